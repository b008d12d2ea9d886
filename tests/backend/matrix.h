/* matrix.h - random weight matrices of every type, for tests of products. */
#ifndef TEST_BACKEND_MATRIX_H
#define TEST_BACKEND_MATRIX_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "ops/ops.h"

static uint32_t next(uint32_t *s)
{
    *s = *s * 1664525u + 1013904223u;
    return *s >> 8;
}

static float uniform(uint32_t *s)
{
    return (float)next(s) * 0x1p-23f - 1.0f;
}

/* A tensor in a shared mapping, as files are, two bytes off any alignment. */
typedef struct source {
    sti_tensor t;
    unsigned char *map;
    size_t size;
    float *value; /* dequantized [N, K] */
} source;

static source make_source(sti_dtype type, int64_t N, int64_t K, uint32_t seed)
{
    source s = {0};
    size_t bytes;
    const sti_dtype_info *info = sti_dtype_find((int)type);
    assert_true(sti_dtype_bytes(type, (uint64_t)(N * K), &bytes));
    s.size = bytes + 2;
    int fd = memfd_create("matrix", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)s.size), 0);
    s.map = mmap(NULL, s.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(s.map != MAP_FAILED);
    close(fd);
    unsigned char *p = s.map + 2;
    s.value = malloc(sizeof(float) * (size_t)(N * K));
    assert_non_null(s.value);
    for (int64_t i = 0; i < N * K; i++) s.value[i] = uniform(&seed);
    if (!sti_quant(type, s.value, p, N * K)) {
        /* K types: any bytes are valid; halves that are no number or huge are not
         * wanted, so the scales (where they lie differs) are set by hand. */
        for (size_t i = 0; i < bytes; i++) p[i] = (unsigned char)next(&seed);
        size_t at = type == STI_Q2_K ? 80 : type == STI_Q3_K ? 108 : 0;
        if (type == STI_Q6_K) at = 208;
        bool min = type == STI_Q2_K || type == STI_Q4_K || type == STI_Q5_K;
        for (size_t b = 0; b < bytes; b += (size_t)info->bytes) {
            uint16_t d = sti_f32_to_f16(0.01f * uniform(&seed)),
                     m = sti_f32_to_f16(0.02f);
            if (type == STI_MXFP4) /* an exponent instead */
                p[b] = (unsigned char)(117 + next(&seed) % 6);
            else
                memcpy(p + b + at, &d, 2);
            if (min) memcpy(p + b + at + 2, &m, 2);
        }
    }
    sti_dequant(type, p, s.value, N * K);
    s.t = (sti_tensor){.name = "w",
                       .type = type,
                       .n_dims = 2,
                       .dim = {N, K},
                       .data = p,
                       .bytes = bytes,
                       .path = "memory"};
    return s;
}

static void free_source(source *s)
{
    munmap(s->map, s->size);
    free(s->value);
}

#endif
