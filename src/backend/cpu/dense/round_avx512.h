/* round_avx512.h - a block of activations as integers with a scale, see matmul.h: shared by
 * the products of few rows and those of a batch, which store them each in their own way. */
#ifndef STI_BACKEND_CPU_DENSE_ROUND_AVX512_H
#define STI_BACKEND_CPU_DENSE_ROUND_AVX512_H

#include <immintrin.h>

#include "backend/cpu/dense/matmul.h"

typedef struct rounded {
    __m512i n[2]; /* of the halves */
    int sum[2];   /* likewise */
    float d;
} rounded;

/* Of 32 numbers: the largest magnitude. Bits of magnitudes order as the numbers do, with
 * infinity and NaN on top, which a comparison of floats would lose. */
STI_INLINE float top_of(__m512 v0, __m512 v1)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const int top = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(v0), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(v1), magnitude)));
    float out;
    memcpy(&out, &top, 4);
    return out;
}

STI_INLINE rounded round_block(const float *x)
{
    rounded r;
    __m512 v[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
    float inv;
    r.d = sti_act_scale(top_of(v[0], v[1]), &inv);
    if (isnan(r.d)) v[0] = v[1] = _mm512_setzero_ps();
    STI_UNROLL for (int h = 0; h < 2; h++)
    {
        r.n[h] = _mm512_cvtps_epi32(_mm512_mul_ps(v[h], _mm512_set1_ps(inv)));
        r.sum[h] = _mm512_reduce_add_epi32(r.n[h]);
    }
    return r;
}

/* The digits of 16 integers as bytes, see sti_act_hi. */
STI_INLINE void digits_of(__m512i n, __m128i *hi, __m128i *lo)
{
    const __m512i half = _mm512_set1_epi32(1 << (STI_ACT_DIGIT - 1));
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(n, half), STI_ACT_DIGIT);
    *hi = _mm512_cvtepi32_epi8(h);
    *lo =
        _mm512_cvtepi32_epi8(_mm512_sub_epi32(n, _mm512_slli_epi32(h, STI_ACT_DIGIT)));
}

#endif
