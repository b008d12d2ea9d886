/* test_hybrid_chunks_batches.c - the chunk-parallel form of the cuda backend's hybrid
 * operator: however a prompt is cut, and with whatever sessions it shares a call, the
 * outputs and the state are the same. */
#include "hybrid_chunks_sessions.h"

/* ---- One session --------------------------------------------------------- */

/* Numbers between x and y that a float can hold, at most. */
static int64_t steps_between(float x, float y)
{
    int32_t a, b;
    memcpy(&a, &x, sizeof a);
    memcpy(&b, &y, sizeof b);
    const int64_t p = a < 0 ? (int64_t)INT32_MIN - a : a;
    const int64_t q = b < 0 ? (int64_t)INT32_MIN - b : b;
    return p > q ? p - q : q - p;
}

/* However a prompt is cut, its outputs are the same but for the last bits: sums of the
 * state begin elsewhere. */
static void test_bits(void **state)
{
    (void)state;
    static const setting all[] = {
        CASE("C 64", "still", 64, 16, 50, 4, 2, 64, CUT(100, 28, 70, 25, 230, 47)),
        CASE("C 48", "still", 48, 20, 60, 2, 1, 128, CUT(49, 100, 27, 168, 26, 130)),
        CASE("C 128", "still", 128, 32, 64, 2, 1, 128, CUT(29, 291, 64, 200)),
    };
    const gpu *g = need_gpu();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const setting *s = &all[i];
        problem p = draw(s, 5);
        const size_t n = outputs(&p), bytes = n * sizeof(float);
        session x = open_session(g, &p, false), y = open_session(g, &p, false);
        float *whole = malloc(bytes), *cut = malloc(bytes);
        assert_true(whole && cut);
        feed_gpu(&x, p.T);
        for (int j = 0; j < CUTS && s->cut[j] > 0; j++) feed_gpu(&y, s->cut[j]);
        move(g, whole, x.y.p, bytes);
        move(g, cut, y.y.p, bytes);
        for (size_t j = 0; j < n; j++)
            if (steps_between(whole[j], cut[j]) > 4 &&
                fabs((double)whole[j] - (double)cut[j]) > 1e-6)
                fail_msg("%s: output %zu is %.9g in one piece, %.9g cut", s->name, j,
                         (double)whole[j], (double)cut[j]);
        free(whole);
        free(cut);
        close_session(&x);
        close_session(&y);
        drop(&p);
    }
}

/* ---- Many sessions ------------------------------------------------------- */

enum { CROWD = 80 };

typedef struct crowd {
    setting s; /* without cuts */
    int n;
    int past[CROWD], T[CROWD]; /* tokens before, and those that come together; sessions
                                  from the first without T on are like the first ones */
} crowd;

static void assert_same_bits(const char *name, int i, const session *x,
                             const session *y)
{
    const size_t bytes = outputs(x->p) * sizeof(float);
    float *a = malloc(bytes), *b = malloc(bytes);
    unsigned char *m = memory_of(x), *n = memory_of(y);
    assert_true(a && b);
    move(x->g, a, x->y.p, bytes);
    move(y->g, b, y->y.p, bytes);
    if (memcmp(a, b, bytes) != 0)
        fail_msg("%s: outputs of session %d are others if it is alone", name, i);
    if (memcmp(m, n, x->memory.bytes) != 0)
        fail_msg("%s: the state of session %d is another if it is alone", name, i);
    free(a);
    free(b);
    free(m);
    free(n);
}

static const crowd crowds[] = {
    {CASE("two", "still", 64, 16, 50, 4, 2, 64, CUT(0)), 2, {0}, {70, 5}},
    {CASE("all places", "still", 32, 8, 20, 4, 2, 64, CUT(0)),
     9,
     {0, 10, 31, 32, 33, 95, 64, 150, 0},
     {5, 20, 5, 33, 64, 6, 200, 40, 7}},
    {CASE("all places, D 128", "still", 64, 16, 40, 4, 2, 128, CUT(0)),
     8,
     {0, 130, 63, 64, 0, 200, 127, 128},
     {20, 5, 66, 64, 300, 7, 130, 128}},
    {CASE("with steps between", "still", 32, 8, 20, 2, 1, 64, CUT(0)),
     7,
     {0, 31, 64, 100, 0, 5, 63},
     {40, 2, 6, 1, 3, 90, 4}},
    {CASE("C 128, D 128", "still", 128, 32, 100, 4, 1, 128, CUT(0)),
     5,
     {300, 0, 255, 0, 384},
     {30, 140, 20, 400, 9}},
    {CASE("more than a launch", "still", 16, 4, 9, 2, 1, 64, CUT(0)),
     75,
     {0, 37, 16, 15, 50},
     {5, 6, 17, 40, 9}},
    {CASE("more than the scratch", "still", 128, 32, 1024, 8, 8, 128, CUT(0)),
     10,
     {0},
     {6, 9}},
    {CASE("one longer than a piece", "still", 64, 16, 64, 1, 1, 64, CUT(0)),
     3,
     {0, 0, 100},
     {30, 8200, 20}},
    {CASE("capped", "still", 32, 8, 40, 4, 2, 64, .position_cap = 100,
          .raw_features = true, .state_cap = 104),
     6,
     {0, 40, 150, 200, 333, 96},
     {300, 20, 5, 100, 50, 32}},
    {CASE("hedgehog", "hedgehog", 64, -1, -1, 4, 2, 64, CUT(0)),
     5,
     {0, 40, 7, 0, 64},
     {70, 20, 5, 3, 33}},
    {CASE("t2r", "t2r", 64, -1, -1, 4, 2, 64, CUT(0)), 2, {0, 40}, {70, 20}},
    {CASE("lolcats", "lolcats", 64, -1, -1, 4, 2, 64, CUT(0)),
     3,
     {0, 100, 170},
     {30, 80, 25}},
    {CASE("per head, window scale", "still", 32, 8, 20, 4, 2, 64, .per_head = true,
          .scale = STI_SCALE_WINDOW),
     3,
     {0, 100, 70},
     {30, 80, 25}},
    {CASE("swa, random", "swa", 64, -1, -1, 4, 2, 64, .score = STI_SCORE_RANDOM),
     3,
     {0, 100, 170},
     {30, 80, 25}},
    {CASE("received", "still", 32, 8, 40, 4, 2, 64, .score = STI_SCORE_RECEIVED),
     4,
     {0, 40, 150, 64},
     {100, 20, 33, 300}},
    {CASE("key norm, no maps", "still", 64, 16, 60, 4, 2, 128, .no_maps = true,
          .score = STI_SCORE_KEYNORM),
     3,
     {0, 100, 190},
     {30, 80, 25}},
};

/* Sessions that are fed together are as the reference is, and to the bit as they are
 * if each is fed alone. All have the parameters of the first. */
static void test_crowd(void **state)
{
    const crowd *c = *state;
    const gpu *g = need_gpu();
    static problem p[CROWD];
    static session x[CROWD];
    static sti_hybrid_args a[CROWD];
    int repeats = 1;
    while (repeats < c->n && c->T[repeats] > 0) repeats++;
    for (int i = 0; i < c->n; i++) {
        setting s = c->s;
        s.cut[0] = c->past[i % repeats];
        s.cut[1] = c->T[i % repeats];
        p[i] = draw_clear(&s, 1000 + 200 * (uint64_t)i);
        if (i > 0) {
            problem *q = &p[i];
            const size_t H = (size_t)q->shape.H, D = (size_t)q->shape.D, map = D * D;
            memcpy(q->alpha, p[0].alpha, H * sizeof(double));
            memcpy(q->window, p[0].window, H * sizeof(double));
            memcpy(q->bias_q, p[0].bias_q, H * sizeof(double));
            memcpy(q->bias_k, p[0].bias_k, (size_t)q->S * sizeof(double));
            if (q->map_q) memcpy(q->map_q, p[0].map_q, H * map * sizeof(double));
            if (q->map_k)
                memcpy(q->map_k, p[0].map_k, (size_t)q->S * map * sizeof(double));
        }
        feed(&p[i], 0, p[i].T);
        x[i] = open_session(g, &p[i], s.interleaved);
        if (s.cut[0] > 0) feed_gpu(&x[i], s.cut[0]);
        a[i] = next_tokens(&x[i], s.cut[1]);
        a[i].set = &p[0].set;
        a[i].in.alpha = x[0].alpha.p;
        a[i].in.window_logit = x[0].window.p;
        a[i].in.map_q = x[0].map_q.p;
        a[i].in.map_k = x[0].map_k.p;
        a[i].in.bias_q = x[0].bias_q.p;
        a[i].in.bias_k = x[0].bias_k.p;
    }
    still_error err;
    if (g->be->hybrid(g->dev, a, c->n, &err) != STILL_OK) fail_msg("%s", err.text);
    for (int i = 0; i < c->n; i++) {
        compare(c->s.name, &x[i]);
        session alone = open_session(g, &p[i], c->s.interleaved);
        if (c->past[i % repeats] > 0) feed_gpu(&alone, c->past[i % repeats]);
        feed_gpu(&alone, c->T[i % repeats]);
        assert_same_bits(c->s.name, i, &x[i], &alone);
        close_session(&alone);
    }
    for (int i = 0; i < c->n; i++) {
        close_session(&x[i]);
        drop(&p[i]);
    }
}

int main(void)
{
    struct CMUnitTest tests[1 + COUNT(crowds)] = {cmocka_unit_test(test_bits)};
    add_cases(tests, 1, test_crowd, crowds, COUNT(crowds), sizeof *crowds);
    return cmocka_run_group_tests(tests, open_chunks_gpu, close_gpu);
}
