/* salient.c - quantized salient tokens; see salient.h. */
#include "ops/salient.h"

#include <math.h>
#include <string.h>

#include "file/dtype.h"
#include "ops/hybrid.h"

enum { GROUP = STI_SALIENT_GROUP };

/* ---- Levels of a group --------------------------------------------------- */

/* u[32], 0 <= u < 2^bits, to its bytes. high: NULL for even numbers of bits. */
static void pack_levels(int bits, const uint8_t *u, uint8_t *low, uint8_t *high)
{
    const int width = bits & ~1, bytes = width * GROUP / 8, mask = (1 << width) - 1;
    memset(low, 0, (size_t)bytes);
    for (int e = 0; e < GROUP; e++)
        low[e % bytes] = (uint8_t)(low[e % bytes] | (u[e] & mask) << e / bytes * width);
    if (!high) return;
    memset(high, 0, GROUP / 8);
    for (int e = 0; e < GROUP; e++)
        high[e / 8] = (uint8_t)(high[e / 8] | u[e] >> width << e % 8);
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

/* The integer next to v, half to even, within [lo, hi]; lo if v is no number. */
static int nearest(float v, int lo, int hi)
{
    if (!(v > (float)lo)) return lo;
    return v < (float)hi ? (int)rintf(v) : hi;
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
    for (size_t g = 0; g < sti_salient_groups(D); g++, x += GROUP) {
        const sti_salient_row to = group_of(bits, row, g, false);
        const int n = group_size(D, g);
        uint8_t u[GROUP];
        float most = 0;
        for (int e = 0; e < n; e++) most = fmaxf(most, fabsf(x[e]));
        *to.scale = sti_f32_to_f16(most / (float)top);
        const float per = inverse(sti_f16_to_f32(*to.scale));
        for (int e = 0; e < GROUP; e++) {
            const int level = e < n ? nearest(x[e] * per, -top, top) : 0;
            u[e] = (uint8_t)(level + key_offset(bits));
        }
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
    for (size_t g = 0; g < sti_salient_groups(D); g++, x += GROUP) {
        const sti_salient_row to = group_of(bits, row, g, true);
        const int n = group_size(D, g);
        uint8_t u[GROUP];
        float least = x[0], most = x[0];
        for (int e = 1; e < n; e++) {
            least = fminf(least, x[e]);
            most = fmaxf(most, x[e]);
        }
        to.scale[0] = sti_f32_to_f16((most - least) / (float)top);
        to.scale[1] = sti_f32_to_f16(least);
        const float per = inverse(sti_f16_to_f32(to.scale[0]));
        const float m = sti_f16_to_f32(to.scale[1]);
        for (int e = 0; e < GROUP; e++)
            u[e] = (uint8_t)(e < n ? nearest((x[e] - m) * per, 0, top) : 0);
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
