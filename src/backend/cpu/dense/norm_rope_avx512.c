/* norm_rope_avx512.c - the row operators with AVX-512; see norm_rope_code.h. */
#include "backend/cpu/dense/norm_rope.h"

#if STI_CPU_X86
#include "backend/cpu/dense/norm_rope_code.h"

const sti_row_kernels sti_cpu_rows_avx512 = STI_ROWS_TABLE;
#endif
