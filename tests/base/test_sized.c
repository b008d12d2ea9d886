/* test_sized.c - structs that carry their size: shorter ones, longer ones, and what is
 * none. */
#include <string.h>

#include "../run.h"

#include "base/sized.h"

typedef struct thing {
    size_t size;
    int a, b;
    const char *c;
    double d;
} thing;

typedef struct later_thing {
    thing first;
    uint64_t more[3];
} later_thing;

static void test_same(void **state)
{
    (void)state;
    still_error e;
    const thing given = {.size = sizeof given, .a = 1, .b = 2, .c = "c", .d = 0.5};
    thing got;
    memset(&got, 0xAA, sizeof got);
    assert_int_equal(STI_TAKE(&got, &given, thing, &e), STILL_OK);
    assert_memory_equal(&got, &given, sizeof got);
    const thing zeros = {.size = sizeof zeros};
    memset(&got, 0xAA, sizeof got);
    assert_int_equal(STI_TAKE(&got, NULL, thing, &e), STILL_OK);
    assert_memory_equal(&got, &zeros, sizeof got);
}

static void test_shorter(void **state)
{
    (void)state;
    still_error e;
    /* What lies behind the end of a shorter struct is another object's. */
    const thing given = {
        .size = offsetof(thing, c), .a = 1, .b = 2, .c = "not its own", .d = 0.5};
    thing got;
    memset(&got, 0xAA, sizeof got);
    assert_int_equal(STI_TAKE(&got, &given, thing, &e), STILL_OK);
    assert_int_equal(got.size, sizeof got);
    assert_int_equal(got.a, 1);
    assert_int_equal(got.b, 2);
    assert_null(got.c);
    assert_true(got.d == 0);
}

static void test_longer(void **state)
{
    (void)state;
    still_error e;
    later_thing given = {.first = {.size = sizeof given, .a = 7}};
    thing got;
    assert_int_equal(STI_TAKE(&got, (const thing *)&given, thing, &e), STILL_OK);
    assert_int_equal(got.a, 7);
    assert_int_equal(got.size, sizeof got);
    for (size_t at = sizeof(thing); at < sizeof given; at++) {
        ((unsigned char *)&given)[at] = 1;
        assert_int_equal(STI_TAKE(&got, (const thing *)&given, thing, &e),
                         STILL_E_UNSUPPORTED);
        assert_non_null(strstr(e.text, "thing: sets something at byte"));
        assert_non_null(strstr(e.text, "needs a later libstill"));
        ((unsigned char *)&given)[at] = 0;
    }
}

static void test_no_size(void **state)
{
    (void)state;
    static const size_t none[] = {0, 8, 17, sizeof(thing) + 4, 1 << 20, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        still_error e = {0};
        thing got;
        assert_int_equal(STI_TAKE(&got, &(thing){.size = none[i]}, thing, &e),
                         STILL_E_ARG);
        assert_non_null(strstr(e.text, "thing: its size is"));
        assert_non_null(strstr(e.text, "STILL_PARAMS"));
    }
}

RUN_TESTS(cmocka_unit_test(test_same), cmocka_unit_test(test_shorter),
          cmocka_unit_test(test_longer), cmocka_unit_test(test_no_size))
