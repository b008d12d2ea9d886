/* hybrid_case.h - a golden case of the hybrid operator: settings, inputs and what must
 * come out, token-major and per selection head. Memory belongs to the sti_golden. */
#ifndef STI_EVAL_SELFTEST_HYBRID_CASE_H
#define STI_EVAL_SELFTEST_HYBRID_CASE_H

#include "eval/selftest/golden.h"
#include "ops/hybrid.h"

typedef struct sti_hybrid_case {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int T, S, P;
    sti_hybrid_in64 in;
    const double *dy, *y;             /* [T,H,D] */
    const double *score_head, *score; /* [T,H], [T,S] */
    int32_t *fold;                    /* [T,S] */
    const int32_t *salient;           /* [T,S] */
    const double *state_s, *state_z;  /* [S,P,D], [S,P] */
    sti_hybrid_grad64 grad;           /* those the file has; NULL elsewhere */
} sti_hybrid_case;

/* A file of golden/operator. */
still_status sti_hybrid_case_read_operator(sti_golden *g, sti_hybrid_case *c,
                                           still_error *err);
/* A file of golden/baselines for a method without window (hedgehog, t2r): no scores,
 * fold chunks (all -1) or salient counts. */
still_status sti_hybrid_case_read_linear(sti_golden *g, const char *method,
                                         sti_hybrid_case *c, still_error *err);

/* Room for the gradients the case has. */
void sti_hybrid_case_take_grad(sti_golden *g, const sti_hybrid_case *c,
                               sti_hybrid_grad64 *grad);
/* A check for each of them; returns how many (at most 10). */
int sti_hybrid_case_check_grad(const sti_hybrid_case *c, const sti_hybrid_grad64 *got,
                               double limit, still_check *check);

#endif
