/* gemm_portable.c - the matrix product of training for any processor; see
 * gemm_code.h. */
#include "backend/cpu/train/gemm_code.h"

const sti_gemm_kernels sti_cpu_gemm_portable = STI_GEMM_TABLE;
