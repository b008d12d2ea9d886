/* pack_code.h - quantized rows of a file into groups, see packing.h.
 *
 * A block of each of 16 rows (a super-block of the K types) is expanded to a byte an
 * element, with its scales as the file has them; 16 of these are transposed, so that a
 * lane is a row, and the bytes are cut into planes. Loops over 64 bytes are the
 * compiler's to vectorize. */
#ifndef STI_BACKEND_CPU_DENSE_PACK_CODE_H
#define STI_BACKEND_CPU_DENSE_PACK_CODE_H

#include "backend/cpu/dense/matmul.h"

typedef struct pack_row { /* a block or super-block of one row */
    _Alignas(64) uint8_t q[STI_SUPER_K];
    uint8_t d[2], m[2];       /* f16; m of K types: dmin */
    uint8_t scale[8], min[8]; /* subs 1: a block's; others: those of its halves */
} pack_row;

/* ---- One row ------------------------------------------------------------- */

STI_INLINE void pack_nibbles(const uint8_t *from, int n, uint8_t *q)
{
    for (int l = 0; l < n; l++) {
        q[l] = from[l] & 15;
        q[n + l] = from[l] >> 4;
    }
}

/* The fifth bits of 32 elements. */
STI_INLINE void pack_fifth(const uint8_t high[4], uint8_t *q)
{
    for (int i = 0; i < 32; i++) q[i] |= (uint8_t)((high[i / 8] >> (i % 8) & 1) << 4);
}

STI_INLINE void pack_halves(const uint8_t d[2], const uint8_t m[2], pack_row *out)
{
    memcpy(out->d, d, 2);
    memcpy(out->m, m, 2);
}

/* Six-bit scales and minima of q4_k and q5_k, four at a time: see sti_scale_min. */
STI_INLINE void pack_scale_min(const uint8_t b[12], pack_row *out)
{
    uint32_t w[3], s[4];
    memcpy(w, b, 12);
    s[0] = w[0] & 0x3f3f3f3f;
    s[1] = (w[2] & 0x0f0f0f0f) | (w[0] >> 2 & 0x30303030);
    s[2] = w[1] & 0x3f3f3f3f;
    s[3] = (w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030);
    memcpy(out->scale, s, 8);
    memcpy(out->min, s + 2, 8);
}

/* Sixteen bytes, a pair to each block: the first half's to scale, the second's to min. */
STI_INLINE void pack_scale_pairs(const uint8_t b[16], pack_row *out)
{
    for (int i = 0; i < 8; i++) {
        out->scale[i] = b[2 * i];
        out->min[i] = b[2 * i + 1];
    }
}

STI_INLINE void pack_expand_q2_k(const sti_block_q2_k *b, pack_row *out)
{
    pack_halves(b->d, b->dmin, out);
    pack_scale_pairs(b->scale, out);
    for (int n = 0; n < 2; n++) {
        for (int j = 0; j < 4; j++) {
            for (int l = 0; l < 32; l++)
                out->q[128 * n + 32 * j + l] = b->q[32 * n + l] >> (2 * j) & 3;
        }
    }
}

STI_INLINE void pack_expand_q3_k(const sti_block_q3_k *b, pack_row *out)
{
    uint32_t w[3], s[4];
    memcpy(w, b->scale, 12);
    s[0] = (w[0] & 0x0f0f0f0f) | (w[2] << 4 & 0x30303030);
    s[1] = (w[1] & 0x0f0f0f0f) | (w[2] << 2 & 0x30303030);
    s[2] = (w[0] >> 4 & 0x0f0f0f0f) | (w[2] & 0x30303030);
    s[3] = (w[1] >> 4 & 0x0f0f0f0f) | (w[2] >> 2 & 0x30303030);
    uint8_t v[16];
    memcpy(v, s, 16);
    for (int g = 0; g < 16; g++) v[g] = (uint8_t)(v[g] - 32);
    pack_halves(b->d, b->d, out);
    pack_scale_pairs(v, out);
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

STI_INLINE void pack_expand_q4_k(const sti_block_q4_k *b, pack_row *out)
{
    pack_halves(b->d, b->dmin, out);
    pack_scale_min(b->scale, out);
    for (int j = 0; j < 4; j++) pack_nibbles(b->q + 32 * j, 32, out->q + 64 * j);
}

STI_INLINE void pack_expand_q5_k(const sti_block_q5_k *b, pack_row *out)
{
    pack_halves(b->d, b->dmin, out);
    pack_scale_min(b->scale, out);
    for (int j = 0; j < 4; j++) {
        uint8_t *q = out->q + 64 * j;
        pack_nibbles(b->q + 32 * j, 32, q);
        for (int l = 0; l < 32; l++) {
            q[l] |= (uint8_t)((b->high[l] >> (2 * j) & 1) << 4);
            q[32 + l] |= (uint8_t)((b->high[l] >> (2 * j + 1) & 1) << 4);
        }
    }
}

STI_INLINE void pack_expand_q6_k(const sti_block_q6_k *b, pack_row *out)
{
    pack_halves(b->d, b->d, out);
    pack_scale_pairs(b->scale, out);
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

STI_INLINE void pack_expand_iq4_xs(const sti_block_iq4_xs *b, pack_row *out)
{
    pack_halves(b->d, b->d, out);
    for (int j = 0; j < 8; j++) {
        out->scale[j] = (uint8_t)sti_iq4_scale(b, j);
        pack_nibbles(b->q + 16 * j, 16, out->q + 32 * j);
    }
}

/* The next block or super-block of a row. */
STI_INLINE void pack_expand(const sti_dtype t, const uint8_t *p, pack_row *out)
{
    switch (t) {
    case STI_Q4_0: {
        const sti_block_q4_0 *b = (const void *)p;
        pack_halves(b->d, b->d, out);
        pack_nibbles(b->q, 16, out->q);
        break;
    }
    case STI_Q4_1: {
        const sti_block_q4_1 *b = (const void *)p;
        pack_halves(b->d, b->m, out);
        pack_nibbles(b->q, 16, out->q);
        break;
    }
    case STI_Q5_0: {
        const sti_block_q5_0 *b = (const void *)p;
        pack_halves(b->d, b->d, out);
        pack_nibbles(b->q, 16, out->q);
        pack_fifth(b->high, out->q);
        break;
    }
    case STI_Q5_1: {
        const sti_block_q5_1 *b = (const void *)p;
        pack_halves(b->d, b->m, out);
        pack_nibbles(b->q, 16, out->q);
        pack_fifth(b->high, out->q);
        break;
    }
    case STI_IQ4_NL: {
        const sti_block_iq4_nl *b = (const void *)p;
        pack_halves(b->d, b->d, out);
        pack_nibbles(b->q, 16, out->q);
        break;
    }
    case STI_MXFP4: {
        const sti_block_mxfp4 *b = (const void *)p;
        sti_store_f16(out->d, sti_mxfp4_scale(b->e));
        pack_nibbles(b->q, 16, out->q);
        break;
    }
    case STI_IQ4_XS: pack_expand_iq4_xs((const void *)p, out); break;
    case STI_Q2_K: pack_expand_q2_k((const void *)p, out); break;
    case STI_Q3_K: pack_expand_q3_k((const void *)p, out); break;
    case STI_Q4_K: pack_expand_q4_k((const void *)p, out); break;
    case STI_Q5_K: pack_expand_q5_k((const void *)p, out); break;
    case STI_Q6_K: pack_expand_q6_k((const void *)p, out); break;
    default: {
        const sti_block_q8_0 *b = (const void *)p;
        pack_halves(b->d, b->d, out);
        memcpy(out->q, b->q, sizeof b->q);
    }
    }
}

/* ---- A group ------------------------------------------------------------- */

/* dst[c][r] = src[r][c] for 16 rows, n columns (a multiple of 8) of 32 bits; lds and
 * ldd in bytes. */
STI_INLINE void pack_transpose(const void *src, size_t lds, int n, void *dst,
                               size_t ldd)
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

/* Fields of `bits` bits, `at` up in the bytes of 8 steps, into planes: bits of them. */
STI_INLINE void pack_planes(const uint8_t *step, const int at, const int bits,
                            uint8_t *out)
{
    const int fields = 8 / bits; /* of a byte */
    for (int i = 0; i < bits; i++) {
        for (int j = 0; j < STI_STEP; j++) {
            unsigned v = 0;
            STI_UNROLL for (int f = 0; f < fields; f++) v |=
                (step[STI_STEP * (f * bits + i) + j] >> at & ((1u << bits) - 1))
                << f * bits;
            out[STI_STEP * i + j] = (uint8_t)v;
        }
    }
}

/* f16 of 16 rows, with their sign turned by `sign`. */
STI_INLINE void pack_f16(const uint8_t *first, uint8_t sign, uint8_t *out)
{
    for (int r = 0; r < STI_GROUP; r++) {
        out[2 * r] = first[r * sizeof(pack_row)];
        out[2 * r + 1] = first[r * sizeof(pack_row) + 1] ^ sign;
    }
}

STI_INLINE void pack_bytes(const uint8_t *first, uint8_t *out)
{
    for (int r = 0; r < STI_GROUP; r++) out[r] = first[r * sizeof(pack_row)];
}

STI_INLINE void pack_typed(const sti_dtype t, const uint8_t *rows, size_t stride, int n,
                           size_t nb, bool flip, uint8_t *out)
{
    const sti_packing f = sti_packing_of(t);
    const size_t bytes = stride / (nb / (size_t)f.unit); /* of a file's block */
    pack_row row[STI_GROUP];
    memset(row, 0, sizeof row); /* rows past n */
    for (size_t b = 0; b < nb; b += (size_t)f.unit, rows += bytes) {
        for (int r = 0; r < n; r++) pack_expand(t, rows + (size_t)r * stride, &row[r]);
        if (f.unit > 1) {
            pack_f16(row[0].d, 0, out);
            if (f.min) pack_f16(row[0].m, 0x80, out + 32);
            out += sti_head_bytes(f);
        }
        for (int u = 0; u < f.unit; u++, out += sti_block_bytes(f)) {
            _Alignas(64) uint8_t step[8 * STI_STEP];
            pack_transpose(row[0].q + STI_BLOCK_K * u, sizeof row[0], 8, step,
                           STI_STEP);
            if (f.low == 8) {
                for (int j = 0; j < 8 * STI_STEP; j++)
                    out[j] = step[j] ^ (flip ? 0x80 : 0);
            } else {
                pack_planes(step, 0, f.low, out);
                if (f.high) pack_planes(step, f.low, f.high, out + STI_STEP * f.low);
            }
            uint8_t *scales = out + sti_quant_bytes(f);
            if (f.unit > 1) {
                pack_bytes(row[0].scale + u, scales);
                if (f.subs == 2 || f.min) pack_bytes(row[0].min + u, scales + 16);
            } else {
                pack_f16(row[0].d, 0, scales);
                if (f.min) pack_f16(row[0].m, 0, scales + 32);
            }
        }
    }
}

static void dense_pack(sti_dtype t, const uint8_t *rows, size_t stride, int n,
                       size_t nb, bool flip, uint8_t *group)
{
#define CASE(type)                                                                     \
    case STI_##type: pack_typed(STI_##type, rows, stride, n, nb, flip, group); break;
    switch (t) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

#endif
