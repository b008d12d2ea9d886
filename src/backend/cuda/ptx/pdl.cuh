/* pdl.cuh - kernels that begin before the one in front of them has ended.
 *
 * A step queues hundreds of kernels that take one or two microseconds each; launching
 * the next only when the last has drained would take as long again. On sm_90 a kernel
 * that is launched with sti_launch may be placed on SMs while its predecessor still
 * runs. It must call sti_follow before it reads or writes anything another kernel
 * touches: that waits until everything queued before has ended. sti_lead lets the
 * successor be placed; called first, since that decides nothing but when it starts
 * waiting. */
#ifndef STI_BACKEND_CUDA_PTX_PDL_CUH
#define STI_BACKEND_CUDA_PTX_PDL_CUH

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

/* All threads of all blocks of a cluster (of the block, where it is alone) come here,
 * and see what the others wrote to shared memory. */
__device__ __forceinline__ void sti_meet()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}

/* 16 bytes of the shared memory of a block of the cluster, where `mine` is in this. */
__device__ __forceinline__ uint4 sti_read_peer(const void *mine, int block)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t at;
    uint4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(at)
        : "r"((uint32_t)__cvta_generic_to_shared(mine)), "r"(block));
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
#else
    return *(const uint4 *)mine; /* there is one block */
#endif
}

/* In clusters of so many blocks, next to each other in x; more than one only where
 * dev->follows.
 * dev->follows: the code that runs was made for sm_90; kernels of older code do not
 * wait, nor do they know of clusters. */
template <class... wanted, class... given>
cudaError_t sti_launch_clusters(const sti_dev *dev, int cluster,
                                void (*kernel)(wanted...), dim3 grid, dim3 block,
                                size_t room, given... args)
{
    cudaLaunchAttribute with[2] = {};
    with[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    with[0].val.programmaticStreamSerializationAllowed = 1;
    with[1].id = cudaLaunchAttributeClusterDimension;
    with[1].val.clusterDim.x = (unsigned)cluster;
    with[1].val.clusterDim.y = with[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = room;
    config.stream = dev->stream;
    config.attrs = with;
    config.numAttrs = !dev->follows ? 0 : cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<wanted>(args)...);
}

template <class... wanted, class... given>
cudaError_t sti_launch(const sti_dev *dev, void (*kernel)(wanted...), dim3 grid,
                       dim3 block, size_t room, given... args)
{
    return sti_launch_clusters(dev, 1, kernel, grid, block, room, args...);
}

#endif
