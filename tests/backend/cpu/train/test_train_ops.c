/* The other operators of training: gradients of norm, activation and positions, the
 * loss, the optimizer. The reference against differences of the functions it claims to
 * be the gradients of; the cpu backend against the reference, on every instruction set
 * here and with any number of threads. Products: test_train_products.c. */
#include "../../../run.h"
#include "train_device.h"

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
        ref()->swiglu_back(
            dev, &(sti_swiglu_back_args){x, g, dy, dgate, dup, 1, K, STI_SILU}, NULL),
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

    for (int k = 0; k < 2; k++) {
        const sti_activation kind = k ? STI_GELU_TANH : STI_SILU;
        memcpy(gate, x, n * sizeof *x);
        memcpy(up, u, n * sizeof *u);
        sti_swiglu_back_args act = {x, u, dy, dgate, dup, c->M, c->K, kind};
        assert_int_equal(ref()->swiglu_back(c->ref_dev, &act, NULL), STILL_OK);
        act = (sti_swiglu_back_args){gate, up, dy, gate, up, c->M, c->K, kind};
        assert_int_equal(cpu()->swiglu_back(dev, &act, NULL), STILL_OK); /* in place */
        for (size_t i = 0; i < n; i++) { /* 1 + g(1-s) cancels; z is rounded */
            assert_near(gate[i], dgate[i], k ? 1e-5 : 2e-6, k ? 5e-6 : 1e-6, isa, i);
            assert_near(up[i], dup[i], k ? 1e-5 : 1e-6, k ? 1e-6 : 1e-34, isa, i);
        }
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

RUN_TESTS(cmocka_unit_test(ref_gradients_are_slopes),
          cmocka_unit_test(row_gradients_match_the_reference),
          cmocka_unit_test(rope_turns_back),
          cmocka_unit_test(ref_loss_is_the_definition),
          cmocka_unit_test(loss_matches_the_reference),
          cmocka_unit_test(loss_refuses_and_reports),
          cmocka_unit_test(adam_is_the_definition),
          cmocka_unit_test(squares_are_added_in_one_order))
