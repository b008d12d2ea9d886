/* test_score.c - what scores say of tokens: which of two is kept. */
#include <math.h>

#include "../run.h"

#include "ops/hybrid.h"

/* STILL eq. 5 by its definition is its closed form, up to terms of size eps. */
static void test_s3(void **state)
{
    (void)state;
    const sti_score *s3 = sti_score_at(STI_SCORE_S3);
    const double eps = 1e-9, logit[] = {0.5, -1, 2, 0.25, 1.5};
    enum { N = sizeof logit / sizeof *logit };
    double sum = 0;
    for (int i = 0; i < N; i++) sum += exp(logit[i]);
    const sti_score_stats stats = {.self = exp(logit[N - 1]) / sum, .eps = eps};
    const double want = s3->definition(logit, N, eps), got = s3->arrive(&stats);
    assert_true(fabs(got - want) < 1e-6);
    assert_true(got > 0);
}

/* A key unlike the others of its chunk stays; the first token of a text stays before
 * any, since attention that has nowhere to go rests there. */
static void test_distinct(void **state)
{
    (void)state;
    const sti_score *distinct = sti_score_at(STI_SCORE_DISTINCT);
    const double like =
                     distinct->retire(&(sti_score_end){.likeness = 1, .position = 9}),
                 unlike =
                     distinct->retire(&(sti_score_end){.likeness = -1, .position = 8}),
                 first = distinct->retire(&(sti_score_end){.likeness = 1});
    assert_true(like < unlike && unlike < first);
}

/* Of keys alike the later one stays, and of keys that differ by a tenth the later one
 * after 10,000 tokens; not even a stream of millions outweighs the first token. */
static void test_distinct_recent(void **state)
{
    (void)state;
    const sti_score *distinct = sti_score_at(STI_SCORE_DISTINCT);
    const double
        at = distinct->retire(&(sti_score_end){.likeness = 0.5, .position = 7}),
        next = distinct->retire(&(sti_score_end){.likeness = 0.5, .position = 8}),
        soon = distinct->retire(&(sti_score_end){.likeness = 0.6, .position = 9900}),
        late = distinct->retire(&(sti_score_end){.likeness = 0.6, .position = 10100}),
        end = distinct->retire(&(sti_score_end){.likeness = -1, .position = 1 << 30});
    assert_true(at < next && soon < at && at < late);
    assert_true(end < distinct->retire(&(sti_score_end){.likeness = 1}));
}

static void test_keynorm_and_random(void **state)
{
    (void)state;
    const sti_score *norm = sti_score_at(STI_SCORE_KEYNORM),
                    *random = sti_score_at(STI_SCORE_RANDOM);
    assert_true(norm->arrive(&(sti_score_stats){.key_norm = 1}) >
                norm->arrive(&(sti_score_stats){.key_norm = 2}));
    double sum = 0;
    for (int i = 0; i < 1000; i++) {
        const double x = random->arrive(&(sti_score_stats){.seed = 3, .position = i});
        assert_true(x >= 0 && x < 1 && (double)(float)x == x);
        sum += x;
    }
    assert_true(fabs(sum / 1000 - 0.5) < 0.05);
}

RUN_TESTS(cmocka_unit_test(test_s3), cmocka_unit_test(test_distinct),
          cmocka_unit_test(test_distinct_recent),
          cmocka_unit_test(test_keynorm_and_random))
