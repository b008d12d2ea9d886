/* Stop strings: never shown, wherever the tokens are cut, and nothing else is lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "cli/stream.h"

/* Feeds text in pieces of `step` bytes; shown gets what was let out. */
static bool run(const char *text, size_t step, const char *const *stop, int n_stops,
                sti_buf *shown)
{
    cli_stream s = {.stop = stop, .n_stops = n_stops};
    const char *show;
    size_t n;
    bool stopped = false;
    for (size_t i = 0; text[i] && !stopped; i += step) {
        size_t left = strlen(text + i);
        stopped = cli_stream_push(&s, text + i, left < step ? left : step, &show, &n);
        sti_buf_put(shown, show, n);
        if (left <= step) break;
    }
    if (!stopped) {
        cli_stream_end(&s, &show, &n);
        sti_buf_put(shown, show, n);
    }
    assert_int_equal(shown->n, s.text.n);
    cli_stream_free(&s);
    return stopped;
}

static void check(const char *text, const char *const *stop, int n_stops,
                  const char *expected, bool stops)
{
    for (size_t step = 1; step <= strlen(text) + 1; step++) {
        sti_buf shown = {0};
        sti_buf_put(&shown, "", 0);
        assert_int_equal(run(text, step, stop, n_stops, &shown), stops);
        assert_string_equal(shown.p, expected);
        sti_buf_free(&shown);
    }
}

static void test_no_stop(void **state)
{
    (void)state;
    check("plain text", NULL, 0, "plain text", false);
}

static void test_straddles_tokens(void **state)
{
    (void)state;
    const char *stop[] = {"END"};
    check("some ENDless text", stop, 1, "some ", true);
    check("END", stop, 1, "", true);
    check("almost EN", stop, 1, "almost EN", false);
    check("EEEND", stop, 1, "EE", true);
}

static void test_overlapping_beginnings(void **state)
{
    (void)state;
    const char *stop[] = {"aab"};
    check("aaaab", stop, 1, "aa", true);
    check("aaaac", stop, 1, "aaaac", false);
}

static void test_several(void **state)
{
    (void)state;
    const char *stop[] = {"\n\n", "User:", "xyz"};
    check("one\ntwo\n\nthree", stop, 3, "one\ntwo", true);
    check("one\nUser: hi", stop, 3, "one\n", true);
    check("xyxyz", stop, 3, "xy", true);
}

static void test_held_back_no_longer_than_needed(void **state)
{
    (void)state;
    const char *stop[] = {"STOP"};
    cli_stream s = {.stop = stop, .n_stops = 1};
    const char *show;
    size_t n;
    assert_false(cli_stream_push(&s, "go on", 5, &show, &n));
    assert_int_equal(n, 5); /* nothing here can begin STOP */
    assert_false(cli_stream_push(&s, " ST", 3, &show, &n));
    assert_int_equal(n, 1);
    assert_false(cli_stream_push(&s, "S", 1, &show, &n));
    assert_int_equal(n, 2); /* "ST" was none; "S" may be */
    assert_false(cli_stream_push(&s, "", 0, &show, &n));
    assert_int_equal(n, 0);
    cli_stream_end(&s, &show, &n);
    assert_int_equal(n, 1);
    cli_stream_free(&s);
}

RUN_TESTS(cmocka_unit_test(test_no_stop), cmocka_unit_test(test_straddles_tokens),
          cmocka_unit_test(test_overlapping_beginnings), cmocka_unit_test(test_several),
          cmocka_unit_test(test_held_back_no_longer_than_needed))
