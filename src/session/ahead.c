/* ahead.c - a token and guesses of what follows it, computed in one pass.
 *
 * A pass over a few rows streams the weights once, so it takes little longer than one over
 * a single row. Guesses are computed as if they had been fed, but the session's length
 * does not count them: a guess becomes part of the past when it is fed and its logits are
 * taken from the pass, and one that is not fed is overwritten by the token that comes in
 * its place. Nothing has to be undone, because only as many are computed as every layer
 * can abandon (sti_attn_engine.undoable): up to the end of a chunk.
 *
 * Logits stay in the model's scratch, which holds a few rows anyway. Any other use of it
 * makes the guesses void, and feeding them is then an ordinary pass. */
#include <string.h>

#include "session/session.h"

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* Rows of a pass of one certain token and n guesses: at least 1. */
static int rows_of(const still_session *s, int n)
{
    const still_model *m = s->model;
    /* A GPU's results depend on the number of rows, in the last bits. */
    if (n <= 0 || !m->be->host_memory) return 1;
    int rows = least(n, STI_AHEAD_MAX) + 1;
    rows = least(rows, s->cfg.ctx - s->length);
    rows = least(rows, least(s->cfg.batch, m->scratch.head_rows));
    for (int l = 0; l < m->cfg.layers && rows > 1; l++) {
        const sti_attn_engine *e = sti_attn_engine_of(&s->cfg, l);
        rows = least(rows, e->undoable ? e->undoable(&s->cfg, s->length) : 1);
    }
    return rows > 1 ? rows : 1;
}

/* Whether tok is the guess that may be fed now, and its logits are there. */
static bool is_ahead(const still_session *s, int32_t tok)
{
    const sti_ahead *a = &s->ahead;
    return a->next < a->n && a->tok[a->next] == tok && a->uses == s->model->uses;
}

/* The past now ends with tok; its logits are in row `row` of scratch. */
static still_status arrive(still_session *s, int32_t tok, int row, still_error *err)
{
    STI_TRY(sti_session_take_logits(s, row, err));
    STI_TRY(sti_session_check(s, &tok, 1, s->logits[0], err));
    s->length++;
    s->has_logits = true;
    return sti_session_mark(s, s->length, err);
}

bool sti_session_take_ahead(still_session *s, int32_t tok, still_status *st,
                            still_error *err)
{
    if (!is_ahead(s, tok)) {
        sti_session_forget_ahead(s);
        return false;
    }
    *st = arrive(s, tok, ++s->ahead.next, err);
    return true;
}

still_status still_session_feed_ahead(still_session *s, int32_t tok,
                                      const int32_t *guess, int n, int *rows,
                                      still_error *err)
{
    still_model *m = s->model;
    int32_t all[STI_AHEAD_MAX + 1] = {tok};
    const int n_rows = is_ahead(s, tok) ? 0 : rows_of(s, n);
    if (n_rows <= 1) {
        STI_TRY(still_session_feed(s, &tok, 1, err));
        if (rows) *rows = n_rows;
        return STILL_OK;
    }
    memcpy(all + 1, guess, (size_t)(n_rows - 1) * sizeof *guess);
    STI_TRY(sti_model_check_tokens(m, all, n_rows, err));
    const sti_sequence q = {
        .n = n_rows, .past = s->length, .memory = s->layer, .session = s->number};
    sti_session_forget_ahead(s);
    STI_TRY(sti_model_forward(m, &s->cfg, all, &q, 1, err));
    STI_TRY(sti_model_logits(m, 0, n_rows, err));
    const uint64_t uses = m->uses;
    if (s->length + n_rows > s->written) s->written = s->length + n_rows;
    STI_TRY(arrive(s, tok, 0, err));
    s->ahead = (sti_ahead){.n = n_rows - 1, .uses = uses};
    memcpy(s->ahead.tok, guess, (size_t)(n_rows - 1) * sizeof *guess);
    if (rows) *rows = n_rows;
    return STILL_OK;
}
