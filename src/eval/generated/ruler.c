/* ruler.c - the tasks of RULER, and how samples are fitted to a length.
 *
 * Sizes are in tokens of the evaluated model, without special ones: a prompt and the
 * max_new tokens written after it are at most p->length. Once per set, a search finds
 * the largest n whose probe fits; each sample then starts with that n and, while it is
 * too long, loses one unit and is drawn again with the next draws of its stream.
 * Prompts grow linearly with n, so the search interpolates and needs a handful of
 * probes; a sample is usually tokenized once.
 *
 * The original loops forever if one unit does not fit; here that is an error. */
#include "eval/generated/ruler.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "eval/metrics.h"

const char sti_ruler_noise[] =
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again.";

/* ---- Sizes --------------------------------------------------------------- */

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *s, uint64_t *tokens, still_error *err)
{
    sti_sample_clear(s);
    STI_TRY(r->kind->draw(r, i, n, d, s, err));
    if (s->prompt.failed || s->expected.failed)
        return sti_fail_memory(err, r->name, s->prompt.n);
    return sti_generated_tokens(r->p.tk, s->prompt.p, s->prompt.n, tokens, err);
}

still_status sti_ruler_probe(const sti_ruler *r, uint64_t n, sti_sample *s,
                             uint64_t *tokens, still_error *err)
{
    sti_draws d = sti_draws_of(r->p.seed, r->name, r->p.length, 0);
    return draw(r, 0, n, &d, s, tokens, err);
}

still_status sti_ruler_search(const sti_ruler *r, uint64_t unit, uint64_t most,
                              uint64_t limit, uint64_t *n, still_error *err)
{
    sti_sample s = {0};
    if (most > unit + limit) most = unit + limit; /* each n adds a token or more */
    uint64_t tokens, fits = 0, fits_tokens = 0, fails = most + 1, fails_tokens = 0;
    uint64_t at = unit;
    still_status status = STILL_OK;
    *n = 0;
    for (int step = 0; at <= most; step++) {
        status = sti_ruler_probe(r, at, &s, &tokens, err);
        if (status != STILL_OK) break;
        if (tokens <= limit) {
            *n = fits = at;
            fits_tokens = tokens ? tokens : 1;
        } else {
            fails = at;
            fails_tokens = tokens;
        }
        if (!fits || fails - fits == 1) break;
        /* Extrapolates from one end, or interpolates between the two; every fourth step
         * bisects, in case that converges slowly. */
        double guess = (double)fits * (double)limit / (double)fits_tokens;
        if (fails_tokens && step % 4 == 3)
            guess = (double)fits + (double)(fails - fits) / 2;
        else if (fails_tokens)
            guess = (double)fits + (double)(fails - fits) *
                                       (double)(limit - fits_tokens) /
                                       (double)(fails_tokens - fits_tokens);
        at = (uint64_t)guess;
        if (at <= fits) at = fits + 1;
        if (at >= fails) at = fails - 1;
    }
    sti_sample_free(&s);
    return status;
}

static still_status find_size(sti_ruler *r, still_error *err)
{
    const sti_ruler_kind *k = r->kind;
    if (k->size) return k->size(r, err);
    const uint64_t most = k->most ? k->most(r) : UINT32_MAX;
    const uint64_t limit = (uint64_t)(r->p.length - r->max_new);
    const uint64_t unit = r->unit < most ? r->unit : most;
    return sti_ruler_search(r, unit, most, limit, &r->n, err);
}

static still_status too_short(const sti_ruler *r, const char *what, still_error *err)
{
    return sti_fail(
        err, STILL_E_LIMIT,
        "%s: length %d is too short: %s, with %d tokens kept for the answer", r->name,
        r->p.length, what, r->max_new);
}

/* ---- A set: one task at one length --------------------------------------- */

typedef struct ruler_detail {
    const sti_ruler_kind *kind;
    const void *variant;
} ruler_detail;

static void close_set(void *set)
{
    sti_ruler *r = set;
    if (r->own) r->kind->free(r->own);
    free(r);
}

static still_status fill_set(sti_ruler *r, still_error *err)
{
    enum { LONGEST = 1 << 24 };
    if (r->p.length > LONGEST)
        return sti_fail(err, STILL_E_LIMIT, "%s: length %d, expected at most %d tokens",
                        r->name, r->p.length, LONGEST);
    if (r->p.length <= r->max_new)
        return too_short(r, "there is no room for a prompt", err);
    STI_TRY(r->kind->load(r, err));
    STI_TRY(find_size(r, err));
    return r->n ? STILL_OK : too_short(r, "the smallest sample does not fit", err);
}

static still_status open_set(const sti_recipe *recipe, const sti_task_params *p,
                             void **set, still_error *err)
{
    const ruler_detail *d = recipe->detail;
    sti_ruler *r = sti_alloc(1, sizeof *r);
    if (!r) return sti_fail_memory(err, recipe->name, sizeof *r);
    *r = (sti_ruler){.kind = d->kind,
                     .variant = d->variant,
                     .name = recipe->name,
                     .p = *p,
                     .max_new = recipe->max_new};
    r->unit = (uint64_t)(p->length < 4096 ? r->kind->unit_short : r->kind->unit);
    still_status status = fill_set(r, err);
    if (status != STILL_OK)
        close_set(r);
    else
        *set = r;
    return status;
}

static still_status make_sample(void *set, uint64_t i, sti_sample *out,
                                still_error *err)
{
    const sti_ruler *r = set;
    const sti_ruler_kind *k = r->kind;
    const uint64_t limit = (uint64_t)(r->p.length - r->max_new);
    const uint64_t least = k->least ? k->least(r, i) : 1;
    sti_draws d = sti_draws_of(r->p.seed, r->name, r->p.length, 1 + i);
    uint64_t n = r->n < least ? least : r->n;
    for (;;) {
        uint64_t tokens;
        STI_TRY(draw(r, i, n, &d, out, &tokens, err));
        if (tokens <= limit) return STILL_OK;
        if (n == least)
            return sti_fail(
                err, STILL_E_LIMIT,
                "%s: sample %llu does not fit length %d: its smallest prompt "
                "has %llu tokens, at most %llu leave room for the answer",
                r->name, (unsigned long long)i, r->p.length, (unsigned long long)tokens,
                (unsigned long long)limit);
        n = n < least + r->unit ? least : n - r->unit;
    }
}

static uint64_t available(const void *set)
{
    const sti_ruler *r = set;
    return r->kind->available ? r->kind->available(r) : UINT64_MAX;
}

/* ---- Rows ---------------------------------------------------------------- */

#define NIAH(haystack, uuid_keys, uuid_values, keys, values, queries)                  \
    {                                                                                  \
        &sti_ruler_niah, &(const sti_niah_variant)                                     \
        {                                                                              \
            STI_HAYSTACK_##haystack, uuid_keys, uuid_values, keys, values, queries     \
        }                                                                              \
    }
#define QA(file, hotpot)                                                               \
    {                                                                                  \
        &sti_ruler_qa, &(const sti_qa_variant)                                         \
        {                                                                              \
            file, hotpot                                                               \
        }                                                                              \
    }

static const ruler_detail DETAIL[TASKS] = {
    [SINGLE_1] = NIAH(NOISE, false, false, 1, 1, 1),
    [SINGLE_2] = NIAH(ESSAY, false, false, 1, 1, 1),
    [SINGLE_3] = NIAH(ESSAY, false, true, 1, 1, 1),
    [MULTIKEY_1] = NIAH(ESSAY, false, false, 4, 1, 1),
    [MULTIKEY_2] = NIAH(NEEDLE, false, false, 1, 1, 1),
    [MULTIKEY_3] = NIAH(NEEDLE, true, true, 1, 1, 1),
    [MULTIVALUE] = NIAH(ESSAY, false, false, 1, 4, 1),
    [MULTIQUERY] = NIAH(ESSAY, false, false, 4, 1, 4),
    [VT] = {&sti_ruler_vt, NULL},
    [CWE] = {&sti_ruler_cwe, NULL},
    [FWE] = {&sti_ruler_fwe, NULL},
    [QA_HOTPOT] = QA("hotpotqa_dev_distractor.jsonl", true),
    [QA_SQUAD] = QA("squad_v2_dev.jsonl", false),
};

#define RECIPE(at, task_name, tokens)                                                  \
    [at] = {.name = task_name,                                                         \
            .max_new = tokens,                                                         \
            .samples = 500,                                                            \
            .detail = &DETAIL[at],                                                     \
            .open = open_set,                                                          \
            .make = make_sample,                                                       \
            .available = available,                                                    \
            .close = close_set}

static const sti_recipe RECIPES[TASKS] = {
    RECIPE(SINGLE_1, "niah_single_1", 128),
    RECIPE(SINGLE_2, "niah_single_2", 128),
    RECIPE(SINGLE_3, "niah_single_3", 128),
    RECIPE(MULTIKEY_1, "niah_multikey_1", 128),
    RECIPE(MULTIKEY_2, "niah_multikey_2", 128),
    RECIPE(MULTIKEY_3, "niah_multikey_3", 128),
    RECIPE(MULTIVALUE, "niah_multivalue", 128),
    RECIPE(MULTIQUERY, "niah_multiquery", 128),
    RECIPE(VT, "vt", 30),
    RECIPE(CWE, "cwe", 120),
    RECIPE(FWE, "fwe", 50),
    RECIPE(QA_HOTPOT, "qa_hotpot", 32),
    RECIPE(QA_SQUAD, "qa_squad", 32),
};

const sti_recipe *sti_ruler_recipe(const char *name)
{
    for (int i = 0; i < TASKS; i++)
        if (strcmp(RECIPES[i].name, name) == 0) return &RECIPES[i];
    return NULL;
}

/* open has no argument for the row, so each row has its own function. */
#define OPEN(at)                                                                       \
    static still_status open_##at(const sti_task_params *p, sti_source **out,          \
                                  still_error *err)                                    \
    {                                                                                  \
        return sti_generated_open(&RECIPES[at], p, out, err);                          \
    }
OPEN(SINGLE_1)
OPEN(SINGLE_2)
OPEN(SINGLE_3)
OPEN(MULTIKEY_1)
OPEN(MULTIKEY_2)
OPEN(MULTIKEY_3)
OPEN(MULTIVALUE)
OPEN(MULTIQUERY)
OPEN(VT)
OPEN(CWE)
OPEN(FWE)
OPEN(QA_HOTPOT)
OPEN(QA_SQUAD)

static const int LENGTHS[] = {4096, 0};

#define ROW(at, task_name, text, needs, metric_fn)                                     \
    [at] = {.name = task_name,                                                         \
            .summary = text,                                                           \
            .metric = "match",                                                         \
            .files = needs,                                                            \
            .lengths = LENGTHS,                                                        \
            .score = metric_fn,                                                        \
            .open = open_##at,                                                         \
            .next = sti_generated_next,                                                \
            .count = sti_generated_count,                                              \
            .close = sti_generated_close}
#define WORDS "words_adjectives.txt words_nouns.txt"
#define ESSAY WORDS " paul_graham_essays.jsonl"

const sti_eval_task sti_task_ruler[] = {
    ROW(SINGLE_1, "niah_single_1", "RULER: a number in repeated noise", WORDS,
        sti_match_all),
    ROW(SINGLE_2, "niah_single_2", "RULER: a number in essays", ESSAY, sti_match_all),
    ROW(SINGLE_3, "niah_single_3", "RULER: a UUID in essays", ESSAY, sti_match_all),
    ROW(MULTIKEY_1, "niah_multikey_1", "RULER: one of 4 numbers in essays", ESSAY,
        sti_match_all),
    ROW(MULTIKEY_2, "niah_multikey_2", "RULER: a number among numbers", WORDS,
        sti_match_all),
    ROW(MULTIKEY_3, "niah_multikey_3", "RULER: a UUID among UUIDs", "", sti_match_all),
    ROW(MULTIVALUE, "niah_multivalue", "RULER: 4 numbers of one key in essays", ESSAY,
        sti_match_all),
    ROW(MULTIQUERY, "niah_multiquery", "RULER: 4 keys and their numbers in essays",
        ESSAY, sti_match_all),
    ROW(VT, "vt", "RULER: variables along a chain of assignments", "", sti_match_all),
    ROW(CWE, "cwe", "RULER: the 10 most common words of a list",
        WORDS " words_verbs.txt", sti_match_all),
    ROW(FWE, "fwe", "RULER: the 3 most frequent coded words", "", sti_match_all),
    ROW(QA_HOTPOT, "qa_hotpot", "RULER: HotpotQA among distractors",
        "hotpotqa_dev_distractor.jsonl", sti_match_part),
    ROW(QA_SQUAD, "qa_squad", "RULER: SQuAD 2.0 among distractors",
        "squad_v2_dev.jsonl", sti_match_part),
    {0},
};
