/* bench.h - what benchmarks share: clocks, memory, random numbers, arguments, and
 * failures that end the program. Of the library it needs still.h alone. */
#ifndef BENCH_H
#define BENCH_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "still.h"

_Noreturn static inline void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
    exit(1);
}

static inline void must(still_status st, const still_error *err)
{
    if (st != STILL_OK) die(err->text);
}

/* ---- Measuring ----------------------------------------------------------- */

static inline double seconds_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double now(void)
{
    return seconds_of(CLOCK_MONOTONIC);
}

/* One thread is timed in CPU time, which other programs disturb less; several
 * threads by the clock. */
static inline double now_of(int threads)
{
    return seconds_of(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC);
}

static inline int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The fastest run first; the median is in the middle. */
static inline void sort_times(double *t, int n)
{
    qsort(t, (size_t)n, sizeof *t, by_value);
}

/* VmHWM, the most memory this process ever held; 0 where /proc does not tell. */
static inline uint64_t peak_rss(void)
{
    uint64_t kb = 0;
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (strncmp(line, "VmHWM:", 6) == 0) kb = strtoull(line + 6, NULL, 10);
    fclose(f);
    return kb * 1024;
}

/* ---- Numbers in [-gain, gain) -------------------------------------------- */

static inline void fill(float *x, size_t n, float gain, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = gain * ((float)(seed >> 8) / (1 << 23) - 1);
    }
}

static inline float *floats(size_t n, float gain, uint32_t seed)
{
    float *x = malloc(n * sizeof *x);
    if (!x) die("no memory");
    fill(x, n, gain, seed);
    return x;
}

/* ---- Arguments ----------------------------------------------------------- */

static inline int number_at(int i, int argc, char **argv, int otherwise)
{
    return i < argc ? atoi(argv[i]) : otherwise;
}

/* The instruction set, which comes first; NULL: the best there is. */
static inline const char *isa_of(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "best") != 0 ? argv[1] : NULL;
}

#endif
