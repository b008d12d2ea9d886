/* complete.c - see complete.h.
 *
 * The prompts of a request are processed in the order of their ids, so that those
 * with a common prefix follow one another and the session walks them like a tree;
 * answers go back in the order of the request. Choices are written directly as JSON
 * text: a batch may have hundreds of thousands of tokens, and an object for each
 * would cost more than computing it. */
#include "server/complete.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/random.h"

still_status srv_encode(const still_tokenizer *tk, const char *text, size_t n,
                        unsigned flags, int32_t **id, size_t *n_ids, still_error *err)
{
    *id = NULL;
    STI_TRY(still_tokenizer_encode(tk, text, n, flags, NULL, 0, n_ids, err));
    int32_t *list = sti_alloc(*n_ids ? *n_ids : 1, sizeof *list);
    if (!list) return sti_fail_memory(err, "token ids", *n_ids * sizeof *list);
    still_status status =
        still_tokenizer_encode(tk, text, n, flags, list, *n_ids, n_ids, err);
    if (status == STILL_OK)
        *id = list;
    else
        free(list);
    return status;
}

/* ---- One choice ---------------------------------------------------------- */

/* The four growing lists of "logprobs", and the text. */
typedef struct choice {
    sti_buf text, tokens, logprobs, tops, offsets;
    size_t characters; /* of the text */
    const char *finish;
    int made; /* tokens */
} choice;

static void free_choice(choice *c)
{
    sti_buf_free(&c->text);
    sti_buf_free(&c->tokens);
    sti_buf_free(&c->logprobs);
    sti_buf_free(&c->tops);
    sti_buf_free(&c->offsets);
}

static void put_text(choice *c, const char *text, size_t n)
{
    sti_buf_put(&c->text, text, n);
    for (size_t i = 0; i < n; i++)
        c->characters += ((unsigned char)text[i] & 0xc0) != 0x80;
}

static void put_piece(const srv_engine *e, sti_buf *b, int32_t id)
{
    size_t n = 0;
    const char *piece = still_tokenizer_piece(e->tk, id, true, &n);
    srv_put_string(b, piece ? piece : "", n);
}

/* A token with its log-probability and the k most likely tokens at its position;
 * logprob NULL: nothing precedes it. The token itself is always among the
 * alternatives. Clients compare numbers to see whether it was the most likely one,
 * so the best of the others must not round to the same value. A float needs 9 digits
 * to survive the round trip. */
static void put_entry(const srv_engine *e, choice *c, int32_t id, const float *logprob,
                      const int32_t *top, const float *top_logprob, int k)
{
    const char *comma = c->offsets.n ? "," : "";
    sti_buf_puts(&c->tokens, comma);
    put_piece(e, &c->tokens, id);
    sti_buf_printf(&c->offsets, "%s%zu", comma, c->characters);
    if (!logprob) {
        sti_buf_puts(&c->logprobs, "null");
        sti_buf_puts(&c->tops, "null");
        return;
    }
    sti_buf_printf(&c->logprobs, "%s%.9g", comma, (double)*logprob);
    sti_buf_printf(&c->tops, "%s{", comma);
    bool seen = false;
    for (int i = 0; i < k; i++) {
        float value = top_logprob[i];
        if (i == 0 && top[0] != id && !(value > *logprob))
            value = nextafterf(*logprob, INFINITY);
        put_piece(e, &c->tops, top[i]);
        sti_buf_printf(&c->tops, ":%.9g%s", (double)value, i + 1 < k ? "," : "");
        seen = seen || top[i] == id;
    }
    if (!seen) {
        sti_buf_puts(&c->tops, k ? "," : "");
        put_piece(e, &c->tops, id);
        sti_buf_printf(&c->tops, ":%.9g", (double)*logprob);
    }
    sti_buf_puts(&c->tops, "}");
}

/* The prompt as part of the answer: its text and its log-probabilities. */
static still_status echo_prompt(const srv_engine *e, const srv_completion *q,
                                const srv_prompt *p, choice *c, still_error *err)
{
    const srv_prefix_cache *cache = &e->cache;
    still_decoder *d;
    const char *text;
    size_t n;
    STI_TRY(still_decoder_new(e->tk, true, &d, err));
    still_status status = STILL_OK;
    for (size_t i = 0; i < p->n && status == STILL_OK; i++) {
        if (q->logprobs >= 0) {
            size_t row = i * (size_t)cache->k;
            put_entry(e, c, p->id[i], i ? &cache->logprob[i] : NULL, cache->top + row,
                      cache->top_logprob + row, q->logprobs);
        }
        if (i == 0 && p->has_bos) continue; /* it is not in the text */
        status = still_decoder_push(d, p->id[i], &text, &n, err);
        if (status == STILL_OK) put_text(c, text, n);
    }
    if (status == STILL_OK) {
        still_decoder_flush(d, &text, &n);
        put_text(c, text, n);
    }
    if (p->text) { /* exactly as it came */
        sti_buf_clear(&c->text);
        c->characters = 0;
        put_text(c, p->text, p->n_text);
    }
    still_decoder_free(d);
    return status;
}

/* Truncates the text at the first stop string at or after `from`. */
static bool stopped(const srv_completion *q, choice *c, size_t from)
{
    size_t first = c->text.n;
    for (int i = 0; i < q->n_stops && c->text.n > from; i++) {
        const char *hit =
            memmem(c->text.p + from, c->text.n - from, q->stop[i].p, q->stop[i].n);
        if (hit && (size_t)(hit - c->text.p) < first) first = (size_t)(hit - c->text.p);
    }
    if (first == c->text.n) return false;
    c->text.n = first;
    return true;
}

typedef struct writer {
    still_sampler *sampler;
    still_decoder *decoder;
} writer;

/* Samples, records and feeds tokens until something ends it. An end token has an entry
 * in the lists, but no text. */
static still_status write_tokens(srv_engine *e, const srv_completion *q, writer *w,
                                 choice *c, srv_gone_fn gone, void *user,
                                 still_error *err)
{
    size_t from = c->text.n;
    c->finish = "length";
    while (c->made < q->max_tokens) {
        int32_t id, top[SRV_MOST_LOGPROBS];
        float logprob, top_logprob[SRV_MOST_LOGPROBS];
        const char *text;
        size_t n;
        const float *logits = still_session_logits(e->cache.session);
        if (gone && gone(user))
            return sti_fail(err, STILL_E_CANCELLED, "the client has left");
        STI_TRY(still_sampler_sample(w->sampler, logits, &id, err));
        still_sampler_accept(w->sampler, id);
        c->made++;
        if (q->logprobs >= 0) {
            srv_top_logprobs(logits, e->cache.vocab, id, q->logprobs, &logprob, top,
                             top_logprob);
            put_entry(e, c, id, &logprob, top, top_logprob, q->logprobs);
        }
        if (still_tokenizer_is_end(e->tk, id)) {
            c->finish = "stop";
            break;
        }
        STI_TRY(still_decoder_push(w->decoder, id, &text, &n, err));
        put_text(c, text, n);
        if (stopped(q, c, from)) {
            c->finish = "stop";
            return STILL_OK;
        }
        if (c->made == q->max_tokens || e->cache.n == e->cache.limit) break;
        STI_TRY(srv_prefix_cache_add(&e->cache, id, err));
    }
    const char *rest;
    size_t n_rest;
    still_decoder_flush(w->decoder, &rest, &n_rest);
    put_text(c, rest, n_rest);
    return STILL_OK;
}

/* The decoder has seen the prompt's last token, so a space or half a character at the
 * border is not mistaken for the beginning of a text. */
static still_status generate(srv_engine *e, const srv_completion *q,
                             const srv_prompt *p, uint64_t seed, choice *c,
                             srv_gone_fn gone, void *user, still_error *err)
{
    writer w = {0};
    const char *unused;
    size_t n;
    still_sampler_params sampling = {.temperature = (float)q->temperature,
                                     .top_p = (float)q->top_p,
                                     .min_p = (float)q->min_p,
                                     .top_k = q->top_k,
                                     .seed = seed};
    still_status status = still_sampler_new(&sampling, e->cache.vocab, &w.sampler, err);
    if (status == STILL_OK) status = still_decoder_new(e->tk, false, &w.decoder, err);
    if (status == STILL_OK)
        status = still_decoder_push(w.decoder, p->id[p->n - 1], &unused, &n, err);
    if (status == STILL_OK) status = write_tokens(e, q, &w, c, gone, user, err);
    still_sampler_free(w.sampler);
    still_decoder_free(w.decoder);
    return status;
}

static void put_choice(sti_buf *b, const srv_completion *q, size_t index,
                       const choice *c)
{
    sti_buf_printf(b, "{\"index\":%zu,\"text\":", index);
    srv_put_string(b, c->text.n ? c->text.p : "", c->text.n);
    if (q->logprobs >= 0)
        sti_buf_printf(b,
                       ",\"logprobs\":{\"tokens\":[%s],\"token_logprobs\":[%s],"
                       "\"top_logprobs\":[%s],\"text_offset\":[%s]}",
                       c->tokens.n ? c->tokens.p : "",
                       c->logprobs.n ? c->logprobs.p : "", c->tops.n ? c->tops.p : "",
                       c->offsets.n ? c->offsets.p : "");
    else
        sti_buf_puts(b, ",\"logprobs\":null");
    sti_buf_printf(b, ",\"finish_reason\":\"%s\"}", c->finish);
    if (c->text.failed || c->tokens.failed || c->logprobs.failed || c->tops.failed ||
        c->offsets.failed)
        b->failed = true;
}

/* ---- All of a request ---------------------------------------------------- */

static still_status encode_prompts(const srv_engine *e, srv_completion *q,
                                   still_error *err)
{
    for (size_t i = 0; i < q->n_prompts; i++) {
        srv_prompt *p = &q->prompt[i];
        if (p->text) {
            STI_TRY(srv_encode(e->tk, p->text, p->n_text,
                               STILL_ENCODE_BOS | STILL_ENCODE_SPECIAL, &p->id, &p->n,
                               err));
            int32_t bos = still_tokenizer_bos(e->tk);
            p->has_bos = still_tokenizer_adds_bos(e->tk) && p->n && p->id[0] == bos;
        }
        if (p->n == 0)
            return sti_fail(err, STILL_E_ARG,
                            "prompt %zu is empty, and this model has no start token to "
                            "begin with",
                            i);
        if (p->n > (size_t)e->cache.limit)
            return sti_fail(err, STILL_E_LIMIT,
                            "prompt %zu has %zu tokens, the context holds %d: shorten "
                            "it, or start the server with a larger --ctx",
                            i, p->n, e->cache.limit);
    }
    return STILL_OK;
}

static int by_ids(const void *a, const void *b)
{
    const srv_prompt *x = *(srv_prompt *const *)a, *y = *(srv_prompt *const *)b;
    size_t n = x->n < y->n ? x->n : y->n;
    for (size_t i = 0; i < n; i++)
        if (x->id[i] != y->id[i]) return x->id[i] < y->id[i] ? -1 : 1;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return (x > y) - (x < y);
}

static uint64_t clock_bits(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

typedef struct answer {
    sti_buf *choice;    /* [prompts], JSON */
    srv_prompt **order; /* [prompts] */
    uint64_t made;
} answer;

static still_status carry_out(srv_engine *e, srv_completion *q, answer *a,
                              srv_gone_fn gone, void *user, still_error *err)
{
    uint64_t seed = q->has_seed ? q->seed : clock_bits() ^ sti_mix64(e->served);
    int k = !q->echo || q->logprobs < 0 ? 0 : q->logprobs ? q->logprobs : 1;
    STI_TRY(encode_prompts(e, q, err));
    for (size_t i = 0; i < q->n_prompts; i++) a->order[i] = &q->prompt[i];
    qsort(a->order, q->n_prompts, sizeof *a->order, by_ids);
    for (size_t i = 0; i < q->n_prompts; i++) {
        const srv_prompt *p = a->order[i];
        size_t index = (size_t)(p - q->prompt);
        choice c = {.finish = "length"};
        still_status status =
            srv_prefix_cache_set(&e->cache, p->id, (int)p->n, k, gone, user, err);
        if (status == STILL_OK && q->echo) status = echo_prompt(e, q, p, &c, err);
        if (status == STILL_OK && q->max_tokens > 0)
            status = generate(e, q, p, seed + index, &c, gone, user, err);
        if (status == STILL_OK) {
            put_choice(&a->choice[index], q, index, &c);
            if (a->choice[index].failed) status = sti_fail_memory(err, "the answer", 0);
        }
        a->made += (uint64_t)c.made;
        free_choice(&c);
        STI_TRY(status);
    }
    return STILL_OK;
}

static void write_answer(const srv_engine *e, const srv_completion *q, const answer *a,
                         srv_reply *reply)
{
    sti_buf *b = &reply->body;
    unsigned long long prompt = 0, made = a->made;
    for (size_t i = 0; i < q->n_prompts; i++) prompt += q->prompt[i].n;
    reply->status = 200;
    sti_buf_clear(b);
    sti_buf_printf(b,
                   "{\"id\":\"cmpl-%016llx\",\"object\":\"text_completion\","
                   "\"created\":%lld,\"model\":",
                   (unsigned long long)sti_mix64(clock_bits() ^ e->served),
                   (long long)time(NULL));
    srv_put_string(b, e->name, strlen(e->name));
    sti_buf_puts(b, ",\"choices\":[");
    for (size_t i = 0; i < q->n_prompts; i++) {
        if (i) sti_buf_puts(b, ",");
        sti_buf_put(b, a->choice[i].p, a->choice[i].n);
    }
    sti_buf_printf(b,
                   "],\"usage\":{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,"
                   "\"total_tokens\":%llu}}",
                   prompt, made, prompt + made);
    if (b->failed) {
        sti_buf_free(b);
        srv_reply_error(reply, 500, "out_of_memory", "out of memory: the answer");
    }
}

void srv_complete(srv_engine *e, srv_completion *q, srv_gone_fn gone, void *user,
                  srv_reply *reply)
{
    still_error err = {0};
    answer a = {.choice = sti_alloc(q->n_prompts, sizeof *a.choice),
                .order = sti_alloc(q->n_prompts, sizeof *a.order)};
    still_status status = STILL_OK;
    if (!a.choice || !a.order) status = sti_fail_memory(&err, "choices", q->n_prompts);
    e->served++;
    if (status == STILL_OK) status = carry_out(e, q, &a, gone, user, &err);
    if (status == STILL_OK)
        write_answer(e, q, &a, reply);
    else
        srv_reply_failure(reply, &err);
    for (size_t i = 0; i < q->n_prompts && a.choice; i++) sti_buf_free(&a.choice[i]);
    free(a.choice);
    free(a.order);
}
