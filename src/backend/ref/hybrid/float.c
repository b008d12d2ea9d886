/* float.c - the hybrid operator as the backend table has it: float arrays in
 * and out, the entries in double between them. States are double (state_kv and
 * state_real of the table are 8), so a session of the reference rounds its inputs and
 * outputs and nothing else. */
#include "backend/ref/float_ref.h"
#include "backend/ref/hybrid/hybrid.h"

/* Elements of each array for `tokens` tokens. */
typedef struct sizes {
    size_t q, k, heads, selectors, map_q, map_k, freq;
} sizes;

static sizes sizes_of(const sti_hybrid_settings *set, const sti_hybrid_shape *shape)
{
    const size_t H = (size_t)shape->H, D = (size_t)shape->D, F = (size_t)shape->F;
    const size_t S = (size_t)sti_hybrid_selection_heads(set, shape);
    return (sizes){.q = H * D,
                   .k = (size_t)shape->G * D,
                   .heads = H,
                   .selectors = S,
                   .map_q = H * D * F,
                   .map_k = S * D * F,
                   .freq = D / 2};
}

static sti_hybrid_in64 widen_in(sti_wide *w, const sti_hybrid_in *in, const sizes *n,
                                size_t tokens)
{
    return (sti_hybrid_in64){
        .q = sti_wide_copy(w, in->q, tokens * n->q),
        .k = sti_wide_copy(w, in->k, tokens * n->k),
        .v = sti_wide_copy(w, in->v, tokens * n->k),
        .gate_logit = sti_wide_copy(w, in->gate_logit, tokens * n->q),
        .alpha = sti_wide_copy(w, in->alpha, n->heads),
        .window_logit = sti_wide_copy(w, in->window_logit, n->heads),
        .map_q = sti_wide_copy(w, in->map_q, n->map_q),
        .map_k = sti_wide_copy(w, in->map_k, n->map_k),
        .bias_q = sti_wide_copy(w, in->bias_q, n->heads),
        .bias_k = sti_wide_copy(w, in->bias_k, n->selectors),
        .q_raw = sti_wide_copy(w, in->q_raw, tokens * n->q),
        .inv_freq = sti_wide_copy(w, in->inv_freq, n->freq),
        .interleaved = in->interleaved};
}

/* Copies: without a window nothing is written to them. */
static sti_hybrid_trace64 widen_trace(sti_wide *w, const sti_hybrid_trace *t,
                                      const sizes *n, size_t tokens)
{
    return (sti_hybrid_trace64){
        .score_head = sti_wide_copy(w, t->score_head, tokens * n->heads),
        .score = sti_wide_copy(w, t->score, tokens * n->selectors),
        .salient = t->salient,
        .fold_chunk = t->fold_chunk};
}

static void trace_back(const sti_hybrid_trace *to, const sti_hybrid_trace64 *from,
                       const sizes *n, size_t tokens)
{
    sti_wide_back(to->score_head, from->score_head, tokens * n->heads);
    sti_wide_back(to->score, from->score, tokens * n->selectors);
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
    const sizes n = sizes_of(a->set, &a->shape);
    const size_t T = (size_t)a->T;
    sti_wide w = {0};
    const sti_hybrid_args64 wide = {.set = a->set,
                                    .shape = a->shape,
                                    .T = a->T,
                                    .in = widen_in(&w, &a->in, &n, T),
                                    .state = a->state,
                                    .y = sti_wide_zeros(&w, a->y, T * n.q),
                                    .trace = widen_trace(&w, &a->trace, &n, T)};
    still_status st =
        w.failed ? sti_fail_memory(err, "hybrid attention", T * n.q * sizeof(double))
                 : sti_ref_hybrid_forward(&wide, err);
    if (st == STILL_OK) {
        sti_wide_back(a->y, wide.y, T * n.q);
        trace_back(&a->trace, &wide.trace, &n, T);
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
                                    const sizes *n, size_t tokens)
{
    return (sti_hybrid_grad64){
        .q = sti_wide_zeros(w, g->q, tokens * n->q),
        .k = sti_wide_zeros(w, g->k, tokens * n->k),
        .v = sti_wide_zeros(w, g->v, tokens * n->k),
        .gate_logit = sti_wide_zeros(w, g->gate_logit, tokens * n->q),
        .alpha = sti_wide_copy(w, g->alpha, n->heads),
        .window_logit = sti_wide_copy(w, g->window_logit, n->heads),
        .map_q = sti_wide_copy(w, g->map_q, n->map_q),
        .map_k = sti_wide_copy(w, g->map_k, n->map_k),
        .bias_q = sti_wide_copy(w, g->bias_q, n->heads),
        .bias_k = sti_wide_copy(w, g->bias_k, n->selectors)};
}

static void grad_back(const sti_hybrid_grad *to, const sti_hybrid_grad64 *from,
                      const sizes *n, size_t tokens)
{
    sti_wide_back(to->q, from->q, tokens * n->q);
    sti_wide_back(to->k, from->k, tokens * n->k);
    sti_wide_back(to->v, from->v, tokens * n->k);
    sti_wide_back(to->gate_logit, from->gate_logit, tokens * n->q);
    sti_wide_back(to->alpha, from->alpha, n->heads);
    sti_wide_back(to->window_logit, from->window_logit, n->heads);
    sti_wide_back(to->map_q, from->map_q, n->map_q);
    sti_wide_back(to->map_k, from->map_k, n->map_k);
    sti_wide_back(to->bias_q, from->bias_q, n->heads);
    sti_wide_back(to->bias_k, from->bias_k, n->selectors);
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
    const sizes n = sizes_of(a->set, &a->shape);
    const size_t tokens = (size_t)a->B * (size_t)a->T;
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
        .in = widen_in(&w, &a->in, &n, tokens),
        .fold_chunk = a->fold_chunk,
        .max_in = sti_wide_copy(&w, a->max_in, tokens * n.heads),
        .max_out = sti_wide_zeros(&w, max_out, tokens * n.heads),
        .y = sti_wide_zeros(&w, y, tokens * n.q),
        .trace = widen_trace(&w, &trace, &n, tokens),
        .dy = backward ? sti_wide_copy(&w, a->dy, tokens * n.q) : NULL,
        .grad = widen_grad(&w, grad, &n, tokens)};
    still_status st =
        w.failed
            ? sti_fail_memory(err, "hybrid attention", tokens * n.q * sizeof(double))
        : match ? sti_ref_hybrid_match(&wide, (double)match->scale, match->loss, err)
                : entry(&wide, err);
    if (st == STILL_OK) {
        sti_wide_back(y, wide.y, tokens * n.q);
        sti_wide_back(max_out, wide.max_out, tokens * n.heads);
        trace_back(&trace, &wide.trace, &n, tokens);
        grad_back(grad, &wide.grad, &n, tokens);
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
