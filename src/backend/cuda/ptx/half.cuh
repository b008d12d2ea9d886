/* half.cuh - floats to halves and back, two by two: the lower half of a word comes
 * first in memory.
 *
 * Two ways to stay in half's range. half_range sends NaN to the range too: in the
 * hybrid operator a NaN that entered a state would stay there. saturated keeps NaN,
 * which the dense operators and softmax attention pass on. */
#ifndef STI_BACKEND_CUDA_PTX_HALF_CUH
#define STI_BACKEND_CUDA_PTX_HALF_CUH

#include <cuda_fp16.h>
#include <string.h>

#include "backend/cuda/ptx/scalar.cuh"

STI_DEVICE uint32_t half2_bits(__half2 h)
{
    uint32_t r;
    memcpy(&r, &h, sizeof r);
    return r;
}
STI_DEVICE __half2 bits_half2(uint32_t u)
{
    __half2 h;
    memcpy(&h, &u, sizeof h);
    return h;
}

STI_DEVICE uint32_t pack_half2(float lo, float hi)
{
    const __half2 h = __floats2half2_rn(lo, hi);
    uint32_t r;
    memcpy(&r, &h, sizeof r);
    return r;
}
STI_DEVICE float2 unpack_half2(uint32_t x)
{
    __half2 h;
    memcpy(&h, &x, sizeof h);
    return __half22float2(h);
}

STI_DEVICE float half_range(float x)
{
    return fminf(fmaxf(x, -65504.0f), 65504.0f);
}
STI_DEVICE float saturated(float x)
{
    return fabsf(x) > 65504.f ? copysignf(65504.f, x) : x;
}
STI_DEVICE __half to_half(float x)
{
    return __float2half_rn(saturated(x));
}
STI_DEVICE uint32_t pack_saturated(float lo, float hi)
{
    return half2_bits(__halves2half2(to_half(lo), to_half(hi)));
}
/* pack_saturated in one instruction. */
STI_DEVICE uint32_t cvt_half2_sat(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Eight floats as halves; each way to stay in range. */
STI_DEVICE uint4 pack_half8(float4 x, float4 y)
{
    return make_uint4(pack_half2(half_range(x.x), half_range(x.y)),
                      pack_half2(half_range(x.z), half_range(x.w)),
                      pack_half2(half_range(y.x), half_range(y.y)),
                      pack_half2(half_range(y.z), half_range(y.w)));
}
STI_DEVICE uint4 pack_saturated8(const float4 &x, const float4 &y)
{
    return make_uint4(pack_half2(saturated(x.x), saturated(x.y)),
                      pack_half2(saturated(x.z), saturated(x.w)),
                      pack_half2(saturated(y.x), saturated(y.y)),
                      pack_half2(saturated(y.z), saturated(y.w)));
}

#endif
