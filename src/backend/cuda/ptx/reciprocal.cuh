/* reciprocal.cuh - one over a number where its last bit does not count. */
#ifndef STI_BACKEND_CUDA_PTX_RECIPROCAL_CUH
#define STI_BACKEND_CUDA_PTX_RECIPROCAL_CUH

#include "backend/cuda/ptx/scalar.cuh"

/* Off by one unit in the last place at most; of more than 2^126 it is 0. */
STI_DEVICE float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

#endif
