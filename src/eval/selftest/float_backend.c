/* float_backend.c - see float_backend.h. */
#include "eval/selftest/float_backend.h"

#include <stdlib.h>
#include <string.h>

/* Float arrays that stand for double ones: inputs, and results to be widened. */
typedef struct pairs {
    struct {
        float *narrow;
        double *wide; /* NULL: an input */
        size_t n;
    } at[40];
    int n;
    bool failed; /* no memory */
} pairs;

static float *pair(pairs *p, double *result, const double *input, size_t n)
{
    if ((!result && !input) || p->failed) return NULL;
    float *x = sti_alloc(n ? n : 1, sizeof *x);
    if (!x) {
        p->failed = true;
        return NULL;
    }
    for (size_t i = 0; input && i < n; i++) x[i] = (float)input[i];
    p->at[p->n].narrow = x;
    p->at[p->n].wide = result;
    p->at[p->n++].n = n;
    return x;
}

static float *in(pairs *p, const double *x, size_t n)
{
    return pair(p, NULL, x, n);
}

static float *out(pairs *p, double *x, size_t n)
{
    return pair(p, x, NULL, n);
}

/* Widens the results and frees everything. */
static void free_pairs(pairs *p)
{
    while (p->n-- > 0) {
        double *wide = p->at[p->n].wide;
        for (size_t i = 0; wide && i < p->at[p->n].n; i++)
            wide[i] = (double)p->at[p->n].narrow[i];
        free(p->at[p->n].narrow);
    }
}

static void widen(double *to, const float *from, size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = (double)from[i];
}

bool sti_float_asked(const sti_suite_run *r)
{
    return r->p->model->backend && strcmp(r->p->model->backend, "ref") != 0;
}

static still_status open_device(const sti_suite_run *r, const sti_backend **b,
                                sti_dev **dev, int H, int G, int D, still_error *err)
{
    *b = sti_backend_find(r->p->model->backend);
    if (!*b)
        return sti_fail(err, STILL_E_ARG, "backend '%s' is not in this build: %s",
                        r->p->model->backend, sti_backend_names());
    const sti_dev_params params = {.threads = r->p->model->threads,
                                   .isa = r->p->model->isa,
                                   .max_k = D,
                                   .heads = H,
                                   .kv_heads = G,
                                   .head_dim = D};
    return (*b)->dev_new(&params, dev, err);
}

/* ---- The hybrid operator ------------------------------------------------- */

static sti_hybrid_parallel_args narrow_hybrid(pairs *p,
                                              const sti_hybrid_parallel_args64 *a)
{
    const size_t T = (size_t)a->B * (size_t)a->T;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(a->set, &a->shape, T);
    sti_hybrid_parallel_args to = {.set = a->set,
                                   .shape = a->shape,
                                   .B = a->B,
                                   .T = a->T,
                                   .fold_chunk = a->fold_chunk,
                                   .y = out(p, a->y, n.q),
                                   .trace.score = out(p, a->trace.score, T * n.bias_k),
                                   .dy = in(p, a->dy, n.q)};
#define BOTH(x)                                                                        \
    to.in.x = in(p, a->in.x, n.x);                                                     \
    to.grad.x = out(p, a->grad.x, n.x);
    STI_HYBRID_ARRAYS(BOTH)
#undef BOTH
    return to;
}

static still_status run_hybrid(const sti_backend *b, sti_dev *dev,
                               const sti_hybrid_parallel_args *a, float *y,
                               double *state_s, double *state_z, still_error *err)
{
    const size_t S = (size_t)sti_hybrid_selection_heads(a->set, &a->shape);
    const size_t P = (size_t)sti_hybrid_features(a->set, &a->shape);
    sti_hybrid_state st;
    sti_carve c = {0};
    sti_hybrid_state_carve(&st, &c, a->set, &a->shape, a->T, sizeof(float),
                           sizeof(float));
    sti_block block;
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "hybrid state", c.used);
    c = (sti_carve){.base = block.p};
    sti_hybrid_state_carve(&st, &c, a->set, &a->shape, a->T, sizeof(float),
                           sizeof(float));
    const sti_hybrid_args session = {
        .set = a->set, .shape = a->shape, .T = a->T, .in = a->in, .state = &st, .y = y};
    still_status status = b->hybrid(dev, &session, 1, err);
    if (status == STILL_OK) {
        widen(state_s, st.lin_s, S * P * (size_t)a->shape.D);
        widen(state_z, st.lin_z, S * P);
        status = b->hybrid_parallel(dev, a, err);
    }
    sti_block_free(&block);
    return status == STILL_OK ? b->hybrid_backward(dev, a, err) : status;
}

still_status sti_float_hybrid(const sti_suite_run *r,
                              const sti_hybrid_parallel_args64 *a, double *y,
                              double *state_s, double *state_z, still_error *err)
{
    const sti_backend *b;
    sti_dev *dev;
    STI_TRY(open_device(r, &b, &dev, a->shape.H, a->shape.G, a->shape.D, err));
    pairs p = {0};
    const sti_hybrid_parallel_args x = narrow_hybrid(&p, a);
    const size_t n = (size_t)a->T * (size_t)a->shape.H * (size_t)a->shape.D;
    float *session_y = out(&p, y, n);
    still_status status =
        p.failed ? sti_fail_memory(err, "golden case", n * sizeof(float))
                 : run_hybrid(b, dev, &x, session_y, state_s, state_z, err);
    free_pairs(&p);
    b->dev_free(dev);
    return status;
}

still_status sti_float_route(const sti_suite_run *r,
                             const sti_hybrid_parallel_args64 *a, still_error *err)
{
    const sti_backend *b;
    sti_dev *dev;
    STI_TRY(open_device(r, &b, &dev, a->shape.H, a->shape.G, a->shape.D, err));
    pairs p = {0};
    const sti_hybrid_parallel_args x = narrow_hybrid(&p, a);
    still_status status = p.failed ? sti_fail_memory(err, "golden case", 0)
                                   : b->hybrid_route(dev, &x, err);
    free_pairs(&p);
    b->dev_free(dev);
    return status;
}

/* ---- Liger, SUPRA -------------------------------------------------------- */

static sti_linear_args narrow_linear(pairs *p, const sti_linear_args64 *a)
{
    const size_t T = (size_t)a->T, D = (size_t)a->shape.D;
    const size_t q = (size_t)a->shape.H * D, k = (size_t)a->shape.G * D;
    return (sti_linear_args){
        .shape = a->shape,
        .T = a->T,
        .window = a->window,
        .in = {.q = in(p, a->in.q, T * q),
               .k = in(p, a->in.k, T * k),
               .v = in(p, a->in.v, T * k),
               .inv_freq = in(p, a->in.inv_freq, D / 2),
               .interleaved = a->in.interleaved,
               .map_q = in(p, a->in.map_q, q * q),
               .map_k = in(p, a->in.map_k, k * k),
               .bias_q = in(p, a->in.bias_q, q),
               .bias_k = in(p, a->in.bias_k, k)},
        .y = out(p, a->y, T * q),
        .dy = in(p, a->dy, T * q),
        .grad = {.q = out(p, a->grad.q, T * q),
                 .k = out(p, a->grad.k, T * k),
                 .v = out(p, a->grad.v, T * k),
                 .map_q = out(p, a->grad.map_q, q * q),
                 .map_k = out(p, a->grad.map_k, k * k),
                 .bias_q = out(p, a->grad.bias_q, q),
                 .bias_k = out(p, a->grad.bias_k, k)},
    };
}

static still_status run_linear(const sti_backend *b, sti_dev *dev, sti_linear_args *a,
                               double *state_s, still_error *err)
{
    const size_t D = (size_t)a->shape.D;
    const size_t heads = (size_t)(a->window > 0 ? a->shape.G : a->shape.H);
    sti_linear_state st;
    sti_carve c = {0};
    sti_linear_state_carve(&st, &c, &a->shape, a->window, sizeof(float), sizeof(float));
    sti_block block;
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "linear state", c.used);
    c = (sti_carve){.base = block.p};
    sti_linear_state_carve(&st, &c, &a->shape, a->window, sizeof(float), sizeof(float));
    sti_linear_args with_state = *a;
    with_state.state = &st;
    still_status status = b->linear(dev, &with_state, 1, err);
    if (status == STILL_OK) widen(state_s, st.s, heads * D * D);
    sti_block_free(&block);
    return status == STILL_OK ? b->linear_backward(dev, a, 1, err) : status;
}

still_status sti_float_linear(const sti_suite_run *r, const sti_linear_args64 *a,
                              double *state_s, still_error *err)
{
    const sti_backend *b;
    sti_dev *dev;
    STI_TRY(open_device(r, &b, &dev, a->shape.H, a->shape.G, a->shape.D, err));
    pairs p = {0};
    sti_linear_args x = narrow_linear(&p, a);
    still_status status = p.failed ? sti_fail_memory(err, "golden case", 0)
                                   : run_linear(b, dev, &x, state_s, err);
    free_pairs(&p);
    b->dev_free(dev);
    return status;
}
