/* matmul_ktypes_code.h - K types, unpacked from the file into a panel.
 *
 * Files of K types are large, so their rows are multiplied as they lie in the mapping:
 * 16 rows of a super-block (256 k) are expanded to bytes and float scales, then
 * transposed so that a lane is a row. From there on they are weights like all others.
 * Centred types become w = D q + M with M = -centre D, which is exact in float. */
#ifndef STI_BACKEND_CPU_DENSE_MATMUL_KTYPES_CODE_H
#define STI_BACKEND_CPU_DENSE_MATMUL_KTYPES_CODE_H

#include "backend/cpu/dense/matmul.h"
#include "file/blocks.h"

typedef struct k_row { /* a super-block of one row */
    _Alignas(64) uint8_t q[256];
    _Alignas(64) float d[16], m[16]; /* 8 used by types with groups of 32 */
} k_row;

STI_INLINE float k_half(const uint8_t p[2])
{
#if defined(__F16C__)
    return _cvtsh_ss((unsigned short)(p[0] | p[1] << 8));
#else
    return sti_load_f16(p);
#endif
}

/* out = d v, n (a multiple of 8) of them. */
STI_INLINE void k_times(float d, const int8_t *v, int n, float *out)
{
    for (int j = 0; j < n; j += 8) {
#if defined(__AVX2__)
        __m256i w = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(v + j)));
        _mm256_storeu_ps(out + j,
                         _mm256_mul_ps(_mm256_cvtepi32_ps(w), _mm256_set1_ps(d)));
#else
        for (int i = j; i < j + 8; i++) out[i] = d * (float)v[i];
#endif
    }
}

/* Six-bit scales and minima of q4_k and q5_k, four at a time: see sti_scale_min. */
STI_INLINE void k_scales(const uint8_t b[12], float d, float dmin, k_row *out)
{
    uint32_t w[3], s[4];
    memcpy(w, b, 12);
    s[0] = w[0] & 0x3f3f3f3f;
    s[1] = (w[2] & 0x0f0f0f0f) | (w[0] >> 2 & 0x30303030);
    s[2] = w[1] & 0x3f3f3f3f;
    s[3] = (w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030);
    int8_t v[16];
    memcpy(v, s, 16);
    k_times(d, v, 8, out->d);
    k_times(-dmin, v + 8, 8, out->m);
}

STI_INLINE void k_expand_q4(const sti_block_q4_k *b, k_row *out)
{
    k_scales(b->scale, k_half(b->d), k_half(b->dmin), out);
    for (int j = 0; j < 4; j++) {
        for (int l = 0; l < 32; l++) {
            out->q[64 * j + l] = b->q[32 * j + l] & 15;
            out->q[64 * j + 32 + l] = b->q[32 * j + l] >> 4;
        }
    }
}

STI_INLINE void k_expand_q5(const sti_block_q5_k *b, k_row *out)
{
    k_scales(b->scale, k_half(b->d), k_half(b->dmin), out);
    for (int j = 0; j < 4; j++) {
        for (int l = 0; l < 32; l++) {
            uint8_t h = (uint8_t)(b->high[l] >> (2 * j));
            out->q[64 * j + l] = (uint8_t)((b->q[32 * j + l] & 15) | (h & 1) << 4);
            out->q[64 * j + 32 + l] = (uint8_t)(b->q[32 * j + l] >> 4 | (h & 2) << 3);
        }
    }
}

STI_INLINE void k_expand_q2(const sti_block_q2_k *b, k_row *out)
{
    int8_t scale[16], min[16];
    for (int g = 0; g < 16; g++) {
        scale[g] = (int8_t)(b->scale[g] & 15);
        min[g] = (int8_t)(b->scale[g] >> 4);
    }
    k_times(k_half(b->d), scale, 16, out->d);
    k_times(-k_half(b->dmin), min, 16, out->m);
    for (int n = 0; n < 2; n++) {
        for (int j = 0; j < 4; j++) {
            for (int l = 0; l < 32; l++)
                out->q[128 * n + 32 * j + l] = b->q[32 * n + l] >> (2 * j) & 3;
        }
    }
}

STI_INLINE void k_expand_q3(const sti_block_q3_k *b, k_row *out)
{
    uint32_t w[3], s[4];
    memcpy(w, b->scale, 12);
    s[0] = (w[0] & 0x0f0f0f0f) | (w[2] << 4 & 0x30303030);
    s[1] = (w[1] & 0x0f0f0f0f) | (w[2] << 2 & 0x30303030);
    s[2] = (w[0] >> 4 & 0x0f0f0f0f) | (w[2] & 0x30303030);
    s[3] = (w[1] >> 4 & 0x0f0f0f0f) | (w[2] >> 2 & 0x30303030);
    int8_t v[16];
    memcpy(v, s, 16);
    for (int g = 0; g < 16; g++) v[g] = (int8_t)(v[g] - 32);
    k_times(k_half(b->d), v, 16, out->d);
    k_times(-4.0f * k_half(b->d), v, 16, out->m);
    for (int n = 0; n < 2; n++) {
        for (int j = 0; j < 4; j++) {
            for (int l = 0; l < 32; l++) {
                int high = b->high[l] >> (4 * n + j) & 1;
                out->q[128 * n + 32 * j + l] =
                    (uint8_t)((b->q[32 * n + l] >> (2 * j) & 3) | high << 2);
            }
        }
    }
}

STI_INLINE void k_expand_q6(const sti_block_q6_k *b, k_row *out)
{
    k_times(k_half(b->d), (const int8_t *)b->scale, 16, out->d);
    k_times(-32.0f * k_half(b->d), (const int8_t *)b->scale, 16, out->m);
    for (int n = 0; n < 2; n++) {
        const uint8_t *low = b->q + 64 * n, *high = b->high + 32 * n;
        uint8_t *q = out->q + 128 * n;
        for (int l = 0; l < 32; l++) {
            q[l] = (uint8_t)((low[l] & 15) | (high[l] & 3) << 4);
            q[l + 32] = (uint8_t)((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4);
            q[l + 64] = (uint8_t)(low[l] >> 4 | (high[l] >> 4 & 3) << 4);
            q[l + 96] = (uint8_t)(low[l + 32] >> 4 | (high[l] >> 6) << 4);
        }
    }
}

/* dst[c][r] = src[r][c] for 16 rows, n columns (a multiple of 8) of 32 bits; lds and
 * ldd in bytes. */
STI_INLINE void k_transpose(const void *src, size_t lds, int n, void *dst, size_t ldd)
{
#if defined(__AVX2__)
    for (int c = 0; c < n; c += 8) {
        for (int half = 0; half < 2; half++) {
            const uint8_t *in = (const uint8_t *)src + 8 * (size_t)half * lds + 4 * c;
            uint8_t *out = (uint8_t *)dst + (size_t)c * ldd + 32 * half;
            __m256 r[8], t[8];
            /* Left halves of rows i and i+4 meet in r[i], right halves in r[i+4]. */
            STI_UNROLL for (int i = 0; i < 4; i++)
            {
                const float *lo = (const float *)(in + (size_t)i * lds);
                const float *hi = (const float *)(in + (size_t)(i + 4) * lds);
                r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lo)),
                                            _mm_loadu_ps(hi), 1);
                r[i + 4] =
                    _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lo + 4)),
                                         _mm_loadu_ps(hi + 4), 1);
            }
            STI_UNROLL for (int i = 0; i < 8; i += 4)
            {
                t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
                t[i + 2] = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
                t[i + 3] = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
                r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
            }
            STI_UNROLL for (int i = 0; i < 8; i++)
                _mm256_storeu_ps((float *)(out + (size_t)i * ldd), r[i]);
        }
    }
#else
    for (int c = 0; c < n; c++) {
        for (int r = 0; r < STI_GROUP; r++)
            memcpy((uint8_t *)dst + (size_t)c * ldd + 4 * r,
                   (const uint8_t *)src + (size_t)r * lds + 4 * c, 4);
    }
#endif
}

STI_INLINE void k_unpack(const sti_dtype t, const size_t bytes, const int sub,
                         const uint8_t *w, size_t stride, int n, int ns,
                         const sti_panel *p, int g)
{
    k_row row[STI_GROUP];
    const size_t ng = (size_t)p->ng;
    for (int r = n; r < STI_GROUP; r++) row[r] = (k_row){0};
    for (int s = 0; s < ns; s++, w += bytes) {
        for (int r = 0; r < n; r++) {
            const uint8_t *b = w + (size_t)r * stride;
            /* Sixteen rows are more streams than the hardware follows: prefetch the
             * same place of the next panel's rows. */
            for (size_t l = 0; l < bytes; l += 64)
                __builtin_prefetch(b + ng * STI_GROUP * stride + l, 0, 2);
            switch (t) {
            case STI_Q2_K: k_expand_q2((const sti_block_q2_k *)b, &row[r]); break;
            case STI_Q3_K: k_expand_q3((const sti_block_q3_k *)b, &row[r]); break;
            case STI_Q4_K: k_expand_q4((const sti_block_q4_k *)b, &row[r]); break;
            case STI_Q5_K: k_expand_q5((const sti_block_q5_k *)b, &row[r]); break;
            default: k_expand_q6((const sti_block_q6_k *)b, &row[r]); break;
            }
        }
        size_t at = (size_t)s * ng;
        k_transpose(row[0].q, sizeof row[0], 64, p->q + at * 4096 + (size_t)g * 64,
                    64 * ng);
        size_t first = (at * (size_t)sub + (size_t)g) * 16;
        k_transpose(row[0].d, sizeof row[0], sub, p->d + first, 64 * ng);
        k_transpose(row[0].m, sizeof row[0], sub, p->m + first, 64 * ng);
    }
}

static void dense_unpack_k(sti_dtype t, const uint8_t *w, size_t stride, int n, int ns,
                           const sti_panel *p, int g)
{
    switch (t) {
    case STI_Q2_K: k_unpack(STI_Q2_K, 84, 16, w, stride, n, ns, p, g); break;
    case STI_Q3_K: k_unpack(STI_Q3_K, 110, 16, w, stride, n, ns, p, g); break;
    case STI_Q4_K: k_unpack(STI_Q4_K, 144, 8, w, stride, n, ns, p, g); break;
    case STI_Q5_K: k_unpack(STI_Q5_K, 176, 8, w, stride, n, ns, p, g); break;
    default: k_unpack(STI_Q6_K, 210, 16, w, stride, n, ns, p, g); break;
    }
}

#endif
