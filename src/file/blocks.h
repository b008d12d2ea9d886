/* blocks.h - byte layout of the quantized blocks, as GGML stores them.
 *
 * Every struct is made of bytes, so it has alignment 1 and may be laid over a mapped
 * file at any offset. Halves are little-endian f16. K blocks ("super-blocks") hold 256
 * elements in groups with scales of their own:
 *
 *   q2_k  16 groups of 16:  x = d * (s & 15) * q - dmin * (s >> 4),   q in 0..3
 *   q3_k  16 groups of 16:  x = d * (s - 32) * q,                     q in -4..3
 *   q4_k   8 groups of 32:  x = d * s * q - dmin * m,                 q in 0..15
 *   q5_k   8 groups of 32:  x = d * s * q - dmin * m,                 q in 0..31
 *   q6_k  16 groups of 16:  x = d * s * q,                            q in -32..31
 *
 * Four bits may also be places in a table of 16 values t:
 *
 *   iq4_nl  32 elements:        x = d * t[q]
 *   iq4_xs  8 groups of 32:     x = d * (s - 32) * t[q],  s of six bits
 *   mxfp4   32 elements:        x = 2^(e - 128) * t[q],   t: twice a float of 4 bits */
#ifndef STI_FILE_BLOCKS_H
#define STI_FILE_BLOCKS_H

#include "file/dtype.h"

enum { STI_QK = 32, STI_QK_K = 256 }; /* elements a block, elements a K block */

typedef struct sti_block_q4_0 { /* x = d * (q - 8) */
    uint8_t d[2], q[16];        /* q[i]: element i low nibble, i + 16 high */
} sti_block_q4_0;
typedef struct sti_block_q4_1 { /* x = d * q + m */
    uint8_t d[2], m[2], q[16];
} sti_block_q4_1;
typedef struct sti_block_q5_0 { /* x = d * (q - 16); bit i of high: 5th bit of i */
    uint8_t d[2], high[4], q[16];
} sti_block_q5_0;
typedef struct sti_block_q5_1 { /* x = d * q + m */
    uint8_t d[2], m[2], high[4], q[16];
} sti_block_q5_1;
typedef struct sti_block_q8_0 { /* x = d * q */
    uint8_t d[2], q[32];        /* q as int8 */
} sti_block_q8_0;

typedef struct sti_block_q2_k {
    uint8_t scale[16], q[64], d[2], dmin[2];
} sti_block_q2_k;
typedef struct sti_block_q3_k {
    uint8_t high[32], q[64], scale[12], d[2];
} sti_block_q3_k;
typedef struct sti_block_q4_k {
    uint8_t d[2], dmin[2], scale[12], q[128];
} sti_block_q4_k;
typedef struct sti_block_q5_k {
    uint8_t d[2], dmin[2], scale[12], high[32], q[128];
} sti_block_q5_k;
typedef struct sti_block_q6_k {
    uint8_t q[128], high[64], scale[16], d[2]; /* scale as int8 */
} sti_block_q6_k;

typedef struct sti_block_iq4_nl {
    uint8_t d[2], q[16]; /* q[i]: element i low nibble, i + 16 high */
} sti_block_iq4_nl;
typedef struct sti_block_iq4_xs {
    uint8_t d[2], high[2], low[4],
        q[128]; /* a scale's bits 4-5, bits 0-3; q by group */
} sti_block_iq4_xs;
typedef struct sti_block_mxfp4 {
    uint8_t e, q[16];
} sti_block_mxfp4;

_Static_assert(sizeof(sti_block_q4_0) == 18 && sizeof(sti_block_q4_1) == 20, "layout");
_Static_assert(sizeof(sti_block_q5_0) == 22 && sizeof(sti_block_q5_1) == 24, "layout");
_Static_assert(sizeof(sti_block_q8_0) == 34 && sizeof(sti_block_q2_k) == 84, "layout");
_Static_assert(sizeof(sti_block_q3_k) == 110 && sizeof(sti_block_q4_k) == 144,
               "layout");
_Static_assert(sizeof(sti_block_q5_k) == 176 && sizeof(sti_block_q6_k) == 210,
               "layout");

_Static_assert(sizeof(sti_block_iq4_nl) == 18 && sizeof(sti_block_iq4_xs) == 136 &&
                   sizeof(sti_block_mxfp4) == 17,
               "layout");

static inline float sti_load_f16(const uint8_t p[2])
{
    return sti_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}
static inline void sti_store_f16(uint8_t p[2], float f)
{
    uint16_t h = sti_f32_to_f16(f);
    p[0] = (uint8_t)h;
    p[1] = (uint8_t)(h >> 8);
}

/* Scale and minimum of group j (0..7) from the 12 bytes of q4_k and q5_k: six bits
 * each. Groups 0-3 lie in the low six bits of bytes j and j+4; groups 4-7 have their
 * low nibbles in byte j+4 and their top two bits above groups j-4. */
static inline void sti_scale_min(const uint8_t *b, int j, int *scale, int *min)
{
    if (j < 4) {
        *scale = b[j] & 63;
        *min = b[j + 4] & 63;
    } else {
        *scale = (b[j + 4] & 15) | (b[j - 4] >> 6) << 4;
        *min = b[j + 4] >> 4 | (b[j] >> 6) << 4;
    }
}

/* The scale of group j (0..7) of iq4_xs. */
static inline int sti_iq4_scale(const sti_block_iq4_xs *b, int j)
{
    return ((b->low[j / 2] >> 4 * (j % 2) & 15) | (b->high[j / 4] >> 2 * (j % 4) & 3)
                                                      << 4) -
           32;
}
/* 2^(e - 128), also where that is subnormal. */
static inline float sti_mxfp4_scale(uint8_t e)
{
    const union {
        uint32_t u;
        float f;
    } v = {e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23};
    return v.f;
}

/* The values that four bits stand for (dequant_table.c). */
extern const int8_t sti_iq4_values[16], sti_mxfp4_values[16];
void sti_dequant_iq4_nl(const sti_block_iq4_nl *b, float *y, int64_t n);
void sti_dequant_iq4_xs(const sti_block_iq4_xs *b, float *y, int64_t n);
void sti_dequant_mxfp4(const sti_block_mxfp4 *b, float *y, int64_t n);

/* The K blocks (dequant_k.c); n blocks each. */
void sti_dequant_q2_k(const sti_block_q2_k *b, float *y, int64_t n);
void sti_dequant_q3_k(const sti_block_q3_k *b, float *y, int64_t n);
void sti_dequant_q4_k(const sti_block_q4_k *b, float *y, int64_t n);
void sti_dequant_q5_k(const sti_block_q5_k *b, float *y, int64_t n);
void sti_dequant_q6_k(const sti_block_q6_k *b, float *y, int64_t n);

#endif
