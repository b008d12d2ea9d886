/* ruler_cwe.c - common words: a numbered list in which ten words occur more often than
 * the others, after a solved example with other words.
 *
 * Draws of a sample: the example's words, the first ten of which are the common
 * ones, and the order of its list; then the same for the sample. n is the number of
 * distinct words. Where the union of nouns, adjectives and verbs has fewer, all of
 * them come from the long English list, as in the original. */
#include <stdlib.h>

#include "base/mem.h"
#include "eval/generated/ruler.h"

enum { COMMON = 10, LIST = 3 };

typedef struct cwe {
    sti_words words;
    sti_words english; /* loaded where the union is too small */
} cwe;

static const char *const FILES[LIST] = {"words_nouns.txt", "words_adjectives.txt",
                                        "words_verbs.txt"};

/* Writes a list of `distinct` words, COMMON of them `often` times and the others
 * `seldom`. *common: [COMMON], the caller frees it. */
static still_status put_list(const sti_words *words, uint32_t distinct, uint32_t often,
                             uint32_t seldom, sti_draws *d, sti_buf *out,
                             uint32_t **common, still_error *err)
{
    const uint32_t total = COMMON * often + (distinct - COMMON) * seldom;
    uint32_t *pick = sti_draw_indices(d, (uint32_t)words->n, distinct);
    uint32_t *list = sti_alloc(total, sizeof *list);
    *common = pick;
    if (!pick || !list) {
        free(list);
        return sti_fail_memory(err, "cwe", total * sizeof *list);
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i < distinct; i++)
        for (uint32_t k = 0; k < (i < COMMON ? often : seldom); k++)
            list[n++] = pick[i];
    sti_draw_choice(d, list, n, n);
    sti_buf_puts(out,
                 "Below is a numbered list of words. In these words, some appear more "
                 "often than others. Memorize the ones that appear most often.\n");
    for (uint32_t i = 0; i < n; i++)
        sti_buf_printf(out, "%s%u. %s", i ? " " : "", i + 1, words->word[list[i]]);
    sti_buf_puts(out,
                 "\nQuestion: What are the 10 most common words in the above list? "
                 "Answer: The top 10 words that appear most often in the list are:");
    free(list);
    return STILL_OK;
}

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err)
{
    (void)i;
    const cwe *own = r->own;
    const bool is_short = r->p.length < 4096;
    const sti_words *words = n <= own->words.n ? &own->words : &own->english;
    uint32_t *common = NULL;
    still_status status = put_list(&own->words, is_short ? 20 : 40, is_short ? 3 : 10,
                                   is_short ? 1 : 3, d, &out->prompt, &common, err);
    for (uint32_t k = 0; status == STILL_OK && k < COMMON; k++)
        sti_buf_printf(&out->prompt, " %u. %s", k + 1, own->words.word[common[k]]);
    sti_buf_puts(&out->prompt, "\n");
    free(common);
    STI_TRY(status);

    status = put_list(words, (uint32_t)n, is_short ? 6 : 30, is_short ? 1 : 3, d,
                      &out->prompt, &common, err);
    for (uint32_t k = 0; status == STILL_OK && k < COMMON; k++)
        sti_sample_expect(out, words->word[common[k]]);
    free(common);
    return status;
}

static still_status load(sti_ruler *r, still_error *err)
{
    cwe *own = r->own = sti_alloc(1, sizeof *own);
    if (!own) return sti_fail_memory(err, r->name, sizeof *own);
    STI_TRY(sti_words_load_union(r->p.data_dir, FILES, LIST, &own->words, err));
    if (own->words.n < 40)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: the word lists of %s have %zu words, expected 40 at least",
                        r->name, r->p.data_dir, own->words.n);
    return STILL_OK;
}

/* The largest list that fits; of the English list, if the union is too small for it. */
static still_status size(sti_ruler *r, still_error *err)
{
    static const char *const english = "words_english.txt";
    cwe *own = r->own;
    const uint64_t limit = (uint64_t)(r->p.length - r->max_new);
    STI_TRY(sti_ruler_search(r, r->unit, own->words.n, limit, &r->n, err));
    if (r->n < own->words.n) return STILL_OK;
    STI_TRY(sti_words_load_union(r->p.data_dir, &english, 1, &own->english, err));
    return sti_ruler_search(r, r->n, own->english.n, limit, &r->n, err);
}

static void free_own(void *p)
{
    cwe *own = p;
    sti_words_free(&own->words);
    sti_words_free(&own->english);
    free(own);
}

static uint64_t least(const sti_ruler *r, uint64_t i)
{
    (void)r;
    (void)i;
    return COMMON;
}

const sti_ruler_kind sti_ruler_cwe = {
    .unit = 10,
    .unit_short = 10,
    .free = free_own,
    STI_NAMED_4(, load, draw, size, least),
};
