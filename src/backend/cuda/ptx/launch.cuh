/* launch.cuh - launching a kernel that may want more shared memory than kernels get by
 * default, with its error checked; and sizes known at run time as template
 * arguments. */
#ifndef STI_BACKEND_CUDA_PTX_LAUNCH_CUH
#define STI_BACKEND_CUDA_PTX_LAUNCH_CUH

#include <type_traits>

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

/* f(W) with the one of the constants that x is; with the last if it is none of them. W
 * can be a template argument in f. */
template <int First, int... Rest, class F>
static still_status with_constant(int x, const F &f)
{
    if constexpr (sizeof...(Rest) == 0)
        return f(std::integral_constant<int, First>());
    else
        return x == First ? f(std::integral_constant<int, First>())
                          : with_constant<Rest...>(x, f);
}

#endif
