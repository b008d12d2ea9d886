/* weight_bf16.c - weights in bfloat16, for gradients that go back through them.
 *
 * Frozen weights are kept so from the first time on, since every step needs them; those
 * in training, which change, are rounded anew each time. */
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/train/kernels.h"

#include <stdlib.h>

/* Weights that are multiplied together, one below the other in bfloat16 [N, ld]; N is
 * rounded up to 8 with rows of zeros. */
struct sti_cuda_weight_bf16 {
    const void *of[STI_BACK_MAX]; /* their addresses; NULL: one in training */
    int64_t N[STI_BACK_MAX], K;
    sti_block block;
};

void sti_cuda_bf16_free(sti_dev *dev)
{
    for (int i = 0; i < dev->n_bf16; i++) sti_cuda_mem_free(dev, &dev->bf16[i].block);
    free(dev->bf16);
    dev->bf16 = NULL;
    dev->n_bf16 = 0;
}

void sti_cuda_bf16_forget(sti_dev *dev, const void *of)
{
    if (!of) return;
    for (int i = dev->n_bf16 - 1; i >= 0; i--) {
        struct sti_cuda_weight_bf16 *c = &dev->bf16[i];
        bool has = false;
        for (int k = 0; k < STI_BACK_MAX; k++) has = has || c->of[k] == of;
        if (!has) continue;
        sti_cuda_mem_free(dev, &c->block);
        *c = dev->bf16[--dev->n_bf16];
    }
}

/* A weight of training is seen where the optimizer changes it, without a copy. */
static bool is_frozen(const sti_weight *w)
{
    return w->own.p != NULL;
}

static size_t ld_of(const sti_weight *w)
{
    return sti_cuda_round_up((size_t)w->K, 8);
}

/* Frozen rows to `out`, ld apart; they become float in scratch first. */
static still_status convert(sti_dev *dev, const sti_weight *w, sti_bf16 *out,
                            still_error *err)
{
    const sti_cuda_matrix m = sti_cuda_matrix_of(w);
    const float *rows = m.w;
    if (m.kind != STI_CUDA_FLOAT) {
        const size_t ids = sti_cuda_round_up((size_t)m.N * sizeof(int32_t), 256);
        void *scratch;
        STI_TRY(sti_cuda_scratch(dev, ids + (size_t)m.N * (size_t)m.K * sizeof(float),
                                 &scratch, err));
        STI_TRY(sti_cuda_count(dev, scratch, m.N, err));
        float *wide = (float *)((char *)scratch + ids);
        STI_TRY(sti_cuda_gather(dev, &m, scratch, m.N, wide, err));
        rows = wide;
    }
    return sti_cuda_round_rows(
        dev, &(sti_cuda_stack){.n = 1, .K = m.K, .x = {rows}, .N = {m.N}, .y = {out}},
        err);
}

static bool is_of(const struct sti_cuda_weight_bf16 *c, const sti_weight *const *w,
                  int n)
{
    bool same = c->K == w[0]->K;
    for (int i = 0; i < STI_BACK_MAX; i++)
        same = same && c->of[i] == (i < n ? w[i]->own.p : NULL) &&
               c->N[i] == (i < n ? w[i]->N : 0);
    return same;
}

static still_status convert_frozen(sti_dev *dev, const sti_weight *const *w, int n,
                                   sti_bf16 *out, still_error *err)
{
    for (int i = 0; i < n; out += (size_t)w[i]->N * ld_of(w[i]), i++)
        if (is_frozen(w[i])) STI_TRY(convert(dev, w[i], out, err));
    return STILL_OK;
}

/* The copy of these weights, the frozen ones in it; it is made if there is none. */
static still_status find_copy(sti_dev *dev, const sti_weight *const *w, int n,
                              sti_bf16 **out, still_error *err)
{
    for (int i = 0; i < dev->n_bf16; i++)
        if (is_of(&dev->bf16[i], w, n)) {
            *out = dev->bf16[i].block.p;
            return STILL_OK;
        }
    struct sti_cuda_weight_bf16 *grown =
        sti_grow(dev->bf16, (size_t)dev->n_bf16 + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, "weights in bfloat16", sizeof *grown);
    dev->bf16 = grown;
    struct sti_cuda_weight_bf16 c = {.K = w[0]->K};
    size_t rows = 0;
    for (int i = 0; i < n; i++) {
        rows += (size_t)w[i]->N;
        c.of[i] = w[i]->own.p;
        c.N[i] = w[i]->N;
    }
    rows = sti_cuda_round_up(rows, 8);
    STI_TRY(
        sti_cuda_mem_new(dev, rows * ld_of(w[0]) * sizeof(sti_bf16), &c.block, err));
    still_status st = convert_frozen(dev, w, n, c.block.p, err);
    if (st != STILL_OK) {
        sti_cuda_mem_free(dev, &c.block);
        return st;
    }
    dev->bf16[dev->n_bf16++] = c;
    *out = c.block.p;
    return STILL_OK;
}

still_status sti_cuda_bf16_rows(sti_dev *dev, const sti_weight *const *w, int n,
                                const sti_bf16 **out, still_error *err)
{
    sti_bf16 *at;
    STI_TRY(find_copy(dev, w, n, &at, err));
    *out = at;
    sti_cuda_stack trained = {.K = (int)w[0]->K};
    for (int i = 0; i < n; at += (size_t)w[i]->N * ld_of(w[i]), i++) {
        if (is_frozen(w[i])) continue;
        trained.x[trained.n] = sti_cuda_matrix_of(w[i]).w;
        trained.N[trained.n] = (int)w[i]->N;
        trained.y[trained.n++] = at;
    }
    return sti_cuda_round_rows(dev, &trained, err);
}
