/* ruler_vt.c - variable tracking: five names are assigned one value, each from the one
 * before, on lines among noise; the question asks for all five. A solved example of
 * about 500 tokens comes first.
 *
 * Draws of the set: a sample of the example's kind per probe; then the places of its
 * lines. Draws of a sample: the example's names and value, the names (letters of one
 * after the other; a name that is there already is drawn again) and value, and their
 * places. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "eval/generated/ruler.h"

enum { CHAIN = 5, EXAMPLE_TOKENS = 500, EXAMPLE_UNIT = 5 };

typedef struct vt {
    uint64_t example_lines;
    uint32_t example_place[CHAIN];
} vt;

typedef struct chain {
    char name[CHAIN][8];
    char value[8];
} chain;

static bool is_new(const chain *c, int n)
{
    for (int i = 0; i < n; i++)
        if (strcmp(c->name[i], c->name[n]) == 0) return false;
    return true;
}

static void draw_chain(sti_draws *d, int letters, chain *c)
{
    *c = (chain){0};
    for (int i = 0; i < CHAIN; i++) do
            for (int k = 0; k < letters; k++)
                c->name[i][k] = (char)('A' + sti_draw_below(d, 26));
        while (!is_new(c, i));
    snprintf(c->value, sizeof c->value, "%u", 10000 + sti_draw_below(d, 89999));
}

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* CHAIN distinct lines of n, in order. */
static bool draw_places(sti_draws *d, uint32_t n, uint32_t place[CHAIN])
{
    uint32_t *all = sti_draw_indices(d, n, CHAIN);
    if (!all) return false;
    memcpy(place, all, CHAIN * sizeof *place);
    qsort(place, CHAIN, sizeof *place, by_number);
    free(all);
    return true;
}

/* n lines of noise, each assignment before one of them; then the question. */
static void put_text(sti_buf *b, const chain *c, uint64_t n, const uint32_t *place)
{
    sti_buf_puts(b,
                 "Memorize and track the chain(s) of variable assignment hidden in the "
                 "following text.\n\n");
    for (uint64_t i = 0, next = 0; i < n; i++) {
        if (next < CHAIN && place[next] == i) {
            if (next == 0)
                sti_buf_printf(b, "VAR %s = %s\n", c->name[0], c->value);
            else
                sti_buf_printf(b, "VAR %s = VAR %s \n", c->name[next],
                               c->name[next - 1]);
            next++;
        }
        sti_buf_puts(b, sti_ruler_noise);
        sti_buf_puts(b, "\n");
    }
    sti_buf_printf(b,
                   "Question: Find all variables that are assigned the value %s in the "
                   "text above. Answer: According to the chain(s) of variable "
                   "assignment in the text above, %d variables are assigned the value "
                   "%s, they are: ",
                   c->value, CHAIN, c->value);
}

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err)
{
    (void)i;
    const vt *own = r->own;
    chain c;
    draw_chain(d, 3, &c);
    if (!own->example_lines) { /* the example itself is being sized */
        uint32_t place[CHAIN];
        if (!draw_places(d, (uint32_t)n, place))
            return sti_fail_memory(err, r->name, n);
        put_text(&out->prompt, &c, n, place);
        return STILL_OK;
    }
    put_text(&out->prompt, &c, own->example_lines, own->example_place);
    for (int k = 0; k < CHAIN; k++) sti_buf_printf(&out->prompt, " %s", c.name[k]);
    sti_buf_puts(&out->prompt, "\n\n");

    uint32_t place[CHAIN];
    draw_chain(d, 5, &c);
    if (!draw_places(d, (uint32_t)n, place)) return sti_fail_memory(err, r->name, n);
    put_text(&out->prompt, &c, n, place);
    for (int k = 0; k < CHAIN; k++) sti_sample_expect(out, c.name[k]);
    return STILL_OK;
}

static still_status load(sti_ruler *r, still_error *err)
{
    vt *own = r->own = sti_alloc(1, sizeof *own);
    if (!own) return sti_fail_memory(err, r->name, sizeof *own);
    uint64_t lines;
    STI_TRY(
        sti_ruler_search(r, EXAMPLE_UNIT, EXAMPLE_TOKENS, EXAMPLE_TOKENS, &lines, err));
    if (!lines)
        return sti_fail(
            err, STILL_E_LIMIT,
            "%s: the example, of %d lines at least, has more than %d tokens", r->name,
            EXAMPLE_UNIT, EXAMPLE_TOKENS);
    sti_draws d = sti_draws_of(r->p.seed, r->name, r->p.length, 0);
    d.used = (uint64_t)1 << 32; /* behind what probes draw */
    if (!draw_places(&d, (uint32_t)lines, own->example_place))
        return sti_fail_memory(err, r->name, lines);
    own->example_lines = lines;
    return STILL_OK;
}

static uint64_t least(const sti_ruler *r, uint64_t i)
{
    (void)r;
    (void)i;
    return CHAIN;
}

const sti_ruler_kind sti_ruler_vt = {
    .unit = 10,
    .unit_short = 5,
    STI_NAMED_4(, load, free, draw, least),
};
