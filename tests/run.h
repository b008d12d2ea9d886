/* run.h - what test programs begin and end with: cmocka, a call of the library that has to
 * succeed, and the main function: RUN_TESTS(cmocka_unit_test(a), ...), with RUN_TESTS_IN
 * where the tests share a setup and a teardown. */
#ifndef TESTS_RUN_H
#define TESTS_RUN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "still.h"

static inline void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

#define RUN_TESTS_IN(setup, teardown, ...)                                             \
    int main(void)                                                                     \
    {                                                                                  \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                               \
        return cmocka_run_group_tests(tests, setup, teardown);                         \
    }
#define RUN_TESTS(...) RUN_TESTS_IN(NULL, NULL, __VA_ARGS__)

#endif
