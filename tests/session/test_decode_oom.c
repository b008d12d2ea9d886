/* A decode step allocates nothing, whatever the method: every allocator is wrapped and
 * counted while tokens are fed one by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "still.h"

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);

static int allocations;

void *__wrap_malloc(size_t n)
{
    allocations++;
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size)
{
    allocations++;
    return __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n)
{
    allocations++;
    return __real_realloc(p, n);
}

static void decode_allocates_nothing(void **state)
{
    (void)state;
    still_error e;
    still_model *m;
    assert_int_equal(still_model_open(FIXTURES "/models/llama3",
                                      &(still_model_params){.threads = 2}, &m, &e),
                     STILL_OK);
    const char *name;
    for (int i = 0; (name = still_method_at(i, NULL)); i++) {
        still_method how;
        still_session *s[3];
        assert_int_equal(still_method_init(&how, name, 8, &e), STILL_OK);
        for (int j = 0; j < 3; j++) {
            assert_int_equal(
                still_session_new(
                    m,
                    &(still_session_params){.ctx = 200, .method = &how, .rollback = 2},
                    &s[j], &e),
                STILL_OK);
            int32_t prompt[30] = {1, 2, 3, 4, 5, 6};
            assert_int_equal(still_session_feed(s[j], prompt, 10 * (j + 1), &e),
                             STILL_OK);
        }
        int before = allocations;
        for (int t = 0; t < 60; t++) {
            int32_t tok[3] = {t, 2 * t, 3 * t};
            assert_int_equal(still_session_feed(s[0], tok, 1, &e), STILL_OK);
            assert_int_equal(still_session_step(s, tok, 3, &e), STILL_OK);
        }
        if (allocations != before)
            fail_msg("%s: %d allocations in 60 steps", name, allocations - before);
        for (int j = 0; j < 3; j++) still_session_free(s[j]);
    }
    still_model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(decode_allocates_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
