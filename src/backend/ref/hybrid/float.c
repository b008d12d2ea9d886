/* float.c - the hybrid operator as the backend table has it: float arrays in
 * and out, the entries in double between them. States are double (state_kv and
 * state_real of the table are 8), so a session of the reference rounds its inputs and
 * outputs and nothing else. */
#include "backend/ref/float_ref.h"
#include "backend/ref/hybrid/hybrid.h"

static sti_hybrid_in64 widen_in(sti_wide *w, const sti_hybrid_in *in,
                                const sti_hybrid_sizes *n, int D)
{
    sti_hybrid_in64 to = {.q_raw = sti_wide_copy(w, in->q_raw, n->q),
                          .inv_freq = sti_wide_copy(w, in->inv_freq, (size_t)D / 2),
                          .interleaved = in->interleaved};
#define COPY(x) to.x = sti_wide_copy(w, in->x, n->x);
    STI_HYBRID_ARRAYS(COPY)
#undef COPY
    return to;
}

/* Copies: without a window nothing is written to them. */
static sti_hybrid_trace64 widen_trace(sti_wide *w, const sti_hybrid_trace *t,
                                      size_t heads, size_t selectors)
{
    return (sti_hybrid_trace64){.score_head = sti_wide_copy(w, t->score_head, heads),
                                .score = sti_wide_copy(w, t->score, selectors),
                                .salient = t->salient,
                                .fold_chunk = t->fold_chunk};
}

static void trace_back(const sti_hybrid_trace *to, const sti_hybrid_trace64 *from,
                       size_t heads, size_t selectors)
{
    sti_wide_back(to->score_head, from->score_head, heads);
    sti_wide_back(to->score, from->score, selectors);
}

/* ---- Recurrent form ------------------------------------------------------ */

still_status sti_ref_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                    const sti_hybrid_shape *shape, int rows,
                                    still_error *err)
{
    (void)dev;
    (void)rows;
    return sti_hybrid_check(set, shape, err);
}

static still_status one_session(const sti_hybrid_args *a, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    const size_t T = (size_t)a->T;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(a->set, &a->shape, T);
    sti_wide w = {0};
    const sti_hybrid_args64 wide = {
        .set = a->set,
        .shape = a->shape,
        .T = a->T,
        .in = widen_in(&w, &a->in, &n, a->shape.D),
        .state = a->state,
        .y = sti_wide_zeros(&w, a->y, n.q),
        .trace = widen_trace(&w, &a->trace, T * n.alpha, T * n.bias_k)};
    still_status st =
        w.failed ? sti_fail_memory(err, "hybrid attention", n.q * sizeof(double))
                 : sti_ref_hybrid_forward(&wide, err);
    if (st == STILL_OK) {
        sti_wide_back(a->y, wide.y, n.q);
        trace_back(&a->trace, &wide.trace, T * n.alpha, T * n.bias_k);
    }
    sti_wide_free(&w);
    return st;
}

still_status sti_ref_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                            still_error *err)
{
    (void)dev;
    for (int i = 0; i < n; i++) STI_TRY(one_session(&a[i], err));
    return STILL_OK;
}

/* ---- Parallel form ------------------------------------------------------- */

/* Gradients of parameters are added to, so they go in as well as out. */
static sti_hybrid_grad64 widen_grad(sti_wide *w, const sti_hybrid_grad *g,
                                    const sti_hybrid_sizes *n)
{
    sti_hybrid_grad64 to;
#define ZEROS(x) to.x = sti_wide_zeros(w, g->x, n->x);
#define COPY(x) to.x = sti_wide_copy(w, g->x, n->x);
    STI_HYBRID_TOKEN_ARRAYS(ZEROS)
    STI_HYBRID_PARAMETERS(COPY)
#undef ZEROS
#undef COPY
    return to;
}

static void grad_back(const sti_hybrid_grad *to, const sti_hybrid_grad64 *from,
                      const sti_hybrid_sizes *n)
{
#define BACK(x) sti_wide_back(to->x, from->x, n->x);
    STI_HYBRID_ARRAYS(BACK)
#undef BACK
}

typedef still_status (*entry64)(const sti_hybrid_parallel_args64 *, still_error *);

/* Matching writes the gradients of parameters alone. */
static sti_hybrid_grad only_parameters(sti_hybrid_grad g)
{
    g.q = g.k = g.v = g.gate_logit = NULL;
    return g;
}

/* Route, forward, backward and match differ in what they read and write; what one does
 * not write comes back as it went in, because nothing of it is asked for. match: runs
 * instead of entry. */
static still_status run_parallel(entry64 entry, const sti_hybrid_match_args *match,
                                 const sti_hybrid_parallel_args *a, bool output,
                                 bool backward, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    const size_t tokens = (size_t)a->B * (size_t)a->T;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(a->set, &a->shape, tokens);
    const size_t heads = tokens * n.alpha, selectors = tokens * n.bias_k;
    const sti_hybrid_grad none = {0}, parameters = only_parameters(a->grad),
                          *grad = match      ? &parameters
                                  : backward ? &a->grad
                                             : &none;
    float *y = output ? a->y : NULL, *max_out = output ? a->max_out : NULL;
    const sti_hybrid_trace trace = match ? (sti_hybrid_trace){0}
                                   : output || backward
                                       ? (sti_hybrid_trace){.salient = a->trace.salient}
                                       : a->trace;
    sti_wide w = {0};
    sti_hybrid_parallel_args64 wide = {
        .set = a->set,
        .shape = a->shape,
        .B = a->B,
        .T = a->T,
        .in = widen_in(&w, &a->in, &n, a->shape.D),
        .fold_chunk = a->fold_chunk,
        .max_in = sti_wide_copy(&w, a->max_in, heads),
        .max_out = sti_wide_zeros(&w, max_out, heads),
        .y = sti_wide_zeros(&w, y, n.q),
        .trace = widen_trace(&w, &trace, heads, selectors),
        .dy = backward ? sti_wide_copy(&w, a->dy, n.q) : NULL,
        .grad = widen_grad(&w, grad, &n)};
    still_status st =
        w.failed ? sti_fail_memory(err, "hybrid attention", n.q * sizeof(double))
        : match  ? sti_ref_hybrid_match(&wide, (double)match->scale, match->loss, err)
                 : entry(&wide, err);
    if (st == STILL_OK) {
        sti_wide_back(y, wide.y, n.q);
        sti_wide_back(max_out, wide.max_out, heads);
        trace_back(&trace, &wide.trace, heads, selectors);
        grad_back(grad, &wide.grad, &n);
    }
    sti_wide_free(&w);
    return st;
}

still_status sti_ref_hybrid_route_float(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                        still_error *err)
{
    (void)dev;
    return run_parallel(sti_ref_hybrid_route, NULL, a, false, false, err);
}

still_status sti_ref_hybrid_parallel_float(sti_dev *dev,
                                           const sti_hybrid_parallel_args *a,
                                           still_error *err)
{
    (void)dev;
    return run_parallel(sti_ref_hybrid_parallel, NULL, a, true, false, err);
}

still_status sti_ref_hybrid_backward_float(sti_dev *dev,
                                           const sti_hybrid_parallel_args *a,
                                           still_error *err)
{
    (void)dev;
    return run_parallel(sti_ref_hybrid_backward, NULL, a, false, true, err);
}

still_status sti_ref_hybrid_match_float(sti_dev *dev, const sti_hybrid_match_args *a,
                                        still_error *err)
{
    (void)dev;
    return run_parallel(NULL, a, a->p, false, false, err);
}
