/* attn_tile_code.h - the kernels of attn_tile.h over the vectors of simd.h. Included
 * once by each attn_<isa>.c, which says what its table is called.
 *
 * score and weigh are matrix products on a register tile of R rows times P panels of
 * two vectors. R and P are constants after inlining, so the accumulators are registers;
 * they are chosen to fill the register file (12 rows and one panel with AVX-512, 6 with
 * AVX2), and half as many rows over two panels when there are few rows, because a
 * fused multiply-add has to have about eight independent ones in flight beside it.
 * Bound by multiply-adds for many rows; by conversion and transposition of the cache,
 * then memory, when decoding. */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_CODE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_CODE_H

#include <math.h>

#include "backend/cpu/simd.h"
#include "backend/cpu/softmax/attn_tile.h"

enum {
    W = 2 * VL, /* panel */
    BLOCK = STI_ATTN_BLOCK,
    LDQ = STI_ATTN_LDQ,
    LDS = STI_ATTN_LDS,
    R_MAX = V_REGS / 8 * 3 /* 2 R_MAX accumulators, 2 operands, 1 broadcast */
};

/* ---- Rows ---------------------------------------------------------------- */

static void scale(float *y, const float *x, float s, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_mul(vf_load(x + i), vf_set(s)));
    if (i < n)
        vf_store_part(y + i, vf_mul(vf_load_part(x + i, n - i), vf_set(s)), n - i);
}

static void divide(float *y, const float *x, float s, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_div(vf_load(x + i), vf_set(s)));
    if (i < n)
        vf_store_part(y + i, vf_div(vf_load_part(x + i, n - i), vf_set(s)), n - i);
}

STI_INLINE vf joined(vf o, vf y, float keep, float add)
{
    return vf_fma(y, vf_set(add), vf_mul(o, vf_set(keep)));
}

static void join(float *y, const float *x, float keep, float add, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL)
        vf_store(y + i, joined(vf_load(y + i), vf_load(x + i), keep, add));
    if (i < n) {
        vf o = vf_load_part(y + i, n - i), p = vf_load_part(x + i, n - i);
        vf_store_part(y + i, joined(o, p, keep, add), n - i);
    }
}

static void to_f16(uint16_t *y, const float *x, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store_f16(y + i, vf_load(x + i));
    for (; i < n; i++) y[i] = sti_f32_to_f16(x[i]);
}

/* ---- Cache to tile ------------------------------------------------------- */

/* Keys [lo, hi) are at most `room` tokens, so their rows wrap around once at most, and
 * one division finds the row of each. */
STI_INLINE const void *row_at(const sti_attn_rows *src, int row)
{
    if (row >= src->room) row -= src->room;
    size_t at = (size_t)row * (size_t)src->D;
    return src->type == STI_F32 ? (const void *)((const float *)src->data + at)
                                : (const void *)((const uint16_t *)src->data + at);
}

/* A worker goes on with the block behind the one it reads, and would wait for memory at
 * its start; so readers ask for every row one block ahead. An address past the cache is
 * harmless. */
STI_INLINE void ask_for(const void *p, int bytes)
{
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}
STI_INLINE void ask_for_next(const sti_attn_rows *src, const void *row)
{
    int bytes = src->D * (src->type == STI_F32 ? 4 : 2);
    ask_for((const char *)row + BLOCK * bytes, bytes);
}

STI_INLINE float element(const sti_attn_rows *src, const void *row, int d)
{
    return src->type == STI_F32 ? ((const float *)row)[d]
                                : sti_f16_to_f32(((const uint16_t *)row)[d]);
}

/* Keys are moved KEYS at a time; row[] has a pointer to each, k is their column of a
 * panel. Returns how many dimensions were moved; the caller does the rest. */
enum { KEYS = W < 16 ? W : 16 };

#if defined(__AVX2__)
/* 16 keys times 8 dimensions at a time: two 8x8 transpositions of 16-bit numbers side
 * by side, keys 0-7 in the low half of each register, 8-15 in the high half. Moving
 * halves the bytes that converting first would. */
STI_INLINE int move_keys(const void *const *row, int D, float *k)
{
    int d = 0;
    for (; d + 8 <= D; d += 8, k += 8 * W) {
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
            vf_store(k + i * W, _mm512_cvtph_ps(r[i]));
#else
            vf_store(k + i * W, _mm256_cvtph_ps(_mm256_castsi256_si128(r[i])));
            vf_store(k + i * W + VL,
                     _mm256_cvtph_ps(_mm256_extracti128_si256(r[i], 1)));
#endif
        }
    }
    return d;
}
#else
STI_INLINE int move_keys(const void *const *row, int D, float *k)
{
    for (int j = 0; j < KEYS; j++) {
        const uint16_t *x = row[j];
        for (int d = 0; d + VL <= D; d += VL) {
            vf f = vf_load_f16(x + d);
            for (int i = 0; i < VL; i++) k[(d + i) * W + j] = f[i];
        }
    }
    return D / VL * VL;
}
#endif

static void load_keys(const sti_attn_rows *src, int start, int lo, int hi, float *k)
{
    int D = src->D, base = (start + lo) % src->room;
    for (int j = lo / KEYS * KEYS; j < hi; j += KEYS) {
        const void *row[KEYS];
        float *to = k + (size_t)(j / W) * (size_t)(D * W) + j % W;
        for (int i = 0; i < KEYS; i++) {
            /* A lane without a key takes its neighbour's; its score is not used. */
            int key = j + i < lo ? lo : j + i < hi ? j + i : hi - 1;
            row[i] = row_at(src, base + key - lo);
            ask_for_next(src, row[i]);
        }
        int d = src->type == STI_F16 ? move_keys(row, D, to) : 0;
        for (; d < D; d++)
            for (int i = 0; i < KEYS; i++) to[d * W + i] = element(src, row[i], d);
    }
}

/* Panels to panels: a plain conversion. */
static void load_panels(const sti_attn_rows *src, int start, int lo, int hi, float *k)
{
    enum { PANEL = STI_ATTN_PANEL };
    const int D = src->D;
    for (int j = lo / KEYS * KEYS; j < hi; j += KEYS) {
        const int slot = start + j, panel = slot / PANEL * PANEL;
        const int width = src->room - panel < PANEL ? src->room - panel : PANEL;
        const size_t at = (size_t)panel * (size_t)D + (size_t)(slot - panel);
        float *to = k + (size_t)(j / W) * (size_t)(D * W) + j % W;
        if (src->type == STI_F16 && width == PANEL) {
            const uint16_t *from = (const uint16_t *)src->data + at;
            for (int d = 0; d < D; d++, from += PANEL, to += W)
                for (int i = 0; i < KEYS; i += VL)
                    vf_store(to + i, vf_load_f16(from + i));
            continue;
        }
        const int keys = panel + width - slot < KEYS ? panel + width - slot : KEYS;
        const size_t size = src->type == STI_F16 ? sizeof(uint16_t) : sizeof(float);
        for (int d = 0; d < D; d++, to += W) {
            const char *from =
                (const char *)src->data + (at + (size_t)d * (size_t)width) * size;
            for (int i = 0; i < KEYS; i++) to[i] = i < keys ? element(src, from, i) : 0;
        }
    }
}

/* One vector of a row, zero behind the row's end. */
STI_INLINE vf value_at(const sti_attn_rows *src, const void *row, int d)
{
    if (d + VL <= src->D)
        return src->type == STI_F16 ? vf_load_f16((const uint16_t *)row + d)
                                    : vf_load((const float *)row + d);
    float x[VL];
    for (int i = 0; i < VL; i++) x[i] = d + i < src->D ? element(src, row, d + i) : 0;
    return vf_load(x);
}

static void load_values(const sti_attn_rows *src, int start, int lo, int hi, float *v)
{
    int base = (start + lo) % src->room;
    int whole = src->type == STI_F16 ? src->D / W * W : 0;
    for (int j = lo; j < hi; j++) {
        const uint16_t *row = row_at(src, base + j - lo);
        ask_for_next(src, row);
        float *to = v + j * W;
        int d = 0;
        for (; d < whole; d += W, to += BLOCK * W) {
            vf_store(to, vf_load_f16(row + d));
            vf_store(to + VL, vf_load_f16(row + d + VL));
        }
        for (; d < src->D; d += W, to += BLOCK * W) {
            vf_store(to, value_at(src, row, d));
            vf_store(to + VL, value_at(src, row, d + VL));
        }
    }
}

/* ---- Register tiles ------------------------------------------------------ */

/* s[R, P W] = q[R, D] k[D, P W]; the panels are D W apart. */
STI_INLINE void score_tile(const int R, const int P, const float *q, const float *k,
                           int D, float *s)
{
    vf acc[R_MAX][4];
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_set(0);
    }
    const float *k1 = k + (size_t)D * W;
    for (int d = 0; d < D; d++) {
        vf x[4];
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++)
            x[i] = vf_load((i < 2 ? k : k1) + d * W + i % 2 * VL);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(q[r * LDQ + d]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) vf_store(s + r * LDS + i * VL, acc[r][i]);
    }
}

/* score_tile with the cache's own panels of f16; k is at the first key. */
STI_INLINE void score_panel_tile(const int R, const int P, const float *q,
                                 const uint16_t *k, int D, float *s, const char *ahead)
{
    enum { PANEL = STI_ATTN_PANEL };
    vf acc[R_MAX][4];
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_set(0);
    }
    const size_t panel = (size_t)D * PANEL;
    for (int d = 0; d < D; d++, k += PANEL, ahead += P * W * 2) {
        vf x[4];
        ask_for(ahead, P * W * 2);
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++)
            x[i] = vf_load_f16(k + (size_t)(i * VL / PANEL) * panel + i * VL % PANEL);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(q[r * LDQ + d]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) vf_store(s + r * LDS + i * VL, acc[r][i]);
    }
}

/* Values of keys 0, 1, ... of a tile: float panels, or the cache's own f16 rows, from
 * `row` on and around the ring. */
typedef struct value_source {
    const float *panel;
    const uint16_t *cache, *ahead;
    int row, room, D;
} value_source;

/* o[R, P W] = p[R, n] v[n, P W], or joined to what o holds. */
STI_INLINE void weigh_tile(const int R, const int P, const bool direct, const float *p,
                           value_source v, int n, float *o, int ldo, const float *keep,
                           const float *add)
{
    vf acc[R_MAX][4];
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_set(0);
    }
    for (int j = 0; j < n; j++) {
        vf x[4];
        if (direct) {
            int row = v.row + j < v.room ? v.row + j : v.row + j - v.room;
            const uint16_t *h = v.cache + (size_t)row * (size_t)v.D;
            ask_for(v.ahead + (size_t)j * (size_t)v.D, P * W * 2);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) x[i] = vf_load_f16(h + i * VL);
        } else {
            const float *f = v.panel + j * W;
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++)
                x[i] = vf_load(f + i / 2 * (BLOCK * W) + i % 2 * VL);
        }
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(p[r * LDS + j]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        float *y = o + (size_t)r * (size_t)ldo;
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++, y += VL)
            vf_store(y,
                     keep ? joined(vf_load(y), acc[r][i], keep[r], add[r]) : acc[r][i]);
    }
}

/* F with R and P as constants: up to R_MAX rows of one panel, or R_MAX / 2 of two. */
#if defined(__AVX512F__)
#define IF_32_REGISTERS(...) __VA_ARGS__
#else
#define IF_32_REGISTERS(...)
#endif
#define CASE(F, R, P, ...)                                                             \
    case R:                                                                            \
        F(R, P, __VA_ARGS__);                                                          \
        break;
#define CASES_1_TO_3(F, P, ...)                                                        \
    CASE(F, 1, P, __VA_ARGS__) CASE(F, 2, P, __VA_ARGS__) CASE(F, 3, P, __VA_ARGS__)
#define CASES_4_TO_6(F, P, ...)                                                        \
    CASE(F, 4, P, __VA_ARGS__) CASE(F, 5, P, __VA_ARGS__) CASE(F, 6, P, __VA_ARGS__)
#define CASES_7_TO_9(F, P, ...)                                                        \
    CASE(F, 7, P, __VA_ARGS__) CASE(F, 8, P, __VA_ARGS__) CASE(F, 9, P, __VA_ARGS__)
#define CASES_10_TO_12(F, P, ...)                                                      \
    CASE(F, 10, P, __VA_ARGS__) CASE(F, 11, P, __VA_ARGS__) CASE(F, 12, P, __VA_ARGS__)
#define ONE_PANEL(F, R, ...)                                                           \
    switch (R) {                                                                       \
        CASES_1_TO_3(F, 1, __VA_ARGS__)                                                \
        CASES_4_TO_6(F, 1, __VA_ARGS__)                                                \
        IF_32_REGISTERS(CASES_7_TO_9(F, 1, __VA_ARGS__))                               \
        IF_32_REGISTERS(CASES_10_TO_12(F, 1, __VA_ARGS__))                             \
    }
#define TWO_PANELS(F, R, ...)                                                          \
    switch (R) {                                                                       \
        CASES_1_TO_3(F, 2, __VA_ARGS__)                                                \
        IF_32_REGISTERS(CASES_4_TO_6(F, 2, __VA_ARGS__))                               \
    }

/* Rows of the next register tile when n are left: as equal as they can be, since a
 * last tile of one row would run at a fraction of the speed. */
STI_INLINE int tile_rows(int n)
{
    int tiles = (n + R_MAX - 1) / R_MAX;
    return (n + tiles - 1) / tiles;
}

static void score(const sti_attn_tile *t, int D, int row, int n, int lo, int hi)
{
    const float *q = t->q + (size_t)row * LDQ;
    float *s = t->s + (size_t)row * LDS;
    int p = lo / W, end = (hi + W - 1) / W;
    if (n <= R_MAX / 2)
        for (; p + 2 <= end; p += 2) {
            const float *k = t->k + (size_t)p * (size_t)(D * W);
            TWO_PANELS(score_tile, n, q, k, D, s + p * W)
        }
    for (; p < end; p++) { /* a panel stays in L1 while all rows pass */
        const float *k = t->k + (size_t)p * (size_t)(D * W);
        for (int r = 0, R; r < n; r += R) {
            R = tile_rows(n - r);
            ONE_PANEL(score_tile, R, q + r * LDQ, k, D, s + r * LDS + p * W)
        }
    }
}

/* As with weigh_cache: few rows, whole panels. */
static void score_panels(const sti_attn_tile *t, const sti_attn_rows *src, int start,
                         int n, int lo, int hi, const void *ahead)
{
    enum { PANEL = STI_ATTN_PANEL };
    const int D = src->D, end = (hi + W - 1) / W * W;
    if (src->type != STI_F16 || start + end > src->room / PANEL * PANEL ||
        n > R_MAX / 2) {
        load_panels(src, start, lo, hi, t->k);
        score(t, D, 0, n, lo, hi);
        return;
    }
    const uint16_t *data = src->data;
    const int first = lo / W * W;
    for (int j = first, step; j < end; j += step) {
        const int slot = start + j;
        const uint16_t *k =
            data + (size_t)(slot / PANEL * PANEL) * (size_t)D + slot % PANEL;
        const char *next =
            ahead ? (const char *)ahead + (j - first) * D * 2 : (const char *)k;
        step = V_REGS == 32 && j + 2 * W <= end ? 2 * W : W;
        if (step == W)
            ONE_PANEL(score_panel_tile, n, t->q, k, D, t->s + j, next)
        else
            TWO_PANELS(score_panel_tile, n, t->q, k, D, t->s + j, next)
    }
}

static void weigh(const sti_attn_tile *t, int D, int row, int n, int lo, int hi,
                  float *o, int ldo, const float *keep, const float *add)
{
    const float *s = t->s + (size_t)row * LDS + lo;
    value_source v = {.panel = t->v + lo * W};
    int p = 0, end = (D + W - 1) / W;
    if (n <= R_MAX / 2)
        for (; p + 2 <= end; p += 2, v.panel += 2 * BLOCK * W)
            TWO_PANELS(weigh_tile, n, false, s, v, hi - lo, o + p * W, ldo, keep, add)
    for (; p < end; p++, v.panel += BLOCK * W)
        for (int r = 0, R; r < n; r += R) {
            R = tile_rows(n - r);
            ONE_PANEL(weigh_tile, R, false, s + r * LDS, v, hi - lo,
                      o + (size_t)r * (size_t)ldo + p * W, ldo, keep ? keep + r : NULL,
                      keep ? add + r : NULL)
        }
}

/* A float copy pays off from a few register tiles of rows on. Below, and where the
 * head fills whole panels, conversion hides behind the multiply-adds; its results take
 * registers, so two panels at a time need 32 of them. */
static void weigh_cache(const sti_attn_tile *t, const sti_attn_rows *src, int start,
                        int n, int lo, int hi, float *o, int ldo, const void *ahead)
{
    const int step = V_REGS == 32 ? 2 * W : W;
    if (src->type != STI_F16 || src->D % step != 0 || n > R_MAX / 2) {
        load_values(src, start, lo, hi, t->v);
        weigh(t, src->D, 0, n, lo, hi, o, ldo, NULL, NULL);
        return;
    }
    const float *s = t->s + lo;
    const int row = (start + lo) % src->room;
    value_source v = {.cache = src->data,
                      .ahead = ahead ? ahead : row_at(src, row),
                      .row = row,
                      .room = src->room,
                      .D = src->D};
    for (int d = 0; d < src->D; d += step, v.cache += step, v.ahead += step)
        if (step == W)
            ONE_PANEL(weigh_tile, n, true, s, v, hi - lo, o + d, ldo, NULL, NULL)
        else
            TWO_PANELS(weigh_tile, n, true, s, v, hi - lo, o + d, ldo, NULL, NULL)
}

/* ---- Softmax ------------------------------------------------------------- */

static void soften(const sti_attn_tile *t, int row, int n, int lo, int hi)
{
    int first = lo / VL * VL, end = (hi + VL - 1) / VL * VL;
    for (int r = row; r < row + n; r++) {
        float *s = t->s + (size_t)r * LDS;
        /* Lanes without a key hold whatever was there: they get weight 0. */
        for (int j = first; j < lo; j++) s[j] = -INFINITY;
        for (int j = hi; j < end; j++) s[j] = -INFINITY;
        vf m = vf_load(s + first), l = vf_set(0);
        for (int j = first + VL; j < end; j += VL) m = vf_max(m, vf_load(s + j));
        t->m[r] = vf_hmax(m);
        m = vf_set(t->m[r]);
        for (int j = first; j < end; j += VL) {
            vf p = vf_exp(vf_sub(vf_load(s + j), m));
            vf_store(s + j, p);
            l = vf_add(l, p);
        }
        t->l[r] = vf_hsum(l);
    }
}

static void fold(float *M, float *L, const float *m, const float *l, float *keep,
                 float *add, int n)
{
    for (int i = 0; i < n; i += VL) {
        int c = n - i < VL ? n - i : VL;
        vf was = vf_load_part(M + i, c), now = vf_load_part(m + i, c);
        vf max = vf_max(was, now);
        vf a = vf_exp(vf_sub(was, max)), b = vf_exp(vf_sub(now, max));
        vf sum = vf_mul(vf_load_part(L + i, c), a);
        sum = vf_fma(vf_load_part(l + i, c), b, sum);
        vf_store_part(M + i, max, c);
        vf_store_part(L + i, sum, c);
        vf_store_part(keep + i, a, c);
        vf_store_part(add + i, b, c);
    }
}

#define STI_ATTN_TABLE                                                                 \
    {                                                                                  \
        scale, divide, join, to_f16, load_keys, load_values, load_panels, score,       \
            score_panels, soften, weigh, weigh_cache, fold                             \
    }

#endif
