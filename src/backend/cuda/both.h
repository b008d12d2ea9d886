/* both.h - code of the cuda backend that is also C11, for the host's own use and for tests
 * that need no GPU (tests/backend/cuda/.../test_host_*.c). */
#ifndef STI_BACKEND_CUDA_BOTH_H
#define STI_BACKEND_CUDA_BOTH_H

#ifdef __CUDACC__
#define STI_BOTH static __host__ __device__ __forceinline__
#define STI_EITHER static __device__ __forceinline__ /* no host code in CUDA C */
#else
#define STI_BOTH static inline
#define STI_EITHER static inline
#endif

#endif
