/* matmul_tiles_amx.c - quantized products of a batch with AMX, the tile registers of Intel's
 * servers (since Sapphire Rapids).
 *
 * A tile instruction multiplies 16 rows of 64 bytes by 16 columns of as many and adds to 16 x
 * 16 sums of 32 bits. Scales belong to blocks of 32 k (of 16 in half blocks), so a tile has
 * 32 bytes a row here, and its sums leave for float registers after every block: 6 vector
 * instructions a row and group, which with 2 tile instructions a block take 3 cycles for 2.
 * Vectors bound it. Sums of a block are computed while those of the block before it are
 * scaled.
 *
 * Activations are two digits as in matmul_quant_avx512.c, weights signed bytes with the centre
 * taken off: the integer sum is the same, and what follows is, so a bit changes nowhere. */
#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/dense/round_avx512.h"
#include "backend/cpu/dense/unpack_avx512.h"

/* A record of R rows of x and 32 k: int8 hi[R][32], lo[R][32], then floats [fields][R]. */
enum {
    X_D,
    X_S, /* d * sum(q) of the block, of its halves */
    X_FIELDS = 4,
};
_Static_assert(2 * STI_BLOCK_K + 4 * X_FIELDS == STI_AMX_BYTES,
               "matmul.h has the size of a record");

/* Tile registers, whose names gcc's intrinsics make of these numbers. */
#define X_HI 0
#define X_LO 1
#define W 2
#define SUM_HI 3
#define SUM_LO 4
#define N_TILES 5
enum { ROWS = STI_AMX_ROWS, SUMS = ROWS * STI_GROUP };

/* What ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

void sti_cpu_begin_tiles(sti_dtype type, int R)
{
    const int k = STI_BLOCK_K / sti_packing_of(type).subs;
    tile_config c = {.palette = 1};
    for (int i = 0; i < N_TILES; i++) {
        c.row_bytes[i] = (uint16_t)(i == X_HI || i == X_LO ? k : STI_STEP);
        c.rows[i] = (uint8_t)(i == W ? k / 4 : R);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

void sti_cpu_end_tiles(void)
{
    _tile_release();
}

/* sum[2][R][16], of the high and of the low digits: half h of a block of x times w [16 rows]
 * in steps that are `stride` bytes apart. */
STI_INLINE void multiply(const uint8_t *w, size_t stride, const uint8_t *a, int R,
                         int h, int32_t *sum)
{
    const size_t half = (size_t)h * STI_BLOCK_K / 2;
    _tile_loadd(W, w, stride);
    _tile_loadd(X_HI, a + half, STI_BLOCK_K);
    _tile_loadd(X_LO, a + (size_t)R * STI_BLOCK_K + half, STI_BLOCK_K);
    _tile_zero(SUM_HI);
    _tile_zero(SUM_LO);
    _tile_dpbssd(SUM_HI, X_HI, W);
    _tile_dpbssd(SUM_LO, X_LO, W);
    _tile_stored(SUM_HI, sum, STI_STEP);
    _tile_stored(SUM_LO, sum + SUMS, STI_STEP);
}

/* f += the sums of sub-block h by its scales; the formula of matmul.h. */
STI_INLINE void scale(const int subs, const bool min, const int R, const int32_t *sum,
                      const uint8_t *a, int h, const float *d, const float *m,
                      __m512 f[ROWS])
{
    const float *x = (const float *)(a + (size_t)R * 2 * STI_BLOCK_K);
    const float *xs = x + R * (subs == 1 ? X_S : X_S + 1 + h);
    const __m512 wd = _mm512_load_ps(d);
    const __m512 wm = min ? _mm512_load_ps(m) : wd;
    STI_UNROLL for (int i = 0; i < ROWS; i++)
    {
        if (i >= R) break;
        const __m512i hi = _mm512_load_si512(sum + STI_GROUP * i);
        const __m512i lo = _mm512_load_si512(sum + SUMS + STI_GROUP * i);
        const __m512i s = _mm512_add_epi32(_mm512_slli_epi32(hi, STI_ACT_DIGIT), lo);
        f[i] = _mm512_fmadd_ps(_mm512_mul_ps(wd, _mm512_set1_ps(x[X_D * R + i])),
                               _mm512_cvtepi32_ps(s), f[i]);
        if (min) f[i] = _mm512_fmadd_ps(wm, _mm512_set1_ps(xs[i]), f[i]);
    }
}

/* Group g of a panel by R rows. */
STI_INLINE void product(const int subs, const bool min, const int R, const sti_panel *p,
                        int g, const uint8_t *a, int nb, float *c)
{
    const size_t stride = STI_STEP * (size_t)p->ng, group = STI_GROUP * (size_t)p->ng;
    const size_t steps = STI_BLOCK_K / 4 / (size_t)subs,
                 bytes = STI_AMX_BYTES * (size_t)R;
    const uint8_t *w = p->q + STI_STEP * g;
    const float *d = p->d + STI_GROUP * g, *m = p->m + STI_GROUP * g;
    const int n = nb * subs; /* sub-blocks */
    int32_t sum[2][2 * SUMS] __attribute__((aligned(64)));
    __m512 f[ROWS];
    STI_UNROLL for (int i = 0; i < ROWS; i++) f[i] =
        i < R ? _mm512_loadu_ps(c + (size_t)i * group) : _mm512_setzero_ps();
    for (int i = 0; i <= n; i++) {
        const int before = i - 1;
        if (i < n)
            multiply(w + (size_t)i * steps * stride, stride,
                     a + (size_t)(i / subs) * bytes, R, i % subs, sum[i % 2]);
        if (i > 0)
            scale(subs, min, R, sum[before % 2], a + (size_t)(before / subs) * bytes,
                  before % subs, d + (size_t)before * group, m + (size_t)before * group,
                  f);
    }
    STI_UNROLL for (int i = 0; i < ROWS; i++) if (i < R)
        _mm512_storeu_ps(c + (size_t)i * group, f[i]);
}

void sti_cpu_product_tiles(const sti_panel *p, const uint8_t *a, int R, int nb,
                           float *c)
{
    const sti_packing f = sti_packing_of(p->type);
#define KIND(subs, min)                                                                \
    if (R == ROWS)                                                                     \
        product(subs, min, ROWS, p, g, a, nb, c + STI_GROUP * g);                      \
    else                                                                               \
        product(subs, min, R, p, g, a, nb, c + STI_GROUP * g)
    for (int g = 0; g < p->ng; g++) {
        if (f.subs == 1 && f.min) {
            KIND(1, true);
        } else if (f.subs == 1) {
            KIND(1, false);
        } else if (f.min) {
            KIND(2, true);
        } else {
            KIND(2, false);
        }
    }
#undef KIND
}

/* ---- A panel of weights -------------------------------------------------- */

void sti_cpu_fill_tiles(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
#define CASE(type)                                                                     \
    case STI_##type: fill_bytes(STI_##type, true, group, b, nb, p, g); break;
    switch (p->type) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

/* ---- Activations --------------------------------------------------------- */

void sti_cpu_quantize_tiles(const float *x, size_t ldx, int R, int nb, uint8_t *act)
{
    const size_t digits = (size_t)R * STI_BLOCK_K;
    for (int i = 0; i < R; i++) {
        const float *row = x + (size_t)i * ldx;
        uint8_t *a = act;
        for (int b = 0; b < nb; b++, row += 32, a += STI_AMX_BYTES * R) {
            const rounded r = round_block(row);
            float *number = (float *)(a + 2 * digits) + i;
            STI_UNROLL for (int h = 0; h < 2; h++)
            {
                uint8_t *out = a + i * STI_BLOCK_K + 16 * h;
                __m128i hi, lo;
                digits_of(r.n[h], &hi, &lo);
                _mm_storeu_si128((__m128i *)out, hi);
                _mm_storeu_si128((__m128i *)(out + digits), lo);
                number[(X_S + 1 + h) * R] = r.d * (float)r.sum[h];
            }
            number[X_D * R] = r.d;
            number[X_S * R] = r.d * (float)(r.sum[0] + r.sum[1]);
        }
    }
}
