/* rows_portable.c - the row operators of training for any processor; see
 * rows_code.h. */
#include "backend/cpu/train/rows_code.h"

const sti_train_kernels sti_cpu_train_portable = STI_TRAIN_TABLE;
