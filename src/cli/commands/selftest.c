/* selftest.c - still selftest: a line per golden case with its largest errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/resolve.h"
#include "cli/near.h"
#include "cli/options.h"

typedef struct report {
    bool json;
    int cases;
} report;

static json_t *case_object(const still_check_case *c)
{
    json_t *checks = json_array();
    for (int i = 0; i < c->n_checks; i++) {
        const still_check *k = &c->check[i];
        sti_json_append(&checks, json_pack("{s:s, s:f, s:f, s:b}", "name", k->name,
                                           "value", k->value, "limit", k->limit,
                                           "passed", (int)k->passed));
    }
    return json_pack("{s:s, s:s, s:b, s:o}", "suite", c->suite, "case", c->name,
                     "passed", (int)c->passed, "checks", checks);
}

static void on_case(void *user, const still_check_case *c)
{
    report *r = user;
    r->cases++;
    if (r->json) {
        cli_print_json(case_object(c));
        return;
    }
    char name[128];
    cli_print("%-4s  %s/%-28s", c->passed ? "ok" : "FAIL", c->suite,
              cli_line(name, sizeof name, c->name));
    for (int i = 0; i < c->n_checks; i++)
        cli_print("  %s %.3g%s%.3g", c->check[i].name, c->check[i].value,
                  c->check[i].passed ? " <= " : " > ", c->check[i].limit);
    cli_print("\n");
    cli_flush();
}

/* The model of end-to-end. One given by the user must exist; the default need not, for
 * suites that do not use it. */
static int find_model(const cli_options *o, const char *suite, char **path)
{
    still_error err;
    *path = NULL;
    if (strcmp(suite, "end-to-end") != 0) return CLI_OK;
    return cli_resolve_model(o->model, path, NULL, &err) ? cli_fail_error(&err)
                                                         : CLI_OK;
}

static int check_suite(const char *suite)
{
    static const char *const here[] = {"models",    "tokenizer",  "chat",
                                       "templates", "end-to-end", "operator",
                                       "baselines"};
    cli_near near = {0};
    for (size_t i = 0; i < sizeof here / sizeof *here; i++) {
        if (!strcmp(suite, here[i])) return CLI_OK;
        cli_near_consider(&near, suite, here[i]);
    }
    if (near.name)
        return cli_usage("selftest", "unknown suite '%s', did you mean %s?", suite,
                         near.name);
    return cli_usage(
        "selftest",
        "unknown suite '%s': models, tokenizer, chat, templates, end-to-end, operator "
        "or baselines",
        suite);
}

int cli_cmd_selftest(const cli_options *o)
{
    const char *suite = o->arg[0], *folder = o->arg[1];
    const still_model_params opened = {.size = sizeof opened,
                                       .backend = o->backend,
                                       .threads = (int)o->threads,
                                       .isa = o->isa};
    still_selftest_params params = {.size = sizeof params, .model = &opened};
    int most = (int)(sizeof params.tokenizer / sizeof *params.tokenizer);
    int status = check_suite(suite);
    if (status != CLI_OK) return status;
    if (o->tokenizers.n > most)
        return cli_usage("selftest", "--tokenizer given more than %d times", most);
    for (int i = 0; i < o->tokenizers.n; i++)
        params.tokenizer[i] = o->tokenizers.item[i];
    char *model;
    status = find_model(o, suite, &model);
    if (status != CLI_OK) return status;
    params.model_path = model;

    still_error err;
    int failed = 0;
    report r = {.json = o->json};
    still_status ran =
        still_selftest_run(suite, folder, &params, on_case, &r, &failed, &err);
    free(model);
    if (ran != STILL_OK) return cli_fail_error(&err);
    if (o->json)
        cli_print_json(json_pack("{s:s, s:i, s:i, s:b}", "suite", suite, "cases",
                                 r.cases, "failed", failed, "passed",
                                 (int)(failed == 0)));
    else
        cli_print("%s: %d cases, %d out of tolerance\n", suite, r.cases, failed);
    if (r.cases == 0) return cli_fail("%s: no golden data of '%s' here", folder, suite);
    return failed ? CLI_FAILED : CLI_OK;
}
