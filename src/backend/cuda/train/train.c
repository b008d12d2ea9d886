/* train.c - entries of training on the GPU; the feed-forward half of a layer is in
 * ffn.c.
 *
 * Gradients are float32 in memory. What goes back through weights is multiplied in
 * bfloat16, which has the range of float32 (half would lose the small ones), with
 * float32 sums: gradients become bfloat16 on their way, side by side where several add
 * up to one, so that theirs is one product; weights in bfloat16 are in weight_bf16.c.
 * Products down to a low rank and gradients of its matrices (lora_grad.cu) are bound by
 * reading their inputs and read them as they are, in TF32. */
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/train/kernels.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 1 << 16, /* numbers that make one part of a sum */
    LOW_RANK = 32,   /* columns up to which a product is bound by reading its rows */
    SUM_TILE = 128,  /* rows and columns of a gradient that an SM makes at once */
    SUM_ROWS = 1024, /* whose sum is worth a part of its own */
    SLOT_PIECES = 8,
    SLOT_WEIGHTS = 9,
    SLOT_TARGETS = 10,
    SLOT_ADAM = 14,
};

/* ---- Products ------------------------------------------------------------ */

static float scale_of(const sti_matmul_back_args *a)
{
    return a->scale != 0 ? a->scale : 1;
}

/* dx[M, K] = [dx +] dy[M, N] W[N, K], W in float, one after the other. */
static still_status back_low_rank(sti_dev *dev, const sti_matmul_back_args *a,
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
                                      .scale = scale_of(a),
                                      .accumulate = a->accumulate || i > 0},
            err));
    }
    return STILL_OK;
}

/* dx[M, K] = [dx +] scale dy[M, ld] W, W as weight_bf16.c keeps it: K columns, and as
 * many rows as dy has columns, those that fill up included. */
static still_status multiply_bf16(sti_dev *dev, const sti_bf16 *w, int K,
                                  const sti_bf16 *dy, int ld, int M, float scale,
                                  bool accumulate, float *dx, still_error *err)
{
    return sti_cuda_multiply(
        dev,
        &(sti_cuda_multiply_args){.type = STI_CUDA_BF16,
                                  .a = w,
                                  .b = dy,
                                  .d = dx,
                                  .m = K,
                                  .n = M,
                                  .k = ld,
                                  .lda = (int)sti_cuda_round_up((size_t)K, 8),
                                  .ldb = ld,
                                  .ldd = K,
                                  .scale = scale,
                                  .accumulate = accumulate},
        err);
}

/* The same as one product: dy side by side [M, sum N], W one below the other. */
static still_status back_together(sti_dev *dev, const sti_matmul_back_args *a,
                                  still_error *err)
{
    const int K = (int)a->w[0]->K;
    sti_cuda_columns dy = {.n = a->n};
    size_t N = 0;
    for (int i = 0; i < a->n; i++) {
        dy.x[i] = a->dy[i];
        dy.N[i] = (int)a->w[i]->N;
        N += (size_t)a->w[i]->N;
    }
    const size_t ld = sti_cuda_round_up(N, 8);
    const sti_bf16 *w;
    void *rows;
    STI_TRY(sti_cuda_bf16_rows(dev, a->w, a->n, &w, err));
    STI_TRY(sti_cuda_scratch(dev, (size_t)a->M * ld * sizeof(sti_bf16), &rows, err));
    STI_TRY(sti_cuda_round_columns(dev, &dy, a->M, (int)ld, rows, err));
    return multiply_bf16(dev, w, K, rows, (int)ld, a->M, scale_of(a), a->accumulate,
                         a->dx, err);
}

still_status sti_cuda_matmul_back(sti_dev *dev, const sti_matmul_back_args *a,
                                  still_error *err)
{
    bool low_rank = true;
    if (a->M < 1 || a->n < 1) return STILL_OK;
    for (int i = 0; i < a->n; i++) {
        if (a->w[i]->K != a->w[0]->K)
            return sti_fail(err, STILL_E_ARG,
                            "matmul_back: matrix %d has %lld columns, expected %lld", i,
                            (long long)a->w[i]->K, (long long)a->w[0]->K);
        low_rank = low_rank && a->w[i]->K <= LOW_RANK &&
                   sti_cuda_matrix_of(a->w[i]).kind == STI_CUDA_FLOAT;
    }
    return low_rank ? back_low_rank(dev, a, err) : back_together(dev, a, err);
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

/* dw[N, K] += scale dy[M, N]^T x[M, K]. Large ones in bfloat16, both sides rounded side
 * by side: tensor cores take floats across the sum at a fraction of their speed. */
static still_status large_grad(sti_dev *dev, const sti_matmul_grad_args *a,
                               still_error *err)
{
    const int parts = sum_parts(dev, a), N = a->N, K = a->K;
    const bool rounded = N >= SUM_TILE && K >= SUM_TILE && N % 8 == 0 && K % 8 == 0;
    const size_t size = (size_t)N * (size_t)K,
                 sums =
                     parts > 1 ? sti_cuda_round_up(4 * (size_t)parts * size, 256) : 0,
                 rows = rounded ? 2 * (size_t)a->M * (size_t)(N + K) : 0;
    sti_cuda_multiply_args p = {.type = STI_CUDA_TF32,
                                .a = a->x,
                                .b = a->dy,
                                .d = a->dw,
                                .m = K,
                                .n = N,
                                .k = a->M / parts,
                                .lda = K,
                                .ldb = N,
                                .ldd = K,
                                .trans_b = true,
                                .scale = a->scale,
                                .accumulate = parts == 1,
                                .parts = parts};
    void *scratch = NULL;
    if (sums + rows > 0) STI_TRY(sti_cuda_scratch(dev, sums + rows, &scratch, err));
    if (rounded) {
        sti_bf16 *both = (sti_bf16 *)((char *)scratch + sums);
        const sti_cuda_columns side = {.n = 2, .x = {a->dy, a->x}, .N = {N, K}};
        STI_TRY(sti_cuda_round_columns(dev, &side, a->M, N + K, both, err));
        p.type = STI_CUDA_BF16;
        p.a = both + N;
        p.b = both;
        p.lda = p.ldb = N + K;
    }
    if (parts > 1) p.d = scratch;
    STI_TRY(sti_cuda_multiply(dev, &p, err));
    return parts > 1 ? sti_cuda_add_parts(dev, scratch, parts, size, a->dw, err)
                     : STILL_OK;
}

/* Where what is added to the gradients of x goes: with those that have it already, or
 * apart; NULL: there is no place. */
static sti_cuda_lora_grad *place_of(sti_cuda_lora_grads_args *all, const float *x,
                                    int W, int slots)
{
    for (int i = 0; i < all->n; i++) {
        sti_cuda_lora_grad *g = &all->of[i];
        if (g->x == x && g->W == W && g->n + slots <= STI_CUDA_GRAD_SLOTS) return g;
    }
    if (all->n == STI_CUDA_GRADS_MOST || slots > STI_CUDA_GRAD_SLOTS) return NULL;
    sti_cuda_lora_grad *g = &all->of[all->n++];
    *g = (sti_cuda_lora_grad){.x = x, .W = W};
    return g;
}

/* Takes a gradient of low rank to the others, if it is one. */
static bool take_low_rank(sti_cuda_lora_grads_args *all, const sti_matmul_grad_args *a)
{
    const bool trans = a->N > a->K; /* x is the narrow side */
    const float *wide = trans ? a->dy : a->x, *narrow = trans ? a->x : a->dy;
    const int W = trans ? a->N : a->K, R = trans ? a->K : a->N, slots = (R + 7) / 8;
    if (W % 4 != 0 || !sti_cuda_aligned(wide) || (all->n > 0 && all->M != a->M))
        return false;
    sti_cuda_lora_grad *g = place_of(all, wide, W, slots);
    if (!g) return false;
    all->M = a->M;
    for (int r = 0; r < R; r += 8)
        g->slot[g->n++] =
            (sti_cuda_lora_slot){.l = narrow + r,
                                 .out = a->dw + (size_t)r * (trans ? 1 : (size_t)W),
                                 .R = R,
                                 .ranks = R - r < 8 ? R - r : 8,
                                 .trans = trans,
                                 .scale = a->scale};
    return true;
}

still_status sti_cuda_matmul_grad(sti_dev *dev, const sti_matmul_grad_args *all, int n,
                                  still_error *err)
{
    sti_cuda_lora_grads_args low_rank = {.n = 0};
    for (int i = 0; i < n; i++)
        if (all[i].M > 0 && !take_low_rank(&low_rank, &all[i]))
            STI_TRY(large_grad(dev, &all[i], err));
    return sti_cuda_lora_grads(dev, &low_rank, err);
}

/* ---- Loss, optimizer, sums ----------------------------------------------- */

/* With a head the gradient goes into its product in bfloat16 and is never in float. */
still_status sti_cuda_loss(sti_dev *dev, const sti_loss_args *a, still_error *err)
{
    const size_t M = (size_t)a->M, ld = sti_cuda_round_up((size_t)a->V, 8);
    const void *target, *weight;
    const sti_bf16 *head;
    void *rows;
    if (a->M < 1) return STILL_OK;
    for (int m = 0; m < a->M; m++)
        if (a->weight[m] != 0 && (a->target[m] < 0 || a->target[m] >= a->V))
            return sti_fail(err, STILL_E_ARG, "loss: target %d is not in 0..%d",
                            a->target[m], a->V - 1);
    STI_TRY(sti_cuda_table(dev, SLOT_TARGETS, a->target, M * sizeof *a->target, &target,
                           err));
    STI_TRY(sti_cuda_table(dev, SLOT_WEIGHTS, a->weight, M * sizeof *a->weight, &weight,
                           err));
    if (!a->head) return sti_cuda_loss_rows(dev, a, target, weight, NULL, err);
    STI_TRY(sti_cuda_bf16_rows(dev, &a->head, 1, &head, err));
    STI_TRY(sti_cuda_scratch(dev, M * ld * sizeof(sti_bf16), &rows, err));
    STI_TRY(sti_cuda_loss_rows(dev, a, target, weight, rows, err));
    return multiply_bf16(dev, head, (int)a->head->K, rows, (int)ld, a->M, 1, false,
                         a->dx, err);
}

still_status sti_cuda_adam(sti_dev *dev, const sti_adam_args *all, int n,
                           still_error *err)
{
    const void *there;
    if (n < 1) return STILL_OK;
    STI_TRY(sti_cuda_table(dev, SLOT_ADAM, all, (size_t)n * sizeof *all, &there, err));
    return sti_cuda_adam_step(dev, there, n, err);
}

static still_status fetch(sti_dev *dev, double *to, const double *from, size_t n,
                          still_error *err)
{
    STI_CUDA(
        cudaMemcpyAsync(to, from, n * sizeof *to, cudaMemcpyDeviceToHost, dev->stream),
        "fetching sums");
    STI_CUDA(cudaStreamSynchronize(dev->stream), "waiting for sums");
    return STILL_OK;
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
    void *part;
    STI_TRY(sti_cuda_scratch(dev, 2 * STI_CUDA_PARTS * sizeof(double), &part, err));
    return sti_cuda_differ(dev, a, part, err);
}
