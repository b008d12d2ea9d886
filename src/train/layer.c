/* layer.c - a layer forwards and backwards; see layer.h.
 *
 *   h = norm(x)   q, k, v, gate = h W (+ low rank)   q, k = norm(q), norm(k)
 *   y = attention   mid = x + norm(y W_o (+ low rank))
 *   x' = mid + norm((act(h2 W_g) h2 W_u) W_d),  h2 = norm(mid)
 *
 * with the norms that the model's form has (model/config.h).
 * Base weights are frozen: the backward computes gradients of inputs only. */
#include "train/layer.h"

/* Arrays that each layer may have of its own. */
static void carve_own(const sti_config *g, size_t M, int rank, bool raw, sti_carve *c,
                      sti_acts *out)
{
    const size_t hidden = (size_t)g->hidden, ffn = (size_t)g->ffn,
                 qd = (size_t)g->heads * (size_t)g->head_dim,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    float **rows[] = {&out->h,  &out->mid, &out->qr,   &out->gate,  &out->y,
                      &out->kr, &out->v,   &out->feed, &out->lora_x};
    const size_t width[] = {
        hidden, hidden, qd, qd, qd, kd, kd, 2 * ffn, STI_TARGETS * (size_t)rank};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = sti_carve_take(c, M * width[i], sizeof(float));
    out->q = raw ? sti_carve_take(c, M * qd, sizeof(float)) : out->qr;
    out->k = raw ? sti_carve_take(c, M * kd, sizeof(float)) : out->kr;
    const bool normed = g->form.qk_norm != STI_QK_PLAIN, behind = g->form.norm_out;
    out->q_in = normed ? sti_carve_take(c, M * qd, sizeof(float)) : out->q;
    out->k_in = normed ? sti_carve_take(c, M * kd, sizeof(float)) : out->k;
    out->out = behind ? sti_carve_take(c, M * hidden, sizeof(float)) : NULL;
    out->feed_out = behind ? sti_carve_take(c, M * hidden, sizeof(float)) : NULL;
    out->fold = sti_carve_take(c, M * (size_t)g->heads, sizeof *out->fold);
}

void sti_batch_carve(sti_batch *b, sti_carve *c)
{
    const int T = b->T, rows = b->B * T;
    b->pos = sti_carve_take(c, (size_t)rows, sizeof *b->pos);
    b->seg = sti_carve_take(c, (size_t)b->B, sizeof *b->seg);
    for (int r = 0; b->pos && r < rows; r++) b->pos[r] = r % T;
    for (int i = 0; b->seg && i < b->B; i++)
        b->seg[i] = (sti_attn_segment){.row0 = i * T, .n = T, .capacity = T};
}

void sti_acts_carve(const still_model *m, int B, int T, int rank, bool raw, int layers,
                    sti_carve *c, sti_acts *out)
{
    const sti_config *g = &m->cfg;
    const size_t M = (size_t)B * (size_t)T,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    out->cache = sti_carve_take(c, 2 * M * kd, sizeof(float));
    sti_carve one = {0};
    carve_own(g, M, rank, raw, &one, out);
    const size_t step = (one.used + STI_CARVE_ALIGN - 1) / STI_CARVE_ALIGN;
    out->step = layers > 1 ? step * STI_CARVE_ALIGN : 0;
    one =
        (sti_carve){.base = sti_carve_take(c, (size_t)layers * step, STI_CARVE_ALIGN)};
    carve_own(g, M, rank, raw, &one, out);
}

sti_acts sti_acts_of(const sti_acts *first, int layer)
{
    sti_acts a = *first;
    const size_t by = a.step * (size_t)layer;
    float **own[] = {&a.h,    &a.q,    &a.k,   &a.qr,       &a.kr,
                     &a.v,    &a.gate, &a.y,   &a.mid,      &a.feed,
                     &a.q_in, &a.k_in, &a.out, &a.feed_out, &a.lora_x};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (*own[i]) *own[i] += by / sizeof(float);
    a.fold += by / sizeof *a.fold;
    return a;
}

void sti_grads_carve(const still_model *m, int B, int T, int rank, sti_carve *c,
                     sti_grads *out)
{
    const sti_config *g = &m->cfg;
    const size_t M = (size_t)B * (size_t)T, hidden = (size_t)g->hidden,
                 ffn = (size_t)g->ffn, qd = (size_t)g->heads * (size_t)g->head_dim,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    float **rows[] = {&out->dh, &out->dq, &out->dgate, &out->dy,
                      &out->dk, &out->dv, &out->feed,  &out->dropped};
    const size_t width[] = {hidden, qd, qd,      qd,
                            kd,     kd, 2 * ffn, hidden > qd ? hidden : qd};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = sti_carve_take(c, M * width[i], sizeof(float));
    const bool normed = g->form.qk_norm != STI_QK_PLAIN, behind = g->form.norm_out;
    out->dq_in = normed ? sti_carve_take(c, M * qd, sizeof(float)) : out->dq;
    out->dk_in = normed ? sti_carve_take(c, M * kd, sizeof(float)) : out->dk;
    out->dout = behind ? sti_carve_take(c, M * hidden, sizeof(float)) : NULL;
    for (int i = 0; i < STI_MATMUL_MAX; i++)
        out->dlora_x[i] = sti_carve_take(c, M * (size_t)rank, sizeof(float));
}

static int rows_of(const sti_layer_job *j)
{
    return j->batch->B * j->batch->T;
}

static size_t hidden_bytes(const sti_layer_job *j)
{
    return (size_t)rows_of(j) * (size_t)j->m->cfg.hidden * sizeof(float);
}

bool sti_layer_converted(const sti_layer_job *j, int layer)
{
    return j->adapter && sti_attn_converts(j->cfg, layer);
}

static const sti_weight *gate_of(const sti_layer_job *j, int layer)
{
    if (!j->gates || !sti_attn_converts(j->cfg, layer)) return NULL;
    const sti_weight *w = &j->gates->layer[layer].gate.w;
    return w->N ? w : NULL;
}

still_status sti_layer_rotate(const sti_layer_job *j, int layer, float *q, float *k,
                              bool back, still_error *err)
{
    const still_model *m = j->m;
    return m->be->rope(
        m->dev,
        &(sti_rope_args){.x = q,
                         .also = k,
                         .pos = j->batch->pos,
                         .inv_freq = sti_config_inv_freq(&m->cfg, layer, j->batch->T),
                         .M = rows_of(j),
                         .heads = m->cfg.heads,
                         .also_heads = m->cfg.kv_heads,
                         .D = m->cfg.head_dim,
                         .interleaved = m->cfg.rope_interleaved,
                         .back = back},
        err);
}

/* ---- Forwards ------------------------------------------------------------ */

static still_status project(const sti_layer_job *j, int layer, const float *x,
                            still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    sti_acts *a = j->acts;
    const size_t row = (size_t)rows_of(j) * (size_t)m->cfg.head_dim * sizeof(float);
    sti_matmul_args mm = {.x = x,
                          .M = rows_of(j),
                          .n = 3,
                          .norm = L->attn_norm,
                          .eps = m->stream_eps,
                          .normed = a->h,
                          .keep_normed = true,
                          .w = {&L->q.w, &L->k.w, &L->v.w},
                          .bias = {L->q.bias, L->k.bias, L->v.bias},
                          .y = {a->q_in, a->k_in, a->v}};
    if (!L->attn_norm) {
        STI_TRY(m->be->mem_move(m->dev, a->h, x, hidden_bytes(j), err));
        mm.x = a->h;
    }
    const sti_weight *gate = gate_of(j, layer);
    if (gate) {
        mm.w[mm.n] = gate;
        mm.y[mm.n++] = a->gate;
    }
    STI_TRY(
        sti_low_rank_forward(j, layer,
                             &(sti_low_rank){.n = mm.n,
                                             .target = {STI_TARGET_Q, STI_TARGET_K,
                                                        STI_TARGET_V, STI_TARGET_GATE},
                                             .x = a->h,
                                             .y = {a->q_in, a->k_in, a->v, a->gate}},
                             &mm, NULL, err));
    STI_TRY(sti_model_norm_qk(m, layer, a->q_in, a->k_in, a->q, a->k, rows_of(j), err));
    if (a->qr != a->q) {
        STI_TRY(m->be->mem_move(m->dev, a->qr, a->q, row * (size_t)m->cfg.heads, err));
        STI_TRY(
            m->be->mem_move(m->dev, a->kr, a->k, row * (size_t)m->cfg.kv_heads, err));
    }
    return sti_layer_rotate(j, layer, a->qr, a->kr, false, err);
}

/* The layer as pretrained: softmax over everything it sees. */
static still_status teacher_attend(const sti_layer_job *j, int layer, still_error *err)
{
    still_model *m = j->m;
    const sti_config *g = &m->cfg;
    sti_acts *a = j->acts;
    /* On a GPU tensor cores take halves. */
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
    /* A layer that stays softmax goes this way too: its backward needs a route. */
    if (j->adapter) return sti_student_attend(j, layer, j->acts->y, err);
    return teacher_attend(j, layer, err);
}

/* x += feed-forward of x; keeps no activations. */
static still_status ffn_forward(const sti_layer_job *j, int layer, float *x,
                                still_error *err)
{
    still_model *m = j->m;
    return m->be->ffn_forward(m->dev,
                              &(sti_ffn_args){.x = x,
                                              .M = rows_of(j),
                                              .w = sti_model_ffn(m, layer),
                                              .scratch_h = j->back->dh,
                                              .scratch = j->back->feed},
                              err);
}

/* The same from acts->mid, keeping what the backward needs. Forward: out = mid +
 * result, NULL if not wanted. Backward: dx, gradient of the layer's output -> of
 * mid. */
static sti_ffn_train_args feed_args(const sti_layer_job *j, int layer, float *out,
                                    float *dx)
{
    return (sti_ffn_train_args){.x = j->acts->mid,
                                .M = rows_of(j),
                                .w = sti_model_ffn(j->m, layer),
                                .kept = j->acts->feed,
                                .kept_out = j->acts->feed_out,
                                .y = out,
                                .dx = dx,
                                .scratch_h = j->back->dh,
                                .scratch = j->back->feed};
}

/* mid = x + norm_out(y W_o). */
static still_status add_output(const sti_layer_job *j, int layer, const float *x,
                               float *mid, still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    sti_acts *a = j->acts;
    const bool normed = L->attn_norm_out;
    float *to = normed ? a->out : mid;
    STI_TRY(sti_low_rank_forward(
        j, layer,
        &(sti_low_rank){.n = 1, .target = {STI_TARGET_O}, .x = a->y, .y = {to}},
        &(sti_matmul_args){.x = a->y,
                           .M = rows_of(j),
                           .n = 1,
                           .w = {&L->o.w},
                           .bias = {L->o.bias},
                           .y = {to},
                           .accumulate = !normed},
        !normed && mid != x ? x : NULL, err));
    if (!normed) return STILL_OK;
    if (mid != x) STI_TRY(m->be->mem_move(m->dev, mid, x, hidden_bytes(j), err));
    return m->be->rmsnorm(m->dev,
                          &(sti_rmsnorm_args){.x = a->out,
                                              .g = L->attn_norm_out,
                                              .y = mid,
                                              .M = rows_of(j),
                                              .K = m->cfg.hidden,
                                              .eps = m->cfg.rms_eps,
                                              .add = true},
                          err);
}

still_status sti_layer_finish(const sti_layer_job *j, int layer, const float *x,
                              float *out, still_error *err)
{
    const bool keep = j->want & STI_WANT_ACTS;
    STI_TRY(add_output(j, layer, x, keep ? j->acts->mid : out, err));
    if (!keep) return ffn_forward(j, layer, out, err);
    const sti_ffn_train_args feed =
        feed_args(j, layer, j->want & STI_WANT_OUTPUT ? out : NULL, NULL);
    return j->m->be->ffn_train(j->m->dev, &feed, err);
}

still_status sti_layer_forward(const sti_layer_job *j, int layer, const float *x,
                               float *out, still_error *err)
{
    STI_TRY(sti_layer_attend(j, layer, x, err));
    return sti_layer_finish(j, layer, x, out, err);
}

/* ---- Backwards ----------------------------------------------------------- */

/* dx [M, K] = gradient of a norm's input x, given dy. */
static still_status norm_back(const sti_layer_job *j, const float *x, const float *g,
                              const float *dy, int M, int K, float *dx,
                              still_error *err)
{
    still_model *m = j->m;
    STI_TRY(m->be->mem_clear(m->dev, dx, (size_t)M * (size_t)K * sizeof(float), err));
    return m->be->rmsnorm_back(
        m->dev,
        &(sti_rmsnorm_back_args){
            .x = x, .g = g, .dy = dy, .dx = dx, .M = M, .K = K, .eps = m->cfg.rms_eps},
        err);
}

/* dq, dk -> dq_in, dk_in: back through norms and scales of queries and keys. */
static still_status norm_qk_back(const sti_layer_job *j, int layer, still_error *err)
{
    still_model *m = j->m;
    const sti_config *g = &m->cfg;
    const sti_layer *L = &m->layer[layer];
    const sti_acts *a = j->acts;
    sti_grads *b = j->back;
    const int M = rows_of(j), D = g->head_dim, H = g->heads, G = g->kv_heads;
    const bool whole = g->form.qk_norm == STI_QK_WHOLE;
    if (L->q_scale)
        STI_TRY(m->be->scale_columns(
            m->dev,
            &(sti_scale_columns_args){.x = b->dq, .g = L->q_scale, .M = M, .K = H * D},
            err));
    if (!L->q_norm) return STILL_OK;
    STI_TRY(norm_back(j, a->q_in, L->q_norm, b->dq, whole ? M : M * H,
                      whole ? H * D : D, b->dq_in, err));
    return norm_back(j, a->k_in, L->k_norm, b->dk, whole ? M : M * G, whole ? G * D : D,
                     b->dk_in, err);
}

/* dx: gradient of mid -> of the layer's input. */
static still_status attention_back(const sti_layer_job *j, int layer, const float *x,
                                   float *dx, still_error *err)
{
    still_model *m = j->m;
    const sti_layer *L = &m->layer[layer];
    const sti_acts *a = j->acts;
    sti_grads *b = j->back;
    const int M = rows_of(j);
    float *dout = dx;
    if (L->attn_norm_out) {
        dout = b->dout;
        STI_TRY(
            norm_back(j, a->out, L->attn_norm_out, dx, M, m->cfg.hidden, dout, err));
    }
    STI_TRY(sti_low_rank_backward(
        j, layer,
        &(sti_low_rank){.n = 1, .target = {STI_TARGET_O}, .x = a->y, .y = {dout}},
        &(sti_matmul_back_args){
            .dy = {dout}, .M = M, .n = 1, .w = {&L->o.w}, .dx = b->dy},
        err));
    STI_TRY(sti_student_backward(j, layer, b->dy, true, err));
    STI_TRY(norm_qk_back(j, layer, err));
    /* Without a norm the input is the residual stream itself. */
    sti_matmul_back_args mm = {.dy = {b->dq_in, b->dk_in, b->dv},
                               .M = M,
                               .n = 3,
                               .w = {&L->q.w, &L->k.w, &L->v.w},
                               .dx = L->attn_norm ? b->dh : dx,
                               .accumulate = !L->attn_norm};
    const sti_weight *gate = gate_of(j, layer);
    if (gate) {
        mm.dy[mm.n] = b->dgate;
        mm.w[mm.n++] = gate;
    }
    STI_TRY(sti_low_rank_backward(
        j, layer,
        &(sti_low_rank){
            .n = mm.n,
            .target = {STI_TARGET_Q, STI_TARGET_K, STI_TARGET_V, STI_TARGET_GATE},
            .x = a->h,
            .y = {b->dq_in, b->dk_in, b->dv, b->dgate}},
        &mm, err));
    if (!L->attn_norm) return STILL_OK;
    return m->be->rmsnorm_back(m->dev,
                               &(sti_rmsnorm_back_args){.x = x,
                                                        .g = L->attn_norm,
                                                        .dy = b->dh,
                                                        .dx = dx,
                                                        .M = M,
                                                        .K = m->cfg.hidden,
                                                        .eps = m->stream_eps},
                               err);
}

still_status sti_layer_backward(const sti_layer_job *j, int layer, const float *x,
                                float *dx, still_error *err)
{
    const sti_ffn_train_args feed = feed_args(j, layer, NULL, dx);
    STI_TRY(j->m->be->ffn_back(j->m->dev, &feed, err));
    return attention_back(j, layer, x, dx, err);
}
