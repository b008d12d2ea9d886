/* test_hybrid_chunks.c - the chunk-parallel form of the cuda backend's hybrid operator
 * against the reference in double: outputs, routing, and the state a session is left
 * with, for prompts cut at any place and for many sessions in one call.
 *
 * Inputs are what a half can hold, so both sides start from the same numbers. A routing
 * that hangs on the last digits of a score may fall either way (docs/methods.md), and
 * then other tokens are folded: problems are drawn until none does. */
#include "../backend/hybrid_problem.h"

#include <stdio.h>

#include "ops/ops.h"

enum { CUTS = 8 };

typedef struct setting {
    const char *name, *method;
    int chunk, select, cap; /* select, cap -1: as the method has it */
    int H, G, D;
    int cut[CUTS]; /* lengths of the calls; 0 ends them */
    sti_score_kind score;
    sti_la_scale scale;
    bool no_gate, factor, plain, no_maps, no_alpha, per_head;
    int state_cap;
    double floor, den_eps;
    double gain;  /* of the queries; 0: 1 */
    double alpha; /* added to alpha: the more, the heavier the state */
    int position_cap;
    bool raw_features, interleaved;
} setting;

/* ---- Problems ------------------------------------------------------------ */

static double to_half(double x)
{
    int e;
    if (x == 0) return 0;
    frexp(x, &e);
    const double unit = ldexp(1, (e < -13 ? -13 : e) - 11);
    return rint(x / unit) * unit;
}

static void halve(double *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = to_half(x[i]);
}

/* Rows of keys of all lengths, one in 16 of them long. */
static void spread(double *x, size_t rows, int D, uint64_t *rng)
{
    for (size_t r = 0; r < rows; r++) {
        const double gain = (0.5 + uniform(rng)) * (below(rng, 16) == 0 ? 3 : 1);
        for (int d = 0; d < D; d++) x[r * (size_t)D + (size_t)d] *= gain;
    }
}

static sti_hybrid_settings settings_of(const setting *s)
{
    sti_hybrid_settings set = preset(s->method, s->chunk);
    if (s->select >= 0) set.select = s->select;
    if (s->cap >= 0) set.cap = s->cap;
    set.per_head = s->per_head;
    set.score = s->score;
    if (s->scale == STI_SCALE_WINDOW) set.la_scale = s->scale;
    if (s->no_gate) set.gate = false;
    if (s->factor) set.window_factor = true;
    if (s->plain) set.norm_preserved = false;
    if (s->no_alpha) set.alpha = false;
    if (s->floor > 0) set.feature_floor = s->floor;
    if (s->den_eps > 0) set.den_eps = s->den_eps;
    set.state_cap = s->state_cap;
    set.position_cap = s->position_cap;
    if (s->raw_features) set.feature_positions = STI_FEATURES_NONE;
    set.seed = 77;
    set.layer = 3;
    return set;
}

static int tokens_of(const setting *s)
{
    int T = 0;
    for (int i = 0; i < CUTS; i++) T += s->cut[i];
    return T;
}

static problem draw(const setting *s, uint64_t seed)
{
    const sti_hybrid_shape shape = {s->H, s->G, s->D, s->D};
    problem p = make(settings_of(s), shape, tokens_of(s), seed);
    const size_t T = (size_t)p.T, D = (size_t)s->D, map = D * D;
    uint64_t rng = seed + 1;
    spread(p.k, T * (size_t)s->G, s->D, &rng);
    for (size_t i = 0; s->gain > 0 && i < outputs(&p); i++) p.q[i] *= s->gain;
    if (sti_hybrid_rotates(&p.set)) rotate(&p);
    for (int h = 0; h < s->H; h++) p.alpha[h] = (float)(p.alpha[h] + s->alpha);
    halve(p.q, outputs(&p));
    halve(p.k, T * (size_t)s->G * D);
    halve(p.v, T * (size_t)s->G * D);
    halve(p.map_q, (size_t)s->H * map);
    halve(p.map_k, (size_t)p.S * map);
    if (s->no_maps) {
        free(p.map_q);
        free(p.map_k);
        p.map_q = p.map_k = NULL;
    }
    return p;
}

static int falling(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Sorts n scores, keeps the k best of them; false if number k is as good but for
 * rounding. */
static bool keep_best(double *score, int *n, int k)
{
    qsort(score, (size_t)*n, sizeof *score, falling);
    if (*n <= k) return true;
    *n = k;
    return k == 0 || score[k - 1] - score[k] > 5e-5;
}

/* Whether no choice of the problem is a matter of rounding. */
static bool clear_cut(problem *p)
{
    const int C = p->set.chunk, select = p->set.select, cap = p->set.cap;
    const sti_hybrid_parallel_args64 a = parallel_args(p);
    still_error err;
    if (!p->set.has_window || select == 0 || cap == 0) return true;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    double *score = calloc((size_t)(2 * C + cap), sizeof *score);
    assert_non_null(score);
    bool clear = true;
    for (int sel = 0; sel < p->S; sel++) {
        int kept = 0;
        for (int now = 2; now * C < p->T; now++) {
            int n = C;
            double *leaving = score + kept;
            for (int i = 0; i < C; i++)
                leaving[i] = p->score_parallel[((now - 2) * C + i) * p->S + sel];
            clear = keep_best(leaving, &n, select) && clear;
            kept += n;
            clear = keep_best(score, &kept, cap) && clear;
        }
    }
    free(score);
    return clear;
}

/* ---- The GPU's session --------------------------------------------------- */

typedef struct gpu {
    const sti_backend *be;
    sti_dev *dev;
} gpu;

static int setup(void **state)
{
    static gpu g;
    const sti_dev_params p = {
        .threads = 1, .max_k = 128, .heads = 32, .kv_heads = 8, .head_dim = 128};
    still_error err;
    g.be = sti_backend_find("cuda");
    *state = g.be && g.be->dev_new(&p, &g.dev, &err) == STILL_OK ? &g : NULL;
    return 0;
}

static int teardown(void **state)
{
    gpu *g = *state;
    if (g) g->be->dev_free(g->dev);
    return 0;
}

static sti_block new_block(const gpu *g, size_t bytes)
{
    still_error err;
    sti_block b;
    if (g->be->mem_new(g->dev, bytes, &b, &err) != STILL_OK) fail_msg("%s", err.text);
    return b;
}

static void move(const gpu *g, void *to, const void *from, size_t bytes)
{
    still_error err;
    if (g->be->mem_move(g->dev, to, from, bytes, &err) != STILL_OK)
        fail_msg("%s", err.text);
}

/* n doubles as floats on the GPU; NULL stays NULL. */
static sti_block upload(const gpu *g, const double *x, size_t n)
{
    if (!x) return (sti_block){0};
    float *y = malloc(n * sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++) y[i] = (float)x[i];
    sti_block b = new_block(g, n * sizeof *y);
    move(g, b.p, y, n * sizeof *y);
    free(y);
    return b;
}

/* n heads of D elements of `width` numbers; interleaved: the pairs that RoPE turns,
 * elements i and i + D/2 of the reference, lie side by side. */
static sti_block upload_heads(const gpu *g, const double *x, size_t n, size_t D,
                              size_t width, bool interleaved)
{
    if (!x || !interleaved) return upload(g, x, n * D * width);
    double *y = malloc(n * D * width * sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n * D; i++) {
        const size_t d = i % D, to = d < D / 2 ? 2 * d : 2 * (d - D / 2) + 1;
        memcpy(y + (i - d + to) * width, x + i * width, width * sizeof *y);
    }
    sti_block b = upload(g, y, n * D * width);
    free(y);
    return b;
}

typedef struct session {
    const gpu *g;
    const problem *p;
    bool interleaved;
    float *inv_freq; /* [D/2] */
    sti_block q, k, v, gate, alpha, window, map_q, map_k, bias_q, bias_k, q_raw, y,
        memory;
    sti_hybrid_state st;
} session;

static session open_session(const gpu *g, const problem *p, bool interleaved)
{
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, S = (size_t)p->S;
    session x = {.g = g,
                 .p = p,
                 .interleaved = interleaved,
                 .q = upload_heads(g, p->q, T * H, D, 1, interleaved),
                 .k = upload_heads(g, p->k, T * G, D, 1, interleaved),
                 .v = upload(g, p->v, T * G * D),
                 .gate = upload(g, p->gate, T * H * D),
                 .alpha = upload(g, p->set.alpha ? p->alpha : NULL, H),
                 .window = upload(g, p->window, H),
                 .map_q = upload_heads(g, p->map_q, H, D, D, interleaved),
                 .map_k = upload_heads(g, p->map_k, S, D, D, interleaved),
                 .bias_q = upload(g, p->bias_q, H),
                 .bias_k = upload(g, p->bias_k, S),
                 .q_raw = upload_heads(g, p->q_raw, T * H, D, 1, interleaved),
                 .y = new_block(g, T * H * D * sizeof(float))};
    if (p->inv_freq) {
        x.inv_freq = malloc(D / 2 * sizeof(float));
        assert_non_null(x.inv_freq);
        for (size_t i = 0; i < D / 2; i++) x.inv_freq[i] = (float)p->inv_freq[i];
    }
    sti_carve c = {0};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, 2, sizeof(float));
    x.memory = new_block(g, c.used);
    c = (sti_carve){.base = x.memory.p};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, 2, sizeof(float));
    return x;
}

static void close_session(session *x)
{
    sti_block *all[] = {&x->q,      &x->k,     &x->v,     &x->gate,   &x->alpha,
                        &x->window, &x->map_q, &x->map_k, &x->bias_q, &x->bias_k,
                        &x->q_raw,  &x->y,     &x->memory};
    free(x->inv_freq);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->p) x->g->be->mem_free(x->g->dev, all[i]);
}

/* The next n tokens. */
static sti_hybrid_args next_tokens(session *x, int n)
{
    const size_t H = (size_t)x->p->shape.H, G = (size_t)x->p->shape.G;
    const size_t D = (size_t)x->p->shape.D, at = (size_t)x->st.pos;
    return (sti_hybrid_args){
        .set = &x->p->set,
        .shape = x->p->shape,
        .T = n,
        .in = {.q = (float *)x->q.p + at * H * D,
               .k = (float *)x->k.p + at * G * D,
               .v = (float *)x->v.p + at * G * D,
               .gate_logit = (float *)x->gate.p + at * H * D,
               .alpha = x->alpha.p,
               .window_logit = x->window.p,
               .map_q = x->map_q.p,
               .map_k = x->map_k.p,
               .bias_q = x->bias_q.p,
               .bias_k = x->bias_k.p,
               .q_raw = x->q_raw.p ? (float *)x->q_raw.p + at * H * D : NULL,
               .inv_freq = x->inv_freq,
               .interleaved = x->interleaved},
        .state = &x->st,
        .y = (float *)x->y.p + at * H * D};
}

static void feed_gpu(session *x, int n)
{
    const sti_hybrid_args a = next_tokens(x, n);
    still_error err;
    if (x->g->be->hybrid(x->g->dev, &a, 1, &err) != STILL_OK) fail_msg("%s", err.text);
}

/* ---- Comparing ----------------------------------------------------------- */

static double half_value(uint16_t h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const double x = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -x : x;
}

/* n numbers against the reference: within `limit` of its norm, plus a floor. */
static void assert_row(const char *name, const char *what, size_t row, const float *x,
                       const double *ref, int n, double limit, double floor)
{
    double error = 0, size = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(x[i])) fail_msg("%s: %s %zu: %g", name, what, row, (double)x[i]);
        error += (x[i] - ref[i]) * (x[i] - ref[i]);
        size += ref[i] * ref[i];
    }
    if (!(sqrt(error) <= limit * sqrt(size) + floor))
        fail_msg("%s: %s %zu: error %g, size %g (%g for %g)", name, what, row,
                 sqrt(error), sqrt(size), (double)x[0], ref[0]);
}

static void compare_outputs(const char *name, const session *x)
{
    const problem *p = x->p;
    const int H = p->shape.H, D = p->shape.D;
    float *y = malloc(outputs(p) * sizeof *y);
    assert_non_null(y);
    move(x->g, y, x->y.p, outputs(p) * sizeof *y);
    /* Far keys are rounded once more, and so are the queries that see them. */
    const double limit = p->set.position_cap > 0 ? 5e-3 : 1.5e-3;
    double worst = 0;
    for (size_t r = 0; r < (size_t)(p->T * H); r++) {
        const size_t at = r * (size_t)D;
        double error = 0, size = 0;
        for (int d = 0; d < D; d++) {
            error += pow(y[at + (size_t)d] - p->y[at + (size_t)d], 2);
            size += pow(p->y[at + (size_t)d], 2);
        }
        worst = fmax(worst, sqrt(error / size));
        assert_row(name, "output", r, y + at, p->y + at, D, limit, 1e-5 * sqrt(D));
    }
    printf("%-28s relative error at most %.1e\n", name, worst);
    free(y);
}

/* Row `row` of halves is exactly that of the reference. */
static void assert_same(const char *name, const char *what, const uint16_t *x,
                        const double *ref, int D)
{
    for (int d = 0; d < D; d++)
        if (half_value(x[d]) != ref[d])
            fail_msg("%s: %s: element %d is %g, expected %g", name, what, d,
                     half_value(x[d]), ref[d]);
}

/* A key that was turned back is close to that of the reference. */
static void assert_near(const char *name, const uint16_t *x, const double *ref, int D)
{
    double error = 0, size = 0;
    for (int d = 0; d < D; d++) {
        error += pow(half_value(x[d]) - ref[d], 2);
        size += ref[d] * ref[d];
    }
    if (!(sqrt(error) <= 1e-3 * sqrt(size)))
        fail_msg("%s: far key: error %g, size %g", name, sqrt(error), sqrt(size));
}

/* The closed form of s3 leaves out up to eps for every token in view (ops/score.c). */
static double score_limit(const problem *p)
{
    return 3e-5 + 1.5 * p->set.eps * p->set.chunk;
}

static void compare_window(const char *name, const problem *p,
                           const sti_hybrid_state *st)
{
    const int D = p->shape.D, window = 2 * p->set.chunk;
    const int first = p->T > window ? p->T - window : 0;
    for (int g = 0; p->set.has_window && g < p->shape.G; g++)
        for (int j = first; j < p->T; j++) {
            const size_t slot = (size_t)(g * window + j % window);
            const size_t at = slot * (size_t)D;
            assert_same(name, "key", (uint16_t *)st->win_k + at,
                        (double *)p->st.win_k + at, D);
            assert_same(name, "value", (uint16_t *)st->win_v + at,
                        (double *)p->st.win_v + at, D);
            const double score = ((double *)p->st.win_score)[slot];
            if (p->set.select > 0 && p->set.cap > 0 &&
                !(fabs(((float *)st->win_score)[slot] - score) <= score_limit(p)))
                fail_msg("%s: score of token %d is %.9g, expected %.9g", name, j,
                         (double)((float *)st->win_score)[slot], score);
        }
}

static void compare_list(const char *name, const problem *p, const sti_hybrid_state *st)
{
    const int D = p->shape.D, room = p->st.room;
    for (int s = 0; s < p->S; s++) {
        const int n = p->st.sal_count[s];
        if (st->sal_count[s] != n || st->folded[s] != p->st.folded[s])
            fail_msg("%s: head %d has %d salient and %lld folded, expected %d and %lld",
                     name, s, st->sal_count[s], (long long)st->folded[s], n,
                     (long long)p->st.folded[s]);
        for (int i = 0; i < n; i++) {
            const size_t at = (size_t)(s * room + i);
            int other = 0;
            while (other < n && p->st.sal_pos[s * room + other] != st->sal_pos[at])
                other++;
            if (other == n)
                fail_msg("%s: head %d keeps token %d, which the reference does not",
                         name, s, st->sal_pos[at]);
            const size_t ref = (size_t)(s * room + other);
            const uint16_t *key = (uint16_t *)st->sal_k + at * (size_t)D;
            const double *ref_key = (double *)p->st.sal_k + ref * (size_t)D;
            if (st->sal_far) assert_int_equal(st->sal_far[at], p->st.sal_far[ref]);
            if (st->sal_far && st->sal_far[at])
                assert_near(name, key, ref_key, D);
            else
                assert_same(name, "salient key", key, ref_key, D);
            assert_same(name, "salient value", (uint16_t *)st->sal_v + at * (size_t)D,
                        (double *)p->st.sal_v + ref * (size_t)D, D);
            assert_true(fabs(((float *)st->sal_score)[at] -
                             ((double *)p->st.sal_score)[ref]) <= score_limit(p));
        }
    }
}

static void compare_sums(const char *name, const problem *p, const sti_hybrid_state *st)
{
    const int D = p->shape.D, P = p->P;
    for (int s = 0; p->set.has_linear && s < p->S; s++) {
        const double n = (double)p->st.folded[s];
        const float *z = (float *)st->lin_z + s * P;
        assert_row(name, "z of head", (size_t)s, z, (double *)p->st.lin_z + s * P, P,
                   1e-3, 0);
        for (int i = 0; i < P; i++) {
            const size_t at = (size_t)((s * P + i) * D);
            assert_row(name, "state row", (size_t)(s * P + i), (float *)st->lin_s + at,
                       (double *)p->st.lin_s + at, D, 3e-3, 1e-5 * n);
        }
    }
}

/* The session's memory as the program can read it; freed by the caller. */
static unsigned char *memory_of(const session *x)
{
    unsigned char *copy = malloc(x->memory.bytes);
    assert_non_null(copy);
    move(x->g, copy, x->memory.p, x->memory.bytes);
    return copy;
}

/* A session that has seen all its tokens is where the reference is. */
static void compare(const char *name, const session *x)
{
    const problem *p = x->p;
    sti_hybrid_state st;
    unsigned char *copy = memory_of(x);
    sti_carve c = {.base = copy};
    assert_int_equal(x->st.pos, p->T);
    compare_outputs(name, x);
    if (x->interleaved) { /* keys and features have another order */
        free(copy);
        return;
    }
    sti_hybrid_state_carve(&st, &c, &p->set, &p->shape, p->T, 2, sizeof(float));
    compare_window(name, p, &st);
    compare_list(name, p, &st);
    compare_sums(name, p, &st);
    free(copy);
}

/* A problem of which every backend makes the same choices. */
static problem draw_clear(const setting *s, uint64_t seed)
{
    for (const uint64_t last = seed + 100;; seed++) {
        problem p = draw(s, seed);
        if (clear_cut(&p)) return p;
        drop(&p);
        assert_true(seed < last);
    }
}

static void run(const gpu *g, const setting *s)
{
    problem p = draw_clear(s, 1000);
    session x = open_session(g, &p, s->interleaved);
    feed(&p, 0, p.T);
    for (int i = 0; i < CUTS && s->cut[i] > 0; i++) feed_gpu(&x, s->cut[i]);
    compare(s->name, &x);
    close_session(&x);
    drop(&p);
}

/* ---- Tests --------------------------------------------------------------- */

static void run_all(void **state, const setting *s, size_t n)
{
    const gpu *g = *state;
    if (!g) skip();
    for (size_t i = 0; i < n; i++) run(g, &s[i]);
}

/* Name, method, chunk, select, cap, H, G, D, lengths of the calls, settings. */
#define CASE(n, m, c, s, k, h, g, d, ...)                                              \
    {                                                                                  \
        .name = n, .method = m, .chunk = c, .select = s, .cap = k, .H = h, .G = g,     \
        .D = d, __VA_ARGS__                                                            \
    }
#define CUT(...) .cut = {__VA_ARGS__}

static void test_shapes(void **state)
{
    static const setting all[] = {
        CASE("C 128, D 128", "still", 128, -1, -1, 4, 2, 128, CUT(900)),
        CASE("C 128, D 64", "still", 128, 32, 100, 3, 1, 64, CUT(777)),
        CASE("C 64, D 128, list full", "still", 64, 16, 40, 2, 1, 128, CUT(700)),
        CASE("C 64, D 64, groups of 3", "still", 64, 20, 64, 6, 2, 64, CUT(650)),
        CASE("C 32, four heads a block", "still", 32, 8, 70, 4, 1, 64, CUT(333)),
        CASE("C 32, groups of 5", "still", 32, 8, 33, 5, 1, 64, CUT(200)),
        CASE("C 16", "still", 16, 5, 7, 2, 2, 64, CUT(250)),
        CASE("C 48, D 128", "still", 48, 48, 96, 2, 2, 128, CUT(400)),
        CASE("C 256, D 128", "still", 256, 64, 300, 1, 1, 128, CUT(1100)),
        CASE("C 144, D 64", "still", 144, 100, 190, 2, 1, 64, CUT(1000)),
        CASE("C 64, D 128, groups of 3", "still", 64, 16, 130, 6, 2, 128, CUT(500)),
        CASE("C 128, D 128, groups of 4", "still", 128, 32, 130, 4, 1, 128, CUT(1000)),
        CASE("whole chunks", "still", 64, -1, -1, 2, 1, 64, CUT(512)),
        CASE("one chunk", "still", 64, -1, -1, 2, 1, 64, CUT(40)),
        CASE("two chunks and one", "still", 64, -1, -1, 2, 1, 64, CUT(129)),
        CASE("nothing folded at first", "still", 32, 32, 200, 2, 1, 64, CUT(450)),
        CASE("more than a piece", "still", 64, 16, 128, 1, 1, 64, CUT(8300)),
    };
    run_all(state, all, sizeof all / sizeof *all);
}

static void test_cuts(void **state)
{
    static const setting all[] = {
        CASE("cut C 128, D 128", "still", 128, -1, 200, 4, 2, 128,
             CUT(300, 84, 5, 123, 256, 7, 130, 40)),
        CASE("cut C 64", "still", 64, 16, 50, 3, 1, 64,
             CUT(64, 64, 30, 98, 10, 54, 150, 17)),
        CASE("cut C 16", "still", 16, 4, 9, 4, 2, 64, CUT(5, 6, 7, 40, 16, 9, 33, 90)),
        CASE("cut C 256", "still", 256, 16, 30, 2, 1, 64,
             CUT(255, 6, 256, 300, 9, 200)),
        /* Calls of a few tokens go through the recurrent form, on the same state. */
        CASE("cut, with steps", "still", 32, 8, 20, 4, 2, 64,
             CUT(70, 1, 58, 3, 100, 2, 27, 40)),
    };
    run_all(state, all, sizeof all / sizeof *all);
}

static void test_settings(void **state)
{
    static const setting all[] = {
        CASE("lolcats", "lolcats", 64, -1, -1, 4, 2, 64, CUT(500)),
        CASE("lolcats, D 128", "lolcats", 128, -1, -1, 2, 1, 128, CUT(300, 300)),
        CASE("lolcats, per head", "lolcats", 64, -1, -1, 4, 2, 128, CUT(300, 200),
             .per_head = true),
        CASE("lolcats, per head, D 64", "lolcats", 64, -1, -1, 4, 1, 64, CUT(333),
             .per_head = true),
        CASE("still, per head", "still", 64, 16, 60, 4, 2, 128, CUT(150, 250),
             .per_head = true),
        CASE("still, per head, D 64", "still", 32, 8, 40, 6, 2, 64, CUT(99, 1, 200),
             .per_head = true),
        CASE("per head, more than a piece", "still", 64, 16, 64, 8, 1, 64, CUT(1100),
             .per_head = true),
        CASE("swa", "swa", 64, -1, -1, 4, 2, 64, CUT(300)),
        CASE("swa, C 512", "swa", 512, -1, -1, 2, 1, 64, CUT(1200, 7, 400)),
        CASE("lolcats, C 512", "lolcats", 512, -1, -1, 2, 1, 64, CUT(700, 900)),
        CASE("lolcats, C 512, D 128", "lolcats", 512, -1, -1, 1, 1, 128, CUT(1300)),
        CASE("window scale", "still", 64, 16, 60, 2, 1, 128, CUT(500),
             .scale = STI_SCALE_WINDOW, .factor = true),
        CASE("window factor", "still", 64, 16, 60, 2, 1, 64, CUT(400), .factor = true),
        CASE("no gate, no alpha", "still", 64, 16, 60, 4, 2, 64, CUT(400),
             .no_gate = true, .no_alpha = true),
        CASE("identity maps", "still", 64, 16, 60, 2, 1, 128, CUT(450),
             .no_maps = true),
        CASE("identity, plain, C 32", "still", 32, 16, 60, 4, 1, 64, CUT(450),
             .no_maps = true, .plain = true),
        CASE("plain map", "still", 64, 16, 60, 2, 1, 64, CUT(450), .plain = true),
        CASE("state cap", "still", 64, 16, 60, 2, 1, 64, CUT(450), .state_cap = 90),
        CASE("floor", "still", 64, 16, 60, 2, 1, 64, CUT(450), .floor = 0.02),
        CASE("den_eps", "still", 64, 16, 60, 2, 1, 64, CUT(450), .den_eps = 0.5),
        CASE("key norm", "still", 64, 16, 60, 4, 2, 64, CUT(450),
             .score = STI_SCORE_KEYNORM),
        CASE("random", "still", 64, 16, 60, 6, 2, 64, CUT(450),
             .score = STI_SCORE_RANDOM),
        CASE("distinct", "still", 64, 16, 60, 4, 2, 64, CUT(450),
             .score = STI_SCORE_DISTINCT),
        CASE("distinct, all of a chunk, cuts", "still", 32, 32, 100, 6, 2, 128,
             CUT(40, 7, 90, 300), .score = STI_SCORE_DISTINCT),
        CASE("cap 0", "still", 64, 16, 0, 2, 1, 64, CUT(450)),
        CASE("select 0", "still", 64, 0, 60, 2, 1, 64, CUT(450)),
        CASE("list shorter than choice", "still", 64, 40, 16, 2, 1, 64, CUT(450)),
        CASE("cap 1024", "still", 32, 32, 1024, 2, 1, 64, CUT(1300)),
        CASE("large logits", "still", 64, 16, 60, 2, 1, 128, CUT(450), .gain = 6,
             .score = STI_SCORE_RANDOM),
        CASE("heavy state", "still", 64, 16, 60, 2, 1, 128, CUT(450), .alpha = 4),
        CASE("heavy state, D 64", "still", 32, 8, 20, 4, 2, 64, CUT(300, 77),
             .alpha = 6),
        CASE("heavy state, window scale", "still", 64, 16, 60, 2, 1, 128, CUT(450),
             .scale = STI_SCALE_WINDOW, .alpha = 3),
        CASE("light state, window scale", "still", 64, 16, 60, 2, 1, 64, CUT(450),
             .scale = STI_SCALE_WINDOW, .alpha = -3),
    };
    run_all(state, all, sizeof all / sizeof *all);
}

/* Streams longer than a model was trained for. Calls of a few tokens are steps of the
 * recurrent form, on the same state. */
static void test_positions(void **state)
{
    static const setting all[] = {
        CASE("capped", "still", 32, 8, 40, 4, 2, 64, CUT(500), .position_cap = 100,
             .raw_features = true, .state_cap = 104),
        CASE("capped, D 128", "still", 64, 16, 70, 4, 2, 128, CUT(700),
             .position_cap = 200, .raw_features = true, .state_cap = 198),
        CASE("capped, C 128", "still", 128, 32, 100, 2, 1, 128, CUT(900, 100),
             .position_cap = 300, .raw_features = true),
        CASE("capped, cut", "still", 32, 8, 40, 4, 2, 64,
             CUT(100, 3, 57, 120, 1, 40, 5, 200), .position_cap = 90,
             .raw_features = true),
        CASE("capped, cut, D 128", "still", 64, 16, 100, 2, 1, 128,
             CUT(300, 2, 90, 128, 4, 60), .position_cap = 150, .raw_features = true),
        CASE("capped, all far soon", "still", 16, 4, 80, 2, 1, 64, CUT(300, 50),
             .position_cap = 32, .raw_features = true),
        CASE("capped, none far", "still", 32, 8, 40, 2, 1, 64, CUT(300, 50),
             .position_cap = 1000, .raw_features = true),
        CASE("capped, features with positions", "still", 32, 8, 40, 2, 1, 64,
             CUT(200, 150), .position_cap = 100),
        CASE("features without positions", "still", 32, 8, 40, 4, 2, 64, CUT(200, 150),
             .raw_features = true),
        CASE("capped, interleaved", "still", 32, 8, 40, 4, 2, 64, CUT(200, 3, 150),
             .position_cap = 100, .raw_features = true, .interleaved = true),
        CASE("capped, no maps", "still", 32, 8, 40, 4, 2, 64, CUT(350),
             .position_cap = 100, .raw_features = true, .no_maps = true),
        CASE("capped, per head", "still", 32, 8, 40, 4, 2, 64, CUT(250, 100),
             .position_cap = 100, .raw_features = true, .per_head = true),
        CASE("capped, window scale", "still", 32, 8, 40, 4, 2, 64, CUT(250, 100),
             .position_cap = 100, .raw_features = true, .scale = STI_SCALE_WINDOW),
        CASE("capped, lolcats", "lolcats", 64, -1, -1, 4, 2, 64, CUT(300, 100),
             .position_cap = 150, .raw_features = true),
        CASE("capped, swa", "swa", 64, -1, -1, 4, 2, 64, CUT(300), .position_cap = 150,
             .raw_features = true),
    };
    run_all(state, all, sizeof all / sizeof *all);
}

/* Methods that fold every token before its own output. */
static void test_no_window(void **state)
{
    static const setting all[] = {
        CASE("hedgehog", "hedgehog", 64, -1, -1, 4, 2, 64, CUT(300)),
        CASE("hedgehog, D 128", "hedgehog", 64, -1, -1, 4, 2, 128, CUT(100, 3, 65)),
        CASE("hedgehog, cut", "hedgehog", 64, -1, -1, 3, 3, 64,
             CUT(5, 32, 1, 31, 33, 64, 2, 7)),
        CASE("hedgehog, per head", "hedgehog", 64, -1, -1, 4, 2, 64, CUT(150),
             .per_head = true),
        CASE("hedgehog, no maps, floor", "hedgehog", 64, -1, -1, 2, 1, 64, CUT(90),
             .no_maps = true, .floor = 0.01),
        CASE("hedgehog, no gate", "hedgehog", 64, -1, -1, 2, 1, 64, CUT(90),
             .no_gate = true),
        CASE("hedgehog, more than a piece", "hedgehog", 64, -1, -1, 1, 1, 64,
             CUT(2100)),
        CASE("t2r", "t2r", 64, -1, -1, 4, 2, 64, CUT(70, 6, 100)),
        CASE("t2r, D 128", "t2r", 64, -1, -1, 2, 1, 128, CUT(200)),
        CASE("t2r, per head", "t2r", 64, -1, -1, 4, 2, 128, CUT(77, 40),
             .per_head = true),
    };
    run_all(state, all, sizeof all / sizeof *all);
}

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
    static const setting all[] = {
        CASE("C 64", "still", 64, 16, 50, 4, 2, 64, CUT(100, 28, 70, 25, 230, 47)),
        CASE("C 48", "still", 48, 20, 60, 2, 1, 128, CUT(49, 100, 27, 168, 26, 130)),
        CASE("C 128", "still", 128, 32, 64, 2, 1, 128, CUT(29, 291, 64, 200)),
    };
    const gpu *g = *state;
    if (!g) skip();
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

/* Sessions that are fed together are as the reference is, and to the bit as they are
 * if each is fed alone. All have the parameters of the first. */
static void run_crowd(const gpu *g, const crowd *c)
{
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

static void test_crowds(void **state)
{
    static const crowd all[] = {
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
        {CASE("key norm, no maps", "still", 64, 16, 60, 4, 2, 128, .no_maps = true,
              .score = STI_SCORE_KEYNORM),
         3,
         {0, 100, 190},
         {30, 80, 25}},
    };
    const gpu *g = *state;
    if (!g) skip();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) run_crowd(g, &all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),    cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_settings),  cmocka_unit_test(test_bits),
        cmocka_unit_test(test_crowds),    cmocka_unit_test(test_positions),
        cmocka_unit_test(test_no_window),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
