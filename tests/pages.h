/* pages.h - how much memory is mapped: scratch and large blocks are mapped, not taken from
 * malloc. */
#ifndef TESTS_PAGES_H
#define TESTS_PAGES_H

#include <stdio.h>

/* Pages of the process's address space; -1: not known, as under a sanitizer, which maps
 * memory of its own whenever a thread comes to run. */
static inline long mapped_pages(void)
{
#ifdef __SANITIZE_ADDRESS__
    return -1;
#endif
    long n = -1;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld", &n) != 1) n = -1;
    if (f) fclose(f);
    return n;
}

#endif
