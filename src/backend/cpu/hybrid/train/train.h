/* train.h - the hybrid operator over whole sequences in float (STILL Alg. 1 and its
 * gradient): what forward and backward share.
 *
 * Work is cut by (sequence, head). A head walks over its sequence span by span (a span
 * is a chunk; without a window, a tile) and carries along the salient keys and the
 * linear state (S, z), so that time is linear in T and nothing of size T^2 exists.
 * Queries of a span go in tiles of TILE rows, one query to a lane:
 *
 *   w [keys, TILE]   softmax weights, or phi(k).phi(q) without a window
 *   y = (w^T V + a (phi(q) S) g) / den,   den = sum w + a phi(q).z   (eq. 10, 11)
 *
 * Backward is two walks. The one forwards in time (backward.c) has S and computes the
 * gradients of queries and of softmax keys. The one backwards in time (keys_bwd.c)
 * carries dS, the sum of a phi(q) (dn g)^T over later queries, and computes those of
 * folded keys. Each head sums the gradients of what its group shares (k, v, maps) on
 * its own; a last step adds the heads in order, so that results do not depend on the
 * number of threads. */
#ifndef STI_BACKEND_CPU_HYBRID_TRAIN_TRAIN_H
#define STI_BACKEND_CPU_HYBRID_TRAIN_TRAIN_H

#include <math.h>

#include "backend/cpu/panel/panel.h"

enum { STI_TRAIN_TILE = 64 }; /* queries: the panels of a tile stay in L2 */

/* One call. */
typedef struct sti_train {
    const sti_hybrid_parallel_args *a;
    const sti_hybrid_settings *set;
    const sti_panel_kernels *f;
    int H, G, D, F, S;   /* as in hybrid.h */
    int per_kv, per_sel; /* query heads of a kv head, of a selection head */
    int Dp, Fp, Pp;      /* D, F and features, padded */
    int span, n_spans;   /* tokens that share a walk's step */
    int most_keys;       /* softmax keys any span sees, itself included */
    float scale;         /* 1 / sqrt(D) */
    /* k and v [B,T,G,D] as the salient cache has them: in.k and in.v themselves unless it
     * is quantized. The gradient passes the rounding as if it were the identity. */
    const float *stored_k, *stored_v;
    float *rounded_k, *rounded_v; /* memory for these; NULL: not needed */
} sti_train;

/* Checks the arguments of a parallel call; most_keys needs sti_train_count_keys. */
still_status sti_train_new(sti_train *t, const sti_dev *dev,
                           const sti_hybrid_parallel_args *a, still_error *err);
/* Reads fold_chunk; overwrites the device's scratch. */
still_status sti_train_count_keys(sti_train *t, sti_dev *dev, still_error *err);

/* Memory for stored_k and stored_v, and what they hold. */
void sti_train_store_carve(sti_carve *c, sti_train *t);
void sti_train_store(sti_train *t, const sti_dev *dev);

/* The chunk at whose first token j is folded into the linear state, for the queries:
 * not before chunk c(j) + 2. n_spans or more: never. */
static inline int sti_train_fold_of(const sti_train *t, int b, int sel, int j)
{
    const int32_t fold =
        t->a->fold_chunk[((size_t)b * (size_t)t->a->T + (size_t)j) * (size_t)t->S +
                         (size_t)sel];
    const int retires = j / t->span + 2;
    return fold < 0 ? INT32_MAX : fold > retires ? fold : retires;
}

/* Whether token j folds what the salient cache had of it. */
static inline bool sti_train_folds_stored(const sti_train *t, int b, int sel, int j)
{
    return t->set->has_window && sti_train_fold_of(t, b, sel, j) > j / t->span + 2;
}

/* Row of token j of sequence b in arrays [B,T,heads,.]. */
static inline size_t sti_train_row(const sti_train *t, int b, int j, int heads,
                                   int head)
{
    return ((size_t)b * (size_t)t->a->T + (size_t)j) * (size_t)heads + (size_t)head;
}

/* Tokens of span c: [c span, end). */
static inline int sti_train_span_end(const sti_train *t, int c)
{
    const int64_t end = ((int64_t)c + 1) * t->span;
    return end < t->a->T ? (int)end : t->a->T;
}

/* The factor of head h on all its softmax weights. */
static inline float sti_train_window_factor(const sti_train *t, int h)
{
    if (!t->set->window_factor) return 1;
    const float *logit = t->a->in.window_logit;
    return logit ? 1 / (1 + expf(-logit[h])) : 0.1f;
}

/* The map of query head h, and that of the keys of selection head sel. */
sti_panel_map sti_train_map_q(const sti_train *t, int h,
                              const sti_panel_map_scratch *scratch);
sti_panel_map sti_train_map_k(const sti_train *t, int sel,
                              const sti_panel_map_scratch *scratch);

/* ---- The walk of a head (walk.c) ----------------------------------------- */

typedef struct sti_train_walk {
    const sti_train *t;
    int b, h, g, sel, c;
    sti_panel_map_scratch scratch_q, scratch_k;
    sti_panel_map map_q, map_k;
    /* Keys the queries of span c see with softmax: salient ones, oldest first, the span
     * before, and from row `own` on the span itself. */
    float *K, *V;   /* [most_keys, Dp] */
    int32_t *token; /* [most_keys] */
    int n_salient, own;
    float *S, *z; /* [Pp,Dp], [Pp] */
    bool folded;  /* the state is not empty */
    /* Tokens to be folded next. Without a window: those of the span, which its queries
     * see one by one. */
    float *fold_k, *fold_v, *fold_raw, *fold_phi; /* [TILE, Dp Dp Fp Pp] */
    int n_fold;
} sti_train_walk;

void sti_train_walk_carve(sti_carve *c, sti_train_walk *w, const sti_train *t,
                          bool backward);
void sti_train_walk_begin(sti_train_walk *w, const sti_train *t, int b, int h);
void sti_train_walk_to(sti_train_walk *w, int c); /* c: 0, 1, 2, ... */

/* A tile: queries [first, first + n) of the walk's span and their weights of the
 * past. */
typedef struct sti_train_tile {
    int first, n, lanes; /* lanes: n padded */
    int keys;            /* rows of w */
    bool linear;         /* there is a linear term */
    float *q;            /* [TILE,Dp] */
    float *trans;        /* [max(Dp,Pp), TILE]: a panel with queries as lanes */
    float *w;            /* [most_keys, TILE] */
    float *raw, *phi;    /* [TILE,Fp], [TILE,Pp] of q */
    float *lin;          /* [TILE,Dp]: phi(q) S, not yet times a */
    float *gate;         /* [TILE,Dp] */
    float *M, *shift, *a, *den, *sum; /* [TILE] */
} sti_train_tile;

void sti_train_tile_carve(sti_carve *c, sti_train_tile *r, const sti_train *t);
/* STILL eq. 11: the weights of both branches and den of eq. 10. Fills r; den is
 * final. */
void sti_train_weights(const sti_train_walk *w, sti_train_tile *r, int first, int n);

/* The causal mask of x [rows, TILE], lanes are queries: lane i sees rows j <= diag + i;
 * writes `value` to the others. */
static inline void sti_train_mask(float *x, int rows, int diag, int lanes, float value)
{
    for (int j = diag > 0 ? diag : 0; j < rows; j++)
        for (int i = 0; i < j - diag && i < lanes; i++)
            x[(size_t)j * STI_TRAIN_TILE + (size_t)i] = value;
}

/* ---- Backward, the folded keys (keys_bwd.c) ------------------------------- */

/* Tokens by the chunk that folds them (without a window: by their span), each chunk's
 * in order: from order[start[c]] on those of chunk c. order [T], start [n_spans + 1].
 */
void sti_train_fold_order(const sti_train *t, int b, int sel, int32_t *order,
                          int *start);

/* Results of the walk over queries. NULL: not wanted. */
typedef struct sti_train_sums {
    /* For the walk over keys, by [B,H,T]: */
    float *aphi; /* [.,Pp]: a phi(q) */
    float *dng;  /* [.,Dp]: dn g */
    float *dden; /* [.] */
    /* Gradients to be added over heads and sequences: softmax side [B,H,T,Dp], folded
     * side [B,S,T,Dp]. */
    float *dk, *dv, *dk_fold, *dv_fold;
    float *map_q, *map_k; /* [B,H,D,Fp], [B,S,D,Fp] */
    /* Sums over whole sequences of numbers that nearly cancel: double. */
    double *bias_q, *alpha, *window; /* [B,H] */
    double *bias_k;                  /* [B,S] */
} sti_train_sums;

size_t sti_train_keys_bytes(const sti_train *t);
/* All folded keys of one selection head of one sequence; memory: sti_train_keys_bytes.
 */
void sti_train_keys_run(const sti_train *t, const sti_train_sums *s, int b, int sel,
                        void *memory);

#endif
