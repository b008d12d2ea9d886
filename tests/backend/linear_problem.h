/* linear_problem.h - random problems of Liger and SUPRA for the tests of both backends:
 * a sequence in double, what the reference makes of it, and the same in float for the
 * backend under test. */
#ifndef TESTS_LINEAR_PROBLEM_H
#define TESTS_LINEAR_PROBLEM_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops/ops.h"

enum { Q, K, V, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {"dq",     "dk",      "dv",     "dmap_q",
                                               "dmap_k", "dbias_q", "dbias_k"};

typedef struct linear_case {
    sti_linear_shape shape;
    int window, T; /* no window: SUPRA */
} linear_case;

static const linear_case linear_cases[] = {
    {{4, 2, 6}, 5, 21},     {{4, 2, 6}, 0, 21},    {{9, 3, 64}, 64, 150},
    {{3, 1, 64}, 0, 150},   {{2, 1, 80}, 16, 70},  {{2, 2, 80}, 0, 70},
    {{1, 1, 128}, 1, 40},   {{1, 1, 128}, 0, 40},  {{2, 1, 16}, 100, 64},
    {{2, 1, 16}, 0, 64},    {{70, 1, 4}, 3, 9},    {{2, 1, 16}, 4, 1},
    {{2, 1, 16}, 0, 1},     {{4, 2, 96}, 33, 129}, {{4, 2, 96}, 0, 129},
    {{2, 1, 32}, 200, 333}, {{2, 2, 32}, 0, 333},  {{8, 2, 128}, 64, 65},
    {{2, 1, 64}, 70, 1100},
};
enum { N_CASES = sizeof linear_cases / sizeof *linear_cases };

typedef struct problem {
    sti_linear_shape shape;
    int T, window;
    bool interleaved;
    size_t n[FIELDS]; /* 0: a parameter that is not there */
    double *in[FIELDS], *grad[FIELDS], *y, *dy, *inv_freq;
    sti_linear_state want;
    sti_block want_block;
    /* The same in float; all but inv_freq_f is the test's to make, in the memory of its
     * backend. */
    float *in_f[FIELDS], *grad_f[FIELDS], *y_f, *dy_f, *inv_freq_f;
    sti_linear_state st;
    sti_block block;
} problem;

/* Random numbers that float holds exactly. */
static inline double *numbers(size_t n, double scale, uint64_t *rng)
{
    double *x = calloc(n ? n : 1, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        *rng = *rng * 6364136223846793005u + 1442695040888963407u;
        x[i] = (double)(float)(scale * ((double)(*rng >> 33) / (1u << 30) - 1));
    }
    return x;
}

static inline sti_block new_state(sti_linear_state *st, const sti_linear_shape *shape,
                                  int window, size_t kv_size, size_t size)
{
    sti_carve c = {0};
    sti_block block;
    sti_linear_state_carve(st, &c, shape, window, kv_size, size);
    assert_true(sti_block_new(&block, c.used));
    c = (sti_carve){.base = block.p};
    sti_linear_state_carve(st, &c, shape, window, kv_size, size);
    return block;
}

/* grad_size: of what the gradients of parameters are added to. */
static inline problem make_problem(linear_case c, double key_size, double grad_size,
                                   uint64_t seed)
{
    problem p = {
        .shape = c.shape, .T = c.T, .window = c.window, .interleaved = seed % 2};
    const size_t HD = (size_t)(c.shape.H * c.shape.D), maps = c.window == 0;
    const size_t GD = (size_t)(c.shape.G * c.shape.D), t = (size_t)c.T;
    const size_t n[FIELDS] = {t * HD,         t * GD,    t * GD,   maps * HD * HD,
                              maps * GD * GD, maps * HD, maps * GD};
    const double size[FIELDS] = {
        1.5, key_size, 1, 1.5 / sqrt((double)HD), 1.5 / sqrt((double)GD), 0.3, 0.3};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        p.n[f] = n[f];
        p.in[f] = numbers(n[f], size[f], &rng);
        p.grad[f] = numbers(n[f], f < MAP_Q ? 0 : grad_size, &rng);
    }
    p.dy = numbers(n[Q], 1, &rng);
    p.y = numbers(n[Q], 0, &rng);
    p.inv_freq = numbers((size_t)c.shape.D / 2, 1, &rng);
    p.inv_freq_f = calloc((size_t)c.shape.D / 2, sizeof(float));
    assert_non_null(p.inv_freq_f);
    for (int i = 0; i < c.shape.D / 2; i++) {
        p.inv_freq_f[i] = (float)pow(10000, -2.0 * i / c.shape.D);
        p.inv_freq[i] = (double)p.inv_freq_f[i];
    }
    p.want_block =
        new_state(&p.want, &c.shape, c.window, sizeof(double), sizeof(double));
    return p;
}

/* What make_problem made. */
static inline void drop_problem(problem *p)
{
    for (int f = 0; f < FIELDS; f++) {
        free(p->in[f]);
        free(p->grad[f]);
    }
    void *all[] = {p->y, p->dy, p->inv_freq, p->inv_freq_f};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&p->want_block);
}

/* The members of a call's in or grad, of pointers to the fields. */
#define FIELDS_OF(p, at)                                                               \
    .q = (at)[Q], .k = (at)[K], .v = (at)[V],                                          \
    .map_q = (p)->n[MAP_Q] ? (at)[MAP_Q] : NULL,                                       \
    .map_k = (p)->n[MAP_K] ? (at)[MAP_K] : NULL,                                       \
    .bias_q = (p)->n[BIAS_Q] ? (at)[BIAS_Q] : NULL,                                    \
    .bias_k = (p)->n[BIAS_K] ? (at)[BIAS_K] : NULL

static inline void run_ref(problem *p)
{
    const bool maps = p->window == 0;
    const sti_linear_args64 a = {.shape = p->shape,
                                 .T = p->T,
                                 .window = p->window,
                                 .in = {FIELDS_OF(p, p->in), .inv_freq = p->inv_freq,
                                        .interleaved = p->interleaved},
                                 .state = &p->want,
                                 .y = p->y,
                                 .dy = p->dy,
                                 .grad = {FIELDS_OF(p, p->grad)}};
    still_error err;
    if (maps ? sti_ref_supra_forward(&a, &err) : sti_ref_liger_forward(&a, &err))
        fail_msg("%s", err.text);
    if (maps ? sti_ref_supra_backward(&a, &err) : sti_ref_liger_backward(&a, &err))
        fail_msg("%s", err.text);
}

/* Tokens [from, from + n) for the backend under test. */
static inline sti_linear_args args(problem *p, int from, int n)
{
    const size_t at = (size_t)from, HD = (size_t)(p->shape.H * p->shape.D),
                 GD = (size_t)(p->shape.G * p->shape.D);
    sti_linear_args a = {.shape = p->shape,
                         .T = n,
                         .window = p->window,
                         .in = {FIELDS_OF(p, p->in_f), .inv_freq = p->inv_freq_f,
                                .interleaved = p->interleaved},
                         .state = &p->st,
                         .y = p->y_f + at * HD,
                         .dy = p->dy_f,
                         .grad = {FIELDS_OF(p, p->grad_f)}};
    a.in.q += at * HD;
    a.in.k += at * GD;
    a.in.v += at * GD;
    return a;
}

/* ---- What must hold ------------------------------------------------------ */

/* Fails unless n numbers are what the reference says, up to `bound` by the test's own
 * measure. SUPRA's norm makes y of a single token almost independent of its query: what
 * is left is a difference of numbers of size 1, so that no measure is of y alone. */
static void expect(const char *what, const problem *p, const float *got,
                   const double *want, size_t n, double bound);

static inline void expect_error(const char *what, const problem *p, double error,
                                double bound)
{
    if (!(error <= bound))
        fail_msg("%s: error %.2g over %.2g (T %d H %d G %d D %d window %d)", what,
                 error, bound, p->T, p->shape.H, p->shape.G, p->shape.D, p->window);
}

static inline void expect_state(const problem *p, double bound)
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

static inline void expect_gradients(const problem *p, double bound)
{
    for (int f = 0; f < FIELDS; f++)
        expect(field_name[f], p, p->grad_f[f], p->grad[f], p->n[f], bound);
}

/* Of a problem of 9 tokens. */
static inline void expect_refusals(const sti_backend *b, sti_dev *dev, problem *p)
{
    still_error err;
    sti_linear_args a = args(p, 0, 9);
    a.shape.G = 3;
    assert_int_equal(b->linear_reserve(dev, &a.shape, 4, 9, &err), STILL_E_ARG);
    assert_int_equal(b->linear(dev, &a, 1, &err), STILL_E_ARG);
    assert_int_equal(b->linear_backward(dev, &a, 1, &err), STILL_E_ARG);
    const sti_linear_args other[] = {args(p, 0, 9), a};
    assert_int_equal(b->linear(dev, other, 2, &err), STILL_E_ARG);
    const size_t there = p->st.kv_size;
    p->st.kv_size = 8;
    a = args(p, 0, 9);
    assert_int_equal(b->linear(dev, &a, 1, &err), STILL_E_UNSUPPORTED);
    p->st.kv_size = there;
}

#endif
