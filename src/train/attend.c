/* attend.c - the student's attention over whole sequences, by the engine of its method:
 * the parallel form of the hybrid operator, or that of Liger and SUPRA. A layer that
 * stays softmax is also a setting of the hybrid operator: every token is kept exact. */
#include <stdlib.h>

#include "base/mem.h"
#include "train/layer.h"

float *sti_grad_of(const sti_layer_job *j, int layer, sti_trained kind, sti_target t)
{
    const sti_adapter *a = j->adapter;
    if (!j->grad || (kind == STI_TRAINED_GATE && j->low_rank_only)) return NULL;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (e->layer == layer && e->kind == kind && e->target == t)
            return j->grad + e->at;
    }
    return NULL;
}

static float *own_grad(const sti_layer_job *j, int layer, sti_trained kind)
{
    return sti_grad_of(j, layer, kind, STI_TARGETS);
}

/* ---- The hybrid operator ------------------------------------------------- */

enum { OTHER_CHUNK = 64 }; /* for layers that stay softmax beside Liger or SUPRA */

/* The window of a layer that stays as it is, if sequences are longer; 0: all is seen. */
static int window_of(const sti_layer_job *j, int layer)
{
    const int window = j->m->cfg.window[layer];
    return !sti_layer_converted(j, layer) && window < j->batch->T ? window : 0;
}

typedef struct hybrid_call {
    sti_hybrid_settings set;
    sti_hybrid_parallel_args args; /* args.set points at set */
} hybrid_call;

static void hybrid_begin(const sti_layer_job *j, int layer, hybrid_call *h)
{
    const still_model *m = j->m;
    const sti_acts *a = j->acts;
    const int chunk = j->cfg->hybrid.chunk; /* 0: the method has none */
    const int window = window_of(j, layer);
    sti_attn_layer l = sti_model_attn_layer(m, layer);
    l.trained = j->adapter->layer[layer].attn;
    if (sti_layer_converted(j, layer))
        h->set = sti_attn_hybrid_settings(j->cfg, &l);
    else
        sti_hybrid_preset("softmax",
                          window      ? 1
                          : chunk > 0 ? chunk
                                      : OTHER_CHUNK,
                          &h->set);
    if (window) h->set.cap = window;
    h->args = (sti_hybrid_parallel_args){.set = &h->set,
                                         .shape = sti_attn_hybrid_shape(&l),
                                         .B = j->batch->B,
                                         .T = j->batch->T,
                                         .in = sti_attn_hybrid_in(&l),
                                         .fold_chunk = a->fold};
    h->args.in.q = a->qr;
    h->args.in.k = a->kr;
    h->args.in.v = a->v;
    if (j->adapter->layer[layer].gate.w.N) h->args.in.gate_logit = a->gate;
}

/* The route of a sliding window: in chunks of one token, token i is salient until query
 * i + window folds it, and what is folded without a linear state is gone. */
static still_status window_route(const sti_layer_job *j, int window, still_error *err)
{
    const int B = j->batch->B, T = j->batch->T, G = j->m->cfg.kv_heads;
    const size_t n = (size_t)B * (size_t)T * (size_t)G;
    int32_t *fold = sti_alloc(n, sizeof *fold);
    if (!fold) return sti_fail_memory(err, "route of a batch", n * sizeof *fold);
    for (size_t i = 0; i < n; i++) {
        const int until = (int)(i / (size_t)G) % T + window;
        fold[i] = until < T ? until : -1;
    }
    const still_status st =
        j->m->be->mem_move(j->m->dev, j->acts->fold, fold, n * sizeof *fold, err);
    free(fold);
    return st;
}

static still_status hybrid_attend(const sti_layer_job *j, int layer, float *y,
                                  still_error *err)
{
    still_model *m = j->m;
    hybrid_call h;
    hybrid_begin(j, layer, &h);
    h.args.y = y;
    const int window = window_of(j, layer);
    STI_TRY(window ? window_route(j, window, err)
                   : m->be->hybrid_route(m->dev, &h.args, err));
    return m->be->hybrid_parallel(m->dev, &h.args, err);
}

static still_status hybrid_back(const sti_layer_job *j, int layer, const float *dy,
                                bool inputs, still_error *err)
{
    still_model *m = j->m;
    sti_grads *b = j->back;
    hybrid_call h;
    hybrid_begin(j, layer, &h);
    h.args.dy = dy;
    sti_hybrid_grad *g = &h.args.grad;
    if (inputs) {
        g->q = b->dq;
        g->k = b->dk;
        g->v = b->dv;
    }
    if (h.args.in.gate_logit) g->gate_logit = b->dgate;
    if (sti_layer_converted(j, layer)) {
        g->map_q = own_grad(j, layer, STI_TRAINED_MAP_Q);
        g->map_k = own_grad(j, layer, STI_TRAINED_MAP_K);
        g->bias_q = own_grad(j, layer, STI_TRAINED_BIAS_Q);
        g->bias_k = own_grad(j, layer, STI_TRAINED_BIAS_K);
        g->alpha = own_grad(j, layer, STI_TRAINED_ALPHA);
        g->window_logit = own_grad(j, layer, STI_TRAINED_WINDOW);
    }
    STI_TRY(m->be->hybrid_backward(m->dev, &h.args, err));
    float *gate = own_grad(j, layer, STI_TRAINED_GATE);
    if (h.args.in.gate_logit && gate)
        STI_TRY(m->be->matmul_grad(
            m->dev,
            &(sti_matmul_grad_args){.dy = b->dgate,
                                    .x = j->acts->h,
                                    .dw = gate,
                                    .M = j->batch->B * j->batch->T,
                                    .N = m->cfg.heads * m->cfg.head_dim,
                                    .K = m->cfg.hidden,
                                    .scale = 1},
            1, err));
    return inputs ? sti_layer_rotate(j, layer, b->dq, b->dk, true, err) : STILL_OK;
}

/* ---- Liger and SUPRA ----------------------------------------------------- */

static sti_linear_args linear_begin(const sti_layer_job *j, int layer, int sequence)
{
    const still_model *m = j->m;
    const sti_config *g = &m->cfg;
    const sti_acts *a = j->acts;
    const sti_attn_params *p = &j->adapter->layer[layer].attn;
    const size_t row = (size_t)sequence * (size_t)j->batch->T,
                 qd = (size_t)g->heads * (size_t)g->head_dim,
                 kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    return (sti_linear_args){
        .shape = {g->heads, g->kv_heads, g->head_dim},
        .T = j->batch->T,
        .window = j->cfg->window,
        .in = {.q = a->q + row * qd,
               .k = a->k + row * kd,
               .v = a->v + row * kd,
               .inv_freq = sti_config_inv_freq(g, layer, j->batch->T),
               .interleaved = g->rope_interleaved,
               .map_q = p->map_q,
               .map_k = p->map_k,
               .bias_q = p->bias_q,
               .bias_k = p->bias_k}};
}

/* All sequences in one call, each from an empty state. */
static still_status linear_attend(const sti_layer_job *j, int layer, float *y,
                                  still_error *err)
{
    still_model *m = j->m;
    const size_t B = (size_t)j->batch->B, T = (size_t)j->batch->T;
    const size_t qd = (size_t)m->cfg.heads * (size_t)m->cfg.head_dim;
    const size_t kv = m->be->state_kv ? m->be->state_kv : sizeof(float);
    sti_linear_args *a = sti_alloc(B, sizeof *a + sizeof *a->state);
    if (!a) return sti_fail_memory(err, "attention of a batch", B * sizeof *a);
    sti_linear_state *st = (sti_linear_state *)(a + B);
    sti_block memory = {0};
    still_status status = STILL_OK;
    for (int pass = 0; pass < 2 && status == STILL_OK; pass++) {
        sti_carve c = {.base = memory.p};
        for (size_t b = 0; b < B; b++) {
            a[b] = linear_begin(j, layer, (int)b);
            sti_linear_state_carve(&st[b], &c, &a[b].shape, a[b].window, kv,
                                   m->be->state_real);
            a[b].state = &st[b];
            a[b].y = y + b * T * qd;
        }
        if (pass == 0) status = m->be->mem_new(m->dev, c.used, &memory, err);
    }
    if (status == STILL_OK) status = m->be->linear(m->dev, a, (int)B, err);
    m->be->mem_free(m->dev, &memory);
    free(a);
    return status;
}

static still_status linear_back(const sti_layer_job *j, int layer, const float *dy,
                                bool inputs, still_error *err)
{
    still_model *m = j->m;
    sti_grads *g = j->back;
    const size_t B = (size_t)j->batch->B, T = (size_t)j->batch->T;
    const size_t qd = (size_t)m->cfg.heads * (size_t)m->cfg.head_dim,
                 kd = (size_t)m->cfg.kv_heads * (size_t)m->cfg.head_dim;
    sti_linear_args *a = sti_alloc(B, sizeof *a);
    if (!a) return sti_fail_memory(err, "attention of a batch", B * sizeof *a);
    for (size_t b = 0; b < B; b++) {
        a[b] = linear_begin(j, layer, (int)b);
        a[b].dy = dy + b * T * qd;
        a[b].grad = (sti_linear_grad){
            .q = inputs ? g->dq + b * T * qd : NULL,
            .k = inputs ? g->dk + b * T * kd : NULL,
            .v = inputs ? g->dv + b * T * kd : NULL,
            .map_q = own_grad(j, layer, STI_TRAINED_MAP_Q),
            .map_k = own_grad(j, layer, STI_TRAINED_MAP_K),
            .bias_q = own_grad(j, layer, STI_TRAINED_BIAS_Q),
            .bias_k = own_grad(j, layer, STI_TRAINED_BIAS_K),
        };
    }
    still_status status = m->be->linear_backward(m->dev, a, (int)B, err);
    free(a);
    return status;
}

/* ---- Either -------------------------------------------------------------- */

static bool is_linear(const sti_layer_job *j, int layer)
{
    return sti_layer_converted(j, layer) && j->cfg->method->engine == &sti_attn_linear;
}

still_status sti_student_attend(const sti_layer_job *j, int layer, float *y,
                                still_error *err)
{
    return is_linear(j, layer) ? linear_attend(j, layer, y, err)
                               : hybrid_attend(j, layer, y, err);
}

still_status sti_student_backward(const sti_layer_job *j, int layer, const float *dy,
                                  bool inputs, still_error *err)
{
    return is_linear(j, layer) ? linear_back(j, layer, dy, inputs, err)
                               : hybrid_back(j, layer, dy, inputs, err);
}

still_status sti_student_match(const sti_layer_job *j, int layer, float scale,
                               double *loss, still_error *err)
{
    still_model *m = j->m;
    if (is_linear(j, layer))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "method %s has no attention weights to match",
                        j->cfg->method->name);
    hybrid_call h;
    hybrid_begin(j, layer, &h);
    h.args.grad = (sti_hybrid_grad){
        .map_q = own_grad(j, layer, STI_TRAINED_MAP_Q),
        .map_k = own_grad(j, layer, STI_TRAINED_MAP_K),
        .bias_q = own_grad(j, layer, STI_TRAINED_BIAS_Q),
        .bias_k = own_grad(j, layer, STI_TRAINED_BIAS_K),
        .alpha = own_grad(j, layer, STI_TRAINED_ALPHA),
        .window_logit = own_grad(j, layer, STI_TRAINED_WINDOW),
    };
    return m->be->hybrid_match(
        m->dev, &(sti_hybrid_match_args){.p = &h.args, .scale = scale, .loss = loss},
        err);
}
