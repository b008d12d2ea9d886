/* What fits into a number of bytes, and what it is worth: sessions and kept conversations
 * take what the plan says. */
#include <string.h>

#include "../run.h"

#include "server/capacity.h"

enum { CTX = 4096, MB = 1 << 20 };

static still_model *open_model(void)
{
    still_model *m;
    still_error e;
    if (still_model_open_shape("tiny", &STILL_PARAMS(still_model_params, .threads = 1),
                               &m, &e))
        fail_msg("%s", e.text);
    return m;
}

static still_status plan(still_model *m, const char *name, int parallel, size_t cache,
                         size_t memory, srv_scheduler_params *p, srv_capacity *c)
{
    static still_method how;
    still_error e = {0};
    *p = (srv_scheduler_params){
        .model = m,
        .parallel = parallel,
        .cache_bytes = cache,
        .session = {.size = sizeof(still_session_params), .ctx = CTX}};
    assert_int_equal(still_method_init(&how, name, 64, &e), STILL_OK);
    p->session.method = &how;
    const still_status st = srv_capacity_plan(p, memory, c, &e);
    if (st != STILL_OK) assert_non_null(strstr(e.text, "--memory"));
    return st;
}

static void as_many_as_fit(void **state)
{
    (void)state;
    still_model *m = open_model();
    srv_scheduler_params p;
    srv_capacity c, more;
    assert_int_equal(plan(m, "still", 3, 0, (size_t)1 << 40, &p, &c), STILL_OK);
    assert_int_equal(p.parallel, 3);
    assert_int_equal(p.cache_bytes, 0);
    assert_int_equal(c.total, c.fixed + 3 * c.session);
    /* Exactly three fit, and not one byte less. */
    assert_int_equal(plan(m, "still", 3, 0, c.total, &p, &more), STILL_OK);
    assert_int_equal(plan(m, "still", 3, 0, c.total - 1, &p, &more), STILL_E_MEMORY);
    assert_int_equal(plan(m, "still", 0, 0, c.total, &p, &more), STILL_OK);
    assert_int_equal(more.parallel, 3);
    assert_int_equal(plan(m, "still", 0, 0, c.total - 1, &p, &more), STILL_OK);
    assert_int_equal(more.parallel, 2);
    assert_int_equal(plan(m, "still", 0, 0, c.fixed, &p, &more), STILL_E_MEMORY);
    /* What is left is for conversations that are kept. */
    assert_int_equal(plan(m, "still", 2, SIZE_MAX, c.total + 7, &p, &more), STILL_OK);
    assert_int_equal(more.cache, c.session + 7);
    assert_int_equal(p.cache_bytes, more.cache);
    assert_int_equal(more.total, c.total + 7);
    assert_int_equal(plan(m, "still", 2, 50 * MB, (size_t)1 << 40, &p, &more),
                     STILL_OK);
    assert_int_equal(more.kept, 50 * MB / c.conversation);
    still_model_free(m);
}

/* Softmax pays for every token of the context, and the plan knows. */
static void against_softmax(void **state)
{
    (void)state;
    still_model *m = open_model();
    srv_scheduler_params p;
    srv_capacity c, soft;
    still_session *s;
    still_error e;
    assert_int_equal(plan(m, "softmax", 1, 0, (size_t)1 << 40, &p, &soft), STILL_OK);
    assert_int_equal(soft.softmax, soft.conversation);
    assert_int_equal(plan(m, "still", 1, 0, (size_t)1 << 40, &p, &c), STILL_OK);
    assert_int_equal(c.softmax, soft.softmax);
    assert_int_equal(still_session_new(m, &p.session, &s, &e), STILL_OK);
    const size_t kept = still_session_snapshot_bytes(s);
    assert_in_range(kept, c.conversation, c.conversation + 16 * 1024);
    still_session_free(s);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(as_many_as_fit), cmocka_unit_test(against_softmax))
