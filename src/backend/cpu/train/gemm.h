/* gemm.h - the float matrix product of training, C = [C +] scale A B, and the
 * kernels an instruction set brings to it.
 *
 * C [M,P] is cut into tiles of `rows` x `strip` elements whose sums stay in registers
 * over STI_GEMM_DEPTH steps of the inner dimension Q. Both operands are copied first:
 * `rows` rows of A, as deep, which stay in L1 while all strips of B pass; and as deep a
 * window of up to STI_GEMM_WINDOW columns of B, widened to float on the way, which
 * stays in L2 while all rows of A pass:
 *
 *     A as stored [M,Q]   [rows][DEPTH]      copied rows: no two share a cache set
 *     A stored as [Q,M]   [DEPTH][rows]
 *     B                   [strips][DEPTH][strip]
 *
 * An element is, for each DEPTH of Q in order, a chain of fused multiply-adds from
 * zero, then one fma(scale, sum, C). That depends on Q alone: not on the other rows,
 * the columns or the threads. Short chains also round less than one over all of Q. */
#ifndef STI_BACKEND_CPU_TRAIN_GEMM_H
#define STI_BACKEND_CPU_TRAIN_GEMM_H

#include "backend/cpu/dense/matmul.h"

enum {
    STI_GEMM_DEPTH = 256,  /* a multiple of STI_GROUP */
    STI_GEMM_WINDOW = 576, /* 590 KB of float at full depth */
    STI_GEMM_GRAIN = 96,   /* columns are cut here: whole strips, whole blocks of k */
    STI_GEMM_ROWS_MAX = 8,
};

typedef struct sti_gemm_kernels {
    int rows, strip;
    /* C [rows, cols] = [C +] scale A B over depth steps, from copies of A and B.
     * across: A was stored as [Q,M]. */
    void (*sweep)(const float *a, bool across, int depth, const float *b, float *C,
                  int64_t ldc, int rows, int cols, float scale, bool add);
    /* `cols` numbers of a float type into row q of the copy of B, zeros up to the end
     * of the last strip. */
    void (*copy_row)(sti_dtype t, const uint8_t *from, int cols, float *b, int q);
    /* nb blocks of a repacked group, from `first` on, into rows q .. q + n - 1. */
    void (*copy_group)(const sti_quant_kernels *quant, sti_dtype t,
                       const uint8_t *group, int first, int nb, int n, float *b, int q);
} sti_gemm_kernels;

#endif
