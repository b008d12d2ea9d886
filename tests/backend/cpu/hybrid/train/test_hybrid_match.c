/* test_hybrid_match.c - attention weights matched instead of outputs: the reference
 * against an independent sum and finite differences, cpu against the reference on every
 * instruction set here, and the same bits from any number of threads. */
#include "../../../../run.h"
#include "../../../hybrid_batch.h"
#include "../../cpu_device.h"

/* A match has no part in the fields before ALPHA, but for q and k. */
#define PARAMETERS(at)                                                                 \
    .alpha = (at)[ALPHA], .window_logit = (at)[WINDOW], .map_q = (at)[MAP_Q],          \
    .map_k = (at)[MAP_K], .bias_q = (at)[BIAS_Q], .bias_k = (at)[BIAS_K]

static sti_hybrid_parallel_args64 match64(const batch *x)
{
    return (sti_hybrid_parallel_args64){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = {.q = x->in[Q], .k = x->in[K], .v = x->in[K], PARAMETERS(x->in)},
        .fold_chunk = x->fold,
        .grad = {PARAMETERS(x->grad)}};
}

static sti_hybrid_parallel_args match32(const batch *x)
{
    return (sti_hybrid_parallel_args){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = {.q = x->in_f[Q], .k = x->in_f[K], .v = x->in_f[K], PARAMETERS(x->in_f)},
        .fold_chunk = x->fold,
        .grad = {PARAMETERS(x->grad_f)}};
}

/* A batch that the reference has routed. */
static batch make_match(sti_hybrid_settings set, sti_hybrid_shape shape, int B, int T,
                        double gain, uint64_t seed)
{
    static const int seen[] = {Q, K, ALPHA, WINDOW, MAP_Q, MAP_K, BIAS_Q, BIAS_K};
    batch x = make_batch(set, shape, B, T, gain, seed);
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
        draw(&x, seen[i], gain, &seed);
    /* Relu features that overlap: log f of next to nothing is ill-conditioned. */
    for (int f = BIAS_Q; f <= BIAS_K; f++)
        for (size_t i = 0; i < x.n[f]; i++)
            x.in[f][i] = x.in_f[f][i] = (float)(x.in[f][i] + 1.5);
    const sti_hybrid_parallel_args64 a = match64(&x);
    still_error err;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    return x;
}

static bool is_matched(const sti_hybrid_settings *s, int field)
{
    return is_read(s, field) && (field != WINDOW || s->window_factor);
}

static void match_ref(batch *x, double scale)
{
    const sti_hybrid_parallel_args64 a = match64(x);
    still_error err;
    for (int f = ALPHA; f < FIELDS; f++)
        memset(x->grad[f], 0, x->n[f] * sizeof(double));
    assert_int_equal(sti_ref_hybrid_match(&a, scale, &x->loss, &err), STILL_OK);
}

static void match_on(const sti_backend *b, sti_dev *dev, batch *x, float scale)
{
    const sti_hybrid_parallel_args p = match32(x);
    const sti_hybrid_match_args a = {.p = &p, .scale = scale, .loss = &x->loss_f};
    still_error err;
    for (int f = ALPHA; f < FIELDS; f++)
        memset(x->grad_f[f], 0, x->n[f] * sizeof(float));
    assert_int_equal(b->hybrid_match(dev, &a, &err), STILL_OK);
}

/* ---- The reference ------------------------------------------------------- */

static double loss_at(const batch *x)
{
    sti_hybrid_parallel_args64 a = match64(x);
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
    match_ref(x, scale);
    for (int f = ALPHA; f < FIELDS; f++) {
        if (!is_matched(&x->set, f)) continue;
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
        batch x = make_match(s, (sti_hybrid_shape){c[i].H, c[i].G, c[i].D, c[i].F}, 2,
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
        make_match(preset("still", 32), (sti_hybrid_shape){H, G, D, D}, 1, T, 1, 3);
    double entropy = 0;
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            double l[32], sum = 0;
            for (int j = 0; j <= t; j++) {
                l[j] = 0;
                for (int e = 0; e < D; e++)
                    l[j] +=
                        x.in[Q][(t * H + h) * D + e] * x.in[K][(j * G + h / 2) * D + e];
                l[j] /= sqrt(D);
                sum += exp(l[j]);
            }
            for (int j = 0; j <= t; j++) entropy -= exp(l[j]) / sum * (l[j] - log(sum));
        }
    match_ref(&x, 1);
    assert_true(fabs(x.loss - entropy) <= 1e-12 * entropy);
    for (int f = ALPHA; f < FIELDS; f++)
        for (size_t i = 0; i < x.n[f]; i++) assert_true(fabs(x.grad[f][i]) < 1e-12);
    drop_batch(&x);
}

/* The table's entry adds to the gradients it finds, and to no others. */
static void test_table_of_ref(void **state)
{
    (void)state;
    batch x =
        make_match(preset("still", 3), (sti_hybrid_shape){2, 1, 6, 6}, 1, 20, 1, 4);
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *dev = dev_of(ref, (sti_dev_params){.threads = 1, .max_k = 64});
    match_ref(&x, 2);
    match_on(ref, dev, &x, 2);
    assert_true(fabs(x.loss_f - x.loss) <= 1e-12 * x.loss);
    sti_hybrid_parallel_args p = match32(&x);
    float q = 7;
    p.grad.q = &q; /* has room for one number only */
    const sti_hybrid_match_args a = {.p = &p, .scale = 2, .loss = &x.loss_f};
    still_error err;
    assert_int_equal(ref->hybrid_match(dev, &a, &err), STILL_OK);
    assert_true(q == 7);
    for (int f = ALPHA; f < FIELDS; f++)
        for (size_t i = 0; i < x.n[f]; i++)
            assert_true(fabs((double)x.grad_f[f][i] - 2 * x.grad[f][i]) <=
                        1e-6 * (1 + fabs(x.grad[f][i])));
    ref->dev_free(dev);
    drop_batch(&x);
}

/* ---- cpu ----------------------------------------------------------------- */

static void compare(const batch *x, double limit)
{
    if (!(fabs(x->loss_f - x->loss) <= limit * fabs(x->loss)))
        fail_msg("loss %.9g, expected %.9g", x->loss_f, x->loss);
    for (int f = ALPHA; f < FIELDS; f++) {
        if (!is_matched(&x->set, f)) continue;
        /* Sums over all queries of numbers near 1 that nearly cancel. */
        const double size = 0.02 * x->T;
        expect_error(field_name[f], x,
                     relative_error(x->grad_f[f], x->grad[f], x->n[f], size), limit);
    }
}

static void check(const char *isa, batch *x, double limit)
{
    sti_dev *dev = new_dev(isa, 2);
    if (!dev) return;
    match_ref(x, 1);
    match_on(cpu(), dev, x, 1);
    compare(x, limit);
    free_dev(dev);
}

static void test_any_settings(void **state)
{
    (void)state;
    int n = 0;
    for (uint64_t seed = 1; seed <= 240; seed++) {
        problem p = any_problem(seed);
        if (p.set.has_linear) {
            batch x = make_match(p.set, p.shape, 1 + (int)(seed % 2), p.T, 1, seed);
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
    for (int i = 0; i < N_REAL_SHAPES; i++)
        for (int isa = 0; isa < N_ISA; isa++) {
            const shape_case *c = &real_shapes[i];
            const sti_hybrid_settings s = settings_of(c);
            if (!s.has_linear) continue;
            batch x = make_match(s, shape_of(c), 1, c->T, 1.5, (uint64_t)i + 1);
            check(isa_name[isa], &x, 1e-5);
            drop_batch(&x);
        }
}

static void test_edges(void **state)
{
    (void)state;
    for (int i = 0; i < N_EDGES; i++) {
        batch x = make_match(preset("still", 8), small_shape, 2, edge_length[i], 1,
                             (uint64_t)i);
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
            batch x = make_match(preset(method[m], 4), small_shape, 1, 40, 12, m + 9);
            for (size_t i = 0; i < x.n[K] / 4; i++) x.in[K][i] = x.in_f[K][i] = 0;
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
    batch x = make_match(preset("still", 32), shape, 2, 210, 1, 3),
          y = make_match(preset("still", 32), shape, 2, 210, 1, 3);
    sti_dev *one = new_dev(NULL, 1);
    match_on(cpu(), one, &x, 0.5f);
    for (int threads = 2; threads <= 5; threads += 3) {
        sti_dev *many = new_dev(NULL, threads);
        match_on(cpu(), many, &y, 0.5f);
        assert_true(x.loss_f == y.loss_f);
        for (int f = ALPHA; f < FIELDS; f++)
            assert_memory_equal(x.grad_f[f], y.grad_f[f], x.n[f] * sizeof(float));
        free_dev(many);
    }
    free_dev(one);
    drop_batch(&x);
    drop_batch(&y);
}

/* A gradient asked for alone has the same bits; with none the loss has. */
static void test_wanted_alone(void **state)
{
    (void)state;
    sti_dev *dev = new_dev(NULL, 1);
    batch x =
        make_match(preset("t2r", 16), (sti_hybrid_shape){4, 2, 16, 16}, 1, 100, 1, 4);
    match_on(cpu(), dev, &x, 1);
    for (int f = ALPHA; f <= FIELDS; f++) {
        const size_t n = f < FIELDS ? x.n[f] : 1;
        float *alone = zeros(n, sizeof *alone), *only[FIELDS] = {0};
        if (f < FIELDS) only[f] = alone;
        sti_hybrid_parallel_args p = match32(&x);
        p.grad = (sti_hybrid_grad){PARAMETERS(only)};
        double loss = 0;
        still_error err;
        const sti_hybrid_match_args a = {.p = &p, .scale = 1, .loss = &loss};
        assert_int_equal(cpu()->hybrid_match(dev, &a, &err), STILL_OK);
        assert_true(loss == x.loss_f);
        if (f < FIELDS) assert_memory_equal(alone, x.grad_f[f], n * sizeof(float));
        free(alone);
    }
    drop_batch(&x);
    free_dev(dev);
}

/* A method that forgets has nothing to match: an error, not an infinite loss. */
static void test_forgetting_is_refused(void **state)
{
    (void)state;
    const sti_backend *const backend[] = {sti_backend_find("ref"), cpu()};
    batch x = make_match(preset("swa", 4), small_shape, 1, 9, 1, 5);
    for (int i = 0; i < 2; i++) {
        sti_dev *dev = dev_of(backend[i], (sti_dev_params){.threads = 1, .max_k = 64});
        const sti_hybrid_parallel_args p = match32(&x);
        const sti_hybrid_match_args a = {.p = &p, .scale = 1, .loss = &x.loss_f};
        still_error err;
        assert_int_equal(backend[i]->hybrid_match(dev, &a, &err), STILL_E_UNSUPPORTED);
        backend[i]->dev_free(dev);
    }
    drop_batch(&x);
}

RUN_TESTS(cmocka_unit_test(test_differences),
          cmocka_unit_test(test_all_exact_is_entropy),
          cmocka_unit_test(test_table_of_ref), cmocka_unit_test(test_any_settings),
          cmocka_unit_test(test_real_shapes), cmocka_unit_test(test_edges),
          cmocka_unit_test(test_extremes), cmocka_unit_test(test_threads),
          cmocka_unit_test(test_wanted_alone),
          cmocka_unit_test(test_forgetting_is_refused))
