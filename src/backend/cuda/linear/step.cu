/* step.cu - Liger and SUPRA token by token: what a decode step needs, and what
 * runs heads too wide for tiles. See linear.h.
 *
 * A block takes one state of one session. It makes the features of the token, moves the
 * state on and reads it for up to four query heads at once; for Liger the same heads
 * then attend to the window, four warps each. All of it is float arithmetic. Bounded by
 * reading and writing the state, or by latency where sessions are few. */
#include "backend/cuda/linear/tile.cuh"
#include "backend/cuda/ptx/pdl.cuh"

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    HEADS = 4,             /* query heads at once */
    SHARE = WARPS / HEADS, /* warps of a head */
    KEYS = 4               /* keys of a warp at once */
};

/* Vectors of D in shared memory, of the token and the heads at hand. */
typedef struct token_memory {
    float *fk, *gamma, *v; /* [D] */
    float *fq, *qr, *o;    /* [HEADS][D] */
    float *part;           /* [THREADS * HEADS] */
    float *top, *sum;      /* [WARPS]: of a warp's keys */
    float *acc;            /* [WARPS][D] */
} token_memory;

static size_t step_shared(int D)
{
    return ((size_t)(3 + 3 * HEADS + WARPS) * (size_t)D + THREADS * HEADS + 2 * WARPS) *
           sizeof(float);
}

STI_DEVICE token_memory token_memory_of(float *at, int D)
{
    token_memory m;
    m.fk = at;
    m.gamma = m.fk + D;
    m.v = m.gamma + D;
    m.fq = m.v + D;
    m.qr = m.fq + HEADS * D;
    m.o = m.qr + HEADS * D;
    m.acc = m.o + HEADS * D;
    m.part = m.acc + WARPS * D;
    m.top = m.part + THREADS * HEADS;
    m.sum = m.top + WARPS;
    return m;
}

/* ---- Features, a vector a warp ------------------------------------------- */

STI_DEVICE void softmax_row(const float *x, float *f, int D, float part)
{
    const int lane = (int)threadIdx.x % 32;
    float top = -FLT_MAX, sum = 0;
    for (int e = lane; e < D; e += 32) top = fmaxf(top, x[e]);
    top = warp_max(top);
    for (int e = lane; e < D; e += 32) sum += f[e] = expf(x[e] - top);
    sum = part / warp_sum(sum);
    for (int e = lane; e < D; e += 32) f[e] *= sum;
}

STI_DEVICE float rotated(const sti_cuda_linear &p, const float *x, int e, int64_t t)
{
    const rotation r = rotation_of(p, e, t);
    return x[e] * r.c + x[r.partner] * r.s;
}

/* fk, gamma and v of row `row`; the ring gets the token. */
STI_DEVICE void make_key(const sti_cuda_linear &p, const sti_cuda_linear_seq &s, int g,
                         int state, int row, int64_t t, const token_memory &m)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const size_t from = ((size_t)row * p.G + g) * p.D;
    const float *k = s.k + from, *v = s.v + from;
    const size_t slot =
        p.window > 0 ? ((size_t)g * p.window + (size_t)(t % p.window)) * p.D : 0;
    if (warp == 0 && p.window > 0) softmax_row(k, m.fk, p.D, 1);
    if (warp == 0 && p.window == 0) {
        const float *b = p.bias_k ? p.bias_k + g * p.D : NULL;
        const float *raw =
            p.raw_k ? p.raw_k + (((size_t)s.row0 + row) * p.G + g) * p.D : k;
        relu_row(p, raw, b, t, p.scale, m.fk, p.D);
    }
    if (warp == 1)
        for (int e = lane; e < p.D; e += 32)
            m.gamma[e] = expf(p.window > 0 ? log_gate(k[e]) : log_gamma(state));
    if (warp == 2)
        for (int e = lane; e < p.D; e += 32) m.v[e] = v[e];
    if (warp == 3 && p.window > 0)
        for (int e = lane; e < p.D; e += 32) {
            ring_put(s.win_k, slot + e, rotated(p, k, e, t), p.half_kv);
            ring_put(s.win_v, slot + e, v[e], p.half_kv);
        }
}

/* fq, and for Liger qr, of heads [h, h + n). */
STI_DEVICE void make_queries(const sti_cuda_linear &p, const sti_cuda_linear_seq &s,
                             int h, int n, int row, int64_t t, const token_memory &m)
{
    const int warp = (int)threadIdx.x / 32 - HEADS, lane = (int)threadIdx.x % 32;
    if (warp < 0 || warp >= n) return;
    const size_t head = (size_t)row * p.H + h + warp;
    const float *q = s.q + head * p.D;
    float *f = m.fq + warp * p.D;
    if (p.window > 0) {
        softmax_row(q, f, p.D, 0.5f);
        for (int e = lane; e < p.D; e += 32) m.qr[warp * p.D + e] = rotated(p, q, e, t);
    } else {
        const float *b = p.bias_q ? p.bias_q + (h + warp) * p.D : NULL;
        relu_row(p, p.raw_q ? p.raw_q + ((size_t)s.row0 * p.H + head) * p.D : q, b, t,
                 1, f, p.D);
    }
}

/* ---- The state ----------------------------------------------------------- */

/* S [D,D] <- diag(gamma) S + fk v^T (where `move`), o [n][D] = fq^T S. A thread has a
 * column and every groups-th row. */
STI_DEVICE void use_state(float *S, int D, int n, bool move, const token_memory &m)
{
    const int columns = min(D, (int)THREADS), groups = THREADS / columns;
    const int group = (int)threadIdx.x / columns, c = (int)threadIdx.x % columns;
    for (int e0 = 0; e0 < D; e0 += columns) {
        const int e = e0 + c;
        float sum[HEADS] = {0};
        if (group < groups && e < D) {
            const float v = m.v[e];
#pragma unroll 8
            for (int i = group; i < D; i += groups) {
                float x = S[(size_t)i * D + e];
                if (move) {
                    x = m.gamma[i] * x + m.fk[i] * v;
                    S[(size_t)i * D + e] = x;
                }
#pragma unroll
                for (int h = 0; h < HEADS; h++)
                    sum[h] += h < n ? m.fq[h * D + i] * x : 0;
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                m.part[(group * HEADS + h) * columns + c] = sum[h];
        }
        __syncthreads();
        for (int at = (int)threadIdx.x; at < n * columns; at += THREADS) {
            const int h = at / columns, column = at % columns;
            float all = 0;
            for (int u = 0; u < groups; u++)
                all += m.part[(u * HEADS + h) * columns + column];
            if (e0 + column < D) m.o[h * D + e0 + column] = all;
        }
        __syncthreads();
    }
}

/* ---- The window ---------------------------------------------------------- */

/* Keys [first, t], of which a warp takes KEYS of every SHARE * KEYS: its largest logit,
 * its sum of exp(logit - largest), that sum of values. */
template <int EACH>
STI_DEVICE void attend(const sti_cuda_linear &p, const sti_cuda_linear_seq &s, int g,
                       int n, int64_t t, const token_memory &m)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int head = warp / SHARE, D = p.D;
    if (head >= n) return;
    const int64_t first = t - p.window + 1 > 0 ? t - p.window + 1 : 0;
    const size_t ring = (size_t)g * p.window;
    float acc[EACH] = {0}, top = -1e30f, sum = 0;
    for (int64_t j0 = first + warp % SHARE * KEYS; j0 <= t; j0 += SHARE * KEYS) {
        float l[KEYS], now = top;
        size_t at[KEYS];
#pragma unroll
        for (int u = 0; u < KEYS; u++) {
            const int64_t j = j0 + u <= t ? j0 + u : t;
            at[u] = (ring + (size_t)(j % p.window)) * D;
            float dot = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int e = lane + 32 * i;
                if (e < D)
                    dot += m.qr[head * D + e] * ring_get(s.win_k, at[u] + e, p.half_kv);
            }
            l[u] = dot;
        }
#pragma unroll
        for (int u = 0; u < KEYS; u++) {
            l[u] = warp_sum(l[u]) * p.scale;
            if (j0 + u <= t) now = fmaxf(now, l[u]);
        }
        const float by = expf(top - now);
        top = now;
        sum *= by;
#pragma unroll
        for (int i = 0; i < EACH; i++) acc[i] *= by;
#pragma unroll
        for (int u = 0; u < KEYS; u++) {
            const float w = j0 + u <= t ? expf(l[u] - now) : 0;
            sum += w;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int e = lane + 32 * i;
                if (e < D) acc[i] += w * ring_get(s.win_v, at[u] + e, p.half_kv);
            }
        }
    }
    if (lane == 0) {
        m.top[warp] = top;
        m.sum[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < D) m.acc[warp * D + lane + 32 * i] = acc[i];
}

/* o += 1/2 of the window's output: the shares of its warps joined. */
STI_DEVICE void join(int D, int n, const token_memory &m)
{
    for (int at = (int)threadIdx.x; at < n * D; at += THREADS) {
        const int w0 = at / D * SHARE, e = at % D;
        float top = -1e30f, sum = 0, value = 0;
        for (int w = w0; w < w0 + SHARE; w++) top = fmaxf(top, m.top[w]);
        for (int w = w0; w < w0 + SHARE; w++) {
            const float by = expf(m.top[w] - top);
            sum += by * m.sum[w];
            value += by * m.acc[w * D + e];
        }
        m.o[at] += 0.5f * value / sum;
    }
}

/* ---- The step ------------------------------------------------------------ */

/* y [n][D] = o, or o normed; a warp a head. */
STI_DEVICE void write_outputs(float *y, int D, int n, bool norm, const token_memory &m)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (warp >= n) return;
    const float *o = m.o + warp * D;
    float mean = 0, factor = 1;
    if (norm) norm_of(o, D, &mean, &factor);
    for (int e = lane; e < D; e += 32) y[warp * D + e] = (o[e] - mean) * factor;
}

/* Grid: states, sessions. */
template <int EACH>
static __global__ void __launch_bounds__(THREADS, 1)
    step_kernel(const sti_cuda_linear p)
{
    pdl_trigger();
    pdl_wait();
    const sti_cuda_linear_seq s = p.seq[blockIdx.y];
    const int state = (int)blockIdx.x, h0 = state * p.per_state, g = h0 / p.per_kv;
    const token_memory m = token_memory_of(block_memory(), p.D);
    float *S = s.s + (size_t)state * p.D * p.D;
    for (int row = 0; row < s.T; row++) {
        const int64_t t = first_position(s) + row;
        for (int h = 0; h < p.per_state; h += HEADS) {
            const int n = min((int)HEADS, p.per_state - h);
            __syncthreads(); /* the vectors are free */
            if (h == 0) make_key(p, s, g, state, row, t, m);
            make_queries(p, s, h0 + h, n, row, t, m);
            __syncthreads();
            use_state(S, p.D, n, h == 0, m);
            if (p.window > 0) {
                attend<EACH>(p, s, g, n, t, m);
                __syncthreads();
                join(p.D, n, m);
                __syncthreads();
            }
            write_outputs(s.y + ((size_t)row * p.H + h0 + h) * p.D, p.D, n,
                          p.window == 0, m);
        }
    }
}

template <int EACH>
static still_status step(sti_dev *dev, const sti_cuda_linear *p, still_error *err)
{
    const size_t shared = step_shared(p->D);
    if (shared > 48 * 1024)
        STI_CUDA(cudaFuncSetAttribute((const void *)step_kernel<EACH>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared),
                 "linear attention: a step");
    STI_CUDA(pdl_launch(dev, step_kernel<EACH>, dim3((unsigned)p->S, (unsigned)p->n),
                        dim3(THREADS), shared, *p),
             "linear attention: a step");
    STI_CUDA(cudaGetLastError(), "linear attention: a step");
    return STILL_OK;
}

still_status sti_cuda_linear_step(sti_dev *dev, const sti_cuda_linear *p,
                                  still_error *err)
{
    if (p->D <= 64) return step<2>(dev, p, err);
    if (p->D <= 128) return step<4>(dev, p, err);
    return step<STI_HEAD_DIM_MAX / 32>(dev, p, err);
}
