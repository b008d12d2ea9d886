/* model.c - opening a model: files, configuration, tokenizer, weights for the backend.
 *
 * Matrices are handed to the backend, which maps or repacks them; vectors (norms,
 * biases) are few and become floats in one array. Every shape is checked against the
 * configuration here, so that no operator has to. */
#include "model/model.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/sized.h"
#include "model/sampling.h"
#include "model/shape.h"

typedef struct loader {
    still_model *m;
    float *vectors; /* as they are read: moved to the operators' memory at the end */
    sti_pool *pool; /* that merges */
    still_error *err;
} loader;

static still_status missing(const loader *ld, sti_part part, int layer, bool bias)
{
    char name[128];
    sti_config_tensor_name(&ld->m->cfg, ld->m->store.is_gguf, part, layer, bias, name,
                           sizeof name);
    return sti_fail(ld->err, STILL_E_FORMAT, "%s: tensor '%s' is missing",
                    ld->m->store.path, name);
}

/* Room for n floats in the model's array; *out is where they will lie. */
static float *take(loader *ld, int n, const float **out)
{
    still_model *m = ld->m;
    float *v = ld->vectors + m->vectors_used;
    *out = (float *)m->vectors.p + m->vectors_used;
    m->vectors_used += (size_t)n;
    return v;
}

/* A vector of n floats, converted into the model's array. */
static still_status load_vector(loader *ld, const sti_tensor *t, int n, float **values,
                                const float **out)
{
    if (t->n_dims != 1 || t->dim[0] != n)
        return sti_fail(
            ld->err, STILL_E_FORMAT,
            "%s: tensor '%s' has %lld elements in %d dimensions, expected %d", t->path,
            t->name, (long long)t->dim[0], t->n_dims, n);
    if (t->type != STI_F32 && t->type != STI_F16 && t->type != STI_BF16)
        return sti_fail(ld->err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s' has type %s, a vector must be a float type",
                        t->path, t->name, sti_dtype_find((int)t->type)->name);
    *values = take(ld, n, out);
    sti_dequant(t->type, t->data, *values, n);
    ld->m->info.params += (uint64_t)n;
    return STILL_OK;
}

/* The weights of a norm, n of them, times `scale`; NULL where the form has none. */
static still_status load_norm(loader *ld, sti_part part, int layer, int n, double scale,
                              const float **out)
{
    const sti_config *g = &ld->m->cfg;
    float *v;
    if (!sti_config_has(g, part)) return STILL_OK;
    const sti_tensor *t = sti_config_tensor(g, &ld->m->store, part, layer, false);
    if (!t) return missing(ld, part, layer, false);
    STI_TRY(load_vector(ld, t, n, &v, out));
    for (int i = 0; i < n; i++)
        v[i] = (float)(((double)v[i] + g->form.norm_offset) * scale);
    return STILL_OK;
}

/* Adds a type to the list of those that merged matrices have. */
static void note_type(still_model *m, sti_dtype type)
{
    const char *name = sti_dtype_find((int)type)->name;
    const size_t n = strlen(m->merged_types);
    m->merged = true;
    if (strstr(m->merged_types, name)) return;
    snprintf(m->merged_types + n, sizeof m->merged_types - n, "%s%s", n ? ", " : "",
             name);
}

/* Hands a matrix that the model owns to the backend, and frees it if that has made a
 * copy. */
static still_status take_own(loader *ld, sti_weight *out)
{
    still_model *m = ld->m;
    sti_tensor *t = &m->own[m->n_own++];
    const still_status st = m->be->weight_new(m->dev, t, out, ld->err);
    if (st != STILL_OK || out->own.bytes) {
        free((void *)t->data);
        t->data = NULL;
    }
    return st;
}

/* A copy of a matrix whose rows are in the order in which pairs are rotated. */
static still_status copy_rotary(const sti_config *g, const sti_tensor *t,
                                sti_tensor *out, still_error *err)
{
    const size_t row = t->bytes / (size_t)t->dim[0], D = (size_t)g->head_dim;
    unsigned char *to = aligned_alloc(64, (t->bytes + 63) / 64 * 64);
    if (!to) return sti_fail_memory(err, t->name, t->bytes);
    for (size_t r = 0; r < (size_t)t->dim[0]; r++) {
        const size_t from = r / D * D + (size_t)sti_rotary_row(g, (int)(r % D));
        memcpy(to + r * row, (const unsigned char *)t->data + from * row, row);
    }
    sti_map_drop(t->data, t->bytes);
    *out = *t;
    out->data = to;
    return STILL_OK;
}

static still_status load_matrix(loader *ld, sti_part part, int layer, int rows,
                                int cols, sti_weight *out)
{
    still_model *m = ld->m;
    const sti_tensor *t = sti_config_tensor(&m->cfg, &m->store, part, layer, false);
    if (!t) return missing(ld, part, layer, false);
    if (t->n_dims != 2 || t->dim[0] != rows || t->dim[1] != cols)
        return sti_fail(ld->err, STILL_E_FORMAT,
                        "%s: tensor '%s' is %lld x %lld, expected %d x %d", t->path,
                        t->name, (long long)t->dim[0],
                        (long long)(t->n_dims > 1 ? t->dim[1] : 1), rows, cols);
    m->info.params += (uint64_t)rows * (uint64_t)cols;
    sti_target target;
    sti_lora_values add;
    const bool merge = m->adapter && sti_target_of(part, &target) &&
                       sti_adapter_low_rank(m->adapter, layer, target, &add);
    const bool moved =
        sti_rotary_moves(&m->cfg) && (part == STI_PART_Q || part == STI_PART_K);
    if (!merge && !moved) return m->be->weight_new(m->dev, t, out, ld->err);
    sti_tensor copy = *t, *own = &m->own[m->n_own];
    if (moved) STI_TRY(copy_rotary(&m->cfg, t, &copy, ld->err));
    if (!merge) {
        *own = copy;
        return take_own(ld, out);
    }
    const still_status st = sti_merge(&copy, &add, ld->pool, own, ld->err);
    if (moved) free((void *)copy.data);
    STI_TRY(st);
    note_type(m, own->type);
    return take_own(ld, out);
}

static still_status load_linear(loader *ld, sti_part part, int layer, int rows,
                                int cols, sti_linear *out)
{
    const sti_config *g = &ld->m->cfg;
    STI_TRY(load_matrix(ld, part, layer, rows, cols, &out->w));
    const sti_tensor *b = sti_config_tensor(g, &ld->m->store, part, layer, true);
    float *v, head[STI_HEAD_MAX];
    if (!b) return STILL_OK;
    STI_TRY(load_vector(ld, b, rows, &v, &out->bias));
    if (!sti_rotary_moves(g) || (part != STI_PART_Q && part != STI_PART_K))
        return STILL_OK;
    for (int h = 0; h < rows; h += g->head_dim, v += g->head_dim) {
        memcpy(head, v, (size_t)g->head_dim * sizeof *v);
        for (int i = 0; i < g->head_dim; i++) v[i] = head[sti_rotary_row(g, i)];
    }
    return STILL_OK;
}

/* What queries are multiplied by, so that q . k / sqrt(D) are the logits of attention:
 * the form's scale, and in rotated numbers the factor of long RoPE, of q and of k. */
static double query_scale(const sti_config *g, int i)
{
    const double all = g->form.attn_scale * sqrt(g->head_dim);
    const int half = g->head_dim / 2;
    const int pair = g->rope_interleaved ? i / 2 : i % half;
    return pair < g->rotary / 2 ? all * g->rope_factor * g->rope_factor : all;
}

/* Norms and scale of queries and keys. */
static still_status load_qk(loader *ld, int i, sti_layer *L)
{
    const sti_config *g = &ld->m->cfg;
    const int D = g->head_dim, qd = g->heads * D, kd = g->kv_heads * D;
    const bool whole = g->form.qk_norm == STI_QK_WHOLE;
    float *scale;
    bool scaled = false;
    scale = ld->vectors + ld->m->vectors_used;
    STI_TRY(load_norm(ld, STI_PART_Q_NORM, i, whole ? qd : D, 1, &L->q_norm));
    for (int d = 0; L->q_norm && d < (whole ? qd : D); d++)
        scale[d] *= (float)query_scale(g, d % D);
    STI_TRY(load_norm(ld, STI_PART_K_NORM, i, whole ? kd : D, 1, &L->k_norm));
    for (int d = 0; d < D; d++) scaled = scaled || fabs(query_scale(g, d) - 1) > 1e-12;
    if (L->q_norm || !scaled) return STILL_OK;
    scale = take(ld, qd, &L->q_scale);
    for (int d = 0; d < qd; d++) scale[d] = (float)query_scale(g, d % D);
    return STILL_OK;
}

static still_status load_layer(loader *ld, int i)
{
    const sti_config *g = &ld->m->cfg;
    sti_layer *L = &ld->m->layer[i];
    const int qd = g->heads * g->head_dim, kd = g->kv_heads * g->head_dim;
    const double residual = g->form.residual_scale;
    STI_TRY(load_norm(ld, STI_PART_ATTN_NORM, i, g->hidden, 1, &L->attn_norm));
    STI_TRY(load_norm(ld, STI_PART_ATTN_OUT_NORM, i, g->hidden, residual,
                      &L->attn_norm_out));
    STI_TRY(
        load_norm(ld, STI_PART_FFN_OUT_NORM, i, g->hidden, residual, &L->ffn_norm_out));
    STI_TRY(load_qk(ld, i, L));
    STI_TRY(load_linear(ld, STI_PART_Q, i, qd, g->hidden, &L->q));
    STI_TRY(load_linear(ld, STI_PART_K, i, kd, g->hidden, &L->k));
    STI_TRY(load_linear(ld, STI_PART_V, i, kd, g->hidden, &L->v));
    STI_TRY(load_linear(ld, STI_PART_O, i, g->hidden, qd, &L->o));
    STI_TRY(load_norm(ld, STI_PART_FFN_NORM, i, g->hidden, 1, &L->ffn_norm));
    STI_TRY(load_linear(ld, STI_PART_GATE, i, g->ffn, g->hidden, &L->gate));
    STI_TRY(load_linear(ld, STI_PART_UP, i, g->ffn, g->hidden, &L->up));
    return load_linear(ld, STI_PART_DOWN, i, g->hidden, g->ffn, &L->down);
}

/* Folds scales, so that they are not computed for every token. Where no norm lies behind
 * a half, x = r u turns
 *   x += r half(norm(x))  into  u += half(norm(u)), with eps / r^2 in the norms
 * of the stream, which do not see its size otherwise. */
static void fold_scales(still_model *m)
{
    const sti_form *f = &m->cfg.form;
    const double r = f->norm_out ? 1 : f->residual_scale;
    m->embed_scale = (float)(f->embed_scale / r);
    m->stream_eps = (float)((double)m->cfg.rms_eps / (r * r));
}

static size_t matrix_bytes(const still_model *m, sti_part part, int layer)
{
    const sti_tensor *t = sti_config_tensor(&m->cfg, &m->store, part, layer, false);
    return t ? m->be->weight_bytes(m->dev, t) : 0;
}

/* Whether a device's memory holds all matrices, before the first is read. */
static still_status check_memory(const still_model *m, still_error *err)
{
    static const sti_part of_layer[] = {STI_PART_Q,   STI_PART_K,    STI_PART_V,
                                        STI_PART_O,   STI_PART_GATE, STI_PART_UP,
                                        STI_PART_DOWN};
    if (!m->be->mem_left) return STILL_OK;
    size_t bytes = matrix_bytes(m, STI_PART_EMBED, 0);
    if (!m->cfg.tied) bytes += matrix_bytes(m, STI_PART_HEAD, 0);
    for (int l = 0; l < m->cfg.layers; l++)
        for (size_t i = 0; i < sizeof of_layer / sizeof *of_layer; i++)
            bytes += matrix_bytes(m, of_layer[i], l);
    const size_t left = m->be->mem_left(m->dev);
    if (bytes <= left) return STILL_OK;
    return sti_fail(
        err, STILL_E_MEMORY,
        "%s: its weights need %.2f GB of GPU memory and %.2f GB are left: use "
        "a file of a smaller type, such as Q4_K, a larger --gpu-memory or "
        "--backend cpu",
        m->store.path, (double)bytes / 1e9, (double)left / 1e9);
}

static still_status load_weights(loader *ld)
{
    still_model *m = ld->m;
    const sti_config *g = &m->cfg;
    /* Room for every vector a layer can have: four norms, those of q and k, q's scale
     * and seven biases. */
    size_t kinds = 4u * (size_t)g->hidden +
                   3u * (size_t)g->heads * (size_t)g->head_dim +
                   3u * (size_t)g->kv_heads * (size_t)g->head_dim +
                   2u * (size_t)g->hidden + 2u * (size_t)g->ffn;
    fold_scales(m);
    m->vectors_capacity = kinds * (size_t)g->layers + (size_t)g->hidden;
    ld->vectors = sti_alloc(m->vectors_capacity, sizeof *ld->vectors);
    m->layer = sti_alloc((size_t)g->layers, sizeof *m->layer);
    if (!ld->vectors || !m->layer)
        return sti_fail_memory(ld->err, m->store.path,
                               m->vectors_capacity * sizeof(float));
    STI_TRY(check_memory(m, ld->err));
    STI_TRY(m->be->mem_new(m->dev, m->vectors_capacity * sizeof(float), &m->vectors,
                           ld->err));
    /* The largest matrix first: its source pages leave memory before others come. */
    STI_TRY(load_matrix(ld, STI_PART_EMBED, 0, g->vocab, g->hidden, &m->embed));
    if (!g->tied)
        STI_TRY(load_matrix(ld, STI_PART_HEAD, 0, g->vocab, g->hidden, &m->head));
    STI_TRY(load_norm(ld, STI_PART_FINAL_NORM, 0, g->hidden, 1 / g->form.logit_scale,
                      &m->final_norm));
    for (int i = 0; i < g->layers; i++) {
        STI_TRY(load_layer(ld, i));
        if (ld->pool) sti_adapter_end_merge(m->adapter, i);
    }
    return m->be->mem_move(m->dev, m->vectors.p, ld->vectors,
                           m->vectors_used * sizeof(float), ld->err);
}

static still_status make_device(still_model *m, const still_model_params *p,
                                still_error *err)
{
    const sti_config *g = &m->cfg;
    int64_t widest = (int64_t)g->heads * g->head_dim;
    if (g->hidden > widest) widest = g->hidden;
    if (g->ffn > widest) widest = g->ffn;
    if (widest > INT_MAX / 4)
        return sti_fail(err, STILL_E_FORMAT, "%s: a row of %lld numbers is absurd",
                        m->store.path, (long long)widest);
    return m->be->dev_new(&(sti_dev_params){.threads = p->threads,
                                            .isa = p->isa,
                                            .max_k = (int)widest,
                                            .heads = g->heads,
                                            .kv_heads = g->kv_heads,
                                            .head_dim = g->head_dim,
                                            .memory = p->gpu_memory},
                          &m->dev, err);
}

static void fill_info(still_model *m)
{
    const sti_config *g = &m->cfg;
    still_model_info *i = &m->info;
    i->path = m->store.path;
    i->name = g->name;
    i->arch = g->arch;
    i->backend = m->be->name;
    i->isa = m->be->dev_isa(m->dev);
    i->threads = m->be->dev_threads(m->dev);
    i->layers = g->layers;
    i->hidden = g->hidden;
    i->ffn = g->ffn;
    i->heads = g->heads;
    i->kv_heads = g->kv_heads;
    i->head_dim = g->head_dim;
    i->vocab = g->vocab;
    i->ctx_train = g->ctx_train;
    for (int l = 0; l < g->layers; l++)
        if (g->window[l] > i->sliding_window) i->sliding_window = g->window[l];
    i->rope_theta = g->rope_theta;
    i->tied = g->tied;
    i->file_bytes = m->store.file_bytes;
    i->merged = m->merged ? m->merged_types : NULL;
}

sti_adapter_home sti_model_home(still_model *m)
{
    return (sti_adapter_home){.cfg = &m->cfg, .be = m->be, .dev = m->dev};
}

/* Reads an adapter that was made for this very model. */
static still_status load_adapter(still_model *m, const char *path, bool merge,
                                 still_error *err)
{
    unsigned char base[STI_FINGERPRINT];
    sti_adapter_spec spec;
    STI_TRY(sti_adapter_read_spec(path, &spec, err));
    sti_model_fingerprint(m, false, base);
    if (memcmp(base, spec.base, sizeof base) != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: the adapter was trained for another base model ('%s') "
                        "than %s",
                        path, spec.base_name, m->store.path);
    const sti_adapter_home home = sti_model_home(m);
    const sti_tensor *q = sti_config_tensor(&m->cfg, &m->store, STI_PART_Q, 0, false);
    const bool floats = q && sti_dtype_find((int)q->type)->block == 1;
    STI_TRY(sti_adapter_read(&home, path, !floats, merge, true, &m->adapter, err));
    m->info.method = &m->adapter->spec.method;
    m->adapter_path = sti_strdup(path);
    if (!m->adapter_path) return sti_fail_memory(err, path, strlen(path));
    m->info.adapter = m->adapter_path;
    if (m->adapter->spec.has_sampling)
        sti_sampling_override(&m->sampling, &m->adapter->spec.sampling);
    m->info.params += m->adapter->n_values + m->adapter->maps.bytes / sizeof(float);
    return STILL_OK;
}

/* An empty model on the backend that was asked for. */
static still_status begin(const char *what, const still_model_params *p,
                          still_model **out, still_error *err)
{
    const sti_backend *be = sti_backend_find(p->backend);
    if (!be)
        return sti_fail(err, STILL_E_ARG, "backend '%s' is not in this build: %s",
                        p->backend, sti_backend_names());
    *out = sti_alloc(1, sizeof **out);
    if (!*out) return sti_fail_memory(err, what, sizeof **out);
    (*out)->be = be;
    (*out)->info.sampling = &(*out)->sampling;
    return STILL_OK;
}

/* What matrices of the model's own need: those that an adapter is merged into, and those
 * whose rows change places. */
static still_status begin_own(loader *ld, int threads)
{
    still_model *m = ld->m;
    const size_t most = (size_t)m->cfg.layers * STI_TARGETS;
    const bool merge = m->adapter && m->adapter->low_rank.p;
    if (!merge && !sti_rotary_moves(&m->cfg)) return STILL_OK;
    m->own = sti_alloc(most, sizeof *m->own);
    if (!m->own) return sti_fail_memory(ld->err, "adapter", most * sizeof *m->own);
    if (!merge) return STILL_OK;
    sti_adapter_begin_merge(m->adapter);
    return sti_pool_new(threads ? threads : sti_cores(), &ld->pool, ld->err);
}

/* Gives back the files' pages that loading touched: most weights have copies, and other
 * pages are read again when they are needed. What then remains is in the bill. */
static void settle(still_model *m)
{
    for (size_t i = 0; i < m->store.n_maps; i++)
        sti_map_drop(m->store.map[i].data, m->store.map[i].size);
    if (!m->be->host_memory) return;
    m->rss = sti_rss();
    m->peak_rss = sti_peak_rss();
}

/* Everything that follows from the store. */
static still_status load(still_model *m, const still_model_params *p, bool tokenizer,
                         still_error *err)
{
    loader ld = {.m = m, .err = err};
    STI_TRY(sti_config_read(&m->store, &m->cfg, err));
    if (p->attn_scale > 0 && !m->cfg.attn_scale_stated)
        m->cfg.form.attn_scale = p->attn_scale;
    float *freq = m->cfg.inv_freq[0];
    for (int i = 0; p->rope_bf16 && i < STI_TABLES * (m->cfg.head_dim / 2); i++)
        freq[i] = sti_bf16_to_f32(sti_f32_to_bf16(freq[i]));
    STI_TRY(sti_sampling_read(&m->store, &m->sampling, err));
    if (tokenizer) STI_TRY(sti_tokenizer_from_store(&m->store, &m->tokenizer, err));
    STI_TRY(make_device(m, p, err));
    if (p->adapter) STI_TRY(load_adapter(m, p->adapter, !p->no_merge, err));
    still_status st = begin_own(&ld, p->threads);
    if (st == STILL_OK) st = load_weights(&ld);
    sti_pool_free(ld.pool);
    free(ld.vectors);
    if (st == STILL_OK) {
        fill_info(m);
        settle(m);
    }
    return st;
}

static still_status finish_open(still_model *m, still_status st, still_model **out)
{
    if (st == STILL_OK)
        *out = m;
    else
        still_model_free(m);
    return st;
}

still_status still_model_open(const char *path, const still_model_params *params,
                              still_model **out, still_error *err)
{
    *out = NULL;
    still_model_params p;
    still_model *m;
    STI_TRY(STI_TAKE(&p, params, still_model_params, err));
    if (!path) return sti_fail(err, STILL_E_ARG, "no model path given");
    STI_TRY(begin(path, &p, &m, err));
    still_status st = sti_store_open(path, &m->store, err);
    if (st == STILL_OK) st = load(m, &p, true, err);
    return finish_open(m, st, out);
}

still_status still_model_open_shape(const char *shape, const still_model_params *params,
                                    still_model **out, still_error *err)
{
    *out = NULL;
    still_model_params p;
    still_model *m;
    STI_TRY(STI_TAKE(&p, params, still_model_params, err));
    if (!shape) return sti_fail(err, STILL_E_ARG, "no shape given");
    STI_TRY(begin(shape, &p, &m, err));
    still_status st = sti_shape_open(shape, m->be->host_memory, &m->store, err);
    if (st == STILL_OK) st = load(m, &p, false, err);
    return finish_open(m, st, out);
}

const char *still_shape_at(int i)
{
    const sti_shape *s = sti_shape_at(i);
    return s ? s->name : NULL;
}

void still_model_free(still_model *m)
{
    if (!m) return;
    sti_model_stand_ins_free(m);
    sti_adapter_free(m->adapter);
    if (m->dev) {
        for (int i = 0; m->layer && i < m->cfg.layers; i++) {
            sti_layer *L = &m->layer[i];
            sti_linear *all[] = {&L->q,    &L->k,  &L->v,   &L->o,
                                 &L->gate, &L->up, &L->down};
            for (size_t j = 0; j < sizeof all / sizeof *all; j++)
                m->be->weight_free(m->dev, &all[j]->w);
        }
        m->be->weight_free(m->dev, &m->embed);
        m->be->weight_free(m->dev, &m->head);
        m->be->mem_free(m->dev, &m->vectors);
        sti_model_scratch_free(m);
        m->be->dev_free(m->dev);
    }
    for (size_t i = 0; i < m->n_own; i++) free((void *)m->own[i].data);
    free(m->own);
    free(m->layer);
    free(m->adapter_path);
    still_tokenizer_free(m->tokenizer);
    sti_config_free(&m->cfg);
    sti_store_close(&m->store);
    free(m);
}

const still_model_info *still_model_get_info(const still_model *m)
{
    return &m->info;
}

size_t still_model_tensor_count(const still_model *m)
{
    return m->store.n_tensors;
}

bool still_model_tensor(const still_model *m, size_t i, still_tensor_info *out)
{
    if (i >= m->store.n_tensors) return false;
    const sti_tensor *t = &m->store.tensor[i];
    *out = (still_tensor_info){.name = t->name,
                               .dtype = sti_dtype_find((int)t->type)->name,
                               .n_dims = t->n_dims,
                               .bytes = t->bytes};
    memcpy(out->dim, t->dim, sizeof out->dim);
    return true;
}

const still_tokenizer *still_model_tokenizer(const still_model *m)
{
    return m->tokenizer;
}
