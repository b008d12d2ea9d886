/* kernels.h - everything that depends on the instruction set, as one table for each.
 *
 * isa_avx2.c is compiled with AVX2, FMA and F16C, isa_avx512.c with AVX-512
 * F/BW/VL/DQ/VNNI on top, isa_portable.c for the baseline of the architecture. Each
 * includes the kernels that are written once over the vectors of simd.h (*_code.h) and
 * names the quantized products that are written by hand for it. AMX is AVX-512 with
 * products of batches of its own. The device takes one table when it is made; nothing
 * else asks which instructions there are. */
#ifndef STI_BACKEND_CPU_KERNELS_H
#define STI_BACKEND_CPU_KERNELS_H

#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/hybrid/kernels.h"
#include "backend/cpu/panel/panel.h"
#include "backend/cpu/softmax/attn_tile.h"
#include "backend/cpu/train/elementwise.h"
#include "backend/cpu/train/gemm.h"

typedef struct sti_cpu_kernels {
    const sti_quant_kernels *quant;
    const sti_dense_kernels *dense;
    const sti_row_kernels *row;
    const sti_attn_kernels *attn;
    const sti_hybrid_kernels *hybrid;
    const sti_panel_kernels *panel;
    const sti_gemm_kernels *gemm;
    const sti_train_kernels *train;
} sti_cpu_kernels;

extern const sti_cpu_kernels sti_cpu_kernels_portable;
#if STI_CPU_X86 /* elsewhere there is no other */
extern const sti_cpu_kernels sti_cpu_kernels_avx2, sti_cpu_kernels_avx512,
    sti_cpu_kernels_amx;
#endif

#endif
