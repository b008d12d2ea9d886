/* train.cu - the element-wise operators of training: gradients of the norm and of the
 * gated activation, the loss, the optimizer, sums, rounding to bfloat16. Bound by
 * memory, which is read 16 bytes at a time where rows allow it; equations are in
 * backend/ref/train.c. Sums are made of parts of fixed shape, added in a fixed order,
 * so that a run repeats bit for bit. */
#include <float.h>

#include <cuda_bf16.h>

#include "backend/cuda/train_kernels.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

static int blocks_for(size_t n)
{
    const size_t blocks = (n + THREADS - 1) / THREADS;
    return (int)(blocks < 65535 ? blocks : 65535);
}

/* Every thread of the block gets the sum. */
template <typename real, int warps = WARPS> __device__ real block_sum(real v)
{
    __shared__ real part[warps];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    __syncthreads(); /* whoever reads part from before has done so */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    real s = 0;
    for (int w = 0; w < warps; w++) s += part[w];
    return s;
}

template <int warps> __device__ float block_max(float v)
{
    __shared__ float part[warps];
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float m = part[0];
    for (int w = 1; w < warps; w++) m = fmaxf(m, part[w]);
    return m;
}

__device__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

/* ---- Norm and gated activation ------------------------------------------------------
 */

/* dx_i += r g_i dy_i - x_i r^3 / K sum_j g_j dy_j x_j; a block a row. */
__global__ void norm_back(sti_rmsnorm_back_args a)
{
    const int64_t row = (int64_t)blockIdx.x * a.K;
    const float *x = a.x + row, *dy = a.dy + row;
    float squares = 0, along = 0;
    for (int i = threadIdx.x; i < a.K; i += THREADS) {
        squares += x[i] * x[i];
        along += a.g[i] * dy[i] * x[i];
    }
    squares = block_sum(squares);
    along = block_sum(along);
    const float r = 1 / sqrtf(squares / (float)a.K + a.eps);
    const float back = r * r * r / (float)a.K * along;
    for (int i = threadIdx.x; i < a.K; i += THREADS)
        a.dx[row + i] += r * a.g[i] * dy[i] - x[i] * back;
}

enum { LANE_FOURS = 8, WARP_COLUMNS = 4 * 32 * LANE_FOURS }; /* of a row in a warp */

/* The same with a warp a row, which is read once: K <= WARP_COLUMNS, in fours, all rows
 * aligned. */
__global__ void __launch_bounds__(THREADS) norm_back_by_warp(sti_rmsnorm_back_args a)
{
    const int lane = threadIdx.x % 32;
    const int64_t m = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (m >= a.M) return;
    const float4 *x4 = (const float4 *)(a.x + m * a.K),
                 *dy4 = (const float4 *)(a.dy + m * a.K), *g4 = (const float4 *)a.g;
    float4 *dx4 = (float4 *)(a.dx + m * a.K);
    float4 x[LANE_FOURS], d[LANE_FOURS]; /* d = g dy */
    float squares = 0, along = 0;
#pragma unroll
    for (int j = 0; j < LANE_FOURS; j++) {
        const int k = lane + 32 * j;
        x[j] = d[j] = make_float4(0, 0, 0, 0);
        if (4 * k >= a.K) continue;
        const float4 g = g4[k];
        x[j] = x4[k];
        d[j] = dy4[k];
        d[j] = make_float4(g.x * d[j].x, g.y * d[j].y, g.z * d[j].z, g.w * d[j].w);
    }
#pragma unroll
    for (int j = 0; j < LANE_FOURS; j++) {
        squares +=
            (x[j].x * x[j].x + x[j].y * x[j].y) + (x[j].z * x[j].z + x[j].w * x[j].w);
        along +=
            (d[j].x * x[j].x + d[j].y * x[j].y) + (d[j].z * x[j].z + d[j].w * x[j].w);
    }
    squares = warp_sum(squares);
    along = warp_sum(along);
    const float r = 1 / sqrtf(squares / (float)a.K + a.eps);
    const float back = r * r * r / (float)a.K * along;
#pragma unroll
    for (int j = 0; j < LANE_FOURS; j++) {
        const int k = lane + 32 * j;
        if (4 * k >= a.K) continue;
        float4 y = dx4[k];
        y.x += r * d[j].x - x[j].x * back;
        y.y += r * d[j].y - x[j].y * back;
        y.z += r * d[j].z - x[j].z * back;
        y.w += r * d[j].w - x[j].w * back;
        dx4[k] = y;
    }
}

still_status sti_cuda_norm_back(sti_dev *dev, const sti_rmsnorm_back_args *a,
                                still_error *err)
{
    if (a->M < 1) return STILL_OK;
    if (a->K % 4 == 0 && a->K <= WARP_COLUMNS && sti_cuda_aligned(a->x) &&
        sti_cuda_aligned(a->g) && sti_cuda_aligned(a->dy) && sti_cuda_aligned(a->dx))
        norm_back_by_warp<<<(a->M + WARPS - 1) / WARPS, THREADS, 0, dev->stream>>>(*a);
    else
        norm_back<<<a->M, THREADS, 0, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "rmsnorm_back");
    return STILL_OK;
}

/* s = 1 / (1 + e^-g):  dg = dy u s (1 + g (1 - s)),  du = dy g s. One exponential, of
 * what is negative, gives both s and 1 - s to full precision. */
__device__ void gate_back(float g, float u, float dy, float *dg, float *du)
{
    const float e = expf(-fabsf(g)), inverse = 1 / (1 + e);
    const float s = g < 0 ? e * inverse : inverse, rest = g < 0 ? inverse : e * inverse;
    *dg = dy * u * s * (1 + g * rest);
    *du = dy * g * s;
}

__global__ void gated_back(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        gate_back(a.gate[i], a.up[i], a.dy[i], &a.dgate[i], &a.dup[i]);
}

/* n fours. */
__global__ void gated_back4(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const float4 g = ((const float4 *)a.gate)[i], u = ((const float4 *)a.up)[i],
                     dy = ((const float4 *)a.dy)[i];
        float4 dg, du;
        gate_back(g.x, u.x, dy.x, &dg.x, &du.x);
        gate_back(g.y, u.y, dy.y, &dg.y, &du.y);
        gate_back(g.z, u.z, dy.z, &dg.z, &du.z);
        gate_back(g.w, u.w, dy.w, &dg.w, &du.w);
        ((float4 *)a.dgate)[i] = dg;
        ((float4 *)a.dup)[i] = du;
    }
}

still_status sti_cuda_gated_back(sti_dev *dev, const sti_swiglu_back_args *a,
                                 still_error *err)
{
    const size_t n = (size_t)a->M * (size_t)a->K;
    if (n == 0) return STILL_OK;
    if (n % 4 == 0 && sti_cuda_aligned(a->gate) && sti_cuda_aligned(a->up) &&
        sti_cuda_aligned(a->dy) && sti_cuda_aligned(a->dgate) &&
        sti_cuda_aligned(a->dup))
        gated_back4<<<blocks_for(n / 4), THREADS, 0, dev->stream>>>(*a, n / 4);
    else
        gated_back<<<blocks_for(n), THREADS, 0, dev->stream>>>(*a, n);
    STI_CUDA(cudaGetLastError(), "swiglu_back");
    return STILL_OK;
}

/* ---- Loss ---------------------------------------------------------------------------
 */

/* One block an SM: the rows that all of them work on stay in L2 between the sums and
 * the gradient, so that logits are read from memory once. */
enum { LOSS_THREADS = 1024, LOSS_WARPS = LOSS_THREADS / 32, LOSS_BATCH = 4 };

/* Logits i .. i + 3 of n; past the end what adds nothing to a sum. vec: rows begin at
 * multiples of 16 bytes, n is a multiple of 4. */
__device__ __forceinline__ float4 logits4(const float *x, int i, int n, bool vec)
{
    if (vec)
        return i < n ? *(const float4 *)(x + i)
                     : make_float4(-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX);
    return make_float4(i < n ? x[i] : -FLT_MAX, i + 1 < n ? x[i + 1] : -FLT_MAX,
                       i + 2 < n ? x[i + 2] : -FLT_MAX,
                       i + 3 < n ? x[i + 3] : -FLT_MAX);
}

/* log sum exp of a row of n logits, for every thread; it is read once. */
__device__ float log_sum(const float *x, int n, bool vec)
{
    float top = -FLT_MAX;
    double sum = 0;
    for (int i = 4 * threadIdx.x; i < n; i += LOSS_BATCH * 4 * LOSS_THREADS) {
        float4 v[LOSS_BATCH]; /* asked for before the first is looked at */
#pragma unroll
        for (int j = 0; j < LOSS_BATCH; j++)
            v[j] = logits4(x, i + j * 4 * LOSS_THREADS, n, vec);
        float most = top;
#pragma unroll
        for (int j = 0; j < LOSS_BATCH; j++)
            most = fmaxf(most, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
        if (most > top) sum *= (double)expf(top - most);
        top = most;
#pragma unroll
        for (int j = 0; j < LOSS_BATCH; j++)
            sum += (double)((expf(v[j].x - top) + expf(v[j].y - top)) +
                            (expf(v[j].z - top) + expf(v[j].w - top)));
    }
    const float all = block_max<LOSS_WARPS>(top);
    sum = block_sum<double, LOSS_WARPS>(sum * (double)expf(top - all));
    return all + (float)log(sum);
}

/* d loss / d logit = weight (p - [it is the target] + kd (p - t)); kl adds up. */
struct loss_terms {
    float log_p, log_t, weight, kd;
    bool taught;
    double kl;
    __device__ __forceinline__ float gradient(float x, float t, bool target)
    {
        const float p = expf(x - log_p), pt = taught ? expf(t - log_t) : 0;
        if (pt > 0) kl += (double)(pt * ((t - log_t) - (x - log_p)));
        return weight * (p - (target ? 1.0f : 0.0f) + kd * (p - pt));
    }
};

/* A block a row. */
__global__ void __launch_bounds__(LOSS_THREADS)
    loss_rows(sti_loss_args a, const int32_t *target, const float *weight, bool vec,
              double *sums)
{
    const int m = blockIdx.x, own = target[m];
    float *x = a.logits + (int64_t)m * a.V;
    const float *t = a.teacher ? a.teacher + (int64_t)m * a.V : nullptr;
    loss_terms l = {0, 0, weight[m], t ? a.kd : 0, t != nullptr, 0};
    if (l.weight == 0) {
        for (int i = threadIdx.x; i < a.V; i += LOSS_THREADS) x[i] = 0;
        if (threadIdx.x == 0) sums[2 * m] = sums[2 * m + 1] = 0;
        return;
    }
    l.log_p = log_sum(x, a.V, vec);
    if (t) l.log_t = log_sum(t, a.V, vec);
    const double loss = (double)l.log_p - (double)x[own];
    __syncthreads(); /* it is read before its place becomes a gradient */
    for (int i = 4 * threadIdx.x; i < a.V; i += 4 * LOSS_THREADS) {
        const float4 v = logits4(x, i, a.V, vec);
        const float4 s = t ? logits4(t, i, a.V, vec) : v;
        const float4 d = make_float4(
            l.gradient(v.x, s.x, i == own), l.gradient(v.y, s.y, i + 1 == own),
            l.gradient(v.z, s.z, i + 2 == own), l.gradient(v.w, s.w, i + 3 == own));
        if (vec) {
            __stcs((float4 *)(x + i), d);
            continue;
        }
        x[i] = d.x;
        if (i + 1 < a.V) x[i + 1] = d.y;
        if (i + 2 < a.V) x[i + 2] = d.z;
        if (i + 3 < a.V) x[i + 3] = d.w;
    }
    const double kl = block_sum<double, LOSS_WARPS>(l.kl);
    if (threadIdx.x > 0) return;
    sums[2 * m] = loss;
    sums[2 * m + 1] = kl;
}

still_status sti_cuda_loss_rows(sti_dev *dev, const sti_loss_args *a,
                                const int32_t *target, const float *weight,
                                double *sums, still_error *err)
{
    const bool vec =
        a->V % 4 == 0 && sti_cuda_aligned(a->logits) && sti_cuda_aligned(a->teacher);
    loss_rows<<<a->M, LOSS_THREADS, 0, dev->stream>>>(*a, target, weight, vec, sums);
    STI_CUDA(cudaGetLastError(), "loss");
    return STILL_OK;
}

/* ---- Optimizer ----------------------------------------------------------------------
 */

__global__ void adam_step(sti_adam_args a)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    const float c1 = (float)(1 / a.c1), c2 = (float)(1 / a.c2);
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        const float g = a.scale * a.grad[i], x = a.x[i];
        const float m = a.beta1 * a.m[i] + (1 - a.beta1) * g;
        const float v = a.beta2 * a.v[i] + (1 - a.beta2) * g * g;
        a.m[i] = m;
        a.v[i] = v;
        a.x[i] = x - a.lr * (m * c1 / (sqrtf(v * c2) + a.eps) + a.decay * x);
    }
}

still_status sti_cuda_adam_step(sti_dev *dev, const sti_adam_args *a, still_error *err)
{
    if (a->n == 0) return STILL_OK;
    adam_step<<<blocks_for(a->n), THREADS, 0, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "adam");
    return STILL_OK;
}

/* ---- Sums ---------------------------------------------------------------------------
 */

__global__ void squares(const float *x, const sti_span *piece, double *part)
{
    const sti_span p = piece[blockIdx.x];
    double sum = 0;
    for (size_t i = threadIdx.x; i < p.n; i += THREADS)
        sum += (double)x[p.at + i] * (double)x[p.at + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

still_status sti_cuda_squares(sti_dev *dev, const float *x, const sti_span *piece,
                              int n, double *part, still_error *err)
{
    if (n < 1) return STILL_OK;
    squares<<<n, THREADS, 0, dev->stream>>>(x, piece, part);
    STI_CUDA(cudaGetLastError(), "sum_squares");
    return STILL_OK;
}

/* vec: both begin at multiples of 16 bytes; what does not fill a four is left to the
 * last threads. */
__global__ void differ(sti_compare_args a, bool vec, double *part)
{
    const size_t step = (size_t)gridDim.x * THREADS,
                 first = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const size_t fours = vec ? a.n / 4 : 0;
    double error = 0, size = 0;
    for (size_t i = first; i < fours; i += step) {
        const float4 o = ((const float4 *)a.o)[i];
        float4 d = ((const float4 *)a.y)[i];
        d = make_float4(d.x - o.x, d.y - o.y, d.z - o.z, d.w - o.w);
        error += ((double)d.x * (double)d.x + (double)d.y * (double)d.y) +
                 ((double)d.z * (double)d.z + (double)d.w * (double)d.w);
        size += ((double)o.x * (double)o.x + (double)o.y * (double)o.y) +
                ((double)o.z * (double)o.z + (double)o.w * (double)o.w);
        ((float4 *)a.y)[i] =
            make_float4(a.factor * d.x, a.factor * d.y, a.factor * d.z, a.factor * d.w);
    }
    for (size_t i = 4 * fours + first; i < a.n; i += step) {
        const float o = a.o[i], d = a.y[i] - o;
        error += (double)d * (double)d;
        size += (double)o * (double)o;
        a.y[i] = a.factor * d;
    }
    error = block_sum(error);
    size = block_sum(size);
    if (threadIdx.x > 0) return;
    part[blockIdx.x] = error;
    part[STI_CUDA_PARTS + blockIdx.x] = size;
}

still_status sti_cuda_differ(sti_dev *dev, const sti_compare_args *a, double *part,
                             still_error *err)
{
    const bool vec = sti_cuda_aligned(a->o) && sti_cuda_aligned(a->y);
    differ<<<STI_CUDA_PARTS, THREADS, 0, dev->stream>>>(*a, vec, part);
    STI_CUDA(cudaGetLastError(), "compare");
    return STILL_OK;
}

__global__ void add_parts(const float *part, int parts, size_t n, float *y)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int p = 0; p < parts; p++) sum += part[(size_t)p * n + i];
    y[i] += sum;
}

still_status sti_cuda_add_parts(sti_dev *dev, const float *part, int parts, size_t n,
                                float *y, still_error *err)
{
    if (n == 0) return STILL_OK;
    add_parts<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, dev->stream>>>(
        part, parts, n, y);
    STI_CUDA(cudaGetLastError(), "adding parts of a gradient");
    return STILL_OK;
}

/* ---- bfloat16 -----------------------------------------------------------------------
 */

__device__ __forceinline__ uint32_t pack_bf16(float a, float b)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b); /* a in the low half */
    return *(const uint32_t *)&pair;
}

/* Eight columns from c on of a row of all matrices side by side. vec: they lie in one
 * matrix, at a multiple of 16 bytes. */
struct eight {
    float4 low, high;
};

__device__ __forceinline__ eight columns8(const sti_cuda_columns &s, int64_t row, int c,
                                          bool vec)
{
    int i = 0;
    while (i < s.n - 1 && c >= s.N[i]) c -= s.N[i++];
    eight e;
    if (vec) {
        const float4 *x = (const float4 *)(s.x[i] + row * s.N[i] + c);
        e.low = x[0];
        e.high = x[1];
        return e;
    }
    float v[8];
    for (int j = 0; j < 8; j++, c++) {
        while (i < s.n - 1 && c >= s.N[i]) c -= s.N[i++];
        v[j] = c < s.N[i] ? s.x[i][row * s.N[i] + c] : 0;
    }
    e.low = make_float4(v[0], v[1], v[2], v[3]);
    e.high = make_float4(v[4], v[5], v[6], v[7]);
    return e;
}

enum { ROUND_BATCH = 3 }; /* loads of a lane before the first is looked at */

/* A warp a row of `eights` groups of eight columns. */
__global__ void __launch_bounds__(THREADS)
    to_bf16(const __grid_constant__ sti_cuda_columns s, int M, int eights, bool vec,
            uint4 *y)
{
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= M) return;
    for (int k = lane; k < eights; k += ROUND_BATCH * 32) {
        eight v[ROUND_BATCH];
#pragma unroll
        for (int j = 0; j < ROUND_BATCH; j++)
            if (k + 32 * j < eights) v[j] = columns8(s, row, 8 * (k + 32 * j), vec);
#pragma unroll
        for (int j = 0; j < ROUND_BATCH; j++)
            if (k + 32 * j < eights)
                y[row * eights + k + 32 * j] =
                    make_uint4(pack_bf16(v[j].low.x, v[j].low.y),
                               pack_bf16(v[j].low.z, v[j].low.w),
                               pack_bf16(v[j].high.x, v[j].high.y),
                               pack_bf16(v[j].high.z, v[j].high.w));
    }
}

still_status sti_cuda_to_bf16(sti_dev *dev, const sti_cuda_columns *s, int M, int ld,
                              sti_bf16 *y, still_error *err)
{
    bool vec = true;
    for (int i = 0; i < s->n; i++)
        vec = vec && s->N[i] % 8 == 0 && sti_cuda_aligned(s->x[i]);
    if (M < 1 || ld < 1) return STILL_OK;
    to_bf16<<<(M + WARPS - 1) / WARPS, THREADS, 0, dev->stream>>>(*s, M, ld / 8, vec,
                                                                  (uint4 *)y);
    STI_CUDA(cudaGetLastError(), "rounding to bfloat16");
    return STILL_OK;
}

/* ---- Dropout, scaling ---------------------------------------------------------------
 */

/* base/random.h's, for the device. */
__device__ uint64_t mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

__global__ void drop(sti_dropout_args a, uint64_t limit, float keep)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        const float left = mix64(a.key + i) >> 11 < limit ? 0 : a.x[i] * keep;
        a.y[i] = a.add ? a.y[i] + left : left;
    }
}

still_status sti_cuda_drop(sti_dev *dev, const sti_dropout_args *a, still_error *err)
{
    if (a->n == 0) return STILL_OK;
    const uint64_t limit = (uint64_t)((double)a->p * 0x1p53);
    drop<<<blocks_for(a->n), THREADS, 0, dev->stream>>>(*a, limit, 1 / (1 - a->p));
    STI_CUDA(cudaGetLastError(), "dropout");
    return STILL_OK;
}

__global__ void times(float *x, size_t n, float by)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        x[i] *= by;
}

still_status sti_cuda_times(sti_dev *dev, float *x, size_t n, float by,
                            still_error *err)
{
    if (n == 0) return STILL_OK;
    times<<<blocks_for(n), THREADS, 0, dev->stream>>>(x, n, by);
    STI_CUDA(cudaGetLastError(), "scale");
    return STILL_OK;
}

__global__ void count(int32_t *y, int n)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) y[i] = i;
}

still_status sti_cuda_count(sti_dev *dev, int32_t *y, int n, still_error *err)
{
    count<<<(n + THREADS - 1) / THREADS, THREADS, 0, dev->stream>>>(y, n);
    STI_CUDA(cudaGetLastError(), "counting");
    return STILL_OK;
}
