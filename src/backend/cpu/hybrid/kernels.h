/* kernels.h - the small kernels of the hybrid operator beside those of attn_tile.h:
 * feature maps, products with the linear state, and compensated sums.
 *
 * As in attn_tile.h, nothing depends on which rows share a call, so a token decoded
 * alone and one in the middle of a prompt get the same bits. */
#ifndef STI_BACKEND_CPU_HYBRID_KERNELS_H
#define STI_BACKEND_CPU_HYBRID_KERNELS_H

#include "backend/cpu/cpu.h"

/* How features are made of u = x W (STILL eq. 6). */
typedef struct sti_hybrid_features_args {
    sti_map_kind kind;
    int F;
    float scale; /* u is multiplied by this: |x| / |u| where the norm is kept */
    float bias;  /* then added (relu) */
    float floor;
} sti_hybrid_features_args;

typedef struct sti_hybrid_kernels {
    /* y[n] = x[n], from half or float. */
    void (*widen)(float *y, const void *x, bool half, int n);
    float (*dot)(const float *a, const float *b, int n);
    /* y[n,N] = x[n,K] B[K,N], rows ldx, ldb, ldy apart. Each y is one chain of
     * multiply-adds over K in order, whatever n and N are. */
    void (*product)(int n, int K, int N, const float *x, int ldx, const float *B,
                    int ldb, float *y, int ldy);
    /* y[n,N] = x[K,n]^T B[K,N], else as product; ldx 0: the same row of x K times. */
    void (*product_t)(int n, int K, int N, const float *x, int ldx, const float *B,
                      int ldb, float *y, int ldy);
    /* STILL eq. 6, second line: u [F] -> phi [P]. u has space for F rounded up to 16,
     * and is overwritten. */
    void (*features)(const sti_hybrid_features_args *a, float *u, float *phi);
    /* m = max, l = sum of e^(s_j - m), over lo <= j < hi. */
    void (*lse)(const float *s, int lo, int hi, float *m, float *l);
    /* sum_j += e^(s_j - m) / l [n] */
    void (*receive)(float *sum, const float *s, float m, float l, int n);
    /* sum += a x [n]; comp, if there is one, keeps what rounding took off (Kahan). */
    void (*add)(float *sum, float *comp, float a, const float *x, int n);
    /* STILL eq. 7, 10: y = (keep o + a lin g) / den [n]; g = 2 sigmoid(gate), 1 where
     * gate is NULL; without a linear term lin is NULL. y may be o. */
    void (*output)(float *y, const float *o, float keep, const float *lin,
                   const float *gate, float a, float den, int n);
} sti_hybrid_kernels;

#endif
