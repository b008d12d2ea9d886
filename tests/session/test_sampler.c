/* Sampling: every setting does what its name says, on logits small enough to check. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "still.h"

enum { V = 8, DRAWS = 40000 };
static const float logits[V] = {0.1f, 2.0f, -1.0f, 1.5f, 2.0f, -3.0f, 0.5f, 1.0f};

static still_sampler *sampler(still_sampler_params p)
{
    still_sampler *s;
    still_error e;
    assert_int_equal(still_sampler_new(&p, V, &s, &e), STILL_OK);
    return s;
}

static void histogram(still_sampler_params p, int count[V])
{
    still_sampler *s = sampler(p);
    for (int i = 0; i < V; i++) count[i] = 0;
    for (int i = 0; i < DRAWS; i++) {
        int32_t id;
        assert_int_equal(still_sampler_pick(s, logits, &id, NULL), STILL_OK);
        count[id]++;
    }
    still_sampler_free(s);
}

static void greedy_takes_the_first_of_equals(void **state)
{
    (void)state;
    still_sampler *s = sampler((still_sampler_params){0});
    int32_t id;
    assert_int_equal(still_sampler_pick(s, logits, &id, NULL), STILL_OK);
    assert_int_equal(id, 1);
    still_sampler_free(s);
}

/* Frequencies follow softmax(logits / T) within five standard deviations. */
static void temperature_gives_softmax(void **state)
{
    (void)state;
    for (float T = 0.5f; T <= 2; T *= 2) {
        int count[V];
        double p[V], sum = 0;
        histogram((still_sampler_params){.temperature = T, .seed = 11}, count);
        for (int i = 0; i < V; i++) sum += p[i] = exp(logits[i] / T);
        for (int i = 0; i < V; i++) {
            double want = DRAWS * p[i] / sum;
            assert_true(fabs(count[i] - want) < 5 * sqrt(want) + 1);
        }
    }
}

static void filters_cut_where_they_should(void **state)
{
    (void)state;
    int count[V];
    histogram((still_sampler_params){.temperature = 1, .top_k = 3, .seed = 1}, count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    /* p = .292 .292 .177 .107 ...: 0.6 is passed by the third. */
    histogram((still_sampler_params){.temperature = 1, .top_p = 0.6f, .seed = 2},
              count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    /* exp(1.5 - 2) = .607, exp(1 - 2) = .368 */
    histogram((still_sampler_params){.temperature = 1, .min_p = 0.5f, .seed = 3},
              count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    histogram((still_sampler_params){.temperature = 1, .top_k = 1, .seed = 4}, count);
    assert_int_equal(count[1], DRAWS);
}

static void penalty_moves_on(void **state)
{
    (void)state;
    still_sampler *s =
        sampler((still_sampler_params){.repeat_penalty = 2, .repeat_last = 2});
    int32_t id;
    still_sampler_accept(s, 1);
    still_sampler_pick(s, logits, &id, NULL);
    assert_int_equal(id, 4);
    still_sampler_accept(s, 4);
    still_sampler_pick(s, logits, &id, NULL);
    assert_int_equal(id, 3); /* 2/2 = 1 for both seen ones, 1.5 is best */
    still_sampler_accept(s, 3);
    still_sampler_pick(s, logits, &id, NULL);
    assert_int_equal(id, 1); /* it has left the last two */
    still_sampler_free(s);
}

static void same_seed_same_draws(void **state)
{
    (void)state;
    still_sampler *a = sampler((still_sampler_params){.temperature = 1, .seed = 5});
    still_sampler *b = sampler((still_sampler_params){.temperature = 1, .seed = 5});
    still_sampler *c = sampler((still_sampler_params){.temperature = 1, .seed = 6});
    int differ = 0;
    for (int i = 0; i < 200; i++) {
        int32_t x, y, z;
        still_sampler_pick(a, logits, &x, NULL);
        still_sampler_pick(b, logits, &y, NULL);
        still_sampler_pick(c, logits, &z, NULL);
        assert_int_equal(x, y);
        differ += x != z;
    }
    assert_true(differ > 50);
    still_sampler_free(a);
    still_sampler_free(b);
    still_sampler_free(c);
}

static void bad_settings_and_logits(void **state)
{
    (void)state;
    still_sampler *s;
    still_error e;
    const still_sampler_params bad[] = {{.temperature = -1},
                                        {.temperature = NAN},
                                        {.top_p = 1.5f},
                                        {.min_p = -0.1f},
                                        {.top_k = -2},
                                        {.repeat_last = -1},
                                        {.repeat_penalty = INFINITY}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(still_sampler_new(&bad[i], V, &s, &e), STILL_E_ARG);
    float nan_logits[V] = {0, 0, NAN};
    s = sampler((still_sampler_params){0});
    int32_t id;
    assert_int_equal(still_sampler_pick(s, nan_logits, &id, &e), STILL_E_NUMERIC);
    still_sampler_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_first_of_equals),
        cmocka_unit_test(temperature_gives_softmax),
        cmocka_unit_test(filters_cut_where_they_should),
        cmocka_unit_test(penalty_moves_on),
        cmocka_unit_test(same_seed_same_draws),
        cmocka_unit_test(bad_settings_and_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
