/* rows_avx2.c - the hybrid operator's kernels with AVX2, FMA and F16C; see
 * rows_code.h. */
#include "backend/cpu/hybrid/rows.h"

#if STI_CPU_X86
#include "backend/cpu/hybrid/rows_code.h"

const sti_hybrid_kernels sti_cpu_hybrid_avx2 = STI_HYBRID_TABLE;
#endif
