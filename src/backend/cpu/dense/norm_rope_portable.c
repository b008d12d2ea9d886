/* norm_rope_portable.c - the row operators for any processor; see norm_rope_code.h. */
#include "backend/cpu/dense/norm_rope_code.h"

const sti_row_kernels sti_cpu_rows_portable = STI_ROWS_TABLE;
