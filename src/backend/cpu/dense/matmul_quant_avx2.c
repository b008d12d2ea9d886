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

/* A float field, of row i. */
STI_INLINE __m256 act_f(const uint8_t *a, int R, int field, int i)
{
    return _mm256_broadcast_ss((const float *)(a + (field * R + i) * 4));
}

/* The sum of the activations of sub-block h of a block. */
STI_INLINE int act_sum(const uint8_t *a, int R, int subs, int h, int i)
{
    int v;
    memcpy(&v, a + ((subs == 1 ? STI_ACT_SUM : STI_ACT_HALF + h) * R + i) * 4, 4);
    return v;
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

/* Every 16 bits right by n, left by -n. */
STI_INLINE __m256i shift(__m256i v, int n)
{
    typedef uint16_t lanes __attribute__((vector_size(32)));
    return (__m256i)(n < 0 ? (lanes)v << -n : (lanes)v >> n);
}

STI_INLINE __m256i bits(__m256i v, int n, int at)
{
    return _mm256_and_si256(v, _mm256_set1_epi8((char)(((1 << n) - 1) << at)));
}

/* Step k of a block, rows 8v to 8v + 7, see packing.h. */
STI_INLINE __m256i quants(const sti_packing f, const uint8_t *w, int k, int v)
{
    w += 32 * v;
    if (f.low == 8) return load(w + STI_STEP * k);
    __m256i q = shift(load(w + STI_STEP * (k % f.low)), k / f.low * f.low);
    q = bits(q, f.low, 0);
    if (f.table)
        return _mm256_shuffle_epi8(
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)f.table)), q);
    if (f.high == 0) return q;
    __m256i h = load(w + STI_STEP * (f.low + k % f.high));
    return _mm256_or_si256(q,
                           bits(shift(h, k / f.high * f.high - f.low), f.high, f.low));
}

STI_INLINE __m256 load_half(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* d and m of 8 rows. */
typedef struct scales {
    __m256 d, m;
} scales;

/* Those that lead a super-block, if the type has any. */
STI_INLINE scales load_head(const sti_packing f, const uint8_t *p, int v)
{
    scales s = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    if (f.unit > 1) s.d = load_half(p + 16 * v);
    if (f.unit > 1 && f.min) s.m = load_half(p + 32 + 16 * v);
    return s;
}

/* Those of sub-block h; p is where the quants of the block end. */
STI_INLINE scales load_scales(const sti_packing f, scales head, const uint8_t *p, int h,
                              int v)
{
    if (f.unit == 1)
        return (scales){load_half(p + 16 * v),
                        f.min ? load_half(p + 32 + 16 * v) : head.m};
    p += 8 * v;
    const __m128i x = _mm_loadl_epi64((const __m128i *)(p + 16 * h));
    if (!f.min) {
        __m256 d = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
        return (scales){_mm256_mul_ps(head.d, d), head.m};
    }
    __m256i d = _mm256_cvtepu8_epi32(x), m;
    if (f.subs == 2) {
        m = _mm256_srli_epi32(d, 4);
        d = _mm256_and_si256(d, _mm256_set1_epi32(15));
    } else {
        m = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 16)));
    }
    return (scales){_mm256_mul_ps(head.d, _mm256_cvtepi32_ps(d)),
                    _mm256_mul_ps(head.m, _mm256_cvtepi32_ps(m))};
}

/* acc += (d da) sum + m sa, the formula of matmul.h, for sub-block h. */
STI_INLINE __m256 scale(const sti_packing f, __m256 acc, __m256i sum, scales s,
                        const uint8_t *a, int R, int h, int i)
{
    if (f.centre)
        sum = _mm256_sub_epi32(
            sum, _mm256_set1_epi32(f.centre * act_sum(a, R, f.subs, h, i)));
    const __m256 da = act_f(a, R, STI_ACT_D, i);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(s.d, da), _mm256_cvtepi32_ps(sum), acc);
    if (!f.min) return acc;
    const __m256 sa =
        f.subs == 1
            ? act_f(a, R, STI_ACT_S, i)
            : _mm256_mul_ps(da, _mm256_set1_ps((float)act_sum(a, R, f.subs, h, i)));
    return _mm256_fmadd_ps(s.m, sa, acc);
}

/* Steps whose products with high digits add up in 16 bits. */
STI_INLINE int steps_that_fit(const sti_packing f)
{
    return f.low + f.high == 6 ? 2 : f.low + f.high == 5 ? 4 : 8 / f.subs;
}

/* One repacked group by R rows, weights unpacked in registers: for R <= TILE, when
 * each weight is used once and memory is the bound. A group's blocks follow each other,
 * as groups do: the hardware fetches them ahead, and better without being told to. Rows
 * 0-7, then rows 8-15. */
STI_INLINE void gemv(const sti_dtype type, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const sti_packing f = sti_packing_of(type);
    const int steps = 8 / f.subs, fit = steps_that_fit(f);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 acc[TILE][2];
    STI_UNROLL for (int i = 0; i < R; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int b = 0; b < nb; b += f.unit) {
        const scales head[2] = {load_head(f, w, 0), load_head(f, w, 1)};
        w += sti_head_bytes(f);
        for (int u = 0; u < f.unit;
             u++, w += sti_block_bytes(f), a += STI_ACT_BYTES * R) {
            STI_UNROLL for (int hv = 0; hv < 2 * f.subs; hv++)
            {
                const int h = hv / 2, v = hv % 2;
                __m256i s[TILE], lo[TILE]; /* sums of the high and of the low digits */
                STI_UNROLL for (int i = 0; i < R; i++) s[i] = lo[i] =
                    _mm256_setzero_si256();
                STI_UNROLL for (int k0 = h * steps; k0 < (h + 1) * steps; k0 += fit)
                {
                    __m256i t[TILE], tlo[TILE];
                    STI_UNROLL for (int k = k0; k < k0 + fit; k++)
                    {
                        const __m256i q = quants(f, w, k, v);
                        STI_UNROLL for (int i = 0; i < R; i++)
                        {
                            __m256i x = act_q(a, R, k, i), y = act_q(a, R, k + 8, i);
                            if (sti_is_signed(f)) {
                                s[i] = _mm256_add_epi32(s[i], step_s8(q, x));
                                lo[i] = _mm256_add_epi32(lo[i], step_s8(q, y));
                                continue;
                            }
                            x = _mm256_maddubs_epi16(q, x);
                            y = _mm256_maddubs_epi16(q, y);
                            t[i] = k == k0 ? x : _mm256_add_epi16(t[i], x);
                            tlo[i] = k == k0 ? y : _mm256_add_epi16(tlo[i], y);
                        }
                    }
                    if (sti_is_signed(f)) continue;
                    STI_UNROLL for (int i = 0; i < R; i++)
                    {
                        s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(t[i], ones));
                        lo[i] =
                            _mm256_add_epi32(lo[i], _mm256_madd_epi16(tlo[i], ones));
                    }
                }
                const scales by = load_scales(f, head[v], w + sti_quant_bytes(f), h, v);
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    s[i] =
                        _mm256_add_epi32(_mm256_slli_epi32(s[i], STI_ACT_DIGIT), lo[i]);
                    acc[i][v] = scale(f, acc[i][v], s[i], by, a, R, h, i);
                }
            }
        }
    }
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        _mm256_storeu_ps(c + 16 * i, acc[i][0]);
        _mm256_storeu_ps(c + 16 * i + 8, acc[i][1]);
    }
}

/* One group by R rows from a panel. */
STI_INLINE void product(const sti_dtype type, const int R, const sti_panel *p,
                        const uint8_t *a, int nb, float *c)
{
    const sti_packing f = sti_packing_of(type);
    const int steps = 8 / f.subs, fit = steps_that_fit(f);
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int h = 0; h < f.subs; h++)
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
                if (sti_is_signed(f)) {
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
            STI_UNROLL for (int v = 0; v < 2; v++)
            {
                const scales by = {_mm256_load_ps(d + 8 * v),
                                   _mm256_load_ps(m + 8 * v)};
                STI_UNROLL for (int i = 0; i < R; i++)
                {
                    float *ci = c + 16 * i + 8 * v;
                    _mm256_storeu_ps(
                        ci, scale(f, _mm256_loadu_ps(ci), s[i][v], by, a, R, h, i));
                }
            }
            q += 64 * steps;
            d += 16;
            m += 16;
        }
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
        const uint8_t *first = group + sti_super_at(f, b);
        const uint8_t *w = first + sti_block_at(f, b);
        STI_UNROLL for (int k = 0; k < 8; k++, q += step)
        {
            _mm256_store_si256((__m256i *)q, quants(f, w, k, 0));
            _mm256_store_si256((__m256i *)(q + 32), quants(f, w, k, 1));
        }
        STI_UNROLL for (int hv = 0; hv < 2 * f.subs; hv++)
        {
            const int v = hv % 2;
            const scales s = load_scales(f, load_head(f, first, v),
                                         w + sti_quant_bytes(f), hv / 2, v);
            _mm256_store_ps(p->d + at + 8 * v, s.d);
            if (f.min) _mm256_store_ps(p->m + at + 8 * v, s.m);
            if (v == 1) at += STI_GROUP * ng;
        }
    }
}

/* Instances: a function for every type, its switch over the rows of the tile. */
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
#define GEMV(type) INSTANCES(gemv_##type, gemv, const uint8_t *, STI_##type)
STI_QUANT_TYPES(GEMV)
INSTANCES(product_Q4_0, product, const sti_panel *, STI_Q4_0)
INSTANCES(product_Q4_1, product, const sti_panel *, STI_Q4_1)
INSTANCES(product_Q5_0, product, const sti_panel *, STI_Q5_0)
INSTANCES(product_Q5_1, product, const sti_panel *, STI_Q5_1)
INSTANCES(product_Q8_0, product, const sti_panel *, STI_Q8_0)
INSTANCES(product_Q2_K, product, const sti_panel *, STI_Q2_K)
INSTANCES(product_Q3_K, product, const sti_panel *, STI_Q3_K)
INSTANCES(product_Q6_K, product, const sti_panel *, STI_Q6_K)

#include "backend/cpu/dense/quant_types_code.h"

static void product_any(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    switch (p->type) {
    case STI_Q4_0: product_Q4_0(p, a, R, nb, c); break;
    case STI_Q4_K:
    case STI_Q4_1: product_Q4_1(p, a, R, nb, c); break;
    case STI_Q5_0: product_Q5_0(p, a, R, nb, c); break;
    case STI_Q5_K:
    case STI_Q5_1: product_Q5_1(p, a, R, nb, c); break;
    case STI_Q2_K: product_Q2_K(p, a, R, nb, c); break;
    case STI_Q3_K: product_Q3_K(p, a, R, nb, c); break;
    case STI_Q6_K: product_Q6_K(p, a, R, nb, c); break;
    default: product_Q8_0(p, a, R, nb, c); break;
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
            f[STI_ACT_D * R] = d;
            f[STI_ACT_S * R] = d * (float)(sum0 + sum1);
            int32_t *n32 = (int32_t *)a + i;
            n32[STI_ACT_SUM * R] = sum0 + sum1;
            n32[STI_ACT_HALF * R] = sum0;
            n32[(STI_ACT_HALF + 1) * R] = sum1;
        }
    }
}

const sti_quant_kernels sti_cpu_quant_avx2 = {
    .tile = TILE,
    .groups = 1,
    .s8_flip = false,
    .quantize = sti_cpu_quantize_avx2,
    .gemv = gemv_any,
    .unpack = unpack_any,
    .batch_bytes = STI_ACT_BYTES,
    .quantize_batch = sti_cpu_quantize_avx2,
    .fill = unpack_any,
    .product = product_any,
};
