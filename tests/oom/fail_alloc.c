/* fail_alloc.c - a library for LD_PRELOAD: one allocation of a whole program fails.
 *
 * FAIL_AT=N   the N-th allocation returns NULL (0 or absent: none)
 * FAIL_COUNT  a file that gets the number of allocations when the program ends
 *
 * Allocations are malloc, calloc, realloc, aligned_alloc and posix_memalign of the program
 * and of every library it uses, libc's own among them, and anonymous mappings. They are
 * counted from main on: what runs before it (the dynamic linker, constructors) cannot
 * report anything. One thread, or the count is not repeatable. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t alignment, size_t n);

static atomic_long count, fail_at;
static atomic_bool on;

static bool fails(void)
{
    if (!on || atomic_fetch_add(&count, 1) + 1 != fail_at) return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t n)
{
    return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return n && fails() ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t alignment, size_t n)
{
    return fails() ? NULL : __libc_memalign(alignment, n);
}

int posix_memalign(void **out, size_t alignment, size_t n)
{
    void *p = fails() ? NULL : __libc_memalign(alignment, n);
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}

void *mmap(void *at, size_t n, int access, int flags, int fd, off_t from)
{
    if ((flags & MAP_ANONYMOUS) && fails()) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, n, access, flags, fd, from);
}

static void report(void)
{
    const char *path = getenv("FAIL_COUNT");
    char text[32];
    on = false;
    const int fd = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    const int n = snprintf(text, sizeof text, "%ld\n", (long)count);
    if (fd < 0 || write(fd, text, (size_t)n) != n) _exit(99);
    close(fd);
}

static int (*real_main)(int, char **, char **);

static int counted_main(int argc, char **argv, char **env)
{
    const char *at = getenv("FAIL_AT");
    if (getenv("FAIL_COUNT")) atexit(report);
    fail_at = at ? atol(at) : 0;
    on = true;
    return real_main(argc, argv, env);
}

/* libc calls main through this. */
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv,
                      void (*init)(void), void (*fini)(void), void (*rtld_fini)(void),
                      void *stack_end);
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv,
                      void (*init)(void), void (*fini)(void), void (*rtld_fini)(void),
                      void *stack_end)
{
    int (*next)(int (*)(int, char **, char **), int, char **, void (*)(void),
                void (*)(void), void (*)(void), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return next(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
