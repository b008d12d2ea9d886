/* feed_batch.c - see feed_batch.h.
 *
 * A pass takes as many tokens of as many pieces as fit the scratch of one session,
 * in the order of the pieces; a long piece continues in the next pass. The rows
 * whose logits are wanted are gathered and computed a slice at a time, so that
 * memory does not grow with the pass. */
#include "session/feed_batch.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_SEQUENCES = 256, MOST_ROWS = 2048 };

/* One row whose logits are wanted. */
typedef struct wanted {
    int row;
    const sti_piece *piece;
    int at; /* token of the piece; n - 1: the last, with its candidates */
} wanted;

typedef struct pass {
    still_model *m;
    const sti_attn_config *cfg;
    int capacity; /* rows of a pass */
    wanted row[MOST_ROWS];
    int n_rows;
} pass;

static still_status check(const sti_piece *piece, int n, still_error *err)
{
    for (int i = 0; i < n; i++) {
        const still_session *s = piece[i].s, *first = piece[0].s;
        if (s->model != first->model || strcmp(s->settings, first->settings) != 0)
            return sti_fail(err, STILL_E_ARG,
                            "session %d cannot be computed together with session 0", i);
        if (piece[i].n < 0 || piece[i].n > s->cfg.ctx - s->length)
            return sti_fail(err, STILL_E_LIMIT,
                            "%d tokens do not fit: the session holds %d of %d",
                            piece[i].n, s->length, s->cfg.ctx);
        STI_TRY(sti_model_check_tokens(s->model, piece[i].tok, piece[i].n, err));
        STI_TRY(sti_model_check_tokens(s->model, piece[i].next, piece[i].n_next, err));
    }
    return STILL_OK;
}

/* Moves the wanted rows to the front of the pass, in order, so that one product
 * makes the logits of all. No row overwrites one that has not moved yet. */
static still_status gather(pass *p, still_error *err)
{
    const size_t width = (size_t)p->m->cfg.hidden;
    float *x = p->m->scratch.x;
    for (int i = 0, n; i < p->n_rows; i += n) {
        const int from = p->row[i].row, by = from - i;
        for (n = 1; i + n < p->n_rows && p->row[i + n].row == from + n; n++)
            if (by > 0 && n == by) break; /* rows moved in one call do not overlap */
        if (by > 0)
            STI_TRY(p->m->be->mem_move(p->m->dev, x + (size_t)i * width,
                                       x + (size_t)from * width,
                                       (size_t)n * width * sizeof *x, err));
    }
    return STILL_OK;
}

static bool is_last(const wanted *w)
{
    return w->at == w->piece->n - 1;
}

/* The target of a row with logits: the token after it or, for the last row of a piece,
 * candidate k. Rows without one get an arbitrary target. */
static int32_t target_of(const wanted *w, int k)
{
    if (is_last(w)) return k < w->piece->n_next ? w->piece->next[k] : 0;
    return w->piece->tok[w->at + 1];
}

static void take_score(const wanted *w, int k, float value, int32_t top)
{
    const sti_piece *q = w->piece;
    if (!is_last(w)) {
        q->logprob[w->at] = value;
        if (q->top) q->top[w->at] = top;
        return;
    }
    if (k < q->n_next) q->next_logprob[k] = value;
    if (q->next_top) *q->next_top = top;
}

/* Computes the logits of the collected rows and the scores that were asked for.
 * Candidates are scored one per row at a time. */
static still_status score_rows(pass *p, still_error *err)
{
    const still_model *m = p->m;
    int32_t target[MOST_ROWS], top[MOST_ROWS];
    float value[MOST_ROWS];
    const int n = p->n_rows;
    int rounds = 1;
    if (n == 0) return STILL_OK;
    STI_TRY(gather(p, err));
    STI_TRY(sti_model_logits(p->m, 0, n, err));
    for (int k = 0; k < rounds; k++) {
        for (int j = 0; j < n; j++) {
            const sti_piece *q = p->row[j].piece;
            target[j] = target_of(&p->row[j], k);
            if (is_last(&p->row[j]) && q->n_next > rounds) rounds = q->n_next;
        }
        STI_TRY(m->be->logprob(m->dev,
                               &(sti_logprob_args){.logits = m->scratch.logits,
                                                   .target = target,
                                                   .M = n,
                                                   .V = m->cfg.vocab,
                                                   .logprob = value,
                                                   .top = top},
                               err));
        for (int j = 0; j < n; j++) {
            const wanted *w = &p->row[j];
            STI_TRY(sti_session_check(w->piece->s, w->piece->tok, w->at + 1, value[j],
                                      err));
            take_score(w, k, value[j], top[j]);
        }
    }
    for (int j = 0; j < n; j++) {
        still_session *s = p->row[j].piece->s;
        if (!is_last(&p->row[j]) || !p->row[j].piece->keep_logits) continue;
        STI_TRY(sti_session_take_logits(s, j, err));
        s->has_logits = true;
    }
    p->n_rows = 0;
    return STILL_OK;
}

static still_status want(pass *p, int row, const sti_piece *piece, int at,
                         still_error *err)
{
    const bool last = at == piece->n - 1;
    if (last ? piece->n_next == 0 && !piece->next_top && !piece->keep_logits
             : at < piece->from)
        return STILL_OK;
    const int most = p->m->scratch.head_rows,
              rows = most < MOST_ROWS ? most : MOST_ROWS;
    if (p->n_rows == rows) STI_TRY(score_rows(p, err));
    p->row[p->n_rows++] = (wanted){row, piece, at};
    return STILL_OK;
}

/* Rows that a session may take in one pass: a ring holds its window and one batch, and
 * boundaries are saved between passes. */
static int most_rows(const still_session *s, int left)
{
    int rows = left < s->cfg.batch ? left : s->cfg.batch;
    if (s->rollback > 0 && !sti_session_keeps_all(s)) {
        int to_boundary = sti_session_chunk(s) - s->length % sti_session_chunk(s);
        if (to_boundary < rows) rows = to_boundary;
    }
    return rows;
}

/* One pass, starting at token *at of piece *i; advances both. */
static still_status run_pass(pass *p, const sti_piece *piece, int n, int *i, int *at,
                             int32_t *tok, still_error *err)
{
    sti_sequence seq[MOST_SEQUENCES];
    const sti_piece *of[MOST_SEQUENCES];
    int first[MOST_SEQUENCES], n_seq = 0, rows = 0;
    const int capacity = p->capacity;
    while (*i < n && rows < capacity && n_seq < MOST_SEQUENCES) {
        const sti_piece *q = &piece[*i];
        int take = most_rows(q->s, q->n - *at);
        if (take > capacity - rows) take = capacity - rows;
        if (take > 0) {
            memcpy(tok + rows, q->tok + *at, (size_t)take * sizeof *tok);
            seq[n_seq] = (sti_sequence){.n = take,
                                        .past = q->s->length,
                                        .memory = q->s->layer,
                                        .session = q->s->number};
            of[n_seq] = q;
            first[n_seq++] = *at;
            rows += take;
            *at += take;
        }
        if (*at < q->n) break; /* a session occurs once in a pass */
        ++*i;
        *at = 0;
    }
    if (rows == 0) return STILL_OK;
    STI_TRY(sti_model_forward(p->m, p->cfg, tok, seq, n_seq, err));
    for (int k = 0, row = 0; k < n_seq; k++) {
        still_session *s = of[k]->s;
        s->length += seq[k].n;
        s->has_logits = false;
        STI_TRY(sti_session_mark(s, s->length, err));
        for (int j = 0; j < seq[k].n; j++, row++)
            STI_TRY(want(p, row, of[k], first[k] + j, err));
    }
    return score_rows(p, err);
}

still_status sti_session_feed_batch(const sti_piece *piece, int n, bool (*poll)(void *),
                                    void *user, still_error *err)
{
    if (n <= 0) return STILL_OK;
    STI_TRY(check(piece, n, err));
    still_session *widest = piece[0].s;
    for (int i = 1; i < n; i++)
        if (piece[i].s->rows > widest->rows) widest = piece[i].s;
    pass p = {.m = widest->model, .cfg = &widest->cfg, .capacity = widest->rows};
    int32_t *tok = sti_alloc((size_t)p.capacity, sizeof *tok);
    if (!tok) return sti_fail_memory(err, "rows", (size_t)p.capacity * sizeof *tok);
    still_status st = STILL_OK;
    for (int i = 0, at = 0; i < n && st == STILL_OK;) {
        if (poll && !poll(user))
            st = sti_fail(err, STILL_E_CANCELLED, "stopped between two passes");
        else
            st = run_pass(&p, piece, n, &i, &at, tok, err);
    }
    free(tok);
    return st;
}

/* Keys and values up to the length; a ring, which may have wrapped, as a whole. */
static still_status copy_layer(still_model *m, const sti_attn_config *cfg, int layer,
                               const sti_attn_memory *from, sti_attn_memory *to,
                               int length, still_error *err)
{
    const sti_attn_layer l = sti_model_attn_layer(m, layer);
    const size_t row =
        (size_t)l.head_dim * (cfg->cache == STI_F32 ? sizeof(float) : sizeof(uint16_t));
    const size_t capacity = (size_t)from->softmax.capacity,
                 held = (size_t)length < capacity ? (size_t)length : capacity;
    for (int g = 0; g < l.kv_heads; g++) {
        const size_t at = (size_t)g * capacity * row;
        STI_TRY(m->be->mem_move(m->dev, (char *)to->softmax.k + at,
                                (const char *)from->softmax.k + at, held * row, err));
        STI_TRY(m->be->mem_move(m->dev, (char *)to->softmax.v + at,
                                (const char *)from->softmax.v + at, held * row, err));
    }
    return STILL_OK;
}

still_status sti_session_copy(still_session *to, const still_session *from,
                              still_error *err)
{
    if (to->model != from->model || to->state_bytes != from->state_bytes ||
        strcmp(to->settings, from->settings) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "the past of one session does not fit the other");
    still_model *m = from->model;
    /* Copy only the rows in use; on a GPU one copy of everything is faster than a
     * call per layer and head. */
    if (sti_session_keeps_all(from) && m->be->host_memory)
        for (int l = 0; l < m->cfg.layers; l++)
            STI_TRY(copy_layer(m, &from->cfg, l, &from->layer[l], &to->layer[l],
                               from->length, err));
    else
        STI_TRY(
            m->be->mem_move(m->dev, to->state, from->state, from->state_bytes, err));
    for (int i = 0; i < to->rollback; i++) to->boundary[i].length = 0;
    to->length = from->length;
    to->has_logits = false;
    sti_session_replaced(to);
    return STILL_OK;
}
