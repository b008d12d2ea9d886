/* loss.cu - the loss of rows of logits and its gradient; equations are in
 * backend/ref/train.c. Bound by memory, which is read 16 bytes at a time where rows
 * allow it. */
#include <float.h>

#include "backend/cuda/ptx/bf16.cuh"
#include "backend/cuda/ptx/reduce.cuh"
#include "backend/cuda/train/kernels.h"

/* One block an SM: the rows that all of them work on stay in L2 between the sums and
 * the gradient, so that logits are read from memory once. */
enum { THREADS = 1024, WARPS = THREADS / 32, BATCH = 4 };

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
    for (int i = 4 * threadIdx.x; i < n; i += BATCH * 4 * THREADS) {
        float4 v[BATCH]; /* loaded before the first is used */
#pragma unroll
        for (int j = 0; j < BATCH; j++) v[j] = logits4(x, i + j * 4 * THREADS, n, vec);
        float most = top;
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            most = fmaxf(most, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
        if (most > top) sum *= (double)expf(top - most);
        top = most;
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            sum += (double)((expf(v[j].x - top) + expf(v[j].y - top)) +
                            (expf(v[j].z - top) + expf(v[j].w - top)));
    }
    const float all = block_max<WARPS>(top);
    sum = block_sum<double, WARPS>(sum * (double)expf(top - all));
    return all + (float)log(sum);
}

/* d loss / d logit = weight (p - [it is the target] + kd (p - t)); kl adds up. What
 * lies past the end of a row (see logits4) gets 0. */
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

/* Where a row's gradient goes: over its logits, or rounded to bfloat16 if `rounded` is
 * there, and then zeros up to a multiple of 8 columns. */
struct gradient_row {
    float *x;
    uint2 *rounded; /* four columns each */
    int V;
    bool vec;
    __device__ __forceinline__ int end() const
    {
        return rounded ? (V + 7) / 8 * 8 : V;
    }
    __device__ __forceinline__ void store(int i, float4 d) const
    {
        if (rounded)
            rounded[i / 4] = make_uint2(pack_bf16(d.x, d.y), pack_bf16(d.z, d.w));
        else if (vec)
            __stcs((float4 *)(x + i), d);
        else {
            x[i] = d.x;
            if (i + 1 < V) x[i + 1] = d.y;
            if (i + 2 < V) x[i + 2] = d.z;
            if (i + 3 < V) x[i + 3] = d.w;
        }
    }
};

/* A block a row. */
__global__ void __launch_bounds__(THREADS)
    loss_rows(sti_loss_args a, const int32_t *target, const float *weight, bool vec,
              uint2 *rounded)
{
    const int m = blockIdx.x, own = target[m];
    float *x = a.logits + (int64_t)m * a.V;
    const float *t = a.teacher ? a.teacher + (int64_t)m * a.V : nullptr;
    gradient_row out = {x, rounded, a.V, vec};
    if (rounded) out.rounded += (int64_t)m * (out.end() / 4);
    loss_terms l = {0, 0, weight[m], t ? a.kd : 0, t != nullptr, 0};
    if (l.weight == 0) {
        for (int i = 4 * threadIdx.x; i < out.end(); i += 4 * THREADS)
            out.store(i, make_float4(0, 0, 0, 0));
        if (threadIdx.x == 0) a.loss[m] = 0;
        if (threadIdx.x == 0 && a.kl) a.kl[m] = 0;
        return;
    }
    l.log_p = log_sum(x, a.V, vec);
    if (t) l.log_t = log_sum(t, a.V, vec);
    const double loss = (double)l.log_p - (double)x[own];
    __syncthreads(); /* it is read before its place becomes a gradient */
    for (int i = 4 * threadIdx.x; i < out.end(); i += 4 * THREADS) {
        const float4 v = logits4(x, i, a.V, vec);
        const float4 s = t ? logits4(t, i, a.V, vec) : v;
        out.store(i, make_float4(l.gradient(v.x, s.x, i == own),
                                 l.gradient(v.y, s.y, i + 1 == own),
                                 l.gradient(v.z, s.z, i + 2 == own),
                                 l.gradient(v.w, s.w, i + 3 == own)));
    }
    const double kl = block_sum<double, WARPS>(l.kl);
    if (threadIdx.x > 0) return;
    a.loss[m] = loss;
    if (a.kl) a.kl[m] = kl;
}

still_status sti_cuda_loss_rows(sti_dev *dev, const sti_loss_args *a,
                                const int32_t *target, const float *weight,
                                sti_bf16 *rounded, still_error *err)
{
    const bool vec =
        a->V % 4 == 0 && sti_cuda_aligned(a->logits) && sti_cuda_aligned(a->teacher);
    loss_rows<<<a->M, THREADS, 0, dev->stream>>>(*a, target, weight, vec,
                                                 (uint2 *)rounded);
    STI_CUDA(cudaGetLastError(), "loss");
    return STILL_OK;
}
