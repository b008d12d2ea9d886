/* matmul_quant_avx2.c - quantized products with AVX2.
 *
 * Weights and activations are multiplied as 16-bit integers: vpmaddwd takes two of each in
 * a lane. A weight is unpacked once and has one product with each row of x, whatever its
 * type, and sums are in 32 bits from the start: exact, as 32 * 255 * STI_ACT_MAX < 2^31.
 * (As two digits of a byte, x would take twice the multiplications, and signed weights
 * twice that.) What a type takes off its quants, their centre, is taken off as they are
 * unpacked.
 *
 * A tile is 16 rows of w, two registers of 8 lanes, by up to 4 rows of x: 8 integer sums,
 * 4 registers of weights and the activation fit the 16 there are; sums in float lie in L1.
 * Few rows take weights as they are unpacked, a batch takes them from a panel. */
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/dense/matmul.h"

/* A record of R rows of x and 32 k, in words of R rows: 16 pairs of 2 k, then fields, the
 * last of which is not used. Bytes 0 to 3 of a step of packing.h become the pairs (0, 2) and
 * (1, 3). */
enum {
    TILE = 4,
    X_D = 16,
    X_S, /* d * sum(q) of the block, of its halves */
};

STI_INLINE __m256i load(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
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

STI_INLINE __m256i pair(const uint8_t *a, int R, int at, int i)
{
    int v;
    memcpy(&v, a + (at * R + i) * 4, 4);
    return _mm256_set1_epi32(v);
}

STI_INLINE __m256 number(const uint8_t *a, int R, int field, int i)
{
    return _mm256_broadcast_ss((const float *)(a + (field * R + i) * 4));
}

/* Step k of a block, rows 8v to 8v + 7, as two registers of pairs. */
STI_INLINE void words(const sti_packing f, const uint8_t *w, int k, int v,
                      __m256i out[2])
{
    const __m256i q = quants(f, w, k, v);
    if (sti_is_signed(f)) {
        out[0] = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8);
        out[1] = _mm256_srai_epi16(q, 8);
        return;
    }
    out[0] = _mm256_and_si256(q, _mm256_set1_epi16(255));
    out[1] = _mm256_srli_epi16(q, 8);
    if (f.centre == 0) return;
    const __m256i centre = _mm256_set1_epi16((short)f.centre);
    out[0] = _mm256_sub_epi16(out[0], centre);
    out[1] = _mm256_sub_epi16(out[1], centre);
}

/* GCC takes integer sums apart and adds them up in trees, which needs far more than 16
 * registers. A value that an empty asm may have changed stays in one piece. */
#define PIN(v) __asm__("" : "+x"(v))

/* s[i][v] += the products of a step with R rows. */
STI_INLINE void add_step(const int R, __m256i w[2][2], const uint8_t *a, int k,
                         __m256i s[TILE][2])
{
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        STI_UNROLL for (int half = 0; half < 2; half++)
        {
            const __m256i x = pair(a, R, 2 * k + half, i);
            STI_UNROLL for (int v = 0; v < 2; v++)
            {
                s[i][v] = _mm256_add_epi32(s[i][v], _mm256_madd_epi16(w[v][half], x));
                PIN(s[i][v]);
            }
        }
    }
}

/* c[i] += (d da) sum + m sa, the formula of matmul.h, for 8 rows of sub-block h. */
STI_INLINE void add_scaled(const int R, const int subs, const bool min, scales by,
                           __m256i s[TILE][2], const uint8_t *a, int h, int v, float *c)
{
    STI_UNROLL for (int i = 0; i < R; i++)
    {
        float *ci = c + 16 * i + 8 * v;
        __m256 acc = _mm256_loadu_ps(ci);
        acc = _mm256_fmadd_ps(_mm256_mul_ps(by.d, number(a, R, X_D, i)),
                              _mm256_cvtepi32_ps(s[i][v]), acc);
        if (min)
            acc = _mm256_fmadd_ps(by.m, number(a, R, subs == 1 ? X_S : X_S + 1 + h, i),
                                  acc);
        _mm256_storeu_ps(ci, acc);
    }
}

/* One repacked group by R rows, weights unpacked in registers. */
STI_INLINE void gemv(const sti_dtype type, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const sti_packing f = sti_packing_of(type);
    const int steps = 8 / f.subs;
    memset(c, 0, (size_t)R * STI_GROUP * sizeof *c);
    for (int b = 0; b < nb; b += f.unit) {
        const scales head[2] = {load_head(f, w, 0), load_head(f, w, 1)};
        w += sti_head_bytes(f);
        for (int u = 0; u < f.unit;
             u++, w += sti_block_bytes(f), a += STI_ACT_BYTES * R) {
            STI_UNROLL for (int h = 0; h < f.subs; h++)
            {
                __m256i s[TILE][2];
                STI_UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] =
                    _mm256_setzero_si256();
                STI_UNROLL for (int k = h * steps; k < (h + 1) * steps; k++)
                {
                    __m256i pairs[2][2];
                    words(f, w, k, 0, pairs[0]);
                    words(f, w, k, 1, pairs[1]);
                    add_step(R, pairs, a, k, s);
                }
                STI_UNROLL for (int v = 0; v < 2; v++)
                    add_scaled(R, f.subs, f.min,
                               load_scales(f, head[v], w + sti_quant_bytes(f), h, v), s,
                               a, h, v, c);
            }
        }
    }
}

/* One group by R rows from a panel, q [8 nb][2 halves of the rows][2][8 rows][2 k]. */
STI_INLINE void product(const int subs, const bool min, const int R, const sti_panel *p,
                        const uint8_t *a, int nb, float *c)
{
    const int steps = 8 / subs;
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    for (int b = 0; b < nb; b++, a += STI_ACT_BYTES * R) {
        STI_UNROLL for (int h = 0; h < subs; h++, d += 16, m += 16)
        {
            __m256i s[TILE][2];
            STI_UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] =
                _mm256_setzero_si256();
            STI_UNROLL for (int k = h * steps; k < (h + 1) * steps; k++, q += 128)
            {
                __m256i pairs[2][2] = {{load(q), load(q + 32)},
                                       {load(q + 64), load(q + 96)}};
                add_step(R, pairs, a, k, s);
            }
            STI_UNROLL for (int v = 0; v < 2; v++)
            {
                const scales by = {_mm256_load_ps(d + 8 * v),
                                   min ? _mm256_load_ps(m + 8 * v)
                                       : _mm256_setzero_ps()};
                add_scaled(R, subs, min, by, s, a, h, v, c);
            }
        }
    }
}

/* ---- A panel of weights -------------------------------------------------- */

/* As bytes, for others. */
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

/* As pairs, for products. */
STI_INLINE void fill(const sti_dtype type, const uint8_t *group, int b, int nb,
                     const sti_panel *p)
{
    const sti_packing f = sti_packing_of(type);
    uint8_t *q = p->q;
    float *d = p->d, *m = p->m;
    for (const int end = b + nb; b < end; b++) {
        const uint8_t *first = group + sti_super_at(f, b);
        const uint8_t *w = first + sti_block_at(f, b);
        STI_UNROLL for (int kv = 0; kv < 16; kv++, q += 64)
        {
            __m256i pairs[2];
            words(f, w, kv / 2, kv % 2, pairs);
            _mm256_store_si256((__m256i *)q, pairs[0]);
            _mm256_store_si256((__m256i *)(q + 32), pairs[1]);
        }
        STI_UNROLL for (int hv = 0; hv < 2 * f.subs; hv++, d += 8, m += 8)
        {
            const scales s = load_scales(f, load_head(f, first, hv % 2),
                                         w + sti_quant_bytes(f), hv / 2, hv % 2);
            _mm256_store_ps(d, s.d);
            if (f.min) _mm256_store_ps(m, s.m);
        }
    }
}

static void fill_any(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
    (void)g; /* a panel is one group */
#define CASE(type)                                                                     \
    case STI_##type: fill(STI_##type, group, b, nb, p); break;
    switch (p->type) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

/* ---- Activations --------------------------------------------------------- */

STI_INLINE int sum_epi32(__m256i v)
{
    __m128i s =
        _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
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

/* 16 numbers to 8 words R apart; their sum. */
STI_INLINE int put_half(__m256i n0, __m256i n1, uint32_t *out, int R)
{
    /* Packing leaves the numbers 0-3, 8-11, 4-7, 12-15; then each four as (0, 2), (1, 3). */
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m256i x = _mm256_permute4x64_epi64(_mm256_packs_epi32(n0, n1), 0xd8);
    x = _mm256_shuffle_epi8(x, order);
    uint32_t w[8];
    _mm256_storeu_si256((__m256i *)w, x);
    STI_UNROLL for (int k = 0; k < 8; k++) out[k * R] = w[k];
    return sum_epi32(_mm256_add_epi32(n0, n1));
}

static void quantize(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_ACT_BYTES * R) {
            __m256 v[4];
            STI_UNROLL for (int j = 0; j < 4; j++) v[j] = _mm256_loadu_ps(row + 8 * j);
            float inv;
            const float d = sti_act_scale(top_of(v), &inv);
            if (isnan(d))
                STI_UNROLL for (int j = 0; j < 4; j++) v[j] = _mm256_setzero_ps();
            __m256i n[4];
            STI_UNROLL for (int j = 0; j < 4; j++) n[j] =
                _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(inv)));
            uint32_t *out = (uint32_t *)a + i;
            const int sum0 = put_half(n[0], n[1], out, R);
            const int sum1 = put_half(n[2], n[3], out + 8 * R, R);
            float *number = (float *)a + i;
            number[X_D * R] = d;
            number[X_S * R] = d * (float)(sum0 + sum1);
            number[(X_S + 1) * R] = d * (float)sum0;
            number[(X_S + 2) * R] = d * (float)sum1;
        }
    }
}

/* ---- Instances ----------------------------------------------------------- */

#define ROWS(name, fn, type, ...)                                                      \
    static void name(type w, const uint8_t *a, int R, int nb, float *c)                \
    {                                                                                  \
        switch (R) {                                                                   \
        case 1: fn(__VA_ARGS__, 1, w, a, nb, c); break;                                \
        case 2: fn(__VA_ARGS__, 2, w, a, nb, c); break;                                \
        case 3: fn(__VA_ARGS__, 3, w, a, nb, c); break;                                \
        default: fn(__VA_ARGS__, 4, w, a, nb, c); break;                               \
        }                                                                              \
    }
#define GEMV(type) ROWS(gemv_##type, gemv, const uint8_t *, STI_##type)
STI_QUANT_TYPES(GEMV)
ROWS(centred, product, const sti_panel *, 1, false)
ROWS(with_min, product, const sti_panel *, 1, true)
ROWS(half_centred, product, const sti_panel *, 2, false)
ROWS(half_with_min, product, const sti_panel *, 2, true)

#include "backend/cpu/dense/quant_types_code.h"

static void product_any(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)
{
    typedef void kernel(const sti_panel *, const uint8_t *, int, int, float *);
    static kernel *const kernels[2][2] = {{centred, with_min},
                                          {half_centred, half_with_min}};
    const sti_packing f = sti_packing_of(p->type);
    kernels[f.subs == 2][f.min](p, a, R, nb, c);
}

const sti_quant_kernels sti_cpu_quant_avx2 = {
    .tile = TILE,
    .few = 2 * TILE,
    .groups = 1,
    .s8_flip = false,
    .quantize = quantize,
    .gemv = gemv_any,
    .unpack = unpack_any,
    .batch_tile = TILE,
    .batch_bytes = STI_ACT_BYTES,
    .quantize_batch = quantize,
    .fill = fill_any,
    .product = product_any,
};
