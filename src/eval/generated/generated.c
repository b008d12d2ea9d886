/* generated.c - the source of items behind every generated task, and its draws.
 *
 * It has what all generators share: streams of draws, the number of samples, and
 * packing a sample into an item, which is one block of memory. */
#include "eval/generated/generated.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct sti_source {
    const sti_recipe *recipe;
    int length;
    uint64_t at, n;
    sti_dataset_file *frozen; /* items come from here, or */
    void *set;                /* from the recipe */
    sti_sample sample;
};

/* ---- Draws --------------------------------------------------------------- */

sti_draws sti_draws_of(uint64_t seed, const char *task, int length, uint64_t stream)
{
    uint64_t name = 0xcbf29ce484222325u; /* FNV-1a */
    for (const char *p = task; *p; p++)
        name = (name ^ (unsigned char)*p) * 0x100000001b3u;
    uint64_t key = sti_mix64(sti_mix64(seed) ^ name);
    key = sti_mix64(key ^ (uint64_t)length);
    return (sti_draws){.key = sti_mix64(key ^ stream)};
}

void sti_draw_choice(sti_draws *d, uint32_t *a, uint32_t n, uint32_t k)
{
    for (uint32_t i = 0; i < k; i++) {
        const uint32_t j = i + sti_draw_below(d, n - i), swap = a[i];
        a[i] = a[j];
        a[j] = swap;
    }
}

uint32_t *sti_draw_indices(sti_draws *d, uint32_t n, uint32_t k)
{
    uint32_t *a = sti_alloc(n ? n : 1, sizeof *a);
    if (!a) return NULL;
    for (uint32_t i = 0; i < n; i++) a[i] = i;
    sti_draw_choice(d, a, n, k);
    return a;
}

/* ---- Samples ------------------------------------------------------------- */

void sti_sample_clear(sti_sample *s)
{
    sti_buf_clear(&s->prompt);
    sti_buf_clear(&s->expected);
    s->n_expected = 0;
}

void sti_sample_free(sti_sample *s)
{
    sti_buf_free(&s->prompt);
    sti_buf_free(&s->expected);
}

void sti_sample_expect(sti_sample *s, const char *text)
{
    sti_buf_put(&s->expected, text, strlen(text) + 1);
    s->n_expected++;
}

still_status sti_generated_tokens(const still_tokenizer *tk, const char *text, size_t n,
                                  uint64_t *tokens, still_error *err)
{
    size_t count;
    STI_TRY(still_tokenizer_encode(tk, text, n, 0, NULL, 0, &count, err));
    *tokens = count;
    return STILL_OK;
}

/* The sample as an item: its pointers, then the strings they point to. */
static still_status make_item(const sti_source *s, sti_item *it, still_error *err)
{
    const sti_sample *m = &s->sample;
    if (m->prompt.failed || m->expected.failed)
        return sti_fail_memory(err, s->recipe->name, m->prompt.n);
    const size_t pointers = (size_t)m->n_expected * sizeof(char *);
    char *block = sti_alloc(pointers + m->prompt.n + 1 + m->expected.n, 1);
    if (!block) return sti_fail_memory(err, s->recipe->name, m->prompt.n);
    *it = (sti_item){.kind = STI_ITEM_GENERATE,
                     .chat = s->recipe->chat,
                     .max_new = s->recipe->max_new,
                     .memory = block,
                     .expected = (char **)(void *)block,
                     .n_expected = m->n_expected,
                     .prompt = block + pointers};
    snprintf(it->id, sizeof it->id, "%d/%llu", s->length, (unsigned long long)s->at);
    if (m->prompt.n) memcpy(it->prompt, m->prompt.p, m->prompt.n);
    char *text = it->prompt + m->prompt.n + 1;
    if (m->expected.n) memcpy(text, m->expected.p, m->expected.n);
    for (int i = 0; i < m->n_expected; i++, text += strlen(text) + 1)
        it->expected[i] = text;
    return STILL_OK;
}

/* ---- The source ---------------------------------------------------------- */

static still_status fill_source(sti_source *s, const sti_task_params *p, bool frozen,
                                still_error *err)
{
    const sti_recipe *r = s->recipe;
    const uint64_t wanted = (uint64_t)(p->samples ? p->samples : r->samples);
    if (frozen) STI_TRY(sti_dataset_file_open(r, p, &s->frozen, err));
    if (s->frozen) {
        s->n = sti_dataset_file_count(s->frozen);
        if (p->samples && s->n < wanted)
            return sti_fail(err, STILL_E_ARG,
                            "%s at length %d: the frozen set in %s holds %llu samples, "
                            "%llu were asked for",
                            r->name, p->length, p->data_dir, (unsigned long long)s->n,
                            (unsigned long long)wanted);
    } else {
        STI_TRY(r->open(r, p, &s->set, err));
        s->n = r->available(s->set);
    }
    if (s->n > wanted) s->n = wanted;
    return STILL_OK;
}

static still_status open_source(const sti_recipe *r, const sti_task_params *p,
                                bool frozen, sti_source **out, still_error *err)
{
    *out = NULL;
    if (!p->data_dir)
        return sti_fail(err, STILL_E_ARG, "%s: no folder with data was given", r->name);
    if (!p->tk)
        return sti_fail(err, STILL_E_ARG,
                        "%s: its samples are sized in tokens, and the model brings no "
                        "tokenizer",
                        r->name);
    if (p->samples < 0)
        return sti_fail(err, STILL_E_ARG, "%s: %d samples, expected 1 or more", r->name,
                        p->samples);
    sti_source *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, r->name, sizeof *s);
    s->recipe = r;
    s->length = p->length;
    still_status status = fill_source(s, p, frozen, err);
    if (status != STILL_OK)
        sti_generated_close(s);
    else
        *out = s;
    return status;
}

still_status sti_generated_open(const sti_recipe *r, const sti_task_params *p,
                                sti_source **out, still_error *err)
{
    return open_source(r, p, true, out, err);
}

still_status sti_generated_open_new(const sti_recipe *r, const sti_task_params *p,
                                    sti_source **out, still_error *err)
{
    return open_source(r, p, false, out, err);
}

still_status sti_generated_next(sti_source *s, sti_item *it, still_error *err)
{
    *it = (sti_item){0};
    if (s->at == s->n) return STILL_OK;
    sti_sample_clear(&s->sample);
    STI_TRY(s->frozen ? sti_dataset_file_next(s->frozen, &s->sample, err)
                      : s->recipe->make(s->set, s->at, &s->sample, err));
    STI_TRY(make_item(s, it, err));
    s->at++;
    return STILL_OK;
}

uint64_t sti_generated_count(const sti_source *s)
{
    return s->n;
}

void sti_generated_close(sti_source *s)
{
    if (!s) return;
    if (s->set) s->recipe->close(s->set);
    sti_dataset_file_close(s->frozen);
    sti_sample_free(&s->sample);
    free(s);
}
