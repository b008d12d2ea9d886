/* salient.h - how a salient token is stored: as the window has it, or quantized.
 *
 * A token is quantized once, when it joins the salient cache; from then on everybody
 * reads what was stored, and what is evicted folds it. Groups of 32 elements along the
 * head share their scales, in f16:
 *
 *   keys    k = d u,      u in -127..127 (8 bits) or -15..15 (5 bits),  d = max|k| / 127
 *                         or / 15
 *   values  v = d u + m,  u in 0..15 (4 bits) or 0..7 (3 bits),  m = min v,
 *                         d = (max v - m) / 15 or / 7
 *
 * with levels by d and m as they are stored: u is the nearest integer to k * (1 / d), or
 * (v - m) * (1 / d), half to even, all in float. So the bytes are the same on every
 * backend; d u is exact in float, and d u + m is rounded once.
 *
 * A row of D elements is stored as G = ceil(D / 32) groups in up to three arrays, each
 * with the rows of all slots one behind the other, so that rows of whole groups start at
 * multiples of 8 or 16 bytes and scales never lie between levels:
 *
 *   low    the low bits:  8 bits  [G, 32]  element e is byte e, two's complement
 *                         4 bits  [G, 16]  byte i: element i, element i + 16 << 4
 *                         2 bits  [G, 8]   byte i: elements i, i + 8, i + 16, i + 24
 *   high   of 5 and 3 bits: the fifth or third one, [G, 4], element e is bit e % 8 of
 *          byte e / 8. Levels of 5 bits are stored plus 16.
 *   scale  keys d [G], values d and m [G, 2], f16
 *
 * A backend may order the bits of rows otherwise (the cpu's panels of keys); sizes are
 * those here. Bytes of a token with D = 64, without score and position: f16 256, keys 8
 * and values 4 bits 108, keys 5 and values 3 bits 76. */
#ifndef STI_OPS_SALIENT_H
#define STI_OPS_SALIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"

enum { STI_SALIENT_GROUP = 32 };

/* One stored row. high is NULL for even numbers of bits. */
typedef struct sti_salient_row {
    uint8_t *low, *high;
    uint16_t *scale;
} sti_salient_row;

static inline size_t sti_salient_groups(int D)
{
    return ((size_t)D + STI_SALIENT_GROUP - 1) / STI_SALIENT_GROUP;
}
/* Bytes of a row in `low` and in `high`. */
static inline size_t sti_salient_low(int bits, int D)
{
    return sti_salient_groups(D) * (size_t)(bits & ~1) * (STI_SALIENT_GROUP / 8);
}
static inline size_t sti_salient_high(int bits, int D)
{
    return bits & 1 ? sti_salient_groups(D) * (STI_SALIENT_GROUP / 8) : 0;
}

/* Room for `slots` rows of D elements, one behind the other; the first is returned. */
sti_salient_row sti_salient_carve(sti_carve *c, int bits, size_t slots, int D);

/* x [D] into a row, and a row as numbers. bits: 8 or 5 for keys, 4 or 3 for values. */
void sti_salient_pack_key(int bits, const float *x, int D, sti_salient_row row);
void sti_salient_unpack_key(int bits, sti_salient_row row, int D, float *x);
void sti_salient_pack_value(int bits, const float *x, int D, sti_salient_row row);
void sti_salient_unpack_value(int bits, sti_salient_row row, int D, float *x);

/* y [D]: x as it comes out of the cache. 0 bits: x itself. y may be x. */
void sti_salient_round_key(int bits, const float *x, int D, float *y);
void sti_salient_round_value(int bits, const float *x, int D, float *y);

#endif
