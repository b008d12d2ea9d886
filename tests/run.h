/* run.h - the main function of a test program: RUN_TESTS(cmocka_unit_test(a), ...), with
 * RUN_TESTS_IN where the tests share a setup and a teardown. */
#ifndef TESTS_RUN_H
#define TESTS_RUN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define RUN_TESTS_IN(setup, teardown, ...)                                             \
    int main(void)                                                                     \
    {                                                                                  \
        const struct CMUnitTest tests[] = {__VA_ARGS__};                               \
        return cmocka_run_group_tests(tests, setup, teardown);                         \
    }
#define RUN_TESTS(...) RUN_TESTS_IN(NULL, NULL, __VA_ARGS__)

#endif
