/* matmul_quant_portable.c - quantized products in plain C.
 *
 * The formula of matmul.h over the same groups and panels as the SIMD files: the loops
 * over 16 rows are what a compiler can turn into whatever vectors there are. */
#include <math.h>

#include "backend/cpu/dense/matmul.h"

enum { TILE = 4 };

/* c[16] += products of one group and one sub-block: steps of 4 k. w steps are ldw
 * apart, those of the activation (row i of R) 4 R; its low digits are 8 steps on. */
static void block_product(sti_packing f, const uint8_t *w, size_t ldw, const uint8_t *x,
                          size_t ldx, int steps, const float *d, const float *m,
                          float da, float sa, float *c)
{
    int32_t s[STI_GROUP] = {0};
    for (int k = 0; k < steps; k++, w += ldw, x += ldx) {
        for (int r = 0; r < STI_GROUP; r++) {
            for (int j = 0; j < 4; j++) {
                int q =
                    sti_is_signed(f) ? (int8_t)w[4 * r + j] : w[4 * r + j] - f.centre;
                s[r] += q * ((int8_t)x[j] * (1 << STI_ACT_DIGIT) +
                             (int8_t)x[8 * ldx + (size_t)j]);
            }
        }
    }
    for (int r = 0; r < STI_GROUP; r++) {
        c[r] += d[r] * da * (float)s[r];
        if (f.min) c[r] += m[r] * sa;
    }
}

/* Word `field` of row i of a record. */
static const uint8_t *act_at(const uint8_t *a, int R, int field, int i)
{
    return a + (size_t)(field * R + i) * 4;
}

static void product(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    const sti_packing f = sti_packing_of(p->type);
    const int steps = 8 / f.subs;
    const size_t step = STI_STEP * (size_t)p->ng;
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * (size_t)R) {
        for (int h = 0; h < f.subs; h++) {
            for (int i = 0; i < R; i++) {
                float da;
                int32_t sum;
                memcpy(&da, act_at(a, R, STI_ACT_D, i), 4);
                memcpy(&sum,
                       act_at(a, R, f.subs == 1 ? STI_ACT_SUM : STI_ACT_HALF + h, i),
                       4);
                for (int g = 0; g < p->ng; g++) {
                    size_t at = ((size_t)(b * f.subs + h) * (size_t)p->ng + (size_t)g);
                    block_product(f,
                                  p->q + (size_t)(b * 8 + h * steps) * step +
                                      (size_t)g * STI_STEP,
                                  step, act_at(a, R, h * steps, i), 4 * (size_t)R,
                                  steps, p->d + at * STI_GROUP, p->m + at * STI_GROUP,
                                  da, da * (float)sum, c + (i * p->ng + g) * STI_GROUP);
                }
            }
        }
    }
}

/* Byte j of step k of a block, see packing.h. */
static uint8_t quant_at(sti_packing f, const uint8_t *w, int k, int j)
{
    if (f.low == 8) return w[STI_STEP * k + j];
    int q = w[STI_STEP * (k % f.low) + j] >> k / f.low * f.low & ((1 << f.low) - 1);
    if (f.table) return (uint8_t)f.table[q];
    if (f.high == 0) return (uint8_t)q;
    int h = w[STI_STEP * (f.low + k % f.high) + j] >> k / f.high * f.high;
    return (uint8_t)(q | (h & ((1 << f.high) - 1)) << f.low);
}

/* Scale (which = 0) or minimum of row r in sub-block h; head leads the super-block, p is
 * where the quants of the block end. */
static float scale_at(sti_packing f, const uint8_t *head, const uint8_t *p, int h,
                      int r, int which)
{
    const uint8_t *half = (f.unit == 1 ? p : head) + 32 * which + 2 * r;
    const float v = sti_f16_to_f32((uint16_t)(half[0] | half[1] << 8));
    const int both = p[16 * h + r]; /* with subs 2 the scale in the low bits */
    if (f.unit == 1) return v;
    if (!f.min) return v * (float)(int8_t)both;
    if (f.subs == 1) return v * (float)p[16 * which + r];
    return v * (float)(which ? both >> 4 : both & 15);
}

static void unpack(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
    const sti_packing f = sti_packing_of(p->type);
    uint8_t *q = p->q + (size_t)g * STI_STEP;
    size_t at = (size_t)g * STI_GROUP;
    for (const int end = b + nb; b < end; b++) {
        const uint8_t *head = group + sti_super_at(f, b);
        const uint8_t *w = head + sti_block_at(f, b);
        for (int k = 0; k < 8; k++, q += STI_STEP * (size_t)p->ng)
            for (int j = 0; j < STI_STEP; j++) q[j] = quant_at(f, w, k, j);
        w += sti_quant_bytes(f);
        for (int h = 0; h < f.subs; h++, at += STI_GROUP * (size_t)p->ng) {
            for (int r = 0; r < STI_GROUP; r++) {
                p->d[at + (size_t)r] = scale_at(f, head, w, h, r, 0);
                if (f.min) p->m[at + (size_t)r] = scale_at(f, head, w, h, r, 1);
            }
        }
    }
}

static void gemv(sti_dtype t, const uint8_t *group, const uint8_t *act, int R, int nb,
                 float *c)
{
    uint8_t q[8 * STI_STEP];
    float d[2 * STI_GROUP], m[2 * STI_GROUP];
    sti_panel p = {.type = t, .ng = 1, .q = q, .d = d, .m = m};
    for (int i = 0; i < R * STI_GROUP; i++) c[i] = 0;
    for (int b = 0; b < nb; b++) {
        unpack(group, b, 1, &p, 0);
        product(&p, act + (size_t)b * STI_ACT_BYTES * (size_t)R, R, 1, c);
    }
}

/* The largest magnitude of 32 numbers, found by its bits: infinity and NaN are above
 * all others. */
static float top_of(const float *x)
{
    uint32_t top = 0;
    for (int j = 0; j < STI_BLOCK_K; j++) {
        uint32_t bits;
        memcpy(&bits, x + j, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float out;
    memcpy(&out, &top, sizeof out);
    return out;
}

static void quantize(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_ACT_BYTES * (size_t)R) {
            float inv;
            const float d = sti_act_scale(top_of(row), &inv);
            int32_t sum[2] = {0, 0};
            for (int j = 0; j < 32; j++) {
                /* |x inv| <= STI_ACT_MAX up to rounding. */
                int q = isnan(d) ? 0 : (int)lrintf(row[j] * inv), hi = sti_act_hi(q);
                sum[j / 16] += q;
                uint8_t *out = a + (j / 4 * R + i) * 4 + j % 4;
                out[0] = (uint8_t)(int8_t)hi;
                out[32 * R] = (uint8_t)(int8_t)(q - hi * (1 << STI_ACT_DIGIT));
            }
            const int32_t all = sum[0] + sum[1];
            const float s = d * (float)all;
            memcpy(a + (STI_ACT_D * R + i) * 4, &d, 4);
            memcpy(a + (STI_ACT_S * R + i) * 4, &s, 4);
            memcpy(a + (STI_ACT_SUM * R + i) * 4, &all, 4);
            memcpy(a + (STI_ACT_HALF * R + i) * 4, &sum[0], 4);
            memcpy(a + ((STI_ACT_HALF + 1) * R + i) * 4, &sum[1], 4);
        }
    }
}

const sti_quant_kernels sti_cpu_quant_portable = {
    .tile = TILE,
    .few = TILE,
    .groups = 1,
    .s8_flip = false,
    .quantize = quantize,
    .gemv = gemv,
    .unpack = unpack,
    .batch_tile = TILE,
    .batch_bytes = STI_ACT_BYTES,
    .quantize_batch = quantize,
    .fill = unpack,
    .product = product,
};
