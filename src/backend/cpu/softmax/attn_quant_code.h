/* attn_quant_code.h - keys and values of few bits (ops/salient.h) for the kernels of
 * attn_tile.h: as vectors of float, k = d u and v = d u + m.
 *
 * d u is exact in float and d u + m is rounded once, so it does not matter where a number
 * is made of its level: decoding, which does so on the way into its multiply-adds, gets
 * the bits of a prompt, which keeps a float copy of the block. The query stays in float:
 * with integer products it would have to be rounded too, for keys that were stored once
 * and are read with few queries at a time. */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_QUANT_CODE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_QUANT_CODE_H

#include "backend/cpu/simd.h"
#include "backend/cpu/softmax/attn_tile.h"

enum { ATTN_GROUP = STI_SALIENT_GROUP };

/* ---- Keys: panels of bytes ----------------------------------------------- */

/* A panel of `width` keys. */
typedef struct attn_key_panel {
    const uint8_t *low, *high;
    const uint16_t *scale;
    int width;
} attn_key_panel;

/* The panel that slot `first` starts. */
STI_INLINE attn_key_panel attn_key_panel_at(const sti_attn_rows *src, int first)
{
    const int left = src->capacity - first;
    const size_t at = (size_t)first;
    return (attn_key_panel){
        (const uint8_t *)src->data + at * sti_salient_low(src->bits, src->D),
        src->high ? src->high + at * sti_salient_high(src->bits, src->D) : NULL,
        src->scale + at * sti_salient_groups(src->D),
        left < STI_ATTN_PANEL ? left : STI_ATTN_PANEL};
}

/* What makes numbers of the levels of a group, for VL keys from `key` on. Five bits are
 * put into the fraction of a float, x = 256 + u, and k = d x - 272 d: all products are
 * exact. */
typedef struct attn_key_scale {
    vf d, offset;
} attn_key_scale;

STI_INLINE attn_key_scale attn_key_scale_of(const int bits, const attn_key_panel *p,
                                            int d, int key)
{
    const vf scale = vf_load_f16(p->scale + d / ATTN_GROUP * STI_ATTN_PANEL + key);
    return (attn_key_scale){scale,
                            bits == 8 ? vf_set(0) : vf_mul(scale, vf_set(-272.0f))};
}

/* The high bits of dimensions [d, d + 8), d a multiple of 8, of VL keys. */
STI_INLINE vi attn_key_high(const int bits, const attn_key_panel *p, int d, int key)
{
    return bits == 8 ? vi_set(0) : vi_load_u8(p->high + d / 8 * STI_ATTN_PANEL + key);
}

/* Dimension d of VL keys from `key` on, of a whole panel. */
STI_INLINE vf attn_key_of(const int bits, const attn_key_panel *p, attn_key_scale s,
                          vi high, int d, int key)
{
    enum { PANEL = STI_ATTN_PANEL };
    const int g = d / ATTN_GROUP, e = d % ATTN_GROUP;
    if (bits == 8) return vf_mul(vf_of(vi_load_i8(p->low + d * PANEL + key)), s.d);
    const vi low = vi_load_u8(p->low + (g * 16 + e % 16) * PANEL + key);
    const vi top = (high << (19 - e % 8) & 0x80000) | 0x43800000;
    return vf_fma((vf)((low << (15 - e / 16 * 4) & 0x78000) | top), s.d, s.offset);
}

/* One level of a panel of any width. */
STI_INLINE int attn_key_level(const int bits, const attn_key_panel *p, int d, int key)
{
    const int g = d / ATTN_GROUP, e = d % ATTN_GROUP, w = p->width;
    if (bits == 8) return (int8_t)p->low[d * w + key];
    const int low = p->low[(g * 16 + e % 16) * w + key] >> e / 16 * 4 & 15;
    const int high = p->high[d / 8 * w + key] >> e % 8 & 1;
    return low + 16 * high - 16;
}

/* `n` keys of a panel to columns of k, ATTN_W apart; missing ones are 0. */
STI_INLINE void attn_load_key_panel(const int bits, const attn_key_panel *p, int D,
                                    int key, int n, float *k, int ldk)
{
    if (p->width == STI_ATTN_PANEL) {
        for (int i = 0; i < n; i += VL)
            for (int d8 = 0; d8 < D; d8 += 8) {
                const attn_key_scale s = attn_key_scale_of(bits, p, d8, key + i);
                const vi high = attn_key_high(bits, p, d8, key + i);
                for (int d = d8; d < D && d < d8 + 8; d++)
                    vf_store(k + (size_t)d * (size_t)ldk + i,
                             attn_key_of(bits, p, s, high, d, key + i));
            }
        return;
    }
    float scale[STI_ATTN_PANEL] = {0};
    const int some = p->width - key < n ? p->width - key : n;
    for (int d = 0; d < D; d++, k += ldk) {
        for (int i = 0; d % ATTN_GROUP == 0 && i < some; i++)
            scale[i] = sti_f16_to_f32(p->scale[d / ATTN_GROUP * p->width + key + i]);
        for (int i = 0; i < n; i++)
            k[i] = i < some ? scale[i] * (float)attn_key_level(bits, p, d, key + i) : 0;
    }
}

/* ---- Values: rows --------------------------------------------------------- */

/* Levels of dimensions [d, d + VL) of a row. With 16 lanes both halves of a group are
 * made at once, of a table of its numbers (attn_value_pair). */
STI_INLINE vf attn_value_levels(const int bits, const uint8_t *low, const uint8_t *high,
                                int d)
{
    const int g = d / ATTN_GROUP, e = d % ATTN_GROUP;
    if (bits == 4) {
        const vi u = vi_load_u8(low + g * 16 + e % 16);
        return vf_of(u >> e / 16 * 4 & 15);
    }
    uint32_t top;
    memcpy(&top, high + g * (ATTN_GROUP / 8), sizeof top);
    const vi lane = vi_lanes() + e;
    const vi u = vi_load_u8_of_8(low + g * 8, e % 8) >> (lane >> 3 << 1) & 3;
    return vf_of(u + ((vi_set((int32_t)top) >> lane & 1) << 2));
}

/* Rows of values from row `row` on; scale: theirs in float, [n, groups, 2]. */
typedef struct attn_value_rows {
    const uint8_t *low, *high;
    const float *scale;
    size_t low_row, high_row, scale_row;
} attn_value_rows;

STI_INLINE vf attn_value_of(const int bits, const attn_value_rows *v, int j, int d)
{
    const float *s = v->scale + (size_t)j * v->scale_row + d / ATTN_GROUP * 2;
    const vf u =
        attn_value_levels(bits, v->low + (size_t)j * v->low_row,
                          bits & 1 ? v->high + (size_t)j * v->high_row : NULL, d);
    return vf_fma(u, vf_set(s[0]), vf_set(s[1]));
}

/* Dimensions [d, d + W) of row j, W = 2 vectors. */
#if defined(__AVX512F__)
STI_INLINE void attn_value_pair(const int bits, const attn_value_rows *v, int j, int d,
                                vf x[2])
{
    const int g = d / ATTN_GROUP;
    const float *s = v->scale + (size_t)j * v->scale_row + g * 2;
    const uint8_t *low = v->low + (size_t)j * v->low_row;
    const vf table = vf_fma(vf_of(vi_lanes()), vf_set(s[0]), vf_set(s[1]));
    vi u[2];
    if (bits == 4) { /* a lookup reads four bits of its index */
        u[0] = vi_load_u8(low + g * 16);
        u[1] = u[0] >> 4;
    } else {
        const uint8_t *high = v->high + (size_t)j * v->high_row + g * 4;
        const vi b = vi_load_u8_of_8(low + g * 8, 0), shift = vi_lanes() >> 3 << 1;
        uint16_t top[2];
        memcpy(top, high, sizeof top);
        u[0] = b >> shift & 3;
        u[1] = b >> (shift + 4) & 3;
        STI_UNROLL
        for (int i = 0; i < 2; i++)
            u[i] = (vi)_mm512_mask_or_epi32((__m512i)u[i], top[i], (__m512i)u[i],
                                            _mm512_set1_epi32(4));
    }
    x[0] = _mm512_permutexvar_ps((__m512i)u[0], table);
    x[1] = _mm512_permutexvar_ps((__m512i)u[1], table);
}
#else
STI_INLINE void attn_value_pair(const int bits, const attn_value_rows *v, int j, int d,
                                vf x[2])
{
    x[0] = attn_value_of(bits, v, j, d);
    x[1] = attn_value_of(bits, v, j, d + VL);
}
#endif

/* The n <= BLOCK rows from `row` on; their scales go to `scale`. */
STI_INLINE attn_value_rows attn_value_rows_of(const sti_attn_rows *src, int row, int n,
                                              float *scale)
{
    const size_t per = 2 * sti_salient_groups(src->D), at = (size_t)row,
                 all = per * (size_t)n;
    const uint16_t *from = src->scale + at * per;
    size_t i = 0;
    for (; i + VL <= all; i += VL) vf_store(scale + i, vf_load_f16(from + i));
    for (; i < all; i++) scale[i] = sti_f16_to_f32(from[i]);
    const size_t low = sti_salient_low(src->bits, src->D),
                 high = sti_salient_high(src->bits, src->D);
    return (attn_value_rows){(const uint8_t *)src->data + at * low,
                             src->high ? src->high + at * high : NULL,
                             scale,
                             low,
                             high,
                             per};
}

enum { ATTN_SCALES = STI_ATTN_BLOCK * 2 * STI_ATTN_MAX_D / ATTN_GROUP };

#endif
