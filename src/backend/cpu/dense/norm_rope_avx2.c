/* norm_rope_avx2.c - the row operators with AVX2, FMA and F16C; see norm_rope_code.h. */
#include "backend/cpu/dense/norm_rope.h"

#if STI_CPU_X86
#include "backend/cpu/dense/norm_rope_code.h"

const sti_row_kernels sti_cpu_rows_avx2 = STI_ROWS_TABLE;
#endif
