/* selftest.h - suites that run golden data of other implementations, and how a suite
 * reports: a case is a name and a few measured quantities, each with its limit. */
#ifndef STI_EVAL_SELFTEST_SELFTEST_H
#define STI_EVAL_SELFTEST_SELFTEST_H

#include "base/error.h"
#include "base/json.h"

typedef struct sti_suite_run {
    const char *suite, *dir;
    const still_selftest_params *p;
    still_check_fn cb;
    void *user;
    int *failed;
} sti_suite_run;

/* Sets check[i].passed, calls the callback, counts a failure. */
void sti_selftest_report(const sti_suite_run *r, const char *name, still_check *check,
                         int n);

still_status sti_selftest_models(const sti_suite_run *r, still_error *err);
still_status sti_selftest_end_to_end(const sti_suite_run *r, still_error *err);
still_status sti_selftest_operator(const sti_suite_run *r, still_error *err);
still_status sti_selftest_baselines(const sti_suite_run *r, still_error *err);
still_status sti_selftest_tokenizer(const sti_suite_run *r, still_error *err);
still_status sti_selftest_chat(const sti_suite_run *r, still_error *err);
still_status sti_selftest_templates(const sti_suite_run *r, still_error *err);

/* The next line of NAME.jsonl as a value; *out NULL at the end (token.c). */
struct sti_lines;
still_status sti_selftest_line(const char *name, struct sti_lines *l, int number,
                               json_t **out, still_error *err);

#endif
