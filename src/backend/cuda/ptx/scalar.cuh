/* scalar.cuh - instructions on single numbers, and ways to hold the compiler back. */
#ifndef STI_BACKEND_CUDA_PTX_SCALAR_CUH
#define STI_BACKEND_CUDA_PTX_SCALAR_CUH

#include <stdint.h>

#define STI_DEVICE static __device__ __forceinline__

static constexpr float log2_e = 1.4426950408889634f;

/* 2^x; results below 2^-126 are 0, and so is 2^-infinity. */
STI_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* (a & mask) | bits in one instruction. */
template <uint32_t mask, uint32_t bits> STI_DEVICE uint32_t and_or(uint32_t a)
{
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "n"(mask), "n"(bits));
    return r;
}

/* ---- Holding the compiler back ------------------------------------------- */

/* Opaque copy: keeps derived addresses from being hoisted into registers. */
STI_DEVICE uint32_t opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
/* Computes x here: it moves across no other volatile asm. */
STI_DEVICE void pin(float2 &x)
{
    asm volatile("" : "+f"(x.x), "+f"(x.y));
}
/* Values read from memory before this are read again after it. */
STI_DEVICE void reload_memory(void)
{
    asm volatile("" ::: "memory");
}

#endif
