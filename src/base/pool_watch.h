/* pool_watch.h - how many workers of a pool are worth waking.
 *
 * Beside a busy process a worker, or the caller, loses its core in the middle of a share,
 * for milliseconds, and all others wait for it: two workers are then slower than one. The
 * caller reports how long it waited for workers without a core, and how long it ran
 * itself. When all stood still for too much of the last milliseconds, one worker less is
 * woken for a while, and then again one more to see; the whiles grow as long as that
 * fails. A worker that is slow because its share is large runs all the time, and counts
 * as nothing lost. */
#ifndef STI_BASE_POOL_WATCH_H
#define STI_BASE_POOL_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct sti_pool_watch {
    int threads;    /* of the pool */
    int workers;    /* that it wakes */
    uint64_t since; /* the time over which `lost` is counted began, ns */
    uint64_t lost;  /* in which a worker, or the caller, had no core */
    uint64_t slept; /* in which the caller waited for workers */
    uint64_t ran;   /* of the caller at `since`: time it has had a core, if known */
    bool known;
    uint64_t last;   /* when a task began */
    uint64_t raised; /* when a worker came back, 0: never */
    uint64_t again;  /* when the next may */
    uint64_t pause;  /* until then, next time */
} sti_pool_watch;

void sti_pool_watch_init(sti_pool_watch *w, int threads);

/* The workers for a task that begins now; adds one when its time has come. */
int sti_pool_watch_workers(sti_pool_watch *w, uint64_t now);

/* The caller slept from..to for a worker that ran for `ran` ns of that. */
void sti_pool_watch_wait(sti_pool_watch *w, uint64_t from, uint64_t to, uint64_t ran);

/* A task begins for several workers. True: sti_pool_watch_caller is to be told for how
 * long the caller has had a core, in all. */
bool sti_pool_watch_due(sti_pool_watch *w, uint64_t now);
void sti_pool_watch_caller(sti_pool_watch *w, uint64_t now, uint64_t ran);

uint64_t sti_clock_ns(void);         /* monotonic */
uint64_t sti_thread_ns(pthread_t t); /* for which a thread had a core */

#endif
