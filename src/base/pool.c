/* pool.c - see pool.h.
 *
 * Raising `task` publishes a task; a worker that sees a new one claims its share, runs
 * it and reports on a cache line of its own. Moving a line between cores takes 50 to
 * 250 ns, so on a quiet machine no two threads write the same one: a task costs one
 * transfer of its line to the worker and one of the worker's line back.
 *
 * Beside other programs a worker may be late, or lose its core in the middle of a
 * share. Shares of a late worker are the caller's. For one that was begun the caller
 * spins a little and then sleeps: that frees a core, and the kernel moves the worker
 * there. The time in which workers had no core is measured while the caller waits
 * (pool_watch.h), and says how many workers are worth waking.
 *
 * All sharing is through atomics, so ThreadSanitizer can follow it. */
#include "base/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/mem.h"
#include "base/pool_watch.h"

enum {
    MAX_THREADS = 1024,
    QUICK_SPINS = 64,   /* before a thread that waits looks at the clock */
    CALLER_NS = 30000,  /* then it spins so long before it sleeps; a worker must */
    WORKER_NS = 200000, /* outlast what the caller does alone between two steps */
    SHARE_BITS = 16,
};

/* Written by the worker alone, unless the caller takes its share or sleeps. */
typedef struct share {
    _Alignas(64) _Atomic uint64_t claimed; /* the last task in which it was taken */
    _Atomic uint64_t done; /* 2 * the last task in which it was finished, + 1 if the
                            * caller sleeps until the next is */
} share;

struct sti_pool {
    _Alignas(
        64) _Atomic uint64_t task; /* number << SHARE_BITS | shares; written last: */
    sti_task fn;
    void *arg;
    _Alignas(64) int threads;
    int started;   /* threads that run, with the caller, */
    pid_t process; /* in this process: a child of fork() has none of them */
    atomic_bool stop;
    atomic_uint *asleep;   /* [threads] 1: the worker sleeps on this word */
    share *share;          /* [threads] */
    pthread_t *thread;     /* [threads], from 1 on */
    struct worker *worker; /* [threads] what each thread starts with */
    sti_pool_watch watch;
};

typedef struct worker {
    sti_pool *p;
    int w;
} worker;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Sleeps until the word is woken, unless it is no longer `was`. */
static void sleep_on(const void *word, uint32_t was)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, was, NULL, NULL, 0);
}

static void wake(const void *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The half of a counter that changes whenever it does: a futex has 32 bits. */
static const void *low_half(const _Atomic uint64_t *x)
{
    const uint16_t one = 1;
    return (const char *)x + (*(const char *)&one ? 0 : 4);
}

/* ---- Shares -------------------------------------------------------------- */

/* Runs share w of a task, if nobody has taken it. Only while the task is unfinished can
 * the claim succeed, and then fn and arg stay as they are until `done` is written; so a
 * worker that comes too late never looks at them. */
static void run_share(sti_pool *p, int w, int shares, uint64_t number)
{
    share *s = &p->share[w];
    uint64_t was = atomic_load_explicit(&s->claimed, memory_order_relaxed);
    if (was >= number ||
        !atomic_compare_exchange_strong_explicit(
            &s->claimed, &was, number, memory_order_acq_rel, memory_order_relaxed))
        return;
    p->fn(p->arg, w, shares);
    if (atomic_exchange_explicit(&s->done, 2 * number, memory_order_acq_rel) & 1)
        wake(low_half(&s->done));
}

/* The next task that has a share for worker w. */
static uint64_t await_task(sti_pool *p, int w, uint64_t seen)
{
    uint64_t until = 0, task;
    for (int spins = 0;; spins++) {
        task = atomic_load_explicit(&p->task, memory_order_acquire);
        if (task != seen && w < (int)(task & ((1 << SHARE_BITS) - 1))) return task;
        relax();
        if (spins % QUICK_SPINS != QUICK_SPINS - 1) continue;
        const uint64_t now = sti_clock_ns();
        if (until == 0) until = now + WORKER_NS;
        if (now < until) continue;
        atomic_store(&p->asleep[w], 1); /* seq_cst: before the load; see publish */
        task = atomic_load(&p->task);
        if (task == seen || w >= (int)(task & ((1 << SHARE_BITS) - 1)))
            sleep_on(&p->asleep[w], 1);
        atomic_store(&p->asleep[w], 0);
        until = 0;
    }
}

/* A worker allocates and frees nothing, not even at its start: with its first call of malloc
 * or free the C library maps a heap for the thread, whenever that comes to run. */
static void *work(void *v)
{
    const worker *a = v;
    sti_pool *p = a->p;
    for (uint64_t seen = 0;;) {
        seen = await_task(p, a->w, seen);
        if (atomic_load_explicit(&p->stop, memory_order_acquire)) return NULL;
        run_share(p, a->w, (int)(seen & ((1 << SHARE_BITS) - 1)), seen >> SHARE_BITS);
    }
}

/* Returns the task's number. */
static uint64_t publish(sti_pool *p, int shares)
{
    const uint64_t number =
        (atomic_load_explicit(&p->task, memory_order_relaxed) >> SHARE_BITS) + 1;
    atomic_store(&p->task, number << SHARE_BITS | (uint64_t)shares);
    for (int w = 1; w < shares; w++)
        if (atomic_load(&p->asleep[w])) {
            atomic_store(&p->asleep[w], 0);
            wake(&p->asleep[w]);
        }
    return number;
}

/* ---- The caller ---------------------------------------------------------- */

static bool is_done(const share *s, uint64_t number)
{
    return atomic_load_explicit(&s->done, memory_order_acquire) >= 2 * number;
}

/* Waits for a share that worker w has begun. */
static void await_share(sti_pool *p, int w, uint64_t number)
{
    share *s = &p->share[w];
    for (int i = 0; i < QUICK_SPINS; i++, relax())
        if (is_done(s, number)) return;
    const uint64_t start = sti_clock_ns();
    uint64_t now = start;
    for (int i = 0; now - start < CALLER_NS; i++, relax()) {
        if (is_done(s, number)) return;
        if (i % QUICK_SPINS == 0) now = sti_clock_ns();
    }
    const uint64_t ran = sti_thread_ns(p->thread[w]);
    for (;;) {
        uint64_t done = atomic_load_explicit(&s->done, memory_order_acquire);
        if (done >= 2 * number) break;
        if ((done & 1) || atomic_compare_exchange_weak(&s->done, &done, done | 1))
            sleep_on(low_half(&s->done), (uint32_t)(done | 1));
    }
    sti_pool_watch_wait(&p->watch, now, sti_clock_ns(),
                        sti_thread_ns(p->thread[w]) - ran);
}

void sti_pool_run(sti_pool *p, sti_task fn, void *arg)
{
    sti_pool_watch *watch = &p->watch;
    const uint64_t now = watch->threads > 1 ? sti_clock_ns() : 0;
    const int shares = sti_pool_watch_workers(watch, now);
    if (shares == 1) {
        fn(arg, 0, 1);
        return;
    }
    if (sti_pool_watch_due(watch, now))
        sti_pool_watch_caller(watch, now, sti_thread_ns(pthread_self()));
    p->fn = fn;
    p->arg = arg;
    const uint64_t number = publish(p, shares);
    fn(arg, 0, shares);
    for (int w = 1; w < shares; w++) run_share(p, w, shares, number);
    for (int w = 1; w < shares; w++) await_share(p, w, number);
}

/* ---- The pool ------------------------------------------------------------ */

still_status sti_pool_new(int threads, sti_pool **out, still_error *err)
{
    *out = NULL;
    if (threads == 0) threads = sti_cores();
    if (threads < 1 || threads > MAX_THREADS)
        return sti_fail(err, STILL_E_ARG, "threads: %d is not between 1 and %d",
                        threads, MAX_THREADS);
    sti_pool *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
    if (!p) return sti_fail_memory(err, "thread pool", sizeof *p);
    *p = (sti_pool){.threads = threads, .started = 1, .process = getpid()};
    sti_pool_watch_init(&p->watch, threads);
    const size_t lines = (size_t)threads * sizeof *p->share;
    p->thread = sti_alloc((size_t)threads, sizeof *p->thread);
    p->worker = sti_alloc((size_t)threads, sizeof *p->worker);
    p->asleep = sti_alloc((size_t)threads, sizeof *p->asleep);
    p->share = aligned_alloc(64, lines);
    if (!p->thread || !p->worker || !p->asleep || !p->share) {
        sti_pool_free(p);
        return sti_fail_memory(err, "thread pool", lines);
    }
    memset(p->share, 0, lines);
    for (int i = 1; i < threads; i++) {
        p->worker[i] = (worker){p, i};
        if (pthread_create(&p->thread[i], NULL, work, &p->worker[i]) != 0) {
            sti_pool_free(p);
            return sti_fail(err, STILL_E_MEMORY,
                            "cannot start thread %d of %d: out of memory, or the "
                            "system allows no more threads",
                            i + 1, threads);
        }
        p->started = i + 1;
    }
    *out = p;
    return STILL_OK;
}

void sti_pool_free(sti_pool *p)
{
    if (!p) return;
    atomic_store_explicit(&p->stop, true, memory_order_release);
    const int started = p->process == getpid() ? p->started : 1;
    if (started > 1) publish(p, started);
    for (int i = 1; i < started; i++) pthread_join(p->thread[i], NULL);
    free(p->thread);
    free(p->worker);
    free(p->asleep);
    free(p->share);
    free(p);
}

int sti_pool_threads(const sti_pool *p)
{
    return p->threads;
}

void sti_pool_limit(sti_pool *p, int n)
{
    sti_pool_watch_init(&p->watch, n < p->threads ? n : p->threads);
}

void sti_split(int64_t n, int64_t grain, int w, int workers, int64_t *lo, int64_t *hi)
{
    int64_t parts = (n + grain - 1) / grain;
    *lo = parts * w / workers * grain;
    *hi = parts * (w + 1) / workers * grain;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}
