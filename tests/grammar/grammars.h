/* grammars.h - what the tests of constrained output share: a vocabulary of all bytes and of
 * pieces that cross every border of JSON, and texts against grammars. */
#ifndef GRAMMARS_H
#define GRAMMARS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/random.h"
#include "base/utf8.h"
#include "token/tokenizer.h"

/* Byte b is token b; then come these, then <|end|>, <|im_start|> and <|user|>. */
static const char *const PIECES[] = {
    "{\"",
    "\":",
    "\": ",
    "\":\"",
    "\",",
    "\", \"",
    "\"}",
    "\"}]",
    "},{",
    "}}",
    "[{\"",
    "[[",
    "]]",
    "],",
    " \"",
    "\n  ",
    "\n    \"",
    ", ",
    ": ",
    "true",
    "tru",
    "e}",
    "false,",
    "null",
    "nul",
    "12",
    "100",
    "1.",
    ".5",
    "0}",
    "-1",
    "e+1",
    "ba",
    "ab",
    "abc",
    "abc\"",
    "the ",
    "name",
    "name\"",
    "id\":",
    "\\n",
    "\\u00",
    "\\t",
    "\\\"",
    "\xC3\xA9",
    "\xC3\xA9\xC3",
    "\xA9\"",
    "\xF0\x9F",
    "\x98\x80",
    "\xE2\x82",
    "\xAC\xE2",
    "x\xE2\x82",
    "root",
    "  ",
    "\t\t",
    "2024-",
    "-0",
    "T1",
    "Z\"",
    "aaaa",
    "bbbb",
    "a\"",
    "a\",\"",
    "zz",
    "((",
    "))",
    "+1",
    "1+",
    "\"\"",
    "[]",
    "{}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" /* 32 */,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" /* 33: too long to be offered */};
enum {
    N_PIECES = sizeof PIECES / sizeof *PIECES,
    END = 256 + N_PIECES,
    START,
    USER_MARK,
    VOCAB_SIZE
};

/* GPT-2's alphabet for bytes, as JSON. */
static inline void put_gpt2(sti_buf *to, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const unsigned char b = (unsigned char)p[i];
        uint32_t c = b, k = 0;
        char utf8[4];
        for (unsigned j = 0; j <= b; j++) {
            const bool shown = (j >= 33 && j <= 126) || (j >= 161 && j != 173);
            if (j == b && !shown) c = 256 + k;
            k += !shown;
        }
        if (c == '"' || c == '\\') sti_buf_puts(to, "\\");
        sti_buf_put(to, utf8, sti_utf8_encode(c, utf8));
    }
}

static inline still_tokenizer *test_tokenizer(void)
{
    still_tokenizer *tk;
    still_error err = {0};
    sti_buf json = {0};
    sti_buf_puts(&json, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int i = 0; i < 256; i++) {
        const char byte = (char)i;
        sti_buf_puts(&json, i ? ",\"" : "\"");
        put_gpt2(&json, &byte, 1);
        sti_buf_printf(&json, "\":%d", i);
    }
    int id = 256;
    for (int i = 0; i < N_PIECES; i++, id++) {
        sti_buf_puts(&json, ",\"");
        put_gpt2(&json, PIECES[i], strlen(PIECES[i]));
        sti_buf_printf(&json, "\":%d", id);
    }
    sti_buf_printf(&json,
                   "}},\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"added_tokens\":["
                   "{\"id\":%d,\"content\":\"<|endoftext|>\",\"special\":true},"
                   "{\"id\":%d,\"content\":\"<|im_start|>\",\"special\":true},"
                   "{\"id\":%d,\"content\":\"<|user|>\",\"special\":false}]}",
                   END, START, USER_MARK);
    assert_false(json.failed);
    if (sti_tokenizer_from_bytes(json.p, json.n, NULL, &tk, &err))
        fail_msg("%s", err.text);
    sti_buf_free(&json);
    assert_int_equal(still_tokenizer_vocab_size(tk), VOCAB_SIZE);
    if (!still_tokenizer_is_end(tk, END))
        assert_int_equal(sti_tokenizer_add_end(tk, END, &err), STILL_OK);
    return tk;
}

typedef still_status (*open_fn)(const still_tokenizer *, const char *, size_t,
                                still_grammar **, still_error *);

static inline still_matcher *new_matcher(still_grammar *g)
{
    still_matcher *m;
    still_error err;
    if (still_matcher_new(g, VOCAB_SIZE, &m, &err)) fail_msg("%s", err.text);
    return m;
}

/* How many bytes of a text are read, one token each. */
static inline size_t feed_bytes(still_matcher *m, const char *p, size_t n)
{
    still_error err;
    for (size_t i = 0; i < n; i++) {
        const still_status st = still_matcher_accept(m, (unsigned char)p[i], &err);
        if (st == STILL_E_LIMIT) fail_msg("%s", err.text);
        if (st != STILL_OK) return i;
    }
    return n;
}

/* Whether all of a text is in the grammar. */
static inline bool matches(still_grammar *g, const char *p, size_t n)
{
    still_matcher *m = new_matcher(g);
    const bool yes = feed_bytes(m, p, n) == n && still_matcher_can_end(m);
    still_matcher_free(m);
    return yes;
}

static inline bool has(const uint64_t *bits, int32_t id)
{
    return bits[id / 64] >> (id % 64) & 1;
}

enum { WORDS = (VOCAB_SIZE + 63) / 64 };

/* The mask, compared with reading each token byte by byte. */
static inline void check_mask(still_matcher *m, uint64_t *bits)
{
    still_error err;
    if (still_matcher_mask(m, bits, &err)) fail_msg("%s", err.text);
    for (int32_t id = 0; id < 64 * WORDS; id++) {
        const char byte = (char)id;
        const char *p = id < 256 ? &byte : id < END ? PIECES[id - 256] : NULL;
        const size_t n = id < 256 ? 1 : p ? strlen(p) : 0;
        bool may = id == END && still_matcher_can_end(m);
        if (p && n <= STI_PIECE_LONGEST) {
            still_matcher *copy;
            assert_int_equal(still_matcher_fork(m, &copy, &err), STILL_OK);
            may = feed_bytes(copy, p, n) == n;
            still_matcher_free(copy);
        }
        if (has(bits, id) != may)
            fail_msg("token %d is %sallowed by the mask", id, may ? "not " : "");
    }
}

#endif
