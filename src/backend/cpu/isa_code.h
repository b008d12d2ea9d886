/* isa_code.h - the kernels that are written once, compiled for the instruction set of
 * the file that includes this, and its table. */
#ifndef STI_BACKEND_CPU_ISA_CODE_H
#define STI_BACKEND_CPU_ISA_CODE_H

#include "backend/cpu/dense/matmul_float_code.h"
#include "backend/cpu/dense/matmul_ktypes_code.h"
#include "backend/cpu/dense/norm_rope_code.h"
#include "backend/cpu/hybrid/kernels_code.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/panel/panel_code.h"
#include "backend/cpu/softmax/attn_tile_code.h"
#include "backend/cpu/train/elementwise_code.h"
#include "backend/cpu/train/gemm_code.h"

static const sti_dense_kernels dense_kernels = {
    .unpack_k = dense_unpack_k,
    .product_float = dense_product_float,
    .store = dense_store,
};

#define STI_CPU_KERNELS(set)                                                           \
    {                                                                                  \
        .quant = &sti_cpu_quant_##set, .dense = &dense_kernels, .row = &row_kernels,   \
        .attn = &attn_kernels, .hybrid = &hyb_kernels, .panel = &panel_kernels,        \
        .gemm = &gemm_kernels, .train = &train_kernels,                                \
    }

#endif
