/* helpers.h - files in memory with a path, and hand-made model files. */
#ifndef TESTS_FILE_HELPERS_H
#define TESTS_FILE_HELPERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "file/store.h"

typedef struct memory_file {
    int fd;
    char path[32];
} memory_file;

static inline memory_file memory_file_new(const void *p, size_t n)
{
    memory_file f = {memfd_create("test", MFD_CLOEXEC), ""};
    assert_true(f.fd >= 0);
    for (size_t done = 0; done < n;) {
        ssize_t k = write(f.fd, (const char *)p + done, n - done);
        assert_true(k > 0);
        done += (size_t)k;
    }
    snprintf(f.path, sizeof f.path, "/proc/self/fd/%d", f.fd);
    return f;
}

/* Opens the bytes as a model; on success the store is the caller's to close. */
static inline still_status open_bytes(const void *p, size_t n, sti_store *s,
                                      still_error *err)
{
    memory_file f = memory_file_new(p, n);
    *err = (still_error){0};
    still_status status = sti_store_open(f.path, s, err);
    close(f.fd);
    if (status != STILL_OK) { /* one line, and nothing left behind */
        assert_int_equal(err->code, status);
        assert_true(err->text[0] != 0);
        assert_null(strchr(err->text, '\n'));
        assert_null(s->tensor);
        assert_null(s->map);
    }
    return status;
}

/* Opening must fail with this status and name `word` in the error. */
static inline void expect_refusal(const void *p, size_t n, still_status status,
                                  const char *word)
{
    sti_store s;
    still_error err;
    still_status got = open_bytes(p, n, &s, &err);
    if (got == STILL_OK) sti_store_close(&s);
    if (got != status || !strstr(err.text, word))
        fail_msg("status %d, \"%s\"; expected %d and \"%s\"", got, err.text, status,
                 word);
}

/* Touches every byte a store promises, so that the sanitizers see a wrong promise. */
static inline unsigned touch(const sti_store *s)
{
    unsigned sum = 0;
    for (size_t i = 0; i < s->n_tensors; i++) {
        const unsigned char *p = s->tensor[i].data;
        for (size_t k = 0; k < s->tensor[i].bytes; k++) sum += p[k];
    }
    for (size_t i = 0; i < s->n_meta; i++) {
        const sti_meta *m = &s->meta[i];
        double real;
        int64_t integer;
        if (sti_meta_float(m, &real)) sum++;
        if (sti_meta_int(m, &integer)) sum += (unsigned)integer;
        for (uint64_t k = 0; k < m->count; k++) {
            if (sti_meta_elem_float(m, k, &real)) sum++;
            if (sti_meta_elem_int(m, k, &integer)) sum += (unsigned)integer;
            for (size_t c = 0; m->str && c < m->str[k].n; c++)
                sum += (unsigned char)m->str[k].p[c];
        }
    }
    return sum;
}

/* Writing a GGUF by hand, independently of file/write.c. */
static inline void u32(sti_buf *b, uint32_t v)
{
    sti_buf_put(b, &v, sizeof v);
}
static inline void u64(sti_buf *b, uint64_t v)
{
    sti_buf_put(b, &v, sizeof v);
}
static inline void str(sti_buf *b, const char *s)
{
    u64(b, strlen(s));
    sti_buf_puts(b, s);
}
static inline void gguf_head(sti_buf *b, uint32_t version, uint64_t tensors,
                             uint64_t pairs)
{
    sti_buf_put(b, "GGUF", 4);
    u32(b, version);
    u64(b, tensors);
    u64(b, pairs);
}
static inline void gguf_tensor(sti_buf *b, const char *name, uint64_t inner,
                               uint64_t outer, uint32_t type, uint64_t offset)
{
    str(b, name);
    u32(b, 2);
    u64(b, inner);
    u64(b, outer);
    u32(b, type);
    u64(b, offset);
}
static inline void pad(sti_buf *b, size_t alignment)
{
    while (b->n % alignment) sti_buf_put(b, "", 1);
}

/* Two tensors, a pair of every kind: the seed of truncations and flips. */
static inline void gguf_sample(sti_buf *b)
{
    gguf_head(b, 3, 2, 6);
    str(b, "general.architecture"), u32(b, STI_META_STRING), str(b, "llama");
    str(b, "x.u8"), u32(b, STI_META_U8), sti_buf_put(b, "\x07", 1);
    str(b, "x.f32"), u32(b, STI_META_F32), sti_buf_put(b, &(float){1.5f}, 4);
    str(b, "x.tokens"), u32(b, STI_META_ARRAY), u32(b, STI_META_STRING), u64(b, 3);
    str(b, "a"), str(b, ""), str(b, "ccc");
    str(b, "x.ints"), u32(b, STI_META_ARRAY), u32(b, STI_META_I32), u64(b, 2);
    u32(b, 5), u32(b, (uint32_t)-6);
    str(b, "general.alignment"), u32(b, STI_META_U32), u32(b, 32);
    gguf_tensor(b, "w", 3, 2, STI_F32, 0);
    gguf_tensor(b, "q", 32, 2, STI_Q4_0, 32);
    pad(b, 32);
    for (int i = 0; i < 6; i++) sti_buf_put(b, &(float){(float)i}, 4);
    pad(b, 32);
    for (int i = 0; i < 36; i++) sti_buf_put(b, &(char){(char)(i * 7)}, 1);
}

/* A safetensors file of a JSON header and n bytes of data; pads the header. */
static inline void safetensors(sti_buf *b, const char *json, size_t padded, size_t n)
{
    size_t length = strlen(json) > padded ? strlen(json) : padded;
    u64(b, length);
    sti_buf_puts(b, json);
    while (b->n < 8 + length) sti_buf_put(b, " ", 1);
    for (size_t i = 0; i < n; i++) sti_buf_put(b, &(char){(char)i}, 1);
}

#endif
