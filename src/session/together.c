/* together.c - see together.h.
 *
 * A pass takes as many tokens of as many pieces as fit the scratch of one session, in
 * the order of the pieces; a long piece goes on in the next pass. Rows that are asked
 * for become logits a slice at a time, so that memory does not grow with the pass. */
#include "session/together.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_SEQUENCES = 160, MOST_ROWS = 2048 };

/* One row whose logits are wanted. */
typedef struct wanted {
    int row;
    const sti_piece *piece;
    int at; /* token of the piece; n - 1: the last, with its candidates */
} wanted;

typedef struct pass {
    still_model *m;
    const sti_attn_config *cfg;
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

/* log p of target[i] in row `row` + i of the logits. */
static still_status logprob(pass *p, int row, const int32_t *target, int n,
                            float *value, int32_t *top, still_error *err)
{
    const size_t vocab = (size_t)p->m->cfg.vocab;
    return p->m->be->logprob(
        p->m->dev,
        &(sti_logprob_args){.logits = p->m->scratch.logits + (size_t)row * vocab,
                            .target = target,
                            .M = n,
                            .V = p->m->cfg.vocab,
                            .logprob = value,
                            .top = top},
        err);
}

/* The last token of a piece: its candidates, and the logits themselves. */
static still_status score_last(pass *p, const sti_piece *q, int row, still_error *err)
{
    int32_t unused;
    for (int i = 0; i < q->n_next; i++)
        STI_TRY(logprob(p, row, &q->next[i], 1, &q->next_logprob[i],
                        q->next_top ? q->next_top : &unused, err));
    STI_TRY(sti_session_take_logits(q->s, row, err));
    q->s->has_logits = true;
    return STILL_OK;
}

/* n rows whose logits have been made, the first of them wanted w. */
static still_status score_run(pass *p, const wanted *w, int n, still_error *err)
{
    int32_t target[MOST_ROWS], top[MOST_ROWS];
    float value[MOST_ROWS];
    for (int j = 0; j < n; j++) {
        const bool last = w[j].at == w[j].piece->n - 1;
        target[j] = last ? 0 : w[j].piece->tok[w[j].at + 1];
    }
    STI_TRY(logprob(p, 0, target, n, value, top, err));
    for (int j = 0; j < n; j++) {
        const sti_piece *q = w[j].piece;
        if (w[j].at == q->n - 1) {
            STI_TRY(score_last(p, q, j, err));
            continue;
        }
        q->logprob[w[j].at] = value[j];
        if (q->top) q->top[w[j].at] = top[j];
    }
    return STILL_OK;
}

/* Logits of the rows collected. Rows that follow each other become one product. */
static still_status score_rows(pass *p, still_error *err)
{
    for (int i = 0, n; i < p->n_rows; i += n) {
        for (n = 1; i + n < p->n_rows && p->row[i + n].row == p->row[i].row + n;) n++;
        STI_TRY(sti_model_logits(p->m, p->row[i].row, n, err));
        STI_TRY(score_run(p, &p->row[i], n, err));
    }
    p->n_rows = 0;
    return STILL_OK;
}

static still_status want(pass *p, int row, const sti_piece *piece, int at,
                         still_error *err)
{
    const bool last = at == piece->n - 1;
    if (last ? piece->n_next == 0 && !piece->keep_logits : at < piece->from)
        return STILL_OK;
    const int most = p->m->scratch.head_rows,
              room = most < MOST_ROWS ? most : MOST_ROWS;
    if (p->n_rows == room) STI_TRY(score_rows(p, err));
    p->row[p->n_rows++] = (wanted){row, piece, at};
    return STILL_OK;
}

/* Rows that a session takes in one pass: a ring holds its window and a batch of its
 * own, and boundaries are kept between passes. */
static int most_rows(const still_session *s, int left)
{
    int rows = left < s->cfg.batch ? left : s->cfg.batch;
    if (s->rollback > 0 && !sti_session_keeps_all(s)) {
        int to_boundary = sti_session_chunk(s) - s->length % sti_session_chunk(s);
        if (to_boundary < rows) rows = to_boundary;
    }
    return rows;
}

/* One pass from token *at of piece *i on; both move. */
static still_status run_pass(pass *p, const sti_piece *piece, int n, int *i, int *at,
                             int32_t *tok, still_error *err)
{
    sti_sequence seq[MOST_SEQUENCES];
    const sti_piece *of[MOST_SEQUENCES];
    int first[MOST_SEQUENCES], n_seq = 0, rows = 0;
    const int room = p->cfg->batch;
    while (*i < n && rows < room && n_seq < MOST_SEQUENCES) {
        const sti_piece *q = &piece[*i];
        int take = most_rows(q->s, q->n - *at);
        if (take > room - rows) take = room - rows;
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
        if (*at < q->n) break; /* a session has one place in a pass */
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

still_status sti_session_feed_together(const sti_piece *piece, int n,
                                       bool (*poll)(void *), void *user,
                                       still_error *err)
{
    if (n <= 0) return STILL_OK;
    STI_TRY(check(piece, n, err));
    still_session *widest = piece[0].s;
    for (int i = 1; i < n; i++)
        if (piece[i].s->cfg.batch > widest->cfg.batch) widest = piece[i].s;
    pass p = {.m = widest->model, .cfg = &widest->cfg};
    int32_t *tok = sti_alloc((size_t)p.cfg->batch, sizeof *tok);
    if (!tok) return sti_fail_memory(err, "rows", (size_t)p.cfg->batch * sizeof *tok);
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

/* Keys and values up to the length; a ring, which may have turned, as a whole. */
static still_status copy_layer(still_model *m, const sti_attn_config *cfg, int layer,
                               const sti_attn_memory *from, sti_attn_memory *to,
                               int length, still_error *err)
{
    const sti_attn_layer l = sti_model_attn_layer(m, layer);
    const size_t row =
        (size_t)l.head_dim * (cfg->cache == STI_F32 ? sizeof(float) : sizeof(uint16_t));
    const size_t room = (size_t)from->softmax.room,
                 held = (size_t)length < room ? (size_t)length : room;
    for (int g = 0; g < l.kv_heads; g++) {
        const size_t at = (size_t)g * room * row;
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
    if (sti_session_keeps_all(from))
        for (int l = 0; l < m->cfg.layers; l++)
            STI_TRY(copy_layer(m, &from->cfg, l, &from->layer[l], &to->layer[l],
                               from->length, err));
    else
        STI_TRY(
            m->be->mem_move(m->dev, to->state, from->state, from->state_bytes, err));
    for (int i = 0; i < to->rollback; i++) to->boundary[i].length = 0;
    to->length = from->length;
    to->has_logits = false;
    return STILL_OK;
}
