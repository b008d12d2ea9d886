/* matmul.h - how the matrix product is cut, and the kernels an instruction set brings.
 *
 * Quantized weights come in groups of 16 rows; a SIMD lane of 32 bits is one row and
 * holds four consecutive k. Nothing is ever summed across lanes, and one layout serves
 * a single token (weights stream from memory once) and a batch (weights are unpacked
 * into an L1-sized panel, then swept by tiles of activation rows).
 *
 * Activations are 15-bit integers in blocks of 32 with a float scale, held as two int8
 * digits, qa = 128 hi + lo, because the multipliers take bytes. One digit alone (8
 * bits) would be twice as fast in prefill, but it moves log-probabilities of a small
 * model by 0.05 on average; two digits leave the rounding of the weights as the only
 * error that shows. With a = da * qa and w = d * qw + m, element (token, row) is, over
 * the blocks in order,
 *
 *     acc = fma(d * da, (float)sum_k(qw qa), acc)     integer sum, exact
 *     acc = fma(m, da * sum_k(qa), acc)               types with a minimum only
 *
 * The integer sum is 128 sum(qw hi) + sum(qw lo), both digits through one accumulator.
 * Types whose values are centred (Q4_0: q - 8) have the centre taken off inside the
 * integer sum. Rounding follows the element's own k alone, so neither the batch nor
 * the number of threads changes a bit. */
#ifndef STI_BACKEND_CPU_DENSE_MATMUL_H
#define STI_BACKEND_CPU_DENSE_MATMUL_H

#include <float.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

enum {
    STI_GROUP = 16,    /* rows of a group */
    STI_BLOCK_K = 32,  /* k of a block */
    STI_SUPER_K = 256, /* k of a block of the K types */
    STI_PANEL_K = 768, /* k of a panel: 2 groups of 768 bytes a row fill most of L1 */
    STI_TILE_MAX = 8,  /* rows of x in a tile, at most */
    STI_PANEL_GROUPS = 2, /* groups in a panel, at most */
    STI_OWN_ROWS = 2,     /* so few rows every worker norms and quantizes for itself */
};

/* sti_weight.layout. The first four are repacked copies, see weight.c. */
typedef enum sti_layout {
    STI_L_U4,     /* Q4_0 */
    STI_L_U4_MIN, /* Q4_1 */
    STI_L_S8,     /* Q8_0, Q5_0 */
    STI_L_S8_MIN, /* Q5_1 */
    STI_L_K,      /* K types, rows as stored */
    STI_L_FLOAT,  /* F32, F16, BF16, rows as stored */
} sti_layout;

/* What the bytes of a panel are; the first four as the layouts above. */
typedef enum sti_panel_kind {
    STI_P_U4,     /* 0..15, centre 8 */
    STI_P_U4_MIN, /* 0..15 */
    STI_P_S8,     /* signed (stored + 128 where s8_flip) */
    STI_P_S8_MIN,
    STI_P_U5_MIN, /* 0..31 */
    STI_P_U6_SUB, /* 0..63, a scale and a minimum for every 16 k */
} sti_panel_kind;

static inline bool sti_panel_signed(sti_panel_kind kind)
{
    return kind == STI_P_S8 || kind == STI_P_S8_MIN;
}
static inline bool sti_panel_has_min(sti_panel_kind kind)
{
    return kind != STI_P_U4 && kind != STI_P_S8;
}

/* Bytes of one block of one group: quants, 16 f16 scales, 16 f16 minima. */
static inline size_t sti_packed_block(sti_layout l)
{
    return (l == STI_L_U4 || l == STI_L_U4_MIN ? 256u : 512u) + 32u +
           (l == STI_L_U4_MIN || l == STI_L_S8_MIN ? 32u : 0u);
}

/* A tile of R quantized activation rows, as records of one block of 32 k:
 *   int8 hi[8][R][4], int8 lo[8][R][4],
 *   float d[R], float s[R], float s0[R], float s1[R], int32 nsum[R]
 * With q = 128 hi + lo: s = d * sum(q), s0 and s1 the same for each half of the block,
 * nsum = -sum(q). */
enum {
    STI_ACT_BYTES = 84, /* a row and block */
    STI_ACT_DIGIT = 7,  /* bits of lo */
    STI_ACT_MAX = 127 << STI_ACT_DIGIT,
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

/* ng groups of unpacked weights side by side, over nb blocks of k. Sub-blocks (`sub`
 * of them) are blocks, or their halves for STI_P_U6_SUB. */
typedef struct sti_panel {
    sti_panel_kind kind;
    int ng;
    uint8_t *q;   /* [8 nb][ng][16 rows][4 k] */
    float *d, *m; /* [sub][ng][16 rows] */
} sti_panel;

/* Quantized products, written by hand for each instruction set
 * (matmul_quant_<set>.c). */
typedef struct sti_quant_kernels {
    int tile;     /* rows of x in a tile */
    int groups;   /* groups in a panel */
    bool s8_flip; /* 8-bit weights are stored as w + 128 */

    /* R rows of x (ldx apart) into one tile of nb records. */
    void (*quantize)(const float *x, size_t ldx, int R, int nb, uint8_t *act);
    /* c[R][16] = products of one repacked group over all nb blocks. */
    void (*gemv)(sti_layout l, const uint8_t *w, const uint8_t *act, int R, int nb,
                 float *c);
    /* nb blocks of one repacked group into place g of a panel. */
    void (*unpack)(const uint8_t *w, int nb, const sti_panel *p, int g);
    /* c[R][ng * 16] += products of a panel over nb blocks. */
    void (*product)(const sti_panel *p, const uint8_t *act, int R, int nb, float *c);
} sti_quant_kernels;

extern const sti_quant_kernels sti_cpu_quant_portable;
#if STI_CPU_X86
extern const sti_quant_kernels sti_cpu_quant_avx2, sti_cpu_quant_avx512;
/* Shared by avx2 and avx512. */
void sti_cpu_quantize_avx2(const float *x, size_t ldx, int R, int nb, uint8_t *act);
#endif

/* What is written once for all instruction sets (matmul_float_code.h,
 * matmul_ktypes_code.h). */
typedef struct sti_dense_kernels {
    /* ns super-blocks of 16 rows (stride bytes apart; n of them exist) into place g. */
    void (*unpack_k)(sti_dtype t, const uint8_t *w, size_t stride, int n, int ns,
                     const sti_panel *p, int g);
    /* c[R][16]: n <= 16 float rows of w, stride bytes apart, times R rows of x. */
    void (*product_float)(sti_dtype t, const void *w, size_t stride, int n,
                          const float *x, size_t ldx, int R, int64_t K, float *c);
    /* y[R][ldy] = [y +] c[R][ldc] [+ bias], `cols` of each row. */
    void (*store)(float *y, int64_t ldy, const float *c, int ldc, int R, int cols,
                  const float *bias, bool accumulate);
} sti_dense_kernels;

#endif
