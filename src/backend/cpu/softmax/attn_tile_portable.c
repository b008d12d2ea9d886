/* attn_tile_portable.c - the attention kernels for any processor; see attn_tile_code.h. */
#include "backend/cpu/softmax/attn_tile_code.h"

const sti_attn_kernels sti_cpu_attn_portable = STI_ATTN_TABLE;
