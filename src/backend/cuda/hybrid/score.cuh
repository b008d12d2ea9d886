/* score.cuh - what the scores are made of, for every kernel that scores: the
 * recurrent form, the chunk-parallel one and training. Their meaning is in ops/score.c.
 * Sums have a fixed order, so that all find the same. */
#ifndef STI_BACKEND_CUDA_HYBRID_SCORE_CUH
#define STI_BACKEND_CUDA_HYBRID_SCORE_CUH

#include "backend/cuda/ptx/reduce.cuh"
#include "ops/hybrid.h"

/* s3 of a token with weight `self` of its own against `others`. */
static __device__ __forceinline__ float saliency(float self, float others, float eps)
{
    const float sum = self + others, p = self / sum, rest = others / sum;
    return (rest > 0 ? rest * logf(rest) : 0) + p * logf((p + eps) / eps);
}

/* received: the mean of the weights that token i of a chunk of C has got, by the time
 * the chunk leaves, from all queries behind it in its own chunk and the next. */
static __device__ __forceinline__ float mean_received(float sum, int C, int i)
{
    const int queries = 2 * C - 1 - i;
    return queries > 0 ? sum / (float)queries : 0;
}

/* random: splitmix64 of seed, layer, head and position. */
static __device__ __forceinline__ uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static __device__ __forceinline__ float random_score(uint64_t seed, int layer, int head,
                                                     int position)
{
    uint64_t x = mix(seed);
    x = mix(x ^ (uint64_t)layer);
    x = mix(x ^ (uint64_t)head);
    x = mix(x ^ (uint64_t)position);
    return (float)(x >> 40) / (float)(1 << 24);
}

/* distinct: how like its chunk a key is, the cosine of each of n keys and the mean of
 * their directions (sti_score_end.likeness), by one block. */
namespace distinct
{

enum { DIMS = STI_HEAD_DIM_MAX / 32 }; /* of a key, by lane */

static __device__ __forceinline__ float inverse_length(float square)
{
    return square > 0 ? 1 / sqrtf(square) : 0;
}

/* The score of the token at `position`. */
static __device__ __forceinline__ float score_of(float likeness, int position)
{
    return position == 0 ? 2 : -likeness;
}

/* key(i, d): number d of key i. put(i, likeness), by one thread for each i. mean [D] is
 * shared memory. All threads of the block, WARPS of them 32 times, call it. */
template <int WARPS, class Key, class Put>
static __device__ void compare_keys(int n, int D, float *mean, Key key, Put put)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float sum[DIMS] = {}, x[DIMS];
    for (int d = (int)threadIdx.x; d < D; d += 32 * WARPS) mean[d] = 0;
    for (int i = warp; i < n; i += WARPS) {
        float square = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            x[e] = lane + 32 * e < D ? key(i, lane + 32 * e) : 0;
            square += x[e] * x[e];
        }
        const float per = inverse_length(warp_sum(square));
#pragma unroll
        for (int e = 0; e < DIMS; e++) sum[e] += x[e] * per;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int e = 0; e < DIMS; e++)
            if (w == warp && lane + 32 * e < D) mean[lane + 32 * e] += sum[e];
        __syncthreads();
    }
    float all = 0;
#pragma unroll
    for (int e = 0; e < DIMS; e++) {
        sum[e] = lane + 32 * e < D ? mean[lane + 32 * e] : 0;
        all += sum[e] * sum[e];
    }
    const float per_mean = inverse_length(warp_sum(all));
    for (int i = warp; i < n; i += WARPS) {
        float square = 0, dot = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            const float one = lane + 32 * e < D ? key(i, lane + 32 * e) : 0;
            square += one * one;
            dot += one * sum[e];
        }
        square = warp_sum(square);
        dot = warp_sum(dot);
        if (lane == 0) put(i, dot * inverse_length(square) * per_mean);
    }
    __syncthreads();
}

} // namespace distinct

#endif
