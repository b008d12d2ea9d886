/* test_host_scores.c - the scores of the cuda backend, as far as the program decides
 * without a GPU: it has all of the table, each from somewhere, and refuses what it does
 * not know. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "../../../run.h"

#include "backend/cuda/hybrid/score.h"

static void test_knows_the_table(void **state)
{
    (void)state;
    for (int i = 0; i < STI_SCORE_COUNT; i++) {
        still_error err = {0};
        if (sti_cuda_score_check((sti_score_kind)i, &err) != STILL_OK)
            fail_msg("score %d: %s", i, err.text);
        assert_int_not_equal(sti_score_source_of(i), STI_FROM_NOWHERE);
    }
}

static void test_refuses_others(void **state)
{
    (void)state;
    static const int unknown[] = {STI_SCORE_COUNT, 77, -1};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        still_error err = {0};
        assert_int_equal(sti_score_source_of(unknown[i]), STI_FROM_NOWHERE);
        assert_int_equal(sti_cuda_score_check((sti_score_kind)unknown[i], &err),
                         STILL_E_ARG);
        assert_non_null(strstr(err.text, "no score number"));
    }
}

RUN_TESTS(cmocka_unit_test(test_knows_the_table), cmocka_unit_test(test_refuses_others))
