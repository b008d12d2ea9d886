/* caps.c - salient tokens for every head, within a number of bytes; see allocate.h.
 *
 * Every head keeps a few tokens, which perplexity wants, and heads that look things up
 * keep more. What a cap is worth to head h is its gain times the share that the cap
 * covers of texts of n = 2K, 4K, ... tokens, up to the trained length:
 *
 *   worth(h, cap) = gain_h sum_n min(cap, n) / n
 *
 * The slope falls at each n: with lengths up to 8K it is 7 : 3 : 1 for a head's first 2K
 * tokens, those up to 4K and those up to 8K. So the best caps come from dealing out
 * tokens to these pieces in the order of their slopes, and the largest number of tokens
 * is dealt whose session fits. Bytes are those of a session with all lists full: whatever
 * it keeps is counted, and no text fills it further. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allocate/allocate.h"
#include "session/session.h"

enum {
    STEP = 16,
    LEAST = 4,
    FEWEST = 64,
    MOST_FEW = 256,
    SHORTEST = 2048,
    SMALLEST_CHUNK = 16,
    MOST = 16384 /* cuda reads prompts of lists beyond it token by token (chunk.h) */
};
/* Share of the bytes that the window and the state may take. */
#define FIXED 0.55
enum { LENGTHS = 24 }; /* no more doublings are below 2^31 */

/* Tokens of one head from one length of text to the next. */
typedef struct piece {
    double slope;
    int head, end; /* the head's cap with this piece */
} piece;

typedef struct search {
    const still_model *m;
    still_method method; /* as asked for, without caps of its own */
    int heads, longest;  /* of the model; trained length */
    int most;            /* that a cap can be */
    int step;            /* tokens are dealt in multiples of it */
    piece *piece;        /* by falling slope */
    int pieces;
    int *cap; /* [heads]: scratch of deal */
    size_t budget;
} search;

/* Rules "LAYER/HEAD:CAP" for `tokens` dealt to the pieces, heads of a large gain first;
 * all others keep `few`. *chosen: heads with a rule. false: too many. */
static bool deal(const search *s, int64_t tokens, int few, still_method *out,
                 int *chosen)
{
    const int G = s->m->cfg.kv_heads;
    size_t at = 0;
    *out = s->method;
    out->cap = few;
    out->caps[0] = 0;
    *chosen = 0;
    for (int h = 0; h < s->heads; h++) s->cap[h] = few;
    for (int i = 0; i < s->pieces && tokens > 0; i++) {
        const piece *p = &s->piece[i];
        const int64_t room = p->end - s->cap[p->head];
        if (room <= 0) continue;
        s->cap[p->head] += (int)(tokens < room ? tokens : room);
        tokens -= room;
    }
    for (int i = 0; i < s->pieces; i++) {
        const int h = s->piece[i].head;
        if (s->cap[h] <= few) continue;
        const int wrote = snprintf(out->caps + at, sizeof out->caps - at, "%s%d/%d:%d",
                                   at ? "," : "", h / G, h % G, s->cap[h]);
        at += (size_t)wrote;
        if (at >= sizeof out->caps) return false;
        s->cap[h] = 0; /* has its rule */
        ++*chosen;
    }
    return true;
}

static still_status bytes_of(const search *s, const still_method *how, size_t *out,
                             still_error *err)
{
    return sti_session_full_bytes(
        s->m, &STILL_PARAMS(still_session_params, .method = how, .ctx = s->longest),
        out, err);
}

/* The most tokens that fit, in steps of s->step: dealt beyond `few` a head, or with few
 * -1 the cap of every head. */
static still_status most_tokens(const search *s, int few, int64_t *out,
                                still_error *err)
{
    const int64_t all = few < 0 ? s->most : (int64_t)s->heads * (s->most - few);
    int64_t low = 0, high = all / s->step + 1; /* in steps; high does not fit */
    while (high - low > 1) {
        const int64_t mid = low + (high - low) / 2;
        still_method how;
        size_t bytes = SIZE_MAX;
        int chosen;
        if (few < 0 ? deal(s, 0, (int)mid * s->step, &how, &chosen)
                    : deal(s, mid * s->step, few, &how, &chosen))
            STI_TRY(bytes_of(s, &how, &bytes, err));
        if (bytes <= s->budget)
            low = mid;
        else
            high = mid;
    }
    *out = low * s->step;
    return STILL_OK;
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
        "%.2f MB in chunks of %d",
        (double)s->budget / 1e6, s->method.forget ? "and " : "the linear state and ",
        LEAST, (double)bytes / 1e6, s->method.chunk);
}

static still_status search_caps(search *s, still_method *out, int *chosen,
                                still_error *err)
{
    int64_t even, tokens;
    STI_TRY(most_tokens(s, -1, &even, err));
    if (even < LEAST) return too_small(s, err);
    const int few = few_tokens((int)even);
    if (even >= 2 * FEWEST) s->step = STEP;
    STI_TRY(most_tokens(s, few, &tokens, err));
    deal(s, tokens, few, out, chosen);
    return *chosen > 0 ? STILL_OK : too_small(s, err);
}

static int by_slope(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    if (x->slope != y->slope) return x->slope < y->slope ? 1 : -1;
    return x->head != y->head ? x->head - y->head : x->end - y->end;
}

/* Every head's pieces: up to 2K, 4K, ..., the trained length, as far as a cap goes. Heads
 * of layers that keep their own attention have none. */
static void cut_pieces(search *s, const sti_attn_config *cfg, const double *gain)
{
    const int G = s->m->cfg.kv_heads;
    int end[LENGTHS], n = 0;
    for (int64_t at = SHORTEST; at < s->longest; at *= 2) end[n++] = (int)at;
    end[n++] = s->longest;
    double slope = 0;
    for (int i = n - 1; i >= 0; i--) {
        slope += 1.0 / end[i];
        const int stop = end[i] < s->most ? end[i] : s->most;
        for (int h = 0; h < s->heads && (i == 0 || end[i - 1] < s->most); h++)
            if (sti_attn_converts(cfg, h / G))
                s->piece[s->pieces++] = (piece){gain[h] * slope, h, stop};
    }
    qsort(s->piece, (size_t)s->pieces, sizeof *s->piece, by_slope);
}

/* A smaller chunk, and without the state if that is not enough, so that the window and
 * the state leave bytes for salient tokens. A state that was trained stays. */
static still_status shrink(search *s, still_error *err)
{
    const int chunk = s->method.chunk, select = s->method.select;
    for (;;) {
        still_method least = s->method;
        size_t bytes;
        least.cap = LEAST;
        STI_TRY(bytes_of(s, &least, &bytes, err));
        if ((double)bytes <= FIXED * (double)s->budget) return STILL_OK;
        if (s->method.chunk / 2 >= SMALLEST_CHUNK) {
            s->method.chunk /= 2;
        } else if (!s->method.forget && !s->m->adapter) {
            s->method.forget = true;
            s->method.chunk = chunk;
        } else {
            return STILL_OK; /* search_caps says what is too small */
        }
        s->method.select = select < s->method.chunk ? select : s->method.chunk;
    }
}

static search search_of(const still_model *m, const still_method *method, size_t budget)
{
    search s = {.m = m,
                .method = *method,
                .heads = m->cfg.layers * m->cfg.kv_heads,
                .longest = m->info.ctx_train > 0 ? m->info.ctx_train : 4096,
                .step = 1,
                .budget = budget};
    s.most = s.longest < MOST ? s.longest : MOST;
    s.method.caps[0] = 0;
    return s;
}

still_status sti_check_budget(const still_model *m, const still_method *method,
                              size_t budget, bool may_shrink, still_error *err)
{
    search s = search_of(m, method, budget);
    size_t bytes = 0;
    if (may_shrink) STI_TRY(shrink(&s, err));
    still_method least = s.method;
    least.cap = LEAST;
    STI_TRY(bytes_of(&s, &least, &bytes, err));
    return bytes > budget ? too_small(&s, err) : STILL_OK;
}

still_status sti_choose_caps(const still_model *m, const still_method *method,
                             const double *gain, size_t budget, bool may_shrink,
                             still_method *out, int *chosen, still_error *err)
{
    search s = search_of(m, method, budget);
    const size_t heads = (size_t)s.heads;
    const sti_attn_layer first = sti_model_attn_layer(m, 0);
    sti_attn_config cfg = {.ctx = s.longest};
    STI_TRY(sti_attn_configure(&s.method, &first, m->cfg.layers, s.longest, &cfg, err));
    s.piece = sti_alloc(heads, LENGTHS * sizeof *s.piece);
    s.cap = sti_alloc(heads, sizeof *s.cap);
    still_status st = s.piece && s.cap
                          ? STILL_OK
                          : sti_fail_memory(err, "a rank of heads",
                                            heads * LENGTHS * sizeof *s.piece);
    if (st == STILL_OK) {
        cut_pieces(&s, &cfg, gain);
        if (may_shrink) st = shrink(&s, err);
    }
    if (st == STILL_OK) st = search_caps(&s, out, chosen, err);
    free(s.piece);
    free(s.cap);
    return st;
}
