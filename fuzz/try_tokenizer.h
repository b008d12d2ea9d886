/* try_tokenizer.h - loads bytes as a vocabulary and, if that works, uses it. */
#ifndef TRY_TOKENIZER_H
#define TRY_TOKENIZER_H

#include <stdlib.h>

#include "token/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(bool holds)
{
    if (!holds) abort();
}

/* Encodes, checks every id, and decodes it again. */
static inline void use_tokenizer(const still_tokenizer *tk, const char *text, size_t n,
                                 unsigned flags)
{
    still_error err;
    still_decoder *d;
    const char *p;
    size_t count, again = 0, len;
    if (still_tokenizer_encode(tk, text, n, flags, NULL, 0, &count, &err)) return;
    int32_t *ids = malloc((count + 1) * sizeof *ids);
    check(ids && !still_tokenizer_encode(tk, text, n, flags, ids, count, &again, &err));
    check(again == count && !still_decoder_new(tk, flags & 1, &d, &err));
    for (size_t i = 0; i < count; i++)
        check(!still_decoder_push(d, ids[i], &p, &len, &err));
    still_decoder_flush(d, &p, &len);
    still_decoder_free(d);
    free(ids);
}

typedef still_status (*load_fn)(still_tokenizer *, const char *, size_t, still_error *);

static inline void try_tokenizer(load_fn load, const uint8_t *data, size_t n)
{
    static const char text[] = "the sky  is\xC3\xA9 123 \xFF<s><sym>\xE2\x96\x81"
                               "ab\n ";
    still_error err;
    still_tokenizer *tk = sti_tokenizer_new();
    check(tk != NULL);
    if (load(tk, (const char *)data, n, &err) == STILL_OK &&
        sti_tokenizer_finish(tk, &err) == STILL_OK)
        for (unsigned flags = 0; flags < 4; flags++)
            use_tokenizer(tk, text, sizeof text - 1, flags);
    still_tokenizer_free(tk);
}

#endif
