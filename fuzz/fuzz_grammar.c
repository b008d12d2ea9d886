/* fuzz_grammar.c - grammars and schemas: any text is refused with one line, or compiles, and
 * then masks agree with what a matcher accepts. The first byte chooses which it is. */
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds) abort();
}

/* All bytes, and whatever the fixture has merged of them. */
static still_tokenizer *tokenizer(void)
{
    static still_tokenizer *tk;
    still_error err;
    if (!tk)
        check(still_tokenizer_open(FIXTURES "/vocab/smollm.json", &tk, &err) ==
              STILL_OK);
    return tk;
}

/* Some steps: each allowed token is accepted, one that is not allowed is not. */
static void walk(still_grammar *g, int vocab, uint64_t seed)
{
    still_matcher *m;
    still_error err = {0};
    uint64_t *bits = calloc(((size_t)vocab + 63) / 64, sizeof *bits);
    check(bits && still_matcher_new(g, vocab, &m, &err) == STILL_OK);
    for (int i = 0; i < 6 && !still_matcher_done(m); i++) {
        const still_status st = still_matcher_mask(m, bits, &err);
        if (st != STILL_OK) {
            check(st == STILL_E_LIMIT || st == STILL_E_UNSUPPORTED);
            break;
        }
        int32_t yes = -1;
        for (int j = 0; j < vocab; j++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            const int32_t id = (int32_t)((seed >> 33) % (uint64_t)vocab);
            const bool may = bits[id / 64] >> (id % 64) & 1;
            if (may) yes = id;
            if (!may && j < 4) check(still_matcher_accept(m, id, &err) != STILL_OK);
            if (may && j > 8) break;
        }
        if (yes < 0) break;
        const still_status read = still_matcher_accept(m, yes, &err);
        check(read == STILL_OK || read == STILL_E_LIMIT);
        if (read != STILL_OK) break;
    }
    still_matcher_free(m);
    free(bits);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    still_grammar *g;
    still_error err = {0};
    if (size < 1) return 0;
    const char *text = (const char *)data + 1;
    const still_status st =
        data[0] & 1 ? still_grammar_open_gbnf(tokenizer(), text, size - 1, &g, &err)
                    : still_grammar_open_schema(tokenizer(), text, size - 1, &g, &err);
    if (st != STILL_OK) {
        check(!g && err.text[0] && !strchr(err.text, '\n'));
        return 0;
    }
    walk(g, still_tokenizer_vocab_size(tokenizer()), size);
    still_grammar_free(g);
    return 0;
}
