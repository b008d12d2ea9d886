/* adapter.c - an adapter in memory: which entries a method has, and the layers' views
 * of them. */
#include "model/adapter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sha256.h"

static const char *const target_names[STI_TARGETS] = {"q", "k", "v", "o", "gate"};

const char *sti_target_name(sti_target t)
{
    return target_names[t];
}

bool sti_target_of(sti_part part, sti_target *out)
{
    if (part < STI_PART_Q || part > STI_PART_O) return false;
    *out = (sti_target)(part - STI_PART_Q + STI_TARGET_Q);
    return true;
}

/* ---- Entries ------------------------------------------------------------- */

typedef struct lister {
    sti_adapter_entry *out; /* NULL: count */
    size_t n;
    int layer;
} lister;

static void list(lister *l, const char *name, sti_trained kind, sti_target target,
                 int64_t d0, int64_t d1, int64_t d2)
{
    sti_adapter_entry e = {
        .kind = kind, .target = target, .layer = l->layer, .dim = {d0, d1, d2}};
    snprintf(e.name, sizeof e.name, "layers.%d.%s", l->layer, name);
    e.n_dims = d2 ? 3 : d1 ? 2 : 1;
    e.n = (size_t)(d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1));
    if (l->out) l->out[l->n] = e;
    l->n++;
}

static void list_low_rank(lister *l, const sti_config *g, const sti_lora_spec *lora,
                          bool gate)
{
    const int64_t qd = (int64_t)g->heads * g->head_dim,
                  kd = (int64_t)g->kv_heads * g->head_dim;
    const int64_t in[STI_TARGETS] = {g->hidden, g->hidden, g->hidden, qd, g->hidden};
    const int64_t out[STI_TARGETS] = {qd, kd, kd, g->hidden, qd};
    for (int t = 0; lora->rank > 0 && t < STI_TARGETS; t++) {
        if (!(lora->targets >> t & 1) || (t == STI_TARGET_GATE && !gate)) continue;
        char name[32];
        snprintf(name, sizeof name, "lora.%s.a", target_names[t]);
        list(l, name, STI_TRAINED_LORA_A, (sti_target)t, lora->rank, in[t], 0);
        snprintf(name, sizeof name, "lora.%s.b", target_names[t]);
        list(l, name, STI_TRAINED_LORA_B, (sti_target)t, out[t], lora->rank, 0);
    }
}

static void list_hybrid(lister *l, const sti_config *g, const sti_hybrid_settings *set)
{
    const int64_t H = g->heads, D = g->head_dim, S = set->per_head ? H : g->kv_heads;
    const sti_target none = STI_TARGETS;
    if (set->has_linear) {
        list(l, "map_q", STI_TRAINED_MAP_Q, none, H, D, D);
        list(l, "map_k", STI_TRAINED_MAP_K, none, S, D, D);
    }
    if (set->has_linear && set->map == STI_MAP_RELU) {
        list(l, "bias_q", STI_TRAINED_BIAS_Q, none, H, 0, 0);
        list(l, "bias_k", STI_TRAINED_BIAS_K, none, S, 0, 0);
    }
    if (set->alpha) list(l, "alpha", STI_TRAINED_ALPHA, none, H, 0, 0);
    if (set->window_factor) list(l, "window", STI_TRAINED_WINDOW, none, H, 0, 0);
    if (set->gate) list(l, "gate", STI_TRAINED_GATE, none, H * D, g->hidden, 0);
}

/* SUPRA's maps run across all heads. */
static void list_supra(lister *l, const sti_config *g)
{
    const int64_t qd = (int64_t)g->heads * g->head_dim,
                  kd = (int64_t)g->kv_heads * g->head_dim;
    list(l, "map_q", STI_TRAINED_MAP_Q, STI_TARGETS, qd, qd, 0);
    list(l, "map_k", STI_TRAINED_MAP_K, STI_TARGETS, kd, kd, 0);
    list(l, "bias_q", STI_TRAINED_BIAS_Q, STI_TARGETS, qd, 0, 0);
    list(l, "bias_k", STI_TRAINED_BIAS_K, STI_TARGETS, kd, 0, 0);
}

static void list_all(lister *l, const sti_config *g, const sti_attn_config *cfg,
                     const sti_lora_spec *lora)
{
    for (l->layer = cfg->first; l->layer <= cfg->last; l->layer++) {
        bool gate = false;
        if (!sti_attn_converts(cfg, l->layer)) continue;
        if (cfg->method->engine == &sti_attn_hybrid) {
            list_hybrid(l, g, &cfg->hybrid);
            gate = cfg->hybrid.gate;
        } else if (cfg->method->engine == &sti_attn_linear && cfg->window == 0) {
            list_supra(l, g);
        }
        list_low_rank(l, g, lora, gate);
    }
}

/* ---- Views --------------------------------------------------------------- */

still_status sti_adapter_matrix_bind(sti_adapter *a, const sti_adapter_entry *e,
                                     sti_dtype type, const void *data, size_t bytes,
                                     sti_adapter_matrix *out, still_error *err)
{
    out->src = (sti_tensor){.name = (char *)e->name,
                            .type = type,
                            .n_dims = 2,
                            .dim = {e->dim[0], e->dim[1]},
                            .data = data,
                            .bytes = bytes,
                            .path = "adapter"};
    return a->be->weight_new(a->dev, &out->src, &out->w, err);
}

static sti_adapter_matrix *matrix_of(sti_adapter_layer *L, const sti_adapter_entry *e)
{
    switch (e->kind) {
    case STI_TRAINED_GATE: return &L->gate;
    case STI_TRAINED_LORA_A: return &L->lora[e->target].a;
    case STI_TRAINED_LORA_B: return &L->lora[e->target].b;
    default: return NULL;
    }
}

static const float **vector_of(sti_adapter_layer *L, const sti_adapter_entry *e)
{
    switch (e->kind) {
    case STI_TRAINED_MAP_Q: return &L->attn.map_q;
    case STI_TRAINED_MAP_K: return &L->attn.map_k;
    case STI_TRAINED_BIAS_Q: return &L->attn.bias_q;
    case STI_TRAINED_BIAS_K: return &L->attn.bias_k;
    case STI_TRAINED_ALPHA: return &L->attn.alpha;
    default: return &L->attn.window_logit;
    }
}

still_status sti_adapter_push(sti_adapter *a, still_error *err)
{
    if (a->seen == a->value) return STILL_OK;
    return a->be->mem_move(a->dev, a->seen, a->value, a->n_values * sizeof(float), err);
}

still_status sti_adapter_pull(sti_adapter *a, still_error *err)
{
    if (a->seen == a->value) return STILL_OK;
    return a->be->mem_move(a->dev, a->value, a->seen, a->n_values * sizeof(float), err);
}

static still_status make_seen(sti_adapter *a, still_error *err)
{
    a->seen = a->value;
    if (a->be->host_memory) return STILL_OK;
    STI_TRY(a->be->mem_new(a->dev, (a->n_values ? a->n_values : 1) * sizeof(float),
                           &a->mirror, err));
    a->seen = a->mirror.p;
    return sti_adapter_push(a, err);
}

/* A copy in half precision: what a GPU multiplies. */
static still_status bind_half(sti_adapter *a, const sti_adapter_entry *e,
                              sti_adapter_matrix *m, still_error *err)
{
    uint16_t *half = sti_alloc(e->n, sizeof *half);
    if (!half) return sti_fail_memory(err, e->name, e->n * sizeof *half);
    for (size_t i = 0; i < e->n; i++) half[i] = sti_f32_to_f16(a->value[e->at + i]);
    still_status st =
        sti_adapter_matrix_bind(a, e, STI_F16, half, e->n * sizeof *half, m, err);
    m->src.data = NULL; /* the backend has its own */
    free(half);
    return st;
}

still_status sti_adapter_bind(sti_adapter *a, bool to_train, still_error *err)
{
    STI_TRY(make_seen(a, err));
    const float *map = a->maps.p;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        sti_adapter_layer *L = &a->layer[e->layer];
        if (e->at == SIZE_MAX && map && sti_adapter_is_map(e)) {
            *vector_of(L, e) = map;
            map += sti_adapter_room(e);
        }
        if (e->at == SIZE_MAX) continue; /* bound elsewhere */
        sti_adapter_matrix *m = matrix_of(L, e);
        if (!m)
            *vector_of(L, e) = a->seen + e->at;
        else if (to_train || a->be->host_memory)
            STI_TRY(sti_adapter_matrix_bind(a, e, STI_F32, a->seen + e->at,
                                            e->n * sizeof(float), m, err));
        else
            STI_TRY(bind_half(a, e, m, err));
    }
    return STILL_OK;
}

/* ---- Making -------------------------------------------------------------- */

static void set_identity(const sti_adapter_entry *e, float *v)
{
    const int64_t heads = e->n_dims == 3 ? e->dim[0] : 1, rows = e->dim[e->n_dims - 2],
                  cols = e->dim[e->n_dims - 1];
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < rows && i < cols; i++) v[(h * rows + i) * cols + i] = 1;
}

static void set_start(sti_adapter *a)
{
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (e->at == SIZE_MAX) continue;
        float *v = a->value + e->at;
        if (sti_adapter_is_map(e)) set_identity(e, v);
        for (size_t j = 0; e->kind == STI_TRAINED_WINDOW && j < e->n; j++)
            v[j] = -2.19722458f; /* logit(0.1) */
    }
}

/* The entries; their values have no place yet. */
static still_status list_entries(sti_adapter *a, const sti_adapter_home *home,
                                 const sti_attn_config *cfg, still_error *err)
{
    lister count = {0};
    list_all(&count, home->cfg, cfg, &a->spec.lora);
    a->entry = sti_alloc(count.n ? count.n : 1, sizeof *a->entry);
    a->layer = sti_alloc((size_t)a->n_layers, sizeof *a->layer);
    if (!a->entry || !a->layer)
        return sti_fail_memory(err, "adapter", count.n * sizeof *a->entry);
    lister fill = {.out = a->entry};
    list_all(&fill, home->cfg, cfg, &a->spec.lora);
    a->n_entries = fill.n;
    for (size_t i = 0; i < a->n_entries; i++) a->entry[i].at = SIZE_MAX;
    return STILL_OK;
}

static bool is_low_rank(const sti_adapter_entry *e)
{
    return e->kind == STI_TRAINED_LORA_A || e->kind == STI_TRAINED_LORA_B;
}

static still_status allocate(sti_adapter *a, bool gates, bool merge, bool late_maps,
                             still_error *err)
{
    size_t low_rank = 0, maps = 0;
    for (size_t i = 0; i < a->n_entries; i++) {
        sti_adapter_entry *e = &a->entry[i];
        const bool late = late_maps && sti_adapter_is_map(e);
        if (late) maps += sti_adapter_room(e);
        if (merge && is_low_rank(e)) low_rank += e->n;
        if (late || (!gates && e->kind == STI_TRAINED_GATE) ||
            (merge && is_low_rank(e)))
            continue;
        e->at = a->n_values;
        a->n_values += sti_adapter_room(e);
    }
    if (!sti_block_new(&a->maps, maps * sizeof(float)))
        return sti_fail_memory(err, "adapter", maps * sizeof(float));
    if (!sti_block_new(&a->block, (a->n_values ? a->n_values : 1) * sizeof(float)))
        return sti_fail_memory(err, "adapter", a->n_values * sizeof(float));
    a->merged = low_rank > 0;
    if (low_rank && !sti_block_new(&a->low_rank, low_rank * sizeof(float)))
        return sti_fail_memory(err, "adapter", low_rank * sizeof(float));
    a->value = a->block.p;
    set_start(a);
    return STILL_OK;
}

still_status sti_adapter_outline(const sti_adapter_home *home,
                                 const sti_adapter_spec *spec, sti_adapter **out,
                                 still_error *err)
{
    *out = NULL;
    const sti_config *g = home->cfg;
    if (spec->lora.rank < 0 || spec->lora.rank > 1024)
        return sti_fail(err, STILL_E_ARG, "LoRA rank %d is not between 0 and 1024",
                        spec->lora.rank);
    sti_attn_config cfg = {.ctx = g->ctx_train};
    const sti_attn_layer layer = {.heads = g->heads,
                                  .kv_heads = g->kv_heads,
                                  .head_dim = g->head_dim,
                                  .kept = g->kept};
    STI_TRY(
        sti_attn_configure(&spec->method, &layer, g->layers, g->ctx_train, &cfg, err));
    sti_adapter *a = sti_alloc(1, sizeof *a);
    if (!a) return sti_fail_memory(err, "adapter", sizeof *a);
    *a = (sti_adapter){
        .spec = *spec, .n_layers = g->layers, .be = home->be, .dev = home->dev};
    still_status st = list_entries(a, home, &cfg, err);
    if (st != STILL_OK) {
        sti_adapter_free(a);
        return st;
    }
    *out = a;
    return STILL_OK;
}

still_status sti_adapter_make(const sti_adapter_home *home,
                              const sti_adapter_spec *spec, bool gates, bool merge,
                              bool late_maps, sti_adapter **out, still_error *err)
{
    STI_TRY(sti_adapter_outline(home, spec, out, err));
    still_status st = allocate(*out, gates, merge, late_maps, err);
    if (st != STILL_OK) {
        sti_adapter_free(*out);
        *out = NULL;
    }
    return st;
}

still_status sti_adapter_new(const sti_adapter_home *home, const sti_adapter_spec *spec,
                             sti_adapter **out, still_error *err)
{
    STI_TRY(sti_adapter_make(home, spec, true, false, false, out, err));
    still_status st = sti_adapter_bind(*out, true, err);
    if (st != STILL_OK) {
        sti_adapter_free(*out);
        *out = NULL;
    }
    return st;
}

static void free_matrix(sti_adapter *a, sti_adapter_matrix *m)
{
    if (m->w.N) a->be->weight_free(a->dev, &m->w);
    free(m->owned);
}

void sti_adapter_free(sti_adapter *a)
{
    if (!a) return;
    for (int l = 0; a->layer && l < a->n_layers; l++) {
        sti_adapter_layer *L = &a->layer[l];
        free_matrix(a, &L->gate);
        for (int t = 0; t < STI_TARGETS; t++) {
            free_matrix(a, &L->lora[t].a);
            free_matrix(a, &L->lora[t].b);
        }
    }
    if (a->mirror.p) a->be->mem_free(a->dev, &a->mirror);
    sti_block_free(&a->block);
    sti_block_free(&a->low_rank);
    sti_block_free(&a->maps);
    sti_store_close(&a->file);
    free(a->entry);
    free(a->layer);
    free(a);
}

/* ---- Merging ------------------------------------------------------------- */

bool sti_adapter_low_rank(const sti_adapter *a, int layer, sti_target target,
                          sti_lora_values *out)
{
    const float *at = a->low_rank.p;
    bool any = false; /* B is more than the zeros it begins training with */
    *out = (sti_lora_values){.rank = a->spec.lora.rank};
    for (size_t i = 0; at && i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (!is_low_rank(e)) continue;
        if (e->layer == layer && e->target == target) {
            *(e->kind == STI_TRAINED_LORA_A ? &out->a : &out->b) = at;
            for (size_t k = 0; out->b == at && k < e->n && !any; k++) any = at[k] != 0;
        }
        at += e->n;
    }
    if (!out->a || !any) return false;
    out->scale = a->spec.lora.alpha / (float)out->rank;
    return true;
}

void sti_adapter_begin_merge(sti_adapter *a)
{
    sti_sha256_of(a->low_rank.p, a->low_rank.bytes, a->merged_sum);
}

void sti_adapter_end_merge(sti_adapter *a, int layer)
{
    size_t n = 0;
    for (size_t i = 0; i < a->n_entries && a->entry[i].layer <= layer; i++)
        if (is_low_rank(&a->entry[i])) n += a->entry[i].n;
    if (layer + 1 < a->n_layers)
        sti_block_forget(&a->low_rank, n * sizeof(float));
    else
        sti_block_free(&a->low_rank);
}

/* ---- Filling ------------------------------------------------------------- */

still_status sti_adapter_check(const sti_adapter_entry *e, const sti_tensor *t,
                               still_error *err)
{
    bool same = t->n_dims == e->n_dims;
    for (int d = 0; same && d < e->n_dims; d++) same = t->dim[d] == e->dim[d];
    if (!same)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' begins with dimension %lld of %d, expected "
                        "%lld of %d: the adapter is for another model",
                        t->path, t->name, (long long)t->dim[0], t->n_dims,
                        (long long)e->dim[0], e->n_dims);
    return STILL_OK;
}

still_status sti_adapter_fill(sti_adapter *a, const sti_store *s, const char *prefix,
                              size_t *found, still_error *err)
{
    *found = 0;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        char name[96];
        snprintf(name, sizeof name, "%s%s", prefix, e->name);
        const sti_tensor *t = sti_store_find(s, name);
        if (!t || e->at == SIZE_MAX) continue;
        STI_TRY(sti_adapter_check(e, t, err));
        sti_dequant(t->type, t->data, a->value + e->at, (int64_t)e->n);
        ++*found;
    }
    return STILL_OK;
}
