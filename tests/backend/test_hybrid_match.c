/* test_hybrid_match.c - attention weights matched instead of outputs: the reference
 * against an independent sum and finite differences, cpu against the reference on every
 * instruction set here, and the same bits from any number of threads. */
#include "hybrid_problem.h"

#include "ops/ops.h"

static const char *const isa_name[] = {"portable", "avx2", "avx512"};
enum { N_ISA = 3 };

enum { ALPHA, WINDOW, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {"alpha", "window", "map_q",
                                               "map_k", "bias_q", "bias_k"};

/* A batch, its parameters and their gradients, in double and in float. */
typedef struct batch {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int B, T;
    size_t n[FIELDS], n_q, n_k, n_fold;
    double *q, *k, *in[FIELDS], *grad[FIELDS], loss;
    float *q_f, *k_f, *in_f[FIELDS], *grad_f[FIELDS];
    double loss_f;
    int32_t *fold;
} batch;

static float *narrow(double *x, size_t n) /* and rounds x, so that both are the same */
{
    float *y = calloc(n ? n : 1, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++) x[i] = y[i] = (float)x[i];
    return y;
}

#define PARAMETERS(at)                                                                 \
    .alpha = (at)[ALPHA], .window_logit = (at)[WINDOW], .map_q = (at)[MAP_Q],          \
    .map_k = (at)[MAP_K], .bias_q = (at)[BIAS_Q], .bias_k = (at)[BIAS_K]

static sti_hybrid_parallel_args64 args64(const batch *x)
{
    return (sti_hybrid_parallel_args64){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = {.q = x->q, .k = x->k, .v = x->k, PARAMETERS(x->in)},
        .fold_chunk = x->fold,
        .grad = {PARAMETERS(x->grad)}};
}

static sti_hybrid_parallel_args args32(const batch *x)
{
    return (sti_hybrid_parallel_args){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = {.q = x->q_f, .k = x->k_f, .v = x->k_f, PARAMETERS(x->in_f)},
        .fold_chunk = x->fold,
        .grad = {PARAMETERS(x->grad_f)}};
}

static batch make_batch(sti_hybrid_settings set, sti_hybrid_shape shape, int B, int T,
                        double gain, uint64_t seed)
{
    batch x = {.set = set, .shape = shape, .B = B, .T = T};
    const size_t rows = (size_t)B * (size_t)T, H = (size_t)shape.H;
    const size_t S = (size_t)sti_hybrid_selectors(&set, &shape), D = (size_t)shape.D;
    const size_t map = D * (size_t)shape.F;
    const double w = 1 / sqrt((double)D);
    const size_t n[FIELDS] = {H, H, H * map, S * map, H, S};
    const double size[FIELDS] = {0.5, 1, w, w, 0.3, 0.3};
    uint64_t rng = seed;
    x.n_q = rows * H * D;
    x.n_k = rows * (size_t)shape.G * D;
    x.n_fold = rows * S;
    x.q = normals(&rng, x.n_q, gain);
    x.k = normals(&rng, x.n_k, gain);
    x.q_f = narrow(x.q, x.n_q);
    x.k_f = narrow(x.k, x.n_k);
    for (int f = 0; f < FIELDS; f++) {
        x.n[f] = n[f];
        x.in[f] = normals(&rng, n[f], size[f]);
        /* Relu features that overlap: log f of next to nothing is ill-conditioned. */
        if (f == BIAS_Q || f == BIAS_K)
            for (size_t i = 0; i < n[f]; i++) x.in[f][i] += 1.5;
        x.in_f[f] = narrow(x.in[f], n[f]);
        x.grad[f] = calloc(n[f], sizeof(double));
        x.grad_f[f] = calloc(n[f], sizeof(float));
    }
    x.fold = calloc(x.n_fold, sizeof *x.fold);
    const sti_hybrid_parallel_args64 a = args64(&x);
    still_error err;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    return x;
}

static void drop_batch(batch *x)
{
    void *all[] = {x->q, x->k, x->q_f, x->k_f, x->fold};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    for (int f = 0; f < FIELDS; f++) {
        free(x->in[f]);
        free(x->grad[f]);
        free(x->in_f[f]);
        free(x->grad_f[f]);
    }
}

static void run_ref(batch *x, double scale)
{
    const sti_hybrid_parallel_args64 a = args64(x);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad[f], 0, x->n[f] * sizeof(double));
    assert_int_equal(sti_ref_hybrid_match(&a, scale, &x->loss, &err), STILL_OK);
}

static void run_backend(const char *name, sti_dev *dev, batch *x, float scale)
{
    const sti_hybrid_parallel_args p = args32(x);
    const sti_hybrid_match_args a = {.p = &p, .scale = scale, .loss = &x->loss_f};
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad_f[f], 0, x->n[f] * sizeof(float));
    assert_int_equal(sti_backend_find(name)->hybrid_match(dev, &a, &err), STILL_OK);
}

static sti_dev *new_dev(const char *backend, const char *isa, int threads)
{
    const sti_dev_params p = {.threads = threads, .isa = isa, .max_k = 64};
    still_error err;
    sti_dev *dev;
    const still_status st = sti_backend_find(backend)->dev_new(&p, &dev, &err);
    if (st == STILL_E_UNSUPPORTED) return NULL; /* this processor lacks it */
    assert_int_equal(st, STILL_OK);
    return dev;
}

/* ---- The reference ------------------------------------------------------- */

static double loss_at(const batch *x)
{
    sti_hybrid_parallel_args64 a = args64(x);
    a.grad = (sti_hybrid_grad64){0};
    double loss = 0;
    still_error err;
    assert_int_equal(sti_ref_hybrid_match(&a, 1, &loss, &err), STILL_OK);
    return loss;
}

/* Every parameter of every field moved a little, both ways. */
static void check_differences(batch *x, double scale)
{
    const double step = 1e-5;
    run_ref(x, scale);
    for (int f = 0; f < FIELDS; f++) {
        if (f == ALPHA && !x->set.alpha) continue; /* not read */
        if (f == WINDOW && !x->set.window_factor) continue;
        if ((f == BIAS_Q || f == BIAS_K) && x->set.map != STI_MAP_RELU) continue;
        double largest = 0, wrong = 0;
        for (size_t i = 0; i < x->n[f]; i++) {
            const double was = x->in[f][i];
            x->in[f][i] = was + step;
            const double up = loss_at(x);
            x->in[f][i] = was - step;
            const double slope = scale * (up - loss_at(x)) / (2 * step);
            x->in[f][i] = was;
            largest = fmax(largest, fabs(slope));
            wrong = fmax(wrong, fabs(slope - x->grad[f][i]));
        }
        assert_true(largest > 1e-3); /* or nothing was tested */
        if (!(wrong <= 1e-6 * largest))
            fail_msg("%s: gradient off by %g of %g", field_name[f], wrong, largest);
    }
}

static void test_differences(void **state)
{
    (void)state;
    static const struct {
        const char *method;
        int chunk, T, H, G, D, F;
        bool per_head, window_scale, factor;
    } c[] = {
        {"still", 3, 23, 4, 2, 5, 5, false, false, false},
        {"still", 3, 23, 4, 2, 5, 4, true, false, false},
        {"still", 2, 17, 2, 1, 6, 6, false, true, true},
        {"lolcats", 4, 21, 4, 2, 5, 5, true, true, true},
        {"hedgehog", 4, 15, 4, 2, 5, 5, true, false, false},
        {"t2r", 4, 15, 4, 2, 5, 5, true, false, false},
        {"t2r", 4, 15, 4, 2, 6, 6, false, false, false},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sti_hybrid_settings s = preset(c[i].method, c[i].chunk);
        if (s.select) s.select = 1;
        if (s.select) s.cap = 2;
        s.per_head = c[i].per_head;
        if (c[i].window_scale) s.la_scale = STI_SCALE_WINDOW;
        if (c[i].factor) s.window_factor = true;
        batch x = make_batch(s, (sti_hybrid_shape){c[i].H, c[i].G, c[i].D, c[i].F}, 2,
                             c[i].T, 1, i + 1);
        check_differences(&x, 0.25);
        drop_batch(&x);
    }
}

/* With every token exact both sides are one softmax: the loss is its entropy, summed
 * here from nothing but q and k. */
static void test_all_exact_is_entropy(void **state)
{
    (void)state;
    const int T = 19, H = 4, G = 2, D = 6;
    batch x =
        make_batch(preset("still", 32), (sti_hybrid_shape){H, G, D, D}, 1, T, 1, 3);
    double entropy = 0;
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            double l[32], sum = 0;
            for (int j = 0; j <= t; j++) {
                l[j] = 0;
                for (int e = 0; e < D; e++)
                    l[j] += x.q[(t * H + h) * D + e] * x.k[(j * G + h / 2) * D + e];
                l[j] /= sqrt(D);
                sum += exp(l[j]);
            }
            for (int j = 0; j <= t; j++) entropy -= exp(l[j]) / sum * (l[j] - log(sum));
        }
    run_ref(&x, 1);
    assert_true(fabs(x.loss - entropy) <= 1e-12 * entropy);
    for (int f = 0; f < FIELDS; f++)
        for (size_t i = 0; i < x.n[f]; i++) assert_true(fabs(x.grad[f][i]) < 1e-12);
    drop_batch(&x);
}

/* The table's entry adds to the gradients it finds, and to no others. */
static void test_table_of_ref(void **state)
{
    (void)state;
    batch x =
        make_batch(preset("still", 3), (sti_hybrid_shape){2, 1, 6, 6}, 1, 20, 1, 4);
    sti_dev *dev = new_dev("ref", NULL, 1);
    run_ref(&x, 2);
    run_backend("ref", dev, &x, 2);
    assert_true(fabs(x.loss_f - x.loss) <= 1e-12 * x.loss);
    sti_hybrid_parallel_args p = args32(&x);
    float q = 7;
    p.grad.q = &q; /* has room for one number only */
    const sti_hybrid_match_args a = {.p = &p, .scale = 2, .loss = &x.loss_f};
    still_error err;
    assert_int_equal(sti_backend_find("ref")->hybrid_match(dev, &a, &err), STILL_OK);
    assert_true(q == 7);
    for (int f = 0; f < FIELDS; f++)
        for (size_t i = 0; i < x.n[f]; i++)
            assert_true(fabs((double)x.grad_f[f][i] - 2 * x.grad[f][i]) <=
                        1e-6 * (1 + fabs(x.grad[f][i])));
    sti_backend_find("ref")->dev_free(dev);
    drop_batch(&x);
}

/* ---- cpu ----------------------------------------------------------------- */

static void compare(const batch *x, double limit)
{
    if (!(fabs(x->loss_f - x->loss) <= limit * fabs(x->loss)))
        fail_msg("loss %.9g, expected %.9g", x->loss_f, x->loss);
    for (int f = 0; f < FIELDS; f++) {
        if (f == ALPHA && !x->set.alpha) continue;
        if (f == WINDOW && !x->set.window_factor) continue;
        if ((f == BIAS_Q || f == BIAS_K) && x->set.map != STI_MAP_RELU) continue;
        /* Sums over all queries of numbers near 1 that nearly cancel. */
        double largest = 0.02 * x->T, wrong = 0;
        for (size_t i = 0; i < x->n[f]; i++) {
            assert_true(isfinite(x->grad_f[f][i]));
            largest = fmax(largest, fabs(x->grad[f][i]));
            wrong = fmax(wrong, fabs((double)x->grad_f[f][i] - x->grad[f][i]));
        }
        if (!(wrong <= limit * largest))
            fail_msg("%s: off by %g of %g", field_name[f], wrong, largest);
    }
}

static void check(const char *isa, batch *x, double limit)
{
    sti_dev *dev = new_dev("cpu", isa, 2);
    if (!dev) return;
    run_ref(x, 1);
    run_backend("cpu", dev, x, 1);
    compare(x, limit);
    sti_backend_find("cpu")->dev_free(dev);
}

static void test_any_settings(void **state)
{
    (void)state;
    int n = 0;
    for (uint64_t seed = 1; seed <= 240; seed++) {
        problem p = any_problem(seed);
        if (p.set.has_linear) {
            batch x = make_batch(p.set, p.shape, 1 + (int)(seed % 2), p.T, 1, seed);
            /* A relu feature near 0 has few digits, and so has its logarithm. */
            check(isa_name[seed % N_ISA], &x, p.set.map == STI_MAP_RELU ? 2e-4 : 1e-5);
            drop_batch(&x);
            n++;
        }
        drop(&p);
    }
    assert_true(n > 150);
}

static void test_real_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *method;
        int C, select, cap, T, H, G, D, F;
        bool per_head;
    } c[] = {
        {"still", 16, 4, 32, 203, 3, 1, 64, 64, false},
        {"still", 32, 8, 16, 203, 2, 2, 80, 80, true},
        {"still", 100, 25, 10, 333, 2, 1, 128, 64, false}, /* two tiles to a chunk */
        {"still", 16, 4, 0, 130, 2, 1, 64, 64, false},
        {"still", 1, 1, 7, 70, 4, 2, 64, 64, false},
        {"lolcats", 64, 0, 0, 300, 2, 1, 64, 32, true},
        {"hedgehog", 64, 0, 0, 300, 2, 1, 64, 64, true},
        {"t2r", 64, 0, 0, 150, 2, 1, 80, 80, true},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        for (int isa = 0; isa < N_ISA; isa++) {
            sti_hybrid_settings s = preset(c[i].method, c[i].C);
            s.select = c[i].select;
            s.cap = c[i].cap;
            s.per_head = c[i].per_head;
            const sti_hybrid_shape shape = {c[i].H, c[i].G, c[i].D, c[i].F};
            batch x = make_batch(s, shape, 1, c[i].T, 1.5, i + 1);
            check(isa_name[isa], &x, 1e-5);
            drop_batch(&x);
        }
}

static void test_edges(void **state)
{
    (void)state;
    static const int length[] = {1, 7, 8, 9, 15, 16, 17, 24, 25};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        batch x = make_batch(preset("still", 8), (sti_hybrid_shape){2, 1, 16, 16}, 2,
                             length[i], 1, i);
        check(NULL, &x, 1e-5);
        drop_batch(&x);
    }
}

/* Logits in the hundreds, keys of norm 0, an alpha far from them all: finite. */
static void test_extremes(void **state)
{
    (void)state;
    static const char *const method[] = {"still", "lolcats", "hedgehog", "t2r"};
    for (size_t m = 0; m < sizeof method / sizeof *method; m++)
        for (int far = -1; far <= 1; far++) {
            batch x = make_batch(preset(method[m], 4), (sti_hybrid_shape){2, 1, 16, 16},
                                 1, 40, 12, m + 9);
            for (size_t i = 0; i < x.n_k / 4; i++) x.k[i] = x.k_f[i] = 0;
            for (size_t i = 0; i < x.n[ALPHA]; i++)
                x.in[ALPHA][i] = x.in_f[ALPHA][i] = 300.0f * (float)far;
            /* Weights so far apart that float keeps few digits of their products. */
            check(NULL, &x, 2e-3);
            drop_batch(&x);
        }
}

static void test_threads(void **state)
{
    (void)state;
    const sti_hybrid_shape shape = {6, 2, 32, 32};
    batch x = make_batch(preset("still", 32), shape, 2, 210, 1, 3),
          y = make_batch(preset("still", 32), shape, 2, 210, 1, 3);
    sti_dev *one = new_dev("cpu", NULL, 1);
    run_backend("cpu", one, &x, 0.5f);
    for (int threads = 2; threads <= 5; threads += 3) {
        sti_dev *many = new_dev("cpu", NULL, threads);
        run_backend("cpu", many, &y, 0.5f);
        assert_true(x.loss_f == y.loss_f);
        for (int f = 0; f < FIELDS; f++)
            assert_memory_equal(x.grad_f[f], y.grad_f[f], x.n[f] * sizeof(float));
        sti_backend_find("cpu")->dev_free(many);
    }
    sti_backend_find("cpu")->dev_free(one);
    drop_batch(&x);
    drop_batch(&y);
}

/* A gradient asked for alone has the same bits; with none the loss has. */
static void test_wanted_alone(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    sti_dev *dev = new_dev("cpu", NULL, 1);
    batch x =
        make_batch(preset("t2r", 16), (sti_hybrid_shape){4, 2, 16, 16}, 1, 100, 1, 4);
    run_backend("cpu", dev, &x, 1);
    for (int f = 0; f <= FIELDS; f++) {
        const size_t n = f < FIELDS ? x.n[f] : 1;
        float *alone = calloc(n, sizeof *alone), *only[FIELDS] = {0};
        if (f < FIELDS) only[f] = alone;
        sti_hybrid_parallel_args p = args32(&x);
        p.grad = (sti_hybrid_grad){PARAMETERS(only)};
        double loss = 0;
        still_error err;
        assert_int_equal(
            b->hybrid_match(
                dev, &(sti_hybrid_match_args){.p = &p, .scale = 1, .loss = &loss},
                &err),
            STILL_OK);
        assert_true(loss == x.loss_f);
        if (f < FIELDS) assert_memory_equal(alone, x.grad_f[f], n * sizeof(float));
        free(alone);
    }
    drop_batch(&x);
    b->dev_free(dev);
}

/* A method that forgets has nothing to match: an error, not an infinite loss. */
static void test_forgetting_is_refused(void **state)
{
    (void)state;
    static const char *const backend[] = {"ref", "cpu"};
    batch x =
        make_batch(preset("swa", 4), (sti_hybrid_shape){2, 1, 16, 16}, 1, 9, 1, 5);
    for (int i = 0; i < 2; i++) {
        sti_dev *dev = new_dev(backend[i], NULL, 1);
        const sti_hybrid_parallel_args p = args32(&x);
        const sti_hybrid_match_args a = {.p = &p, .scale = 1, .loss = &x.loss_f};
        still_error err;
        assert_int_equal(sti_backend_find(backend[i])->hybrid_match(dev, &a, &err),
                         STILL_E_UNSUPPORTED);
        sti_backend_find(backend[i])->dev_free(dev);
    }
    drop_batch(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_all_exact_is_entropy),
        cmocka_unit_test(test_table_of_ref),
        cmocka_unit_test(test_any_settings),
        cmocka_unit_test(test_real_shapes),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_wanted_alone),
        cmocka_unit_test(test_forgetting_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
