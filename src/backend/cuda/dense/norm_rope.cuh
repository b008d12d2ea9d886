/* norm_rope.cuh - rows of floats as a block of 256 threads reads them: rmsnorm's sum of
 * squares and the rows themselves. Shared by the norm of its own and by products that
 * norm their input, so that both give the same bits. */
#ifndef STI_BACKEND_CUDA_DENSE_NORM_ROPE_CUH
#define STI_BACKEND_CUDA_DENSE_NORM_ROPE_CUH

#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/ptx/reduce.cuh"

enum { STI_ROW_THREADS = 256, STI_ROW_WARPS = STI_ROW_THREADS / 32 };

__device__ __forceinline__ bool sti_aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* Columns k .. k + 3 of a row of K; zero past the end. vec: K is a multiple of 4 and
 * the row begins at a multiple of 16 bytes. */
__device__ __forceinline__ float4 sti_load4(const float *x, int k, int K, bool vec)
{
    if (vec) return k < K ? *(const float4 *)(x + k) : make_float4(0, 0, 0, 0);
    return make_float4(k < K ? x[k] : 0, k + 1 < K ? x[k + 1] : 0,
                       k + 2 < K ? x[k + 2] : 0, k + 3 < K ? x[k + 3] : 0);
}

__device__ __forceinline__ float sti_square4(float4 v)
{
    return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
}

/* This thread's part of a row's sum of squares. */
__device__ __forceinline__ float sti_squares(const float *x, int K, bool vec)
{
    float s = 0;
#pragma unroll 2
    for (int k = 4 * threadIdx.x; k < K; k += 4 * STI_ROW_THREADS)
        s += sti_square4(sti_load4(x, k, K, vec));
    return s;
}

/* The first fours of a row that a thread has, columns 4 tid, + 4 THREADS, ...: loaded
 * before they are needed. */
template <int N> struct sti_held {
    float4 v[N];
    static __device__ __forceinline__ int column(int j)
    {
        return 4 * ((int)threadIdx.x + j * STI_ROW_THREADS);
    }
    __device__ __forceinline__ void load(const float *x, int K, bool vec)
    {
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = sti_load4(x, column(j), K, vec);
    }
};

/* The warps' parts of the sums of squares of M rows; visible after __syncthreads. Rows
 * are read four at a time, so that one waits for memory once. */
__device__ __forceinline__ void sti_square_parts(const float *x, int M, int K, bool vec,
                                                 float (*part)[STI_ROW_WARPS])
{
    for (int m = 0; m < M; m += 4) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[i] = m + i < M ? sti_squares(x + (int64_t)(m + i) * K, K, vec) : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[i] = warp_sum(s[i]);
            if (m + i < M && threadIdx.x % 32 == 0)
                part[m + i][threadIdx.x / 32] = s[i];
        }
    }
}

/* 1 / sqrt(mean of squares + eps) from the parts of all warps. */
__device__ __forceinline__ float sti_norm_factor(const float part[STI_ROW_WARPS], int K,
                                                 float eps)
{
    float s = 0;
#pragma unroll
    for (int w = 0; w < STI_ROW_WARPS; w++) s += part[w];
    return 1 / sqrtf(s / (float)K + eps);
}

/* Four columns of x / rms * g. */
__device__ __forceinline__ float4 sti_normed4(float4 v, float factor, float4 g)
{
    return make_float4(v.x * factor * g.x, v.y * factor * g.y, v.z * factor * g.z,
                       v.w * factor * g.w);
}

__device__ __forceinline__ float4 sti_add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void sti_store4(float *y, int k, int K, bool vec, float4 v)
{
    if (vec) {
        if (k < K) *(float4 *)(y + k) = v;
        return;
    }
    if (k < K) y[k] = v.x;
    if (k + 1 < K) y[k + 1] = v.y;
    if (k + 2 < K) y[k + 2] = v.z;
    if (k + 3 < K) y[k + 3] = v.w;
}

#endif
