/* eval.h - running a model on items: sessions, answers, records.
 *
 * run.c takes items from a task, passes them to loglik.c or generate.c a block at a
 * time, and turns answers into records: JSON objects for the log and the results. A
 * record from an earlier run with the same settings is reused. */
#ifndef STI_EVAL_EVAL_H
#define STI_EVAL_EVAL_H

#include "eval/task.h"
#include "session/session.h"

enum { STI_MOST_OPTIONS = 16, STI_MOST_SESSIONS = 256 };

/* ---- Sessions (runner.c) ------------------------------------------------- */

typedef struct sti_runner {
    still_model *m;
    const still_tokenizer *tk;
    still_session_params params; /* ctx: set when sessions are made */
    still_method method;         /* params.method */
    int limit;                   /* most tokens the model may see */
    bool recompute;              /* each option from its first token on */
    bool (*poll)(void *);
    void *user;
    /* Sessions of ctx tokens; session 0 keeps a beginning that items share. */
    still_session *s[STI_MOST_SESSIONS];
    int n_sessions, most, ctx;        /* how many exist, how many may; tokens of each */
    struct sti_pool *pool;            /* for CPU work beside a GPU; or NULL */
    char settings[STI_SETTINGS_LINE]; /* as text, for the log */
    int32_t *stem;                    /* [n_stem]: what session 0 holds */
    int n_stem;
    uint64_t fed, counted; /* tokens computed; the same without sharing */
} sti_runner;

/* p: as still_eval_run got it; method NULL: the model's own. */
still_status sti_runner_open(still_model *m, const still_session_params *p,
                             sti_runner *r, still_error *err);
void sti_runner_close(sti_runner *r);
/* Makes sure that there are sessions of at least ctx tokens: as many as asked for,
 * but at least three, and no more than the memory set aside allows. Existing ones
 * keep their past if they are long enough. */
still_status sti_runner_need(sti_runner *r, int ctx, int sessions, still_error *err);
/* Calls fn(arg, i) for i = 0 .. n - 1, in any order, on several threads if they are
 * idle. Returns the error of the lowest i that failed. */
typedef still_status sti_runner_fn(void *arg, int i, still_error *err);
still_status sti_runner_each(sti_runner *r, int n, sti_runner_fn *fn, void *arg,
                             still_error *err);

/* ---- Tokens of items (encode.c) ------------------------------------------ */

typedef struct sti_ids {
    int32_t *id;
    int n;
    int n_context; /* the first token that is scored */
    bool cut;      /* its beginning did not fit */
} sti_ids;
/* n options of an item by the rules of docs/evaluation.md; each has at most limit + 1
 * tokens, the last of which is never fed. free() the id of each out, which is zeroed
 * before; those that were made before an error, too. */
still_status sti_encode_options(const still_tokenizer *tk, const sti_option *o, int n,
                                int limit, sti_ids *out, still_error *err);
/* A prompt that leaves room for the answer. *plain: the item wants a chat turn but the
 * model has no template. */
still_status sti_encode_prompt(const still_tokenizer *tk, const sti_item *it, int limit,
                               sti_ids *out, bool *plain, still_error *err);

/* ---- Answers ------------------------------------------------------------- */

typedef struct sti_answer {
    double sum[STI_MOST_OPTIONS]; /* log p of each continuation */
    bool greedy;                  /* every token of option 0 is the most likely */
    bool cut, plain;              /* as above */
    char *output;                 /* what was written; free() it */
} sti_answer;

/* n items of one kind; out [n]. */
still_status sti_run_loglik(sti_runner *r, const sti_item *item, int n, sti_answer *out,
                            still_error *err);
still_status sti_run_generate(sti_runner *r, const sti_item *item, int n,
                              sti_answer *out, still_error *err);

/* ---- Records (record.c) -------------------------------------------------- */

/* Of an answered item. NULL: no memory. */
json_t *sti_record_make(const char *run, const sti_eval_task *t, const sti_item *it,
                        const sti_answer *a);
/* Index of the largest sum, or sum / length; ties go to the first. */
int sti_record_pick(const double *sum, const int *length, int n);

typedef struct sti_tally { /* running sums of a result */
    uint64_t n, cut, plain;
    double right, right2; /* sums of the score and its square */
    double right_norm, right_norm2;
    double nll;
    bool has_norm, has_nll;
} sti_tally;
void sti_tally_add(sti_tally *t, const json_t *record);
void sti_tally_result(const sti_tally *t, still_eval_result *out);

/* ---- The log (log.c) ----------------------------------------------------- */

typedef struct sti_log sti_log;
/* Opens or creates a log. Removes an incomplete last line. path NULL: *out is NULL,
 * which the functions below treat as an empty log. */
still_status sti_log_open(const char *path, sti_log **out, still_error *err);
void sti_log_close(sti_log *l);
/* Begins or continues the run that `header` describes; `run` is its short name, a
 * hash of the header. *done: {id: record} of its records in the log; json_decref it. */
still_status sti_log_begin(sti_log *l, const json_t *header, char run[17],
                           json_t **done, still_error *err);
still_status sti_log_add(sti_log *l, const json_t *record, still_error *err);

#endif
