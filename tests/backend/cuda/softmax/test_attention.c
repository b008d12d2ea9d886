/* test_attention.c - softmax attention of the cuda backend against `ref`: rows alone
 * and together, several sessions, rings, windows, every kernel, and recorded passes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../../run.h"

#include "../../../skip.h"
#include "ops/ops.h"

enum { MAX_SEG = 70 };

typedef struct shape {
    int H, G, D, window;
    float gain; /* of the queries: how far apart logits lie */
    sti_dtype cache;
} shape;

/* A backend and its memory for one call: activations, and a cache for every segment. */
typedef struct side {
    const sti_backend *be;
    sti_dev *dev;
    sti_block q, k, v, o, K[MAX_SEG], V[MAX_SEG];
} side;

/* The call, as the program sees it. Inputs are what a half can hold, so that products
 * in half precision start from the same numbers. */
typedef struct call {
    shape s;
    int M, n_seg;
    sti_attn_segment seg[MAX_SEG]; /* K, V not set */
    float *q, *k, *v;
} call;

static int setup(void **state)
{
    const sti_backend *be = sti_backend_find("cuda");
    sti_dev_params p = {
        .threads = 1, .max_k = 64, .heads = 64, .kv_heads = 8, .head_dim = 256};
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

static side open_side(const char *name, sti_dev *dev)
{
    side x = {.be = sti_backend_find(name), .dev = dev};
    sti_dev_params p = {
        .threads = 2, .max_k = 64, .heads = 64, .kv_heads = 8, .head_dim = 256};
    still_error err;
    if (!dev) assert_int_equal(x.be->dev_new(&p, &x.dev, &err), STILL_OK);
    return x;
}

static sti_block upload(const side *x, const void *from, size_t bytes)
{
    still_error err;
    sti_block b;
    if (x->be->mem_new(x->dev, bytes, &b, &err) != STILL_OK) fail_msg("%s", err.text);
    assert_int_equal(x->be->mem_move(x->dev, b.p, from, bytes, &err), STILL_OK);
    return b;
}

static void *download(const side *x, const sti_block *b, size_t bytes)
{
    still_error err;
    void *to = sti_alloc(bytes, 1);
    assert_non_null(to);
    if (x->be->mem_move(x->dev, to, b->p, bytes, &err) != STILL_OK)
        fail_msg("%s", err.text);
    return to;
}

static void free_memory(side *x)
{
    sti_block *all[] = {&x->q, &x->k, &x->v, &x->o};
    for (int i = 0; i < 4; i++) x->be->mem_free(x->dev, all[i]);
    for (int i = 0; i < MAX_SEG; i++) {
        if (x->K[i].p) x->be->mem_free(x->dev, &x->K[i]);
        if (x->V[i].p) x->be->mem_free(x->dev, &x->V[i]);
    }
}

static float *numbers(size_t n, float gain, uint32_t *seed)
{
    float *x = sti_alloc(n, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        float y = gain * ((float)(*seed >> 8) / (1 << 23) - 1);
        x[i] = sti_f16_to_f32(sti_f32_to_f16(y));
    }
    return x;
}

static size_t kv_row(const call *c)
{
    return (size_t)(c->s.G * c->s.D);
}

static size_t cache_bytes(const call *c, int s)
{
    return kv_row(c) * (size_t)c->seg[s].capacity * (c->s.cache == STI_F16 ? 2 : 4);
}

/* A cache that holds the past of segment s; rows no one wrote are NaN. */
static void *past_cache(const call *c, int s, uint32_t *seed)
{
    const sti_attn_segment *g = &c->seg[s];
    size_t size = c->s.cache == STI_F16 ? 2 : 4, D = (size_t)c->s.D;
    unsigned char *cache = sti_alloc(cache_bytes(c, s), 1);
    assert_non_null(cache);
    memset(cache, 0xff, cache_bytes(c, s));
    int held = g->past < g->capacity ? g->past : g->capacity;
    float *x = numbers((size_t)held * kv_row(c) + 1, 1, seed), *from = x;
    for (int h = 0; h < c->s.G; h++)
        for (int j = g->past - held; j < g->past; j++, from += D) {
            size_t at =
                ((size_t)h * (size_t)g->capacity + (size_t)(j % g->capacity)) * D;
            for (size_t d = 0; d < D; d++) {
                uint16_t half = sti_f32_to_f16(from[d]);
                memcpy(cache + (at + d) * size,
                       size == 2 ? (void *)&half : (void *)&from[d], size);
            }
        }
    free(x);
    return cache;
}

static call open_call(shape s, const sti_attn_segment *seg, int n_seg, side *a, side *b)
{
    uint32_t seed = 17;
    call c = {.s = s, .n_seg = n_seg};
    for (int i = 0; i < n_seg; i++) {
        c.seg[i] = seg[i];
        c.seg[i].row0 = c.M;
        c.M += seg[i].n;
    }
    size_t rows = (size_t)c.M, wide = (size_t)(s.H * s.D);
    c.q = numbers(rows * wide, s.gain, &seed);
    c.k = numbers(rows * kv_row(&c), 1, &seed);
    c.v = numbers(rows * kv_row(&c), 1, &seed);
    side *both[] = {a, b};
    void *K[MAX_SEG], *V[MAX_SEG];
    for (int i = 0; i < n_seg; i++) {
        K[i] = past_cache(&c, i, &seed);
        V[i] = past_cache(&c, i, &seed);
    }
    for (int x = 0; x < 2; x++) {
        both[x]->q = upload(both[x], c.q, rows * wide * sizeof(float));
        both[x]->k = upload(both[x], c.k, rows * kv_row(&c) * sizeof(float));
        both[x]->v = upload(both[x], c.v, rows * kv_row(&c) * sizeof(float));
        both[x]->o = upload(both[x], c.q, rows * wide * sizeof(float));
        for (int i = 0; i < n_seg; i++) {
            both[x]->K[i] = upload(both[x], K[i], cache_bytes(&c, i));
            both[x]->V[i] = upload(both[x], V[i], cache_bytes(&c, i));
        }
    }
    for (int i = 0; i < n_seg; i++) {
        free(K[i]);
        free(V[i]);
    }
    return c;
}

static void close_call(call *c, side *a, side *b)
{
    free(c->q);
    free(c->k);
    free(c->v);
    free_memory(a);
    free_memory(b);
}

static still_status attend(const side *x, const call *c, still_error *err)
{
    sti_attn_segment seg[MAX_SEG];
    for (int i = 0; i < c->n_seg; i++) {
        seg[i] = c->seg[i];
        seg[i].K = x->K[i].p;
        seg[i].V = x->V[i].p;
    }
    return x->be->softmax_attn(x->dev,
                               &(sti_attn_args){.q = x->q.p,
                                                .k = x->k.p,
                                                .v = x->v.p,
                                                .o = x->o.p,
                                                .H = c->s.H,
                                                .G = c->s.G,
                                                .D = c->s.D,
                                                .window = c->s.window,
                                                .cache = c->s.cache,
                                                .seg = seg,
                                                .n_seg = c->n_seg},
                               err);
}

/* Outputs agree, each row of a head relative to its length; caches agree exactly. */
static void compare(const side *ref, const side *cuda, const call *c, const char *what)
{
    size_t n = (size_t)(c->M * c->s.H * c->s.D) * sizeof(float), D = (size_t)c->s.D;
    float *want = download(ref, &ref->o, n), *got = download(cuda, &cuda->o, n);
    double limit = c->s.cache == STI_F16 ? 2e-3 : 1e-5;
    for (size_t r = 0; r < (size_t)(c->M * c->s.H); r++) {
        double off = 0, length = 0;
        for (size_t d = 0; d < D; d++) {
            double x = (double)want[r * D + d], y = (double)got[r * D + d];
            off += (x - y) * (x - y);
            length += x * x;
        }
        if (!(sqrt(off) <= limit * sqrt(length) + 1e-7))
            fail_msg("%s: %d/%d heads of %d, window %d, cache %d: row %zu, head %zu is "
                     "off by %.3g of its length",
                     what, c->s.H, c->s.G, c->s.D, c->s.window, (int)c->s.cache,
                     r / (size_t)c->s.H, r % (size_t)c->s.H, sqrt(off / length));
    }
    free(want);
    free(got);
    for (int s = 0; s < c->n_seg; s++)
        for (int v = 0; v < 2; v++) {
            size_t bytes = cache_bytes(c, s);
            void *x = download(ref, v ? &ref->V[s] : &ref->K[s], bytes);
            void *y = download(cuda, v ? &cuda->V[s] : &cuda->K[s], bytes);
            assert_memory_equal(x, y, bytes);
            free(x);
            free(y);
        }
}

static void try_call(sti_dev *dev, shape s, const sti_attn_segment *seg, int n_seg,
                     const char *what)
{
    side ref = open_side("ref", NULL), cuda = open_side("cuda", dev);
    call c = open_call(s, seg, n_seg, &ref, &cuda);
    still_error err;
    assert_int_equal(attend(&ref, &c, &err), STILL_OK);
    if (attend(&cuda, &c, &err) != STILL_OK) fail_msg("%s: %s", what, err.text);
    compare(&ref, &cuda, &c, what);
    close_call(&c, &ref, &cuda);
    ref.be->dev_free(ref.dev);
}

/* Groups of 1 to 16, head sizes of every kernel, odd ones, both cache types. */
static const shape shapes[] = {
    {8, 2, 128, 0, 2, STI_F16},   {4, 4, 64, 0, 2, STI_F16},
    {9, 3, 64, 0, 3, STI_F16},    {6, 1, 80, 0, 2, STI_F16},
    {5, 1, 96, 0, 2, STI_F16},    {2, 1, 256, 0, 1, STI_F16},
    {16, 1, 64, 0, 2, STI_F16},   {8, 1, 128, 0, 40, STI_F16},
    {3, 1, 33, 0, 2, STI_F16},    {2, 2, 8, 0, 2, STI_F16},
    {3, 3, 1, 0, 2, STI_F16},     {8, 2, 128, 0, 2, STI_F32},
    {4, 2, 40, 0, 2, STI_F32},    {2, 1, 256, 0, 1, STI_F32},
    {8, 2, 128, 100, 2, STI_F16}, {6, 2, 64, 1, 2, STI_F16},
    {7, 1, 64, 70, 2, STI_F16},   {4, 2, 48, 100, 2, STI_F32},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void one_row_each(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 1, .past = 0, .capacity = 1},     {.n = 1, .past = 15, .capacity = 400},
        {.n = 1, .past = 16, .capacity = 17},   {.n = 1, .past = 319, .capacity = 330},
        {.n = 1, .past = 320, .capacity = 500}, {.n = 1, .past = 700, .capacity = 720},
    };
    for (int i = 0; i < N_SHAPES; i++)
        try_call(*state, shapes[i], seg, 6, "one row each");
}

static void many_rows(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 2, .past = 0, .capacity = 2},    {.n = 130, .past = 0, .capacity = 130},
        {.n = 33, .past = 63, .capacity = 96}, {.n = 5, .past = 200, .capacity = 300},
        {.n = 64, .past = 1, .capacity = 70},
    };
    for (int i = 0; i < N_SHAPES; i++) try_call(*state, shapes[i], seg, 5, "many rows");
}

static void both_kinds_at_once(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 40, .past = 10, .capacity = 50}, {.n = 1, .past = 150, .capacity = 160},
        {.n = 0, .past = 3, .capacity = 3},    {.n = 17, .past = 0, .capacity = 20},
        {.n = 1, .past = 2, .capacity = 3},
    };
    for (int i = 0; i < N_SHAPES; i++)
        try_call(*state, shapes[i], seg, 5, "both kinds");
}

/* Rings just large enough, that have been overwritten once and several times. */
static void rings(void **state)
{
    if (!*state) skip_because("no GPU");
    static const int windows[] = {1, 5, 64, 340, 700};
    for (int i = 0; i < N_SHAPES; i++)
        for (int w = 0; w < 5; w++) {
            shape s = shapes[i];
            int n = 7 + 60 * (w % 3);
            s.window = windows[w];
            const sti_attn_segment seg[] = {
                {.n = 1, .past = 777, .capacity = s.window},
                {.n = 1, .past = s.window, .capacity = s.window},
                {.n = n, .past = 500, .capacity = s.window + n - 1},
                {.n = n, .past = 3, .capacity = s.window + n + 5},
            };
            try_call(*state, s, seg, 4, "ring");
        }
}

/* Whole sequences, many tiles of keys long, of heads of up to 64 dims. */
static void whole_sequences(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 450, .past = 0, .capacity = 450},
        {.n = 257, .past = 0, .capacity = 300},
        {.n = 192, .past = 190, .capacity = 382},
    };
    try_call(*state, (shape){9, 3, 64, 0, 2, STI_F16}, seg, 3, "whole sequences");
    try_call(*state, (shape){2, 1, 64, 0, 30, STI_F16}, seg, 3, "whole sequences");
    try_call(*state, (shape){2, 2, 48, 0, 2, STI_F16}, seg, 3, "whole sequences");
    try_call(*state, (shape){3, 1, 64, 130, 2, STI_F16}, seg, 3, "whole sequences");
}

/* As many pieces as there are, and pieces longer than the shortest. */
static void long_pasts(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 1, .past = 10559, .capacity = 10560},
        {.n = 1, .past = 10560, .capacity = 11000},
        {.n = 1, .past = 12999, .capacity = 13000},
        {.n = 3, .past = 3000, .capacity = 3003},
    };
    try_call(*state, (shape){4, 1, 128, 0, 2, STI_F16}, seg, 4, "long past");
    try_call(*state, (shape){4, 2, 64, 10900, 2, STI_F16}, seg, 4, "long past");
    try_call(*state, (shape){2, 1, 64, 0, 2, STI_F32}, seg, 4, "long past");
}

/* So many rows that their keys are cut into longer pieces. */
static void crowds(void **state)
{
    if (!*state) skip_because("no GPU");
    enum { SESSIONS = 12 };
    static const int past[SESSIONS] = {0,   319, 320,  321,  639,   640,
                                       700, 959, 1024, 3000, 10559, 11000};
    sti_attn_segment seg[SESSIONS];
    for (int i = 0; i < SESSIONS; i++)
        seg[i] =
            (sti_attn_segment){.n = 1, .past = past[i], .capacity = past[i] + 1 + i};
    try_call(*state, (shape){16, 8, 128, 0, 2, STI_F16}, seg, SESSIONS, "crowd");
    try_call(*state, (shape){8, 4, 64, 700, 2, STI_F16}, seg, SESSIONS, "crowd");
    try_call(*state, (shape){4, 4, 32, 0, 2, STI_F32}, seg, SESSIONS, "crowd");
}

/* More segments than a launch takes. */
static void many_sessions(void **state)
{
    if (!*state) skip_because("no GPU");
    sti_attn_segment seg[MAX_SEG];
    for (int n = 1; n < 3; n++) {
        for (int i = 0; i < MAX_SEG; i++)
            seg[i] = (sti_attn_segment){.n = n, .past = 3 * i, .capacity = 3 * i + n};
        try_call(*state, (shape){4, 2, 64, 0, 2, STI_F16}, seg, MAX_SEG, "sessions");
    }
}

/* A row is the same, bit for bit, whoever shares the call with it, short of a crowd. */
static void batches_change_nothing(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 1, .past = 900, .capacity = 1000},
        {.n = 1, .past = 300, .capacity = 400},
        {.n = 70, .past = 40, .capacity = 120},
    };
    shape s = {8, 2, 128, 0, 2, STI_F16};
    side ref = open_side("ref", NULL), cuda = open_side("cuda", *state);
    call c = open_call(s, seg, 3, &ref, &cuda);
    still_error err;
    size_t n = (size_t)(c.M * s.H * s.D) * sizeof(float);
    assert_int_equal(attend(&cuda, &c, &err), STILL_OK);
    void *together = download(&cuda, &cuda.o, n);
    for (int i = 0; i < 3; i++) { /* storing a row again changes nothing */
        call one = c;
        side only = cuda;
        one.n_seg = 1;
        one.seg[0] = c.seg[i];
        only.K[0] = cuda.K[i];
        only.V[0] = cuda.V[i];
        assert_int_equal(attend(&only, &one, &err), STILL_OK);
    }
    void *alone = download(&cuda, &cuda.o, n);
    assert_memory_equal(together, alone, n);
    free(together);
    free(alone);
    close_call(&c, &ref, &cuda);
    ref.be->dev_free(ref.dev);
}

/* Decode steps as a model runs them: the first plain, the second recorded, the rest
 * replayed, at positions that the recording has not seen. */
static void recorded_passes(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {
        {.n = 1, .past = 125, .capacity = 300},
        {.n = 1, .past = 0, .capacity = 300},
        {.n = 1, .past = 254, .capacity = 300},
    };
    shape s = {8, 2, 128, 0, 2, STI_F16};
    side ref = open_side("ref", NULL), cuda = open_side("cuda", *state);
    call c = open_call(s, seg, 3, &ref, &cuda);
    int replayed = 0;
    for (int step = 0; step < 6; step++) {
        still_error err;
        int32_t tok[3] = {0}, pos[3];
        const uint64_t key[] = {(uintptr_t)cuda.K[0].p, (uintptr_t)cuda.q.p};
        for (int i = 0; i < 3; i++) pos[i] = c.seg[i].past;
        sti_pass pass = {.tok = tok, .pos = pos, .M = 3, .one_each = true};
        pass.key = key;
        pass.n_key = 2;
        bool done = false;
        if (cuda.be->pass_begin(cuda.dev, &pass, &done, &err) != STILL_OK ||
            (!done && attend(&cuda, &c, &err) != STILL_OK) ||
            (!done && cuda.be->pass_end(cuda.dev, true, &err) != STILL_OK))
            fail_msg("step %d: %s", step, err.text);
        replayed += done;
        assert_int_equal(attend(&ref, &c, &err), STILL_OK);
        compare(&ref, &cuda, &c, "recorded");
        for (int i = 0; i < 3; i++) c.seg[i].past++;
    }
    assert_true(replayed > 0);
    close_call(&c, &ref, &cuda);
    ref.be->dev_free(ref.dev);
}

static void impossible_calls_are_refused(void **state)
{
    if (!*state) skip_because("no GPU");
    static const sti_attn_segment seg[] = {{.n = 4, .past = 0, .capacity = 8}};
    shape s = {6, 2, 64, 0, 1, STI_F16};
    side ref = open_side("ref", NULL), cuda = open_side("cuda", *state);
    call c = open_call(s, seg, 1, &ref, &cuda), bad = c;
    still_error err;
    bad.s.G = 4;
    assert_int_equal(attend(&cuda, &bad, &err), STILL_E_ARG);
    bad = c;
    bad.s.D = 300;
    assert_int_equal(attend(&cuda, &bad, &err), STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "300"));
    bad = c;
    bad.s.cache = STI_Q8_0;
    assert_int_equal(attend(&cuda, &bad, &err), STILL_E_UNSUPPORTED);
    bad = c;
    bad.seg[0].past = 5; /* 9 tokens, room for 8, no window */
    assert_int_equal(attend(&cuda, &bad, &err), STILL_E_ARG);
    bad.s.window = 6; /* the ring would need 6 + 4 - 1 rows */
    assert_int_equal(attend(&cuda, &bad, &err), STILL_E_ARG);
    bad = c;
    bad.n_seg = 0;
    assert_int_equal(attend(&cuda, &bad, &err), STILL_OK);
    close_call(&c, &ref, &cuda);
    ref.be->dev_free(ref.dev);
}

RUN_TESTS_IN(setup, teardown, cmocka_unit_test(one_row_each),
             cmocka_unit_test(many_rows), cmocka_unit_test(both_kinds_at_once),
             cmocka_unit_test(rings), cmocka_unit_test(whole_sequences),
             cmocka_unit_test(long_pasts), cmocka_unit_test(crowds),
             cmocka_unit_test(many_sessions), cmocka_unit_test(batches_change_nothing),
             cmocka_unit_test(recorded_passes),
             cmocka_unit_test(impossible_calls_are_refused))
