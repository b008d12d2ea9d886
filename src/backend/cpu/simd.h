/* simd.h - one float vector, three widths: 16 lanes with AVX-512, 8 with AVX2, 4
 * otherwise (the compiler's own vectors, which become SSE2, NEON or scalars).
 *
 * Kernels are written once over these few functions, in files named *_code.h, and
 * compiled once per instruction set by isa_<set>.c. Every function is the same
 * operation in every lane, so a number's bits do not depend on the lane it sits in;
 * vf_hsum and vf_hmax are the exceptions and fix their order. vf_fma rounds once where
 * the instruction set can and twice where it cannot, always the same way in one file.
 */
#ifndef STI_BACKEND_CPU_SIMD_H
#define STI_BACKEND_CPU_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "file/dtype.h"

#define STI_INLINE static inline __attribute__((always_inline, unused))
/* Before a loop over accumulators: its count is a constant after inlining, and the
 * accumulators live in registers only if it disappears. */
#if defined(__clang__)
#define STI_UNROLL _Pragma("clang loop unroll(full)")
#else
#define STI_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
enum { VL = 16, V_REGS = 32 };
typedef __m512 vf;
#define VF(name) _mm512_##name
#elif defined(__AVX2__)
#include <immintrin.h>
enum { VL = 8, V_REGS = 16 };
typedef __m256 vf;
#define VF(name) _mm256_##name
#endif

/* Instructions that both have under one name. */
#if defined(VF)

STI_INLINE vf vf_load(const float *p)
{
    return VF(loadu_ps)(p);
}
STI_INLINE void vf_store(float *p, vf x)
{
    VF(storeu_ps)(p, x);
}
STI_INLINE vf vf_set(float x)
{
    return VF(set1_ps)(x);
}
STI_INLINE vf vf_add(vf a, vf b)
{
    return VF(add_ps)(a, b);
}
STI_INLINE vf vf_sub(vf a, vf b)
{
    return VF(sub_ps)(a, b);
}
STI_INLINE vf vf_mul(vf a, vf b)
{
    return VF(mul_ps)(a, b);
}
STI_INLINE vf vf_div(vf a, vf b)
{
    return VF(div_ps)(a, b);
}
STI_INLINE vf vf_fma(vf a, vf b, vf c) /* a b + c */
{
    return VF(fmadd_ps)(a, b, c);
}
STI_INLINE vf vf_max(vf a, vf b) /* b where either is NaN */
{
    return VF(max_ps)(a, b);
}
STI_INLINE vf vf_min(vf a, vf b) /* b where either is NaN */
{
    return VF(min_ps)(a, b);
}
STI_INLINE vf vf_sqrt(vf x)
{
    return VF(sqrt_ps)(x);
}

#endif

#if defined(__AVX512F__)

STI_INLINE vf vf_round(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* x 2^n for whole n in [-151, 129]: rounds once, into denormals and zero too. */
STI_INLINE vf vf_scale2(vf x, vf n)
{
    return _mm512_scalef_ps(x, n);
}
STI_INLINE vf vf_load_u8(const uint8_t *p)
{
    __m128i q = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(q));
}
STI_INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
STI_INLINE void vf_store_f16(uint16_t *p, vf x)
{
    __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}
/* Halves are added (compared) lane by lane until one lane is left: a fixed tree. */
STI_INLINE float vf_hsum(vf x)
{
    return _mm512_reduce_add_ps(x);
}
STI_INLINE float vf_hmax(vf x)
{
    return _mm512_reduce_max_ps(x);
}

#elif defined(__AVX2__)

STI_INLINE vf vf_round(vf x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* Two factors, because 2^n itself leaves the range of float before the result does. */
STI_INLINE vf vf_scale2(vf x, vf n)
{
    __m256i k = _mm256_cvtps_epi32(n), bias = _mm256_set1_epi32(127);
    __m256i half = _mm256_srai_epi32(k, 1), rest = _mm256_sub_epi32(k, half);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(a));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(b));
}
STI_INLINE vf vf_load_u8(const uint8_t *p)
{
    __m128i q = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(q));
}
STI_INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
STI_INLINE void vf_store_f16(uint16_t *p, vf x)
{
    __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)(void *)p, h);
}
STI_INLINE float vf_hsum(vf x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
STI_INLINE float vf_hmax(vf x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

#else

enum { VL = 4, V_REGS = 16 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vf_int __attribute__((vector_size(16)));
typedef uint32_t vf_bits __attribute__((vector_size(16)));

STI_INLINE vf vf_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
STI_INLINE void vf_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}
STI_INLINE vf vf_set(float x)
{
    return (vf){x, x, x, x};
}
STI_INLINE vf vf_add(vf a, vf b)
{
    return a + b;
}
STI_INLINE vf vf_sub(vf a, vf b)
{
    return a - b;
}
STI_INLINE vf vf_mul(vf a, vf b)
{
    return a * b;
}
STI_INLINE vf vf_div(vf a, vf b)
{
    return a / b;
}
STI_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
STI_INLINE vf vf_pick(vf_int mask, vf a, vf b) /* a where mask is set, else b */
{
    return (vf)((mask & (vf_int)a) | (~mask & (vf_int)b));
}
STI_INLINE vf vf_max(vf a, vf b)
{
    return vf_pick(a > b, a, b);
}
STI_INLINE vf vf_min(vf a, vf b)
{
    return vf_pick(a < b, a, b);
}
/* For |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction. */
STI_INLINE vf vf_round(vf x)
{
    vf big = vf_set(0x1.8p23f);
    return (x + big) - big;
}
STI_INLINE vf vf_scale2(vf x, vf n)
{
    /* The low bits of n + 1.5 * 2^23 are n as an integer, also when n is NaN. */
    vf_int k = (vf_int)(n + vf_set(0x1.8p23f)) - (vf_int)vf_set(0x1.8p23f);
    vf_int half = k >> 1, rest = k - half;
    return x * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
}
STI_INLINE vf vf_sqrt(vf x)
{
    return (vf){sqrtf(x[0]), sqrtf(x[1]), sqrtf(x[2]), sqrtf(x[3])};
}
STI_INLINE vf vf_load_u8(const uint8_t *p)
{
    return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
/* Exponent and fraction moved up are the number times 2^-112, denormals included;
 * infinities and NaNs get their exponent back by hand. */
STI_INLINE vf vf_load_f16(const uint16_t *p)
{
    vf_int h = {p[0], p[1], p[2], p[3]};
    vf_int sign = (vf_int)((vf_bits)(h & 0x8000) << 16), bits = (h & 0x7fff) << 13;
    vf_int special = (bits >= 0x7c00 << 13) & 0x7f800000;
    return (vf)((vf_int)((vf)bits * vf_set(0x1p112f)) | special | sign);
}
STI_INLINE void vf_store_f16(uint16_t *p, vf x)
{
    for (int i = 0; i < VL; i++) p[i] = sti_f32_to_f16(x[i]);
}
STI_INLINE float vf_hsum(vf x)
{
    return (x[0] + x[2]) + (x[1] + x[3]);
}
STI_INLINE float vf_hmax(vf x)
{
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}

#endif

/* ---- Whole numbers, for levels of few bits ------------------------------- */

typedef int32_t vi __attribute__((vector_size(4 * VL)));

STI_INLINE vf vf_of(vi x)
{
    return __builtin_convertvector(x, vf);
}
STI_INLINE vi vi_set(int32_t x)
{
    return (vi){0} + x;
}
STI_INLINE vi vi_lanes(void) /* 0, 1, 2, ... */
{
    static const int32_t lane[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                     8, 9, 10, 11, 12, 13, 14, 15};
    vi x;
    memcpy(&x, lane, sizeof x);
    return x;
}
/* VL bytes; and lanes i of the 8 bytes at p, from `first` on and around, first a multiple
 * of VL or 0. */
#if defined(__AVX512F__)
STI_INLINE vi vi_load_u8(const uint8_t *p)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
STI_INLINE vi vi_load_u8_of_8(const uint8_t *p, int first)
{
    (void)first;
    int64_t x;
    memcpy(&x, p, sizeof x);
    return (vi)_mm512_cvtepu8_epi32(_mm_set1_epi64x(x));
}
#elif defined(__AVX2__)
STI_INLINE vi vi_load_u8(const uint8_t *p)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
STI_INLINE vi vi_load_u8_of_8(const uint8_t *p, int first)
{
    return vi_load_u8(p + first);
}
#else
STI_INLINE vi vi_load_u8(const uint8_t *p)
{
    return (vi){p[0], p[1], p[2], p[3]};
}
STI_INLINE vi vi_load_u8_of_8(const uint8_t *p, int first)
{
    return vi_load_u8(p + first);
}
#endif

/* The first n < VL lanes from memory, `rest` or zero in the others; and back. */
#if defined(__AVX512F__)
STI_INLINE __mmask16 vf_first(int n)
{
    return (__mmask16)((1u << n) - 1);
}
STI_INLINE vf vf_load_part_or(const float *p, int n, float rest)
{
    return _mm512_mask_loadu_ps(vf_set(rest), vf_first(n), p);
}
STI_INLINE void vf_store_part(float *p, vf v, int n)
{
    _mm512_mask_storeu_ps(p, vf_first(n), v);
}
#elif defined(__AVX2__)
STI_INLINE __m256i vf_first(int n)
{
    static const int32_t on[2 * VL] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(const void *)(on + VL - n));
}
STI_INLINE vf vf_load_part_or(const float *p, int n, float rest)
{
    const __m256i first = vf_first(n);
    return _mm256_blendv_ps(vf_set(rest), _mm256_maskload_ps(p, first),
                            _mm256_castsi256_ps(first));
}
STI_INLINE void vf_store_part(float *p, vf v, int n)
{
    _mm256_maskstore_ps(p, vf_first(n), v);
}
#else
STI_INLINE vf vf_load_part_or(const float *p, int n, float rest)
{
    float x[VL];
    for (int i = 0; i < VL; i++) x[i] = i < n ? p[i] : rest;
    return vf_load(x);
}
STI_INLINE void vf_store_part(float *p, vf v, int n)
{
    float x[VL];
    vf_store(x, v);
    memcpy(p, x, (size_t)n * sizeof *p);
}
#endif
STI_INLINE vf vf_load_part(const float *p, int n)
{
    return vf_load_part_or(p, n, 0);
}

/* The next up to VL of n numbers, zero (or `rest`) in the other lanes; and back. */
STI_INLINE vf vf_load_some(const float *p, int64_t n)
{
    return n >= VL ? vf_load(p) : vf_load_part(p, (int)n);
}
STI_INLINE vf vf_load_or(const float *p, int64_t n, float rest)
{
    return n >= VL ? vf_load(p) : vf_load_part_or(p, (int)n, rest);
}
STI_INLINE void vf_store_some(float *p, vf v, int64_t n)
{
    if (n >= VL)
        vf_store(p, v);
    else
        vf_store_part(p, v, (int)n);
}

/* e^x within 1 ulp wherever the result is a normal number: 0 at -inf, inf from 89 on,
 * NaN at NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 q(r), q the polynomial of
 * degree 4 with the smallest relative error (3e-9). ln 2 is cut in two: the first part
 * has 9 bits, so that n times it is exact without a fused multiply too. */
STI_INLINE vf vf_exp(vf x)
{
    x = vf_max(vf_set(-104.0f), x); /* e^-104 rounds to 0 */
    x = vf_min(vf_set(89.0f), x);
    vf n = vf_round(vf_mul(x, vf_set(0x1.715476p+0f)));
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf q = vf_set(0x1.6a2352p-10f);
    q = vf_fma(q, r, vf_set(0x1.123a6cp-7f));
    q = vf_fma(q, r, vf_set(0x1.5558f4p-5f));
    q = vf_fma(q, r, vf_set(0x1.555490p-3f));
    q = vf_fma(q, r, vf_set(0x1.fffffcp-2f));
    vf p = vf_fma(vf_mul(r, r), q, r);
    return vf_scale2(vf_add(p, vf_set(1.0f)), n);
}

/* x where a > b, 0 elsewhere. */
STI_INLINE vf vf_if_above(vf a, vf b, vf x)
{
    typedef int32_t whole __attribute__((vector_size(4 * VL)));
    return (vf)((whole)(a > b) & (whole)x);
}

/* log x within 2 ulp for normal positive x; nothing is promised elsewhere.
 * x = 2^n (1 + r) with 1 + r in [sqrt(1/2), sqrt(2)); log(1 + r) = r - r^2/2 + r^3
 * q(r), q the polynomial of degree 7 with the smallest relative error (6e-9). ln 2 is
 * cut in two as in vf_exp. */
STI_INLINE vf vf_log(vf x)
{
    typedef int32_t whole __attribute__((vector_size(4 * VL)));
    typedef uint32_t bits __attribute__((vector_size(4 * VL)));
    const whole up = (whole)x - 0x3f3504f3; /* the bits of sqrt(1/2) */
    const bits exponent = (bits)(up >> 23) << 23;
    const vf n = __builtin_convertvector(up >> 23, vf);
    const vf r = vf_sub((vf)((bits)x - exponent), vf_set(1.0f));
    vf q = vf_set(-0x1.38b4ccp-4f);
    q = vf_fma(q, r, vf_set(0x1.055b46p-3f));
    q = vf_fma(q, r, vf_set(-0x1.0d8552p-3f));
    q = vf_fma(q, r, vf_set(0x1.22da22p-3f));
    q = vf_fma(q, r, vf_set(-0x1.547244p-3f));
    q = vf_fma(q, r, vf_set(0x1.99a008p-3f));
    q = vf_fma(q, r, vf_set(-0x1.000228p-2f));
    q = vf_fma(q, r, vf_set(0x1.555554p-2f));
    vf y = vf_fma(vf_mul(r, r), vf_fma(q, r, vf_set(-0.5f)), r);
    y = vf_fma(n, vf_set(-2.12194440e-4f), y);
    return vf_fma(n, vf_set(0.693359375f), y);
}

#endif
