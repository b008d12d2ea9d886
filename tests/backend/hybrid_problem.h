/* hybrid_problem.h - random problems of the hybrid operator for its tests: a sequence
 * of any method with any settings, and both forms run on it. */
#ifndef TESTS_HYBRID_PROBLEM_H
#define TESTS_HYBRID_PROBLEM_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/ref/hybrid/hybrid.h"
#include "file/dtype.h"

/* ---- Random problems ----------------------------------------------------- */

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline double uniform(uint64_t *rng) /* [0, 1) */
{
    return (double)(next_random(rng) >> 11) / (double)(1ull << 53);
}

static inline int below(uint64_t *rng, int n)
{
    return (int)(next_random(rng) % (unsigned)n);
}

static inline double normal(uint64_t *rng)
{
    double radius = sqrt(-2 * log(1 - uniform(rng)));
    return radius * cos(6.283185307179586 * uniform(rng));
}

static inline double *normals(uint64_t *rng, size_t n, double scale)
{
    double *x = calloc(n ? n : 1, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = scale * normal(rng);
    return x;
}

/* A sequence with all its inputs; what comes out of it, in either form. */
typedef struct problem {
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int T, S, P;
    double *q, *k, *v, *gate, *alpha, *window, *map_q, *map_k, *bias_q, *bias_k;
    double *q_raw, *inv_freq; /* NULL unless rotate() made them */
    double *y, *y_parallel, *score, *score_parallel, *max;
    int32_t *fold, *fold_parallel, *salient, *salient_parallel;
    sti_hybrid_state st;
    sti_block block;
} problem;

static inline sti_hybrid_in64 inputs(const problem *p)
{
    return (sti_hybrid_in64){.q = p->q,
                             .k = p->k,
                             .v = p->v,
                             .gate_logit = p->gate,
                             .alpha = p->alpha,
                             .window_logit = p->window,
                             .map_q = p->map_q,
                             .map_k = p->map_k,
                             .bias_q = p->bias_q,
                             .bias_k = p->bias_k,
                             .q_raw = p->q_raw,
                             .inv_freq = p->inv_freq};
}

static inline problem make(sti_hybrid_settings set, sti_hybrid_shape shape, int T,
                           uint64_t seed)
{
    problem p = {.set = set, .shape = shape, .T = T};
    uint64_t rng = seed;
    still_error err;
    assert_int_equal(sti_hybrid_check(&set, &shape, &err), STILL_OK);
    p.S = sti_hybrid_selection_heads(&set, &shape);
    p.P = sti_hybrid_features(&set, &shape);
    const size_t t = (size_t)T, H = (size_t)shape.H, G = (size_t)shape.G;
    const size_t D = (size_t)shape.D, S = (size_t)p.S, map = D * (size_t)shape.F;
    p.q = normals(&rng, t * H * D, 1);
    p.k = normals(&rng, t * G * D, 1);
    p.v = normals(&rng, t * G * D, 1);
    p.gate = normals(&rng, t * H * D, 1);
    p.alpha = normals(&rng, H, 0.5);
    p.window = normals(&rng, H, 1);
    p.map_q = normals(&rng, H * map, 1 / sqrt((double)D));
    p.map_k = normals(&rng, S * map, 1 / sqrt((double)D));
    p.bias_q = normals(&rng, H, 0.3);
    p.bias_k = normals(&rng, S, 0.3);
    p.y = calloc(t * H * D, sizeof(double));
    p.y_parallel = calloc(t * H * D, sizeof(double));
    p.max = calloc(t * H, sizeof(double));
    p.score = calloc(t * S, sizeof(double));
    p.score_parallel = calloc(t * S, sizeof(double));
    p.fold = malloc(t * S * sizeof(int32_t));
    p.fold_parallel = calloc(t * S, sizeof(int32_t));
    p.salient = calloc(t * S, sizeof(int32_t));
    p.salient_parallel = calloc(t * S, sizeof(int32_t));
    for (size_t i = 0; i < t * S; i++) p.fold[i] = -1;
    sti_carve c = {0};
    sti_hybrid_state_carve(&p.st, &c, &set, &shape, T, sizeof(double), sizeof(double));
    assert_true(sti_block_new(&p.block, c.used));
    c = (sti_carve){.base = p.block.p};
    sti_hybrid_state_carve(&p.st, &c, &set, &shape, T, sizeof(double), sizeof(double));
    return p;
}

static inline void drop(problem *p)
{
    void *all[] = {p->q,
                   p->k,
                   p->v,
                   p->gate,
                   p->alpha,
                   p->window,
                   p->map_q,
                   p->map_k,
                   p->bias_q,
                   p->bias_k,
                   p->q_raw,
                   p->inv_freq,
                   p->y,
                   p->y_parallel,
                   p->max,
                   p->score,
                   p->score_parallel,
                   p->fold,
                   p->fold_parallel,
                   p->salient,
                   p->salient_parallel};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&p->block);
}

/* Tokens [from, from + n) through the recurrent form. */
static inline void feed(problem *p, int from, int n)
{
    const size_t H = (size_t)p->shape.H, G = (size_t)p->shape.G, D = (size_t)p->shape.D;
    const size_t at = (size_t)from, S = (size_t)p->S;
    sti_hybrid_in64 in = inputs(p);
    in.q += at * H * D;
    in.k += at * G * D;
    in.v += at * G * D;
    in.gate_logit += at * H * D;
    if (in.q_raw) in.q_raw += at * H * D;
    still_error err;
    assert_int_equal(sti_ref_hybrid_forward(
                         &(sti_hybrid_args64){.set = &p->set,
                                              .shape = p->shape,
                                              .T = n,
                                              .in = in,
                                              .state = &p->st,
                                              .y = p->y + at * H * D,
                                              .trace = {.score = p->score + at * S,
                                                        .salient = p->salient + at * S,
                                                        .fold_chunk = p->fold}},
                         &err),
                     STILL_OK);
}

/* Gives every token its position: q and k so far become q and k before RoPE. */
static inline void rotate(problem *p)
{
    const int H = p->shape.H, G = p->shape.G, D = p->shape.D;
    p->q_raw = malloc((size_t)(p->T * H * D) * sizeof(double));
    p->inv_freq = malloc((size_t)(D / 2) * sizeof(double));
    assert_true(p->q_raw && p->inv_freq);
    memcpy(p->q_raw, p->q, (size_t)(p->T * H * D) * sizeof(double));
    for (int i = 0; i < D / 2; i++)
        p->inv_freq[i] = (double)(float)pow(10000, -2.0 * i / D);
    const sti_hybrid_in64 in = inputs(p);
    for (int t = 0; t < p->T; t++) {
        for (int h = 0; h < H; h++)
            sti_ref_rope(p->q + (t * H + h) * D, D, t, in.inv_freq, in.interleaved);
        for (int g = 0; g < G; g++)
            sti_ref_rope(p->k + (t * G + g) * D, D, t, in.inv_freq, in.interleaved);
    }
}

static inline sti_hybrid_parallel_args64 parallel_args(problem *p)
{
    return (sti_hybrid_parallel_args64){
        .set = &p->set,
        .shape = p->shape,
        .B = 1,
        .T = p->T,
        .in = inputs(p),
        .fold_chunk = p->fold_parallel,
        .max_out = p->max,
        .y = p->y_parallel,
        .trace = {.score = p->score_parallel, .salient = p->salient_parallel}};
}

static inline void run_parallel(problem *p)
{
    const sti_hybrid_parallel_args64 a = parallel_args(p);
    still_error err;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
}

static inline void assert_close(const double *a, const double *b, size_t n,
                                double limit)
{
    double size = 0;
    for (size_t i = 0; i < n; i++) size = fmax(size, fabs(b[i]));
    for (size_t i = 0; i < n; i++) {
        assert_true(isfinite(a[i]));
        if (!(fabs(a[i] - b[i]) <= limit * size))
            fail_msg("element %zu: %.17g and %.17g (largest %g)", i, a[i], b[i], size);
    }
}

static inline size_t outputs(const problem *p)
{
    return (size_t)p->T * (size_t)p->shape.H * (size_t)p->shape.D;
}

static inline sti_hybrid_settings preset(const char *method, int chunk)
{
    sti_hybrid_settings s;
    assert_true(sti_hybrid_preset(method, chunk, &s));
    return s;
}

/* Selection heads with caps of their own: from nothing to the largest. */
static inline void make_uneven(sti_hybrid_settings *s, uint64_t *rng)
{
    s->uneven = true;
    for (int i = 0; i < STI_UNEVEN_HEADS_MAX; i++)
        s->head_cap[i] = below(rng, s->cap + 1);
    s->head_cap[below(rng, 2)] = s->cap;
}

/* Bits of salient tokens: 0 none, 1 keys 8 and values 4, 2 keys 5 and values 3. */
static inline void quantize(sti_hybrid_settings *s, int how)
{
    s->key_bits = how == 1 ? 8 : how == 2 ? 5 : 0;
    s->value_bits = how == 1 ? 4 : how == 2 ? 3 : 0;
}

/* Any settings the operator allows, of any method; quantized: with salient tokens in
 * few bits, and heads of more than a group. */
static inline problem draw_problem(uint64_t seed, bool quantized)
{
    static const char *const method[] = {"still",    "still", "still", "lolcats",
                                         "hedgehog", "t2r",   "swa",   "softmax"};
    uint64_t rng = seed * 7919 + 1;
    sti_hybrid_settings s = preset(method[below(&rng, 8)], 1 + below(&rng, 7));
    if (s.has_window && s.cap != STI_CAP_NONE && s.has_linear) {
        s.select = below(&rng, s.chunk + 1);
        s.cap = below(&rng, 12) - 1;
        s.score = (sti_score_kind)below(&rng, STI_SCORE_COUNT);
        s.la_scale = below(&rng, 2) ? STI_SCALE_EXACT : STI_SCALE_WINDOW;
        s.window_factor = below(&rng, 2);
        uint64_t caps = seed; /* drawn apart */
        if (s.cap > 0 && seed % 2) make_uneven(&s, &caps);
    }
    s.per_head = below(&rng, 2);
    s.norm_preserved = below(&rng, 2);
    s.gate = below(&rng, 2);
    s.alpha = below(&rng, 2);
    if (below(&rng, 3) == 0) s.feature_floor = 0.05; /* high enough to be felt */
    s.seed = seed;
    sti_hybrid_shape shape = {.G = 1 + below(&rng, 3), .D = 2 + below(&rng, 9)};
    if (quantized) {
        static const int keys[] = {8, 5, 0}, values[] = {4, 3, 0};
        uint64_t bits = seed; /* drawn apart */
        s.key_bits = keys[below(&bits, 3)];
        s.value_bits = values[s.key_bits ? below(&bits, 3) : below(&bits, 2)];
        if (below(&bits, 2)) shape.D += 30;
    }
    shape.H = shape.G * (1 + below(&rng, 3));
    shape.F = below(&rng, 3) ? shape.D : 1 + below(&rng, shape.D);
    return make(s, shape, 1 + below(&rng, 48), seed);
}
static inline problem any_problem(uint64_t seed)
{
    return draw_problem(seed, false);
}

/* ---- As backends see it -------------------------------------------------- */

/* The reference sees what a backend in float sees: inputs in float, keys and values as
 * they are stored. */
static inline void round_inputs(problem *p, size_t kv_size)
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
            p->k[j] = (double)sti_f16_to_f32(sti_f32_to_f16((float)p->k[j]));
            p->v[j] = (double)sti_f16_to_f32(sti_f32_to_f16((float)p->v[j]));
        }
}

#endif
