/* The thread pool: every share of every task runs once, whoever sleeps or comes late, and
 * a worker without a core is not woken. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../run.h"

#include "base/cores.h"
#include "base/pool.h"
#include "base/pool_watch.h"

enum { MOST = 8 };

typedef struct counts {
    int hits[MOST], workers[MOST];
} counts;

static void count(void *arg, int w, int workers)
{
    counts *c = arg;
    c->hits[w]++; /* each share its own counter: no race */
    c->workers[w] = workers;
}

/* The pool may use fewer workers than threads, if this machine is busy. */
static void run_and_check(sti_pool *p)
{
    counts c = {0};
    sti_pool_run(p, count, &c);
    assert_in_range(c.workers[0], 1, sti_pool_threads(p));
    for (int w = 0; w < MOST; w++) {
        assert_int_equal(c.hits[w], w < c.workers[0]);
        assert_int_equal(c.workers[w], w < c.workers[0] ? c.workers[0] : 0);
    }
}

static void every_share_of_every_task(void **state)
{
    (void)state;
    for (int threads = 1; threads <= MOST; threads++) {
        sti_pool *p;
        still_error e;
        assert_int_equal(sti_pool_new(threads, &p, &e), STILL_OK);
        assert_int_equal(sti_pool_threads(p), threads);
        for (int i = 0; i < 500; i++) run_and_check(p);
        usleep(20000); /* long enough for the workers to fall asleep */
        for (int i = 0; i < 500; i++) run_and_check(p);
        sti_pool_free(p);
    }
}

/* Who ran what, and a task whose shares take their time. */
typedef struct taken {
    pthread_t caller;
    bool by_caller[MOST];
    atomic_int begun;
} taken;

static void note(void *arg, int w, int workers)
{
    taken *t = arg;
    (void)workers;
    t->by_caller[w] = pthread_equal(pthread_self(), t->caller);
}

/* Workers that sleep come too late for a task that is nothing: the caller does not wait
 * for them. */
static void the_caller_takes_what_nobody_began(void **state)
{
    (void)state;
    sti_pool *p;
    still_error e;
    taken t = {.caller = pthread_self()};
    assert_int_equal(sti_pool_new(4, &p, &e), STILL_OK);
    int tries = 0;
    do {
        usleep(2000);
        sti_pool_run(p, note, &t);
        assert_true(t.by_caller[0]);
    } while (!(t.by_caller[1] && t.by_caller[2] && t.by_caller[3]) && ++tries < 1000);
    assert_true(tries < 1000);
    sti_pool_free(p);
}

/* The caller waits until its share is the last that is unfinished, or sees that a worker
 * has begun the other: both ways to the end of a task, the second asleep. */
static void dawdle(void *arg, int w, int workers)
{
    taken *t = arg;
    (void)workers;
    note(arg, w, workers);
    atomic_fetch_add(&t->begun, 1);
    if (w == 0)
        for (int i = 0; i < 1000 && atomic_load(&t->begun) == 1; i++) usleep(100);
    else
        usleep(3000);
}

static void the_caller_sleeps_until_others_are_done(void **state)
{
    (void)state;
    sti_pool *p;
    still_error e;
    int by_worker = 0;
    assert_int_equal(sti_pool_new(2, &p, &e), STILL_OK);
    for (int i = 0; i < 20; i++) {
        taken t = {.caller = pthread_self()};
        sti_pool_run(p, dawdle, &t);
        assert_int_equal(atomic_load(&t.begun), sti_pool_threads(p));
        by_worker += !t.by_caller[1];
        sti_pool_limit(p, 2); /* a worker that slept may have looked like a lost one */
    }
    assert_true(by_worker > 0);
    sti_pool_free(p);
}

/* Results of one task are there for the next one, whoever computes it. */
static void add(void *arg, int w, int workers)
{
    int64_t *x = arg, lo, hi;
    sti_split(100, 1, w, workers, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) x[i + 1]++;
}

static void sum(void *arg, int w, int workers)
{
    int64_t *x = arg, all = 0;
    (void)workers;
    for (int i = 0; i < 100; i++) all += x[i + 1];
    if (w == 0) x[0] = all; /* nobody else reads it */
}

static void tasks_follow_each_other(void **state)
{
    (void)state;
    sti_pool *p;
    still_error e;
    int64_t x[101] = {0};
    assert_int_equal(sti_pool_new(MOST, &p, &e), STILL_OK);
    for (int i = 1; i <= 2000; i++) {
        sti_pool_limit(p, 1 + i % MOST);
        sti_pool_run(p, add, x);
        sti_pool_run(p, sum, x);
        assert_int_equal(x[0], 100 * i);
    }
    sti_pool_free(p);
}

/* A clock of our own, in ms. */
enum { MS = 1000000 };

static void run_for(sti_pool_watch *w, uint64_t *now, int ms, int lost_of_ten)
{
    for (int i = 0; i < ms; i += 10) {
        const uint64_t lost = (uint64_t)lost_of_ten * MS;
        *now += 10 * (uint64_t)MS;
        if (sti_pool_watch_workers(w, *now) < 2) continue;
        if (sti_pool_watch_due(w, *now)) sti_pool_watch_caller(w, *now, *now);
        /* the worker ran for half a ms of the wait */
        if (lost) sti_pool_watch_wait(w, *now - lost - MS / 2, *now, MS / 2);
    }
}

static void a_lost_core_is_noticed(void **state)
{
    (void)state;
    sti_pool_watch w;
    uint64_t now = 1000 * (uint64_t)MS;
    sti_pool_watch_init(&w, 2);
    run_for(&w, &now, 1000, 0);
    assert_int_equal(w.workers, 2);
    run_for(&w, &now, 1000, 1); /* a tenth is no reason */
    assert_int_equal(w.workers, 2);
    run_for(&w, &now, 50, 6);
    assert_int_equal(w.workers, 1);
    int at_work = 0; /* of 10 s, in units of 10 ms: trials get rare */
    for (int i = 0; i < 1000; i++) {
        run_for(&w, &now, 10, 6);
        at_work += w.workers == 2;
    }
    assert_in_range(at_work, 0, 20);
    run_for(&w, &now, 2000, 0); /* the neighbour is gone */
    assert_int_equal(w.workers, 2);
    run_for(&w, &now, 1000, 0);
    assert_int_equal(w.workers, 2);
    run_for(&w, &now, 50, 6); /* and comes again: a short pause first */
    assert_int_equal(w.workers, 1);
    run_for(&w, &now, 150, 0);
    assert_int_equal(w.workers, 2);
}

/* The caller has a core for some tenths of the time; then it reads from somewhere. */
static void a_caller_without_a_core_counts(void **state)
{
    (void)state;
    sti_pool_watch w;
    uint64_t now = 1000 * (uint64_t)MS, ran = 0;
    sti_pool_watch_init(&w, 2);
    for (int i = 0; i < 1000; i++, now += MS, ran += MS * 8 / 10)
        if (sti_pool_watch_due(&w, now)) sti_pool_watch_caller(&w, now, ran);
    assert_int_equal(w.workers, 2);
    for (int i = 0; i < 50; i++, now += 40 * (uint64_t)MS) /* busy elsewhere */
        if (sti_pool_watch_due(&w, now)) sti_pool_watch_caller(&w, now, ran);
    assert_int_equal(w.workers, 2);
    for (int i = 0; i < 60; i++, now += MS, ran += MS / 2)
        if (sti_pool_watch_due(&w, now)) sti_pool_watch_caller(&w, now, ran);
    assert_int_equal(w.workers, 1);
}

static void a_long_share_is_no_lost_core(void **state)
{
    (void)state;
    sti_pool_watch w;
    sti_pool_watch_init(&w, 2);
    for (uint64_t now = 10 * (uint64_t)MS; now < 1000 * (uint64_t)MS; now += 9 * MS)
        sti_pool_watch_wait(&w, now, now + 8 * (uint64_t)MS, 8 * (uint64_t)MS);
    assert_int_equal(w.workers, 2);
}

static void workers_go_and_come_one_by_one(void **state)
{
    (void)state;
    sti_pool_watch w;
    uint64_t now = 0;
    sti_pool_watch_init(&w, 4);
    for (int left = 3; left >= 1; left--) {
        now += 30 * (uint64_t)MS;
        sti_pool_watch_wait(&w, now - 20 * (uint64_t)MS, now, 0);
        assert_int_equal(w.workers, left);
    }
    sti_pool_watch_wait(&w, now, now + 900 * (uint64_t)MS, 0);
    assert_int_equal(w.workers, 1); /* never fewer */
    for (int i = 0; i < 100; i++) {
        const int was = w.workers;
        now += 50 * (uint64_t)MS;
        assert_in_range(sti_pool_watch_workers(&w, now), was, was + 1);
    }
    assert_int_equal(w.workers, 4);
}

static void cores_are_processors_or_fewer(void **state)
{
    (void)state;
    assert_in_range(sti_cores(), 1, sti_processors());
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

/* A child of fork() has the pool but not its threads: it can compute and free. */
static void a_child_computes_alone(void **state)
{
    (void)state;
    sti_pool *p;
    still_error e;
    int status;
    assert_int_equal(sti_pool_new(MOST, &p, &e), STILL_OK);
    run_and_check(p);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        counts c = {0};
        alarm(30); /* rather than wait for a thread that is not there */
        sti_pool_run(p, count, &c);
        for (int w = 0; w < c.workers[0]; w++)
            if (c.hits[w] != 1) _exit(1);
        sti_pool_free(p);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    run_and_check(p);
    sti_pool_free(p);
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

RUN_TESTS(cmocka_unit_test(every_share_of_every_task),
          cmocka_unit_test(the_caller_takes_what_nobody_began),
          cmocka_unit_test(the_caller_sleeps_until_others_are_done),
          cmocka_unit_test(tasks_follow_each_other),
          cmocka_unit_test(a_lost_core_is_noticed),
          cmocka_unit_test(a_caller_without_a_core_counts),
          cmocka_unit_test(a_long_share_is_no_lost_core),
          cmocka_unit_test(workers_go_and_come_one_by_one),
          cmocka_unit_test(cores_are_processors_or_fewer),
          cmocka_unit_test(split_covers_all_once),
          cmocka_unit_test(a_child_computes_alone), cmocka_unit_test(absurd_counts))
