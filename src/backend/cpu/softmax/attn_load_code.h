/* attn_load_code.h - keys and values out of the cache into a tile; see attn_tile.h. */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_LOAD_CODE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_LOAD_CODE_H

#include "backend/cpu/softmax/attn_quant_code.h"

enum { ATTN_W = 2 * VL, ATTN_BLOCK = STI_ATTN_BLOCK }; /* keys of a panel, of a block */

/* Keys [lo, hi) are at most `capacity` tokens, so their rows wrap around once at most,
 * and one division finds the row of each. */
STI_INLINE const void *attn_row_at(const sti_attn_rows *src, int row)
{
    if (row >= src->capacity) row -= src->capacity;
    size_t at = (size_t)row * (size_t)src->D;
    return src->type == STI_F32 ? (const void *)((const float *)src->data + at)
                                : (const void *)((const uint16_t *)src->data + at);
}

/* A worker reads block after block, and would wait for memory at the start of each; so
 * every row of the next block is prefetched. An address past the cache is harmless. */
STI_INLINE void attn_prefetch(const void *p, int bytes)
{
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
STI_INLINE void attn_prefetch_next(const sti_attn_rows *src, const void *row)
{
    int bytes = src->D * (src->type == STI_F32 ? 4 : 2);
    attn_prefetch((const char *)row + ATTN_BLOCK * bytes, bytes);
}

STI_INLINE float attn_element(const sti_attn_rows *src, const void *row, int d)
{
    return src->type == STI_F32 ? ((const float *)row)[d]
                                : sti_f16_to_f32(((const uint16_t *)row)[d]);
}

/* Keys are moved KEYS at a time; row[] has a pointer to each, k is their column of a
 * panel. Returns how many dimensions were moved; the caller does the rest. */
enum { ATTN_KEYS = ATTN_W < 16 ? ATTN_W : 16 };

#if defined(__AVX2__)
/* 16 keys times 8 dimensions at a time: two 8x8 transpositions of 16-bit numbers side
 * by side, keys 0-7 in the low half of each register, 8-15 in the high half. Moving
 * halves the bytes that converting first would. */
STI_INLINE int attn_move_keys(const void *const *row, int D, float *k)
{
    int d = 0;
    for (; d + 8 <= D; d += 8, k += 8 * ATTN_W) {
        __m256i r[8], a[8], b[8];
        STI_UNROLL
        for (int i = 0; i < 8; i++) {
            const uint16_t *lo = (const uint16_t *)row[i] + d;
            const uint16_t *hi = (const uint16_t *)row[i + 8] + d;
            __m128i l = _mm_loadu_si128((const __m128i *)(const void *)lo);
            __m128i h = _mm_loadu_si128((const __m128i *)(const void *)hi);
            r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(l), h, 1);
        }
        STI_UNROLL
        for (int i = 0; i < 8; i += 2) { /* pairs of keys: d 0-3, d 4-7 */
            a[i] = _mm256_unpacklo_epi16(r[i], r[i + 1]);
            a[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
        }
        STI_UNROLL
        for (int i = 0; i < 8; i += 4) { /* fours of keys: d 01, 23, 45, 67 */
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 2]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 2]);
            b[i + 2] = _mm256_unpacklo_epi32(a[i + 1], a[i + 3]);
            b[i + 3] = _mm256_unpackhi_epi32(a[i + 1], a[i + 3]);
        }
        STI_UNROLL
        for (int i = 0; i < 4; i++) { /* all eight: one dimension each */
            r[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
            r[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
        }
        STI_UNROLL
        for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
            vf_store(k + i * ATTN_W, _mm512_cvtph_ps(r[i]));
#else
            vf_store(k + i * ATTN_W, _mm256_cvtph_ps(_mm256_castsi256_si128(r[i])));
            vf_store(k + i * ATTN_W + VL,
                     _mm256_cvtph_ps(_mm256_extracti128_si256(r[i], 1)));
#endif
        }
    }
    return d;
}
#else
STI_INLINE int attn_move_keys(const void *const *row, int D, float *k)
{
    for (int j = 0; j < ATTN_KEYS; j++) {
        const uint16_t *x = row[j];
        for (int d = 0; d + VL <= D; d += VL) {
            vf f = vf_load_f16(x + d);
            for (int i = 0; i < VL; i++) k[(d + i) * ATTN_W + j] = f[i];
        }
    }
    return D / VL * VL;
}
#endif

static void attn_load_keys(const sti_attn_rows *src, int start, int lo, int hi,
                           float *k)
{
    int D = src->D, base = (start + lo) % src->capacity;
    for (int j = lo / ATTN_KEYS * ATTN_KEYS; j < hi; j += ATTN_KEYS) {
        const void *row[ATTN_KEYS];
        float *to = k + (size_t)(j / ATTN_W) * (size_t)(D * ATTN_W) + j % ATTN_W;
        for (int i = 0; i < ATTN_KEYS; i++) {
            /* A lane without a key takes its neighbour's; its logit is not used. */
            int key = j + i < lo ? lo : j + i < hi ? j + i : hi - 1;
            row[i] = attn_row_at(src, base + key - lo);
            attn_prefetch_next(src, row[i]);
        }
        int d = src->type == STI_F16 ? attn_move_keys(row, D, to) : 0;
        for (; d < D; d++)
            for (int i = 0; i < ATTN_KEYS; i++)
                to[d * ATTN_W + i] = attn_element(src, row[i], d);
    }
}

/* Panels to panels: a plain conversion. */
static void attn_load_panels(const sti_attn_rows *src, int start, int lo, int hi,
                             float *k)
{
    enum { PANEL = STI_ATTN_PANEL };
    const int D = src->D;
    for (int j = lo / ATTN_KEYS * ATTN_KEYS; j < hi; j += ATTN_KEYS) {
        const int slot = start + j, panel = slot / PANEL * PANEL;
        const int width = src->capacity - panel < PANEL ? src->capacity - panel : PANEL;
        const size_t at = (size_t)panel * (size_t)D + (size_t)(slot - panel);
        float *to = k + (size_t)(j / ATTN_W) * (size_t)(D * ATTN_W) + j % ATTN_W;
        if (src->type == STI_F16 && width == PANEL) {
            const uint16_t *from = (const uint16_t *)src->data + at;
            for (int d = 0; d < D; d++, from += PANEL, to += ATTN_W)
                for (int i = 0; i < ATTN_KEYS; i += VL)
                    vf_store(to + i, vf_load_f16(from + i));
            continue;
        }
        const int keys =
            panel + width - slot < ATTN_KEYS ? panel + width - slot : ATTN_KEYS;
        const size_t size = src->type == STI_F16 ? sizeof(uint16_t) : sizeof(float);
        for (int d = 0; d < D; d++, to += ATTN_W) {
            const char *from =
                (const char *)src->data + (at + (size_t)d * (size_t)width) * size;
            for (int i = 0; i < ATTN_KEYS; i++)
                to[i] = i < keys ? attn_element(src, from, i) : 0;
        }
    }
}

/* One vector of a row, zero behind the row's end. */
STI_INLINE vf attn_value_at(const sti_attn_rows *src, const void *row, int d)
{
    if (d + VL <= src->D)
        return src->type == STI_F16 ? vf_load_f16((const uint16_t *)row + d)
                                    : vf_load((const float *)row + d);
    float x[VL];
    for (int i = 0; i < VL; i++)
        x[i] = d + i < src->D ? attn_element(src, row, d + i) : 0;
    return vf_load(x);
}

/* Rows of few bits; the block lies within the list. */
STI_INLINE void attn_load_quant_rows(const int bits, const sti_attn_rows *src,
                                     int start, int lo, int hi, float *v)
{
    float scale[ATTN_SCALES];
    const attn_value_rows rows = attn_value_rows_of(src, start + lo, hi - lo, scale);
    for (int j = lo; j < hi; j++) {
        float *to = v + j * ATTN_W;
        for (int d = 0; d < src->D; d += ATTN_W, to += ATTN_BLOCK * ATTN_W) {
            vf x[2];
            attn_value_pair(bits, &rows, j - lo, d, x);
            vf_store(to, x[0]);
            vf_store(to + VL, x[1]);
        }
    }
}

static void attn_load_quant_values(const sti_attn_rows *src, int start, int lo, int hi,
                                   float *v)
{
    if (src->bits == 4)
        attn_load_quant_rows(4, src, start, lo, hi, v);
    else
        attn_load_quant_rows(3, src, start, lo, hi, v);
}

static void attn_load_values(const sti_attn_rows *src, int start, int lo, int hi,
                             float *v)
{
    if (src->bits) {
        attn_load_quant_values(src, start, lo, hi, v);
        return;
    }
    int base = (start + lo) % src->capacity;
    int whole = src->type == STI_F16 ? src->D / ATTN_W * ATTN_W : 0;
    for (int j = lo; j < hi; j++) {
        const uint16_t *row = attn_row_at(src, base + j - lo);
        attn_prefetch_next(src, row);
        float *to = v + j * ATTN_W;
        int d = 0;
        for (; d < whole; d += ATTN_W, to += ATTN_BLOCK * ATTN_W) {
            vf_store(to, vf_load_f16(row + d));
            vf_store(to + VL, vf_load_f16(row + d + VL));
        }
        for (; d < src->D; d += ATTN_W, to += ATTN_BLOCK * ATTN_W) {
            vf_store(to, attn_value_at(src, row, d));
            vf_store(to + VL, attn_value_at(src, row, d + VL));
        }
    }
}

#endif
