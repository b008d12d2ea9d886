/* ref.h - the device of the reference backend, and the entries of its table that
 * training alone needs (train.c). */
#ifndef STI_BACKEND_REF_REF_H
#define STI_BACKEND_REF_REF_H

#include "base/pool.h"
#include "ops/ops.h"

struct sti_dev {
    sti_pool *pool;
    sti_dev_params p;
    float *row;      /* [threads, max_k]: a dequantized weight row for each worker */
    double *weights; /* [threads, capacity]: attention weights of one query */
    size_t capacity; /* longest cache seen so far */
};

still_status sti_ref_matmul_back(sti_dev *d, const sti_matmul_back_args *a,
                                 still_error *err);
still_status sti_ref_matmul_grad(sti_dev *d, const sti_matmul_grad_args *all, int n,
                                 still_error *err);
still_status sti_ref_rmsnorm_back(sti_dev *d, const sti_rmsnorm_back_args *a,
                                  still_error *err);
/* z of an activation x / (1 + e^-z). */
static inline double sti_ref_slope(sti_activation act, double x)
{
    return act == STI_SILU ? x : STI_GELU_SLOPE * (x + STI_GELU_CUBE * x * x * x);
}

still_status sti_ref_swiglu_back(sti_dev *d, const sti_swiglu_back_args *a,
                                 still_error *err);
still_status sti_ref_loss(sti_dev *d, const sti_loss_args *a, still_error *err);
still_status sti_ref_adam(sti_dev *d, const sti_adam_args *all, int n,
                          still_error *err);
still_status sti_ref_sum_squares(sti_dev *d, const float *x, const sti_span *span,
                                 int n, double *out, still_error *err);

#endif
