/* train.c - entries of training on the GPU.
 *
 * Gradients are float32 and multiplied in TF32, which has their range: rounding them to
 * half would lose the small ones. What goes back through a weight needs it in float: a
 * copy is made the first time and kept, since it is asked for in every step. Results
 * for the program are sums of parts, added here, in order. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/train_kernels.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 1 << 16, /* numbers that make one part of a sum */
    SLOT_PIECES = 8,
    SLOT_WEIGHTS = 9,
    SLOT_TARGETS = 10,
};

/* ---- Weights in float
 * ---------------------------------------------------------------- */

/* Copies by the address of what they were made of. */
struct sti_cuda_wide {
    const void *of;
    sti_block copy;
};

void sti_cuda_wide_free(sti_dev *dev)
{
    for (int i = 0; i < dev->n_wide; i++) sti_cuda_mem_free(dev, &dev->wide[i].copy);
    free(dev->wide);
    dev->wide = NULL;
    dev->n_wide = 0;
}

void sti_cuda_wide_forget(sti_dev *dev, const void *of)
{
    for (int i = 0; i < dev->n_wide; i++)
        if (dev->wide[i].of == of) {
            sti_cuda_mem_free(dev, &dev->wide[i].copy);
            dev->wide[i] = dev->wide[--dev->n_wide];
            return;
        }
}

static still_status widen(sti_dev *dev, const sti_cuda_matrix *m, float *out,
                          still_error *err)
{
    void *ids;
    STI_TRY(sti_cuda_scratch(dev, (size_t)m->N * sizeof(int32_t), &ids, err));
    STI_TRY(sti_cuda_count(dev, ids, m->N, err));
    return sti_cuda_gather(dev, m, ids, m->N, out, err);
}

static still_status in_float(sti_dev *dev, const sti_weight *w, const float **out,
                             still_error *err)
{
    const sti_cuda_matrix m = sti_cuda_matrix_of(w);
    *out = m.w;
    if (m.kind == STI_CUDA_FLOAT) return STILL_OK;
    for (int i = 0; i < dev->n_wide; i++)
        if (dev->wide[i].of == m.w) {
            *out = dev->wide[i].copy.p;
            return STILL_OK;
        }
    struct sti_cuda_wide *grown =
        sti_grow(dev->wide, (size_t)dev->n_wide + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, "weights in float", sizeof *grown);
    dev->wide = grown;
    sti_block copy;
    STI_TRY(
        sti_cuda_mem_new(dev, (size_t)m.N * (size_t)m.K * sizeof(float), &copy, err));
    dev->wide[dev->n_wide++] = (struct sti_cuda_wide){m.w, copy};
    *out = copy.p;
    return widen(dev, &m, copy.p, err);
}

/* ---- Products
 * ------------------------------------------------------------------------ */

/* dx[M, K] = [dx +] dy[M, N] W[N, K]. */
still_status sti_cuda_matmul_back(sti_dev *dev, const sti_matmul_back_args *a,
                                  still_error *err)
{
    for (int i = 0; i < a->n && a->M > 0; i++) {
        const float *w;
        STI_TRY(in_float(dev, a->w[i], &w, err));
        const int N = (int)a->w[i]->N, K = (int)a->w[i]->K;
        STI_TRY(sti_cuda_multiply(
            dev,
            &(sti_cuda_multiply_args){.type = STI_CUDA_TF32,
                                      .a = w,
                                      .b = a->dy[i],
                                      .d = a->dx,
                                      .m = K,
                                      .n = a->M,
                                      .k = N,
                                      .lda = K,
                                      .ldb = N,
                                      .ldd = K,
                                      .scale = 1,
                                      .accumulate = a->accumulate || i > 0},
            err));
    }
    return STILL_OK;
}

/* dw[N, K] += scale dy[M, N]^T x[M, K]. */
still_status sti_cuda_matmul_grad(sti_dev *dev, const sti_matmul_grad_args *a,
                                  still_error *err)
{
    if (a->M < 1) return STILL_OK;
    return sti_cuda_multiply(dev,
                             &(sti_cuda_multiply_args){.type = STI_CUDA_TF32,
                                                       .a = a->x,
                                                       .b = a->dy,
                                                       .d = a->dw,
                                                       .m = a->K,
                                                       .n = a->N,
                                                       .k = a->M,
                                                       .lda = a->K,
                                                       .ldb = a->N,
                                                       .ldd = a->K,
                                                       .turn_b = true,
                                                       .scale = a->scale,
                                                       .accumulate = true},
                             err);
}

/* ---- Results for the program
 * --------------------------------------------------------- */

static still_status fetch(sti_dev *dev, double *to, const double *from, size_t n,
                          still_error *err)
{
    STI_CUDA(
        cudaMemcpyAsync(to, from, n * sizeof *to, cudaMemcpyDeviceToHost, dev->stream),
        "fetching sums");
    STI_CUDA(cudaStreamSynchronize(dev->stream), "waiting for sums");
    return STILL_OK;
}

still_status sti_cuda_loss(sti_dev *dev, const sti_loss_args *a, still_error *err)
{
    const size_t M = (size_t)a->M;
    const void *target, *weight;
    void *sums;
    if (a->M < 1) return STILL_OK;
    for (int m = 0; m < a->M; m++)
        if (a->weight[m] != 0 && (a->target[m] < 0 || a->target[m] >= a->V))
            return sti_fail(err, STILL_E_ARG, "loss: target %d is not in 0..%d",
                            a->target[m], a->V - 1);
    STI_TRY(sti_cuda_table(dev, SLOT_TARGETS, a->target, M * sizeof *a->target, &target,
                           err));
    STI_TRY(sti_cuda_table(dev, SLOT_WEIGHTS, a->weight, M * sizeof *a->weight, &weight,
                           err));
    STI_TRY(sti_cuda_scratch(dev, 2 * M * sizeof(double), &sums, err));
    STI_TRY(sti_cuda_loss_rows(dev, a, target, weight, sums, err));
    double *pair = sti_alloc(2 * M, sizeof *pair);
    if (!pair) return sti_fail_memory(err, "loss", 2 * M * sizeof *pair);
    still_status st = fetch(dev, pair, sums, 2 * M, err);
    for (size_t m = 0; m < M && st == STILL_OK; m++) {
        a->loss[m] = pair[2 * m];
        if (a->kl) a->kl[m] = pair[2 * m + 1];
    }
    free(pair);
    return st;
}

static size_t pieces_of(const sti_span *span)
{
    return (span->n + PIECE - 1) / PIECE;
}

still_status sti_cuda_sum_squares(sti_dev *dev, const float *x, const sti_span *span,
                                  int n, double *out, still_error *err)
{
    size_t all = 0, at = 0;
    for (int i = 0; i < n; i++) all += pieces_of(&span[i]);
    for (int i = 0; i < n; i++) out[i] = 0;
    if (all == 0) return STILL_OK;
    sti_span *piece = sti_alloc(all, sizeof *piece + sizeof(double));
    if (!piece) return sti_fail_memory(err, "sum of squares", all * sizeof *piece);
    double *part = (double *)(piece + all);
    for (int i = 0; i < n; i++)
        for (size_t k = 0; k < span[i].n; k += PIECE)
            piece[at++] = (sti_span){span[i].at + k,
                                     span[i].n - k < PIECE ? span[i].n - k : PIECE};
    const void *pieces;
    void *sums;
    still_status st =
        sti_cuda_table(dev, SLOT_PIECES, piece, all * sizeof *piece, &pieces, err);
    if (st == STILL_OK) st = sti_cuda_scratch(dev, all * sizeof(double), &sums, err);
    if (st == STILL_OK) st = sti_cuda_squares(dev, x, pieces, (int)all, sums, err);
    if (st == STILL_OK) st = fetch(dev, part, sums, all, err);
    at = 0;
    for (int i = 0; i < n && st == STILL_OK; i++)
        for (size_t k = 0; k < pieces_of(&span[i]); k++) out[i] += part[at++];
    free(piece);
    return st;
}

still_status sti_cuda_compare(sti_dev *dev, const sti_compare_args *a, still_error *err)
{
    double part[2 * STI_CUDA_PARTS];
    void *sums;
    STI_TRY(sti_cuda_scratch(dev, sizeof part, &sums, err));
    STI_TRY(sti_cuda_differ(dev, a, sums, err));
    STI_TRY(fetch(dev, part, sums, 2 * STI_CUDA_PARTS, err));
    *a->error = *a->size = 0;
    for (int i = 0; i < STI_CUDA_PARTS; i++) {
        *a->error += part[i];
        *a->size += part[STI_CUDA_PARTS + i];
    }
    return STILL_OK;
}
