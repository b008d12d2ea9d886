/* test_dtype.c - block types against GGML's Python package (fixtures/quant), halves
 * against their definition for all 65536 values. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "file/store.h"

static int open_fixture(void **state)
{
    static sti_store s;
    still_error err;
    *state = &s;
    return sti_store_open(FIXTURES "/quant/quant.gguf", &s, &err) != STILL_OK;
}

static int close_fixture(void **state)
{
    sti_store_close(*state);
    return 0;
}

static const sti_tensor *find(const sti_store *s, const char *type, const char *suffix)
{
    char name[32];
    snprintf(name, sizeof name, "%s.%s", type, suffix);
    return sti_store_find(s, name);
}

static void decodes_as_ggml(void **state)
{
    int types = 0;
    for (int i = 0; sti_dtype_at(i); i++) {
        const sti_dtype_info *info = sti_dtype_at(i);
        const sti_tensor *blocks = find(*state, info->name, "blocks");
        if (!blocks) continue;
        const sti_tensor *values = find(*state, info->name, "values");
        int64_t n = blocks->dim[0] * blocks->dim[1];
        assert_int_equal(blocks->type, info->type);
        assert_int_equal(n * 4, values->bytes);
        /* At an odd address: sources need no alignment. */
        unsigned char *odd = malloc(blocks->bytes + 1);
        float *y = malloc((size_t)n * sizeof *y);
        memcpy(odd + 1, blocks->data, blocks->bytes);
        sti_dequant(info->type, odd + 1, y, n);
        const float *want = values->data;
        for (int64_t k = 0; k < n; k++)
            if (y[k] != want[k])
                fail_msg("%s[%d] is %.9g, expected %.9g", info->name, (int)k, y[k],
                         want[k]);
        free(odd);
        free(y);
        types++;
    }
    assert_int_equal(types, 13);
}

static void encodes_as_ggml(void **state)
{
    const sti_tensor *x = sti_store_find(*state, "input");
    int types = 0;
    for (int i = 0; sti_dtype_at(i); i++) {
        const sti_dtype_info *info = sti_dtype_at(i);
        const sti_tensor *want = find(*state, info->name, "encoded");
        if (!want) continue;
        unsigned char *q = malloc(want->bytes);
        assert_true(sti_quant(info->type, x->data, q, x->dim[0] * x->dim[1]));
        for (size_t k = 0; k < want->bytes; k++)
            if (q[k] != ((const unsigned char *)want->data)[k])
                fail_msg("%s: byte %zu of the encoding differs", info->name, k);
        free(q);
        types++;
    }
    assert_int_equal(types, 7);
    assert_false(sti_quant(STI_Q4_K, x->data, NULL, 256));
    assert_false(sti_quant(STI_IQ4_XS, x->data, NULL, 256));
}

/* A block of NaN, infinities and huge values has some encoding, and the sanitizers
 * see no undefined conversion. */
static void encodes_what_is_not_a_number(void **state)
{
    (void)state;
    float x[32];
    unsigned char q[128];
    for (int i = 0; i < 32; i++) x[i] = i % 3 ? (i % 2 ? INFINITY : -INFINITY) : NAN;
    x[7] = 3e38f;
    for (int i = 0; sti_dtype_at(i); i++) {
        const sti_dtype_info *info = sti_dtype_at(i);
        size_t bytes;
        if (!sti_quant(info->type, x, q, 0)) continue;
        assert_true(sti_dtype_bytes(info->type, 32, &bytes));
        assert_true(bytes <= sizeof q);
        assert_true(sti_quant(info->type, x, q, 32));
    }
}

/* sign * 2^(e-25) * (1024 + f), or 2^-24 * f for subnormals. */
static double half_by_definition(unsigned h)
{
    int e = h >> 10 & 31, f = h & 1023;
    double v = e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
    if (e == 31) v = f ? NAN : INFINITY;
    return h & 0x8000 ? -v : v;
}

static void halves_widen_exactly(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x10000; h++) {
        double want = half_by_definition(h);
        float got = sti_f16_to_f32((uint16_t)h);
        if (isnan(want))
            assert_true(isnan(got));
        else if ((double)got != want || !signbit(got) != !signbit(want))
            fail_msg("half %04x is %g, expected %g", h, got, want);
        if (!isnan(want)) assert_int_equal(sti_f32_to_f16(got), h);
    }
    assert_true(isnan(sti_f16_to_f32(sti_f32_to_f16(NAN))));
    assert_true(isnan(sti_bf16_to_f32(sti_f32_to_bf16(NAN))));
}

/* Around the middle of every two neighbours: below goes down, above goes up, the
 * middle to the even one. */
static void halves_round_to_nearest_even(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x7c00; h++) {
        double lo = half_by_definition(h);
        double hi = h == 0x7bff ? 65536 : half_by_definition(h + 1);
        float middle = (float)((lo + hi) / 2);
        unsigned even = h & 1 ? h + 1 : h;
        assert_int_equal(sti_f32_to_f16(middle), even);
        assert_int_equal(sti_f32_to_f16(-middle), even | 0x8000);
        assert_int_equal(sti_f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(sti_f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
    }
    assert_int_equal(sti_f32_to_f16(1e30f), 0x7c00);
    assert_int_equal(sti_f32_to_f16(1e-30f), 0);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(sti_f32_to_bf16(1.0f), 0x3f80);
    assert_int_equal(sti_f32_to_bf16(1.00390625f), 0x3f80); /* middle: to even */
    assert_int_equal(sti_f32_to_bf16(1.01171875f), 0x3f82);
    assert_int_equal(sti_f32_to_bf16(nextafterf(1.00390625f, 2)), 0x3f81);
    assert_int_equal(sti_f32_to_bf16(3.4e38f), 0x7f80); /* overflow to infinity */
    assert_int_equal(sti_f32_to_bf16(-INFINITY), 0xff80);
}

static void sizes_are_checked(void **state)
{
    (void)state;
    size_t bytes;
    assert_true(sti_dtype_bytes(STI_Q4_K, 512, &bytes));
    assert_int_equal(bytes, 288);
    assert_false(sti_dtype_bytes(STI_Q4_K, 576, &bytes));
    assert_false(sti_dtype_bytes(STI_F64, UINT64_MAX / 4, &bytes));
    assert_null(sti_dtype_find(9));
    assert_null(sti_dtype_at(-1));
    assert_null(sti_dtype_by_name("q9"));
    assert_int_equal(sti_dtype_by_name("Q6_K")->type, STI_Q6_K);
}

static void wide_types_become_floats(void **state)
{
    (void)state;
    float y[2];
    sti_dequant(STI_F64, (const double[]){0.1, -2e300}, y, 2);
    assert_true(y[0] == 0.1f && y[1] == -INFINITY);
    sti_dequant(STI_I32, (const int32_t[]){-7, 1 << 24}, y, 2);
    assert_true(y[0] == -7 && y[1] == 16777216);
    sti_dequant(STI_I64, (const int64_t[]){-7, (int64_t)1 << 40}, y, 2);
    assert_true(y[0] == -7 && y[1] == 0x1p40f);
}

RUN_TESTS_IN(open_fixture, close_fixture, cmocka_unit_test(decodes_as_ggml),
             cmocka_unit_test(encodes_as_ggml),
             cmocka_unit_test(encodes_what_is_not_a_number),
             cmocka_unit_test(halves_widen_exactly),
             cmocka_unit_test(halves_round_to_nearest_even),
             cmocka_unit_test(bf16_rounds_to_nearest_even),
             cmocka_unit_test(sizes_are_checked),
             cmocka_unit_test(wide_types_become_floats))
