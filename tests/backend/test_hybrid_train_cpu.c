/* test_hybrid_train_cpu.c - the hybrid operator over whole sequences on the cpu
 * backend, every instruction set here: routing, outputs and gradients against the
 * reference in double over many settings, and the same bits from any number of threads.
 */
#include "hybrid_problem.h"

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

static float *narrow(const double *x, size_t n)
{
    float *y = calloc(n ? n : 1, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; x && i < n; i++) y[i] = (float)x[i];
    return y;
}

/* The inputs rounded to float, so that both backends see the same numbers. */
static void round_inputs(double *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = (double)(float)x[i];
}

enum { Q, K, V, GATE, ALPHA, WINDOW, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {
    "q", "k", "v", "gate", "alpha", "window", "map_q", "map_k", "bias_q", "bias_k"};

/* A batch: inputs in double and float, outputs and gradients of both backends. */
typedef struct batch {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int B, T, S;
    size_t n[FIELDS];
    double *in[FIELDS], *grad[FIELDS];
    float *in_f[FIELDS], *grad_f[FIELDS];
    double *y, *dy, *score, *max;
    float *y_f, *dy_f, *score_f, *max_f;
    int32_t *fold, *fold_f, *salient, *salient_f;
} batch;

static batch make_batch(sti_hybrid_settings set, sti_hybrid_shape shape, int B, int T,
                        double gain, uint64_t seed)
{
    batch x = {.set = set, .shape = shape, .B = B, .T = T};
    x.S = sti_hybrid_selectors(&set, &shape);
    const size_t rows = (size_t)B * (size_t)T, H = (size_t)shape.H, S = (size_t)x.S;
    const size_t D = (size_t)shape.D, map = D * (size_t)shape.F;
    const size_t n[FIELDS] = {rows * H * D,
                              rows * (size_t)shape.G * D,
                              rows * (size_t)shape.G * D,
                              rows * H * D,
                              H,
                              H,
                              H * map,
                              S * map,
                              H,
                              S};
    const double w = 1 / sqrt((double)D);
    const double size[FIELDS] = {gain, gain, 1, 1, 0.5, 1, w, w, 0.3, 0.3};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        x.n[f] = n[f];
        x.in[f] = normals(&rng, n[f], size[f]);
        round_inputs(x.in[f], n[f]);
        x.in_f[f] = narrow(x.in[f], n[f]);
        x.grad[f] = calloc(n[f], sizeof(double));
        x.grad_f[f] = narrow(NULL, n[f]);
    }
    x.dy = normals(&rng, rows * H * D, 1);
    round_inputs(x.dy, rows * H * D);
    x.dy_f = narrow(x.dy, rows * H * D);
    x.y = calloc(rows * H * D, sizeof(double));
    x.y_f = narrow(NULL, rows * H * D);
    x.max = calloc(rows * H, sizeof(double));
    x.max_f = narrow(NULL, rows * H);
    x.score = calloc(rows * S, sizeof(double));
    x.score_f = narrow(NULL, rows * S);
    x.fold = calloc(rows * S, sizeof(int32_t));
    x.fold_f = calloc(rows * S, sizeof(int32_t));
    x.salient = calloc(rows * S, sizeof(int32_t));
    x.salient_f = calloc(rows * S, sizeof(int32_t));
    return x;
}

static void drop_batch(batch *x)
{
    for (int f = 0; f < FIELDS; f++) {
        free(x->in[f]);
        free(x->grad[f]);
        free(x->in_f[f]);
        free(x->grad_f[f]);
    }
    void *all[] = {x->y,       x->dy,    x->score, x->max,    x->y_f,     x->dy_f,
                   x->score_f, x->max_f, x->fold,  x->fold_f, x->salient, x->salient_f};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#define FIELDS_OF(type, at)                                                            \
    (type)                                                                             \
    {                                                                                  \
        .q = (at)[Q], .k = (at)[K], .v = (at)[V], .gate_logit = (at)[GATE],            \
        .alpha = (at)[ALPHA], .window_logit = (at)[WINDOW], .map_q = (at)[MAP_Q],      \
        .map_k = (at)[MAP_K], .bias_q = (at)[BIAS_Q], .bias_k = (at)[BIAS_K]           \
    }

static sti_hybrid_parallel_args64 args64(batch *x)
{
    return (sti_hybrid_parallel_args64){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = FIELDS_OF(sti_hybrid_in64, x->in),
        .fold_chunk = x->fold,
        .max_out = x->max,
        .y = x->y,
        .trace = {.score = x->score, .salient = x->salient},
        .dy = x->dy,
        .grad = FIELDS_OF(sti_hybrid_grad64, x->grad)};
}

static sti_hybrid_parallel_args args32(batch *x)
{
    return (sti_hybrid_parallel_args){
        .set = &x->set,
        .shape = x->shape,
        .B = x->B,
        .T = x->T,
        .in = FIELDS_OF(sti_hybrid_in, x->in_f),
        .fold_chunk = x->fold_f,
        .max_out = x->max_f,
        .y = x->y_f,
        .trace = {.score = x->score_f, .salient = x->salient_f},
        .dy = x->dy_f,
        .grad = FIELDS_OF(sti_hybrid_grad, x->grad_f)};
}

static void run_ref(batch *x)
{
    sti_hybrid_parallel_args64 a = args64(x);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad[f], 0, x->n[f] * sizeof(double));
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
}

/* Routes (the result stays in fold_f), then runs both ways with the routing `fold`. */
static void run_cpu(sti_dev *dev, batch *x, int32_t *fold)
{
    const sti_backend *b = sti_backend_find("cpu");
    sti_hybrid_parallel_args a = args32(x);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad_f[f], 0, x->n[f] * sizeof(float));
    assert_int_equal(b->hybrid_route(dev, &a, &err), STILL_OK);
    a.fold_chunk = fold;
    assert_int_equal(b->hybrid_parallel(dev, &a, &err), STILL_OK);
    assert_int_equal(b->hybrid_backward(dev, &a, &err), STILL_OK);
}

/* Largest difference over the largest value, or over `size` if that is larger. */
static double error_of(const float *got, const double *want, size_t n, double size)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) size = fmax(size, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
    }
    return size > 0 ? worst / size : worst;
}

static void expect(const char *what, const batch *x, const float *got,
                   const double *want, size_t n, double size, double limit)
{
    const double e = error_of(got, want, n, size);
    if (!(e <= limit))
        fail_msg("%s: error %.2g over %.2g (B %d T %d H %d G %d D %d F %d, chunk %d "
                 "select %d cap %d, per head %d window %d linear %d map %d norm %d)",
                 what, e, limit, x->B, x->T, x->shape.H, x->shape.G, x->shape.D,
                 x->shape.F, x->set.chunk, x->set.select, x->set.cap, x->set.per_head,
                 x->set.has_window, x->set.has_linear, x->set.map,
                 x->set.norm_preserved);
}

/* A token may be routed otherwise only if another one with the same score, up to
 * rounding, was. */
static void expect_routes(const batch *x, double tie)
{
    for (int b = 0; b < x->B; b++)
        for (int s = 0; s < x->S; s++)
            for (int i = 0; i < x->T; i++) {
                const size_t at = (size_t)(b * x->T + i) * (size_t)x->S + (size_t)s;
                if (x->fold[at] == x->fold_f[at]) continue;
                bool tied = false;
                for (int j = 0; j < x->T; j++) {
                    const size_t o = (size_t)(b * x->T + j) * (size_t)x->S + (size_t)s;
                    tied = tied || (j != i && x->fold[o] != x->fold_f[o] &&
                                    fabs(x->score[at] - x->score[o]) < tie);
                }
                if (!tied)
                    fail_msg("token %d of head %d folded at %d, expected %d", i, s,
                             x->fold_f[at], x->fold[at]);
            }
}

static void compare(batch *x, double limit)
{
    const size_t rows = (size_t)x->B * (size_t)x->T;
    if (x->set.has_window) {
        expect("score", x, x->score_f, x->score, rows * (size_t)x->S, 0, limit);
        expect_routes(x, 1e-4);
    }
    for (size_t i = 0; i < rows * (size_t)x->S; i++)
        assert_int_equal(x->salient[i], x->salient_f[i]);
    expect("y", x, x->y_f, x->y, x->n[Q], 0, limit);
    if (x->set.has_window)
        expect("max", x, x->max_f, x->max, rows * (size_t)x->shape.H, 0, limit);
    for (int f = 0; f < FIELDS; f++) {
        /* What a setting does not read has no gradient worth the name. */
        if (f == GATE && !x->set.gate) continue;
        if (f == ALPHA && !x->set.alpha) continue;
        if ((f == BIAS_Q || f == BIAS_K) && x->set.map != STI_MAP_RELU) continue;
        /* Where there is but one kind of term, or one feature, its weight cancels, and
         * the gradient is what rounding leaves of a sum of larger numbers. */
        const double size = f == ALPHA || f == WINDOW ? 1 : 0.02;
        expect(field_name[f], x, x->grad_f[f], x->grad[f], x->n[f], size, limit);
    }
}

static void check(const char *isa, batch *x, double limit)
{
    sti_dev *dev = new_dev(isa, 2);
    if (!dev) return;
    run_ref(x);
    run_cpu(dev, x, x->fold);
    compare(x, limit);
    sti_backend_find("cpu")->dev_free(dev);
}

/* Settings of every kind on small shapes. */
static void test_any_settings(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 240; seed++) {
        problem p = any_problem(seed);
        batch x = make_batch(p.set, p.shape, 1 + (int)(seed % 2), p.T, 1, seed);
        check(isa_name[seed % N_ISA], &x, 2e-5);
        drop_batch(&x);
        drop(&p);
    }
}

/* Methods at the shapes of real models, T no multiple of anything. */
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
        {"still", 16, 16, -1, 130, 2, 1, 64, 64, false},
        {"still", 16, 4, 0, 130, 2, 1, 64, 64, false},
        {"still", 1, 1, 7, 70, 4, 2, 64, 64, false},
        {"lolcats", 64, 0, 0, 300, 2, 1, 64, 32, true},
        {"hedgehog", 64, 0, 0, 300, 2, 1, 64, 64, true},
        {"t2r", 64, 0, 0, 150, 2, 1, 80, 80, true},
        {"swa", 32, 0, 0, 150, 2, 1, 64, 64, false},
        {"softmax", 32, 32, -1, 150, 2, 1, 64, 64, false},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        for (int isa = 0; isa < N_ISA; isa++) {
            sti_hybrid_settings s = preset(c[i].method, c[i].C);
            s.select = c[i].select;
            s.cap = c[i].cap;
            s.per_head = c[i].per_head;
            const sti_hybrid_shape shape = {c[i].H, c[i].G, c[i].D, c[i].F};
            batch x = make_batch(s, shape, 1, c[i].T, 1.5, i + 1);
            check(isa_name[isa], &x, 2e-5);
            drop_batch(&x);
        }
}

/* Lengths at the edges of chunks: nothing has left, something just has. */
static void test_edges(void **state)
{
    (void)state;
    static const int length[] = {1, 7, 8, 9, 15, 16, 17, 24, 25};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        batch x = make_batch(preset("still", 8), (sti_hybrid_shape){2, 1, 16, 16}, 2,
                             length[i], 1, i);
        check(NULL, &x, 2e-5);
        drop_batch(&x);
    }
}

/* Keys and queries of norm 0: no division by it, no gradient through |x|. */
static void test_zero_vectors(void **state)
{
    (void)state;
    batch x =
        make_batch(preset("still", 4), (sti_hybrid_shape){2, 1, 16, 16}, 1, 40, 1, 5);
    for (size_t i = 0; i < x.n[K] / 2; i++) x.in[K][i] = x.in_f[K][i] = 0;
    for (size_t i = 0; i < x.n[Q]; i += 3) x.in[Q][i] = x.in_f[Q][i] = 0;
    for (size_t i = 64; i < 128; i++) x.in[Q][i] = x.in_f[Q][i] = 0;
    check(NULL, &x, 2e-5);
    drop_batch(&x);
}

/* M given from outside is used as it is. */
static void test_max_in(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("lolcats", 8);
    batch x = make_batch(s, (sti_hybrid_shape){2, 1, 16, 16}, 1, 50, 1, 9);
    sti_dev *dev = new_dev(NULL, 1);
    run_ref(&x);
    const size_t n = 50 * 2;
    for (size_t i = 0; i < n; i++) {
        x.max[i] = (double)(float)(x.max[i] + 0.25);
        x.max_f[i] = (float)x.max[i];
    }
    const float *max_f = x.max_f;
    sti_hybrid_parallel_args64 a = args64(&x);
    sti_hybrid_parallel_args b = args32(&x);
    still_error err;
    a.max_in = x.max;
    b.max_in = max_f;
    a.max_out = NULL;
    b.max_out = NULL;
    b.fold_chunk = x.fold;
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    assert_int_equal(sti_backend_find("cpu")->hybrid_parallel(dev, &b, &err), STILL_OK);
    expect("y", &x, x.y_f, x.y, x.n[Q], 0, 1e-6);
    sti_backend_find("cpu")->dev_free(dev);
    drop_batch(&x);
}

/* One, two and five threads, and a batch cut in two: the same bits. */
static void test_threads(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("still", 32);
    const sti_hybrid_shape shape = {6, 2, 32, 32};
    batch x = make_batch(s, shape, 2, 210, 1, 3),
          y = make_batch(s, shape, 2, 210, 1, 3);
    sti_dev *one = new_dev(NULL, 1);
    run_cpu(one, &x, x.fold_f);
    for (int threads = 2; threads <= 5; threads += 3) {
        sti_dev *many = new_dev(NULL, threads);
        run_cpu(many, &y, y.fold_f);
        assert_memory_equal(x.fold_f, y.fold_f, 2 * 210 * 2 * sizeof(int32_t));
        assert_memory_equal(x.y_f, y.y_f, x.n[Q] * sizeof(float));
        for (int f = 0; f < FIELDS; f++)
            assert_memory_equal(x.grad_f[f], y.grad_f[f], x.n[f] * sizeof(float));
        sti_backend_find("cpu")->dev_free(many);
    }
    /* The second sequence alone. */
    sti_hybrid_parallel_args a = args32(&y);
    const size_t half = y.n[Q] / 2, half_k = y.n[K] / 2;
    still_error err;
    a.B = 1;
    a.in.q += half;
    a.in.k += half_k;
    a.in.v += half_k;
    a.in.gate_logit += half;
    a.trace = (sti_hybrid_trace){0};
    memset(y.y_f, 0, y.n[Q] * sizeof(float));
    assert_int_equal(sti_backend_find("cpu")->hybrid_route(one, &a, &err), STILL_OK);
    assert_int_equal(sti_backend_find("cpu")->hybrid_parallel(one, &a, &err), STILL_OK);
    assert_memory_equal(y.y_f, x.y_f + half, half * sizeof(float));
    sti_backend_find("cpu")->dev_free(one);
    drop_batch(&x);
    drop_batch(&y);
}

/* Gradients not asked for are not needed by the others: each alone is the same bits. */
static void test_wanted_alone(void **state)
{
    (void)state;
    static const char *const method[] = {"still", "lolcats", "t2r"};
    const sti_backend *b = sti_backend_find("cpu");
    sti_dev *dev = new_dev(NULL, 1);
    for (size_t m = 0; m < sizeof method / sizeof *method; m++) {
        batch x = make_batch(preset(method[m], 16), (sti_hybrid_shape){4, 2, 16, 16}, 1,
                             100, 1, 4);
        run_cpu(dev, &x, x.fold_f);
        for (int f = 0; f < FIELDS; f++) {
            float *alone = narrow(NULL, x.n[f]), *none[FIELDS] = {0};
            none[f] = alone;
            sti_hybrid_parallel_args a = args32(&x);
            a.grad = FIELDS_OF(sti_hybrid_grad, none);
            still_error err;
            assert_int_equal(b->hybrid_backward(dev, &a, &err), STILL_OK);
            assert_memory_equal(alone, x.grad_f[f], x.n[f] * sizeof(float));
            free(alone);
        }
        drop_batch(&x);
    }
    b->dev_free(dev);
}

/* A session that is fed the whole sequence, and the parallel form with the routing the
 * session chose: the same outputs, token by token. */
static void test_session_is_parallel(void **state)
{
    (void)state;
    static const char *const method[] = {"still", "lolcats", "hedgehog",
                                         "t2r",   "swa",     "softmax"};
    const sti_backend *b = sti_backend_find("cpu");
    for (size_t m = 0; m < sizeof method / sizeof *method; m++) {
        const sti_hybrid_shape shape = {4, 2, 32, 32};
        batch x = make_batch(preset(method[m], 16), shape, 1, 150, 1, m + 1);
        const sti_dev_params p = {
            .threads = 2, .max_k = 64, .heads = 4, .kv_heads = 2, .head_dim = 32};
        still_error err;
        sti_dev *dev;
        assert_int_equal(b->dev_new(&p, &dev, &err), STILL_OK);
        sti_hybrid_state st;
        sti_block block;
        sti_carve c = {0};
        sti_hybrid_state_carve(&st, &c, &x.set, &shape, x.T, sizeof(float),
                               sizeof(float));
        assert_true(sti_block_new(&block, c.used));
        c = (sti_carve){.base = block.p};
        sti_hybrid_state_carve(&st, &c, &x.set, &shape, x.T, sizeof(float),
                               sizeof(float));
        for (int i = 0; i < x.T * x.S; i++) x.fold_f[i] = -1;
        const sti_hybrid_args session = {.set = &x.set,
                                         .shape = shape,
                                         .T = x.T,
                                         .in = FIELDS_OF(sti_hybrid_in, x.in_f),
                                         .state = &st,
                                         .y = x.y_f,
                                         .trace = {.fold_chunk = x.fold_f}};
        assert_int_equal(b->hybrid(dev, &session, 1, &err), STILL_OK);
        for (size_t i = 0; i < x.n[Q]; i++) x.y[i] = (double)x.y_f[i];
        const sti_hybrid_parallel_args a = args32(&x);
        assert_int_equal(b->hybrid_parallel(dev, &a, &err), STILL_OK);
        expect("y", &x, x.y_f, x.y, x.n[Q], 0, 5e-6);
        b->dev_free(dev);
        sti_block_free(&block);
        drop_batch(&x);
    }
}

static void test_bad_arguments(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    sti_dev *dev = new_dev(NULL, 1);
    batch x =
        make_batch(preset("still", 4), (sti_hybrid_shape){2, 1, 16, 16}, 1, 9, 1, 5);
    still_error err;
    sti_hybrid_parallel_args a = args32(&x);
    a.shape.G = 3;
    assert_int_equal(b->hybrid_route(dev, &a, &err), STILL_E_ARG);
    assert_int_equal(b->hybrid_parallel(dev, &a, &err), STILL_E_ARG);
    assert_int_equal(b->hybrid_backward(dev, &a, &err), STILL_E_ARG);
    drop_batch(&x);
    b->dev_free(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_settings),
        cmocka_unit_test(test_real_shapes),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_zero_vectors),
        cmocka_unit_test(test_max_in),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_wanted_alone),
        cmocka_unit_test(test_session_is_parallel),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
