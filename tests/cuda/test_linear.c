/* test_linear.c - Liger and SUPRA on the cuda backend against the reference in double:
 * outputs, states and every gradient over shapes, windows and lengths; prompts cut
 * anywhere, sessions of different lengths in one call, recorded steps.
 *
 * Products of many tokens run in TF32, whose rounding is 5e-4: errors are measured
 * against the size of the whole tensor and may be five times that. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops/ops.h"

static const double limit = 2.5e-3;
/* Steps are float arithmetic. */
static const double step_limit = 1e-5;

static const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static int setup(void **state)
{
    const sti_dev_params p = {.threads = 1, .max_k = 64};
    still_error err;
    sti_dev *dev = NULL;
    *state = cuda() && cuda()->dev_new(&p, &dev, &err) == STILL_OK ? dev : NULL;
    return 0;
}

static int teardown(void **state)
{
    if (*state) cuda()->dev_free(*state);
    return 0;
}

static void ok(still_status st, const still_error *err)
{
    if (st != STILL_OK) fail_msg("%s", err->text);
}

/* ---- Problems ------------------------------------------------------------ */

enum { Q, K, V, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {"dq",     "dk",      "dv",     "dmap_q",
                                               "dmap_k", "dbias_q", "dbias_k"};

/* A sequence in double, what the reference makes of it, and the same on the GPU. */
typedef struct problem {
    sti_dev *dev;
    sti_linear_shape shape;
    int T, window;
    bool interleaved;
    size_t n[FIELDS];
    double *in[FIELDS], *grad[FIELDS], *y, *dy, *inv_freq;
    float *inv_freq_f;
    sti_linear_state want, st;
    sti_block want_block, block;
    sti_block d_in[FIELDS], d_grad[FIELDS], d_y, d_dy;
} problem;

/* Random numbers that float holds exactly. */
static double *numbers(size_t n, double scale, uint64_t *rng)
{
    double *x = calloc(n ? n : 1, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        *rng = *rng * 6364136223846793005u + 1442695040888963407u;
        x[i] = (double)(float)(scale * ((double)(*rng >> 33) / (1u << 30) - 1));
    }
    return x;
}

static void move(sti_dev *dev, void *to, const void *from, size_t bytes)
{
    still_error err;
    ok(cuda()->mem_move(dev, to, from, bytes, &err), &err);
}

/* n floats on the GPU: x, or zeros. */
static sti_block new_floats(sti_dev *dev, const double *x, size_t n)
{
    still_error err;
    sti_block b;
    ok(cuda()->mem_new(dev, (n ? n : 1) * sizeof(float), &b, &err), &err);
    float *narrow = calloc(n ? n : 1, sizeof *narrow);
    assert_non_null(narrow);
    for (size_t i = 0; x && i < n; i++) narrow[i] = (float)x[i];
    move(dev, b.p, narrow, n * sizeof *narrow);
    free(narrow);
    return b;
}

static void new_state(problem *p, size_t kv)
{
    still_error err;
    sti_carve c = {0};
    sti_linear_state_carve(&p->st, &c, &p->shape, p->window, kv, sizeof(float));
    ok(cuda()->mem_new(p->dev, c.used, &p->block, &err), &err);
    c = (sti_carve){.base = p->block.p};
    sti_linear_state_carve(&p->st, &c, &p->shape, p->window, kv, sizeof(float));
}

static problem make(sti_dev *dev, sti_linear_shape shape, int window, int T,
                    double key_size, uint64_t seed)
{
    problem p = {
        .dev = dev, .shape = shape, .T = T, .window = window, .interleaved = seed % 2};
    const size_t HD = (size_t)(shape.H * shape.D), GD = (size_t)(shape.G * shape.D);
    const size_t t = (size_t)T, maps = window == 0;
    const size_t n[FIELDS] = {t * HD,         t * GD,    t * GD,   maps * HD * HD,
                              maps * GD * GD, maps * HD, maps * GD};
    const double size[FIELDS] = {
        1.5, key_size, 1, 1.5 / sqrt((double)HD), 1.5 / sqrt((double)GD), 0.3, 0.3};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        p.n[f] = n[f];
        p.in[f] = numbers(n[f], size[f], &rng);
        p.grad[f] = numbers(n[f], f < MAP_Q ? 0 : 1, &rng); /* is added to */
        p.d_in[f] = new_floats(dev, p.in[f], n[f]);
        p.d_grad[f] = new_floats(dev, p.grad[f], n[f]);
    }
    p.dy = numbers(n[Q], 1, &rng);
    p.d_dy = new_floats(dev, p.dy, n[Q]);
    p.y = numbers(n[Q], 0, &rng);
    p.d_y = new_floats(dev, NULL, n[Q]);
    p.inv_freq = numbers((size_t)shape.D / 2, 1, &rng);
    p.inv_freq_f = calloc((size_t)shape.D / 2, sizeof(float));
    assert_non_null(p.inv_freq_f);
    for (int i = 0; i < shape.D / 2; i++) {
        p.inv_freq_f[i] = (float)pow(10000, -2.0 * i / shape.D);
        p.inv_freq[i] = (double)p.inv_freq_f[i];
    }
    sti_carve c = {0};
    sti_linear_state_carve(&p.want, &c, &shape, window, sizeof(double), sizeof(double));
    assert_true(sti_block_new(&p.want_block, c.used));
    c = (sti_carve){.base = p.want_block.p};
    sti_linear_state_carve(&p.want, &c, &shape, window, sizeof(double), sizeof(double));
    new_state(&p, sizeof(float));
    return p;
}

static void drop(problem *p)
{
    for (int f = 0; f < FIELDS; f++) {
        free(p->in[f]);
        free(p->grad[f]);
        cuda()->mem_free(p->dev, &p->d_in[f]);
        cuda()->mem_free(p->dev, &p->d_grad[f]);
    }
    void *all[] = {p->y, p->dy, p->inv_freq, p->inv_freq_f};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&p->want_block);
    cuda()->mem_free(p->dev, &p->block);
    cuda()->mem_free(p->dev, &p->d_y);
    cuda()->mem_free(p->dev, &p->d_dy);
}

/* Leaves a parameter out: its start value; and its gradient. */
static void leave_out(problem *p, int field)
{
    free(p->in[field]);
    free(p->grad[field]);
    p->in[field] = p->grad[field] = NULL;
    p->n[field] = 0;
}

static void run_ref(problem *p)
{
    const bool maps = p->window == 0;
    sti_linear_args64 a = {.shape = p->shape,
                           .T = p->T,
                           .window = p->window,
                           .in = {.q = p->in[Q],
                                  .k = p->in[K],
                                  .v = p->in[V],
                                  .inv_freq = p->inv_freq,
                                  .interleaved = p->interleaved},
                           .state = &p->want,
                           .y = p->y,
                           .dy = p->dy,
                           .grad = {.q = p->grad[Q], .k = p->grad[K], .v = p->grad[V]}};
    if (maps) {
        a.in.map_q = p->in[MAP_Q];
        a.in.map_k = p->in[MAP_K];
        a.in.bias_q = p->in[BIAS_Q];
        a.in.bias_k = p->in[BIAS_K];
        a.grad.map_q = p->grad[MAP_Q];
        a.grad.map_k = p->grad[MAP_K];
        a.grad.bias_q = p->grad[BIAS_Q];
        a.grad.bias_k = p->grad[BIAS_K];
    }
    still_error err;
    ok(maps ? sti_ref_supra_forward(&a, &err) : sti_ref_liger_forward(&a, &err), &err);
    ok(maps ? sti_ref_supra_backward(&a, &err) : sti_ref_liger_backward(&a, &err),
       &err);
}

static void *parameter(const problem *p, const sti_block *b, int field)
{
    return p->n[field] ? b[field].p : NULL;
}

/* Tokens [from, from + n) for the GPU. */
static sti_linear_args args(problem *p, int from, int n)
{
    const size_t at = (size_t)from, HD = (size_t)(p->shape.H * p->shape.D),
                 GD = (size_t)(p->shape.G * p->shape.D);
    return (sti_linear_args){.shape = p->shape,
                             .T = n,
                             .window = p->window,
                             .in = {.q = (float *)p->d_in[Q].p + at * HD,
                                    .k = (float *)p->d_in[K].p + at * GD,
                                    .v = (float *)p->d_in[V].p + at * GD,
                                    .inv_freq = p->inv_freq_f,
                                    .interleaved = p->interleaved,
                                    .map_q = parameter(p, p->d_in, MAP_Q),
                                    .map_k = parameter(p, p->d_in, MAP_K),
                                    .bias_q = parameter(p, p->d_in, BIAS_Q),
                                    .bias_k = parameter(p, p->d_in, BIAS_K)},
                             .state = &p->st,
                             .y = (float *)p->d_y.p + at * HD,
                             .dy = p->d_dy.p,
                             .grad = {.q = p->d_grad[Q].p,
                                      .k = p->d_grad[K].p,
                                      .v = p->d_grad[V].p,
                                      .map_q = parameter(p, p->d_grad, MAP_Q),
                                      .map_k = parameter(p, p->d_grad, MAP_K),
                                      .bias_q = parameter(p, p->d_grad, BIAS_Q),
                                      .bias_k = parameter(p, p->d_grad, BIAS_K)}};
}

/* |got - want| against |want|. SUPRA's norm makes y of a single token almost
 * independent of its query: what is left is a difference of numbers of size 1. */
static void expect(const char *what, const problem *p, const void *device,
                   const double *want, size_t n, double bound)
{
    float *got = calloc(n ? n : 1, sizeof *got);
    assert_non_null(got);
    move(p->dev, got, device, n * sizeof *got);
    double off = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)got[i] - want[i];
        if (!isfinite(got[i])) fail_msg("%s: number %zu is not finite", what, i);
        off += d * d;
        size += want[i] * want[i];
    }
    free(got);
    const double error = sqrt(off) / (sqrt(size) + 0.05 * sqrt((double)n) + 1e-30);
    if (!(error <= bound))
        fail_msg("%s: error %.2g over %.2g (T %d H %d G %d D %d window %d)", what,
                 error, bound, p->T, p->shape.H, p->shape.G, p->shape.D, p->window);
}

static void expect_state(const problem *p, double bound)
{
    const size_t D = (size_t)p->shape.D,
                 heads = (size_t)(p->window ? p->shape.G : p->shape.H);
    assert_int_equal(p->st.pos, p->T);
    expect("state", p, p->st.s, p->want.s, heads * D * D, bound);
    if (p->window == 0 || p->st.kv_size != sizeof(float)) return;
    const size_t ring = (size_t)p->shape.G * (size_t)p->window * D;
    expect("window's keys", p, p->st.win_k, p->want.win_k, ring, 1e-5);
    expect("window's values", p, p->st.win_v, p->want.win_v, ring, 0);
}

static const struct {
    sti_linear_shape shape;
    int window, T;
} cases[] = {
    {{4, 2, 6}, 5, 21},     {{4, 2, 6}, 0, 21},    {{9, 3, 64}, 64, 150},
    {{3, 1, 64}, 0, 150},   {{2, 1, 80}, 16, 70},  {{2, 2, 80}, 0, 70},
    {{1, 1, 128}, 1, 40},   {{1, 1, 128}, 0, 40},  {{2, 1, 16}, 100, 64},
    {{2, 1, 16}, 0, 64},    {{70, 1, 4}, 3, 9},    {{2, 1, 16}, 4, 1},
    {{2, 1, 16}, 0, 1},     {{4, 2, 96}, 33, 129}, {{4, 2, 96}, 0, 129},
    {{2, 1, 32}, 200, 333}, {{2, 2, 32}, 0, 333},  {{8, 2, 128}, 64, 65},
    {{2, 1, 64}, 70, 1100},
};
enum { N_CASES = sizeof cases / sizeof *cases };

/* ---- Tests --------------------------------------------------------------- */

static void test_whole_sequences(void **state)
{
    if (!*state) skip();
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(*state, cases[i].shape, cases[i].window, cases[i].T, 1.5,
                         (uint64_t)i + 1);
        const sti_linear_args a = args(&p, 0, p.T);
        still_error err;
        run_ref(&p);
        ok(cuda()->linear_reserve(p.dev, &p.shape, p.window, p.T, &err), &err);
        ok(cuda()->linear(p.dev, &a, 1, &err), &err);
        expect("y", &p, p.d_y.p, p.y, p.n[Q], limit);
        expect_state(&p, limit);
        ok(cuda()->linear_backward(p.dev, &a, 1, &err), &err);
        for (int f = 0; f < FIELDS; f++)
            expect(field_name[f], &p, p.d_grad[f].p, p.grad[f], p.n[f], limit);
        drop(&p);
    }
}

/* Three sessions in one call, each cut into pieces of its own: some are stepped, some
 * go by spans, some have nothing to do. */
static void test_any_cut(void **state)
{
    if (!*state) skip();
    enum { N = 3 };
    for (int i = 0; i < N_CASES; i++) {
        problem p[N];
        int at[N] = {0}, step[N] = {1, 8, 90}, left = 1;
        for (int s = 0; s < N; s++) {
            p[s] = make(*state, cases[i].shape, cases[i].window, cases[i].T + 3 * s,
                        1.5, 7);
            if (s > 0 && cases[i].window == 0) /* sessions share parameters */
                for (int f = MAP_Q; f < FIELDS; f++) {
                    move(*state, p[s].d_in[f].p, p[0].d_in[f].p,
                         p[0].n[f] * sizeof(float));
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
            ok(cuda()->linear(*state, a, N, &err), &err);
        }
        for (int s = 0; s < N; s++) {
            expect("y", &p[s], p[s].d_y.p, p[s].y, p[s].n[Q], limit);
            expect_state(&p[s], limit);
            drop(&p[s]);
        }
    }
}

/* Token by token, heads too wide for tiles as well. */
static void test_steps(void **state)
{
    if (!*state) skip();
    static const struct {
        sti_linear_shape shape;
        int window, T;
    } steps[] = {{{4, 2, 6}, 5, 21},   {{4, 2, 6}, 0, 21},  {{9, 3, 64}, 16, 40},
                 {{9, 3, 64}, 0, 20},  {{7, 1, 80}, 9, 20}, {{2, 1, 128}, 70, 90},
                 {{2, 1, 160}, 6, 12}, {{2, 1, 160}, 0, 12}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        problem p =
            make(*state, steps[i].shape, steps[i].window, steps[i].T, 1.5, i + 1);
        still_error err;
        run_ref(&p);
        for (int at = 0; at < p.T; at++) {
            const sti_linear_args a = args(&p, at, 1);
            ok(cuda()->linear(p.dev, &a, 1, &err), &err);
        }
        expect("y", &p, p.d_y.p, p.y, p.n[Q], step_limit);
        expect_state(&p, step_limit);
        if (p.shape.D > 128) { /* many tokens at once are stepped too */
            const sti_linear_args a = args(&p, 0, p.T);
            ok(cuda()->mem_clear(p.dev, p.block.p, p.block.bytes, &err), &err);
            p.st.pos = 0;
            ok(cuda()->linear(p.dev, &a, 1, &err), &err);
            expect("y", &p, p.d_y.p, p.y, p.n[Q], step_limit);
            assert_int_equal(cuda()->linear_backward(p.dev, &a, 1, &err),
                             STILL_E_UNSUPPORTED);
        }
        drop(&p);
    }
}

/* Two sessions through passes that are recorded and replayed. */
static void test_recorded(void **state)
{
    if (!*state) skip();
    if (!cuda()->pass_begin) skip();
    for (int window = 0; window <= 8; window += 8) {
        enum { N = 2, T = 30 };
        const sti_linear_shape shape = {4, 2, 32};
        const size_t HD = 4 * 32, GD = 2 * 32;
        problem p[N];
        still_error err;
        sti_block q = new_floats(*state, NULL, N * HD),
                  k = new_floats(*state, NULL, N * GD),
                  v = new_floats(*state, NULL, N * GD),
                  y = new_floats(*state, NULL, N * HD);
        for (int s = 0; s < N; s++) {
            p[s] = make(*state, shape, window, T, 1.5, 3); /* equal but for v */
            for (size_t i = 0; i < p[s].n[V]; i++) p[s].in[V][i] *= 1 + s;
            cuda()->mem_free(*state, &p[s].d_in[V]);
            p[s].d_in[V] = new_floats(*state, p[s].in[V], p[s].n[V]);
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
                move(*state, (float *)q.p + s * HD,
                     (float *)p[s].d_in[Q].p + (size_t)t * HD, HD * sizeof(float));
                move(*state, (float *)k.p + s * GD,
                     (float *)p[s].d_in[K].p + (size_t)t * GD, GD * sizeof(float));
                move(*state, (float *)v.p + s * GD,
                     (float *)p[s].d_in[V].p + (size_t)t * GD, GD * sizeof(float));
            }
            ok(cuda()->pass_begin(*state, &pass, &done, &err), &err);
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
                ok(cuda()->linear(*state, a, N, &err), &err);
            }
            ok(cuda()->pass_end(*state, &err), &err);
            for (size_t s = 0; s < N; s++)
                move(*state, (float *)p[s].d_y.p + (size_t)t * HD,
                     (float *)y.p + s * HD, HD * sizeof(float));
        }
        assert_true(replays > T / 2);
        for (int s = 0; s < N; s++) {
            p[s].st.pos = T;
            expect("y", &p[s], p[s].d_y.p, p[s].y, p[s].n[Q], step_limit);
            expect_state(&p[s], step_limit);
            drop(&p[s]);
        }
        sti_block *all[] = {&q, &k, &v, &y};
        for (int i = 0; i < 4; i++) cuda()->mem_free(*state, all[i]);
    }
}

/* Maps, biases and gradients that are not there. */
static void test_start_values(void **state)
{
    if (!*state) skip();
    for (int without = 0; without < 4; without++) {
        problem p = make(*state, (sti_linear_shape){4, 2, 32}, 0, 70, 1.5, 11);
        still_error err;
        if (without & 1) leave_out(&p, MAP_Q), leave_out(&p, BIAS_K);
        if (without & 2) leave_out(&p, MAP_K), leave_out(&p, BIAS_Q);
        run_ref(&p);
        sti_linear_args a = args(&p, 0, p.T);
        ok(cuda()->linear(p.dev, &a, 1, &err), &err);
        expect("y", &p, p.d_y.p, p.y, p.n[Q], limit);
        ok(cuda()->linear_backward(p.dev, &a, 1, &err), &err);
        for (int f = 0; f < FIELDS; f++)
            expect(field_name[f], &p, p.d_grad[f].p, p.grad[f], p.n[f], limit);
        /* Only the maps: what was asked for before stays as it is. */
        a.grad.q = a.grad.k = a.grad.v = NULL;
        ok(cuda()->linear_backward(p.dev, &a, 1, &err), &err);
        for (int f = 0; f < MAP_Q; f++)
            expect(field_name[f], &p, p.d_grad[f].p, p.grad[f], p.n[f], limit);
        drop(&p);
    }
}

/* Gradients of several sequences in one call, in places of their own or behind each
 * other; those of parameters add up. */
static void batch_backward(sti_dev *dev, int window, bool together)
{
    enum { N = 3 };
    const sti_linear_shape shape = {4, 2, 32};
    const size_t row[3] = {4 * 32, 2 * 32, 2 * 32}; /* numbers of a token: q, k, v */
    problem p[N];
    sti_linear_args a[N];
    still_error err;
    sti_block in[3] = {0}, grad[3] = {0};
    size_t at[N] = {0}, all = 0;
    for (int s = 0; s < N; s++) {
        p[s] = make(dev, shape, window, 70 + 31 * s, 1.5, 5);
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
        in[f] = new_floats(dev, NULL, all * row[f]);
        grad[f] = new_floats(dev, NULL, all * row[f]);
        for (int s = 0; s < N; s++)
            move(dev, (float *)in[f].p + at[s] * row[f], p[s].d_in[f].p,
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
            x[f] = together ? (float *)in[f].p + at[s] * row[f] : p[s].d_in[f].p;
            dx[f] = together ? (float *)grad[f].p + at[s] * row[f] : p[s].d_grad[f].p;
        }
        a[s].in.q = x[Q];
        a[s].in.k = x[K];
        a[s].in.v = x[V];
        a[s].grad.q = dx[Q];
        a[s].grad.k = dx[K];
        a[s].grad.v = dx[V];
    }
    ok(cuda()->linear_backward(dev, a, N, &err), &err);
    for (int s = 0; s < N; s++) {
        expect(field_name[Q], &p[s], a[s].grad.q, p[s].grad[Q], p[s].n[Q], limit);
        expect(field_name[K], &p[s], a[s].grad.k, p[s].grad[K], p[s].n[K], limit);
        expect(field_name[V], &p[s], a[s].grad.v, p[s].grad[V], p[s].n[V], limit);
    }
    for (int f = MAP_Q; f < FIELDS; f++)
        expect(field_name[f], &p[0], p[0].d_grad[f].p, p[0].grad[f], p[0].n[f], limit);
    for (int f = 0; f < 3; f++) {
        cuda()->mem_free(dev, &in[f]);
        cuda()->mem_free(dev, &grad[f]);
    }
    for (int s = 0; s < N; s++) drop(&p[s]);
}

static void test_batches(void **state)
{
    if (!*state) skip();
    for (int window = 0; window <= 40; window += 40) {
        batch_backward(*state, window, false);
        batch_backward(*state, window, true);
    }
}

/* Gates at both ends of the sigmoid: a state that vanishes within a token. */
static void test_far_gates(void **state)
{
    if (!*state) skip();
    problem p = make(*state, (sti_linear_shape){2, 1, 16}, 4, 200, 400, 3);
    const sti_linear_args a = args(&p, 0, p.T);
    still_error err;
    run_ref(&p);
    ok(cuda()->linear(p.dev, &a, 1, &err), &err);
    expect("state", &p, p.st.s, p.want.s, 16 * 16, limit);
    ok(cuda()->linear_backward(p.dev, &a, 1, &err), &err);
    expect("dv", &p, p.d_grad[V].p, p.grad[V], p.n[V], 1); /* logits round as much */
    const struct {
        const void *p;
        size_t n;
    } all[] = {{p.d_y.p, p.n[Q]}, {p.d_grad[Q].p, p.n[Q]}, {p.d_grad[K].p, p.n[K]}};
    for (int i = 0; i < 3; i++) {
        float *got = calloc(all[i].n, sizeof *got);
        assert_non_null(got);
        move(p.dev, got, all[i].p, all[i].n * sizeof *got);
        for (size_t k = 0; k < all[i].n; k++) assert_true(isfinite(got[k]));
        free(got);
    }
    drop(&p);
}

/* A window kept in 16 bits, by spans and by steps. */
static void test_half_window(void **state)
{
    if (!*state) skip();
    problem p = make(*state, (sti_linear_shape){6, 2, 64}, 32, 90, 1.5, 3);
    still_error err;
    cuda()->mem_free(p.dev, &p.block);
    new_state(&p, sizeof(uint16_t));
    run_ref(&p);
    for (int at = 0, n = 40; at < p.T; at += n, n = at < 60 ? 1 : 30) {
        const sti_linear_args a = args(&p, at, p.T - at < n ? p.T - at : n);
        ok(cuda()->linear(p.dev, &a, 1, &err), &err);
    }
    expect("y", &p, p.d_y.p, p.y, p.n[Q], limit);
    expect_state(&p, limit);
    drop(&p);
}

static void test_bad_arguments(void **state)
{
    if (!*state) skip();
    problem p = make(*state, (sti_linear_shape){2, 1, 16}, 4, 9, 1.5, 3);
    still_error err;
    sti_linear_args a = args(&p, 0, 9);
    a.shape.G = 3;
    assert_int_equal(cuda()->linear_reserve(p.dev, &a.shape, 4, 9, &err), STILL_E_ARG);
    assert_int_equal(cuda()->linear(p.dev, &a, 1, &err), STILL_E_ARG);
    assert_int_equal(cuda()->linear_backward(p.dev, &a, 1, &err), STILL_E_ARG);
    const sti_linear_args other[] = {args(&p, 0, 9), a};
    assert_int_equal(cuda()->linear(p.dev, other, 2, &err), STILL_E_ARG);
    p.st.kv_size = 8;
    a = args(&p, 0, 9);
    assert_int_equal(cuda()->linear(p.dev, &a, 1, &err), STILL_E_UNSUPPORTED);
    p.st.kv_size = 4;
    sti_linear_state there = p.st;
    p.st.s = p.in[Q]; /* the program's memory */
    assert_int_equal(cuda()->linear(p.dev, &a, 1, &err), STILL_E_ARG);
    p.st = there;
    drop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_sequences), cmocka_unit_test(test_any_cut),
        cmocka_unit_test(test_steps),           cmocka_unit_test(test_recorded),
        cmocka_unit_test(test_start_values),    cmocka_unit_test(test_batches),
        cmocka_unit_test(test_far_gates),       cmocka_unit_test(test_half_window),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
