/* prompt_scores.c - log-probabilities of prompts, see srv_scores in sequence.h. */
#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/sequence.h"

still_status srv_scores_init(int limit, srv_scores *out, still_error *err)
{
    const size_t n = (size_t)limit, wide = n * SRV_MOST_TOP;
    *out = (srv_scores){.id = sti_alloc(n, sizeof *out->id),
                        .logprob = sti_alloc(n, sizeof *out->logprob),
                        .top = sti_alloc(wide, sizeof *out->top),
                        .top_logprob = sti_alloc(wide, sizeof *out->top_logprob)};
    if (out->id && out->logprob && out->top && out->top_logprob) return STILL_OK;
    srv_scores_free(out);
    return sti_fail_memory(err, "log-probabilities", wide * 8);
}

void srv_scores_free(srv_scores *c)
{
    free(c->id);
    free(c->logprob);
    free(c->top);
    free(c->top_logprob);
    *c = (srv_scores){0};
}

void srv_rank(const float *logits, int vocab, int32_t id, int k, float *logprob,
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
