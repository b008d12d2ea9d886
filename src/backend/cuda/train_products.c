/* train_products.c - products of training by cuBLASLt that plans.c has no use for:
 * bfloat16 numbers with float32 sums, and several products of one shape at once, which
 * is how a sum over very many rows is cut so that every SM has a part of it. What
 * cuBLASLt chooses for a shape is kept: a run multiplies a dozen shapes. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/train_kernels.h"

enum { PLANS = 64, ALIGN_MAX = 256 };

typedef struct plan_key { /* ints only: compared as bytes */
    int bf16, m, n, k, lda, ldb, ldd, turn_b, parts, align;
} plan_key;

typedef struct plan {
    plan_key key;
    uint64_t used; /* 0: free */
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} plan;

struct sti_train_plans {
    uint64_t clock;
    plan plan[PLANS];
};

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

/* `parts` matrices of rows x columns, each column ld apart, one after the other. */
static cublasStatus_t lay_out(cublasLtMatrixLayoutOpaque_t *out, cudaDataType type,
                              int rows, int columns, int ld, int parts)
{
    const int32_t count = parts;
    const int64_t step = (int64_t)ld * columns;
    cublasStatus_t e =
        cublasLtMatrixLayoutInit(out, type, (uint64_t)rows, (uint64_t)columns, ld);
    if (e == CUBLAS_STATUS_SUCCESS && parts > 1)
        e = cublasLtMatrixLayoutSetAttribute(out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                             &count, sizeof count);
    if (e == CUBLAS_STATUS_SUCCESS && parts > 1)
        e = cublasLtMatrixLayoutSetAttribute(
            out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    return e;
}

static cublasStatus_t describe(plan *p, const sti_train_product *a)
{
    const cudaDataType in = a->bf16 ? CUDA_R_16BF : CUDA_R_32F;
    const cublasOperation_t op_b = a->turn_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t e = cublasLtMatmulDescInit(
        &p->op, a->bf16 ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_FAST_TF32,
        CUDA_R_32F);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b,
                                           sizeof op_b);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = lay_out(&p->a, in, a->m, a->k, a->lda, a->parts);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = a->turn_b ? lay_out(&p->b, in, a->n, a->k, a->ldb, a->parts)
                      : lay_out(&p->b, in, a->k, a->n, a->ldb, a->parts);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = lay_out(&p->d, CUDA_R_32F, a->m, a->n, a->ldd, a->parts);
    return e;
}

/* Sums are float32 throughout, as in plans.c. */
static cublasStatus_t prefer(const sti_dev *dev, int align,
                             cublasLtMatmulPreferenceOpaque_t *pref)
{
    static const cublasLtMatmulPreferenceAttributes_t side[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t room = dev->lt_room.bytes;
    const uint32_t bytes = (uint32_t)align,
                   sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t e = cublasLtMatmulPreferenceInit(pref);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulPreferenceSetAttribute(
            pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    if (e == CUBLAS_STATUS_SUCCESS)
        e = cublasLtMatmulPreferenceSetAttribute(
            pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums);
    for (size_t i = 0; i < sizeof side / sizeof *side && e == CUBLAS_STATUS_SUCCESS;
         i++)
        e = cublasLtMatmulPreferenceSetAttribute(pref, side[i], &bytes, sizeof bytes);
    return e;
}

static still_status choose(sti_dev *dev, plan *p, const sti_train_product *a, int align,
                           still_error *err)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    STI_TRY(sti_cublas_check(describe(p, a), "describing a product", err));
    STI_TRY(sti_cublas_check(prefer(dev, align, &pref), "describing a product", err));
    cublasStatus_t e = cublasLtMatmulAlgoGetHeuristic(
        dev->lt, &p->op, &p->a, &p->b, &p->d, &p->d, &pref, 1, &best, &found);
    if (e != CUBLAS_STATUS_SUCCESS || found < 1)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda: cuBLASLt has no %d products of %d x %d by %d x %d in "
                        "%s: %s",
                        a->parts, a->m, a->k, a->k, a->n, a->bf16 ? "bf16" : "tf32",
                        cublasLtGetStatusString(e));
    p->algo = best.algo;
    return STILL_OK;
}

/* The plan of this shape, made if there is none yet; the least recently used gives way.
 */
static still_status find(sti_dev *dev, struct sti_train_plans *all,
                         const sti_train_product *a, plan **out, still_error *err)
{
    const plan_key key = {
        .bf16 = a->bf16,
        .m = a->m,
        .n = a->n,
        .k = a->k,
        .lda = a->lda,
        .ldb = a->ldb,
        .ldd = a->ldd,
        .turn_b = a->turn_b,
        .parts = a->parts,
        .align = least(least(alignment(a->a), alignment(a->b)), alignment(a->d))};
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

struct sti_train_plans *sti_train_plans_new(void)
{
    return sti_alloc(1, sizeof(struct sti_train_plans));
}

still_status sti_train_multiply(sti_dev *dev, struct sti_train_plans *plans,
                                const sti_train_product *a, still_error *err)
{
    const float beta = a->accumulate ? 1 : 0;
    plan *p;
    STI_TRY(find(dev, plans, a, &p, err));
    return sti_cublas_check(cublasLtMatmul(dev->lt, &p->op, &a->scale, a->a, &p->a,
                                           a->b, &p->b, &beta, a->d, &p->d, a->d, &p->d,
                                           &p->algo, dev->lt_room.p, dev->lt_room.bytes,
                                           dev->stream),
                            "a product of training", err);
}
