/* Guesses from earlier text: what they are, when there are none, and how far back. */
#include <stdlib.h>

#include "../run.h"

#include "still.h"

enum { MOST = 15, SPAN = 65536 };

static still_lookup *make(int most)
{
    still_lookup *l;
    still_error e;
    if (still_lookup_new(most, &l, &e)) fail_msg("%s", e.text);
    return l;
}

static void accept_all(still_lookup *l, const int32_t *tok, int n)
{
    for (int i = 0; i < n; i++) still_lookup_accept(l, tok[i]);
}

static uint32_t next(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* A passage that comes again is guessed as it was, after a few of its tokens. */
static void follows_a_copy(void **state)
{
    (void)state;
    int32_t tok[400], guess[MOST];
    uint32_t seed = 1;
    still_lookup *l = make(MOST);
    for (int i = 0; i < 400; i++) tok[i] = (int32_t)(next(&seed) % 50000);
    accept_all(l, tok, 400);
    assert_int_equal(still_lookup_guess(l, guess), 0); /* nothing came twice */
    int guessed = 0;
    for (int i = 100; i < 200; i++) {
        still_lookup_accept(l, tok[i]);
        const int n = still_lookup_guess(l, guess);
        for (int k = 0; k < n; k++) assert_int_equal(guess[k], tok[i + 1 + k]);
        if (i >= 112) assert_true(n > 0);
        if (i >= 150) assert_int_equal(n, MOST);
        guessed += n;
    }
    assert_true(guessed > 60 * MOST);
    still_lookup_free(l);
}

/* A loop shorter than the guesses goes on through what is guessed. */
static void goes_round_a_loop(void **state)
{
    (void)state;
    int32_t guess[MOST];
    still_lookup *l = make(MOST);
    for (int i = 0; i < 60; i++) still_lookup_accept(l, 7 + i % 3);
    assert_int_equal(still_lookup_guess(l, guess), MOST);
    for (int k = 0; k < MOST; k++) assert_int_equal(guess[k], 7 + (60 + k) % 3);
    still_lookup_free(l);
}

/* Where matches mislead, guessing stops: of a dozen tokens at random every few have come
 * before, and say nothing of what comes next. */
static void gives_up_where_it_is_wrong(void **state)
{
    (void)state;
    int32_t guess[MOST];
    uint32_t seed = 5;
    int late = 0;
    still_lookup *l = make(MOST);
    for (int i = 0; i < 6000; i++) {
        still_lookup_accept(l, (int32_t)(next(&seed) % 12));
        const int n = still_lookup_guess(l, guess);
        if (i >= 3000) late += n;
    }
    assert_true(late <= 60); /* 2% of the places */
    /* And comes back where the text begins to repeat itself. */
    for (int i = 0; i < 40; i++) still_lookup_accept(l, 100 + i);
    for (int i = 0; i < 39; i++) still_lookup_accept(l, 100 + i);
    assert_true(still_lookup_guess(l, guess) > 0);
    assert_int_equal(guess[0], 139);
    still_lookup_free(l);
}

/* Guesses of a copy after 20 of its tokens where one more row takes `row` of a pass. */
static int guesses_at(double row)
{
    int32_t guess[MOST];
    still_lookup *l = make(MOST);
    for (int i = 0; i < 200; i++) still_lookup_accept(l, i);
    for (int i = 0; i < 60; i++) {
        still_lookup_timed(l, 1, 1e-3);
        still_lookup_timed(l, 4, 1e-3 * (1 + 3 * row));
    }
    for (int i = 0; i < 20; i++) still_lookup_accept(l, i);
    const int n = still_lookup_guess(l, guess);
    still_lookup_free(l);
    return n;
}

/* Rows that cost next to nothing are all used, dear ones not at all; times that cannot be
 * change nothing. */
static void weighs_with_what_rows_cost(void **state)
{
    (void)state;
    assert_int_equal(guesses_at(0.02), MOST);
    assert_true(guesses_at(0.3) > 1);
    assert_int_equal(guesses_at(0.95), 0);
    int32_t guess[MOST], again[MOST];
    still_lookup *l = make(MOST);
    for (int i = 0; i < 240; i++) still_lookup_accept(l, i % 200);
    const int n = still_lookup_guess(l, guess);
    still_lookup_timed(l, 0, 1);
    still_lookup_timed(l, 5, 1); /* before any of one row */
    still_lookup_timed(l, 1, 0);
    still_lookup_timed(l, 1, -1);
    assert_int_equal(still_lookup_guess(l, again), n);
    still_lookup_free(l);
}

static void forgets(void **state)
{
    (void)state;
    int32_t guess[MOST], tok[64];
    uint32_t seed = 8;
    still_lookup *l = make(MOST);
    for (int i = 0; i < 64; i++) tok[i] = (int32_t)i;
    accept_all(l, tok, 64);
    still_lookup_reset(l);
    accept_all(l, tok, 32);
    assert_int_equal(still_lookup_guess(l, guess), 0);
    /* What lies further back than the span is gone, and a ring that has gone round several
     * times still finds what is in it. */
    for (int64_t i = 0; i < 3 * SPAN; i++)
        still_lookup_accept(l, 1000 + (int32_t)(next(&seed) % 100000000));
    accept_all(l, tok, 40);
    assert_int_equal(still_lookup_guess(l, guess), 0);
    for (int64_t i = 0; i < SPAN - 100; i++)
        still_lookup_accept(l, 1000 + (int32_t)(next(&seed) % 100000000));
    accept_all(l, tok, 24);
    assert_true(still_lookup_guess(l, guess) > 0);
    assert_int_equal(guess[0], tok[24]);
    still_lookup_free(l);
}

static void respects_the_most(void **state)
{
    (void)state;
    still_error e;
    still_lookup *l;
    int32_t guess[32];
    assert_int_equal(still_lookup_new(-1, &l, &e), STILL_E_ARG);
    assert_int_equal(still_lookup_new(32, &l, &e), STILL_E_ARG);
    assert_null(l);
    still_lookup_free(l);
    const int most[] = {2, 3, 31};
    for (int k = 0; k < 3; k++) {
        l = make(most[k]);
        assert_int_equal(still_lookup_guess(l, guess), 0);
        for (int i = 0; i < 3000; i++) still_lookup_accept(l, i % 40);
        assert_int_equal(still_lookup_guess(l, guess), most[k]);
        still_lookup_free(l);
    }
    l = make(0);
    for (int i = 0; i < 3000; i++) still_lookup_accept(l, i % 40);
    assert_int_equal(still_lookup_guess(l, guess), MOST);
    still_lookup_free(l);
}

RUN_TESTS(cmocka_unit_test(follows_a_copy), cmocka_unit_test(goes_round_a_loop),
          cmocka_unit_test(gives_up_where_it_is_wrong),
          cmocka_unit_test(weighs_with_what_rows_cost), cmocka_unit_test(forgets),
          cmocka_unit_test(respects_the_most))
