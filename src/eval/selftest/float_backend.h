/* float_backend.h - golden cases, which are double, run by a backend whose arrays are
 * float: inputs are narrowed, results widened into the arrays of the double arguments.
 * The state that such a call needs is made for it and handed back in double. */
#ifndef STI_EVAL_SELFTEST_FLOAT_BACKEND_H
#define STI_EVAL_SELFTEST_FLOAT_BACKEND_H

#include "eval/selftest/selftest.h"
#include "ops/ops.h"

/* Whether the suite's backend computes in float (the reference does not). */
bool sti_float_asked(const sti_suite_run *r);

/* Both forms of a method of the hybrid operator: y from a session of the whole
 * sequence, a->y and a->grad from the parallel form. state_s, state_z: [S,P,D], [S,P].
 */
still_status sti_float_hybrid(const sti_suite_run *r,
                              const sti_hybrid_parallel_args64 *a, double *y,
                              double *state_s, double *state_z, still_error *err);
/* Scores of the route entry, into a->trace.score. */
still_status sti_float_route(const sti_suite_run *r,
                             const sti_hybrid_parallel_args64 *a, still_error *err);
/* Liger, SUPRA: y, gradients, and state_s [G or H, D, D]. */
still_status sti_float_linear(const sti_suite_run *r, const sti_linear_args64 *a,
                              double *state_s, still_error *err);

#endif
