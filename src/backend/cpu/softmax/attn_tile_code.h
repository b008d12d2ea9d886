/* attn_tile_code.h - the kernels of attn_tile.h over the vectors of simd.h.
 *
 * qk_logits and pv_product are matrix products on a register tile of R rows times P
 * panels of two vectors. R and P are constants after inlining, so the accumulators are
 * registers; they are chosen to fill the register file (12 rows and one panel with
 * AVX-512, 6 with AVX2), and half as many rows over two panels when there are few rows,
 * because a fused multiply-add has to have about eight independent ones in flight
 * beside it. Bound by multiply-adds for many rows; by conversion and transposition of
 * the cache, then memory, when decoding. */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_CODE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_CODE_H

#include <math.h>

#include "backend/cpu/softmax/attn_load_code.h"

enum {
    ATTN_LDQ = STI_ATTN_LDQ,
    ATTN_LDS = STI_ATTN_LDS,
    ATTN_ROWS = V_REGS / 8 * 3 /* 2 ATTN_ROWS accumulators, 2 operands, 1 broadcast */
};

/* ---- Rows ---------------------------------------------------------------- */

static void attn_scale(float *y, const float *x, float s, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_mul(vf_load(x + i), vf_set(s)));
    if (i < n)
        vf_store_part(y + i, vf_mul(vf_load_part(x + i, n - i), vf_set(s)), n - i);
}

static void attn_divide(float *y, const float *x, float s, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_div(vf_load(x + i), vf_set(s)));
    if (i < n)
        vf_store_part(y + i, vf_div(vf_load_part(x + i, n - i), vf_set(s)), n - i);
}

STI_INLINE vf attn_joined(vf o, vf y, float keep, float add)
{
    return vf_fma(y, vf_set(add), vf_mul(o, vf_set(keep)));
}

static void attn_join(float *y, const float *x, float keep, float add, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL)
        vf_store(y + i, attn_joined(vf_load(y + i), vf_load(x + i), keep, add));
    if (i < n) {
        vf o = vf_load_part(y + i, n - i), p = vf_load_part(x + i, n - i);
        vf_store_part(y + i, attn_joined(o, p, keep, add), n - i);
    }
}

static void attn_to_f16(uint16_t *y, const float *x, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store_f16(y + i, vf_load(x + i));
    for (; i < n; i++) y[i] = sti_f32_to_f16(x[i]);
}

/* ---- Register tiles ------------------------------------------------------ */

/* The accumulators of R rows by P panels of two vectors. */
STI_INLINE void attn_clear(const int R, const int P, vf acc[ATTN_ROWS][4])
{
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_set(0);
    }
}

STI_INLINE void attn_store(const int R, const int P, vf acc[ATTN_ROWS][4], float *y,
                           int ldy)
{
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++)
            vf_store(y + (size_t)r * (size_t)ldy + i * VL, acc[r][i]);
    }
}

/* s[R, P W] = q[R, D] k[D, P W]; the panels are D W apart. */
STI_INLINE void attn_logits_tile(const int R, const int P, const float *q,
                                 const float *k, int D, float *s)
{
    vf acc[ATTN_ROWS][4];
    attn_clear(R, P, acc);
    const float *k1 = k + (size_t)D * ATTN_W;
    for (int d = 0; d < D; d++) {
        vf x[4];
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++)
            x[i] = vf_load((i < 2 ? k : k1) + d * ATTN_W + i % 2 * VL);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(q[r * ATTN_LDQ + d]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    attn_store(R, P, acc, s, ATTN_LDS);
}

/* attn_logits_tile with the cache's own panels of f16; k is at the first key. */
STI_INLINE void attn_panel_logits_tile(const int R, const int P, const float *q,
                                       const uint16_t *k, int D, float *s,
                                       const char *ahead)
{
    enum { PANEL = STI_ATTN_PANEL };
    vf acc[ATTN_ROWS][4];
    attn_clear(R, P, acc);
    const size_t panel = (size_t)D * PANEL;
    for (int d = 0; d < D; d++, k += PANEL, ahead += P * ATTN_W * 2) {
        vf x[4];
        attn_prefetch(ahead, P * ATTN_W * 2);
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++)
            x[i] = vf_load_f16(k + (size_t)(i * VL / PANEL) * panel + i * VL % PANEL);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(q[r * ATTN_LDQ + d]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    attn_store(R, P, acc, s, ATTN_LDS);
}

/* o[R, P W] = p[R, n] v[n, P W] with values of few bits, from dimension d on. */
STI_INLINE void attn_quant_pv_tile(const int R, const int P, const int bits,
                                   const float *p, const attn_value_rows *v, int d,
                                   int n, float *o, int ldo,
                                   const sti_attn_ahead *ahead)
{
    enum { AT_ONCE = 16 };
    vf acc[ATTN_ROWS][4];
    attn_clear(R, P, acc);
    for (int j = 0; j < n; j++) {
        vf x[4];
        if (j % AT_ONCE == 0) attn_prefetch_ahead(ahead, j, AT_ONCE);
        STI_UNROLL
        for (int i = 0; i < P; i++)
            attn_value_pair(bits, v, j, d + i * ATTN_W, x + 2 * i);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(p[r * ATTN_LDS + j]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    attn_store(R, P, acc, o, ldo);
}

/* Values of keys 0, 1, ... of a tile: float panels, or the cache's own f16 rows, from
 * `row` on and around the ring. */
typedef struct attn_values {
    const float *panel;
    const uint16_t *cache, *ahead;
    int row, capacity, D;
} attn_values;

/* o[R, P W] = p[R, n] v[n, P W], or joined to what o holds. */
STI_INLINE void attn_pv_tile(const int R, const int P, const bool direct,
                             const float *p, attn_values v, int n, float *o, int ldo,
                             const float *keep, const float *add)
{
    vf acc[ATTN_ROWS][4];
    attn_clear(R, P, acc);
    for (int j = 0; j < n; j++) {
        vf x[4];
        if (direct) {
            int row = v.row + j < v.capacity ? v.row + j : v.row + j - v.capacity;
            const uint16_t *h = v.cache + (size_t)row * (size_t)v.D;
            attn_prefetch(v.ahead + (size_t)j * (size_t)v.D, P * ATTN_W * 2);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) x[i] = vf_load_f16(h + i * VL);
        } else {
            const float *f = v.panel + j * ATTN_W;
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++)
                x[i] = vf_load(f + i / 2 * (ATTN_BLOCK * ATTN_W) + i % 2 * VL);
        }
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(p[r * ATTN_LDS + j]);
            STI_UNROLL
            for (int i = 0; i < 2 * P; i++) acc[r][i] = vf_fma(a, x[i], acc[r][i]);
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        float *y = o + (size_t)r * (size_t)ldo;
        STI_UNROLL
        for (int i = 0; i < 2 * P; i++, y += VL)
            vf_store(y, keep ? attn_joined(vf_load(y), acc[r][i], keep[r], add[r])
                             : acc[r][i]);
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
STI_INLINE int attn_tile_rows(int n)
{
    int tiles = (n + ATTN_ROWS - 1) / ATTN_ROWS;
    return (n + tiles - 1) / tiles;
}

static void attn_qk_logits(const sti_attn_tile *t, int D, int row, int n, int lo,
                           int hi)
{
    const float *q = t->q + (size_t)row * ATTN_LDQ;
    float *s = t->s + (size_t)row * ATTN_LDS;
    int p = lo / ATTN_W, end = (hi + ATTN_W - 1) / ATTN_W;
    if (n <= ATTN_ROWS / 2)
        for (; p + 2 <= end; p += 2) {
            const float *k = t->k + (size_t)p * (size_t)(D * ATTN_W);
            TWO_PANELS(attn_logits_tile, n, q, k, D, s + p * ATTN_W)
        }
    for (; p < end; p++) { /* a panel stays in L1 while all rows pass */
        const float *k = t->k + (size_t)p * (size_t)(D * ATTN_W);
        for (int r = 0, R; r < n; r += R) {
            R = attn_tile_rows(n - r);
            ONE_PANEL(attn_logits_tile, R, q + r * ATTN_LDQ, k, D,
                      s + r * ATTN_LDS + p * ATTN_W)
        }
    }
}

/* As with pv_product_cache: few rows, whole panels. */
static void attn_qk_logits_panels(const sti_attn_tile *t, const sti_attn_rows *src,
                                  int start, int n, int lo, int hi,
                                  const sti_attn_ahead *ahead)
{
    enum { PANEL = STI_ATTN_PANEL };
    const int D = src->D, end = (hi + ATTN_W - 1) / ATTN_W * ATTN_W;
    if (src->type != STI_F16 || start + end > src->capacity / PANEL * PANEL ||
        n > ATTN_ROWS / 2) {
        attn_load_panels(src, start, lo, hi, t->k);
        attn_qk_logits(t, D, 0, n, lo, hi);
        return;
    }
    const uint16_t *data = src->data;
    const int first = lo / ATTN_W * ATTN_W;
    for (int j = first, step; j < end; j += step) {
        const int slot = start + j;
        const uint16_t *k =
            data + (size_t)(slot / PANEL * PANEL) * (size_t)D + slot % PANEL;
        const char *next = ahead ? ahead->at[0] + (j - first) * D * 2 : (const char *)k;
        step = V_REGS == 32 && j + 2 * ATTN_W <= end ? 2 * ATTN_W : ATTN_W;
        if (step == ATTN_W)
            ONE_PANEL(attn_panel_logits_tile, n, t->q, k, D, t->s + j, next)
        else
            TWO_PANELS(attn_panel_logits_tile, n, t->q, k, D, t->s + j, next)
    }
}

static void attn_pv_product(const sti_attn_tile *t, int D, int row, int n, int lo,
                            int hi, float *o, int ldo, const float *keep,
                            const float *add)
{
    const float *s = t->s + (size_t)row * ATTN_LDS + lo;
    attn_values v = {.panel = t->v + lo * ATTN_W};
    int p = 0, end = (D + ATTN_W - 1) / ATTN_W;
    if (n <= ATTN_ROWS / 2)
        for (; p + 2 <= end; p += 2, v.panel += 2 * ATTN_BLOCK * ATTN_W)
            TWO_PANELS(attn_pv_tile, n, false, s, v, hi - lo, o + p * ATTN_W, ldo, keep,
                       add)
    for (; p < end; p++, v.panel += ATTN_BLOCK * ATTN_W)
        for (int r = 0, R; r < n; r += R) {
            R = attn_tile_rows(n - r);
            ONE_PANEL(attn_pv_tile, R, false, s + r * ATTN_LDS, v, hi - lo,
                      o + (size_t)r * (size_t)ldo + p * ATTN_W, ldo,
                      keep ? keep + r : NULL, keep ? add + r : NULL)
        }
}

/* Values of few bits: few rows, whole panels of dimensions. */
STI_INLINE void attn_quant_pv(const int bits, const sti_attn_tile *t,
                              const sti_attn_rows *src, int start, int n, int lo,
                              int hi, float *o, int ldo, const sti_attn_ahead *ahead)
{
    const int step = V_REGS == 32 ? 2 * ATTN_W : ATTN_W;
    float scale[ATTN_SCALES];
    const attn_value_rows v = attn_value_rows_of(src, start + lo, hi - lo, scale);
    const float *s = t->s + lo;
    for (int d = 0; d < src->D; d += step)
        if (step == ATTN_W)
            ONE_PANEL(attn_quant_pv_tile, n, bits, s, &v, d, hi - lo, o + d, ldo, ahead)
        else
            TWO_PANELS(attn_quant_pv_tile, n, bits, s, &v, d, hi - lo, o + d, ldo,
                       ahead)
}

/* A float copy pays off from a few register tiles of rows on. Below, and where the
 * head fills whole panels, conversion hides behind the multiply-adds; its results take
 * registers, so two panels at a time need 32 of them. */
static void attn_pv_product_cache(const sti_attn_tile *t, const sti_attn_rows *src,
                                  int start, int n, int lo, int hi, float *o, int ldo,
                                  const sti_attn_ahead *ahead)
{
    const int step = V_REGS == 32 ? 2 * ATTN_W : ATTN_W;
    if ((src->type != STI_F16 && !src->bits) || src->D % step != 0 ||
        n > ATTN_ROWS / 2) {
        attn_load_values(src, start, lo, hi, t->v);
        attn_pv_product(t, src->D, 0, n, lo, hi, o, ldo, NULL, NULL);
        return;
    }
    if (src->bits == 4) {
        attn_quant_pv(4, t, src, start, n, lo, hi, o, ldo, ahead);
        return;
    }
    if (src->bits == 3) {
        attn_quant_pv(3, t, src, start, n, lo, hi, o, ldo, ahead);
        return;
    }
    const float *s = t->s + lo;
    const int row = (start + lo) % src->capacity;
    attn_values v = {.cache = src->data,
                     .ahead = ahead ? (const uint16_t *)(const void *)ahead->at[0]
                                    : attn_row_at(src, row),
                     .row = row,
                     .capacity = src->capacity,
                     .D = src->D};
    for (int d = 0; d < src->D; d += step, v.cache += step, v.ahead += step)
        if (step == ATTN_W)
            ONE_PANEL(attn_pv_tile, n, true, s, v, hi - lo, o + d, ldo, NULL, NULL)
        else
            TWO_PANELS(attn_pv_tile, n, true, s, v, hi - lo, o + d, ldo, NULL, NULL)
}

/* ---- Softmax ------------------------------------------------------------- */

static void attn_softmax(const sti_attn_tile *t, int row, int n, int lo, int hi)
{
    int first = lo / VL * VL, end = (hi + VL - 1) / VL * VL;
    for (int r = row; r < row + n; r++) {
        float *s = t->s + (size_t)r * ATTN_LDS;
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

static void attn_merge_lse(float *M, float *L, const float *m, const float *l,
                           float *keep, float *add, int n)
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

#endif
