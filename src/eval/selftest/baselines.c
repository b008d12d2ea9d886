/* baselines.c - golden cases of the baselines and of the scores.
 *
 * Hedgehog and T2R are settings of the hybrid operator and run in both its forms; Liger
 * and SUPRA have operators of their own. The reference runs in double and must agree to
 * its rounding, any other backend in float. */
#include <math.h>
#include <string.h>

#include "eval/selftest/float_backend.h"
#include "eval/selftest/golden.h"
#include "eval/selftest/hybrid_case.h"
#include "ops/linear.h"

/* Relative error a backend may have. */
static double limit_of(const sti_suite_run *suite)
{
    return sti_float_asked(suite) ? 2e-5 : 1e-9;
}

/* ---- Hedgehog, T2R ------------------------------------------------------- */

static still_status run_forms(const sti_suite_run *suite, const sti_hybrid_case *c,
                              sti_hybrid_state *st, double *y, double *y_parallel,
                              const sti_hybrid_grad64 *grad, still_error *err)
{
    sti_hybrid_parallel_args64 a = {.set = &c->set,
                                    .shape = c->shape,
                                    .B = 1,
                                    .T = c->T,
                                    .in = c->in,
                                    .fold_chunk = c->fold,
                                    .y = y_parallel,
                                    .dy = c->dy,
                                    .grad = *grad};
    if (sti_float_asked(suite))
        return sti_float_hybrid(suite, &a, y, st->lin_s, st->lin_z, err);
    STI_TRY(sti_ref_hybrid_forward(&(sti_hybrid_args64){.set = &c->set,
                                                        .shape = c->shape,
                                                        .T = c->T,
                                                        .in = c->in,
                                                        .state = st,
                                                        .y = y},
                                   err));
    STI_TRY(sti_ref_hybrid_parallel(&a, err));
    return sti_ref_hybrid_backward(&a, err);
}

static still_status run_hybrid(const sti_suite_run *suite, const char *name,
                               const char *method, sti_golden *g, still_error *err)
{
    sti_hybrid_case c;
    STI_TRY(sti_hybrid_case_read_linear(g, method, &c, err));
    const size_t n = (size_t)c.T * (size_t)c.shape.H * (size_t)c.shape.D;
    const size_t ns = (size_t)c.S * (size_t)c.P;
    sti_hybrid_grad64 grad;
    sti_hybrid_case_take_grad(g, &c, &grad);
    double *y = sti_golden_take(g, n), *y_parallel = sti_golden_take(g, n);

    sti_hybrid_state st;
    sti_carve carve = {0};
    sti_hybrid_state_carve(&st, &carve, &c.set, &c.shape, c.T, sizeof *y, sizeof *y);
    carve =
        (sti_carve){.base = (unsigned char *)sti_golden_take(g, carve.used / 8 + 1)};
    STI_TRY(g->status);
    sti_hybrid_state_carve(&st, &carve, &c.set, &c.shape, c.T, sizeof *y, sizeof *y);
    STI_TRY(run_forms(suite, &c, &st, y, y_parallel, &grad, err));

    const double limit = limit_of(suite);
    still_check check[16] = {
        {"y", sti_golden_error(y, c.y, n), limit, false},
        {"y parallel", sti_golden_error(y_parallel, c.y, n), limit, false},
        {"state s", sti_golden_error(st.lin_s, c.state_s, ns * (size_t)c.shape.D),
         limit, false},
        {"state z", sti_golden_error(st.lin_z, c.state_z, ns), limit, false},
    };
    const int grads = sti_hybrid_case_check_grad(&c, &grad, limit, check + 4);
    sti_selftest_report(suite, name, check, 4 + grads);
    return STILL_OK;
}

/* ---- Liger, SUPRA -------------------------------------------------------- */

/* A case of either method; arrays are the golden file's memory. */
typedef struct linear_case {
    bool liger;
    int heads;             /* that have a state */
    size_t nq, nk, wq, wk; /* numbers of q and of k, of one token of each */
    sti_linear_state st;
    sti_linear_args64 a;
} linear_case;

static still_status read_linear_sizes(sti_golden *g, linear_case *c, still_error *err)
{
    const int H = sti_golden_int(g, "q_heads", 1, 256);
    const int G = sti_golden_int(g, "kv_heads", 1, 256);
    const int D = sti_golden_int(g, "head_dim", 2, STI_HEAD_DIM_MAX);
    c->a.shape = (sti_linear_shape){H, G, D};
    c->a.T = sti_golden_int(g, "tokens", 1, 1 << 16);
    c->a.window = c->liger ? sti_golden_int(g, "window", 1, 1 << 12) : 0;
    if (!sti_golden_is(g, "rope_layout", "rotate_half") && g->status == STILL_OK)
        return sti_fail(err, STILL_E_FORMAT, "%s: rope_layout is not rotate_half",
                        g->store.path);
    STI_TRY(g->status);
    if (H % G != 0 || D % 2 != 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: %d heads over %d, head size %d",
                        g->store.path, H, G, D);
    c->heads = c->liger ? G : H;
    c->wq = (size_t)H * (size_t)D;
    c->wk = (size_t)G * (size_t)D;
    c->nq = (size_t)c->a.T * c->wq;
    c->nk = (size_t)c->a.T * c->wk;
    return STILL_OK;
}

static void read_linear_state(sti_golden *g, linear_case *c)
{
    const size_t size = sizeof(double);
    sti_carve carve = {0};
    sti_linear_state_carve(&c->st, &carve, &c->a.shape, c->a.window, size, size);
    carve =
        (sti_carve){.base = (unsigned char *)sti_golden_take(g, carve.used / size + 1)};
    if (g->status == STILL_OK)
        sti_linear_state_carve(&c->st, &carve, &c->a.shape, c->a.window, size, size);
    c->a.state = &c->st;
}

static still_status read_linear_arrays(sti_golden *g, linear_case *c)
{
    const int H = c->a.shape.H, G = c->a.shape.G, D = c->a.shape.D, T = c->a.T;
    const double theta = sti_golden_real(g, "rope_theta");
    c->a.in.q = sti_golden_rows(g, "q_raw", H, T, D);
    STI_TRY(g->status); /* the file is as large as it says: memory may be taken */
    double *inv_freq = sti_golden_take(g, (size_t)D / 2);
    for (int i = 0; inv_freq && i < D / 2; i++) inv_freq[i] = pow(theta, -2.0 * i / D);
    c->a.in.inv_freq = inv_freq;
    c->a.in.k = sti_golden_rows(g, "k_raw", G, T, D);
    c->a.in.v = sti_golden_rows(g, "v", G, T, D);
    c->a.dy = sti_golden_rows(g, "in.dy", H, T, D);
    c->a.y = sti_golden_take(g, c->nq);
    c->a.grad.q = sti_golden_take(g, c->nq);
    c->a.grad.k = sti_golden_take(g, c->nk);
    c->a.grad.v = sti_golden_take(g, c->nk);
    if (!c->liger) {
        c->a.in.map_q = sti_golden_flat(g, "map_q", c->wq * c->wq);
        c->a.in.map_k = sti_golden_flat(g, "map_k", c->wk * c->wk);
        c->a.in.bias_q = sti_golden_flat(g, "bias_q", c->wq);
        c->a.in.bias_k = sti_golden_flat(g, "bias_k", c->wk);
        c->a.grad.map_q = sti_golden_take(g, c->wq * c->wq);
        c->a.grad.map_k = sti_golden_take(g, c->wk * c->wk);
        c->a.grad.bias_q = sti_golden_take(g, c->wq);
        c->a.grad.bias_k = sti_golden_take(g, c->wk);
    }
    read_linear_state(g, c);
    return g->status;
}

static still_status run_linear_entries(const sti_suite_run *suite, linear_case *c,
                                       still_error *err)
{
    if (sti_float_asked(suite)) return sti_float_linear(suite, &c->a, c->st.s, err);
    if (c->liger) {
        STI_TRY(sti_ref_liger_forward(&c->a, err));
        return sti_ref_liger_backward(&c->a, err);
    }
    STI_TRY(sti_ref_supra_forward(&c->a, err));
    return sti_ref_supra_backward(&c->a, err);
}

/* The golden state is per query head. */
static double worst_state(const linear_case *c, const double *want)
{
    const size_t H = (size_t)c->a.shape.H, D = (size_t)c->a.shape.D;
    const size_t group = H / (size_t)c->heads;
    double worst = 0;
    for (size_t h = 0; h < H; h++)
        worst = fmax(worst, sti_golden_error((double *)c->st.s + h / group * D * D,
                                             want + h * D * D, D * D));
    return worst;
}

static still_status run_linear(const sti_suite_run *suite, const char *name, bool liger,
                               sti_golden *g, still_error *err)
{
    linear_case c = {.liger = liger};
    STI_TRY(read_linear_sizes(g, &c, err));
    STI_TRY(read_linear_arrays(g, &c));
    const int H = c.a.shape.H, G = c.a.shape.G, D = c.a.shape.D, T = c.a.T;
    const size_t mq = c.wq * c.wq, mk = c.wk * c.wk;
    const double *want_y = sti_golden_rows(g, "out.y", H, T, D);
    const double *want_s = sti_golden_flat(g, "out.state_s", c.wq * (size_t)D);
    const struct {
        const char *what;
        const double *got, *want;
        size_t n;
    } grad[] = {
        {"grad q", c.a.grad.q, sti_golden_rows(g, "grad.q_raw", H, T, D), c.nq},
        {"grad k", c.a.grad.k, sti_golden_rows(g, "grad.k_raw", G, T, D), c.nk},
        {"grad v", c.a.grad.v, sti_golden_rows(g, "grad.v", G, T, D), c.nk},
        {"grad map q", c.a.grad.map_q, sti_golden_flat_opt(g, "grad.map_q", mq), mq},
        {"grad map k", c.a.grad.map_k, sti_golden_flat_opt(g, "grad.map_k", mk), mk},
        {"grad bias q", c.a.grad.bias_q, sti_golden_flat_opt(g, "grad.bias_q", c.wq),
         c.wq},
        {"grad bias k", c.a.grad.bias_k, sti_golden_flat_opt(g, "grad.bias_k", c.wk),
         c.wk},
    };
    STI_TRY(g->status);
    STI_TRY(run_linear_entries(suite, &c, err));

    const double limit = limit_of(suite);
    still_check check[16] = {
        {"y", sti_golden_error(c.a.y, want_y, c.nq), limit, false},
        {"state s", worst_state(&c, want_s), limit, false},
    };
    int n = 2;
    for (size_t i = 0; i < sizeof grad / sizeof *grad; i++)
        if (grad[i].got && grad[i].want)
            check[n++] = (still_check){
                grad[i].what, sti_golden_error(grad[i].got, grad[i].want, grad[i].n),
                limit, false};
    sti_selftest_report(suite, name, check, n);
    return STILL_OK;
}

/* ---- Scores -------------------------------------------------------------- */

/* The golden s3 is the closed form, ours the definition: they differ by terms of size
 * eps. The golden key norms were rounded to float. */
static still_status run_scores(const sti_suite_run *suite, const char *name,
                               sti_golden *g, still_error *err)
{
    static const struct {
        const char *name, *tensor;
        double limit;
    } kind[] = {{"s3", "out.s3", 1e-5},
                {"received", "out.received", 1e-9},
                {"keynorm", "out.keynorm", 1.2e-7}};
    const sti_hybrid_shape shape = {
        .H = sti_golden_dim(g, "q", 0),
        .G = sti_golden_dim(g, "k", 0),
        .D = sti_golden_dim(g, "q", 2),
        .F = sti_golden_dim(g, "q", 2),
    };
    const int T = sti_golden_dim(g, "q", 1),
              chunk = sti_golden_int(g, "chunk", 1, 1 << 12);
    STI_TRY(g->status);
    sti_hybrid_settings set;
    sti_hybrid_preset("still", chunk, &set);
    set.per_head = true;
    STI_TRY(sti_hybrid_check(&set, &shape, err));
    const size_t n = (size_t)T * (size_t)shape.H;
    sti_hybrid_parallel_args64 a = {
        .set = &set,
        .shape = shape,
        .B = 1,
        .T = T,
        .in = {.q = sti_golden_rows(g, "q", shape.H, T, shape.D),
               .k = sti_golden_rows(g, "k", shape.G, T, shape.D)},
        .fold_chunk = sti_golden_take_int(g, n),
        .trace = {.score = sti_golden_take(g, n)},
    };
    still_check check[sizeof kind / sizeof *kind];
    int i = 0;
    for (; i < (int)(sizeof kind / sizeof *kind); i++) {
        const double *want = sti_golden_rows(g, kind[i].tensor, shape.H, T, 1);
        STI_TRY(g->status);
        sti_score_find(kind[i].name, &set.score);
        STI_TRY(sti_float_asked(suite) ? sti_float_route(suite, &a, err)
                                       : sti_ref_hybrid_route(&a, err));
        check[i] = (still_check){kind[i].name, sti_golden_error(a.trace.score, want, n),
                                 fmax(kind[i].limit, limit_of(suite)), false};
    }
    sti_selftest_report(suite, name, check, i);
    return STILL_OK;
}

static still_status run_case(const sti_suite_run *suite, const char *name,
                             sti_golden *g, still_error *err)
{
    if (!json_object_get(g->store.st_meta, "method"))
        return run_scores(suite, name, g, err);
    if (sti_golden_is(g, "method", "liger"))
        return run_linear(suite, name, true, g, err);
    if (sti_golden_is(g, "method", "supra"))
        return run_linear(suite, name, false, g, err);
    if (sti_golden_is(g, "method", "hedgehog"))
        return run_hybrid(suite, name, "hedgehog", g, err);
    if (sti_golden_is(g, "method", "t2r"))
        return run_hybrid(suite, name, "t2r", g, err);
    return sti_fail(err, STILL_E_FORMAT, "%s: a method this suite does not know",
                    g->store.path);
}

still_status sti_selftest_baselines(const sti_suite_run *r, still_error *err)
{
    return sti_golden_each(r, run_case, err);
}
