/* test_hybrid_train.c - the hybrid operator over whole sequences on the cuda backend:
 * routing, outputs and every gradient against the reference in double, over methods,
 * settings, shapes and lengths; the same bits each time and whatever else is asked for.
 *
 * Products run in half or TF32, whose rounding is 5e-4: errors are measured against the
 * size of the whole tensor and may be ten times that. */
#include "../../../../run.h"
#include "../../../hybrid_batch.h"

#include "../../gpu.h"

static const double limit = 5e-3;

static int setup(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){.threads = 1, .max_k = 64});
}

static void ok(still_status st, const still_error *err)
{
    if (st != STILL_OK) fail_msg("%s", err->text);
}

/* Leaves an input out: its start value. */
static void leave_out(batch *x, int field)
{
    free(x->in[field]);
    x->in[field] = NULL;
}

/* ---- The device ---------------------------------------------------------- */

/* A batch on the GPU, and what came back of it. */
typedef struct device_batch {
    const gpu *g;
    sti_block in[FIELDS], grad[FIELDS], y, dy, fold;
    float *got[FIELDS], *got_y; /* gradients, y */
    int32_t *got_fold;
} device_batch;

static device_batch to_device(const gpu *g, const batch *x)
{
    device_batch d = {.g = g};
    for (int f = 0; f < FIELDS; f++) {
        d.in[f] = upload(g, x->in[f], x->n[f]);
        d.grad[f] = new_block(g, x->n[f] * sizeof(float));
    }
    d.y = new_block(g, x->n[Q] * sizeof(float));
    d.dy = upload(g, x->dy, x->n[Q]);
    d.fold = new_block(g, x->routes * sizeof(int32_t));
    return d;
}

static void drop_device(device_batch *d)
{
    const gpu *g = d->g;
    for (int f = 0; f < FIELDS; f++) {
        if (d->in[f].p) g->be->mem_free(g->dev, &d->in[f]);
        g->be->mem_free(g->dev, &d->grad[f]);
        free(d->got[f]);
    }
    g->be->mem_free(g->dev, &d->y);
    g->be->mem_free(g->dev, &d->dy);
    g->be->mem_free(g->dev, &d->fold);
    free(d->got_y);
    free(d->got_fold);
}

static sti_hybrid_parallel_args args_of(const batch *x, const device_batch *d,
                                        unsigned wanted)
{
    float *in[FIELDS], *grad[FIELDS];
    for (int f = 0; f < FIELDS; f++) {
        in[f] = d->in[f].p;
        grad[f] = wanted >> f & 1 ? d->grad[f].p : NULL;
    }
    return (sti_hybrid_parallel_args){.set = &x->set,
                                      .shape = x->shape,
                                      .B = x->B,
                                      .T = x->T,
                                      .in = FIELDS_OF(sti_hybrid_in, in),
                                      .fold_chunk = d->fold.p,
                                      .y = d->y.p,
                                      .dy = d->dy.p,
                                      .grad = FIELDS_OF(sti_hybrid_grad, grad)};
}

static const unsigned all_fields = (1u << FIELDS) - 1;

/* Routes on the GPU, then runs both ways with the reference's routing. Gradients that
 * are written begin as something else, those that are added to begin at zero. */
static void run_cuda(device_batch *d, const batch *x, unsigned wanted)
{
    const gpu *g = d->g;
    const sti_hybrid_parallel_args a = args_of(x, d, wanted);
    const size_t bytes = x->routes * sizeof(int32_t);
    still_error err;
    for (int f = 0; f < FIELDS; f++) {
        float *start = zeros(x->n[f], sizeof *start);
        for (size_t i = 0; f <= GATE && i < x->n[f]; i++) start[i] = 77;
        move(g, d->grad[f].p, start, x->n[f] * sizeof *start);
        free(start);
    }
    ok(g->be->hybrid_route(g->dev, &a, &err), &err);
    d->got_fold = download(g, d->fold.p, bytes);
    move(g, d->fold.p, x->fold, bytes);
    ok(g->be->hybrid_parallel(g->dev, &a, &err), &err);
    ok(g->be->hybrid_backward(g->dev, &a, &err), &err);
    d->got_y = download(g, d->y.p, x->n[Q] * sizeof(float));
    for (int f = 0; f < FIELDS; f++)
        d->got[f] = download(g, d->grad[f].p, x->n[f] * sizeof(float));
}

/* ---- Comparison ---------------------------------------------------------- */

/* |got - want| over |want|; `least`: what an element of want counts for at least. */
static double error_of(const float *got, const double *want, size_t n, double least)
{
    double error = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        error += pow((double)got[i] - want[i], 2);
        size += want[i] * want[i];
    }
    return sqrt(error) / fmax(sqrt(size), least * sqrt((double)n));
}

static void expect(const char *what, const batch *x, const float *got,
                   const double *want, size_t n, double least)
{
    expect_error(what, x, error_of(got, want, n, least), limit);
}

/* Where there is but one key, one kind of term or one feature, its weight cancels, and
 * the gradient is what rounding leaves of a sum of larger numbers: as many as there are
 * features and tokens for a bias, tokens for the other numbers. */
static const double least[FIELDS] = {
    [Q] = 0.2,    [K] = 0.2,      [V] = 0.02,     [GATE] = 0.02, [ALPHA] = 1,
    [WINDOW] = 1, [MAP_Q] = 0.02, [MAP_K] = 0.02, [BIAS_Q] = 3,  [BIAS_K] = 3};

/* size: of dy. */
static void compare(const batch *x, const device_batch *d, double size)
{
    expect_routes(x, d->got_fold);
    expect("y", x, d->got_y, x->y, x->n[Q], 0);
    for (int f = 0; f < FIELDS; f++) {
        if (!is_read(&x->set, f)) continue;
        expect(field_name[f], x, d->got[f], x->grad[f], x->n[f], least[f] * size);
    }
}

static void check(const gpu *g, batch *x)
{
    run_ref(x);
    device_batch d = to_device(g, x);
    run_cuda(&d, x, all_fields);
    compare(x, &d, 1);
    drop_device(&d);
}

/* ---- Tests --------------------------------------------------------------- */

/* Methods at many shapes: every head size, chunks that are no multiple of anything,
 * caps that are reached and not. */
static void test_shapes(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const shape_case c[] = {
        {"still", 16, 4, 32, 203, 3, 1, 64, 64, false},
        {"still", 32, 8, 16, 203, 4, 2, 80, 80, true},
        {"still", 100, 25, 10, 333, 2, 1, 128, 64, false}, /* two tiles to a chunk */
        {"still", 16, 16, -1, 130, 2, 1, 64, 64, false},
        {"still", 16, 4, 0, 130, 2, 1, 64, 64, false},
        {"still", 1, 1, 7, 70, 4, 2, 64, 64, false},
        {"still", 5, 2, 3, 97, 2, 1, 16, 16, true},
        {"still", 7, 2, 200, 75, 6, 2, 32, 32, false},
        {"still", 24, 6, 20, 150, 2, 2, 96, 96, false},
        {"still", 12, 3, 9, 100, 2, 1, 30, 22, false}, /* rows no one aligned */
        {"lolcats", 64, 0, 0, 300, 2, 1, 64, 32, true},
        {"hedgehog", 64, 0, 0, 150, 2, 1, 64, 64, true},
        {"hedgehog", 8, 0, 0, 65, 4, 2, 32, 32, false},
        {"t2r", 64, 0, 0, 150, 2, 1, 80, 80, true},
        {"swa", 32, 0, 0, 150, 2, 1, 64, 64, false},
        {"softmax", 32, 32, -1, 300, 2, 1, 64, 64, false},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        batch x = make_batch(settings_of(&c[i]), shape_of(&c[i]), 1 + (int)(i % 2),
                             c[i].T, 1.2, i + 1);
        check(g, &x);
        drop_batch(&x);
    }
}

/* Settings of every kind, drawn at random. */
static void test_any_settings(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const int size[] = {16, 32, 64};
    for (uint64_t seed = 1; seed <= 60; seed++) {
        problem p = any_problem(seed);
        uint64_t rng = seed;
        sti_hybrid_shape shape = p.shape;
        shape.D = size[below(&rng, 3)];
        shape.F = below(&rng, 3) ? shape.D : shape.D / 2 + 1;
        p.set.feature_floor = p.set.feature_floor > 1e-6 ? 0.02 : p.set.feature_floor;
        batch x = make_batch(p.set, shape, 1 + (int)(seed % 2), p.T + 20, 1, seed);
        check(g, &x);
        drop_batch(&x);
        drop(&p);
    }
}

/* Every score, both scales, relu features beside a window. */
static void test_variants(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    for (int score = 0; score < STI_SCORE_COUNT; score++)
        for (int variant = 0; variant < 4; variant++) {
            sti_hybrid_settings s = preset("still", 20);
            s.cap = 12;
            s.score = (sti_score_kind)score;
            s.per_head = variant % 2;
            s.seed = 5;
            s.layer = 3;
            if (variant >= 2) {
                s.la_scale = STI_SCALE_WINDOW;
                s.window_factor = true;
                s.map = STI_MAP_RELU;
                s.norm_preserved = variant == 3;
            }
            batch x = make_batch(s, (sti_hybrid_shape){4, 2, 32, 32}, 2, 155, 1,
                                 (uint64_t)(score * 4 + variant));
            check(g, &x);
            drop_batch(&x);
        }
}

/* Quantized salient tokens: what is stored counts outside the window, and the gradient
 * passes the rounding. */
static void test_quantized(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const struct {
        int key_bits, value_bits, chunk, select, cap, D;
        bool per_head, uneven;
    } c[] = {
        {8, 4, 16, 6, 20, 64, false, false}, {5, 3, 16, 6, 20, 64, false, true},
        {5, 0, 20, 8, 9, 32, true, false},   {0, 3, 20, 8, 9, 96, false, false},
        {8, 3, 32, 10, 40, 128, true, true},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sti_hybrid_settings s = preset("still", c[i].chunk);
        uint64_t rng = i;
        s.select = c[i].select;
        s.cap = c[i].cap;
        s.key_bits = c[i].key_bits;
        s.value_bits = c[i].value_bits;
        s.per_head = c[i].per_head;
        if (c[i].uneven) make_uneven(&s, &rng);
        batch x =
            make_batch(s, (sti_hybrid_shape){4, 2, c[i].D, c[i].D}, 2, 230, 1, i + 90);
        check(g, &x);
        drop_batch(&x);
    }
}

/* Inputs left out have their start values. */
static void test_start_values(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const char *const method[] = {"still", "lolcats", "t2r"};
    for (int i = 0; i < 3; i++) {
        sti_hybrid_settings s = preset(method[i], 16);
        batch x = make_batch(s, (sti_hybrid_shape){2, 1, 64, 48}, 1, 140, 1, 40);
        for (int f = GATE; f < FIELDS; f++) leave_out(&x, f);
        check(g, &x);
        drop_batch(&x);
    }
}

static void test_edges(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    for (int i = 0; i < N_EDGES; i++) {
        batch x = edge_batch(i);
        check(g, &x);
        drop_batch(&x);
    }
}

static void test_zero_vectors(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    batch x = batch_of_zeros();
    check(g, &x);
    drop_batch(&x);
}

/* Logits of 60 and more: weights spread over all of float's range. */
static void test_large_logits(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    batch x =
        make_batch(preset("still", 16), (sti_hybrid_shape){2, 1, 64, 64}, 1, 100, 1, 8);
    for (size_t t = 0; t < 100; t += 5)
        for (size_t e = 0; e < 64; e++) x.in[K][t * 64 + e] *= 8;
    for (size_t i = 0; i < x.n[ALPHA]; i++) x.in[ALPHA][i] = 30;
    run_ref(&x);
    device_batch d = to_device(g, &x);
    run_cuda(&d, &x, all_fields);
    /* A logit's rounding grows with it; what is left to ask for is that nothing breaks.
     */
    for (int f = 0; f < FIELDS; f++)
        assert_true(isfinite(error_of(d.got[f], x.grad[f], x.n[f], 0.02)));
    assert_true(error_of(d.got_y, x.y, x.n[Q], 0) < 0.05);
    drop_device(&d);
    drop_batch(&x);
}

/* Gradients of any size: all small or large, of very different rows, of which some are
 * zero, or growing by far along chunks of more than one tile. */
static void test_gradient_sizes(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const char *const method[] = {"still", "lolcats", "softmax", "t2r"};
    enum { SMALL, LARGE, MIXED, GROWING, KINDS };
    static const double size[KINDS] = {1e-12, 1e9, 1, 1};
    for (int i = 0; i < 4 * KINDS; i++) {
        const int kind = i % KINDS, T = kind == GROWING ? 330 : 150;
        sti_hybrid_settings s = preset(method[i / KINDS], kind == GROWING ? 80 : 32);
        /* Of other seeds one has a relu feature nearer to 0 than float can tell. */
        const uint64_t seed = (uint64_t)(20 + i / KINDS * 3 + kind);
        batch x = make_batch(s, (sti_hybrid_shape){4, 2, 64, 64}, 1, T, 1, seed);
        for (size_t e = 0; e < x.n[Q]; e++) {
            const size_t row = e / 64;
            double times = size[kind];
            if (kind == MIXED) times = pow(10, -(double)(row % 8)) * (row % 3 != 0);
            if (kind == GROWING) times = pow(10, 6 * (double)row / (4 * T) - 6);
            x.dy[e] = (double)(float)(x.dy[e] * times);
        }
        run_ref(&x);
        device_batch d = to_device(g, &x);
        run_cuda(&d, &x, all_fields);
        compare(&x, &d, size[kind]);
        drop_device(&d);
        drop_batch(&x);
    }
}

/* The same bits each time; a gradient does not depend on what else is asked for. */
static void test_same_bits(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const char *const method[] = {"still", "lolcats", "t2r"};
    for (int i = 0; i < 3; i++) {
        batch x = make_batch(preset(method[i], 32), (sti_hybrid_shape){6, 2, 32, 32}, 2,
                             210, 1, 3);
        run_ref(&x);
        device_batch one = to_device(g, &x);
        run_cuda(&one, &x, all_fields);
        for (int f = -1; f < FIELDS; f++) {
            device_batch two = to_device(g, &x);
            run_cuda(&two, &x, f < 0 ? all_fields : 1u << f);
            assert_memory_equal(one.got_fold, two.got_fold, x.routes * sizeof(int32_t));
            assert_memory_equal(one.got_y, two.got_y, x.n[Q] * sizeof(float));
            for (int k = 0; k < FIELDS; k++)
                if (f < 0 || f == k)
                    assert_memory_equal(one.got[k], two.got[k], x.n[k] * sizeof(float));
            drop_device(&two);
        }
        drop_device(&one);
        drop_batch(&x);
    }
}

/* Gradients of parameters are added to. */
static void test_adds_up(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    batch x = make_batch(preset("still", 16), (sti_hybrid_shape){2, 1, 32, 32}, 1, 100,
                         1, 11);
    run_ref(&x);
    device_batch d = to_device(g, &x);
    run_cuda(&d, &x, all_fields);
    const sti_hybrid_parallel_args a = args_of(&x, &d, all_fields);
    still_error err;
    ok(g->be->hybrid_backward(g->dev, &a, &err), &err);
    for (int f = ALPHA; f <= MAP_K; f++) {
        float *twice = download(g, d.grad[f].p, x.n[f] * sizeof(float));
        for (size_t i = 0; i < x.n[f]; i++)
            assert_true(fabsf(twice[i] - 2 * d.got[f][i]) <=
                        1e-5f * (1 + fabsf(d.got[f][i])));
        free(twice);
    }
    drop_device(&d);
    drop_batch(&x);
}

/* The shapes of SmolLM2 and of Llama, one sequence. */
static void test_real_shapes(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    static const shape_case c[] = {
        {"still", 64, 16, 128, 1024, 9, 3, 64, 64, false},
        {"still", 128, 32, 256, 700, 3, 1, 64, 64, true},
        {"still", 128, 32, 256, 600, 9, 3, 64, 64, false}, /* tiles of several heads */
        {"still", 128, 32, 64, 600, 8, 2, 128, 128, false},
        {"lolcats", 256, 0, 0, 800, 3, 1, 64, 64, true},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        batch x = make_batch(settings_of(&c[i]), shape_of(&c[i]), 1, c[i].T, 1, i + 70);
        check(g, &x);
        drop_batch(&x);
    }
}

/* What this backend does not do is an error that says so. */
static void test_unsupported(void **state)
{
    (void)state;
    const gpu *g = need_gpu();
    batch x = make_batch(preset("still", 8), small_shape, 1, 30, 1, 9);
    device_batch d = to_device(g, &x);
    sti_hybrid_parallel_args a = args_of(&x, &d, 0);
    still_error err;
    a.max_in = d.y.p;
    assert_int_equal(g->be->hybrid_parallel(g->dev, &a, &err), STILL_E_UNSUPPORTED);
    assert_int_equal(g->be->hybrid_backward(g->dev, &a, &err), STILL_E_UNSUPPORTED);
    a.max_in = NULL;
    a.max_out = d.y.p;
    assert_int_equal(g->be->hybrid_parallel(g->dev, &a, &err), STILL_E_UNSUPPORTED);
    drop_device(&d);
    drop_batch(&x);
}

RUN_TESTS_IN(setup, close_gpu, cmocka_unit_test(test_edges),
             cmocka_unit_test(test_shapes), cmocka_unit_test(test_variants),
             cmocka_unit_test(test_any_settings), cmocka_unit_test(test_start_values),
             cmocka_unit_test(test_zero_vectors), cmocka_unit_test(test_large_logits),
             cmocka_unit_test(test_gradient_sizes), cmocka_unit_test(test_same_bits),
             cmocka_unit_test(test_adds_up), cmocka_unit_test(test_real_shapes),
             cmocka_unit_test(test_unsupported), cmocka_unit_test(test_quantized))
