/* hybrid.h - what the files of the recurrent hybrid operator share.
 *
 *   hybrid.c   the entry: checks, scratch, a call cut into steps
 *   retire.c   a chunk leaves the window: select, evict, fold (STILL eq. 6, 8, 9)
 *   salient.c  slots of a salient list
 *   query.c    outputs and scores of queries (eq. 1 to 5, 7, 10, 11)
 *   decode.c   one token of many sessions: the same, split over keys
 *
 * A step is the part of one chunk that lies in this call: window, salient list and
 * state are then fixed but for the step's own tokens, and a ring of two chunks is
 * enough for any prompt. Numbers depend on positions, never on how a prompt was cut:
 * blocks of keys are cut at fixed slots of the ring or of the list, and every sum has
 * one order.
 *
 * Keys are stored transposed, since a key is read by every token of the next chunks
 * but written once. For each head, slots are grouped in panels of STI_ATTN_PANEL:
 *   [capacity / PANEL, D, PANEL], the last panel as wide as slots are left,
 * so keys take as many bytes as rows would. Values are rows [capacity, D]. */
#ifndef STI_BACKEND_CPU_HYBRID_HYBRID_H
#define STI_BACKEND_CPU_HYBRID_HYBRID_H

#include <math.h>

#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/hybrid/kernels.h"
#include "backend/cpu/softmax/attn_tile.h"

enum {
    STI_HYB_KEYS = STI_ATTN_BLOCK, /* folded at a time; >= STI_ATTN_ROWS */
    STI_HYB_SLOTS = 128            /* partial results of a round of decoding */
};

/* Running log-sum-exp of a query over the last C tokens (the softmax of STILL eq. 3),
 * and the weight of its own token relative to e^self_m. */
typedef struct sti_hyb_score {
    double m, l, self_m, self;
} sti_hyb_score;

/* A candidate for the salient list. */
typedef struct sti_hyb_entry {
    uint64_t rank; /* the larger the better */
    int32_t at; /* >= 0: slot of the list; < 0: token -1 - at of the retiring chunk */
} sti_hyb_entry;

/* One chunk's retirement, for one selection head. */
typedef struct sti_hyb_retiring {
    sti_hyb_entry *entry;     /* [C + cap] */
    uint8_t *stays, *evicted; /* [C], [cap] */
    float *likeness;          /* [C]: of the chunk's keys, where the score needs it */
    int32_t *fold;            /* [C]: tokens to fold, as `at` above; slots come last */
    int n_fold, n_evicted;    /* of `fold`: all, slots */
    float *phi, *value;       /* [KEYS, ldp], [KEYS, D]: of those folded together */
} sti_hyb_retiring;

/* One worker's scratch. Each worker rebuilds these pointers (sti_hyb_worker_of): a copy
 * written by the caller costs a cache-line transfer per step. */
typedef struct sti_hyb_worker {
    sti_attn_tile t;
    float *q_far;              /* [ROWS, LDQ]: queries for far keys, scaled */
    int8_t *digits_far;        /* as those of t, for far keys */
    float *tail_m, *tail_l;    /* [ROWS]: the part of a block among the last C tokens */
    float *self;               /* [ROWS]: weight of the query's own token */
    sti_hyb_score *score;      /* [ROWS] */
    float *lin, *den;          /* [ROWS, ldo], [ROWS]: phi s, phi.z */
    float *x, *u, *phi;        /* [KEYS, D], [KEYS, ldu], [KEYS, ldp] */
    float *sum;                /* [P, D] */
    struct sti_hyb_unit *unit; /* [SLOTS]: of a round of decoding */
} sti_hyb_worker;

/* Which tokens a block has: part of the window, of the salient list, or the state. */
typedef enum sti_hyb_part {
    STI_HYB_START, /* nothing yet */
    STI_HYB_PREVIOUS,
    STI_HYB_OWN,
    STI_HYB_FAR,
    STI_HYB_NEAR,
    STI_HYB_LINEAR,
    STI_HYB_END
} sti_hyb_part;

/* Keys [lo, hi) from `slot` on, which starts a panel of the ring or of the list. */
typedef struct sti_hyb_block {
    sti_hyb_part part;
    int slot, lo, hi;
    int offset; /* in the chunk, of key 0 (window) */
} sti_hyb_block;

/* Decoding: one block for one selection head of one session. */
typedef struct sti_hyb_unit {
    const sti_hybrid_args *a;
    sti_hyb_block b;
    int sel;
    int row; /* of the call: where the session's sums are kept */
    bool first, last;
    bool stores; /* the new token is in this block, and in no other: store it first */
    int64_t middle; /* cost of the units before and half of its own */
} sti_hyb_unit;

/* Where in the units of a call a round of decoding begins. */
typedef struct sti_hyb_place {
    int session, sel;
    int row;          /* of the session */
    sti_hyb_block at; /* of the selection head; START: its first */
    bool first;       /* no unit of that head has been in a round */
} sti_hyb_place;

/* What worker 0 leaves of a round of decoding. */
typedef struct sti_hyb_round {
    sti_hyb_place next; /* where the next one begins */
    int n, workers;     /* units, and shares they were cut into */
    int64_t cost;       /* of all units */
} sti_hyb_round;

/* Results of a unit, [group, ...]. */
typedef struct sti_hyb_slot {
    float *o; /* [group, ldo] */
    float *m, *l, *tail_m, *tail_l, *self;
} sti_hyb_slot;

typedef struct sti_hyb {
    const sti_hybrid_settings *set; /* of the call; all its sessions have these */
    const sti_attn_kernels *f;
    const sti_hybrid_kernels *k;
    const sti_row_kernels *rows;
    int H, G, D, F, S, P, C;
    int group;         /* query heads of a selection head */
    int per_kv;        /* query heads of a kv head */
    int ldo, ldu, ldp; /* row strides: outputs, u, features */
    float scale;       /* 1 / sqrt(D) */
    bool scored;       /* tokens get a score when they arrive */
    bool self;         /* it needs the weight that a token gives itself */
    bool received, rotates;
    bool may_retire; /* a chunk may leave the window in this call */
    sti_pool *pool;
    int workers;
    const float *cap_rope; /* [2, D/2]: cos, sin of RoPE at position_cap */
    /* Scratch. */
    unsigned char *areas; /* of the workers, area_bytes each */
    size_t area_bytes;
    sti_hyb_retiring *retiring; /* [S]; laid out if may_retire */
    sti_hyb_round *round;
    float *slots;               /* [SLOTS, group, ldo + 5] */
    float *M, *L;               /* [rows, H] */
    float *window_m, *window_l; /* [rows, H]: of the window alone */
    sti_hyb_score *score;       /* [rows, H] */
    /* The current step or round. */
    const sti_hybrid_args *a; /* the session of a step; all sessions in decoding */
    int n;                    /* sessions in decoding */
    int row, tokens;          /* of the step: rows of a->in */
    int base;                 /* the session's first row in the call */
    bool units_store;         /* units of decoding store the new keys */
    sti_hyb_place from;       /* where the round begins */
} sti_hyb;

static inline int sti_hyb_kv_of(const sti_hyb *h, int sel)
{
    return sel * h->group / h->per_kv;
}
static inline bool sti_hyb_in_window(const sti_hyb_block *b)
{
    return b->part == STI_HYB_PREVIOUS || b->part == STI_HYB_OWN;
}
/* The tile with the queries for far keys. */
static inline sti_attn_tile sti_hyb_far_tile(const sti_hyb_worker *w)
{
    sti_attn_tile t = w->t;
    t.q = w->q_far;
    t.digits = w->digits_far;
    return t;
}
/* Row `row` of the call, query head `head`. */
static inline size_t sti_hyb_query_at(const sti_hyb *h, int row, int head)
{
    return ((size_t)row * h->H + head) * (size_t)h->D;
}
/* Before the first block. */
static inline sti_hyb_score sti_hyb_no_score(void)
{
    return (sti_hyb_score){-INFINITY, 0, -INFINITY, 0};
}
static inline sti_dtype sti_hyb_type(const sti_hybrid_state *st)
{
    return st->kv_size == 2 ? STI_F16 : STI_F32;
}
/* Row `row` of an array of values. */
static inline void *sti_hyb_row(const sti_hyb *h, const sti_hybrid_state *st,
                                void *base, size_t row)
{
    return (char *)base + row * (size_t)h->D * st->kv_size;
}

/* The window of kv head g, as a list. */
static inline sti_hybrid_list sti_hyb_ring(const sti_hyb *h, int g)
{
    return (sti_hybrid_list){(size_t)g * 2 * (size_t)h->C, 2 * h->C};
}

/* A key in its panel: elements `step` apart. */
typedef struct sti_hyb_key {
    void *p;
    int step;
} sti_hyb_key;

static inline sti_hyb_key sti_hyb_key_at(const sti_hyb *h, const sti_hybrid_state *st,
                                         void *base, sti_hybrid_list l, int slot)
{
    const int first = slot / STI_ATTN_PANEL * STI_ATTN_PANEL, left = l.capacity - first;
    const size_t at = (l.first + (size_t)first) * (size_t)h->D;
    return (sti_hyb_key){(char *)base + (at + (size_t)(slot - first)) * st->kv_size,
                         left < STI_ATTN_PANEL ? left : STI_ATTN_PANEL};
}
static inline sti_hyb_key
sti_hyb_window_key(const sti_hyb *h, const sti_hybrid_state *st, int g, int slot)
{
    return sti_hyb_key_at(h, st, st->win_k, sti_hyb_ring(h, g), slot);
}

/* A worker's part of a step in which every head has `each` items. Whole panels, so that
 * no two workers write one line. */
typedef struct sti_hyb_share {
    int64_t at, end;
    int each;
} sti_hyb_share;

static inline sti_hyb_share sti_hyb_share_of(int heads, int each, int w, int workers)
{
    sti_hyb_share s = {.each = each};
    sti_split((int64_t)heads * each, STI_ATTN_PANEL, w, workers, &s.at, &s.end);
    return s;
}
/* The next items [*lo, *hi) of one head; false: no more. */
static inline bool sti_hyb_share_next(sti_hyb_share *s, int *head, int *lo, int *hi)
{
    if (s->at >= s->end) return false;
    const int64_t left = s->end - s->at;
    *head = (int)(s->at / s->each);
    *lo = (int)(s->at % s->each);
    *hi = left < s->each - *lo ? *lo + (int)left : s->each;
    s->at += *hi - *lo;
    return true;
}

/* Copies a key [D], in the state's type, out of a panel and into one. */
void sti_hyb_take_key(const sti_hyb *h, const sti_hybrid_state *st, sti_hyb_key from,
                      void *x);
void sti_hyb_put_key(const sti_hyb *h, const sti_hybrid_state *st, sti_hyb_key to,
                     const void *x);
/* x [D] in the state's type: x itself, or a copy in buffer [D]. */
const void *sti_hyb_narrow(const sti_hyb *h, const sti_hybrid_state *st, const float *x,
                           uint16_t *buffer);

/* hybrid.c */

sti_hyb_worker sti_hyb_worker_of(const sti_hyb *h, int w);
/* Stores keys and values of kv head g: of tokens [i, i + n) from the session's position
 * on, of which token 0 is row `row` of the call. */
void sti_hyb_store_kv(const sti_hyb *h, const sti_hybrid_args *a, int g, int row, int i,
                      int n);

/* retire.c */

/* STILL eq. 8, 9: a new chunk of session `a` begins, so the chunk before the last
 * retires. */
void sti_hyb_retire(const sti_hyb *h, const sti_hybrid_args *a);
/* Without a window: folds row `row` of the call at once. */
void sti_hyb_fold_token(const sti_hyb *h, const sti_hyb_worker *w,
                        const sti_hybrid_args *a, int sel, int row, int64_t position);
/* STILL eq. 6: phi [n, ldp] of rows x, ldx apart; u and phi: rows `step` apart. */
void sti_hyb_map(const sti_hyb *h, const sti_hybrid_settings *set, const float *W,
                 float bias, const float *x, int ldx, int n, int step, float *u,
                 float *phi);

/* query.c; tasks for the pool, arg is a sti_hyb. */
void sti_hyb_prefill_work(void *h, int w, int workers); /* the step's tokens */
void sti_hyb_receive_work(void *h, int w, int workers); /* weights that keys received */
void sti_hyb_stream_work(void *h, int w, int workers);  /* sessions without window */
/* Advances *b to the next block, for tokens of chunk offset < end, or to part END. */
void sti_hyb_next_block(const sti_hyb *h, const sti_hybrid_args *a, int64_t chunk,
                        int sel, int end, sti_hyb_block *b);

/* Steps of query.c that decode.c uses; comments are at their definitions. */
sti_attn_rows sti_hyb_rows(const sti_hyb *h, const sti_hybrid_state *st, int sel,
                           const sti_hyb_block *b, bool keys);
void sti_hyb_queries(const sti_hyb *h, const sti_hyb_worker *w,
                     const sti_hybrid_args *a, int sel, int row, int n);
void sti_hyb_linear(const sti_hyb *h, const sti_hyb_worker *w, const sti_hybrid_args *a,
                    int sel, int row, int n, float *lin, float *den);
void sti_hyb_tail_lse(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_block *b,
                      int row, int n, int offset);
void sti_hyb_self_weight(const sti_hyb *h, const sti_hyb_worker *w,
                         const sti_hyb_block *b, int row, int n, int keys, int offset);
void sti_hyb_lse_update(sti_hyb_score *s, float m, float l, float self);
void sti_hyb_score_token(const sti_hyb *h, const sti_hybrid_args *a, int sel, int row,
                         int64_t position, const sti_hyb_score *s);
void sti_hyb_joint_output(const sti_hyb *h, const sti_hybrid_args *a, int row, int sel,
                          int i, const float *o, float M, float L, const float *lin,
                          float den_lin);

/* decode.c: the next token of every session of h->a that gets one. Chunks have retired,
 * and the new keys are stored unless units do that (h->units_store). */
void sti_hyb_decode(sti_dev *dev, sti_hyb *h);

#endif
