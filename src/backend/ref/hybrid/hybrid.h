/* hybrid.h - the pieces that the forms of the reference's hybrid operator share, in
 * double. Its entries are declared in ops/hybrid.h. */
#ifndef STI_BACKEND_REF_HYBRID_HYBRID_H
#define STI_BACKEND_REF_HYBRID_HYBRID_H

#include <math.h>

#include "ops/hybrid.h"

typedef struct sti_ref_dims {
    int H, G, D, F; /* as in sti_hybrid_shape */
    int S, P;       /* selection heads, features */
    int per_kv;     /* query heads of a kv head: kv head of h is h / per_kv */
    int per_sel;    /* query heads of a selection head: that of h is h / per_sel */
} sti_ref_dims;

static inline sti_ref_dims sti_ref_dims_of(const sti_hybrid_settings *set,
                                           const sti_hybrid_shape *s)
{
    const int S = sti_hybrid_selection_heads(set, s);
    return (sti_ref_dims){.H = s->H,
                          .G = s->G,
                          .D = s->D,
                          .F = s->F,
                          .S = S,
                          .P = sti_hybrid_features(set, s),
                          .per_kv = s->H / s->G,
                          .per_sel = s->H / S};
}

/* The kv head that selection head s reads. */
static inline int sti_ref_kv_of(const sti_ref_dims *d, int s)
{
    return s * d->per_sel / d->per_kv;
}

static inline double sti_ref_dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* y += a x */
static inline void sti_ref_axpy(double a, const double *x, double *y, int n)
{
    for (int i = 0; i < n; i++) y[i] += a * x[i];
}

/* x <- softmax(x) */
static inline void sti_ref_softmax(double *x, int n)
{
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) top = fmax(top, x[i]);
    for (int i = 0; i < n; i++) {
        x[i] = exp(x[i] - top);
        sum += x[i];
    }
    for (int i = 0; i < n; i++) x[i] /= sum;
}

static inline double sti_ref_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static inline double sti_ref_logit(const double *q, const double *k, int D)
{
    return sti_ref_dot(q, k, D) / sqrt((double)D);
}

/* RoPE on x [D]: rotates pair i by position * inv_freq[i]. -position is the transpose,
 * which takes gradients back. */
static inline void sti_ref_rope(double *x, int D, double position,
                                const double *inv_freq, bool interleaved)
{
    for (int i = 0; i < D / 2; i++) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + D / 2;
        const double angle = position * inv_freq[i];
        const double xa = x[a], xb = x[b];
        x[a] = xa * cos(angle) - xb * sin(angle);
        x[b] = xb * cos(angle) + xa * sin(angle);
    }
}

/* Learned inputs of head h; an input whose setting is off is not read. */
static inline double sti_ref_alpha(const sti_hybrid_settings *set,
                                   const sti_hybrid_in64 *in, int h)
{
    return set->alpha && in->alpha ? in->alpha[h] : 0;
}

static inline double sti_ref_window_factor(const sti_hybrid_settings *set,
                                           const sti_hybrid_in64 *in, int h)
{
    if (!set->window_factor) return 1;
    return in->window_logit ? sti_ref_sigmoid(in->window_logit[h]) : 0.1;
}

/* STILL eq. 7: the gate g = 2 sigmoid(logit) of element i of [T,H,D]. */
static inline double sti_ref_gate(const sti_hybrid_settings *set,
                                  const sti_hybrid_in64 *in, size_t i)
{
    return set->gate && in->gate_logit ? 2 * sti_ref_sigmoid(in->gate_logit[i]) : 1;
}

/* The maximum M of a query, which keeps STILL eq. 11 finite: over its n softmax tokens
 * and, in exact scaling, alpha if something was folded. In window scaling without a
 * softmax token it is -infinity and nothing reads it. */
static inline double sti_ref_max(const sti_hybrid_settings *set, const double *logit,
                                 int n, double alpha, bool folded)
{
    double M = -INFINITY;
    for (int i = 0; i < n; i++) M = fmax(M, logit[i]);
    if (set->la_scale == STI_SCALE_EXACT && folded) M = fmax(M, alpha);
    return M;
}

/* Softmax tokens weigh exp(l - shift), the linear term weighs `linear`. In window
 * scaling that is exp(l - M) and exp(alpha), both divided by exp(alpha) where that is
 * above 1, so that nothing overflows: only the ratio reaches the output. */
typedef struct sti_ref_scales {
    double shift, linear;
} sti_ref_scales;

static inline sti_ref_scales sti_ref_scales_of(const sti_hybrid_settings *set, double M,
                                               double alpha, bool folded)
{
    if (!folded) return (sti_ref_scales){M, 0};
    if (set->la_scale == STI_SCALE_EXACT) return (sti_ref_scales){M, exp(alpha - M)};
    return (sti_ref_scales){M + fmax(alpha, 0), exp(fmin(alpha, 0))};
}

/* ---- Feature maps (map.c) ----------------------------------------- */

typedef struct sti_ref_map {
    sti_map_kind kind;
    bool norm_preserved;
    double floor;
    int D, F;
    const double *W; /* [D,F]; NULL: identity */
    double bias;
} sti_ref_map;

sti_ref_map sti_ref_map_q(const sti_hybrid_settings *set, const sti_hybrid_shape *shape,
                          const sti_hybrid_in64 *in, int h);
sti_ref_map sti_ref_map_k(const sti_hybrid_settings *set, const sti_hybrid_shape *shape,
                          const sti_hybrid_in64 *in, int s);
/* STILL eq. 6: x [D] -> phi [P] */
void sti_ref_map_forward(const sti_ref_map *m, const double *x, double *phi);
/* Adds to dx [D], dW [D,F] and *dbias (the last two may be NULL). */
void sti_ref_map_backward(const sti_ref_map *m, const double *x, const double *dphi,
                          double *dx, double *dW, double *dbias);

/* ---- Windows ------------------------------------------------------------- */

/* STILL eq. 2: first of the last C tokens, over which the score of token t is taken. */
static inline int64_t sti_ref_score_start(const sti_hybrid_settings *set, int64_t t)
{
    return t >= set->chunk ? t - set->chunk + 1 : 0;
}

/* First token of the window of query t: its own chunk and the one before. */
static inline int64_t sti_ref_window_start(const sti_hybrid_settings *set, int64_t t)
{
    const int64_t C = set->chunk;
    return t / C > 0 ? (t / C - 1) * C : 0;
}

/* ---- Scores and selection (route.c) -------------------------------------- */

/* Score of a token as it arrives, for query head h: STILL eq. 5 for s3. logit: those of
 * the last n <= C tokens, its own last; overwritten. */
double sti_ref_score(const sti_hybrid_settings *set, double *logit, int n,
                     const double *key, int D, int64_t position, int h);
/* Of key i of the n keys of a chunk, `step` numbers apart: see sti_score_end. */
double sti_ref_likeness(const double *k, int n, size_t step, int D, int i);

/* Whether token i (score a) goes before token j (score b): equal scores keep the
 * earlier one. */
static inline bool sti_ref_better(double a, int64_t i, double b, int64_t j)
{
    return a > b || (a == b && i < j);
}

/* A token that may stay exact. */
typedef struct sti_ref_candidate {
    double score;
    int64_t position;
    bool stays;
} sti_ref_candidate;

/* STILL eq. 8: of the n tokens of a leaving chunk the `select` best stay (M_SA), the
 * others do not (M_LA). */
void sti_ref_select_top(sti_ref_candidate *chunk, int n, int select);
/* Beyond the paper: of the candidates that stay, the worst go until `cap` are left. */
void sti_ref_evict_over_cap(sti_ref_candidate *c, int n, int cap);

#endif
