/* pool.h - a pool of threads that work on one task at a time.
 *
 * A decode step is a few hundred short tasks of 5-50 microseconds, so handing one
 * out must cost less than a microsecond: workers spin for a while after each task
 * before they sleep. The caller is worker 0; a pool of one thread starts none.
 *
 * A task is cut into shares. The caller takes over shares that nobody has begun when
 * its own is finished, and where other programs keep taking a core away, tasks are cut
 * into fewer shares for a while. So a share has no thread of its own, and what a task
 * computes must not depend on the number of shares. A child of fork() has the pool without
 * its threads: the caller then computes all shares. */
#ifndef STI_BASE_POOL_H
#define STI_BASE_POOL_H

#include "base/error.h"

typedef struct sti_pool sti_pool;

/* Computes share `worker` of `workers`, 1 <= workers <= sti_pool_threads(). No two
 * shares of the same number run at a time, so scratch may belong to a share. */
typedef void (*sti_task)(void *arg, int worker, int workers);

/* threads = 0: one for each core that this process may use. */
still_status sti_pool_new(int threads, sti_pool **out, still_error *err);
void sti_pool_free(sti_pool *p);
int sti_pool_threads(const sti_pool *p);
/* Uses at most n of the threads from now on; for tests. */
void sti_pool_limit(sti_pool *p, int n);

/* Runs fn(arg, w, workers) once for every w and returns when all are done. Shares may
 * run one after the other on the same thread: they must not wait for each other. */
void sti_pool_run(sti_pool *p, sti_task fn, void *arg);

/* The share [*lo, *hi) of 0..n-1 of worker w of `workers`, cut at multiples of grain. */
void sti_split(int64_t n, int64_t grain, int w, int workers, int64_t *lo, int64_t *hi);

#endif
