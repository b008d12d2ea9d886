/* gemm_avx512.c - the matrix product of training with AVX-512; see
 * gemm_code.h. */
#include "backend/cpu/train/gemm.h"

#if STI_CPU_X86
#include "backend/cpu/train/gemm_code.h"

const sti_gemm_kernels sti_cpu_gemm_avx512 = STI_GEMM_TABLE;
#endif
