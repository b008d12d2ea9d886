/* mbarrier.cuh - barriers in shared memory, of which some threads wait for others by
 * rounds (sm_80 on; as used here, sm_90). */
#ifndef STI_BACKEND_CUDA_PTX_MBARRIER_CUH
#define STI_BACKEND_CUDA_PTX_MBARRIER_CUH

#include "backend/cuda/ptx/memory.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A round of the barrier ends when so many have arrived. */
static __device__ __forceinline__ void mbarrier_init(uint64_t *b, int count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)),
                 "r"(count)
                 : "memory");
}
static __device__ __forceinline__ void mbarrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b))
                 : "memory");
}
/* Arrives when the copies that this thread has begun (cp.async) have ended. */
static __device__ __forceinline__ void mbarrier_arrive_cp_async(uint64_t *b)
{
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b))
        : "memory");
}
/* Waits for the end of the round whose number has this last bit; a new barrier is in
 * round 0, after a round 1. */
static __device__ __forceinline__ void mbarrier_wait(uint64_t *b, uint32_t round)
{
    uint32_t over;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(over)
                     : "r"(shared_address(b)), "r"(round)
                     : "memory");
    } while (!over);
}

#endif

#endif
