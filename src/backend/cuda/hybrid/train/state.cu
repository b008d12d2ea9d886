/* state.cu - sums over tokens of outer products, and sums over spans (STILL eq. 9).
 *
 *   state   S_c = sum of phi(k_j)^T v_j, z_c = sum of phi(k_j), j folded at c or before
 *   dstate  dS_c = sum of phi(q_t)^T (a g dn)_t, dz_c = sum of (a dden)_t phi(q_t), the
 *           queries t of span c and later
 *
 * Without a window a span folds its own tokens, but its queries see those one by one:
 * there, c itself is left out. Bounded by reading the tokens: a block makes 128 rows of
 * a product and has the next tile of tokens on its way during that of the last. */
#include "backend/cuda/hybrid/train/tile.cuh"

typedef enum outer_kind { OUTER_STATE, OUTER_DSTATE } outer_kind;

enum {
    OUTER_THREADS = 256, /* 8 warps of 16 features */
    OUTER_FEATURES = 128 /* of a block */
};

/* ---- Tiles of tokens ----------------------------------------------------- */

/* Products are in half. Rows of numbers of any size - a g dn, relu features - are in
 * units of their largest; others, features as stored and values, have unit 1. */

/* What a block sums over: n tokens, those folded (state) or those of the span, for
 * each of its query heads (dstate). */
typedef struct outer_sum {
    int b, head, c, m0, n; /* m0: the first feature */
    size_t span;           /* span_at */
} outer_sum;

/* A tile of it: tokens first .. first + 63 of n, query head h. */
typedef struct outer_place {
    int h, first;
} outer_place;

/* A tile of tokens in shared memory. Numbers are logarithms of units. */
template <int DP> struct outer_tile {
    uint16_t phi[ROWS * OUTER_FEATURES], x[ROWS * DP];
    float phi_unit[ROWS], x_unit[ROWS];
    uint16_t weight[2][ROWS]; /* of phi in z, in the unit of x: high parts, low parts */
};

/* A tile of a g dn and a dden on its way: columns 4 (i % (DP / 4)) and the next three
 * of row i / (DP / 4), i = thread + n OUTER_THREADS. */
template <int DP> struct outer_rows {
    static constexpr int LANES = DP / 4, EACH = ROWS * LANES / OUTER_THREADS;
    float4 x[EACH];
    float weight[EACH];
};

/* Token of row r of a tile; past the end that of the last one. */
template <int KIND>
STI_DEVICE int outer_token(const sti_hybrid_train &p, const outer_sum &o,
                           const outer_place &i, int r)
{
    const int j = min(i.first + r, o.n - 1);
    return KIND == OUTER_STATE ? p.folds[o.span * p.span + j] : o.c * p.span + j;
}
template <int KIND>
STI_DEVICE const uint16_t *outer_features(const sti_hybrid_train &p, const outer_sum &o,
                                          const outer_place &i, int r)
{
    const int t = outer_token<KIND>(p, o, i, r);
    return KIND == OUTER_STATE
               ? features_at(p, p.phi_k, row_at(p, p.h.S, o.b, o.head, t), o.m0)
               : features_at(p, p.phi_q, row_at(p, p.h.H, o.b, i.h, t), o.m0);
}

/* Largest of the lanes that share a row, log2 of its unit. */
template <int LANES> STI_DEVICE float unit_of_row(float4 x, float also)
{
    float most = fmaxf(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), also),
                       fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    return unit_log2(most);
}
/* Columns e .. e + 3 of row r of a tile of rows of W halves. */
template <int W>
STI_DEVICE void put4(uint16_t *tile, int r, int e, float4 x, float part)
{
    *(uint2 *)((unsigned char *)tile + unit_at<W>(r, e / 8) + e % 8 * 2) = make_uint2(
        pack_half2(x.x * part, x.y * part), pack_half2(x.z * part, x.w * part));
}

/* relu features, floats. */
template <int KIND, int DP>
STI_DEVICE void put_relu(const sti_hybrid_train &p, const outer_sum &o,
                         const outer_place &i, outer_tile<DP> *to)
{
    const int e = (int)threadIdx.x % 32 * 4;
    for (int r = (int)threadIdx.x / 32; r < ROWS; r += OUTER_THREADS / 32) {
        const float *row = (const float *)outer_features<KIND>(p, o, i, r);
        const float4 x = load4(row, e, p.PP - o.m0, true);
        const float unit = unit_of_row<32>(x, 0);
        put4<OUTER_FEATURES>(to->phi, r, e, x, unit_part(unit));
        if (e == 0) to->phi_unit[r] = unit;
    }
}

/* A tile begins its way: features, and values or rows. */
template <int KIND, int DP>
STI_DEVICE void fetch_tile(const sti_hybrid_train &p, const outer_sum &o,
                           const outer_place &i, outer_tile<DP> *to,
                           outer_rows<DP> *rows)
{
    constexpr int UNITS = OUTER_FEATURES / 8;
    if (!p.relu) {
#pragma unroll
        for (int n = 0; n < ROWS * UNITS / OUTER_THREADS; n++) {
            const int at = (int)threadIdx.x + n * OUTER_THREADS;
            const int r = at / UNITS, u = at % UNITS;
            cp_async16(shared_address(to->phi) + unit_at<OUTER_FEATURES>(r, u),
                       outer_features<KIND>(p, o, i, r) + u * 8);
        }
    }
    if constexpr (KIND == OUTER_STATE) {
        const int g = o.head * p.h.group / p.h.per_kv;
#pragma unroll
        for (int n = 0; n < ROWS * DP / 8 / OUTER_THREADS; n++) {
            const int at = (int)threadIdx.x + n * OUTER_THREADS;
            const int r = at / (DP / 8), u = at % (DP / 8);
            const int t = outer_token<KIND>(p, o, i, r);
            const size_t stored = was_salient(p, o.c, t) ? p.half_stored : 0;
            cp_async16(shared_address(to->x) + unit_at<DP>(r, u),
                       p.half_v + row_at(p, p.h.G, o.b, g, t) * DP + u * 8 + stored);
        }
    } else {
#pragma unroll
        for (int n = 0; n < outer_rows<DP>::EACH; n++) {
            const int at = (int)threadIdx.x + n * OUTER_THREADS;
            const int r = at / outer_rows<DP>::LANES,
                      e = at % outer_rows<DP>::LANES * 4;
            const size_t row =
                row_at(p, p.h.H, o.b, i.h, outer_token<KIND>(p, o, i, r));
            const bool has = i.first + r < o.n;
            rows->x[n] = has ? *(const float4 *)(p.adng + row * DP + e)
                             : make_float4(0, 0, 0, 0);
            rows->weight[n] = has ? p.adden[row] : 0;
        }
    }
    cp_async_commit();
}

/* The rest of it. A token that is not there has no unit, and so no weight. */
template <int KIND, int DP>
STI_DEVICE void finish_tile(const sti_hybrid_train &p, const outer_sum &o,
                            const outer_place &i, outer_tile<DP> *to,
                            const outer_rows<DP> &rows)
{
    const auto put_weight = [&](int r, float x) {
        const float high = unpack_half2(pack_half2(x, 0)).x;
        to->weight[0][r] = (uint16_t)pack_half2(x, 0);
        to->weight[1][r] = (uint16_t)pack_half2(x - high, 0);
    };
    if (p.relu)
        put_relu<KIND, DP>(p, o, i, to);
    else if (threadIdx.x < ROWS)
        to->phi_unit[threadIdx.x] = 0;
    if constexpr (KIND == OUTER_STATE) {
        const int r = (int)threadIdx.x;
        if (r >= ROWS) return;
        to->x_unit[r] = i.first + r < o.n ? 0 : nothing_log2;
        put_weight(r, 1);
    } else {
        constexpr int LANES = outer_rows<DP>::LANES;
#pragma unroll
        for (int n = 0; n < outer_rows<DP>::EACH; n++) {
            const int at = (int)threadIdx.x + n * OUTER_THREADS;
            const int r = at / LANES, e = at % LANES * 4;
            const float unit = unit_of_row<LANES>(rows.x[n], fabsf(rows.weight[n]));
            put4<DP>(to->x, r, e, rows.x[n], unit_part(unit));
            if (e > 0) continue;
            to->x_unit[r] = unit;
            put_weight(r, rows.weight[n] * unit_part(unit));
        }
    }
}

/* ---- Sums of outer products ---------------------------------------------- */

/* A warp's 16 features: S and z (column 0 of the high parts of the weights, 1 of the
 * low ones), in unit 2^U, the largest so far. */
template <int DP> struct outer_sums {
    float S[DP / 8][4], z[1][4], U;
};

/* += sum over the tile of (phi_t 2^(unit_t - U))^T [x_t, weight_t] */
template <int DP>
STI_DEVICE void add_tile(const outer_tile<DP> &tile, const lane_place &at,
                         outer_sums<DP> *sum)
{
    const lane_address<OUTER_FEATURES> A =
        lane_address<OUTER_FEATURES>::by8(shared_address(tile.phi), at.lane);
    const lane_address<DP> B = lane_address<DP>::by16(shared_address(tile.x), at.lane);
    const auto unit = [&](int t) { return tile.phi_unit[t] + tile.x_unit[t]; };
    float U = fmaxf(unit(at.lane), unit(at.lane + 32));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) U = fmaxf(U, __shfl_xor_sync(0xffffffffu, U, d));
    if (U > sum->U) { /* a power of 2: nothing is lost */
        const float less = exp2_fast(sum->U - U);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int n = 0; n < DP / 8; n++) sum->S[n][i] *= less;
            sum->z[0][i] *= less;
        }
        sum->U = U;
    }
#pragma unroll 2
    for (int k = 0; k < ROWS; k += 16) {
        uint32_t a[4], w[2] = {0, 0};
        ldmatrix_x4_trans(a, A.at(k, at.warp));
#pragma unroll
        for (int h = 0; h < 2; h++) { /* tokens t, t + 1 */
            const int t = k + 8 * h + 2 * at.t;
            const uint32_t scale = pack_half2(exp2_fast(unit(t) - sum->U),
                                              exp2_fast(unit(t + 1) - sum->U));
            a[2 * h] = times_half2(a[2 * h], scale);
            a[2 * h + 1] = times_half2(a[2 * h + 1], scale);
            if (at.g < 2) w[h] = *(const uint32_t *)(tile.weight[at.g] + t);
        }
        mma(sum->z[0], a, w[0], w[1]);
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            uint32_t x[4];
            ldmatrix_x4_trans(x, B.at(k, n / 2));
            mma(sum->S[n], a, x[0], x[1]);
            mma(sum->S[n + 1], a, x[2], x[3]);
        }
    }
}

/* Features m and m + 8 of a lane. */
template <int DP>
STI_DEVICE void write_outer(const sti_hybrid_train &p, const outer_sums<DP> &sum,
                            float *S, float *z, int m, const lane_place &at)
{
    const float whole = exp2_fast(sum.U) / p.phi_unit;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float *to = S + (size_t)(m + 8 * r) * DP + 2 * at.t;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
            *(float2 *)(to + 8 * n) =
                make_float2(sum.S[n][2 * r] * whole, sum.S[n][2 * r + 1] * whole);
        if (at.t == 0) z[m + 8 * r] = (sum.z[0][2 * r] + sum.z[0][2 * r + 1]) * whole;
    }
}

/* Grid: spans x blocks of features, selection heads, sequences. */
template <int DP, int KIND>
static __global__ void __launch_bounds__(OUTER_THREADS, DP <= 64 ? 2 : 1)
    outer_kernel(const sti_hybrid_train p)
{
    const lane_place at = lane_place_of();
    const int blocks = (p.PP - 1) / OUTER_FEATURES + 1;
    outer_sum o;
    o.b = (int)blockIdx.z;
    o.head = (int)blockIdx.y;
    o.c = (int)blockIdx.x / blocks;
    o.m0 = (int)blockIdx.x % blocks * OUTER_FEATURES;
    o.span = span_at(p, o.b, o.head, o.c);
    o.n = KIND == OUTER_STATE ? p.n_folds[o.span] : span_end(p, o.c) - o.c * p.span;
    const int tiles = (o.n + ROWS - 1) / ROWS;
    const int all = tiles * (KIND == OUTER_STATE ? 1 : p.h.group);
    const auto place = [&](int i) {
        return outer_place{o.head * p.h.group + i / tiles, i % tiles * ROWS};
    };
    outer_tile<DP> *tile = (outer_tile<DP> *)block_memory(); /* two of them */
    outer_rows<DP> rows;
    outer_sums<DP> sum;
    clear_tiles(sum.S);
    clear_tiles(sum.z);
    sum.U = 2 * nothing_log2;
    const int m = o.m0 + at.warp * 16;
    if (all > 0) {
        fetch_tile<KIND, DP>(p, o, place(0), &tile[0], &rows);
        finish_tile<KIND, DP>(p, o, place(0), &tile[0], rows);
    }
    for (int i = 0; i < all; i++) {
        outer_tile<DP> *next = &tile[(i + 1) % 2];
        cp_async_wait<0>();
        __syncthreads(); /* tile i is there, i - 1 has been used */
        if (i + 1 < all) fetch_tile<KIND, DP>(p, o, place(i + 1), next, &rows);
        if (m < p.PP) add_tile<DP>(tile[i % 2], at, &sum);
        if (i + 1 < all) finish_tile<KIND, DP>(p, o, place(i + 1), next, rows);
    }
    if (m < p.PP)
        write_outer<DP>(p, sum,
                        (KIND == OUTER_STATE ? p.state : p.dstate) + o.span * p.PP * DP,
                        (KIND == OUTER_STATE ? p.state_z : p.dstate_z) + o.span * p.PP,
                        m + at.g, at);
}

template <int KIND>
static still_status outer(sti_dev *dev, const sti_hybrid_train *p, still_error *err)
{
    const dim3 grid(p->spans * ((p->PP - 1) / OUTER_FEATURES + 1), p->h.S, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, "hybrid training: sums of outer products", err,
                      outer_kernel<W, KIND>, grid, OUTER_THREADS,
                      2 * sizeof(outer_tile<W>), *p);
    });
}

/* ---- Sums over spans ----------------------------------------------------- */

enum { SCAN_THREADS = 256, SCAN_BATCH = 8 };

/* S [heads,spans,n] and z [heads,spans,n_z]: span c becomes the sum of spans 0 .. c
 * (back: c .. spans - 1); without `own`, c itself is left out. Forward, mean [heads,
 * spans,n] is S over the number of tokens folded by then: at most as large as a value
 * times a feature, so half holds it. NULL of a relu map. One thread a number; batches
 * keep several reads in flight. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    scan_kernel(float *S, float *z, uint16_t *mean, const int32_t *n_folded, int spans,
                int n, int n_z, int back, int own)
{
    int i = (int)(blockIdx.x * SCAN_THREADS + threadIdx.x);
    if (i >= n + n_z) return;
    const int step = i < n ? n : n_z;
    const size_t head = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    float *x = (i < n ? S + i : z + i - n) + head * spans * step;
    mean = mean && !back && i < n ? mean + head * spans * n + i : NULL;
    n_folded += head * spans;
    float sum = 0;
    for (int c0 = 0; c0 < spans; c0 += SCAN_BATCH) {
        float y[SCAN_BATCH];
#pragma unroll
        for (i = 0; i < SCAN_BATCH; i++) {
            const int c = back ? spans - 1 - c0 - i : c0 + i;
            y[i] = c0 + i < spans ? x[(size_t)c * step] : 0;
        }
#pragma unroll
        for (i = 0; i < SCAN_BATCH; i++) {
            const int c = back ? spans - 1 - c0 - i : c0 + i;
            if (c0 + i >= spans) continue;
            const float here = own ? sum + y[i] : sum;
            x[(size_t)c * step] = here;
            if (mean)
                mean[(size_t)c * n] = (uint16_t)pack_half2(
                    half_range(here / (float)max(n_folded[c], 1)), 0);
            sum += y[i];
        }
    }
}

static still_status scan(sti_dev *dev, const sti_hybrid_train *p, float *S, float *z,
                         bool back, still_error *err)
{
    const int n = p->PP * p->DP, all = n + p->PP;
    return launch(dev, "hybrid training: sums over spans", err, scan_kernel,
                  dim3((all - 1) / SCAN_THREADS + 1, p->h.S, p->B), SCAN_THREADS, 0, S,
                  z, p->mean, (const int32_t *)p->n_folded, p->spans, n, p->PP,
                  (int)back, (int)p->h.has_window);
}

/* ---- Launchers ----------------------------------------------------------- */

still_status sti_hybrid_train_states(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    STI_TRY(outer<OUTER_STATE>(dev, p, err));
    return scan(dev, p, p->state, p->state_z, false, err);
}

still_status sti_hybrid_train_dstates(sti_dev *dev, const sti_hybrid_train *p,
                                      still_error *err)
{
    STI_TRY(outer<OUTER_DSTATE>(dev, p, err));
    return scan(dev, p, p->dstate, p->dstate_z, true, err);
}
