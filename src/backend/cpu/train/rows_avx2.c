/* rows_avx2.c - the row operators of training with AVX2; see
 * rows_code.h. */
#include "backend/cpu/train/rows.h"

#if STI_CPU_X86
#include "backend/cpu/train/rows_code.h"

const sti_train_kernels sti_cpu_train_avx2 = STI_TRAIN_TABLE;
#endif
