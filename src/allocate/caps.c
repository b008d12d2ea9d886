/* caps.c - salient tokens for every head, within a number of bytes; see allocate.h.
 *
 * Heads are of two kinds: those that look things up share one large cap, all others keep
 * a few tokens, which perplexity wants. How many look things up is a trade: recall needs
 * the heads that do it together, and each of them as far back as the text is long. So of
 * every number of heads the cap is found that fits the bytes, and the best product of
 *
 *   share of all attention on facts that these heads have,
 *   tokens that the cap covers, mean over texts of 2K, 4K, ... up to the trained length
 *
 * is taken. Bytes are those of the bill: whatever a session keeps is counted. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allocate/allocate.h"

enum { STEP = 16, LEAST = 4, FEWEST = 64, MOST_FEW = 256 };

typedef struct search {
    const still_model *m;
    still_method method; /* as asked for, without caps of its own */
    int heads, longest;  /* of the model; trained length */
    int step;            /* caps are multiples of it */
    const int *order;    /* heads by falling gain */
    const double *gain;
    size_t budget;
} search;

/* Rules "LAYER/HEAD:CAP" for the n first heads of the order. false: too many. */
static bool write_caps(const search *s, int n, int cap, int few, still_method *out)
{
    const int G = s->m->cfg.kv_heads;
    size_t at = 0;
    *out = s->method;
    out->cap = few;
    out->caps[0] = 0;
    for (int i = 0; i < n; i++) {
        const int wrote = snprintf(out->caps + at, sizeof out->caps - at, "%s%d/%d:%d",
                                   i ? "," : "", s->order[i] / G, s->order[i] % G, cap);
        at += (size_t)wrote;
        if (at >= sizeof out->caps) return false;
    }
    return true;
}

static still_status bytes_of(const search *s, const still_method *how, size_t *out,
                             still_error *err)
{
    still_bill bill;
    STI_TRY(still_model_bill(
        s->m, &(still_session_params){.method = how, .ctx = s->longest}, &bill, err));
    *out = bill.cache;
    return STILL_OK;
}

/* The largest cap of the n first heads that fits, others keep `few`; n 0: of all heads.
 * 0: none fits. */
static still_status largest_cap(const search *s, int n, int few, int *out,
                                still_error *err)
{
    int low = 0, high = s->longest / s->step + 1; /* in steps; high does not fit */
    *out = 0;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        still_method how;
        size_t bytes;
        const int cap = mid * s->step;
        if (!write_caps(s, n, cap, n ? few : cap, &how)) return STILL_OK;
        STI_TRY(bytes_of(s, &how, &bytes, err));
        if (bytes <= s->budget)
            low = mid;
        else
            high = mid;
    }
    *out = low * s->step;
    return STILL_OK;
}

/* Share of a text that the cap covers, mean over lengths. */
static double coverage(const search *s, int cap)
{
    double sum = 0;
    int lengths = 0;
    for (int64_t n = 2048; n <= s->longest || lengths == 0; n *= 2, lengths++)
        sum += cap < n ? (double)cap / (double)n : 1;
    return sum / lengths;
}

/* What heads that look nothing up keep: a third of an even share, within bounds, and of
 * a share below those a half. */
static int few_tokens(int even)
{
    const int third = even / 3 / STEP * STEP;
    if (even < 2 * FEWEST) return even / 2;
    return third < FEWEST ? FEWEST : third > MOST_FEW ? MOST_FEW : third;
}

static still_status too_small(const search *s, still_error *err)
{
    still_method least = s->method;
    size_t bytes = 0;
    least.cap = LEAST;
    STI_TRY(bytes_of(s, &least, &bytes, err));
    return sti_fail(
        err, STILL_E_ARG,
        "a budget of %.2f MB is too small: the window, %s%d salient tokens a head take "
        "%.2f MB (a smaller --chunk takes less)",
        (double)s->budget / 1e6, s->method.forget ? "and " : "the linear state and ",
        LEAST, (double)bytes / 1e6);
}

static still_status search_heads(search *s, still_method *out, int *chosen,
                                 still_error *err)
{
    double total = 0, share = 0, best = 0;
    int even;
    for (int i = 0; i < s->heads; i++) total += s->gain[i];
    STI_TRY(largest_cap(s, 0, 0, &even, err));
    if (even < LEAST) return too_small(s, err);
    const int few = few_tokens(even);
    if (even >= 2 * FEWEST) s->step = STEP;
    *chosen = -1;
    for (int n = 1; n <= s->heads; n++) {
        int cap;
        share += s->gain[s->order[n - 1]];
        STI_TRY(largest_cap(s, n, few, &cap, err));
        if (cap <= few) break;
        const double worth = share / total * coverage(s, cap);
        if (worth <= best) continue;
        best = worth;
        *chosen = n;
        write_caps(s, n, cap, few, out);
    }
    return *chosen > 0 ? STILL_OK : too_small(s, err);
}

static int compare(const void *a, const void *b, void *gain)
{
    const int i = *(const int *)a, j = *(const int *)b;
    const double x = ((const double *)gain)[i], y = ((const double *)gain)[j];
    return x != y ? (x < y) - (x > y) : i - j;
}

still_status sti_choose_caps(const still_model *m, const still_method *method,
                             const double *gain, size_t budget, still_method *out,
                             int *chosen, still_error *err)
{
    const int heads = m->cfg.layers * m->cfg.kv_heads;
    int *order = sti_alloc((size_t)heads, sizeof *order);
    if (!order) return sti_fail_memory(err, "a rank of heads", sizeof *order);
    for (int i = 0; i < heads; i++) order[i] = i;
    qsort_r(order, (size_t)heads, sizeof *order, compare, (void *)gain);
    search s = {.m = m,
                .method = *method,
                .heads = heads,
                .longest = m->info.ctx_train > 0 ? m->info.ctx_train : 4096,
                .step = 1,
                .order = order,
                .gain = gain,
                .budget = budget};
    s.method.caps[0] = 0;
    const still_status st = search_heads(&s, out, chosen, err);
    free(order);
    return st;
}
