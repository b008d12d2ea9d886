/* sampler.c - choosing a token from logits.
 *
 * The order of the steps is llama.cpp's: bias, penalties, top-k, then with temperature
 * top-p and min-p, then a draw. Everything works on one array of candidates
 * allocated up front. Only as much of it is sorted as the settings need. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/random.h"
#include "base/sized.h"
#include "grammar/grammar.h"

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
    uint64_t *seen; /* [vocab] bits, 0 between calls; NULL: there is no penalty */
    int32_t *times; /* [vocab] generated so often; NULL: nobody asks */
    still_logit_bias *bias; /* [p.n_bias] */
};

/* One 64-bit state, passes statistical tests, same on every machine. */
static double uniform(uint64_t *s)
{
    const uint64_t z = sti_mix64(*s);
    *s += STI_MIX64_STEP;
    return (double)(z >> 11) * 0x1p-53;
}

static bool counts(const still_sampler_params *p)
{
    return p->presence_penalty != 0 || p->frequency_penalty != 0;
}

static still_status check_more(const still_sampler_params *p, int vocab,
                               still_error *err)
{
    if (!isfinite(p->presence_penalty) || !isfinite(p->frequency_penalty))
        return sti_fail(err, STILL_E_ARG,
                        "sampling: presence penalty %g, frequency penalty %g cannot be",
                        p->presence_penalty, p->frequency_penalty);
    if (p->n_bias < 0 || (p->n_bias > 0 && !p->bias))
        return sti_fail(err, STILL_E_ARG, "sampling: %d biases in no list", p->n_bias);
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].id < 0 || p->bias[i].id >= vocab || isnan(p->bias[i].bias) ||
            p->bias[i].bias == INFINITY)
            return sti_fail(err, STILL_E_ARG,
                            "sampling: a bias of %g for token %d of %d cannot be",
                            p->bias[i].bias, p->bias[i].id, vocab);
    return STILL_OK;
}

still_status still_sampler_new(const still_sampler_params *params, int vocab,
                               still_sampler **out, still_error *err)
{
    *out = NULL;
    still_sampler_params p;
    STI_TRY(STI_TAKE(&p, params, still_sampler_params, err));
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
    STI_TRY(check_more(&p, vocab, err));
    if (p.repeat_last == 0) p.repeat_last = 64;
    if (p.repeat_penalty == 0) p.repeat_penalty = 1;
    still_sampler *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "sampler", sizeof *s);
    *s = (still_sampler){.p = p, .vocab = vocab, .rng = p.seed};
    s->cand = sti_alloc((size_t)vocab, sizeof *s->cand);
    s->recent = sti_alloc((size_t)p.repeat_last, sizeof *s->recent);
    const bool repeats = p.repeat_penalty != 1, count = counts(&p);
    if (repeats) s->seen = sti_alloc((size_t)vocab / 64 + 1, sizeof *s->seen);
    if (count) s->times = sti_alloc((size_t)vocab, sizeof *s->times);
    if (p.n_bias > 0) s->bias = sti_alloc((size_t)p.n_bias, sizeof *s->bias);
    if (!s->cand || !s->recent || (repeats && !s->seen) || (count && !s->times) ||
        (p.n_bias > 0 && !s->bias)) {
        still_sampler_free(s);
        return sti_fail_memory(err, "sampler", (size_t)vocab * sizeof(candidate));
    }
    if (p.n_bias > 0) memcpy(s->bias, p.bias, (size_t)p.n_bias * sizeof *s->bias);
    s->p.bias = s->bias;
    *out = s;
    return STILL_OK;
}

void still_sampler_free(still_sampler *s)
{
    if (!s) return;
    free(s->cand);
    free(s->recent);
    free(s->seen);
    free(s->times);
    free(s->bias);
    free(s);
}

static bool is_token(const still_sampler *s, int32_t id)
{
    return id >= 0 && id < s->vocab;
}

void still_sampler_accept_prompt(still_sampler *s, int32_t id)
{
    s->recent[s->at] = id;
    s->at = (s->at + 1) % s->p.repeat_last;
    if (s->n_recent < s->p.repeat_last) s->n_recent++;
}

void still_sampler_accept(still_sampler *s, int32_t id)
{
    still_sampler_accept_prompt(s, id);
    if (s->times && is_token(s, id) && s->times[id] < INT32_MAX) s->times[id]++;
}

static void penalize_generated(const still_sampler *s)
{
    for (int i = 0; i < s->vocab; i++)
        if (s->times[i] > 0)
            s->cand[i].logit -=
                s->p.presence_penalty + s->p.frequency_penalty * (float)s->times[i];
}

/* Makes recent tokens less likely: positive logits are divided, negative ones
 * multiplied. Each token is penalized once, however often it occurred. */
static void penalize(const still_sampler *s)
{
    for (int i = 0; i < s->n_recent; i++) {
        const int32_t id = s->recent[i];
        if (!is_token(s, id) || s->seen[id / 64] >> (id % 64) & 1) continue;
        s->seen[id / 64] |= UINT64_C(1) << (id % 64);
        float *l = &s->cand[id].logit;
        *l = *l > 0 ? *l / s->p.repeat_penalty : *l * s->p.repeat_penalty;
    }
    for (int i = 0; i < s->n_recent; i++)
        if (is_token(s, s->recent[i])) s->seen[s->recent[i] / 64] = 0;
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

/* Sorts as many of the n best as have `mass` together and returns how many those are.
 * Most of a vocabulary weighs next to nothing, so few need to be sorted. */
static int sort_mass(candidate *c, int n, double mass)
{
    double have = 0;
    int kept = 0;
    for (int sorted = 0, next = 64; kept < n && have < mass; next *= 8) {
        int end = n - sorted < next ? n : sorted + next;
        if (end < n) select_best(c + sorted, n - sorted, end - sorted);
        qsort(c + sorted, (size_t)(end - sorted), sizeof *c, by_logit);
        while (kept < end && have < mass) have += c[kept++].logit;
        sorted = end;
    }
    return kept > 0 ? kept : 1;
}

/* Leaves those of n candidates that top-k, top-p and min-p allow; returns how many.
 * Logits become probabilities (not normalised after the cut). */
static int filter(const still_sampler *s, int n, double *mass)
{
    candidate *c = s->cand;
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
    if (s->p.top_p > 0 && s->p.top_p < 1) n = sort_mass(c, n, s->p.top_p * sum);
    *mass = 0;
    for (int i = 0; i < n; i++) *mass += c[i].logit;
    return n;
}

/* Logits with bias and penalties as candidates; those that cannot be chosen are left
 * out. Returns how many there are. */
static int gather(still_sampler *s, const float *logits, const uint64_t *bits)
{
    int n = 0;
    for (int i = 0; i < s->vocab; i++) s->cand[i] = (candidate){logits[i], i};
    for (int i = 0; i < s->p.n_bias; i++)
        s->cand[s->bias[i].id].logit += s->bias[i].bias;
    if (s->seen) penalize(s);
    if (s->times) penalize_generated(s);
    for (int i = 0; i < s->vocab; i++)
        if (s->cand[i].logit > -INFINITY && (!bits || (bits[i / 64] >> (i % 64) & 1)))
            s->cand[n++] = s->cand[i];
    return n;
}

still_status still_sampler_sample_masked(still_sampler *s, const float *logits,
                                         const uint64_t *bits, int32_t *id,
                                         still_error *err)
{
    int best = 0;
    for (int i = 0; i < s->vocab; i++)
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return sti_fail(err, STILL_E_NUMERIC, "the logit of token %d is %g", i,
                            logits[i]);
    int n = gather(s, logits, bits);
    if (n == 0)
        return sti_fail(err, STILL_E_ARG,
                        "no token can be chosen: what may follow and the biases leave "
                        "none of %d",
                        s->vocab);
    if (s->p.temperature == 0) {
        for (int i = 1; i < n; i++)
            if (s->cand[i].logit > s->cand[best].logit) best = i;
        *id = s->cand[best].id;
        return STILL_OK;
    }
    double mass;
    n = filter(s, n, &mass);
    double r = uniform(&s->rng) * mass;
    for (best = 0; best < n - 1; best++) {
        r -= s->cand[best].logit;
        if (r < 0) break;
    }
    *id = s->cand[best].id;
    return STILL_OK;
}

still_status still_sampler_sample(still_sampler *s, const float *logits, int32_t *id,
                                  still_error *err)
{
    return still_sampler_sample_masked(s, logits, NULL, id, err);
}

still_status still_sampler_sample_matched(still_sampler *s, still_matcher *m,
                                          const float *logits, int32_t *id,
                                          still_error *err)
{
    if (!m) return still_sampler_sample(s, logits, id, err);
    if (m->vocab != s->vocab)
        return sti_fail(err, STILL_E_ARG, "a matcher of %d tokens, a sampler of %d",
                        m->vocab, s->vocab);
    if (s->p.temperature == 0) { /* what is most likely mostly fits */
        int32_t best;
        STI_TRY(still_sampler_sample(s, logits, &best, err));
        if (sti_matcher_allows(m, best)) {
            *id = best;
            return STILL_OK;
        }
    }
    STI_TRY(still_matcher_mask(m, m->bits, err));
    return still_sampler_sample_masked(s, logits, m->bits, id, err);
}
