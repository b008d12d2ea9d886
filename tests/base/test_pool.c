/* The thread pool: every worker runs every task once, also after it slept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#include "../run.h"

#include "base/pool.h"

enum { MOST = 8 };

static void count(void *arg, int w, int workers)
{
    int *hits = arg;
    assert_in_range(w, 0, workers - 1);
    hits[w]++; /* each worker its own counter: no race */
}

static void every_worker_every_task(void **state)
{
    (void)state;
    for (int threads = 1; threads <= MOST; threads++) {
        sti_pool *p;
        still_error e;
        int hits[MOST] = {0};
        assert_int_equal(sti_pool_new(threads, &p, &e), STILL_OK);
        assert_int_equal(sti_pool_threads(p), threads);
        for (int i = 0; i < 500; i++) sti_pool_run(p, count, hits);
        usleep(20000); /* long enough for the workers to fall asleep */
        for (int i = 0; i < 500; i++) sti_pool_run(p, count, hits);
        for (int w = 0; w < MOST; w++)
            assert_int_equal(hits[w], w < threads ? 1000 : 0);
        sti_pool_free(p);
    }
}

typedef struct meeting {
    sti_pool *pool;
    int rounds[MOST]; /* that each worker has begun */
    atomic_int left;  /* workers that are through with the last part */
    int seen;         /* of them, by the one worker that waits */
} meeting;

/* Between two meetings all workers have begun the same number of rounds. */
static void meet(void *arg, int w, int workers)
{
    meeting *m = arg;
    for (int i = 1; i <= 10; i++) {
        m->rounds[w] = i;
        sti_pool_meet(m->pool, w);
        for (int k = 0; k < workers; k++) assert_int_equal(m->rounds[k], i);
        sti_pool_meet(m->pool, w);
    }
    atomic_fetch_add_explicit(&m->left, 1, memory_order_relaxed);
    sti_pool_arrive(m->pool, w);
    if (w + 1 != workers) return;
    sti_pool_await(m->pool, w);
    m->seen = atomic_load_explicit(&m->left, memory_order_relaxed);
}

static void workers_meet_inside_a_task(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 4; threads++) {
        meeting m = {0};
        still_error e;
        assert_int_equal(sti_pool_new(threads, &m.pool, &e), STILL_OK);
        for (int i = 0; i < 3; i++) {
            atomic_store(&m.left, 0);
            sti_pool_run(m.pool, meet, &m);
            assert_int_equal(m.seen, threads);
        }
        sti_pool_free(m.pool);
    }
}

static void split_covers_all_once(void **state)
{
    (void)state;
    for (int64_t n = 0; n < 70; n++)
        for (int64_t grain = 1; grain < 20; grain += 3)
            for (int workers = 1; workers < 6; workers++) {
                int64_t next = 0;
                for (int w = 0; w < workers; w++) {
                    int64_t lo, hi;
                    sti_split(n, grain, w, workers, &lo, &hi);
                    assert_int_equal(lo, next);
                    assert_true(hi >= lo && (lo % grain == 0 || lo == n));
                    next = hi;
                }
                assert_int_equal(next, n);
            }
}

static void absurd_counts(void **state)
{
    (void)state;
    sti_pool *p;
    still_error e;
    assert_int_equal(sti_pool_new(-1, &p, &e), STILL_E_ARG);
    assert_int_equal(sti_pool_new(1000000, &p, &e), STILL_E_ARG);
    assert_null(p);
}

RUN_TESTS(cmocka_unit_test(every_worker_every_task),
          cmocka_unit_test(workers_meet_inside_a_task),
          cmocka_unit_test(split_covers_all_once), cmocka_unit_test(absurd_counts))
