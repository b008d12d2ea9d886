/* The six real vocabularies against golden lines, where scripts/fetch-vocabularies has
 * brought them; skipped elsewhere. */
#include "../run.h"
#include "../skip.h"
#include "tokens.h"

#include <stdio.h>
#include <unistd.h>

static void on_case(void *user, const still_check_case *c)
{
    ++*(int *)user;
    for (int i = 0; i < c->n_checks; i++)
        if (!c->check[i].passed)
            print_error("%s: %g %s\n", c->name, c->check[i].value, c->check[i].name);
}

static void test_tokenizers(void **state)
{
    (void)state;
    char stamp[4096];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache == '/')
        snprintf(stamp, sizeof stamp, "%s/still/vocab/qwen.tiktoken", cache);
    else
        snprintf(stamp, sizeof stamp, "%s/.cache/still/vocab/qwen.tiktoken",
                 home ? home : "");
    if (access(stamp, F_OK) != 0) skip_because("the vocabularies are not in the cache");
    int cases = 0, failed = 0;
    still_error err = {0};
    if (still_selftest_run("tokenizer", FIXTURES "/tokenizer", NULL, on_case, &cases,
                           &failed, &err))
        fail_msg("%s", err.text);
    assert_int_equal(cases, 6);
    assert_int_equal(failed, 0);
}

static void test_chats(void **state)
{
    (void)state;
    int cases = 0, failed = 0;
    still_error err = {0};
    if (still_selftest_run("chat", FIXTURES "/chat", NULL, on_case, &cases, &failed,
                           &err))
        fail_msg("%s", err.text);
    assert_int_equal(cases, 3);
    assert_int_equal(failed, 0);
}

RUN_TESTS(cmocka_unit_test(test_tokenizers), cmocka_unit_test(test_chats))
