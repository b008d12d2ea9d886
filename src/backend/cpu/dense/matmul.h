/* matmul.h - how the matrix product is cut, and the kernels an instruction set brings.
 *
 * Quantized weights come in groups of 16 rows (packing.h); a SIMD lane of 32 bits is one
 * row and holds four consecutive k. Nothing is ever summed across lanes, and one layout
 * serves a single token (weights stream from memory once) and a batch (weights are
 * unpacked into a small panel, then swept by tiles of activation rows).
 *
 * Activations are 15-bit integers in blocks of 32 with a float scale. 8 bits would be faster
 * in prefill, but they move log-probabilities of a small model by 0.05 on average; 15 leave
 * the rounding of the weights as the only error that shows. They are multiplied as they are
 * (AVX2, and batches with AVX-512), or as two int8 digits, qa = 128 hi + lo, where the
 * multipliers take bytes (few rows with AVX-512). With a = da * qa and w = d * qw + m,
 * element (token, row) is, over the blocks in order (their halves, where these have scales
 * of their own),
 *
 *     acc = fma(d * da, (float)sum_k(qw qa), acc)     integer sum, exact
 *     acc = fma(m, da * sum_k(qa), acc)               types with a minimum only
 *
 * The integer sum of digits is 128 sum(qw hi) + sum(qw lo).
 * Types whose values are centred (Q4_0: q - 8) have the centre taken off inside the
 * integer sum. K types have d = D * scale, rounded to float. Rounding follows the
 * element's own k alone, so neither the batch nor the number of threads changes a bit. */
#ifndef STI_BACKEND_CPU_DENSE_MATMUL_H
#define STI_BACKEND_CPU_DENSE_MATMUL_H

#include <float.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/dense/packing.h"

enum {
    STI_TILE_MAX = 8,     /* rows of x in a tile, at most */
    STI_PANEL_GROUPS = 2, /* groups in a panel, at most */
    STI_QUANT_MAX = 2,    /* bytes of a quant in a panel, at most */
};

/* Quantized weights are; floats stay as they are, in the file or in a copy of another
 * backend's. */
static inline bool sti_is_packed(const sti_weight *w)
{
    return w->type != STI_F32 && w->type != STI_F16 && w->type != STI_BF16;
}

/* Group g of a repacked matrix. */
static inline const uint8_t *sti_group_at(const sti_weight *w, int64_t g)
{
    const size_t nb = (size_t)w->K / STI_BLOCK_K;
    return (const uint8_t *)w->own.p +
           (size_t)g * sti_packed_bytes(sti_packing_of(w->type), nb);
}

/* A tile of R quantized activation rows, as records of one block of 32 k. An instruction
 * set may fill their STI_ACT_BYTES otherwise; as digits they are
 *   int8 hi[8][R][4], int8 lo[8][R][4],
 *   float d[R], float s[R], int32 sum[R], int32 sum0[R], int32 sum1[R]
 * With q = 128 hi + lo: sum = sum(q), sum0 and sum1 those of the block's halves,
 * s = d * sum. */
enum {
    STI_ACT_BYTES = 84, /* a row and block */
    STI_ACT_D = 16,     /* places of the fields, in words of R rows */
    STI_ACT_S = 17,
    STI_ACT_SUM = 18,
    STI_ACT_HALF = 19,
    STI_ACT_DIGIT = 7, /* bits of lo */
    STI_ACT_MAX = 127 << STI_ACT_DIGIT,
    STI_PAIR_BYTES = 92, /* a row and block in matmul_pairs_avx512.c */
    STI_PAIR_ROWS = 6,   /* of a tile there */
    STI_AMX_BYTES = 80,  /* likewise in matmul_tiles_amx.c */
    STI_AMX_ROWS = 16,   /* of a tile there */
};
/* Of rows of K. */
static inline size_t sti_act_bytes(int64_t rows, int64_t K)
{
    return (size_t)rows * (size_t)(K / STI_BLOCK_K) * STI_ACT_BYTES;
}

/* The scale of a block whose largest magnitude is `top`, and what its numbers are
 * multiplied by before they are rounded. A block with an infinity or a NaN has the scale
 * NaN and quants of 0: every product with it is NaN, and nothing is converted that does
 * not fit an integer. */
static inline float sti_act_scale(float top, float *inv)
{
    *inv = 0;
    if (!(top <= FLT_MAX)) return NAN;
    if (top > 1e-30f) *inv = STI_ACT_MAX / top;
    return top / STI_ACT_MAX;
}

/* The digits of q. |lo| <= 64, so hi fits a byte for |q| <= STI_ACT_MAX. */
static inline int sti_act_hi(int q)
{
    return (q + (1 << (STI_ACT_DIGIT - 1))) >> STI_ACT_DIGIT;
}

/* ng groups of unpacked weights side by side, over nb blocks of k. What `unpack` leaves
 * has bytes, q [8 nb][ng][16 rows][4 k]; what `fill` leaves only `product` reads. */
typedef struct sti_panel {
    sti_dtype type;
    int ng;
    bool pairs;   /* products two at a time, see matmul_pairs_avx512.c */
    uint8_t *q;   /* at most STI_QUANT_MAX bytes a quant */
    float *d, *m; /* [subs nb][ng][16 rows] */
    int32_t *off; /* likewise, see matmul_pairs_avx512.c */
} sti_panel;

/* Quantized products, written by hand for each instruction set
 * (matmul_quant_<set>.c). */
typedef struct sti_quant_kernels {
    int tile; /* rows of x that gemv takes */
    int few;  /* rows that gemv multiplies, a tile after the other; more are a batch */
    int groups;   /* groups in a panel */
    bool s8_flip; /* 8-bit weights are stored as w + 128 */

    /* R rows of x (ldx apart) into one tile of nb records. */
    void (*quantize)(const float *x, size_t ldx, int R, int nb, uint8_t *act);
    /* c[R][16] = products of one repacked group over all nb blocks. */
    void (*gemv)(sti_dtype t, const uint8_t *group, const uint8_t *act, int R, int nb,
                 float *c);
    /* Blocks [b, b + nb) of a repacked group into place g of a panel, as bytes. */
    void (*unpack)(const uint8_t *group, int b, int nb, const sti_panel *p, int g);

    /* Batches: activations and panels as `product` reads them. */
    int batch_tile;  /* rows of x in a tile */
    int batch_bytes; /* of a row and block of activations */
    void (*quantize_batch)(const float *x, size_t ldx, int R, int nb, uint8_t *act);
    void (*fill)(const uint8_t *group, int b, int nb, const sti_panel *p, int g);
    /* c[R][ng * 16] += products of a panel over nb blocks. Where there is `begin`, a thread
     * calls it before products of another type or R than the last ones, and `end` after
     * the last: they set up registers. */
    void (*begin)(sti_dtype t, int R);
    void (*product)(const sti_panel *p, const uint8_t *act, int R, int nb, float *c);
    void (*end)(void);
} sti_quant_kernels;

extern const sti_quant_kernels sti_cpu_quant_portable;
#if STI_CPU_X86
extern const sti_quant_kernels sti_cpu_quant_avx2, sti_cpu_quant_avx512,
    sti_cpu_quant_amx;
/* Batches with avx512, and with amx. */
void sti_cpu_quantize_pairs(const float *x, size_t ldx, int R, int nb, uint8_t *act);
void sti_cpu_fill_pairs(const uint8_t *group, int b, int nb, const sti_panel *p, int g);
void sti_cpu_product_pairs(const sti_panel *p, const uint8_t *act, int R, int nb,
                           float *c);
void sti_cpu_quantize_tiles(const float *x, size_t ldx, int R, int nb, uint8_t *act);
void sti_cpu_fill_tiles(const uint8_t *group, int b, int nb, const sti_panel *p, int g);
void sti_cpu_begin_tiles(sti_dtype t, int R);
void sti_cpu_product_tiles(const sti_panel *p, const uint8_t *act, int R, int nb,
                           float *c);
void sti_cpu_end_tiles(void);
#endif

/* What is written once for all instruction sets (matmul_float_code.h, pack_code.h). */
typedef struct sti_dense_kernels {
    /* nb blocks of n <= 16 rows of a file (stride bytes apart) into a group; flip:
     * 8-bit weights as w + 128. */
    void (*pack)(sti_dtype t, const uint8_t *rows, size_t stride, int n, size_t nb,
                 bool flip, uint8_t *group);
    /* c[R][16]: n <= 16 float rows of w, stride bytes apart, times R rows of x. */
    void (*product_float)(sti_dtype t, const void *w, size_t stride, int n,
                          const float *x, size_t ldx, int R, int64_t K, float *c);
    /* y[R][ldy] = [y +] c[R][ldc] [+ bias], `cols` of each row. */
    void (*store)(float *y, int64_t ldy, const float *c, int ldc, int R, int cols,
                  const float *bias, bool accumulate);
} sti_dense_kernels;

#endif
