/* buf.c - see buf.h. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t CAP = (size_t)1 << 40;

static bool reserve(sti_buf *b, size_t extra)
{
    if (b->failed) return false;
    if (extra >= CAP - b->n) goto fail;
    size_t need = b->n + extra + 1;
    if (need > b->capacity) {
        size_t capacity = b->capacity < 64 ? 64 : b->capacity;
        while (capacity < need) capacity *= 2;
        char *p = realloc(b->p, capacity);
        if (!p) goto fail;
        b->p = p;
        b->capacity = capacity;
    }
    return true;
fail:
    b->failed = true;
    return false;
}

void sti_buf_put(sti_buf *b, const void *data, size_t n)
{
    if (!reserve(b, n)) return;
    if (n) memcpy(b->p + b->n, data, n);
    b->n += n;
    b->p[b->n] = 0;
}

void sti_buf_puts(sti_buf *b, const char *s)
{
    sti_buf_put(b, s, strlen(s));
}

void sti_buf_printf(sti_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
    } else if (reserve(b, (size_t)n)) {
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
}

void sti_buf_clear(sti_buf *b)
{
    b->n = 0;
    b->failed = false;
    if (b->p) b->p[0] = 0;
}

void sti_buf_free(sti_buf *b)
{
    free(b->p);
    *b = (sti_buf){0};
}

void sti_hex(const unsigned char *bytes, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}
