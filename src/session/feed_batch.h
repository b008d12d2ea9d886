/* feed_batch.h - several sessions of one model advanced by several tokens each in one
 * pass, with log-probabilities; and the past of one copied into another.
 *
 * Short pieces of text are slow one by one, because each pass streams all weights.
 * Ranking answers has many short pieces that do not depend on each other. */
#ifndef STI_SESSION_FEED_BATCH_H
#define STI_SESSION_FEED_BATCH_H

#include "session/session.h"

typedef struct sti_piece {
    still_session *s;
    const int32_t *tok; /* [n]: fed; n may be 0, then nothing happens */
    int n;
    /* log p(tok[i + 1] | everything up to tok[i]) goes to logprob[i], the most likely
     * id there to top[i], for i = from .. n - 2. from >= n - 1: no such row. */
    int from;
    float *logprob; /* [n - 1] */
    int32_t *top;   /* [n - 1] */
    /* Candidates for the token after the last: log p of each to next_logprob. */
    const int32_t *next; /* [n_next] */
    int n_next;
    float *next_logprob; /* [n_next] */
    int32_t *next_top;   /* the most likely id there; may be NULL */
    bool keep_logits;    /* the session has logits afterwards */
} sti_piece;

/* Feeds all pieces; no session occurs twice, and all have the same settings. Each
 * result is the one that feeding the sessions one by one would give, bit for bit. Rows
 * of a pass are at most those of the widest of the sessions (sti_session_widen). poll
 * (may be NULL) is called before each pass; false ends with STILL_E_CANCELLED. After a
 * failure the caller must reset the sessions. */
still_status sti_session_feed_batch(const sti_piece *piece, int n, bool (*poll)(void *),
                                    void *user, still_error *err);

/* Copies the past of `from` to `to`, which has the same settings and context; allocates
 * nothing. Logits and rollback boundaries are not copied. */
still_status sti_session_copy(still_session *to, const still_session *from,
                              still_error *err);

#endif
