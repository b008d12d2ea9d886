/* memory.cuh - global and shared memory: copies in the background (cp.async),
 * prefetches, loads and additions that say how they are meant. */
#ifndef STI_BACKEND_CUDA_PTX_MEMORY_CUH
#define STI_BACKEND_CUDA_PTX_MEMORY_CUH

#include "backend/cuda/ptx/scalar.cuh"

/* Address of shared memory as instructions take it. */
STI_DEVICE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- Copies to shared memory in the background --------------------------- */

/* 16 bytes; 4 bytes. */
STI_DEVICE void cp_async16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from)
                 : "memory");
}
STI_DEVICE void cp_async4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from)
                 : "memory");
}
/* The first `bytes` of 16, and zeros for the rest. */
STI_DEVICE void cp_async16_part(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}
/* 16 bytes, or as many zeros: then nothing is read. L2: bytes of the line that the
 * second-level cache fetches along, 0 for its own choice. */
template <int L2 = 0>
STI_DEVICE void cp_async16_or_zero(uint32_t to, const void *from, bool there)
{
    const int bytes = there ? 16 : 0;
    static_assert(L2 == 0 || L2 == 128 || L2 == 256, "what the instruction knows");
    if constexpr (L2 == 0)
        cp_async16_part(to, from, bytes);
    else if constexpr (L2 == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(from), "r"(bytes)
                     : "memory");
}
STI_DEVICE void cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
/* Waits until at most N of this thread's groups of copies are under way. */
template <int N> STI_DEVICE void cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

/* ---- Prefetches ---------------------------------------------------------- */

STI_DEVICE void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
STI_DEVICE void prefetch_l1(const void *p)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* Any number of bytes, a multiple of 16, from an address that is one. */
STI_DEVICE void prefetch_bulk(const void *p, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(p), "r"(bytes)
                 : "memory");
}
#endif

/* ---- Loads and additions ------------------------------------------------- */

/* Read-only loads, issued at the place of the call and not later. */
STI_DEVICE uint4 load_nc16(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
STI_DEVICE uint2 load_nc8(const void *p)
{
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
STI_DEVICE uint32_t load_nc4(const void *p)
{
    uint32_t v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

/* y += v in memory, without waiting for the sum. */
STI_DEVICE void red_add4(float *y, float4 v)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    atomicAdd(y, v.x);
    atomicAdd(y + 1, v.y);
    atomicAdd(y + 2, v.z);
    atomicAdd(y + 3, v.w);
#endif
}

/* *p += x; returns what was there. Writes before it are visible to whoever sees the sum
 * by the same instruction. */
STI_DEVICE unsigned long long atomic_add_acq_rel(int64_t *p, unsigned long long x)
{
    unsigned long long before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(p), "l"(x)
                 : "memory");
    return before;
}

#endif
