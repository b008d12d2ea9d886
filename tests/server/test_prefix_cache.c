/* The server's session: whatever it held before, it says what a fresh one says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/prefix_cache.h"

enum { CTX = 96, VOCAB = 384, MOST = 5 };

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

typedef struct rig {
    still_model *model;
    still_session *session;
    srv_prefix_cache past;
} rig;

static rig set_up(const char *method_name, int rollback)
{
    rig r = {0};
    still_error e;
    still_method method;
    must(still_method_init(&method, method_name, 8, &e), &e);
    must(still_model_open(FIXTURES "/models/llama3", NULL, &r.model, &e), &e);
    must(still_session_new(
             r.model,
             &(still_session_params){
                 .ctx = CTX, .batch = 16, .method = &method, .rollback = rollback},
             &r.session, &e),
         &e);
    must(srv_prefix_cache_new(r.model, r.session, &r.past, &e), &e);
    return r;
}

static void tear_down(rig *r)
{
    srv_prefix_cache_free(&r->past);
    still_session_free(r->session);
    still_model_free(r->model);
}

/* What an empty session says of the ids. */
typedef struct truth {
    float logprob[CTX], top_logprob[CTX * MOST], logits[VOCAB];
    int32_t top[CTX * MOST];
} truth;

static void find_truth(rig *r, const int32_t *id, int n, int k, truth *t)
{
    still_error e;
    still_session *s;
    must(still_session_fork(r->session, &s, &e), &e);
    still_session_reset(s);
    must(
        still_session_top_logprobs(s, id, n, k, t->logprob, t->top, t->top_logprob, &e),
        &e);
    memcpy(t->logits, still_session_logits(s), sizeof t->logits);
    still_session_free(s);
}

static void check(rig *r, const int32_t *id, int n, int k)
{
    still_error e;
    truth t;
    find_truth(r, id, n, k ? k : 1, &t);
    must(srv_prefix_cache_set(&r->past, id, n, k, NULL, NULL, &e), &e);
    assert_int_equal(r->past.n, n);
    assert_int_equal(still_session_length(r->session), n);
    assert_memory_equal(still_session_logits(r->session), t.logits, sizeof t.logits);
    for (int i = 0; k > 0 && i < n - 1; i++) {
        size_t mine = (size_t)(i + 1) * (size_t)r->past.k, its = (size_t)(i * k);
        assert_memory_equal(&r->past.logprob[i + 1], &t.logprob[i], sizeof(float));
        assert_memory_equal(&r->past.top[mine], &t.top[its], (size_t)k * 4);
        assert_memory_equal(&r->past.top_logprob[mine], &t.top_logprob[its],
                            (size_t)k * 4);
    }
}

static void try_method(const char *name, int rollback)
{
    rig r = set_up(name, rollback);
    unsigned seed = 7;
    int32_t id[CTX], common[CTX];
    for (int i = 0; i < CTX; i++) common[i] = (i * 29 + 5) % VOCAB;
    for (int round = 0; round < 60; round++) {
        seed = seed * 1664525u + 1013904223u;
        int n = 1 + (int)(seed >> 8) % CTX, same = (int)(seed >> 20) % (n + 1);
        for (int i = 0; i < n; i++)
            id[i] = i < same ? common[i] : (int32_t)((seed >> 4) + (unsigned)i) % VOCAB;
        check(&r, id, n, (int)(seed >> 28) % 4 * MOST / 3);
    }
    assert_true(r.past.reused > 0 || rollback == 0);
    tear_down(&r);
}

static void softmax(void **state)
{
    (void)state;
    try_method("softmax", 0);
}

static void folding(void **state)
{
    (void)state;
    try_method("still", 0);
    try_method("still", 3);
    try_method("lolcats", 3);
    try_method("liger", 2);
}

static void shares(void **state)
{
    (void)state;
    rig r = set_up("softmax", 0);
    int32_t id[50];
    for (int i = 0; i < 50; i++) id[i] = i + 3;
    check(&r, id, 50, 1);
    uint64_t fed = r.past.fed;
    id[48] = 200;
    check(&r, id, 50, 1); /* 47 is fed again, for it speaks of 48 */
    assert_int_equal(r.past.fed - fed, 3);
    check(&r, id, 50, 1); /* the last alone, for its logits */
    assert_int_equal(r.past.fed - fed, 4);
    check(&r, id, 50, 3); /* more alternatives than were kept */
    assert_int_equal(r.past.fed - fed, 54);
    tear_down(&r);
}

static void ranks(void **state)
{
    (void)state;
    const float logits[] = {1, 3, 3, -2, 0};
    float lp, top_lp[3];
    int32_t top[3];
    srv_top_logprobs(logits, 5, 4, 3, &lp, top, top_lp);
    assert_int_equal(top[0], 1);
    assert_int_equal(top[1], 2);
    assert_int_equal(top[2], 0);
    /* log of e + 2 e^3 + e^-2 + 1 */
    assert_float_equal(lp, -3.784751, 1e-5);
    assert_float_equal(top_lp[0], 3 - 3.784751, 1e-5);
    srv_top_logprobs(logits, 5, 4, 0, &lp, NULL, NULL);
    assert_float_equal(lp, -3.784751, 1e-5);
}

static void refuses(void **state)
{
    (void)state;
    rig r = set_up("softmax", 0);
    still_error e;
    int32_t id[CTX + 1] = {0}, top;
    float lp, top_lp;
    assert_int_equal(srv_prefix_cache_set(&r.past, id, 0, 0, NULL, NULL, &e),
                     STILL_E_LIMIT);
    assert_int_equal(srv_prefix_cache_set(&r.past, id, CTX + 1, 0, NULL, NULL, &e),
                     STILL_E_LIMIT);
    check(&r, id, CTX, 1);
    assert_int_equal(srv_prefix_cache_add(&r.past, 1, &e), STILL_E_LIMIT);
    assert_int_equal(r.past.n, CTX);
    assert_int_equal(
        still_session_top_logprobs(r.session, id, 1, 0, &lp, &top, &top_lp, &e),
        STILL_E_ARG);
    tear_down(&r);
}

RUN_TESTS(cmocka_unit_test(softmax), cmocka_unit_test(folding),
          cmocka_unit_test(shares), cmocka_unit_test(ranks), cmocka_unit_test(refuses))
