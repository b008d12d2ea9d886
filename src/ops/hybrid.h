/* hybrid.h - the hybrid attention operator: what every backend agrees on.
 *
 * Each past token is in one of three places: the window (its own chunk and the one
 * before; softmax), the salient cache (at most `cap` tokens kept exact; softmax), or
 * the linear state (s, z) of feature maps. docs/methods.md has the equations and the
 * methods that are settings of this operator. Two forms give the same numbers:
 *
 *   recurrent  a session's next T tokens, its state carried in sti_hybrid_state;
 *   parallel   whole sequences at once, the route of each token written as one number,
 *              the chunk in which it is folded. It is the form that has a backward.
 *
 * Letters: H query heads, G kv heads, D head size, F columns of a map, P features,
 * C chunk size, S selection heads (G if they are shared by a group of query heads,
 * else H), B sequences, T tokens. The chunk of token t is c(t) = t / C. */
#ifndef STI_OPS_HYBRID_H
#define STI_OPS_HYBRID_H

#include <math.h>

#include "base/error.h"
#include "base/mem.h"
#include "ops/salient.h"

/* ---- Scores: which tokens stay exact (ops/score.c) ----------------------- */

typedef enum sti_score_kind {
    STI_SCORE_S3,       /* Self-Saliency Score, STILL eq. 5 */
    STI_SCORE_RECEIVED, /* attention received inside the window */
    STI_SCORE_KEYNORM,  /* small key norm */
    STI_SCORE_DISTINCT, /* a key unlike the others of its chunk (KeyDiff) */
    STI_SCORE_RANDOM,
    STI_SCORE_COUNT
} sti_score_kind;

/* What is known of a token when it arrives, for one query head. */
typedef struct sti_score_stats {
    double self;     /* weight it gives itself in the softmax over the last C tokens */
    double key_norm; /* |k| */
    double eps;
    uint64_t seed;
    int64_t position;
    int layer, head;
} sti_score_stats;

/* What is known of it when its chunk retires from the window, for a selection head. */
typedef struct sti_score_end {
    double arrived;  /* mean of `arrive` over the query heads */
    double received; /* mean weight that the later queries of the token's own and next
                        chunk gave it in the softmax over their window */
    double likeness; /* cosine of its key and the mean of the chunk's keys, all taken
                        at length 1 and as attention sees them (after RoPE) */
    int64_t position;
} sti_score_end;

/* What the score `distinct` gives a token for each position before it. Without it a long
 * stream keeps tokens of all of it, fewer and fewer of the last pages, and predicts worse
 * and worse (docs/methods.md). 10,000 positions weigh as much as a tenth of the cosine. */
#define STI_DISTINCT_RECENT 1e-5f
#define STI_DISTINCT_FIRST 1e30f /* token 0, which stays */

/* A score in two steps. `arrive` runs once a token and query head; the mean over the
 * query heads of a selection head is stored with the token. `retire` runs when the
 * token's chunk retires; backends find out what it says it needs. A new score is a row
 * of the table in ops/score.c, for ref and cpu; cuda has formulas of its own
 * (backend/cuda/hybrid/score.h). */
typedef struct sti_score {
    const char *name, *summary;
    double (*arrive)(const sti_score_stats *s); /* NULL: 0 */
    double (*retire)(const sti_score_end *e);   /* NULL: arrived */
    bool self;                                  /* `arrive` needs the softmax */
    bool received, likeness;                    /* what `retire` needs */
    /* The definition where `arrive` is a closed form of it; the reference runs this.
     * logit: those of the last n <= C tokens, the token's own last. */
    double (*definition)(const double *logit, int n, double eps);
} sti_score;

#ifdef __cplusplus
extern "C" { /* CUDA C calls these */
#endif
const sti_score *sti_score_at(sti_score_kind kind); /* NULL: no such score */
bool sti_score_find(const char *name, sti_score_kind *out);

/* Refuses a score that a backend has no code for, and names it. known: bit 1 << kind of
 * each score it computes. sti_hybrid_check refuses what is not in the table, which is
 * enough for a backend that runs the table's functions; one with kernels of its own
 * calls this as well, on the way into every form. */
still_status sti_score_check(sti_score_kind kind, unsigned known, const char *backend,
                             still_error *err);
#ifdef __cplusplus
}
#endif

/* ---- Settings ------------------------------------------------------------ */

typedef enum sti_la_scale {
    STI_SCALE_EXACT, /* one denominator: the linear term weighs exp(alpha) */
    STI_SCALE_WINDOW /* softmax weights relative to their largest, M; M matters */
} sti_la_scale;

typedef enum sti_map_kind {
    STI_MAP_SOFTMAX, /* [softmax(u), softmax(-u)], u = x W; P = 2F */
    STI_MAP_RELU     /* relu(x W + b); P = F */
} sti_map_kind;

/* What the state's features are made of. */
typedef enum sti_feature_positions {
    STI_FEATURES_ABSOLUTE, /* q and k after RoPE */
    STI_FEATURES_NONE      /* q and k before RoPE */
} sti_feature_positions;

enum { STI_CAP_NONE = -1, STI_HEAD_DIM_MAX = 512, STI_UNEVEN_HEADS_MAX = 128 };

typedef struct sti_hybrid_settings {
    int chunk;   /* C */
    int select;  /* lambda: tokens of a leaving chunk that join the salient cache */
    int cap;     /* salient tokens kept; STI_CAP_NONE: all (no longer linear) */
    bool uneven; /* selection heads have caps of their own, and cap is the largest */
    int32_t head_cap[STI_UNEVEN_HEADS_MAX]; /* [S], if uneven */
    /* Bits of a salient token's keys (8 or 5) and values (4 or 3), see ops/salient.h;
     * 0: they are stored as in the window. */
    int key_bits, value_bits;
    sti_score_kind score;
    bool per_head;   /* selection, map of k and state per query head, not per kv head */
    bool has_window; /* off: a token is folded before its own output */
    bool has_linear; /* off: a folded token is forgotten */
    sti_la_scale la_scale;
    sti_map_kind map;
    bool norm_preserved; /* u is scaled to |x| (NP-Map) */
    /* Learned inputs that exist. Where one exists but is passed as NULL it has its
     * start value: gate 1, alpha 0, window factor 0.1. */
    bool gate, alpha, window_factor;
    double feature_floor; /* features are kept above this */
    double den_eps;       /* added to the denominator */
    double eps;           /* of the score */
    uint64_t seed;        /* of the random score */
    int layer;            /* likewise */
    /* Streams longer than a model was trained for; recurrent form only. A salient key
     * at distance L = position_cap or more from the last token of the query's chunk is
     * far: every query of the chunk sees it at distance L exactly. 0: distances are
     * what they are. */
    int position_cap;
    sti_feature_positions feature_positions;
    /* Tokens the linear state may weigh as: with n folded tokens and n > state_cap the
     * linear term is multiplied by state_cap / n. 0: as many as were folded. A head
     * whose own cap is smaller than `cap` has that much less. Recurrent form only. */
    int state_cap;
} sti_hybrid_settings;

typedef struct sti_hybrid_shape {
    int H, G, D, F;
} sti_hybrid_shape;

/* Whether queries and keys before RoPE are needed: in.q_raw, inv_freq, interleaved. */
static inline bool sti_hybrid_needs_raw(const sti_hybrid_settings *set)
{
    return set->position_cap > 0 || set->feature_positions == STI_FEATURES_NONE;
}

/* Salient tokens that selection head `sel` keeps. */
static inline int sti_hybrid_cap(const sti_hybrid_settings *set, int sel)
{
    return set->uneven ? set->head_cap[sel] : set->cap;
}
bool sti_hybrid_same_caps(const sti_hybrid_settings *a, const sti_hybrid_settings *b,
                          int S);

/* What state_cap adds to alpha of selection head `sel` when n tokens are folded there:
 * log of the factor. */
static inline double sti_hybrid_state_shift(const sti_hybrid_settings *set, int sel,
                                            int64_t n)
{
    const int most = set->state_cap - (set->cap - sti_hybrid_cap(set, sel));
    return set->state_cap > 0 && n > most ? log((double)most / (double)n) : 0;
}

/* Settings of a method by its name: still, lolcats, hedgehog, t2r, swa, softmax, all
 * with chunk C (lambda C/4 and cap 2C for still). false: no setting of this operator.
 */
bool sti_hybrid_preset(const char *method, int chunk, sti_hybrid_settings *out);
still_status sti_hybrid_check(const sti_hybrid_settings *set,
                              const sti_hybrid_shape *shape, still_error *err);

/* Attention weights can be matched (sti_hybrid_match_args) where every past token has
 * one. phi(q).phi(k) below the floor counts as the floor in the logarithm and has no
 * gradient there: relu features may have nothing in common. */
#define STI_MATCH_FLOOR 1e-12
still_status sti_hybrid_match_check(const sti_hybrid_settings *set, still_error *err);

static inline int sti_hybrid_selection_heads(const sti_hybrid_settings *set,
                                             const sti_hybrid_shape *shape)
{
    return set->per_head ? shape->H : shape->G;
}
static inline int sti_hybrid_features(const sti_hybrid_settings *set,
                                      const sti_hybrid_shape *shape)
{
    return set->map == STI_MAP_RELU ? shape->F : 2 * shape->F;
}

/* ---- State of a session, one layer --------------------------------------- */

/* Element types belong to the backend: `kv` elements hold keys and values (double in
 * the reference; float or half elsewhere), `real` elements everything that is summed
 * (double in the reference, float elsewhere; never less). So does the order in which
 * the elements of a head's keys lie. Zeroed memory is the empty state. What a setting
 * has no use for is NULL. */
typedef struct sti_hybrid_state {
    int64_t pos;        /* tokens seen */
    int64_t max_tokens; /* what sal_capacity was made for without a cap */
    int sal_capacity;   /* tokens the largest salient list can hold */
    size_t kv_size, real_size;
    void *win_k, *win_v; /* kv   [G, 2C, D]: token j at slot j % 2C */
    void *win_score;     /* real [S, 2C] */
    void *win_received;  /* real [S, 2C]: sum, for scores that ask for it */
    /* Salient lists, one behind the other: sti_hybrid_list_of has a head's slots. */
    void *sal_k, *sal_v; /* kv   [slots, D], a list in no order; quantized: rows of the
                            low bits (ops/salient.h), */
    uint8_t *sal_k_high,
        *sal_v_high; /* rows of the high ones, NULL if there are none, */
    uint16_t *sal_k_scale, *sal_v_scale; /* and [slots, D / 32], [slots, D / 32, 2] */
    void *sal_score;                     /* real [slots] */
    int32_t *sal_pos;                    /* [slots] */
    uint8_t *sal_far;    /* [slots], with a position cap: 1 if the key is far, and then
                          * kept as it was before RoPE (quantized: its stored value
                          * rotated back, and rounded once more) */
    int32_t *sal_count;  /* [S] */
    void *lin_s, *lin_z; /* real [S, P, D], [S, P] */
    void *comp_s, *comp_z; /* float states that tokens are added to one by one (no
                              window): what rounding took from lin_s and lin_z, so that
                              a sum of millions does not drift. Sums of whole chunks do
                              without */
    int64_t *folded;       /* [S]: tokens in the state (or forgotten) */
} sti_hybrid_state;

/* A salient list: its slots are [first, first + capacity) of the arrays of all lists. */
typedef struct sti_hybrid_list {
    size_t first;
    int capacity;
} sti_hybrid_list;

/* The list of selection head `sel`; that of head S begins where the last one ends. */
static inline sti_hybrid_list sti_hybrid_list_of(const sti_hybrid_settings *set,
                                                 const sti_hybrid_state *st, int sel)
{
    sti_hybrid_list l = {(size_t)sel * (size_t)st->sal_capacity, st->sal_capacity};
    if (!set->uneven || st->sal_capacity == 0) return l;
    l.first = 0;
    for (int i = 0; i < sel; i++) l.first += (size_t)set->head_cap[i];
    l.capacity = sel < STI_UNEVEN_HEADS_MAX ? set->head_cap[sel] : 0;
    return l;
}

/* Where a slot's key and value are, if they are quantized and lie in rows. */
static inline sti_salient_row sti_hybrid_salient_key(const sti_hybrid_settings *set,
                                                     const sti_hybrid_state *st, int D,
                                                     size_t slot)
{
    const int bits = set->key_bits;
    sti_salient_row r = {(uint8_t *)st->sal_k + slot * sti_salient_low(bits, D), NULL,
                         st->sal_k_scale + slot * sti_salient_groups(D)};
    if (st->sal_k_high) r.high = st->sal_k_high + slot * sti_salient_high(bits, D);
    return r;
}
static inline sti_salient_row sti_hybrid_salient_value(const sti_hybrid_settings *set,
                                                       const sti_hybrid_state *st,
                                                       int D, size_t slot)
{
    const int bits = set->value_bits;
    sti_salient_row r = {(uint8_t *)st->sal_v + slot * sti_salient_low(bits, D), NULL,
                         st->sal_v_scale + slot * 2 * sti_salient_groups(D)};
    if (st->sal_v_high) r.high = st->sal_v_high + slot * sti_salient_high(bits, D);
    return r;
}

/* Lays the state out in c; with c->base NULL it only counts. max_tokens bounds the
 * session and sizes the salient lists where there is no cap. Settings were checked. */
void sti_hybrid_state_carve(sti_hybrid_state *st, sti_carve *c,
                            const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape, int64_t max_tokens,
                            size_t kv_size, size_t real_size);
void sti_hybrid_state_clear(sti_hybrid_state *st, const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape); /* back to empty */

/* ---- Arguments ----------------------------------------------------------- */

/* The structs exist twice: in float for backends, and in double, with a 64 behind the
 * name, for the reference. Token-major, no padding between rows.
 *
 * sti_hybrid_in: q [T,H,D], k, v [T,G,D], q and k after RoPE; gate_logit [T,H,D];
 * alpha, window_logit [H]; map_q [H,D,F], map_k [S,D,F] ([in, out]; NULL: identity, the
 * first F columns); bias_q [H], bias_k [S] (relu map; NULL: 0). In the parallel form T
 * stands for B * T. Where sti_hybrid_needs_raw: q_raw [T,H,D], q before RoPE, and
 * inv_freq [D/2] with pairs as in sti_rope_args; angles are products in double.
 * unrotated: q and k come before RoPE instead, and the operator applies RoPE by inv_freq;
 * no q_raw then. Recurrent form, where a backend's hybrid_applies_rope says that it does.
 *
 * sti_hybrid_grad: a gradient for each input, of its shape; NULL: not wanted. Those of
 * q, k, v and gate_logit are written, those of parameters are added to.
 *
 * sti_hybrid_trace: what the operator decided, for tests and reports; NULL: not wanted.
 *   score_head [T,H], score [T,S]: when the token arrived (recurrent), or final,
 *   over the queries that exist (parallel);
 *   salient [T,S]: salient tokens the query sees;
 *   fold_chunk [.,S], recurrent form only: the chunk at whose first token the token was
 *   folded. Indexed by position in the session; the caller fills it with -1.
 *   Without a window there are no scores and no fold chunks: nothing is written.
 *
 * sti_hybrid_args: the next T tokens of a session; a batch of sessions is an array of
 * these. The state is advanced.
 *
 * sti_hybrid_parallel_args: B sequences from their beginning. fold_chunk [B,T,S] (-1:
 * never) comes from the route entry and is an input of the others. max_in [B,T,H]
 * replaces M (NULL: computed); max_out receives it. Backward reads dy [B,T,H,D] and
 * writes grad, routing and M held fixed; it does not read y. */
#define STI_HYBRID_TYPES(real, suffix)                                                 \
    typedef struct sti_hybrid_in##suffix {                                             \
        const real *q, *k, *v, *gate_logit;                                            \
        const real *alpha, *window_logit, *map_q, *map_k, *bias_q, *bias_k;            \
        const real *q_raw, *inv_freq;                                                  \
        bool interleaved, unrotated;                                                   \
    } sti_hybrid_in##suffix;                                                           \
    typedef struct sti_hybrid_grad##suffix {                                           \
        real *q, *k, *v, *gate_logit;                                                  \
        real *alpha, *window_logit, *map_q, *map_k, *bias_q, *bias_k;                  \
    } sti_hybrid_grad##suffix;                                                         \
    typedef struct sti_hybrid_trace##suffix {                                          \
        real *score_head, *score;                                                      \
        int32_t *salient, *fold_chunk;                                                 \
    } sti_hybrid_trace##suffix;                                                        \
    typedef struct sti_hybrid_args##suffix {                                           \
        const sti_hybrid_settings *set;                                                \
        sti_hybrid_shape shape;                                                        \
        int T;                                                                         \
        sti_hybrid_in##suffix in;                                                      \
        sti_hybrid_state *state;                                                       \
        real *y; /* [T,H,D], no alias */                                               \
        sti_hybrid_trace##suffix trace;                                                \
    } sti_hybrid_args##suffix;                                                         \
    typedef struct sti_hybrid_parallel_args##suffix {                                  \
        const sti_hybrid_settings *set;                                                \
        sti_hybrid_shape shape;                                                        \
        int B, T;                                                                      \
        sti_hybrid_in##suffix in;                                                      \
        int32_t *fold_chunk;                                                           \
        const real *max_in;                                                            \
        real *max_out;                                                                 \
        real *y; /* [B,T,H,D] */                                                       \
        sti_hybrid_trace##suffix trace;                                                \
        const real *dy;                                                                \
        sti_hybrid_grad##suffix grad;                                                  \
    } sti_hybrid_parallel_args##suffix;

STI_HYBRID_TYPES(float, )
STI_HYBRID_TYPES(double, 64)

/* The arrays that sti_hybrid_in and sti_hybrid_grad both have: of tokens, of parameters,
 * all. */
#define STI_HYBRID_TOKEN_ARRAYS(X) X(q) X(k) X(v) X(gate_logit)
#define STI_HYBRID_PARAMETERS(X)                                                       \
    X(alpha) X(window_logit) X(map_q) X(map_k) X(bias_q) X(bias_k)
#define STI_HYBRID_ARRAYS(X) STI_HYBRID_TOKEN_ARRAYS(X) STI_HYBRID_PARAMETERS(X)

/* Numbers in each of them, for `tokens` tokens. */
typedef struct sti_hybrid_sizes {
    size_t q, k, v, gate_logit, alpha, window_logit, map_q, map_k, bias_q, bias_k;
} sti_hybrid_sizes;
sti_hybrid_sizes sti_hybrid_sizes_of(const sti_hybrid_settings *set,
                                     const sti_hybrid_shape *shape, size_t tokens);

/* Where token j stands for the query t of the same sequence (parallel form). */
typedef enum sti_place {
    STI_PLACE_NONE, /* in the future */
    STI_PLACE_WINDOW,
    STI_PLACE_SALIENT,
    STI_PLACE_LINEAR
} sti_place;

static inline sti_place sti_hybrid_place(const sti_hybrid_settings *set, int64_t t,
                                         int64_t j, int32_t fold_chunk)
{
    if (j > t) return STI_PLACE_NONE;
    if (!set->has_window) return STI_PLACE_LINEAR;
    int64_t now = t / set->chunk;
    if (j / set->chunk >= now - 1) return STI_PLACE_WINDOW;
    return fold_chunk >= 0 && fold_chunk <= now ? STI_PLACE_LINEAR : STI_PLACE_SALIENT;
}

/* Whether a token that is folded (place LINEAR) was in the salient cache before: what it
 * folds is then what was stored there. Tokens that leave the window unselected, or are
 * evicted as they join, fold what the window has. */
static inline bool sti_hybrid_was_salient(const sti_hybrid_settings *set, int64_t j,
                                          int32_t fold_chunk)
{
    return set->has_window && fold_chunk > j / set->chunk + 2;
}

/* ---- The reference, in double (backend/ref) ------------------------------ */

/* Golden data and tests call these by name; everything else goes through the table of
 * a backend. They allocate what they need and free it. */

/* Recurrent form: the state's kv and real elements are double. On error the state is
 * as it was. */
still_status sti_ref_hybrid_forward(const sti_hybrid_args64 *a, still_error *err);

/* Parallel form. route reads q and k and writes fold_chunk and the trace's scores;
 * forward and backward read fold_chunk. Time grows with T^2: this is the
 * meaning of the operator, not a way to compute it. */
still_status sti_ref_hybrid_route(const sti_hybrid_parallel_args64 *a,
                                  still_error *err);
still_status sti_ref_hybrid_parallel(const sti_hybrid_parallel_args64 *a,
                                     still_error *err);
still_status sti_ref_hybrid_backward(const sti_hybrid_parallel_args64 *a,
                                     still_error *err);
/* sti_hybrid_match_args of ops/ops.h, in double: *loss, and scale times its gradient.
 */
still_status sti_ref_hybrid_match(const sti_hybrid_parallel_args64 *a, double scale,
                                  double *loss, still_error *err);

#endif
