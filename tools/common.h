/* common.h - shared by the tools that write models: errors, progress, disk space. */
#ifndef TOOLS_COMMON_H
#define TOOLS_COMMON_H

#include <errno.h>
#include <libgen.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "file/store.h"

/* One line on stderr. */
__attribute__((format(printf, 2, 3))) static inline void
print_complaint(const char *tool, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s: ", tool);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}
/* The same with the exit status as its value: return complain(TOOL, 2, ...); */
#define complain(tool, status, ...) (print_complaint(tool, __VA_ARGS__), (status))

typedef struct progress {
    const char *tool;
    uint64_t done, total; /* bytes */
    struct timespec start, shown;
    bool terminal;
} progress;

static inline double seconds_since(const struct timespec *t)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - t->tv_sec) + 1e-9 * (double)(now.tv_nsec - t->tv_nsec);
}

static inline void progress_start(progress *p, const char *tool, uint64_t total)
{
    *p = (progress){.tool = tool, .total = total, .terminal = isatty(STDERR_FILENO)};
    clock_gettime(CLOCK_MONOTONIC, &p->start);
    p->shown = p->start;
}

/* A line that is rewritten on a terminal; elsewhere one line every ten seconds. */
static inline void progress_add(progress *p, uint64_t bytes)
{
    p->done += bytes;
    bool last = p->done == p->total;
    if (!last && seconds_since(&p->shown) < (p->terminal ? 0.2 : 10)) return;
    clock_gettime(CLOCK_MONOTONIC, &p->shown);
    double elapsed = seconds_since(&p->start) + 1e-9;
    double rate = (double)p->done / elapsed;
    fprintf(stderr, "%s%s: %.1f of %.1f MB, %.0f MB/s, %.0f s left%s",
            p->terminal ? "\r" : "", p->tool, (double)p->done * 1e-6,
            (double)p->total * 1e-6, rate * 1e-6, (double)(p->total - p->done) / rate,
            p->terminal && !last ? "   " : "\n");
}

/* Whether the file system of path has room for `bytes`; path may not exist yet. */
static inline still_status check_free_space(const char *path, uint64_t bytes,
                                            still_error *err)
{
    struct statvfs fs;
    char *copy = sti_strdup(path);
    if (!copy) return sti_fail_memory(err, path, strlen(path) + 1);
    int rc = statvfs(dirname(copy), &fs);
    free(copy);
    if (rc != 0) return sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
    uint64_t capacity = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (capacity < bytes)
        return sti_fail(err, STILL_E_IO, "%s: needs %.1f MB, the disk has %.1f MB free",
                        path, (double)bytes * 1e-6, (double)capacity * 1e-6);
    return STILL_OK;
}

/* general.file_type of a file whose matrices have type t. */
static inline uint32_t file_type(sti_dtype t)
{
    switch (t) {
    case STI_F32: return 0;
    case STI_F16: return 1;
    case STI_Q4_0: return 2;
    case STI_Q4_1: return 3;
    case STI_Q8_0: return 7;
    case STI_Q5_0: return 8;
    case STI_Q5_1: return 9;
    case STI_Q2_K: return 10;
    case STI_Q3_K: return 11;
    case STI_Q4_K: return 14;
    case STI_Q5_K: return 16;
    case STI_Q6_K: return 18;
    case STI_IQ4_NL: return 25;
    case STI_IQ4_XS: return 30;
    case STI_MXFP4: return 38;
    case STI_BF16: return 32;
    default: return 1024; /* "guessed" */
    }
}

#endif
