/* Pasts by their tokens: whatever was put and given up before, what is found is the longest
 * there is, and it is the past of those tokens. */
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "server/prefix_tree.h"

enum { CTX = 64, CHUNK = 8, VOCAB = 512, MOST = 400 };

typedef struct rig {
    still_model *model;
    still_session *s, *fresh;
    srv_prefix_tree tree;
} rig;

static rig set_up(const char *name, size_t limit)
{
    rig r = {.tree = {.limit = limit, .cuts = strcmp(name, "softmax") == 0}};
    still_error e;
    still_method how;
    must(still_method_init(&how, name, CHUNK, &e), &e);
    must(still_model_open_shape("tiny", &STILL_PARAMS(still_model_params, .threads = 1),
                                &r.model, &e),
         &e);
    const still_session_params p = {
        .size = sizeof p, .ctx = CTX, .batch = 16, .method = &how};
    must(still_session_new(r.model, &p, &r.s, &e), &e);
    must(still_session_new(r.model, &p, &r.fresh, &e), &e);
    return r;
}

static void tear_down(rig *r)
{
    srv_prefix_tree_free(&r->tree);
    still_session_free(r->s);
    still_session_free(r->fresh);
    still_model_free(r->model);
}

static void feed(still_session *s, const int32_t *id, int n)
{
    still_error e;
    must(still_session_feed(s, id, n, &e), &e);
}

static void put(rig *r, const int32_t *id, int n)
{
    still_session_reset(r->s);
    feed(r->s, id, n);
    srv_prefix_tree_put(&r->tree, id, r->s);
}

/* Restores what was found and goes on to the end: as if nothing had been there. */
static void check_past(rig *r, const srv_prefix_match *m, const int32_t *id, int n)
{
    still_error e;
    int at;
    must(still_session_restore(r->s, m->past, &e), &e);
    if (m->length < still_session_length(r->s)) {
        assert_true(r->tree.cuts);
        must(still_session_rollback(r->s, m->length, &at, &e), &e);
    }
    assert_int_equal(still_session_length(r->s), m->length);
    feed(r->s, id + m->length, n - m->length);
    still_session_reset(r->fresh);
    feed(r->fresh, id, n);
    assert_memory_equal(still_session_logits(r->s), still_session_logits(r->fresh),
                        VOCAB * sizeof(float));
}

/* ---- Against a list ------------------------------------------------------ */

typedef struct text {
    int32_t id[CTX];
    int n;
} text;

static int common(const text *a, const text *b)
{
    int n = 0;
    while (n < a->n && n < b->n && a->id[n] == b->id[n]) n++;
    return n;
}

/* Texts of two letters part everywhere. */
static void make_text(text *t, unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    t->n = 1 + (int)(*seed >> 9) % 24;
    for (int i = 0; i < t->n; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        t->id[i] = (int32_t)(*seed >> 29) < 6 ? 3 : 5;
    }
}

static void longest_of_all(const char *name)
{
    rig r = set_up(name, SIZE_MAX / 2);
    text *list = calloc(MOST, sizeof *list), ask;
    unsigned seed = 3;
    for (int k = 0; k < MOST; k++) {
        make_text(&ask, &seed);
        int best = 0, shared = 0;
        for (int i = 0; i < k; i++) {
            const int n = common(&list[i], &ask);
            if (n == list[i].n && n > best) best = n;
            if (n > shared) shared = n;
        }
        /* An end that a longer text has taken over is cut out of that. */
        const int cut = shared < ask.n ? shared : ask.n - 1;
        const srv_prefix_match m = srv_prefix_tree_find(&r.tree, ask.id, ask.n);
        assert_int_equal(m.shared, shared);
        if (r.tree.cuts)
            assert_true(m.length == cut || (m.length == best && best > cut));
        else
            assert_int_equal(m.length, best);
        assert_int_equal(m.past != NULL, m.length > 0);
        if (m.past && k % 7 == 0) check_past(&r, &m, ask.id, ask.n);
        make_text(&list[k], &seed);
        put(&r, list[k].id, list[k].n);
    }
    free(list);
    tear_down(&r);
}

static void finds_the_longest(void **state)
{
    (void)state;
    longest_of_all("still");
    longest_of_all("softmax");
}

/* ---- Within bytes -------------------------------------------------------- */

static void stays_within(const char *name)
{
    rig r = set_up(name, 0);
    text t;
    unsigned seed = 9;
    int hits = 0;
    make_text(&t, &seed);
    put(&r, t.id, t.n);
    assert_int_equal(r.tree.pasts, 0);
    assert_int_equal(r.tree.bytes, 0);
    feed(r.fresh, t.id, t.n);
    r.tree.limit = 5 * still_session_snapshot_bytes(r.fresh);
    for (int k = 0; k < MOST; k++) {
        make_text(&t, &seed);
        const srv_prefix_match m = srv_prefix_tree_find(&r.tree, t.id, t.n);
        if (m.past) check_past(&r, &m, t.id, t.n);
        hits += m.past != NULL;
        put(&r, t.id, t.n);
        assert_true(r.tree.bytes <= r.tree.limit);
        assert_true(r.tree.pasts > 0);
    }
    assert_true(hits > MOST / 20);
    assert_true(r.tree.given_up > 0);
    tear_down(&r);
}

static void gives_up_what_is_old(void **state)
{
    (void)state;
    stays_within("still");
    stays_within("softmax");
}

static bool holds(rig *r, const int32_t *id, int n)
{
    /* A token that no text has: only pasts of n tokens or fewer. */
    int32_t more[CTX];
    memcpy(more, id, (size_t)n * sizeof *id);
    more[n] = VOCAB - 1;
    return srv_prefix_tree_find(&r->tree, more, n + 1).length == n;
}

/* The end of an answer goes on from the prompt's, so the prompt's goes first; but not
 * where two texts part. */
static void keeps_ends_and_forks(void **state)
{
    (void)state;
    rig r = set_up("still", SIZE_MAX / 2);
    int32_t id[4][40];
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 40; i++) id[k][i] = i < 16 ? i : 100 * k + i;
    put(&r, id[0], 16); /* what all have in common */
    put(&r, id[0], 30);
    put(&r, id[1], 30);
    put(&r, id[0], 40); /* goes on from its 30 */
    assert_int_equal(r.tree.pasts, 4);
    r.tree.limit = r.tree.bytes + 1000;
    put(&r, id[2], 30);
    assert_int_equal(r.tree.pasts, 4);
    assert_false(holds(&r, id[0], 30));
    assert_true(holds(&r, id[0], 40));
    assert_true(holds(&r, id[0], 16));
    assert_true(holds(&r, id[1], 30));
    assert_true(holds(&r, id[2], 30)); /* just used, as were those above */
    assert_true(holds(&r, id[0], 16));
    assert_true(holds(&r, id[1], 30));
    put(&r, id[3], 30); /* 0's 40 is the oldest */
    assert_false(holds(&r, id[0], 40));
    assert_true(holds(&r, id[3], 30));
    tear_down(&r);
}

/* Where every key is kept, the longest past of a line is all that line needs. */
static void one_past_a_line(void **state)
{
    (void)state;
    rig r = set_up("softmax", SIZE_MAX / 2);
    int32_t id[40];
    for (int i = 0; i < 40; i++) id[i] = i;
    for (int n = 8; n <= 40; n += 8) {
        put(&r, id, n);
        assert_int_equal(r.tree.pasts, 1);
    }
    const srv_prefix_match m = srv_prefix_tree_find(&r.tree, id, 21);
    assert_int_equal(m.length, 20); /* the last is fed, for its logits */
    check_past(&r, &m, id, 21);
    tear_down(&r);
}

/* A past whose logits nobody took stands for a longer text alone. */
static void without_logits(void **state)
{
    (void)state;
    rig r = set_up("still", SIZE_MAX / 2);
    still_error e;
    int32_t id[20], top;
    for (int i = 0; i < 20; i++) id[i] = i + 1;
    feed(r.s, id, 9);
    must(still_session_step_top(&r.s, &id[9], 1, &top, &e), &e);
    srv_prefix_tree_put(&r.tree, id, r.s);
    assert_int_equal(srv_prefix_tree_find(&r.tree, id, 10).length, 0);
    srv_prefix_match m = srv_prefix_tree_find(&r.tree, id, 11);
    assert_int_equal(m.length, 10);
    check_past(&r, &m, id, 20);
    put(&r, id, 10); /* now with them */
    assert_int_equal(r.tree.pasts, 1);
    m = srv_prefix_tree_find(&r.tree, id, 10);
    assert_int_equal(m.length, 10);
    must(still_session_restore(r.fresh, m.past, &e), &e);
    assert_non_null(still_session_logits(r.fresh));
    tear_down(&r);
}

RUN_TESTS(cmocka_unit_test(finds_the_longest), cmocka_unit_test(gives_up_what_is_old),
          cmocka_unit_test(keeps_ends_and_forks), cmocka_unit_test(one_past_a_line),
          cmocka_unit_test(without_logits))
