/* test_linear.c - Liger and SUPRA on the cuda backend against the reference in double:
 * outputs, states and every gradient over shapes, windows and lengths; prompts cut
 * anywhere, sessions of different lengths in one call, recorded steps.
 *
 * Products of many tokens run in TF32, whose rounding is 5e-4: errors are measured
 * against the size of the whole tensor and may be five times that. */
#include "../../../run.h"
#include "../../linear_problem.h"

#include "../gpu.h"

static const double limit = 2.5e-3;
/* Steps are float arithmetic. */
static const double step_limit = 1e-5;

static int setup(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){.threads = 1, .max_k = 64});
}

static void ok(still_status st, const still_error *err)
{
    if (st != STILL_OK) fail_msg("%s", err->text);
}

/* ---- Problems ------------------------------------------------------------ */

static void gpu_state(const gpu *g, problem *p, size_t kv)
{
    sti_carve c = {0};
    sti_linear_state_carve(&p->st, &c, &p->shape, p->window, kv, sizeof(float));
    p->block = new_block(g, c.used);
    c = (sti_carve){.base = p->block.p};
    sti_linear_state_carve(&p->st, &c, &p->shape, p->window, kv, sizeof(float));
}

static problem make(const gpu *g, linear_case c, double key_size, uint64_t seed)
{
    problem p = make_problem(c, key_size, 1, seed);
    for (int f = 0; f < FIELDS; f++) {
        p.in_f[f] = upload(g, p.in[f], p.n[f]).p;
        p.grad_f[f] = upload(g, p.grad[f], p.n[f]).p;
    }
    p.dy_f = upload(g, p.dy, p.n[Q]).p;
    p.y_f = new_block(g, p.n[Q] * sizeof(float)).p;
    gpu_state(g, &p, sizeof(float));
    return p;
}

static void release(const gpu *g, void *p) /* cuda frees by the address alone */
{
    g->be->mem_free(g->dev, &(sti_block){.p = p});
}

static void drop(const gpu *g, problem *p)
{
    for (int f = 0; f < FIELDS; f++) {
        release(g, p->in_f[f]);
        release(g, p->grad_f[f]);
    }
    release(g, p->y_f);
    release(g, p->dy_f);
    release(g, p->block.p);
    drop_problem(p);
}

/* Leaves a parameter out: its start value; and its gradient. */
static void leave_out(problem *p, int field)
{
    free(p->in[field]);
    free(p->grad[field]);
    p->in[field] = p->grad[field] = NULL;
    p->n[field] = 0;
}

/* |got - want| against |want|. */
static void expect(const char *what, const problem *p, const float *device,
                   const double *want, size_t n, double bound)
{
    float *got = download(need_gpu(), device, n * sizeof *got);
    double off = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)got[i] - want[i];
        if (!isfinite(got[i])) fail_msg("%s: number %zu is not finite", what, i);
        off += d * d;
        size += want[i] * want[i];
    }
    free(got);
    expect_error(what, p, sqrt(off) / (sqrt(size) + 0.05 * sqrt((double)n) + 1e-30),
                 bound);
}

/* ---- Tests --------------------------------------------------------------- */

static void test_whole_sequences(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(g, linear_cases[i], 1.5, (uint64_t)i + 1);
        const sti_linear_args a = args(&p, 0, p.T);
        still_error err;
        run_ref(&p);
        ok(g->be->linear_reserve(g->dev, &p.shape, p.window, p.T, &err), &err);
        ok(g->be->linear(g->dev, &a, 1, &err), &err);
        expect("y", &p, p.y_f, p.y, p.n[Q], limit);
        expect_state(&p, limit);
        ok(g->be->linear_backward(g->dev, &a, 1, &err), &err);
        expect_gradients(&p, limit);
        drop(g, &p);
    }
}

/* Three sessions in one call, each cut into pieces of its own: some are stepped, some
 * go by spans, some have nothing to do. */
static void test_any_cut(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    enum { N = 3 };
    for (int i = 0; i < N_CASES; i++) {
        problem p[N];
        int at[N] = {0}, step[N] = {1, 8, 90}, left = 1;
        for (int s = 0; s < N; s++) {
            linear_case c = linear_cases[i];
            c.T += 3 * s;
            p[s] = make(g, c, 1.5, 7);
            if (s > 0 && linear_cases[i].window == 0) /* sessions share parameters */
                for (int f = MAP_Q; f < FIELDS; f++) {
                    move(g, p[s].in_f[f], p[0].in_f[f], p[0].n[f] * sizeof(float));
                    memcpy(p[s].in[f], p[0].in[f], p[0].n[f] * sizeof(double));
                }
            run_ref(&p[s]);
        }
        while (left) {
            sti_linear_args a[N];
            still_error err;
            left = 0;
            for (int s = 0; s < N; s++) {
                const int n = p[s].T - at[s] < step[s] ? p[s].T - at[s] : step[s];
                a[s] = args(&p[s], at[s], n);
                if (s > 0) { /* of one call */
                    a[s].in.map_q = a[0].in.map_q;
                    a[s].in.map_k = a[0].in.map_k;
                    a[s].in.bias_q = a[0].in.bias_q;
                    a[s].in.bias_k = a[0].in.bias_k;
                }
                at[s] += n;
                left += p[s].T - at[s];
                step[s] = 1 + (step[s] * 7 + 3) % 29;
            }
            ok(g->be->linear(g->dev, a, N, &err), &err);
        }
        for (int s = 0; s < N; s++) {
            expect("y", &p[s], p[s].y_f, p[s].y, p[s].n[Q], limit);
            expect_state(&p[s], limit);
            drop(g, &p[s]);
        }
    }
}

/* Token by token, heads too wide for tiles as well. */
static void test_steps(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const linear_case steps[] = {{{4, 2, 6}, 5, 21},   {{4, 2, 6}, 0, 21},
                                        {{9, 3, 64}, 16, 40}, {{9, 3, 64}, 0, 20},
                                        {{7, 1, 80}, 9, 20},  {{2, 1, 128}, 70, 90},
                                        {{2, 1, 160}, 6, 12}, {{2, 1, 160}, 0, 12}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        problem p = make(g, steps[i], 1.5, i + 1);
        still_error err;
        run_ref(&p);
        for (int at = 0; at < p.T; at++) {
            const sti_linear_args a = args(&p, at, 1);
            ok(g->be->linear(g->dev, &a, 1, &err), &err);
        }
        expect("y", &p, p.y_f, p.y, p.n[Q], step_limit);
        expect_state(&p, step_limit);
        if (p.shape.D > 128) { /* many tokens at once are stepped too */
            const sti_linear_args a = args(&p, 0, p.T);
            ok(g->be->mem_clear(g->dev, p.block.p, p.block.bytes, &err), &err);
            p.st.pos = 0;
            ok(g->be->linear(g->dev, &a, 1, &err), &err);
            expect("y", &p, p.y_f, p.y, p.n[Q], step_limit);
            assert_int_equal(g->be->linear_backward(g->dev, &a, 1, &err),
                             STILL_E_UNSUPPORTED);
        }
        drop(g, &p);
    }
}

/* Two sessions through passes that are recorded and replayed. */
static void test_recorded(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    assert_non_null(g->be->pass_begin);
    for (int window = 0; window <= 8; window += 8) {
        enum { N = 2, T = 30 };
        const linear_case c = {{4, 2, 32}, window, T};
        const size_t HD = 4 * 32, GD = 2 * 32;
        problem p[N];
        still_error err;
        sti_block q = new_block(g, N * HD * sizeof(float)),
                  k = new_block(g, N * GD * sizeof(float)),
                  v = new_block(g, N * GD * sizeof(float)),
                  y = new_block(g, N * HD * sizeof(float));
        for (int s = 0; s < N; s++) {
            p[s] = make(g, c, 1.5, 3); /* equal but for v */
            for (size_t i = 0; i < p[s].n[V]; i++) p[s].in[V][i] *= 1 + s;
            release(g, p[s].in_f[V]);
            p[s].in_f[V] = upload(g, p[s].in[V], p[s].n[V]).p;
            run_ref(&p[s]);
        }
        int replays = 0;
        for (int t = 0; t < T; t++) {
            const int32_t tok[N] = {0, 0}, pos[N] = {t, t};
            const uint64_t key = 77 + (uint64_t)window;
            const sti_pass pass = {.tok = tok,
                                   .pos = pos,
                                   .M = N,
                                   .key = &key,
                                   .n_key = 1,
                                   .one_each = true};
            bool done = false;
            for (size_t s = 0; s < N; s++) {
                move(g, (float *)q.p + s * HD, p[s].in_f[Q] + (size_t)t * HD,
                     HD * sizeof(float));
                move(g, (float *)k.p + s * GD, p[s].in_f[K] + (size_t)t * GD,
                     GD * sizeof(float));
                move(g, (float *)v.p + s * GD, p[s].in_f[V] + (size_t)t * GD,
                     GD * sizeof(float));
            }
            ok(g->be->pass_begin(g->dev, &pass, &done, &err), &err);
            replays += done;
            if (!done) {
                sti_linear_args a[N];
                for (size_t s = 0; s < N; s++) {
                    a[s] = args(&p[s], 0, 1);
                    a[s].in = args(&p[0], 0, 1).in;
                    a[s].in.q = (float *)q.p + s * HD;
                    a[s].in.k = (float *)k.p + s * GD;
                    a[s].in.v = (float *)v.p + s * GD;
                    a[s].y = (float *)y.p + s * HD;
                    p[s].st.pos = t;
                }
                ok(g->be->linear(g->dev, a, N, &err), &err);
            }
            ok(g->be->pass_end(g->dev, true, &err), &err);
            for (size_t s = 0; s < N; s++)
                move(g, p[s].y_f + (size_t)t * HD, (float *)y.p + s * HD,
                     HD * sizeof(float));
        }
        assert_true(replays > T / 2);
        for (int s = 0; s < N; s++) {
            p[s].st.pos = T;
            expect("y", &p[s], p[s].y_f, p[s].y, p[s].n[Q], step_limit);
            expect_state(&p[s], step_limit);
            drop(g, &p[s]);
        }
        sti_block *all[] = {&q, &k, &v, &y};
        for (int i = 0; i < 4; i++) g->be->mem_free(g->dev, all[i]);
    }
}

/* Maps, biases and gradients that are not there. */
static void test_start_values(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    for (int without = 0; without < 4; without++) {
        problem p = make(g, (linear_case){{4, 2, 32}, 0, 70}, 1.5, 11);
        still_error err;
        if (without & 1) leave_out(&p, MAP_Q), leave_out(&p, BIAS_K);
        if (without & 2) leave_out(&p, MAP_K), leave_out(&p, BIAS_Q);
        run_ref(&p);
        sti_linear_args a = args(&p, 0, p.T);
        ok(g->be->linear(g->dev, &a, 1, &err), &err);
        expect("y", &p, p.y_f, p.y, p.n[Q], limit);
        ok(g->be->linear_backward(g->dev, &a, 1, &err), &err);
        expect_gradients(&p, limit);
        /* Only the maps: what was asked for before stays as it is. */
        a.grad.q = a.grad.k = a.grad.v = NULL;
        ok(g->be->linear_backward(g->dev, &a, 1, &err), &err);
        for (int f = 0; f < MAP_Q; f++)
            expect(field_name[f], &p, p.grad_f[f], p.grad[f], p.n[f], limit);
        drop(g, &p);
    }
}

/* Gradients of several sequences in one call, in places of their own or behind each
 * other; those of parameters add up. */
static void batch_backward(const gpu *g, int window, bool together)
{
    enum { N = 3 };
    const size_t row[3] = {4 * 32, 2 * 32, 2 * 32}; /* numbers of a token: q, k, v */
    problem p[N];
    sti_linear_args a[N];
    still_error err;
    sti_block in[3] = {0}, grad[3] = {0};
    size_t at[N] = {0}, all = 0;
    for (int s = 0; s < N; s++) {
        p[s] = make(g, (linear_case){{4, 2, 32}, window, 70 + 31 * s}, 1.5, 5);
        for (int f = MAP_Q; s > 0 && f < FIELDS; f++) {
            memcpy(p[s].in[f], p[0].in[f], p[0].n[f] * sizeof(double));
            memset(p[s].grad[f], 0, p[0].n[f] * sizeof(double));
        }
        run_ref(&p[s]);
        for (int f = MAP_Q; s > 0 && f < FIELDS; f++)
            for (size_t i = 0; i < p[0].n[f]; i++) p[0].grad[f][i] += p[s].grad[f][i];
        at[s] = all;
        all += (size_t)p[s].T;
    }
    for (int f = 0; together && f < 3; f++) {
        in[f] = new_block(g, all * row[f] * sizeof(float));
        grad[f] = new_block(g, all * row[f] * sizeof(float));
        for (int s = 0; s < N; s++)
            move(g, (float *)in[f].p + at[s] * row[f], p[s].in_f[f],
                 p[s].n[f] * sizeof(float));
    }
    for (int s = 0; s < N; s++) {
        a[s] = args(&p[s], 0, p[s].T);
        const sti_linear_args first = args(&p[0], 0, p[0].T);
        a[s].in = first.in;
        a[s].grad = first.grad;
        const float *x[3];
        float *dx[3];
        for (int f = 0; f < 3; f++) {
            x[f] = together ? (float *)in[f].p + at[s] * row[f] : p[s].in_f[f];
            dx[f] = together ? (float *)grad[f].p + at[s] * row[f] : p[s].grad_f[f];
        }
        a[s].in.q = x[Q];
        a[s].in.k = x[K];
        a[s].in.v = x[V];
        a[s].grad.q = dx[Q];
        a[s].grad.k = dx[K];
        a[s].grad.v = dx[V];
    }
    ok(g->be->linear_backward(g->dev, a, N, &err), &err);
    for (int s = 0; s < N; s++) {
        expect(field_name[Q], &p[s], a[s].grad.q, p[s].grad[Q], p[s].n[Q], limit);
        expect(field_name[K], &p[s], a[s].grad.k, p[s].grad[K], p[s].n[K], limit);
        expect(field_name[V], &p[s], a[s].grad.v, p[s].grad[V], p[s].n[V], limit);
    }
    for (int f = MAP_Q; f < FIELDS; f++)
        expect(field_name[f], &p[0], p[0].grad_f[f], p[0].grad[f], p[0].n[f], limit);
    for (int f = 0; f < 3; f++) {
        g->be->mem_free(g->dev, &in[f]);
        g->be->mem_free(g->dev, &grad[f]);
    }
    for (int s = 0; s < N; s++) drop(g, &p[s]);
}

static void test_batches(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    for (int window = 0; window <= 40; window += 40) {
        batch_backward(g, window, false);
        batch_backward(g, window, true);
    }
}

/* Gates at both ends of the sigmoid: a state that vanishes within a token. */
static void test_far_gates(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    problem p = make(g, (linear_case){{2, 1, 16}, 4, 200}, 400, 3);
    const sti_linear_args a = args(&p, 0, p.T);
    still_error err;
    run_ref(&p);
    ok(g->be->linear(g->dev, &a, 1, &err), &err);
    expect("state", &p, p.st.s, p.want.s, 16 * 16, limit);
    ok(g->be->linear_backward(g->dev, &a, 1, &err), &err);
    expect("dv", &p, p.grad_f[V], p.grad[V], p.n[V], 1); /* logits round as much */
    const struct {
        const void *p;
        size_t n;
    } all[] = {{p.y_f, p.n[Q]}, {p.grad_f[Q], p.n[Q]}, {p.grad_f[K], p.n[K]}};
    for (int i = 0; i < 3; i++) {
        float *got = download(g, all[i].p, all[i].n * sizeof *got);
        for (size_t k = 0; k < all[i].n; k++) assert_true(isfinite(got[k]));
        free(got);
    }
    drop(g, &p);
}

/* A window kept in 16 bits, by spans and by steps. */
static void test_half_window(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    problem p = make(g, (linear_case){{6, 2, 64}, 32, 90}, 1.5, 3);
    still_error err;
    g->be->mem_free(g->dev, &p.block);
    gpu_state(g, &p, sizeof(uint16_t));
    run_ref(&p);
    for (int at = 0, n = 40; at < p.T; at += n, n = at < 60 ? 1 : 30) {
        const sti_linear_args a = args(&p, at, p.T - at < n ? p.T - at : n);
        ok(g->be->linear(g->dev, &a, 1, &err), &err);
    }
    expect("y", &p, p.y_f, p.y, p.n[Q], limit);
    expect_state(&p, limit);
    drop(g, &p);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    problem p = make(g, (linear_case){{2, 1, 16}, 4, 9}, 1.5, 3);
    still_error err;
    expect_refusals(g->be, g->dev, &p);
    const sti_linear_args a = args(&p, 0, 9);
    sti_linear_state there = p.st;
    p.st.s = p.in[Q]; /* the program's memory */
    assert_int_equal(g->be->linear(g->dev, &a, 1, &err), STILL_E_ARG);
    p.st = there;
    drop(g, &p);
}

RUN_TESTS_IN(setup, close_gpu, cmocka_unit_test(test_whole_sequences),
             cmocka_unit_test(test_any_cut), cmocka_unit_test(test_steps),
             cmocka_unit_test(test_recorded), cmocka_unit_test(test_start_values),
             cmocka_unit_test(test_batches), cmocka_unit_test(test_far_gates),
             cmocka_unit_test(test_half_window), cmocka_unit_test(test_bad_arguments))
