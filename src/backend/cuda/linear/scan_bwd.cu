/* scan_bwd.cu - the gradient of the state of Liger and SUPRA, from the last token of
 * a span to its first, and what keys, values and decays get of it. See linear.h.
 *
 * Built as scan_fwd.cu is, with R in place of S. */
#include "backend/cuda/linear/tile.cuh"

template <int DP> static constexpr size_t back_shared(void)
{
    return ((size_t)(DP + 6 * TILE) * (DP + 4) + 2 * TILE * WEIGHT_LD) * sizeof(float);
}

/* A block's tiles in shared memory. */
typedef struct tiles {
    float *R;                       /* [DP][LD] */
    float *k, *v, *A, *q, *d_o, *x; /* [TILE][LD] */
    float *wq, *wd;                 /* [TILE][WEIGHT_LD]: pairs of fq, fk; of do, v */
} tiles;
template <int DP> STI_DEVICE tiles tiles_of(float *at)
{
    constexpr int LD = DP + 4;
    tiles m;
    m.R = at;
    m.k = m.R + DP * LD;
    m.v = m.k + TILE * LD;
    m.A = m.v + TILE * LD;
    m.q = m.A + TILE * LD;
    m.d_o = m.q + TILE * LD;
    m.x = m.d_o + TILE * LD;
    m.wq = m.x + TILE * LD;
    m.wd = m.wq + TILE * WEIGHT_LD;
    return m;
}

/* What the tokens after the tile give: dfk_j = exp(A_end - A_j) (R v_j), dv_j = R^T
 * (exp(A_end - A_j) fk_j). */
template <int DP>
STI_DEVICE void from_later(const tiles &m, float (&dk)[DP / 32][4],
                           float (&dv)[DP / 32][4], const lane_place &at)
{
    constexpr int LD = DP + 4;
    const int column = at.warp * (DP / 4);
    decayed<DP, true>(m.x, m.k, m.A);
    __syncthreads();
    clear_tiles(dk);
    clear_tiles(dv);
    product_at<DP / 32, DP / 8>(dk, m.v, LD, m.R + column * LD, LD, at.lane);
    product_an<DP / 32, DP / 8>(dv, m.x, LD, m.R + column, LD, at.lane);
#pragma unroll
    for (int n = 0; n < DP / 32; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = at.g + i / 2 * 8, e = column + 8 * n + 2 * at.t + i % 2;
            dk[n][i] *= expf(m.A[(TILE - 1) * LD + e] - m.A[j * LD + e]);
        }
}

/* What the tile's own queries of one head give: dv_j += sum over t >= j of w_tj do_t,
 * dfk_j += sum over t >= j of (do_t . v_j) exp(A_t - A_j) fq_t. */
template <int DP>
STI_DEVICE void from_tile(const tiles &m, float (&dk)[DP / 32][4],
                          float (&dv)[DP / 32][4], const lane_place &at)
{
    constexpr int LD = DP + 4;
    const int column = at.warp * (DP / 4);
    product_tn<DP / 32, TILE / 8>(dv, m.wq, WEIGHT_LD, m.d_o + column, LD, at.lane);
#pragma unroll
    for (int n = 0; n < DP / 32; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = at.g + i / 2 * 8, e = column + 8 * n + 2 * at.t + i % 2;
            const float a = m.A[j * LD + e];
            float sum = 0;
            for (int t = j; t < TILE; t++)
                sum += m.wd[t * WEIGHT_LD + j] * __expf(m.A[t * LD + e] - a) *
                       m.q[t * LD + e];
            dk[n][i] += sum;
        }
}

/* KEYS: dfk and dv, from dstates; else what the span's queries add to the gradient of
 * the state before it, to dstates. */
template <int DP, bool KEYS>
static __global__ void __launch_bounds__(SPAN_THREADS, DP <= 64 ? 4 : 2)
    scan_bwd_kernel(const sti_cuda_linear p)
{
    constexpr int LD = DP + 4;
    const lane_place at = lane_place_of();
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const span_place r = span_place_of(p, s);
    if (r.n <= 0 || (!KEYS && r.c == 0)) return;
    const tiles m = tiles_of<DP>(block_memory());
    load_rows<DP, DP, false>(m.R, p.dstates + r.at * DP * DP, DP, KEYS ? DP : 0);
    float sum = 0; /* of a over the span, channel threadIdx.x */
    for (int t0 = (r.n - 1) / TILE * TILE; t0 >= 0; t0 -= TILE) {
        const int have = min((int)TILE, r.n - t0);
        const size_t row = (size_t)s.row0 + r.first + t0;
        float dk[DP / 32][4], dv[DP / 32][4];
        __syncthreads();
        load_rows<TILE, DP, false>(m.k, p.fk + (row * p.G + r.g) * DP, (size_t)p.G * DP,
                                   have);
        load_rows<TILE, DP, true>(m.v, p.v + (row * p.G + r.g) * DP, (size_t)p.G * DP,
                                  have);
        load_decays<DP>(p, r, m.A, row, have);
        if (threadIdx.x < DP) sum += m.A[(TILE - 1) * LD + threadIdx.x];
        if (KEYS) from_later<DP>(m, dk, dv, at);
        for (int h = r.h0; h < r.h0 + p.per_state; h++) {
            const size_t from = (row * p.H + h) * DP;
            __syncthreads(); /* R has been read; the tiles of a head are free */
            load_rows<TILE, DP, false>(m.q, p.fq + from, (size_t)p.H * DP, have);
            load_rows<TILE, DP, true>(m.d_o, p.d_o + from, (size_t)p.H * DP, have);
            __syncthreads();
            decayed<DP, false>(m.x, m.q, m.A);
            if (KEYS) {
                pair_products<DP, true>(m.wq, m.q, m.k, m.A);
                pair_products<DP, false>(m.wd, m.d_o, m.v, m.A);
            }
            __syncthreads();
            if (KEYS) from_tile<DP>(m, dk, dv, at);
            advance<DP>(m.R, m.x, m.d_o, m.A, h == r.h0, at);
        }
        if (!KEYS) continue;
        const size_t to = (row * p.S + r.state) * DP;
        store_shared<DP>(dk, p.dfk + to, (size_t)p.S * DP, have, at);
        store_shared<DP>(dv, p.dv + to, (size_t)p.S * DP, have, at);
    }
    if (KEYS) return;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < DP * DP; i += SPAN_THREADS)
        p.dstates[r.at * DP * DP + i] = m.R[i / DP * LD + i % DP];
    if (threadIdx.x < DP) p.sums[r.at * DP + threadIdx.x] = sum;
}

/* ---- The scan ------------------------------------------------------------ */

enum { SCAN_THREADS = 256, SCAN_AHEAD = 8 };

/* What spans add becomes the gradient of the state after each, in place: 0 after the
 * last. As the scan of scan_fwd.cu, from the end. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    scan_back_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int at = (int)(blockIdx.x * SCAN_THREADS + threadIdx.x);
    const int state = (int)blockIdx.y, i = at / p.DP;
    if (at >= p.DP * p.DP) return;
    float now = 0;
    for (int c0 = s.spans - 1; c0 >= 0; c0 -= SCAN_AHEAD) {
        float add[SCAN_AHEAD], by[SCAN_AHEAD];
#pragma unroll
        for (int u = 0; u < SCAN_AHEAD; u++) {
            const bool is = c0 - u > 0; /* nothing lies before the first */
            const size_t span = ((size_t)s.span0 + (is ? c0 - u : 0)) * p.S + state;
            add[u] = is ? p.dstates[span * p.DP * p.DP + at] : 0;
            by[u] = is ? p.sums[span * p.DP + i] : 0;
        }
#pragma unroll
        for (int u = 0; u < SCAN_AHEAD; u++) {
            if (c0 - u < 0) break;
            const size_t span = ((size_t)s.span0 + c0 - u) * p.S + state;
            p.dstates[span * p.DP * p.DP + at] = now;
            now = expf(by[u]) * now + add[u];
        }
    }
}

/* ---- Decays -------------------------------------------------------------- */

enum { DECAY_WARPS = 4 };

/* da of a span and kv head: the row sums of R S after the span, by warps, then tokens
 * from the last, a channel a thread. */
static __global__ void __launch_bounds__(32 * DECAY_WARPS)
    decay_kernel(const sti_cuda_linear p)
{
    __shared__ float after[STI_LINEAR_MAX_D];
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const span_place r = span_place_of(p, s);
    const int DP = p.DP, lane = (int)threadIdx.x % 32, i = (int)threadIdx.x;
    if (r.n <= 0) return;
    const bool last = r.first + r.n >= s.T;
    for (int row = (int)threadIdx.x / 32; row < DP; row += DECAY_WARPS) {
        float sum = 0;
        if (!last) {
            const float *R = p.dstates + (r.at * DP + row) * DP;
            const float *S = p.states + ((r.at + p.S) * DP + row) * DP;
            for (int e = lane; e < DP; e += 32) sum += R[e] * S[e];
        }
        sum = warp_sum(sum);
        if (lane == 0) after[row] = sum;
    }
    __syncthreads();
    if (i >= DP) return;
    float da = after[i];
    for (int t = r.n - 1; t >= 0; t--) {
        const size_t row = (size_t)s.row0 + r.first + t,
                     key = (row * p.G + r.g) * DP + i;
        float queries = 0;
        for (int h = r.h0; h < r.h0 + p.per_state; h++)
            queries += p.fq[(row * p.H + h) * DP + i] * p.dfq[(row * p.H + h) * DP + i];
        da += queries - p.fk[key] * p.dfk[key];
        p.da[key] = da;
    }
}

/* ---- Launchers ----------------------------------------------------------- */

still_status sti_cuda_linear_dstates(sti_dev *dev, const sti_cuda_linear *p,
                                     still_error *err)
{
    if (p->longest > SPAN)
        STI_TRY(by_width(p, [&](auto W) {
            return launch(dev, "linear attention: gradients of states", err,
                          scan_bwd_kernel<W, false>, span_grid(p), SPAN_THREADS,
                          back_shared<W>(), *p);
        }));
    const dim3 grid((unsigned)(p->DP * p->DP + SCAN_THREADS - 1) / SCAN_THREADS,
                    (unsigned)p->S, (unsigned)p->n);
    return launch(dev, "linear attention: gradients of states, joined", err,
                  scan_back_kernel, grid, SCAN_THREADS, 0, *p);
}

still_status sti_cuda_linear_keys(sti_dev *dev, const sti_cuda_linear *p,
                                  still_error *err)
{
    return by_width(p, [&](auto W) {
        return launch(dev, "linear attention: gradient of the keys", err,
                      scan_bwd_kernel<W, true>, span_grid(p), SPAN_THREADS,
                      back_shared<W>(), *p);
    });
}

still_status sti_cuda_linear_decays(sti_dev *dev, const sti_cuda_linear *p,
                                    still_error *err)
{
    return launch(dev, "linear attention: gradient of the decays", err, decay_kernel,
                  span_grid(p), 32 * DECAY_WARPS, 0, *p);
}
