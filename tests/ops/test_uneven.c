/* test_uneven.c - selection heads with caps of their own: lists one behind the other, a
 * state that weighs less where fewer tokens are exact, settings that compare and check. */
#include <math.h>
#include <string.h>

#include "../run.h"

#include "ops/hybrid.h"

enum { S = 4 };
static const sti_hybrid_shape shape = {.H = 8, .G = S, .D = 16, .F = 16};

static sti_hybrid_settings uneven(void)
{
    sti_hybrid_settings s;
    assert_true(sti_hybrid_preset("still", 8, &s));
    s.cap = 9;
    s.uneven = true;
    const int32_t cap[S] = {3, 9, 0, 5};
    memcpy(s.head_cap, cap, sizeof cap);
    return s;
}

static void test_lists(void **state)
{
    (void)state;
    const size_t first[S + 1] = {0, 3, 12, 12, 17};
    sti_hybrid_settings s = uneven();
    const sti_hybrid_state st = {.sal_capacity = 9};
    for (int i = 0; i <= S; i++)
        assert_int_equal(sti_hybrid_list_of(&s, &st, i).first, first[i]);
    for (int i = 0; i < S; i++) {
        assert_int_equal(sti_hybrid_list_of(&s, &st, i).capacity, s.head_cap[i]);
        assert_int_equal(sti_hybrid_cap(&s, i), s.head_cap[i]);
    }
    s.uneven = false;
    assert_int_equal(sti_hybrid_list_of(&s, &st, 2).first, 18);
    assert_int_equal(sti_hybrid_cap(&s, 2), 9);
}

/* A head's state weighs as the tokens it may keep exactly: state_cap less what its cap
 * lacks of the largest. */
static void test_state(void **state)
{
    (void)state;
    sti_hybrid_settings s = uneven();
    assert_true(sti_hybrid_state_shift(&s, 0, 1000) == 0); /* no bound */
    s.state_cap = 25;
    const int most[S] = {19, 25, 16, 21};
    for (int i = 0; i < S; i++) {
        assert_true(sti_hybrid_state_shift(&s, i, most[i]) == 0);
        assert_true(fabs(sti_hybrid_state_shift(&s, i, 1000) - log(most[i] / 1000.0)) <
                    1e-12);
    }
}

static void test_same(void **state)
{
    (void)state;
    const sti_hybrid_settings a = uneven();
    sti_hybrid_settings b = uneven();
    b.head_cap[S] = 7; /* of a head that is not there */
    assert_true(sti_hybrid_same_caps(&a, &b, S));
    b.head_cap[S - 1]--;
    assert_false(sti_hybrid_same_caps(&a, &b, S));
    b = uneven();
    b.uneven = false;
    assert_false(sti_hybrid_same_caps(&a, &b, S));
}

static void test_check(void **state)
{
    (void)state;
    still_error err;
    sti_hybrid_settings s = uneven();
    assert_int_equal(sti_hybrid_check(&s, &shape, &err), STILL_OK);
    s.head_cap[3] = 10; /* above the largest */
    assert_int_equal(sti_hybrid_check(&s, &shape, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "cap 10 of head 3"));
    s.head_cap[3] = -1;
    assert_int_equal(sti_hybrid_check(&s, &shape, &err), STILL_E_ARG);
    s = uneven();
    const sti_hybrid_shape many = {
        .H = STI_UNEVEN_HEADS_MAX + 1, .G = STI_UNEVEN_HEADS_MAX + 1, .D = 16, .F = 16};
    assert_int_equal(sti_hybrid_check(&s, &many, &err), STILL_E_UNSUPPORTED);
}

RUN_TESTS(cmocka_unit_test(test_lists), cmocka_unit_test(test_state),
          cmocka_unit_test(test_same), cmocka_unit_test(test_check))
