/* test_attn.c - softmax attention of the cpu backend, every instruction set here:
 * against a double loop, and bit for bit against itself under other cuts of the prompt,
 * other batches, other thread counts, and a ring instead of a full cache. */
#include "../../../run.h"
#include "../cpu_device.h"

#include "backend/cpu/cpu.h"

typedef struct shape {
    int T, H, G, D, window;
    float gain; /* of the queries: how far apart logits lie */
    sti_dtype cache;
} shape;

/* A session's whole life: inputs of T tokens, the cache, and the outputs. */
typedef struct session {
    shape s;
    int capacity, past;
    float *q, *k, *v, *o;
    void *K, *V;
} session;

static sti_dev *dev_for(const char *isa, int threads, shape s)
{
    return dev_of(cpu(), (sti_dev_params){.threads = threads,
                                          .isa = isa,
                                          .max_k = 64,
                                          .heads = s.H,
                                          .kv_heads = s.G,
                                          .head_dim = s.D});
}

static session open_session(shape s, int capacity, uint32_t seed)
{
    size_t nq = (size_t)(s.T * s.H * s.D), nk = (size_t)(s.T * s.G * s.D);
    size_t size = s.cache == STI_F16 ? 2 : 4;
    session x = {.s = s, .capacity = capacity};
    x.q = floats(nq, s.gain, seed);
    x.k = floats(nk, 1, seed + 1);
    x.v = floats(nk, 1, seed + 2);
    x.o = floats(nq, 0, 0);
    x.K = sti_alloc((size_t)(s.G * capacity * s.D), size);
    x.V = sti_alloc((size_t)(s.G * capacity * s.D), size);
    assert_true(x.K && x.V);
    /* Rows no one wrote must not matter. */
    memset(x.K, 0xff, (size_t)(s.G * capacity * s.D) * size);
    memset(x.V, 0xff, (size_t)(s.G * capacity * s.D) * size);
    return x;
}

static void close_session(session *x)
{
    free(x->q);
    free(x->k);
    free(x->v);
    free(x->o);
    free(x->K);
    free(x->V);
}

/* Feeds each of several sessions its next n[i] tokens in one call. */
static void feed(sti_dev *dev, session *const *x, const int *n, int count)
{
    shape s = x[0]->s;
    sti_attn_segment seg[8];
    int M = 0;
    for (int i = 0; i < count; i++) {
        seg[i] =
            (sti_attn_segment){M, n[i], x[i]->past, x[i]->K, x[i]->V, x[i]->capacity};
        M += n[i];
    }
    size_t rq = (size_t)(s.H * s.D), rk = (size_t)(s.G * s.D);
    float *q = floats((size_t)M * rq, 0, 0), *k = floats((size_t)M * rk, 0, 0);
    float *v = floats((size_t)M * rk, 0, 0), *o = floats((size_t)M * rq, 0, 0);
    for (int i = 0; i < count; i++) {
        size_t to = (size_t)seg[i].row0, from = (size_t)x[i]->past, c = (size_t)n[i];
        memcpy(q + to * rq, x[i]->q + from * rq, c * rq * sizeof *q);
        memcpy(k + to * rk, x[i]->k + from * rk, c * rk * sizeof *k);
        memcpy(v + to * rk, x[i]->v + from * rk, c * rk * sizeof *v);
    }
    sti_attn_args a = {.q = q,
                       .k = k,
                       .v = v,
                       .o = o,
                       .H = s.H,
                       .G = s.G,
                       .D = s.D,
                       .window = s.window,
                       .cache = s.cache,
                       .seg = seg,
                       .n_seg = count};
    still_error err;
    still_status st = cpu()->softmax_attn(dev, &a, &err);
    if (st != STILL_OK) fail_msg("%s", err.text);
    for (int i = 0; i < count; i++) {
        memcpy(x[i]->o + (size_t)x[i]->past * rq, o + (size_t)seg[i].row0 * rq,
               (size_t)n[i] * rq * sizeof *o);
        x[i]->past += n[i];
    }
    free(q);
    free(k);
    free(v);
    free(o);
}

/* The rest of a session's tokens, at most `step` at a time. */
static void feed_all(sti_dev *dev, session *x, int step)
{
    while (x->past < x->s.T) {
        int n = x->s.T - x->past < step ? x->s.T - x->past : step;
        feed(dev, &x, &n, 1);
    }
}

/* n numbers as the cache keeps them. */
static float *stored(sti_dtype t, const float *x, size_t n)
{
    float *y = floats(n, 0, 0);
    for (size_t i = 0; i < n; i++)
        y[i] = t == STI_F16 ? sti_f16_to_f32(sti_f32_to_f16(x[i])) : x[i];
    return y;
}

/* Largest |o - definition| over all rows; *logit is the largest logit met. */
static double error_of(const session *x, double *logit)
{
    shape s = x->s;
    double worst = 0, *w = sti_alloc((size_t)s.T, sizeof *w);
    size_t nk = (size_t)(s.T * s.G * s.D);
    float *k = stored(s.cache, x->k, nk), *v = stored(s.cache, x->v, nk);
    assert_non_null(w);
    *logit = 0;
    for (int t = 0; t < s.T; t++)
        for (int h = 0; h < s.H; h++) {
            const float *q = x->q + (t * s.H + h) * s.D,
                        *o = x->o + (t * s.H + h) * s.D;
            int g = h / (s.H / s.G);
            int first = s.window > 0 && t >= s.window ? t - s.window + 1 : 0;
            double max = -INFINITY, sum = 0;
            for (int j = first; j <= t; j++) {
                w[j] = 0;
                for (int d = 0; d < s.D; d++)
                    w[j] += (double)q[d] * k[(j * s.G + g) * s.D + d];
                w[j] /= sqrt(s.D);
                max = fmax(max, w[j]);
                *logit = fmax(*logit, fabs(w[j]));
            }
            for (int j = first; j <= t; j++) sum += w[j] = exp(w[j] - max);
            for (int d = 0; d < s.D; d++) {
                double y = 0;
                for (int j = first; j <= t; j++) y += w[j] * v[(j * s.G + g) * s.D + d];
                double e = fabs(y / sum - (double)o[d]);
                if (!(e <= worst)) worst = e; /* a NaN is the worst error */
            }
        }
    free(w);
    free(k);
    free(v);
    return worst;
}

static const shape shapes[] = {
    {300, 9, 3, 64, 0, 2, STI_F16},   {1, 9, 3, 64, 0, 2, STI_F16},
    {150, 4, 4, 80, 0, 2, STI_F16},   {140, 8, 2, 128, 0, 2, STI_F16},
    {270, 8, 1, 16, 0, 4, STI_F16},   {200, 2, 2, 32, 0, 2, STI_F16},
    {133, 3, 1, 33, 0, 2, STI_F16},   {40, 2, 1, 256, 0, 1, STI_F16},
    {300, 6, 2, 64, 100, 2, STI_F16}, {400, 3, 1, 24, 128, 2, STI_F16},
    {260, 3, 1, 16, 1, 2, STI_F16},   {300, 4, 2, 8, 200, 2, STI_F16},
    {200, 3, 3, 1, 0, 2, STI_F16},    {300, 9, 3, 64, 0, 600, STI_F16},
    {200, 4, 2, 40, 0, 2, STI_F32},   {60, 40, 2, 16, 30, 2, STI_F32},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void matches_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++)
        for (int k = 0; k < N_SHAPES; k++) {
            sti_dev *dev = dev_for(isa_name[i], 2, shapes[k]);
            if (!dev) continue;
            session x = open_session(shapes[k], shapes[k].T, 7);
            feed_all(dev, &x, x.s.T);
            double logit, e = error_of(&x, &logit);
            /* A logit's own rounding moves a weight by as much, relatively. */
            double limit = 1e-6 + 4e-7 * logit;
            if (!(e <= limit))
                fail_msg("%s, shape %d: error %g, at most %g expected", isa_name[i], k,
                         e, limit);
            if (shapes[k].gain > 100) assert_true(logit > 200);
            close_session(&x);
            free_dev(dev);
        }
}

static void assert_same(const session *a, const session *b, const char *isa, int k,
                        const char *what)
{
    size_t n = (size_t)(a->s.T * a->s.H * a->s.D);
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a->o[i], &b->o[i], sizeof *a->o) != 0)
            fail_msg("%s, shape %d, %s: row %zu of head %zu differs: %.9g, %.9g", isa,
                     k, what, i / (size_t)(a->s.H * a->s.D),
                     i / (size_t)a->s.D % (size_t)a->s.H, (double)a->o[i],
                     (double)b->o[i]);
}

static void cuts_and_threads_change_nothing(void **state)
{
    (void)state;
    static const struct {
        int threads, step;
        const char *what;
    } way[] = {{1, 1, "decoded"},          {3, 50, "in fifties by three threads"},
               {2, 17, "in pieces of 17"}, {2, 127, "in pieces of 127"},
               {1, 1000, "by one thread"}, {5, 1000, "by five threads"}};
    for (int i = 0; i < N_ISA; i++)
        for (int k = 0; k < N_SHAPES; k++) {
            sti_dev *dev = dev_for(isa_name[i], 2, shapes[k]);
            if (!dev) continue;
            session whole = open_session(shapes[k], shapes[k].T, 9);
            feed_all(dev, &whole, shapes[k].T);
            free_dev(dev);
            for (size_t w = 0; w < sizeof way / sizeof *way; w++) {
                dev = dev_for(isa_name[i], way[w].threads, shapes[k]);
                sti_pool_limit(dev->pool, 4); /* as if cores were lost */
                session x = open_session(shapes[k], shapes[k].T + 5, 9);
                feed_all(dev, &x, way[w].step);
                assert_same(&whole, &x, isa_name[i], k, way[w].what);
                close_session(&x);
                free_dev(dev);
            }
            close_session(&whole);
        }
}

/* Sessions of different lengths in one call, decoding and prefilling side by side. */
static void batches_change_nothing(void **state)
{
    (void)state;
    static const shape s = {290, 9, 3, 64, 0, 3, STI_F16};
    static const int pieces[][4] = {{129, 1, 40, 3}, {1, 1, 1, 1},    {1, 128, 1, 1},
                                    {1, 1, 1, 1},    {30, 1, 200, 1}, {1, 7, 1, 1}};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = dev_for(isa_name[i], 2, s);
        if (!dev) continue;
        session x[4], alone[4], *all[4];
        for (int k = 0; k < 4; k++) {
            x[k] = open_session(s, s.T + k, (uint32_t)(100 * k));
            alone[k] = open_session(s, s.T, (uint32_t)(100 * k));
            all[k] = &x[k];
            feed_all(dev, &alone[k], s.T);
        }
        for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++)
            feed(dev, all, pieces[p], 4);
        for (int k = 0; k < 4; k++) {
            feed_all(dev, &x[k], s.T);
            assert_same(&alone[k], &x[k], isa_name[i], k, "batched");
            close_session(&x[k]);
            close_session(&alone[k]);
        }
        free_dev(dev);
    }
}

static void a_ring_is_enough_for_a_window(void **state)
{
    (void)state;
    static const int windows[] = {1, 50, 128, 150};
    for (int i = 0; i < N_ISA; i++)
        for (int k = 0; k < 4; k++) {
            shape s = {400, 4, 2, k % 2 ? 64 : 24, windows[k], 3, STI_F16};
            sti_dev *dev = dev_for(isa_name[i], 2, s);
            if (!dev) continue;
            session full = open_session(s, s.T, 3);
            feed_all(dev, &full, s.T);
            static const int steps[] = {1, 2, 33, 140};
            for (int j = 0; j < 4; j++) {
                session ring = open_session(s, s.window + steps[j] - 1, 3);
                feed_all(dev, &ring, steps[j]);
                assert_same(&full, &ring, isa_name[i], k, "ring");
                close_session(&ring);
            }
            close_session(&full);
            free_dev(dev);
        }
}

/* More blocks than partial results fit at once. */
static void long_contexts_decode_in_rounds(void **state)
{
    (void)state;
    static const shape s = {2300, 8, 8, 8, 0, 3, STI_F16};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = dev_for(isa_name[i], 2, s);
        if (!dev) continue;
        session whole = open_session(s, s.T, 5), x = open_session(s, s.T, 5);
        feed_all(dev, &whole, s.T);
        int n = s.T - 3;
        session *one = &x;
        feed(dev, &one, &n, 1);
        feed_all(dev, &x, 1);
        assert_same(&whole, &x, isa_name[i], 0, "rounds");
        close_session(&whole);
        close_session(&x);
        free_dev(dev);
    }
}

/* A value too large for f16 ruins the rows that see it and no others. */
static void rows_do_not_see_the_future(void **state)
{
    (void)state;
    static const shape s = {200, 6, 2, 64, 0, 2, STI_F16};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = dev_for(isa_name[i], 2, s);
        if (!dev) continue;
        session clean = open_session(s, s.T, 5), x = open_session(s, s.T, 5);
        x.v[150 * s.G * s.D] = 1e30f;
        x.k[151 * s.G * s.D] = NAN;
        feed_all(dev, &clean, s.T);
        feed_all(dev, &x, s.T);
        size_t rows = 150u * (size_t)(s.H * s.D);
        assert_memory_equal(clean.o, x.o, rows * sizeof(float));
        assert_false(isfinite(x.o[rows]));
        close_session(&clean);
        close_session(&x);
        free_dev(dev);
    }
}

static void impossible_calls_are_refused(void **state)
{
    (void)state;
    shape s = {4, 6, 2, 64, 0, 1, STI_F16};
    sti_dev *dev = dev_for(NULL, 1, s);
    session x = open_session(s, 8, 1);
    const sti_backend *b = cpu();
    sti_attn_segment seg = {0, 4, 0, x.K, x.V, 8};
    sti_attn_args good = {.q = x.q,
                          .k = x.k,
                          .v = x.v,
                          .o = x.o,
                          .H = 6,
                          .G = 2,
                          .D = 64,
                          .cache = STI_F16,
                          .seg = &seg,
                          .n_seg = 1};
    still_error err;
    assert_int_equal(b->softmax_attn(dev, &good, &err), STILL_OK);
    sti_attn_args a = good;
    a.G = 4;
    assert_int_equal(b->softmax_attn(dev, &a, &err), STILL_E_ARG);
    a = good;
    a.H = 8;
    assert_int_equal(b->softmax_attn(dev, &a, &err), STILL_E_ARG);
    a = good;
    a.D = 300;
    assert_int_equal(b->softmax_attn(dev, &a, &err), STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "300"));
    a = good;
    a.cache = STI_Q8_0;
    assert_int_equal(b->softmax_attn(dev, &a, &err), STILL_E_UNSUPPORTED);
    seg.past = 5; /* 9 tokens, room for 8, no window */
    assert_int_equal(b->softmax_attn(dev, &good, &err), STILL_E_ARG);
    good.window = 6; /* the ring would need 6 + 4 - 1 rows */
    assert_int_equal(b->softmax_attn(dev, &good, &err), STILL_E_ARG);
    good.window = 5;
    assert_int_equal(b->softmax_attn(dev, &good, &err), STILL_OK);
    good.n_seg = 0;
    assert_int_equal(b->softmax_attn(dev, &good, &err), STILL_OK);
    close_session(&x);
    free_dev(dev);
}

RUN_TESTS(cmocka_unit_test(matches_the_definition),
          cmocka_unit_test(cuts_and_threads_change_nothing),
          cmocka_unit_test(batches_change_nothing),
          cmocka_unit_test(a_ring_is_enough_for_a_window),
          cmocka_unit_test(long_contexts_decode_in_rounds),
          cmocka_unit_test(rows_do_not_see_the_future),
          cmocka_unit_test(impossible_calls_are_refused))
