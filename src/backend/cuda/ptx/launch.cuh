/* launch.cuh - launching a kernel that may ask for more shared memory than kernels get
 * unasked, with its error checked. */
#ifndef STI_BACKEND_CUDA_PTX_LAUNCH_CUH
#define STI_BACKEND_CUDA_PTX_LAUNCH_CUH

#include "backend/cuda/cuda.h"

template <typename... A>
static still_status launch(sti_dev *dev, const char *what, still_error *err,
                           void (*kernel)(A...), dim3 grid, int threads, size_t shared,
                           A... args)
{
    if (shared > 48 * 1024)
        STI_CUDA(cudaFuncSetAttribute((const void *)kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared),
                 what);
    kernel<<<grid, threads, shared, dev->stream>>>(args...);
    STI_CUDA(cudaGetLastError(), what);
    return STILL_OK;
}

#endif
