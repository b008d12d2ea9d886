/* ffn.c - the feed-forward half of a layer in training.
 *
 * What lies between its products is bound by memory, so it is never float: forwards
 * gate and up are kept as halves without their biases, [2, M, ffn], and what the last
 * product reads is half; backwards everything is bfloat16, which has the range of
 * gradients, and the gradients of gate and up lie side by side, so that theirs is one
 * product. Weights in float, rows that are no multiples of 8 and forms other than
 * llama's are left to the plain operators. */
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/train/kernels.h"
#include "backend/host.h"

static bool fits(const sti_weight *w)
{
    return sti_cuda_matrix_of(w).kind != STI_CUDA_FLOAT && w->K % 8 == 0;
}

/* Whether it is computed here; the same for both directions. */
static bool is_half(const sti_ffn_train_args *a)
{
    if (!a->w.norm || a->w.norm_out || a->w.act != STI_SILU) return false;
    return fits(a->w.gate) && fits(a->w.up) && fits(a->w.down) &&
           sti_cuda_aligned(a->kept) && sti_cuda_aligned(a->scratch) &&
           sti_cuda_aligned(a->scratch_h);
}

/* y[M, N] = [from +] x[M, K] W^T + bias, x in half; float if `from` is there. */
static still_status multiply(sti_dev *dev, const sti_weight *w, const sti_half *x,
                             int M, const float *bias, const float *from, void *y,
                             still_error *err)
{
    const sti_cuda_matrix m = sti_cuda_matrix_of(w);
    const sti_half *half = m.half;
    if (!half) {
        void *scratch;
        STI_TRY(sti_cuda_scratch(dev, (size_t)m.N * (size_t)m.ld * sizeof(sti_half),
                                 &scratch, err));
        STI_TRY(sti_cuda_to_half(dev, &m, scratch, err));
        half = scratch;
    }
    return sti_cuda_multiply(
        dev,
        &(sti_cuda_multiply_args){.type = from ? STI_CUDA_HALF_TO_FLOAT
                                               : STI_CUDA_HALF_TO_HALF,
                                  .a = half,
                                  .b = x,
                                  .c = from,
                                  .d = y,
                                  .m = m.N,
                                  .n = M,
                                  .k = m.ld,
                                  .lda = m.ld,
                                  .ldb = m.ld,
                                  .ldd = m.N,
                                  .trans_a = true,
                                  .bias = bias,
                                  .scale = 1,
                                  .accumulate = from != NULL},
        err);
}

still_status sti_cuda_ffn_train(sti_dev *dev, const sti_ffn_train_args *a,
                                still_error *err)
{
    if (a->M < 1) return STILL_OK;
    if (!is_half(a)) return sti_host_ffn_train(&sti_backend_cuda, dev, a, err);
    const int M = a->M, K = (int)a->w.gate->K, ffn = (int)a->w.gate->N;
    sti_half *h = (sti_half *)a->scratch_h, *gate = (sti_half *)a->kept,
             *up = gate + (size_t)M * (size_t)ffn, *s = (sti_half *)a->scratch;
    STI_TRY(sti_cuda_norm(dev, a->x, a->w.norm, a->w.eps, M, K, NULL, h, err));
    STI_TRY(multiply(dev, a->w.gate, h, M, NULL, NULL, gate, err));
    STI_TRY(multiply(dev, a->w.up, h, M, NULL, NULL, up, err));
    if (!a->y) return STILL_OK;
    STI_TRY(sti_cuda_gated_half(dev, gate, up, a->w.gate_bias, a->w.up_bias, M, ffn, s,
                                err));
    return multiply(dev, a->w.down, s, M, a->w.down_bias, a->x, a->y, err);
}

/* y[M, K] = dy[M, N] W[N, K] in bfloat16, W as weight_bf16.c keeps it. */
static still_status multiply_back(sti_dev *dev, const sti_weight *const *w, int n,
                                  const sti_bf16 *dy, int M, sti_cuda_product type,
                                  void *y, still_error *err)
{
    const sti_bf16 *rows;
    const int K = (int)w[0]->K;
    int N = 0;
    for (int i = 0; i < n; i++) N += (int)w[i]->N;
    STI_TRY(sti_cuda_bf16_rows(dev, w, n, &rows, err));
    return sti_cuda_multiply(dev,
                             &(sti_cuda_multiply_args){.type = type,
                                                       .a = rows,
                                                       .b = dy,
                                                       .d = y,
                                                       .m = K,
                                                       .n = M,
                                                       .k = N,
                                                       .lda = K,
                                                       .ldb = N,
                                                       .ldd = K,
                                                       .scale = 1},
                             err);
}

still_status sti_cuda_ffn_back(sti_dev *dev, const sti_ffn_train_args *a,
                               still_error *err)
{
    if (a->M < 1) return STILL_OK;
    if (!is_half(a)) return sti_host_ffn_back(&sti_backend_cuda, dev, a, err);
    const int M = a->M, K = (int)a->w.gate->K, ffn = (int)a->w.gate->N;
    const size_t size = (size_t)M * (size_t)ffn;
    const sti_half *gate = (const sti_half *)a->kept;
    sti_bf16 *dy = (sti_bf16 *)a->scratch_h, *ds = (sti_bf16 *)a->scratch,
             *d = ds + size;
    STI_TRY(sti_cuda_round_columns(
        dev, &(sti_cuda_columns){.n = 1, .x = {a->dx}, .N = {K}}, M, K, dy, err));
    STI_TRY(multiply_back(dev, &a->w.down, 1, dy, M, STI_CUDA_BF16_TO_BF16, ds, err));
    STI_TRY(sti_cuda_gated_back_half(
        dev,
        &(sti_cuda_gated_back_args){.gate = gate,
                                    .up = gate + size,
                                    .gate_bias = a->w.gate_bias,
                                    .up_bias = a->w.up_bias,
                                    .dy = ds,
                                    .d = d,
                                    .M = M,
                                    .K = ffn},
        err));
    const sti_weight *both[] = {a->w.gate, a->w.up};
    STI_TRY(multiply_back(dev, both, 2, d, M, STI_CUDA_BF16, a->scratch_h, err));
    return sti_cuda_norm_back(dev,
                              &(sti_rmsnorm_back_args){.x = a->x,
                                                       .g = a->w.norm,
                                                       .dy = a->scratch_h,
                                                       .dx = a->dx,
                                                       .M = M,
                                                       .K = K,
                                                       .eps = a->w.eps},
                              err);
}
