/* elementwise.h - the operators of training that work element by element or row by row,
 * for one instruction set: gradients of the norm and of the gated activation, the loss,
 * the optimizer. Equations in backend/ref/train.c. */
#ifndef STI_BACKEND_CPU_TRAIN_ELEMENTWISE_H
#define STI_BACKEND_CPU_TRAIN_ELEMENTWISE_H

#include "backend/cpu/cpu.h"

/* One row of logits, and what the loss computes of it. */
typedef struct sti_loss_row {
    float *x;       /* [V] logits, then their gradient */
    const float *t; /* [V] the teacher's, or NULL */
    int V, target;
    double weight, kd;
    double loss, kl; /* out */
} sti_loss_row;

typedef struct sti_train_kernels {
    /* One row of K: dx += gradient. */
    void (*rmsnorm_back)(const float *x, const float *g, const float *dy, float *dx,
                         int K, float eps);
    /* n elements. */
    void (*swiglu_back)(const float *gate, const float *up, const float *dy,
                        float *dgate, float *dup, int64_t n);
    void (*geglu_back)(const float *gate, const float *up, const float *dy,
                       float *dgate, float *dup, int64_t n);
    void (*loss)(sti_loss_row *row);
    /* Elements [lo, hi) of a. */
    void (*adam)(const sti_adam_args *a, size_t lo, size_t hi);
    double (*sum_squares)(const float *x, size_t n);
} sti_train_kernels;

#endif
