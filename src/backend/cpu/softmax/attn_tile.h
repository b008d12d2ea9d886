/* attn_tile.h - the parts softmax attention is made of, for any operator that needs
 * exact attention over some keys: logits of a block, its softmax, the weighted sum of
 * values, and the running log-sum-exp that joins blocks.
 *
 * Keys are cut at positions that are multiples of STI_ATTN_BLOCK. For a query row and a
 * block with visible keys [lo, hi):
 *   s_j = sum_d q_d k_jd, d in order             qk_logits
 *   m = max s_j,  p_j = e^(s_j - m),  l = sum    softmax
 *   y = sum_j p_j v_j, j in order                pv_product
 * and blocks are joined in order of position:
 *   m' = max(M, m), keep = e^(M - m'), add = e^(m - m')
 *   M = m',  L = keep L + add l,  O = keep O + add y      merge_lse, pv_product or join
 * Nothing here depends on which rows share a tile, so one row decoded alone, a prompt
 * in one piece and a prompt in many give the same bits.
 *
 * A tile is rows of queries that share one kv head, against one block at a time. Keys
 * come out of the cache once per tile, as float and transposed: a vector then holds one
 * dimension of many keys, and no sum crosses lanes.
 *
 * An operator whose keys live long may keep them transposed in its cache: panels of
 * STI_ATTN_PANEL keys, one dimension of all of them after the other. Blocks then start
 * at a panel, and a few rows read the cache itself (qk_logits_panels). */
#ifndef STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_H
#define STI_BACKEND_CPU_SOFTMAX_ATTN_TILE_H

#include "backend/cpu/cpu.h"

enum {
    STI_ATTN_BLOCK = 128, /* keys: q, k, v and logits of a tile stay in L2 */
    STI_ATTN_ROWS = 96,   /* query rows of a tile; a multiple of every register tile */
    STI_ATTN_MAX_D = 256,
    STI_ATTN_PANEL = 16, /* keys of a panel in a cache; the last may have fewer */
    STI_ATTN_STRIP = 64, /* keys that are read at once at most, from a multiple of it */
    /* Row strides, constant so that a register tile needs one pointer, and no power of
     * two so that its rows fall into different cache sets. */
    STI_ATTN_LDQ = STI_ATTN_MAX_D + 16,
    STI_ATTN_LDS = STI_ATTN_BLOCK + 16,
    STI_ATTN_DIGITS = 3, /* of a query, for keys of few bits */
    STI_ATTN_PAD = 32    /* values and outputs are padded to multiples of this */
};

typedef struct sti_attn_tile {
    float *q;          /* [ROWS, LDQ], times 1 / sqrt(D) */
    float *s;          /* [ROWS, LDS], logits, then weights */
    int8_t *digits;    /* [ROWS, digit_bytes]: q for keys of few bits, or NULL */
    float *k;          /* [BLOCK / W, D, W]: panels of W keys, W = 2 vectors */
    float *v;          /* [D / W, BLOCK, W]: panels of W dimensions */
    float *o;          /* [ROWS, D padded]: O, not yet divided by L */
    float *M, *L;      /* [ROWS] state */
    float *m, *l;      /* [ROWS] of the block */
    float *keep, *add; /* [ROWS] */
} sti_attn_tile;

/* Of a query as digits: they, their sums over groups and a scale. */
static inline size_t sti_attn_digit_bytes(int D)
{
    const size_t groups = sti_salient_groups(D);
    return STI_ATTN_DIGITS * groups * (STI_SALIENT_GROUP + sizeof(int32_t)) +
           sizeof(float);
}

/* Where a kv head's rows lie: token j at row j % capacity. */
typedef struct sti_attn_rows {
    const void *data; /* [capacity, D] */
    sti_dtype type;   /* STI_F16 or STI_F32 */
    int capacity, D;
    /* Quantized (ops/salient.h): keys in panels of words (qk_logits_levels), values in rows.
     * bits 0: not; else data has the low bits, and type is not read. */
    int bits;
    const uint8_t *high;
    const uint16_t *scale;
} sti_attn_rows;

/* Memory that will be read next and is prefetched meanwhile: up to three arrays, `step`
 * bytes of each for every key that is worked on. */
typedef struct sti_attn_ahead {
    const char *at[3];
    size_t step[3];
} sti_attn_ahead;

/* The rows (or panels) from `slot` on. values: else keys, which have half the scales. */
static inline sti_attn_ahead sti_attn_rows_ahead(const sti_attn_rows *r, int slot,
                                                 bool values)
{
    const size_t at = (size_t)slot, D = (size_t)r->D;
    if (r->bits == 0) {
        const size_t row = D * (r->type == STI_F32 ? sizeof(float) : sizeof(uint16_t));
        return (sti_attn_ahead){{(const char *)r->data + at * row}, {row}};
    }
    const size_t low = sti_salient_low(r->bits, r->D),
                 high = sti_salient_high(r->bits, r->D),
                 scales = sti_salient_groups(r->D) * (values ? 2 : 1);
    return (sti_attn_ahead){{(const char *)r->data + at * low,
                             (const char *)(r->scale + at * scales),
                             high ? (const char *)r->high + at * high : NULL},
                            {low, scales * sizeof *r->scale, high}};
}

typedef struct sti_attn_kernels {
    /* Time that a key and value of few bits take in decoding, in percent of those in
     * halves. */
    int levels_cost;

    /* y = x s; y = x / s; y = keep y + add x. n floats. */
    void (*scale)(float *y, const float *x, float s, int n);
    void (*divide)(float *y, const float *x, float s, int n);
    void (*join)(float *y, const float *x, float keep, float add, int n);
    void (*to_f16)(uint16_t *y, const float *x, int n);

    /* Keys, values [lo, hi) of the block that starts at token `start`. */
    void (*load_keys)(const sti_attn_rows *src, int start, int lo, int hi, float *k);
    void (*load_values)(const sti_attn_rows *src, int start, int lo, int hi, float *v);
    /* The same of keys in panels: src->data is [capacity / PANEL, D, PANEL], the keys
     * are inside the capacity, start is a multiple of PANEL. */
    void (*load_panels)(const sti_attn_rows *src, int start, int lo, int hi, float *k);

    /* Rows [row, row + n) of the tile against keys [lo, hi) of the loaded block. */
    void (*qk_logits)(const sti_attn_tile *t, int D, int row, int n, int lo, int hi);
    /* Rows [0, n) against keys in panels (load_panels not needed). `ahead`, here and
     * below, may be NULL; in an operator of floats or halves its first array counts. */
    void (*qk_logits_panels)(const sti_attn_tile *t, const sti_attn_rows *src,
                             int start, int n, int lo, int hi,
                             const sti_attn_ahead *ahead);
    /* Keys of few bits. First the queries [0, n) of the tile become digits; then these
     * are multiplied with keys in panels. The arrays of a panel hold words of four bytes,
     * one of all its keys after the other. Of five bits the low ones are as in
     * ops/salient.h; in the word with the high ones of a group, element 4 k + j has bit k
     * of byte j. The last panel of a list may have fewer keys than 16. */
    void (*round_queries)(const sti_attn_tile *t, int D, int n);
    void (*qk_logits_levels)(const sti_attn_tile *t, const sti_attn_rows *src,
                             int start, int n, int lo, int hi,
                             const sti_attn_ahead *ahead);
    void (*softmax)(const sti_attn_tile *t, int row, int n, int lo, int hi);
    /* o [n, ldo]: y if keep is NULL, else keep o + add y. */
    void (*pv_product)(const sti_attn_tile *t, int D, int row, int n, int lo, int hi,
                       float *o, int ldo, const float *keep, const float *add);
    /* Rows [0, n): y, with values read from the cache (load_values not needed). */
    void (*pv_product_cache)(const sti_attn_tile *t, const sti_attn_rows *src,
                             int start, int n, int lo, int hi, float *o, int ldo,
                             const sti_attn_ahead *ahead);
    /* Adds a block to the log-sum-exp of n rows; keep and add come out. */
    void (*merge_lse)(float *M, float *L, const float *m, const float *l, float *keep,
                      float *add, int n);
} sti_attn_kernels;

#endif
