/* pool_watch.c - see pool_watch.h. */
#include "base/pool_watch.h"

#include <time.h>

#define MS UINT64_C(1000000)

/* The kernel takes a core away for a slice of 3 or 4 ms. A window must not take one slice
 * for a lost core. */
#define WINDOW (25 * MS)
#define PAUSE_MIN (100 * MS) /* between losing a worker and trying again */
#define PAUSE_MAX (1600 * MS)
/* A worker that slept has a claim to a core, so for a while it runs beside anything: one
 * that is lost within this time was never really back. */
#define BACK (1000 * MS)

uint64_t sti_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

uint64_t sti_thread_ns(pthread_t t)
{
    struct timespec ran = {0};
    clockid_t id;
    if (pthread_getcpuclockid(t, &id) == 0) clock_gettime(id, &ran);
    return (uint64_t)ran.tv_sec * 1000 * MS + (uint64_t)ran.tv_nsec;
}

void sti_pool_watch_init(sti_pool_watch *w, int threads)
{
    *w = (sti_pool_watch){.threads = threads, .workers = threads, .pause = PAUSE_MIN};
}

/* What is lost counts from `now` on; the caller's time is to be read. */
static void restart(sti_pool_watch *w, uint64_t now)
{
    w->since = now;
    w->lost = w->slept = 0;
    w->known = false;
}

int sti_pool_watch_workers(sti_pool_watch *w, uint64_t now)
{
    if (w->workers == w->threads || now < w->again) return w->workers;
    w->workers++;
    w->raised = now;
    w->again = now + WINDOW; /* the next one, if this one stays */
    restart(w, now);
    return w->workers;
}

/* Two workers take 0.6 to 0.75 of the time of one, so they are slower than one when they
 * stand still for 0.3 of theirs. Of n workers each does 1/n of the work. Waking one less
 * begins a new window. */
static void judge(sti_pool_watch *w, uint64_t now)
{
    const uint64_t time = now - w->since > WINDOW ? now - w->since : WINDOW;
    if (w->workers == 1 || w->lost <= time * 3 / (5 * (uint64_t)w->workers)) return;
    if (now - w->raised > BACK) w->pause = PAUSE_MIN;
    w->workers--;
    w->again = now + w->pause;
    w->pause = 2 * w->pause < PAUSE_MAX ? 2 * w->pause : PAUSE_MAX;
    restart(w, now);
}

void sti_pool_watch_wait(sti_pool_watch *w, uint64_t from, uint64_t to, uint64_t ran)
{
    w->slept += to - from;
    if (to - from > ran) w->lost += to - from - ran;
    judge(w, to);
}

bool sti_pool_watch_due(sti_pool_watch *w, uint64_t now)
{
    if (now - w->last > WINDOW) restart(w, now); /* it was busy with something else */
    w->last = now;
    return !w->known || now - w->since >= WINDOW;
}

void sti_pool_watch_caller(sti_pool_watch *w, uint64_t now, uint64_t ran)
{
    const uint64_t time = now - w->since, own = ran - w->ran + w->slept;
    if (w->known && own < time) {
        w->lost += time - own;
        judge(w, now);
    }
    restart(w, now);
    w->ran = ran;
    w->known = true;
}
