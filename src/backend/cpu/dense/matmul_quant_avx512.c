/* matmul_quant_avx512.c - quantized products with AVX-512 VNNI.
 *
 * vpdpbusd multiplies unsigned by signed bytes and adds four products into a lane of
 * 32 bits, exactly. A register is a group of 16 rows. The panel product keeps 2 groups
 * by 6 activation rows: 12 integer and 12 float accumulators, 2 weights and a scale or
 * two fill the 32 registers, and 8 loads feed 12 multiplications. A block is swept
 * twice, for the high digits of the activations and, after a shift, for the low ones.
 * Signed weights are stored as w + 128 and -128 * sum(qa) is added to the sum, so that
 * what is left is exact. */
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/dense/matmul.h"

enum { TILE = 6 };

/* Places in an activation record of R rows, see STI_ACT_BYTES; steps 0-7 are the high
 * digits, 8-15 the low ones. */
STI_INLINE __m512i act_q(const uint8_t *a, int R, int step, int i)
{
    int v;
    memcpy(&v, a + (step * R + i) * 4, 4);
    return _mm512_set1_epi32(v);
}

STI_INLINE __m512 act_f(const uint8_t *a, int R, int field, int i)
{
    float v;
    memcpy(&v, a + (16 + field) * 4 * R + 4 * i, 4);
    return _mm512_set1_ps(v);
}

/* Makes room for the low digits in the sum of the high ones, and takes off the centre
 * of the type. */
STI_INLINE __m512i next_digit(__m512i sum, const uint8_t *a, int R, int i,
                              sti_panel_kind kind)
{
    sum = _mm512_slli_epi32(sum, STI_ACT_DIGIT);
    if (kind == STI_P_U4_MIN || kind == STI_P_U5_MIN || kind == STI_P_U6_SUB)
        return sum;
    int v;
    memcpy(&v, a + 20 * 4 * R + 4 * i, 4);
    return _mm512_add_epi32(
        sum, _mm512_slli_epi32(_mm512_set1_epi32(v), kind == STI_P_U4 ? 3 : 7));
}

/* One repacked group by R rows, weights unpacked in registers: for R <= TILE, when
 * each weight is used once and memory is the bound. A group's blocks follow each other,
 * as groups do: the hardware fetches them ahead, and better without being told to. */
STI_INLINE void gemv(const sti_panel_kind kind, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const bool wide = sti_panel_signed(kind);
    const size_t quants = wide ? 512 : 256,
                 block = quants + (sti_panel_has_min(kind) ? 64 : 32);
    const __m512i low = _mm512_set1_epi8(15);
    __m512 f[TILE];
    STI_UNROLL for (int i = 0; i < R; i++) f[i] = _mm512_setzero_ps();
    for (int b = 0; b < nb; b++, w += block, a += STI_ACT_BYTES * R) {
        __m512i s[TILE], lo[TILE]; /* sums of the high and of the low digits */
        STI_UNROLL for (int i = 0; i < R; i++) s[i] = lo[i] = _mm512_setzero_si512();
        STI_UNROLL for (int p = 0; p < 4; p++)
        {
            __m512i w0, w1; /* steps p and p + 4 */
            if (wide) {
                w0 = _mm512_loadu_si512(w + 64 * p);
                w1 = _mm512_loadu_si512(w + 64 * (p + 4));
            } else {
                __m512i v = _mm512_loadu_si512(w + 64 * p);
                w0 = _mm512_and_si512(v, low);
                w1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            }
            STI_UNROLL for (int i = 0; i < R; i++)
            {
                s[i] = _mm512_dpbusd_epi32(s[i], w0, act_q(a, R, p, i));
                lo[i] = _mm512_dpbusd_epi32(lo[i], w0, act_q(a, R, p + 8, i));
                s[i] = _mm512_dpbusd_epi32(s[i], w1, act_q(a, R, p + 4, i));
                lo[i] = _mm512_dpbusd_epi32(lo[i], w1, act_q(a, R, p + 12, i));
            }
        }
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + quants)));
        __m512 m = d;
        if (sti_panel_has_min(kind))
            m = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(w + quants + 32)));
        STI_UNROLL for (int i = 0; i < R; i++)
        {
            s[i] = _mm512_add_epi32(next_digit(s[i], a, R, i, kind), lo[i]);
            f[i] = _mm512_fmadd_ps(_mm512_mul_ps(d, act_f(a, R, 0, i)),
                                   _mm512_cvtepi32_ps(s[i]), f[i]);
            if (sti_panel_has_min(kind))
                f[i] = _mm512_fmadd_ps(m, act_f(a, R, 1, i), f[i]);
        }
    }
    STI_UNROLL for (int i = 0; i < R; i++) _mm512_storeu_ps(c + 16 * i, f[i]);
}

/* ng groups by R rows from a panel; sub-blocks of 32 or 16 k. */
STI_INLINE void product(const sti_panel_kind kind, const int ng, const int R,
                        const sti_panel *p, const uint8_t *a, int nb, float *c)
{
    const int halves = kind == STI_P_U6_SUB ? 2 : 1, steps = 8 / halves;
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    __m512 f[TILE][2];
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
            _mm512_loadu_ps(c + (i * ng + g) * 16);
    }
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int h = 0; h < halves; h++)
        {
            __m512i s[TILE][2];
            STI_UNROLL for (int digit = 0; digit < 2; digit++)
            {
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    STI_UNROLL for (int g = 0; g < ng; g++) s[i][g] =
                        digit ? next_digit(s[i][g], a, R, i, kind)
                              : _mm512_setzero_si512();
                }
                STI_UNROLL for (int k = 0; k < steps; k++)
                {
                    __m512i w0 = _mm512_load_si512(q + 64 * ng * k), w1 = w0;
                    if (ng == 2) w1 = _mm512_load_si512(q + 64 * ng * k + 64);
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        __m512i x = act_q(a, R, 8 * digit + h * steps + k, i);
                        s[i][0] = _mm512_dpbusd_epi32(s[i][0], w0, x);
                        if (ng == 2) s[i][1] = _mm512_dpbusd_epi32(s[i][1], w1, x);
                    }
                }
            }
            q += 64 * ng * steps;
            STI_UNROLL for (int i = 0; i < R; i++)
            {
                __m512 da = act_f(a, R, 0, i);
                STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
                    _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(d + 16 * g), da),
                                    _mm512_cvtepi32_ps(s[i][g]), f[i][g]);
                if (!sti_panel_has_min(kind)) continue;
                __m512 sa = act_f(a, R, halves == 2 ? 2 + h : 1, i);
                STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
                    _mm512_fmadd_ps(_mm512_load_ps(m + 16 * g), sa, f[i][g]);
            }
            d += 16 * ng;
            m += 16 * ng;
        }
    }
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        STI_UNROLL for (int g = 0; g < ng; g++)
            _mm512_storeu_ps(c + (i * ng + g) * 16, f[i][g]);
    }
}

/* Instances: a function for every kind, its switch over the rows of the tile. */
#define GEMV(name, kind)                                                               \
    static void gemv_##name(const uint8_t *w, const uint8_t *a, int R, int nb,         \
                            float *c)                                                  \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: gemv(kind, 1, w, a, nb, c); break;                                     \
        case 2: gemv(kind, 2, w, a, nb, c); break;                                     \
        case 3: gemv(kind, 3, w, a, nb, c); break;                                     \
        case 4: gemv(kind, 4, w, a, nb, c); break;                                     \
        case 5: gemv(kind, 5, w, a, nb, c); break;                                     \
        default: gemv(kind, 6, w, a, nb, c); break;                                    \
        }                                                                              \
    }
GEMV(u4, STI_P_U4)
GEMV(u4_min, STI_P_U4_MIN)
GEMV(s8, STI_P_S8)
GEMV(s8_min, STI_P_S8_MIN)

#define PRODUCT(name, kind, ng)                                                        \
    static void product_##name(const sti_panel *p, const uint8_t *a, int R, int nb,    \
                               float *c)                                               \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: product(kind, ng, 1, p, a, nb, c); break;                              \
        case 2: product(kind, ng, 2, p, a, nb, c); break;                              \
        case 3: product(kind, ng, 3, p, a, nb, c); break;                              \
        case 4: product(kind, ng, 4, p, a, nb, c); break;                              \
        case 5: product(kind, ng, 5, p, a, nb, c); break;                              \
        default: product(kind, ng, 6, p, a, nb, c); break;                             \
        }                                                                              \
    }
PRODUCT(u4_1, STI_P_U4, 1)
PRODUCT(u4_2, STI_P_U4, 2)
PRODUCT(min_1, STI_P_U4_MIN, 1) /* five bits multiply like four here */
PRODUCT(min_2, STI_P_U4_MIN, 2)
PRODUCT(s8_1, STI_P_S8, 1)
PRODUCT(s8_2, STI_P_S8, 2)
PRODUCT(s8_min_1, STI_P_S8_MIN, 1)
PRODUCT(s8_min_2, STI_P_S8_MIN, 2)
PRODUCT(sub_1, STI_P_U6_SUB, 1)
PRODUCT(sub_2, STI_P_U6_SUB, 2)

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
    bool two = p->ng == 2;
    switch (p->kind) {
    case STI_P_U4: (two ? product_u4_2 : product_u4_1)(p, a, R, nb, c); break;
    case STI_P_U4_MIN:
    case STI_P_U5_MIN: (two ? product_min_2 : product_min_1)(p, a, R, nb, c); break;
    case STI_P_S8: (two ? product_s8_2 : product_s8_1)(p, a, R, nb, c); break;
    case STI_P_S8_MIN:
        (two ? product_s8_min_2 : product_s8_min_1)(p, a, R, nb, c);
        break;
    case STI_P_U6_SUB: (two ? product_sub_2 : product_sub_1)(p, a, R, nb, c); break;
    }
}

static void unpack(const uint8_t *w, int nb, const sti_panel *p, int g)
{
    const bool wide = sti_panel_signed(p->kind);
    const size_t quants = wide ? 512 : 256;
    const size_t block = quants + (sti_panel_has_min(p->kind) ? 64 : 32);
    const size_t step = 64 * (size_t)p->ng;
    const __m512i low = _mm512_set1_epi8(15);
    for (int b = 0; b < nb; b++, w += block) {
        uint8_t *q = p->q + (size_t)b * 8 * step + (size_t)g * 64;
        for (size_t i = 0; i < 4; i++) {
            __m512i w0, w1;
            if (wide) {
                w0 = _mm512_loadu_si512(w + 64 * i);
                w1 = _mm512_loadu_si512(w + 64 * (i + 4));
            } else {
                __m512i v = _mm512_loadu_si512(w + 64 * i);
                w0 = _mm512_and_si512(v, low);
                w1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            }
            _mm512_store_si512(q + i * step, w0);
            _mm512_store_si512(q + (i + 4) * step, w1);
        }
        size_t at = ((size_t)b * (size_t)p->ng + (size_t)g) * 16;
        const __m256i *h = (const void *)(w + quants);
        _mm512_store_ps(p->d + at, _mm512_cvtph_ps(_mm256_loadu_si256(h)));
        if (sti_panel_has_min(p->kind))
            _mm512_store_ps(p->m + at, _mm512_cvtph_ps(_mm256_loadu_si256(h + 1)));
    }
}

const sti_quant_kernels sti_cpu_quant_avx512 = {
    .tile = TILE,
    .groups = 2,
    .s8_flip = true,
    .quantize = sti_cpu_quantize_avx2,
    .gemv = gemv_any,
    .unpack = unpack,
    .product = product_any,
};
