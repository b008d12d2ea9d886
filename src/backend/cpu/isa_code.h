/* isa_code.h - the kernels that are written once, compiled for the instruction set of
 * the file that includes this, and its tables. */
#ifndef STI_BACKEND_CPU_ISA_CODE_H
#define STI_BACKEND_CPU_ISA_CODE_H

#include "backend/cpu/dense/matmul_float_code.h"
#include "backend/cpu/dense/norm_rope_code.h"
#include "backend/cpu/dense/pack_code.h"
#include "backend/cpu/hybrid/kernels_code.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/panel/panel_code.h"
#include "backend/cpu/softmax/attn_tile_code.h"
#include "backend/cpu/train/elementwise_code.h"
#include "backend/cpu/train/gemm_code.h"
#include "base/named.h"

static const sti_dense_kernels dense_kernels = {
    STI_NAMED_3(dense_, pack, product_float, store),
};

static const sti_row_kernels row_kernels = {
    STI_NAMED_4(row_, rmsnorm, swiglu, rope, sum_exp),
    STI_NAMED_2(row_, rmsnorm_add, geglu),
};

static const sti_attn_kernels attn_kernels = {
    .levels_cost = ATTN_LEVELS_COST,
    STI_NAMED_4(attn_, scale, divide, join, to_f16),
    STI_NAMED_3(attn_, load_keys, load_values, load_panels),
    STI_NAMED_2(attn_, round_queries, qk_logits_levels),
    STI_NAMED_3(attn_, qk_logits, qk_logits_panels, softmax),
    STI_NAMED_3(attn_, pv_product, pv_product_cache, merge_lse),
};

static const sti_hybrid_kernels hyb_kernels = {
    STI_NAMED_4(hyb_, widen, dot, product, product_t),
    STI_NAMED_5(hyb_, features, lse, receive, add, output),
};

static const sti_panel_kernels panel_kernels = {
    STI_NAMED_2(panel_, multiply, transpose),
    STI_NAMED_4(panel_, lane_max, exp_shifted, lane_sum, dot),
    STI_NAMED_3(panel_, softmax_backward, exp_moments, match),
    STI_NAMED_5(panel_, row_dots, add_scaled, gate, softmax, decay),
    STI_NAMED_2(panel_, features, features_backward),
};

static const sti_gemm_kernels gemm_kernels = {
    .rows = GEMM_ROWS,
    .strip = GEMM_STRIP,
    STI_NAMED_3(gemm_, sweep, copy_row, copy_group),
};

static const sti_train_kernels train_kernels = {
    STI_NAMED_5(train_, rmsnorm_back, swiglu_back, loss, adam, sum_squares),
    .geglu_back = train_geglu_back,
};

#define STI_CPU_KERNELS(set)                                                           \
    {                                                                                  \
        .quant = &sti_cpu_quant_##set, .dense = &dense_kernels, .row = &row_kernels,   \
        .attn = &attn_kernels, .hybrid = &hyb_kernels, .panel = &panel_kernels,        \
        .gemm = &gemm_kernels, .train = &train_kernels,                                \
    }

#endif
