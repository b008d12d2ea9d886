/* train_kernels.h - launchers of the operators of training (train.cu, thin.cu); the
 * entries in train.c move what the program gives and wants. */
#ifndef STI_BACKEND_CUDA_TRAIN_KERNELS_H
#define STI_BACKEND_CUDA_TRAIN_KERNELS_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

still_status sti_cuda_norm_back(sti_dev *, const sti_rmsnorm_back_args *,
                                still_error *);
still_status sti_cuda_gated_back(sti_dev *, const sti_swiglu_back_args *,
                                 still_error *);
/* Everything on the device. sums [M, 2] receives loss and kl of the rows. */
still_status sti_cuda_loss_rows(sti_dev *, const sti_loss_args *, const int32_t *target,
                                const float *weight, double *sums, still_error *);
still_status sti_cuda_adam_step(sti_dev *, const sti_adam_args *, still_error *);
/* part[i] = sum of squares of piece i of x, for n pieces. */
still_status sti_cuda_squares(sti_dev *, const float *x, const sti_span *piece, int n,
                              double *part, still_error *);
/* part [2, STI_CUDA_PARTS]: sums of (y - o)^2, then of o^2. */
enum { STI_CUDA_PARTS = 528 };
still_status sti_cuda_differ(sti_dev *, const sti_compare_args *, double *part,
                             still_error *);
still_status sti_cuda_drop(sti_dev *, const sti_dropout_args *, still_error *);
still_status sti_cuda_times(sti_dev *, float *x, size_t n, float by, still_error *);
/* y[i] = i. */
still_status sti_cuda_count(sti_dev *, int32_t *y, int n, still_error *);
/* y += sum of `parts` arrays of n numbers, which follow each other, in order. */
still_status sti_cuda_add_parts(sti_dev *, const float *part, int parts, size_t n,
                                float *y, still_error *);

/* ---- Low ranks (thin.cu) --------------------------------------------------------
 */

/* y_i[M, N_i] = x[M, K] W_i^T in half, W in float [N_i, K]. */
typedef struct sti_cuda_thin {
    const float *x;
    int M, K, n;
    const float *w[STI_MATMUL_MAX];
    float *y[STI_MATMUL_MAX];
    int N[STI_MATMUL_MAX];
} sti_cuda_thin;

/* Whether it can be computed here: eight columns or a few of eight. */
bool sti_cuda_thin_fits(const sti_cuda_thin *);
still_status sti_cuda_thin_rows(sti_dev *, const sti_cuda_thin *, still_error *);

/* y[M, N] = [y +] sum_i x_i[M, R_i] W_i in float. */
typedef struct sti_cuda_up {
    const float *x[STI_MATMUL_MAX], *w[STI_MATMUL_MAX];
    int R[STI_MATMUL_MAX], n, M, N;
    bool turned; /* W_i is [N, R_i], else [R_i, N] */
    bool accumulate;
    float *y;
} sti_cuda_up;

bool sti_cuda_up_fits(const sti_cuda_up *);
still_status sti_cuda_up_rows(sti_dev *, const sti_cuda_up *, still_error *);

/* ---- bfloat16 ----------------------------------------------------------------------
 */

typedef uint16_t sti_bf16; /* the bits of one: C has no name for it */

/* Matrices [M, N_i] side by side. */
typedef struct sti_cuda_columns {
    int n;
    const float *x[STI_MATMUL_MAX];
    int N[STI_MATMUL_MAX];
} sti_cuda_columns;

/* y[M, ld] = the columns, rounded, then zeros; ld is a multiple of 8, y of 16 bytes. */
still_status sti_cuda_to_bf16(sti_dev *, const sti_cuda_columns *, int M, int ld,
                              sti_bf16 *y, still_error *);

#ifdef __cplusplus
}
#endif

#endif
