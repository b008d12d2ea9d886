/* feed.c - tokens into sessions: a prompt into one, or the next token of several.
 *
 * All arguments are checked before the first row is computed, so a failed call leaves the
 * session unchanged. The exception is results that are not finite: they are found
 * afterwards, and the session's past is then lost. */
#include <string.h>

#include "session/session.h"

enum { MOST_HEAD_ROWS = 512 };

still_status sti_session_take_logits(still_session *s, int row, still_error *err)
{
    const still_model *m = s->model;
    const size_t vocab = (size_t)m->cfg.vocab;
    return m->be->mem_move(m->dev, s->logits, m->scratch.logits + (size_t)row * vocab,
                           vocab * sizeof(float), err);
}

/* The logits of one row of the last pass; written in place where the backend can. */
static still_status make_logits(still_session *s, int row, still_error *err)
{
    if (s->model->be->host_memory)
        return sti_model_logits_to(s->model, row, s->logits, err);
    STI_TRY(sti_model_logits(s->model, row, 1, err));
    return sti_session_take_logits(s, 0, err);
}

static still_status check_limit(const still_session *s, int n, still_error *err)
{
    if (n < 0) return sti_fail(err, STILL_E_ARG, "%d tokens cannot be fed", n);
    if (n > s->cfg.ctx - s->length)
        return sti_fail(
            err, STILL_E_LIMIT,
            "%d tokens do not fit: the session holds %d of %d; use a larger "
            "context or a shorter prompt",
            n, s->length, s->cfg.ctx);
    return STILL_OK;
}

/* ---- Feeding one session ------------------------------------------------- */

typedef struct score_request {
    const int32_t *tok;
    int n;
    float *logprob;
    int32_t *top; /* [n-1], or [n-1, k] with top_logprob; may be NULL */
    int k;
    float *top_logprob; /* NULL: only the most likely id is wanted */
} score_request;

/* The k most likely of a row of logits, whose `target` has log-probability lp. */
static void best_of_row(const float *logits, int vocab, int32_t target, float lp, int k,
                        int32_t *top, float *top_logprob)
{
    int have = 0;
    for (int32_t id = 0; id < vocab; id++) {
        if (have == k && !(logits[id] > logits[top[k - 1]])) continue;
        int at = have < k ? have++ : k - 1;
        for (; at > 0 && logits[id] > logits[top[at - 1]]; at--) top[at] = top[at - 1];
        top[at] = id;
    }
    for (int i = 0; i < k; i++) top_logprob[i] = lp + (logits[top[i]] - logits[target]);
}

/* log p of the next token of each row of a batch, a slice of rows at a time; row 0 is
 * token `at` of the call. */
static still_status score_rows(still_session *s, const score_request *r, int at,
                               int rows, still_error *err)
{
    still_model *m = s->model;
    int32_t own_top[MOST_HEAD_ROWS];
    bool one = r->top && !r->top_logprob;
    const int most =
        m->scratch.head_rows < MOST_HEAD_ROWS ? m->scratch.head_rows : MOST_HEAD_ROWS;
    for (int i = 0; i < rows; i += most) {
        int n = rows - i < most ? rows - i : most;
        if (at + i + n > r->n - 1) n = r->n - 1 - (at + i); /* the last has no next */
        if (n <= 0) break;
        STI_TRY(sti_model_logits(m, i, n, err));
        STI_TRY(
            m->be->logprob(m->dev,
                           &(sti_logprob_args){.logits = m->scratch.logits,
                                               .target = r->tok + at + i + 1,
                                               .M = n,
                                               .V = m->cfg.vocab,
                                               .logprob = r->logprob + at + i,
                                               .top = one ? r->top + at + i : own_top},
                           err));
        for (int j = at + i; j < at + i + n; j++)
            STI_TRY(sti_session_check(s, r->tok, j + 1, r->logprob[j], err));
        for (int j = 0; j < n && r->top && r->top_logprob; j++) {
            size_t row = (size_t)(at + i + j), k = (size_t)r->k;
            STI_TRY(sti_session_take_logits(s, j, err));
            best_of_row(s->logits, m->cfg.vocab, r->tok[row + 1], r->logprob[row], r->k,
                        r->top + row * k, r->top_logprob + row * k);
        }
    }
    return STILL_OK;
}

/* Rows of the next call: a batch, cut at a boundary that must be saved. */
static int rows_of(const still_session *s, int length, int left)
{
    int rows = left < s->cfg.batch ? left : s->cfg.batch;
    if (s->rollback > 0 && !sti_session_keeps_all(s)) {
        int chunk = sti_session_chunk(s);
        int to_boundary = chunk - length % chunk;
        if (to_boundary < rows) rows = to_boundary;
    }
    return rows;
}

static still_status feed(still_session *s, const int32_t *tok, int n,
                         const score_request *score, still_error *err)
{
    STI_TRY(check_limit(s, n, err));
    if (n == 0) return STILL_OK;
    STI_TRY(sti_model_check_tokens(s->model, tok, n, err));
    still_status st;
    if (n == 1 && !score && sti_session_take_ahead(s, tok[0], &st, err)) return st;
    int rows = 0;
    for (int at = 0; at < n; at += rows) {
        int past = s->length + at;
        rows = rows_of(s, past, n - at);
        sti_sequence q = {
            .n = rows, .past = past, .memory = s->layer, .session = s->number};
        STI_TRY(sti_model_forward(s->model, &s->cfg, tok + at, &q, 1, err));
        if (score) STI_TRY(score_rows(s, score, at, rows, err));
        STI_TRY(sti_session_mark(s, past + rows, err));
    }
    STI_TRY(make_logits(s, rows - 1, err));
    STI_TRY(sti_session_check(s, tok, n, s->logits[0], err));
    s->length += n;
    s->has_logits = true;
    return STILL_OK;
}

still_status still_session_feed(still_session *s, const int32_t *tok, int n,
                                still_error *err)
{
    return feed(s, tok, n, NULL, err);
}

still_status still_session_logprobs(still_session *s, const int32_t *tok, int n,
                                    float *logprob, int32_t *top, still_error *err)
{
    return feed(s, tok, n, &(score_request){tok, n, logprob, top, 1, NULL}, err);
}

still_status still_session_top_logprobs(still_session *s, const int32_t *tok, int n,
                                        int k, float *logprob, int32_t *top,
                                        float *top_logprob, still_error *err)
{
    int vocab = s->model->cfg.vocab;
    if (k < 1 || k > vocab)
        return sti_fail(err, STILL_E_ARG, "the %d most likely of %d tokens", k, vocab);
    return feed(s, tok, n, &(score_request){tok, n, logprob, top, k, top_logprob}, err);
}

/* ---- Stepping several ---------------------------------------------------- */

static still_status check_step(still_session **s, const int32_t *tok, int n,
                               still_error *err)
{
    for (int i = 0; i < n; i++) {
        if (s[i]->model != s[0]->model)
            return sti_fail(err, STILL_E_ARG, "session %d is of another model", i);
        if (strcmp(s[i]->settings, s[0]->settings) != 0)
            return sti_fail(err, STILL_E_ARG,
                            "session %d keeps its past in another way than session 0",
                            i);
        STI_TRY(check_limit(s[i], 1, err));
    }
    return sti_model_check_tokens(s[0]->model, tok, n, err);
}

/* What a step leaves of each session: its logits, or its most likely id. */
typedef struct step_request {
    int32_t *top;           /* [n], -1 where it failed; NULL: the logits of all */
    const bool *keep;       /* [n] logits of these, too; NULL: of none */
    const uint64_t *enough; /* and where top is not among these bits; NULL: any is */
} step_request;

static bool keeps(const step_request *r, int i)
{
    if (!r->top || (r->keep && r->keep[i])) return true;
    const int32_t id = r->top[i];
    return id >= 0 && r->enough && !(r->enough[id / 64] >> (id % 64) & 1);
}

/* One pass of `rows` sessions, from session `at` of the call on. *first: the first
 * failure of one of them. What concerns all is returned. */
static still_status step_rows(still_session **s, const int32_t *tok, int at, int rows,
                              const step_request *r, still_status *first,
                              still_error *err)
{
    still_model *m = s[0]->model;
    sti_sequence seq[MOST_HEAD_ROWS];
    float logprob[MOST_HEAD_ROWS];
    still_error why;
    s += at;
    tok += at;
    for (int i = 0; i < rows; i++)
        seq[i] = (sti_sequence){.n = 1,
                                .past = s[i]->length,
                                .memory = s[i]->layer,
                                .session = s[i]->number};
    STI_TRY(sti_model_forward(m, &s[0]->cfg, tok, seq, rows, err));
    if (rows == 1 && !r->top) {
        STI_TRY(make_logits(s[0], 0, err));
        return sti_session_check(s[0], tok, 1, s[0]->logits[0], err);
    }
    STI_TRY(sti_model_logits(m, 0, rows, err));
    if (r->top)
        STI_TRY(m->be->logprob(m->dev,
                               &(sti_logprob_args){.logits = m->scratch.logits,
                                                   .target = tok,
                                                   .M = rows,
                                                   .V = m->cfg.vocab,
                                                   .logprob = logprob,
                                                   .top = r->top + at},
                               err));
    for (int i = 0; i < rows; i++)
        if (keeps(r, at + i)) STI_TRY(sti_session_take_logits(s[i], i, err));
    for (int i = 0; i < rows; i++) { /* looking for a reason takes the logits' place */
        const float result = r->top ? logprob[i] : s[i]->logits[0];
        const still_status st = sti_session_check(s[i], tok + i, 1, result, &why);
        if (st == STILL_OK) continue;
        if (r->top) r->top[at + i] = -1;
        if (*first != STILL_OK) continue;
        *first = st;
        if (err) *err = why;
    }
    return STILL_OK;
}

/* *first: as in step_rows. */
static still_status step_all(still_session **s, const int32_t *tok, int n,
                             const step_request *r, still_status *first,
                             still_error *err)
{
    if (n <= 0) return STILL_OK;
    STI_TRY(check_step(s, tok, n, err));
    int most = s[0]->model->scratch.head_rows;
    if (most > MOST_HEAD_ROWS) most = MOST_HEAD_ROWS;
    for (int at = 0; at < n; at += most) {
        const int rows = n - at < most ? n - at : most;
        STI_TRY(step_rows(s, tok, at, rows, r, first, err));
    }
    for (int i = 0; i < n && (r->top || *first == STILL_OK); i++) {
        if (r->top && r->top[i] < 0) continue;
        s[i]->length++;
        s[i]->has_logits = keeps(r, i);
        STI_TRY(sti_session_mark(s[i], s[i]->length, err));
    }
    return STILL_OK;
}

static still_status step(still_session **s, const int32_t *tok, int n,
                         const step_request *r, still_error *err)
{
    still_status first = STILL_OK;
    const still_status st = step_all(s, tok, n, r, &first, err);
    for (int i = 0; st != STILL_OK && r->top && i < n; i++) r->top[i] = -1;
    return st != STILL_OK ? st : first;
}

still_status still_session_step(still_session **s, const int32_t *tok, int n,
                                still_error *err)
{
    return step(s, tok, n, &(step_request){0}, err);
}

still_status still_session_step_top(still_session **s, const int32_t *tok, int n,
                                    int32_t *top, still_error *err)
{
    return step(s, tok, n, &(step_request){.top = top}, err);
}

still_status still_session_step_some(still_session **s, const int32_t *tok, int n,
                                     const bool *keep, const uint64_t *enough,
                                     int32_t *top, still_error *err)
{
    return step(s, tok, n, &(step_request){top, keep, enough}, err);
}
