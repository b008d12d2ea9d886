/* selftest.c - the table of suites. */
#include "eval/selftest/selftest.h"
#include "base/sized.h"

#include <string.h>

void sti_selftest_report(const sti_suite_run *r, const char *name, still_check *check,
                         int n)
{
    bool all = true;
    for (int i = 0; i < n; i++) {
        check[i].passed = check[i].value <= check[i].limit; /* false for NaN */
        all = all && check[i].passed;
    }
    if (!all) ++*r->failed;
    r->cb(r->user, &(still_check_case){r->suite, name, check, n, all});
}

static const struct {
    const char *name;
    still_status (*run)(const sti_suite_run *, still_error *);
} suites[] = {
    {"models", sti_selftest_models},       {"end-to-end", sti_selftest_end_to_end},
    {"tokenizer", sti_selftest_tokenizer}, {"chat", sti_selftest_chat},
    {"operator", sti_selftest_operator},   {"baselines", sti_selftest_baselines},
    {"templates", sti_selftest_templates},
};

still_status still_selftest_run(const char *suite, const char *dir,
                                const still_selftest_params *params, still_check_fn cb,
                                void *user, int *failed, still_error *err)
{
    still_selftest_params p;
    still_model_params model;
    STI_TRY(STI_TAKE(&p, params, still_selftest_params, err));
    STI_TRY(STI_TAKE(&model, p.model, still_model_params, err));
    p.model = &model;
    *failed = 0;
    sti_suite_run r = {suite, dir, &p, cb, user, failed};
    for (size_t i = 0; i < sizeof suites / sizeof *suites; i++)
        if (strcmp(suites[i].name, suite) == 0) return suites[i].run(&r, err);
    return sti_fail(err, STILL_E_ARG, "no self-test is called '%s'", suite);
}
