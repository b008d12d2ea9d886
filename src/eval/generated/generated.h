/* generated.h - tasks whose items are generated from source texts: RULER and BABILong.
 *
 * A recipe generates the samples of one task at one length, in order, from a seed.
 * Sample i does not depend on how many are asked for. Each sample draws from a stream
 * of its own, so a change in one task does not affect the others; the top of each
 * ruler_*.c and of babilong.c lists the order of draws.
 *
 * A set can be frozen: written to a file and read from there afterwards
 * (dataset_file.c). */
#ifndef STI_EVAL_GENERATED_GENERATED_H
#define STI_EVAL_GENERATED_GENERATED_H

#include "base/buf.h"
#include "base/error.h"
#include "base/random.h"
#include "eval/task.h"

/* ---- Draws --------------------------------------------------------------- */

typedef struct sti_draws {
    uint64_t key, used;
} sti_draws;

/* The stream of a task and length; stream 0 belongs to the whole set, 1 + i to sample
 * i. */
sti_draws sti_draws_of(uint64_t seed, const char *task, int length, uint64_t stream);
/* Draw number k of a stream is sti_mix64(key + k). */
static inline uint64_t sti_draw(sti_draws *d)
{
    return sti_mix64(d->key + d->used++);
}
/* Uniform in 0..n-1, n >= 1: the upper half of a draw, scaled. The bias is below
 * n / 2^32. */
static inline uint32_t sti_draw_below(sti_draws *d, uint32_t n)
{
    return (uint32_t)((sti_draw(d) >> 32) * n >> 32);
}
/* Moves a random choice of k of a[0..n) to its front, in random order (k = n:
 * shuffles): for i = 0..k-1, a[i] is exchanged with a[i + below(n - i)]. */
void sti_draw_choice(sti_draws *d, uint32_t *a, uint32_t n, uint32_t k);
/* 0..n-1, with such a choice in front. free() it; NULL: no memory. */
uint32_t *sti_draw_indices(sti_draws *d, uint32_t n, uint32_t k);

/* ---- Recipes ------------------------------------------------------------- */

typedef struct sti_sample {
    sti_buf prompt;
    sti_buf expected; /* strings, each with its NUL */
    int n_expected;
} sti_sample;
void sti_sample_clear(sti_sample *s); /* keeps the memory */
void sti_sample_free(sti_sample *s);
void sti_sample_expect(sti_sample *s, const char *text);

typedef struct sti_recipe sti_recipe;
struct sti_recipe {
    const char *name;
    int max_new, samples; /* samples: as many as are usual */
    bool chat;
    const void *detail; /* for open */
    still_status (*open)(const sti_recipe *r, const sti_task_params *p, void **set,
                         still_error *err);
    /* Sample i, into *out, which is clear. Samples are asked for in order. */
    still_status (*make)(void *set, uint64_t i, sti_sample *out, still_error *err);
    uint64_t (*available)(const void *set); /* samples there can be */
    void (*close)(void *set);
};
const sti_recipe *sti_ruler_recipe(const char *name); /* NULL: not one of them */
const sti_recipe *sti_babilong_recipe(const char *name);

/* Opens a task by its recipe. If p->data_dir has a frozen set NAME-LENGTH.jsonl,
 * reads it; otherwise generates the items. _new always generates them. */
still_status sti_generated_open(const sti_recipe *r, const sti_task_params *p,
                                sti_source **out, still_error *err);
still_status sti_generated_open_new(const sti_recipe *r, const sti_task_params *p,
                                    sti_source **out, still_error *err);
still_status sti_generated_next(sti_source *s, sti_item *it, still_error *err);
uint64_t sti_generated_count(const sti_source *s);
void sti_generated_close(sti_source *s);

/* Tokens of a text, without special ones. */
still_status sti_generated_tokens(const still_tokenizer *tk, const char *text, size_t n,
                                  uint64_t *tokens, still_error *err);

/* ---- Frozen sets (dataset_file.c) ---------------------------------------------- */

/* Generates the items of a task and writes them to path, ignoring frozen files. The
 * file appears whole or not at all. */
still_status sti_dataset_file_write(const sti_eval_task *t, const sti_task_params *p,
                                    const char *path, still_error *err);
/* Where sti_generated_open looks. free() it; NULL: no memory. */
char *sti_dataset_file_path(const char *dir, const char *task, int length);

typedef struct sti_dataset_file sti_dataset_file;
/* Reads the file once, as a whole, and checks task, length, seed and checksum. *out is
 * NULL, without error, if there is no such file. */
still_status sti_dataset_file_open(const sti_recipe *r, const sti_task_params *p,
                                   sti_dataset_file **out, still_error *err);
uint64_t sti_dataset_file_count(const sti_dataset_file *f);
still_status sti_dataset_file_next(sti_dataset_file *f, sti_sample *out,
                                   still_error *err);
void sti_dataset_file_close(sti_dataset_file *f);

#endif
