/* open_store.h - open bytes as a model and read all it promises. */
#ifndef FUZZ_OPEN_STORE_H
#define FUZZ_OPEN_STORE_H

#include <string.h>

#include "file/store.h"
#include "memory_file.h"

static volatile uint64_t sink; /* keeps the reads */

static inline void read_bytes(const void *p, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((const unsigned char *)p)[i];
    sink += sum;
}

/* Every byte of every tensor and value; sorted names; look-ups that find. */
static inline void read_store(const sti_store *s)
{
    for (size_t i = 0; i < s->n_tensors; i++) {
        const sti_tensor *t = &s->tensor[i];
        read_bytes(t->data, t->bytes);
        if (sti_store_find(s, t->name) != t) abort();
        if (t->bytes < 1 << 16) {
            const sti_dtype_info *info = sti_dtype_find((int)t->type);
            size_t n = t->bytes / (size_t)info->bytes * (size_t)info->block;
            float *x = malloc(n * sizeof *x);
            if (x) sti_dequant(t->type, t->data, x, (int64_t)n);
            free(x);
        }
    }
    for (size_t i = 0; i < s->n_meta; i++) {
        const sti_meta *m = &s->meta[i];
        int64_t integer;
        double real;
        if (sti_meta_find(s, m->key) != m) abort();
        sink += sti_meta_int(m, &integer) + sti_meta_float(m, &real);
        for (uint64_t k = 0; k < m->count; k++) {
            sink +=
                sti_meta_elem_int(m, k, &integer) + sti_meta_elem_float(m, k, &real);
            if (m->str) read_bytes(m->str[k].p, m->str[k].n);
        }
    }
}

static inline void open_bytes(const uint8_t *data, size_t n)
{
    char path[32];
    sti_store s;
    still_error err = {0};
    int fd = memory_file(data, n, path);
    if (sti_store_open(path, &s, &err) == STILL_OK) {
        read_store(&s);
        sti_store_close(&s);
    } else if (!err.text[0] || strchr(err.text, '\n')) {
        abort(); /* a failure has one line */
    }
    close(fd);
}

#endif
