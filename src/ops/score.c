/* score.c - the table of scores that decide which tokens stay exact.
 *
 * To try a new score, write its function here and add a row (and its name to
 * sti_score_kind): ref and cpu read the table, cuda has its formulas in
 * backend/cuda/hybrid/score.h, and refuses by name what it lacks. A score is compared,
 * never summed with others, so only its order matters; equal scores keep the earlier
 * token. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "ops/hybrid.h"

/* Self-Saliency Score, by its definition (STILL eq. 5). A, eq. 3: softmax of the
 * logits of the last n tokens; B, eq. 4: the same without the token itself (all 0 for
 * the first token);
 *   score = sum_j A_j log((A_j + eps) / (B_j + eps))     eq. 5 */
static double s3_definition(const double *logit, int n, double eps)
{
    double top = -INFINITY, top_others = -INFINITY;
    for (int j = 0; j < n - 1; j++) top_others = fmax(top_others, logit[j]);
    top = fmax(top_others, logit[n - 1]);
    double sum = 0, sum_others = 0;
    for (int j = 0; j < n; j++) sum += exp(logit[j] - top);
    for (int j = 0; j < n - 1; j++) sum_others += exp(logit[j] - top_others);
    double score = 0;
    for (int j = 0; j < n; j++) {
        double A = exp(logit[j] - top) / sum;
        double B = j < n - 1 ? exp(logit[j] - top_others) / sum_others : 0;
        score += A * log((A + eps) / (B + eps));
    }
    return score;
}

/* STILL eq. 5 in closed form. B, STILL eq. 4, is A / (1 - p) away from the token
 * itself, p = A_t, so up to terms of size eps
 *   score = (1 - p) log(1 - p) + p log((p + eps) / eps) */
static double s3_arrive(const sti_score_stats *s)
{
    double p = s->self, others = p < 1 ? (1 - p) * log1p(-p) : 0;
    return others + p * log((p + s->eps) / s->eps);
}

static double received_retire(const sti_score_end *e)
{
    return e->received;
}

/* The formula of KeyDiff (arXiv 2504.15364), over the keys of a chunk: most point the
 * same way; those of a name or a number do not. Of keys alike the later one stays. The
 * first token is where attention rests that has nowhere to go: it stays. */
static double distinct_retire(const sti_score_end *e)
{
    if (e->position == 0) return STI_DISTINCT_FIRST;
    return STI_DISTINCT_RECENT * (double)e->position - e->likeness;
}

static double keynorm_arrive(const sti_score_stats *s)
{
    return -s->key_norm;
}

/* Uniform in [0, 1), 24 bits: exact in float, so every backend orders it alike. */
static double random_arrive(const sti_score_stats *s)
{
    uint64_t x = sti_mix64(s->seed);
    x = sti_mix64(x ^ (uint64_t)s->layer);
    x = sti_mix64(x ^ (uint64_t)s->head);
    x = sti_mix64(x ^ (uint64_t)s->position);
    return (double)(x >> 40) / (double)(1 << 24);
}

static const sti_score table[STI_SCORE_COUNT] = {
    [STI_SCORE_S3] = {"s3", "Self-Saliency Score (the paper's)", .arrive = s3_arrive,
                      .self = true, .definition = s3_definition},
    [STI_SCORE_RECEIVED] = {"received", "attention received inside the window",
                            .retire = received_retire, .received = true},
    [STI_SCORE_KEYNORM] = {"keynorm", "small key norm", .arrive = keynorm_arrive},
    [STI_SCORE_DISTINCT] = {"distinct",
                            "a key unlike the others of its chunk (KeyDiff)",
                            .retire = distinct_retire, .likeness = true},
    [STI_SCORE_RANDOM] = {"random", "a hash of seed, layer, head and position",
                          .arrive = random_arrive},
};

const sti_score *sti_score_at(sti_score_kind kind)
{
    return (unsigned)kind < STI_SCORE_COUNT && table[kind].name ? &table[kind] : NULL;
}

still_status sti_score_check(sti_score_kind kind, unsigned known, const char *backend,
                             still_error *err)
{
    const sti_score *score = sti_score_at(kind);
    if (!score)
        return sti_fail(err, STILL_E_ARG, "hybrid attention: no score number %d",
                        (int)kind);
    if (known >> kind & 1) return STILL_OK;
    char others[256] = "";
    for (int i = 0; i < STI_SCORE_COUNT; i++) {
        const size_t n = strlen(others);
        if (known >> i & 1)
            snprintf(others + n, sizeof others - n, "%s%s", n ? ", " : "",
                     table[i].name);
    }
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "hybrid attention: the %s backend has no score '%s' (it has %s)",
                    backend, score->name, others);
}

bool sti_score_find(const char *name, sti_score_kind *out)
{
    for (int i = 0; i < STI_SCORE_COUNT; i++)
        if (table[i].name && strcmp(table[i].name, name) == 0) {
            *out = (sti_score_kind)i;
            return true;
        }
    return false;
}
