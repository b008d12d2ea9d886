/* lora_gemm.h - launchers of products with matrices of low rank (lora_gemm.cu). */
#ifndef STI_BACKEND_CUDA_DENSE_LORA_GEMM_H
#define STI_BACKEND_CUDA_DENSE_LORA_GEMM_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y_i[M, N_i] = scale x[M, K] W_i^T in half, W in float [N_i, K]. */
typedef struct sti_cuda_lora_down_args {
    const float *x;
    int M, K, n;
    const float *w[STI_MATMUL_MAX];
    float *y[STI_MATMUL_MAX];
    int N[STI_MATMUL_MAX];
    float scale;
    uint16_t *half; /* [M, ld] or NULL: x, then half_scale y_0, y_1, .. as halves */
    int ld;         /* K + sum N */
    float half_scale;
} sti_cuda_lora_down_args;

/* Whether it can be computed here: eight columns or a few of eight. */
bool sti_cuda_lora_down_fits(const sti_cuda_lora_down_args *);
still_status sti_cuda_lora_down(sti_dev *, const sti_cuda_lora_down_args *,
                                still_error *);

/* y[M, N] = [y +] x[M, R] W[N, R]^T in float. */
typedef struct sti_cuda_lora_up_args {
    const float *x, *w;
    int M, N, R;
    bool accumulate;
    float *y;
} sti_cuda_lora_up_args;

bool sti_cuda_lora_up_fits(const sti_cuda_lora_up_args *);
still_status sti_cuda_lora_up(sti_dev *, const sti_cuda_lora_up_args *, still_error *);

/* Weights and what is added to them, as halves [sum N, ld], one below the other:
 * W_i[N_i, K], then zeros but for gain B_i[N_i, R_i] from column at_i on. K is a
 * multiple of 4, at_i and R_i are even. */
typedef struct sti_cuda_concat_lora_args {
    int n, K, ld;
    const uint16_t *half[STI_MATMUL_MAX]; /* W_i; NULL: in float, w_i */
    const void *w[STI_MATMUL_MAX];
    const float *b[STI_MATMUL_MAX];
    int N[STI_MATMUL_MAX], R[STI_MATMUL_MAX], at[STI_MATMUL_MAX];
    float gain;
    uint16_t *y;
} sti_cuda_concat_lora_args;
still_status sti_cuda_concat_lora(sti_dev *, const sti_cuda_concat_lora_args *,
                                  still_error *);

#ifdef __cplusplus
}
#endif

#endif
