/* unpack.h - sixteen neighbours of a row out of the blocks that files store (file/blocks.h
 * has their formulas). Device code, and C for a test that compares
 * it with file/dequant.c where there is no GPU. */
#ifndef STI_BACKEND_CUDA_DENSE_UNPACK_H
#define STI_BACKEND_CUDA_DENSE_UNPACK_H

#include "backend/cuda/both.h"
#include "file/dtype.h"

/* value = scale q + min */
typedef struct sti_group16 {
    int q[16];
    float scale, min;
} sti_group16;

#ifdef __CUDACC__

#include "backend/cuda/ptx/half.cuh"

STI_EITHER float sti_half_at(const uint8_t *p)
{
    return __half2float(__ushort_as_half((uint16_t)(p[0] | p[1] << 8)));
}
/* As the layouts keep a scale. */
STI_EITHER float sti_half_of(float x)
{
    return __half2float(to_half(x));
}
STI_EITHER float sti_float_of(uint32_t bits)
{
    return __uint_as_float(bits);
}

#else

#include <string.h>

STI_EITHER float sti_half_at(const uint8_t *p)
{
    return sti_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}
STI_EITHER float sti_half_of(float x)
{
    return sti_f16_to_f32(sti_f32_to_f16(x));
}
STI_EITHER float sti_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif

/* Blocks of 32. `high`: the second half of the block, in the high nibbles. */
STI_EITHER void unpack_4(const uint8_t *q, int high, sti_group16 *o)
{
    for (int i = 0; i < 16; i++) o->q[i] = q[i] >> 4 * high & 15;
}

STI_EITHER void unpack_5(const uint8_t *q, const uint8_t *fifth, int high, int centre,
                         sti_group16 *o)
{
    unpack_4(q, high, o);
    for (int i = 0; i < 16; i++) {
        int bit = 16 * high + i;
        o->q[i] = (o->q[i] | (fifth[bit / 8] >> bit % 8 & 1) << 4) - centre;
    }
}

/* Six-bit scale and minimum of group j of q4_k and q5_k. */
STI_EITHER void scale_min(const uint8_t *b, int j, int *scale, int *min)
{
    if (j < 4) {
        *scale = b[j] & 63;
        *min = b[j + 4] & 63;
    } else {
        *scale = (b[j + 4] & 15) | (b[j - 4] >> 6) << 4;
        *min = b[j + 4] >> 4 | (b[j] >> 6) << 4;
    }
}

/* K blocks of 256; g: group of sixteen, 0..15. */
STI_EITHER void unpack_q2_k(const uint8_t *b, int g, sti_group16 *o)
{
    const uint8_t *q = b + 16 + g / 8 * 32 + g % 2 * 16;
    for (int i = 0; i < 16; i++) o->q[i] = q[i] >> g / 2 % 4 * 2 & 3;
    o->scale = sti_half_at(b + 80) * (float)(b[g] & 15);
    o->min = -sti_half_at(b + 82) * (float)(b[g] >> 4);
}

STI_EITHER void unpack_q3_k(const uint8_t *b, int g, sti_group16 *o)
{
    const uint8_t *high = b + g % 2 * 16, *scale = b + 96;
    const uint8_t *q = b + 32 + g / 8 * 32 + g % 2 * 16;
    for (int i = 0; i < 16; i++) /* + 4: unsigned */
        o->q[i] = (q[i] >> g / 2 % 4 * 2 & 3) + (high[i] >> g / 2 & 1 ? 4 : 0);
    int low4 = scale[g % 8] >> g / 8 * 4 & 15, top2 = scale[8 + g % 4] >> g / 4 * 2 & 3;
    o->scale = sti_half_at(b + 108) * (float)((low4 | top2 << 4) - 32);
    o->min = -4 * sti_half_of(o->scale); /* so that zero stays zero */
}

STI_EITHER void unpack_q4_k(const uint8_t *b, int g, sti_group16 *o)
{
    int s, m;
    scale_min(b + 4, g / 2, &s, &m);
    unpack_4(b + 16 + g / 4 * 32 + g % 2 * 16, g / 2 % 2, o);
    o->scale = sti_half_at(b) * (float)s;
    o->min = -sti_half_at(b + 2) * (float)m;
}

STI_EITHER void unpack_q5_k(const uint8_t *b, int g, sti_group16 *o)
{
    int s, m;
    const uint8_t *fifth = b + 16 + g % 2 * 16;
    scale_min(b + 4, g / 2, &s, &m);
    unpack_4(b + 48 + g / 4 * 32 + g % 2 * 16, g / 2 % 2, o);
    for (int i = 0; i < 16; i++) o->q[i] |= (fifth[i] >> g / 2 & 1) << 4;
    o->scale = sti_half_at(b) * (float)s;
    o->min = -sti_half_at(b + 2) * (float)m;
}

STI_EITHER void unpack_q6_k(const uint8_t *b, int g, sti_group16 *o)
{
    int half = g / 8, run = g / 2 % 4, at = g % 2 * 16;
    const uint8_t *q = b + half * 64 + run % 2 * 32 + at;
    const uint8_t *high = b + 128 + half * 32 + at;
    for (int i = 0; i < 16; i++)
        o->q[i] = ((q[i] >> run / 2 * 4 & 15) | (high[i] >> 2 * run & 3) << 4) - 32;
    o->scale = sti_half_at(b + 208) * (float)(int8_t)b[192 + g];
    o->min = 0;
}

/* Values of a table, as file/dequant_table.c has them. */
STI_EITHER void look_up(const int8_t table[16], const uint8_t *q, int high,
                        sti_group16 *o)
{
    for (int i = 0; i < 16; i++) o->q[i] = table[q[i] >> 4 * high & 15];
    o->min = 0;
}

STI_EITHER void unpack_iq4(const uint8_t *q, int high, sti_group16 *o)
{
    const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                              1,    13,   25,  38,  53,  69,  89,  113};
    look_up(table, q, high, o);
}

STI_EITHER void unpack_iq4_xs(const uint8_t *b, int g, sti_group16 *o)
{
    const int j = g / 2; /* group of 32 */
    const int s = (b[4 + j / 2] >> 4 * (j % 2) & 15) | (b[2 + j / 4] >> 2 * (j % 4) & 3)
                                                           << 4;
    unpack_iq4(b + 8 + 16 * j, g % 2, o);
    o->scale = sti_half_at(b) * (float)(s - 32);
}

STI_EITHER void unpack_mxfp4(const uint8_t *b, int high, sti_group16 *o)
{
    const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    look_up(table, b + 1, high, o);
    o->scale = sti_float_of(b[0] < 2 ? 0x00200000u << b[0] : (b[0] - 1u) << 23);
}

/* Columns 16 i .. 16 i + 15 of a row of blocks. */
STI_EITHER void sti_unpack(sti_dtype type, const uint8_t *row, int i, sti_group16 *o)
{
    const int high = i % 2, g = i % 16;
    const int64_t small = i / 2, large = i / 16; /* block of 32, of 256 */
    const uint8_t *b;
    switch (type) {
    case STI_Q4_0:
        b = row + small * 18;
        unpack_4(b + 2, high, o);
        o->scale = sti_half_at(b);
        o->min = -8 * o->scale;
        return;
    case STI_Q4_1:
        b = row + small * 20;
        unpack_4(b + 4, high, o);
        o->scale = sti_half_at(b);
        o->min = sti_half_at(b + 2);
        return;
    case STI_Q5_0:
        b = row + small * 22;
        unpack_5(b + 6, b + 2, high, 16, o);
        o->scale = sti_half_at(b);
        o->min = 0;
        return;
    case STI_Q5_1:
        b = row + small * 24;
        unpack_5(b + 8, b + 4, high, 0, o);
        o->scale = sti_half_at(b);
        o->min = sti_half_at(b + 2);
        return;
    case STI_Q8_0:
        b = row + small * 34;
        for (int k = 0; k < 16; k++) o->q[k] = (int8_t)b[2 + 16 * high + k];
        o->scale = sti_half_at(b);
        o->min = 0;
        return;
    case STI_IQ4_NL:
        b = row + small * 18;
        unpack_iq4(b + 2, high, o);
        o->scale = sti_half_at(b);
        return;
    case STI_IQ4_XS: unpack_iq4_xs(row + large * 136, g, o); return;
    case STI_MXFP4: unpack_mxfp4(row + small * 17, high, o); return;
    case STI_Q2_K: unpack_q2_k(row + large * 84, g, o); return;
    case STI_Q3_K: unpack_q3_k(row + large * 110, g, o); return;
    case STI_Q4_K: unpack_q4_k(row + large * 144, g, o); return;
    case STI_Q5_K: unpack_q5_k(row + large * 176, g, o); return;
    default: unpack_q6_k(row + large * 210, g, o); return;
    }
}

#endif
