/* process.h - the clock and the memory of this process. */
#ifndef STI_BASE_PROCESS_H
#define STI_BASE_PROCESS_H

#include <stddef.h>
#include <sys/resource.h>
#include <time.h>

/* Seconds of a clock that only goes forward. */
static inline double sti_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Peak resident memory of this process, in bytes. */
static inline size_t sti_peak_rss(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (size_t)use.ru_maxrss * 1024;
}
/* What it holds now, in bytes; 0 if the system does not say. */
size_t sti_rss(void);
/* Resets the peak to what the process holds now, where the system can do that. */
void sti_peak_rss_restart(void);

/* Bytes it could still allocate, by the system's estimate and its container's limit; a
 * huge number if the system does not say. */
size_t sti_memory_free(void);

#endif
