/* sampler.c - choosing a token from logits.
 *
 * The order of the steps is llama.cpp's: repeat penalty, top-k, then with temperature
 * top-p and min-p, then a draw. Everything works on one array of candidates
 * allocated up front. Only as much of it is sorted as the settings need. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/random.h"

typedef struct candidate {
    float logit;
    int32_t id;
} candidate;

struct still_sampler {
    still_sampler_params p;
    int vocab;
    uint64_t rng;
    candidate *cand; /* [vocab] */
    int32_t *recent; /* [repeat_last], a ring */
    int n_recent, at;
};

/* One 64-bit state, passes statistical tests, same on every machine. */
static double uniform(uint64_t *s)
{
    const uint64_t z = sti_mix64(*s);
    *s += STI_MIX64_STEP;
    return (double)(z >> 11) * 0x1p-53;
}

still_status still_sampler_new(const still_sampler_params *params, int vocab,
                               still_sampler **out, still_error *err)
{
    *out = NULL;
    still_sampler_params p = params ? *params : (still_sampler_params){0};
    if (vocab < 1)
        return sti_fail(err, STILL_E_ARG, "a vocabulary of %d tokens", vocab);
    if (!(p.temperature >= 0) || !(p.top_p >= 0 && p.top_p <= 1) ||
        !(p.min_p >= 0 && p.min_p <= 1) || !(p.repeat_penalty >= 0) || p.top_k < 0 ||
        p.repeat_last < 0 || p.repeat_last > 1 << 20 || isinf(p.temperature) ||
        isinf(p.repeat_penalty))
        return sti_fail(
            err, STILL_E_ARG,
            "sampling: temperature %g, top-k %d, top-p %g, min-p %g, repeat "
            "penalty %g over %d tokens cannot be",
            p.temperature, p.top_k, p.top_p, p.min_p, p.repeat_penalty, p.repeat_last);
    if (p.repeat_last == 0) p.repeat_last = 64;
    if (p.repeat_penalty == 0) p.repeat_penalty = 1;
    still_sampler *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "sampler", sizeof *s);
    *s = (still_sampler){.p = p, .vocab = vocab, .rng = p.seed};
    s->cand = sti_alloc((size_t)vocab, sizeof *s->cand);
    s->recent = sti_alloc((size_t)p.repeat_last, sizeof *s->recent);
    if (!s->cand || !s->recent) {
        still_sampler_free(s);
        return sti_fail_memory(err, "sampler", (size_t)vocab * sizeof(candidate));
    }
    *out = s;
    return STILL_OK;
}

void still_sampler_free(still_sampler *s)
{
    if (!s) return;
    free(s->cand);
    free(s->recent);
    free(s);
}

void still_sampler_accept(still_sampler *s, int32_t id)
{
    s->recent[s->at] = id;
    s->at = (s->at + 1) % s->p.repeat_last;
    if (s->n_recent < s->p.repeat_last) s->n_recent++;
}

/* Makes recent tokens less likely: positive logits are divided, negative ones
 * multiplied. Each token is penalized once, however often it occurred. */
static void penalize(const still_sampler *s)
{
    for (int i = 0; i < s->n_recent; i++) {
        int32_t id = s->recent[i];
        bool again = id < 0 || id >= s->vocab;
        for (int j = 0; j < i && !again; j++) again = s->recent[j] == id;
        if (again) continue;
        float *l = &s->cand[id].logit;
        *l = *l > 0 ? *l / s->p.repeat_penalty : *l * s->p.repeat_penalty;
    }
}

static int by_logit(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Moves the k best candidates to the front, unordered (quickselect). */
static void select_best(candidate *c, int n, int k)
{
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        candidate pivot = c[lo + (hi - lo) / 2];
        int i = lo, j = hi;
        while (i <= j) {
            while (by_logit(&c[i], &pivot) < 0) i++;
            while (by_logit(&c[j], &pivot) > 0) j--;
            if (i <= j) {
                candidate t = c[i];
                c[i++] = c[j];
                c[j--] = t;
            }
        }
        if (k - 1 <= j)
            hi = j;
        else if (k - 1 >= i)
            lo = i;
        else
            return;
    }
}

/* Leaves the candidates that top-k, top-p and min-p allow; returns how many. Logits
 * become probabilities (not normalised after the cut). */
static int filter(const still_sampler *s, double *mass)
{
    candidate *c = s->cand;
    int n = s->vocab;
    if (s->p.top_k > 0 && s->p.top_k < n) {
        select_best(c, n, s->p.top_k);
        n = s->p.top_k;
    }
    float max = c[0].logit;
    for (int i = 1; i < n; i++)
        if (c[i].logit > max) max = c[i].logit;
    double sum = 0;
    for (int i = 0; i < n; i++) {
        c[i].logit = expf((c[i].logit - max) / s->p.temperature);
        sum += c[i].logit;
    }
    if (s->p.min_p > 0) { /* the best has weight 1 */
        int kept = 0;
        for (int i = 0; i < n; i++)
            if (c[i].logit >= s->p.min_p) c[kept++] = c[i];
        n = kept;
    }
    if (s->p.top_p > 0 && s->p.top_p < 1) {
        qsort(c, (size_t)n, sizeof *c, by_logit);
        double have = 0;
        int kept = 0;
        while (kept < n && have < s->p.top_p * sum) have += c[kept++].logit;
        n = kept > 0 ? kept : 1;
    }
    *mass = 0;
    for (int i = 0; i < n; i++) *mass += c[i].logit;
    return n;
}

still_status still_sampler_sample(still_sampler *s, const float *logits, int32_t *id,
                                  still_error *err)
{
    bool greedy = s->p.temperature == 0;
    int best = 0;
    for (int i = 0; i < s->vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return sti_fail(err, STILL_E_NUMERIC, "the logit of token %d is %g", i,
                            logits[i]);
        s->cand[i] = (candidate){logits[i], i};
    }
    if (s->p.repeat_penalty != 1) penalize(s);
    if (greedy) {
        for (int i = 1; i < s->vocab; i++)
            if (s->cand[i].logit > s->cand[best].logit) best = i;
        *id = best;
        return STILL_OK;
    }
    double mass;
    int n = filter(s, &mass);
    double r = uniform(&s->rng) * mass;
    for (best = 0; best < n - 1; best++) {
        r -= s->cand[best].logit;
        if (r < 0) break;
    }
    *id = s->cand[best].id;
    return STILL_OK;
}
