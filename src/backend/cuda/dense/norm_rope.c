/* norm_rope.c - table entries of the operators on rows: checks and copies what lies in
 * the program's memory; the rest is in norm_rope.cu. */
#include "backend/cuda/dense/kernels.h"

/* Slots of sti_cuda_table that belong to this file. */
enum { TABLE_INV_FREQ = 0 };

still_status sti_cuda_embed(sti_dev *dev, const sti_embed_args *a, still_error *err)
{
    const int32_t *tok;
    const sti_cuda_matrix m = sti_cuda_matrix_of(a->w);
    if (a->M < 1) return STILL_OK;
    /* A captured pass is replayed with ids that only the caller sees. */
    if (!sti_cuda_capturing(dev))
        for (int i = 0; i < a->M; i++)
            if (a->tok[i] < 0 || a->tok[i] >= m.N)
                return sti_fail(err, STILL_E_ARG,
                                "token %d is outside the vocabulary of %d",
                                (int)a->tok[i], m.N);
    STI_TRY(sti_cuda_ids(dev, a->tok, a->M, &tok, err));
    return sti_cuda_gather(dev, &m, tok, a->M, a->y, err);
}

still_status sti_cuda_rmsnorm(sti_dev *dev, const sti_rmsnorm_args *a, still_error *err)
{
    if (a->M < 1) return STILL_OK;
    if (a->add)
        return sti_cuda_norm_add(dev, a->x, a->g, a->eps, a->M, a->K, a->y, err);
    return sti_cuda_norm(dev, a->x, a->g, a->eps, a->M, a->K, a->y, NULL, err);
}

still_status sti_cuda_rope(sti_dev *dev, const sti_rope_args *a, still_error *err)
{
    const int32_t *pos;
    const void *inv_freq;
    if (a->D < 2 || a->D % 2 != 0)
        return sti_fail(err, STILL_E_ARG, "rope rotates pairs: head size %d is odd",
                        a->D);
    if (a->M < 1) return STILL_OK;
    STI_TRY(sti_cuda_ids(dev, a->pos, a->M, &pos, err));
    STI_TRY(sti_cuda_table(dev, TABLE_INV_FREQ, a->inv_freq,
                           sizeof(float) * (size_t)(a->D / 2), &inv_freq, err));
    return sti_cuda_rope_rows(dev, a, pos, inv_freq, err);
}

still_status sti_cuda_swiglu(sti_dev *dev, const sti_swiglu_args *a, still_error *err)
{
    size_t n = (size_t)a->M * (size_t)a->K;
    return n > 0 ? sti_cuda_gated(dev, a->act, a->gate, a->up, a->y, n, err) : STILL_OK;
}

still_status sti_cuda_scale_columns(sti_dev *dev, const sti_scale_columns_args *a,
                                    still_error *err)
{
    const size_t n = (size_t)a->M * (size_t)a->K;
    return n > 0 ? sti_cuda_by_columns(dev, a->x, a->g, n, a->K, err) : STILL_OK;
}

/* At most STI_CUDA_PROB_ROWS rows from row m on. */
static still_status logprob_rows(sti_dev *dev, const sti_logprob_args *a, int m, int n,
                                 still_error *err)
{
    void *answers;
    STI_TRY(sti_cuda_answers(dev, STI_CUDA_PROB_ROWS * sizeof(sti_cuda_prob), &answers,
                             err));
    const sti_cuda_prob *result = answers;
    STI_TRY(sti_cuda_probs(dev, a->logits + (size_t)m * (size_t)a->V, a->target + m, n,
                           a->V, answers, err));
    STI_CUDA(cudaStreamSynchronize(dev->stream), "logprob");
    for (int i = 0; i < n; i++) {
        a->logprob[m + i] = result[i].logprob;
        a->top[m + i] = result[i].top;
    }
    return STILL_OK;
}

still_status sti_cuda_logprob(sti_dev *dev, const sti_logprob_args *a, still_error *err)
{
    for (int i = 0; i < a->M; i++)
        if (a->target[i] < 0 || a->target[i] >= a->V)
            return sti_fail(err, STILL_E_ARG,
                            "target %d is outside the vocabulary of %d",
                            (int)a->target[i], a->V);
    for (int m = 0; m < a->M; m += STI_CUDA_PROB_ROWS) {
        int n = a->M - m < STI_CUDA_PROB_ROWS ? a->M - m : STI_CUDA_PROB_ROWS;
        STI_TRY(logprob_rows(dev, a, m, n, err));
    }
    return STILL_OK;
}
