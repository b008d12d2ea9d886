/* matmul_quant_avx512.c - quantized products of few rows with AVX-512 VNNI; those of a batch
 * are in matmul_pairs_avx512.c, and in matmul_tiles_amx.c where there is AMX, too.
 *
 * vpdpbusd multiplies unsigned by signed bytes and adds four products into a lane of
 * 32 bits, exactly. A register is a group of 16 rows; each row of x has two integer sums,
 * of the high and of the low digits. Signed weights are stored as w + 128. Of centred
 * types -centre * sum(qa) is added to the sum, which is exact. */
#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/dense/round_avx512.h"
#include "backend/cpu/dense/unpack_avx512.h"

enum {
    TILE = 8,
    FEW = 4 * TILE, /* beyond, panels are faster for most types */
    AHEAD = 3072    /* bytes that super-blocks are fetched before they are read */
};

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

/* One repacked group by R rows, weights unpacked in registers: for R <= TILE. Of one
 * row memory is the bound, of many multiplication. A group's blocks follow each other,
 * as groups do: the hardware fetches them ahead, and of blocks of their own better without
 * being told to. Super-blocks, whose heads break the pattern, are asked for; addresses past
 * the end do no harm. */
STI_INLINE void gemv(const sti_dtype type, const int R, const uint8_t *w,
                     const uint8_t *a, int nb, float *c)
{
    const sti_packing f = sti_packing_of(type);
    const int steps = 8 / f.subs, centre = centre_of(f);
    __m512 acc[TILE];
    STI_UNROLL for (int i = 0; i < R; i++) acc[i] = _mm512_setzero_ps();
    for (int b = 0; b < nb; b += f.unit) {
        const size_t whole = sti_packed_bytes(f, (size_t)f.unit);
        for (size_t i = 0; f.unit > 1 && i < whole; i += 64)
            _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
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

STI_INLINE void unpack(const sti_dtype type, const uint8_t *group, int b, int nb,
                       const sti_panel *p, int g)
{
    fill_bytes(type, false, group, b, nb, p, g);
}

/* 16 bytes, four consecutive ones to each of 4 places R words apart. */
STI_INLINE void put_bytes(__m128i q, uint32_t *out, int R)
{
    uint32_t w[4];
    _mm_storeu_si128((__m128i *)w, q);
    STI_UNROLL for (int k = 0; k < 4; k++) out[k * R] = w[k];
}

static void quantize(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_ACT_BYTES * R) {
            const rounded r = round_block(row);
            uint32_t *out = (uint32_t *)a + i;
            STI_UNROLL for (int h = 0; h < 2; h++)
            {
                __m128i hi, lo;
                digits_of(r.n[h], &hi, &lo);
                put_bytes(hi, out + 4 * h * R, R);
                put_bytes(lo, out + (8 + 4 * h) * R, R);
            }
            float *f = (float *)a + i;
            f[STI_ACT_D * R] = r.d;
            f[STI_ACT_S * R] = r.d * (float)(r.sum[0] + r.sum[1]);
            int32_t *n32 = (int32_t *)a + i;
            n32[STI_ACT_SUM * R] = r.sum[0] + r.sum[1];
            n32[STI_ACT_HALF * R] = r.sum[0];
            n32[(STI_ACT_HALF + 1) * R] = r.sum[1];
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
        case 6: gemv(STI_##type, 6, w, a, nb, c); break;                               \
        case 7: gemv(STI_##type, 7, w, a, nb, c); break;                               \
        default: gemv(STI_##type, 8, w, a, nb, c); break;                              \
        }                                                                              \
    }
STI_QUANT_TYPES(GEMV)

#include "backend/cpu/dense/quant_types_code.h"

#define FEW_ROWS                                                                       \
    .tile = TILE, .groups = 2, .s8_flip = true, .quantize = quantize,                  \
    .gemv = gemv_any, .unpack = unpack_any

const sti_quant_kernels sti_cpu_quant_avx512 = {
    FEW_ROWS,
    .few = FEW,
    .batch_tile = STI_PAIR_ROWS,
    .batch_bytes = STI_PAIR_BYTES,
    .quantize_batch = sti_cpu_quantize_pairs,
    .fill = sti_cpu_fill_pairs,
    .product = sti_cpu_product_pairs,
};

const sti_quant_kernels sti_cpu_quant_amx = {
    FEW_ROWS,
    .few = TILE,
    .batch_tile = STI_AMX_ROWS,
    .batch_bytes = STI_AMX_BYTES,
    .quantize_batch = sti_cpu_quantize_tiles,
    .fill = sti_cpu_fill_tiles,
    .begin = sti_cpu_begin_tiles,
    .product = sti_cpu_product_tiles,
    .end = sti_cpu_end_tiles,
};
