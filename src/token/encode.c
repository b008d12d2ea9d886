/* encode.c - from text to ids.
 *
 * Special tokens cut the text into fragments. A byte-level fragment is split by the
 * vocabulary's rule; a SentencePiece fragment gets its leading space and is split
 * into words if no token spans them. Each piece is then looked up whole (nine in ten
 * words are tokens) and merged only if that fails. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/nfc.h"
#include "base/utf8.h"
#include "token/tokenizer.h"

typedef struct encoder {
    const still_tokenizer *tk;
    int32_t *ids;
    size_t cap, n; /* n counts on past cap */
    bool after_unknown;
    sti_bpe_work work;
    sti_buf text;                /* the fragment with spaces in place */
    sti_buf nfc;                 /* what of it is not in NFC, normalized */
    sti_trie_hits special, user; /* places of tokens in the text, in the fragment */
} encoder;

static inline void emit(encoder *e, int32_t id)
{
    if (e->n < e->cap) e->ids[e->n] = id;
    e->n++;
    e->after_unknown = false;
}

static void emit_unknown(encoder *e)
{
    if (e->tk->unknown < 0 || (e->tk->fuse_unknown && e->after_unknown)) return;
    emit(e, e->tk->unknown);
    e->after_unknown = true;
}

/* ---- Byte-level ---------------------------------------------------------- */

static still_status encode_piece(void *user, const char *p, size_t n, still_error *err)
{
    encoder *e = user;
    const still_tokenizer *tk = e->tk;
    int32_t id = sti_vocab_find(&tk->v, p, n);
    if (id >= 0 && tk->v.kind[id] != STI_KIND_UNUSED &&
        (tk->bpe.whole[id] || tk->ignore_merges)) {
        emit(e, id);
        return STILL_OK;
    }
    STI_TRY(sti_bpe_work_symbols(&e->work, n, err));
    int32_t *sym = e->work.sym;
    size_t k = sti_bpe_symbols(&tk->bpe, &tk->v, p, n, sym);
    STI_TRY(sti_bpe_run(&tk->bpe, sym, &k, &e->work, err));
    for (size_t i = 0; i < k; i++) {
        if (sym[i] >= 0)
            emit(e, sym[i]);
        else
            emit_unknown(e);
    }
    return STILL_OK;
}

/* Bytes that are not UTF-8: unchanged, or as U+FFFD if the vocabulary lacks one. */
static still_status encode_broken(encoder *e, const char *p, size_t n, still_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (e->tk->v.byte_id[(unsigned char)p[i]] < 0)
            return encode_piece(e, STI_UTF8_REPLACEMENT, 3, err);
    return encode_piece(e, p, n, err);
}

static size_t broken_span(const char *p, size_t n)
{
    size_t i = 0, bad;
    bool cut;
    while (i < n && !sti_utf8_char(p + i, n - i, &bad, &cut)) i += bad;
    return i;
}

/* Splits a well-formed text, after bringing it into NFC where that is asked for. */
static still_status encode_split(encoder *e, const char *p, size_t n, still_error *err)
{
    const still_tokenizer *tk = e->tk;
    if (tk->nfc && sti_nfc_span(p, n) < n) {
        sti_buf_clear(&e->nfc);
        sti_nfc_put(p, n, &e->nfc);
        if (e->nfc.failed) return sti_fail_memory(err, "encoding", n);
        p = e->nfc.p;
        n = e->nfc.n;
    }
    return sti_split_walk(&tk->split, p, n, encode_piece, e, err);
}

static still_status encode_bytes(encoder *e, const char *p, size_t n, still_error *err)
{
    if (e->tk->space_in_front && n && p[0] != ' ') {
        sti_buf_clear(&e->text);
        sti_buf_put(&e->text, " ", 1);
        sti_buf_put(&e->text, p, n);
        if (e->text.failed) return sti_fail_memory(err, "encoding", n);
        p = e->text.p;
        n = e->text.n;
    }
    while (n) {
        size_t good = sti_utf8_span(p, n);
        STI_TRY(encode_split(e, p, good, err));
        size_t bad = broken_span(p + good, n - good);
        if (bad) STI_TRY(encode_broken(e, p + good, bad, err));
        p += good + bad;
        n -= good + bad;
    }
    return STILL_OK;
}

/* ---- SentencePiece ------------------------------------------------------- */

/* A character no token covers: its bytes, or the unknown token. */
static void emit_character(encoder *e, const char *p, size_t n)
{
    const int32_t *byte_id = e->tk->v.byte_id;
    for (size_t i = 0; i < n; i++) {
        if (byte_id[(unsigned char)p[i]] < 0) {
            emit_unknown(e);
            return;
        }
    }
    for (size_t i = 0; i < n; i++) emit(e, byte_id[(unsigned char)p[i]]);
}

/* A symbol after merging. UNUSED tokens are split back into the pair they were merged
 * from, at most `depth` levels; vocabularies have one or two. */
static void emit_symbol(encoder *e, int32_t id, const char *p, size_t n, int depth)
{
    const still_tokenizer *tk = e->tk;
    int kind = id < 0 ? STI_KIND_CHARACTER : tk->v.kind[id];
    if (kind == STI_KIND_UNUSED && depth && tk->bpe.parts &&
        tk->bpe.parts[id][0] >= 0) {
        size_t left;
        sti_vocab_piece(&tk->v, tk->bpe.parts[id][0], &left);
        emit_symbol(e, tk->bpe.parts[id][0], p, left, depth - 1);
        emit_symbol(e, tk->bpe.parts[id][1], p + left, n - left, depth - 1);
    } else if (kind == STI_KIND_CHARACTER) {
        emit_character(e, p, n);
    } else {
        emit(e, id);
    }
}

static still_status encode_word(encoder *e, const char *p, size_t n, still_error *err)
{
    enum { DEPTH = 32 };
    const still_tokenizer *tk = e->tk;
    int32_t id = n <= STI_MAX_PIECE ? sti_vocab_find(&tk->v, p, n) : -1;
    if (id >= 0 && (tk->bpe.whole[id] || tk->ignore_merges)) {
        emit_symbol(e, id, p, n, DEPTH);
        return STILL_OK;
    }
    STI_TRY(sti_bpe_work_symbols(&e->work, n, err));
    int32_t *sym = e->work.sym;
    size_t k = sti_bpe_symbols(&tk->bpe, &tk->v, p, n, sym);
    STI_TRY(sti_bpe_run(&tk->bpe, sym, &k, &e->work, err));
    for (size_t i = 0, len; i < k; i++, p += len) {
        if (sym[i] >= 0)
            sti_vocab_piece(&tk->v, sym[i], &len);
        else
            sti_utf8_decode(p, &len);
        emit_symbol(e, sym[i], p, len, DEPTH);
    }
    return STILL_OK;
}

static still_status encode_words(encoder *e, const char *p, size_t n, still_error *err)
{
    bool each = e->tk->each_space;
    if (!e->tk->words_apart && !each) return n ? encode_word(e, p, n, err) : STILL_OK;
    for (size_t i = 0, from = 0; i < n; from = i) {
        while (i < n && p[i] == ' ' && !(each && i > from)) i++;
        const char *space = i < n ? memchr(p + i, ' ', n - i) : NULL;
        i = space ? (size_t)(space - p) : n;
        STI_TRY(encode_word(e, p + from, i - from, err));
    }
    return STILL_OK;
}

/* The fragment with its leading space, U+2581 as a space, and U+FFFD for every byte
 * that is not UTF-8. */
static still_status normalize(encoder *e, const char *p, size_t n, bool first,
                              still_error *err)
{
    sti_buf *b = &e->text;
    sti_buf_clear(b);
    bool has_space = n && (p[0] == ' ' || (n >= 3 && !memcmp(p, "\xE2\x96\x81", 3)));
    if ((e->tk->prefix == STI_PREFIX_ALL ||
         (e->tk->prefix == STI_PREFIX_FIRST && first)) &&
        !(e->tk->prefix_once && has_space))
        sti_buf_put(b, " ", 1);
    while (n) {
        size_t good = sti_utf8_span(p, n);
        for (size_t done = 0; done < good;) {
            const char *mark = memmem(p + done, good - done, "\xE2\x96\x81", 3);
            size_t plain = mark ? (size_t)(mark - p) - done : good - done;
            sti_buf_put(b, p + done, plain);
            done += plain;
            if (mark) {
                sti_buf_put(b, " ", 1);
                done += 3;
            }
        }
        size_t bad = broken_span(p + good, n - good);
        for (size_t i = 0; i < bad; i++) sti_buf_put(b, STI_UTF8_REPLACEMENT, 3);
        p += good + bad;
        n -= good + bad;
    }
    return b->failed ? sti_fail_memory(err, "encoding", n) : STILL_OK;
}

static still_status encode_spm(encoder *e, const char *p, size_t n, bool first,
                               still_error *err)
{
    const still_tokenizer *tk = e->tk;
    if (!n) return STILL_OK;
    STI_TRY(normalize(e, p, n, first, err));
    p = e->text.p;
    n = e->text.n;
    size_t done = 0;
    STI_TRY(sti_trie_scan(&tk->user, p, NULL, n, true, &e->user, err));
    for (const sti_trie_hit *at; (at = sti_trie_next(&e->user, done));) {
        STI_TRY(encode_words(e, p + done, at->start - done, err));
        emit(e, at->id);
        done = at->start + (size_t)at->n;
    }
    return encode_words(e, p + done, n - done, err);
}

/* ---- Fragments ----------------------------------------------------------- */

static bool blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* content: marks as of a rendering, or NULL. */
static still_status encode_text(encoder *e, const char *p, const unsigned char *content,
                                size_t n, bool control, still_error *err)
{
    const still_tokenizer *tk = e->tk;
    size_t done = 0, end;
    STI_TRY(sti_trie_scan(&tk->special, p, content, n, control, &e->special, err));
    for (int32_t id = 0; id >= 0; done = end) {
        const sti_trie_hit *at = sti_trie_next(&e->special, done);
        id = at ? at->id : -1;
        const size_t length = at ? (size_t)at->n : 0;
        size_t stop = at ? at->start : n;
        end = stop + length;
        unsigned strip = id >= 0 && tk->strip ? tk->strip[id] : 0;
        if (strip & STI_STRIP_LEFT)
            while (stop > done && blank(p[stop - 1])) stop--;
        if (strip & STI_STRIP_RIGHT)
            while (end < n && blank(p[end])) end++;
        STI_TRY(tk->spm ? encode_spm(e, p + done, stop - done, done == 0, err)
                        : encode_bytes(e, p + done, stop - done, err));
        if (id >= 0) emit(e, id);
    }
    return STILL_OK;
}

static still_status finish(encoder *e, still_status st, size_t *n_ids)
{
    sti_bpe_work_free(&e->work);
    sti_buf_free(&e->text);
    sti_buf_free(&e->nfc);
    sti_trie_hits_free(&e->special);
    sti_trie_hits_free(&e->user);
    if (st == STILL_OK) *n_ids = e->n;
    return st;
}

still_status still_tokenizer_encode(const still_tokenizer *tk, const char *text,
                                    size_t n, unsigned flags, int32_t *ids, size_t cap,
                                    size_t *n_ids, still_error *err)
{
    if (!tk || (!text && n) || (!ids && cap) || !n_ids)
        return sti_fail(err, STILL_E_ARG, "tokenizer encode: an argument is NULL");
    if (!text) text = "";
    encoder e = {.tk = tk, .ids = ids, .cap = cap};
    if ((flags & STILL_ENCODE_BOS) && tk->add_bos) emit(&e, tk->bos);
    const bool control = (flags & STILL_ENCODE_SPECIAL) != 0;
    return finish(&e, encode_text(&e, text, NULL, n, control, err), n_ids);
}

still_status still_chat_encode(const still_tokenizer *tk, const still_rendering *r,
                               size_t from, int32_t *ids, size_t cap, size_t *n_ids,
                               still_error *err)
{
    if (!tk || !r || from > r->n || (!ids && cap) || !n_ids)
        return sti_fail(err, STILL_E_ARG,
                        "chat encode: an argument is NULL, or the "
                        "text begins behind its end");
    encoder e = {.tk = tk, .ids = ids, .cap = cap};
    const still_status st =
        encode_text(&e, r->n ? r->text + from : "", r->n ? r->content + from : NULL,
                    r->n - from, true, err);
    return finish(&e, st, n_ids);
}
