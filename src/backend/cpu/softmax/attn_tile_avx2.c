/* attn_tile_avx2.c - the attention kernels with AVX2, FMA and F16C; see attn_tile_code.h. */
#include "backend/cpu/softmax/attn_tile.h"

#if STI_CPU_X86
#include "backend/cpu/softmax/attn_tile_code.h"

const sti_attn_kernels sti_cpu_attn_avx2 = STI_ATTN_TABLE;
#endif
