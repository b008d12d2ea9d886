/* linear.h - what Liger and SUPRA share on the cpu backend. Equations in
 * docs/methods.md; the loops that specify them are in backend/ref/linear.
 *
 * Both go over tokens with the state as a panel: one token reads and writes D x D
 * numbers that stay in L1 or L2. That costs far less than the projections around it,
 * and needs no quotient of decays. */
#ifndef STI_BACKEND_CPU_LINEAR_LINEAR_H
#define STI_BACKEND_CPU_LINEAR_LINEAR_H

#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/panel/panel.h"

typedef struct sti_lin {
    const sti_linear_args *a; /* [n] */
    int n;
    const sti_panel_kernels *f;
    const sti_row_kernels *rows;
    int H, G, D, Dp, group, workers;
} sti_lin;

/* Scratch of the forward pass for sessions of at most `rows` tokens each. */
size_t sti_cpu_liger_scratch(const sti_lin *l);
size_t sti_cpu_supra_scratch(const sti_lin *l, int rows);
/* Forward, in scratch that is there. */
void sti_cpu_liger(sti_dev *dev, const sti_lin *l);
void sti_cpu_supra(sti_dev *dev, const sti_lin *l);

still_status sti_cpu_liger_backward(sti_dev *dev, const sti_lin *l, still_error *err);
still_status sti_cpu_supra_backward(sti_dev *dev, const sti_lin *l, still_error *err);

/* RoPE: rotates x [D] to position `pos`; -pos rotates it back. */
static inline void sti_lin_rotate(const sti_lin *l, float *x, int64_t pos)
{
    l->rows->rope(x, (int)pos, l->a->in.inv_freq, 1, l->D, l->a->in.interleaved);
}

#endif
