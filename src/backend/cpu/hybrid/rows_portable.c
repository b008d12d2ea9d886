/* rows_portable.c - the hybrid operator's kernels for any processor; see
 * rows_code.h. */
#include "backend/cpu/hybrid/rows_code.h"

const sti_hybrid_kernels sti_cpu_hybrid_portable = STI_HYBRID_TABLE;
