/* answer.c - see answer.h. */
#include "server/answer.h"

#include <math.h>
#include <string.h>

#include "base/random.h"
#include "server/reply.h"

/* ---- Log-probabilities --------------------------------------------------- */

static void put_piece(sti_buf *b, const still_tokenizer *tk, int32_t id)
{
    size_t n = 0;
    const char *piece = still_tokenizer_piece(tk, id, true, &n);
    srv_put_string(b, piece ? piece : "", n);
}

/* JSON has no infinity; the API's smallest is this. A float needs 9 digits to survive the
 * round trip. */
static void put_value(sti_buf *b, float v)
{
    sti_buf_printf(b, "%.9g", isfinite(v) ? (double)v : -9999.0);
}

/* Clients compare numbers to see whether a token was the most likely one, so the best of
 * the others must not round to the same value. */
static float apart(const srv_token *t, int i)
{
    float v = t->top_logprob[i];
    return i == 0 && t->top[0] != t->id && !(v > t->logprob)
               ? nextafterf(t->logprob, INFINITY)
               : v;
}

static void add_text_entry(srv_logprobs *l, const still_tokenizer *tk,
                           const srv_token *t)
{
    const char *comma = l->offsets.n ? "," : "";
    bool seen = false;
    sti_buf_puts(&l->tokens, comma);
    put_piece(&l->tokens, tk, t->id);
    sti_buf_printf(&l->offsets, "%s%zu", comma, l->characters);
    sti_buf_puts(&l->logprobs, comma);
    sti_buf_puts(&l->tops, comma);
    if (isnan(t->logprob)) { /* nothing precedes it */
        sti_buf_puts(&l->logprobs, "null");
        sti_buf_puts(&l->tops, "null");
        return;
    }
    put_value(&l->logprobs, t->logprob);
    sti_buf_puts(&l->tops, "{");
    for (int i = 0; i < t->n_top; i++) {
        put_piece(&l->tops, tk, t->top[i]);
        sti_buf_puts(&l->tops, ":");
        put_value(&l->tops, apart(t, i));
        if (i + 1 < t->n_top) sti_buf_puts(&l->tops, ",");
        seen = seen || t->top[i] == t->id;
    }
    if (!seen) {
        if (t->n_top) sti_buf_puts(&l->tops, ",");
        put_piece(&l->tops, tk, t->id);
        sti_buf_puts(&l->tops, ":");
        put_value(&l->tops, t->logprob);
    }
    sti_buf_puts(&l->tops, "}");
}

/* {"token", "logprob", "bytes" without the closing brace. */
static void put_chat_entry(sti_buf *b, const still_tokenizer *tk, int32_t id, float v)
{
    size_t n = 0;
    const char *piece = still_tokenizer_piece(tk, id, true, &n);
    sti_buf_puts(b, "{\"token\":");
    put_piece(b, tk, id);
    sti_buf_puts(b, ",\"logprob\":");
    put_value(b, v);
    sti_buf_puts(b, ",\"bytes\":[");
    for (size_t i = 0; piece && i < n; i++)
        sti_buf_printf(b, i ? ",%d" : "%d", (unsigned char)piece[i]);
    sti_buf_puts(b, "]");
}

static void add_chat_entry(srv_logprobs *l, const still_tokenizer *tk,
                           const srv_token *t)
{
    if (l->tokens.n) sti_buf_puts(&l->tokens, ",");
    put_chat_entry(&l->tokens, tk, t->id, t->logprob);
    sti_buf_puts(&l->tokens, ",\"top_logprobs\":[");
    for (int i = 0; i < t->n_top; i++) {
        if (i) sti_buf_puts(&l->tokens, ",");
        put_chat_entry(&l->tokens, tk, t->top[i], t->top_logprob[i]);
        sti_buf_puts(&l->tokens, "}");
    }
    sti_buf_puts(&l->tokens, "]}");
}

void srv_logprobs_add(srv_logprobs *l, const still_tokenizer *tk, const srv_token *t)
{
    if (l->chat)
        add_chat_entry(l, tk, t);
    else
        add_text_entry(l, tk, t);
}

void srv_logprobs_clear(srv_logprobs *l)
{
    sti_buf_clear(&l->tokens);
    sti_buf_clear(&l->logprobs);
    sti_buf_clear(&l->tops);
    sti_buf_clear(&l->offsets);
}

void srv_logprobs_free(srv_logprobs *l)
{
    sti_buf_free(&l->tokens);
    sti_buf_free(&l->logprobs);
    sti_buf_free(&l->tops);
    sti_buf_free(&l->offsets);
}

static const char *text_of(const sti_buf *b)
{
    return b->n ? b->p : "";
}

static void put_logprobs(sti_buf *b, const srv_logprobs *l)
{
    sti_buf_puts(b, ",\"logprobs\":");
    if (!l || (!l->tokens.n && l->chat)) {
        sti_buf_puts(b, "null");
        return;
    }
    if (l->tokens.failed || l->logprobs.failed || l->tops.failed || l->offsets.failed)
        b->failed = true;
    /* Not sti_buf_printf: these are long. */
    sti_buf_puts(b, l->chat ? "{\"content\":[" : "{\"tokens\":[");
    sti_buf_puts(b, text_of(&l->tokens));
    if (!l->chat) {
        sti_buf_puts(b, "],\"token_logprobs\":[");
        sti_buf_puts(b, text_of(&l->logprobs));
        sti_buf_puts(b, "],\"top_logprobs\":[");
        sti_buf_puts(b, text_of(&l->tops));
        sti_buf_puts(b, "],\"text_offset\":[");
        sti_buf_puts(b, text_of(&l->offsets));
    }
    sti_buf_puts(b, l->chat ? "],\"refusal\":null}" : "]}");
}

/* ---- Choices ------------------------------------------------------------- */

static void put_calls(sti_buf *b, const srv_part *p, bool numbered)
{
    char id[SRV_CALL_ID + 1];
    sti_buf_puts(b, ",\"tool_calls\":[");
    for (int i = 0; i < p->n_calls; i++) {
        int at = p->call_at + i;
        srv_call_id(sti_mix64(p->call_seed + p->index * SRV_MOST_CALLS + (uint64_t)at),
                    id);
        sti_buf_puts(b, i ? ",{" : "{");
        if (numbered) sti_buf_printf(b, "\"index\":%d,", at);
        sti_buf_printf(
            b, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", id);
        srv_put_string(b, p->call[i].name, strlen(p->call[i].name));
        sti_buf_puts(b, ",\"arguments\":");
        srv_put_string(b, p->call[i].arguments, strlen(p->call[i].arguments));
        sti_buf_puts(b, "}}");
    }
    sti_buf_puts(b, "]");
}

static void put_finish(sti_buf *b, const srv_part *p)
{
    put_logprobs(b, p->logprobs);
    if (p->kept) {
        sti_buf_puts(b, ",\"still\":");
        sti_buf_put(b, p->kept->p, p->kept->n);
    }
    if (p->finish)
        sti_buf_printf(b, ",\"finish_reason\":\"%s\"}", p->finish);
    else
        sti_buf_puts(b, ",\"finish_reason\":null}");
}

void srv_put_choice(sti_buf *b, const srv_head *h, const srv_part *p)
{
    sti_buf_printf(b, "{\"index\":%zu,", p->index);
    sti_buf_puts(b, h->chat ? "\"message\":{\"role\":\"assistant\",\"content\":"
                            : "\"text\":");
    if (h->chat && p->n == 0 && p->n_calls)
        sti_buf_puts(b, "null");
    else
        srv_put_string(b, p->n ? p->text : "", p->n);
    if (h->chat) {
        if (p->n_calls) put_calls(b, p, false);
        sti_buf_puts(b, ",\"refusal\":null}");
    }
    put_finish(b, p);
}

static void put_head(sti_buf *b, const srv_head *h, const char *object)
{
    sti_buf_printf(b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":",
                   h->id, object, h->created);
    srv_put_string(b, h->model, strlen(h->model));
    sti_buf_puts(b, ",\"choices\":[");
}

static void put_usage(sti_buf *b, const srv_usage *u)
{
    sti_buf_printf(b,
                   "\"usage\":{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,"
                   "\"total_tokens\":%llu,\"prompt_tokens_details\":{\"cached_tokens\":"
                   "%llu}}",
                   (unsigned long long)u->prompt, (unsigned long long)u->made,
                   (unsigned long long)(u->prompt + u->made),
                   (unsigned long long)u->cached);
}

void srv_put_open(sti_buf *b, const srv_head *h)
{
    put_head(b, h, h->chat ? "chat.completion" : "text_completion");
}

void srv_put_close(sti_buf *b, const srv_usage *u)
{
    sti_buf_puts(b, "],");
    put_usage(b, u);
    sti_buf_puts(b, "}");
}

/* ---- Events -------------------------------------------------------------- */

static void put_event_head(sti_buf *b, const srv_head *h)
{
    sti_buf_puts(b, "data: ");
    put_head(b, h, h->chat ? "chat.completion.chunk" : "text_completion");
}

static void put_delta(sti_buf *b, const srv_part *p)
{
    sti_buf_puts(b, "\"delta\":{");
    if (p->first) sti_buf_puts(b, "\"role\":\"assistant\",\"content\":");
    if (!p->first && p->n) sti_buf_puts(b, "\"content\":");
    if (p->first || p->n) srv_put_string(b, p->n ? p->text : "", p->n);
    if (p->n_calls) {
        sti_buf calls = {0};
        put_calls(&calls, p, true); /* with a comma before it */
        sti_buf_puts(b, text_of(&calls) + (p->first || p->n || calls.n == 0 ? 0 : 1));
        b->failed = b->failed || calls.failed;
        sti_buf_free(&calls);
    }
    sti_buf_puts(b, "}");
}

void srv_put_event(sti_buf *b, const srv_head *h, const srv_part *p)
{
    put_event_head(b, h);
    sti_buf_printf(b, "{\"index\":%zu,", p->index);
    if (h->chat) {
        put_delta(b, p);
    } else {
        sti_buf_puts(b, "\"text\":");
        srv_put_string(b, p->n ? p->text : "", p->n);
    }
    put_finish(b, p);
    sti_buf_puts(b, h->usage ? "],\"usage\":null}\n\n" : "]}\n\n");
}

void srv_put_usage_event(sti_buf *b, const srv_head *h, const srv_usage *u)
{
    put_event_head(b, h);
    srv_put_close(b, u);
    sti_buf_puts(b, "\n\n");
}

void srv_put_error_event(sti_buf *b, const char *error, size_t n)
{
    sti_buf_puts(b, "data: ");
    sti_buf_put(b, error, n);
    sti_buf_puts(b, "\n\n");
}

void srv_put_done(sti_buf *b)
{
    sti_buf_puts(b, "data: [DONE]\n\n");
}

void srv_put_ping(sti_buf *b)
{
    sti_buf_puts(b, ": waiting\n\n");
}
