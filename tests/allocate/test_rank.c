/* test_rank.c - how much a head looks back at a fact: all of its attention is 1, none of
 * it is 0, and the best query head of a group counts. */
#include <math.h>
#include <stdlib.h>

#include "../eval/tiny.h"
#include "allocate/allocate.h"

enum { N = 40, ANSWER = 30, HEADS = 4 }; /* 2 layers of 2 kv heads */

/* gain of the four heads for a value and an answer of n tokens */
static void rank(still_model *m, sti_probe_span value, int n, double gain[HEADS])
{
    int32_t tok[N];
    still_error err;
    assert_int_equal(m->cfg.layers * m->cfg.kv_heads, HEADS);
    for (int i = 0; i < N; i++) tok[i] = (i * 37 + i * i) % VOCAB;
    for (int h = 0; h < HEADS; h++) gain[h] = 0;
    const sti_probe p = {
        .tok = tok, .n = N, .value = value, .answer = {.first = ANSWER, .n = n}};
    must(sti_rank_heads(m, &p, gain, &err), &err);
}

static void test_all_and_nothing(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    double gain[HEADS];
    rank(m, (sti_probe_span){0, N}, N - ANSWER, gain);
    for (int h = 0; h < HEADS; h++) assert_true(fabs(gain[h] - 1) < 1e-9);
    rank(m, (sti_probe_span){5, 0}, N - ANSWER, gain);
    for (int h = 0; h < HEADS; h++) assert_true(gain[h] == 0);
    /* The query that predicts the answer's first token does not see it. */
    rank(m, (sti_probe_span){ANSWER, 1}, 1, gain);
    for (int h = 0; h < HEADS; h++) assert_true(gain[h] == 0);
    rank(m, (sti_probe_span){ANSWER - 1, 1}, 1, gain);
    for (int h = 0; h < HEADS; h++) assert_true(gain[h] > 0 && gain[h] < 1);
    still_model_free(m);
}

/* One head's weights on all tokens add up to 1, the larger ones of two heads to more. */
static void test_best_of_group(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    double sum[HEADS] = {0}, gain[HEADS];
    assert_true(m->cfg.heads > m->cfg.kv_heads);
    for (int j = 0; j < N; j++) {
        rank(m, (sti_probe_span){j, 1}, 1, gain);
        for (int h = 0; h < HEADS; h++) sum[h] += gain[h];
    }
    for (int h = 0; h < HEADS; h++) assert_true(sum[h] > 1 + 1e-4 && sum[h] < 2);
    still_model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_and_nothing),
                                       cmocka_unit_test(test_best_of_group)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
