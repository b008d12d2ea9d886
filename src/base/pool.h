/* pool.h - a pool of threads that work on one task at a time.
 *
 * A decode step is a few hundred short tasks of 5-50 microseconds, so handing one
 * out must cost less than a microsecond: workers spin for a while after each task
 * before they sleep. The caller is worker 0; a pool of one thread starts none. */
#ifndef STI_BASE_POOL_H
#define STI_BASE_POOL_H

#include "base/error.h"

typedef struct sti_pool sti_pool;
typedef void (*sti_task)(void *arg, int worker, int workers);

still_status sti_pool_new(int threads, sti_pool **out, still_error *err);
void sti_pool_free(sti_pool *p);
int sti_pool_threads(const sti_pool *p);
int sti_cores(void); /* cores this process may run on */

/* Runs fn(arg, w, workers) on every worker and returns when all are done. */
void sti_pool_run(sti_pool *p, sti_task fn, void *arg);

/* A barrier inside a task, for worker w: arrive signals, await blocks until every
 * worker has signalled as often as w, meet does both. It is cheaper than ending a
 * task and starting the next, because the caller prepares nothing in between. All
 * workers of a task arrive equally often; a worker that depends on no other need not
 * await. */
void sti_pool_arrive(sti_pool *p, int w);
void sti_pool_await(sti_pool *p, int w);
void sti_pool_meet(sti_pool *p, int w);

/* The share [*lo, *hi) of 0..n-1 of worker w of `workers`, cut at multiples of grain.
 * Static, so that results do not depend on timing. */
void sti_split(int64_t n, int64_t grain, int w, int workers, int64_t *lo, int64_t *hi);

#endif
