/* Saliency: the two scores of the whole past against plain loops, agreement against
 * figures worked out by hand, and a run's result against what must hold of it. */
#include "../../run.h"
#include "../tiny.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "eval/saliency/saliency.h"

enum { TOKENS = 61, CHUNK = 8 };

static void near(double a, double b, double within, const char *what)
{
    if (!(fabs(a - b) <= within)) fail_msg("%s: %.9g, expected %.9g", what, a, b);
}

/* ---- Agreement ----------------------------------------------------------- */

static still_agreement agree(const float *a, const float *b, int chunk, int chunks,
                             int select)
{
    still_agreement out;
    still_error e;
    must(sti_saliency_agreement(a, b, chunk, chunks, select, &out, &e), &e);
    return out;
}

static void agreement_by_hand(void **state)
{
    (void)state;
    const float up[] = {1, 2, 3, 4}, down[] = {4, 3, 2, 1}, flat[] = {5, 5, 5, 5},
                mixed[] = {10, 30, 20, 40}, tied[] = {1, 2, 2, 3};
    still_agreement a = agree(up, up, 4, 1, 2);
    near(a.overlap, 1, 0, "itself: overlap");
    near(a.correlation, 1, 1e-12, "itself: correlation");
    near(a.captured, 0.7, 1e-12, "itself: captured");
    a = agree(up, down, 4, 1, 2);
    near(a.overlap, 0, 0, "reversed: overlap");
    near(a.correlation, -1, 1e-12, "reversed: correlation");
    near(a.captured, 0.3, 1e-12, "reversed: captured");
    a = agree(up, mixed, 4, 1, 2); /* 4, 3 against 4, 2: 1 - 6 * 2 / (4 * 15) */
    near(a.overlap, 0.5, 0, "mixed: overlap");
    near(a.correlation, 0.8, 1e-12, "mixed: correlation");
    near(a.captured, 0.6, 1e-12, "mixed: captured");
    /* Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 / sqrt(4.5 * 5). */
    near(agree(tied, up, 4, 1, 2).correlation, 4.5 / sqrt(22.5), 1e-12, "ties");
    /* Of equals the earlier token is chosen: 0 and 1, which `down` ranks first. */
    a = agree(flat, down, 4, 1, 2);
    near(a.overlap, 1, 0, "equals: overlap");
    assert_true(isnan(a.correlation));
    near(agree(up, (const float[]){0, 0, 0, 0}, 4, 1, 2).captured, 0.5, 0, "nothing");
}

/* Chunks are compared one by one, and those without an order do not count. */
static void agreement_over_chunks(void **state)
{
    (void)state;
    const float a[] = {1, 2, 3, 4, 5, 6, 7, 7, 7}, b[] = {11, 12, 13, 3, 2, 1, 1, 2, 3};
    near(agree(a, b, 3, 2, 1).overlap, 0.5, 0, "overlap");
    near(agree(a, b, 3, 2, 1).correlation, 0, 1e-12, "correlation");
    near(agree(a, b, 3, 3, 1).correlation, 0, 1e-12, "one is flat");
    near(agree(a, b, 3, 3, 3).overlap, 1, 0, "all are chosen");
    near(agree(a, b, 3, 3, 3).captured, 1, 1e-12, "all are captured");
}

/* ---- The whole past ------------------------------------------------------ */

enum { H = 4, G = 2, D = 6 };

static double logit(const sti_full_attention_args *a, int h, int t, int j)
{
    double dot = 0;
    for (int d = 0; d < D; d++)
        dot += (double)a->q[(t * H + h) * D + d] *
               (double)a->k[(j * G + h / (H / G)) * D + d];
    return dot / sqrt(D);
}

/* Token j of selection head s, query by query. */
static void by_definition(const sti_full_attention_args *a, int s, int j, double *whole,
                          double *received)
{
    const sti_score *s3 = sti_score_at(STI_SCORE_S3);
    const int group = H / a->S;
    int queries = 0;
    *whole = *received = 0;
    for (int h = s * group; h < (s + 1) * group; h++) {
        double row[TOKENS];
        queries = 0;
        for (int t = j; t < a->T; t++) {
            const int first = a->window && t >= a->window ? t - a->window + 1 : 0;
            double sum = 0, weight;
            for (int i = first; i <= t; i++) row[i - first] = logit(a, h, t, i);
            for (int i = first; i <= t; i++) sum += exp(row[i - first]);
            weight = j >= first ? exp(row[j - first]) / sum : 0;
            if (t == j) *whole += s3->definition(row, t + 1 - first, a->eps) / group;
            if (t / a->chunk < j / a->chunk + 2) continue;
            *received += weight / group;
            queries++;
        }
    }
    *received = queries ? *received / queries : NAN;
}

static void past_is_the_definition(void **state)
{
    (void)state;
    still_error e;
    sti_pool *pool;
    float q[TOKENS * H * D], k[TOKENS * G * D], whole[H * TOKENS], received[H * TOKENS];
    for (size_t i = 0; i < sizeof q / sizeof *q; i++)
        q[i] = (float)((double)(sti_mix64(i) >> 40) * 0x1p-22 - 2);
    for (size_t i = 0; i < sizeof k / sizeof *k; i++)
        k[i] = (float)((double)(sti_mix64(~i) >> 40) * 0x1p-22 - 2);
    must(sti_pool_new(2, &pool, &e), &e);
    const int cases[][4] = {/* T, S, window, chunk */
                            {TOKENS, G, 0, 8},
                            {TOKENS, H, 0, 5},
                            {TOKENS, G, 19, 4},
                            {33, H, 7, 16},
                            {1, G, 0, 8}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int T = cases[c][0];
        const sti_full_attention_args a = {.q = q,
                                           .k = k,
                                           .T = T,
                                           .H = H,
                                           .G = G,
                                           .D = D,
                                           .S = cases[c][1],
                                           .window = cases[c][2],
                                           .chunk = cases[c][3],
                                           .eps = 1e-6,
                                           .whole = whole,
                                           .received = received};
        must(sti_saliency_full_attention(&a, pool, &e), &e);
        for (int s = 0; s < a.S; s++)
            for (int t = 0; t < T; t++) {
                double want, from;
                by_definition(&a, s, t, &want, &from);
                near((double)whole[s * T + t], want, 2e-5 * (1 + fabs(want)), "whole");
                assert_true(isnan(from) == (bool)isnan(received[s * T + t]));
                if (!isnan(from))
                    near((double)received[s * T + t], from, 1e-6, "received");
            }
    }
    sti_pool_free(pool);
}

/* ---- A run --------------------------------------------------------------- */

static still_method small(const char *name)
{
    return method_of(name, CHUNK);
}

static const int32_t *text(void)
{
    static int32_t tok[TOKENS];
    for (int i = 0; i < TOKENS; i++) tok[i] = (int32_t)(sti_mix64((uint64_t)i) % VOCAB);
    return tok;
}

static still_saliency *run(still_model *m, const still_method *method)
{
    still_error e;
    still_saliency *s;
    const still_saliency_params p = {.size = sizeof p, .method = method};
    must(still_saliency_run(m, text(), TOKENS, &p, &s, &e), &e);
    return s;
}

static size_t cell(const still_saliency *s, int layer, int head, int token)
{
    return ((size_t)layer * (size_t)s->heads + (size_t)head) * (size_t)s->tokens +
           (size_t)token;
}

static void check_head(const still_saliency *s, int l, int h)
{
    int exact = 0;
    for (int t = 0; t < s->tokens; t++) {
        const size_t at = cell(s, l, h, t);
        assert_true(isfinite(s->local[at]) && isfinite(s->whole[at]));
        /* In the first chunk the window of the score is the whole past. */
        if (t < CHUNK)
            near((double)s->local[at], (double)s->whole[at], 1e-3, "first chunk");
        if (t >= s->left) {
            assert_true(isnan(s->received[at]));
            assert_int_equal(s->folded[at], -1);
            continue;
        }
        assert_true(s->received[at] >= 0 && s->received[at] <= 1);
        if (s->folded[at] < 0) {
            exact++;
        } else {
            assert_int_equal(s->folded[at] % CHUNK, 0);
            assert_true(s->folded[at] >= (t / CHUNK + 2) * CHUNK);
            assert_true(s->folded[at] < s->tokens);
        }
    }
    const int chosen = s->left / CHUNK * s->method.select;
    assert_int_equal(exact, chosen < s->method.cap ? chosen : s->method.cap);
    assert_int_equal(s->folded[cell(s, l, h, 0)], -1); /* the sink stays */
}

static void a_run_is_sound(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    for (int variant = 0; variant < 3; variant++) {
        still_method how = small("still");
        how.per_head = variant == 1;
        how.cap = variant == 2 ? 3 : how.cap;
        still_saliency *s = run(m, &how);
        assert_int_equal(s->tokens, TOKENS);
        assert_int_equal(s->layers, 2);
        assert_int_equal(s->heads, how.per_head ? m->cfg.heads : m->cfg.kv_heads);
        assert_int_equal(s->left, 48); /* 61 is in chunk 7: 0 to 5 have left */
        double overlap = 0;
        for (int l = 0; l < s->layers; l++)
            for (int h = 0; h < s->heads; h++) {
                check_head(s, l, h);
                const still_agreement *a = &s->with_whole[l * s->heads + h];
                assert_true(a->overlap >= 0 && a->overlap <= 1);
                assert_true(a->correlation >= -1 && a->correlation <= 1);
                overlap += a->overlap / (s->layers * s->heads);
                /* The first chunk does not count. */
                still_agreement again =
                    agree(s->local + cell(s, l, h, CHUNK),
                          s->received + cell(s, l, h, CHUNK), CHUNK, 5, how.select);
                assert_memory_equal(&again, &s->with_received[l * s->heads + h],
                                    sizeof again);
            }
        near(s->mean_whole.overlap, overlap, 1e-12, "mean overlap");
        near(s->mean_received.captured,
             (s->layer_received[0].captured + s->layer_received[1].captured) / 2, 1e-12,
             "mean of layers");
        still_saliency_free(s);
    }
    still_model_free(m);
}

/* Every score in one run is what a run with that score says. */
static void all_scores_are_those_of_their_runs(void **state)
{
    (void)state;
    still_error e;
    still_model *m = open_tiny("cpu");
    still_method how = small("still");
    still_saliency *all;
    const still_saliency_params p = {
        .size = sizeof p, .method = &how, .all_scores = true};
    must(still_saliency_run(m, text(), TOKENS, &p, &all, &e), &e);
    const size_t cells = cell(all, all->layers, 0, 0);
    assert_int_equal(all->scores, STI_SCORE_COUNT);
    for (int i = 0; i < all->scores; i++) {
        snprintf(how.score, sizeof how.score, "%s", all->score_name[i]);
        still_saliency *one = run(m, &how);
        assert_int_equal(one->scores, 0);
        assert_memory_equal(all->by_score + (size_t)i * cells, one->local,
                            cells * sizeof *one->local);
        if (i == 0) /* the method's own: asking for others changes nothing */
            assert_memory_equal(all->folded, one->folded, cells * sizeof *one->folded);
        still_saliency_free(one);
    }
    still_saliency_free(all);
    still_model_free(m);
}

/* A score is its own best friend. */
static void a_score_agrees_with_itself(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = small("still");
    still_saliency *s3 = run(m, &how);
    snprintf(how.score, sizeof how.score, "random");
    still_saliency *random = run(m, &how);
    assert_true(s3->mean_whole.correlation > 0.5);
    assert_true(fabs(random->mean_whole.correlation) < 0.4);
    assert_true(s3->mean_whole.overlap > random->mean_whole.overlap);
    assert_memory_equal(s3->whole, random->whole,
                        cell(s3, s3->layers, 0, 0) * sizeof *s3->whole);
    still_saliency_free(s3);
    still_saliency_free(random);
    still_model_free(m);
}

static void backends_agree(void **state)
{
    (void)state;
    still_model *fast = open_tiny("cpu"), *ref = open_tiny("ref");
    still_method how = small("still");
    still_saliency *a = run(fast, &how), *b = run(ref, &how);
    for (size_t i = 0; i < cell(a, a->layers, 0, 0); i++) {
        near((double)a->local[i], (double)b->local[i], 0.02, "local");
        near((double)a->whole[i], (double)b->whole[i], 0.02, "whole");
    }
    near(a->mean_received.captured, b->mean_received.captured, 0.02, "captured");
    still_saliency_free(a);
    still_saliency_free(b);
    still_model_free(fast);
    still_model_free(ref);
}

/* The teacher's layers are the same whichever of them the method is to replace; an
 * adapter's change what comes after them. */
static void layers_and_adapters(void **state)
{
    (void)state;
    still_error e;
    still_model *m = open_tiny("cpu");
    still_method how = small("still"), last = how;
    last.first_layer = 1;
    still_saliency *all = run(m, &how), *one = run(m, &last);
    assert_int_equal(one->first_layer, 1);
    assert_int_equal(one->layers, 1);
    const size_t layer = cell(all, 1, 0, 0), bytes = layer * sizeof(float);
    assert_memory_equal(all->local + layer, one->local, bytes);
    assert_memory_equal(all->received + layer, one->received, bytes);
    must(sti_model_stand_in(m, &how, &e), &e);
    still_saliency *own = run(m, &how);
    assert_memory_equal(all->local, own->local, bytes);
    assert_memory_not_equal(all->local + layer, own->local + layer, bytes);
    must(sti_model_stand_in(m, NULL, &e), &e);
    still_saliency_free(all);
    still_saliency_free(one);
    still_saliency_free(own);
    still_model_free(m);
}

static bool stop_after_one(void *user, uint64_t done, uint64_t total)
{
    assert_int_equal(total, 2);
    ++*(int *)user;
    return done < 1;
}

static void refusals(void **state)
{
    (void)state;
    still_error e;
    int asked = 0;
    still_model *m = open_tiny("cpu");
    still_method how = small("still"), lolcats = small("lolcats"),
                 softmax = small("softmax"), none = small("still");
    none.select = 0;
    still_saliency *s = (still_saliency *)&e; /* must be taken back */
    still_saliency_params p = {.size = sizeof p, .method = &how};
    assert_int_equal(still_saliency_run(m, text(), 3 * CHUNK, &p, &s, &e), STILL_E_ARG);
    assert_null(s);
    assert_non_null(strstr(e.text, "24 tokens, at least 25"));
    assert_int_equal(still_saliency_run(m, text(), 0, &p, &s, &e), STILL_E_ARG);
    must(still_saliency_run(m, text(), 3 * CHUNK + 1, &p, &s, &e), &e);
    still_saliency_free(s);
    const still_method *wrong[] = {&lolcats, &softmax, &none};
    for (int i = 0; i < 3; i++) {
        p.method = wrong[i];
        assert_int_equal(still_saliency_run(m, text(), TOKENS, &p, &s, &e),
                         STILL_E_ARG);
        assert_non_null(strstr(e.text, "chooses no tokens"));
    }
    int32_t bad[TOKENS] = {0};
    bad[TOKENS - 1] = VOCAB;
    p = STILL_PARAMS(still_saliency_params, .method = &how, .progress = stop_after_one,
                     .user = &asked);
    assert_int_equal(still_saliency_run(m, bad, TOKENS, &p, &s, &e), STILL_E_ARG);
    assert_int_equal(asked, 0);
    assert_int_equal(still_saliency_run(m, text(), TOKENS, &p, &s, &e),
                     STILL_E_CANCELLED);
    assert_int_equal(asked, 1);
    assert_null(s);
    still_saliency_free(NULL);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(agreement_by_hand), cmocka_unit_test(agreement_over_chunks),
          cmocka_unit_test(past_is_the_definition), cmocka_unit_test(a_run_is_sound),
          cmocka_unit_test(all_scores_are_those_of_their_runs),
          cmocka_unit_test(a_score_agrees_with_itself),
          cmocka_unit_test(backends_agree), cmocka_unit_test(layers_and_adapters),
          cmocka_unit_test(refusals))
