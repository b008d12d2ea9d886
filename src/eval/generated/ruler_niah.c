/* ruler_niah.c - needles in a haystack: numbers or UUIDs that belong to keys, hidden in
 * lines of noise, in essays, or among other needles.
 *
 * Draws of a sample: per key, the key and then its values (a word key: adjective, noun;
 * a UUID: its upper, then its lower half); the order of the needles; which keys are
 * asked for; key and value of each line, if lines are needles; the needles' places. A
 * key or value that was drawn before is drawn again, so that an answer is unique. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "eval/generated/ruler.h"
#include "eval/generated/sentences.h"

enum { MAX_NEEDLES = 4, DEPTHS = 40 };

typedef struct niah {
    sti_words adjectives, nouns;
    sti_buf essay;    /* words with one space between them */
    size_t *word_end; /* [n_words] offsets in essay */
    size_t n_words;
} niah;

/* ---- Ingredients --------------------------------------------------------- */

/* Appends text with runs of white space as one space, none at its ends. */
static void put_words(sti_buf *b, const char *text, size_t n)
{
    for (size_t i = 0, k; i < n;) {
        if ((k = sti_white(text + i, n - i))) {
            i += k;
            continue;
        }
        const size_t from = i;
        while (i < n && !sti_white(text + i, n - i)) i++;
        if (b->n) sti_buf_put(b, " ", 1);
        sti_buf_put(b, text + from, i - from);
    }
}

static still_status add_essay(void *user, json_t *rec, still_error *err)
{
    sti_buf *b = user;
    const char *text;
    STI_TRY(sti_field_string(rec, "text", &text, err));
    put_words(b, text, strlen(text));
    return b->failed ? sti_fail_memory(err, "essays", b->n) : STILL_OK;
}

static still_status load_essays(const char *dir, niah *own, still_error *err)
{
    static const char file[] = "paul_graham_essays.jsonl";
    STI_TRY(sti_source_read(dir, file, add_essay, &own->essay, err));
    const sti_buf *b = &own->essay;
    if (!b->n) return sti_fail(err, STILL_E_FORMAT, "%s/%s: has no text", dir, file);
    own->n_words = 1;
    for (size_t i = 0; i < b->n; i++) own->n_words += b->p[i] == ' ';
    own->word_end = sti_alloc(own->n_words, sizeof *own->word_end);
    if (!own->word_end)
        return sti_fail_memory(err, file, own->n_words * sizeof *own->word_end);
    size_t w = 0;
    for (size_t i = 0; i < b->n; i++)
        if (b->p[i] == ' ') own->word_end[w++] = i;
    own->word_end[w] = b->n;
    return STILL_OK;
}

static still_status load(sti_ruler *r, still_error *err)
{
    const sti_niah_variant *v = r->variant;
    niah *own = r->own = sti_alloc(1, sizeof *own);
    if (!own) return sti_fail_memory(err, r->name, sizeof *own);
    if (v->haystack != STI_HAYSTACK_ESSAY) {
        r->unit = r->p.length < 4096 ? 5 : 25; /* lines; words, of essays */
    } else {
        STI_TRY(load_essays(r->p.data_dir, own, err));
    }
    if (v->uuid_keys) return STILL_OK;
    STI_TRY(
        sti_words_load(r->p.data_dir, "words_adjectives.txt", &own->adjectives, err));
    return sti_words_load(r->p.data_dir, "words_nouns.txt", &own->nouns, err);
}

static void free_own(void *p)
{
    niah *own = p;
    sti_words_free(&own->adjectives);
    sti_words_free(&own->nouns);
    sti_buf_free(&own->essay);
    free(own->word_end);
    free(own);
}

static uint64_t least(const sti_ruler *r, uint64_t i)
{
    (void)i;
    const sti_niah_variant *v = r->variant;
    return v->keys * v->values;
}

/* ---- Keys, values, needles ----------------------------------------------- */

typedef struct label { /* a key or a value */
    char text[128];
} label;

static void draw_uuid(sti_draws *d, label *out)
{
    uint64_t high = sti_draw(d), low = sti_draw(d);
    high = (high & ~(uint64_t)0xF000) | 0x4000;             /* version 4 */
    low = (low & ~((uint64_t)3 << 62)) | (uint64_t)2 << 62; /* its variant */
    snprintf(out->text, sizeof out->text, "%08x-%04x-%04x-%04x-%012llx",
             (unsigned)(high >> 32), (unsigned)(high >> 16 & 0xFFFF),
             (unsigned)(high & 0xFFFF), (unsigned)(low >> 48),
             (unsigned long long)(low & 0xFFFFFFFFFFFFu));
}

static void draw_key(const sti_ruler *r, sti_draws *d, label *out)
{
    const niah *own = r->own;
    if (((const sti_niah_variant *)r->variant)->uuid_keys) {
        draw_uuid(d, out);
        return;
    }
    const char *a =
        own->adjectives.word[sti_draw_below(d, (uint32_t)own->adjectives.n)];
    const char *n = own->nouns.word[sti_draw_below(d, (uint32_t)own->nouns.n)];
    snprintf(out->text, sizeof out->text, "%.60s-%.60s", a, n);
}

static void draw_value(const sti_ruler *r, sti_draws *d, label *out)
{
    if (((const sti_niah_variant *)r->variant)->uuid_values)
        draw_uuid(d, out);
    else
        snprintf(out->text, sizeof out->text, "%u",
                 1000000 + sti_draw_below(d, 9000000));
}

/* Draws until it differs from all of seen[0..n); fails if the lists are too small. */
static still_status draw_new(const sti_ruler *r, sti_draws *d,
                             void (*one)(const sti_ruler *, sti_draws *, label *),
                             const label *seen, uint32_t n, label *out,
                             still_error *err)
{
    for (int tries = 0; tries < 1000; tries++) {
        bool fresh = true;
        one(r, d, out);
        for (uint32_t i = 0; i < n && fresh; i++)
            fresh = strcmp(seen[i].text, out->text) != 0;
        if (fresh) return STILL_OK;
    }
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: the word lists of %s give too few different keys", r->name,
                    r->p.data_dir);
}

typedef struct needles {
    label key[MAX_NEEDLES],
        value[MAX_NEEDLES]; /* needle i: key[i / values], value[i] */
    uint32_t order[MAX_NEEDLES];
    uint32_t n, keys, values;
    const char *plural;
} needles;

static void put_needle(sti_buf *b, const char *plural, const label *key,
                       const label *value)
{
    sti_buf_printf(b, "One of the special magic %s for %s is: %s.", plural, key->text,
                   value->text);
}

static void put_hidden(sti_buf *b, const needles *h, uint32_t i)
{
    const uint32_t k = h->order[i];
    put_needle(b, h->plural, &h->key[k / h->values], &h->value[k]);
}

static still_status draw_needles(const sti_ruler *r, sti_draws *d, needles *h,
                                 still_error *err)
{
    const sti_niah_variant *v = r->variant;
    *h = (needles){.keys = v->keys, .values = v->values};
    h->plural = v->uuid_values ? "uuids" : "numbers";
    for (uint32_t k = 0; k < v->keys; k++) {
        STI_TRY(draw_new(r, d, draw_key, h->key, k, &h->key[k], err));
        for (uint32_t i = 0; i < v->values; i++, h->n++)
            STI_TRY(draw_new(r, d, draw_value, h->value, h->n, &h->value[h->n], err));
    }
    for (uint32_t i = 0; i < h->n; i++) h->order[i] = i;
    sti_draw_choice(d, h->order, h->n, h->n);
    return STILL_OK;
}

/* ---- Haystacks ----------------------------------------------------------- */

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* n lines of noise or other needles; each needle goes before a different one. */
static still_status put_lines(const sti_ruler *r, uint32_t n, const needles *h,
                              sti_draws *d, sti_buf *out, still_error *err)
{
    const bool noise =
        ((const sti_niah_variant *)r->variant)->haystack == STI_HAYSTACK_NOISE;
    label *line = noise ? NULL : sti_alloc(2 * (size_t)n, sizeof *line);
    if (!noise && !line) return sti_fail_memory(err, r->name, n * sizeof *line);
    still_status status = STILL_OK;
    for (uint32_t i = 0; !noise && i < n && status == STILL_OK; i++) {
        status = draw_new(r, d, draw_key, h->key, h->keys, &line[2 * i], err);
        if (status == STILL_OK)
            status = draw_new(r, d, draw_value, h->value, h->n, &line[2 * i + 1], err);
    }
    uint32_t *place = status == STILL_OK ? sti_draw_indices(d, n, h->n) : NULL;
    if (status == STILL_OK && !place)
        status = sti_fail_memory(err, r->name, n * sizeof *place);
    if (place) qsort(place, h->n, sizeof *place, by_number);
    for (uint32_t i = 0, next = 0; place && i < n; i++) {
        if (next < h->n && place[next] == i) {
            put_hidden(out, h, next++);
            sti_buf_puts(out, "\n");
        }
        if (noise)
            sti_buf_puts(out, sti_ruler_noise);
        else
            put_needle(out, h->plural, &line[2 * i], &line[2 * i + 1]);
        if (i + 1 < n) sti_buf_puts(out, "\n");
    }
    free(place);
    free(line);
    return status;
}

/* The first n words, starting over at the end. */
static void put_first_words(const niah *own, uint32_t n, sti_buf *out)
{
    for (; n > own->n_words; n -= (uint32_t)own->n_words) {
        sti_buf_put(out, own->essay.p, own->essay.n);
        sti_buf_put(out, " ", 1);
    }
    sti_buf_put(out, own->essay.p, own->word_end[n - 1]);
}

/* Offsets of sentences, and behind the last the length of the text plus one, so that
 * sentences i..j-1 joined by spaces are the bytes [first[i], first[j] - 1). */
static size_t *find_sentences(const sti_buf *text, size_t *count)
{
    size_t capacity = 64, n = 0, at = 0, start, end;
    size_t *first = sti_alloc(capacity, sizeof *first);
    while (first && sti_sentence_next(text->p, text->n, true, &at, &start, &end)) {
        if (n + 1 == capacity) {
            size_t *grown = sti_grow(first, capacity *= 2, sizeof *first);
            if (!grown) free(first);
            first = grown;
        }
        if (first) first[n++] = start;
    }
    if (first) first[n] = text->n + 1;
    *count = n;
    return first;
}

static void put_sentences(sti_buf *out, const sti_buf *text, const size_t *first,
                          size_t from, size_t to)
{
    if (to > from) sti_buf_put(out, text->p + first[from], first[to] - 1 - first[from]);
}

/* Needles go before the sentences at depths drawn from 40. Pieces of text and needles
 * alternate, separated by a space; a piece may be empty. */
static still_status put_essay(const sti_ruler *r, uint32_t n, const needles *h,
                              sti_draws *d, sti_buf *out, still_error *err)
{
    sti_buf text = {0};
    put_first_words(r->own, n, &text);
    size_t count = 0, *first = text.failed ? NULL : find_sentences(&text, &count);
    uint32_t *depth = sti_draw_indices(d, DEPTHS, h->n);
    if (first && depth) {
        qsort(depth, h->n, sizeof *depth, by_number);
        size_t from = 0;
        for (uint32_t i = 0; i < h->n; i++) {
            /* round(100 k / 39): never half way, as 200 k is even and 39 j is not */
            const size_t percent = (200 * depth[i] + DEPTHS - 1) / (2 * (DEPTHS - 1));
            const size_t to = count * percent / 100;
            put_sentences(out, &text, first, from, to);
            sti_buf_puts(out, " ");
            put_hidden(out, h, i);
            sti_buf_puts(out, " ");
            from = to;
        }
        put_sentences(out, &text, first, from, count);
    }
    const bool ok = first && depth;
    const size_t wanted = text.n;
    free(depth);
    free(first);
    sti_buf_free(&text);
    return ok ? STILL_OK : sti_fail_memory(err, r->name, wanted);
}

/* ---- A sample ------------------------------------------------------------ */

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err)
{
    (void)i;
    const sti_niah_variant *v = r->variant;
    needles h;
    STI_TRY(draw_needles(r, d, &h, err));
    uint32_t asked[MAX_NEEDLES] = {0, 1, 2, 3};
    sti_draw_choice(d, asked, h.keys, v->queries);
    char query[MAX_NEEDLES * sizeof(label) + 16] = "";
    for (uint32_t q = 0, at = 0; q < v->queries; q++) {
        const char *join = q == 0 ? "" : q + 1 < v->queries ? ", " : ", and ";
        at += (uint32_t)snprintf(query + at, sizeof query - at, "%s%s", join,
                                 h.key[asked[q]].text);
    }
    /* A single answer is worded in the singular. */
    const bool one = v->queries * v->values == 1;
    char t[8];
    snprintf(t, sizeof t, "%.*s", (int)strlen(h.plural) - one, h.plural);
    sti_buf *b = &out->prompt;
    sti_buf_printf(b,
                   "%s special magic %s %s hidden within the following text. Make sure "
                   "to memorize it. I will quiz you about the %s afterwards.\n",
                   one ? "A" : "Some", t, one ? "is" : "are", t);
    STI_TRY(v->haystack == STI_HAYSTACK_ESSAY
                ? put_essay(r, (uint32_t)n, &h, d, b, err)
                : put_lines(r, (uint32_t)n, &h, d, b, err));
    sti_buf_printf(
        b,
        "\nWhat %s the special magic %s for %s mentioned in the provided "
        "text? The special magic %s for %s mentioned in the provided text %s",
        one ? "is" : "are all", t, query, t, query, one ? "is" : "are");
    for (uint32_t q = 0; q < v->queries; q++)
        for (uint32_t k = 0; k < v->values; k++)
            sti_sample_expect(out, h.value[asked[q] * v->values + k].text);
    return STILL_OK;
}

const sti_ruler_kind sti_ruler_niah = {
    .unit = 500,
    .unit_short = 500,
    .free = free_own,
    STI_NAMED_3(, load, draw, least),
};
