/* kernels.h - launchers of the dense operators, and weights as their kernels read them.
 *
 * A weight [N, K] is kept on the device as one of
 *
 *   float    [N, K]: sources in float, multiplied in float
 *   half     [N, ld], ld = K rounded up to 8, the rest zero
 *   quants   4 or 8 bits a number in tiles of 16 rows by 64 columns, in the order in
 *            which the lanes of a warp want them for mma.m16n8k16 (dequant.cuh), and
 *            apart from them a scale, and a minimum where there is one, per group of 32
 *            or 16 numbers: w = scale q + minimum
 *
 * All block types of files become one of the quant layouts while loading: 2, 3 and 4
 * bits become 4, 5, 6 and 8 bits become 8. Blocks as stored (18, 34, 110, 210 bytes)
 * would allow loads of two bytes only, and ten formats in the hot loop. Scales of K
 * types are products of two stored numbers, rounded to half here, as the weights
 * themselves are on their way to the tensor cores. */
#ifndef STI_BACKEND_CUDA_DENSE_KERNELS_H
#define STI_BACKEND_CUDA_DENSE_KERNELS_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t sti_half; /* the bits of a half: C has no name for one */

typedef enum sti_cuda_kind {
    STI_CUDA_FLOAT,
    STI_CUDA_HALF,
    STI_CUDA_U4,    /* q in 0..15; every group has a minimum */
    STI_CUDA_S8,    /* q in -128..127; no minima */
    STI_CUDA_S8_MIN /* the same with minima */
} sti_cuda_kind;

enum {
    STI_CUDA_TILE = 16,  /* rows of a tile of quants */
    STI_CUDA_CHUNK = 64, /* columns of one */
    STI_CUDA_GEMV_ROWS =
        16, /* rows of x up to which weights are read as they are kept */
    STI_CUDA_GEMV_ROWS_HALF =
        8, /* of weights in half, beyond which gemm.cu is faster */
    STI_CUDA_GEMV_ROWS_FLOAT = 8,
    STI_CUDA_HALF_MOST = 128 << 20 /* bytes of a matrix that is half in scratch */
};

typedef struct sti_cuda_matrix {
    const void *w;        /* float, half or quants */
    const void *scale;    /* of quants */
    const sti_half *half; /* [N, ld] for many rows; NULL: made for each product */
    int N, K, ld;
    int chunks; /* of 64 columns */
    int groups; /* a chunk: 2 or 4 */
    sti_cuda_kind kind;
} sti_cuda_matrix;

/* weight.c */
sti_cuda_matrix sti_cuda_matrix_of(const sti_weight *w);
/* Rows of a matrix of quants that are made half at once, and the scratch that takes; 0
 * for one that need not be. */
int sti_cuda_half_rows(const sti_cuda_matrix *m);
size_t sti_cuda_half_bytes(const sti_cuda_matrix *m);
/* Rows [row0, row0 + n) of a matrix of quants; row0 is a multiple of the tile. */
sti_cuda_matrix sti_cuda_matrix_rows(const sti_cuda_matrix *m, int row0, int n);

/* ---- Weights (dequant.cu) ------------------------------------------------ */

/* Rows [row0, row0 + n) of a matrix, which lie at `raw` as in the file, row_bytes each,
 * to where m keeps them. row0 is a multiple of the tile; the last tile's missing rows
 * become zero. */
still_status sti_cuda_pack(sti_dev *, const sti_cuda_matrix *m, sti_dtype type,
                           const void *raw, size_t row_bytes, int row0, int n,
                           still_error *err);
/* Quants to half [N, ld]. */
still_status sti_cuda_to_half(sti_dev *, const sti_cuda_matrix *m, sti_half *out,
                              still_error *err);
/* y[i] = row id[i] as float [M, K]; ids are on the device. */
still_status sti_cuda_gather(sti_dev *, const sti_cuda_matrix *m, const int32_t *id,
                             int M, float *y, still_error *err);

/* ---- Few rows: gemv (gemv.cu) -------------------------------------------- */

/* y_i[M, N_i] = [y_i +] h W_i^T + bias_i, h = x, or rmsnorm(x), or xh. With yh instead
 * of y: yh[M, N] = silu(h W_0^T + bias_0) * (h W_1^T + bias_1), N = N_0 = N_1. */
typedef struct sti_cuda_gemv_args {
    const float *x;     /* [M, K] */
    const sti_half *xh; /* [M, ld] instead of x: already half */
    const float *norm;  /* [K] or NULL */
    float eps;
    float *keep; /* [M, K] or NULL: where normed rows are to be written as well */
    int M, K, n;
    sti_cuda_matrix w[STI_MATMUL_MAX];
    const float *bias[STI_MATMUL_MAX];
    float *y[STI_MATMUL_MAX];
    bool accumulate;
    sti_half *yh;
} sti_cuda_gemv_args;

/* Whether x of this size can be staged by a block; if not, it must come as xh. */
bool sti_cuda_gemv_fits(int M, int K);
/* M <= STI_CUDA_GEMV_ROWS; matrices of any kind but floats, with yh of one kind. */
still_status sti_cuda_gemv(sti_dev *, const sti_cuda_gemv_args *f, still_error *err);
/* M <= STI_CUDA_GEMV_ROWS_FLOAT; all matrices of floats; neither xh, keep nor yh. */
still_status sti_cuda_gemv_float(sti_dev *, const sti_cuda_gemv_args *f,
                                 still_error *err);

/* ---- Rows by the dozen: gemm_small (gemm.cu) ----------------------------- */

/* The same products for any M where they are small, with weights in half (m.half) and h
 * as xh. fit: whether these are. */
bool sti_cuda_gemm_small_fits(const sti_dev *, const sti_cuda_gemv_args *f);
still_status sti_cuda_gemm_small(sti_dev *, const sti_cuda_gemv_args *f,
                                 still_error *err);

/* ---- Rows (norm_rope.cu) ------------------------------------------------------ */

/* rmsnorm(x) [M, K], x itself where g is NULL, as float into y and as half [M, ld] into
 * yh, ld = K rounded up to 8; either may be NULL, y may be x. */
still_status sti_cuda_norm(sti_dev *, const float *x, const float *g, float eps, int M,
                           int K, float *y, sti_half *yh, still_error *err);
still_status sti_cuda_rope_rows(sti_dev *, const sti_rope_args *a, const int32_t *pos,
                                const float *inv_freq, still_error *err);
/* y = silu(gate) * up over n floats; y may be gate. */
still_status sti_cuda_gated(sti_dev *, sti_activation, const float *gate,
                            const float *up, float *y, size_t n, still_error *err);
/* y += that norm of x; n elements in rows of K times g. */
still_status sti_cuda_norm_add(sti_dev *, const float *x, const float *g, float eps,
                               int M, int K, float *y, still_error *err);
still_status sti_cuda_by_columns(sti_dev *, float *x, const float *g, size_t n, int K,
                                 still_error *err);
/* The same in half over [M, K], K a multiple of 8; biases [K] or NULL; y may be gate.
 */
still_status sti_cuda_gated_half(sti_dev *, const sti_half *gate, const sti_half *up,
                                 const float *gate_bias, const float *up_bias, int M,
                                 int K, sti_half *y, still_error *err);

enum { STI_CUDA_PROB_ROWS = 256 };
typedef struct sti_cuda_prob { /* of one row of logits */
    float logprob;
    int32_t top;
} sti_cuda_prob;
/* M <= STI_CUDA_PROB_ROWS rows of logits; target is in the program's memory, out where
 * kernels can write. */
still_status sti_cuda_probs(sti_dev *, const float *logits, const int32_t *target,
                            int M, int V, sti_cuda_prob *out, still_error *err);

/* Memory of the program that kernels write to (graph.c): what they leave there can be
 * read once the stream has been waited for, and stays until the next answers. */
still_status sti_cuda_answers(sti_dev *, size_t bytes, void **out, still_error *err);

/* ---- Products (cublaslt.c) -------------------------------------------------- */

typedef enum sti_cuda_product {
    STI_CUDA_HALF_TO_FLOAT,
    STI_CUDA_HALF_TO_HALF,
    STI_CUDA_ALL_FLOAT,
    STI_CUDA_TF32, /* floats, rounded to 10 bits on their way into the tensor cores */
    STI_CUDA_BF16, /* bfloat16 to float */
    STI_CUDA_BF16_TO_BF16
} sti_cuda_product;

/* D = scale op(A) op(B) [+ C] + bias by cuBLASLt, in its terms: D and C are m x n,
 * every matrix column after column, ld apart. bias [m] or NULL; not with half results.
 * parts > 1: so many such products, their matrices one after the other. */
typedef struct sti_cuda_multiply_args {
    sti_cuda_product type;
    const void *a, *b;
    const void *c; /* what is added if it accumulates; NULL: D itself */
    void *d;
    int m, n, k, lda, ldb, ldd;
    bool trans_a, trans_b; /* op is the transpose */
    const float *bias;
    float scale;
    bool accumulate;
    int parts; /* 0: 1 */
} sti_cuda_multiply_args;
still_status sti_cuda_multiply(sti_dev *, const sti_cuda_multiply_args *,
                               still_error *err);

/* y[M, N] = [y +] x[M, K] W[N, K]^T + bias, in ours. */
typedef struct sti_cuda_gemm_args {
    sti_cuda_product type;
    const void *x, *w; /* rows of K numbers, ld apart */
    void *y;
    const float *bias; /* [N] or NULL; not with half results */
    int M, N, K, ld;
    int ldy; /* from a row of y to the next; 0: N */
    bool accumulate;
} sti_cuda_gemm_args;
still_status sti_cuda_gemm(sti_dev *, const sti_cuda_gemm_args *, still_error *err);

#ifdef __cplusplus
}
#endif

#endif
