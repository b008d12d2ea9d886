/* test_snapshot.c - a past that a session takes over replaces its own: boundaries of the
 * old one are gone, those of a fork's origin are there, and a file of other settings is
 * refused though its size fits. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../eval/tiny.h"
#include "../run.h"

enum { CHUNK = 8, N = 80 };

static still_session *session(still_model *m, int select)
{
    still_session *s;
    still_error e;
    still_method how = method_of("still", CHUNK);
    how.select = select;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = N, .batch = 16,
                                         .method = &how, .rollback = 4),
                           &s, &e),
         &e);
    return s;
}

static void feed(still_session *s, int n, int step)
{
    int32_t tok[N];
    still_error e;
    for (int i = 0; i < n; i++) tok[i] = (7 + i * step) % VOCAB;
    must(still_session_feed(s, tok, n, &e), &e);
}

/* Three chunks and a half of one text, then of another: the boundaries that were kept are
 * of the first, and going back to them would leave the second. */
static void test_restore_forgets_boundaries(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_session *one = session(m, 2), *other = session(m, 2);
    still_snapshot *snap;
    still_error e;
    int at;
    feed(one, 3 * CHUNK + 4, 3);
    feed(other, 3 * CHUNK + 4, 5);
    must(still_session_snapshot(other, &snap, &e), &e);
    must(still_session_restore(one, snap, &e), &e);
    assert_int_equal(still_session_rollback(one, 2 * CHUNK, &at, &e), STILL_E_LIMIT);
    /* What comes after it is kept as ever. */
    feed(one, CHUNK, 5);
    must(still_session_rollback(one, 4 * CHUNK + 1, &at, &e), &e);
    assert_int_equal(at, 4 * CHUNK);
    still_snapshot_free(snap);
    still_session_free(one);
    still_session_free(other);
    still_model_free(m);
}

/* A fork can go back where its origin could, and is then where that would be. */
static void test_fork_keeps_boundaries(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_session *one = session(m, 2), *fork;
    still_error e;
    int at;
    feed(one, 3 * CHUNK + 4, 3);
    must(still_session_fork(one, &fork, &e), &e);
    must(still_session_rollback(fork, 2 * CHUNK + 1, &at, &e), &e);
    assert_int_equal(at, 2 * CHUNK);
    must(still_session_rollback(one, 2 * CHUNK + 1, &at, &e), &e);
    feed(one, CHUNK, 11);
    feed(fork, CHUNK, 11);
    assert_memory_equal(still_session_logits(one), still_session_logits(fork),
                        VOCAB * sizeof(float));
    still_session_free(one);
    still_session_free(fork);
    still_model_free(m);
}

static void test_file_of_other_settings(void **state)
{
    (void)state;
    char path[] = "/tmp/still-snapshot-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    still_model *m = open_tiny("cpu");
    still_session *one = session(m, 2), *other = session(m, 3);
    still_error e;
    feed(one, 3 * CHUNK, 3);
    must(still_session_save(one, path, &e), &e);
    assert_int_equal(still_session_load(other, path, &e), STILL_E_ARG);
    /* What differs is named, and nothing else. */
    assert_non_null(strstr(e.text, "saved with '"));
    assert_null(strstr(e.text, "backend="));
    assert_int_equal(still_session_length(other), 0);
    must(still_session_load(one, path, &e), &e);
    unlink(path);
    still_session_free(one);
    still_session_free(other);
    still_model_free(m);
}

/* A session of a method, softmax layers among the others in the last. */
static still_session *session_of(still_model *m, int kind)
{
    still_session *s;
    still_error e;
    still_method how = method_of(kind == 0 ? "softmax" : "still", CHUNK);
    if (kind == 2) how.last_layer = 0;
    must(still_session_new(
             m,
             &STILL_PARAMS(still_session_params, .ctx = N, .batch = 16, .method = &how),
             &s, &e),
         &e);
    return s;
}

/* What a snapshot takes grows with the tokens where every key is kept; restored, from
 * memory or from a file, it goes on as the origin does, in a session that held more. */
static void test_packed(void **state)
{
    (void)state;
    char path[] = "/tmp/still-snapshot-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    still_model *m = open_tiny("cpu");
    for (int kind = 0; kind < 3; kind++) {
        still_session *one = session_of(m, kind), *other = session_of(m, kind);
        still_snapshot *snap = NULL, *loaded;
        still_error e;
        size_t before = 0;
        for (int n = CHUNK + 3; n < N - 10; n += 2 * CHUNK + 1) {
            still_session_reset(one);
            still_session_reset(other);
            feed(one, n, 3);
            feed(other, N - 1, 5);
            must(still_session_snapshot_again(one, &snap, &e), &e);
            assert_int_equal(still_snapshot_length(snap), n);
            assert_int_equal(still_snapshot_bytes(snap) > before,
                             before == 0 || kind != 1);
            before = still_snapshot_bytes(snap);
            must(still_session_restore(other, snap, &e), &e);
            assert_memory_equal(still_session_logits(one), still_session_logits(other),
                                VOCAB * sizeof(float));
            feed(one, 9, 11);
            feed(other, 9, 11);
            assert_memory_equal(still_session_logits(one), still_session_logits(other),
                                VOCAB * sizeof(float));
            must(still_snapshot_save(snap, path, &e), &e);
            must(still_snapshot_load(other, path, &loaded, &e), &e);
            must(still_session_restore(other, loaded, &e), &e);
            feed(other, 9, 11);
            assert_memory_equal(still_session_logits(one), still_session_logits(other),
                                VOCAB * sizeof(float));
            still_snapshot_free(loaded);
        }
        still_snapshot_free(snap);
        still_session_free(one);
        still_session_free(other);
    }
    unlink(path);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(test_restore_forgets_boundaries),
          cmocka_unit_test(test_fork_keeps_boundaries),
          cmocka_unit_test(test_file_of_other_settings), cmocka_unit_test(test_packed))
