/* linear.h - what the reference's Liger and SUPRA share, in double. Their entries
 * are declared in ops/linear.h. */
#ifndef STI_BACKEND_REF_LINEAR_LINEAR_H
#define STI_BACKEND_REF_LINEAR_LINEAR_H

#include <math.h>

#include "ops/linear.h"

/* Turns pair i of x [D] by turn * position * inv_freq[i]; turn -1 is the transpose,
 * which takes gradients back. */
static inline void sti_ref_rotate(double *x, int D, int64_t position, double turn,
                                  const sti_linear_in64 *in)
{
    for (int i = 0; i < D / 2; i++) {
        const int a = in->interleaved ? 2 * i : i,
                  b = in->interleaved ? a + 1 : i + D / 2;
        const double angle = turn * (double)position * in->inv_freq[i];
        const double xa = x[a], xb = x[b];
        x[a] = xa * cos(angle) - xb * sin(angle);
        x[b] = xb * cos(angle) + xa * sin(angle);
    }
}

#endif
