/* rows_avx512.c - the hybrid operator's kernels with AVX-512; see
 * rows_code.h. */
#include "backend/cpu/hybrid/rows.h"

#if STI_CPU_X86
#include "backend/cpu/hybrid/rows_code.h"

const sti_hybrid_kernels sti_cpu_hybrid_avx512 = STI_HYBRID_TABLE;
#endif
