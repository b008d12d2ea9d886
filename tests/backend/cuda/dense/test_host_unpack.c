/* test_host_unpack.c - the cuda backend's unpacking of quantized blocks, compiled as C,
 * against file/dequant.c: every type, random bytes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "../../../run.h"

#include "backend/cuda/dense/unpack.h"
#include "base/random.h"

enum { COLUMNS = 512, ROWS = 400 };

/* Where the halves of a block are. */
typedef struct quant {
    sti_dtype type;
    int at[2], n_at;
} quant;
static const quant quants[] = {
    {STI_Q4_0, {0}, 1},    {STI_Q4_1, {0, 2}, 2}, {STI_Q5_0, {0}, 1},
    {STI_Q5_1, {0, 2}, 2}, {STI_Q8_0, {0}, 1},    {STI_Q2_K, {80, 82}, 2},
    {STI_Q3_K, {108}, 1},  {STI_Q4_K, {0, 2}, 2}, {STI_Q5_K, {0, 2}, 2},
    {STI_Q6_K, {208}, 1},  {STI_IQ4_NL, {0}, 1},  {STI_IQ4_XS, {0}, 1},
    {STI_MXFP4, {0}, 0},
};

static size_t draw_row(const quant *t, uint8_t *row, uint64_t *seed)
{
    const sti_dtype_info *info = sti_dtype_find((int)t->type);
    const size_t block = (size_t)info->bytes,
                 bytes = block * (size_t)(COLUMNS / info->block);
    for (size_t i = 0; i < bytes; i++) row[i] = (uint8_t)(sti_mix64((*seed)++) >> 7);
    for (size_t b = 0; b < bytes; b += block) { /* no infinities */
        for (int i = 0; i < t->n_at; i++) row[b + (size_t)t->at[i] + 1] &= 0xbb;
        if (t->type == STI_MXFP4) row[b] %= 240;
    }
    return bytes;
}

static void compare(const quant *t)
{
    uint8_t row[2 * COLUMNS];
    float want[COLUMNS];
    uint64_t seed = 7;
    for (int r = 0; r < ROWS; r++) {
        assert_true(draw_row(t, row, &seed) <= sizeof row);
        sti_dequant(t->type, row, want, COLUMNS);
        for (int i = 0; i < COLUMNS / 16; i++) {
            sti_group16 v = {.scale = NAN};
            sti_unpack(t->type, row, i, &v);
            for (int k = 0; k < 16; k++) {
                const float x = want[16 * i + k], y = v.scale * (float)v.q[k] + v.min;
                const float most = fabsf(v.scale * (float)v.q[k]) + fabsf(v.min);
                /* q3_k's minimum is rounded to half */
                const float off = t->type == STI_Q3_K ? 1e-3f : 1e-6f;
                if (!(fabsf(x - y) <= off * most + 1e-30f))
                    fail_msg("%s, row %d, column %d: %g, not %g",
                             sti_dtype_find((int)t->type)->name, r, 16 * i + k,
                             (double)y, (double)x);
            }
        }
    }
}

static void test_agrees_with_the_file(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof quants / sizeof *quants; i++) compare(&quants[i]);
}

RUN_TESTS(cmocka_unit_test(test_agrees_with_the_file))
