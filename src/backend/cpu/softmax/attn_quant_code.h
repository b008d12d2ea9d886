/* attn_quant_code.h - keys and values of few bits (ops/salient.h) for the kernels of
 * attn_tile.h.
 *
 * Where the processor sums products of bytes (AVX-512 VNNI), logits are those of the keys'
 * levels and of the query as an integer of three digits, which is as exact as float:
 *
 *   q = c sum_i 2^7i q_i, |q_i| <= 64,   q.k = sum over groups g of d_g c (q_g . u_g)
 *
 * Three products of bytes take the place of four of floats, and no level has to become a
 * float on its way. Elsewhere keys become float, d u, which is exact.
 *
 * Values become float, v = d u + m, rounded once, so it does not matter where a number is
 * made of its level: decoding, which does so on the way into its multiply-adds, gets the
 * bits of a prompt, which keeps a float copy of the block. */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_QUANT_CODE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_QUANT_CODE_H

#include "backend/cpu/simd.h"
#include "backend/cpu/softmax/attn_tile.h"

enum { ATTN_GROUP = STI_SALIENT_GROUP };

/* What is read next while n keys from `key` on are worked on. */
STI_INLINE void attn_prefetch_ahead(const sti_attn_ahead *a, int key, int n)
{
    for (int i = 0; a && i < 3 && a->at[i]; i++) {
        const char *p = a->at[i] + (size_t)key * a->step[i],
                   *end = p + (size_t)n * a->step[i];
        for (; p < end; p += 64) __builtin_prefetch(p, 0, 2);
    }
}

/* ---- Keys: panels of words ----------------------------------------------- */

enum { ATTN_PANEL = STI_ATTN_PANEL, ATTN_WORD = 4 };

/* Words of VL keys, and back. */
STI_INLINE vi attn_load_words(const uint8_t *p)
{
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}
STI_INLINE void attn_store_words(uint8_t *p, vi x)
{
    memcpy(p, &x, sizeof x);
}

/* A panel of 16 keys; those of the next are behind it in each array. */
typedef struct attn_key_panel {
    const uint8_t *low, *high;
    const uint16_t *scale;
} attn_key_panel;

/* What is taken off a level. */
STI_INLINE int attn_key_centre(const int bits)
{
    return bits == 5 ? 16 : 128;
}

STI_INLINE attn_key_panel attn_panel_from(const int bits, attn_key_panel p, int D,
                                          size_t keys)
{
    p.low += keys * sti_salient_low(bits, D);
    if (bits == 5) p.high += keys * sti_salient_high(bits, D);
    p.scale += keys * sti_salient_groups(D);
    return p;
}

/* The high bits of group g, of VL keys from `key` on. */
STI_INLINE vi attn_high_plane(const int bits, const attn_key_panel *p, int g, int key)
{
    return bits == 5 ? attn_load_words(p->high + (g * ATTN_PANEL + key) * ATTN_WORD)
                     : vi_set(0);
}

/* Levels of dimensions 4 k to 4 k + 3 of group g, plus the centre: a byte each. */
STI_INLINE vi attn_levels(const int bits, const attn_key_panel *p, vi high, int g,
                          const int k, int key)
{
    enum { STEP = ATTN_PANEL * ATTN_WORD };
    const uint8_t *low = p->low + key * ATTN_WORD;
    if (bits == 8)
        return attn_load_words(low + (8 * g + k) * STEP) ^ (int32_t)0x80808080;
    const vi x = attn_load_words(low + (4 * g + k % 4) * STEP) >> k / 4 * 4;
    const vi top = k < 4 ? high << (4 - k) : high >> (k - 4);
    return (x & 0x0f0f0f0f) | (top & 0x10101010);
}

/* n elements of `size` bytes, `width` of them side by side, to 16 side by side. */
STI_INLINE void attn_widen_panel(const void *from, size_t n, size_t width, size_t size,
                                 void *to)
{
    memset(to, 0, n * ATTN_PANEL * size);
    for (size_t i = 0; i < n; i++)
        memcpy((char *)to + i * ATTN_PANEL * size,
               (const char *)from + i * width * size, width * size);
}

/* Memory for a panel of fewer keys. */
typedef struct attn_wide_panel {
    uint8_t low[ATTN_PANEL * STI_ATTN_MAX_D], high[ATTN_PANEL * STI_ATTN_MAX_D / 8];
    uint16_t scale[ATTN_PANEL * STI_ATTN_MAX_D / ATTN_GROUP];
} attn_wide_panel;

/* The panel that slot `first` starts; one with fewer keys gets others of zeros. */
STI_INLINE attn_key_panel attn_panel_at(const int bits, const sti_attn_rows *src,
                                        int first, attn_wide_panel *wide)
{
    const attn_key_panel p =
        attn_panel_from(bits, (attn_key_panel){src->data, src->high, src->scale},
                        src->D, (size_t)first);
    const int width = src->capacity - first;
    if (width >= ATTN_PANEL) return p;
    const size_t w = (size_t)width;
    attn_widen_panel(p.low, sti_salient_low(bits, src->D) / ATTN_WORD, w, ATTN_WORD,
                     wide->low);
    attn_widen_panel(p.high, sti_salient_high(bits, src->D) / ATTN_WORD, w, ATTN_WORD,
                     wide->high);
    attn_widen_panel(p.scale, sti_salient_groups(src->D), w, sizeof *p.scale,
                     wide->scale);
    return (attn_key_panel){wide->low, wide->high, wide->scale};
}

/* ---- Queries as digits ---------------------------------------------------- */

#if defined(__AVX512VNNI__)

enum { ATTN_LEVELS_COST = 80 };
enum { ATTN_DIGITS = STI_ATTN_DIGITS, ATTN_DIGIT = 7, ATTN_INT_ROWS = 4 };

/* A query of D dimensions, padded to whole groups:
 *   int8 digit[3][D], the highest first; int32 sum[3][D / 32]; float c */
STI_INLINE size_t attn_digit_sums(int groups)
{
    return (size_t)(ATTN_DIGITS * groups * ATTN_GROUP);
}

static void attn_round_query(const float *x, int D, int8_t *to)
{
    const int groups = (int)sti_salient_groups(D), all = groups * ATTN_GROUP;
    const float most = 63 << 2 * ATTN_DIGIT; /* so the highest digit is at most 63 */
    vf top = vf_set(0), zero = top;
    for (int d = 0; d < D; d += VL) {
        const vf y = vf_load_some(x + d, D - d);
        top = vf_max(top, vf_max(y, vf_sub(vf_set(0), y)));
        zero = vf_fma(y, vf_set(0), zero); /* or NaN: then all logits are */
    }
    const float m = vf_hmax(top), c = m / most + vf_hsum(zero);
    const vf per = vf_set(m > 1e-30f ? most / m : 0);
    int32_t sum[ATTN_DIGITS][STI_ATTN_MAX_D / ATTN_GROUP] = {{0}};
    for (int d = 0; d < all; d += VL) {
        const vf y = d < D ? vf_load_some(x + d, D - d) : vf_set(0);
        vi left = (vi)_mm512_cvtps_epi32(vf_mul(y, per));
        STI_UNROLL
        for (int i = 0; i < ATTN_DIGITS; i++) {
            const int down = (ATTN_DIGITS - 1 - i) * ATTN_DIGIT;
            const vi v = down ? (left + (1 << (down - 1))) >> down : left;
            left -= v << down;
            _mm_storeu_si128((__m128i *)(void *)(to + i * all + d),
                             _mm512_cvtepi32_epi8((__m512i)v));
            sum[i][d / ATTN_GROUP] += _mm512_reduce_add_epi32((__m512i)v);
        }
    }
    int8_t *more = to + attn_digit_sums(groups);
    for (int i = 0; i < ATTN_DIGITS; i++, more += groups * 4)
        memcpy(more, sum[i], (size_t)groups * sizeof sum[i][0]);
    memcpy(more, &c, sizeof c);
}

static void attn_round_queries(const sti_attn_tile *t, int D, int n)
{
    const size_t row = sti_attn_digit_bytes(D);
    for (int r = 0; r < n; r++)
        attn_round_query(t->q + (size_t)r * STI_ATTN_LDQ, D,
                         t->digits + (size_t)r * row);
}

STI_INLINE int32_t attn_int_at(const int8_t *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* s[R, P panels] of R queries. */
STI_INLINE void attn_int_tile(const int R, const int P, const int bits,
                              const int8_t *query, size_t row, attn_key_panel key,
                              int D, float *s)
{
    const int groups = (int)sti_salient_groups(D), all = groups * ATTN_GROUP;
    const int8_t *sums = query + attn_digit_sums(groups);
    attn_key_panel panel[2];
    vf acc[ATTN_INT_ROWS][2];
    STI_UNROLL
    for (int p = 0; p < P; p++)
        panel[p] = attn_panel_from(bits, key, D, (size_t)(p * ATTN_PANEL));
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int p = 0; p < P; p++) acc[r][p] = vf_set(0);
    }
    for (int g = 0; g < groups; g++) {
        vi a[ATTN_INT_ROWS][2][ATTN_DIGITS], high[2];
        STI_UNROLL
        for (int p = 0; p < P; p++) high[p] = attn_high_plane(bits, &panel[p], g, 0);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            STI_UNROLL
            for (int i = 0; i < ATTN_DIGITS; i++) {
                const int32_t sum =
                    attn_int_at(sums + (size_t)r * row + (i * groups + g) * 4);
                STI_UNROLL
                for (int p = 0; p < P; p++)
                    a[r][p][i] = vi_set(-attn_key_centre(bits) * sum);
            }
        }
        STI_UNROLL
        for (int k = 0; k < 8; k++) {
            vi u[2];
            STI_UNROLL
            for (int p = 0; p < P; p++)
                u[p] = attn_levels(bits, &panel[p], high[p], g, k, 0);
            STI_UNROLL
            for (int r = 0; r < R; r++) {
                STI_UNROLL
                for (int i = 0; i < ATTN_DIGITS; i++) {
                    const vi x = vi_set(attn_int_at(query + (size_t)r * row + i * all +
                                                    g * ATTN_GROUP + k * 4));
                    STI_UNROLL
                    for (int p = 0; p < P; p++)
                        a[r][p][i] = (vi)_mm512_dpbusd_epi32((__m512i)a[r][p][i],
                                                             (__m512i)u[p], (__m512i)x);
                }
            }
        }
        STI_UNROLL
        for (int p = 0; p < P; p++) {
            const vf d = vf_load_f16(panel[p].scale + g * ATTN_PANEL);
            STI_UNROLL
            for (int r = 0; r < R; r++) {
                const vi low = (a[r][p][1] << ATTN_DIGIT) + a[r][p][2];
                const vf sum =
                    vf_fma(vf_of(a[r][p][0]), vf_set(1 << 2 * ATTN_DIGIT), vf_of(low));
                acc[r][p] = vf_fma(d, sum, acc[r][p]);
            }
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        float c;
        memcpy(&c, sums + (size_t)r * row + ATTN_DIGITS * groups * 4, sizeof c);
        STI_UNROLL
        for (int p = 0; p < P; p++)
            vf_store(s + r * STI_ATTN_LDS + p * ATTN_PANEL,
                     vf_mul(acc[r][p], vf_set(c)));
    }
}

/* All n queries against P panels. */
STI_INLINE void attn_int_panels(const int P, const int bits, const sti_attn_tile *t,
                                attn_key_panel key, int D, int n, int at)
{
    const size_t row = sti_attn_digit_bytes(D);
    for (int r = 0; r < n; r += ATTN_INT_ROWS) {
        const int8_t *query = t->digits + (size_t)r * row;
        float *s = t->s + r * STI_ATTN_LDS + at;
        switch (n - r) {
        case 1: attn_int_tile(1, P, bits, query, row, key, D, s); break;
        case 2: attn_int_tile(2, P, bits, query, row, key, D, s); break;
        case 3: attn_int_tile(3, P, bits, query, row, key, D, s); break;
        default: attn_int_tile(4, P, bits, query, row, key, D, s); break;
        }
    }
}

STI_INLINE void attn_int_logits(const int bits, const sti_attn_tile *t,
                                const sti_attn_rows *src, int start, int n, int lo,
                                int hi, const sti_attn_ahead *ahead)
{
    attn_wide_panel wide;
    const int D = src->D;
    for (int j = lo / ATTN_PANEL * ATTN_PANEL, P; j < hi; j += P * ATTN_PANEL) {
        const attn_key_panel key = attn_panel_at(bits, src, start + j, &wide);
        P = j + ATTN_PANEL < hi && start + j + 2 * ATTN_PANEL <= src->capacity ? 2 : 1;
        attn_prefetch_ahead(ahead, j - lo / ATTN_PANEL * ATTN_PANEL, P * ATTN_PANEL);
        if (P == 2)
            attn_int_panels(2, bits, t, key, D, n, j);
        else
            attn_int_panels(1, bits, t, key, D, n, j);
    }
}

static void attn_qk_logits_levels(const sti_attn_tile *t, const sti_attn_rows *src,
                                  int start, int n, int lo, int hi,
                                  const sti_attn_ahead *ahead)
{
    if (src->bits == 5)
        attn_int_logits(5, t, src, start, n, lo, hi, ahead);
    else
        attn_int_logits(8, t, src, start, n, lo, hi, ahead);
}

#else

enum { ATTN_LEVELS_COST = 100 };

/* Digits are not used. */
static void attn_round_queries(const sti_attn_tile *t, int D, int n)
{
    (void)t;
    (void)D;
    (void)n;
}

/* Keys [lo, hi) to panels of float. */
STI_INLINE void attn_float_keys(const int bits, const sti_attn_rows *src, int start,
                                int lo, int hi, float *k)
{
    enum { W = 2 * VL };
    const int D = src->D, groups = (int)sti_salient_groups(D);
    attn_wide_panel wide;
    for (int j = lo / ATTN_PANEL * ATTN_PANEL; j < hi; j += ATTN_PANEL) {
        const attn_key_panel p = attn_panel_at(bits, src, start + j, &wide);
        for (int i = 0; i < ATTN_PANEL; i += VL) {
            float *to = k + (size_t)((j + i) / W) * (size_t)(D * W) + (j + i) % W;
            for (int g = 0; g < groups; g++) {
                const vf d = vf_load_f16(p.scale + g * ATTN_PANEL + i);
                const vi high = attn_high_plane(bits, &p, g, i);
                STI_UNROLL
                for (int s = 0; s < 8; s++) {
                    const vi u = attn_levels(bits, &p, high, g, s, i);
                    for (int b = 0; b < 4 && g * ATTN_GROUP + 4 * s + b < D; b++)
                        vf_store(
                            to + (size_t)(g * ATTN_GROUP + 4 * s + b) * W,
                            vf_mul(vf_of((u >> 8 * b & 255) - attn_key_centre(bits)),
                                   d));
                }
            }
        }
    }
}

static void attn_qk_logits(const sti_attn_tile *t, int D, int row, int n, int lo,
                           int hi);

static void attn_qk_logits_levels(const sti_attn_tile *t, const sti_attn_rows *src,
                                  int start, int n, int lo, int hi,
                                  const sti_attn_ahead *ahead)
{
    attn_prefetch_ahead(ahead, 0, hi - lo);
    if (src->bits == 5)
        attn_float_keys(5, src, start, lo, hi, t->k);
    else
        attn_float_keys(8, src, start, lo, hi, t->k);
    attn_qk_logits(t, src->D, 0, n, lo, hi);
}

#endif

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
