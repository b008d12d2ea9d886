/* The golden suites that ship with the tests, on every backend and instruction set. */
#include <stdio.h>
#include <string.h>

#include "../../run.h"

#include "../../skip.h"
#include "still.h"

static void count_case(void *user, const still_check_case *c)
{
    ++*(int *)user;
    for (int i = 0; i < c->n_checks; i++)
        printf("  %s %s: %s %.3g (limit %.3g)\n", c->suite, c->name, c->check[i].name,
               c->check[i].value, c->check[i].limit);
}

static void models_on(const char *backend, const char *isa)
{
    int cases = 0, failed = -1;
    still_error e;
    still_selftest_params p = {.size = sizeof p,
                               .model =
                                   &STILL_PARAMS(still_model_params, .backend = backend,
                                                 .isa = isa, .threads = 2)};
    printf("models on %s %s\n", backend, isa ? isa : "");
    still_status st = still_selftest_run("models", FIXTURES "/models", &p, count_case,
                                         &cases, &failed, &e);
    if (st == STILL_E_UNSUPPORTED && isa) {
        skip_isa(isa);
        return;
    }
    if (st != STILL_OK) fail_msg("%s", e.text);
    assert_int_equal(cases, 11);
    assert_int_equal(failed, 0);
}

static void models_match(void **state)
{
    (void)state;
    models_on("ref", NULL);
    models_on("cpu", "portable");
    models_on("cpu", "avx2");
    models_on("cpu", "avx512");
    models_on("cpu", "amx");
}

static void ignore_case(void *user, const still_check_case *c)
{
    (void)user;
    (void)c;
}

static void bad_requests(void **state)
{
    (void)state;
    int failed;
    still_error e;
    assert_int_equal(
        still_selftest_run("nonsense", ".", NULL, ignore_case, NULL, &failed, &e),
        STILL_E_ARG);
    assert_int_equal(
        still_selftest_run("models", "/nowhere", NULL, ignore_case, NULL, &failed, &e),
        STILL_E_IO);
    assert_int_equal(still_selftest_run("end-to-end", FIXTURES "/end_to_end", NULL,
                                        ignore_case, NULL, &failed, &e),
                     STILL_E_ARG);
    assert_non_null(strstr(e.text, "still pull smollm2"));
}

RUN_TESTS(cmocka_unit_test(models_match), cmocka_unit_test(bad_requests))
