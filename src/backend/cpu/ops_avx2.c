/* ops_avx2.c - the row operators with AVX2, FMA and F16C; see ops_rows_code.h. */
#include "backend/cpu/ops_rows.h"

#if STI_CPU_X86
#include "backend/cpu/ops_rows_code.h"

const sti_row_kernels sti_cpu_rows_avx2 = STI_ROWS_TABLE;
#endif
