/* unpack_avx512.h - a block of repacked weights in AVX-512 registers, see packing.h: shared by
 * the products of few rows and those of a batch. */
#ifndef STI_BACKEND_CPU_DENSE_UNPACK_AVX512_H
#define STI_BACKEND_CPU_DENSE_UNPACK_AVX512_H

#include <immintrin.h>

#include "backend/cpu/dense/packing.h"

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

/* What places in a table stand for, plus 128. */
STI_INLINE __m512i look_up(const sti_packing f, __m512i q)
{
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)f.table));
    return _mm512_add_epi8(_mm512_shuffle_epi8(table, q), _mm512_set1_epi8((char)128));
}

/* Step k of a block, see packing.h. */
STI_INLINE __m512i quants(const sti_packing f, const uint8_t *w, int k)
{
    if (f.low == 8) return plane(w, k);
    __m512i q = _mm512_and_si512(shift(plane(w, k % f.low), k / f.low * f.low),
                                 _mm512_set1_epi8((char)((1 << f.low) - 1)));
    if (f.table) return look_up(f, q);
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
    return sti_is_signed(f) ? 128 : f.centre;
}

/* Blocks [b, b + nb) of a group into place g of a panel, a byte a quant, with its scales.
 * centred: the centre is taken off. */
STI_INLINE void fill_bytes(const sti_dtype type, const bool centred,
                           const uint8_t *group, int b, int nb, const sti_panel *p,
                           int g)
{
    const sti_packing f = sti_packing_of(type);
    const __m512i centre = _mm512_set1_epi8((char)centre_of(f));
    const size_t ng = (size_t)p->ng, step = STI_STEP * ng;
    uint8_t *q = p->q + STI_STEP * (size_t)g;
    size_t at = STI_GROUP * (size_t)g;
    for (const int end = b + nb; b < end; b++) {
        const uint8_t *w = group + sti_super_at(f, b);
        const scales head = load_head(f, w);
        w += sti_block_at(f, b);
        STI_UNROLL for (int k = 0; k < 8; k++, q += step)
        {
            const __m512i v = quants(f, w, k);
            _mm512_store_si512(q, centred ? _mm512_sub_epi8(v, centre) : v);
        }
        STI_UNROLL for (int h = 0; h < f.subs; h++, at += STI_GROUP * ng)
        {
            const scales s = load_scales(f, head, w + sti_quant_bytes(f), h);
            _mm512_store_ps(p->d + at, s.d);
            if (f.min) _mm512_store_ps(p->m + at, s.m);
        }
    }
}

#endif
