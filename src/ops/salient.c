/* salient.c - quantized salient tokens; see salient.h. */
#include "ops/salient.h"

#include <math.h>
#include <string.h>

#include "file/dtype.h"
#include "ops/hybrid.h"

enum { GROUP = STI_SALIENT_GROUP };

sti_salient_row sti_salient_carve(sti_carve *c, int bits, size_t slots, int D)
{
    const size_t high = sti_salient_high(bits, D);
    const size_t scales = sti_salient_groups(D) * (bits < 5 ? 2 : 1); /* values: d, m */
    sti_salient_row r = {.low = sti_carve_take(c, slots, sti_salient_low(bits, D))};
    if (high > 0) r.high = sti_carve_take(c, slots, high);
    r.scale = sti_carve_take(c, slots * scales, sizeof *r.scale);
    return r;
}

/* ---- Levels of a group --------------------------------------------------- */

/* The loops here have constant bounds and no calls, so that compilers make vectors of
 * them: every token that leaves the window is packed. */

/* u[32], 0 <= u < 2^bits, to its bytes. high: NULL for even numbers of bits. */
static void pack_levels(int bits, const uint8_t *u, uint8_t *low, uint8_t *high)
{
    const int width = bits & ~1;
    if (width == 8)
        memcpy(low, u, GROUP);
    else if (width == 4)
        for (int i = 0; i < 16; i++) low[i] = (uint8_t)((u[i] & 15) | u[i + 16] << 4);
    else
        for (int i = 0; i < 8; i++)
            low[i] = (uint8_t)((u[i] & 3) | (u[i + 8] & 3) << 2 | (u[i + 16] & 3) << 4 |
                               u[i + 24] << 6);
    for (int b = 0; high && b < GROUP / 8; b++) {
        int x = 0;
        for (int i = 0; i < 8; i++) x |= u[8 * b + i] >> width << i;
        high[b] = (uint8_t)x;
    }
}

static void unpack_levels(int bits, const uint8_t *low, const uint8_t *high, uint8_t *u)
{
    const int width = bits & ~1, bytes = width * GROUP / 8, mask = (1 << width) - 1;
    for (int e = 0; e < GROUP; e++) {
        u[e] = (uint8_t)(low[e % bytes] >> e / bytes * width & mask);
        if (high) u[e] = (uint8_t)(u[e] | (high[e / 8] >> e % 8 & 1) << width);
    }
}

/* Group g of a row. values: it has a minimum beside its scale. */
static sti_salient_row group_of(int bits, sti_salient_row row, size_t g, bool values)
{
    row.low += g * (size_t)(bits & ~1) * (GROUP / 8);
    if (bits & 1) row.high += g * (GROUP / 8);
    if (!(bits & 1)) row.high = NULL;
    row.scale += values ? 2 * g : g;
    return row;
}

static int group_size(int D, size_t g)
{
    const int left = D - (int)g * GROUP;
    return left < GROUP ? left : GROUP;
}

static float inverse(float d)
{
    return d > 0 ? 1.0f / d : 0;
}

/* u[32] = the integers next to (x - m) per, half to even, within [lo, hi] (lo if it is no
 * number), plus `offset`. */
static void nearest(const float *x, float m, float per, int lo, int hi, int offset,
                    uint8_t *u)
{
    const float whole = 0x1.8p23f; /* float has no fraction from here on */
    const float least = (float)lo, most = (float)hi;
    for (int e = 0; e < GROUP; e++) {
        float v = (x[e] - m) * per;
        v = v > least ? v : least;
        v = v < most ? v : most;
        u[e] = (uint8_t)((int)((v + whole) - whole) + offset);
    }
}

/* The largest number; those that are none do not count. n = 8. */
static float largest(const float *x)
{
    float most = x[0];
    for (int i = 1; i < 8; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Group g of x [D], and `rest` behind its end. */
static void load_group(const float *x, int D, size_t g, float rest, float *y)
{
    const int n = group_size(D, g);
    if (n < GROUP)
        for (int e = 0; e < GROUP; e++) y[e] = rest;
    memcpy(y, x + g * GROUP, (size_t)n * sizeof *y);
}

/* ---- Keys ---------------------------------------------------------------- */

/* A level is in -top..top; five bits are stored plus 16, eight as they are. */
static int key_top(int bits)
{
    return (1 << (bits - 1)) - 1;
}
static int key_offset(int bits)
{
    return bits == 8 ? 0 : 1 << (bits - 1);
}

void sti_salient_pack_key(int bits, const float *x, int D, sti_salient_row row)
{
    const int top = key_top(bits);
    for (size_t g = 0; g < sti_salient_groups(D); g++) {
        const sti_salient_row to = group_of(bits, row, g, false);
        uint8_t u[GROUP];
        float y[GROUP], most[8] = {0};
        load_group(x, D, g, 0, y);
        for (int e = 0; e < GROUP; e += 8)
            for (int i = 0; i < 8; i++) {
                const float size = fabsf(y[e + i]);
                most[i] = size > most[i] ? size : most[i];
            }
        *to.scale = sti_f32_to_f16(largest(most) / (float)top);
        nearest(y, 0, inverse(sti_f16_to_f32(*to.scale)), -top, top, key_offset(bits),
                u);
        pack_levels(bits, u, to.low, to.high);
    }
}

void sti_salient_unpack_key(int bits, sti_salient_row row, int D, float *x)
{
    for (size_t g = 0; g < sti_salient_groups(D); g++, x += GROUP) {
        const sti_salient_row from = group_of(bits, row, g, false);
        const float d = sti_f16_to_f32(*from.scale);
        uint8_t u[GROUP];
        unpack_levels(bits, from.low, from.high, u);
        for (int e = 0; e < group_size(D, g); e++)
            x[e] = d * (float)(bits == 8 ? (int8_t)u[e] : u[e] - key_offset(bits));
    }
}

/* ---- Values -------------------------------------------------------------- */

void sti_salient_pack_value(int bits, const float *x, int D, sti_salient_row row)
{
    const int top = (1 << bits) - 1;
    for (size_t g = 0; g < sti_salient_groups(D); g++) {
        const sti_salient_row to = group_of(bits, row, g, true);
        uint8_t u[GROUP];
        float y[GROUP], most[8], minus[8];
        load_group(x, D, g, x[g * GROUP], y);
        for (int i = 0; i < 8; i++) most[i] = minus[i] = -INFINITY;
        for (int e = 0; e < GROUP; e += 8)
            for (int i = 0; i < 8; i++) {
                most[i] = y[e + i] > most[i] ? y[e + i] : most[i];
                minus[i] = -y[e + i] > minus[i] ? -y[e + i] : minus[i];
            }
        const float least = -largest(minus);
        to.scale[0] = sti_f32_to_f16((largest(most) - least) / (float)top);
        to.scale[1] = sti_f32_to_f16(least);
        if (group_size(D, g) < GROUP)
            load_group(x, D, g, sti_f16_to_f32(to.scale[1]), y);
        nearest(y, sti_f16_to_f32(to.scale[1]), inverse(sti_f16_to_f32(to.scale[0])), 0,
                top, 0, u);
        pack_levels(bits, u, to.low, to.high);
    }
}

void sti_salient_unpack_value(int bits, sti_salient_row row, int D, float *x)
{
    for (size_t g = 0; g < sti_salient_groups(D); g++, x += GROUP) {
        const sti_salient_row from = group_of(bits, row, g, true);
        const float d = sti_f16_to_f32(from.scale[0]),
                    m = sti_f16_to_f32(from.scale[1]);
        uint8_t u[GROUP];
        unpack_levels(bits, from.low, from.high, u);
        for (int e = 0; e < group_size(D, g); e++) x[e] = d * (float)u[e] + m;
    }
}

/* ---- There and back ------------------------------------------------------ */

/* A row that lives as long as a call. */
typedef struct row_memory {
    uint8_t low[STI_HEAD_DIM_MAX], high[STI_HEAD_DIM_MAX / 8];
    uint16_t scale[2 * STI_HEAD_DIM_MAX / GROUP];
} row_memory;

typedef void pack_fn(int bits, const float *x, int D, sti_salient_row row);
typedef void unpack_fn(int bits, sti_salient_row row, int D, float *x);

static void round_row(int bits, const float *x, int D, float *y, pack_fn *pack,
                      unpack_fn *unpack)
{
    row_memory m;
    const sti_salient_row row = {m.low, m.high, m.scale};
    if (bits == 0) {
        memmove(y, x, (size_t)D * sizeof *x);
        return;
    }
    pack(bits, x, D, row);
    unpack(bits, row, D, y);
}

void sti_salient_round_key(int bits, const float *x, int D, float *y)
{
    round_row(bits, x, D, y, sti_salient_pack_key, sti_salient_unpack_key);
}

void sti_salient_round_value(int bits, const float *x, int D, float *y)
{
    round_row(bits, x, D, y, sti_salient_pack_value, sti_salient_unpack_value);
}
