/* hybrid_batch.h - batches of whole sequences for tests of the hybrid operator in
 * training: inputs that float holds exactly, what the reference makes of them in
 * double, and room for what a backend makes of them in float. */
#ifndef TESTS_HYBRID_BATCH_H
#define TESTS_HYBRID_BATCH_H

#include "hybrid_problem.h"

#include "ops/ops.h"

enum { Q, K, V, GATE, ALPHA, WINDOW, MAP_Q, MAP_K, BIAS_Q, BIAS_K, FIELDS };
static const char *const field_name[FIELDS] = {
    "q", "k", "v", "gate", "alpha", "window", "map_q", "map_k", "bias_q", "bias_k"};

typedef struct batch {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int B, T, S;
    size_t n[FIELDS], routes;          /* routes: [B,T,S] */
    double *in[FIELDS], *grad[FIELDS]; /* an input may be NULL: its start value */
    float *in_f[FIELDS], *grad_f[FIELDS];
    double *y, *dy, *score, *max;
    float *y_f, *dy_f, *score_f, *max_f;
    int32_t *fold, *fold_f, *salient, *salient_f;
    double loss, loss_f; /* where weights are matched */
} batch;

static inline void *zeros(size_t n, size_t size)
{
    void *x = calloc(n ? n : 1, size);
    assert_non_null(x);
    return x;
}

/* x in float, to which x is rounded too, so that both backends see the same numbers. */
static inline float *rounded(double *x, size_t n)
{
    float *y = zeros(n, sizeof *y);
    for (size_t i = 0; i < n; i++) x[i] = y[i] = (float)x[i];
    return y;
}

/* New numbers for an input; gain: of queries and keys. */
static inline void draw(batch *x, int field, double gain, uint64_t *rng)
{
    const double w = 1 / sqrt((double)x->shape.D);
    const double size[FIELDS] = {gain, gain, 1, 1, 0.5, 1, w, w, 0.3, 0.3};
    free(x->in[field]);
    free(x->in_f[field]);
    x->in[field] = normals(rng, x->n[field], size[field]);
    x->in_f[field] = rounded(x->in[field], x->n[field]);
}

static inline batch make_batch(sti_hybrid_settings set, sti_hybrid_shape shape, int B,
                               int T, double gain, uint64_t seed)
{
    batch x = {.set = set, .shape = shape, .B = B, .T = T};
    x.S = sti_hybrid_selection_heads(&set, &shape);
    const size_t rows = (size_t)B * (size_t)T, H = (size_t)shape.H, S = (size_t)x.S;
    const size_t D = (size_t)shape.D, map = D * (size_t)shape.F;
    const size_t kv = rows * (size_t)shape.G * D;
    const size_t n[FIELDS] = {rows * H * D, kv, kv, rows * H * D, H, H, H * map,
                              S * map,      H,  S};
    uint64_t rng = seed;
    for (int f = 0; f < FIELDS; f++) {
        x.n[f] = n[f];
        draw(&x, f, gain, &rng);
        x.grad[f] = zeros(n[f], sizeof(double));
        x.grad_f[f] = zeros(n[f], sizeof(float));
    }
    x.routes = rows * S;
    x.dy = normals(&rng, n[Q], 1);
    x.dy_f = rounded(x.dy, n[Q]);
    x.y = zeros(n[Q], sizeof(double));
    x.y_f = zeros(n[Q], sizeof(float));
    x.max = zeros(rows * H, sizeof(double));
    x.max_f = zeros(rows * H, sizeof(float));
    x.score = zeros(x.routes, sizeof(double));
    x.score_f = zeros(x.routes, sizeof(float));
    int32_t **route[] = {&x.fold, &x.fold_f, &x.salient, &x.salient_f};
    for (int i = 0; i < 4; i++) *route[i] = zeros(x.routes, sizeof(int32_t));
    return x;
}

static inline void drop_batch(batch *x)
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

static inline sti_hybrid_parallel_args64 args64(const batch *x)
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

static inline sti_hybrid_parallel_args args32(const batch *x)
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

static inline void run_ref(batch *x)
{
    const sti_hybrid_parallel_args64 a = args64(x);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad[f], 0, x->n[f] * sizeof(double));
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
}

/* ---- What must hold ------------------------------------------------------ */

/* What a setting does not read has no gradient worth the name. */
static inline bool is_read(const sti_hybrid_settings *s, int field)
{
    if (field == GATE) return s->gate;
    if (field == ALPHA) return s->alpha;
    return (field != BIAS_Q && field != BIAS_K) || s->map == STI_MAP_RELU;
}

static inline void expect_error(const char *what, const batch *x, double error,
                                double limit)
{
    if (!(error <= limit))
        fail_msg("%s: error %.2g over %.2g (B %d T %d H %d G %d D %d F %d, chunk %d "
                 "select %d cap %d, per head %d window %d linear %d map %d norm %d)",
                 what, error, limit, x->B, x->T, x->shape.H, x->shape.G, x->shape.D,
                 x->shape.F, x->set.chunk, x->set.select, x->set.cap, x->set.per_head,
                 x->set.has_window, x->set.has_linear, x->set.map,
                 x->set.norm_preserved);
}

/* A token may be routed otherwise only if another one with the same score, up to
 * rounding, was. */
static inline void expect_routes(const batch *x, const int32_t *got)
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

/* ---- Cases --------------------------------------------------------------- */

typedef struct shape_case {
    const char *method;
    int C, select, cap, T, H, G, D, F;
    bool per_head;
} shape_case;

static inline sti_hybrid_settings settings_of(const shape_case *c)
{
    sti_hybrid_settings s = preset(c->method, c->C);
    s.select = c->select;
    s.cap = c->cap;
    s.per_head = c->per_head;
    return s;
}

static inline sti_hybrid_shape shape_of(const shape_case *c)
{
    return (sti_hybrid_shape){c->H, c->G, c->D, c->F};
}

/* Methods at the shapes of real models, T no multiple of anything. */
static const shape_case real_shapes[] = {
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
enum { N_REAL_SHAPES = sizeof real_shapes / sizeof *real_shapes };

static const sti_hybrid_shape small_shape = {2, 1, 16, 16};

/* Lengths at the edges of chunks of 8: nothing has left, something just has. */
static const int edge_length[] = {1, 7, 8, 9, 15, 16, 17, 24, 25};
enum { N_EDGES = sizeof edge_length / sizeof *edge_length };

static inline batch edge_batch(int i)
{
    return make_batch(preset("still", 8), small_shape, 2, edge_length[i], 1,
                      (uint64_t)i);
}

/* Keys and queries of norm 0: no division by it, no gradient through |x|. */
static inline batch batch_of_zeros(void)
{
    batch x = make_batch(preset("still", 4), small_shape, 1, 40, 1, 5);
    for (size_t i = 0; i < x.n[K] / 2; i++) x.in[K][i] = x.in_f[K][i] = 0;
    for (size_t i = 0; i < x.n[Q]; i += 3) x.in[Q][i] = x.in_f[Q][i] = 0;
    for (size_t i = 64; i < 128; i++) x.in[Q][i] = x.in_f[Q][i] = 0;
    return x;
}

#endif
