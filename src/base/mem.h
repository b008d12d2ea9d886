/* mem.h - memory whose sizes are checked before they are multiplied.
 *
 * Plain objects: sti_alloc / free(). Large arrays that kernels stream through:
 * sti_block, 64-byte aligned, on huge pages where the system gives them. */
#ifndef STI_BASE_MEM_H
#define STI_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* n * size zeroed bytes, or NULL if that overflows or does not fit. free() it. */
void *sti_alloc(size_t n, size_t size);
/* Like realloc for arrays of n elements; the old block survives failure. */
void *sti_grow(void *p, size_t n, size_t size);
char *sti_strdup(const char *s);
char *sti_strndup(const char *s, size_t n);

/* a * b and a + b into *out; false on overflow. */
static inline bool sti_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool sti_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

size_t sti_page_size(void);

/* One aligned, zeroed allocation in a mapping of its own. Freeing returns it to the
 * system at once, so the bill of memory is what the system shows. */
typedef struct sti_block {
    void *p;
    size_t bytes;
} sti_block;
bool sti_block_new(sti_block *b, size_t bytes); /* false: no memory; b zeroed */
/* The same on small pages, each of which takes memory when it is first written. */
bool sti_block_new_sparse(sti_block *b, size_t bytes);
void sti_block_free(sti_block *b);
/* The first n bytes, in whole pages, are not needed any more: they take no memory and read
 * as zero. */
void sti_block_forget(sti_block *b, size_t n);

/* Carves aligned pieces out of one block. A first pass with base NULL counts bytes, a
 * second hands out memory, so the same code gives the size and the layout. */
typedef struct sti_carve {
    unsigned char *base; /* NULL: count only */
    size_t used;
} sti_carve;
enum { STI_CARVE_ALIGN = 64 };

static inline void *sti_carve_take(sti_carve *c, size_t n, size_t size)
{
    size_t bytes, at = (c->used + STI_CARVE_ALIGN - 1) & ~(size_t)(STI_CARVE_ALIGN - 1);
    /* An impossible size stays impossible: sti_block_new refuses it. */
    if (!sti_mul(n, size, &bytes) || !sti_add(at, bytes, &c->used))
        c->used = SIZE_MAX - STI_CARVE_ALIGN;
    return c->base ? c->base + at : NULL;
}

#endif
