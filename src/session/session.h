/* session.h - one sequence: its memory, its length, its last logits. */
#ifndef STI_SESSION_SESSION_H
#define STI_SESSION_SESSION_H

#include "model/model.h"

typedef struct sti_boundary { /* the past as it was at a chunk boundary */
    int length;               /* 0: empty slot */
    unsigned char *state;     /* operators' memory */
} sti_boundary;

enum { STI_SETTINGS_LINE = 8192, STI_AHEAD_MAX = 31 };

/* Tokens that were computed before they were fed (ahead.c). */
typedef struct sti_ahead {
    int32_t tok[STI_AHEAD_MAX];
    int n, next;   /* of them: how many, and which of them may be fed now */
    uint64_t uses; /* of the model's scratch when their logits were put there: row
                      i + 1 has those after tok[i] */
} sti_ahead;

struct still_session {
    still_model *model;
    sti_attn_config cfg;
    /* Everything that the meaning of its memory depends on, as text: sessions with
     * equal lines can be batched and can adopt each other's past. */
    char settings[STI_SETTINGS_LINE];
    int rollback; /* boundaries kept */
    int rows;     /* capacity of a pass shared with others; cfg.batch or more */
    int length;
    bool has_logits;
    sti_ahead ahead;
    int written; /* the most tokens, guesses and what was rolled back included, that were
                    in its memory: rings have overwritten what lies far before them */
    uint64_t number;      /* see sti_sequence */
    sti_block memory;     /* of the operators: the states below lie in it */
    unsigned char *state; /* all layers' memories, one after the other */
    size_t state_bytes;
    sti_block tables;       /* of the program: everything below lies in it */
    sti_attn_memory *layer; /* [layers]: where each lies in state */
    sti_boundary *boundary; /* [rollback], a ring by chunk number */
    float *logits;          /* [vocab] after the last token */
};

/* An empty session with the settings of another and a context of its own. */
still_status sti_session_like(const still_session *s, int ctx, still_session **out,
                              still_error *err);
/* Fails with STILL_E_NUMERIC, naming the layer, unless `result`, a logit or a
 * log-probability after the last of n tokens, is finite (not_finite.c). */
still_status sti_session_check(const still_session *s, const int32_t *tok, int n,
                               float result, still_error *err);
/* Allows passes of several sessions (feed_batch.h) with up to `rows` rows. One session
 * still takes at most its batch per pass, which is at most its context. */
still_status sti_session_widen(still_session *s, int rows, still_error *err);
/* Lays out the layers' memories in a range of state_bytes at `base`: the session's
 * own, or a copy of it elsewhere. base NULL: only counts. Returns the bytes. */
size_t sti_session_lay_out(const still_session *s, void *base, sti_attn_memory *layer);
/* Copies row `row` of the model's last logits to the session. */
still_status sti_session_take_logits(still_session *s, int row, still_error *err);
/* Tokens between saved boundaries: a chunk, or a batch for methods without chunks. */
int sti_session_chunk(const still_session *s);
/* Saves the past if it is at a chunk boundary and the session keeps boundaries. */
still_status sti_session_mark(still_session *s, int length, still_error *err);
/* Feeds a token that was guessed, and whose logits are still there; false: it was not,
 * or they are not, and the guesses are forgotten. */
bool sti_session_take_ahead(still_session *s, int32_t tok, still_status *st,
                            still_error *err);
/* The past changes by other means than feeding: guesses do not follow it any more. */
static inline void sti_session_forget_ahead(still_session *s)
{
    s->ahead.n = 0;
}
/* It is another's past now, which guesses may have been written behind. */
static inline void sti_session_replaced(still_session *s)
{
    const int most = s->cfg.batch - 1;
    sti_session_forget_ahead(s);
    s->written = s->length + (most < STI_AHEAD_MAX ? most : STI_AHEAD_MAX);
}
/* Of a salient token of one list: key, value, score, position (kept.c). */
size_t sti_session_salient_bytes(const sti_hybrid_settings *set,
                                 const sti_hybrid_state *st, int D);
/* Bytes of the state of such a session once its lists are as full as their caps allow; the
 * bill states what a context fills of them. */
still_status sti_session_full_bytes(const still_model *m,
                                    const still_session_params *params, size_t *out,
                                    still_error *err);
/* Whether its past can be cut to any length because nothing was folded. */
bool sti_session_keeps_all(const still_session *s);

/* For benchmarks (synthetic.c): the session holds `length` tokens that were never fed.
 * Its memory is as full as they would make it, its numbers are random; there are no
 * logits. After failure it is empty. */
still_status sti_session_fill_synthetic(still_session *s, int length, uint64_t seed,
                                        still_error *err);
/* The same past as that of another session with equal settings and context. */
still_status sti_session_fill_like(still_session *s, const still_session *other,
                                   still_error *err);

#endif
