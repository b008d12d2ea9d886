/* export_list.c - which tensors an export has, what each is made of, and whether the
 * files at hand fit together. Shapes are checked here, so rows can be trusted. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/export.h"

still_status sti_export_add(sti_export_list *l, const sti_export_tensor *t,
                            still_error *err)
{
    if (l->n == l->capacity) {
        const size_t capacity = l->capacity ? 2 * l->capacity : 64;
        sti_export_tensor *grown = sti_grow(l->tensor, capacity, sizeof *grown);
        if (!grown) return sti_fail_memory(err, "export", capacity * sizeof *grown);
        l->tensor = grown;
        l->capacity = capacity;
    }
    l->tensor[l->n++] = *t;
    return STILL_OK;
}

void sti_export_list_free(sti_export_list *l)
{
    free(l->tensor);
    *l = (sti_export_list){0};
}

/* Hugging Face files keep the halves apart, and so do GGUF files of some. */
sti_row_order sti_export_order(const sti_export *x, bool gguf)
{
    const bool pairs = gguf && x->cfg.gguf_pairs;
    if (pairs == x->cfg.rope_interleaved) return STI_ROWS_KEPT;
    return pairs ? STI_ROWS_TO_PAIRS : STI_ROWS_TO_HALVES;
}

/* ---- The adapter --------------------------------------------------------- */

still_status sti_export_trained(const sti_export *x, const sti_adapter_entry *e,
                                const sti_tensor **out, still_error *err)
{
    const sti_tensor *t = *out = sti_store_find(&x->adapter, e->name);
    if (!t)
        return sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is missing",
                        x->adapter.path, e->name);
    return sti_adapter_check(e, t, err);
}

still_status sti_export_low_rank(const sti_export *x, int layer, sti_target target,
                                 const sti_tensor **a, const sti_tensor **b,
                                 still_error *err)
{
    *a = *b = NULL;
    for (size_t i = 0; x->linearized && i < x->trained->n_entries; i++) {
        const sti_adapter_entry *e = &x->trained->entry[i];
        if (e->layer != layer || e->target != target) continue;
        if (e->kind == STI_TRAINED_LORA_A) STI_TRY(sti_export_trained(x, e, a, err));
        if (e->kind == STI_TRAINED_LORA_B) STI_TRY(sti_export_trained(x, e, b, err));
    }
    return STILL_OK;
}

still_status sti_export_add_own(const sti_export *x, bool gguf, sti_export_list *l,
                                still_error *err)
{
    const sti_row_order order = sti_export_order(x, gguf);
    /* SUPRA maps vectors of all heads, and rotates after the map. */
    const bool supra = strcmp(x->spec.method.name, "supra") == 0;
    for (size_t i = 0; i < x->trained->n_entries; i++) {
        const sti_adapter_entry *e = &x->trained->entry[i];
        if (e->kind == STI_TRAINED_LORA_A || e->kind == STI_TRAINED_LORA_B) continue;
        sti_export_tensor t = {.type = STI_F32};
        memcpy(t.name, e->name, sizeof e->name);
        STI_TRY(sti_export_trained(x, e, &t.src, err));
        const bool map = e->kind == STI_TRAINED_MAP_Q || e->kind == STI_TRAINED_MAP_K;
        const bool bias =
            e->kind == STI_TRAINED_BIAS_Q || e->kind == STI_TRAINED_BIAS_K;
        if (map || (bias && supra)) t.order = order;
        t.columns = map && supra;
        if (e->kind == STI_TRAINED_GATE)
            STI_TRY(sti_export_low_rank(x, e->layer, STI_TARGET_GATE, &t.a, &t.b, err));
        STI_TRY(sti_export_add(l, &t, err));
    }
    return STILL_OK;
}

/* ---- The model ----------------------------------------------------------- */

/* The type of a part's tensor: that of the entry it is joined to, or else as the source
 * is, changed if a low-rank addition goes into any of its rows. */
static still_status type_of_part(const sti_export *x, sti_part part, int layer,
                                 const sti_export_tensor *t, sti_export_type_fn type,
                                 const sti_export_list *l, sti_dtype *out,
                                 still_error *err)
{
    bool changed = t->b != NULL;
    sti_target target;
    const sti_tensor *a, *b;
    if (t->joined) {
        *out = l->tensor[l->n - 1].type;
        return STILL_OK;
    }
    for (int p = (int)part + 1;
         p < STI_PARTS && sti_config_joined(&x->cfg, (sti_part)p); p++) {
        if (!sti_target_of((sti_part)p, &target)) continue;
        STI_TRY(sti_export_low_rank(x, layer, target, &a, &b, err));
        changed = changed || b;
    }
    return type(x, t->src, changed, out, err);
}

/* What norms are in the other kind of file: an architecture may have an offset in one
 * kind, and a scale of q . k that only the other has a key for. */
static void convert_norm(const sti_export *x, sti_part part, bool gguf,
                         sti_export_tensor *t)
{
    if (gguf == x->store.is_gguf) return;
    t->offset = gguf ? x->cfg.form.norm_offset : -sti_config_norm_offset(&x->cfg);
    t->factor = gguf && part == STI_PART_Q_NORM ? sti_config_gguf_q_norm(&x->cfg) : 1;
    if (t->offset == 0 && t->factor == 1) t->factor = 0; /* as it is */
}

/* One tensor, where the model has it. */
static still_status add_part(const sti_export *x, sti_part part, int layer, bool bias,
                             bool gguf, sti_export_type_fn type, sti_export_list *l,
                             still_error *err)
{
    sti_export_tensor t = {
        .src = sti_config_tensor(&x->cfg, &x->store, part, layer, bias)};
    const sti_part_shape s = sti_config_shape(&x->cfg, part);
    const int64_t rows = s.rows, cols = bias ? 0 : s.cols;
    sti_target target;
    sti_config_tensor_name(&x->cfg, x->store.is_gguf, part, layer, bias, t.name,
                           sizeof t.name);
    if ((!t.src && bias) || !sti_config_has(&x->cfg, part)) return STILL_OK;
    if (!t.src)
        return sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is missing",
                        x->store.path, t.name);
    if (t.src->n_dims != (cols ? 2 : 1) || t.src->dim[0] != rows ||
        (cols && t.src->dim[1] != cols))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' begins with dimension %lld of %d, expected "
                        "%lld of %d",
                        t.src->path, t.name, (long long)t.src->dim[0], t.src->n_dims,
                        (long long)rows, cols ? 2 : 1);
    if (bias && x->cfg.form.fused)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s': biases of a model whose matrices are fused "
                        "cannot be exported",
                        t.src->path, t.name);
    sti_config_fused_name(&x->cfg, gguf, part, layer, t.name, sizeof t.name);
    if (!t.name[0])
        sti_config_tensor_name(&x->cfg, gguf, part, layer, bias, t.name, sizeof t.name);
    t.joined = sti_config_joined(&x->cfg, part);
    if (part == STI_PART_Q || part == STI_PART_K) {
        t.order = sti_export_order(x, gguf);
        t.rotary = sti_rotary_moves(&x->cfg);
    }
    if (!s.cols) convert_norm(x, part, gguf, &t);
    if (!bias && sti_target_of(part, &target))
        STI_TRY(sti_export_low_rank(x, layer, target, &t.a, &t.b, err));
    STI_TRY(type_of_part(x, part, layer, &t, type, l, &t.type, err));
    return sti_export_add(l, &t, err);
}

still_status sti_export_add_model(const sti_export *x, bool gguf,
                                  sti_export_type_fn type, sti_export_list *l,
                                  still_error *err)
{
    STI_TRY(add_part(x, STI_PART_EMBED, 0, false, gguf, type, l, err));
    for (int layer = 0; layer < x->cfg.layers; layer++)
        for (int part = STI_PART_ATTN_NORM; part < STI_PARTS; part++)
            for (int bias = 0; bias < 2; bias++)
                STI_TRY(
                    add_part(x, (sti_part)part, layer, bias != 0, gguf, type, l, err));
    STI_TRY(add_part(x, STI_PART_FINAL_NORM, 0, false, gguf, type, l, err));
    if (x->cfg.tied) return STILL_OK;
    return add_part(x, STI_PART_HEAD, 0, false, gguf, type, l, err);
}
