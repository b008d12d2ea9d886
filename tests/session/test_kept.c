/* What a session says it holds: places and scores are those of the reference, whatever
 * way the tokens came in; each token is in one place, caps are held, and the bytes follow
 * the length. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../eval/tiny.h"
#include "../run.h"

enum { CHUNK = 8, MOST = 128 };

typedef struct view {
    uint8_t place[MOST];
    float score[MOST];
    still_kept kept;
} view;

static still_session *session(still_model *m, const still_method *how)
{
    still_session *s;
    still_error e;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = MOST, .batch = 16,
                                         .cache = "f32", .method = how, .rollback = 4),
                           &s, &e),
         &e);
    return s;
}

static int32_t token(int i)
{
    return (int32_t)((unsigned)i * 2654435761u >> 8) % VOCAB;
}

/* Tokens from the session's length up to n, `step` at a time. */
static void feed(still_session *s, int n, int step)
{
    still_error e;
    int32_t tok[MOST];
    for (int i = still_session_length(s); i < n; i += step) {
        const int part = n - i < step ? n - i : step;
        for (int j = 0; j < part; j++) tok[j] = token(i + j);
        must(still_session_feed(s, tok, part, &e), &e);
    }
}

static view look(const still_session *s, int layer, int head)
{
    view v;
    still_error e;
    memset(&v, 0xee, sizeof v);
    must(still_session_kept(s, layer, head, v.place, v.score, &v.kept, &e), &e);
    return v;
}

static int count(const view *v, int n, still_place place)
{
    int found = 0;
    for (int i = 0; i < n; i++) found += v->place[i] == place;
    return found;
}

static int layers(const still_model *m)
{
    return still_model_get_info(m)->layers;
}

/* Each token in one place, the counts as the array has them, nothing written past it. */
static void check_whole(const view *v, int n)
{
    int sum = 0;
    for (int p = 0; p < STILL_PLACES; p++) {
        assert_int_equal(count(v, n, (still_place)p), v->kept.count[p]);
        sum += v->kept.count[p];
    }
    assert_int_equal(sum, n);
    if (n < MOST) assert_int_equal(v->place[n], 0xee);
}

/* ---- Methods that choose --------------------------------------------------- */

static void check_choice(const still_session *s, const still_method *how, int layer,
                         int head, int cap)
{
    const view v = look(s, layer, head);
    const int n = still_session_length(s), chunk = n > 0 ? (n - 1) / how->chunk : 0,
              start = chunk > 0 ? (chunk - 1) * how->chunk : 0,
              chosen = start / how->chunk * how->select;
    check_whole(&v, n);
    assert_int_equal(v.kept.cap, cap);
    assert_int_equal(v.kept.count[STILL_PLACE_WINDOW], n - start);
    assert_int_equal(v.kept.count[STILL_PLACE_SALIENT], chosen < cap ? chosen : cap);
    assert_int_equal(v.kept.count[how->forget ? STILL_PLACE_FOLDED : STILL_PLACE_GONE],
                     0);
    for (int i = 0; i < n; i++) {
        assert_int_equal(v.place[i] == STILL_PLACE_WINDOW, i >= start);
        if (v.place[i] == STILL_PLACE_SALIENT)
            assert_true(isfinite(v.score[i]));
        else if (i < start)
            assert_true(isnan(v.score[i]));
        else
            assert_int_equal(isfinite(v.score[i]), strcmp(how->score, "s3") == 0);
    }
}

/* At every length: from nothing to a list that has been full for long. */
static void test_counts_and_caps(void **state)
{
    (void)state;
    still_method s3 = method_of("still", CHUNK), compact, untrained;
    still_error e;
    s3.cap = 6;
    must(still_method_compact(&compact, CHUNK, &e), &e);
    compact.cap = 10;
    strcpy(compact.caps, "0:21,1/1:3");
    must(still_method_untrained(&untrained, CHUNK, &e), &e);
    untrained.cap = 12;
    const still_method *all[] = {&s3, &compact, &untrained};
    still_model *m = open_tiny("cpu");
    const int heads = still_model_get_info(m)->kv_heads;
    assert_true(layers(m) >= 2 && heads >= 2);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        still_session *s = session(m, all[i]);
        for (int n = 0; n <= 9 * CHUNK + 3; n++) {
            feed(s, n, 1);
            for (int l = 0; l < layers(m); l++)
                for (int h = 0; h < heads; h++) {
                    const int cap = all[i] != &compact ? all[i]->cap
                                    : l == 0           ? 21
                                    : h == 1           ? 3
                                                       : 10;
                    check_choice(s, all[i], l, h, cap);
                }
        }
        still_session_free(s);
    }
    still_model_free(m);
}

/* The best `select` tokens of a chunk join the list, and the worst of the list leave it
 * while it is longer than its cap: by scores that were told while each token was the last
 * one of the window. */
static void test_best_stay(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = method_of("still", CHUNK);
    how.cap = 5;
    still_session *s = session(m, &how);
    const int n = 6 * CHUNK, left = 4 * CHUNK;
    float arrived[MOST];
    bool stays[MOST] = {false};
    for (int i = 0; i < n; i++) {
        feed(s, i + 1, 1);
        arrived[i] = look(s, 1, 1).score[i];
    }
    for (int first = 0; first < left; first += CHUNK) {
        for (int k = 0; k < how.select; k++) {
            int best = -1;
            for (int i = first; i < first + CHUNK; i++)
                if (!stays[i] && (best < 0 || arrived[i] > arrived[best])) best = i;
            stays[best] = true;
        }
        for (;;) {
            int kept = 0, worst = -1;
            for (int i = 0; i < first + CHUNK; i++) {
                if (!stays[i]) continue;
                kept++;
                if (worst < 0 || arrived[i] <= arrived[worst]) worst = i;
            }
            if (kept <= how.cap) break;
            stays[worst] = false;
        }
    }
    const view v = look(s, 1, 1);
    for (int i = 0; i < left; i++) {
        assert_int_equal(v.place[i] == STILL_PLACE_SALIENT, stays[i]);
        if (stays[i]) assert_true(v.score[i] == arrived[i]);
    }
    still_session_free(s);
    still_model_free(m);
}

/* The reference, fed token by token, and the cpu, fed in pieces of any size. */
static void test_as_reference(void **state)
{
    (void)state;
    const char *const score[] = {"s3", "distinct", "received", "keynorm", "random"};
    still_model *cpu = open_tiny("cpu"), *ref = open_tiny("ref");
    const int n = 7 * CHUNK + 5;
    for (size_t i = 0; i < sizeof score / sizeof *score; i++) {
        still_method how = method_of("still", CHUNK);
        how.cap = 7;
        how.per_head = i == 1;
        strcpy(how.score, score[i]);
        still_session *a = session(cpu, &how), *b = session(ref, &how);
        feed(a, n, 13);
        feed(b, n, 1);
        /* Layers after the first see outputs that differ in their last bits, and two
         * scores may then change places; the first does not. */
        for (int h = 0; h < look(a, 0, 0).kept.heads; h++) {
            const view x = look(a, 0, h), y = look(b, 0, h);
            assert_memory_equal(x.place, y.place, sizeof x.place);
            assert_memory_equal(&x.kept, &y.kept, sizeof x.kept);
            for (int t = 0; t < n; t++) {
                assert_int_equal(isnan(x.score[t]), isnan(y.score[t]));
                if (!isnan(x.score[t]))
                    assert_true(fabsf(x.score[t] - y.score[t]) <=
                                1e-3f * (1 + fabsf(y.score[t])));
            }
        }
        still_session_free(a);
        still_session_free(b);
    }
    still_model_free(cpu);
    still_model_free(ref);
}

/* What comes back after going back is what was there. */
static void test_rollback(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = method_of("still", CHUNK);
    still_session *s = session(m, &how);
    still_error e;
    int at;
    feed(s, 5 * CHUNK, 7);
    const view before = look(s, 1, 1);
    feed(s, 6 * CHUNK + 3, 7);
    assert_memory_not_equal(before.place, look(s, 1, 1).place, sizeof before.place);
    must(still_session_rollback(s, 5 * CHUNK + 2, &at, &e), &e);
    assert_int_equal(at, 5 * CHUNK);
    const view after = look(s, 1, 1);
    assert_memory_equal(before.place, after.place, sizeof before.place);
    assert_memory_equal(before.score, after.score, 5 * CHUNK * sizeof(float));
    still_session_free(s);
    still_model_free(m);
}

/* ---- Others -------------------------------------------------------------- */

static void test_methods_without_choice(void **state)
{
    (void)state;
    const struct {
        const char *method;
        int window; /* tokens of N in it */
        still_place others;
    } row[] = {
        {"softmax", 41, STILL_PLACE_GONE},  {"swa", 9, STILL_PLACE_GONE},
        {"lolcats", 9, STILL_PLACE_FOLDED}, {"hedgehog", 0, STILL_PLACE_FOLDED},
        {"supra", 0, STILL_PLACE_FOLDED},   {"liger", CHUNK, STILL_PLACE_FOLDED}};
    still_model *m = open_tiny("cpu");
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        const still_method how = method_of(row[i].method, CHUNK);
        still_session *s = session(m, &how);
        feed(s, 41, 11);
        const view v = look(s, 1, 1);
        check_whole(&v, 41);
        assert_int_equal(v.kept.cap, 0);
        assert_int_equal(v.kept.count[STILL_PLACE_WINDOW], row[i].window);
        assert_int_equal(v.kept.count[row[i].others], 41 - row[i].window);
        for (int t = 0; t < 41; t++) {
            assert_int_equal(v.place[t] == STILL_PLACE_WINDOW, t >= 41 - row[i].window);
            assert_true(isnan(v.score[t]));
        }
        still_session_free(s);
    }
    still_model_free(m);
}

/* Layers that stay softmax hold everything. */
static void test_some_layers(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = method_of("still", CHUNK);
    how.first_layer = 1;
    how.last_layer = 1;
    still_session *s = session(m, &how);
    feed(s, 41, 11);
    assert_int_equal(look(s, 0, 0).kept.count[STILL_PLACE_WINDOW], 41);
    assert_int_equal(look(s, 1, 0).kept.count[STILL_PLACE_WINDOW], 9);
    still_session_free(s);
    still_model_free(m);
}

static still_held held(const still_session *s)
{
    still_held h;
    still_error e;
    must(still_session_held(s, &h, &e), &e);
    return h;
}

/* Softmax fills its cache in step with the length, and that is what others are compared
 * with; a hybrid state fills up to what it took, and no more. */
static void test_bytes(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const still_model_info *info = still_model_get_info(m);
    const still_method softmax = method_of("softmax", 0);
    still_method how;
    still_error e;
    must(still_method_compact(&how, CHUNK, &e), &e);
    how.cap = 20;
    still_session *plain = session(m, &softmax);
    const size_t token = 2 * sizeof(float) * (size_t)info->layers *
                         (size_t)info->kv_heads * (size_t)info->head_dim;
    for (int n = 1; n <= MOST; n += 13) {
        feed(plain, n, 16);
        const still_held h = held(plain);
        assert_true(h.used >= token * (size_t)n && h.used < token * (size_t)n + 4096);
        assert_true(h.softmax >= h.used && h.softmax < h.used + 4096);
        assert_true(h.used <= h.bytes);
    }
    still_session *s = session(m, &how);
    still_bill bill;
    size_t last = 0;
    must(still_model_bill(m,
                          &STILL_PARAMS(still_session_params, .ctx = MOST,
                                        .cache = "f32", .method = &how),
                          &bill, &e),
         &e);
    for (int n = 1; n <= MOST; n++) {
        feed(s, n, 1);
        const still_held h = held(s);
        assert_int_equal(h.bytes, bill.cache);
        assert_true(h.used > 0 && h.used <= h.bytes);
        assert_int_equal(h.softmax / token, n);
        if (n < 2 * CHUNK) assert_true(h.used > last);
        last = h.used;
    }
    /* Window and lists are full at the end of a chunk. */
    assert_true(held(s).bytes - last < 1024 * (size_t)info->layers);
    still_session_free(s);
    still_session_free(plain);
    still_model_free(m);
}

static void test_wrong_arguments(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = method_of("still", CHUNK);
    still_session *s = session(m, &how);
    still_error e;
    still_kept k = {.heads = 77};
    assert_int_equal(still_session_kept(s, -1, 0, NULL, NULL, &k, &e), STILL_E_ARG);
    assert_int_equal(still_session_kept(s, layers(m), 0, NULL, NULL, &k, &e),
                     STILL_E_ARG);
    assert_non_null(strstr(e.text, "layer"));
    assert_int_equal(still_session_kept(s, 0, 999, NULL, NULL, &k, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "head 999"));
    assert_int_equal(k.heads, 77);
    must(still_session_kept(s, 0, 0, NULL, NULL, NULL, &e), &e);
    must(still_session_kept(s, 0, 0, NULL, NULL, &k, NULL), &e);
    assert_int_equal(k.heads, still_model_get_info(m)->kv_heads);
    still_session_free(s);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(test_counts_and_caps), cmocka_unit_test(test_best_stay),
          cmocka_unit_test(test_as_reference), cmocka_unit_test(test_rollback),
          cmocka_unit_test(test_methods_without_choice),
          cmocka_unit_test(test_some_layers), cmocka_unit_test(test_bytes),
          cmocka_unit_test(test_wrong_arguments))
