/* follow.cuh - kernels that begin before the one in front of them has ended.
 *
 * A step queues hundreds of kernels that take one or two microseconds each; launching
 * the next only when the last has drained would take as long again. On sm_90 a kernel
 * that is launched with sti_launch may be placed on SMs while its predecessor still
 * runs. It must call sti_follow before it reads or writes anything another kernel
 * touches: that waits until everything queued before has ended. sti_lead lets the
 * successor be placed; called first, since that decides nothing but when it starts
 * waiting. */
#ifndef STI_BACKEND_CUDA_FOLLOW_CUH
#define STI_BACKEND_CUDA_FOLLOW_CUH

#include "backend/cuda/cuda.h"

__device__ __forceinline__ void sti_lead()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void sti_follow()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* dev->follows: the code that runs was made for sm_90; kernels of older code do not
 * wait.
 */
template <class... wanted, class... given>
cudaError_t sti_launch(const sti_dev *dev, void (*kernel)(wanted...), dim3 grid,
                       dim3 block, size_t room, given... args)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = room;
    config.stream = dev->stream;
    config.attrs = &early;
    config.numAttrs = dev->follows ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<wanted>(args)...);
}

#endif
