/* hybrid_chunks_sessions.h - problems and sessions of the chunk-parallel form of the
 * cuda backend's hybrid operator for its tests, compared with the reference in double:
 * outputs, routing, and the state a session is left with.
 *
 * Inputs are what a half can hold, so both sides start from the same numbers. A routing
 * that hangs on the last digits of a score may fall either way (docs/methods.md), and
 * then other tokens are folded: problems are drawn until none does. */
#ifndef TESTS_CUDA_HYBRID_CHUNKS_SESSIONS_H
#define TESTS_CUDA_HYBRID_CHUNKS_SESSIONS_H

#include "../../../hybrid_problem.h"

#include <stdio.h>

#include "../../gpu.h"

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
    bool uneven; /* selection heads have caps of their own, `cap` the largest */
    int key_bits, value_bits; /* of salient tokens; 0: as in the window */
    bool no_state;            /* what is not kept is forgotten */
} setting;

/* Name, method, chunk, select, cap, H, G, D, lengths of the calls, settings. */
#define CASE(n, m, c, s, k, h, g, d, ...)                                              \
    {                                                                                  \
        .name = n, .method = m, .chunk = c, .select = s, .cap = k, .H = h, .G = g,     \
        .D = d, __VA_ARGS__                                                            \
    }
#define CUT(...) .cut = {__VA_ARGS__}

/* ---- Problems ------------------------------------------------------------ */

static inline double to_half(double x)
{
    int e;
    if (x == 0) return 0;
    frexp(x, &e);
    const double unit = ldexp(1, (e < -13 ? -13 : e) - 11);
    return rint(x / unit) * unit;
}

static inline void halve(double *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = to_half(x[i]);
}

/* Rows of keys of all lengths, one in 16 of them long. */
static inline void spread(double *x, size_t rows, int D, uint64_t *rng)
{
    for (size_t r = 0; r < rows; r++) {
        const double gain = (0.5 + uniform(rng)) * (below(rng, 16) == 0 ? 3 : 1);
        for (int d = 0; d < D; d++) x[r * (size_t)D + (size_t)d] *= gain;
    }
}

static inline sti_hybrid_settings settings_of(const setting *s)
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
    set.key_bits = s->key_bits;
    set.value_bits = s->value_bits;
    if (s->no_state) set.has_linear = set.gate = false;
    uint64_t rng = 5;
    if (s->uneven) make_uneven(&set, &rng);
    return set;
}

static inline int tokens_of(const setting *s)
{
    int T = 0;
    for (int i = 0; i < CUTS; i++) T += s->cut[i];
    return T;
}

static inline problem draw(const setting *s, uint64_t seed)
{
    const sti_hybrid_shape shape = {s->H, s->G, s->D, s->D};
    problem p = make(settings_of(s), shape, tokens_of(s), seed);
    const size_t T = (size_t)p.T, D = (size_t)s->D, map = D * D;
    uint64_t rng = seed + 1;
    spread(p.k, T * (size_t)s->G, s->D, &rng);
    for (size_t i = 0; s->gain > 0 && i < outputs(&p); i++) p.q[i] *= s->gain;
    if (sti_hybrid_needs_raw(&p.set)) rotate(&p);
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

static inline int falling(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* How far a score may be off. The closed form of s3 leaves out up to eps for every
 * token in view (ops/score.c); received weights are small numbers. */
static inline double score_limit(const problem *p)
{
    return p->set.score == STI_SCORE_RECEIVED ? 1e-7
                                              : 3e-5 + 1.5 * p->set.eps * p->set.chunk;
}

/* Sorts n scores, keeps the k best of them; false if number k is as good but for
 * rounding. */
static inline bool keep_best(const problem *p, double *score, int *n, int k)
{
    const double gap = p->set.score == STI_SCORE_RECEIVED ? 1e-6 : 5e-5;
    qsort(score, (size_t)*n, sizeof *score, falling);
    if (*n <= k) return true;
    *n = k;
    return k == 0 || score[k - 1] - score[k] > gap;
}

/* Whether no choice of the problem is a matter of rounding. */
static inline bool clear_cut(problem *p)
{
    const int C = p->set.chunk, select = p->set.select;
    const sti_hybrid_parallel_args64 a = parallel_args(p);
    still_error err;
    if (!p->set.has_window || select == 0 || p->set.cap == 0) return true;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    double *score = calloc((size_t)(2 * C + p->set.cap), sizeof *score);
    assert_non_null(score);
    bool clear = true;
    for (int sel = 0; sel < p->S; sel++) {
        int kept = 0;
        for (int now = 2; now * C < p->T; now++) {
            int n = C;
            double *leaving = score + kept;
            for (int i = 0; i < C; i++)
                leaving[i] = p->score_parallel[((now - 2) * C + i) * p->S + sel];
            clear = keep_best(p, leaving, &n, select) && clear;
            kept += n;
            clear = keep_best(p, score, &kept, sti_hybrid_cap(&p->set, sel)) && clear;
        }
    }
    free(score);
    return clear;
}

/* A problem of which every backend makes the same choices. */
static inline problem draw_clear(const setting *s, uint64_t seed)
{
    for (const uint64_t last = seed + 100;; seed++) {
        problem p = draw(s, seed);
        if (clear_cut(&p)) return p;
        drop(&p);
        assert_true(seed < last);
    }
}

/* ---- The GPU's session --------------------------------------------------- */

static inline int open_chunks_gpu(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){
        .threads = 1, .max_k = 128, .heads = 32, .kv_heads = 8, .head_dim = 128});
}

/* n heads of D elements of `width` numbers; interleaved: the pairs that RoPE turns,
 * elements i and i + D/2 of the reference, lie side by side. */
static inline sti_block upload_heads(const gpu *g, const double *x, size_t n, size_t D,
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

static inline session open_session(const gpu *g, const problem *p, bool interleaved)
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

static inline void close_session(session *x)
{
    sti_block *all[] = {&x->q,      &x->k,     &x->v,     &x->gate,   &x->alpha,
                        &x->window, &x->map_q, &x->map_k, &x->bias_q, &x->bias_k,
                        &x->q_raw,  &x->y,     &x->memory};
    free(x->inv_freq);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->p) x->g->be->mem_free(x->g->dev, all[i]);
}

/* The next n tokens. */
static inline sti_hybrid_args next_tokens(session *x, int n)
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

static inline void feed_gpu(session *x, int n)
{
    const sti_hybrid_args a = next_tokens(x, n);
    still_error err;
    if (x->g->be->hybrid(x->g->dev, &a, 1, &err) != STILL_OK) fail_msg("%s", err.text);
}

/* ---- Comparing ----------------------------------------------------------- */

static inline double half_value(uint16_t h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const double x = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -x : x;
}

/* n numbers against the reference: within `limit` of its norm, plus a floor. */
static inline void assert_row(const char *name, const char *what, size_t row,
                              const float *x, const double *ref, int n, double limit,
                              double floor)
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

static inline void compare_outputs(const char *name, const session *x)
{
    const problem *p = x->p;
    const int H = p->shape.H, D = p->shape.D;
    float *y = malloc(outputs(p) * sizeof *y);
    assert_non_null(y);
    move(x->g, y, x->y.p, outputs(p) * sizeof *y);
    /* Far keys are rounded once more, and so are the queries that see them; levels of
     * quantized keys become halves. */
    const bool rounded = p->set.position_cap > 0 || p->set.key_bits > 0;
    const double limit = rounded ? 5e-3 : 1.5e-3;
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
static inline void assert_same(const char *name, const char *what, const uint16_t *x,
                               const double *ref, int D)
{
    for (int d = 0; d < D; d++)
        if (half_value(x[d]) != ref[d])
            fail_msg("%s: %s: element %d is %g, expected %g", name, what, d,
                     half_value(x[d]), ref[d]);
}

/* A key that was turned back is close to that of the reference. */
static inline void assert_near(const char *name, const uint16_t *x, const double *ref,
                               int D)
{
    double error = 0, size = 0;
    for (int d = 0; d < D; d++) {
        error += pow(half_value(x[d]) - ref[d], 2);
        size += ref[d] * ref[d];
    }
    if (!(sqrt(error) <= 1e-3 * sqrt(size)))
        fail_msg("%s: far key: error %g, size %g", name, sqrt(error), sqrt(size));
}

static inline void compare_window(const char *name, const problem *p,
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

/* What the tokens of the window have received so far, sums of up to 2C weights. */
static inline void compare_received(const char *name, const problem *p,
                                    const sti_hybrid_state *st)
{
    const int window = 2 * p->set.chunk, first = p->T > window ? p->T - window : 0;
    if (!st->win_received || p->set.select == 0 || p->set.cap == 0) return;
    for (int s = 0; s < p->S; s++)
        for (int j = first; j < p->T; j++) {
            const size_t slot = (size_t)(s * window + j % window);
            const double sum = ((double *)p->st.win_received)[slot];
            const float x = ((float *)st->win_received)[slot];
            if (!(fabs(x - sum) <= 1e-5 * sum + 1e-6))
                fail_msg("%s: token %d has received %.9g, expected %.9g", name, j,
                         (double)x, sum);
        }
}

/* A quantized row has the same bytes. */
static inline void assert_stored(const char *name, const char *what, int bits, int D,
                                 sti_salient_row x, sti_salient_row ref)
{
    const size_t scales = sti_salient_groups(D) * (bits < 5 ? 2 : 1);
    if (memcmp(x.scale, ref.scale, scales * sizeof *x.scale) != 0)
        fail_msg("%s: scales of a salient %s differ", name, what);
    if (memcmp(x.low, ref.low, sti_salient_low(bits, D)) != 0 ||
        (x.high && memcmp(x.high, ref.high, sti_salient_high(bits, D)) != 0))
        fail_msg("%s: levels of a salient %s differ", name, what);
}

/* A quantized key that was turned back: all levels are the same, but for one of a few
 * that lie between two. */
static inline void assert_stored_near(const char *name, int bits, int D,
                                      sti_salient_row x, sti_salient_row ref)
{
    float own[128], expected[128];
    double error = 0, size = 0;
    assert_true(D <= 128);
    sti_salient_unpack_key(bits, x, D, own);
    sti_salient_unpack_key(bits, ref, D, expected);
    for (int d = 0; d < D; d++) {
        error += pow(own[d] - expected[d], 2);
        size += pow(expected[d], 2);
    }
    if (!(sqrt(error) <= 3e-2 * sqrt(size)))
        fail_msg("%s: stored far key: error %g, size %g", name, sqrt(error),
                 sqrt(size));
}

static inline void compare_list(const char *name, const problem *p,
                                const sti_hybrid_state *st)
{
    const int D = p->shape.D;
    for (int s = 0; s < p->S; s++) {
        const int n = p->st.sal_count[s];
        const size_t first = sti_hybrid_list_of(&p->set, &p->st, s).first;
        if (st->sal_count[s] != n || st->folded[s] != p->st.folded[s])
            fail_msg("%s: head %d has %d salient and %lld folded, expected %d and %lld",
                     name, s, st->sal_count[s], (long long)st->folded[s], n,
                     (long long)p->st.folded[s]);
        for (int i = 0; i < n; i++) {
            const size_t at = first + (size_t)i;
            int other = 0;
            while (other < n && p->st.sal_pos[first + (size_t)other] != st->sal_pos[at])
                other++;
            if (other == n)
                fail_msg("%s: head %d keeps token %d, which the reference does not",
                         name, s, st->sal_pos[at]);
            const size_t ref = first + (size_t)other;
            const uint16_t *key = (uint16_t *)st->sal_k + at * (size_t)D;
            const double *ref_key = (double *)p->st.sal_k + ref * (size_t)D;
            if (st->sal_far) assert_int_equal(st->sal_far[at], p->st.sal_far[ref]);
            if (p->set.key_bits && st->sal_far && st->sal_far[at])
                assert_stored_near(name, p->set.key_bits, D,
                                   sti_hybrid_salient_key(&p->set, st, D, at),
                                   sti_hybrid_salient_key(&p->set, &p->st, D, ref));
            else if (p->set.key_bits)
                assert_stored(name, "key", p->set.key_bits, D,
                              sti_hybrid_salient_key(&p->set, st, D, at),
                              sti_hybrid_salient_key(&p->set, &p->st, D, ref));
            else if (st->sal_far && st->sal_far[at])
                assert_near(name, key, ref_key, D);
            else
                assert_same(name, "salient key", key, ref_key, D);
            if (p->set.value_bits)
                assert_stored(name, "value", p->set.value_bits, D,
                              sti_hybrid_salient_value(&p->set, st, D, at),
                              sti_hybrid_salient_value(&p->set, &p->st, D, ref));
            else
                assert_same(name, "salient value",
                            (uint16_t *)st->sal_v + at * (size_t)D,
                            (double *)p->st.sal_v + ref * (size_t)D, D);
            assert_true(fabs(((float *)st->sal_score)[at] -
                             ((double *)p->st.sal_score)[ref]) <= score_limit(p));
        }
    }
}

static inline void compare_sums(const char *name, const problem *p,
                                const sti_hybrid_state *st)
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
static inline unsigned char *memory_of(const session *x)
{
    unsigned char *copy = malloc(x->memory.bytes);
    assert_non_null(copy);
    move(x->g, copy, x->memory.p, x->memory.bytes);
    return copy;
}

/* A session that has seen all its tokens is where the reference is. */
static inline void compare(const char *name, const session *x)
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
    compare_received(name, p, &st);
    compare_list(name, p, &st);
    compare_sums(name, p, &st);
    free(copy);
}

#endif
