/* Sessions on the tiny checkpoints: cuts, batches and failures change nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../run.h"

#include "still.h"

enum { N = 120 };
static const char *const checkpoints[] = {"llama3", "llama3.1", "llama3.2-tied",
                                          "mistral-window", "qwen2-bias"};
static const char *const backends[] = {"cpu", "ref"};

static still_model *open_model(const char *name, const char *backend, int threads)
{
    char path[512];
    snprintf(path, sizeof path, FIXTURES "/models/%s", name);
    still_model *m;
    still_error e;
    must(still_model_open(
             path,
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = threads),
             &m, &e),
         &e);
    return m;
}

static still_session *new_session(still_model *m, int ctx, int batch)
{
    still_session *s;
    still_error e;
    must(
        still_session_new(
            m, &STILL_PARAMS(still_session_params, .ctx = ctx, .batch = batch), &s, &e),
        &e);
    return s;
}

static void make_tokens(int32_t *tok, int n, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        tok[i] = (int32_t)(seed >> 16) % 384;
    }
}

static void same_logits(const still_session *a, const still_session *b, int vocab)
{
    assert_memory_equal(still_session_logits(a), still_session_logits(b),
                        (size_t)vocab * sizeof(float));
}

/* The prompt in one piece, token by token, in odd pieces and with a small batch gives
 * the same logits, bit for bit, on both backends and for any number of threads. */
static void any_cut_is_the_same(void **state)
{
    (void)state;
    int32_t tok[N];
    make_tokens(tok, N, 7);
    for (size_t c = 0; c < sizeof checkpoints / sizeof *checkpoints; c++)
        for (size_t b = 0; b < 2; b++) {
            still_model *m = open_model(checkpoints[c], backends[b], 1);
            still_model *m2 = open_model(checkpoints[c], backends[b], 3);
            int vocab = still_model_get_info(m)->vocab;
            still_error e;
            still_session *whole = new_session(m, N, N), *steps = new_session(m, N, 16),
                          *odd = new_session(m, N, 13),
                          *threads = new_session(m2, N, 31);
            must(still_session_feed(whole, tok, N, &e), &e);
            for (int i = 0; i < N; i++)
                must(still_session_feed(steps, tok + i, 1, &e), &e);
            for (int i = 0, n; i < N; i += n) {
                n = 1 + i % 17 < N - i ? 1 + i % 17 : N - i;
                must(still_session_feed(odd, tok + i, n, &e), &e);
            }
            must(still_session_feed(threads, tok, N, &e), &e);
            same_logits(whole, steps, vocab);
            same_logits(whole, odd, vocab);
            same_logits(whole, threads, vocab);
            still_session_free(whole);
            still_session_free(steps);
            still_session_free(odd);
            still_session_free(threads);
            still_model_free(m);
            still_model_free(m2);
        }
}

/* Sessions of different lengths stepped together give what each gives alone. */
static void batching_changes_nothing(void **state)
{
    (void)state;
    enum { S = 5, STEPS = 9 };
    for (size_t b = 0; b < 2; b++) {
        still_model *m = open_model("mistral-window", backends[b], 2);
        int vocab = still_model_get_info(m)->vocab;
        still_session *alone[S], *together[S];
        int32_t tok[S][N];
        still_error e;
        for (int i = 0; i < S; i++) {
            make_tokens(tok[i], N, 100 + (unsigned)i);
            alone[i] = new_session(m, N, 8);
            together[i] = new_session(m, N, 4); /* a step of 5 rows takes two calls */
            must(still_session_feed(alone[i], tok[i], 1 + 20 * i, &e), &e);
            must(still_session_feed(together[i], tok[i], 1 + 20 * i, &e), &e);
        }
        for (int t = 0; t < STEPS; t++) {
            int32_t next[S];
            for (int i = 0; i < S; i++) {
                next[i] = tok[i][1 + 20 * i + t];
                must(still_session_feed(alone[i], &next[i], 1, &e), &e);
            }
            must(still_session_step(together, next, S, &e), &e);
            for (int i = 0; i < S; i++) same_logits(alone[i], together[i], vocab);
        }
        for (int i = 0; i < S; i++) {
            still_session_free(alone[i]);
            still_session_free(together[i]);
        }
        still_model_free(m);
    }
}

/* The most likely ids, and logits of exactly those that should keep them. */
static void some_keep_logits(void **state)
{
    (void)state;
    enum { S = 5, STEPS = 9 };
    int kept = 0, unasked = 0;
    for (size_t b = 0; b < 2; b++) {
        still_model *m = open_model("mistral-window", backends[b], 2);
        const int vocab = still_model_get_info(m)->vocab;
        still_session *all[S], *some[S];
        int32_t tok[N];
        uint64_t enough[6];
        still_error e;
        make_tokens(tok, N, 41);
        for (int i = 0; i < 6; i++) enough[i] = 0x5555555555555555; /* even ids */
        for (int i = 0; i < S; i++) {
            all[i] = new_session(m, N, 4);
            some[i] = new_session(m, N, 4); /* a step of 5 rows takes two calls */
            must(still_session_feed(all[i], tok, 5 + i, &e), &e);
            must(still_session_feed(some[i], tok, 5 + i, &e), &e);
        }
        for (int t = 0; t < STEPS; t++) {
            int32_t top[S];
            const bool keep[S] = {t % 2, false, true, t % 3 == 0, false};
            must(still_session_step(all, tok + 20 + t, S, &e), &e);
            must(still_session_step_some(some, tok + 20 + t, S, keep,
                                         t < STEPS / 2 ? enough : NULL, top, &e),
                 &e);
            for (int i = 0; i < S; i++) {
                const float *l = still_session_logits(all[i]);
                int best = 0;
                for (int k = 1; k < vocab; k++)
                    if (l[k] > l[best]) best = k;
                assert_int_equal(top[i], best);
                const bool more = t < STEPS / 2 && best % 2;
                assert_int_equal(still_session_logits(some[i]) != NULL,
                                 keep[i] || more);
                if (keep[i] || more) same_logits(all[i], some[i], vocab);
                kept += keep[i];
                unasked += more && !keep[i];
            }
        }
        for (int i = 0; i < S; i++) {
            still_session_free(all[i]);
            still_session_free(some[i]);
        }
        still_model_free(m);
    }
    assert_true(kept > 0 && unasked > 0);
}

/* A copy of a checkpoint in `folder` whose embedding of token `bad` is not finite. */
static void spoil_embedding(const char *name, int bad, int hidden, const char *folder)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    for (int i = 0; i < 2; i++) {
        char path[512];
        static char data[1 << 20];
        snprintf(path, sizeof path, FIXTURES "/models/%s/%s", name, files[i]);
        FILE *f = fopen(path, "rb");
        assert_non_null(f);
        const size_t n = fread(data, 1, sizeof data - 1, f);
        fclose(f);
        assert_true(n > 0 && n < sizeof data - 1);
        if (i == 1) { /* u64 bytes of JSON, JSON, numbers */
            uint64_t header;
            memcpy(&header, data, sizeof header);
            const char *at = strstr(data + 8, "\"model.embed_tokens.weight\"");
            assert_non_null(at);
            at = strstr(at, "\"data_offsets\"");
            assert_non_null(at);
            const size_t first = strtoul(strchr(at, '[') + 1, NULL, 10);
            const float nan = NAN;
            memcpy(data + 8 + header + first + sizeof nan * (size_t)(bad * hidden),
                   &nan, sizeof nan);
        }
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(data, 1, n, f), n);
        assert_int_equal(fclose(f), 0);
    }
}

static void remove_copy(const char *folder)
{
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", folder);
    remove(path);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    remove(path);
    rmdir(folder);
}

/* In a step a session whose numbers are not finite fails alone. */
static void one_session_fails_alone(void **state)
{
    (void)state;
    enum { S = 5, BAD = 7, FAILS = 2 };
    char folder[] = "/tmp/still-test-XXXXXX";
    assert_non_null(mkdtemp(folder));
    spoil_embedding("mistral-window", BAD, 64, folder);
    for (size_t b = 0; b < 2; b++) {
        still_model *m;
        still_error e;
        must(still_model_open(folder,
                              &STILL_PARAMS(still_model_params, .backend = backends[b],
                                            .threads = 2),
                              &m, &e),
             &e);
        const int vocab = still_model_get_info(m)->vocab;
        still_session *alone[S], *together[S];
        int32_t tok[N], top[S];
        const bool keep[S] = {true, true, true, true, true};
        make_tokens(tok, N, 41);
        for (int i = 0; i < N; i++) tok[i] += tok[i] == BAD;
        for (int i = 0; i < S; i++) {
            alone[i] = new_session(m, N, 4);
            together[i] = new_session(m, N, 4);
            must(still_session_feed(alone[i], tok, 5 + i, &e), &e);
            must(still_session_feed(together[i], tok, 5 + i, &e), &e);
        }
        tok[20 + FAILS] = BAD;
        assert_int_equal(
            still_session_step_some(together, tok + 20, S, keep, NULL, top, &e),
            STILL_E_NUMERIC);
        for (int i = 0; i < S; i++) {
            assert_int_equal(top[i] < 0, i == FAILS);
            assert_int_equal(still_session_length(together[i]), 5 + i + (i != FAILS));
            if (i == FAILS) continue;
            must(still_session_feed(alone[i], tok + 20 + i, 1, &e), &e);
            same_logits(alone[i], together[i], vocab);
        }
        still_session_reset(together[FAILS]);
        must(still_session_feed(together[FAILS], tok, 5, &e), &e);
        for (int i = 0; i < S; i++) {
            still_session_free(alone[i]);
            still_session_free(together[i]);
        }
        still_model_free(m);
    }
    remove_copy(folder);
}

static void score_agrees_with_logits(void **state)
{
    (void)state;
    still_model *m = open_model("llama3", "cpu", 2);
    int vocab = still_model_get_info(m)->vocab;
    int32_t tok[N], top[N];
    float lp[N];
    make_tokens(tok, N, 3);
    still_error e;
    still_session *s = new_session(m, N, 50), *t = new_session(m, N, 50);
    must(still_session_logprobs(s, tok, N, lp, top, &e), &e);
    for (int i = 0; i < N - 1; i++) {
        must(still_session_feed(t, tok + i, 1, &e), &e);
        const float *l = still_session_logits(t);
        double sum = 0;
        int best = 0;
        for (int j = 0; j < vocab; j++) {
            sum += exp((double)l[j]);
            if (l[j] > l[best]) best = j;
        }
        assert_int_equal(best, top[i]);
        assert_true(fabs(l[tok[i + 1]] - log(sum) - lp[i]) < 1e-5);
    }
    must(still_session_feed(t, tok + N - 1, 1, &e), &e);
    same_logits(s, t, vocab);
    still_session_free(s);
    still_session_free(t);
    still_model_free(m);
}

/* A call that fails leaves length and logits as they were, and the session usable. */
static void failure_loses_nothing(void **state)
{
    (void)state;
    still_model *m = open_model("mistral-window", "cpu", 1);
    int vocab = still_model_get_info(m)->vocab;
    int32_t tok[N], bad[N];
    make_tokens(tok, N, 9);
    memcpy(bad, tok, sizeof bad);
    bad[N - 1] = vocab;
    still_error e;
    still_session *s = new_session(m, N, 8), *plain = new_session(m, N, 8);
    must(still_session_feed(s, tok, 60, &e), &e);
    must(still_session_feed(plain, tok, 60, &e), &e);
    assert_int_equal(still_session_feed(s, tok, N, &e), STILL_E_LIMIT);
    assert_non_null(strstr(e.text, "60 of 120"));
    assert_int_equal(still_session_feed(s, bad + 60, 60, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "vocabulary of 384"));
    bad[0] = -1;
    assert_int_equal(still_session_feed(s, bad, 1, NULL), STILL_E_ARG);
    assert_int_equal(still_session_length(s), 60);
    same_logits(s, plain, vocab);
    must(still_session_feed(s, tok + 60, 60, &e), &e);
    must(still_session_feed(plain, tok + 60, 60, &e), &e);
    same_logits(s, plain, vocab);
    still_session_reset(s);
    assert_null(still_session_logits(s));
    must(still_session_feed(s, tok, N, &e), &e);
    same_logits(s, plain, vocab);
    still_session_free(s);
    still_session_free(plain);
    still_model_free(m);
}

static void absurd_sizes_are_refused(void **state)
{
    (void)state;
    still_model *m = open_model("llama3", "cpu", 1);
    still_session *s = (still_session *)1;
    still_error e;
    assert_int_equal(
        still_session_new(m, &STILL_PARAMS(still_session_params, .ctx = -5), &s, &e),
        STILL_E_ARG);
    assert_null(s);
    assert_int_equal(still_session_new(
                         m, &STILL_PARAMS(still_session_params, .cache = "q3"), &s, &e),
                     STILL_E_ARG);
    /* 2^31-1 tokens in f32: 1.6 TB for this model, more than any test machine has. */
    assert_int_equal(
        still_session_new(m,
                          &STILL_PARAMS(still_session_params, .ctx = INT32_MAX,
                                        .batch = INT32_MAX, .cache = "f32"),
                          &s, &e),
        STILL_E_MEMORY);
    still_model_free(m);
}

/* The bill states what a session really takes. */
static void bill_is_exact(void **state)
{
    (void)state;
    still_model *m = open_model("llama3", "cpu", 1);
    still_bill a, b;
    still_error e;
    must(still_model_bill(
             m, &STILL_PARAMS(still_session_params, .ctx = 1000, .cache = "f16"), &a,
             &e),
         &e);
    must(still_model_bill(
             m, &STILL_PARAMS(still_session_params, .ctx = 2000, .cache = "f16"), &b,
             &e),
         &e);
    const still_model_info *i = still_model_get_info(m);
    size_t per_token =
        (size_t)i->layers * 2u * (size_t)i->kv_heads * (size_t)i->head_dim * 2u;
    assert_int_equal(b.cache - a.cache, 1000 * per_token);
    assert_int_equal(a.total, a.weights_mapped + a.weights_resident + a.cache +
                                  a.scratch + a.runtime);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(any_cut_is_the_same),
          cmocka_unit_test(batching_changes_nothing),
          cmocka_unit_test(some_keep_logits), cmocka_unit_test(one_session_fails_alone),
          cmocka_unit_test(score_agrees_with_logits),
          cmocka_unit_test(failure_loses_nothing),
          cmocka_unit_test(absurd_sizes_are_refused), cmocka_unit_test(bill_is_exact))
