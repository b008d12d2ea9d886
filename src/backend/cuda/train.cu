/* train.cu - the element-wise operators of training: gradients of the norm and of the
 * gated activation, the loss, the optimizer, sums. Bound by memory; equations are in
 * backend/ref/train.c. Sums are made of parts of fixed shape, added in a fixed order,
 * so that a run repeats bit for bit. */
#include "backend/cuda/train_kernels.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

static int blocks_for(size_t n)
{
    const size_t blocks = (n + THREADS - 1) / THREADS;
    return (int)(blocks < 65535 ? blocks : 65535);
}

/* Every thread of the block gets the sum. */
template <typename real> __device__ real block_sum(real v)
{
    __shared__ real part[WARPS];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    __syncthreads(); /* whoever reads part from before has done so */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    real s = 0;
    for (int w = 0; w < WARPS; w++) s += part[w];
    return s;
}

__device__ float block_max(float v)
{
    __shared__ float part[WARPS];
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float m = part[0];
    for (int w = 1; w < WARPS; w++) m = fmaxf(m, part[w]);
    return m;
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

still_status sti_cuda_norm_back(sti_dev *dev, const sti_rmsnorm_back_args *a,
                                still_error *err)
{
    if (a->M < 1) return STILL_OK;
    norm_back<<<a->M, THREADS, 0, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "rmsnorm_back");
    return STILL_OK;
}

/* s = 1 / (1 + e^-g):  dg = dy u s (1 + g (1 - s)),  du = dy g s. */
__global__ void gated_back(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const float g = a.gate[i], u = a.up[i], dy = a.dy[i];
        const float s = 1 / (1 + expf(-g)), rest = 1 / (1 + expf(g));
        a.dgate[i] = dy * u * s * (1 + g * rest);
        a.dup[i] = dy * g * s;
    }
}

still_status sti_cuda_gated_back(sti_dev *dev, const sti_swiglu_back_args *a,
                                 still_error *err)
{
    const size_t n = (size_t)a->M * (size_t)a->K;
    if (n == 0) return STILL_OK;
    gated_back<<<blocks_for(n), THREADS, 0, dev->stream>>>(*a, n);
    STI_CUDA(cudaGetLastError(), "swiglu_back");
    return STILL_OK;
}

/* ---- Loss ---------------------------------------------------------------------------
 */

/* log sum exp of a row of n logits, for every thread. */
__device__ float log_sum(const float *x, int n)
{
    float top = -INFINITY;
    for (int i = threadIdx.x; i < n; i += THREADS) top = fmaxf(top, x[i]);
    top = block_max(top);
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += (double)expf(x[i] - top);
    sum = block_sum(sum);
    return top + (float)log(sum);
}

/* d loss / d logit_i = weight (p_i - [i = target] + kd (p_i - t_i)); a block a row. */
__global__ void loss_rows(sti_loss_args a, const int32_t *target, const float *weight,
                          double *sums)
{
    const int m = blockIdx.x;
    float *x = a.logits + (int64_t)m * a.V;
    const float *t = a.teacher ? a.teacher + (int64_t)m * a.V : nullptr;
    const float w = weight[m], kd = t ? a.kd : 0;
    if (w == 0) {
        for (int i = threadIdx.x; i < a.V; i += THREADS) x[i] = 0;
        if (threadIdx.x == 0) sums[2 * m] = sums[2 * m + 1] = 0;
        return;
    }
    const float log_p = log_sum(x, a.V), log_t = t ? log_sum(t, a.V) : 0;
    const float own = x[target[m]];
    double kl = 0;
    __syncthreads(); /* own is read before its place becomes a gradient */
    for (int i = threadIdx.x; i < a.V; i += THREADS) {
        const float p = expf(x[i] - log_p), pt = t ? expf(t[i] - log_t) : 0;
        if (pt > 0) kl += (double)(pt * ((t[i] - log_t) - (x[i] - log_p)));
        x[i] = w * (p - (i == target[m] ? 1.0f : 0.0f) + kd * (p - pt));
    }
    kl = block_sum(kl);
    if (threadIdx.x > 0) return;
    sums[2 * m] = (double)log_p - (double)own;
    sums[2 * m + 1] = kl;
}

still_status sti_cuda_loss_rows(sti_dev *dev, const sti_loss_args *a,
                                const int32_t *target, const float *weight,
                                double *sums, still_error *err)
{
    loss_rows<<<a->M, THREADS, 0, dev->stream>>>(*a, target, weight, sums);
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

__global__ void differ(sti_compare_args a, double *part)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    double error = 0, size = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
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
    differ<<<STI_CUDA_PARTS, THREADS, 0, dev->stream>>>(*a, part);
    STI_CUDA(cudaGetLastError(), "compare");
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
