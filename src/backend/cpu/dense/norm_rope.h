/* norm_rope.h - the operators that work on rows of activations, for one instruction
 * set: root mean square norm, rotary positions, gated activation, log-probabilities. */
#ifndef STI_BACKEND_CPU_DENSE_NORM_ROPE_H
#define STI_BACKEND_CPU_DENSE_NORM_ROPE_H

#include "backend/cpu/cpu.h"

typedef struct sti_row_kernels {
    /* One row of K: y = x / sqrt(mean(x^2) + eps) * g. */
    void (*rmsnorm)(const float *x, const float *g, float *y, int K, float eps);
    /* y += that. */
    void (*rmsnorm_add)(const float *x, const float *g, float *y, int K, float eps);
    /* n elements: y = act(x) * up, with silu and with GELU. */
    void (*swiglu)(const float *x, const float *up, float *y, int64_t n);
    void (*geglu)(const float *x, const float *up, float *y, int64_t n);
    /* One row of [heads, D]; see sti_rope_args. -pos rotates back. */
    void (*rope)(float *x, int pos, const float *inv_freq, int heads, int D,
                 bool interleaved);
    /* Largest of n numbers, and the sum of e^(x - max). */
    double (*sum_exp)(const float *x, int n, float *max);
} sti_row_kernels;

typedef void (*sti_gate_fn)(const float *x, const float *up, float *y, int64_t n);
static inline sti_gate_fn sti_gate_of(const sti_row_kernels *f, sti_activation act)
{
    return act == STI_GELU_TANH ? f->geglu : f->swiglu;
}

#endif
