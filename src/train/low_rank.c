/* low_rank.c - low-rank additions to frozen projections, forwards and backwards:
 *
 *   lora_x = scale drop(x) A^T      y += lora_x B^T
 *   dB += dy^T lora_x     dlora_x = scale dy B     dA += dlora_x^T drop(x)
 *   dx = dy W + drop(dlora_x A)
 *
 * Without dropout A is one more matrix in the backward product with W. */
#include "base/random.h"
#include "train/layer.h"

static const sti_lora *find(const sti_layer_job *j, int layer, sti_target t)
{
    if (!sti_layer_converted(j, layer)) return NULL;
    const sti_lora *l = &j->adapter->layer[layer].lora[t];
    return l->a.w.N ? l : NULL;
}

static float scale_of(const sti_layer_job *j)
{
    const sti_lora_spec *s = j->adapter ? &j->adapter->spec.lora : NULL;
    return s && s->rank ? s->alpha / (float)s->rank : 1;
}

static size_t rows_of(const sti_layer_job *j)
{
    return (size_t)j->batch->B * (size_t)j->batch->T;
}

/* Where lora_x of a target is; those of one input are consecutive. */
static float *low_of(const sti_layer_job *j, sti_target t)
{
    static const size_t place[STI_TARGETS] = {[STI_TARGET_Q] = 0,
                                              [STI_TARGET_K] = 1,
                                              [STI_TARGET_V] = 2,
                                              [STI_TARGET_GATE] = 3,
                                              [STI_TARGET_O] = 4};
    return j->acts->lora_x + place[t] * rows_of(j) * (size_t)j->adapter->spec.lora.rank;
}

/* y = [y +] dropout of x. */
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
                                  const sti_low_rank *r, const sti_matmul_args *base,
                                  const float *from, still_error *err)
{
    const int M = (int)rows_of(j);
    const bool dropped = j->dropout.p > 0;
    sti_matmul_lora_args all = {.product = *base, .from = from, .scale = scale_of(j)};
    for (int i = 0; i < r->n && !dropped; i++) {
        const sti_lora *lora = find(j, layer, r->target[i]);
        if (lora)
            all.add[i] =
                (sti_lora_args){&lora->a.w, &lora->b.w, low_of(j, r->target[i])};
    }
    STI_TRY(j->m->be->matmul_lora(j->m->dev, &all, err));
    for (int i = 0; i < r->n && dropped; i++) { /* each drops other elements */
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

/* Gradients of matrices yet to be computed. */
typedef struct grads {
    int n;
    sti_matmul_grad_args of[2 * STI_MATMUL_MAX];
} grads;

/* dlora_x; those of A and B are left for later. */
static still_status matrices_back(const sti_layer_job *j, int layer, sti_target t,
                                  const sti_lora *lora, const float *x, const float *dy,
                                  float *dlora_x, grads *later, still_error *err)
{
    still_model *m = j->m;
    const int M = (int)rows_of(j), rank = (int)lora->a.w.N, in = (int)lora->a.w.K,
              out = (int)lora->b.w.N;
    float *da = sti_grad_of(j, layer, STI_TRAINED_LORA_A, t),
          *db = sti_grad_of(j, layer, STI_TRAINED_LORA_B, t);
    if (db)
        later->of[later->n++] = (sti_matmul_grad_args){.dy = dy,
                                                       .x = low_of(j, t),
                                                       .dw = db,
                                                       .M = M,
                                                       .N = out,
                                                       .K = rank,
                                                       .scale = 1};
    if (da) {
        STI_TRY(input(j, layer, t, in, &x, err));
        later->of[later->n++] = (sti_matmul_grad_args){
            .dy = dlora_x, .x = x, .dw = da, .M = M, .N = rank, .K = in, .scale = 1};
    }
    return m->be->matmul_back(m->dev,
                              &(sti_matmul_back_args){.dy = {dy},
                                                      .M = M,
                                                      .n = 1,
                                                      .w = {&lora->b.w},
                                                      .dx = dlora_x,
                                                      .scale = scale_of(j)},
                              err);
}

static still_status compute(const sti_layer_job *j, grads *g, still_error *err)
{
    const int n = g->n;
    g->n = 0;
    return n > 0 ? j->m->be->matmul_grad(j->m->dev, g->of, n, err) : STILL_OK;
}

/* dx += drop(dlora_x A). */
static still_status dropped_back(const sti_layer_job *j, int layer, sti_target t,
                                 const sti_lora *lora, const float *dlora_x, float *dx,
                                 still_error *err)
{
    still_model *m = j->m;
    const size_t M = rows_of(j);
    STI_TRY(m->be->matmul_back(m->dev,
                               &(sti_matmul_back_args){.dy = {dlora_x},
                                                       .M = (int)M,
                                                       .n = 1,
                                                       .w = {&lora->a.w},
                                                       .dx = j->back->dropped},
                               err));
    return drop(j, layer, t, j->back->dropped, M * (size_t)lora->a.w.K, dx, true, err);
}

still_status sti_low_rank_backward(const sti_layer_job *j, int layer,
                                   const sti_low_rank *r,
                                   const sti_matmul_back_args *base, still_error *err)
{
    still_model *m = j->m;
    sti_matmul_back_args all = *base;
    grads later = {.n = 0};
    for (int i = 0; i < r->n; i++) {
        const sti_lora *lora = find(j, layer, r->target[i]);
        float *dlora_x = j->back->dlora_x[i];
        if (!lora) continue;
        STI_TRY(matrices_back(j, layer, r->target[i], lora, r->x, r->y[i], dlora_x,
                              &later, err));
        if (j->dropout.p > 0) { /* the next input overwrites this one */
            STI_TRY(compute(j, &later, err));
            continue;
        }
        all.dy[all.n] = dlora_x;
        all.w[all.n++] = &lora->a.w;
    }
    STI_TRY(compute(j, &later, err));
    STI_TRY(m->be->matmul_back(m->dev, &all, err));
    for (int i = 0; i < r->n && j->dropout.p > 0; i++) {
        const sti_lora *lora = find(j, layer, r->target[i]);
        if (lora)
            STI_TRY(dropped_back(j, layer, r->target[i], lora, j->back->dlora_x[i],
                                 all.dx, err));
    }
    return STILL_OK;
}
