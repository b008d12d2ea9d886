/* hybrid_distinct.cuh - how like its chunk a key is: the cosine of each of n keys and
 * the mean of their directions (sti_score_end.likeness), by one block. Sums have a
 * fixed order, so that every kernel that needs it finds the same. */
#ifndef STI_BACKEND_CUDA_HYBRID_DISTINCT_CUH
#define STI_BACKEND_CUDA_HYBRID_DISTINCT_CUH

#include "ops/hybrid.h"

namespace distinct
{

enum { DIMS = STI_HEAD_DIM_MAX / 32 }; /* of a key, by lane */

static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

static __device__ __forceinline__ float inverse_length(float square)
{
    return square > 0 ? 1 / sqrtf(square) : 0;
}

/* The score of the token at `position`; ops/score.c. */
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
        const float per = inverse_length(lanes_sum(square));
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
    const float per_mean = inverse_length(lanes_sum(all));
    for (int i = warp; i < n; i += WARPS) {
        float square = 0, dot = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            const float one = lane + 32 * e < D ? key(i, lane + 32 * e) : 0;
            square += one * one;
            dot += one * sum[e];
        }
        square = lanes_sum(square);
        dot = lanes_sum(dot);
        if (lane == 0) put(i, dot * inverse_length(square) * per_mean);
    }
    __syncthreads();
}

} // namespace distinct

#endif
