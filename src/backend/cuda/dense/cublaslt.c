/* cublaslt.c - products by cuBLASLt.
 *
 * Row-major y[M, N] = x[M, K] W[N, K]^T is column-major D(N x M) = op_T(W)(N x K)
 * x(K x M): each matrix is handed over as it lies. What cuBLASLt chooses for a shape is
 * kept, so that asking (some 50 us) happens once; M follows the lengths of prompts, so
 * the least recently used choice gives way. Sums are float32 throughout: reductions
 * over parts of K in the type of the result are excluded. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/dense/kernels.h"

enum { PLANS = 128, ALIGN_MAX = 256 };

typedef struct plan_key { /* ints only: compared as bytes */
    int type, m, n, k, lda, ldb, ldd, trans, bias, parts, align;
} plan_key;

typedef struct plan {
    plan_key key;
    uint64_t used; /* 0: free */
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} plan;

struct sti_cublaslt_plans {
    uint64_t clock;
    plan plan[PLANS];
};

void sti_cublaslt_free(sti_dev *dev)
{
    free(dev->plans);
    dev->plans = NULL;
}

/* The power of two that p is a multiple of, at most ALIGN_MAX. */
static int alignment(const void *p)
{
    uintptr_t bits = (uintptr_t)p | ALIGN_MAX;
    return (int)(bits & -bits);
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* op of it is rows x columns; `parts` of them follow each other. */
static cublasStatus_t lay_out(cublasLtMatrixLayoutOpaque_t *out, cudaDataType type,
                              int rows, int columns, bool trans, int ld, int parts)
{
    const uint64_t high = (uint64_t)(trans ? columns : rows),
                   wide = (uint64_t)(trans ? rows : columns);
    const int32_t count = parts;
    const int64_t step = (int64_t)ld * (int64_t)wide;
    cublasStatus_t e = cublasLtMatrixLayoutInit(out, type, high, wide, ld);
    if (e == CUBLAS_STATUS_SUCCESS && parts > 1)
        e = cublasLtMatrixLayoutSetAttribute(out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                             &count, sizeof count);
    if (e == CUBLAS_STATUS_SUCCESS && parts > 1)
        e = cublasLtMatrixLayoutSetAttribute(
            out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    return e;
}

static cublasStatus_t set_op(plan *p, const sti_cuda_multiply_args *a)
{
    const cublasOperation_t op_a = a->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                            op_b = a->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t bias = CUBLASLT_EPILOGUE_BIAS;
    const cublasComputeType_t how =
        a->type == STI_CUDA_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasStatus_t e = cublasLtMatmulDescInit(&p->op, how, CUDA_R_32F);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_TRANSA, &op_a,
                                           sizeof op_a);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b,
                                           sizeof op_b);
    if (e == CUBLAS_STATUS_SUCCESS && a->bias)
        e = cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias,
                                           sizeof bias);
    return e;
}

/* A description that is freed with its plan: none of these allocate. */
static cublasStatus_t describe_product(plan *p, const sti_cuda_multiply_args *a)
{
    static const cudaDataType in_type[] = {
        [STI_CUDA_HALF_TO_FLOAT] = CUDA_R_16F, [STI_CUDA_HALF_TO_HALF] = CUDA_R_16F,
        [STI_CUDA_ALL_FLOAT] = CUDA_R_32F,     [STI_CUDA_TF32] = CUDA_R_32F,
        [STI_CUDA_BF16] = CUDA_R_16BF,         [STI_CUDA_BF16_TO_BF16] = CUDA_R_16BF};
    const cudaDataType in = in_type[a->type];
    const cudaDataType out = a->type == STI_CUDA_HALF_TO_HALF   ? CUDA_R_16F
                             : a->type == STI_CUDA_BF16_TO_BF16 ? CUDA_R_16BF
                                                                : CUDA_R_32F;
    cublasStatus_t e = set_op(p, a);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = lay_out(&p->a, in, a->m, a->k, a->trans_a, a->lda, a->parts);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = lay_out(&p->b, in, a->k, a->n, a->trans_b, a->ldb, a->parts);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = lay_out(&p->d, out, a->m, a->n, false, a->ldd, a->parts);
    return e;
}

static cublasStatus_t set_bias(plan *p, const float *bias)
{
    if (!bias) return CUBLAS_STATUS_SUCCESS;
    return cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                          &bias, sizeof bias);
}

static cublasStatus_t prefer(const sti_dev *dev, int align,
                             cublasLtMatmulPreferenceOpaque_t *pref)
{
    static const cublasLtMatmulPreferenceAttributes_t side[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t workspace = dev->lt_workspace.bytes;
    const uint32_t bytes = (uint32_t)align,
                   sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t e = cublasLtMatmulPreferenceInit(pref);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulPreferenceSetAttribute(
            pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
            sizeof workspace);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulPreferenceSetAttribute(
            pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums);
    for (size_t i = 0; i < sizeof side / sizeof *side && e == CUBLAS_STATUS_SUCCESS;
         i++)
        e = cublasLtMatmulPreferenceSetAttribute(pref, side[i], &bytes, sizeof bytes);
    return e;
}

static still_status choose(sti_dev *dev, plan *p, const sti_cuda_multiply_args *a,
                           int align, still_error *err)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    STI_TRY(sti_cublas_check(describe_product(p, a), "describing a product", err));
    STI_TRY(sti_cublas_check(set_bias(p, a->bias), "describing a bias", err));
    STI_TRY(sti_cublas_check(prefer(dev, align, &pref), "describing a product", err));
    cublasStatus_t e = cublasLtMatmulAlgoGetHeuristic(
        dev->lt, &p->op, &p->a, &p->b, &p->d, &p->d, &pref, 1, &best, &found);
    if (e != CUBLAS_STATUS_SUCCESS || found < 1)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda: cuBLASLt has no product of %d x %d by %d x %d of type "
                        "%d%s: %s",
                        a->m, a->k, a->k, a->n, (int)a->type,
                        a->bias ? " with bias" : "", cublasLtGetStatusString(e));
    p->algo = best.algo;
    return STILL_OK;
}

/* The plan of this shape, made if there is none yet. */
static still_status find(sti_dev *dev, const sti_cuda_multiply_args *a, plan **out,
                         still_error *err)
{
    if (!dev->plans) {
        dev->plans = sti_alloc(1, sizeof *dev->plans);
        if (!dev->plans) return sti_fail_memory(err, "cuda plans", sizeof *dev->plans);
    }
    struct sti_cublaslt_plans *all = dev->plans;
    const void *c = a->c ? a->c : a->d;
    const plan_key key = {.type = (int)a->type,
                          .m = a->m,
                          .n = a->n,
                          .k = a->k,
                          .lda = a->lda,
                          .ldb = a->ldb,
                          .ldd = a->ldd,
                          .trans = a->trans_a + 2 * a->trans_b,
                          .bias = a->bias != NULL,
                          .parts = a->parts,
                          .align = least(least(alignment(a->a), alignment(a->b)),
                                         least(alignment(c), alignment(a->d)))};
    plan *oldest = &all->plan[0];
    for (plan *p = all->plan; p < all->plan + PLANS; p++) {
        if (p->used > 0 && memcmp(&p->key, &key, sizeof key) == 0) {
            p->used = ++all->clock;
            *out = p;
            return STILL_OK;
        }
        if (p->used < oldest->used) oldest = p;
    }
    *oldest = (plan){.key = key};
    STI_TRY(choose(dev, oldest, a, key.align, err));
    oldest->used = ++all->clock;
    *out = oldest;
    return STILL_OK;
}

still_status sti_cuda_multiply(sti_dev *dev, const sti_cuda_multiply_args *a,
                               still_error *err)
{
    const float beta = a->accumulate ? 1 : 0;
    plan *p;
    STI_TRY(find(dev, a, &p, err));
    STI_TRY(sti_cublas_check(set_bias(p, a->bias), "setting a bias", err));
    return sti_cublas_check(
        cublasLtMatmul(dev->lt, &p->op, &a->scale, a->a, &p->a, a->b, &p->b, &beta,
                       a->c ? a->c : a->d, &p->d, a->d, &p->d, &p->algo,
                       dev->lt_workspace.p, dev->lt_workspace.bytes, dev->stream),
        "a product", err);
}

still_status sti_cuda_gemm(sti_dev *dev, const sti_cuda_gemm_args *a, still_error *err)
{
    return sti_cuda_multiply(dev,
                             &(sti_cuda_multiply_args){.type = a->type,
                                                       .a = a->w,
                                                       .b = a->x,
                                                       .d = a->y,
                                                       .m = a->N,
                                                       .n = a->M,
                                                       .k = a->K,
                                                       .lda = a->ld,
                                                       .ldb = a->ld,
                                                       .ldd = a->ldy ? a->ldy : a->N,
                                                       .trans_a = true,
                                                       .bias = a->bias,
                                                       .scale = 1,
                                                       .accumulate = a->accumulate},
                             err);
}
