/* test_train_ops.c - the operators of training. The reference against differences of
 * the functions it claims to be the gradients of; the cpu backend against the
 * reference, on every instruction set here, every weight type and odd sizes; and bit
 * for bit against itself with other threads and other rows around. */
#include "cpu_device.h"
#include "matrix.h"

#include <stdio.h>

enum { THREADS_MAX = 3, MAX_K = 2048 };

static const sti_backend *ref(void)
{
    return sti_backend_find("ref");
}

static sti_dev *any_dev(const sti_backend *b, const char *isa, int threads)
{
    return dev_of(b, (sti_dev_params){.threads = threads, .isa = isa, .max_k = MAX_K});
}

/* |y - want| <= rel |want| + abs, and a NaN never. */
static void assert_near(double y, double want, double rel, double abs, const char *what,
                        size_t i)
{
    if (!(fabs(y - want) <= rel * fabs(want) + abs))
        fail_msg("%s, element %zu: %.9g, expected %.9g", what, i, y, want);
}

/* ---- Weights ------------------------------------------------------------- */

static const sti_dtype TYPES[] = {STI_F32,  STI_F16,  STI_BF16, STI_Q4_0, STI_Q4_1,
                                  STI_Q5_0, STI_Q5_1, STI_Q8_0, STI_Q2_K, STI_Q3_K,
                                  STI_Q4_K, STI_Q5_K, STI_Q6_K};
enum { N_TYPES = sizeof TYPES / sizeof *TYPES };

/* ---- matmul_back --------------------------------------------------------- */

typedef struct back_case {
    int M, n;
    int64_t K, N[STI_MATMUL_MAX];
    sti_dtype type[STI_MATMUL_MAX];
    bool accumulate;
    source s[STI_MATMUL_MAX];
    float *dy[STI_MATMUL_MAX];
    float *dx, *size; /* as it was before; largest error per unit of rounding */
} back_case;

static void fill_case(back_case *c)
{
    for (int i = 0; i < c->n; i++) {
        c->s[i] = make_source(c->type[i], c->N[i], c->K, (uint32_t)(7 + i));
        c->dy[i] = floats((size_t)(c->M * c->N[i]), 1, (uint32_t)(20 + i));
    }
    const size_t out = (size_t)(c->M * c->K);
    c->dx = floats(out, 5, 30);
    c->size = floats(out, 0, 0);
    for (int m = 0; m < c->M; m++)
        for (int64_t k = 0; k < c->K; k++) {
            double sum = fabs(c->dx[m * c->K + k]);
            for (int i = 0; i < c->n; i++)
                for (int64_t n = 0; n < c->N[i]; n++)
                    sum +=
                        fabsf(c->dy[i][m * c->N[i] + n] * c->s[i].value[n * c->K + k]);
            c->size[m * c->K + k] = (float)sum;
        }
}

static void free_case(back_case *c)
{
    for (int i = 0; i < c->n; i++) {
        free_source(&c->s[i]);
        free(c->dy[i]);
    }
    free(c->dx);
    free(c->size);
}

/* dx of rows [m0, m0 + M); the caller frees it. */
static float *back(const sti_backend *b, sti_dev *dev, const back_case *c, int m0,
                   int M)
{
    sti_weight w[STI_MATMUL_MAX];
    float *dx = copy(c->dx + m0 * c->K, (size_t)(M * c->K));
    sti_matmul_back_args a = {.M = M, .n = c->n, .dx = dx, .accumulate = c->accumulate};
    for (int i = 0; i < c->n; i++) {
        assert_int_equal(b->weight_new(dev, &c->s[i].t, &w[i], NULL), STILL_OK);
        a.w[i] = &w[i];
        a.dy[i] = c->dy[i] + m0 * c->N[i];
    }
    assert_int_equal(b->matmul_back(dev, &a, NULL), STILL_OK);
    for (int i = 0; i < c->n; i++) b->weight_free(dev, &w[i]);
    return dx;
}

/* The reference against the definition, cpu against the reference, threads and rows. */
static void check_back(back_case c)
{
    fill_case(&c);
    const size_t out = (size_t)(c.M * c.K);
    sti_dev *dev = any_dev(ref(), NULL, 2);
    float *want = back(ref(), dev, &c, 0, c.M);
    ref()->dev_free(dev);
    for (int64_t k = 0; k < c.K; k += 1 + c.K / 7) { /* of the last row */
        const int64_t m = c.M - 1;
        double sum = c.accumulate ? c.dx[m * c.K + k] : 0;
        for (int i = 0; i < c.n; i++)
            for (int64_t n = 0; n < c.N[i]; n++)
                sum += (double)c.dy[i][m * c.N[i] + n] * c.s[i].value[n * c.K + k];
        assert_near(want[m * c.K + k], sum, 1e-6, 1e-12, "ref", (size_t)k);
    }
    for (int isa = 0; isa < N_ISA; isa++) {
        float *first = NULL;
        for (int threads = 1; threads <= THREADS_MAX; threads++) {
            dev = any_dev(cpu(), isa_name[isa], threads);
            if (!dev) break;
            float *got = back(cpu(), dev, &c, 0, c.M);
            if (!first) {
                first = got;
                for (size_t i = 0; i < out; i++)
                    assert_near(got[i], want[i], 0, 1.5e-6 * c.size[i], isa_name[isa],
                                i);
                const int m = c.M / 2;
                float *row = back(cpu(), dev, &c, m, 1);
                assert_memory_equal(row, got + m * c.K, (size_t)c.K * sizeof *row);
                free(row);
            } else {
                assert_memory_equal(got, first, out * sizeof *got);
                free(got);
            }
            free_dev(dev);
        }
        free(first);
    }
    free(want);
    free_case(&c);
}

static void matmul_back_of_every_type(void **state)
{
    (void)state;
    for (int t = 0; t < N_TYPES; t++) {
        const int block = sti_dtype_find((int)TYPES[t])->block;
        const int64_t K = block == 256 ? 768 : block == 32 ? 224 : 207;
        check_back(
            (back_case){.M = 13, .n = 1, .K = K, .N = {299}, .type = {TYPES[t]}});
        check_back(
            (back_case){.M = 1, .n = 1, .K = block, .N = {1}, .type = {TYPES[t]}});
    }
}

static void matmul_back_of_odd_sizes(void **state)
{
    (void)state;
    static const struct {
        int M;
        int64_t N, K;
    } size[] = {{1, 1, 1},     {2, 3, 5},     {7, 257, 16},  {8, 256, 48}, {9, 33, 49},
                {200, 67, 97}, {100, 17, 33}, {6, 40, 1213}, {17, 9, 577}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        check_back((back_case){.M = size[i].M,
                               .n = 1,
                               .K = size[i].K,
                               .N = {size[i].N},
                               .type = {STI_F32},
                               .accumulate = i % 2});
    check_back((back_case){.M = 11, .n = 1, .K = 1248, .N = {50}, .type = {STI_Q4_1}});
    check_back((back_case){.M = 5, .n = 1, .K = 1792, .N = {30}, .type = {STI_Q6_K}});
}

static void matmul_back_adds_up_matrices(void **state)
{
    (void)state;
    check_back((back_case){.M = 19,
                           .n = 4,
                           .K = 256,
                           .N = {48, 17, 5, 261},
                           .type = {STI_Q8_0, STI_Q4_K, STI_F16, STI_Q4_0},
                           .accumulate = true});
}

/* ---- matmul_grad --------------------------------------------------------- */

static void matmul_grad_is_the_definition(void **state)
{
    (void)state;
    static const int size[][3] = {{1, 1, 1},     {3, 2, 5},     {200, 17, 49},
                                  {700, 9, 33},  {256, 8, 48},  {257, 100, 97},
                                  {30, 5, 1300}, {64, 576, 16}, {13, 16, 576}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        const int M = size[i][0], N = size[i][1], K = size[i][2];
        const size_t out = (size_t)(N * K);
        float *dy = floats((size_t)(M * N), 1, 1), *x = floats((size_t)(M * K), 1, 2);
        float *dw = floats(out, 1, 3), *want = copy(dw, out);
        sti_matmul_grad_args a = {dy, x, want, M, N, K, 0.3f};
        sti_dev *dev = any_dev(ref(), NULL, 2);
        assert_int_equal(ref()->matmul_grad(dev, &a, 1, NULL), STILL_OK);
        ref()->dev_free(dev);
        double sum = 0; /* the last element by hand */
        for (int m = 0; m < M; m++) sum += (double)dy[m * N + N - 1] * x[m * K + K - 1];
        assert_near(want[out - 1], dw[out - 1] + (double)0.3f * sum, 1e-6, 1e-9, "ref",
                    out - 1);
        for (int isa = 0; isa < N_ISA; isa++) {
            float *first = NULL;
            for (int threads = 1; threads <= THREADS_MAX; threads++) {
                dev = any_dev(cpu(), isa_name[isa], threads);
                if (!dev) break;
                a.dw = copy(dw, out);
                assert_int_equal(cpu()->matmul_grad(dev, &a, 1, NULL), STILL_OK);
                if (first) {
                    assert_memory_equal(a.dw, first, out * sizeof *first);
                    free(a.dw);
                } else {
                    first = a.dw;
                    for (size_t e = 0; e < out; e++)
                        assert_near(first[e], want[e], 3e-7, 3e-8 * M + 1e-7,
                                    isa_name[isa], e);
                }
                free_dev(dev);
            }
            free(first);
        }
        free(dy);
        free(x);
        free(dw);
        free(want);
    }
}

/* ---- Norm, activation, positions ----------------------------------------- */

static double norm_of(const double *x, const float *g, const float *dy, int K,
                      float eps)
{
    double ss = 0, sum = 0;
    for (int i = 0; i < K; i++) ss += x[i] * x[i];
    for (int i = 0; i < K; i++) sum += dy[i] * x[i] * g[i] / sqrt(ss / K + eps);
    return sum;
}

static void ref_gradients_are_slopes(void **state)
{
    (void)state;
    enum { K = 11 };
    sti_dev *dev = any_dev(ref(), NULL, 1);
    const double h = 1e-5;
    float *x = floats(K, 2, 1), *g = floats(K, 2, 2), *dy = floats(K, 2, 3);
    float dx[K] = {0}, dgate[K], dup[K];
    double wide[K];
    for (int i = 0; i < K; i++) wide[i] = x[i];
    assert_int_equal(ref()->rmsnorm_back(
                         dev, &(sti_rmsnorm_back_args){x, g, dy, dx, 1, K, 0.1f}, NULL),
                     STILL_OK);
    for (int i = 0; i < K; i++) {
        wide[i] = x[i] + h;
        const double up = norm_of(wide, g, dy, K, 0.1f);
        wide[i] = x[i] - h;
        const double slope = (up - norm_of(wide, g, dy, K, 0.1f)) / (2 * h);
        wide[i] = x[i];
        assert_near(dx[i], slope, 1e-6, 1e-7, "rmsnorm_back", (size_t)i);
    }
    assert_int_equal(
        ref()->swiglu_back(dev, &(sti_swiglu_back_args){x, g, dy, dgate, dup, 1, K},
                           NULL),
        STILL_OK);
    for (int i = 0; i < K; i++) {
        const double a = x[i] + h, b = x[i] - h;
        const double slope = (a / (1 + exp(-a)) - b / (1 + exp(-b))) / (2 * h);
        assert_near(dgate[i], dy[i] * g[i] * slope, 1e-6, 1e-8, "dgate", (size_t)i);
        assert_near(dup[i], dy[i] * x[i] / (1 + exp((double)-x[i])), 1e-6, 1e-8, "dup",
                    (size_t)i);
    }
    free(x);
    free(g);
    free(dy);
    ref()->dev_free(dev);
}

/* Calls body(dev, name) for every instruction set and number of threads. */
static void each_cpu(void (*body)(sti_dev *, const char *, void *), void *arg)
{
    for (int isa = 0; isa < N_ISA; isa++)
        for (int threads = 1; threads <= THREADS_MAX; threads++) {
            sti_dev *dev = any_dev(cpu(), isa_name[isa], threads);
            if (!dev) break;
            body(dev, isa_name[isa], arg);
            free_dev(dev);
        }
}

typedef struct rows_case {
    int M, K;
    sti_dev *ref_dev;
} rows_case;

static void check_rows(sti_dev *dev, const char *isa, void *arg)
{
    const rows_case *c = arg;
    const size_t n = (size_t)(c->M * c->K);
    float *x = floats(n, c->K % 2 ? 8 : 120, 1), *u = floats(n, 2, 2);
    float *dy = floats(n, 2, 3), *g = floats((size_t)c->K, 2, 4), *dx = floats(n, 1, 5);
    float *want = copy(dx, n), *gate = copy(x, n), *up = copy(u, n);
    float *dgate = floats(n, 0, 0), *dup = floats(n, 0, 0);

    sti_rmsnorm_back_args norm = {x, g, dy, want, c->M, c->K, 1e-5f};
    assert_int_equal(ref()->rmsnorm_back(c->ref_dev, &norm, NULL), STILL_OK);
    norm.dx = dx;
    assert_int_equal(cpu()->rmsnorm_back(dev, &norm, NULL), STILL_OK);
    for (size_t i = 0; i < n; i++)
        assert_near(dx[i], want[i], 1e-6, c->K % 2 ? 2e-6 : 2e-7, isa, i);

    sti_swiglu_back_args act = {x, u, dy, dgate, dup, c->M, c->K};
    assert_int_equal(ref()->swiglu_back(c->ref_dev, &act, NULL), STILL_OK);
    act = (sti_swiglu_back_args){gate, up, dy, gate, up, c->M, c->K}; /* in place */
    assert_int_equal(cpu()->swiglu_back(dev, &act, NULL), STILL_OK);
    for (size_t i = 0; i < n; i++) {
        assert_near(gate[i], dgate[i], 2e-6, 1e-6, isa, i); /* 1 + g(1-s) cancels */
        assert_near(up[i], dup[i], 1e-6, 1e-34, isa, i);
    }
    float *all[] = {x, u, dy, g, dx, want, gate, up, dgate, dup};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void row_gradients_match_the_reference(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 1},   {3, 7},     {2, 33},
                                  {1, 576}, {40, 1023}, {9, 1536}};
    sti_dev *dev = any_dev(ref(), NULL, 2);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        each_cpu(check_rows, &(rows_case){size[i][0], size[i][1], dev});
    ref()->dev_free(dev);
}

static void check_rope(const sti_backend *b, sti_dev *dev, const char *name)
{
    enum { M = 5, H = 3, D = 24, N = M * H * D };
    const int32_t pos[M] = {0, 1, 77, 4000, 1000003};
    float freq[D / 2];
    for (int i = 0; i < D / 2; i++) freq[i] = powf(10000.0f, -2.0f * (float)i / D);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        float *x = floats(N, 1, 1), *y = floats(N, 1, 2), *rx = copy(x, N);
        float *ry = copy(y, N);
        sti_rope_args a = {.x = rx,
                           .pos = pos,
                           .inv_freq = freq,
                           .M = M,
                           .heads = H,
                           .D = D,
                           .interleaved = interleaved};
        assert_int_equal(b->rope(dev, &a, NULL), STILL_OK);
        a.x = ry;
        a.back = true;
        assert_int_equal(b->rope(dev, &a, NULL), STILL_OK);
        double forth = 0, back = 0; /* R x . y = x . R^T y */
        for (int i = 0; i < N; i++) {
            forth += (double)rx[i] * y[i];
            back += (double)x[i] * ry[i];
        }
        assert_near(back, forth, 1e-6, 1e-6, name, 0);
        a.x = rx;
        assert_int_equal(b->rope(dev, &a, NULL), STILL_OK);
        for (int i = 0; i < N; i++) assert_near(rx[i], x[i], 0, 5e-7, name, (size_t)i);
        free(x);
        free(y);
        free(rx);
        free(ry);
    }
}

static void check_cpu_rope(sti_dev *dev, const char *isa, void *arg)
{
    (void)arg;
    check_rope(cpu(), dev, isa);
}

static void rope_turns_back(void **state)
{
    (void)state;
    sti_dev *dev = any_dev(ref(), NULL, 1);
    check_rope(ref(), dev, "ref");
    ref()->dev_free(dev);
    each_cpu(check_cpu_rope, NULL);
}

/* ---- Loss ---------------------------------------------------------------- */

static double loss_of(const double *x, const double *t, int V, int target, double kd)
{
    double sx = 0, st = 0, kl = 0;
    for (int i = 0; i < V; i++) {
        sx += exp(x[i]);
        st += exp(t[i]);
    }
    for (int i = 0; i < V; i++)
        if (exp(t[i]) > 0) kl += exp(t[i]) / st * (t[i] - log(st) - x[i] + log(sx));
    return log(sx) - x[target] + kd * kl;
}

static void ref_loss_is_the_definition(void **state)
{
    (void)state;
    enum { V = 9, TARGET = 4 };
    sti_dev *dev = any_dev(ref(), NULL, 1);
    float *l = floats(V, 3, 1), *t = floats(V, 3, 2);
    t[7] = -INFINITY;
    double x[V], y[V], loss, kl;
    for (int i = 0; i < V; i++) {
        x[i] = l[i];
        y[i] = t[i];
    }
    const float weight = 0.7f, kd = 0.4f;
    const int32_t target = TARGET;
    assert_int_equal(ref()->loss(dev,
                                 &(sti_loss_args){l, t, &target, &weight, kd, 1, V,
                                                  &loss, &kl, NULL, NULL},
                                 NULL),
                     STILL_OK);
    assert_near(loss, loss_of(x, y, V, TARGET, 0), 1e-12, 1e-12, "loss", 0);
    assert_near(loss + kl, loss_of(x, y, V, TARGET, 1), 1e-12, 1e-12, "kl", 0);
    for (int i = 0; i < V; i++) {
        const double h = 1e-5, at = x[i];
        x[i] = at + h;
        const double up = loss_of(x, y, V, TARGET, kd);
        x[i] = at - h;
        const double slope = (up - loss_of(x, y, V, TARGET, kd)) / (2 * h);
        x[i] = at;
        assert_near(l[i], weight * slope, 1e-6, 1e-8, "gradient", (size_t)i);
    }
    free(l);
    free(t);
    ref()->dev_free(dev);
}

typedef struct loss_case {
    int M, V;
    float gain;
    bool teacher;
    sti_dev *ref_dev;
} loss_case;

static void check_loss(sti_dev *dev, const char *isa, void *arg)
{
    const loss_case *c = arg;
    enum { ROWS = 4 };
    const size_t n = (size_t)(c->M * c->V);
    float *l = floats(n, c->gain, 1), *t = floats(n, c->gain, 2), *want = copy(l, n);
    int32_t target[ROWS];
    float weight[ROWS] = {1, 0, 0.01f, 3};
    double loss[2][ROWS], kl[2][ROWS];
    for (int m = 0; m < c->M; m++) {
        target[m] = m == 1 ? -1 : (m * 7919 + c->V / 2) % c->V;
        if (c->V > 3) t[m * c->V + (target[m] + 3) % c->V] = -INFINITY;
    }
    if (c->M > 1) l[c->V] = want[c->V] = NAN; /* in the row of weight 0 */
    sti_loss_args a = {want,   c->teacher ? t : NULL,
                       target, weight,
                       0.5f,   c->M,
                       c->V,   loss[0],
                       kl[0],  NULL,
                       NULL};
    assert_int_equal(ref()->loss(c->ref_dev, &a, NULL), STILL_OK);
    a.logits = l;
    a.loss = loss[1];
    a.kl = kl[1];
    assert_int_equal(cpu()->loss(dev, &a, NULL), STILL_OK);
    for (int m = 0; m < c->M; m++) {
        assert_near(loss[1][m], loss[0][m], 1e-6, 1e-6, isa, (size_t)m);
        assert_near(kl[1][m], kl[0][m], 1e-6, 1e-6 * (1 + (double)c->gain), isa,
                    (size_t)m);
        for (int i = 0; i < c->V; i++)
            assert_near(l[m * c->V + i], want[m * c->V + i], 2e-6, 2e-7 * weight[m],
                        isa, (size_t)(m * c->V + i));
    }
    if (c->M > 1) assert_true(loss[1][1] == 0 && kl[1][1] == 0 && l[c->V] == 0);
    free(l);
    free(t);
    free(want);
}

static void loss_matches_the_reference(void **state)
{
    (void)state;
    static const struct {
        int M, V;
        float gain;
    } size[] = {{1, 1, 1},    {1, 2, 1e4f}, {4, 7, 3},      {3, 33, 1e4f},
                {2, 100, 20}, {4, 5003, 8}, {4, 49152, 10}, {4, 49152, 1e4f}};
    sti_dev *dev = any_dev(ref(), NULL, 2);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int teacher = 0; teacher < 2; teacher++)
            each_cpu(check_loss,
                     &(loss_case){size[i].M, size[i].V, size[i].gain, teacher, dev});
    ref()->dev_free(dev);
}

static void check_bad_loss(sti_dev *dev, const char *isa, void *arg)
{
    (void)isa;
    (void)arg;
    float l[20] = {0}, weight = 1;
    int32_t target = 20;
    double loss;
    still_error err;
    sti_loss_args a = {l, NULL, &target, &weight, 0, 1, 20, &loss, NULL, NULL, NULL};
    assert_int_equal(cpu()->loss(dev, &a, &err), STILL_E_ARG);
    target = 3;
    l[17] = NAN; /* must show, so that training can stop */
    assert_int_equal(cpu()->loss(dev, &a, NULL), STILL_OK);
    assert_true(isnan(loss));
}

static void loss_refuses_and_reports(void **state)
{
    (void)state;
    each_cpu(check_bad_loss, NULL);
}

/* ---- Optimizer ----------------------------------------------------------- */

enum { WEIGHTS = 20011, STEPS = 5 };

static void optimize(const sti_backend *b, sti_dev *dev, float *x, float *m, float *v)
{
    double c1 = 1, c2 = 1;
    for (int t = 0; t < STEPS; t++) {
        float *g = floats(WEIGHTS, t % 2 ? 100 : 1e-3f, (uint32_t)t);
        g[5] = 0;
        c1 *= (double)0.9f;
        c2 *= (double)0.999f;
        const sti_adam_args a = {x,    m,      v,     g,     WEIGHTS, 0.25f, 1e-2f,
                                 0.9f, 0.999f, 1e-8f, 0.05f, 1 - c1,  1 - c2};
        assert_int_equal(b->adam(dev, &a, 1, NULL), STILL_OK);
        free(g);
    }
}

typedef struct moments {
    float *x, *m, *v;
} moments;

static moments start(void)
{
    return (moments){floats(WEIGHTS, 1, 77), floats(WEIGHTS, 0, 0),
                     floats(WEIGHTS, 0, 0)};
}

static void stop(moments *s)
{
    free(s->x);
    free(s->m);
    free(s->v);
}

static void check_adam(sti_dev *dev, const char *isa, void *arg)
{
    const moments *want = arg;
    moments got = start();
    optimize(cpu(), dev, got.x, got.m, got.v);
    for (size_t i = 0; i < WEIGHTS; i++) {
        assert_near(got.x[i], want->x[i], 1e-6, 1e-7, isa, i);
        assert_near(got.m[i], want->m[i], 1e-6, 1e-6, isa, i);
        assert_near(got.v[i], want->v[i], 2e-6, 1e-12, isa, i);
    }
    stop(&got);
}

static void adam_is_the_definition(void **state)
{
    (void)state;
    sti_dev *dev = any_dev(ref(), NULL, 1);
    /* The first step is the sign of the gradient, whatever its size. */
    float x[2] = {3, 3}, m[2] = {0}, v[2] = {0}, g[2] = {1e-4f, -50};
    const sti_adam_args a = {x,
                             m,
                             v,
                             g,
                             2,
                             1,
                             0.1f,
                             0.9f,
                             0.99f,
                             0,
                             0.5f,
                             1 - (double)0.9f,
                             1 - (double)0.99f};
    assert_int_equal(ref()->adam(dev, &a, 1, NULL), STILL_OK);
    assert_near(x[0], 3 - 0.1 * (1 + 0.5 * 3), 1e-6, 0, "adam", 0);
    assert_near(x[1], 3 - 0.1 * (-1 + 0.5 * 3), 1e-6, 0, "adam", 1);
    moments want = start();
    optimize(ref(), dev, want.x, want.m, want.v);
    each_cpu(check_adam, &want);
    stop(&want);
    ref()->dev_free(dev);
}

static void squares_are_added_in_one_order(void **state)
{
    (void)state;
    static const size_t size[] = {0, 1, 15, 17, 4095, 4097, 100003};
    sti_dev *dev = any_dev(ref(), NULL, 1);
    for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
        float *x = floats(size[k], 1, 9);
        if (size[k] > 3) x[3] = 1e30f; /* its square is no float */
        double want, sum = 0;
        assert_int_equal(
            ref()->sum_squares(dev, x, &(sti_span){0, size[k]}, 1, &want, NULL),
            STILL_OK);
        for (size_t i = 0; i < size[k]; i++) sum += (double)x[i] * x[i];
        assert_true(want == sum);
        for (int isa = 0; isa < N_ISA; isa++) {
            double first = 0, got;
            for (int threads = 1; threads <= THREADS_MAX; threads++) {
                sti_dev *d = any_dev(cpu(), isa_name[isa], threads);
                if (!d) break;
                assert_int_equal(
                    cpu()->sum_squares(d, x, &(sti_span){0, size[k]}, 1, &got, NULL),
                    STILL_OK);
                assert_near(got, want, 1e-12, 0, isa_name[isa], size[k]);
                if (threads == 1) first = got;
                assert_true(got == first);
                free_dev(d);
            }
        }
        free(x);
    }
    ref()->dev_free(dev);
}

/* ---- Errors, memory ------------------------------------------------------ */

/* Pages of address space: scratch is mapped, not taken from malloc. */
static long mapped_pages(void)
{
    long n = -1;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld", &n) != 1) n = -1;
    if (f) fclose(f);
    return n;
}

static void products_refuse_and_stay_small(void **state)
{
    (void)state;
    sti_dev *dev = any_dev(cpu(), NULL, 2);
    source s = make_source(STI_F32, 40, 64, 1), other = make_source(STI_F32, 40, 32, 2);
    sti_weight w, v;
    still_error err;
    assert_int_equal(cpu()->weight_new(dev, &s.t, &w, NULL), STILL_OK);
    assert_int_equal(cpu()->weight_new(dev, &other.t, &v, NULL), STILL_OK);
    float *dy = floats(300 * 40, 1, 1), *dx = floats(300 * 64, 1, 2);
    sti_matmul_back_args a = {.dy = {dy, dy}, .M = 3, .n = 2, .w = {&w, &v}, .dx = dx};
    assert_int_equal(cpu()->matmul_back(dev, &a, &err), STILL_E_ARG);
    a.n = STI_BACK_MAX + 1;
    assert_int_equal(cpu()->matmul_back(dev, &a, &err), STILL_E_ARG);
    a.n = 1;
    assert_int_equal(cpu()->matmul_back(dev, &a, NULL), STILL_OK);
    const long before = mapped_pages();
    a.M = 300;
    const sti_matmul_grad_args grad = {dy, dx, s.value, 300, 40, 64, 1};
    assert_int_equal(cpu()->matmul_back(dev, &a, NULL), STILL_OK);
    assert_int_equal(cpu()->matmul_grad(dev, &grad, 1, NULL), STILL_OK);
    assert_int_equal(mapped_pages(), before);
    cpu()->weight_free(dev, &w);
    cpu()->weight_free(dev, &v);
    free_dev(dev);
    free(dy);
    free(dx);
    free_source(&s);
    free_source(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matmul_back_of_every_type),
        cmocka_unit_test(matmul_back_of_odd_sizes),
        cmocka_unit_test(matmul_back_adds_up_matrices),
        cmocka_unit_test(matmul_grad_is_the_definition),
        cmocka_unit_test(ref_gradients_are_slopes),
        cmocka_unit_test(row_gradients_match_the_reference),
        cmocka_unit_test(rope_turns_back),
        cmocka_unit_test(ref_loss_is_the_definition),
        cmocka_unit_test(loss_matches_the_reference),
        cmocka_unit_test(loss_refuses_and_reports),
        cmocka_unit_test(adam_is_the_definition),
        cmocka_unit_test(squares_are_added_in_one_order),
        cmocka_unit_test(products_refuse_and_stay_small),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
