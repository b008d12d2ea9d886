/* selftest_operator.c - golden cases of the hybrid operator.
 *
 * A case is run in both forms: recurrent over the whole sequence, and parallel with the
 * golden routing, which also gives the gradients. What a backend computes is an engine:
 * it fills `results` in double, whatever it computes in. The reference must agree to
 * rounding of double, routing included. A float engine may order two tokens either way
 * if their scores differ by less than its rounding; where it did, its recurrent form
 * saw other tokens than the golden one and is not compared. */
#include <math.h>
#include <string.h>

#include "eval/golden.h"
#include "eval/hybrid_case.h"
#include "ops/ops.h"

typedef struct results {
    double *y, *y_parallel;        /* [T,H,D] */
    double *score_head, *score;    /* [T,H], [T,S] */
    int32_t *fold, *fold_parallel; /* [T,S]: recurrent, and from the route entry */
    int32_t *salient;              /* [T,S] */
    double *state_s, *state_z;     /* [S,P,D], [S,P] */
    sti_hybrid_grad64 grad;
} results;

typedef struct engine {
    const char *backend;
    double limit; /* relative error of every tensor */
    double tie;   /* scores closer than this may be ordered either way */
    still_status (*run)(const sti_suite_run *suite, const sti_hybrid_case *c,
                        results *r, still_error *err);
} engine;

/* ---- The reference ------------------------------------------------------------------
 */

static still_status ref_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                            results *r, still_error *err)
{
    (void)suite;
    const size_t S = (size_t)c->S, P = (size_t)c->P, D = (size_t)c->shape.D;
    sti_carve carve = {0};
    sti_hybrid_state st;
    sti_hybrid_state_carve(&st, &carve, &c->set, &c->shape, c->T, sizeof(double),
                           sizeof(double));
    sti_block block;
    if (!sti_block_new(&block, carve.used))
        return sti_fail_memory(err, "hybrid state", carve.used);
    carve = (sti_carve){.base = block.p};
    sti_hybrid_state_carve(&st, &carve, &c->set, &c->shape, c->T, sizeof(double),
                           sizeof(double));
    still_status status = sti_ref_hybrid_forward(
        &(sti_hybrid_args64){.set = &c->set,
                             .shape = c->shape,
                             .T = c->T,
                             .in = c->in,
                             .state = &st,
                             .y = r->y,
                             .trace = {.score_head = r->score_head,
                                       .score = r->score,
                                       .salient = r->salient,
                                       .fold_chunk = r->fold}},
        err);
    memcpy(r->state_s, st.lin_s, S * P * D * sizeof(double));
    memcpy(r->state_z, st.lin_z, S * P * sizeof(double));
    sti_block_free(&block);

    sti_hybrid_parallel_args64 a = {.set = &c->set,
                                    .shape = c->shape,
                                    .B = 1,
                                    .T = c->T,
                                    .in = c->in,
                                    .fold_chunk = r->fold_parallel,
                                    .y = r->y_parallel,
                                    .dy = c->dy,
                                    .grad = r->grad};
    if (status == STILL_OK) status = sti_ref_hybrid_route(&a, err);
    a.fold_chunk = c->fold;
    if (status == STILL_OK) status = sti_ref_hybrid_parallel(&a, err);
    if (status == STILL_OK) status = sti_ref_hybrid_backward(&a, err);
    return status;
}

/* ---- Backends in float
 * -----------------------------------------------------------------
 */

static float *take(sti_carve *c, const void *wanted, size_t n)
{
    return wanted ? sti_carve_take(c, n, sizeof(float)) : NULL;
}

static float *narrow(sti_carve *c, const double *x, size_t n)
{
    float *y = take(c, x, n);
    for (size_t i = 0; y && i < n; i++) y[i] = (float)x[i];
    return y;
}

static void widen(double *to, const float *from, size_t n)
{
    for (size_t i = 0; to && i < n; i++) to[i] = from[i];
}

/* A case as a backend sees it. With c->base NULL it only counts. */
typedef struct float_case {
    sti_hybrid_in in;
    sti_hybrid_state st;
    sti_hybrid_grad grad;
    float *dy, *y, *y_parallel, *score_head, *score;
} float_case;

static void lay_out(float_case *f, sti_carve *at, const sti_hybrid_case *c,
                    const results *r)
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, map = D * (size_t)c->shape.F;
    const size_t q = T * H * D, k = T * (size_t)c->shape.G * D;
    const sti_hybrid_in64 *in = &c->in;
    const sti_hybrid_grad64 *g = &r->grad;
    *f = (float_case){
        .in = {.q = narrow(at, in->q, q),
               .k = narrow(at, in->k, k),
               .v = narrow(at, in->v, k),
               .gate_logit = narrow(at, in->gate_logit, q),
               .alpha = narrow(at, in->alpha, H),
               .window_logit = narrow(at, in->window_logit, H),
               .map_q = narrow(at, in->map_q, H * map),
               .map_k = narrow(at, in->map_k, S * map),
               .bias_q = narrow(at, in->bias_q, H),
               .bias_k = narrow(at, in->bias_k, S)},
        .grad = {.q = take(at, g->q, q),
                 .k = take(at, g->k, k),
                 .v = take(at, g->v, k),
                 .gate_logit = take(at, g->gate_logit, q),
                 .alpha = take(at, g->alpha, H),
                 .window_logit = take(at, g->window_logit, H),
                 .map_q = take(at, g->map_q, H * map),
                 .map_k = take(at, g->map_k, S * map),
                 .bias_q = take(at, g->bias_q, H),
                 .bias_k = take(at, g->bias_k, S)},
        .dy = narrow(at, c->dy, q),
        .y = take(at, r->y, q),
        .y_parallel = take(at, r->y_parallel, q),
        .score_head = take(at, r->score_head, T * H),
        .score = take(at, r->score, T * S),
    };
    sti_hybrid_state_carve(&f->st, at, &c->set, &c->shape, c->T, sizeof(float),
                           sizeof(float));
}

static void widen_results(const float_case *f, const sti_hybrid_case *c, results *r)
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, P = (size_t)c->P;
    const size_t map = D * (size_t)c->shape.F, q = T * H * D;
    const size_t k = T * (size_t)c->shape.G * D;
    widen(r->y, f->y, q);
    widen(r->y_parallel, f->y_parallel, q);
    widen(r->score_head, f->score_head, T * H);
    widen(r->score, f->score, T * S);
    widen(r->state_s, f->st.lin_s, S * P * D);
    widen(r->state_z, f->st.lin_z, S * P);
    widen(r->grad.q, f->grad.q, q);
    widen(r->grad.k, f->grad.k, k);
    widen(r->grad.v, f->grad.v, k);
    widen(r->grad.gate_logit, f->grad.gate_logit, q);
    widen(r->grad.alpha, f->grad.alpha, H);
    widen(r->grad.window_logit, f->grad.window_logit, H);
    widen(r->grad.map_q, f->grad.map_q, H * map);
    widen(r->grad.map_k, f->grad.map_k, S * map);
    widen(r->grad.bias_q, f->grad.bias_q, H);
    widen(r->grad.bias_k, f->grad.bias_k, S);
}

static still_status run_forms(const sti_backend *b, sti_dev *dev, float_case *f,
                              const sti_hybrid_case *c, results *r, still_error *err)
{
    const sti_hybrid_args session = {.set = &c->set,
                                     .shape = c->shape,
                                     .T = c->T,
                                     .in = f->in,
                                     .state = &f->st,
                                     .y = f->y,
                                     .trace = {.score_head = f->score_head,
                                               .score = f->score,
                                               .salient = r->salient,
                                               .fold_chunk = r->fold}};
    STI_TRY(b->hybrid(dev, &session, 1, err));
    sti_hybrid_parallel_args a = {.set = &c->set,
                                  .shape = c->shape,
                                  .B = 1,
                                  .T = c->T,
                                  .in = f->in,
                                  .fold_chunk = r->fold_parallel,
                                  .y = f->y_parallel,
                                  .dy = f->dy,
                                  .grad = f->grad};
    STI_TRY(b->hybrid_route(dev, &a, err));
    a.fold_chunk = c->fold;
    STI_TRY(b->hybrid_parallel(dev, &a, err));
    return b->hybrid_backward(dev, &a, err);
}

static still_status cpu_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                            results *r, still_error *err)
{
    const sti_backend *b = sti_backend_find("cpu");
    const sti_dev_params params = {.threads = suite->p->model.threads,
                                   .isa = suite->p->model.isa,
                                   .max_k = c->shape.D,
                                   .heads = c->shape.H,
                                   .kv_heads = c->shape.G,
                                   .head_dim = c->shape.D};
    float_case f;
    sti_carve at = {0};
    lay_out(&f, &at, c, r);
    sti_block block;
    if (!sti_block_new(&block, at.used))
        return sti_fail_memory(err, "golden case", at.used);
    at = (sti_carve){.base = block.p};
    lay_out(&f, &at, c, r);
    sti_dev *dev;
    still_status status = b->dev_new(&params, &dev, err);
    if (status == STILL_OK) {
        status = run_forms(b, dev, &f, c, r, err);
        b->dev_free(dev);
    }
    widen_results(&f, c, r);
    sti_block_free(&block);
    return status;
}

static const engine engines[] = {
    {"ref", 1e-9, 0, ref_run},
    {"cpu", 2e-5, 1e-4, cpu_run},
};

static const engine *engine_of(const sti_suite_run *r, still_error *err)
{
    const char *name = r->p->model.backend ? r->p->model.backend : engines[0].backend;
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++)
        if (strcmp(engines[i].backend, name) == 0) return &engines[i];
    sti_fail(err, STILL_E_UNSUPPORTED, "backend '%s' has no hybrid operator", name);
    return NULL;
}

/* ---- Routing ------------------------------------------------------------------------
 */

/* Tokens folded in another chunk than the golden ones. One is excused if a token of its
 * head whose score is within `tie` of its own went elsewhere too. */
static void compare_routes(const sti_hybrid_case *c, const int32_t *fold, double tie,
                           int *wrong, int *excused)
{
    *wrong = *excused = 0;
    for (int s = 0; s < c->S; s++)
        for (int i = 0; i < c->T; i++) {
            const size_t a = (size_t)i * (size_t)c->S + (size_t)s;
            if (fold[a] == c->fold[a]) continue;
            bool tied = false;
            for (int j = 0; j < c->T; j++) {
                const size_t b = (size_t)j * (size_t)c->S + (size_t)s;
                tied = tied || (j != i && fold[b] != c->fold[b] &&
                                fabs(c->score[a] - c->score[b]) < tie);
            }
            ++*(tied ? excused : wrong);
        }
}

static int count_different(const int32_t *a, const int32_t *b, size_t n)
{
    int different = 0;
    for (size_t i = 0; i < n; i++) different += a[i] != b[i];
    return different;
}

/* ---- A case -------------------------------------------------------------------------
 */

static void take_results(sti_golden *g, const sti_hybrid_case *c, results *r)
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, P = (size_t)c->P;
    *r = (results){
        .y = sti_golden_take(g, T * H * D),
        .y_parallel = sti_golden_take(g, T * H * D),
        .score_head = sti_golden_take(g, T * H),
        .score = sti_golden_take(g, T * S),
        .fold = sti_golden_take_int(g, T * S),
        .fold_parallel = sti_golden_take_int(g, T * S),
        .salient = sti_golden_take_int(g, T * S),
        .state_s = sti_golden_take(g, S * P * D),
        .state_z = sti_golden_take(g, S * P),
    };
    sti_hybrid_case_take_grad(g, c, &r->grad);
    for (size_t i = 0; r->fold && i < T * S; i++) r->fold[i] = -1;
}

static void compare(const sti_suite_run *suite, const char *name, const engine *e,
                    const sti_hybrid_case *c, const results *r)
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, P = (size_t)c->P;
    still_check check[32];
    int n = 0, wrong, excused, wrong_parallel, excused_parallel;
    compare_routes(c, r->fold, e->tie, &wrong, &excused);
    compare_routes(c, r->fold_parallel, e->tie, &wrong_parallel, &excused_parallel);
    check[n++] = (still_check){"fold chunk", wrong, 0, false};
    check[n++] = (still_check){"fold chunk parallel", wrong_parallel, 0, false};
    const struct {
        const char *what;
        const double *got, *want;
        size_t n;
        bool own_routing; /* depends on the routing the engine chose */
    } pair[] = {
        {"y", r->y, c->y, T * H * D, true},
        {"y parallel", r->y_parallel, c->y, T * H * D, false},
        {"score head", r->score_head, c->score_head, T * H, false},
        {"score", r->score, c->score, T * S, false},
        {"state s", r->state_s, c->state_s, S * P * D, true},
        {"state z", r->state_z, c->state_z, S * P, true},
    };
    for (size_t i = 0; i < sizeof pair / sizeof *pair; i++)
        if (!pair[i].own_routing || excused == 0)
            check[n++] = (still_check){
                pair[i].what, sti_golden_error(pair[i].got, pair[i].want, pair[i].n),
                e->limit, false};
    if (excused == 0)
        check[n++] = (still_check){
            "salient count", count_different(r->salient, c->salient, T * S), 0, false};
    n += sti_hybrid_case_check_grad(c, &r->grad, e->limit, check + n);
    sti_selftest_report(suite, name, check, n);
}

static still_status run_case(const sti_suite_run *suite, const char *name,
                             sti_golden *g, still_error *err)
{
    const engine *e = engine_of(suite, err);
    if (!e) return STILL_E_UNSUPPORTED;
    sti_hybrid_case c;
    STI_TRY(sti_hybrid_case_read_operator(g, &c, err));
    results r;
    take_results(g, &c, &r);
    STI_TRY(g->status);
    STI_TRY(e->run(suite, &c, &r, err));
    compare(suite, name, e, &c, &r);
    return STILL_OK;
}

still_status sti_selftest_operator(const sti_suite_run *r, still_error *err)
{
    return sti_golden_each(r, run_case, err);
}
