/* bf16.cuh - bfloat16 two by two: the lower half of a word comes first in memory. */
#ifndef STI_BACKEND_CUDA_PTX_BF16_CUH
#define STI_BACKEND_CUDA_PTX_BF16_CUH

#include <cuda_bf16.h>

#include "backend/cuda/ptx/scalar.cuh"

STI_DEVICE uint32_t pack_bf16(float a, float b)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b); /* a in the low half */
    return *(const uint32_t *)&pair;
}

STI_DEVICE float2 unpack_bf16(uint32_t w)
{
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}

#endif
