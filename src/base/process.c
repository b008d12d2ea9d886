/* process.c - memory as the system reports it; see process.h. Where it does not report,
 * memory is assumed to be plentiful. */
#include "base/process.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number after `key` in a file of lines, or its first number if key is empty. */
static size_t number_in(const char *path, const char *key, size_t otherwise)
{
    char line[256];
    FILE *f = fopen(path, "r");
    if (!f) return otherwise;
    size_t found = otherwise;
    while (found == otherwise && fgets(line, sizeof line, f)) {
        char *end;
        const char *at = line + strlen(key);
        if (strncmp(line, key, strlen(key)) != 0) continue;
        const unsigned long long n = strtoull(at, &end, 10);
        if (end != at && n < SIZE_MAX) found = (size_t)n;
    }
    fclose(f);
    return found;
}

/* Memory the process holds now. */
static size_t resident(void)
{
    unsigned long long all = 0, here = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f) return 0;
    const int read = fscanf(f, "%llu %llu", &all, &here); /* NOLINT(cert-err34-c) */
    fclose(f);
    return read == 2 ? (size_t)here * (size_t)sysconf(_SC_PAGESIZE) : 0;
}

size_t sti_memory_free(void)
{
    static const char *const limits[] = {"/sys/fs/cgroup/memory.max",
                                         "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    const size_t kib = number_in("/proc/meminfo", "MemAvailable:", SIZE_MAX >> 10);
    size_t left = kib << 10;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const size_t limit = number_in(limits[i], "", SIZE_MAX), own = resident();
        const size_t free_bytes = limit > own ? limit - own : 0;
        if (free_bytes < left) left = free_bytes;
    }
    return left;
}

void sti_peak_rss_restart(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (!f) return;
    fputs("5", f);
    fclose(f);
}
