/* kernels.h - launchers of the operators of training (*.cu of this folder); the
 * entries in train.c, lora.c and ffn.c say what is computed by which. */
#ifndef STI_BACKEND_CUDA_TRAIN_KERNELS_H
#define STI_BACKEND_CUDA_TRAIN_KERNELS_H

#include "backend/cuda/dense/lora_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t sti_bf16; /* the bits of one: C has no name for it */

still_status sti_cuda_norm_back(sti_dev *, const sti_rmsnorm_back_args *,
                                still_error *);
still_status sti_cuda_gated_back(sti_dev *, const sti_swiglu_back_args *,
                                 still_error *);
/* Target and weight on the device. `rounded` [M, V up to 8] receives the gradient, with
 * zeros at the end of rows; NULL: the logits do. */
still_status sti_cuda_loss_rows(sti_dev *, const sti_loss_args *, const int32_t *target,
                                const float *weight, sti_bf16 *rounded, still_error *);
/* `all` [n] is on the device. */
still_status sti_cuda_adam_step(sti_dev *, const sti_adam_args *all, int n,
                                still_error *);
/* part[i] = sum of squares of piece i of x, for n pieces. */
still_status sti_cuda_squares(sti_dev *, const float *x, const sti_span *piece, int n,
                              double *part, still_error *);
/* part [2, STI_CUDA_PARTS] is scratch. */
enum { STI_CUDA_PARTS = 528 };
still_status sti_cuda_differ(sti_dev *, const sti_compare_args *, double *part,
                             still_error *);
still_status sti_cuda_dropout(sti_dev *, const sti_dropout_args *, still_error *);
still_status sti_cuda_scale(sti_dev *, float *x, size_t n, float by, still_error *);
/* y[i] = i. */
still_status sti_cuda_count(sti_dev *, int32_t *y, int n, still_error *);
/* y += sum of `parts` arrays of n numbers, which follow each other, in order. */
still_status sti_cuda_add_parts(sti_dev *, const float *part, int parts, size_t n,
                                float *y, still_error *);

/* ---- Low ranks (products: dense/lora_gemm.h) ------------------------------ */

/* Gradients of low-rank matrices (lora_grad.cu): out[ranks, W] += scale l[M, ranks]^T
 * x[M, W] for eight or less columns of l, which is [M, R]; trans: out is [W, ranks] of
 * [W, R]. */
enum { STI_CUDA_GRAD_SLOTS = 4, STI_CUDA_GRADS_MOST = 2 * STI_MATMUL_MAX };
typedef struct sti_cuda_lora_slot {
    const float *l;
    float *out;
    int R, ranks;
    bool trans;
    float scale;
} sti_cuda_lora_slot;

/* All that one x is part of: W is a multiple of 4, x of 16 bytes. */
typedef struct sti_cuda_lora_grad {
    const float *x;
    int W, n;
    sti_cuda_lora_slot slot[STI_CUDA_GRAD_SLOTS];
} sti_cuda_lora_grad;
typedef struct sti_cuda_lora_grads_args {
    int M, n;
    sti_cuda_lora_grad of[STI_CUDA_GRADS_MOST];
} sti_cuda_lora_grads_args;
still_status sti_cuda_lora_grads(sti_dev *, const sti_cuda_lora_grads_args *,
                                 still_error *);

/* ---- bfloat16 ------------------------------------------------------------ */

/* Matrices [M, N_i] side by side. */
typedef struct sti_cuda_columns {
    int n;
    const float *x[STI_BACK_MAX];
    int N[STI_BACK_MAX];
} sti_cuda_columns;

/* y[M, ld] = the columns, rounded, then zeros; ld is a multiple of 8, y of 16 bytes. */
still_status sti_cuda_round_columns(sti_dev *, const sti_cuda_columns *, int M, int ld,
                                    sti_bf16 *y, still_error *);

/* Matrices [N_i, K]. */
typedef struct sti_cuda_stack {
    int n, K;
    const float *x[STI_BACK_MAX];
    int N[STI_BACK_MAX];
    sti_bf16 *y[STI_BACK_MAX]; /* multiples of 16 bytes */
} sti_cuda_stack;

/* y_i[N_i, K up to 8] = x_i, rounded, then zeros. */
still_status sti_cuda_round_rows(sti_dev *, const sti_cuda_stack *, still_error *);

/* Weights of equal K one below the other in bfloat16, [sum N up to 8, K up to 8], the
 * rest zeros (weight_bf16.c). May take scratch. */
still_status sti_cuda_bf16_rows(sti_dev *, const sti_weight *const *w, int n,
                                const sti_bf16 **out, still_error *);

/* d[M, 2 K] = gradients of gate and of up, side by side, of silu(gate + gate_bias) *
 * (up + up_bias), all [M, K], K a multiple of 8. */
typedef struct sti_cuda_gated_back_args {
    const uint16_t *gate, *up;        /* halves */
    const float *gate_bias, *up_bias; /* [K] or NULL */
    const sti_bf16 *dy;
    sti_bf16 *d;
    int M, K;
} sti_cuda_gated_back_args;
still_status sti_cuda_gated_back_half(sti_dev *, const sti_cuda_gated_back_args *,
                                      still_error *);

#ifdef __cplusplus
}
#endif

#endif
