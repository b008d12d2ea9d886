/* tiles.cuh - a key unit on tensor cores: half keys, heads of up to 128 numbers. The
 * parts of unit.cuh that depend on how keys lie, for tiles of 16 keys and four queries
 * (fragments: mma.cuh):
 *
 *   logits [16 keys, 8]  +=  K [16 keys, 16] Q [16, 8]         D / 16 products
 *   o [16, 8]            +=  V^T [16, 16 keys] p [16 keys, 8]  likewise
 *
 * Queries and weights are sums of two halves, so nothing is lost to half precision: the
 * eight columns are (high, low) of each query. Logits and o of lane 4 g + t are those
 * of query t.
 *
 * A warp has a place of its own in shared memory for the keys, and one for the values,
 * of a batch, 4 KB each, and copies there in the background: keys of the next batch as
 * soon as these have been used, values likewise. 20 warps a multiprocessor: 160 KB in
 * flight. Tokens of a quantized list go the same way, as levels (levels.cuh). */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH

#include "backend/cuda/hybrid/step/levels.cuh"
#include "backend/cuda/hybrid/step/step.cuh"
#include "backend/cuda/ptx/mma.cuh"

template <int ROW> using tile_shared = step_shared<__half, MAX_HEADS, ROW>;

/* x as the sum of two halves. */
STI_DEVICE void split_half(float x, __half *high, __half *low)
{
    narrow(x, high);
    narrow(x - widen(*high), low);
}

/* ---- Queries ------------------------------------------------------------- */

/* Queries as operands: of lane 4 g + t half g % 2 of query g / 2, for the two products
 * of 32 numbers, in the order of rows of halves and, if there may be some, of levels. A
 * thread makes a vector at a time. */
template <int ROW, bool STORED> struct tile_queries {
    static __device__ __forceinline__ void make(tile_shared<ROW> &sh)
    {
        const int bits = STORED ? sh.keys_stored.bits : 0;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < (bits > 0 ? 2 * ROW : ROW); i += THREADS)
            make_vector(sh, i % ROW, i < ROW ? 0 : bits);
    }
    /* bits: of levels; 0: halves. */
    static __device__ __forceinline__ void make_vector(tile_shared<ROW> &sh, int at,
                                                       int bits)
    {
        const float *x = &sh.keys.q[at % 32 / 8][at / 32 * 32];
        const bool want_low = at / 4 % 2 != 0;
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int e = bits > 0 ? key_number(bits, k, at % 4) : at % 4 * 2 + 8 * k;
            __half high[2], low[2];
            split_half(x[e], &high[0], &low[0]);
            split_half(x[e + 1], &high[1], &low[1]);
            const __half2 both = want_low ? __halves2half2(low[0], low[1])
                                          : __halves2half2(high[0], high[1]);
            memcpy(&word[k], &both, sizeof both);
        }
        sh.keys.operand[bits > 0][at] = make_uint4(word[0], word[1], word[2], word[3]);
    }
};

/* ---- Products ------------------------------------------------------------ */

/* Weights of rows g and g + 8 as an operand. */
STI_DEVICE void trans_weights(const float *p, uint32_t *weight)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        __half high, low;
        split_half(p[i], &high, &low);
        const __half2 both = __halves2half2(high, low);
        memcpy(&weight[i], &both, sizeof both);
        weight[i] = movmatrix_trans(weight[i]);
    }
}

/* Largest of, or sum over, the lanes that have the same query. */
STI_DEVICE float rows_max(float x)
{
    for (int i = 4; i < 32; i <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
STI_DEVICE float rows_sum(float x)
{
    for (int i = 4; i < 32; i <<= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

/* ---- A warp's keys ------------------------------------------------------- */

/* Softmax of query t over the keys the warp has seen, l those of this lane, as is
 * `recent`; of o the numbers 32 c + 8 i + g, and from quantized values others
 * (value_levels). */
template <int CHUNKS, bool STORED> struct tile_running {
    float m, l, o[CHUNKS][4], stored[STORED ? CHUNKS / 2 : 1][8];
    logit_sum recent;

    __device__ __forceinline__ void clear()
    {
        m = -INFINITY;
        l = 0;
        recent.clear();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[c][i] = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS / 2; j++)
#pragma unroll
            for (int i = 0; STORED && i < 8; i++) stored[j][i] = 0;
    }
};

/* 16 TILES places; of the lane row u, 0 <= u < 2 TILES, is place base + 8 u + g. */
template <int TILES, int ROW, bool STORED> struct tile_batch {
    typedef tile_shared<ROW> shared;
    enum { BATCH = 16 * TILES, CHUNKS = ROW / 32 };
    enum { UNITS = ROW / 8, AT_ONCE = 32 / UNITS }; /* of 16 bytes; rows of a copy */
    float logit[2 * TILES];
    bool seen[2 * TILES];
    typedef key_levels<TILES, ROW> stored_k;
    typedef value_levels<TILES, ROW> stored_v;
    static_assert(BATCH * UNITS == 256, "a batch fills its place");
    static_assert(stored_k::END <= 256 * sizeof(uint4), "as levels it fits");

    static __device__ __forceinline__ int place(int base, int u)
    {
        return base + u * 8 + (int)threadIdx.x % 32 / 4;
    }
    /* Whether the batch from place `base` on is of a list that is quantized, if `bits`
     * (of its keys or its values) is not zero. */
    static __device__ __forceinline__ bool quantized(const shared &sh, int bits,
                                                     int base)
    {
        return STORED && bits > 0 && base >= sh.keys_at.list;
    }
    /* Rows from place `base` on, if `there`; what lies behind D is zero. A group of
     * copies either way: they are counted. */
    static __device__ __forceinline__ void
    copy(uint4 *to, const token_rows<__half> &from, int base, bool there)
    {
        const int lane = (int)threadIdx.x % 32, unit = lane % UNITS;
        const bool in_row = unit * 8 < from.D, in_window = base + BATCH <= from.ring;
        const int first = lane / UNITS, skip = in_row ? unit * 8 : 0;
        __syncwarp(); /* nobody uses what was there */
        if (there &&
            (in_window || (base >= from.list && base + BATCH <= from.places))) {
            const __half *row = from.at(base + first) + skip; /* all lie in a row */
#pragma unroll
            for (int r = 0; r < BATCH; r += AT_ONCE) {
                cp_async16_or_zero(
                    shared_address(to + unit_at<ROW>(first + r, unit) / 16), row,
                    in_row);
                row += AT_ONCE * from.D;
            }
        } else if (there) {
#pragma unroll 1
            for (int r = first; r < BATCH; r += AT_ONCE)
                cp_async16_or_zero(shared_address(to + unit_at<ROW>(r, unit) / 16),
                                   from.at(base + r) + skip, in_row);
        }
        cp_async_commit();
    }
    static __device__ __forceinline__ uint4 *keys(shared &sh)
    {
        return sh.keys.warp[threadIdx.x / 32].staged[0];
    }
    static __device__ __forceinline__ uint4 *values(shared &sh)
    {
        return sh.keys.warp[threadIdx.x / 32].staged[1];
    }
    /* Of a quantized list as levels. */
    static __device__ __forceinline__ void copy_levels(const shared &sh, uint4 *to,
                                                       const level_runs &runs, int base,
                                                       bool there)
    {
        __syncwarp(); /* nobody uses what was there */
        if (there) stored_k::copy(to, runs, base - sh.keys_at.list, sh.list.capacity);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_keys(const step_args &a, shared &sh, int base,
                                              bool there)
    {
        if (quantized(sh, a.h.key_bits, base))
            copy_levels(sh, keys(sh), sh.key_runs, base, there);
        else
            copy(keys(sh), sh.keys_at, base, there);
    }
    __device__ __forceinline__ void load_values(const step_args &a, shared &sh,
                                                int base, bool there)
    {
        if (quantized(sh, a.h.value_bits, base))
            copy_levels(sh, values(sh), sh.value_runs, base, there);
        else
            copy(values(sh), sh.values_at, base, there);
    }
    /* All but the last group of copies have arrived. */
    static __device__ __forceinline__ void await()
    {
        cp_async_wait<1>();
        __syncwarp();
    }
    /* And the new token's row takes the place of what the ring has there. */
    static __device__ __forceinline__ void await(uint4 *staged, const __half *row,
                                                 const sight &see, int base)
    {
        const int fresh = see.fresh() - base, lane = (int)threadIdx.x % 32;
        await();
        if (fresh < 0 || fresh >= BATCH) return; /* of all lanes */
        if (lane < UNITS)
            staged[unit_at<ROW>(fresh, lane) / 16] =
                reinterpret_cast<const uint4 *>(row)[lane];
        __syncwarp();
    }
    __device__ __forceinline__ void find_seen(const step_args &a, const shared &sh,
                                              const sight &see, int base, bool far)
    {
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = place(base, u);
            seen[u] = base >= see.list ? i < see.end() : see.sees(i);
            if (a.h.position_cap > 0 && seen[u]) seen[u] = far == is_far(sh, i);
        }
    }
    __device__ __forceinline__ void dot(const step_args &a, shared &sh,
                                        const sight &see, int base)
    {
        const int lane = (int)threadIdx.x % 32;
        if constexpr (STORED)
            if (quantized(sh, a.h.key_bits, base)) {
                const stored_k k(keys(sh), sh.key_runs, a.h.D / 32);
                await();
                if (a.h.key_bits == 8)
                    k.template dot<8>(sh.keys.operand[1], logit);
                else
                    k.template dot<5>(sh.keys.operand[1], logit);
                return;
            }
        float sum[TILES][4] = {};
        await(keys(sh), sh.keys.k[0], see, base);
        const lane_address<ROW> k =
            lane_address<ROW>::by16(shared_address(keys(sh)), lane);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint4 q = sh.keys.operand[0][c * 32 + lane];
#pragma unroll
            for (int u = 0; u < TILES; u++) {
                uint32_t part[4];
                ldmatrix_x4(part, k.at(16 * u, 2 * c));
                mma(sum[u], part, q.x, q.y);
                ldmatrix_x4(part, k.at(16 * u, 2 * c + 1));
                mma(sum[u], part, q.z, q.w);
            }
        }
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
            logit[u] = sum[u / 2][u % 2 * 2] + sum[u / 2][u % 2 * 2 + 1];
    }
    /* Scales logits, and keeps those that the score wants. */
    __device__ __forceinline__ void keep_logits(const step_args &a, const shared &sh,
                                                const sight &see, int base, int first,
                                                tile_running<CHUNKS, STORED> &r)
    {
        const float scale = a.h.scale * log2_e;
        const int query = first + (int)threadIdx.x % 4;
        const bool all = sti_score_from(a.h.score, STI_FROM_QUERIES);
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
            logit[u] = seen[u] ? logit[u] * scale : -INFINITY;
        if ((!all && !looks_at_itself(a.h)) || base >= see.ring) return;
        float recent[2 * TILES];
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = place(base, u);
            recent[u] = seen[u] && see.recent(i, a.h.C - 1) ? logit[u] : -INFINITY;
            if (query < a.h.group && seen[u] &&
                (i == see.fresh() || (all && i < see.ring)))
                sh.logits[query * (2 * a.h.C + 2) + see.age(i)] = logit[u];
        }
        r.recent.add(recent);
    }
    template <int M, int N>
    static __device__ __forceinline__ void keep_sums(float (&o)[M][N], float keep)
    {
#pragma unroll
        for (int i = 0; i < M * N; i++) o[i / N][i % N] *= keep;
    }
    __device__ __forceinline__ void soften(const step_args &a, shared &sh,
                                           const sight &see, int base,
                                           tile_running<CHUNKS, STORED> &r)
    {
        float top = r.m;
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) top = fmaxf(top, logit[u]);
        top = rows_max(top);
        const float keep_from = top > -INFINITY ? top : 0;
        const float keep = exp2_fast(r.m - keep_from);
        uint32_t weight[TILES][2];
        r.m = top;
        r.l *= keep;
#pragma unroll
        for (int u = 0; u < TILES; u++) {
            const float p[2] = {exp2_fast(logit[2 * u] - keep_from),
                                exp2_fast(logit[2 * u + 1] - keep_from)};
            r.l += p[0] + p[1];
            trans_weights(p, weight[u]);
        }
        if constexpr (STORED)
            if (quantized(sh, a.h.value_bits, base)) {
                const stored_v v(values(sh), sh.value_runs, a.h.D / 32);
                await();
                if (a.h.value_bits == 4)
                    v.template add<4>(weight, keep, r.stored);
                else
                    v.template add<3>(weight, keep, r.stored);
                keep_sums(r.o, keep);
                return;
            }
        if constexpr (STORED) keep_sums(r.stored, keep);
        await(values(sh), sh.keys.v[0], see, base);
        const lane_address<ROW> v =
            lane_address<ROW>::by8(shared_address(values(sh)), (int)threadIdx.x % 32);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float sum[4] = {0, 0, 0, 0};
#pragma unroll
                for (int u = 0; u < TILES; u++) {
                    uint32_t part[4];
                    ldmatrix_x4_trans(part, v.at(16 * u, 2 * c + j));
                    mma(sum, part, weight[u][0], weight[u][1]);
                }
                r.o[c][2 * j] = fmaf(r.o[c][2 * j], keep, sum[0] + sum[1]);
                r.o[c][2 * j + 1] = fmaf(r.o[c][2 * j + 1], keep, sum[2] + sum[3]);
            }
    }
};

/* Rows of up to ROW numbers; a warp takes TILES tiles at once. */
typedef struct tile_keys {
} tile_keys;
template <int ROW_, bool STORED_> struct tile_layout {
    typedef tile_keys kind;
    enum { STORED = STORED_ }; /* lists may be quantized */
    enum { ROW = ROW_, CHUNKS = ROW / 32, TILES = ROW <= 64 ? 2 : 1 };
    enum { BATCH = 16 * TILES, OUTPUT = 4 }; /* places; numbers a thread joins */
    typedef tile_queries<ROW_, STORED_> queries;
    typedef tile_batch<TILES, ROW_, STORED_> batch;
    typedef tile_running<CHUNKS, STORED_> running;
};

/* What a warp has, to shared memory. */
template <typename Layout>
STI_DEVICE void store_to_join(tile_keys, tile_shared<Layout::ROW> &sh,
                              typename Layout::running &r)
{
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int t = (int)threadIdx.x % 4;
    const float l = rows_sum(r.l);
    cp_async_wait<0>();
    __syncwarp(); /* what the warp has takes the place of keys */
#pragma unroll 1
    for (int apart = 4; apart < 32; apart <<= 1) r.recent.join_lane(apart);
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sh.keys.warp[warp].o[t][c * 32 + i * 8 + g] = r.o[c][i];
    if constexpr (Layout::STORED) {
        typedef value_levels<Layout::TILES, Layout::ROW> levels;
        __syncwarp();
        if (sh.values_stored.bits > 0)
#pragma unroll
            for (int j = 0; j < levels::WORDS; j++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sh.keys.warp[warp]
                        .o[t][levels::number(sh.values_stored.bits, j, i)] +=
                        r.stored[j][i];
    }
    if (g > 0) return;
    sh.keys.all[warp][t] = logit_sum{r.m, l};
    sh.keys.recent[warp][t] = r.recent;
}

#endif
