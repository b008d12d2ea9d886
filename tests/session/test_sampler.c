/* Sampling: every setting does what its name says, on logits small enough to check. */
#include <math.h>

#include "../run.h"

#include "base/random.h"
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
        assert_int_equal(still_sampler_sample(s, logits, &id, NULL), STILL_OK);
        count[id]++;
    }
    still_sampler_free(s);
}

static void greedy_takes_the_first_of_equals(void **state)
{
    (void)state;
    still_sampler *s =
        sampler((still_sampler_params){.size = sizeof(still_sampler_params)});
    int32_t id;
    assert_int_equal(still_sampler_sample(s, logits, &id, NULL), STILL_OK);
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
        histogram(STILL_PARAMS(still_sampler_params, .temperature = T, .seed = 11),
                  count);
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
    histogram(
        STILL_PARAMS(still_sampler_params, .temperature = 1, .top_k = 3, .seed = 1),
        count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    /* p = .292 .292 .177 .107 ...: 0.6 is passed by the third. */
    histogram(
        STILL_PARAMS(still_sampler_params, .temperature = 1, .top_p = 0.6f, .seed = 2),
        count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    /* exp(1.5 - 2) = .607, exp(1 - 2) = .368 */
    histogram(
        STILL_PARAMS(still_sampler_params, .temperature = 1, .min_p = 0.5f, .seed = 3),
        count);
    for (int i = 0; i < V; i++)
        assert_int_equal(count[i] > 0, i == 1 || i == 3 || i == 4);
    histogram(
        STILL_PARAMS(still_sampler_params, .temperature = 1, .top_k = 1, .seed = 4),
        count);
    assert_int_equal(count[1], DRAWS);
}

/* ---- Exactly at the boundary --------------------------------------------- */

/* The tokens that can be drawn, a bit each. No weight below is under 1/40 of the sum, so
 * a token that 2000 draws miss is one that was cut. */
static unsigned drawn(still_sampler_params p, const float x[V])
{
    unsigned seen = 0;
    still_sampler *s = sampler(p);
    for (int i = 0; i < 2000; i++) {
        int32_t id;
        assert_int_equal(still_sampler_sample(s, x, &id, NULL), STILL_OK);
        seen |= 1u << id;
    }
    still_sampler_free(s);
    return seen;
}

enum { ALL = (1 << V) - 1 };
/* Four of weight 1, in the odd places, and four that cannot be drawn: sums are exact. */
static const float four[V] = {-INFINITY, 0, -INFINITY, 0, -INFINITY, 0, -INFINITY, 0};
enum { FOUR = 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7 };

/* The smallest set of at least the mass asked for: at equality nothing more. */
static void top_p_stops_at_the_mass(void **state)
{
    (void)state;
    const still_sampler_params p = {.size = sizeof p, .temperature = 1, .seed = 21};
    still_sampler_params q = p;
    q.top_p = 0.5f;
    assert_int_equal(drawn(q, four), 1 << 1 | 1 << 3); /* equals: the lower ids */
    q.top_p = nextafterf(0.5f, 1);
    assert_int_equal(drawn(q, four), 1 << 1 | 1 << 3 | 1 << 5);
    q.top_p = nextafterf(0.5f, 0);
    assert_int_equal(drawn(q, four), 1 << 1 | 1 << 3);
    q.top_p = 1e-30f; /* never none */
    assert_int_equal(drawn(q, four), 1 << 1);
    q.top_p = nextafterf(1, 0);
    assert_int_equal(drawn(q, four), FOUR);
    q.top_p = 1;
    assert_int_equal(drawn(q, four), FOUR);
    /* Close to 1 it cuts all the same: 7 of 7.2 is 0.97. */
    const float tail[V] = {0, 0, 0, 0, 0, 0, 0, -1.5f};
    q.top_p = 0.96f;
    assert_int_equal(drawn(q, tail), ALL & ~(1 << 7));
    q.top_p = 0.98f;
    assert_int_equal(drawn(q, tail), ALL);
    q.temperature = 4; /* so that every token is likely enough to be seen */
    assert_int_equal(drawn(q, logits), ALL);
    q.top_p = 0; /* not asked for */
    assert_int_equal(drawn(q, logits), ALL);
}

/* A weight relative to the best's that is the bound itself stays. */
static void min_p_keeps_the_bound(void **state)
{
    (void)state;
    const float x[V] = {2, 1, 0, 2, 1, 0, -INFINITY, 1.5f};
    still_sampler_params p = {.size = sizeof p, .temperature = 1, .seed = 22};
    p.min_p = expf(-1);
    assert_int_equal(drawn(p, x), 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 7);
    p.min_p = nextafterf(expf(-1), 1);
    assert_int_equal(drawn(p, x), 1 << 0 | 1 << 3 | 1 << 7);
    p.min_p = 1; /* the best, all of them */
    assert_int_equal(drawn(p, x), 1 << 0 | 1 << 3);
    p.min_p = expf(-2);
    assert_int_equal(drawn(p, x), ALL & ~(1 << 6));
    /* It is temperature that makes logits weights: e^(-1 / 0.5) is below e^-1. */
    p.temperature = 0.5f;
    p.min_p = expf(-1);
    assert_int_equal(drawn(p, x), 1 << 0 | 1 << 3 | 1 << 7);
}

static void top_k_of_equals(void **state)
{
    (void)state;
    const float x[V] = {1, 2, 1, 2, 1, 2, 1, 0};
    still_sampler_params p = {.size = sizeof p, .temperature = 2, .seed = 23};
    static const struct {
        int k;
        unsigned set;
    } c[] = {{1, 1 << 1},
             {2, 1 << 1 | 1 << 3},
             {3, 1 << 1 | 1 << 3 | 1 << 5},
             {4, 1 << 1 | 1 << 3 | 1 << 5 | 1 << 0},
             {6, 1 << 1 | 1 << 3 | 1 << 5 | 1 << 0 | 1 << 2 | 1 << 4},
             {7, ALL & ~(1 << 7)},
             {8, ALL},
             {9, ALL},
             {0, ALL}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        p.top_k = c[i].k;
        assert_int_equal(drawn(p, x), c[i].set);
    }
    /* Top-p is of the mass that top-k left: 3 of 3, not 3 of 7.1. */
    p.temperature = 1;
    p.top_k = 3;
    p.top_p = 0.9f;
    assert_int_equal(drawn(p, x), 1 << 1 | 1 << 3 | 1 << 5);
}

/* ---- Repetition ---------------------------------------------------------- */

static int32_t greedy_after(float penalty, const int32_t *seen, int n, const float x[V])
{
    still_sampler *s =
        sampler(STILL_PARAMS(still_sampler_params, .repeat_penalty = penalty));
    int32_t id;
    for (int i = 0; i < n; i++) still_sampler_accept(s, seen[i]);
    assert_int_equal(still_sampler_sample(s, x, &id, NULL), STILL_OK);
    still_sampler_free(s);
    return id;
}

/* A penalty makes a token less likely whatever its logit's sign, once however often it
 * was seen; below 1 it is a reward; ids that are no tokens are no place to write to. */
static void penalty_by_sign(void **state)
{
    (void)state;
    const float minus[V] = {-2, -3, -5, -6, -7, -8, -9, -9};
    const float mixed[V] = {0.5f, 0, -1, -1, -1, -1, -1, -1};
    const float often[V] = {6, 2, 1, 1, 1, 1, 1, 1};
    assert_int_equal(greedy_after(2, (int32_t[]){0}, 1, minus), 1);    /* -4 */
    assert_int_equal(greedy_after(1.4f, (int32_t[]){0}, 1, minus), 0); /* -2.8 */
    assert_int_equal(greedy_after(0.5f, (int32_t[]){1}, 1, minus), 1); /* -1.5 */
    assert_int_equal(greedy_after(1e9f, (int32_t[]){0}, 1, mixed), 0); /* still > 0 */
    assert_int_equal(greedy_after(1e9f, (int32_t[]){1}, 1, mixed), 0);
    assert_int_equal(greedy_after(2, (int32_t[]){0, 0, 0}, 3, often), 0); /* 3 > 2 */
    assert_int_equal(greedy_after(2, (int32_t[]){-1, V, INT32_MIN}, 3, often), 0);
    assert_int_equal(greedy_after(1, (int32_t[]){0}, 1, often), 0);
}

static void penalty_moves_on(void **state)
{
    (void)state;
    still_sampler *s = sampler(
        STILL_PARAMS(still_sampler_params, .repeat_penalty = 2, .repeat_last = 2));
    int32_t id;
    still_sampler_accept(s, 1);
    still_sampler_sample(s, logits, &id, NULL);
    assert_int_equal(id, 4);
    still_sampler_accept(s, 4);
    still_sampler_sample(s, logits, &id, NULL);
    assert_int_equal(id, 3); /* 2/2 = 1 for both seen ones, 1.5 is best */
    still_sampler_accept(s, 3);
    still_sampler_sample(s, logits, &id, NULL);
    assert_int_equal(id, 1); /* it has left the last two */
    still_sampler_free(s);
}

/* Whatever enters the last tokens and leaves them, and however often: those that are
 * among them are penalized once, the others are not. */
static void penalty_of_the_last(void **state)
{
    (void)state;
    enum { LAST = 5, TOKENS = 400 };
    int32_t seen[TOKENS], id;
    still_sampler *s = sampler(
        STILL_PARAMS(still_sampler_params, .repeat_penalty = 2, .repeat_last = LAST));
    for (int n = 0; n < TOKENS; n++) {
        float x[V], most = 0;
        int best = 0;
        seen[n] = (int32_t)(sti_mix64((uint64_t)n) % (V + 2)) - 1; /* or no token */
        still_sampler_accept_prompt(s, seen[n]);
        for (int i = 0; i < V; i++) {
            bool held = false;
            for (int k = n; k >= 0 && k > n - LAST; k--) held = held || seen[k] == i;
            x[i] = 1 + (float)(sti_mix64((uint64_t)(n * V + i)) % 1000) / 500;
            const float left = held ? x[i] / 2 : x[i];
            if (left > most) {
                most = left;
                best = i;
            }
        }
        assert_int_equal(still_sampler_sample(s, x, &id, NULL), STILL_OK);
        assert_int_equal(id, best);
    }
    still_sampler_free(s);
}

/* Presence counts once, frequency each time, and both what was generated alone. */
static void penalties_of_what_was_generated(void **state)
{
    (void)state;
    const float x[V] = {3, 2.5f, 0, 0, 0, 0, 0, 0};
    static const struct {
        float presence, frequency;
        int times;
        int32_t best;
    } c[] = {{0.4f, 0, 1, 0},     {0.6f, 0, 1, 1},    {0.4f, 0, 5, 0}, {0, 0.3f, 1, 0},
             {0, 0.3f, 2, 1},     {0.3f, 0.3f, 1, 1}, {0.6f, 0, 0, 0}, {0, 9, 0, 0},
             {0.9f, -0.2f, 1, 1}, {0.9f, -0.2f, 3, 0}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        still_sampler *s = sampler(STILL_PARAMS(still_sampler_params,
                                                .presence_penalty = c[i].presence,
                                                .frequency_penalty = c[i].frequency));
        int32_t id;
        for (int k = 0; k < 7; k++) still_sampler_accept_prompt(s, 0);
        for (int k = 0; k < c[i].times; k++) still_sampler_accept(s, 0);
        still_sampler_accept(s, V); /* no place to count at */
        assert_int_equal(still_sampler_sample(s, x, &id, NULL), STILL_OK);
        assert_int_equal(id, c[i].best);
        still_sampler_free(s);
    }
    /* The repeat penalty sees the prompt too. */
    still_sampler *s = sampler(STILL_PARAMS(still_sampler_params, .repeat_penalty = 2));
    int32_t id;
    still_sampler_accept_prompt(s, 0);
    assert_int_equal(still_sampler_sample(s, x, &id, NULL), STILL_OK);
    assert_int_equal(id, 1);
    still_sampler_free(s);
}

static void biases_and_masks(void **state)
{
    (void)state;
    still_logit_bias bias[] = {{1, -INFINITY}, {4, -0.4f}, {2, 2.4f}};
    still_sampler_params p = {.size = sizeof p, .bias = bias, .n_bias = 3};
    still_sampler *s = sampler(p);
    still_error e;
    int32_t id;
    bias[0].bias = 100; /* they were copied */
    assert_int_equal(still_sampler_sample(s, logits, &id, NULL), STILL_OK);
    assert_int_equal(id, 4); /* 1.6, before 1.5 and 1.4 */
    uint64_t allowed = 1u << 2 | 1u << 1 | 1u << 5;
    assert_int_equal(still_sampler_sample_masked(s, logits, &allowed, &id, &e),
                     STILL_OK);
    assert_int_equal(id, 2);
    allowed = 1u << 1; /* the one that is forbidden */
    assert_int_equal(still_sampler_sample_masked(s, logits, &allowed, &id, &e),
                     STILL_E_ARG);
    still_sampler_free(s);
    /* Draws stay among them, in their shares. */
    s = sampler(STILL_PARAMS(still_sampler_params, .temperature = 1, .seed = 8));
    int count[V] = {0};
    allowed = 1u << 0 | 1u << 3 | 1u << 7;
    for (int i = 0; i < DRAWS; i++) {
        assert_int_equal(still_sampler_sample_masked(s, logits, &allowed, &id, &e),
                         STILL_OK);
        count[id]++;
    }
    still_sampler_free(s);
    const double sum = exp(0.1) + exp(1.5) + exp(1);
    assert_int_equal(count[0] + count[3] + count[7], DRAWS);
    assert_true(fabs(count[3] - DRAWS * exp(1.5) / sum) < 500);
    assert_true(fabs(count[0] - DRAWS * exp(0.1) / sum) < 500);
}

/* Only a part of a vocabulary is sorted for top-p; what is drawn is as if all were. */
static void top_p_of_many(void **state)
{
    (void)state;
    enum { MANY = 600 };
    static float x[MANY];
    still_error e;
    still_sampler *s;
    for (int i = 0; i < MANY; i++) x[(i * 7) % MANY] = -0.002f * (float)i;
    for (float p = 0.05f; p < 1; p += 0.3f) {
        double sum = 0, have = 0;
        int kept = 0, seen[MANY] = {0};
        for (int i = 0; i < MANY; i++) sum += exp(-0.002 * i);
        while (have < (double)p * sum) have += exp(-0.002 * kept++);
        assert_int_equal(still_sampler_new(&STILL_PARAMS(still_sampler_params,
                                                         .temperature = 1, .top_p = p),
                                           MANY, &s, &e),
                         STILL_OK);
        int rank_of_worst = 0;
        for (int i = 0; i < 6000; i++) {
            int32_t id;
            assert_int_equal(still_sampler_sample(s, x, &id, &e), STILL_OK);
            seen[id]++;
        }
        for (int i = 0; i < MANY; i++)
            if (seen[(i * 7) % MANY]) rank_of_worst = i;
        assert_in_range(rank_of_worst, kept - 6, kept);
        still_sampler_free(s);
    }
}

static void same_seed_same_draws(void **state)
{
    (void)state;
    still_sampler *a =
        sampler(STILL_PARAMS(still_sampler_params, .temperature = 1, .seed = 5));
    still_sampler *b =
        sampler(STILL_PARAMS(still_sampler_params, .temperature = 1, .seed = 5));
    still_sampler *c =
        sampler(STILL_PARAMS(still_sampler_params, .temperature = 1, .seed = 6));
    int differ = 0;
    for (int i = 0; i < 200; i++) {
        int32_t x, y, z;
        still_sampler_sample(a, logits, &x, NULL);
        still_sampler_sample(b, logits, &y, NULL);
        still_sampler_sample(c, logits, &z, NULL);
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
    const still_sampler_params bad[] = {
        {.size = sizeof(still_sampler_params), .temperature = -1},
        {.size = sizeof(still_sampler_params), .temperature = NAN},
        {.size = sizeof(still_sampler_params), .top_p = 1.5f},
        {.size = sizeof(still_sampler_params), .min_p = -0.1f},
        {.size = sizeof(still_sampler_params), .top_k = -2},
        {.size = sizeof(still_sampler_params), .repeat_last = -1},
        {.size = sizeof(still_sampler_params), .repeat_penalty = INFINITY},
        {.size = sizeof(still_sampler_params), .presence_penalty = NAN},
        {.size = sizeof(still_sampler_params), .frequency_penalty = INFINITY},
        {.size = sizeof(still_sampler_params), .n_bias = -1},
        {.size = sizeof(still_sampler_params), .n_bias = 1},
        {.size = sizeof(still_sampler_params),
         .bias = &(still_logit_bias){V, 1},
         .n_bias = 1},
        {.size = sizeof(still_sampler_params),
         .bias = &(still_logit_bias){-1, 1},
         .n_bias = 1},
        {.size = sizeof(still_sampler_params),
         .bias = &(still_logit_bias){0, NAN},
         .n_bias = 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(still_sampler_new(&bad[i], V, &s, &e), STILL_E_ARG);
    float nan_logits[V] = {0, 0, NAN};
    s = sampler((still_sampler_params){.size = sizeof(still_sampler_params)});
    int32_t id;
    assert_int_equal(still_sampler_sample(s, nan_logits, &id, &e), STILL_E_NUMERIC);
    still_sampler_free(s);
}

RUN_TESTS(cmocka_unit_test(greedy_takes_the_first_of_equals),
          cmocka_unit_test(temperature_gives_softmax),
          cmocka_unit_test(filters_cut_where_they_should),
          cmocka_unit_test(top_p_stops_at_the_mass),
          cmocka_unit_test(min_p_keeps_the_bound), cmocka_unit_test(top_k_of_equals),
          cmocka_unit_test(penalty_by_sign), cmocka_unit_test(penalty_moves_on),
          cmocka_unit_test(penalty_of_the_last),
          cmocka_unit_test(penalties_of_what_was_generated),
          cmocka_unit_test(biases_and_masks), cmocka_unit_test(top_p_of_many),
          cmocka_unit_test(same_seed_same_draws),
          cmocka_unit_test(bad_settings_and_logits))
