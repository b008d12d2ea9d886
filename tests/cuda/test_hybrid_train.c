/* test_hybrid_train.c - the hybrid operator over whole sequences on the cuda backend:
 * routing, outputs and every gradient against the reference in double, over methods,
 * settings, shapes and lengths; the same bits each time and whatever else is asked for.
 *
 * Products run in half or TF32, whose rounding is 5e-4: errors are measured against the
 * size of the whole tensor and may be ten times that. */
#include "../backend/hybrid_problem.h"

#include "ops/ops.h"

static const double limit = 5e-3;

static int setup(void **state)
{
    const sti_backend *be = sti_backend_find("cuda");
    const sti_dev_params p = {.threads = 1, .max_k = 64};
    still_error err;
    sti_dev *dev = NULL;
    *state = be && be->dev_new(&p, &dev, &err) == STILL_OK ? dev : NULL;
    return 0;
}

static int teardown(void **state)
{
    if (*state) sti_backend_find("cuda")->dev_free(*state);
    return 0;
}

/* ---- Batches ------------------------------------------------------------- */

enum { Q, K, V, GATE, ALPHA, WINDOW, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {
    "q", "k", "v", "gate", "alpha", "window", "map_q", "map_k", "bias_q", "bias_k"};

/* Inputs that a float can hold, and what the reference makes of them. */
typedef struct batch {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int B, T, S;
    size_t n[FIELDS];
    double *in[FIELDS], *grad[FIELDS]; /* an input may be NULL: its start value */
    double *y, *dy, *score;
    int32_t *fold;
} batch;

static batch make_batch(sti_hybrid_settings set, sti_hybrid_shape shape, int B, int T,
                        double gain, uint64_t seed)
{
    batch x = {.set = set, .shape = shape, .B = B, .T = T};
    x.S = sti_hybrid_selectors(&set, &shape);
    const size_t rows = (size_t)B * (size_t)T, H = (size_t)shape.H, S = (size_t)x.S;
    const size_t D = (size_t)shape.D, map = D * (size_t)shape.F;
    const size_t kv = rows * (size_t)shape.G * D;
    const size_t n[FIELDS] = {rows * H * D, kv, kv, rows * H * D, H, H, H * map,
                              S * map,      H,  S};
    const double w = 1 / sqrt((double)D);
    const double size[FIELDS] = {gain, gain, 1, 1, 0.5, 1, w, w, 0.3, 0.3};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        x.n[f] = n[f];
        x.in[f] = normals(&rng, n[f], size[f]);
        for (size_t i = 0; i < n[f]; i++) x.in[f][i] = (double)(float)x.in[f][i];
        x.grad[f] = calloc(n[f], sizeof(double));
    }
    x.dy = normals(&rng, n[Q], 1);
    for (size_t i = 0; i < n[Q]; i++) x.dy[i] = (double)(float)x.dy[i];
    x.y = calloc(n[Q], sizeof(double));
    x.score = calloc(rows * S, sizeof(double));
    x.fold = calloc(rows * S, sizeof(int32_t));
    return x;
}

static void drop_batch(batch *x)
{
    for (int f = 0; f < FIELDS; f++) {
        free(x->in[f]);
        free(x->grad[f]);
    }
    free(x->y);
    free(x->dy);
    free(x->score);
    free(x->fold);
}

/* Leaves an input out: its start value. */
static void leave_out(batch *x, int field)
{
    free(x->in[field]);
    x->in[field] = NULL;
}

#define FIELDS_OF(type, at)                                                            \
    (type)                                                                             \
    {                                                                                  \
        .q = (at)[Q], .k = (at)[K], .v = (at)[V], .gate_logit = (at)[GATE],            \
        .alpha = (at)[ALPHA], .window_logit = (at)[WINDOW], .map_q = (at)[MAP_Q],      \
        .map_k = (at)[MAP_K], .bias_q = (at)[BIAS_Q], .bias_k = (at)[BIAS_K]           \
    }

static size_t routes(const batch *x)
{
    return (size_t)x->B * (size_t)x->T * (size_t)x->S;
}

static void run_ref(batch *x)
{
    const sti_hybrid_parallel_args64 a = {.set = &x->set,
                                          .shape = x->shape,
                                          .B = x->B,
                                          .T = x->T,
                                          .in = FIELDS_OF(sti_hybrid_in64, x->in),
                                          .fold_chunk = x->fold,
                                          .y = x->y,
                                          .trace = {.score = x->score},
                                          .dy = x->dy,
                                          .grad =
                                              FIELDS_OF(sti_hybrid_grad64, x->grad)};
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad[f], 0, x->n[f] * sizeof(double));
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
}

/* ---- The device ---------------------------------------------------------- */

/* A batch on the GPU, and what came back of it. */
typedef struct device_batch {
    sti_dev *dev;
    sti_block in[FIELDS], grad[FIELDS], y, dy, fold;
    float *got[FIELDS], *got_y; /* gradients, y */
    int32_t *got_fold;
} device_batch;

static const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static void ok(still_status st, const still_error *err)
{
    if (st != STILL_OK) fail_msg("%s", err->text);
}

static void move(sti_dev *dev, void *to, const void *from, size_t bytes)
{
    still_error err;
    ok(cuda()->mem_move(dev, to, from, bytes, &err), &err);
}

static sti_block new_floats(sti_dev *dev, const double *x, size_t n)
{
    still_error err;
    sti_block b;
    ok(cuda()->mem_new(dev, n * sizeof(float), &b, &err), &err);
    if (!x) return b;
    float *narrow = calloc(n, sizeof *narrow);
    assert_non_null(narrow);
    for (size_t i = 0; i < n; i++) narrow[i] = (float)x[i];
    move(dev, b.p, narrow, n * sizeof *narrow);
    free(narrow);
    return b;
}

static void *fetch(sti_dev *dev, const sti_block *b, size_t bytes)
{
    void *x = calloc(bytes ? bytes : 1, 1);
    assert_non_null(x);
    move(dev, x, b->p, bytes);
    return x;
}

static device_batch to_device(sti_dev *dev, const batch *x)
{
    device_batch d = {.dev = dev};
    still_error err;
    for (int f = 0; f < FIELDS; f++) {
        if (x->in[f]) d.in[f] = new_floats(dev, x->in[f], x->n[f]);
        d.grad[f] = new_floats(dev, NULL, x->n[f]);
    }
    d.y = new_floats(dev, NULL, x->n[Q]);
    d.dy = new_floats(dev, x->dy, x->n[Q]);
    ok(cuda()->mem_new(dev, routes(x) * sizeof(int32_t), &d.fold, &err), &err);
    return d;
}

static void drop_device(device_batch *d)
{
    for (int f = 0; f < FIELDS; f++) {
        if (d->in[f].p) cuda()->mem_free(d->dev, &d->in[f]);
        cuda()->mem_free(d->dev, &d->grad[f]);
        free(d->got[f]);
    }
    cuda()->mem_free(d->dev, &d->y);
    cuda()->mem_free(d->dev, &d->dy);
    cuda()->mem_free(d->dev, &d->fold);
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
    const sti_hybrid_parallel_args a = args_of(x, d, wanted);
    const size_t bytes = routes(x) * sizeof(int32_t);
    still_error err;
    for (int f = 0; f < FIELDS; f++) {
        float *start = calloc(x->n[f], sizeof *start);
        assert_non_null(start);
        for (size_t i = 0; f <= GATE && i < x->n[f]; i++) start[i] = 77;
        move(d->dev, d->grad[f].p, start, x->n[f] * sizeof *start);
        free(start);
    }
    ok(cuda()->hybrid_route(d->dev, &a, &err), &err);
    d->got_fold = fetch(d->dev, &d->fold, bytes);
    move(d->dev, d->fold.p, x->fold, bytes);
    ok(cuda()->hybrid_parallel(d->dev, &a, &err), &err);
    ok(cuda()->hybrid_backward(d->dev, &a, &err), &err);
    d->got_y = fetch(d->dev, &d->y, x->n[Q] * sizeof(float));
    for (int f = 0; f < FIELDS; f++)
        d->got[f] = fetch(d->dev, &d->grad[f], x->n[f] * sizeof(float));
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
    const double e = error_of(got, want, n, least);
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
static void expect_routes(const batch *x, const int32_t *got)
{
    for (int b = 0; b < x->B; b++)
        for (int s = 0; s < x->S; s++)
            for (int i = 0; i < x->T; i++) {
                const size_t at = (size_t)(b * x->T + i) * (size_t)x->S + (size_t)s;
                if (x->fold[at] == got[at]) continue;
                bool tied = false;
                for (int j = 0; j < x->T; j++) {
                    const size_t o = (size_t)(b * x->T + j) * (size_t)x->S + (size_t)s;
                    tied = tied || (j != i && x->fold[o] != got[o] &&
                                    fabs(x->score[at] - x->score[o]) < 1e-4);
                }
                if (!tied)
                    fail_msg("token %d of head %d folded at %d, expected %d", i, s,
                             got[at], x->fold[at]);
            }
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
        /* What a setting does not read has no gradient worth the name. */
        if (f == GATE && !x->set.gate) continue;
        if (f == ALPHA && !x->set.alpha) continue;
        if ((f == BIAS_Q || f == BIAS_K) && x->set.map != STI_MAP_RELU) continue;
        expect(field_name[f], x, d->got[f], x->grad[f], x->n[f], least[f] * size);
    }
}

static void check(sti_dev *dev, batch *x)
{
    run_ref(x);
    device_batch d = to_device(dev, x);
    run_cuda(&d, x, all_fields);
    compare(x, &d, 1);
    drop_device(&d);
}

static sti_dev *need_gpu(void **state)
{
    if (!*state) skip();
    return *state;
}

/* ---- Tests --------------------------------------------------------------- */

typedef struct shape_case {
    const char *method;
    int C, select, cap, T, H, G, D, F;
    bool per_head;
} shape_case;

static sti_hybrid_settings settings_of(const shape_case *c)
{
    sti_hybrid_settings s = preset(c->method, c->C);
    s.select = c->select;
    s.cap = c->cap;
    s.per_head = c->per_head;
    return s;
}

/* Methods at many shapes: every head size, chunks that are no multiple of anything,
 * caps that are reached and not. */
static void test_shapes(void **state)
{
    sti_dev *dev = need_gpu(state);
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
        const sti_hybrid_shape shape = {c[i].H, c[i].G, c[i].D, c[i].F};
        batch x =
            make_batch(settings_of(&c[i]), shape, 1 + (int)(i % 2), c[i].T, 1.2, i + 1);
        check(dev, &x);
        drop_batch(&x);
    }
}

/* Settings of every kind, drawn at random. */
static void test_any_settings(void **state)
{
    sti_dev *dev = need_gpu(state);
    static const int size[] = {16, 32, 64};
    for (uint64_t seed = 1; seed <= 60; seed++) {
        problem p = any_problem(seed);
        uint64_t rng = seed;
        sti_hybrid_shape shape = p.shape;
        shape.D = size[below(&rng, 3)];
        shape.F = below(&rng, 3) ? shape.D : shape.D / 2 + 1;
        p.set.feature_floor = p.set.feature_floor > 1e-6 ? 0.02 : p.set.feature_floor;
        batch x = make_batch(p.set, shape, 1 + (int)(seed % 2), p.T + 20, 1, seed);
        check(dev, &x);
        drop_batch(&x);
        drop(&p);
    }
}

/* Every score, both scales, relu features beside a window. */
static void test_variants(void **state)
{
    sti_dev *dev = need_gpu(state);
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
            check(dev, &x);
            drop_batch(&x);
        }
}

/* Inputs left out have their start values. */
static void test_start_values(void **state)
{
    sti_dev *dev = need_gpu(state);
    static const char *const method[] = {"still", "lolcats", "t2r"};
    for (int i = 0; i < 3; i++) {
        sti_hybrid_settings s = preset(method[i], 16);
        batch x = make_batch(s, (sti_hybrid_shape){2, 1, 64, 48}, 1, 140, 1, 40);
        for (int f = GATE; f < FIELDS; f++) leave_out(&x, f);
        check(dev, &x);
        drop_batch(&x);
    }
}

/* Lengths at the edges of chunks: nothing has left, something just has. */
static void test_edges(void **state)
{
    sti_dev *dev = need_gpu(state);
    static const int length[] = {1, 7, 8, 9, 15, 16, 17, 24, 25};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        batch x = make_batch(preset("still", 8), (sti_hybrid_shape){2, 1, 16, 16}, 2,
                             length[i], 1, i);
        check(dev, &x);
        drop_batch(&x);
    }
}

/* Keys and queries of norm 0: no division by it, no gradient through |x|. */
static void test_zero_vectors(void **state)
{
    sti_dev *dev = need_gpu(state);
    batch x =
        make_batch(preset("still", 4), (sti_hybrid_shape){2, 1, 16, 16}, 1, 40, 1, 5);
    for (size_t i = 0; i < x.n[K] / 2; i++) x.in[K][i] = 0;
    for (size_t i = 0; i < x.n[Q]; i += 3) x.in[Q][i] = 0;
    for (size_t i = 64; i < 128; i++) x.in[Q][i] = 0;
    check(dev, &x);
    drop_batch(&x);
}

/* Logits of 60 and more: weights spread over all of float's range. */
static void test_large_logits(void **state)
{
    sti_dev *dev = need_gpu(state);
    batch x =
        make_batch(preset("still", 16), (sti_hybrid_shape){2, 1, 64, 64}, 1, 100, 1, 8);
    for (size_t t = 0; t < 100; t += 5)
        for (size_t e = 0; e < 64; e++) x.in[K][t * 64 + e] *= 8;
    for (size_t i = 0; i < x.n[ALPHA]; i++) x.in[ALPHA][i] = 30;
    run_ref(&x);
    device_batch d = to_device(dev, &x);
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
    sti_dev *dev = need_gpu(state);
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
        device_batch d = to_device(dev, &x);
        run_cuda(&d, &x, all_fields);
        compare(&x, &d, size[kind]);
        drop_device(&d);
        drop_batch(&x);
    }
}

/* The same bits each time; a gradient does not depend on what else is asked for. */
static void test_same_bits(void **state)
{
    sti_dev *dev = need_gpu(state);
    static const char *const method[] = {"still", "lolcats", "t2r"};
    for (int i = 0; i < 3; i++) {
        batch x = make_batch(preset(method[i], 32), (sti_hybrid_shape){6, 2, 32, 32}, 2,
                             210, 1, 3);
        run_ref(&x);
        device_batch one = to_device(dev, &x);
        run_cuda(&one, &x, all_fields);
        for (int f = -1; f < FIELDS; f++) {
            device_batch two = to_device(dev, &x);
            run_cuda(&two, &x, f < 0 ? all_fields : 1u << f);
            assert_memory_equal(one.got_fold, two.got_fold,
                                routes(&x) * sizeof(int32_t));
            assert_memory_equal(one.got_y, two.got_y, x.n[Q] * sizeof(float));
            for (int g = 0; g < FIELDS; g++)
                if (f < 0 || f == g)
                    assert_memory_equal(one.got[g], two.got[g], x.n[g] * sizeof(float));
            drop_device(&two);
        }
        drop_device(&one);
        drop_batch(&x);
    }
}

/* Gradients of parameters are added to. */
static void test_adds_up(void **state)
{
    sti_dev *dev = need_gpu(state);
    batch x = make_batch(preset("still", 16), (sti_hybrid_shape){2, 1, 32, 32}, 1, 100,
                         1, 11);
    run_ref(&x);
    device_batch d = to_device(dev, &x);
    run_cuda(&d, &x, all_fields);
    const sti_hybrid_parallel_args a = args_of(&x, &d, all_fields);
    still_error err;
    ok(cuda()->hybrid_backward(dev, &a, &err), &err);
    for (int f = ALPHA; f <= MAP_K; f++) {
        float *twice = fetch(dev, &d.grad[f], x.n[f] * sizeof(float));
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
    sti_dev *dev = need_gpu(state);
    static const shape_case c[] = {
        {"still", 64, 16, 128, 1024, 9, 3, 64, 64, false},
        {"still", 128, 32, 256, 700, 3, 1, 64, 64, true},
        {"still", 128, 32, 256, 600, 9, 3, 64, 64, false}, /* tiles of several heads */
        {"still", 128, 32, 64, 600, 8, 2, 128, 128, false},
        {"lolcats", 256, 0, 0, 800, 3, 1, 64, 64, true},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        const sti_hybrid_shape shape = {c[i].H, c[i].G, c[i].D, c[i].F};
        batch x = make_batch(settings_of(&c[i]), shape, 1, c[i].T, 1, i + 70);
        check(dev, &x);
        drop_batch(&x);
    }
}

/* What this backend does not do is an error that says so. */
static void test_unsupported(void **state)
{
    sti_dev *dev = need_gpu(state);
    batch x =
        make_batch(preset("still", 8), (sti_hybrid_shape){2, 1, 16, 16}, 1, 30, 1, 9);
    device_batch d = to_device(dev, &x);
    sti_hybrid_parallel_args a = args_of(&x, &d, 0);
    still_error err;
    a.max_in = d.y.p;
    assert_int_equal(cuda()->hybrid_parallel(dev, &a, &err), STILL_E_UNSUPPORTED);
    assert_int_equal(cuda()->hybrid_backward(dev, &a, &err), STILL_E_UNSUPPORTED);
    a.max_in = NULL;
    a.max_out = d.y.p;
    assert_int_equal(cuda()->hybrid_parallel(dev, &a, &err), STILL_E_UNSUPPORTED);
    drop_device(&d);
    drop_batch(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edges),        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_variants),     cmocka_unit_test(test_any_settings),
        cmocka_unit_test(test_start_values), cmocka_unit_test(test_zero_vectors),
        cmocka_unit_test(test_large_logits), cmocka_unit_test(test_gradient_sizes),
        cmocka_unit_test(test_same_bits),    cmocka_unit_test(test_adds_up),
        cmocka_unit_test(test_real_shapes),  cmocka_unit_test(test_unsupported),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
