/* Quantized salient tokens: how far a number moves, where its bits lie, what rounding
 * leaves alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "file/dtype.h"
#include "ops/hybrid.h"

static uint64_t rng = 1;

static float normal(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(rng >> 40) / (float)(1 << 24);
    }
    return sum - 6;
}

static void draw(float *x, int D, float gain, float mean)
{
    for (int i = 0; i < D; i++) x[i] = gain * normal() + mean;
}

/* Half a step, and what half precision takes from scale and minimum: a level is off by
 * 2^-11 of itself, the minimum by 2^-11 of itself. */
static void test_error_bounds(void **state)
{
    (void)state;
    for (int n = 0; n < 400; n++) {
        const int D = 1 + n % 130;
        float x[130], k8[130], k5[130], v4[130], v3[130];
        draw(x, D, n % 7 ? 1 : 100, n % 3 ? 0 : 4);
        sti_salient_round_key(8, x, D, k8);
        sti_salient_round_key(5, x, D, k5);
        sti_salient_round_value(4, x, D, v4);
        sti_salient_round_value(3, x, D, v3);
        for (int g = 0; g < D; g += 32) {
            const int end = D < g + 32 ? D : g + 32;
            float most = 0, lo = x[g], hi = x[g];
            for (int e = g; e < end; e++) {
                most = fmaxf(most, fabsf(x[e]));
                lo = fminf(lo, x[e]);
                hi = fmaxf(hi, x[e]);
            }
            for (int e = g; e < end; e++) {
                const float half = 0x1p-11f, size = fabsf(lo) + fabsf(hi);
                assert_true(fabsf(k8[e] - x[e]) <= most / 127 * 0.501f + most * half);
                assert_true(fabsf(k5[e] - x[e]) <= most / 15 * 0.501f + most * half);
                assert_true(fabsf(v4[e] - x[e]) <=
                            (hi - lo) / 15 * 0.501f + 2 * size * half);
                assert_true(fabsf(v3[e] - x[e]) <=
                            (hi - lo) / 7 * 0.501f + 2 * size * half);
            }
        }
    }
}

/* Where elements lie, as salient.h draws it. */
static void test_layout(void **state)
{
    (void)state;
    float x[64];
    uint8_t low[64], high[8];
    uint16_t scale[4];
    const sti_salient_row row = {low, high, scale};
    assert_int_equal(sti_salient_low(8, 64), 64);
    assert_int_equal(sti_salient_low(5, 64), 32);
    assert_int_equal(sti_salient_low(4, 64), 32);
    assert_int_equal(sti_salient_low(3, 64), 16);
    assert_int_equal(sti_salient_high(8, 64) + sti_salient_high(4, 64), 0);
    assert_int_equal(sti_salient_high(5, 64) + sti_salient_high(3, 64), 16);
    assert_int_equal(sti_salient_low(8, 33), 64);

    for (int e = 0; e < 64; e++) x[e] = (float)(e % 32 - 15) / 8; /* -15 .. 16 */
    x[31] = x[63] = 15.0f / 8;
    sti_salient_pack_key(5, x, 64, row);
    for (int e = 0; e < 64; e++) {
        const int level = (e % 32 == 31 ? 15 : e % 32 - 15) + 16, g = e / 32;
        assert_int_equal(low[g * 16 + e % 16] >> e % 32 / 16 * 4 & 15, level & 15);
        assert_int_equal(high[e / 8] >> e % 8 & 1, level >> 4);
        assert_float_equal(sti_f16_to_f32(scale[g]), 0.125, 0);
    }

    for (int e = 0; e < 64; e++) x[e] = (float)(e % 8) / 4 - 1;
    sti_salient_pack_value(3, x, 64, row);
    for (int e = 0; e < 64; e++) {
        const int g = e / 32;
        assert_int_equal(low[g * 8 + e % 8] >> e % 32 / 8 * 2 & 3, e % 8 & 3);
        assert_int_equal(high[e / 8] >> e % 8 & 1, e % 8 >> 2);
        assert_float_equal(sti_f16_to_f32(scale[2 * g]), 0.25, 0);
        assert_float_equal(sti_f16_to_f32(scale[2 * g + 1]), -1, 0);
    }

    for (int e = 0; e < 32; e++) x[e] = (float)(e * 8 - 127);
    x[31] = 127;
    sti_salient_pack_key(8, x, 32, row);
    for (int e = 0; e < 32; e++) assert_int_equal((int8_t)low[e], (int)x[e]);

    for (int e = 0; e < 32; e++) x[e] = (float)(e % 16) * 2 + 10;
    sti_salient_pack_value(4, x, 32, row);
    for (int e = 0; e < 16; e++) assert_int_equal(low[e], e | e << 4);
}

/* What comes out goes in again unchanged. */
static void test_rounding_twice(void **state)
{
    (void)state;
    for (int n = 0; n < 200; n++) {
        float x[64], once[64], twice[64];
        draw(x, 64, 1, n % 2);
        for (int bits = 5; bits <= 8; bits += 3) {
            sti_salient_round_key(bits, x, 64, once);
            sti_salient_round_key(bits, once, 64, twice);
            assert_memory_equal(once, twice, sizeof once);
        }
        for (int bits = 3; bits <= 4; bits++) {
            sti_salient_round_value(bits, x, 64, once);
            sti_salient_round_value(bits, once, 64, twice);
            assert_memory_equal(once, twice, sizeof once);
        }
        sti_salient_round_key(0, x, 64, once);
        assert_memory_equal(once, x, sizeof once);
    }
}

static void test_odd_numbers(void **state)
{
    (void)state;
    float x[32] = {0}, y[32];
    for (int bits = 5; bits <= 8; bits += 3) {
        sti_salient_round_key(bits, x, 32, y);
        assert_memory_equal(y, x, sizeof x);
    }
    for (int e = 0; e < 32; e++) x[e] = -3;
    for (int bits = 3; bits <= 4; bits++) { /* a range of 0 */
        sti_salient_round_value(bits, x, 32, y);
        assert_memory_equal(y, x, sizeof x);
    }
    for (int e = 0; e < 32; e++) x[e] = e % 2 ? NAN : 1e-9f;
    sti_salient_round_key(8, x, 32, y); /* no level is undefined */
    sti_salient_round_value(4, x, 32, y);
}

/* Bytes of a slot, score and position included, are what the documents say. */
static void test_bytes(void **state)
{
    (void)state;
    static const struct {
        int key_bits, value_bits;
        size_t bytes;
    } want[] = {{0, 0, 264}, {8, 4, 116}, {5, 3, 84}, {8, 0, 204}, {0, 3, 168}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        size_t used[2];
        for (int n = 0; n < 2; n++) {
            sti_hybrid_settings set;
            sti_hybrid_preset("still", 128, &set);
            set.cap = n ? 2048 : 1024;
            set.key_bits = want[i].key_bits;
            set.value_bits = want[i].value_bits;
            sti_hybrid_state st;
            sti_carve c = {0};
            sti_hybrid_state_carve(&st, &c, &set, &(sti_hybrid_shape){9, 3, 64, 64}, 1,
                                   2, 4);
            used[n] = c.used;
        }
        assert_int_equal(used[1] - used[0], 3 * 1024 * want[i].bytes);
    }
}

static void test_checks(void **state)
{
    (void)state;
    const sti_hybrid_shape shape = {9, 3, 64, 64};
    sti_hybrid_settings set;
    still_error err;
    sti_hybrid_preset("still", 128, &set);
    for (int bits = -1; bits <= 16; bits++) {
        set.key_bits = bits;
        assert_int_equal(sti_hybrid_check(&set, &shape, &err) == STILL_OK,
                         bits == 0 || bits == 5 || bits == 8);
        set.key_bits = 0;
        set.value_bits = bits;
        assert_int_equal(sti_hybrid_check(&set, &shape, &err) == STILL_OK,
                         bits == 0 || bits == 3 || bits == 4);
        set.value_bits = 0;
    }
}

RUN_TESTS(cmocka_unit_test(test_error_bounds), cmocka_unit_test(test_layout),
          cmocka_unit_test(test_rounding_twice), cmocka_unit_test(test_odd_numbers),
          cmocka_unit_test(test_bytes), cmocka_unit_test(test_checks))
