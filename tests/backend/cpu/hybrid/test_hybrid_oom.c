/* test_hybrid_oom.c - memory of the hybrid operator: once its scratch is reserved the
 * cpu backend allocates nothing, and the reference's float entries leave a session as
 * it was when an allocation fails. */
#include "../../../run.h"
#include "../../hybrid_problem.h"

#include <stdio.h>

#include "ops/ops.h"

#include "../../../oom.h"
#include "../../../pages.h"

typedef struct session {
    float *q, *k, *v, *gate, *y;
    sti_hybrid_state st;
    sti_block block;
} session;

static session open_session(const problem *p, size_t kv_size, size_t real_size)
{
    const size_t nq = outputs(p);
    const size_t nk = (size_t)(p->T * p->shape.G * p->shape.D);
    session x = {.q = malloc(nq * sizeof(float)),
                 .k = malloc(nk * sizeof(float)),
                 .v = malloc(nk * sizeof(float)),
                 .gate = malloc(nq * sizeof(float)),
                 .y = calloc(nq, sizeof(float))};
    for (size_t i = 0; i < nq; i++) {
        x.q[i] = (float)p->q[i];
        x.gate[i] = (float)p->gate[i];
    }
    for (size_t i = 0; i < nk; i++) {
        x.k[i] = (float)p->k[i];
        x.v[i] = (float)p->v[i];
    }
    sti_carve c = {0};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, real_size);
    assert_true(sti_block_new(&x.block, c.used));
    c = (sti_carve){.base = x.block.p};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, real_size);
    return x;
}

static void close_session(session *x)
{
    free(x->q);
    free(x->k);
    free(x->v);
    free(x->gate);
    free(x->y);
    sti_block_free(&x->block);
}

static still_status feed_next(const sti_backend *b, sti_dev *dev, const problem *p,
                              session *x, int n, still_error *err)
{
    const size_t at = (size_t)x->st.pos;
    const size_t q = (size_t)(p->shape.H * p->shape.D) * at;
    const size_t k = (size_t)(p->shape.G * p->shape.D) * at;
    const sti_hybrid_args a = {
        .set = &p->set,
        .shape = p->shape,
        .T = n,
        .in = {.q = x->q + q, .k = x->k + k, .v = x->v + k, .gate_logit = x->gate + q},
        .state = &x->st,
        .y = x->y + q};
    return b->hybrid(dev, &a, 1, err);
}

static void test_nothing_is_allocated(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("cpu");
    problem p = make(preset("still", 32), (sti_hybrid_shape){6, 2, 64, 64}, 400, 1);
    session x = open_session(&p, 2, sizeof(float));
    still_error err;
    sti_dev *dev;
    const sti_dev_params params = {.threads = 2, .max_k = 64};
    assert_int_equal(b->dev_new(&params, &dev, &err), STILL_OK);
    const size_t before = b->dev_bytes(dev, 128);
    assert_int_equal(b->hybrid_reserve(dev, &p.set, &p.shape, 128, &err), STILL_OK);
    assert_true(b->dev_bytes(dev, 128) > before); /* and is in the bill */

    allocations = 0;
    still_status status = feed_next(b, dev, &p, &x, 128, &err);
    /* The first steps, one of which retires a chunk, may let the stack grow. */
    while (status == STILL_OK && x.st.pos < 128 + 40)
        status = feed_next(b, dev, &p, &x, 1, &err);
    assert_int_equal(allocations, 0);
    const long pages = mapped_pages(); /* with the heap of the thread that started */
    allocations = 0;
    while (status == STILL_OK && x.st.pos < p.T)
        status = feed_next(b, dev, &p, &x, 1, &err);
    const long taken = allocations;
    const long pages_now = mapped_pages();
    assert_int_equal(status, STILL_OK);
    assert_int_equal(taken, 0);
    assert_int_equal(pages_now, pages);
    b->dev_free(dev);
    close_session(&x);
    drop(&p);
}

static void test_reference_survives(void **state)
{
    (void)state;
    const sti_backend *b = sti_backend_find("ref");
    problem p = make(preset("still", 4), (sti_hybrid_shape){4, 2, 8, 8}, 30, 2);
    session x = open_session(&p, b->state_kv, b->state_real);
    unsigned char *was = malloc(x.block.bytes);
    still_error err;
    sti_dev *dev;
    const sti_dev_params params = {.threads = 1, .max_k = 64};
    assert_int_equal(b->dev_new(&params, &dev, &err), STILL_OK);
    assert_int_equal(feed_next(b, dev, &p, &x, 20, &err), STILL_OK);
    memcpy(was, x.block.p, x.block.bytes);
    still_status status = STILL_E_MEMORY;
    int failures = -1;
    while (status == STILL_E_MEMORY) {
        allocations = 0;
        countdown = ++failures;
        status = feed_next(b, dev, &p, &x, 10, &err);
        countdown = -1;
        if (status != STILL_E_MEMORY) break;
        assert_int_equal(x.st.pos, 20);
        assert_memory_equal(was, x.block.p, x.block.bytes);
    }
    assert_int_equal(status, STILL_OK);
    assert_in_range(failures, 5, 50);
    assert_int_equal(x.st.pos, 30);
    b->dev_free(dev);
    free(was);
    close_session(&x);
    drop(&p);
}

RUN_TESTS(cmocka_unit_test(test_nothing_is_allocated),
          cmocka_unit_test(test_reference_survives))
