/* layer.c - a layer forwards and backwards; see layer.h.
 *
 *   h = norm(x)   q, k, v, gate = h W (+ low rank)   y = attention
 *   mid = x + y W_o (+ low rank)   x' = mid + (silu(h2 W_g) h2 W_u) W_d,  h2 =
 * norm(mid)
 *
 * Base weights are frozen: going back asks for the gradient of inputs only. */
#include "train/layer.h"

void sti_acts_carve(const still_model *m, int B, int T, int rank, sti_carve *c,
                    sti_acts *out)
{
    const sti_config *g = &m->cfg;
    const size_t M = (size_t)B * (size_t)T, hidden = (size_t)g->hidden,
                 ffn = (size_t)g->ffn, qd = (size_t)g->heads * (size_t)g->head_dim,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    float **rows[] = {&out->h,    &out->mid, &out->h2, &out->q,  &out->qr,
                      &out->gate, &out->y,   &out->k,  &out->kr, &out->v,
                      &out->g,    &out->u,   &out->s};
    const size_t width[] = {hidden, hidden, hidden, qd,  qd,  qd, qd,
                            kd,     kd,     kd,     ffn, ffn, ffn};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = sti_carve_take(c, M * width[i], sizeof(float));
    for (int t = 0; t < STI_TARGETS; t++)
        out->low[t] = sti_carve_take(c, M * (size_t)rank, sizeof(float));
    out->fold = sti_carve_take(c, M * (size_t)g->heads, sizeof *out->fold);
    out->cache = sti_carve_take(c, 2 * M * kd, sizeof(float));
}

void sti_grads_carve(const still_model *m, int B, int T, int rank, sti_carve *c,
                     sti_grads *out)
{
    const sti_config *g = &m->cfg;
    const size_t M = (size_t)B * (size_t)T, hidden = (size_t)g->hidden,
                 ffn = (size_t)g->ffn, qd = (size_t)g->heads * (size_t)g->head_dim,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    float **rows[] = {&out->dh, &out->dq, &out->dgate, &out->dy,      &out->dk,
                      &out->dv, &out->dg, &out->du,    &out->dropped, &out->dlow};
    const size_t width[] = {
        hidden, qd, qd, qd, kd, kd, ffn, ffn, hidden > qd ? hidden : qd, (size_t)rank};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = sti_carve_take(c, M * width[i], sizeof(float));
}

static int rows_of(const sti_layer_job *j)
{
    return j->batch->B * j->batch->T;
}

static still_status norm(const sti_layer_job *j, const float *x, const float *g,
                         float *y, still_error *err)
{
    const still_model *m = j->m;
    return m->be->rmsnorm(m->dev,
                          &(sti_rmsnorm_args){.x = x,
                                              .g = g,
                                              .y = y,
                                              .M = rows_of(j),
                                              .K = m->cfg.hidden,
                                              .eps = m->cfg.rms_eps},
                          err);
}

/* dx += what goes back through a norm. */
static still_status norm_back(const sti_layer_job *j, const float *x, const float *g,
                              const float *dy, float *dx, still_error *err)
{
    const still_model *m = j->m;
    return m->be->rmsnorm_back(m->dev,
                               &(sti_rmsnorm_back_args){.x = x,
                                                        .g = g,
                                                        .dy = dy,
                                                        .dx = dx,
                                                        .M = rows_of(j),
                                                        .K = m->cfg.hidden,
                                                        .eps = m->cfg.rms_eps},
                               err);
}

bool sti_layer_converted(const sti_layer_job *j, int layer)
{
    return j->adapter && layer >= j->cfg->first && layer <= j->cfg->last;
}

static const sti_weight *gate_of(const sti_layer_job *j, int layer)
{
    if (!sti_layer_converted(j, layer)) return NULL;
    const sti_weight *w = &j->adapter->layer[layer].gate.w;
    return w->N ? w : NULL;
}

still_status sti_layer_rotate(const sti_layer_job *j, float *x, int heads, bool back,
                              still_error *err)
{
    const still_model *m = j->m;
    return m->be->rope(m->dev,
                       &(sti_rope_args){.x = x,
                                        .pos = j->batch->pos,
                                        .inv_freq = m->cfg.inv_freq,
                                        .M = rows_of(j),
                                        .heads = heads,
                                        .D = m->cfg.head_dim,
                                        .interleaved = m->cfg.rope_interleaved,
                                        .back = back},
                       err);
}

/* ---- Forwards ---------------------------------------------------------------------
 */

static still_status project(const sti_layer_job *j, int layer, const float *x,
                            still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    sti_acts *a = j->acts;
    const size_t M = (size_t)rows_of(j);
    STI_TRY(norm(j, x, L->attn_norm, a->h, err));
    sti_matmul_args mm = {.x = a->h,
                          .M = (int)M,
                          .n = 3,
                          .w = {&L->q.w, &L->k.w, &L->v.w},
                          .bias = {L->q.bias, L->k.bias, L->v.bias},
                          .y = {a->q, a->k, a->v}};
    const sti_weight *gate = gate_of(j, layer);
    if (gate) {
        mm.w[mm.n] = gate;
        mm.y[mm.n++] = a->gate;
    }
    STI_TRY(m->be->matmul(m->dev, &mm, err));
    if (sti_layer_converted(j, layer)) {
        STI_TRY(sti_low_rank_forward(j, layer, STI_TARGET_Q, a->h, a->q, err));
        STI_TRY(sti_low_rank_forward(j, layer, STI_TARGET_K, a->h, a->k, err));
        STI_TRY(sti_low_rank_forward(j, layer, STI_TARGET_V, a->h, a->v, err));
        if (gate)
            STI_TRY(
                sti_low_rank_forward(j, layer, STI_TARGET_GATE, a->h, a->gate, err));
    }
    STI_TRY(m->be->mem_move(
        m->dev, a->qr, a->q,
        M * (size_t)(m->cfg.heads * m->cfg.head_dim) * sizeof(float), err));
    STI_TRY(m->be->mem_move(
        m->dev, a->kr, a->k,
        M * (size_t)(m->cfg.kv_heads * m->cfg.head_dim) * sizeof(float), err));
    STI_TRY(sti_layer_rotate(j, a->qr, m->cfg.heads, false, err));
    return sti_layer_rotate(j, a->kr, m->cfg.kv_heads, false, err);
}

/* The layer as it was pretrained: softmax over everything it sees. */
static still_status teacher_attend(const sti_layer_job *j, int layer, still_error *err)
{
    still_model *m = j->m;
    const sti_config *g = &m->cfg;
    sti_acts *a = j->acts;
    /* Far from the program there are tensor cores, which take halves. */
    const sti_dtype cache = m->be->host_memory ? STI_F32 : m->be->cache;
    const size_t one = (size_t)g->kv_heads * (size_t)j->batch->T * (size_t)g->head_dim;
    for (int b = 0; b < j->batch->B; b++) {
        float *kept = (float *)a->cache + 2 * (size_t)b * one;
        j->batch->seg[b].K = kept;
        j->batch->seg[b].V = kept + one;
    }
    return m->be->softmax_attn(m->dev,
                               &(sti_attn_args){.q = a->qr,
                                                .k = a->kr,
                                                .v = a->v,
                                                .o = a->y,
                                                .H = g->heads,
                                                .G = g->kv_heads,
                                                .D = g->head_dim,
                                                .window = g->window[layer],
                                                .cache = cache,
                                                .seg = j->batch->seg,
                                                .n_seg = j->batch->B},
                               err);
}

still_status sti_layer_attend(const sti_layer_job *j, int layer, const float *x,
                              still_error *err)
{
    STI_TRY(project(j, layer, x, err));
    /* A layer that stays softmax has the same attention; its backward needs a route. */
    if (j->adapter) return sti_student_attend(j, layer, j->acts->y, err);
    return teacher_attend(j, layer, err);
}

still_status sti_layer_finish(const sti_layer_job *j, int layer, float *x,
                              still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    sti_acts *a = j->acts;
    const int M = rows_of(j);
    const size_t bytes = (size_t)M * (size_t)m->cfg.hidden * sizeof(float);
    STI_TRY(m->be->mem_move(m->dev, a->mid, x, bytes, err));
    STI_TRY(m->be->matmul(m->dev,
                          &(sti_matmul_args){.x = a->y,
                                             .M = M,
                                             .n = 1,
                                             .w = {&L->o.w},
                                             .bias = {L->o.bias},
                                             .y = {a->mid},
                                             .accumulate = true},
                          err));
    if (sti_layer_converted(j, layer))
        STI_TRY(sti_low_rank_forward(j, layer, STI_TARGET_O, a->y, a->mid, err));
    STI_TRY(norm(j, a->mid, L->ffn_norm, a->h2, err));
    STI_TRY(m->be->matmul(m->dev,
                          &(sti_matmul_args){.x = a->h2,
                                             .M = M,
                                             .n = 2,
                                             .w = {&L->gate.w, &L->up.w},
                                             .bias = {L->gate.bias, L->up.bias},
                                             .y = {a->g, a->u}},
                          err));
    STI_TRY(
        m->be->swiglu(m->dev,
                      &(sti_swiglu_args){
                          .gate = a->g, .up = a->u, .y = a->s, .M = M, .K = m->cfg.ffn},
                      err));
    STI_TRY(m->be->mem_move(m->dev, x, a->mid, bytes, err));
    return m->be->matmul(m->dev,
                         &(sti_matmul_args){.x = a->s,
                                            .M = M,
                                            .n = 1,
                                            .w = {&L->down.w},
                                            .bias = {L->down.bias},
                                            .y = {x},
                                            .accumulate = true},
                         err);
}

still_status sti_layer_forward(const sti_layer_job *j, int layer, float *x,
                               still_error *err)
{
    STI_TRY(sti_layer_attend(j, layer, x, err));
    return sti_layer_finish(j, layer, x, err);
}

/* ---- Backwards --------------------------------------------------------------------
 */

/* dx: of the layer's output -> of mid. */
static still_status feed_forward_back(const sti_layer_job *j, int layer, float *dx,
                                      still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    const sti_acts *a = j->acts;
    sti_grads *b = j->back;
    const int M = rows_of(j);
    STI_TRY(m->be->matmul_back(
        m->dev,
        &(sti_matmul_back_args){
            .dy = {dx}, .M = M, .n = 1, .w = {&L->down.w}, .dx = b->dg},
        err));
    STI_TRY(m->be->swiglu_back(m->dev,
                               &(sti_swiglu_back_args){.gate = a->g,
                                                       .up = a->u,
                                                       .dy = b->dg,
                                                       .dgate = b->dg,
                                                       .dup = b->du,
                                                       .M = M,
                                                       .K = m->cfg.ffn},
                               err));
    STI_TRY(m->be->matmul_back(m->dev,
                               &(sti_matmul_back_args){.dy = {b->dg, b->du},
                                                       .M = M,
                                                       .n = 2,
                                                       .w = {&L->gate.w, &L->up.w},
                                                       .dx = b->dh},
                               err));
    return norm_back(j, a->mid, L->ffn_norm, b->dh, dx, err);
}

/* dx: of mid -> of the layer's input. */
static still_status attention_back(const sti_layer_job *j, int layer, const float *x,
                                   float *dx, still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    const sti_acts *a = j->acts;
    sti_grads *b = j->back;
    const int M = rows_of(j);
    STI_TRY(
        m->be->matmul_back(m->dev,
                           &(sti_matmul_back_args){
                               .dy = {dx}, .M = M, .n = 1, .w = {&L->o.w}, .dx = b->dy},
                           err));
    if (sti_layer_converted(j, layer))
        STI_TRY(sti_low_rank_backward(j, layer, STI_TARGET_O, a->y, dx, b->dy, err));
    STI_TRY(sti_student_backward(j, layer, b->dy, true, err));
    sti_matmul_back_args mm = {.dy = {b->dq, b->dk, b->dv},
                               .M = M,
                               .n = 3,
                               .w = {&L->q.w, &L->k.w, &L->v.w},
                               .dx = b->dh};
    const sti_weight *gate = gate_of(j, layer);
    if (gate) {
        mm.dy[mm.n] = b->dgate;
        mm.w[mm.n++] = gate;
    }
    STI_TRY(m->be->matmul_back(m->dev, &mm, err));
    if (sti_layer_converted(j, layer)) {
        STI_TRY(sti_low_rank_backward(j, layer, STI_TARGET_Q, a->h, b->dq, b->dh, err));
        STI_TRY(sti_low_rank_backward(j, layer, STI_TARGET_K, a->h, b->dk, b->dh, err));
        STI_TRY(sti_low_rank_backward(j, layer, STI_TARGET_V, a->h, b->dv, b->dh, err));
        if (gate)
            STI_TRY(sti_low_rank_backward(j, layer, STI_TARGET_GATE, a->h, b->dgate,
                                          b->dh, err));
    }
    return norm_back(j, x, L->attn_norm, b->dh, dx, err);
}

still_status sti_layer_backward(const sti_layer_job *j, int layer, const float *x,
                                float *dx, still_error *err)
{
    STI_TRY(feed_forward_back(j, layer, dx, err));
    return attention_back(j, layer, x, dx, err);
}
