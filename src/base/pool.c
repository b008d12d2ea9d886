/* pool.c - see pool.h.
 *
 * Raising `round` publishes a task; a worker that sees a new round runs the task and
 * reports on a cache line of its own. Moving a line between cores takes 50 to 250
 * ns, so no two threads write the same one: a task costs one transfer of its line to
 * the worker and one of the worker's line back, a barrier one transfer. Workers spin
 * for a while, then sleep on a condition variable. All sharing is through atomics
 * and the mutex, so ThreadSanitizer can follow it. */
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* Spins before a thread yields its processor, and before a worker sleeps. The first is
 * longer than any task of a decode step, so it matters only on a crowded machine. */
enum { SPIN_POLITE = 4000, SPIN_SLEEP = 20000, MAX_THREADS = 1024 };

/* Written by one worker alone. */
typedef struct own_line {
    _Alignas(64) atomic_uint done; /* the last round it has finished */
    atomic_uint arrived;           /* barriers it has arrived at, ever */
} own_line;

struct sti_pool {
    _Alignas(64) atomic_uint round; /* raised once per task, last: */
    int threads;
    sti_task fn;
    void *arg;
    _Alignas(64) atomic_int asleep; /* workers waiting on `wake` */
    atomic_bool stop;
    own_line *own; /* [threads] */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t *thread; /* [threads - 1] */
};

typedef struct start_arg {
    sti_pool *p;
    int worker;
} start_arg;

static inline void relax(int spins)
{
    if (spins >= SPIN_POLITE) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Spins until *count has reached n; the counter may wrap around. */
static void wait_for(const atomic_uint *count, unsigned n)
{
    for (int spins = 0;
         (int)(atomic_load_explicit(count, memory_order_acquire) - n) < 0;)
        relax(spins < SPIN_POLITE ? spins++ : spins);
}

static void *work(void *v)
{
    start_arg a = *(start_arg *)v;
    free(v);
    sti_pool *p = a.p;
    unsigned seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&p->round, memory_order_acquire) == seen) {
            if (++spins < SPIN_SLEEP) {
                relax(spins);
                continue;
            }
            pthread_mutex_lock(&p->lock);
            atomic_fetch_add(&p->asleep, 1);
            while (atomic_load(&p->round) == seen)
                pthread_cond_wait(&p->wake, &p->lock);
            atomic_fetch_sub(&p->asleep, 1);
            pthread_mutex_unlock(&p->lock);
        }
        seen++;
        if (atomic_load_explicit(&p->stop, memory_order_acquire)) return NULL;
        p->fn(p->arg, a.worker, p->threads);
        atomic_store_explicit(&p->own[a.worker].done, seen, memory_order_release);
    }
}

static unsigned publish(sti_pool *p)
{
    /* seq_cst: ordered before the load below */
    const unsigned round = atomic_fetch_add(&p->round, 1) + 1;
    if (atomic_load(&p->asleep) > 0) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    return round;
}

void sti_pool_run(sti_pool *p, sti_task fn, void *arg)
{
    if (p->threads == 1) {
        fn(arg, 0, 1);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    const unsigned round = publish(p);
    fn(arg, 0, p->threads);
    for (int w = 1; w < p->threads; w++) wait_for(&p->own[w].done, round);
}

void sti_pool_arrive(sti_pool *p, int w)
{
    atomic_uint *mine = &p->own[w].arrived;
    const unsigned was = atomic_load_explicit(mine, memory_order_relaxed);
    atomic_store_explicit(mine, was + 1, memory_order_release);
}

void sti_pool_await(sti_pool *p, int w)
{
    const unsigned mine =
        atomic_load_explicit(&p->own[w].arrived, memory_order_relaxed);
    for (int v = 0; v < p->threads; v++) wait_for(&p->own[v].arrived, mine);
}

void sti_pool_meet(sti_pool *p, int w)
{
    sti_pool_arrive(p, w);
    sti_pool_await(p, w);
}

int sti_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return 1;
}

still_status sti_pool_new(int threads, sti_pool **out, still_error *err)
{
    *out = NULL;
    if (threads == 0) threads = sti_cores();
    if (threads < 1 || threads > MAX_THREADS)
        return sti_fail(err, STILL_E_ARG, "threads: %d is not between 1 and %d",
                        threads, MAX_THREADS);
    sti_pool *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
    if (!p) return sti_fail_memory(err, "thread pool", sizeof *p);
    *p = (sti_pool){.threads = 1};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    const size_t lines = (size_t)threads * sizeof *p->own;
    p->thread = sti_alloc((size_t)threads, sizeof *p->thread);
    p->own = aligned_alloc(64, lines);
    if (!p->thread || !p->own) {
        sti_pool_free(p);
        return sti_fail_memory(err, "thread pool", lines);
    }
    memset(p->own, 0, lines);
    for (int i = 1; i < threads; i++) {
        start_arg *a = malloc(sizeof *a);
        if (a) *a = (start_arg){p, i};
        if (!a || pthread_create(&p->thread[i - 1], NULL, work, a) != 0) {
            free(a);
            sti_pool_free(p);
            return sti_fail(err, STILL_E_MEMORY,
                            "cannot start thread %d of %d: out of memory, or the "
                            "system allows no more threads",
                            i + 1, threads);
        }
        p->threads = i + 1;
    }
    *out = p;
    return STILL_OK;
}

void sti_pool_free(sti_pool *p)
{
    if (!p) return;
    atomic_store_explicit(&p->stop, true, memory_order_release);
    publish(p);
    for (int i = 1; i < p->threads; i++) pthread_join(p->thread[i - 1], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->thread);
    free(p->own);
    free(p);
}

int sti_pool_threads(const sti_pool *p)
{
    return p->threads;
}

void sti_split(int64_t n, int64_t grain, int w, int workers, int64_t *lo, int64_t *hi)
{
    int64_t parts = (n + grain - 1) / grain;
    *lo = parts * w / workers * grain;
    *hi = parts * (w + 1) / workers * grain;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}
