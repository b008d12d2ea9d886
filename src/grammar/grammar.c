/* grammar.c - a compiled grammar: from text to automaton, with room for its masks. */
#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "token/tokenizer.h"

enum {
    WIDE_MASKS = 256,    /* whole masks that are kept at a time, at least */
    MORE_STORE = 1 << 18 /* and room for short ones, 4 bytes each */
};

void still_grammar_free(still_grammar *g)
{
    if (!g) return;
    sti_automaton_free(&g->a);
    sti_machine_free(&g->m);
    free(g->mask);
    free(g->store);
    free(g->bits);
    free(g->ends);
    free(g->text);
    free(g->next.item);
    free(g->next.frame);
    free(g->next.link);
    free(g->next.number);
    free(g->next.old);
    free(g);
}

static still_status make_room(still_grammar *g, still_error *err)
{
    g->store_room = WIDE_MASKS * 2 * g->words + g->pieces->n + MORE_STORE;
    g->mask = sti_alloc((size_t)g->a.n_kinds, sizeof *g->mask);
    g->store = sti_alloc(g->store_room, sizeof *g->store);
    g->bits = sti_alloc(g->words, sizeof *g->bits);
    g->text = sti_alloc(g->words, sizeof *g->text);
    g->ends = sti_alloc(g->pieces->n, sizeof *g->ends);
    g->next.item = sti_alloc(STI_MATCHER_ITEMS, sizeof *g->next.item);
    g->next.frame = sti_alloc(STI_MATCHER_FRAMES, sizeof *g->next.frame);
    g->next.link = sti_alloc(STI_MATCHER_LINKS, sizeof *g->next.link);
    g->next.number = sti_alloc(STI_MACHINE_FRAMES, sizeof *g->next.number);
    g->next.old = sti_alloc(STI_MATCHER_FRAMES, sizeof *g->next.old);
    if (!g->mask || !g->store || !g->bits || !g->text || !g->ends || !g->next.item ||
        !g->next.frame || !g->next.link || !g->next.number || !g->next.old)
        return sti_fail_memory(err, "grammar", g->store_room * sizeof *g->store);
    for (uint32_t i = 0; i < g->pieces->token[g->pieces->n]; i++)
        g->text[g->pieces->id[i] / 64] |= (uint64_t)1 << g->pieces->id[i] % 64;
    return STILL_OK;
}

still_status sti_grammar_new(const still_tokenizer *tk, const sti_sketch *k,
                             int32_t root, still_grammar **out, still_error *err)
{
    *out = NULL;
    still_grammar *g = sti_alloc(1, sizeof *g);
    if (!g) return sti_fail_memory(err, "grammar", sizeof *g);
    g->tk = tk;
    g->vocab = tk->n;
    g->words = ((size_t)g->vocab + 63) / 64;
    still_status status = sti_tokenizer_pieces(tk, &g->pieces, err);
    if (status == STILL_OK)
        status = sti_automaton_make(k, root, STI_PIECE_LONGEST, &g->a, err);
    if (status == STILL_OK) status = sti_machine_init(&g->m, &g->a, err);
    if (status == STILL_OK) status = make_room(g, err);
    if (status != STILL_OK) {
        still_grammar_free(g);
        return status;
    }
    *out = g;
    return STILL_OK;
}

static still_status open_with(const still_tokenizer *tk, const char *text, size_t n,
                              still_status (*read)(const char *, size_t, sti_sketch *,
                                                   int32_t *, still_error *),
                              const char *what, still_grammar **out, still_error *err)
{
    sti_sketch k = {0};
    int32_t root;
    *out = NULL;
    if (!tk) return sti_fail(err, STILL_E_ARG, "%s: the tokenizer is NULL", what);
    if (n > STI_GRAMMAR_TEXT)
        return sti_fail(err, STILL_E_LIMIT, "%s: has %zu bytes, %d are the most", what,
                        n, STI_GRAMMAR_TEXT);
    still_status status = read(text, n, &k, &root, err);
    if (status == STILL_OK) status = sti_grammar_new(tk, &k, root, out, err);
    sti_sketch_free(&k);
    return status;
}

still_status still_grammar_open_gbnf(const still_tokenizer *tk, const char *text,
                                     size_t n, still_grammar **out, still_error *err)
{
    return open_with(tk, text, n, sti_gbnf_read, "grammar", out, err);
}

still_status still_grammar_open_schema(const still_tokenizer *tk, const char *schema,
                                       size_t n, still_grammar **out, still_error *err)
{
    return open_with(tk, schema, n, sti_schema_read, "schema", out, err);
}

still_status still_grammar_open_json(const still_tokenizer *tk, still_grammar **out,
                                     still_error *err)
{
    static const char any[] = "{\"type\": \"object\"}";
    return open_with(tk, any, sizeof any - 1, sti_schema_read, "schema", out, err);
}
