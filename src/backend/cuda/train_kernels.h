/* train_kernels.h - launchers of the element-wise operators of training (train.cu); the
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

#ifdef __cplusplus
}
#endif

#endif
