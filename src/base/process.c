/* process.c - memory as the system reports it; see process.h. Where it does not report,
 * memory is assumed to be plentiful. */
#include "base/process.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number after `key` in a file of lines, or its first number if key is empty. */
static size_t number_in(const char *path, const char *key, size_t otherwise)
{
    char line[256];
    FILE *f = fopen(path, "re");
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

/* Without a FILE, whose buffer would be an allocation that may fail. */
size_t sti_rss(void)
{
    char text[128], *end;
    const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t n = read(file, text, sizeof text - 1);
    close(file);
    if (n <= 0) return 0;
    text[n] = 0;
    strtoull(text, &end, 10); /* all pages, then those in memory */
    return (size_t)strtoull(end, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
}

size_t sti_memory_free(void)
{
    static const char *const limits[] = {"/sys/fs/cgroup/memory.max",
                                         "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    const size_t kib = number_in("/proc/meminfo", "MemAvailable:", SIZE_MAX >> 10);
    size_t left = kib << 10;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const size_t limit = number_in(limits[i], "", SIZE_MAX), own = sti_rss();
        const size_t free_bytes = limit > own ? limit - own : 0;
        if (free_bytes < left) left = free_bytes;
    }
    return left;
}

void sti_peak_rss_restart(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "we");
    if (!f) return;
    fputs("5", f);
    fclose(f);
}
