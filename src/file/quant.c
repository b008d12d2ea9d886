/* quant.c - float to the block types, rounding as GGML's reference encoders do, so a
 * file written here equals one quantized there, byte for byte.
 *
 * A value that is not a number becomes level 0: conversions to integers are guarded,
 * never undefined. */
#include <math.h>
#include <string.h>

#include "file/blocks.h"

/* v truncated to an integer level in 0..top. */
static inline int level(float v, int top)
{
    return v > 0 ? v < (float)top ? (int)v : top : 0;
}

static inline float inverse(float d)
{
    return d != 0 ? 1.0f / d : 0.0f;
}

/* The element of the largest magnitude, with its sign; the first of equals. */
static float extreme(const float *x)
{
    float best = 0, magnitude = 0;
    for (int i = 0; i < STI_QK; i++)
        if (fabsf(x[i]) > magnitude) {
            magnitude = fabsf(x[i]);
            best = x[i];
        }
    return best;
}

static void range(const float *x, float *min, float *max)
{
    *min = *max = x[0];
    for (int i = 1; i < STI_QK; i++) {
        if (x[i] < *min) *min = x[i];
        if (x[i] > *max) *max = x[i];
    }
}

static void quant_q4_0(const float *x, sti_block_q4_0 *b, int64_t n)
{
    for (; n > 0; n--, b++, x += STI_QK) {
        float d = extreme(x) / -8, inv = inverse(d);
        sti_store_f16(b->d, d);
        for (int i = 0; i < 16; i++) {
            int lo = level(x[i] * inv + 8.5f, 15);
            int hi = level(x[i + 16] * inv + 8.5f, 15);
            b->q[i] = (uint8_t)(lo | hi << 4);
        }
    }
}

static void quant_q4_1(const float *x, sti_block_q4_1 *b, int64_t n)
{
    for (; n > 0; n--, b++, x += STI_QK) {
        float min, max;
        range(x, &min, &max);
        float d = (max - min) / 15, inv = inverse(d);
        sti_store_f16(b->d, d);
        sti_store_f16(b->m, min);
        for (int i = 0; i < 16; i++) {
            int lo = level((x[i] - min) * inv + 0.5f, 15);
            int hi = level((x[i + 16] - min) * inv + 0.5f, 15);
            b->q[i] = (uint8_t)(lo | hi << 4);
        }
    }
}

/* Sixteen pairs of five-bit levels: nibbles and the mask of fifth bits. */
static void pack_fives(const uint8_t v[32], uint8_t q[16], uint8_t high[4])
{
    memset(high, 0, 4);
    for (int i = 0; i < 16; i++) q[i] = (uint8_t)((v[i] & 15) | (v[i + 16] & 15) << 4);
    for (int i = 0; i < 32; i++)
        high[i / 8] = (uint8_t)(high[i / 8] | (v[i] >> 4) << i % 8);
}

static void quant_q5_0(const float *x, sti_block_q5_0 *b, int64_t n)
{
    for (; n > 0; n--, b++, x += STI_QK) {
        float d = extreme(x) / -16, inv = inverse(d);
        uint8_t v[STI_QK];
        sti_store_f16(b->d, d);
        for (int i = 0; i < STI_QK; i++) v[i] = (uint8_t)level(x[i] * inv + 16.5f, 31);
        pack_fives(v, b->q, b->high);
    }
}

static void quant_q5_1(const float *x, sti_block_q5_1 *b, int64_t n)
{
    for (; n > 0; n--, b++, x += STI_QK) {
        float min, max;
        range(x, &min, &max);
        float d = (max - min) / 31, inv = inverse(d);
        uint8_t v[STI_QK];
        sti_store_f16(b->d, d);
        sti_store_f16(b->m, min);
        for (int i = 0; i < STI_QK; i++)
            v[i] = (uint8_t)level((x[i] - min) * inv + 0.5f, 31);
        pack_fives(v, b->q, b->high);
    }
}

static void quant_q8_0(const float *x, sti_block_q8_0 *b, int64_t n)
{
    for (; n > 0; n--, b++, x += STI_QK) {
        float d = fabsf(extreme(x)) / 127, inv = inverse(d);
        sti_store_f16(b->d, d);
        for (int i = 0; i < STI_QK; i++) { /* half away from zero */
            float v = x[i] * inv, size = fabsf(v);
            int q = level(size, 127);
            q += q < 127 && size - (float)q >= 0.5f;
            b->q[i] = (uint8_t)(v < 0 ? -q : q);
        }
    }
}

static void narrow_f16(const float *x, unsigned char *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h = sti_f32_to_f16(x[i]);
        memcpy(p + 2 * i, &h, 2);
    }
}

static void narrow_bf16(const float *x, unsigned char *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h = sti_f32_to_bf16(x[i]);
        memcpy(p + 2 * i, &h, 2);
    }
}

bool sti_quant(sti_dtype t, const float *src, void *dst, int64_t n)
{
    switch (t) {
    case STI_F32: memcpy(dst, src, (size_t)n * sizeof *src); return true;
    case STI_F16: narrow_f16(src, dst, n); return true;
    case STI_BF16: narrow_bf16(src, dst, n); return true;
    case STI_Q4_0: quant_q4_0(src, dst, n / STI_QK); return true;
    case STI_Q4_1: quant_q4_1(src, dst, n / STI_QK); return true;
    case STI_Q5_0: quant_q5_0(src, dst, n / STI_QK); return true;
    case STI_Q5_1: quant_q5_1(src, dst, n / STI_QK); return true;
    case STI_Q8_0: quant_q8_0(src, dst, n / STI_QK); return true;
    default: return false;
    }
}
