/* hybrid_cpu.h - what the files of the recurrent hybrid operator share.
 *
 *   hybrid.c        the entry: checks, scratch, a call cut into steps
 *   hybrid_leave.c  a chunk leaves the window: selection, eviction, folding
 *   hybrid_query.c  queries meet window, salient keys and state
 *
 * A step is the part of one chunk that lies in this call: window, salient list and
 * state are then fixed but for the step's own tokens, and a ring of two chunks is
 * enough for any prompt. Numbers depend on positions, never on how a prompt was cut:
 * blocks of keys start at the chunk's first token or at the list's first slot, and
 * every sum has one order. */
#ifndef STI_BACKEND_CPU_HYBRID_CPU_H
#define STI_BACKEND_CPU_HYBRID_CPU_H

#include "backend/cpu/attn_tile.h"
#include "backend/cpu/hybrid_rows.h"

enum {
    STI_HYB_KEYS = STI_ATTN_BLOCK,   /* folded at a time; >= STI_ATTN_ROWS */
    STI_HYB_LDT = STI_HYB_KEYS + 16, /* row stride of transposed features */
    STI_HYB_SLOTS = 128              /* partial results of a round of decoding */
};

/* The log-sum-exp of a query over the last C tokens, as its blocks come in, and the
 * weight of its own token relative to e^self_m. */
typedef struct sti_hyb_score {
    double m, l, self_m, self;
} sti_hyb_score;

/* A candidate for the salient list. */
typedef struct sti_hyb_entry {
    float score;
    int32_t position;
    int32_t at; /* >= 0: slot of the list; < 0: token -1 - at of the leaving chunk */
} sti_hyb_entry;

typedef struct sti_hyb_worker {
    sti_attn_tile t;
    float *q_far;             /* [ROWS, LDQ]: queries as far keys see them, scaled */
    float *tail_m, *tail_l;   /* [ROWS]: the part of a block among the last C tokens */
    float *self;              /* [ROWS]: weight of the query's own token */
    sti_hyb_score *score;     /* [ROWS] */
    float *lin, *den;         /* [ROWS, ldo], [ROWS]: phi s, phi.z */
    float *x, *u, *phi;       /* [KEYS, D], [KEYS, ldu], [KEYS, ldp] */
    float *phi_t, *value;     /* [P, LDT], [KEYS, D] */
    float *sum;               /* [max(P, 1), D] */
    sti_hyb_entry *entry;     /* [C + cap] */
    uint8_t *stays, *evicted; /* [C], [cap] */
} sti_hyb_worker;

/* A block of keys of one selection head, or the state. */
typedef enum sti_hyb_part {
    STI_HYB_START, /* nothing yet */
    STI_HYB_PREVIOUS,
    STI_HYB_OWN,
    STI_HYB_FAR,
    STI_HYB_NEAR,
    STI_HYB_LINEAR,
    STI_HYB_END
} sti_hyb_part;

typedef struct sti_hyb_block {
    sti_hyb_part part;
    int slot;   /* of its first key: of the window's ring, or of the list */
    int offset; /* of its first key in the chunk (window) */
    int n;      /* keys */
} sti_hyb_block;

/* Decoding: one block for one selection head of one session. */
typedef struct sti_hyb_unit {
    const sti_hybrid_args *a;
    sti_hyb_block b;
    int sel;
    int row; /* of the call: where the session's sums are kept */
    bool first, last;
} sti_hyb_unit;

/* Results of a unit, [group, ...]. */
typedef struct sti_hyb_slot {
    float *o; /* [group, ldo] */
    float *m, *l, *tail_m, *tail_l, *self;
} sti_hyb_slot;

typedef struct sti_hyb {
    const sti_attn_kernels *f;
    const sti_hybrid_kernels *k;
    int H, G, D, F, S, P, C;
    int group;         /* query heads of a selection head */
    int per_kv;        /* query heads of a kv head */
    int ldo, ldu, ldp; /* row strides: outputs, u, features */
    float scale;       /* 1 / sqrt(D) */
    bool scored, received, rotates;
    int workers;
    /* Scratch. */
    sti_hyb_worker *worker;     /* [workers] */
    sti_hyb_unit *unit;         /* [SLOTS] */
    float *slots;               /* [SLOTS, group, ldo + 5] */
    float *turn;                /* [D]: cos, sin of the rotation by position_cap */
    float *M, *L;               /* [rows, H] */
    float *window_m, *window_l; /* [rows, H]: of the window alone */
    sti_hyb_score *score;       /* [rows, H] */
    /* The work at hand. */
    const sti_hybrid_args *a; /* the session of a step; all sessions in decoding */
    int n;                    /* sessions in decoding */
    int row, tokens;          /* of the step: rows of a->in */
    int base;                 /* row of the call that the session's first is */
    int n_units;
} sti_hyb;

static inline int sti_hyb_kv_of(const sti_hyb *h, int sel)
{
    return sel * h->group / h->per_kv;
}
static inline sti_dtype sti_hyb_type(const sti_hybrid_state *st)
{
    return st->kv_size == 2 ? STI_F16 : STI_F32;
}
/* Row `row` of an array of keys or values. */
static inline void *sti_hyb_row(const sti_hyb *h, const sti_hybrid_state *st,
                                void *base, size_t row)
{
    return (char *)base + row * (size_t)h->D * st->kv_size;
}

/* hybrid_leave.c */

/* Chunk c - 2 leaves before the first token of chunk c; selection head `sel`. */
void sti_hyb_leave(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                   int sel, int64_t c);
/* Folds one token, row `row` of the call, at once (no window). */
void sti_hyb_fold_token(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                        int sel, int row, int64_t position);
/* x [D] turns by `position` (backwards if negative); angles in double. */
void sti_hyb_rotate(const sti_hyb *h, const sti_hybrid_in *in, float *x,
                    double position);
/* phi [n, ldp] of rows x, ldx apart; rows of u and phi are `step` apart. */
void sti_hyb_map(const sti_hyb *h, const sti_hybrid_settings *set, const float *W,
                 float bias, const float *x, int ldx, int n, int step, float *u,
                 float *phi);

/* hybrid_query.c; tasks for the pool, arg is a sti_hyb. */
void sti_hyb_prefill_work(void *h, int w, int workers); /* the step's tokens */
void sti_hyb_unit_work(void *h, int w, int workers);    /* units of decoding */
void sti_hyb_join_work(void *h, int w, int workers);    /* and their results */
void sti_hyb_receive_work(void *h, int w, int workers); /* weights keys received */
void sti_hyb_stream_work(void *h, int w, int workers);  /* sessions without window */
/* The block after *b for tokens of chunk offset < end; b->part END: no more. */
void sti_hyb_next_block(const sti_hyb *h, const sti_hybrid_args *a, int64_t chunk,
                        int sel, int end, sti_hyb_block *b);

#endif
