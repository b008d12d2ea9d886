/* test_linear_cpu.c - Liger and SUPRA on the cpu backend, every instruction set here:
 * against the reference in double, cut anywhere, from any number of threads. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops/ops.h"

static const char *const isa_name[] = {"portable", "avx2", "avx512"};
enum { N_ISA = 3 };

static sti_dev *new_dev(const char *isa, int threads)
{
    const sti_dev_params p = {.threads = threads, .isa = isa, .max_k = 64};
    still_error err;
    sti_dev *dev;
    const still_status st = sti_backend_find("cpu")->dev_new(&p, &dev, &err);
    if (st == STILL_E_UNSUPPORTED) return NULL; /* this processor lacks it */
    assert_int_equal(st, STILL_OK);
    return dev;
}

enum { Q, K, V, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {"q",     "k",      "v",     "map_q",
                                               "map_k", "bias_q", "bias_k"};

/* A sequence in double and in float: what goes in, what comes out of each backend. */
typedef struct problem {
    sti_linear_shape shape;
    int T, window;
    bool interleaved;
    size_t n[FIELDS];
    double *in[FIELDS], *grad[FIELDS], *y, *dy, *inv_freq;
    float *in_f[FIELDS], *grad_f[FIELDS], *y_f, *dy_f, *inv_freq_f;
    sti_linear_state st, st_f;
    sti_block block, block_f;
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

static float *narrow(const double *x, size_t n)
{
    float *y = calloc(n ? n : 1, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; x && i < n; i++) y[i] = (float)x[i];
    return y;
}

static sti_block state_of(sti_linear_state *st, const sti_linear_shape *shape,
                          int window, size_t size)
{
    sti_carve c = {0};
    sti_block block;
    sti_linear_state_carve(st, &c, shape, window, size, size);
    assert_true(sti_block_new(&block, c.used));
    c = (sti_carve){.base = block.p};
    sti_linear_state_carve(st, &c, shape, window, size, size);
    return block;
}

static problem make(sti_linear_shape shape, int window, int T, uint64_t seed)
{
    problem p = {.shape = shape, .T = T, .window = window, .interleaved = seed % 2};
    const size_t HD = (size_t)(shape.H * shape.D), GD = (size_t)(shape.G * shape.D);
    const size_t t = (size_t)T, maps = window == 0;
    const size_t n[FIELDS] = {t * HD,         t * GD,    t * GD,   maps * HD * HD,
                              maps * GD * GD, maps * HD, maps * GD};
    const double size[FIELDS] = {
        1.5, 1.5, 1, 1.5 / sqrt((double)HD), 1.5 / sqrt((double)GD), 0.3, 0.3};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        p.n[f] = n[f];
        p.in[f] = numbers(n[f], size[f], &rng);
        p.in_f[f] = narrow(p.in[f], n[f]);
        p.grad[f] = calloc(n[f] ? n[f] : 1, sizeof(double));
        p.grad_f[f] = narrow(NULL, n[f]);
    }
    p.dy = numbers(n[Q], 1, &rng);
    p.dy_f = narrow(p.dy, n[Q]);
    p.y = calloc(n[Q], sizeof(double));
    p.y_f = narrow(NULL, n[Q]);
    p.inv_freq = numbers((size_t)shape.D / 2, 1, &rng);
    for (int i = 0; i < shape.D / 2; i++)
        p.inv_freq[i] = (double)(float)pow(10000, -2.0 * i / shape.D);
    p.inv_freq_f = narrow(p.inv_freq, (size_t)shape.D / 2);
    p.block = state_of(&p.st, &shape, window, sizeof(double));
    p.block_f = state_of(&p.st_f, &shape, window, sizeof(float));
    return p;
}

static void drop(problem *p)
{
    for (int f = 0; f < FIELDS; f++) {
        free(p->in[f]);
        free(p->grad[f]);
        free(p->in_f[f]);
        free(p->grad_f[f]);
    }
    void *all[] = {p->y, p->dy, p->inv_freq, p->y_f, p->dy_f, p->inv_freq_f};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&p->block);
    sti_block_free(&p->block_f);
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
                           .state = &p->st,
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
    assert_int_equal(maps ? sti_ref_supra_forward(&a, &err)
                          : sti_ref_liger_forward(&a, &err),
                     STILL_OK);
    assert_int_equal(maps ? sti_ref_supra_backward(&a, &err)
                          : sti_ref_liger_backward(&a, &err),
                     STILL_OK);
}

static sti_linear_args args(problem *p, int from, int n)
{
    const size_t at = (size_t)from, HD = (size_t)(p->shape.H * p->shape.D),
                 GD = (size_t)(p->shape.G * p->shape.D);
    sti_linear_args a = {
        .shape = p->shape,
        .T = n,
        .window = p->window,
        .in = {.q = p->in_f[Q] + at * HD,
               .k = p->in_f[K] + at * GD,
               .v = p->in_f[V] + at * GD,
               .inv_freq = p->inv_freq_f,
               .interleaved = p->interleaved},
        .state = &p->st_f,
        .y = p->y_f + at * HD,
        .dy = p->dy_f,
        .grad = {.q = p->grad_f[Q], .k = p->grad_f[K], .v = p->grad_f[V]}};
    if (p->window == 0) {
        a.in.map_q = p->in_f[MAP_Q];
        a.in.map_k = p->in_f[MAP_K];
        a.in.bias_q = p->in_f[BIAS_Q];
        a.in.bias_k = p->in_f[BIAS_K];
        a.grad.map_q = p->grad_f[MAP_Q];
        a.grad.map_k = p->grad_f[MAP_K];
        a.grad.bias_q = p->grad_f[BIAS_Q];
        a.grad.bias_k = p->grad_f[BIAS_K];
    }
    return a;
}

static void run_cpu(sti_dev *dev, problem *p)
{
    const sti_backend *b = sti_backend_find("cpu");
    const sti_linear_args a = args(p, 0, p->T);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(p->grad_f[f], 0, p->n[f] * sizeof(float));
    memset(p->block_f.p, 0, p->block_f.bytes);
    p->st_f.pos = 0;
    assert_int_equal(b->linear(dev, &a, 1, &err), STILL_OK);
    assert_int_equal(b->linear_backward(dev, &a, 1, &err), STILL_OK);
}

static void expect(const char *what, const problem *p, const float *got,
                   const double *want, size_t n, double limit)
{
    /* SUPRA's norm makes y of a single token almost independent of its query: what is
     * left is a difference of numbers of size 1. */
    double size = 0.1, worst = 0;
    for (size_t i = 0; i < n; i++) size = fmax(size, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        assert_true(isfinite(got[i]));
        worst = fmax(worst, fabs((double)got[i] - want[i]));
    }
    if (!(worst <= limit * size))
        fail_msg("%s: error %.2g of %.2g over %.2g (T %d H %d G %d D %d window %d)",
                 what, worst, size, limit, p->T, p->shape.H, p->shape.G, p->shape.D,
                 p->window);
}

static void compare(const problem *p, double limit)
{
    const size_t D = (size_t)p->shape.D;
    expect("y", p, p->y_f, p->y, p->n[Q], limit);
    expect("state", p, p->st_f.s, p->st.s,
           (size_t)(p->window ? p->shape.G : p->shape.H) * D * D, limit);
    for (int f = 0; f < FIELDS; f++)
        expect(field_name[f], p, p->grad_f[f], p->grad[f], p->n[f], limit);
}

static const struct {
    sti_linear_shape shape;
    int window, T;
} cases[] = {
    {{4, 2, 6}, 5, 21},   {{4, 2, 6}, 0, 21},   {{9, 3, 64}, 64, 150},
    {{3, 1, 64}, 0, 150}, {{2, 1, 80}, 16, 70}, {{2, 2, 80}, 0, 70},
    {{1, 1, 128}, 1, 40}, {{1, 1, 128}, 0, 40}, {{2, 1, 16}, 100, 64},
    {{2, 1, 16}, 0, 64},  {{70, 1, 4}, 3, 9},   {{2, 1, 16}, 4, 1},
    {{2, 1, 16}, 0, 1},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static void test_against_reference(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(cases[i].shape, cases[i].window, cases[i].T, (uint64_t)i + 1);
        run_ref(&p);
        for (int isa = 0; isa < N_ISA; isa++) {
            sti_dev *dev = new_dev(isa_name[isa], 2);
            if (!dev) continue;
            run_cpu(dev, &p);
            compare(&p, 2e-5);
            sti_backend_find("cpu")->dev_free(dev);
        }
        drop(&p);
    }
}

/* Two sessions in one call, fed in pieces of any size. */
static void test_any_cut(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(cases[i].shape, cases[i].window, cases[i].T, 7),
                o = make(cases[i].shape, cases[i].window, cases[i].T, 7);
        sti_dev *dev = new_dev(NULL, 2);
        run_ref(&p);
        for (int at = 0, step = 1; at < p.T;
             at += step, step = 1 + (step * 7 + 3) % 29) {
            const int n = p.T - at < step ? p.T - at : step;
            const sti_linear_args two[] = {args(&p, at, n), args(&o, at, n)};
            still_error err;
            assert_int_equal(b->linear(dev, two, 2, &err), STILL_OK);
        }
        assert_int_equal(p.st_f.pos, p.T);
        expect("y", &p, p.y_f, p.y, p.n[Q], 2e-5);
        assert_memory_equal(p.y_f, o.y_f, p.n[Q] * sizeof(float));
        b->dev_free(dev);
        drop(&p);
        drop(&o);
    }
}

static void test_threads(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(cases[i].shape, cases[i].window, cases[i].T, 5),
                o = make(cases[i].shape, cases[i].window, cases[i].T, 5);
        sti_dev *one = new_dev(NULL, 1), *five = new_dev(NULL, 5);
        run_cpu(one, &p);
        run_cpu(five, &o);
        assert_memory_equal(p.y_f, o.y_f, p.n[Q] * sizeof(float));
        for (int f = 0; f < FIELDS; f++)
            assert_memory_equal(p.grad_f[f], o.grad_f[f], p.n[f] * sizeof(float));
        sti_backend_find("cpu")->dev_free(one);
        sti_backend_find("cpu")->dev_free(five);
        drop(&p);
        drop(&o);
    }
}

/* Gates at both ends of the sigmoid: a state that vanishes within a token. */
static void test_far_gates(void **state)
{
    (void)state;
    problem p = make((sti_linear_shape){2, 1, 16}, 4, 60, 3);
    for (size_t i = 0; i < p.n[K]; i++) {
        p.in[K][i] *= 256;
        p.in_f[K][i] *= 256;
    }
    sti_dev *dev = new_dev(NULL, 1);
    run_ref(&p);
    run_cpu(dev, &p);
    /* Logits of the window are as large, so their rounding is felt there. */
    expect("state", &p, p.st_f.s, p.st.s, 16 * 16, 2e-5);
    for (size_t i = 0; i < p.n[Q]; i++) assert_true(isfinite(p.y_f[i]));
    for (int f = 0; f < 3; f++)
        for (size_t i = 0; i < p.n[f]; i++) assert_true(isfinite(p.grad_f[f][i]));
    sti_backend_find("cpu")->dev_free(dev);
    drop(&p);
}

/* A window kept in 16 bits: what its rounding costs, no more. */
static void test_half_window(void **state)
{
    (void)state;
    problem p = make((sti_linear_shape){6, 2, 64}, 32, 90, 3);
    sti_block_free(&p.block_f);
    sti_carve c = {0};
    sti_linear_state_carve(&p.st_f, &c, &p.shape, 32, sizeof(uint16_t), sizeof(float));
    assert_true(sti_block_new(&p.block_f, c.used));
    c = (sti_carve){.base = p.block_f.p};
    sti_linear_state_carve(&p.st_f, &c, &p.shape, 32, sizeof(uint16_t), sizeof(float));
    sti_dev *dev = new_dev(NULL, 2);
    run_ref(&p);
    run_cpu(dev, &p);
    expect("y", &p, p.y_f, p.y, p.n[Q], 2e-3);
    sti_backend_find("cpu")->dev_free(dev);
    drop(&p);
}

/* A call needs no more than was reserved, which the bill knows. */
static void test_reserved(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    int more[2] = {0}; /* cases that need more than a matrix product: SUPRA, Liger */
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(cases[i].shape, cases[i].window, cases[i].T, 5);
        sti_dev *dev = new_dev(NULL, 1);
        const sti_linear_args a = args(&p, 0, p.T);
        still_error err;
        const size_t before = b->dev_bytes(dev, p.T);
        assert_int_equal(b->linear_reserve(dev, &p.shape, p.window, p.T, &err),
                         STILL_OK);
        const size_t reserved = b->dev_bytes(dev, p.T);
        more[p.window > 0] += reserved > before;
        assert_int_equal(b->linear(dev, &a, 1, &err), STILL_OK);
        assert_int_equal(b->dev_bytes(dev, p.T), reserved);
        b->dev_free(dev);
        drop(&p);
    }
    assert_true(more[0] > 0 && more[1] > 0);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    problem p = make((sti_linear_shape){2, 1, 16}, 4, 9, 3);
    sti_dev *dev = new_dev(NULL, 1);
    still_error err;
    sti_linear_args a = args(&p, 0, 9);
    a.shape.G = 3;
    assert_int_equal(b->linear_reserve(dev, &a.shape, 4, 9, &err), STILL_E_ARG);
    assert_int_equal(b->linear(dev, &a, 1, &err), STILL_E_ARG);
    assert_int_equal(b->linear_backward(dev, &a, 1, &err), STILL_E_ARG);
    const sti_linear_args other[] = {args(&p, 0, 9), a};
    assert_int_equal(b->linear(dev, other, 2, &err), STILL_E_ARG);
    p.st_f.kv_size = 8;
    a = args(&p, 0, 9);
    assert_int_equal(b->linear(dev, &a, 1, &err), STILL_E_UNSUPPORTED);
    b->dev_free(dev);
    drop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference), cmocka_unit_test(test_any_cut),
        cmocka_unit_test(test_threads),           cmocka_unit_test(test_far_gates),
        cmocka_unit_test(test_half_window),       cmocka_unit_test(test_reserved),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
