/* reduce.cuh - sums and maxima over the threads of a block or a warp, always in the
 * same order. */
#ifndef STI_BACKEND_CUDA_PTX_REDUCE_CUH
#define STI_BACKEND_CUDA_PTX_REDUCE_CUH

__device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

/* Every thread of the block gets the sum. */
template <typename real, int warps> __device__ real block_sum(real v)
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

#endif
