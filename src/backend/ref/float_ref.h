/* float_ref.h - arrays of the backend table, which are float, as the reference wants
 * them: double. One sti_wide per call owns all copies. */
#ifndef STI_BACKEND_REF_FLOAT_REF_H
#define STI_BACKEND_REF_FLOAT_REF_H

#include <stdlib.h>

#include "base/error.h"
#include "base/mem.h"
#include "ops/ops.h"

typedef struct sti_wide {
    double *held[32];
    int n;
    bool failed; /* some copy did not fit into memory */
} sti_wide;

/* n zeroed numbers; NULL where the caller wants none. */
static inline double *sti_wide_zeros(sti_wide *w, const float *wanted, size_t n)
{
    if (!wanted || w->failed) return NULL;
    double *x = sti_alloc(n ? n : 1, sizeof *x);
    if (x)
        w->held[w->n++] = x;
    else
        w->failed = true;
    return x;
}

/* A copy of n numbers; NULL of NULL. */
static inline double *sti_wide_copy(sti_wide *w, const float *x, size_t n)
{
    double *y = sti_wide_zeros(w, x, n);
    for (size_t i = 0; y && i < n; i++) y[i] = x[i];
    return y;
}

/* And back: to [n] = from [n], unless nothing was wanted. */
static inline void sti_wide_back(float *to, const double *from, size_t n)
{
    for (size_t i = 0; to && from && i < n; i++) to[i] = (float)from[i];
}

static inline void sti_wide_free(sti_wide *w)
{
    while (w->n > 0) free(w->held[--w->n]);
}

/* Entries of the table: hybrid/float.c, linear/float.c. */
still_status sti_ref_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                    const sti_hybrid_shape *shape, int rows,
                                    still_error *err);
still_status sti_ref_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                            still_error *err);
still_status sti_ref_hybrid_route_float(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                        still_error *err);
still_status sti_ref_hybrid_parallel_float(sti_dev *dev,
                                           const sti_hybrid_parallel_args *a,
                                           still_error *err);
still_status sti_ref_hybrid_backward_float(sti_dev *dev,
                                           const sti_hybrid_parallel_args *a,
                                           still_error *err);
still_status sti_ref_hybrid_match_float(sti_dev *dev, const sti_hybrid_match_args *a,
                                        still_error *err);
still_status sti_ref_linear_reserve(sti_dev *dev, const sti_linear_shape *shape,
                                    int window, int rows, still_error *err);
still_status sti_ref_linear(sti_dev *dev, const sti_linear_args *a, int n,
                            still_error *err);
still_status sti_ref_linear_backward(sti_dev *dev, const sti_linear_args *a, int n,
                                     still_error *err);

#endif
