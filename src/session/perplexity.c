/* perplexity.c - how surprised a model is by a text.
 *
 * A window is fed a piece at a time, so that even a window of a million tokens shows
 * progress and can be cancelled; the results do not depend on the pieces. */
#include <math.h>
#include <stdlib.h>

#include "session/session.h"

enum { PIECE = 2048 };

typedef struct tally {
    still_perplexity r;
    double squares;
    float *logprob; /* [PIECE] */
} tally;

static void finish_tally(tally *t)
{
    double n = (double)t->r.n, mean = t->r.nll / n;
    double variance = t->r.n > 1 ? (t->squares - n * mean * mean) / (n - 1) : 0;
    t->r.value = exp(mean);
    /* d exp(mean) = exp(mean) d mean */
    t->r.stderr_ = t->r.value * sqrt(variance > 0 ? variance / n : 0);
}

/* Log-probabilities of tokens at .. at + n - 1 of the text. */
static still_status count(tally *t, const float *logprob, size_t at, int n, float *each,
                          still_error *err)
{
    for (int i = 0; i < n; i++) {
        if (!isfinite(logprob[i]))
            return sti_fail(err, STILL_E_NUMERIC, "log-probability of token %zu is %g",
                            at + (size_t)i, logprob[i]);
        t->r.nll -= logprob[i];
        t->squares += (double)logprob[i] * logprob[i];
        t->r.n++;
        if (each) each[at + (size_t)i] = logprob[i];
    }
    return STILL_OK;
}

/* log p of the first token of a piece, from the logits the last piece left. */
static still_status score_first(still_session *s, int32_t tok, float *logprob,
                                still_error *err)
{
    const int vocab = s->model->cfg.vocab;
    const float *x = s->logits;
    STI_TRY(sti_model_check_tokens(s->model, &tok, 1, err));
    int top = 0;
    for (int i = 1; i < vocab; i++)
        if (x[i] > x[top]) top = i;
    double others = 0; /* the top itself adds 1 */
    for (int i = 0; i < vocab; i++)
        if (i != top) others += exp((double)x[i] - (double)x[top]);
    *logprob = (float)((double)x[tok] - (double)x[top] - log1p(others));
    return STILL_OK;
}

static still_status piece(still_session *s, tally *t, const int32_t *ids, size_t at,
                          int n, float *each, still_error *err)
{
    if (still_session_length(s) > 0) {
        STI_TRY(score_first(s, ids[at], t->logprob, err));
        STI_TRY(count(t, t->logprob, at, 1, each, err));
    }
    STI_TRY(still_session_logprobs(s, ids + at, n, t->logprob, NULL, err));
    return count(t, t->logprob, at + 1, n - 1, each, err);
}

still_status still_perplexity_run(still_session *s, const int32_t *ids, size_t n,
                                  int ctx, float *each, still_progress_fn cb,
                                  void *user, still_perplexity *out, still_error *err)
{
    if (ctx < 2 || ctx > s->cfg.ctx)
        return sti_fail(err, STILL_E_ARG,
                        "windows of %d tokens: must be 2 to %d, the session's context",
                        ctx, s->cfg.ctx);
    if (n < 2)
        return sti_fail(err, STILL_E_ARG,
                        "the text has %zu tokens; perplexity needs at least 2", n);
    tally t = {.logprob = sti_alloc(PIECE, sizeof *t.logprob)};
    if (!t.logprob) return sti_fail_memory(err, "perplexity", PIECE * sizeof(float));
    for (size_t i = 0; each && i < n; i++) each[i] = NAN;
    still_status st = STILL_OK;
    for (size_t start = 0; start + 1 < n && st == STILL_OK; start += (size_t)ctx) {
        size_t end = n - start < (size_t)ctx ? n : start + (size_t)ctx;
        still_session_reset(s);
        t.r.windows++;
        for (size_t at = start; at < end && st == STILL_OK;) {
            int len = end - at < PIECE ? (int)(end - at) : PIECE;
            st = piece(s, &t, ids, at, len, each, err);
            at += (size_t)len;
            if (st != STILL_OK || t.r.n == 0) continue;
            finish_tally(&t);
            *out = t.r; /* a running value for progress, and when cancelled */
            if (cb && !cb(user, at, n))
                st = sti_fail(err, STILL_E_CANCELLED, "stopped after %llu tokens",
                              (unsigned long long)t.r.n);
        }
    }
    free(t.logprob);
    return st;
}
