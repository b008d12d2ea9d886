/* lora.c - products of training whose matrices have low-rank additions,
 *
 *   y_i = [from +] x W_i^T + bias_i + lora_x_i B_i^T,   lora_x_i = scale x A_i^T.
 *
 * A separate addition would read and write y once more, which takes longer than the
 * product: instead lora_x is concatenated to x and B to W, both in half, and y is one
 * product, [x | lora_x_0 lora_x_1 ..] [W_i | 0 .. B_i .. 0]^T. B is small when training
 * begins, so it is multiplied by GAIN and lora_x divided by it. */
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/train/kernels.h"
#include "backend/host.h"

static const float GAIN = 64;

typedef struct added {
    sti_cuda_lora_down_args down;
    sti_cuda_concat_lora_args concat;
} added;

static bool is_float(const sti_weight *w)
{
    return sti_cuda_matrix_of(w).kind == STI_CUDA_FLOAT;
}

/* A matrix that is half, or is made so each time because it is in training. */
static bool can_concat(const sti_weight *w, const sti_cuda_matrix *m)
{
    return m->half || (is_float(w) && !w->own.p);
}

/* What is to be done, but for where things are; false: by the plain operators. */
static bool prepare_lora(const sti_matmul_lora_args *a, added *out)
{
    const sti_matmul_args *p = &a->product;
    const int K = (int)p->w[0]->K;
    sti_cuda_lora_down_args *down = &out->down;
    sti_cuda_concat_lora_args *concat = &out->concat;
    *down = (sti_cuda_lora_down_args){
        .x = p->norm ? p->normed : p->x, .M = p->M, .K = K, .scale = a->scale};
    *concat = (sti_cuda_concat_lora_args){.n = p->n, .K = K, .ld = K, .gain = GAIN};
    bool fits = p->M > STI_CUDA_GEMV_ROWS;
    for (int i = 0; i < p->n; i++) {
        const sti_cuda_matrix m = sti_cuda_matrix_of(p->w[i]);
        const sti_lora_args *add = &a->add[i];
        fits = fits && p->w[i]->K == K && can_concat(p->w[i], &m);
        concat->half[i] = m.half;
        concat->w[i] = m.w;
        concat->N[i] = m.N;
        if (!add->a) continue;
        fits = fits && is_float(add->a) && is_float(add->b);
        down->w[down->n] = sti_cuda_matrix_of(add->a).w;
        down->y[down->n] = add->lora_x;
        down->N[down->n++] = (int)add->a->N;
        concat->b[i] = sti_cuda_matrix_of(add->b).w;
        concat->at[i] = concat->ld;
        concat->R[i] = (int)add->a->N;
        concat->ld += concat->R[i];
    }
    return fits && down->n > 0 && sti_cuda_lora_down_fits(down);
}

still_status sti_cuda_matmul_lora(sti_dev *dev, const sti_matmul_lora_args *a,
                                  still_error *err)
{
    const sti_matmul_args *p = &a->product;
    added all;
    if (p->M < 1 || p->n < 1) return STILL_OK;
    if (!prepare_lora(a, &all))
        return sti_host_matmul_lora(&sti_backend_cuda, dev, a, err);
    const int ld = all.concat.ld;
    size_t at = sti_cuda_round_up((size_t)p->M * (size_t)ld * sizeof(sti_half), 256),
           rows = 0;
    for (int i = 0; i < p->n; i++) rows += (size_t)p->w[i]->N;
    void *scratch;
    STI_TRY(sti_cuda_scratch(dev, at + rows * (size_t)ld * sizeof(sti_half), &scratch,
                             err));
    sti_half *w = (sti_half *)((char *)scratch + at);
    all.down.half = scratch;
    all.down.ld = ld;
    all.down.half_scale = 1 / GAIN;
    all.concat.y = w;
    if (p->norm)
        STI_TRY(sti_cuda_norm(dev, p->x, p->norm, p->eps, p->M, all.down.K, p->normed,
                              NULL, err));
    STI_TRY(sti_cuda_lora_down(dev, &all.down, err));
    STI_TRY(sti_cuda_concat_lora(dev, &all.concat, err));
    for (int i = 0; i < p->n; w += (size_t)p->w[i++]->N * (size_t)ld)
        STI_TRY(
            sti_cuda_multiply(dev,
                              &(sti_cuda_multiply_args){.type = STI_CUDA_HALF_TO_FLOAT,
                                                        .a = w,
                                                        .b = scratch,
                                                        .c = a->from,
                                                        .d = p->y[i],
                                                        .m = (int)p->w[i]->N,
                                                        .n = p->M,
                                                        .k = ld,
                                                        .lda = ld,
                                                        .ldb = ld,
                                                        .ldd = (int)p->w[i]->N,
                                                        .trans_a = true,
                                                        .bias = p->bias[i],
                                                        .scale = 1,
                                                        .accumulate = p->accumulate},
                              err));
    return STILL_OK;
}
