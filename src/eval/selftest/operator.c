/* operator.c - golden cases of the hybrid operator.
 *
 * A case is run in both forms: recurrent over the whole sequence, and parallel with
 * the golden routing, which also gives the gradients. An engine runs it on a backend
 * and fills `results` in double, whatever it computes in. The reference must agree
 * to double rounding, routing included. A float engine may order two tokens either
 * way if their scores differ by less than its rounding; where it did, its recurrent
 * form saw other tokens than the golden one and is not compared. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "eval/selftest/golden.h"
#include "eval/selftest/hybrid_case.h"
#include "ops/ops.h"

typedef struct results {
    double *y, *y_parallel;        /* [T,H,D] */
    double *score_head, *score;    /* [T,H], [T,S] */
    int32_t *fold, *fold_parallel; /* [T,S]: recurrent, and from the route entry */
    int32_t *salient;              /* [T,S] */
    double *state_s, *state_z;     /* [S,P,D], [S,P] */
    sti_hybrid_grad64 grad;
    bool traced, trains; /* the backend tells its routing; it has the parallel form */
} results;

typedef struct engine {
    const char *backend;
    double limit; /* relative error of every tensor; of `half`, beside its baseline's */
    double trained; /* of the parallel form and its gradients */
    double tie;     /* scores closer than this may be ordered either way */
    still_status (*run)(const sti_suite_run *suite, const sti_hybrid_case *c,
                        results *r, still_error *err);
    bool half; /* keys and values are stored, and multiplied, in half precision */
} engine;

/* ---- The reference ------------------------------------------------------- */

static still_status ref_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                            results *r, still_error *err)
{
    (void)suite;
    r->traced = r->trains = true;
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

/* ---- Backends in float --------------------------------------------------- */

static float *take(sti_carve *c, const void *wanted, size_t n)
{
    return wanted ? sti_carve_take(c, n, sizeof(float)) : NULL;
}

/* A case as a backend sees it. */
typedef struct float_case {
    sti_hybrid_in in;
    sti_hybrid_state st;
    sti_hybrid_grad grad;
    float *dy, *y, *y_parallel, *score_head, *score;
    int32_t *fold, *fold_parallel; /* the golden route, and the backend's */
} float_case;

/* Places everything; counts if there is no base. kv: bytes of a stored key's number. */
static void lay_out(float_case *f, sti_carve *at, const sti_hybrid_case *c,
                    const results *r, size_t kv)
{
    const size_t T = (size_t)c->T, S = (size_t)c->S;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(&c->set, &c->shape, T);
    *f = (float_case){
        .dy = take(at, c->dy, n.q),
        .y = take(at, r->y, n.q),
        .y_parallel = take(at, r->y_parallel, n.q),
        .score_head = take(at, r->score_head, T * n.alpha),
        .score = take(at, r->score, T * S),
        .fold = sti_carve_take(at, T * S, sizeof(int32_t)),
        .fold_parallel = sti_carve_take(at, T * S, sizeof(int32_t)),
    };
#define TAKE(x)                                                                        \
    f->in.x = take(at, c->in.x, n.x);                                                  \
    f->grad.x = take(at, r->grad.x, n.x);
    STI_HYBRID_ARRAYS(TAKE)
#undef TAKE
    sti_hybrid_state_carve(&f->st, at, &c->set, &c->shape, c->T, kv, sizeof(float));
}

static void narrow(const float *to, const double *x, size_t n)
{
    float *y = (float *)to;
    for (size_t i = 0; y && i < n; i++) y[i] = (float)x[i];
}

static void narrow_inputs(const float_case *f, const sti_hybrid_case *c)
{
    const size_t T = (size_t)c->T;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(&c->set, &c->shape, T);
#define NARROW(x) narrow(f->in.x, c->in.x, n.x);
    STI_HYBRID_ARRAYS(NARROW)
#undef NARROW
    narrow(f->dy, c->dy, n.q);
    memcpy(f->fold, c->fold, T * (size_t)c->S * sizeof *f->fold);
}

static void widen(double *to, const float *from, size_t n)
{
    for (size_t i = 0; to && i < n; i++) to[i] = from[i];
}

static void widen_results(const float_case *f, const sti_hybrid_case *c, results *r)
{
    const size_t T = (size_t)c->T, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, P = (size_t)c->P;
    const sti_hybrid_sizes n = sti_hybrid_sizes_of(&c->set, &c->shape, T);
    memcpy(r->fold_parallel, f->fold_parallel, T * S * sizeof *r->fold_parallel);
    widen(r->y, f->y, n.q);
    widen(r->y_parallel, f->y_parallel, n.q);
    widen(r->score_head, f->score_head, T * n.alpha);
    widen(r->score, f->score, T * S);
    widen(r->state_s, f->st.lin_s, S * P * D);
    widen(r->state_z, f->st.lin_z, S * P);
#define WIDEN(x) widen(r->grad.x, f->grad.x, n.x);
    STI_HYBRID_ARRAYS(WIDEN)
#undef WIDEN
}

static still_status run_forms(const sti_backend *b, sti_dev *dev, float_case *f,
                              const sti_hybrid_case *c, results *r, still_error *err)
{
    sti_hybrid_args session = {.set = &c->set,
                               .shape = c->shape,
                               .T = c->T,
                               .in = f->in,
                               .state = &f->st,
                               .y = f->y};
    if (r->traced)
        session.trace = (sti_hybrid_trace){.score_head = f->score_head,
                                           .score = f->score,
                                           .salient = r->salient,
                                           .fold_chunk = r->fold};
    STI_TRY(b->hybrid(dev, &session, 1, err));
    if (!r->trains) return STILL_OK;
    sti_hybrid_parallel_args a = {.set = &c->set,
                                  .shape = c->shape,
                                  .B = 1,
                                  .T = c->T,
                                  .in = f->in,
                                  .fold_chunk = f->fold_parallel,
                                  .y = f->y_parallel,
                                  .dy = f->dy,
                                  .grad = f->grad};
    STI_TRY(b->hybrid_route(dev, &a, err));
    a.fold_chunk = f->fold;
    STI_TRY(b->hybrid_parallel(dev, &a, err));
    return b->hybrid_backward(dev, &a, err);
}

/* For a backend that does not report when it folded a token: only the final salient
 * list is known, so all other tokens count as folded when the golden ones were. */
static void read_routes(const float_case *f, const sti_hybrid_case *c, results *r)
{
    const sti_hybrid_state *st = &f->st;
    const int outside = ((c->T - 1) / c->set.chunk - 1) * c->set.chunk;
    for (int s = 0; c->set.has_window && s < c->S; s++) {
        for (int t = 0; t < outside; t++) {
            const size_t at = (size_t)t * (size_t)c->S + (size_t)s;
            r->fold[at] = c->fold[at] >= 0 ? c->fold[at] : 0;
        }
        for (int i = 0; st->sal_count && i < st->sal_count[s]; i++) {
            const size_t t =
                (size_t)st->sal_pos[(size_t)s * (size_t)st->sal_capacity + i];
            r->fold[t * (size_t)c->S + (size_t)s] = -1;
        }
    }
}

/* Runs the case on a device: lays it out in host memory, moves it to the device and
 * back. */
static still_status run_on(const sti_backend *b, sti_dev *dev, const sti_hybrid_case *c,
                           results *r, size_t kv, still_error *err)
{
    float_case here, there;
    sti_carve at = {0};
    lay_out(&here, &at, c, r, kv);
    const size_t bytes = at.used;
    sti_block host, device;
    if (!sti_block_new(&host, bytes)) return sti_fail_memory(err, "golden case", bytes);
    at = (sti_carve){.base = host.p};
    lay_out(&here, &at, c, r, kv);
    narrow_inputs(&here, c);
    still_status status = b->mem_new(dev, bytes, &device, err);
    if (status == STILL_OK) {
        at = (sti_carve){.base = device.p};
        lay_out(&there, &at, c, r, kv);
        status = b->mem_move(dev, device.p, host.p, bytes, err);
        if (status == STILL_OK) status = run_forms(b, dev, &there, c, r, err);
        if (status == STILL_OK) status = b->mem_move(dev, host.p, device.p, bytes, err);
        b->mem_free(dev, &device);
    }
    if (status == STILL_OK) {
        widen_results(&here, c, r);
        if (!r->traced) read_routes(&here, c, r);
    }
    sti_block_free(&host);
    return status;
}

static still_status float_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                              results *r, size_t kv, still_error *err)
{
    const sti_backend *b = sti_backend_find(suite->p->model->backend);
    if (!b)
        return sti_fail(err, STILL_E_ARG, "backend '%s' is not in this build: %s",
                        suite->p->model->backend, sti_backend_names());
    const sti_dev_params params = {.threads = suite->p->model->threads,
                                   .isa = suite->p->model->isa,
                                   .max_k = c->shape.D,
                                   .heads = c->shape.H,
                                   .kv_heads = c->shape.G,
                                   .head_dim = c->shape.D};
    sti_dev *dev;
    r->traced = b->host_memory;
    r->trains = b->hybrid_backward && kv == sizeof(float);
    STI_TRY(b->dev_new(&params, &dev, err));
    still_status status = run_on(b, dev, c, r, kv, err);
    b->dev_free(dev);
    return status;
}

static still_status full_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                             results *r, still_error *err)
{
    return float_run(suite, c, r, sizeof(float), err);
}

/* ---- Keys and values in half precision ----------------------------------- */

static still_status half_run(const sti_suite_run *suite, const sti_hybrid_case *c,
                             results *r, still_error *err)
{
    return float_run(suite, c, r, sizeof(uint16_t), err);
}

static void round_to_half(sti_golden *g, const double **x, size_t n)
{
    double *y = sti_golden_take(g, n);
    for (size_t i = 0; y && i < n; i++)
        y[i] = sti_f16_to_f32(sti_f32_to_f16((float)(*x)[i]));
    *x = y;
}

/* The case in double with q, k and v rounded to half: the baseline for the error of a
 * backend that multiplies halves. */
static still_status half_baseline(sti_golden *g, const sti_hybrid_case *c, results *r,
                                  still_error *err)
{
    const size_t T = (size_t)c->T, D = (size_t)c->shape.D;
    sti_hybrid_case rounded = *c;
    round_to_half(g, &rounded.in.q, T * (size_t)c->shape.H * D);
    round_to_half(g, &rounded.in.k, T * (size_t)c->shape.G * D);
    round_to_half(g, &rounded.in.v, T * (size_t)c->shape.G * D);
    STI_TRY(g->status);
    return ref_run(NULL, &rounded, r, err);
}

static const engine engines[] = {
    {"ref", 1e-9, 1e-9, 0, ref_run, false},
    {"cpu", 2e-5, 2e-5, 1e-4, full_run, false},
    {"cuda", 2e-5, 5e-3, 1e-4, full_run, false}, /* trains in TF32 */
    {"cuda", 1e-3, 0, 2e-2, half_run, true},
};

/* ---- Routing ------------------------------------------------------------- */

/* Counts tokens folded in another chunk than the golden ones. One is excused if another
 * token of its head, with a score within `tie` of its own, differs too. */
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

/* ---- A case -------------------------------------------------------------- */

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
                    const sti_hybrid_case *c, const results *r, const results *base)
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, S = (size_t)c->S;
    const size_t D = (size_t)c->shape.D, P = (size_t)c->P;
    still_check check[32];
    int n = 0, wrong, excused, wrong_parallel, excused_parallel;
    compare_routes(c, r->fold, e->tie, &wrong, &excused);
    compare_routes(c, r->fold_parallel, e->tie, &wrong_parallel, &excused_parallel);
    check[n++] = (still_check){"fold chunk", wrong, 0, false};
    if (r->trains)
        check[n++] = (still_check){"fold chunk parallel", wrong_parallel, 0, false};
    const struct {
        const char *what;
        const double *got, *want, *base;
        size_t n;
        bool own_routing; /* depends on the routing the engine chose */
        bool there;
        double limit;
    } pair[] = {
        {"y", r->y, c->y, base->y, T * H * D, true, true, e->limit},
        {"y parallel", r->y_parallel, c->y, base->y, T * H * D, false, r->trains,
         e->trained},
        {"score head", r->score_head, c->score_head, NULL, T * H, false, r->traced,
         e->limit},
        {"score", r->score, c->score, NULL, T * S, false, r->traced, e->limit},
        {"state s", r->state_s, c->state_s, base->state_s, S * P * D, true, true,
         e->limit},
        {"state z", r->state_z, c->state_z, base->state_z, S * P, true, true, e->limit},
    };
    for (size_t i = 0; i < sizeof pair / sizeof *pair; i++) {
        if (!pair[i].there || (pair[i].own_routing && excused > 0)) continue;
        double limit = pair[i].limit;
        if (e->half && pair[i].base)
            limit += 2 * sti_golden_error(pair[i].base, pair[i].want, pair[i].n);
        check[n++] = (still_check){
            pair[i].what, sti_golden_error(pair[i].got, pair[i].want, pair[i].n), limit,
            false};
    }
    if (r->traced && excused == 0)
        check[n++] = (still_check){
            "salient count", count_different(r->salient, c->salient, T * S), 0, false};
    if (r->trains) n += sti_hybrid_case_check_grad(c, &r->grad, e->trained, check + n);
    sti_selftest_report(suite, name, check, n);
}

static still_status run_engine(const sti_suite_run *suite, const engine *e,
                               const char *name, sti_golden *g,
                               const sti_hybrid_case *c, still_error *err)
{
    char half_name[128];
    results r, base = {0};
    take_results(g, c, &r);
    STI_TRY(g->status);
    STI_TRY(e->run(suite, c, &r, err));
    if (e->half) {
        take_results(g, c, &base);
        STI_TRY(half_baseline(g, c, &base, err));
        snprintf(half_name, sizeof half_name, "%s, half keys", name);
        name = half_name;
    }
    compare(suite, name, e, c, &r, &base);
    return STILL_OK;
}

static still_status run_case(const sti_suite_run *suite, const char *name,
                             sti_golden *g, still_error *err)
{
    const char *backend = suite->p->model->backend;
    if (!backend) backend = engines[0].backend;
    sti_hybrid_case c;
    bool ran = false;
    STI_TRY(sti_hybrid_case_read_operator(g, &c, err));
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        if (strcmp(engines[i].backend, backend) != 0) continue;
        STI_TRY(run_engine(suite, &engines[i], name, g, &c, err));
        ran = true;
    }
    if (ran) return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED, "backend '%s' has no hybrid operator",
                    backend);
}

still_status sti_selftest_operator(const sti_suite_run *r, still_error *err)
{
    return sti_golden_each(r, run_case, err);
}
