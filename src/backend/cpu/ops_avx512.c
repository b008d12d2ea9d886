/* ops_avx512.c - the row operators with AVX-512; see ops_rows_code.h. */
#include "backend/cpu/ops_rows.h"

#if STI_CPU_X86
#include "backend/cpu/ops_rows_code.h"

const sti_row_kernels sti_cpu_rows_avx512 = STI_ROWS_TABLE;
#endif
