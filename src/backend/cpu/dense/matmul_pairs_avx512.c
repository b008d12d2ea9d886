/* matmul_pairs_avx512.c - quantized products of a batch with AVX-512 VNNI.
 *
 * Panel and activations are 16-bit integers: vpdpwssd multiplies two of each in a lane,
 * which is as fast as two bytes in two digits (matmul.h), and no digits are put together.
 * What bounds it is multiplication. Winograd's inner product halves it, at two sums more:
 *
 *     x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1
 *
 * The two terms at the end belong to a row of x and to a row of w; they are computed when
 * these are quantized and unpacked, and the accumulators start from them. All is exact in
 * 32 bits that wrap around: the sums in 16 bits fit, the result does, and what overflows
 * between is taken off again. So a bit changes nowhere, whichever way a product is taken.
 *
 * Three of four products are paired: a core of AMD's has as many units that add as units
 * that multiply, and these too can add, so 6 pairs and 4 plain products of a block take
 * both kinds the same time. Where the units that multiply are those that add (Intel), all
 * products are plain.
 *
 * A tile is 2 groups by 6 rows of x: 12 integer and 12 float accumulators. Pairs and plain
 * products alternate, so that both kinds of units always have work in sight. */
#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/dense/round_avx512.h"
#include "backend/cpu/dense/unpack_avx512.h"

/* A record of R rows of x and 32 k, in words of R rows: 16 steps of 2 k, then fields. Bytes
 * 0 to 3 of a step of packing.h become the steps (0, 2) and (1, 3). */
enum {
    STEPS = 8, /* of 16 k */
    PAIRS = 3, /* of them: steps 0 with 1, 2 with 3, 4 with 5 */
    X_D = 2 * STEPS,
    X_S,        /* d * sum(q) of the block, of its halves */
    X_OFF = 20, /* -sum of x0 x1 over the pairs of the block, of its halves */
    X_WORDS = 23,
};
_Static_assert(4 * X_WORDS == STI_PAIR_BYTES, "matmul.h has the size of a record");

STI_INLINE __m512i word(const uint8_t *a, int R, int field, int i)
{
    int v;
    memcpy(&v, a + (field * R + i) * 4, 4);
    return _mm512_set1_epi32(v);
}

STI_INLINE __m512 number(const uint8_t *a, int R, int field, int i)
{
    return _mm512_castsi512_ps(word(a, R, field, i));
}

/* The field of a sub-block: of the block, or of half h. */
STI_INLINE int field_of(int first, int subs, int h)
{
    return subs == 1 ? first : first + 1 + h;
}

/* s[i][g] += products of 16 k: x from step k on, w [STEPS][ng][16 rows][2 k]. */
STI_INLINE void half_product(const bool pairs, const int ng, const int rows,
                             const uint8_t *w, const uint8_t *a, int R, int k,
                             __m512i s[STI_TILE_MAX][2])
{
    const int paired = pairs ? PAIRS : 0, plain = STEPS - 2 * paired;
    STI_UNROLL for (int j = 0; j < (paired > plain ? paired : plain); j++)
    {
        __m512i w0[2], w1[2], v[2]; /* of pair j, of plain step j */
        STI_UNROLL for (int g = 0; g < ng; g++)
        {
            if (j < paired) {
                w0[g] = _mm512_load_si512(w + STI_STEP * (ng * 2 * j + g));
                w1[g] = _mm512_load_si512(w + STI_STEP * (ng * (2 * j + 1) + g));
            }
            if (j < plain)
                v[g] = _mm512_load_si512(w + STI_STEP * (ng * (2 * paired + j) + g));
        }
        STI_UNROLL for (int i = 0; i < rows; i++)
        {
            if (j < paired) {
                const __m512i x0 = word(a, R, k + 2 * j, i);
                const __m512i x1 = word(a, R, k + 2 * j + 1, i);
                STI_UNROLL for (int g = 0; g < ng; g++) s[i][g] = _mm512_dpwssd_epi32(
                    s[i][g], _mm512_add_epi16(x0, w1[g]), _mm512_add_epi16(x1, w0[g]));
            }
            if (j < plain) {
                const int r = (i + rows / 2) % rows; /* not the sum just added to */
                const __m512i x = word(a, R, k + 2 * paired + j, r);
                STI_UNROLL for (int g = 0; g < ng; g++) s[r][g] =
                    _mm512_dpwssd_epi32(s[r][g], v[g], x);
            }
        }
    }
}

/* ng groups by the first `rows` of R rows; the formula of matmul.h. */
STI_INLINE void product(const bool pairs, const int subs, const bool min, const int ng,
                        const int rows, const sti_panel *p, const uint8_t *a, int R,
                        int nb, float *c)
{
    const uint8_t *q = p->q;
    const float *d = p->d, *m = p->m;
    const int32_t *off = p->off;
    __m512 f[STI_TILE_MAX][2];
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
            _mm512_loadu_ps(c + (i * ng + g) * 16);
    }
    for (int b = 0; b < nb; b++, a += STI_PAIR_BYTES * R) {
        STI_UNROLL for (int h = 0; h < subs; h++)
        {
            __m512i s[STI_TILE_MAX][2];
            STI_UNROLL for (int g = 0; g < ng; g++)
            {
                const __m512i row = _mm512_load_si512(off + 16 * g);
                STI_UNROLL for (int i = 0; i < rows; i++)
                {
                    s[i][g] = _mm512_setzero_si512();
                    if (pairs)
                        s[i][g] = _mm512_add_epi32(
                            row, word(a, R, field_of(X_OFF, subs, h), i));
                }
            }
            half_product(pairs, ng, rows, q, a, R, STEPS * h, s);
            q += STI_STEP * STEPS * ng;
            if (subs == 1) {
                half_product(pairs, ng, rows, q, a, R, STEPS, s);
                q += STI_STEP * STEPS * ng;
            }
            STI_UNROLL for (int i = 0; i < rows; i++)
            {
                const __m512 da = number(a, R, X_D, i);
                STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
                    _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(d + 16 * g), da),
                                    _mm512_cvtepi32_ps(s[i][g]), f[i][g]);
                if (!min) continue;
                const __m512 sa = number(a, R, field_of(X_S, subs, h), i);
                STI_UNROLL for (int g = 0; g < ng; g++) f[i][g] =
                    _mm512_fmadd_ps(_mm512_load_ps(m + 16 * g), sa, f[i][g]);
            }
            d += 16 * ng;
            m += 16 * ng;
            off += 16 * ng;
        }
    }
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int g = 0; g < ng; g++)
            _mm512_storeu_ps(c + (i * ng + g) * 16, f[i][g]);
    }
}

/* ---- A panel of weights -------------------------------------------------- */

STI_INLINE void fill(const sti_dtype type, const uint8_t *group, int b, int nb,
                     const sti_panel *p, int g)
{
    const sti_packing f = sti_packing_of(type);
    const __m512i low = _mm512_set1_epi16(255);
    const __m512i centre = _mm512_set1_epi16((short)centre_of(f));
    const size_t ng = (size_t)p->ng, step = STI_STEP * ng;
    uint8_t *q = p->q + STI_STEP * (size_t)g;
    size_t at = STI_GROUP * (size_t)g;
    for (const int end = b + nb; b < end; b++) {
        const uint8_t *w = group + sti_super_at(f, b);
        const scales head = load_head(f, w);
        w += sti_block_at(f, b);
        __m512i off = _mm512_setzero_si512();
        STI_UNROLL for (int k = 0; k < 8; k++, q += 2 * step)
        {
            const __m512i v = quants(f, w, k);
            const __m512i w0 = _mm512_sub_epi16(_mm512_and_si512(v, low), centre);
            const __m512i w1 = _mm512_sub_epi16(_mm512_srli_epi16(v, 8), centre);
            _mm512_store_si512(q, w0);
            _mm512_store_si512(q + step, w1);
            if (k % (STEPS / 2) < PAIRS)
                off = _mm512_sub_epi32(off, _mm512_madd_epi16(w0, w1));
            if (k % (8 / f.subs) != 8 / f.subs - 1) continue;
            const scales s =
                load_scales(f, head, w + sti_quant_bytes(f), k / (8 / f.subs));
            _mm512_store_ps(p->d + at, s.d);
            if (f.min) _mm512_store_ps(p->m + at, s.m);
            _mm512_store_si512(p->off + at, off);
            off = _mm512_setzero_si512();
            at += STI_GROUP * ng;
        }
    }
}

void sti_cpu_fill_pairs(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
#define CASE(type)                                                                     \
    case STI_##type: fill(STI_##type, group, b, nb, p, g); break;
    switch (p->type) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

/* ---- Activations --------------------------------------------------------- */

/* 16 numbers to STEPS words R apart; -sum of x0 x1 over the pairs. */
STI_INLINE int put_half(__m512i n, uint32_t *out, int R)
{
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    const __m256i x = _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(n), order);
    uint32_t w[STEPS];
    _mm256_storeu_si256((__m256i *)w, x);
    STI_UNROLL for (int k = 0; k < STEPS; k++) out[k * R] = w[k];
    /* Words 0, 2, 4: products of both numbers of a step with those of the next. */
    const __m256i pair = _mm256_madd_epi16(x, _mm256_shuffle_epi32(x, 0xb1));
    const __m512i three = _mm512_maskz_mov_epi32(0x15, _mm512_castsi256_si512(pair));
    return _mm512_reduce_add_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), three));
}

void sti_cpu_quantize_pairs(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_PAIR_BYTES * R) {
            const rounded r = round_block(row);
            uint32_t *out = (uint32_t *)a + i, off = 0;
            float *number = (float *)a + i;
            STI_UNROLL for (int h = 0; h < 2; h++)
            {
                const uint32_t t = (uint32_t)put_half(r.n[h], out + STEPS * h * R, R);
                number[(X_S + 1 + h) * R] = r.d * (float)r.sum[h];
                out[(X_OFF + 1 + h) * R] = t;
                off += t; /* wraps, as the sums do */
            }
            number[X_D * R] = r.d;
            number[X_S * R] = r.d * (float)(r.sum[0] + r.sum[1]);
            out[X_OFF * R] = off;
        }
    }
}

/* ---- Instances ----------------------------------------------------------- */

/* Two groups by a whole tile; what remains of groups or rows goes row by row. */
enum { TILE = STI_PAIR_ROWS };

#define TILE_OF(name, pairs, subs, min)                                                \
    static void name(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)    \
    {                                                                                  \
        (void)R;                                                                       \
        product(pairs, subs, min, 2, TILE, p, a, TILE, nb, c);                         \
    }
#define ROWS_OF(name, subs, min, ng)                                                   \
    static void name(const sti_panel *p, const uint8_t *a, int R, int nb, float *c)    \
    {                                                                                  \
        for (int i = 0; i < R; i++)                                                    \
            product(false, subs, min, ng, 1, p, a + 4 * i, R, nb,                      \
                    c + STI_GROUP * ng * i);                                           \
    }
#define KIND(name, subs, min)                                                          \
    ROWS_OF(name##_1, subs, min, 1)                                                    \
    ROWS_OF(name##_2, subs, min, 2)                                                    \
    TILE_OF(name##_tile, false, subs, min)                                             \
    TILE_OF(name##_pairs, true, subs, min)
KIND(centred, 1, false)
KIND(with_min, 1, true)
KIND(half_centred, 2, false)
KIND(half_with_min, 2, true)

void sti_cpu_product_pairs(const sti_panel *p, const uint8_t *a, int R, int nb,
                           float *c)
{
    typedef void kernel(const sti_panel *, const uint8_t *, int, int, float *);
#define ROW(name)                                                                      \
    {                                                                                  \
        name##_1, name##_2, name##_tile, name##_pairs                                  \
    }
    static kernel *const kernels[2][2][4] = {{ROW(centred), ROW(with_min)},
                                             {ROW(half_centred), ROW(half_with_min)}};
#undef ROW
    const sti_packing f = sti_packing_of(p->type);
    const int how = p->ng == 1 ? 0 : R < TILE ? 1 : p->pairs ? 3 : 2;
    kernels[f.subs == 2][f.min][how](p, a, R, nb, c);
}
