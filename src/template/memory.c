/* memory.c - the memory of a parse or a run: an arena with a cap; and the other limits of a
 * run, with its first failure. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "template/ast.h"

/* ---- The arena ----------------------------------------------------------- */

enum { ALIGN = 16, SMALLEST = 4096, LARGEST = 1 << 20 };

struct sti_arena_block {
    sti_arena_block *next;
    _Alignas(ALIGN) unsigned char bytes[];
};

/* Blocks double up to LARGEST, so a small template costs little; a large piece gets a
 * block of its own size. */
static bool add_block(sti_arena *a, size_t n)
{
    size_t size = a->room ? 2 * a->room : SMALLEST, bytes;
    if (size > LARGEST) size = LARGEST;
    if (size < n) size = n;
    a->over = size > a->limit || a->total > a->limit - size;
    if (a->over || !sti_add(size, sizeof(sti_arena_block), &bytes)) return false;
    sti_arena_block *b = sti_alloc(1, bytes);
    if (!b) return false;
    b->next = a->block;
    a->block = b;
    a->used = 0;
    a->room = size;
    a->total += size;
    return true;
}

void *sti_arena_take(sti_arena *a, size_t n)
{
    if (n > SIZE_MAX - ALIGN) {
        a->over = true;
        return NULL;
    }
    n = (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    if ((!a->block || n > a->room - a->used) && !add_block(a, n)) return NULL;
    void *p = a->block->bytes + a->used;
    a->used += n;
    return p;
}

void sti_arena_free(sti_arena *a)
{
    for (sti_arena_block *b = a->block, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    *a = (sti_arena){0};
}

/* ---- A run --------------------------------------------------------------- */

enum { MOST_DEPTH = 400 }; /* of expressions, statements, macros and values together */

sti_tval sti_run_fail(sti_run *r, still_status code, const char *fmt, ...)
{
    char text[640];
    if (r->failed) return STI_T_UNDEF;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    r->failed = true;
    r->status = sti_template_fail(r->t, r->at, code, text, r->err);
    return STI_T_UNDEF;
}

void *sti_run_take(sti_run *r, size_t n, size_t size)
{
    size_t bytes;
    if (r->failed) return NULL;
    if (!sti_mul(n, size, &bytes)) bytes = SIZE_MAX;
    void *p = sti_arena_take(&r->mem, bytes);
    if (!p && r->mem.over)
        sti_run_fail(r, STILL_E_LIMIT, "the template needs more than %zu MiB of memory",
                     r->mem.limit >> 20);
    else if (!p)
        sti_run_fail(r, STILL_E_MEMORY, "out of memory: %zu bytes", bytes);
    return p;
}

bool sti_run_step(sti_run *r, size_t cost)
{
    r->steps += cost;
    if (r->steps > r->most_steps)
        sti_run_fail(r, STILL_E_LIMIT, "the template takes more than %llu steps",
                     (unsigned long long)r->most_steps);
    return !r->failed;
}

bool sti_run_enter(sti_run *r)
{
    if (++r->depth > MOST_DEPTH)
        sti_run_fail(r, STILL_E_LIMIT,
                     "macros, expressions or values are nested more than %d deep",
                     MOST_DEPTH);
    return sti_run_step(r, 1);
}
