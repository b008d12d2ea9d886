/* perplexity.c - how surprised a model is by a text. */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "session/session.h"

static void finish(still_perplexity *r, double sum_squares)
{
    double n = (double)r->n, mean = r->nll / n;
    double variance = r->n > 1 ? (sum_squares - n * mean * mean) / (n - 1) : 0;
    r->value = exp(mean);
    /* d exp(mean) = exp(mean) d mean */
    r->stderr_ = r->value * sqrt(variance > 0 ? variance / n : 0);
}

still_status still_perplexity_run(still_session *s, const int32_t *ids, size_t n,
                                  int ctx, still_progress_fn cb, void *user,
                                  still_perplexity *out, still_error *err)
{
    if (ctx < 2 || ctx > s->cfg.ctx)
        return sti_fail(err, STILL_E_ARG,
                        "windows of %d tokens: must be 2 to %d, the session's context",
                        ctx, s->cfg.ctx);
    if (n < 2)
        return sti_fail(err, STILL_E_ARG,
                        "the text has %zu tokens; perplexity needs at least 2", n);
    float *logprob = sti_alloc((size_t)ctx, sizeof *logprob);
    if (!logprob) return sti_fail_memory(err, "perplexity", (size_t)ctx * 4);
    still_perplexity r = {0};
    double squares = 0;
    still_status st = STILL_OK;
    for (size_t at = 0; at + 1 < n && st == STILL_OK; at += (size_t)ctx) {
        int len = n - at < (size_t)ctx ? (int)(n - at) : ctx;
        still_session_reset(s);
        st = still_session_score(s, ids + at, len, logprob, NULL, err);
        for (int i = 0; i < len - 1 && st == STILL_OK; i++) {
            if (!isfinite(logprob[i])) {
                st =
                    sti_fail(err, STILL_E_NUMERIC, "log-probability of token %zu is %g",
                             at + (size_t)i + 1, logprob[i]);
                break;
            }
            r.nll -= logprob[i];
            squares += (double)logprob[i] * logprob[i];
            r.n++;
        }
        r.windows++;
        if (st == STILL_OK) {
            finish(&r, squares);
            *out = r; /* a running value for whoever watches, also when cancelled */
            if (cb && !cb(user, at + (size_t)len, n))
                st = sti_fail(err, STILL_E_CANCELLED, "stopped after %llu tokens",
                              (unsigned long long)r.n);
        }
    }
    free(logprob);
    return st;
}
