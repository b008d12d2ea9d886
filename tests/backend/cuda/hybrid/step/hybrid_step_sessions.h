/* hybrid_step_sessions.h - sessions of the recurrent form of the hybrid operator on the
 * GPU for its tests: opened together, driven through many tokens, each its own number
 * of them and at its own place in a chunk, and compared with the reference in double:
 * outputs, scores, counts, salient lists, states. Keys and values are representable in
 * half where they are kept in half, so that the bounds can be tight. */
#ifndef TESTS_CUDA_HYBRID_STEP_SESSIONS_H
#define TESTS_CUDA_HYBRID_STEP_SESSIONS_H

#include "../../../hybrid_problem.h"

#include "../../gpu.h"
#include "backend/cuda/hybrid/step/step.h"

enum { SESSIONS = 3 };

static inline int open_step_gpu(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){.threads = 1, .max_k = 64});
}

/* ---- A case -------------------------------------------------------------- */

typedef struct test_case {
    const char *name, *method;
    int chunk;
    sti_hybrid_shape shape;
    int T;
    void (*change)(sti_hybrid_settings *);
    bool interleaved, no_learned;
    double half_limit; /* 0: 1e-4 */
} test_case;

typedef struct learned {
    sti_block alpha, window, map_q, map_k, bias_q, bias_k, inv_freq;
} learned;

typedef struct session {
    problem *p;
    sti_block q, k, v, gate, q_raw, y, state;
    sti_hybrid_state st;
    int past;
} session;

typedef struct run {
    const gpu *g;
    const test_case *c;
    bool unrotated; /* the GPU is given q and k as they were before RoPE */
    problem p[SESSIONS];
    double *k_raw[SESSIONS];
    session x[SESSIONS];
    learned in;
    sti_cuda_hybrid_params h;
    sti_block table, pos, room;
    size_t kv_size;
} run;

/* Sessions of one call share what was learned. */
static inline void share_learned(problem *to, const problem *from)
{
    const size_t H = (size_t)to->shape.H, S = (size_t)to->S;
    const size_t map = (size_t)to->shape.D * (size_t)to->shape.F;
    memcpy(to->alpha, from->alpha, H * sizeof(double));
    memcpy(to->window, from->window, H * sizeof(double));
    memcpy(to->map_q, from->map_q, H * map * sizeof(double));
    memcpy(to->map_k, from->map_k, S * map * sizeof(double));
    memcpy(to->bias_q, from->bias_q, H * sizeof(double));
    memcpy(to->bias_k, from->bias_k, S * sizeof(double));
}

static inline sti_hybrid_in64 reference_inputs(const run *r, const problem *p)
{
    sti_hybrid_in64 in = inputs(p);
    in.interleaved = r->c->interleaved;
    if (r->c->no_learned) {
        in.gate_logit = in.alpha = in.window_logit = NULL;
        in.map_q = in.map_k = in.bias_q = in.bias_k = NULL;
    }
    return in;
}

static inline void run_reference(const run *r, problem *p)
{
    const sti_hybrid_args64 a = {.set = &p->set,
                                 .shape = p->shape,
                                 .T = p->T,
                                 .in = reference_inputs(r, p),
                                 .state = &p->st,
                                 .y = p->y};
    still_error err;
    assert_int_equal(sti_ref_hybrid_forward(&a, &err), STILL_OK);
}

/* Positions for q and k, as rotate() gives them, of either kind of pairs. */
static inline void give_positions(run *r, int i)
{
    problem *p = &r->p[i];
    const int H = p->shape.H, G = p->shape.G, D = p->shape.D;
    const size_t keys = (size_t)(p->T * G * D) * sizeof(double);
    r->k_raw[i] = malloc(keys);
    assert_non_null(r->k_raw[i]);
    memcpy(r->k_raw[i], p->k, keys);
    p->q_raw = malloc((size_t)(p->T * H * D) * sizeof(double));
    p->inv_freq = malloc((size_t)(D / 2) * sizeof(double));
    assert_true(p->q_raw && p->inv_freq);
    memcpy(p->q_raw, p->q, (size_t)(p->T * H * D) * sizeof(double));
    for (int e = 0; e < D / 2; e++)
        p->inv_freq[e] = (double)(float)pow(10000, -2.0 * e / D);
    const sti_hybrid_in64 in = reference_inputs(r, p);
    for (int t = 0; t < p->T; t++) {
        for (int h = 0; h < H; h++)
            sti_ref_rope(p->q + (t * H + h) * D, D, t, in.inv_freq, in.interleaved);
        for (int g = 0; g < G; g++)
            sti_ref_rope(p->k + (t * G + g) * D, D, t, in.inv_freq, in.interleaved);
    }
}

static inline void open_session(run *r, int i)
{
    problem *p = &r->p[i];
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D;
    session *x = &r->x[i];
    const gpu *g = r->g;
    *x = (session){.p = p,
                   .q = upload(g, r->unrotated ? p->q_raw : p->q, T * H * D),
                   .k = upload(g, r->unrotated ? r->k_raw[i] : p->k, T * G * D),
                   .v = upload(g, p->v, T * G * D),
                   .gate = upload(g, r->c->no_learned ? NULL : p->gate, T * H * D),
                   .q_raw = upload(g, r->unrotated ? NULL : p->q_raw, T * H * D),
                   .y = new_block(g, T * H * D * sizeof(float))};
    sti_carve c = {0};
    sti_hybrid_state_carve(&x->st, &c, &p->set, &p->shape, p->T, r->kv_size,
                           sizeof(float));
    x->state = new_block(g, c.used);
    c = (sti_carve){.base = x->state.p};
    sti_hybrid_state_carve(&x->st, &c, &p->set, &p->shape, p->T, r->kv_size,
                           sizeof(float));
}

static inline sti_cuda_hybrid_params shape_of(const run *r)
{
    const problem *p = &r->p[0];
    const sti_hybrid_args args = {.set = &p->set,
                                  .shape = p->shape,
                                  .in = {.alpha = r->in.alpha.p,
                                         .window_logit = r->in.window.p,
                                         .map_q = r->in.map_q.p,
                                         .map_k = r->in.map_k.p,
                                         .bias_q = r->in.bias_q.p,
                                         .bias_k = r->in.bias_k.p,
                                         .interleaved = r->c->interleaved,
                                         .unrotated = r->unrotated},
                                  .state = (sti_hybrid_state *)&r->x[0].st};
    sti_cuda_hybrid_params h =
        sti_cuda_hybrid_params_of(args.set, &args.shape, &args.in, args.state->kv_size);
    h.inv_freq = r->in.inv_freq.p;
    still_error err;
    if (sti_cuda_hybrid_lists(r->g->dev, args.set, &h, &err) != STILL_OK)
        fail_msg("%s", err.text);
    return h;
}

static inline void open_run(run *r, const gpu *g, const test_case *c, size_t kv_size,
                            uint64_t seed, bool unrotated)
{
    *r = (run){.g = g, .c = c, .unrotated = unrotated, .kv_size = kv_size};
    sti_hybrid_settings set = preset(c->method, c->chunk);
    set.seed = seed;
    set.layer = 3;
    if (c->change) c->change(&set);
    for (int i = 0; i < SESSIONS; i++) {
        const int T = i == 2 ? c->T : c->T - c->T / 3 * (i + 1) + i;
        r->p[i] = make(set, c->shape, T < 1 ? 1 : T, seed + 100 * (uint64_t)i);
        if (i > 0) share_learned(&r->p[i], &r->p[0]);
        if (unrotated || sti_hybrid_needs_raw(&set)) give_positions(r, i);
        round_inputs(&r->p[i], kv_size);
        run_reference(r, &r->p[i]);
        open_session(r, i);
    }
    const problem *p = &r->p[0];
    if (!c->no_learned) {
        const size_t H = (size_t)p->shape.H, S = (size_t)p->S;
        const size_t map = (size_t)p->shape.D * (size_t)p->shape.F;
        r->in = (learned){.alpha = upload(g, p->alpha, H),
                          .window = upload(g, p->window, H),
                          .map_q = upload(g, p->map_q, H * map),
                          .map_k = upload(g, p->map_k, S * map),
                          .bias_q = upload(g, p->bias_q, H),
                          .bias_k = upload(g, p->bias_k, S)};
    }
    r->in.inv_freq = upload(g, p->inv_freq, (size_t)p->shape.D / 2);
    r->h = shape_of(r);
    r->table = new_block(g, SESSIONS * sizeof(sti_cuda_hybrid_session));
    r->pos = new_block(g, SESSIONS * sizeof(int32_t));
    const size_t bytes = sti_cuda_hybrid_step_scratch(g->dev, &r->h, SESSIONS);
    r->room = new_block(g, bytes);
    void *garbage = malloc(bytes ? bytes : 1); /* nothing may rely on what is there */
    assert_non_null(garbage);
    memset(garbage, 0xff, bytes);
    move(g, r->room.p, garbage, bytes);
    free(garbage);
}

static inline void close_run(run *r)
{
    sti_block *all[64];
    size_t n = 0;
    for (int i = 0; i < SESSIONS; i++) {
        session *x = &r->x[i];
        sti_block *own[] = {&x->q, &x->k, &x->v, &x->gate, &x->q_raw, &x->y, &x->state};
        for (size_t j = 0; j < sizeof own / sizeof *own; j++) all[n++] = own[j];
        drop(&r->p[i]);
        free(r->k_raw[i]);
    }
    sti_block *rest[] = {&r->in.alpha,  &r->in.window, &r->in.map_q,    &r->in.map_k,
                         &r->in.bias_q, &r->in.bias_k, &r->in.inv_freq, &r->table,
                         &r->pos,       &r->room};
    for (size_t j = 0; j < sizeof rest / sizeof *rest; j++) all[n++] = rest[j];
    for (size_t i = 0; i < n; i++)
        if (all[i]->p) r->g->be->mem_free(r->g->dev, all[i]);
}

/* ---- Driving it ---------------------------------------------------------- */

static inline const float *from_row(const sti_block *b, size_t at)
{
    return b->p ? (const float *)b->p + at : NULL;
}

static inline sti_cuda_hybrid_session describe(const run *r, int i, int T)
{
    const session *x = &r->x[i];
    const problem *p = x->p;
    const size_t past = (size_t)x->past, HD = (size_t)(p->shape.H * p->shape.D);
    const size_t GD = (size_t)(p->shape.G * p->shape.D);
    const sti_hybrid_args args = {.T = T,
                                  .in = {.q = from_row(&x->q, past * HD),
                                         .k = from_row(&x->k, past * GD),
                                         .v = from_row(&x->v, past * GD),
                                         .gate_logit = from_row(&x->gate, past * HD),
                                         .q_raw = from_row(&x->q_raw, past * HD),
                                         .unrotated = r->unrotated},
                                  .state = (sti_hybrid_state *)&x->st,
                                  .y = (float *)x->y.p + past * HD};
    return sti_cuda_hybrid_session_of(&args, (const int32_t *)r->pos.p + i);
}

/* The next few tokens of every session, each its own number of them, maybe none; the
 * last `keep` are not fed. */
static inline bool feed_some(run *r, int call, int keep)
{
    sti_cuda_hybrid_session table[SESSIONS];
    int32_t pos[SESSIONS];
    int longest = 0;
    bool more = false;
    for (int i = 0; i < SESSIONS; i++) {
        session *x = &r->x[i];
        int T = (call + i) % 4;
        const int left = x->p->T - keep - x->past;
        if (T > left) T = left > 0 ? left : 0;
        if (T > longest) longest = T;
        pos[i] = x->past;
        table[i] = describe(r, i, T);
        x->past += T;
        more = more || x->past < x->p->T - keep;
    }
    move(r->g, r->table.p, table, sizeof table);
    move(r->g, r->pos.p, pos, sizeof pos);
    for (int t = 0; t < longest; t++) {
        still_error err;
        bool leaves = false;
        for (int i = 0; i < SESSIONS; i++)
            leaves = leaves || (pos[i] + t) % r->h.C == 0;
        if (leaves && sti_cuda_hybrid_retire(r->g->dev, &r->h, r->table.p, SESSIONS, t,
                                             r->room.p, &err) != STILL_OK)
            fail_msg("%s: %s", r->c->name, err.text);
        if (sti_cuda_hybrid_step(r->g->dev, &r->h, r->table.p, SESSIONS, t,
                                 t == 0 && !leaves, r->room.p, &err) != STILL_OK)
            fail_msg("%s: %s", r->c->name, err.text);
    }
    return more;
}

/* ---- Comparing ----------------------------------------------------------- */

static inline void compare(run *r, int i, const char *what, const void *device,
                           const double *want, size_t n, double limit)
{
    float *got = download(r->g, device, n * sizeof *got);
    double size = 0, worst = 0;
    size_t at = 0;
    for (size_t j = 0; j < n; j++) size = fmax(size, fabs(want[j]));
    for (size_t j = 0; j < n; j++) {
        const double e = isfinite(got[j]) ? fabs((double)got[j] - want[j]) : INFINITY;
        if (e > worst) {
            worst = e;
            at = j;
        }
    }
    if (!(worst <= limit * size))
        fail_msg("%s, keys of %zu bytes, session %d: %s[%zu] is %.9g, expected %.9g "
                 "(largest %g)",
                 r->c->name, r->kv_size, i, what, at, (double)got[at], want[at], size);
    free(got);
}

static inline int by_value(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* The same tokens are salient, in whatever order. */
static inline void compare_lists(run *r, int i)
{
    const session *x = &r->x[i];
    const sti_hybrid_state *want = &x->p->st;
    const size_t S = (size_t)x->p->S;
    const size_t slots = sti_hybrid_list_of(&x->p->set, &x->st, x->p->S).first;
    int32_t *count = download(r->g, x->st.sal_count, S * sizeof *count);
    int64_t *folded = download(r->g, x->st.folded, S * sizeof *folded);
    int32_t *pos =
        slots ? download(r->g, x->st.sal_pos, slots * sizeof *pos) : malloc(1);
    for (size_t s = 0; s < S; s++) {
        if (count[s] != want->sal_count[s] || folded[s] != want->folded[s])
            fail_msg(
                "%s, session %d, head %zu: %d salient and %lld folded, expected %d "
                "and %lld",
                r->c->name, i, s, count[s], (long long)folded[s], want->sal_count[s],
                (long long)want->folded[s]);
        const size_t n = (size_t)count[s];
        if (n == 0) continue;
        const size_t first = sti_hybrid_list_of(&x->p->set, &x->st, (int)s).first;
        int32_t *own = pos + first, *expected = want->sal_pos + first;
        qsort(own, n, sizeof *own, by_value);
        qsort(expected, n, sizeof *expected, by_value);
        for (size_t j = 0; j < n; j++)
            if (own[j] != expected[j])
                fail_msg("%s, session %d, head %zu: token %d is salient, expected %d",
                         r->c->name, i, s, own[j], expected[j]);
    }
    free(count);
    free(folded);
    free(pos);
}

static inline void compare_session(run *r, int i)
{
    const session *x = &r->x[i];
    problem *p = x->p;
    const sti_hybrid_settings *set = &p->set;
    const size_t S = (size_t)p->S, P = (size_t)p->P, D = (size_t)p->shape.D;
    const size_t slots = 2 * (size_t)set->chunk;
    double limit = 1e-5;
    if (r->kv_size == 2) limit = r->c->half_limit > 0 ? r->c->half_limit : 1e-4;
    compare_lists(r, i);
    /* The score is a closed form here and a sum in the reference: terms of size eps
     * are left out, one for each token of a chunk. */
    if (set->has_window && set->select > 0 && (size_t)p->T >= slots)
        compare(r, i, "score", x->st.win_score, p->st.win_score, S * slots, 2e-4);
    if (x->st.win_received && (size_t)p->T >= slots)
        compare(r, i, "received", x->st.win_received, p->st.win_received, S * slots,
                limit);
    compare(r, i, "y", x->y.p, p->y, outputs(p), limit);
    if (!set->has_linear) return;
    compare(r, i, "s", x->st.lin_s, p->st.lin_s, S * P * D, limit);
    compare(r, i, "z", x->st.lin_z, p->st.lin_z, S * P, limit);
}

/* ---- What cases change --------------------------------------------------- */

static inline void small_cap(sti_hybrid_settings *s)
{
    s->cap = s->chunk / 2 + 1;
}
static inline void uneven(sti_hybrid_settings *s)
{
    uint64_t rng = s->seed;
    s->cap = 3 * s->chunk;
    make_uneven(s, &rng);
}
/* One long list among short ones: it is cut into more units. */
static inline void long_list(sti_hybrid_settings *s)
{
    uneven(s);
    s->select = s->chunk;
    s->cap = 20 * s->chunk;
    s->head_cap[0] = 3;
    s->head_cap[1] = s->cap;
    s->head_cap[2] = s->chunk + 1;
}
static inline void quantized_long(sti_hybrid_settings *s)
{
    long_list(s);
    s->key_bits = 5;
    s->value_bits = 3;
}
static inline void per_head(sti_hybrid_settings *s)
{
    s->per_head = true;
    small_cap(s);
}
static inline void received(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_RECEIVED;
    small_cap(s);
}
static inline void random_scores(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_RANDOM;
    small_cap(s);
}
static inline void far_keys(sti_hybrid_settings *s)
{
    s->position_cap = 2 * s->chunk + 3;
    s->cap = 2 * s->chunk;
}
static inline void far_and_raw(sti_hybrid_settings *s)
{
    far_keys(s);
    s->cap = s->chunk / 2;
    s->feature_positions = STI_FEATURES_NONE;
}

#endif
