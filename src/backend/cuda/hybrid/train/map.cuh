/* map.cuh - the feature map (hybrid/map.cuh, STILL eq. 6) on 16 rows of a warp, for its
 * two directions; raw is u before its norm is that of x.
 *
 * Rows go from global memory to the tensor cores and back through registers alone; only
 * W is in shared memory, once for all the tokens of a block. For that, a lane's numbers
 * of a row must lie side by side in memory. Which column stands at which place of a
 * product is free as long as both factors agree, so W is stored with its rows and its
 * columns in another order (place_in, place_out). Lane 4 g + t has rows g and g + 8 and
 * in them
 *   x    columns 16 k + 4 t and the next three: its part of step k of A
 *   raw  columns 32 q + 8 t and the next seven: its part of tiles 4 q .. 4 q + 3 of C
 *
 * x W is a product of split halves: a feature that is cut off by relu or the floor must
 * be cut off where the reference cuts it off. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_MAP_CUH
#define STI_BACKEND_CUDA_HYBRID_TRAIN_MAP_CUH

#include "backend/cuda/hybrid/map.cuh"
#include "backend/cuda/hybrid/train/tile.cuh"

/* One side's share of the call. */
typedef struct map_side {
    const float *x, *W, *bias; /* W, bias: of all heads */
    const float *stored;       /* x of tokens that were salient; NULL: x */
    int heads, x_heads;        /* of the map, of x */
    int x_per;                 /* heads of the map that read one head of x */
    uint16_t *half;            /* [B,x_heads,T,DP]: x in half; NULL: not wanted */
    uint16_t *phi;             /* [B,heads,T,PP], as stored */
    const float *dphi;         /* [B,heads,T,PP] */
    bool folded;               /* dphi is 0, and not stored, of tokens not folded */
    float *dx;                 /* NULL: not wanted */
    bool dx_by_token;          /* dx is [B,T,heads,D], else [B,heads,T,DP] */
    bool dx_add;
    float *part_map, *part_bias; /* [B map_parts, heads, DP, DP], [B map_parts, heads];
                                    NULL: not wanted */
} map_side;

/* Both sides go in one launch: heads of q, then heads of k. */
typedef struct map_sides {
    map_side q, k;
} map_sides;

static inline map_sides map_sides_of(const sti_hybrid_train *p)
{
    return map_sides{{p->q, p->h.map_q, p->h.bias_q, NULL, p->h.H, p->h.H, 1, p->half_q,
                      p->phi_q, p->dphi_q, false, p->grad.q, true, p->h.has_window,
                      p->part_map_q, p->part_bias_q},
                     {p->k, p->h.map_k, p->h.bias_k, p->stored_k, p->h.S, p->h.G,
                      p->h.S / p->h.G, p->stored_k ? NULL : p->half_k, p->phi_k,
                      p->dphi_k, p->h.has_window, p->dk_fold, false, false,
                      p->part_map_k, p->part_bias_k}};
}

static inline dim3 map_grid(const sti_hybrid_train *p, const map_sides *s)
{
    return dim3(p->map_parts, s->q.heads + s->k.heads, p->B);
}

/* f(W, FULL) with DP, and whether all its columns are features, as constants. */
template <class F> static still_status by_map(const sti_hybrid_train *p, const F &f)
{
    return by_width(p, [&](auto W) {
        return p->h.F == W ? f(W, std::true_type()) : f(W, std::false_type());
    });
}

/* ---- Columns ------------------------------------------------------------- */

/* Row d of W stands at this place of a step of 16, whose halves t has: 2t, 2t + 1 and
 * 2t + 8, 2t + 9. */
STI_DEVICE int place_in(int d)
{
    return (d & ~15) | (d & 2) << 2 | (d & 12) >> 1 | (d & 1);
}
/* Column e of W stands at this place of four tiles, of which t has 2t, 2t + 1 each. */
STI_DEVICE int place_out(int e)
{
    return (e & ~31) | (e & 6) << 2 | (e & 24) >> 2 | (e & 1);
}
/* Column of element i of tile n of C. */
STI_DEVICE int column_of(const lane_place &at, int n, int i)
{
    return 32 * (n / 4) + 8 * at.t + 2 * (n % 4) + (i & 1);
}
template <int DP, bool FULL>
STI_DEVICE bool is_feature(const sti_hybrid_train &p, const lane_place &at, int n,
                           int i)
{
    return FULL || column_of(at, n, i) < p.h.F;
}

/* High parts of x and y; *low: what is left of them. */
STI_DEVICE uint32_t split_half2(float x, float y, uint32_t *low)
{
    const uint32_t high = pack_half2(half_range(x), half_range(y));
    const float2 h = unpack_half2(high);
    *low = pack_half2(x - h.x, y - h.y);
    return high;
}

/* ---- Loading ------------------------------------------------------------- */

/* A head's W, identity if there is none, split and in order of places, at the start of
 * shared memory: high parts, then low ones. By all threads of the block. */
template <int DP>
STI_DEVICE void load_map(const sti_hybrid_train &p, const map_side &side, int head)
{
    unsigned char *high = (unsigned char *)block_memory();
    unsigned char *low = high + DP * DP * 2;
    const float *from = side.W + (size_t)head * p.h.D * p.h.F;
    const bool vec = p.h.F % 4 == 0 && ((uintptr_t)from & 15) == 0;
    constexpr int BATCH = 8; /* read before the first is written */
    for (int i0 = (int)threadIdx.x; i0 < DP * DP / 4; i0 += BATCH * THREADS) {
        float4 w[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int i = i0 + j * THREADS, d = i / (DP / 4), e = i % (DP / 4) * 4;
            if (side.W)
                w[j] =
                    load4(d < p.h.D ? from + (size_t)d * p.h.F : NULL, e, p.h.F, vec);
            else
                w[j] = d < p.h.F
                           ? make_float4(d == e, d == e + 1, d == e + 2, d == e + 3)
                           : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int i = i0 + j * THREADS, d = i / (DP / 4), e = i % (DP / 4) * 4;
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const int place = place_out(e + 2 * pair);
                const uint32_t to =
                    unit_at<DP>(place_in(d), place / 8) + (uint32_t)(place % 8) * 2;
                *(uint32_t *)(high + to) =
                    split_half2(pair ? w[j].z : w[j].x, pair ? w[j].w : w[j].y,
                                (uint32_t *)(low + to));
            }
        }
    }
}

/* Row of x of token t; NULL past the last one. */
STI_DEVICE const float *x_row(const sti_hybrid_train &p, const map_side &side, int b,
                              int head, int t)
{
    if (t >= p.T) return NULL;
    const bool stored = side.stored && was_salient(p, fold_of(p, b, head, t), t);
    return (stored ? side.stored : side.x) +
           token_at(p, side.x_heads, b, head / side.x_per, t) * p.h.D;
}

/* 16 rows of x: steps of A, rows g and g + 8. */
template <int DP> struct map_rows {
    float4 x[DP / 16][2];

    /* From row t0 + g of x; zeros past the last one. */
    __device__ __forceinline__ void load(const sti_hybrid_train &p,
                                         const map_side &side, int b, int head, int t0,
                                         const lane_place &at)
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = t0 + at.g + 8 * r;
            const float *row = x_row(p, side, b, head, t);
#pragma unroll
            for (int k = 0; k < DP / 16; k++)
                x[k][r] = load4(row, 16 * k + 4 * at.t, p.h.D, p.vec);
        }
    }
};

/* Columns e .. e + 3 of a row of `cols`. */
STI_DEVICE void store4(float *row, int e, int cols, bool vec, float4 x)
{
    if (vec) {
        if (e < cols) *(float4 *)(row + e) = x;
        return;
    }
    if (e < cols) row[e] = x.x;
    if (e + 1 < cols) row[e + 1] = x.y;
    if (e + 2 < cols) row[e + 2] = x.z;
    if (e + 3 < cols) row[e + 3] = x.w;
}

/* ---- The map ------------------------------------------------------------- */

/* Rows g and g + 8 of a warp, in the places of C. */
template <int DP> struct row_map {
    float raw[DP / 8][4];
    float norm_x[2], norm_raw[2], keep[2], bias;
    bool norm_kept[2];

    __device__ __forceinline__ float u(int n, int i) const
    {
        return raw[n][i] * keep[i / 2] + bias;
    }
};

/* raw and norms. keep(k, high): what becomes of step k of x in half, as it is in A. */
template <int DP, typename Keep>
STI_DEVICE void apply_map(const sti_hybrid_train &p, const map_side &side, int head,
                          const map_rows<DP> &rows, const lane_place &at, Keep keep,
                          row_map<DP> *m)
{
    constexpr int N = DP / 8;
    const uint32_t W = shared_address(block_memory());
    const lane_address<DP> W_high = lane_address<DP>::by16(W, at.lane);
    const lane_address<DP> W_low = lane_address<DP>::by16(W + DP * DP * 2, at.lane);
    float square[2] = {0, 0}, raw_square[2] = {0, 0};
    clear_tiles(m->raw);
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float4 x = rows.x[k][r];
            square[r] += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
            high[r] = split_half2(x.x, x.y, &low[r]);
            high[r + 2] = split_half2(x.z, x.w, &low[r + 2]);
        }
        keep(k, high);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, W_low.at(16 * k, n / 2));
            mma(m->raw[n], high, b[0], b[1]);
            mma(m->raw[n + 1], high, b[2], b[3]);
            ldmatrix_x4_trans(b, W_high.at(16 * k, n / 2));
            mma(m->raw[n], low, b[0], b[1]);
            mma(m->raw[n + 1], low, b[2], b[3]);
            mma(m->raw[n], high, b[0], b[1]);
            mma(m->raw[n + 1], high, b[2], b[3]);
        }
    }
    m->bias = side.bias ? side.bias[head] : 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) raw_square[i / 2] += m->raw[n][i] * m->raw[n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m->norm_x[r] = sqrtf(quad_sum(square[r]));
        const float norm = sqrtf(quad_sum(raw_square[r]));
        m->norm_kept[r] = norm > smallest_norm;
        m->norm_raw[r] = fmaxf(norm, smallest_norm);
        m->keep[r] = p.h.norm_preserved ? m->norm_x[r] / m->norm_raw[r] : 1;
    }
}

/* softmax(SIGN u) of a row r is e part[r]; softmax maps have no bias. */
template <int SIGN, int DP, bool FULL>
STI_DEVICE void exponentials(const sti_hybrid_train &p, const row_map<DP> &m,
                             const lane_place &at, float (&e)[DP / 8][4],
                             float (&part)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float scale = SIGN * m.keep[r] * log2_e;
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                if (is_feature<DP, FULL>(p, at, n, i))
                    top = fmaxf(top, m.raw[n][i] * scale);
        top = quad_max(top);
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                e[n][i] = is_feature<DP, FULL>(p, at, n, i)
                              ? exp2_fast(m.raw[n][i] * scale - top)
                              : 0;
                sum += e[n][i];
            }
        part[r] = 1 / quad_sum(sum);
    }
}

#endif
