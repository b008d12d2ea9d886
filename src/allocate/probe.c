/* probe.c - see probe.h. A prompt is put together from pieces that are encoded one by
 * one, so that a value has the same tokens where it stands and where it is asked for.
 * Names and phrases are made up for this: no benchmark of eval uses them. */
#include "allocate/probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"

enum { FACTS = 3, VALUE_BYTES = 64 };

static const char *const thing[] = {
    "lantern", "anchor", "violin",  "ladder", "basket",  "compass", "kettle", "saddle",
    "mirror",  "hammer", "curtain", "barrel", "thimble", "wagon",   "candle", "ribbon"};
static const char *const word[] = {
    "amber",  "river",  "copper", "willow", "marble", "harbor", "velvet", "thunder",
    "meadow", "silver", "garden", "winter", "falcon", "pepper", "cotton", "orchard"};
enum { N_THINGS = sizeof thing / sizeof *thing, N_WORDS = sizeof word / sizeof *word };

static uint64_t draw(uint64_t *rng, uint64_t n)
{
    return sti_mix64((*rng)++) % n;
}

typedef enum value_kind { NUMBER, WORDS, HEX, KINDS } value_kind;

/* A value with the space in front of it. */
static void make_value(uint64_t *rng, value_kind kind, char out[VALUE_BYTES])
{
    if (kind == NUMBER)
        snprintf(out, VALUE_BYTES, " %d", 100000 + (int)draw(rng, 900000));
    else if (kind == WORDS)
        snprintf(out, VALUE_BYTES, " %s-%s-%s", word[draw(rng, N_WORDS)],
                 word[draw(rng, N_WORDS)], word[draw(rng, N_WORDS)]);
    else
        snprintf(out, VALUE_BYTES, " %04x-%04x-%04x", (unsigned)draw(rng, 65536),
                 (unsigned)draw(rng, 65536), (unsigned)draw(rng, 65536));
}

static const char *const name_of[KINDS] = {
    [NUMBER] = "mark", [WORDS] = "motto", [HEX] = "seal"};

/* ---- Tokens -------------------------------------------------------------- */

static still_status append(const still_tokenizer *tk, const char *text, size_t n,
                           unsigned flags, sti_probe *p, sti_probe_span *span,
                           still_error *err)
{
    size_t ids;
    STI_TRY(still_tokenizer_encode(tk, text, n, flags, NULL, 0, &ids, err));
    int32_t *grown = sti_grow(p->tok, (size_t)p->n + ids + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, "a probe", ids * sizeof *grown);
    p->tok = grown;
    STI_TRY(still_tokenizer_encode(tk, text, n, flags, grown + p->n, ids, &ids, err));
    if (span) *span = (sti_probe_span){p->n, (int)ids};
    p->n += (int)ids;
    return STILL_OK;
}

static still_status append_text(const still_tokenizer *tk, const char *text,
                                sti_probe *p, still_error *err)
{
    return append(tk, text, strlen(text), 0, p, NULL, err);
}

/* ---- A prompt ------------------------------------------------------------ */

typedef struct plan {
    value_kind kind;
    int facts, asked;
    const char *owner[FACTS];
    char value[FACTS][VALUE_BYTES];
    int first, passages; /* of the prose */
    int place[FACTS];    /* the passage each fact stands in, ascending ... */
    size_t cut[FACTS];   /* ... and the bytes of it before the fact */
} plan;

/* The end of the sentence that byte `at` lies in. */
static size_t sentence_end(const char *text, size_t at)
{
    while (text[at] && !(text[at] == '.' && text[at + 1] == ' ')) at++;
    return text[at] ? at + 1 : at;
}

static const char *passage(const plan *p, int i)
{
    return sti_probe_prose[(p->first + i) % sti_probe_passages];
}

static plan make_plan(uint64_t seed, int index, int passages)
{
    uint64_t rng = sti_mix64(seed) + (uint64_t)index * 1000003;
    plan p = {.kind = (value_kind)(index % KINDS),
              .facts = index / KINDS % 2 ? 1 : FACTS,
              .passages = passages > FACTS ? passages : FACTS + 1};
    p.asked = (int)draw(&rng, (uint64_t)p.facts);
    p.first = (int)draw(&rng, (uint64_t)sti_probe_passages);
    const uint64_t things = draw(&rng, N_THINGS);
    for (int i = 0; i < p.facts; i++) {
        p.owner[i] = thing[(things + 5 * (uint64_t)i) % N_THINGS];
        make_value(&rng, p.kind, p.value[i]);
        /* Not in the last passage: the answer is to be far away. */
        const int from = i * (p.passages - 1) / p.facts,
                  to = (i + 1) * (p.passages - 1) / p.facts;
        p.place[i] = from + (int)draw(&rng, (uint64_t)(to - from));
        const char *text = passage(&p, p.place[i]);
        p.cut[i] = sentence_end(text, draw(&rng, strlen(text)));
    }
    return p;
}

static still_status write_fact(const still_tokenizer *tk, const plan *p, int i,
                               sti_probe *out, still_error *err)
{
    char text[128];
    snprintf(text, sizeof text, " Note for the %s: its %s is", p->owner[i],
             name_of[p->kind]);
    STI_TRY(append_text(tk, text, out, err));
    STI_TRY(append(tk, p->value[i], strlen(p->value[i]), 0, out,
                   i == p->asked ? &out->value : NULL, err));
    return append_text(tk, ".", out, err);
}

static still_status write_probe(const still_tokenizer *tk, const plan *p,
                                sti_probe *out, still_error *err)
{
    char text[256];
    int fact = 0;
    STI_TRY(append(tk, "", 0, STILL_ENCODE_BOS, out, NULL, err));
    for (int i = 0; i < p->passages; i++) {
        const char *rest = passage(p, i);
        if (i > 0) STI_TRY(append_text(tk, "\n\n", out, err));
        if (fact < p->facts && p->place[fact] == i) {
            STI_TRY(append(tk, rest, p->cut[fact], 0, out, NULL, err));
            STI_TRY(write_fact(tk, p, fact, out, err));
            rest += p->cut[fact++];
        }
        STI_TRY(append_text(tk, rest, out, err));
    }
    snprintf(
        text, sizeof text,
        "\n\nQuestion: Which %s was noted for the %s?\nAnswer: The %s of the %s is",
        name_of[p->kind], p->owner[p->asked], name_of[p->kind], p->owner[p->asked]);
    STI_TRY(append_text(tk, text, out, err));
    const char *value = p->value[p->asked];
    return append(tk, value, strlen(value), 0, out, &out->answer, err);
}

still_status sti_probe_make(const still_tokenizer *tk, uint64_t seed, int index,
                            int passages, sti_probe *out, still_error *err)
{
    const plan p = make_plan(seed, index, passages);
    *out = (sti_probe){0};
    const still_status st = write_probe(tk, &p, out, err);
    if (st != STILL_OK) {
        free(out->tok);
        *out = (sti_probe){0};
    }
    return st;
}
