/* gemm_avx2.c - the matrix product of training with AVX2; see
 * gemm_code.h. */
#include "backend/cpu/train/gemm.h"

#if STI_CPU_X86
#include "backend/cpu/train/gemm_code.h"

const sti_gemm_kernels sti_cpu_gemm_avx2 = STI_GEMM_TABLE;
#endif
