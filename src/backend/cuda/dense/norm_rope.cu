/* norm_rope.cu - operators that go through rows of activations once: rmsnorm, rope,
 * swiglu, log probabilities. All are bounded by memory, or by latency where rows are
 * few. */
#include <float.h>

#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/dense/norm_rope.cuh"
#include "backend/cuda/ptx/pdl.cuh"

namespace
{

enum { THREADS = STI_ROW_THREADS };

/* ---- rmsnorm, conversion to half ----------------------------------------- */

/* A block a row. g is loaded before the wait for x: it comes from far away. add: y is
 * added to. */
__global__ void __launch_bounds__(THREADS)
    norm_rows(const float *x, const float *g, float eps, int K, float *y, __half *yh,
              bool add)
{
    enum { HELD = 4 };
    __shared__ float part[STI_ROW_WARPS];
    const int64_t at = (int64_t)blockIdx.x * K;
    const int ld = (K + 7) / 8 * 8, rest = sti_held<HELD>::column(HELD);
    const bool whole = K % 4 == 0, vec = whole && sti_aligned16(x);
    const bool vec_g = whole && sti_aligned16(g), vec_y = whole && sti_aligned16(y);
    sti_held<HELD> row, gain;
    float factor = 1;
    pdl_trigger();
    if (g) gain.load(g, K, vec_g);
    pdl_wait();
    row.load(x + at, K, vec);
    if (g) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) s += sti_square4(row.v[j]);
        for (int k = rest; k < K; k += 4 * THREADS)
            s += sti_square4(sti_load4(x + at, k, K, vec));
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
        __syncthreads();
        factor = sti_norm_factor(part, K, eps);
    }
    const auto put = [&](int k, float4 v) {
        if (add) v = sti_add4(v, sti_load4(y + at, k, K, vec_y));
        if (y) sti_store4(y + at, k, K, vec_y, v);
        if (yh)
            *(uint2 *)(yh + (int64_t)blockIdx.x * ld + k) =
                make_uint2(pack_saturated(v.x, v.y), pack_saturated(v.z, v.w));
    };
#pragma unroll
    for (int j = 0; j < HELD; j++)
        if (row.column(j) < ld)
            put(row.column(j), g ? sti_normed4(row.v[j], factor, gain.v[j]) : row.v[j]);
    for (int k = rest; k < ld; k += 4 * THREADS) {
        const float4 v = sti_load4(x + at, k, K, vec);
        put(k, g ? sti_normed4(v, factor, sti_load4(g, k, K, vec_g)) : v);
    }
}

enum {
    WARP_FOURS = 8,                     /* of a lane */
    WARP_COLUMNS = 4 * 32 * WARP_FOURS, /* of a row that a warp can hold */
    WARP_ROWS = 256 /* from which on there is a row for every warp */
};

/* The same with a warp a row, which is read once: K <= WARP_COLUMNS, in fours, all rows
 * aligned. Lane l has the columns of threads l, l + 32, ... above and adds them up in
 * the order of their warps, which gives the same bits. */
__global__ void __launch_bounds__(THREADS)
    norm_rows_by_warp(const float *x, const float *g, float eps, int M, int K, float *y,
                      __half *yh, bool add)
{
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * STI_ROW_WARPS + threadIdx.x / 32;
    const int ld = (K + 7) / 8 * 8;
    float4 v[WARP_FOURS], gain[WARP_FOURS];
    float factor = 1;
    pdl_trigger();
    if (row >= M) return;
#pragma unroll
    for (int j = 0; j < WARP_FOURS; j++)
        if (g) gain[j] = sti_load4(g, 4 * (lane + 32 * j), K, true);
    pdl_wait();
#pragma unroll
    for (int j = 0; j < WARP_FOURS; j++)
        v[j] = sti_load4(x + row * K, 4 * (lane + 32 * j), K, true);
    if (g) {
        float s = 0;
#pragma unroll
        for (int j = 0; j < WARP_FOURS; j++)
            if (4 * 32 * j < K) s += warp_sum(sti_square4(v[j]));
        factor = 1 / sqrtf(s / (float)K + eps);
    }
#pragma unroll
    for (int j = 0; j < WARP_FOURS; j++) {
        const int k = 4 * (lane + 32 * j);
        if (k >= ld) continue;
        if (g) v[j] = sti_normed4(v[j], factor, gain[j]);
        if (add) v[j] = sti_add4(v[j], sti_load4(y + row * K, k, K, true));
        if (y) sti_store4(y + row * K, k, K, true, v[j]);
        if (yh)
            *(uint2 *)(yh + row * ld + k) = make_uint2(pack_saturated(v[j].x, v[j].y),
                                                       pack_saturated(v[j].z, v[j].w));
    }
}

/* ---- rope ---------------------------------------------------------------- */

enum { TURN_HEADS = 4 }; /* heads that share a thread's sine and cosine */

/* A thread takes pair i of TURN_HEADS heads of row m. The angle is a product in double
 * and is brought to [-1/2, 1/2] turns in double; sine and cosine of that are float.
 * Positions and frequencies come from the program by copies, which no kernel overtakes,
 * so only the rows are waited for; all heads are then loaded at once. */
__global__ void __launch_bounds__(128)
    rope(const __grid_constant__ sti_rope_args a, const int32_t *__restrict__ pos,
         const float *__restrict__ inv_freq)
{
    const int half = a.D / 2;
    const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int m = (int)(at / half), i = (int)(at % half);
    pdl_trigger();
    if (m >= a.M) return;
    double turns =
        (double)pos[m] * (double)inv_freq[i] * 0.15915494309189535; /* / 2 pi */
    turns -= rint(turns);
    float s, c;
    sincospif((float)(2 * turns), &s, &c);
    if (a.back) s = -s;
    pdl_wait();
    const int first = a.interleaved ? 2 * i : i, second = a.interleaved ? 1 : half;
    const int heads = a.heads + (a.also ? a.also_heads : 0);
    const int begin = blockIdx.y * TURN_HEADS;
    float *p[TURN_HEADS], u[TURN_HEADS], v[TURN_HEADS];
#pragma unroll
    for (int j = 0; j < TURN_HEADS; j++) {
        const int h = begin + j;
        if (h >= heads) break;
        p[j] = h < a.heads ? a.x + ((int64_t)m * a.heads + h) * a.D
                           : a.also + ((int64_t)m * a.also_heads + h - a.heads) * a.D;
        u[j] = p[j][first];
        v[j] = p[j][first + second];
    }
#pragma unroll
    for (int j = 0; j < TURN_HEADS; j++) {
        if (begin + j >= heads) break;
        p[j][first] = u[j] * c - v[j] * s;
        p[j][first + second] = v[j] * c + u[j] * s;
    }
}

/* ---- swiglu -------------------------------------------------------------- */

/* z of an activation g / (1 + e^-z). */
template <bool GELU> __device__ __forceinline__ float gated_float(float g, float u)
{
    const float z =
        GELU ? (float)STI_GELU_SLOPE * (g + (float)STI_GELU_CUBE * g * g * g) : g;
    return g / (1 + expf(-z)) * u;
}

template <bool GELU>
__global__ void gated(const float *gate, const float *up, float *y, size_t n, bool vec)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (!vec) {
        if (i < n) y[i] = gated_float<GELU>(gate[i], up[i]);
        return;
    }
    if (i >= n / 4) return;
    const float4 g = ((const float4 *)gate)[i], u = ((const float4 *)up)[i];
    ((float4 *)y)[i] =
        make_float4(gated_float<GELU>(g.x, u.x), gated_float<GELU>(g.y, u.y),
                    gated_float<GELU>(g.z, u.z), gated_float<GELU>(g.w, u.w));
}

/* A thread an element. */
__global__ void by_columns(float *x, const float *__restrict__ g, size_t n, int K)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= g[i % (size_t)K];
}

/* The result is rounded to half: fast exponential and division are exact enough. */
__device__ __forceinline__ float gated_fast(float g, float u)
{
    return __fdividef(g, 1 + __expf(-g)) * u;
}

/* Eight halves a thread; columns: of a row, in eights. */
__global__ void gated_half(const __half *gate, const __half *__restrict__ up,
                           const float *__restrict__ gate_bias,
                           const float *__restrict__ up_bias, size_t n, int columns,
                           __half *out)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint4 g4 = ((const uint4 *)gate)[i], u4 = ((const uint4 *)up)[i];
    const uint32_t g[4] = {g4.x, g4.y, g4.z, g4.w}, u[4] = {u4.x, u4.y, u4.z, u4.w};
    const int k = (int)(i % (size_t)columns) * 8;
    uint32_t y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 a = __half22float2(bits_half2(g[j])),
               b = __half22float2(bits_half2(u[j]));
        if (gate_bias) a.x += gate_bias[k + 2 * j], a.y += gate_bias[k + 2 * j + 1];
        if (up_bias) b.x += up_bias[k + 2 * j], b.y += up_bias[k + 2 * j + 1];
        y[j] = pack_saturated(gated_fast(a.x, b.x), gated_fast(a.y, b.y));
    }
    ((uint4 *)out)[i] = make_uint4(y[0], y[1], y[2], y[3]);
}

/* ---- Log probabilities --------------------------------------------------- */

enum {
    PROB_THREADS = 512,
    PROB_WARPS = PROB_THREADS / 32,
    PROB_BLOCKS = 8 /* of a row, where rows are few */
};

struct targets { /* passed by value: no copy of its own */
    int32_t id[STI_CUDA_PROB_ROWS];
};

/* The largest logit seen, the lowest id that has it, and the sum of exp(logit - max):
 * in double, so that what others add to the top's 1 is not lost. */
struct summary {
    float max;
    int top;
    double sum;
    __device__ __forceinline__ void raise(float v, int id)
    {
        sum *= (double)expf(max - v);
        max = v;
        top = id;
    }
    __device__ __forceinline__ void add(float v, int id)
    {
        if (v > max) raise(v, id);
        sum += (double)expf(v - max);
    }
    __device__ __forceinline__ void add4(float4 v, int id)
    {
        const float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
        if (most > max)
            raise(most, id + (v.x == most ? 0 : v.y == most ? 1 : v.z == most ? 2 : 3));
        sum += (double)expf(v.x - max);
        sum += (double)expf(v.y - max);
        sum += (double)expf(v.z - max);
        sum += (double)expf(v.w - max);
    }
};

/* All lanes get the summary of what they have. Code that a step runs once comes from
 * memory: it is here once. */
__device__ __noinline__ summary merge_warp(summary s)
{
    float max = s.max;
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, d));
    double sum = s.sum * (double)expf(s.max - max);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    const int top = __reduce_min_sync(0xffffffffu, s.max == max ? s.top : INT_MAX);
    return {max, top, sum};
}

/* A cluster of blocks a row, which is read once: of one block where rows are many. */
__global__ void __launch_bounds__(PROB_THREADS)
    probs(const float *logits, const __grid_constant__ targets target, int V,
          sti_cuda_prob *out)
{
    __shared__ __align__(16) summary part[PROB_WARPS];
    const float *l = logits + (int64_t)blockIdx.y * V;
    const int t = threadIdx.x, blocks = gridDim.x, by = blocks * PROB_THREADS,
              first = blockIdx.x * PROB_THREADS + t;
    const summary none = {-FLT_MAX, INT_MAX, 0};
    summary s = none;
    /* Up to three logits before the first multiple of 16 bytes, up to three at the end.
     */
    const int before = min(V, (int)((16 - ((uintptr_t)l & 15)) % 16 / 4));
    const int fours = (V - before) / 4, after = before + 4 * fours;
    const float4 *l4 = (const float4 *)(l + before);
    const int id = min(max(target.id[blockIdx.y], 0), V - 1);
    pdl_trigger();
    pdl_wait();
    const float wanted = first == 0 ? l[id] : 0; /* loaded before it is needed */
    if (first < before) s.add(l[first], first);
    for (int i = first; i < fours; i += 4 * by) {
        float4 v[4]; /* loaded before the first is used */
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * by < fours) v[j] = __ldcs(l4 + i + j * by);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * by < fours) s.add4(v[j], before + 4 * (i + j * by));
    }
    if (after + first < V) s.add(l[after + first], after + first);
    s = merge_warp(s);
    if (t % 32 == 0) part[t / 32] = s;
    __syncthreads();
    if (t < 32) {
        s = merge_warp(t < PROB_WARPS ? part[t] : none);
        if (t == 0) part[0] = s;
    }
    cluster_sync();
    if (blockIdx.x == 0 && t < 32) {
        s = none;
        if (t < blocks) {
            const uint4 v = cluster_read16(&part[0], t);
            memcpy(&s, &v, sizeof s);
        }
        s = merge_warp(s);
        const double others = s.sum - 1; /* the top itself adds 1 */
        if (t == 0)
            out[blockIdx.y] = {(float)((double)wanted - (double)s.max - log1p(others)),
                               s.top < V ? s.top : 0};
    }
    if (blocks > 1) cluster_sync(); /* no block ends while its part is read */
}

unsigned blocks_of(size_t n, size_t threads)
{
    return (unsigned)((n + threads - 1) / threads);
}

} // namespace

still_status sti_cuda_has_pdl(bool *out, still_error *err)
{
    cudaFuncAttributes a;
    STI_CUDA(cudaFuncGetAttributes(&a, (const void *)rope),
             "asking what code there is");
    *out = a.ptxVersion >= 90;
    return STILL_OK;
}

static still_status norm(sti_dev *dev, const float *x, const float *g, float eps, int M,
                         int K, float *y, sti_half *yh, bool add, still_error *err)
{
    /* Where nothing is normed rows can be cut anywhere. */
    const int64_t all = (int64_t)M * K;
    const bool recut = !g && K % 8 == 0 && all % WARP_COLUMNS == 0;
    const int rows = recut ? (int)(all / WARP_COLUMNS) : M,
              columns = recut ? WARP_COLUMNS : K;
    if (rows >= WARP_ROWS && columns <= WARP_COLUMNS && columns % 4 == 0 &&
        sti_cuda_aligned(x) && sti_cuda_aligned(g) && sti_cuda_aligned(y)) {
        STI_CUDA(pdl_launch(dev, norm_rows_by_warp,
                            dim3(blocks_of((size_t)rows, STI_ROW_WARPS)), dim3(THREADS),
                            0, x, g, eps, rows, columns, y, (__half *)yh, add),
                 "rmsnorm");
        return STILL_OK;
    }
    STI_CUDA(pdl_launch(dev, norm_rows, dim3((unsigned)M), dim3(THREADS), 0, x, g, eps,
                        K, y, (__half *)yh, add),
             "rmsnorm");
    return STILL_OK;
}

still_status sti_cuda_norm(sti_dev *dev, const float *x, const float *g, float eps,
                           int M, int K, float *y, sti_half *yh, still_error *err)
{
    return norm(dev, x, g, eps, M, K, y, yh, false, err);
}

still_status sti_cuda_norm_add(sti_dev *dev, const float *x, const float *g, float eps,
                               int M, int K, float *y, still_error *err)
{
    return norm(dev, x, g, eps, M, K, y, NULL, true, err);
}

still_status sti_cuda_by_columns(sti_dev *dev, float *x, const float *g, size_t n,
                                 int K, still_error *err)
{
    by_columns<<<blocks_of(n, THREADS), THREADS, 0, dev->stream>>>(x, g, n, K);
    STI_CUDA(cudaGetLastError(), "scale_columns");
    return STILL_OK;
}

still_status sti_cuda_rope_rows(sti_dev *dev, const sti_rope_args *a,
                                const int32_t *pos, const float *inv_freq,
                                still_error *err)
{
    const int heads = a->heads + (a->also ? a->also_heads : 0);
    const dim3 grid(blocks_of((size_t)a->M * (size_t)(a->D / 2), 128),
                    blocks_of((size_t)heads, TURN_HEADS));
    STI_CUDA(pdl_launch(dev, rope, grid, dim3(128), 0, *a, pos, inv_freq), "rope");
    return STILL_OK;
}

still_status sti_cuda_gated(sti_dev *dev, sti_activation act, const float *gate,
                            const float *up, float *y, size_t n, still_error *err)
{
    const bool vec = n % 4 == 0 && sti_cuda_aligned(gate) && sti_cuda_aligned(up) &&
                     sti_cuda_aligned(y);
    const unsigned blocks = blocks_of(vec ? n / 4 : n, THREADS);
    if (act == STI_GELU_TANH)
        gated<true><<<blocks, THREADS, 0, dev->stream>>>(gate, up, y, n, vec);
    else
        gated<false><<<blocks, THREADS, 0, dev->stream>>>(gate, up, y, n, vec);
    STI_CUDA(cudaGetLastError(), "swiglu");
    return STILL_OK;
}

still_status sti_cuda_gated_half(sti_dev *dev, const sti_half *gate, const sti_half *up,
                                 const float *gate_bias, const float *up_bias, int M,
                                 int K, sti_half *y, still_error *err)
{
    const size_t n = (size_t)M * (size_t)K / 8;
    gated_half<<<blocks_of(n, THREADS), THREADS, 0, dev->stream>>>(
        (const __half *)gate, (const __half *)up, gate_bias, up_bias, n, K / 8,
        (__half *)y);
    STI_CUDA(cudaGetLastError(), "swiglu in half");
    return STILL_OK;
}

still_status sti_cuda_probs(sti_dev *dev, const float *logits, const int32_t *target,
                            int M, int V, sti_cuda_prob *out, still_error *err)
{
    targets t = {};
    for (int m = 0; m < M; m++) t.id[m] = target[m];
    const int blocks = dev->pdl && M * PROB_BLOCKS <= 2 * dev->sms ? PROB_BLOCKS : 1;
    STI_CUDA(pdl_launch_clusters(dev, blocks, probs,
                                 dim3((unsigned)blocks, (unsigned)M),
                                 dim3(PROB_THREADS), 0, logits, t, V, out),
             "logprob");
    return STILL_OK;
}
