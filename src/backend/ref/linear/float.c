/* float.c - Liger and SUPRA as the backend table has them: float arrays in and
 * out, the entries in double between them, on states in double. */
#include "backend/ref/float_ref.h"
#include "ops/linear.h"

typedef still_status (*entry64)(const sti_linear_args64 *, still_error *);

static still_status run(entry64 entry, const sti_linear_args *a, bool backward,
                        still_error *err)
{
    STI_TRY(sti_linear_check(&a->shape, a->T, a->window, err));
    const size_t T = (size_t)a->T, D = (size_t)a->shape.D;
    const size_t q = (size_t)a->shape.H * D, k = (size_t)a->shape.G * D;
    const sti_linear_grad none = {0}, *g = backward ? &a->grad : &none;
    float *y = backward ? NULL : a->y;
    sti_wide w = {0};
    const sti_linear_args64 wide = {
        .shape = a->shape,
        .T = a->T,
        .window = a->window,
        .in = {.q = sti_wide_copy(&w, a->in.q, T * q),
               .k = sti_wide_copy(&w, a->in.k, T * k),
               .v = sti_wide_copy(&w, a->in.v, T * k),
               .inv_freq = sti_wide_copy(&w, a->in.inv_freq, D / 2),
               .interleaved = a->in.interleaved,
               .map_q = sti_wide_copy(&w, a->in.map_q, q * q),
               .map_k = sti_wide_copy(&w, a->in.map_k, k * k),
               .bias_q = sti_wide_copy(&w, a->in.bias_q, q),
               .bias_k = sti_wide_copy(&w, a->in.bias_k, k)},
        .state = a->state,
        .y = sti_wide_zeros(&w, y, T * q),
        .dy = backward ? sti_wide_copy(&w, a->dy, T * q) : NULL,
        .grad = {.q = sti_wide_zeros(&w, g->q, T * q),
                 .k = sti_wide_zeros(&w, g->k, T * k),
                 .v = sti_wide_zeros(&w, g->v, T * k),
                 .map_q = sti_wide_copy(&w, g->map_q, q * q),
                 .map_k = sti_wide_copy(&w, g->map_k, k * k),
                 .bias_q = sti_wide_copy(&w, g->bias_q, q),
                 .bias_k = sti_wide_copy(&w, g->bias_k, k)},
    };
    still_status st =
        w.failed ? sti_fail_memory(err, "linear attention", T * q * sizeof(double))
                 : entry(&wide, err);
    if (st == STILL_OK) {
        sti_wide_back(y, wide.y, T * q);
        sti_wide_back(g->q, wide.grad.q, T * q);
        sti_wide_back(g->k, wide.grad.k, T * k);
        sti_wide_back(g->v, wide.grad.v, T * k);
        sti_wide_back(g->map_q, wide.grad.map_q, q * q);
        sti_wide_back(g->map_k, wide.grad.map_k, k * k);
        sti_wide_back(g->bias_q, wide.grad.bias_q, q);
        sti_wide_back(g->bias_k, wide.grad.bias_k, k);
    }
    sti_wide_free(&w);
    return st;
}

still_status sti_ref_linear_reserve(sti_dev *dev, const sti_linear_shape *shape,
                                    int window, int rows, still_error *err)
{
    (void)dev;
    return sti_linear_check(shape, rows, window, err);
}

still_status sti_ref_linear(sti_dev *dev, const sti_linear_args *a, int n,
                            still_error *err)
{
    (void)dev;
    for (int i = 0; i < n; i++)
        STI_TRY(run(a[i].window > 0 ? sti_ref_liger_forward : sti_ref_supra_forward,
                    &a[i], false, err));
    return STILL_OK;
}

still_status sti_ref_linear_backward(sti_dev *dev, const sti_linear_args *a, int n,
                                     still_error *err)
{
    (void)dev;
    for (int i = 0; i < n; i++)
        STI_TRY(run(a[i].window > 0 ? sti_ref_liger_backward : sti_ref_supra_backward,
                    &a[i], true, err));
    return STILL_OK;
}
