/* train.c - entries of training on the GPU.
 *
 * Gradients are float32 in memory. What goes back through weights is multiplied in
 * bfloat16, which has the range of float32 (half would lose the small ones), with
 * float32 sums: gradients become bfloat16 on their way, side by side where several add
 * up to one, so that theirs is one product, and frozen weights are kept in bfloat16
 * from the first time on, since they are asked for in every step. Products down to a
 * low rank and gradients of weights, which are sums over all rows, are bound by reading
 * their inputs and read them as they are, in TF32; those up from one are in float
 * (thin.cu). Results for the program are sums of
 * parts, added here, in order. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/train_kernels.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 1 << 16, /* numbers that make one part of a sum */
    THIN = 32,       /* columns up to which a product is bound by reading its rows */
    SUM_TILE = 128,  /* rows and columns of a gradient that an SM makes at once */
    SUM_ROWS = 1024, /* whose sum is worth a part of its own */
    SLOT_PIECES = 8,
    SLOT_WEIGHTS = 9,
    SLOT_TARGETS = 10,
};

/* ---- Weights in bfloat16
 * ------------------------------------------------------------- */

/* Weights that are multiplied together, one below the other in bfloat16 [N, ld]. */
struct sti_cuda_wide {
    const void *of[STI_MATMUL_MAX]; /* their addresses; NULL: one in training, which is
                                       copied anew each time */
    int64_t N[STI_MATMUL_MAX], K;
    sti_block block;
};

void sti_cuda_wide_free(sti_dev *dev)
{
    for (int i = 0; i < dev->n_wide; i++) sti_cuda_mem_free(dev, &dev->wide[i].block);
    free(dev->wide);
    dev->wide = NULL;
    dev->n_wide = 0;
}

void sti_cuda_wide_forget(sti_dev *dev, const void *of)
{
    if (!of) return;
    for (int i = dev->n_wide - 1; i >= 0; i--) {
        struct sti_cuda_wide *c = &dev->wide[i];
        bool has = false;
        for (int k = 0; k < STI_MATMUL_MAX; k++) has = has || c->of[k] == of;
        if (!has) continue;
        sti_cuda_mem_free(dev, &c->block);
        *c = dev->wide[--dev->n_wide];
    }
}

/* The rows to `out`, ld apart; they become float in scratch first. */
static still_status convert(sti_dev *dev, const sti_weight *w, sti_bf16 *out,
                            still_error *err)
{
    const sti_cuda_matrix m = sti_cuda_matrix_of(w);
    const float *rows = m.w;
    if (m.kind != STI_CUDA_FLOAT) {
        const size_t ids = sti_cuda_up_to((size_t)m.N * sizeof(int32_t), 256);
        void *room;
        STI_TRY(sti_cuda_scratch(dev, ids + (size_t)m.N * (size_t)m.K * sizeof(float),
                                 &room, err));
        STI_TRY(sti_cuda_count(dev, room, m.N, err));
        float *wide = (float *)((char *)room + ids);
        STI_TRY(sti_cuda_gather(dev, &m, room, m.N, wide, err));
        rows = wide;
    }
    return sti_cuda_to_bf16(dev, &(sti_cuda_columns){.n = 1, .x = {rows}, .N = {m.K}},
                            m.N, m.ld, out, err);
}

/* A weight of training is seen where the optimizer changes it, without a copy. */
static bool is_frozen(const sti_weight *w)
{
    return w->own.p != NULL;
}

static bool is_of(const struct sti_cuda_wide *c, const sti_matmul_back_args *a)
{
    bool same = c->K == a->w[0]->K;
    for (int i = 0; i < STI_MATMUL_MAX; i++) {
        const sti_weight *w = i < a->n ? a->w[i] : NULL;
        same = same && c->of[i] == (w ? w->own.p : NULL) && c->N[i] == (w ? w->N : 0);
    }
    return same;
}

/* Copies those weights that are frozen, or those that are not. */
static still_status copy_weights(sti_dev *dev, const sti_matmul_back_args *a,
                                 bool frozen, sti_bf16 *out, still_error *err)
{
    const size_t ld = sti_cuda_up_to((size_t)a->w[0]->K, 8);
    for (int i = 0; i < a->n; out += (size_t)a->w[i++]->N * ld)
        if (is_frozen(a->w[i]) == frozen) STI_TRY(convert(dev, a->w[i], out, err));
    return STILL_OK;
}

/* The copy of a call's weights, the frozen ones in it; it is made if there is none. */
static still_status find_copy(sti_dev *dev, const sti_matmul_back_args *a, size_t bytes,
                              sti_bf16 **out, still_error *err)
{
    for (int i = 0; i < dev->n_wide; i++)
        if (is_of(&dev->wide[i], a)) {
            *out = dev->wide[i].block.p;
            return STILL_OK;
        }
    struct sti_cuda_wide *grown =
        sti_grow(dev->wide, (size_t)dev->n_wide + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, "weights in bfloat16", sizeof *grown);
    dev->wide = grown;
    struct sti_cuda_wide c = {.K = a->w[0]->K};
    for (int i = 0; i < a->n; i++) {
        c.of[i] = a->w[i]->own.p;
        c.N[i] = a->w[i]->N;
    }
    STI_TRY(sti_cuda_mem_new(dev, bytes, &c.block, err));
    still_status st = copy_weights(dev, a, true, c.block.p, err);
    if (st != STILL_OK) {
        sti_cuda_mem_free(dev, &c.block);
        return st;
    }
    dev->wide[dev->n_wide++] = c;
    *out = c.block.p;
    return STILL_OK;
}

/* ---- Products
 * ------------------------------------------------------------------------ */

/* dx[M, K] = [dx +] dy[M, N] W[N, K], W in float, one after the other. */
static still_status back_thin(sti_dev *dev, const sti_matmul_back_args *a,
                              still_error *err)
{
    for (int i = 0; i < a->n; i++) {
        const int N = (int)a->w[i]->N, K = (int)a->w[i]->K;
        STI_TRY(sti_cuda_multiply(
            dev,
            &(sti_cuda_multiply_args){.type = STI_CUDA_TF32,
                                      .a = sti_cuda_matrix_of(a->w[i]).w,
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

/* The same of matrices in training that lead up from a low rank, if they do. */
static bool is_up(const sti_matmul_back_args *a, sti_cuda_up *out)
{
    *out = (sti_cuda_up){.n = a->n,
                         .M = a->M,
                         .N = (int)a->w[0]->K,
                         .accumulate = a->accumulate,
                         .y = a->dx};
    bool trained = true;
    for (int i = 0; i < a->n; i++) {
        out->x[i] = a->dy[i];
        out->w[i] = sti_cuda_matrix_of(a->w[i]).w;
        out->R[i] = (int)a->w[i]->N;
        trained = trained && !is_frozen(a->w[i]);
    }
    return trained && sti_cuda_up_fits(out);
}

/* The same as one product: dy side by side [M, sum N], W one below the other. */
static still_status back_together(sti_dev *dev, const sti_matmul_back_args *a,
                                  still_error *err)
{
    const int K = (int)a->w[0]->K;
    const size_t ldw = sti_cuda_up_to((size_t)K, 8);
    sti_cuda_columns dy = {.n = a->n};
    size_t N = 0;
    bool frozen = false;
    for (int i = 0; i < a->n; i++) {
        dy.x[i] = a->dy[i];
        dy.N[i] = (int)a->w[i]->N;
        N += (size_t)a->w[i]->N;
        frozen = frozen || is_frozen(a->w[i]);
    }
    const size_t ld = sti_cuda_up_to(N, 8), weights = N * ldw * sizeof(sti_bf16),
                 rows = sti_cuda_up_to((size_t)a->M * ld * sizeof(sti_bf16), 256);
    sti_bf16 *w = NULL;
    void *room;
    if (frozen) STI_TRY(find_copy(dev, a, weights, &w, err));
    STI_TRY(sti_cuda_scratch(dev, rows + (w ? 0 : weights), &room, err));
    if (!w) w = (sti_bf16 *)((char *)room + rows);
    STI_TRY(copy_weights(dev, a, false, w, err)); /* floats: this asks for no scratch */
    STI_TRY(sti_cuda_to_bf16(dev, &dy, a->M, (int)ld, room, err));
    return sti_cuda_multiply(dev,
                             &(sti_cuda_multiply_args){.type = STI_CUDA_BF16,
                                                       .a = w,
                                                       .b = room,
                                                       .d = a->dx,
                                                       .m = K,
                                                       .n = a->M,
                                                       .k = (int)N,
                                                       .lda = (int)ldw,
                                                       .ldb = (int)ld,
                                                       .ldd = K,
                                                       .scale = 1,
                                                       .accumulate = a->accumulate},
                             err);
}

still_status sti_cuda_matmul_back(sti_dev *dev, const sti_matmul_back_args *a,
                                  still_error *err)
{
    bool thin = true;
    if (a->M < 1 || a->n < 1) return STILL_OK;
    for (int i = 0; i < a->n; i++) {
        if (a->w[i]->K != a->w[0]->K)
            return sti_fail(err, STILL_E_ARG,
                            "matmul_back: matrix %d has %lld columns, expected %lld", i,
                            (long long)a->w[i]->K, (long long)a->w[0]->K);
        thin = thin && a->w[i]->K <= THIN &&
               sti_cuda_matrix_of(a->w[i]).kind == STI_CUDA_FLOAT;
    }
    sti_cuda_up up;
    if (is_up(a, &up)) return sti_cuda_up_rows(dev, &up, err);
    return thin ? back_thin(dev, a, err) : back_together(dev, a, err);
}

/* Parts in which the rows of a gradient's sum are added: a power of two. */
static int sum_parts(const sti_dev *dev, const sti_matmul_grad_args *a)
{
    if (a->N < SUM_TILE || a->K < SUM_TILE) return 1;
    const int64_t tiles = (int64_t)((a->N + SUM_TILE - 1) / SUM_TILE) *
                          ((a->K + SUM_TILE - 1) / SUM_TILE);
    int parts = 1;
    while (tiles * parts < dev->sms && a->M % (2 * parts) == 0 &&
           a->M / (2 * parts) >= SUM_ROWS)
        parts *= 2;
    return parts;
}

/* dw[N, K] += scale dy[M, N]^T x[M, K]. */
still_status sti_cuda_matmul_grad(sti_dev *dev, const sti_matmul_grad_args *a,
                                  still_error *err)
{
    if (a->M < 1) return STILL_OK;
    const int parts = sum_parts(dev, a);
    const size_t size = (size_t)a->N * (size_t)a->K;
    void *part = a->dw;
    if (parts > 1)
        STI_TRY(
            sti_cuda_scratch(dev, (size_t)parts * size * sizeof(float), &part, err));
    STI_TRY(sti_cuda_multiply(dev,
                              &(sti_cuda_multiply_args){.type = STI_CUDA_TF32,
                                                        .a = a->x,
                                                        .b = a->dy,
                                                        .d = part,
                                                        .m = a->K,
                                                        .n = a->N,
                                                        .k = a->M / parts,
                                                        .lda = a->K,
                                                        .ldb = a->N,
                                                        .ldd = a->K,
                                                        .turn_b = true,
                                                        .scale = a->scale,
                                                        .accumulate = parts == 1,
                                                        .parts = parts},
                              err));
    if (parts == 1) return STILL_OK;
    return sti_cuda_add_parts(dev, part, parts, size, a->dw, err);
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
