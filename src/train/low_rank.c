/* low_rank.c - low-rank additions to frozen projections, forwards and backwards:
 *
 *   low = scale drop(x) A^T      y += low B^T
 *   dB += dy^T low     dlow = scale dy B     dA += dlow^T drop(x)     dx += drop(dlow
 * A) */
#include "base/random.h"
#include "train/layer.h"

typedef struct low_rank {
    const sti_lora *lora;
    float scale;
    int rank, in, out;
} low_rank;

static bool find(const sti_layer_job *j, int layer, sti_target t, low_rank *r)
{
    const sti_adapter *a = j->adapter;
    r->lora = &a->layer[layer].lora[t];
    r->rank = a->spec.lora.rank;
    if (!r->lora->a.w.N) return false;
    r->scale = a->spec.lora.alpha / (float)r->rank;
    r->in = (int)r->lora->a.w.K;
    r->out = (int)r->lora->b.w.N;
    return true;
}

/* y = [y +] what dropout leaves of x. */
static still_status drop(const sti_layer_job *j, int layer, sti_target t,
                         const float *x, size_t n, float *y, bool add, still_error *err)
{
    const uint64_t place = sti_mix64((uint64_t)layer * STI_TARGETS + (uint64_t)t);
    return j->m->be->dropout(
        j->m->dev,
        &(sti_dropout_args){.x = x,
                            .y = y,
                            .n = n,
                            .p = j->dropout.p,
                            .key = sti_mix64(j->dropout.key ^ place),
                            .add = add},
        err);
}

static still_status input(const sti_layer_job *j, int layer, sti_target t,
                          const low_rank *r, const float *x, const float **out,
                          still_error *err)
{
    const size_t n = (size_t)j->batch->B * (size_t)j->batch->T * (size_t)r->in;
    *out = j->dropout.p > 0 ? j->back->dropped : x;
    if (*out == x) return STILL_OK;
    return drop(j, layer, t, x, n, j->back->dropped, false, err);
}

still_status sti_low_rank_forward(const sti_layer_job *j, int layer, sti_target t,
                                  const float *x, float *y, still_error *err)
{
    low_rank r;
    if (!find(j, layer, t, &r)) return STILL_OK;
    STI_TRY(input(j, layer, t, &r, x, &x, err));
    return sti_model_add_low_rank(j->adapter, layer, &t, 1, x,
                                  j->batch->B * j->batch->T, j->acts->low[t], &y, err);
}

still_status sti_low_rank_backward(const sti_layer_job *j, int layer, sti_target t,
                                   const float *x, const float *dy, float *dx,
                                   still_error *err)
{
    low_rank r;
    if (!find(j, layer, t, &r)) return STILL_OK;
    still_model *m = j->m;
    const int M = j->batch->B * j->batch->T;
    float *dlow = j->back->dlow;
    STI_TRY(m->be->matmul_back(
        m->dev,
        &(sti_matmul_back_args){
            .dy = {dy}, .M = M, .n = 1, .w = {&r.lora->b.w}, .dx = dlow},
        err));
    STI_TRY(m->be->scale(m->dev, dlow, (size_t)M * (size_t)r.rank, r.scale, err));
    float *da = sti_grad_of(j, layer, STI_TRAINED_LORA_A, t),
          *db = sti_grad_of(j, layer, STI_TRAINED_LORA_B, t);
    if (db)
        STI_TRY(m->be->matmul_grad(m->dev,
                                   &(sti_matmul_grad_args){.dy = dy,
                                                           .x = j->acts->low[t],
                                                           .dw = db,
                                                           .M = M,
                                                           .N = r.out,
                                                           .K = r.rank,
                                                           .scale = 1},
                                   err));
    if (da) {
        STI_TRY(input(j, layer, t, &r, x, &x, err));
        STI_TRY(m->be->matmul_grad(m->dev,
                                   &(sti_matmul_grad_args){.dy = dlow,
                                                           .x = x,
                                                           .dw = da,
                                                           .M = M,
                                                           .N = r.rank,
                                                           .K = r.in,
                                                           .scale = 1},
                                   err));
    }
    const bool drops = j->dropout.p > 0;
    STI_TRY(
        m->be->matmul_back(m->dev,
                           &(sti_matmul_back_args){.dy = {dlow},
                                                   .M = M,
                                                   .n = 1,
                                                   .w = {&r.lora->a.w},
                                                   .dx = drops ? j->back->dropped : dx,
                                                   .accumulate = !drops},
                           err));
    if (!drops) return STILL_OK;
    return drop(j, layer, t, j->back->dropped, (size_t)M * (size_t)r.in, dx, true, err);
}
