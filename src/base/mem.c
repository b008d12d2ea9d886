/* mem.c - see mem.h. */
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };

/* 4 KiB, but 16 or 64 on some machines. */
size_t sti_page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

void *sti_alloc(size_t n, size_t size)
{
    return calloc(n ? n : 1, size ? size : 1); /* calloc checks the product */
}

void *sti_grow(void *p, size_t n, size_t size)
{
    size_t bytes;
    if (!sti_mul(n, size, &bytes)) return NULL;
    return realloc(p, bytes ? bytes : 1);
}

char *sti_strndup(const char *s, size_t n)
{
    char *d = sti_alloc(n + 1, 1);
    if (d) memcpy(d, s, n);
    return d;
}

char *sti_strdup(const char *s)
{
    return sti_strndup(s, strlen(s));
}

static bool new_block(sti_block *b, size_t bytes, bool sparse)
{
    *b = (sti_block){0};
    if (bytes == 0) return true;
    if (bytes > SIZE_MAX / 2) return false;
    /* Blocks of several megabytes start on a huge page, so that the system can back
     * them with huge pages: weights then cost 16x fewer page walks per token. */
    size_t slack = !sparse && bytes >= 2u * HUGE_PAGE ? HUGE_PAGE : 0;
    unsigned char *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return false;
    if (slack) {
        size_t head = (HUGE_PAGE - ((uintptr_t)p & (HUGE_PAGE - 1))) & (HUGE_PAGE - 1);
        if (head) munmap(p, head);
        /* The tail is cut at the page after the last byte. */
        const size_t page = sti_page_size(), end = (head + bytes + page - 1) & -page;
        if (bytes + slack > end) munmap(p + end, bytes + slack - end);
        p += head;
        madvise(p, bytes, MADV_HUGEPAGE);
    }
    if (sparse) madvise(p, bytes, MADV_NOHUGEPAGE); /* also where they are the rule */
    b->p = p;
    b->bytes = bytes;
    return true;
}

bool sti_block_new(sti_block *b, size_t bytes)
{
    return new_block(b, bytes, false);
}

bool sti_block_new_sparse(sti_block *b, size_t bytes)
{
    return new_block(b, bytes, true);
}

void sti_block_forget(sti_block *b, size_t n)
{
    n = (n < b->bytes ? n : b->bytes) & -sti_page_size();
    if (n) madvise(b->p, n, MADV_DONTNEED);
}

void sti_block_free(sti_block *b)
{
    if (b->p) munmap(b->p, b->bytes);
    *b = (sti_block){0};
}
