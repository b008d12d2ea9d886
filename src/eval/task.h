/* task.h - evaluation tasks: where questions come from, and how answers are scored.
 *
 * A task turns files into items, one at a time and in a fixed order. An item is either
 * a choice (the model ranks continuations by log-likelihood) or a text to be generated
 * (the output is searched for expected strings). What runs a model on items, run.c,
 * knows nothing of any task; a new task is a row of the table in task.c. Protocols,
 * word for word: docs/evaluation.md. */
#ifndef STI_EVAL_TASK_H
#define STI_EVAL_TASK_H

#include "file/store.h"
#include "token/token.h"

typedef enum sti_item_kind {
    STI_ITEM_CHOICE,  /* rank the continuations */
    STI_ITEM_GENERATE /* write up to max_new tokens, greedily */
} sti_item_kind;

/* One continuation and the context it follows. Contexts of an item are often the same
 * pointer: they are computed once. */
typedef struct sti_option {
    const char *context, *continuation; /* continuation: with its leading space */
    int length; /* code points of the choice itself, for normalisation */
} sti_option;

typedef struct sti_item {
    sti_item_kind kind;
    char id[64]; /* unique in its task: "12", "anatomy/3", "4096/17" */
    /* choice */
    sti_option *option;
    int n_options, gold;
    bool greedy; /* correct iff every token of option 0 is the most likely (LAMBADA) */
    /* generate */
    char *prompt; /* with its answer prefix */
    bool chat;    /* one user turn of the chat template, if the model has one */
    char **expected;
    int n_expected, max_new;
    void *memory; /* everything above; sti_item_free */
} sti_item;
void sti_item_free(sti_item *it);

/* What a score needs of a generated text: fraction in 0..1. */
typedef double (*sti_metric)(const sti_item *it, const char *output);

typedef struct sti_task_params {
    const char *data_dir;
    const still_tokenizer *tk; /* sizes of generated tasks are in its tokens */
    int shots;                 /* -1: the task's own */
    int length;                /* tokens, of tasks with lengths */
    int samples;               /* of generated tasks; 0: the task's own */
    uint64_t seed;
    int ctx_limit; /* longest context the model may see */
} sti_task_params;

typedef struct sti_source sti_source; /* an opened task's items */

typedef struct sti_eval_task { /* sti_task is a pool's (base/pool.h) */
    const char *name, *summary;
    const char *metric; /* what users compare: "acc", "acc_norm", "match" */
    const char *files;  /* in data_dir, separated by spaces, for error messages */
    const int *lengths; /* default lengths, 0-terminated; NULL: the task has none */
    sti_metric score;   /* of generated tasks */
    still_status (*open)(const sti_task_params *p, sti_source **out, still_error *err);
    /* The next item; *it zeroed at the end. Malformed records are an error that names
     * file and line. */
    still_status (*next)(sti_source *s, sti_item *it, still_error *err);
    /* Items in all; 0: not known before they are read. */
    uint64_t (*count)(const sti_source *s);
    void (*close)(sti_source *s);
} sti_eval_task;

const sti_eval_task *sti_task_find(const char *name); /* NULL: unknown */
const sti_eval_task *sti_task_at(int i);              /* NULL past the end */

/* Rows of the table, by the file that has them. */
extern const sti_eval_task
    sti_task_choice[]; /* choice.c: piqa .. lambada; name NULL ends */
extern const sti_eval_task sti_task_ruler[];    /* ruler.c */
extern const sti_eval_task sti_task_babilong[]; /* babilong.c */

#endif
