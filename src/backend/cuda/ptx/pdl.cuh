/* pdl.cuh - programmatic dependent launch: kernels that start before the one in front
 * of them has ended; and clusters of blocks.
 *
 * A step queues hundreds of kernels that take one or two microseconds each; launching
 * the next only when the last has drained would double that. On sm_90 a kernel that is
 * launched with pdl_launch may be placed on SMs while its predecessor still runs. It
 * must call pdl_wait before it reads or writes anything another kernel touches: that
 * waits until everything queued before has ended. pdl_trigger lets the successor be
 * placed; kernels call it first, since it decides only when the successor starts to
 * wait. */
#ifndef STI_BACKEND_CUDA_PTX_PDL_CUH
#define STI_BACKEND_CUDA_PTX_PDL_CUH

#include "backend/cuda/cuda.h"
#include "backend/cuda/ptx/scalar.cuh"

STI_DEVICE void pdl_trigger()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

STI_DEVICE void pdl_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Barrier of all threads of a cluster (of the block, where it is alone), after which
 * they see what the others wrote to shared memory. */
STI_DEVICE void cluster_sync()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
#else
    __syncthreads();
#endif
}

/* 16 bytes of another block's shared memory, at the place of `mine` in this block's. */
STI_DEVICE uint4 cluster_read16(const void *mine, int block)
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

/* Launches in clusters of so many blocks, next to each other in x. dev->pdl: the code
 * that runs was made for sm_90; older code neither waits nor has clusters of more than
 * one. */
template <class... wanted, class... given>
static cudaError_t pdl_launch_clusters(const sti_dev *dev, int cluster,
                                       void (*kernel)(wanted...), dim3 grid, dim3 block,
                                       size_t shared, given... args)
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
    config.dynamicSmemBytes = shared;
    config.stream = dev->stream;
    config.attrs = with;
    config.numAttrs = !dev->pdl ? 0 : cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<wanted>(args)...);
}

template <class... wanted, class... given>
static cudaError_t pdl_launch(const sti_dev *dev, void (*kernel)(wanted...), dim3 grid,
                              dim3 block, size_t shared, given... args)
{
    return pdl_launch_clusters(dev, 1, kernel, grid, block, shared, args...);
}

#endif
