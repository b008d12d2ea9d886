/* oom.h - allocations that fail when a test says so. The linker sends malloc, calloc
 * and realloc of our own code to the functions below (-Wl,--wrap, see
 * tests/CMakeLists.txt); included once by a test named *_oom.c. */
#ifndef TEST_OOM_H
#define TEST_OOM_H

#include <stdbool.h>
#include <stddef.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);

static long countdown = -1; /* allocations until the one that fails; < 0: none */
static long allocations;    /* so far */

static bool fails(void)
{
    allocations++;
    return countdown >= 0 && countdown-- == 0;
}
void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

#endif
