/* prefix_cache.c - see prefix_cache.h. */
#include "server/prefix_cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/request.h"

enum { PIECE = 512 }; /* tokens fed between two checks that the client is still there */

still_status srv_prefix_cache_new(still_model *m, still_session *s,
                                  srv_prefix_cache *out, still_error *err)
{
    size_t limit = (size_t)still_session_limit(s), wide = limit * SRV_MOST_LOGPROBS;
    *out = (srv_prefix_cache){.session = s,
                              .limit = (int)limit,
                              .vocab = still_model_get_info(m)->vocab,
                              .id = sti_alloc(limit, sizeof *out->id),
                              .logprob = sti_alloc(limit, sizeof *out->logprob),
                              .top = sti_alloc(wide, sizeof *out->top),
                              .top_logprob = sti_alloc(wide, sizeof *out->top_logprob)};
    if (out->id && out->logprob && out->top && out->top_logprob) return STILL_OK;
    srv_prefix_cache_free(out);
    return sti_fail_memory(err, "log-probabilities", wide * 8);
}

void srv_prefix_cache_free(srv_prefix_cache *p)
{
    free(p->id);
    free(p->logprob);
    free(p->top);
    free(p->top_logprob);
    *p = (srv_prefix_cache){0};
}

/* Rolls back to at most `length` tokens; to 0 if the method cannot go back that far. */
static void go_back(srv_prefix_cache *p, int length)
{
    int at;
    if (length < p->n && still_session_rollback(p->session, length, &at, NULL))
        still_session_reset(p->session);
    p->n = still_session_length(p->session);
    if (p->scored > p->n) p->scored = p->n;
}

static still_status feed(srv_prefix_cache *p, const int32_t *id, int n,
                         srv_gone_fn gone, void *user, still_error *err)
{
    while (p->n < n) {
        int piece = n - p->n < PIECE ? n - p->n : PIECE;
        if (gone && gone(user))
            return sti_fail(err, STILL_E_CANCELLED, "the client has left");
        STI_TRY(still_session_feed(p->session, id + p->n, piece, err));
        memcpy(p->id + p->n, id + p->n, (size_t)piece * sizeof *id);
        p->n += piece;
        p->fed += (uint64_t)piece;
    }
    return STILL_OK;
}

/* Row i of the scores is about token i+1, hence the offsets. */
static still_status feed_scored(srv_prefix_cache *p, const int32_t *id, int n,
                                still_error *err)
{
    size_t next = (size_t)p->n + 1, k = (size_t)p->k;
    STI_TRY(still_session_top_logprobs(p->session, id + p->n, n - p->n, p->k,
                                       p->logprob + next, p->top + next * k,
                                       p->top_logprob + next * k, err));
    memcpy(p->id + p->n, id + p->n, (size_t)(n - p->n) * sizeof *id);
    p->fed += (uint64_t)(n - p->n);
    p->n = p->scored = n;
    return STILL_OK;
}

still_status srv_prefix_cache_set(srv_prefix_cache *p, const int32_t *id, int n, int k,
                                  srv_gone_fn gone, void *user, still_error *err)
{
    int same = 0;
    if (n < 1 || n > p->limit)
        return sti_fail(err, STILL_E_LIMIT,
                        "the prompt has %d tokens, the context holds 1 to %d", n,
                        p->limit);
    while (same < p->n && same < n && p->id[same] == id[same]) same++;
    if (k > 0 && same > p->scored) same = p->scored;
    if (k > p->k) same = 0; /* too few alternatives were kept */
    /* The last token is always fed, for its logits. When scoring, so is the last common
     * token, because its row scores the first token that differs. */
    if (same == n || (k > 0 && same > 0)) same--;
    go_back(p, same);
    p->reused += (uint64_t)p->n;
    if (k == 0) return feed(p, id, n, gone, user, err);
    if (k > p->k) p->k = k;
    if (gone && gone(user))
        return sti_fail(err, STILL_E_CANCELLED, "the client has left");
    return feed_scored(p, id, n, err);
}

still_status srv_prefix_cache_add(srv_prefix_cache *p, int32_t id, still_error *err)
{
    STI_TRY(still_session_feed(p->session, &id, 1, err));
    p->id[p->n++] = id;
    p->fed++;
    return STILL_OK;
}

void srv_top_logprobs(const float *logits, int vocab, int32_t id, int k, float *logprob,
                      int32_t *top, float *top_logprob)
{
    int have = 0, best = 0;
    double sum = 1; /* the best one's own term */
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    for (int i = 0; i < vocab; i++)
        if (i != best) sum += exp((double)logits[i] - (double)logits[best]);
    double norm = (double)logits[best] + log(sum);
    for (int32_t i = 0; i < vocab; i++) {
        if (have == k && (k == 0 || !(logits[i] > logits[top[k - 1]]))) continue;
        int at = have < k ? have++ : k - 1;
        for (; at > 0 && logits[i] > logits[top[at - 1]]; at--) top[at] = top[at - 1];
        top[at] = i;
    }
    for (int i = 0; i < k; i++) top_logprob[i] = (float)((double)logits[top[i]] - norm);
    *logprob = (float)((double)logits[id] - norm);
}
