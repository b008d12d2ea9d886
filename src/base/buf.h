/* buf.h - a growing byte buffer with a cap, always NUL-terminated when not empty. */
#ifndef STI_BASE_BUF_H
#define STI_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

typedef struct sti_buf {
    char *p;
    size_t n, capacity;
    bool failed; /* an append did not fit; later appends do nothing */
} sti_buf;

void sti_buf_put(sti_buf *b, const void *data, size_t n);
void sti_buf_puts(sti_buf *b, const char *s);
void sti_buf_printf(sti_buf *b, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void sti_buf_clear(sti_buf *b); /* keeps the memory */
void sti_buf_free(sti_buf *b);

/* n bytes as 2n lower-case digits and a NUL. */
void sti_hex(const unsigned char *bytes, size_t n, char *out);

#endif
