/* matmul_quant_portable.c - quantized products in plain C.
 *
 * The formula of matmul.h over the same groups and panels as the SIMD files: the loops
 * over 16 rows are what a compiler can turn into whatever vectors there are. */
#include <math.h>

#include "backend/cpu/dense/matmul.h"

enum { TILE = 4 };

/* c[16] += products of one group and one sub-block: steps of 4 k. w steps are ldw
 * apart, those of the activation (row i of R) 4 R; its low digits are 8 steps on. */
static void block_product(bool wide, int centre, const uint8_t *w, size_t ldw,
                          const uint8_t *x, size_t ldx, int steps, const float *d,
                          const float *m, float da, float sa, float *c)
{
    int32_t s[STI_GROUP] = {0};
    for (int k = 0; k < steps; k++, w += ldw, x += ldx) {
        for (int r = 0; r < STI_GROUP; r++) {
            for (int j = 0; j < 4; j++) {
                int q = wide ? (int8_t)w[4 * r + j] : w[4 * r + j] - centre;
                s[r] += q * ((int8_t)x[j] * (1 << STI_ACT_DIGIT) +
                             (int8_t)x[8 * ldx + (size_t)j]);
            }
        }
    }
    for (int r = 0; r < STI_GROUP; r++) {
        c[r] += d[r] * da * (float)s[r];
        if (m) c[r] += m[r] * sa;
    }
}

static float act_float(const uint8_t *a, int R, int field, int i)
{
    float v;
    memcpy(&v, a + (size_t)((16 + field) * R + i) * 4, 4);
    return v;
}

static void product(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    const int halves = p->kind == STI_P_U6_SUB ? 2 : 1, steps = 8 / halves;
    const bool wide = sti_panel_signed(p->kind);
    const int centre = p->kind == STI_P_U4 ? 8 : 0;
    const size_t step = 64 * (size_t)p->ng;
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * (size_t)R) {
        for (int h = 0; h < halves; h++) {
            for (int i = 0; i < R; i++) {
                float da = act_float(a, R, 0, i);
                float sa = act_float(a, R, halves == 2 ? 2 + h : 1, i);
                const uint8_t *x = a + ((size_t)(h * steps * R) + (size_t)i) * 4;
                for (int g = 0; g < p->ng; g++) {
                    size_t at = ((size_t)(b * halves + h) * (size_t)p->ng + (size_t)g);
                    block_product(wide, centre,
                                  p->q + (size_t)(b * 8 + h * steps) * step +
                                      (size_t)g * 64,
                                  step, x, 4 * (size_t)R, steps, p->d + at * 16,
                                  sti_panel_has_min(p->kind) ? p->m + at * 16 : NULL,
                                  da, sa, c + (i * p->ng + g) * STI_GROUP);
                }
            }
        }
    }
}

static void unpack(const uint8_t *w, int nb, const sti_panel *p, int g)
{
    const bool wide = sti_panel_signed(p->kind);
    const size_t quants = wide ? 512 : 256;
    const size_t step = 64 * (size_t)p->ng;
    for (int b = 0; b < nb; b++) {
        uint8_t *q = p->q + (size_t)b * 8 * step + (size_t)g * 64;
        for (size_t k = 0; k < 4; k++) {
            for (size_t j = 0; j < 64; j++) {
                uint8_t v = w[64 * k + j];
                q[k * step + j] = wide ? v : v & 15;
                q[(k + 4) * step + j] = wide ? w[64 * (k + 4) + j] : v >> 4;
            }
        }
        w += quants;
        size_t at = ((size_t)b * (size_t)p->ng + (size_t)g) * STI_GROUP;
        for (int half = 0; half < (sti_panel_has_min(p->kind) ? 2 : 1); half++) {
            uint16_t h[STI_GROUP];
            memcpy(h, w, sizeof h);
            float *out = (half ? p->m : p->d) + at;
            for (int r = 0; r < STI_GROUP; r++) out[r] = sti_f16_to_f32(h[r]);
            w += sizeof h;
        }
    }
}

static void gemv(sti_layout l, const uint8_t *w, const uint8_t *act, int R, int nb,
                 float *c)
{
    uint8_t q[512];
    float d[STI_GROUP], m[STI_GROUP];
    sti_panel p = {.kind = (sti_panel_kind)l, .ng = 1, .q = q, .d = d, .m = m};
    for (int i = 0; i < R * STI_GROUP; i++) c[i] = 0;
    for (int b = 0; b < nb; b++) {
        unpack(w + (size_t)b * sti_packed_block(l), 1, &p, 0);
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
            float f[4] = {d, d * (float)(sum[0] + sum[1]), d * (float)sum[0],
                          d * (float)sum[1]};
            int32_t nsum = -(sum[0] + sum[1]);
            for (int j = 0; j < 4; j++) memcpy(a + ((16 + j) * R + i) * 4, &f[j], 4);
            memcpy(a + (20 * R + i) * 4, &nsum, 4);
        }
    }
}

const sti_quant_kernels sti_cpu_quant_portable = {
    .tile = TILE,
    .groups = 1,
    .s8_flip = false,
    .quantize = quantize,
    .gemv = gemv,
    .unpack = unpack,
    .product = product,
};
