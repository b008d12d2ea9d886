/* ruler_fwe.c - frequent words: coded words whose counts fall off by Zipf's law,
 *   count(k) = floor(n k^-2 / zeta(2)),   k = 1, 2, 3 ... the rank,
 * in random order. Rank 1 is written as dots and does not count; ranks 2 to 4 are asked
 * for. The vocabulary has B/50 words, B = length - max_new.
 *
 * Draws of a sample: the words, in order of rank, letters of one after the other (a
 * word that is there already is drawn again); then the order of the text.
 *
 * n does not come from the search: it starts from B/6, in steps of B/32, and is the
 * last whose text has less than B tokens. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "eval/generated/ruler.h"

enum { LETTERS = 6, ASKED = 3 };

typedef struct word {
    char text[LETTERS + 2];
} word;

static uint64_t budget(const sti_ruler *r)
{
    return (uint64_t)(r->p.length - r->max_new);
}

static still_status load(sti_ruler *r, still_error *err)
{
    r->unit = budget(r) / 32;
    if (budget(r) / 50 > ASKED) return STILL_OK;
    return sti_fail(err, STILL_E_LIMIT,
                    "%s: length %d is too short: it gives a vocabulary of %llu words, "
                    "%d are needed",
                    r->name, r->p.length, (unsigned long long)(budget(r) / 50),
                    ASKED + 1);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(((const word *)a)->text, ((const word *)b)->text);
}

/* Whether v[0..n) are all different; sorted is scratch. */
static bool all_differ(const word *v, uint64_t n, word *sorted)
{
    memcpy(sorted, v, n * sizeof *v);
    qsort(sorted, n, sizeof *sorted, by_text);
    for (uint64_t i = 1; i < n; i++)
        if (strcmp(sorted[i].text, sorted[i - 1].text) == 0) return false;
    return true;
}

/* A few hundred or thousand of 26^6 words are drawn, so two are rarely the same; if
 * they are, all are drawn again. */
static void draw_vocabulary(sti_draws *d, word *v, uint64_t n, word *scratch)
{
    do
        for (uint64_t i = 0; i < n; i++)
            for (int k = 0; k < LETTERS; k++)
                v[i].text[k] = (char)('a' + sti_draw_below(d, 26));
    while (!all_differ(v, n, scratch));
    strcpy(v[0].text, "...");
}

static uint64_t count_of(uint64_t n, uint64_t rank)
{
    const double zeta2 = 1.6449340668482264; /* pi^2 / 6 */
    return (uint64_t)((double)n * pow((double)rank, -2) / zeta2);
}

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err)
{
    (void)i;
    const uint64_t vocabulary = budget(r) / 50;
    word *v = sti_alloc(2 * vocabulary, sizeof *v);
    uint32_t *text =
        sti_alloc(n ? n : 1, sizeof *text); /* counts add up to n at most */
    if (!v || !text) {
        free(v);
        free(text);
        return sti_fail_memory(err, r->name, n * sizeof *text);
    }
    draw_vocabulary(d, v, vocabulary, v + vocabulary);
    uint32_t total = 0;
    for (uint64_t rank = 1; rank <= vocabulary; rank++)
        for (uint64_t k = count_of(n, rank); k; k--) text[total++] = (uint32_t)rank - 1;
    sti_draw_choice(d, text, total, total);
    sti_buf *b = &out->prompt;
    sti_buf_puts(b,
                 "Read the following coded text and track the frequency of each coded "
                 "word. Find the three most frequently appeared coded words. ");
    for (uint32_t k = 0; k < total; k++) {
        if (k) sti_buf_puts(b, " ");
        sti_buf_puts(b, v[text[k]].text);
    }
    sti_buf_puts(b,
                 "\nQuestion: Do not provide any explanation. Please ignore the dots "
                 "'....'. What are the three most frequently appeared words in the "
                 "above coded text? Answer: According to the coded text above, the "
                 "three most frequently appeared words are:");
    for (int k = 1; k <= ASKED; k++) sti_sample_expect(out, v[k].text);
    free(v);
    free(text);
    return STILL_OK;
}

static still_status size(sti_ruler *r, still_error *err)
{
    sti_sample s = {0};
    still_status status;
    uint64_t n = budget(r) / 6, tokens = 0;
    while ((status = sti_ruler_probe(r, n, &s, &tokens, err)) == STILL_OK &&
           tokens < budget(r))
        n += r->unit;
    sti_sample_free(&s);
    r->n = n - r->unit;
    return status;
}

/* With fewer words, ranks 4 and 5 are equally frequent or missing. */
static uint64_t least(const sti_ruler *r, uint64_t i)
{
    (void)r;
    (void)i;
    uint64_t n = 1;
    while (count_of(n, ASKED + 1) == count_of(n, ASKED + 2)) n++;
    return n;
}

const sti_ruler_kind sti_ruler_fwe = {
    .unit = 1,
    .unit_short = 1,
    STI_NAMED_4(, load, draw, size, least),
};
