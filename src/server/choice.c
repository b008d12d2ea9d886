/* choice.c - see choice.h. A token's way: decoder (whole characters), stop strings, calls;
 * each may hold text back until it knows more. */
#include "server/choice.h"

#include <string.h>

#include "base/error.h"

still_status srv_choice_init(srv_choice *c, const srv_reading *how,
                             const srv_prompt *prompt, still_error *err)
{
    const srv_options *o = how->options;
    const char *unused;
    size_t n;
    c->how = how;
    c->prompt = prompt;
    c->stops = (srv_stops){.stop = o->stop, .n = o->n_stops};
    c->calls = (srv_calls){.tools = how->tools, .one = !o->parallel_calls};
    c->logprobs.chat = how->chat;
    STI_TRY(still_decoder_new(how->tk, false, &c->decoder, err));
    /* The decoder has seen the prompt's last token, so a space or half a character at the
     * border is not mistaken for the beginning of a text. An answer in a conversation is
     * a text of its own. */
    if (!how->chat)
        STI_TRY(still_decoder_push(c->decoder, prompt->id[prompt->n - 1], &unused, &n,
                                   err));
    if (o->echo && o->logprobs >= 0)
        STI_TRY(still_decoder_new(how->tk, true, &c->echo, err));
    return STILL_OK;
}

void srv_choice_free(srv_choice *c)
{
    still_decoder_free(c->decoder);
    still_decoder_free(c->echo);
    srv_stops_free(&c->stops);
    srv_calls_free(&c->calls);
    srv_logprobs_free(&c->logprobs);
    sti_buf_free(&c->passed);
    sti_buf_free(&c->text);
    still_matcher_free(c->work.matcher);
    sti_buf_free(&c->ids);
}

static size_t characters(const char *text, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

/* The answer begins; an echoed prompt is exactly as it came. */
static void start(srv_choice *c)
{
    c->started = true;
    if (c->how->written && c->how->written->n)
        srv_calls_push(&c->calls, c->how->written->p, c->how->written->n, &c->text);
    if (!c->how->options->echo) return;
    sti_buf_put(&c->text, c->prompt->text ? c->prompt->text : "", c->prompt->n_text);
    c->logprobs.characters = characters(c->text.n ? c->text.p : "", c->text.n);
}

static void pass(srv_choice *c, const char *text, size_t n)
{
    if (c->how->tools)
        srv_calls_push(&c->calls, text, n, &c->text);
    else
        sti_buf_put(&c->text, text, n);
}

/* False: a stop string ended the text. A text that must be longer is not ended by one. */
static bool put(srv_choice *c, const char *text, size_t n)
{
    bool more = true;
    c->logprobs.characters += characters(text, n);
    if (c->made <= c->how->options->min_tokens) {
        pass(c, text, n);
        return true;
    }
    sti_buf_clear(&c->passed);
    more = srv_stops_push(&c->stops, text, n, &c->passed);
    if (c->passed.n) pass(c, c->passed.p, c->passed.n);
    return more;
}

static void take_prompt(srv_choice *c, const srv_token *t, size_t at)
{
    const char *text;
    size_t n;
    srv_logprobs_add(&c->logprobs, c->how->tk, t);
    if (at == 0 && c->prompt->has_bos) return; /* it is not in the text */
    if (c->echo && still_decoder_push(c->echo, t->id, &text, &n, NULL) == STILL_OK)
        c->logprobs.characters += characters(text, n);
}

bool srv_choice_take(srv_choice *c, const srv_token *t)
{
    const srv_reading *how = c->how;
    const char *text;
    size_t n;
    if (t->prompt) {
        take_prompt(c, t, (size_t)c->made++);
        return true;
    }
    if (!c->started) {
        c->made = 0;
        start(c);
    }
    c->made++;
    if (how->options->kept) sti_buf_put(&c->ids, &t->id, sizeof t->id);
    if (how->options->logprobs >= 0 && !(how->chat && t->end))
        srv_logprobs_add(&c->logprobs, how->tk, t);
    if (t->end) return true;
    c->failed = still_decoder_push(c->decoder, t->id, &text, &n, NULL);
    if (c->failed != STILL_OK || srv_choice_failed(c)) return false;
    if (!put(c, text, n) || srv_calls_over(&c->calls)) return false;
    if (!how->tools || n > 0) return true;
    /* Marks of calls are special tokens in some vocabularies. */
    text = still_tokenizer_piece(how->tk, t->id, true, &n);
    return !text || !srv_calls_mark(text, n) ||
           (put(c, text, n) && !srv_calls_over(&c->calls));
}

void srv_choice_end(srv_choice *c)
{
    const char *text;
    size_t n;
    if (!c->started) start(c);
    if (!c->stops.found) {
        still_decoder_flush(c->decoder, &text, &n);
        put(c, text, n);
    }
    sti_buf_clear(&c->passed);
    srv_stops_end(&c->stops, &c->passed);
    if (c->passed.n) pass(c, c->passed.p, c->passed.n);
    if (c->how->tools) srv_calls_end(&c->calls, &c->text);
}

bool srv_choice_failed(const srv_choice *c)
{
    return c->failed != STILL_OK || c->text.failed || c->ids.failed ||
           c->passed.failed || c->calls.failed || c->logprobs.tokens.failed ||
           c->logprobs.tops.failed;
}
