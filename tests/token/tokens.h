/* tokens.h - what the tokenizer tests share: cmocka in order, opening, encoding. */
#ifndef TOKENS_H
#define TOKENS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "still.h"

#define VOCAB(name) FIXTURES "/vocab/" name

static inline still_tokenizer *open_split(const char *path, const char *split)
{
    still_tokenizer *tk;
    still_error err = {0};
    if (still_tokenizer_open_split(path, split, &tk, &err)) fail_msg("%s", err.text);
    return tk;
}

/* Ranks are read as Llama 3's. */
static inline still_tokenizer *open_tokenizer(const char *path)
{
    return open_split(path, strstr(path, ".tiktoken") ? "llama-bpe" : NULL);
}

/* The ids of n bytes, malloc'd. */
static inline int32_t *encode(const still_tokenizer *tk, const char *text, size_t n,
                              unsigned flags, size_t *count)
{
    still_error err;
    assert_int_equal(still_tokenizer_encode(tk, text, n, flags, NULL, 0, count, &err),
                     STILL_OK);
    size_t again, capacity = *count;
    int32_t *ids = malloc((capacity + 1) * sizeof *ids);
    assert_non_null(ids);
    assert_int_equal(
        still_tokenizer_encode(tk, text, n, flags, ids, capacity, &again, &err),
        STILL_OK);
    assert_int_equal(again, *count);
    return ids;
}

/* The streamed text of ids, malloc'd and NUL-terminated. */
static inline char *decode(const still_tokenizer *tk, const int32_t *ids, size_t n,
                           bool with_special, size_t *len)
{
    still_decoder *d;
    still_error err;
    const char *p;
    size_t k, total = 0;
    char *out = calloc(1, 1);
    assert_int_equal(still_decoder_new(tk, with_special, &d, &err), STILL_OK);
    for (size_t i = 0; i <= n; i++) {
        if (i < n)
            assert_int_equal(still_decoder_push(d, ids[i], &p, &k, &err), STILL_OK);
        else
            still_decoder_flush(d, &p, &k);
        out = realloc(out, total + k + 1);
        assert_non_null(out);
        memcpy(out + total, p, k + 1);
        total += k;
    }
    still_decoder_free(d);
    *len = total;
    return out;
}

#endif
