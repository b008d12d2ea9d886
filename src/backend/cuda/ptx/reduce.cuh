/* reduce.cuh - sums and maxima over the threads of a quad, a warp or a block, always in
 * the same order. */
#ifndef STI_BACKEND_CUDA_PTX_REDUCE_CUH
#define STI_BACKEND_CUDA_PTX_REDUCE_CUH

#include "backend/cuda/ptx/scalar.cuh"

/* Four lanes in a row: those that share a row of a matrix fragment. */
STI_DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
STI_DEVICE float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

template <typename real> STI_DEVICE real warp_sum(real x)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
STI_DEVICE float warp_max(float x)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

/* Every thread of the block gets the sum. */
template <typename real, int warps> __device__ real block_sum(real v)
{
    __shared__ real part[warps];
    v = warp_sum(v);
    __syncthreads(); /* part has been read by whoever used it before */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    real s = 0;
    for (int w = 0; w < warps; w++) s += part[w];
    return s;
}

template <int warps> __device__ float block_max(float v)
{
    __shared__ float part[warps];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float m = part[0];
    for (int w = 1; w < warps; w++) m = fmaxf(m, part[w]);
    return m;
}

#endif
