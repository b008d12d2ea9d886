/* elementwise.cu - the element-wise operators of training: gradient of the norm, the
 * optimizer, sums, dropout. Bound by memory, which is read 16 bytes at a time where
 * rows allow it; equations are in backend/ref/train.c. Sums are made of parts of fixed
 * shape, added in a fixed order, so that a run repeats bit for bit. */
#include "backend/cuda/ptx/reduce.cuh"
#include "backend/cuda/train/kernels.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

static int blocks_for(size_t n)
{
    const size_t blocks = (n + THREADS - 1) / THREADS;
    return (int)(blocks < 65535 ? blocks : 65535);
}

/* ---- Norm ---------------------------------------------------------------- */

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
    squares = block_sum<float, WARPS>(squares);
    along = block_sum<float, WARPS>(along);
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

/* ---- Optimizer ----------------------------------------------------------- */

enum { ADAM_BLOCKS = 32 }; /* of an array */

/* all[blockIdx.y], in the device's memory. */
__global__ void adam_step(const sti_adam_args *all)
{
    const sti_adam_args a = all[blockIdx.y];
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

still_status sti_cuda_adam_step(sti_dev *dev, const sti_adam_args *all, int n,
                                still_error *err)
{
    if (n < 1) return STILL_OK;
    adam_step<<<dim3(ADAM_BLOCKS, (unsigned)n), THREADS, 0, dev->stream>>>(all);
    STI_CUDA(cudaGetLastError(), "adam");
    return STILL_OK;
}

/* ---- Sums ---------------------------------------------------------------- */

__global__ void squares(const float *x, const sti_span *piece, double *part)
{
    const sti_span p = piece[blockIdx.x];
    double sum = 0;
    for (size_t i = threadIdx.x; i < p.n; i += THREADS)
        sum += (double)x[p.at + i] * (double)x[p.at + i];
    sum = block_sum<double, WARPS>(sum);
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
    error = block_sum<double, WARPS>(error);
    size = block_sum<double, WARPS>(size);
    if (threadIdx.x > 0) return;
    part[blockIdx.x] = error;
    part[STI_CUDA_PARTS + blockIdx.x] = size;
}

/* sums[b] = the parts of block b, added up. */
__global__ void sum_up(const double *part, double *sums)
{
    double sum = 0;
    for (int i = threadIdx.x; i < STI_CUDA_PARTS; i += THREADS)
        sum += part[(int)blockIdx.x * STI_CUDA_PARTS + i];
    sum = block_sum<double, WARPS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

still_status sti_cuda_differ(sti_dev *dev, const sti_compare_args *a, double *part,
                             still_error *err)
{
    const bool vec = sti_cuda_aligned(a->o) && sti_cuda_aligned(a->y);
    differ<<<STI_CUDA_PARTS, THREADS, 0, dev->stream>>>(*a, vec, part);
    sum_up<<<2, THREADS, 0, dev->stream>>>(part, a->sums);
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

/* ---- Dropout, scaling ---------------------------------------------------- */

/* base/random.h's, for the device. */
__device__ uint64_t mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

__global__ void dropout(sti_dropout_args a, uint64_t limit, float keep)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        const float left = mix64(a.key + i) >> 11 < limit ? 0 : a.x[i] * keep;
        a.y[i] = a.add ? a.y[i] + left : left;
    }
}

still_status sti_cuda_dropout(sti_dev *dev, const sti_dropout_args *a, still_error *err)
{
    if (a->n == 0) return STILL_OK;
    const uint64_t limit = (uint64_t)((double)a->p * 0x1p53);
    dropout<<<blocks_for(a->n), THREADS, 0, dev->stream>>>(*a, limit, 1 / (1 - a->p));
    STI_CUDA(cudaGetLastError(), "dropout");
    return STILL_OK;
}

__global__ void scale_by(float *x, size_t n, float by)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        x[i] *= by;
}

still_status sti_cuda_scale(sti_dev *dev, float *x, size_t n, float by,
                            still_error *err)
{
    if (n == 0) return STILL_OK;
    scale_by<<<blocks_for(n), THREADS, 0, dev->stream>>>(x, n, by);
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
