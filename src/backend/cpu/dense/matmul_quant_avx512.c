/* matmul_quant_avx512.c - quantized products with AVX-512 VNNI.
 *
 * vpdpbusd multiplies unsigned by signed bytes and adds four products into a lane of
 * 32 bits, exactly. A register is a group of 16 rows. The panel product keeps 2 groups
 * by 6 activation rows: 12 integer and 12 float accumulators, 2 weights and a scale or
 * two fill the 32 registers, and 8 loads feed 12 multiplications. A block is swept
 * twice, for the high digits of the activations and, after a shift, for the low ones.
 * Signed weights are stored as w + 128. Of centred types -centre * sum(qa) is added to
 * the sum, which is exact. */
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

/* A float field, of row i. */
STI_INLINE __m512 act_f(const uint8_t *a, int R, int field, int i)
{
    float v;
    memcpy(&v, a + (field * R + i) * 4, 4);
    return _mm512_set1_ps(v);
}

/* The sum of the activations of sub-block h of a block. */
STI_INLINE int act_sum(const uint8_t *a, int R, int subs, int h, int i)
{
    int v;
    memcpy(&v, a + ((subs == 1 ? STI_ACT_SUM : STI_ACT_HALF + h) * R + i) * 4, 4);
    return v;
}

/* What the minimum of sub-block h is multiplied by. */
STI_INLINE __m512 act_s(const uint8_t *a, int R, int subs, int h, int i)
{
    if (subs == 1) return act_f(a, R, STI_ACT_S, i);
    float d;
    memcpy(&d, a + (STI_ACT_D * R + i) * 4, 4);
    return _mm512_set1_ps(d * (float)act_sum(a, R, subs, h, i));
}

/* Every 16 bits right by n, left by -n. */
STI_INLINE __m512i shift(__m512i v, int n)
{
    typedef uint16_t lanes __attribute__((vector_size(64)));
    return (__m512i)(n < 0 ? (lanes)v << -n : (lanes)v >> n);
}

STI_INLINE __m512i plane(const uint8_t *w, int i)
{
    return _mm512_loadu_si512(w + STI_STEP * i);
}

/* Step k of a block, see packing.h. */
STI_INLINE __m512i quants(const sti_packing f, const uint8_t *w, int k)
{
    if (f.low == 8) return plane(w, k);
    __m512i q = _mm512_and_si512(shift(plane(w, k % f.low), k / f.low * f.low),
                                 _mm512_set1_epi8((char)((1 << f.low) - 1)));
    if (f.high == 0) return q;
    __m512i h =
        shift(plane(w, f.low + k % f.high), k / f.high * f.high - f.low); /* in place */
    /* q | (h & mask) */
    return _mm512_ternarylogic_epi32(
        q, h, _mm512_set1_epi8((char)(((1 << f.high) - 1) << f.low)), 0xf8);
}

STI_INLINE __m512 load_half(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}

/* d and m of 16 rows. */
typedef struct scales {
    __m512 d, m;
} scales;

/* Those that lead a super-block, if the type has any. */
STI_INLINE scales load_head(const sti_packing f, const uint8_t *p)
{
    scales s = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (f.unit > 1) s.d = load_half(p);
    if (f.unit > 1 && f.min) s.m = load_half(p + 32);
    return s;
}

/* Those of sub-block h; p is where the quants of the block end. */
STI_INLINE scales load_scales(const sti_packing f, scales head, const uint8_t *p, int h)
{
    if (f.unit == 1) return (scales){load_half(p), f.min ? load_half(p + 32) : head.m};
    const __m128i v = _mm_loadu_si128((const void *)(p + 16 * h));
    if (!f.min) {
        __m512 d = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
        return (scales){_mm512_mul_ps(head.d, d), head.m};
    }
    __m512i d = _mm512_cvtepu8_epi32(v), m;
    if (f.subs == 2) {
        m = _mm512_srli_epi32(d, 4);
        d = _mm512_and_si512(d, _mm512_set1_epi32(15));
    } else {
        m = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(p + 16)));
    }
    return (scales){_mm512_mul_ps(head.d, _mm512_cvtepi32_ps(d)),
                    _mm512_mul_ps(head.m, _mm512_cvtepi32_ps(m))};
}

/* What is taken off every quant as it lies in a panel. */
STI_INLINE int centre_of(const sti_packing f)
{
    return f.low == 8 ? 128 : f.centre;
}

/* One repacked group by R rows, weights unpacked in registers: for R <= TILE, when
 * each weight is used once and memory is the bound. A group's blocks follow each other,
 * as groups do: the hardware fetches them ahead, and better without being told to. */
STI_INLINE void gemv(const sti_dtype type, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const sti_packing f = sti_packing_of(type);
    const int steps = 8 / f.subs, centre = centre_of(f);
    __m512 acc[TILE];
    STI_UNROLL for (int i = 0; i < R; i++) acc[i] = _mm512_setzero_ps();
    for (int b = 0; b < nb; b += f.unit) {
        const scales head = load_head(f, w);
        w += sti_head_bytes(f);
        for (int u = 0; u < f.unit;
             u++, w += sti_block_bytes(f), a += STI_ACT_BYTES * R) {
            STI_UNROLL for (int h = 0; h < f.subs; h++)
            {
                __m512i s[TILE], lo[TILE]; /* sums of the high and of the low digits */
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    s[i] = _mm512_setzero_si512();
                    lo[i] = s[i];
                    if (centre)
                        lo[i] =
                            _mm512_set1_epi32(-centre * act_sum(a, R, f.subs, h, i));
                }
                STI_UNROLL for (int k = h * steps; k < (h + 1) * steps; k++)
                {
                    const __m512i q = quants(f, w, k);
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        s[i] = _mm512_dpbusd_epi32(s[i], q, act_q(a, R, k, i));
                        lo[i] = _mm512_dpbusd_epi32(lo[i], q, act_q(a, R, k + 8, i));
                    }
                }
                const scales by = load_scales(f, head, w + sti_quant_bytes(f), h);
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    s[i] =
                        _mm512_add_epi32(_mm512_slli_epi32(s[i], STI_ACT_DIGIT), lo[i]);
                    acc[i] =
                        _mm512_fmadd_ps(_mm512_mul_ps(by.d, act_f(a, R, STI_ACT_D, i)),
                                        _mm512_cvtepi32_ps(s[i]), acc[i]);
                    if (f.min)
                        acc[i] =
                            _mm512_fmadd_ps(by.m, act_s(a, R, f.subs, h, i), acc[i]);
                }
            }
        }
    }
    STI_UNROLL for (int i = 0; i < R; i++) _mm512_storeu_ps(c + 16 * i, acc[i]);
}

/* ng groups by R rows from a panel, whose bytes are alike for all types. */
STI_INLINE void product(const int subs, const bool min, const int ng, const int R,
                        const sti_panel *p, const uint8_t *a, int nb, float *c)
{
    const int steps = 8 / subs, centre = centre_of(sti_packing_of(p->type));
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    __m512 f[TILE][2];
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
            _mm512_loadu_ps(c + (i * ng + g) * 16);
    }
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int h = 0; h < subs; h++)
        {
            __m512i s[TILE][2];
            STI_UNROLL for (int digit = 0; digit < 2; digit++)
            {
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    __m512i off = _mm512_setzero_si512();
                    if (digit && !min)
                        off = _mm512_set1_epi32(-centre * act_sum(a, R, subs, h, i));
                    STI_UNROLL for (int g = 0; g < ng; g++)
                    {
                        if (!digit) {
                            s[i][g] = off;
                            continue;
                        }
                        s[i][g] = _mm512_slli_epi32(s[i][g], STI_ACT_DIGIT);
                        if (!min) s[i][g] = _mm512_add_epi32(s[i][g], off);
                    }
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
                __m512 da = act_f(a, R, STI_ACT_D, i);
                STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
                    _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(d + 16 * g), da),
                                    _mm512_cvtepi32_ps(s[i][g]), f[i][g]);
                if (!min) continue;
                __m512 sa = act_s(a, R, subs, h, i);
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

STI_INLINE void unpack(const sti_dtype type, const uint8_t *group, int b, int nb,
                       const sti_panel *p, int g)
{
    const sti_packing f = sti_packing_of(type);
    const size_t ng = (size_t)p->ng, step = STI_STEP * ng;
    uint8_t *q = p->q + STI_STEP * (size_t)g;
    size_t at = STI_GROUP * (size_t)g;
    for (const int end = b + nb; b < end; b++) {
        const uint8_t *w = group + sti_super_at(f, b);
        const scales head = load_head(f, w);
        w += sti_block_at(f, b);
        STI_UNROLL for (int k = 0; k < 8; k++, q += step)
            _mm512_store_si512(q, quants(f, w, k));
        STI_UNROLL for (int h = 0; h < f.subs; h++, at += STI_GROUP * ng)
        {
            const scales s = load_scales(f, head, w + sti_quant_bytes(f), h);
            _mm512_store_ps(p->d + at, s.d);
            if (f.min) _mm512_store_ps(p->m + at, s.m);
        }
    }
}

/* Instances: a function for every type, its switch over the rows of the tile. */
#define GEMV(type)                                                                     \
    static void gemv_##type(const uint8_t *w, const uint8_t *a, int R, int nb,         \
                            float *c)                                                  \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: gemv(STI_##type, 1, w, a, nb, c); break;                               \
        case 2: gemv(STI_##type, 2, w, a, nb, c); break;                               \
        case 3: gemv(STI_##type, 3, w, a, nb, c); break;                               \
        case 4: gemv(STI_##type, 4, w, a, nb, c); break;                               \
        case 5: gemv(STI_##type, 5, w, a, nb, c); break;                               \
        default: gemv(STI_##type, 6, w, a, nb, c); break;                              \
        }                                                                              \
    }                                                                                  \
    static void unpack_##type(const uint8_t *group, int b, int nb, const sti_panel *p, \
                              int g)                                                   \
    {                                                                                  \
        unpack(STI_##type, group, b, nb, p, g);                                        \
    }
STI_QUANT_TYPES(GEMV)

#define PRODUCT(name, subs, min, ng)                                                   \
    static void product_##name(const sti_panel *p, const uint8_t *a, int R, int nb,    \
                               float *c)                                               \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: product(subs, min, ng, 1, p, a, nb, c); break;                         \
        case 2: product(subs, min, ng, 2, p, a, nb, c); break;                         \
        case 3: product(subs, min, ng, 3, p, a, nb, c); break;                         \
        case 4: product(subs, min, ng, 4, p, a, nb, c); break;                         \
        case 5: product(subs, min, ng, 5, p, a, nb, c); break;                         \
        default: product(subs, min, ng, 6, p, a, nb, c); break;                        \
        }                                                                              \
    }
PRODUCT(centred_1, 1, false, 1)
PRODUCT(centred_2, 1, false, 2)
PRODUCT(min_1, 1, true, 1)
PRODUCT(min_2, 1, true, 2)
PRODUCT(half_centred_1, 2, false, 1)
PRODUCT(half_centred_2, 2, false, 2)
PRODUCT(half_min_1, 2, true, 1)
PRODUCT(half_min_2, 2, true, 2)

static void gemv_any(sti_dtype t, const uint8_t *w, const uint8_t *a, int R, int nb,
                     float *c)
{
#define CASE(type)                                                                     \
    case STI_##type: gemv_##type(w, a, R, nb, c); break;
    switch (t) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

static void unpack_any(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
#define CASE(type)                                                                     \
    case STI_##type: unpack_##type(group, b, nb, p, g); break;
    switch (p->type) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

static void product_any(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    const bool two = p->ng == 2;
    const sti_packing f = sti_packing_of(p->type);
    if (f.subs == 1 && f.min)
        (two ? product_min_2 : product_min_1)(p, a, R, nb, c);
    else if (f.subs == 1)
        (two ? product_centred_2 : product_centred_1)(p, a, R, nb, c);
    else if (f.min)
        (two ? product_half_min_2 : product_half_min_1)(p, a, R, nb, c);
    else
        (two ? product_half_centred_2 : product_half_centred_1)(p, a, R, nb, c);
}

const sti_quant_kernels sti_cpu_quant_avx512 = {
    .tile = TILE,
    .groups = 2,
    .s8_flip = true,
    .quantize = sti_cpu_quantize_avx2,
    .gemv = gemv_any,
    .unpack = unpack_any,
    .product = product_any,
};
