/* forward.c - the transformer, one batch of rows at a time.
 *
 * Rows of several sequences are computed together: everything but attention treats
 * them alike, and attention is told which rows belong to which sequence. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

enum { FEW_ROWS = 16 }; /* of logits, at least */

/* ---- Scratch ------------------------------------------------------------- */

/* Logits follow the layers and need only x and h, so on the host they lie where the
 * other activations do: as many rows as fit there, but enough for a few sessions. */
static void carve_logits(const still_model *m, int rows, size_t from, sti_carve *c,
                         sti_scratch *out)
{
    const size_t vocab = (size_t)m->cfg.vocab;
    sti_carve at = {.base = c->base, .used = from};
    const size_t room = (c->used - from) / sizeof(float) / vocab;
    int n = rows < m->be->head_rows ? rows : m->be->head_rows;
    if (m->be->host_memory && n > FEW_ROWS && room < (size_t)n)
        n = room > FEW_ROWS ? (int)room : FEW_ROWS;
    out->head_rows = n;
    if (!m->be->host_memory) at.used = c->used;
    out->logits = sti_carve_take(&at, (size_t)n * vocab, sizeof(float));
    if (at.used > c->used) c->used = at.used;
}

static void carve_memory(const still_model *m, int rows, sti_carve *c, sti_scratch *out)
{
    const sti_config *g = &m->cfg;
    size_t R = (size_t)rows, hidden = (size_t)g->hidden;
    size_t qd = (size_t)g->heads * (size_t)g->head_dim;
    size_t kd = (size_t)g->kv_heads * (size_t)g->head_dim;
    out->rows = rows;
    out->x = sti_carve_take(c, R * hidden, sizeof(float));
    out->h = sti_carve_take(c, R * hidden, sizeof(float));
    const size_t after_h = c->used;
    out->q = sti_carve_take(c, R * qd, sizeof(float));
    out->q_raw = sti_carve_take(c, R * qd, sizeof(float));
    out->o = sti_carve_take(c, R * qd, sizeof(float));
    out->k = sti_carve_take(c, R * kd, sizeof(float));
    out->v = sti_carve_take(c, R * kd, sizeof(float));
    out->ffn = sti_carve_take(c, 2 * R * (size_t)g->ffn, sizeof(float));
    if (m->adapter) {
        size_t rank = (size_t)sti_adapter_rank(m->adapter);
        if (m->adapter->spec.method.gate)
            out->attn_gate = sti_carve_take(c, R * qd, sizeof(float));
        out->lora_x = sti_carve_take(c, STI_MATMUL_MAX * R * rank, sizeof(float));
    }
    carve_logits(m, rows, after_h, c, out);
}

static void carve_tables(int rows, sti_carve *c, sti_scratch *out)
{
    size_t R = (size_t)rows;
    out->pos = sti_carve_take(c, R, sizeof *out->pos);
    out->sequence = sti_carve_take(c, R, sizeof *out->sequence);
    out->attn = sti_carve_take(c, R, STI_ATTN_SCRATCH);
    out->key = sti_carve_take(c, R + 1, sizeof *out->key);
}

size_t sti_model_scratch_bytes(const still_model *m, int rows)
{
    sti_carve memory = {0};
    sti_scratch unused;
    carve_memory(m, rows, &memory, &unused);
    return memory.used;
}

size_t sti_model_table_bytes(int rows)
{
    sti_carve tables = {0};
    sti_scratch unused;
    carve_tables(rows, &tables, &unused);
    return tables.used;
}

still_status sti_model_reserve(still_model *m, int rows, still_error *err)
{
    if (rows <= m->scratch.rows) return STILL_OK;
    sti_scratch grown = {0};
    sti_carve memory = {0}, tables = {0};
    carve_memory(m, rows, &memory, &grown);
    carve_tables(rows, &tables, &grown);
    if (!sti_block_new(&grown.tables, tables.used))
        return sti_fail_memory(err, "rows of a pass", tables.used);
    still_status st = m->be->mem_new(m->dev, memory.used, &grown.memory, err);
    if (st != STILL_OK) {
        sti_block_free(&grown.tables);
        return st;
    }
    memory = (sti_carve){.base = grown.memory.p};
    tables = (sti_carve){.base = grown.tables.p};
    carve_memory(m, rows, &memory, &grown);
    carve_tables(rows, &tables, &grown);
    sti_model_scratch_free(m);
    m->scratch = grown;
    m->uses++;
    return STILL_OK;
}

void sti_model_scratch_free(still_model *m)
{
    if (m->dev) m->be->mem_free(m->dev, &m->scratch.memory);
    sti_block_free(&m->scratch.tables);
    m->scratch = (sti_scratch){0};
}

/* ---- Layers -------------------------------------------------------------- */

sti_attn_layer sti_model_attn_layer(const still_model *m, int layer)
{
    sti_attn_layer l = {.index = layer,
                        .heads = m->cfg.heads,
                        .kv_heads = m->cfg.kv_heads,
                        .head_dim = m->cfg.head_dim,
                        .window = m->cfg.window[layer],
                        .inv_freq = sti_config_inv_freq(&m->cfg, layer, 0),
                        .inv_freq_long = sti_config_inv_freq(&m->cfg, layer, INT_MAX),
                        .long_from = m->cfg.long_from,
                        .kept = m->cfg.kept,
                        .interleaved = m->cfg.rope_interleaved};
    if (m->adapter) l.trained = m->adapter->layer[layer].attn;
    return l;
}

sti_ffn_weights sti_model_ffn(const still_model *m, int layer)
{
    const sti_layer *L = &m->layer[layer];
    return (sti_ffn_weights){.gate = &L->gate.w,
                             .up = &L->up.w,
                             .down = &L->down.w,
                             .gate_bias = L->gate.bias,
                             .up_bias = L->up.bias,
                             .down_bias = L->down.bias,
                             .norm = L->ffn_norm,
                             .norm_out = L->ffn_norm_out,
                             .eps = m->stream_eps,
                             .eps_out = m->cfg.rms_eps,
                             .act = m->cfg.form.act};
}

still_status sti_model_embed(still_model *m, const int32_t *tok, int M, float *x,
                             still_error *err)
{
    STI_TRY(m->be->embed(
        m->dev, &(sti_embed_args){.w = &m->embed, .tok = tok, .M = M, .y = x}, err));
    if (m->embed_scale == 1) return STILL_OK;
    return m->be->scale(m->dev, x, (size_t)M * (size_t)m->cfg.hidden, m->embed_scale,
                        err);
}

still_status sti_model_norm_qk(still_model *m, int layer, const float *q_in,
                               const float *k_in, float *q, float *k, int M,
                               still_error *err)
{
    const sti_config *g = &m->cfg;
    const sti_layer *L = &m->layer[layer];
    const int D = g->head_dim, H = g->heads, G = g->kv_heads;
    const bool whole = g->form.qk_norm == STI_QK_WHOLE;
    if (L->q_norm) {
        sti_rmsnorm_args a = {.x = q_in,
                              .g = L->q_norm,
                              .y = q,
                              .M = whole ? M : M * H,
                              .K = whole ? H * D : D,
                              .eps = g->rms_eps};
        STI_TRY(m->be->rmsnorm(m->dev, &a, err));
        a.x = k_in;
        a.y = k;
        a.g = L->k_norm;
        a.M = whole ? M : M * G;
        a.K = whole ? G * D : D;
        STI_TRY(m->be->rmsnorm(m->dev, &a, err));
    }
    if (!L->q_scale) return STILL_OK;
    return m->be->scale_columns(
        m->dev, &(sti_scale_columns_args){.x = q, .g = L->q_scale, .M = M, .K = H * D},
        err);
}

still_status sti_model_add_low_rank(const sti_adapter *a, int layer,
                                    const sti_target *target, int n, const float *x,
                                    int M, float *lora_x, float *const *y,
                                    still_error *err)
{
    const int rank = a->spec.lora.rank;
    const float scale = a->spec.lora.alpha / (float)(rank ? rank : 1);
    const size_t size = (size_t)M * (size_t)rank;
    const sti_lora *lora[STI_MATMUL_MAX];
    float *out[STI_MATMUL_MAX];
    sti_matmul_args down = {.x = x, .M = M};
    for (int i = 0; i < n; i++) {
        const sti_lora *l = &a->layer[layer].lora[target[i]];
        if (!l->a.w.N) continue;
        lora[down.n] = l;
        out[down.n] = y[i];
        down.w[down.n] = &l->a.w;
        down.y[down.n++] = lora_x + (size_t)i * size;
    }
    if (down.n == 0) return STILL_OK;
    STI_TRY(a->be->matmul(a->dev, &down, err));
    for (int i = 0; i < down.n; i++) {
        STI_TRY(a->be->scale(a->dev, down.y[i], size, scale, err));
        STI_TRY(a->be->matmul(a->dev,
                              &(sti_matmul_args){.x = down.y[i],
                                                 .M = M,
                                                 .n = 1,
                                                 .w = {&lora[i]->b.w},
                                                 .y = {out[i]},
                                                 .accumulate = true},
                              err));
    }
    return STILL_OK;
}

still_status sti_model_check_tokens(const still_model *m, const int32_t *tok, int n,
                                    still_error *err)
{
    for (int i = 0; i < n; i++)
        if (tok[i] < 0 || tok[i] >= m->cfg.vocab)
            return sti_fail(
                err, STILL_E_ARG,
                "token %d of %d has id %d, which is not in the vocabulary of %d", i, n,
                tok[i], m->cfg.vocab);
    return STILL_OK;
}

/* Lays the sequences' rows out: positions, and who owns which row. Returns M. */
static int place(sti_scratch *s, const sti_sequence *seq, int n_seq)
{
    int M = 0;
    for (int i = 0; i < n_seq; i++) {
        s->sequence[i] = (sti_attn_seq){.row0 = M, .n = seq[i].n, .past = seq[i].past};
        for (int t = 0; t < seq[i].n; t++) s->pos[M++] = seq[i].past + t;
    }
    return M;
}

/* x += norm_out(W_o o): the way back into the residual stream. a: with its low-rank
 * additions, or NULL. */
static still_status add_output(still_model *m, int layer, const sti_adapter *a, int M,
                               still_error *err)
{
    sti_scratch *s = &m->scratch;
    const sti_layer *L = &m->layer[layer];
    float *out = L->attn_norm_out ? s->h : s->x;
    STI_TRY(m->be->matmul(m->dev,
                          &(sti_matmul_args){.x = s->o,
                                             .M = M,
                                             .n = 1,
                                             .w = {&L->o.w},
                                             .bias = {L->o.bias},
                                             .y = {out},
                                             .accumulate = !L->attn_norm_out},
                          err));
    if (sti_adapter_rank(a) > 0)
        STI_TRY(sti_model_add_low_rank(a, layer, (const sti_target[]){STI_TARGET_O}, 1,
                                       s->o, M, s->lora_x, (float *const[]){out}, err));
    if (!L->attn_norm_out) return STILL_OK;
    return m->be->rmsnorm(m->dev,
                          &(sti_rmsnorm_args){.x = out,
                                              .g = L->attn_norm_out,
                                              .y = s->x,
                                              .M = M,
                                              .K = m->cfg.hidden,
                                              .eps = m->cfg.rms_eps,
                                              .add = true},
                          err);
}

static still_status attention(still_model *m, const sti_attn_config *cfg, int layer,
                              int M, const sti_sequence *seq, int n_seq,
                              still_error *err)
{
    sti_scratch *s = &m->scratch;
    const sti_layer *L = &m->layer[layer];
    const sti_attn_layer shape = sti_model_attn_layer(m, layer);
    const sti_adapter *a =
        sti_attn_engine_of(cfg, layer) != &sti_attn_softmax ? m->adapter : NULL;
    const bool gated = a && a->layer[layer].gate.w.N > 0;
    for (int i = 0; i < n_seq; i++) s->sequence[i].memory = &seq[i].memory[layer];
    sti_matmul_args project = {.x = s->x,
                               .M = M,
                               .n = 3,
                               .norm = L->attn_norm,
                               .eps = m->stream_eps,
                               .normed = s->h,
                               .keep_normed = sti_adapter_rank(a) > 0,
                               .w = {&L->q.w, &L->k.w, &L->v.w},
                               .bias = {L->q.bias, L->k.bias, L->v.bias},
                               .y = {s->q, s->k, s->v}};
    if (gated) {
        project.w[project.n] = &a->layer[layer].gate.w;
        project.y[project.n++] = s->attn_gate;
    }
    STI_TRY(m->be->matmul(m->dev, &project, err));
    if (sti_adapter_rank(a) > 0)
        STI_TRY(sti_model_add_low_rank(
            a, layer,
            (const sti_target[]){STI_TARGET_Q, STI_TARGET_K, STI_TARGET_V,
                                 STI_TARGET_GATE},
            project.n, L->attn_norm ? s->h : s->x, M, s->lora_x, project.y, err));
    STI_TRY(sti_model_norm_qk(m, layer, s->q, s->k, s->q, s->k, M, err));
    STI_TRY(sti_attn_engine_of(cfg, layer)
                ->forward(m->be, m->dev, cfg, &shape,
                          &(sti_attn_io){.q = s->q,
                                         .k = s->k,
                                         .v = s->v,
                                         .gate_logit = gated ? s->attn_gate : NULL,
                                         .q_raw = s->q_raw,
                                         .o = s->o,
                                         .pos = s->pos,
                                         .M = M,
                                         .rows = s->sequence,
                                         .n_rows = n_seq,
                                         .scratch = s->attn},
                          err));
    return add_output(m, layer, a, M, err);
}

static still_status ffn_forward(still_model *m, int layer, int M, still_error *err)
{
    return m->be->ffn_forward(m->dev,
                              &(sti_ffn_args){.x = m->scratch.x,
                                              .M = M,
                                              .w = sti_model_ffn(m, layer),
                                              .scratch_h = m->scratch.h,
                                              .scratch = m->scratch.ffn},
                              err);
}

typedef struct nan_search {
    float *copy; /* [M, hidden] of a layer's output, in the program's memory */
    int bad;     /* first layer with a number that is not finite; cfg.layers: none */
} nan_search;

static still_status search_output(const still_model *m, int M, int layer, nan_search *s,
                                  still_error *err)
{
    const size_t n = (size_t)M * (size_t)m->cfg.hidden;
    STI_TRY(m->be->mem_move(m->dev, s->copy, m->scratch.x, n * sizeof *s->copy, err));
    for (size_t i = 0; i < n && s->bad == m->cfg.layers; i++)
        if (!isfinite(s->copy[i])) s->bad = layer;
    return STILL_OK;
}

/* With `search` the pass ends at the first layer whose output is not finite. */
static still_status layers(still_model *m, const sti_attn_config *cfg,
                           const int32_t *tok, int M, const sti_sequence *seq,
                           int n_seq, nan_search *search, still_error *err)
{
    STI_TRY(sti_model_embed(m, tok, M, m->scratch.x, err));
    for (int l = 0; l < m->cfg.layers; l++) {
        STI_TRY(attention(m, cfg, l, M, seq, n_seq, err));
        STI_TRY(ffn_forward(m, l, M, err));
        if (search) STI_TRY(search_output(m, M, l, search, err));
        if (search && search->bad == l) break;
    }
    return STILL_OK;
}

/* What the backend is told of a pass: its key is where activations lie, and the
 * sessions, whose settings and memories never change. */
static sti_pass describe_pass(still_model *m, const sti_attn_config *cfg,
                              const int32_t *tok, int M, const sti_sequence *seq,
                              int n_seq)
{
    sti_scratch *s = &m->scratch;
    s->key[0] = (uint64_t)(uintptr_t)s->memory.p;
    sti_pass p = {.tok = tok,
                  .pos = s->pos,
                  .M = M,
                  .key = s->key,
                  .n_key = n_seq + 1,
                  .one_each = M == n_seq,
                  .chunk = cfg->hybrid.chunk};
    for (int i = 0; i < n_seq; i++) s->key[i + 1] = seq[i].session;
    return p;
}

static still_status run_pass(still_model *m, const sti_attn_config *cfg,
                             const int32_t *tok, const sti_sequence *seq, int n_seq,
                             nan_search *search, still_error *err)
{
    const int M = place(&m->scratch, seq, n_seq);
    bool done = false;
    m->uses++;
    for (int i = 0; i < n_seq; i++)
        sti_adapter_need_maps(m->adapter, cfg, (int64_t)seq[i].past + seq[i].n);
    if (m->be->pass_begin) {
        const sti_pass pass = describe_pass(m, cfg, tok, M, seq, n_seq);
        STI_TRY(m->be->pass_begin(m->dev, &pass, &done, err));
    }
    still_status st = done ? STILL_OK : layers(m, cfg, tok, M, seq, n_seq, search, err);
    if (m->be->pass_end) {
        still_error ignored;
        still_status end =
            m->be->pass_end(m->dev, st == STILL_OK, st == STILL_OK ? err : &ignored);
        if (st == STILL_OK) st = end;
    }
    return st;
}

still_status sti_model_forward(still_model *m, const sti_attn_config *cfg,
                               const int32_t *tok, const sti_sequence *seq, int n_seq,
                               still_error *err)
{
    return run_pass(m, cfg, tok, seq, n_seq, NULL, err);
}

still_status sti_model_find_nan_layer(still_model *m, const sti_attn_config *cfg,
                                      const int32_t *tok, const sti_sequence *seq,
                                      int *layer, still_error *err)
{
    const size_t n = (size_t)seq->n * (size_t)m->cfg.hidden;
    nan_search search = {.copy = sti_alloc(n, sizeof(float)), .bad = m->cfg.layers};
    if (!search.copy) return sti_fail_memory(err, "residual stream", n * sizeof(float));
    const still_status st = run_pass(m, cfg, tok, seq, 1, &search, err);
    *layer = search.bad;
    free(search.copy);
    return st;
}

static still_status logits_to(still_model *m, int row0, int n, float *to,
                              still_error *err)
{
    sti_scratch *s = &m->scratch;
    const size_t first = (size_t)row0 * (size_t)m->cfg.hidden;
    m->uses++;
    return m->be->matmul(m->dev,
                         &(sti_matmul_args){.x = s->x + first,
                                            .M = n,
                                            .n = 1,
                                            .norm = m->final_norm,
                                            .eps = m->stream_eps,
                                            .normed = s->h,
                                            .w = {sti_model_head(m)},
                                            .y = {to}},
                         err);
}

still_status sti_model_logits(still_model *m, int row0, int n, still_error *err)
{
    return logits_to(m, row0, n, m->scratch.logits, err);
}

still_status sti_model_logits_to(still_model *m, int row, float *to, still_error *err)
{
    return logits_to(m, row, 1, to, err);
}
