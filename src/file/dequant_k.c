/* dequant_k.c - the K blocks of 256 elements to float; see blocks.h for the formulas.
 *
 * All of them interleave: one byte carries the bits of elements 32 or 64 apart, so
 * that a vector of bytes unpacks into several runs with the same mask and shift. */
#include "file/blocks.h"

/* Two halves of 128 elements, 32 bytes each; the bit pair at 2*j of byte l belongs to
 * element 32*j + l of its half. */
void sti_dequant_q2_k(const sti_block_q2_k *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++) {
        float d = sti_load_f16(b->d), dmin = sti_load_f16(b->dmin);
        for (int g = 0; g < 16; g++, y += 16) {
            const uint8_t *q = b->q + g / 8 * 32 + g % 2 * 16;
            int shift = g / 2 % 4 * 2;
            float scale = d * (float)(b->scale[g] & 15);
            float min = dmin * (float)(b->scale[g] >> 4);
            for (int l = 0; l < 16; l++)
                y[l] = scale * (float)(q[l] >> shift & 3) - min;
        }
    }
}

/* Low two bits as in q2_k. The third bit of element 32*j + l is bit j of high[l]; when
 * it is clear, 4 is taken away. Scales have six bits: the low four in the nibbles of
 * bytes 0-7, the top two in bytes 8-11. */
void sti_dequant_q3_k(const sti_block_q3_k *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++) {
        float d = sti_load_f16(b->d);
        for (int g = 0; g < 16; g++, y += 16) {
            const uint8_t *q = b->q + g / 8 * 32 + g % 2 * 16;
            const uint8_t *high = b->high + g % 2 * 16;
            int shift = g / 2 % 4 * 2, bit = g / 2;
            int low4 = b->scale[g % 8] >> g / 8 * 4 & 15;
            int top2 = b->scale[8 + g % 4] >> g / 4 * 2 & 3;
            float scale = d * (float)((low4 | top2 << 4) - 32);
            for (int l = 0; l < 16; l++) {
                int v = (q[l] >> shift & 3) - (high[l] >> bit & 1 ? 0 : 4);
                y[l] = scale * (float)v;
            }
        }
    }
}

/* A block of q4_k, whose bytes 32*p .. 32*p+31 hold group 2p in their low nibbles, 2p+1 in
 * the high ones; or, with high, of q5_k: the fifth bit of element l of group g is bit g of
 * high[l]. */
static inline void dequant_nibbles(float d, float dmin, const uint8_t scales[12],
                                   const uint8_t *q, const uint8_t *high, float *y)
{
    for (int g = 0; g < 8; g++, y += 32) {
        const uint8_t *nibble = q + g / 2 * 32;
        int s, m, shift = g % 2 * 4;
        sti_scale_min(scales, g, &s, &m);
        float scale = d * (float)s, min = dmin * (float)m;
        for (int l = 0; l < 32; l++) {
            int v = nibble[l] >> shift & 15;
            if (high) v |= (high[l] >> g & 1) << 4;
            y[l] = scale * (float)v - min;
        }
    }
}

void sti_dequant_q4_k(const sti_block_q4_k *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK_K)
        dequant_nibbles(sti_load_f16(b->d), sti_load_f16(b->dmin), b->scale, b->q, NULL,
                        y);
}

void sti_dequant_q5_k(const sti_block_q5_k *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK_K)
        dequant_nibbles(sti_load_f16(b->d), sti_load_f16(b->dmin), b->scale, b->q,
                        b->high, y);
}

/* Two halves of 128 elements in four runs of 32. Runs 0 and 1 have their low nibbles
 * in the low half of the 64 bytes, runs 2 and 3 in the high half; the top two bits of
 * run r, element l, are at 2*r of high[l]. */
void sti_dequant_q6_k(const sti_block_q6_k *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++) {
        float d = sti_load_f16(b->d);
        for (int g = 0; g < 16; g++, y += 16) {
            int half = g / 8, run = g / 2 % 4, at = g % 2 * 16;
            const uint8_t *q = b->q + half * 64 + run % 2 * 32 + at;
            const uint8_t *high = b->high + half * 32 + at;
            float scale = d * (float)(int8_t)b->scale[g];
            for (int l = 0; l < 16; l++) {
                int v = (q[l] >> run / 2 * 4 & 15) | (high[l] >> 2 * run & 3) << 4;
                y[l] = scale * (float)(v - 32);
            }
        }
    }
}
