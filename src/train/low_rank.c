/* low_rank.c - low-rank additions to frozen projections, forwards and backwards:
 *
 *   low = scale drop(x) A^T      y += low B^T
 *   dB += dy^T low     dlow = scale dy B     dA += dlow^T drop(x)     dx += drop(dlow
 * A) */
#include "base/random.h"
#include "train/layer.h"

static const sti_lora *find(const sti_layer_job *j, int layer, sti_target t)
{
    const sti_lora *l = &j->adapter->layer[layer].lora[t];
    return l->a.w.N ? l : NULL;
}

static size_t rows_of(const sti_layer_job *j)
{
    return (size_t)j->batch->B * (size_t)j->batch->T;
}

/* Where low of a target is: those of one input follow each other. */
static float *low_of(const sti_layer_job *j, sti_target t)
{
    static const size_t place[STI_TARGETS] = {[STI_TARGET_Q] = 0,
                                              [STI_TARGET_K] = 1,
                                              [STI_TARGET_V] = 2,
                                              [STI_TARGET_GATE] = 3,
                                              [STI_TARGET_O] = 4};
    return j->acts->low + place[t] * rows_of(j) * (size_t)j->adapter->spec.lora.rank;
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

/* *x as the target's A sees it. */
static still_status input(const sti_layer_job *j, int layer, sti_target t, int64_t in,
                          const float **x, still_error *err)
{
    if (j->dropout.p <= 0) return STILL_OK;
    STI_TRY(
        drop(j, layer, t, *x, rows_of(j) * (size_t)in, j->back->dropped, false, err));
    *x = j->back->dropped;
    return STILL_OK;
}

still_status sti_low_rank_forward(const sti_layer_job *j, int layer,
                                  const sti_low_rank *r, still_error *err)
{
    const int M = (int)rows_of(j);
    if (j->dropout.p <= 0)
        return sti_model_add_low_rank(j->adapter, layer, r->target, r->n, r->x, M,
                                      low_of(j, r->target[0]), r->y, err);
    for (int i = 0; i < r->n; i++) { /* each drops other numbers */
        const sti_target t = r->target[i];
        const sti_lora *lora = find(j, layer, t);
        const float *x = r->x;
        if (!lora) continue;
        STI_TRY(input(j, layer, t, lora->a.w.K, &x, err));
        STI_TRY(sti_model_add_low_rank(j->adapter, layer, &t, 1, x, M, low_of(j, t),
                                       &r->y[i], err));
    }
    return STILL_OK;
}

/* dlow, and the gradients of A and B. */
static still_status matrices_back(const sti_layer_job *j, int layer, sti_target t,
                                  const sti_lora *lora, const float *x, const float *dy,
                                  float *dlow, still_error *err)
{
    still_model *m = j->m;
    const sti_lora_spec *spec = &j->adapter->spec.lora;
    const size_t M = rows_of(j);
    const int rank = spec->rank, in = (int)lora->a.w.K, out = (int)lora->b.w.N;
    float *da = sti_grad_of(j, layer, STI_TRAINED_LORA_A, t),
          *db = sti_grad_of(j, layer, STI_TRAINED_LORA_B, t);
    STI_TRY(m->be->matmul_back(
        m->dev,
        &(sti_matmul_back_args){
            .dy = {dy}, .M = (int)M, .n = 1, .w = {&lora->b.w}, .dx = dlow},
        err));
    STI_TRY(
        m->be->scale(m->dev, dlow, M * (size_t)rank, spec->alpha / (float)rank, err));
    if (db)
        STI_TRY(m->be->matmul_grad(m->dev,
                                   &(sti_matmul_grad_args){.dy = dy,
                                                           .x = low_of(j, t),
                                                           .dw = db,
                                                           .M = (int)M,
                                                           .N = out,
                                                           .K = rank,
                                                           .scale = 1},
                                   err));
    if (!da) return STILL_OK;
    STI_TRY(input(j, layer, t, in, &x, err));
    return m->be->matmul_grad(
        m->dev,
        &(sti_matmul_grad_args){
            .dy = dlow, .x = x, .dw = da, .M = (int)M, .N = rank, .K = in, .scale = 1},
        err);
}

still_status sti_low_rank_backward(const sti_layer_job *j, int layer,
                                   const sti_low_rank *r, float *dx, still_error *err)
{
    still_model *m = j->m;
    const size_t M = rows_of(j);
    sti_matmul_back_args all = {.M = (int)M, .dx = dx, .accumulate = true};
    for (int i = 0; i < r->n; i++) {
        const sti_target t = r->target[i];
        const sti_lora *lora = find(j, layer, t);
        float *dlow = j->back->dlow[i];
        if (!lora) continue;
        STI_TRY(matrices_back(j, layer, t, lora, r->x, r->y[i], dlow, err));
        if (j->dropout.p <= 0) {
            all.dy[all.n] = dlow;
            all.w[all.n++] = &lora->a.w;
            continue;
        }
        STI_TRY(m->be->matmul_back(m->dev,
                                   &(sti_matmul_back_args){.dy = {dlow},
                                                           .M = (int)M,
                                                           .n = 1,
                                                           .w = {&lora->a.w},
                                                           .dx = j->back->dropped},
                                   err));
        STI_TRY(drop(j, layer, t, j->back->dropped, M * (size_t)lora->a.w.K, dx, true,
                     err));
    }
    return all.n > 0 ? m->be->matmul_back(m->dev, &all, err) : STILL_OK;
}
