/* scan_fwd.cu - the state of Liger and SUPRA from the first token of a span to its
 * last: what the span adds, its outputs, the gradient of its queries; and the scan
 * that joins spans. See linear.h.
 *
 * A block takes a span and a state. Bounded by latency, phase after phase of a tile,
 * and by the exponentials of pairs: one for every channel. */
#include "backend/cuda/linear/tile.cuh"

enum scan_kind { SUM, OUTPUT, QUERIES };

template <int DP> static constexpr size_t scan_fwd_shared(void)
{
    return ((size_t)(DP + 5 * TILE) * (DP + 4) + TILE * WEIGHT_LD) * sizeof(float);
}

/* o of head h: rows of x = fq exp(A) read the state, pairs the values. */
template <int DP>
STI_DEVICE void output_head(const sti_cuda_linear &p, int h, size_t row, int have,
                            const float *S, const float *k, const float *v,
                            const float *A, float *q, float *x, float *w,
                            const lane_place &at)
{
    constexpr int LD = DP + 4;
    const int column = at.warp * (DP / 4);
    __syncthreads(); /* q, x, w are free */
    load_rows<TILE, DP, false>(q, p.fq + (row * p.H + h) * DP, (size_t)p.H * DP, have);
    __syncthreads();
    pair_products<DP, true>(w, q, k, A);
    decayed<DP, false>(x, q, A);
    __syncthreads();
    float c[DP / 32][4];
    clear_tiles(c);
    product_an<DP / 32, DP / 8>(c, x, LD, S + column, LD, at.lane);
    product_an<DP / 32, TILE / 8>(c, w, WEIGHT_LD, v + column, LD, at.lane);
    store_shared<DP>(c, p.o + (row * p.H + h) * DP, (size_t)p.H * DP, have, at);
}

/* dfq_t = exp(A_t) (S do_t) + sum over j <= t of (do_t . v_j) exp(A_t - A_j) fk_j */
template <int DP>
STI_DEVICE void query_head(const sti_cuda_linear &p, int h, size_t row, int have,
                           const float *S, const float *k, const float *v,
                           const float *A, float *d_o, float *w, const lane_place &at)
{
    constexpr int LD = DP + 4;
    const int column = at.warp * (DP / 4);
    __syncthreads(); /* d_o, w are free */
    load_rows<TILE, DP, true>(d_o, p.d_o + (row * p.H + h) * DP, (size_t)p.H * DP,
                              have);
    __syncthreads();
    pair_products<DP, false>(w, d_o, v, A);
    __syncthreads();
    float c[DP / 32][4];
    clear_tiles(c);
    product_at<DP / 32, DP / 8>(c, d_o, LD, S + column * LD, LD, at.lane);
#pragma unroll
    for (int n = 0; n < DP / 32; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = at.g + i / 2 * 8, e = column + 8 * n + 2 * at.t + i % 2;
            const float a = A[t * LD + e];
            float sum = c[n][i] * expf(a);
            for (int j = 0; j <= t; j++)
                sum += w[t * WEIGHT_LD + j] * __expf(a - A[j * LD + e]) * k[j * LD + e];
            c[n][i] = sum;
        }
    store_shared<DP>(c, p.dfq + (row * p.H + h) * DP, (size_t)p.H * DP, have, at);
}

/* The state before the span, zeros for its own sum. */
template <int DP>
STI_DEVICE void begin_state(const sti_cuda_linear &p, const span_place &r, bool empty,
                            float *S)
{
    load_rows<DP, DP, false>(S, p.states + r.at * DP * DP, DP, empty ? 0 : DP);
}

template <int DP>
STI_DEVICE void keep_state(const sti_cuda_linear &p, const sti_cuda_linear_seq &s,
                           const span_place &r, const float *S)
{
    for (int i = (int)threadIdx.x; i < p.D * p.D; i += SPAN_THREADS)
        s.s[(size_t)r.state * p.D * p.D + i] = S[i / p.D * (DP + 4) + i % p.D];
}

template <int DP, scan_kind KIND>
static __global__ void __launch_bounds__(SPAN_THREADS, DP <= 64 ? 4 : 2)
    scan_fwd_kernel(const sti_cuda_linear p)
{
    constexpr int LD = DP + 4;
    const lane_place at = lane_place_of();
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const span_place r = span_place_of(p, s);
    const bool last = r.first + r.n >= s.T;
    if (r.n <= 0 || (KIND == SUM && last)) return;
    float *S = block_memory(), *k = S + DP * LD, *v = k + TILE * LD, *A = v + TILE * LD;
    float *q = A + TILE * LD, *x = q + TILE * LD, *w = x + TILE * LD;
    begin_state<DP>(p, r, KIND == SUM, S);
    float sum = 0; /* of a over the span, channel threadIdx.x */
    for (int t0 = 0; t0 < r.n; t0 += TILE) {
        const int have = min((int)TILE, r.n - t0);
        const size_t row = (size_t)s.row0 + r.first + t0;
        __syncthreads();
        load_rows<TILE, DP, false>(k, p.fk + (row * p.G + r.g) * DP, (size_t)p.G * DP,
                                   have);
        load_rows<TILE, DP, true>(v, p.v + (row * p.G + r.g) * DP, (size_t)p.G * DP,
                                  have);
        load_decays<DP>(p, r, A, row, have);
        for (int h = r.h0; KIND != SUM && h < r.h0 + p.per_state; h++) {
            if (KIND == OUTPUT)
                output_head<DP>(p, h, row, have, S, k, v, A, q, x, w, at);
            else
                query_head<DP>(p, h, row, have, S, k, v, A, q, w, at);
        }
        if (KIND == QUERIES && t0 + TILE >= r.n) return;
        __syncthreads(); /* the state before the tile has been read */
        decayed<DP, true>(x, k, A);
        if (threadIdx.x < DP) sum += A[(TILE - 1) * LD + threadIdx.x];
        __syncthreads();
        advance<DP>(S, x, v, A, true, at);
    }
    __syncthreads();
    if (KIND == OUTPUT && last && s.s) keep_state<DP>(p, s, r, S);
    if (KIND == SUM) {
        for (int i = (int)threadIdx.x; i < DP * DP; i += SPAN_THREADS)
            p.states[r.at * DP * DP + i] = S[i / DP * LD + i % DP];
        if (threadIdx.x < DP) p.sums[r.at * DP + threadIdx.x] = sum;
    }
}

/* ---- The scan ------------------------------------------------------------ */

enum { SCAN_THREADS = 256, SCAN_AHEAD = 8 };

/* What spans add becomes the state before each, in place. A thread has one number of
 * the state and walks over spans; loads go ahead of the sum. Bounded by memory. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    scan_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int at = (int)(blockIdx.x * SCAN_THREADS + threadIdx.x);
    const int state = (int)blockIdx.y, i = at / p.DP, e = at % p.DP;
    if (at >= p.DP * p.DP) return;
    float now = 0;
    if (s.s && i < p.D && e < p.D) now = s.s[((size_t)state * p.D + i) * p.D + e];
    for (int c0 = 0; c0 < s.spans; c0 += SCAN_AHEAD) {
        float add[SCAN_AHEAD], by[SCAN_AHEAD];
#pragma unroll
        for (int u = 0; u < SCAN_AHEAD; u++) {
            const size_t span = ((size_t)s.span0 + c0 + u) * p.S + state;
            const bool is = c0 + u + 1 < s.spans; /* the last adds to no other */
            add[u] = is ? p.states[span * p.DP * p.DP + at] : 0;
            by[u] = is ? p.sums[span * p.DP + i] : 0;
        }
#pragma unroll
        for (int u = 0; u < SCAN_AHEAD; u++) {
            if (c0 + u >= s.spans) break;
            const size_t span = ((size_t)s.span0 + c0 + u) * p.S + state;
            p.states[span * p.DP * p.DP + at] = now;
            now = expf(by[u]) * now + add[u];
        }
    }
}

/* ---- Launchers ----------------------------------------------------------- */

still_status sti_cuda_linear_states(sti_dev *dev, const sti_cuda_linear *p,
                                    still_error *err)
{
    if (p->longest > SPAN)
        STI_TRY(by_width(p, [&](auto W) {
            return launch(dev, "linear attention: sums of spans", err,
                          scan_fwd_kernel<W, SUM>, span_grid(p), SPAN_THREADS,
                          scan_fwd_shared<W>(), *p);
        }));
    const dim3 grid((unsigned)(p->DP * p->DP + SCAN_THREADS - 1) / SCAN_THREADS,
                    (unsigned)p->S, (unsigned)p->n);
    return launch(dev, "linear attention: states of spans", err, scan_kernel, grid,
                  SCAN_THREADS, 0, *p);
}

still_status sti_cuda_linear_outputs(sti_dev *dev, const sti_cuda_linear *p,
                                     still_error *err)
{
    return by_width(p, [&](auto W) {
        return launch(dev, "linear attention: outputs", err, scan_fwd_kernel<W, OUTPUT>,
                      span_grid(p), SPAN_THREADS, scan_fwd_shared<W>(), *p);
    });
}

still_status sti_cuda_linear_queries(sti_dev *dev, const sti_cuda_linear *p,
                                     still_error *err)
{
    return by_width(p, [&](auto W) {
        return launch(dev, "linear attention: gradient of the queries", err,
                      scan_fwd_kernel<W, QUERIES>, span_grid(p), SPAN_THREADS,
                      scan_fwd_shared<W>(), *p);
    });
}
