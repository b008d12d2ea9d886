/* encode.c - items as tokens.
 *
 * Context and continuation are tokenized as one text; the number of tokens of the
 * context alone says how many of them are context, even where a merge crosses the
 * border. White space at the end of a context counts as continuation, which does not
 * change the text. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "eval/eval.h"
#include "eval/text.h"

/* Tokens of a text, or of a rendering if that is given, after `before` free entries. Most
 * texts have fewer than half as many tokens as bytes, so one pass is usually enough. */
static still_status encode_any(const still_tokenizer *tk, const char *text, size_t n,
                               const still_rendering *r, unsigned flags, size_t before,
                               sti_ids *out, still_error *err)
{
    size_t capacity = n / 2 + 16, count = 0;
    still_status st;
    for (;;) {
        out->id = sti_alloc(before + capacity, sizeof *out->id);
        if (!out->id) return sti_fail_memory(err, "tokens", capacity * sizeof *out->id);
        int32_t *id = out->id + before;
        st = r ? still_chat_encode(tk, r, 0, id, capacity, &count, err)
               : still_tokenizer_encode(tk, text, n, flags, id, capacity, &count, err);
        if (st == STILL_OK && count > INT_MAX / 2)
            st =
                sti_fail(err, STILL_E_LIMIT, "a text of %zu tokens is too long", count);
        if (st == STILL_OK && count <= capacity) break;
        free(out->id);
        out->id = NULL;
        if (st != STILL_OK) return st;
        capacity = count;
    }
    out->n = (int)(before + count);
    return STILL_OK;
}

static still_status encode(const still_tokenizer *tk, const char *text, size_t n,
                           unsigned flags, size_t before, sti_ids *out,
                           still_error *err)
{
    return encode_any(tk, text, n, NULL, flags, before, out, err);
}

/* Keeps the last `capacity` tokens. */
static void keep_last(sti_ids *t, int capacity)
{
    const int over = t->n - capacity;
    if (over <= 0) return;
    memmove(t->id, t->id + over, (size_t)capacity * sizeof *t->id);
    t->n = capacity;
    t->n_context = t->n_context - over > 1 ? t->n_context - over : 1;
    t->cut = true;
}

/* The token for an empty context: BOS, else EOS. */
static still_status start_token(const still_tokenizer *tk, int32_t *id,
                                still_error *err)
{
    *id = still_tokenizer_bos(tk) >= 0 ? still_tokenizer_bos(tk)
                                       : still_tokenizer_eos(tk);
    if (*id >= 0) return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "an empty context needs a token of beginning or end, and the "
                    "tokenizer has neither");
}

/* alone: tokens of the context by itself; 0: not yet counted. */
static still_status encode_option(const still_tokenizer *tk, const sti_option *o,
                                  int limit, size_t *alone, sti_ids *out,
                                  still_error *err)
{
    *out = (sti_ids){0};
    const size_t context = sti_text_strip_end(o->context, strlen(o->context));
    sti_buf whole = {0};
    sti_buf_puts(&whole, o->context);
    sti_buf_puts(&whole, o->continuation);
    if (whole.failed) {
        sti_buf_free(&whole);
        return sti_fail_memory(err, "a question", whole.n);
    }
    still_status st;
    int32_t start = -1;
    if (context == 0) {
        st = start_token(tk, &start, err);
        if (st == STILL_OK) st = encode(tk, whole.p, whole.n, 0, 1, out, err);
        if (st == STILL_OK) {
            out->id[0] = start;
            out->n_context = 1;
        }
    } else {
        st = encode(tk, whole.p, whole.n, STILL_ENCODE_BOS, 0, out, err);
        if (st == STILL_OK && *alone == 0)
            st = still_tokenizer_encode(tk, whole.p, context, STILL_ENCODE_BOS, NULL, 0,
                                        alone, err);
        if (st == STILL_OK)
            out->n_context = *alone < (size_t)out->n ? (int)*alone : out->n;
    }
    sti_buf_free(&whole);
    if (st == STILL_OK) keep_last(out, limit + 1);
    return st;
}

still_status sti_encode_options(const still_tokenizer *tk, const sti_option *o, int n,
                                int limit, sti_ids *out, still_error *err)
{
    size_t alone = 0;
    for (int i = 0; i < n; i++) {
        if (i > 0 && o[i].context != o[i - 1].context) alone = 0;
        STI_TRY(encode_option(tk, &o[i], limit, &alone, &out[i], err));
    }
    return STILL_OK;
}

still_status sti_encode_prompt(const still_tokenizer *tk, const sti_item *it, int limit,
                               sti_ids *out, bool *plain, still_error *err)
{
    *out = (sti_ids){0};
    if (it->max_new >= limit)
        return sti_fail(err, STILL_E_LIMIT,
                        "a context of %d tokens has no room for a prompt and the %d "
                        "tokens to write",
                        limit, it->max_new);
    const char *template = still_tokenizer_chat_template(tk);
    still_status st;
    *plain = it->chat && !template;
    if (it->chat && template) {
        still_rendering r = {0};
        const still_message turn = {"user", it->prompt};
        const still_conversation c = {.size = sizeof c,
                                      .message = &turn,
                                      .n_messages = 1,
                                      .add_generation_prompt = true};
        STI_TRY(still_chat_render(tk, template, &c, &r, err));
        st = encode_any(tk, NULL, r.n, &r, 0, 0, out, err);
        still_rendering_free(&r);
    } else {
        st = encode(tk, it->prompt, strlen(it->prompt), STILL_ENCODE_BOS, 0, out, err);
    }
    if (st == STILL_OK && out->n == 0) {
        st = start_token(tk, &out->id[0], err);
        out->n = 1;
        if (st != STILL_OK) {
            free(out->id);
            out->id = NULL;
        }
    }
    out->n_context = out->n;
    if (st == STILL_OK) keep_last(out, limit - it->max_new);
    return st;
}
