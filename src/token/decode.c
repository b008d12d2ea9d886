/* decode.c - from ids to text: one token, or a stream that never cuts a character. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"
#include "token/tokenizer.h"

const char *still_tokenizer_piece(const still_tokenizer *tk, int32_t id,
                                  bool with_special, size_t *n)
{
    size_t len = 0;
    const char *p = NULL;
    if (tk && id >= 0 && id < tk->n) {
        p = sti_vocab_piece(&tk->v, id, &len);
        int kind = tk->v.kind[id];
        if (!with_special && (kind == STI_KIND_CONTROL || kind == STI_KIND_UNKNOWN)) {
            p = "";
            len = 0;
        }
    }
    if (n) *n = len;
    return p;
}

struct still_decoder {
    const still_tokenizer *tk;
    bool with_special;
    bool started; /* some text was emitted: no more leading space to drop */
    sti_buf raw;  /* pending bytes: at most an unfinished character */
    sti_buf out;
};

still_status still_decoder_new(const still_tokenizer *tk, bool with_special,
                               still_decoder **out, still_error *err)
{
    *out = NULL;
    if (!tk) return sti_fail(err, STILL_E_ARG, "decoder: the tokenizer is NULL");
    still_decoder *d = sti_alloc(1, sizeof *d);
    if (!d) return sti_fail_memory(err, "decoder", sizeof *d);
    d->tk = tk;
    d->with_special = with_special;
    *out = d;
    return STILL_OK;
}

void still_decoder_free(still_decoder *d)
{
    if (!d) return;
    sti_buf_free(&d->raw);
    sti_buf_free(&d->out);
    free(d);
}

/* Moves whole characters from raw to out, with U+FFFD for invalid bytes, and keeps an
 * unfinished one (unless this is the end). SentencePiece replaces invalid bytes one by
 * one, byte-level decoders an invalid character at a time. */
static void move_text(still_decoder *d, bool end)
{
    const char *p = d->raw.p;
    size_t n = d->raw.n, i = 0;
    while (i < n) {
        size_t good = sti_utf8_span(p + i, n - i), bad;
        bool cut;
        sti_buf_put(&d->out, p + i, good);
        i += good;
        if (i == n) break;
        sti_utf8_char(p + i, n - i, &bad, &cut);
        if (cut && !end) break;
        sti_buf_puts(&d->out, STI_UTF8_REPLACEMENT);
        i += d->tk->spm ? 1 : bad;
    }
    if (i) memmove(d->raw.p, p + i, n - i);
    d->raw.n = n - i;
}

static void hand_out(still_decoder *d, const char **text, size_t *n)
{
    *text = d->out.n ? d->out.p : "";
    *n = d->out.n;
}

still_status still_decoder_push(still_decoder *d, int32_t id, const char **text,
                                size_t *n, still_error *err)
{
    size_t len;
    const char *p = still_tokenizer_piece(d->tk, id, d->with_special, &len);
    if (!p)
        return sti_fail(err, STILL_E_ARG, "token %d is outside the vocabulary of %d",
                        id, d->tk->n);
    int kind = d->tk->v.kind[id];
    if (!d->started && kind != STI_KIND_CONTROL && kind != STI_KIND_UNKNOWN && len) {
        d->started = true;
        if (d->tk->prefix != STI_PREFIX_NONE && kind != STI_KIND_BYTE && p[0] == ' ')
            p++, len--;
    }
    sti_buf_clear(&d->out);
    sti_buf_put(&d->raw, p, len);
    move_text(d, false);
    if (d->raw.failed || d->out.failed) return sti_fail_memory(err, "decoding", len);
    hand_out(d, text, n);
    return STILL_OK;
}

void still_decoder_flush(still_decoder *d, const char **text, size_t *n)
{
    sti_buf_clear(&d->out);
    move_text(d, true);
    d->raw.n = 0;
    d->started = false;
    hand_out(d, text, n);
}
