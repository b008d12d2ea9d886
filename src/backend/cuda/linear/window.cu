/* window.cu - Liger's window: softmax attention over the last `window` tokens
 * and its gradient. See linear.h.
 *
 *   p_tj = softmax over t - window < j <= t of (q_t . k_j / sqrt(D)),  win_t = sum p v
 *   y has win / 2: ds = p (dy.v / 2 - delta), dq = ds k, dk = ds q, dv = p dy / 2
 *
 * q and k are rotated. A block takes 64 queries of a head, or 64 keys of a kv head with
 * the queries of all its heads, and walks over 32 rows of the other kind at a time.
 * Tokens are counted from the first of the call; keys before it, j < 0, are in the
 * session's ring. Bounded by shared memory and tensor cores. */
#include "backend/cuda/linear/tile.cuh"

enum { ROWS = 64, WALKED = 32, M = WALKED / 8 };
#define NOTHING (-1e30f) /* below every logit, and finite */

template <int DP> static constexpr size_t window_shared(void)
{
    return ((size_t)(2 * ROWS + 2 * WALKED) * (DP + 4) + 2 * WALKED) * sizeof(float);
}

/* ---- Rows ---------------------------------------------------------------- */

/* to [WALKED][LD] = keys (or values) [first, first + WALKED) before `end`, of rows
 * [rows,G,DP] or of the ring, rounded. */
template <int DP>
STI_DEVICE void load_keys(const sti_cuda_linear &p, const sti_cuda_linear_seq &s, int g,
                          int first, int end, const float *rows, const void *ring,
                          float *to)
{
    const float *from = rows + (((int64_t)s.row0 + first) * p.G + g) * DP;
    if (first >= 0) {
        load_rows<WALKED, DP, true>(to, from, (size_t)p.G * DP, end - first);
        return;
    }
    const int64_t position = first_position(s);
    for (int i = (int)threadIdx.x; i < WALKED * DP; i += SPAN_THREADS) {
        const int r = i / DP, e = i % DP, j = first + r;
        float x = 0;
        if (j >= 0 && j < end)
            x = from[(size_t)r * p.G * DP + e];
        else if (j < 0 && e < p.D)
            x = ring_get(ring,
                         ((size_t)g * p.window + (position + j) % p.window) * p.D + e,
                         p.half_kv);
        to[r * (DP + 4) + e] = tf32(x);
    }
}

/* Queries [first, first + N) before `end` of [rows,H,DP]. */
template <int N, int DP>
STI_DEVICE void load_queries(const sti_cuda_linear &p, const sti_cuda_linear_seq &s,
                             int h, int first, int end, const float *rows, float *to)
{
    load_rows<N, DP, true>(to, rows + (((size_t)s.row0 + first) * p.H + h) * DP,
                           (size_t)p.H * DP, end - first);
}

STI_DEVICE bool sees(const sti_cuda_linear &p, int t, int j)
{
    return j <= t && j > t - p.window;
}

/* The oldest key that token t sees: 0 where nothing came before this call. */
STI_DEVICE int oldest_key(const sti_cuda_linear &p, const sti_cuda_linear_seq &s, int t)
{
    const int64_t held = first_position(s), j = (int64_t)t - p.window + 1;
    return (int)(j > -held ? j : -held);
}

template <int DP>
STI_DEVICE void store_rows(const float (&c)[DP / 8][4], float *to, size_t stride,
                           int have, const lane_place &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        if (row >= have) continue;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
            *(float2 *)(to + row * stride + 8 * n + 2 * at.t) =
                make_float2(c[n][2 * i], c[n][2 * i + 1]);
    }
}

/* ---- Forward ------------------------------------------------------------- */

template <int DP>
static __global__ void __launch_bounds__(SPAN_THREADS, DP <= 64 ? 3 : 2)
    window_kernel(const sti_cuda_linear p)
{
    constexpr int N = DP / 8, LD = DP + 4;
    const lane_place at = lane_place_of();
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int first = (int)blockIdx.x * ROWS, h = (int)blockIdx.y, g = h / p.per_kv;
    const int end = min(first + (int)ROWS, s.T);
    if (first >= end) return;
    float *q = block_memory(), *k = q + 2 * ROWS * LD, *v = k + WALKED * LD;
    load_queries<ROWS, DP>(p, s, h, first, end, p.qr, q);
    float o[N][4], top[2] = {NOTHING, NOTHING}, sum[2] = {0, 0};
    clear_tiles(o);
    for (int j0 = oldest_key(p, s, first); j0 < end; j0 += WALKED) {
        __syncthreads();
        load_keys<DP>(p, s, g, j0, end, p.kr, s.win_k, k);
        load_keys<DP>(p, s, g, j0, end, p.v, s.win_v, v);
        __syncthreads();
        float w[M][4], now[2] = {top[0], top[1]};
        clear_tiles(w);
        product_nt<M, N>(w, q + at.warp * 16 * LD, LD, k, LD, at.lane);
#pragma unroll
        for (int n = 0; n < M; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = first + at.warp * 16 + at.g + i / 2 * 8;
                const int j = j0 + 8 * n + 2 * at.t + i % 2;
                w[n][i] = sees(p, t, j) ? w[n][i] * p.scale : NOTHING;
                now[i / 2] = fmaxf(now[i / 2], w[n][i]);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            now[i] = quad_max(now[i]);
            const float by = __expf(top[i] - now[i]);
            top[i] = now[i];
            sum[i] *= by;
#pragma unroll
            for (int n = 0; n < N; n++) {
                o[n][2 * i] *= by;
                o[n][2 * i + 1] *= by;
            }
        }
#pragma unroll
        for (int n = 0; n < M; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x = w[n][i];
                w[n][i] = x == NOTHING ? 0 : tf32(__expf(x - now[i / 2]));
                sum[i / 2] += w[n][i];
            }
        product_rn<N, M>(o, w, v, LD, at.lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        const int row = at.warp * 16 + at.g + 8 * i;
        const float by = sum[i] > 0 ? 1 / sum[i] : 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
            o[n][2 * i] *= by;
            o[n][2 * i + 1] *= by;
        }
        if (p.lse && at.t == 0 && first + row < end)
            p.lse[((size_t)s.row0 + first + row) * p.H + h] = top[i] + logf(sum[i]);
    }
    store_rows<DP>(o, p.win + (((size_t)s.row0 + first) * p.H + h) * DP,
                   (size_t)p.H * DP, end - first, at);
}

/* ---- Backward: whole sequences, no ring ---------------------------------- */

template <int DP>
static __global__ void __launch_bounds__(SPAN_THREADS, DP <= 64 ? 3 : 2)
    window_query_kernel(const sti_cuda_linear p)
{
    constexpr int N = DP / 8, LD = DP + 4;
    const lane_place at = lane_place_of();
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int first = (int)blockIdx.x * ROWS, h = (int)blockIdx.y, g = h / p.per_kv;
    const int end = min(first + (int)ROWS, s.T);
    if (first >= end) return;
    float *q = block_memory(), *d_o = q + ROWS * LD, *k = d_o + ROWS * LD;
    float *v = k + WALKED * LD;
    load_queries<ROWS, DP>(p, s, h, first, end, p.qr, q);
    load_queries<ROWS, DP>(p, s, h, first, end, p.d_o, d_o);
    float lse[2] = {0, 0}, delta[2] = {0, 0}, dq[N][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int t = first + at.warp * 16 + at.g + 8 * i;
        if (t >= end) continue;
        lse[i] = p.lse[((size_t)s.row0 + t) * p.H + h];
        delta[i] = p.delta[((size_t)s.row0 + t) * p.H + h];
    }
    clear_tiles(dq);
    for (int j0 = oldest_key(p, s, first); j0 < end; j0 += WALKED) {
        __syncthreads();
        load_keys<DP>(p, s, g, j0, end, p.kr, NULL, k);
        load_keys<DP>(p, s, g, j0, end, p.v, NULL, v);
        __syncthreads();
        float w[M][4], ds[M][4];
        clear_tiles(w);
        clear_tiles(ds);
        product_nt<M, N>(w, q + at.warp * 16 * LD, LD, k, LD, at.lane);
        product_nt<M, N>(ds, d_o + at.warp * 16 * LD, LD, v, LD, at.lane);
#pragma unroll
        for (int n = 0; n < M; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = first + at.warp * 16 + at.g + i / 2 * 8;
                const int j = j0 + 8 * n + 2 * at.t + i % 2;
                const bool seen = t < end && sees(p, t, j);
                const float x = seen ? __expf(w[n][i] * p.scale - lse[i / 2]) : 0;
                ds[n][i] = tf32(x * (0.5f * ds[n][i] - delta[i / 2]) * p.scale);
            }
        product_rn<N, M>(dq, ds, k, LD, at.lane);
    }
    store_rows<DP>(dq, p.dqr + (((size_t)s.row0 + first) * p.H + h) * DP,
                   (size_t)p.H * DP, end - first, at);
}

/* Queries [t0, t0 + WALKED) before `end` of head h against the block's keys. */
template <int DP>
STI_DEVICE void key_step(const sti_cuda_linear &p, int first, int t0, int end,
                         const float *k, const float *v, const float *q,
                         const float *d_o, const float *lse, const float *delta,
                         float (&dk)[DP / 8][4], float (&dv)[DP / 8][4],
                         const lane_place &at)
{
    constexpr int N = DP / 8, LD = DP + 4;
    float w[M][4], ds[M][4];
    clear_tiles(w);
    clear_tiles(ds);
    product_nt<M, N>(w, k + at.warp * 16 * LD, LD, q, LD, at.lane);
    product_nt<M, N>(ds, v + at.warp * 16 * LD, LD, d_o, LD, at.lane);
#pragma unroll
    for (int n = 0; n < M; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = first + at.warp * 16 + at.g + i / 2 * 8;
            const int column = 8 * n + 2 * at.t + i % 2, t = t0 + column;
            const bool seen = t < end && sees(p, t, j);
            const float x = seen ? __expf(w[n][i] * p.scale - lse[column]) : 0;
            w[n][i] = tf32(0.5f * x);
            ds[n][i] = tf32(x * (0.5f * ds[n][i] - delta[column]) * p.scale);
        }
    product_rn<N, M>(dv, w, d_o, LD, at.lane);
    product_rn<N, M>(dk, ds, q, LD, at.lane);
}

template <int DP>
static __global__ void __launch_bounds__(SPAN_THREADS, DP <= 64 ? 3 : 2)
    window_key_kernel(const sti_cuda_linear p)
{
    constexpr int N = DP / 8, LD = DP + 4;
    const lane_place at = lane_place_of();
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int first = (int)blockIdx.x * ROWS, g = (int)blockIdx.y;
    const int have = min((int)ROWS, s.T - first);
    if (have <= 0) return;
    /* The last query that sees one of the keys, and one. */
    const int end =
        (int)min((int64_t)s.T, (int64_t)first + have - 1 + (int64_t)p.window);
    float *k = block_memory(), *v = k + ROWS * LD, *q = v + ROWS * LD;
    float *d_o = q + WALKED * LD, *lse = d_o + WALKED * LD, *delta = lse + WALKED;
    const size_t from = (((size_t)s.row0 + first) * p.G + g) * DP;
    load_rows<ROWS, DP, true>(k, p.kr + from, (size_t)p.G * DP, have);
    load_rows<ROWS, DP, true>(v, p.v + from, (size_t)p.G * DP, have);
    float dk[N][4], dv[N][4];
    clear_tiles(dk);
    clear_tiles(dv);
    for (int h = g * p.per_kv; h < (g + 1) * p.per_kv; h++)
        for (int t0 = first; t0 < end; t0 += WALKED) {
            __syncthreads();
            load_queries<WALKED, DP>(p, s, h, t0, end, p.qr, q);
            load_queries<WALKED, DP>(p, s, h, t0, end, p.d_o, d_o);
            if (threadIdx.x < WALKED) {
                const int t = t0 + (int)threadIdx.x;
                const size_t row = ((size_t)s.row0 + t) * p.H + h;
                lse[threadIdx.x] = t < end ? p.lse[row] : 0;
                delta[threadIdx.x] = t < end ? p.delta[row] : 0;
            }
            __syncthreads();
            key_step<DP>(p, first, t0, end, k, v, q, d_o, lse, delta, dk, dv, at);
        }
    store_rows<DP>(dk, p.dkr + from, (size_t)p.G * DP, have, at);
    store_rows<DP>(dv, p.dvr + from, (size_t)p.G * DP, have, at);
}

/* ---- Launchers ----------------------------------------------------------- */

/* A block for every ROWS tokens of every head of every session; kernel: from a width to the
 * instance of it. */
template <class Kernel>
static still_status launch_window(sti_dev *dev, const sti_cuda_linear *p, int heads,
                                  const char *what, Kernel kernel, still_error *err)
{
    const dim3 grid((unsigned)(p->longest + ROWS - 1) / ROWS, (unsigned)heads,
                    (unsigned)p->n);
    return by_width(p, [&](auto W) {
        return launch(dev, what, err, kernel(W), grid, SPAN_THREADS, window_shared<W>(),
                      *p);
    });
}

still_status sti_cuda_linear_window(sti_dev *dev, const sti_cuda_linear *p,
                                    still_error *err)
{
    return launch_window(
        dev, p, p->H, "linear attention: the window's outputs",
        [](auto W) { return window_kernel<W>; }, err);
}

still_status sti_cuda_linear_window_queries(sti_dev *dev, const sti_cuda_linear *p,
                                            still_error *err)
{
    return launch_window(
        dev, p, p->H, "linear attention: gradient of the window's queries",
        [](auto W) { return window_query_kernel<W>; }, err);
}

still_status sti_cuda_linear_window_keys(sti_dev *dev, const sti_cuda_linear *p,
                                         still_error *err)
{
    return launch_window(
        dev, p, p->G, "linear attention: gradient of the window's keys",
        [](auto W) { return window_key_kernel<W>; }, err);
}
