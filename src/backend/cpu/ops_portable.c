/* ops_portable.c - the row operators for any processor; see ops_rows_code.h. */
#include "backend/cpu/ops_rows_code.h"

const sti_row_kernels sti_cpu_rows_portable = STI_ROWS_TABLE;
