/* Sessions of every attention method on a tiny checkpoint: cuts, batches, snapshots,
 * rollback and files change nothing; limits of a setting are softmax. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../run.h"

#include "still.h"

enum { N = 150, VOCAB = 384 };

static still_model *open_model(const char *backend, int threads)
{
    still_model *m;
    still_error e;
    must(still_model_open(
             FIXTURES "/models/llama3",
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = threads),
             &m, &e),
         &e);
    return m;
}

static still_method method(const char *name, int chunk)
{
    still_method m;
    still_error e;
    must(still_method_init(&m, name, chunk, &e), &e);
    return m;
}

static still_session *session(still_model *m, const still_method *how, int batch)
{
    still_session *s;
    still_error e;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = N, .batch = batch,
                                         .method = how, .rollback = 3),
                           &s, &e),
         &e);
    return s;
}

static void make_tokens(int32_t *tok, int n, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        tok[i] = (int32_t)(seed >> 16) % VOCAB;
    }
}

static double worst(const float *a, const float *b)
{
    double w = 0;
    for (int i = 0; i < VOCAB; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (!(d <= w)) w = d;
    }
    return w;
}

static void same(const still_session *a, const still_session *b)
{
    assert_memory_equal(still_session_logits(a), still_session_logits(b),
                        VOCAB * sizeof(float));
}

/* Settings of all kinds: every method, every score, shared and not, caps and none. */
static int settings(still_method out[64])
{
    int n = 0;
    const char *name;
    for (int i = 0; (name = still_method_at(i, NULL)); i++) {
        out[n++] = method(name, 8);
        out[n++] = method(name, 13);
    }
    const char *scores[] = {"received", "keynorm", "distinct", "random"};
    for (int i = 0; i < 4; i++) {
        out[n] = method("still", 8);
        snprintf(out[n++].score, sizeof out->score, "%s", scores[i]);
    }
    out[n] = method("still", 8);
    out[n++].per_head = true;
    out[n] = method("still", 8);
    out[n].key_bits = 8;
    out[n++].value_bits = 4;
    out[n] = method("still", 8);
    snprintf(out[n].caps, sizeof out->caps, "0/1:30,1:7");
    out[n].positions = STILL_POSITIONS_CAPPED;
    out[n].key_bits = 5;
    out[n++].value_bits = 3;
    out[n] = method("still", 8);
    out[n++].cap = -1;
    out[n] = method("still", 8);
    out[n++].cap = 0;
    out[n] = method("still", 8);
    snprintf(out[n++].caps, sizeof out->caps, "0:3,1-2:9");
    out[n] = method("still", 8); /* heads of a layer differ; the first rule counts */
    snprintf(out[n++].caps, sizeof out->caps, "0/1:30,0-1/0:2,0:7,2/0-1:0");
    out[n] = method("still", 8); /* a capped state follows the caps */
    out[n].positions = STILL_POSITIONS_CAPPED;
    snprintf(out[n++].caps, sizeof out->caps, "1:40");
    out[n] = method("still", 8); /* no state: what is not kept is forgotten */
    out[n].forget = true;
    out[n].positions = STILL_POSITIONS_CAPPED;
    snprintf(out[n++].caps, sizeof out->caps, "1/0:40,0:3");
    out[n] = method("still", 8);
    out[n++].select = 0;
    out[n] = method("still", 1);
    out[n++].select = 1;
    out[n] = method("still", 8);
    out[n++].window_scale = true;
    out[n] = method("still", 8);
    out[n++].norm_preserved = false;
    out[n] = method("still", 8); /* features without positions, a capped state */
    out[n++].positions = STILL_POSITIONS_CAPPED;
    out[n] = method("lolcats", 8);
    out[n++].positions = STILL_POSITIONS_CAPPED;
    out[n] = method("still", 8);
    out[n].first_layer = 1;
    out[n++].last_layer = 1;
    return n;
}

static void feed_in_pieces(still_session *s, const int32_t *tok, int n, unsigned seed)
{
    still_error e;
    for (int i = 0, piece; i < n; i += piece) {
        seed = seed * 1664525u + 1013904223u;
        piece = 1 + (int)(seed >> 16) % 23;
        if (piece > n - i) piece = n - i;
        must(still_session_feed(s, tok + i, piece, &e), &e);
    }
}

/* One piece, token by token, random pieces: the same bits on cpu. */
static void any_cut_is_the_same(void **state)
{
    (void)state;
    still_method all[64];
    int n = settings(all);
    int32_t tok[N];
    make_tokens(tok, N, 21);
    still_model *m = open_model("cpu", 1), *m3 = open_model("cpu", 3);
    for (int i = 0; i < n; i++) {
        still_error e;
        still_session *whole = session(m, &all[i], N), *steps = session(m, &all[i], 16),
                      *odd = session(m3, &all[i], 11);
        must(still_session_feed(whole, tok, N, &e), &e);
        for (int t = 0; t < N; t++) must(still_session_feed(steps, tok + t, 1, &e), &e);
        feed_in_pieces(odd, tok, N, (unsigned)i);
        double a = worst(still_session_logits(whole), still_session_logits(steps));
        double b = worst(still_session_logits(whole), still_session_logits(odd));
        if (!(a <= 1e-3) || !(b <= 1e-3))
            fail_msg("%s, setting %d: steps differ by %g, pieces by %g", all[i].name, i,
                     a, b);
        still_session_free(whole);
        still_session_free(steps);
        still_session_free(odd);
    }
    still_model_free(m);
    still_model_free(m3);
}

/* cpu and ref agree on every method and setting. */
static void backends_agree(void **state)
{
    (void)state;
    still_method all[64];
    int n = settings(all);
    int32_t tok[N];
    make_tokens(tok, N, 22);
    still_model *cpu = open_model("cpu", 2), *ref = open_model("ref", 2);
    for (int i = 0; i < n; i++) {
        still_error e;
        still_session *a = session(cpu, &all[i], 64), *b = session(ref, &all[i], 64);
        must(still_session_feed(a, tok, N, &e), &e);
        must(still_session_feed(b, tok, N, &e), &e);
        double d = worst(still_session_logits(a), still_session_logits(b));
        /* A level of a quantized key may round the other way. */
        if (!(d <= (all[i].key_bits ? 1e-2 : 1e-3)))
            fail_msg("%s, setting %d: cpu and ref differ by %g", all[i].name, i, d);
        still_session_free(a);
        still_session_free(b);
    }
    still_model_free(cpu);
    still_model_free(ref);
}

/* bf16 runs the softmax model, rounded (near, not equal), in any pieces alike, and says
 * that it runs no other method. */
static void bf16_is_softmax_rounded(void **state)
{
    (void)state;
    still_method all[64];
    int n = settings(all);
    int32_t tok[N];
    make_tokens(tok, N, 22);
    still_model *exact = open_model("cpu", 2), *rounded = open_model("bf16", 2);
    still_error e;
    still_session *want = session(exact, NULL, 64), *got = session(rounded, NULL, 64),
                  *steps = session(rounded, NULL, 64);
    must(still_session_feed(want, tok, N, &e), &e);
    must(still_session_feed(got, tok, N, &e), &e);
    for (int t = 0; t < N; t++) must(still_session_feed(steps, tok + t, 1, &e), &e);
    double d = worst(still_session_logits(want), still_session_logits(got));
    assert_true(d > 0 && d < 0.1);
    d = worst(still_session_logits(steps), still_session_logits(got));
    assert_true(d < 0.1);
    still_session_free(want);
    still_session_free(got);
    still_session_free(steps);
    for (int i = 0; i < n; i++) {
        if (strcmp(all[i].name, "softmax") == 0) continue;
        still_session *s = NULL;
        still_session_params p = {.size = sizeof p, .ctx = N, .method = &all[i]};
        assert_int_equal(still_session_new(rounded, &p, &s, &e), STILL_E_UNSUPPORTED);
        assert_null(s);
        assert_non_null(strstr(e.text, "does not run on backend bf16"));
    }
    still_model_free(exact);
    still_model_free(rounded);
}

/* Selecting everything without a cap, or a chunk longer than the text, is softmax. */
static void limits_are_softmax(void **state)
{
    (void)state;
    int32_t tok[N];
    make_tokens(tok, N, 23);
    still_model *m = open_model("cpu", 2);
    still_method all_salient = method("still", 8), long_chunk = method("lolcats", 200),
                 none_converted = method("softmax", 8);
    all_salient.select = 8;
    all_salient.cap = -1;
    long_chunk.window_scale = false;
    still_error e;
    still_session *want = session(m, NULL, 64), *got = session(m, &all_salient, 64),
                  *same_as = session(m, &none_converted, 64);
    must(still_session_feed(want, tok, N, &e), &e);
    must(still_session_feed(got, tok, N, &e), &e);
    must(still_session_feed(same_as, tok, N, &e), &e);
    assert_true(worst(still_session_logits(want), still_session_logits(got)) < 1e-4);
    same(want, same_as);
    still_session_free(got);
    got = session(m, &long_chunk, 64);
    must(still_session_feed(got, tok, N, &e), &e);
    assert_true(worst(still_session_logits(want), still_session_logits(got)) < 1e-4);
    still_session_free(want);
    still_session_free(got);
    still_session_free(same_as);
    still_model_free(m);
}

/* Sessions of different lengths stepped together give what each gives alone. */
static void batching_changes_nothing(void **state)
{
    (void)state;
    enum { S = 4, STEPS = 20 };
    still_method all[64];
    int n = settings(all);
    still_model *m = open_model("cpu", 2);
    for (int i = 0; i < n; i += 3) {
        still_session *alone[S], *together[S];
        int32_t tok[S][N];
        still_error e;
        for (int j = 0; j < S; j++) {
            make_tokens(tok[j], N, 200 + (unsigned)j);
            alone[j] = session(m, &all[i], 16);
            together[j] = session(m, &all[i], 16);
            must(still_session_feed(alone[j], tok[j], 3 + 17 * j, &e), &e);
            must(still_session_feed(together[j], tok[j], 3 + 17 * j, &e), &e);
        }
        for (int t = 0; t < STEPS; t++) {
            int32_t next[S];
            for (int j = 0; j < S; j++) {
                next[j] = tok[j][3 + 17 * j + t];
                must(still_session_feed(alone[j], &next[j], 1, &e), &e);
            }
            must(still_session_step(together, next, S, &e), &e);
            for (int j = 0; j < S; j++) same(alone[j], together[j]);
        }
        for (int j = 0; j < S; j++) {
            still_session_free(alone[j]);
            still_session_free(together[j]);
        }
    }
    still_model_free(m);
}

/* Snapshot, fork, file and rollback: going on from them is going on. */
static void the_past_can_be_kept(void **state)
{
    (void)state;
    still_method all[64];
    int n = settings(all);
    int32_t tok[N];
    make_tokens(tok, N, 24);
    still_model *m = open_model("cpu", 2);
    char path[] = "/tmp/still-state-XXXXXX";
    assert_true(close(mkstemp(path)) == 0);
    for (int i = 0; i < n; i++) {
        still_error e;
        still_session *s = session(m, &all[i], 16), *fork,
                      *other = session(m, &all[i], 16);
        still_snapshot *snap;
        must(still_session_feed(s, tok, 90, &e), &e);
        must(still_session_fork(s, &fork, &e), &e);
        must(still_session_snapshot(s, &snap, &e), &e);
        must(still_session_save(s, path, &e), &e);
        must(still_session_feed(s, tok + 90, N - 90, &e), &e);
        must(still_session_feed(fork, tok + 90, N - 90, &e), &e);
        same(s, fork);
        must(still_session_restore(other, snap, &e), &e);
        assert_int_equal(still_session_length(other), 90);
        must(still_session_feed(other, tok + 90, N - 90, &e), &e);
        same(s, other);
        must(still_session_load(other, path, &e), &e);
        must(still_session_feed(other, tok + 90, N - 90, &e), &e);
        same(s, other);
        /* Back to a boundary, and on again. */
        int at = -1;
        must(still_session_rollback(other, N - 2, &at, &e), &e);
        assert_in_range(at, N - 2 - 16, N - 2);
        assert_null(still_session_logits(other));
        must(still_session_feed(other, tok + at, N - at, &e), &e);
        assert_true(worst(still_session_logits(s), still_session_logits(other)) <=
                    1e-3);
        still_session_reset(other);
        must(still_session_feed(other, tok, N, &e), &e);
        assert_true(worst(still_session_logits(s), still_session_logits(other)) <=
                    1e-3);
        still_snapshot_free(snap);
        still_session_free(s);
        still_session_free(fork);
        still_session_free(other);
    }
    unlink(path);
    still_model_free(m);
}

/* A file that was cut, flipped, or made for something else is refused, and the session
 * goes on as it was. */
static void bad_state_files(void **state)
{
    (void)state;
    still_model *m = open_model("cpu", 1);
    still_method how = method("still", 8), other = method("still", 8),
                 bits = method("still", 8);
    other.cap = 4;
    bits.key_bits = 8;
    bits.value_bits = 4;
    int32_t tok[N];
    make_tokens(tok, N, 25);
    still_error e;
    char path[] = "/tmp/still-state-XXXXXX";
    assert_true(close(mkstemp(path)) == 0);
    still_session *s = session(m, &how, 16), *t = session(m, &how, 16),
                  *o = session(m, &other, 16), *plain = session(m, NULL, 16),
                  *q = session(m, &bits, 16);
    must(still_session_feed(s, tok, 60, &e), &e);
    must(still_session_feed(t, tok, 60, &e), &e);
    must(still_session_save(s, path, &e), &e);
    assert_int_equal(still_session_load(o, path, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "cap=16"));
    assert_int_equal(still_session_load(q, path, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "cache-type-k=8 cache-type-v=4"));
    still_session_free(q);
    assert_int_equal(still_session_load(plain, path, &e), STILL_E_ARG);
    assert_int_equal(still_session_load(s, "/nowhere/state", &e), STILL_E_IO);

    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    static unsigned char bytes[1 << 22];
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    for (size_t cut = 0; cut < n; cut += n / 37 + 1) {
        f = fopen(path, "wb");
        fwrite(bytes, 1, cut, f);
        fclose(f);
        assert_true(still_session_load(s, path, &e) != STILL_OK);
    }
    for (size_t at = 0; at < n; at += n / 101 + 1) {
        f = fopen(path, "wb");
        bytes[at] ^= 0x40;
        fwrite(bytes, 1, n, f);
        bytes[at] ^= 0x40;
        fclose(f);
        assert_true(still_session_load(s, path, &e) != STILL_OK);
    }
    same(s, t);
    must(still_session_feed(s, tok + 60, 60, &e), &e);
    must(still_session_feed(t, tok + 60, 60, &e), &e);
    same(s, t);
    unlink(path);
    still_session_free(s);
    still_session_free(t);
    still_session_free(o);
    still_session_free(plain);
    still_model_free(m);
}

/* The state of a method with a cap does not grow with the context; its bill says so. */
static void memory_is_constant(void **state)
{
    (void)state;
    still_model *m = open_model("cpu", 1);
    const char *name;
    for (int i = 0; (name = still_method_at(i, NULL)); i++) {
        still_method how = method(name, 8);
        still_bill a, b;
        still_error e;
        must(still_model_bill(
                 m, &STILL_PARAMS(still_session_params, .ctx = 4096, .method = &how),
                 &a, &e),
             &e);
        must(still_model_bill(
                 m, &STILL_PARAMS(still_session_params, .ctx = 65536, .method = &how),
                 &b, &e),
             &e);
        if (strcmp(name, "softmax") == 0)
            assert_true(b.cache == 16 * a.cache);
        else
            assert_int_equal(a.cache, b.cache);
    }
    still_model_free(m);
}

static void impossible_settings(void **state)
{
    (void)state;
    still_model *m = open_model("cpu", 1);
    still_method bad[8];
    for (int i = 0; i < 8; i++) bad[i] = method("still", 8);
    bad[0].select = 9;
    bad[1].chunk = 0;
    bad[2].cap = -7;
    snprintf(bad[3].score, sizeof bad[3].score, "best");
    bad[4].last_layer = 3;
    bad[5].first_layer = 2;
    bad[5].last_layer = 1;
    bad[6].select = -1;
    snprintf(bad[7].name, sizeof bad[7].name, "mamba");
    for (int i = 0; i < 8; i++) {
        still_session *s;
        still_error e;
        assert_int_equal(
            still_session_new(m, &STILL_PARAMS(still_session_params, .method = &bad[i]),
                              &s, &e),
            STILL_E_ARG);
        assert_null(s);
    }
    still_method how;
    still_error e;
    assert_int_equal(still_method_init(&how, "mamba", 0, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "still, lolcats"));
    const char *caps[] = {"x",        "1",     "1:",   "2-1:5",   "3:5",
                          "-1:4",     "1:5 ",  "1:5;", "1:-3",    "1:99999999999999",
                          "1:5,,2:4", "1/9:5", "1/:5", "1/1-0:5", "/1:5",
                          "1/0/1:5"};
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
        still_session *s;
        how = method("still", 8);
        snprintf(how.caps, sizeof how.caps, "%s", caps[i]);
        assert_int_equal(
            still_session_new(m, &STILL_PARAMS(still_session_params, .method = &how),
                              &s, &e),
            STILL_E_ARG);
        assert_non_null(strstr(e.text, "caps"));
    }
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(any_cut_is_the_same), cmocka_unit_test(backends_agree),
          cmocka_unit_test(bf16_is_softmax_rounded),
          cmocka_unit_test(limits_are_softmax),
          cmocka_unit_test(batching_changes_nothing),
          cmocka_unit_test(the_past_can_be_kept), cmocka_unit_test(bad_state_files),
          cmocka_unit_test(memory_is_constant), cmocka_unit_test(impossible_settings))
