/* matmul_quant_avx2.c - quantized products with AVX2.
 *
 * A group of 16 rows is two registers of 8 lanes. vpmaddubsw multiplies unsigned by
 * signed bytes and adds pairs into 16 bits; with weights of 4 bits all 8 steps of a
 * block fit (8 * 2 * 15 * 127 < 2^15), with 5 bits 4 steps, with 6 bits 2, before the
 * sums are widened to 32 bits. Signed bytes take |w| times sign(w) a, one step at a
 * time (2 * 128 * 127 < 2^15). All of it is exact. The low digits follow the high ones
 * through the same accumulators, shifted by STI_ACT_DIGIT in 32 bits.
 *
 * The panel product is 16 rows by 4 activation rows: 8 integer accumulators, 2 weights
 * and the activation stay in the 16 registers; float accumulators live in L1. */
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/dense/matmul.h"

enum { TILE = 4 };

/* Places in an activation record of R rows, see STI_ACT_BYTES; steps 0-7 are the high
 * digits, 8-15 the low ones. */
STI_INLINE __m256i act_q(const uint8_t *a, int R, int step, int i)
{
    int v;
    memcpy(&v, a + (step * R + i) * 4, 4);
    return _mm256_set1_epi32(v);
}

STI_INLINE __m256 act_f(const uint8_t *a, int R, int field, int i)
{
    return _mm256_broadcast_ss((const float *)(a + (16 + field) * 4 * R + 4 * i));
}

/* GCC takes integer sums apart and adds them up in trees, which needs far more than 16
 * registers. A value that an empty asm may have changed stays in one piece. */
#define PIN(v) __asm__("" : "+x"(v))

STI_INLINE __m256i load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Products of one step, four k a lane, in 32 bits: signed weights. */
STI_INLINE __m256i step_s8(__m256i w, __m256i x)
{
    return _mm256_madd_epi16(
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
        _mm256_set1_epi16(1));
}

/* acc += (d da) sum + m sa, the formula of matmul.h. */
STI_INLINE __m256 scale(const sti_panel_kind kind, __m256 acc, __m256i sum, __m256 d,
                        __m256 m, const uint8_t *a, int R, int field, int i)
{
    if (kind == STI_P_U4)
        sum = _mm256_add_epi32(sum, _mm256_slli_epi32(act_q(a, R, 20, i), 3));
    acc = _mm256_fmadd_ps(_mm256_mul_ps(d, act_f(a, R, 0, i)), _mm256_cvtepi32_ps(sum),
                          acc);
    if (sti_panel_has_min(kind)) acc = _mm256_fmadd_ps(m, act_f(a, R, field, i), acc);
    return acc;
}

STI_INLINE __m256 load_half(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* One repacked group by R rows, weights unpacked in registers: for R <= TILE, when
 * each weight is used once and memory is the bound. A group's blocks follow each other,
 * as groups do: the hardware fetches them ahead, and better without being told to. Rows
 * 0-7, then rows 8-15. */
STI_INLINE void gemv(const sti_panel_kind kind, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const size_t quants = sti_panel_signed(kind) ? 512 : 256;
    const size_t block = quants + (sti_panel_has_min(kind) ? 64 : 32);
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 f[TILE][2];
    STI_UNROLL for (int i = 0; i < R; i++) f[i][0] = f[i][1] = _mm256_setzero_ps();
    for (int b = 0; b < nb; b++, w += block, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int v = 0; v < 2; v++)
        {
            __m256i s[TILE], lo[TILE]; /* sums of the high and of the low digits */
            STI_UNROLL for (int i = 0; i < R; i++) s[i] = lo[i] =
                _mm256_setzero_si256();
            if (sti_panel_signed(kind)) {
                STI_UNROLL for (int k = 0; k < 8; k++)
                {
                    __m256i q = load(w + 64 * k + 32 * v);
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        s[i] = _mm256_add_epi32(s[i], step_s8(q, act_q(a, R, k, i)));
                        lo[i] =
                            _mm256_add_epi32(lo[i], step_s8(q, act_q(a, R, k + 8, i)));
                    }
                }
            } else {
                STI_UNROLL for (int k = 0; k < 4; k++)
                {
                    __m256i q = load(w + 64 * k + 32 * v);
                    __m256i q0 = _mm256_and_si256(q, low);
                    __m256i q1 = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        __m256i t = _mm256_add_epi16(
                            _mm256_maddubs_epi16(q0, act_q(a, R, k, i)),
                            _mm256_maddubs_epi16(q1, act_q(a, R, k + 4, i)));
                        s[i] = _mm256_add_epi16(s[i], t);
                        t = _mm256_add_epi16(
                            _mm256_maddubs_epi16(q0, act_q(a, R, k + 8, i)),
                            _mm256_maddubs_epi16(q1, act_q(a, R, k + 12, i)));
                        lo[i] = _mm256_add_epi16(lo[i], t);
                    }
                }
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    s[i] = _mm256_madd_epi16(s[i], ones);
                    lo[i] = _mm256_madd_epi16(lo[i], ones);
                }
            }
            STI_UNROLL for (int i = 0; i < R; i++) s[i] =
                _mm256_add_epi32(_mm256_slli_epi32(s[i], STI_ACT_DIGIT), lo[i]);
            __m256 d = load_half(w + quants + 16 * v), m = d;
            if (sti_panel_has_min(kind)) m = load_half(w + quants + 32 + 16 * v);
            STI_UNROLL for (int i = 0; i < R; i++) f[i][v] =
                scale(kind, f[i][v], s[i], d, m, a, R, 1, i);
        }
    }
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        _mm256_storeu_ps(c + 16 * i, f[i][0]);
        _mm256_storeu_ps(c + 16 * i + 8, f[i][1]);
    }
}

/* One group by R rows from a panel; sub-blocks of 32 or 16 k. */
STI_INLINE void product(const sti_panel_kind kind, const int R, const sti_panel *p,
                        const uint8_t *a, int nb, float *c)
{
    const int halves = kind == STI_P_U6_SUB ? 2 : 1, steps = 8 / halves;
    /* Steps that fit in 16 bits. */
    const int fit = kind == STI_P_U6_SUB ? 2 : kind == STI_P_U5_MIN ? 4 : 8;
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int h = 0; h < halves; h++)
        {
            __m256i s[TILE][2];
            STI_UNROLL for (int digit = 0; digit < 2; digit++)
            {
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    STI_UNROLL for (int v = 0; v < 2; v++) s[i][v] =
                        digit ? _mm256_slli_epi32(s[i][v], STI_ACT_DIGIT)
                              : _mm256_setzero_si256();
                }
                const int at = 8 * digit + h * steps; /* first step of the digits */
                if (sti_panel_signed(kind)) {
                    STI_UNROLL for (int k = 0; k < 8; k++)
                    {
                        __m256i w0 = load(q + 64 * k), w1 = load(q + 64 * k + 32);
                        STI_UNROLL for (int i = 0; i < R; i++)
                        {
                            __m256i x = act_q(a, R, at + k, i);
                            s[i][0] = _mm256_add_epi32(s[i][0], step_s8(w0, x));
                            PIN(s[i][0]);
                            s[i][1] = _mm256_add_epi32(s[i][1], step_s8(w1, x));
                            PIN(s[i][1]);
                        }
                    }
                    continue;
                }
                STI_UNROLL for (int k0 = 0; k0 < steps; k0 += fit)
                {
                    __m256i t[TILE][2];
                    STI_UNROLL for (int k = k0; k < k0 + fit; k++)
                    {
                        __m256i w0 = load(q + 64 * k), w1 = load(q + 64 * k + 32);
                        STI_UNROLL for (int i = 0; i < R; i++)
                        {
                            __m256i x = act_q(a, R, at + k, i);
                            __m256i t0 = _mm256_maddubs_epi16(w0, x);
                            __m256i t1 = _mm256_maddubs_epi16(w1, x);
                            t[i][0] = k == k0 ? t0 : _mm256_add_epi16(t[i][0], t0);
                            t[i][1] = k == k0 ? t1 : _mm256_add_epi16(t[i][1], t1);
                            PIN(t[i][0]);
                            PIN(t[i][1]);
                        }
                    }
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        STI_UNROLL for (int v = 0; v < 2; v++) s[i][v] =
                            _mm256_add_epi32(s[i][v], _mm256_madd_epi16(t[i][v], ones));
                    }
                }
            }
            const int field = halves == 2 ? 2 + h : 1;
            STI_UNROLL for (int v = 0; v < 2; v++)
            {
                __m256 dv = _mm256_load_ps(d + 8 * v), mv = _mm256_load_ps(m + 8 * v);
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    float *ci = c + 16 * i + 8 * v;
                    _mm256_storeu_ps(ci, scale(kind, _mm256_loadu_ps(ci), s[i][v], dv,
                                               mv, a, R, field, i));
                }
            }
            q += 64 * steps;
            d += 16;
            m += 16;
        }
    }
}

/* Instances: a function for every kind, its switch over the rows of the tile. */
#define INSTANCES(name, fn, type, kind)                                                \
    static void name(type w, const uint8_t *a, int R, int nb, float *c)                \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: fn(kind, 1, w, a, nb, c); break;                                       \
        case 2: fn(kind, 2, w, a, nb, c); break;                                       \
        case 3: fn(kind, 3, w, a, nb, c); break;                                       \
        default: fn(kind, 4, w, a, nb, c); break;                                      \
        }                                                                              \
    }
INSTANCES(gemv_u4, gemv, const uint8_t *, STI_P_U4)
INSTANCES(gemv_u4_min, gemv, const uint8_t *, STI_P_U4_MIN)
INSTANCES(gemv_s8, gemv, const uint8_t *, STI_P_S8)
INSTANCES(gemv_s8_min, gemv, const uint8_t *, STI_P_S8_MIN)
INSTANCES(product_u4, product, const sti_panel *, STI_P_U4)
INSTANCES(product_u4_min, product, const sti_panel *, STI_P_U4_MIN)
INSTANCES(product_s8, product, const sti_panel *, STI_P_S8)
INSTANCES(product_s8_min, product, const sti_panel *, STI_P_S8_MIN)
INSTANCES(product_u5_min, product, const sti_panel *, STI_P_U5_MIN)
INSTANCES(product_u6_sub, product, const sti_panel *, STI_P_U6_SUB)

static void gemv_any(sti_layout l, const uint8_t *w, const uint8_t *a, int R, int nb,
                     float *c)
{
    switch (l) {
    case STI_L_U4: gemv_u4(w, a, R, nb, c); break;
    case STI_L_U4_MIN: gemv_u4_min(w, a, R, nb, c); break;
    case STI_L_S8: gemv_s8(w, a, R, nb, c); break;
    default: gemv_s8_min(w, a, R, nb, c); break;
    }
}

static void product_any(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    switch (p->kind) {
    case STI_P_U4: product_u4(p, a, R, nb, c); break;
    case STI_P_U4_MIN: product_u4_min(p, a, R, nb, c); break;
    case STI_P_S8: product_s8(p, a, R, nb, c); break;
    case STI_P_S8_MIN: product_s8_min(p, a, R, nb, c); break;
    case STI_P_U5_MIN: product_u5_min(p, a, R, nb, c); break;
    case STI_P_U6_SUB: product_u6_sub(p, a, R, nb, c); break;
    }
}

static void unpack(const uint8_t *w, int nb, const sti_panel *p, int g)
{
    const bool wide = sti_panel_signed(p->kind);
    const size_t quants = wide ? 512 : 256;
    const size_t block = quants + (sti_panel_has_min(p->kind) ? 64 : 32);
    const size_t step = 64 * (size_t)p->ng;
    const __m256i low = _mm256_set1_epi8(15);
    for (int b = 0; b < nb; b++, w += block) {
        uint8_t *q = p->q + (size_t)b * 8 * step + (size_t)g * 64;
        for (size_t i = 0; i < 8; i++) {
            __m256i w0, w1;
            size_t at = i / 2 * step + i % 2 * 32;
            if (wide) {
                w0 = load(w + 32 * i);
                w1 = load(w + 32 * i + 256);
            } else {
                w0 = load(w + 32 * i);
                w1 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low);
                w0 = _mm256_and_si256(w0, low);
            }
            _mm256_store_si256((__m256i *)(q + at), w0);
            _mm256_store_si256((__m256i *)(q + at + 4 * step), w1);
        }
        size_t at = ((size_t)b * (size_t)p->ng + (size_t)g) * 16;
        for (size_t v = 0; v < 2; v++) {
            _mm256_store_ps(p->d + at + 8 * v, load_half(w + quants + 16 * v));
            if (sti_panel_has_min(p->kind))
                _mm256_store_ps(p->m + at + 8 * v, load_half(w + quants + 32 + 16 * v));
        }
    }
}

STI_INLINE int sum_epi32(__m256i v)
{
    __m128i s =
        _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

/* 32 small numbers as bytes, four consecutive ones to each of 8 places R apart. */
STI_INLINE void put_bytes(const __m256i n[4], uint32_t *out, int R)
{
    /* Packing leaves dwords in the order 0 2 4 6 1 3 5 7. */
    __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]),
                                   _mm256_packs_epi32(n[2], n[3]));
    q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    uint32_t w[8];
    _mm256_storeu_si256((__m256i *)w, q);
    STI_UNROLL for (int k = 0; k < 8; k++) out[k * R] = w[k];
}

/* The largest magnitude of a block. Bits of magnitudes order as the numbers do, with
 * infinity and NaN on top, which a comparison of floats would lose. */
STI_INLINE float top_of(const __m256 v[4])
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
    STI_UNROLL for (int j = 0; j < 4; j++) top =
        _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[j]), magnitude));
    __m128i t =
        _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(t));
}

void sti_cpu_quantize_avx2(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_ACT_BYTES * R) {
            __m256 v[4];
            STI_UNROLL for (int j = 0; j < 4; j++) v[j] = _mm256_loadu_ps(row + 8 * j);
            float amax = top_of(v), inv;
            const float d = sti_act_scale(amax, &inv);
            if (isnan(d))
                STI_UNROLL for (int j = 0; j < 4; j++) v[j] = _mm256_setzero_ps();

            __m256i n[4];
            STI_UNROLL for (int j = 0; j < 4; j++) n[j] =
                _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(inv)));
            int sum0 = sum_epi32(_mm256_add_epi32(n[0], n[1]));
            int sum1 = sum_epi32(_mm256_add_epi32(n[2], n[3]));
            __m256i hi[4], lo[4];
            STI_UNROLL for (int j = 0; j < 4; j++)
            {
                const __m256i half = _mm256_set1_epi32(1 << (STI_ACT_DIGIT - 1));
                hi[j] = _mm256_srai_epi32(_mm256_add_epi32(n[j], half), STI_ACT_DIGIT);
                lo[j] = _mm256_sub_epi32(n[j], _mm256_slli_epi32(hi[j], STI_ACT_DIGIT));
            }
            put_bytes(hi, (uint32_t *)a + i, R);
            put_bytes(lo, (uint32_t *)a + 8 * R + i, R);
            float *f = (float *)a + i;
            f[16 * R] = d;
            f[17 * R] = d * (float)(sum0 + sum1);
            f[18 * R] = d * (float)sum0;
            f[19 * R] = d * (float)sum1;
            ((int32_t *)a)[20 * R + i] = -(sum0 + sum1);
        }
    }
}

const sti_quant_kernels sti_cpu_quant_avx2 = {
    .tile = TILE,
    .groups = 1,
    .s8_flip = false,
    .quantize = sti_cpu_quantize_avx2,
    .gemv = gemv_any,
    .unpack = unpack,
    .product = product_any,
};
