/* test_hybrid_step.c - the recurrent form of the hybrid operator on the GPU: leave and
 * step, driven through many tokens of several sessions at once, of different lengths
 * and at different places in their chunks, against the reference in double: outputs,
 * scores, counts, salient lists, states. Keys and values are representable in half
 * where they are kept in half, so that the bounds can be tight. */
#include "../backend/hybrid_problem.h"

#include <stdio.h>

#include "backend/cuda/cuda.h"

enum { SESSIONS = 3 };

typedef struct gpu {
    const sti_backend *be;
    sti_dev *dev;
} gpu;

static int open_gpu(void **state)
{
    static gpu g;
    const sti_dev_params p = {.threads = 1, .max_k = 64};
    still_error err;
    g = (gpu){.be = sti_backend_find("cuda")};
    if (!g.be || g.be->dev_new(&p, &g.dev, &err) != STILL_OK) g.dev = NULL;
    *state = &g;
    return 0;
}

static int close_gpu(void **state)
{
    gpu *g = *state;
    if (g->dev) g->be->dev_free(g->dev);
    return 0;
}

/* ---- Memory of the GPU --------------------------------------------------- */

static void move(gpu *g, void *to, const void *from, size_t bytes)
{
    still_error err;
    if (g->be->mem_move(g->dev, to, from, bytes, &err) != STILL_OK)
        fail_msg("%s", err.text);
}

static sti_block new_block(gpu *g, size_t bytes)
{
    sti_block b;
    still_error err;
    if (g->be->mem_new(g->dev, bytes ? bytes : 1, &b, &err) != STILL_OK)
        fail_msg("%s", err.text);
    return b;
}

/* x in float on the GPU; empty if x is NULL. */
static sti_block upload(gpu *g, const double *x, size_t n)
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

static void *download(gpu *g, const void *p, size_t bytes)
{
    void *x = malloc(bytes ? bytes : 1);
    assert_non_null(x);
    move(g, x, p, bytes);
    return x;
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
    gpu *g;
    const test_case *c;
    bool unrotated; /* the GPU is given q and k as they were before RoPE */
    problem p[SESSIONS];
    double *k_raw[SESSIONS];
    session x[SESSIONS];
    learned in;
    sti_cuda_shape h;
    sti_block table, pos, room;
    size_t kv_size;
} run;

static double as_half(double x)
{
    return (double)sti_f16_to_f32(sti_f32_to_f16((float)x));
}

/* The reference sees what the GPU sees. */
static void round_problem(problem *p, size_t kv_size)
{
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, map = D * (size_t)p->shape.F;
    const struct {
        double *x;
        size_t n;
    } all[] = {{p->q, T * H * D},    {p->k, T * G * D},
               {p->v, T * G * D},    {p->gate, T * H * D},
               {p->alpha, H},        {p->window, H},
               {p->map_q, H * map},  {p->map_k, (size_t)p->S * map},
               {p->bias_q, H},       {p->bias_k, (size_t)p->S},
               {p->q_raw, T * H * D}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (size_t j = 0; all[i].x && j < all[i].n; j++)
            all[i].x[j] = (double)(float)all[i].x[j];
    if (kv_size == 2 && p->set.has_window)
        for (size_t j = 0; j < T * G * D; j++) {
            p->k[j] = as_half(p->k[j]);
            p->v[j] = as_half(p->v[j]);
        }
}

/* Sessions of one call share what was learned. */
static void share_learned(problem *to, const problem *from)
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

static sti_hybrid_in64 reference_inputs(const run *r, const problem *p)
{
    sti_hybrid_in64 in = inputs(p);
    in.interleaved = r->c->interleaved;
    if (r->c->no_learned) {
        in.gate_logit = in.alpha = in.window_logit = NULL;
        in.map_q = in.map_k = in.bias_q = in.bias_k = NULL;
    }
    return in;
}

static void run_reference(const run *r, problem *p)
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
static void give_positions(run *r, int i)
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
        for (int h = 0; h < H; h++) sti_ref_turn(p->q + (t * H + h) * D, D, t, &in);
        for (int g = 0; g < G; g++) sti_ref_turn(p->k + (t * G + g) * D, D, t, &in);
    }
}

static void open_session(run *r, int i)
{
    problem *p = &r->p[i];
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D;
    session *x = &r->x[i];
    gpu *g = r->g;
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

static sti_cuda_shape shape_of(const run *r)
{
    const problem *p = &r->p[0];
    const sti_hybrid_settings *set = &p->set;
    return (sti_cuda_shape){.H = p->shape.H,
                            .G = p->shape.G,
                            .D = p->shape.D,
                            .F = p->shape.F,
                            .S = p->S,
                            .P = p->P,
                            .C = set->chunk,
                            .group = p->shape.H / p->S,
                            .per_kv = p->shape.H / p->shape.G,
                            .select = set->select,
                            .cap = set->cap,
                            .score = (int)set->score,
                            .la_scale = (int)set->la_scale,
                            .map = (int)set->map,
                            .per_head = set->per_head,
                            .has_window = set->has_window,
                            .has_linear = set->has_linear,
                            .norm_preserved = set->norm_preserved,
                            .gate = set->gate,
                            .window_factor = set->window_factor,
                            .raw_features = set->feature_positions == STI_FEATURES_NONE,
                            .interleaved = r->c->interleaved,
                            .unrotated = r->unrotated,
                            .half_kv = r->kv_size == 2,
                            .position_cap = set->position_cap,
                            .state_cap = set->state_cap,
                            .feature_floor = (float)set->feature_floor,
                            .den_eps = (float)set->den_eps,
                            .eps = (float)set->eps,
                            .scale = 1 / sqrtf((float)p->shape.D),
                            .seed = set->seed,
                            .layer = set->layer,
                            .alpha = set->alpha ? r->in.alpha.p : NULL,
                            .window_logit = r->in.window.p,
                            .map_q = r->in.map_q.p,
                            .map_k = r->in.map_k.p,
                            .bias_q = r->in.bias_q.p,
                            .bias_k = r->in.bias_k.p,
                            .inv_freq = r->in.inv_freq.p};
}

static void open_run(run *r, gpu *g, const test_case *c, size_t kv_size, uint64_t seed,
                     bool unrotated)
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
        if (unrotated || sti_hybrid_rotates(&set)) give_positions(r, i);
        round_problem(&r->p[i], kv_size);
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
    r->table = new_block(g, SESSIONS * sizeof(sti_cuda_session));
    r->pos = new_block(g, SESSIONS * sizeof(int32_t));
    const size_t bytes = sti_cuda_step_room(g->dev, &r->h, SESSIONS);
    r->room = new_block(g, bytes);
    void *garbage = malloc(bytes ? bytes : 1); /* nothing may rely on what is there */
    assert_non_null(garbage);
    memset(garbage, 0xff, bytes);
    move(g, r->room.p, garbage, bytes);
    free(garbage);
}

static void close_run(run *r)
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

static const float *from_row(const sti_block *b, size_t at)
{
    return b->p ? (const float *)b->p + at : NULL;
}

static sti_cuda_session describe(const run *r, int i, int T)
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
    return sti_cuda_session_of(&args, (const int32_t *)r->pos.p + i);
}

/* The next few tokens of every session, each its own number of them, maybe none; the
 * last `keep` are not fed. */
static bool feed_some(run *r, int call, int keep)
{
    sti_cuda_session table[SESSIONS];
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
        if (leaves && sti_cuda_hybrid_leave(r->g->dev, &r->h, r->table.p, SESSIONS, t,
                                            r->room.p, &err) != STILL_OK)
            fail_msg("%s: %s", r->c->name, err.text);
        if (sti_cuda_hybrid_step(r->g->dev, &r->h, r->table.p, SESSIONS, t,
                                 t == 0 && !leaves, r->room.p, &err) != STILL_OK)
            fail_msg("%s: %s", r->c->name, err.text);
    }
    return more;
}

/* ---- Comparing ----------------------------------------------------------- */

static void compare(run *r, int i, const char *what, const void *device,
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

static int by_value(const void *a, const void *b)
{
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* The same tokens are salient, in whatever order. */
static void compare_lists(run *r, int i)
{
    const session *x = &r->x[i];
    const sti_hybrid_state *want = &x->p->st;
    const size_t S = (size_t)x->p->S, room = (size_t)x->st.room;
    int32_t *count = download(r->g, x->st.sal_count, S * sizeof *count);
    int64_t *folded = download(r->g, x->st.folded, S * sizeof *folded);
    int32_t *pos =
        room ? download(r->g, x->st.sal_pos, S * room * sizeof *pos) : malloc(1);
    for (size_t s = 0; s < S; s++) {
        if (count[s] != want->sal_count[s] || folded[s] != want->folded[s])
            fail_msg(
                "%s, session %d, head %zu: %d salient and %lld folded, expected %d "
                "and %lld",
                r->c->name, i, s, count[s], (long long)folded[s], want->sal_count[s],
                (long long)want->folded[s]);
        const size_t n = (size_t)count[s];
        if (n == 0) continue;
        qsort(pos + s * room, n, sizeof *pos, by_value);
        qsort(want->sal_pos + s * room, n, sizeof *pos, by_value);
        for (size_t j = 0; j < n; j++)
            if (pos[s * room + j] != want->sal_pos[s * room + j])
                fail_msg("%s, session %d, head %zu: token %d is salient, expected %d",
                         r->c->name, i, s, pos[s * room + j],
                         want->sal_pos[s * room + j]);
    }
    free(count);
    free(folded);
    free(pos);
}

static void compare_session(run *r, int i)
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

static void check(gpu *g, const test_case *c, uint64_t seed, bool unrotated)
{
    for (size_t kv_size = 2; kv_size <= 4; kv_size += 2) {
        static run r;
        open_run(&r, g, c, kv_size, seed, unrotated);
        assert_true(!unrotated || sti_cuda_step_turns(&r.h));
        for (int call = 1; feed_some(&r, call, 0);) call++;
        for (int i = 0; i < SESSIONS; i++) compare_session(&r, i);
        close_run(&r);
    }
}

/* ---- Cases --------------------------------------------------------------- */

static void small_cap(sti_hybrid_settings *s)
{
    s->cap = s->chunk / 2 + 1;
}
static void no_cap(sti_hybrid_settings *s)
{
    s->cap = STI_CAP_NONE;
}
static void per_head(sti_hybrid_settings *s)
{
    s->per_head = true;
    small_cap(s);
}
static void received(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_RECEIVED;
    small_cap(s);
}
static void received_per_head(sti_hybrid_settings *s)
{
    received(s);
    s->per_head = true;
}
static void keynorm(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_KEYNORM;
    small_cap(s);
}
static void distinct(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_DISTINCT;
    small_cap(s);
}
static void random_scores(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_RANDOM;
    small_cap(s);
}
static void window_scale(sti_hybrid_settings *s)
{
    s->la_scale = STI_SCALE_WINDOW;
    s->window_factor = true;
    small_cap(s);
}
static void relu(sti_hybrid_settings *s)
{
    s->map = STI_MAP_RELU;
    s->den_eps = 1e-6;
    small_cap(s);
}
static void plain_map(sti_hybrid_settings *s)
{
    s->norm_preserved = s->gate = s->alpha = false;
    s->feature_floor = 0.02; /* high enough to be felt */
}
static void select_all(sti_hybrid_settings *s)
{
    s->select = s->chunk;
    s->cap = s->chunk + 3;
}
static void no_list(sti_hybrid_settings *s)
{
    s->cap = 0;
}
static void far_keys(sti_hybrid_settings *s)
{
    s->position_cap = 2 * s->chunk + 3;
    s->cap = 2 * s->chunk;
}
static void far_and_raw(sti_hybrid_settings *s)
{
    far_keys(s);
    s->cap = s->chunk / 2;
    s->feature_positions = STI_FEATURES_NONE;
}
static void raw_features(sti_hybrid_settings *s)
{
    s->feature_positions = STI_FEATURES_NONE;
    if (s->has_window) small_cap(s);
}
static void state_cap(sti_hybrid_settings *s)
{
    s->state_cap = 10;
    small_cap(s);
}

/* Every setting, at shapes that no vector fits and at those that vectors are for. */
static const test_case cases[] = {
    {"still", "still", 8, {4, 2, 16, 16}, 75, NULL, false, false, 0},
    {"small cap", "still", 8, {6, 2, 32, 32}, 75, small_cap, false, false, 0},
    {"odd sizes", "still", 5, {3, 1, 13, 13}, 61, small_cap, false, false, 0},
    {"few features", "still", 6, {4, 2, 24, 10}, 61, small_cap, false, false, 0},
    {"odd features", "still", 6, {2, 2, 40, 33}, 61, small_cap, false, false, 0},
    {"narrow maps", "still", 6, {4, 2, 48, 24}, 61, small_cap, false, false, 0},
    {"maps of 4", "still", 6, {4, 2, 64, 4}, 61, small_cap, false, false, 0},
    {"one token chunks", "still", 1, {2, 1, 8, 8}, 20, select_all, false, false, 0},
    {"start values", "still", 8, {4, 2, 16, 16}, 60, small_cap, false, true, 0},
    {"no cap", "still", 8, {4, 2, 64, 64}, 75, no_cap, false, false, 0},
    {"per head", "still", 8, {4, 2, 32, 32}, 75, per_head, false, false, 0},
    {"group of 7", "still", 8, {7, 1, 16, 16}, 50, small_cap, false, false, 0},
    {"group of 6", "still", 8, {6, 1, 112, 56}, 40, small_cap, false, false, 0},
    {"group of 8", "still", 8, {16, 2, 64, 64}, 50, small_cap, false, false, 0},
    {"received", "still", 8, {6, 2, 32, 32}, 75, received, false, false, 0},
    {"received, per head",
     "still",
     7,
     {6, 2, 20, 20},
     75,
     received_per_head,
     false,
     false,
     0},
    {"keynorm", "still", 8, {4, 2, 16, 16}, 60, keynorm, false, false, 0},
    {"random", "still", 8, {4, 2, 16, 16}, 60, random_scores, false, false, 0},
    {"distinct", "still", 8, {4, 2, 64, 64}, 75, distinct, false, false, 0},
    {"distinct, odd", "still", 7, {6, 2, 20, 20}, 75, distinct, false, false, 0},
    {"window scale", "still", 8, {4, 2, 16, 16}, 60, window_scale, false, false, 0},
    {"window scale, start",
     "still",
     8,
     {4, 2, 16, 16},
     60,
     window_scale,
     false,
     true,
     0},
    {"relu", "still", 8, {4, 2, 16, 16}, 60, relu, false, false, 0},
    {"plain map", "still", 8, {4, 2, 16, 16}, 60, plain_map, false, false, 0},
    {"select all", "still", 8, {4, 2, 16, 16}, 75, select_all, false, false, 0},
    {"no list", "still", 8, {4, 2, 16, 16}, 60, no_list, false, false, 0},
    {"state cap", "still", 8, {4, 2, 16, 16}, 75, state_cap, false, false, 0},
    /* A far key that is kept in half is rounded once more when it turns. */
    {"far keys", "still", 8, {4, 2, 16, 16}, 90, far_keys, false, false, 2e-3},
    {"far keys, pairs", "still", 8, {4, 2, 10, 10}, 90, far_keys, true, false, 2e-3},
    {"far and raw", "still", 8, {4, 2, 32, 32}, 90, far_and_raw, false, false, 2e-3},
    {"raw features", "still", 8, {4, 2, 16, 16}, 60, raw_features, true, false, 0},
    {"lolcats", "lolcats", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"hedgehog", "hedgehog", 8, {4, 2, 16, 16}, 40, NULL, false, false, 0},
    {"hedgehog of 96", "hedgehog", 8, {8, 1, 96, 32}, 30, NULL, false, false, 0},
    {"hedgehog, raw", "hedgehog", 8, {4, 2, 16, 16}, 40, raw_features, false, false, 0},
    {"t2r", "t2r", 8, {6, 2, 18, 18}, 40, NULL, false, false, 0},
    {"swa", "swa", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"softmax", "softmax", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"heads of 80", "still", 16, {4, 2, 80, 80}, 80, small_cap, false, false, 0},
    {"heads of 128", "still", 16, {8, 2, 128, 128}, 80, small_cap, false, false, 0},
    {"heads of 256", "still", 8, {4, 2, 256, 256}, 40, small_cap, false, false, 0},
};

static void test_settings(void **state)
{
    gpu *g = *state;
    if (!g->dev) skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(g, &cases[i], 11 + i, false);
}

/* Rows that come before RoPE. A key that is rounded after a turn in float may be
 * rounded to the next half. */
static void test_unrotated(void **state)
{
    static const test_case turned[] = {
        {"turned", "still", 8, {6, 2, 64, 64}, 75, NULL, false, false, 2e-3},
        {"turned pairs", "still", 8, {6, 2, 64, 64}, 75, small_cap, true, false, 2e-3},
        {"turned, 32", "still", 8, {4, 2, 32, 32}, 75, NULL, false, false, 2e-3},
        {"turned, 80", "still", 8, {4, 2, 80, 80}, 60, NULL, false, false, 2e-3},
        {"turned, 128", "still", 8, {8, 2, 128, 128}, 60, NULL, false, false, 2e-3},
        {"turned, 10", "still", 8, {4, 2, 10, 10}, 60, NULL, true, false, 2e-3},
        {"turned, 136", "still", 8, {4, 2, 136, 136}, 40, NULL, false, false, 2e-3},
        {"turned, 256", "still", 8, {4, 2, 256, 64}, 40, NULL, false, false, 2e-3},
        {"turned, of 7", "still", 8, {7, 1, 48, 48}, 50, NULL, false, false, 2e-3},
        {"turned, head", "still", 8, {4, 2, 32, 32}, 75, per_head, false, false, 2e-3},
        {"turned, received",
         "still",
         8,
         {4, 2, 32, 32},
         75,
         received,
         false,
         false,
         2e-3},
        {"turned, far", "still", 8, {6, 2, 64, 64}, 90, far_keys, false, false, 2e-3},
        {"turned, far, raw",
         "still",
         8,
         {6, 1, 32, 32},
         90,
         far_and_raw,
         true,
         false,
         2e-3},
        {"turned, raw",
         "still",
         8,
         {4, 2, 64, 64},
         60,
         raw_features,
         false,
         false,
         2e-3},
        {"turned, lolcats", "lolcats", 8, {4, 2, 64, 64}, 60, NULL, false, false, 2e-3},
        {"turned, swa", "swa", 8, {4, 2, 64, 64}, 60, NULL, false, false, 2e-3}};
    gpu *g = *state;
    if (!g->dev) skip();
    for (size_t i = 0; i < sizeof turned / sizeof *turned; i++)
        check(g, &turned[i], 71 + i, true);
}

/* Which calls of the entry may be unrotated. */
static void test_turns(void **state)
{
    gpu *g = *state;
    if (!g->dev) skip();
    static const struct {
        const char *method;
        void (*change)(sti_hybrid_settings *);
        int D, T;
        bool turns;
    } calls[] = {{"still", NULL, 64, 1, true},     {"still", NULL, 64, 4, true},
                 {"still", NULL, 64, 5, false},    {"still", far_and_raw, 64, 1, true},
                 {"still", keynorm, 64, 1, false}, {"still", NULL, 13, 1, false},
                 {"hedgehog", NULL, 64, 1, false}, {"lolcats", NULL, 128, 1, true}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        sti_hybrid_settings set = preset(calls[i].method, 64);
        if (calls[i].change) calls[i].change(&set);
        sti_hybrid_state st = {.kv_size = 2};
        const sti_hybrid_args one = {
            .set = &set, .shape = {4, 2, calls[i].D, calls[i].D}, .T = 1, .state = &st};
        sti_hybrid_args a[2] = {one, one};
        a[1].T = calls[i].T;
        if (sti_cuda_hybrid_turns(a, 2) != calls[i].turns)
            fail_msg("%s, call %zu: expected %d", calls[i].method, i, calls[i].turns);
    }
}

/* Sizes of real models: lists that fill up, thousands of keys. */
static void test_real_sizes(void **state)
{
    static const test_case real[] = {
        {"SmolLM2", "still", 128, {9, 3, 64, 64}, 1100, NULL, false, false, 2e-3},
        {"8B", "still", 128, {8, 2, 128, 128}, 700, NULL, false, false, 2e-3},
        {"large chunks", "still", 600, {2, 1, 32, 32}, 1900, NULL, false, false, 0}};
    gpu *g = *state;
    if (!g->dev) skip();
    for (size_t i = 0; i < sizeof real / sizeof *real; i++)
        check(g, &real[i], 5 + i, i < 2);
}

/* The order in which blocks arrive changes nothing. */
static void test_repeatable(void **state)
{
    static const test_case c = {"repeated", "still", 16, {8, 2, 64, 64}, 150, small_cap,
                                false,      false,   0};
    gpu *g = *state;
    if (!g->dev) skip();
    float *first = NULL;
    for (int i = 0; i < 3; i++) {
        static run r;
        open_run(&r, g, &c, 2, 99, false);
        for (int call = 1; feed_some(&r, call, 0);) call++;
        const size_t n = outputs(&r.p[2]);
        float *y = download(g, r.x[2].y.p, n * sizeof *y);
        if (first) assert_memory_equal(first, y, n * sizeof *y);
        if (!first)
            first = y;
        else
            free(y);
        close_run(&r);
    }
    free(first);
}

/* Whatever the scores are, and if a chunk leaves twice, so that the list has its tokens
 * already: no list is longer than its room, and what it names is there. */
static void test_leaves_again(void **state)
{
    static const test_case c = {
        "leaves again", "still", 8, {4, 2, 16, 16}, 75, small_cap, false, false, 0};
    static run r;
    gpu *g = *state;
    if (!g->dev) skip();
    for (int kind = 0; kind < 3; kind++) {
        sti_cuda_session table[SESSIONS];
        const int32_t pos[SESSIONS] = {64, 64, 64};
        open_run(&r, g, &c, 2, 7, false);
        for (int call = 1; feed_some(&r, call, 0);) call++;
        const size_t S = (size_t)r.h.S, slots = S * 2 * (size_t)r.h.C;
        float score[64];
        assert_true(slots <= sizeof score / sizeof *score);
        for (size_t j = 0; j < slots; j++) score[j] = kind == 1 ? 0.5f : -NAN;
        for (int i = 0; i < SESSIONS; i++) {
            table[i] = describe(&r, i, 1);
            if (kind > 0) move(g, r.x[i].st.win_score, score, slots * sizeof *score);
        }
        move(g, r.table.p, table, sizeof table);
        move(g, r.pos.p, pos, sizeof pos);
        for (int again = 0; again < 6; again++) {
            still_error err;
            assert_int_equal(sti_cuda_hybrid_leave(g->dev, &r.h, r.table.p, SESSIONS, 0,
                                                   r.room.p, &err),
                             STILL_OK);
        }
        for (int i = 0; i < SESSIONS; i++) {
            const sti_hybrid_state *st = &r.x[i].st;
            const size_t room = (size_t)st->room;
            int32_t *count = download(g, st->sal_count, S * sizeof *count);
            int32_t *at = download(g, st->sal_pos, S * room * sizeof *at);
            for (size_t s = 0; s < S; s++) {
                assert_int_equal(count[s], st->room);
                for (size_t j = 0; j < room; j++)
                    assert_in_range(at[s * room + j], 0, c.T - 1);
            }
            free(count);
            free(at);
        }
        close_run(&r);
    }
}

/* ---- Batches ------------------------------------------------------------- */

/* n sessions that are copies of those of the run, before their last token, take it
 * together: as many units as there are for so many. */
static void check_batch(run *r, int n)
{
    gpu *g = r->g;
    const size_t row = (size_t)(r->h.H * r->h.D), S = (size_t)r->h.S;
    sti_cuda_session *table = calloc((size_t)n, sizeof *table);
    sti_hybrid_state *st = calloc((size_t)n, sizeof *st);
    sti_block *state = calloc((size_t)n, sizeof *state);
    int32_t *pos = calloc((size_t)n, sizeof *pos);
    assert_true(table && st && state && pos);
    sti_block y = new_block(g, (size_t)n * row * sizeof(float));
    sti_block room = new_block(g, sti_cuda_step_room(g->dev, &r->h, n));
    sti_block on_table = new_block(g, (size_t)n * sizeof *table);
    sti_block on_pos = new_block(g, (size_t)n * sizeof *pos);
    for (int i = 0; i < n; i++) {
        const session *x = &r->x[i % SESSIONS];
        const problem *p = x->p;
        sti_carve c = {0};
        sti_hybrid_state_carve(&st[i], &c, &p->set, &p->shape, p->T, r->kv_size,
                               sizeof(float));
        state[i] = new_block(g, c.used);
        move(g, state[i].p, x->state.p, c.used);
        c = (sti_carve){.base = state[i].p};
        sti_hybrid_state_carve(&st[i], &c, &p->set, &p->shape, p->T, r->kv_size,
                               sizeof(float));
        pos[i] = x->past;
        table[i] = describe(r, i % SESSIONS, 1);
        const sti_hybrid_args args = {.T = 1,
                                      .in = {.q = table[i].q,
                                             .k = table[i].k,
                                             .v = table[i].v,
                                             .gate_logit = table[i].gate,
                                             .q_raw = table[i].q_raw},
                                      .state = &st[i],
                                      .y = (float *)y.p + (size_t)i * row};
        table[i] = sti_cuda_session_of(&args, (const int32_t *)on_pos.p + i);
    }
    move(g, on_table.p, table, (size_t)n * sizeof *table);
    move(g, on_pos.p, pos, (size_t)n * sizeof *pos);
    still_error err;
    if (sti_cuda_hybrid_leave(g->dev, &r->h, on_table.p, n, 0, room.p, &err) !=
            STILL_OK ||
        sti_cuda_hybrid_step(g->dev, &r->h, on_table.p, n, 0, false, room.p, &err) !=
            STILL_OK)
        fail_msg("%s: %s", r->c->name, err.text);
    for (int i = 0; i < n; i++) {
        const problem *p = r->x[i % SESSIONS].p;
        int64_t *folded = download(g, st[i].folded, S * sizeof *folded);
        for (size_t s = 0; s < S; s++) assert_int_equal(folded[s], p->st.folded[s]);
        free(folded);
        compare(r, i, "y of a batch", (float *)y.p + (size_t)i * row,
                p->y + (size_t)(p->T - 1) * row, row, r->kv_size == 2 ? 1e-4 : 1e-5);
        g->be->mem_free(g->dev, &state[i]);
    }
    g->be->mem_free(g->dev, &y);
    g->be->mem_free(g->dev, &room);
    g->be->mem_free(g->dev, &on_table);
    g->be->mem_free(g->dev, &on_pos);
    free(table);
    free(st);
    free(state);
    free(pos);
}

/* One session is cut into many units, hundreds into two: the same outputs. Sessions are
 * in their first chunk, in the middle of one, and at its first token. */
static void test_batches(void **state)
{
    static const test_case batches[] = {
        {"SmolLM2, batch", "still", 16, {9, 3, 64, 64}, 97, NULL, false, false, 0},
        {"8B, batch", "still", 32, {8, 2, 128, 128}, 200, NULL, false, false, 0},
        {"per head, batch", "still", 16, {4, 2, 64, 64}, 36, per_head, false, false, 0},
        {"lolcats, batch", "lolcats", 16, {4, 2, 64, 64}, 65, NULL, false, false, 0},
        {"hedgehog, batch", "hedgehog", 16, {4, 2, 64, 64}, 30, NULL, false, false, 0},
        {"swa, batch", "swa", 128, {4, 2, 64, 64}, 300, NULL, false, false, 0}};
    static const int sizes[] = {1, 2, 12, 256};
    gpu *g = *state;
    if (!g->dev) skip();
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
        for (size_t kv_size = 2; kv_size <= 4; kv_size += 2) {
            static run r;
            open_run(&r, g, &batches[i], kv_size, 31 + i, false);
            for (int call = 1; feed_some(&r, call, 1);) call++;
            for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
                check_batch(&r, sizes[j]);
            close_run(&r);
        }
}

/* ---- Passes -------------------------------------------------------------- */

/* Rows of a pass, which lie in the same place every time. */
typedef struct pass_rows {
    sti_block q, k, v, gate, raw, y;
    float inv_freq[64];
} pass_rows;

static void move_row(gpu *g, const sti_block *to, size_t m, const sti_block *from,
                     size_t t, size_t row)
{
    move(g, (float *)to->p + m * row, (const float *)from->p + t * row,
         row * sizeof(float));
}

/* The next token of every session that has one. rope: a kernel in front turns the rows,
 * where the step would see at once that it has not waited for it. */
static bool feed_pass(run *r, const pass_rows *b, bool rope)
{
    gpu *g = r->g;
    const size_t HD = (size_t)(r->h.H * r->h.D), GD = (size_t)(r->h.G * r->h.D);
    const int32_t tok[SESSIONS] = {0};
    int32_t pos[SESSIONS];
    sti_hybrid_args a[SESSIONS];
    session *who[SESSIONS];
    uint64_t key[2] = {0, r->p[0].set.seed}; /* who takes part, in which run */
    int M = 0;
    for (int i = 0; i < SESSIONS; i++) {
        session *x = &r->x[i];
        if (x->past >= x->p->T) continue;
        const size_t m = (size_t)M, t = (size_t)x->past;
        move_row(g, &b->q, m, &x->q, t, HD);
        move_row(g, &b->k, m, &x->k, t, GD);
        move_row(g, &b->v, m, &x->v, t, GD);
        move_row(g, &b->gate, m, &x->gate, t, HD);
        move_row(g, &b->raw, m, &x->q, t, HD);
        a[M] = (sti_hybrid_args){.set = &x->p->set,
                                 .shape = x->p->shape,
                                 .T = 1,
                                 .in = {.q = (float *)b->q.p + m * HD,
                                        .k = (float *)b->k.p + m * GD,
                                        .v = (float *)b->v.p + m * GD,
                                        .gate_logit = (float *)b->gate.p + m * HD,
                                        .alpha = r->in.alpha.p,
                                        .window_logit = r->in.window.p,
                                        .map_q = r->in.map_q.p,
                                        .map_k = r->in.map_k.p,
                                        .bias_q = r->in.bias_q.p,
                                        .bias_k = r->in.bias_k.p,
                                        .inv_freq = b->inv_freq,
                                        .interleaved = r->c->interleaved,
                                        .q_raw = (float *)b->raw.p + m * HD,
                                        .unrotated = !rope},
                                 .state = &x->st,
                                 .y = (float *)b->y.p + m * HD};
        x->st.pos = x->past;
        pos[M] = x->past;
        key[0] |= (uint64_t)1 << i;
        who[M++] = x;
    }
    if (M == 0) return false;
    const sti_pass pass = {.tok = tok,
                           .pos = pos,
                           .M = M,
                           .key = key,
                           .n_key = 2,
                           .one_each = true,
                           .chunk = r->h.C};
    const sti_rope_args turn = {.x = b->q.p,
                                .also = b->k.p,
                                .pos = pos,
                                .inv_freq = b->inv_freq,
                                .M = M,
                                .heads = r->h.H,
                                .also_heads = r->h.G,
                                .D = r->h.D,
                                .interleaved = r->c->interleaved};
    bool done;
    still_error err;
    assert_true(g->be->hybrid_turns(a, M));
    if (g->be->pass_begin(g->dev, &pass, &done, &err) != STILL_OK ||
        (!done && rope && g->be->rope(g->dev, &turn, &err) != STILL_OK) ||
        (!done && g->be->hybrid(g->dev, a, M, &err) != STILL_OK) ||
        g->be->pass_end(g->dev, &err) != STILL_OK)
        fail_msg("%s: %s", r->c->name, err.text);
    for (int m = 0; m < M; m++)
        move_row(g, &who[m]->y, (size_t)who[m]->past++, &b->y, (size_t)m, HD);
    return true;
}

static void check_passes(gpu *g, const test_case *c, uint64_t seed, bool rope)
{
    static run r;
    open_run(&r, g, c, 2, seed, true);
    const size_t HD = SESSIONS * (size_t)(r.h.H * r.h.D) * sizeof(float);
    const size_t GD = SESSIONS * (size_t)(r.h.G * r.h.D) * sizeof(float);
    pass_rows b = {.q = new_block(g, HD),
                   .k = new_block(g, GD),
                   .v = new_block(g, GD),
                   .gate = new_block(g, HD),
                   .raw = new_block(g, HD),
                   .y = new_block(g, HD)};
    for (int i = 0; i < r.h.D / 2; i++) b.inv_freq[i] = (float)r.p[0].inv_freq[i];
    while (feed_pass(&r, &b, rope)) {}
    for (int i = 0; i < SESSIONS; i++) compare_session(&r, i);
    sti_block *all[] = {&b.q, &b.k, &b.v, &b.gate, &b.raw, &b.y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        g->be->mem_free(g->dev, all[i]);
    close_run(&r);
}

/* Through the entry, in passes that are recorded and replayed, some with a chunk that
 * leaves; sessions end one after the other. */
static void test_passes(void **state)
{
    static const test_case c[] = {
        {"passes", "still", 16, {6, 2, 64, 64}, 100, small_cap, false, false, 2e-3},
        {"passes, far",
         "still",
         8,
         {4, 2, 128, 128},
         90,
         far_and_raw,
         true,
         false,
         2e-3},
        {"passes, lolcats",
         "lolcats",
         16,
         {4, 2, 64, 64},
         70,
         NULL,
         false,
         false,
         2e-3},
        {"passes, SmolLM2",
         "still",
         128,
         {9, 3, 64, 64},
         290,
         NULL,
         false,
         false,
         2e-3},
        {"passes, swa", "swa", 64, {4, 2, 64, 64}, 150, NULL, false, false, 2e-3},
        {"passes, narrow",
         "still",
         16,
         {6, 2, 40, 24},
         60,
         random_scores,
         false,
         false,
         2e-3},
        {"passes, per head",
         "still",
         16,
         {4, 2, 128, 128},
         50,
         per_head,
         false,
         false,
         2e-3},
        {"passes, wide group",
         "still",
         16,
         {12, 2, 64, 64},
         60,
         NULL,
         false,
         false,
         2e-3},
        {"passes, received",
         "still",
         16,
         {6, 2, 64, 64},
         60,
         received,
         false,
         false,
         2e-3}};
    gpu *g = *state;
    if (!g->dev) skip();
    for (size_t n = 0; n < sizeof c / sizeof *c; n++)
        for (int rope = 0; rope < 2; rope++)
            check_passes(g, &c[n], 17 + 2 * n + (size_t)rope, rope != 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_settings),   cmocka_unit_test(test_unrotated),
        cmocka_unit_test(test_turns),      cmocka_unit_test(test_real_sizes),
        cmocka_unit_test(test_repeatable), cmocka_unit_test(test_leaves_again),
        cmocka_unit_test(test_batches),    cmocka_unit_test(test_passes)};
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
