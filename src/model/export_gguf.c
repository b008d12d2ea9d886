/* export_gguf.c - the merged model as llama.cpp loads it, and beside it, where the
 * model is linearized, a second GGUF file with our own tensors.
 *
 * A GGUF base keeps its metadata, and its tensors byte for byte but for those the merge
 * changed. For a folder the metadata are written from the configuration. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/export.h"

/* ---- Types --------------------------------------------------------------- */

static bool is_float(sti_dtype t)
{
    return t == STI_F32 || t == STI_F16 || t == STI_BF16;
}

/* `t`, unless rows do not divide into its blocks. */
static sti_dtype fitting(sti_dtype t, const sti_tensor *src)
{
    size_t bytes;
    return sti_dtype_bytes(t, (uint64_t)src->dim[src->n_dims - 1], &bytes) ? t
                                                                           : STI_F16;
}

static still_status named_type(const char *name, sti_dtype *out, still_error *err)
{
    const sti_dtype_info *info = sti_dtype_by_name(name);
    if (!info || !(is_float(info->type) || info->type == STI_Q8_0))
        return sti_fail(err, STILL_E_ARG,
                        "gguf: type '%s' is not one of f32, f16, bf16, q8_0, same",
                        name);
    *out = info->type;
    return STILL_OK;
}

static still_status type_of(const sti_export *x, const sti_tensor *src, bool changed,
                            sti_dtype *out, still_error *err)
{
    const char *name = x->p->dtype;
    const bool gguf = x->store.is_gguf;
    if (src->n_dims == 1) { /* norms and biases */
        *out = gguf ? src->type : STI_F32;
    } else if (name && strcmp(name, "same") != 0) {
        STI_TRY(named_type(name, out, err));
        *out = fitting(*out, src);
    } else if (name) {
        *out = src->type;
    } else if (gguf && (!changed || is_float(src->type))) {
        *out = src->type;
    } else {
        *out = gguf ? fitting(sti_merge_type(src->type), src) : STI_F16;
    }
    return STILL_OK;
}

/* ---- Metadata ------------------------------------------------------------ */

/* GGUF's number for "mostly this type"; -1: mixed, or the base's own. */
static int file_type(const sti_export *x)
{
    static const struct {
        const char *name;
        int number;
    } known[] = {{"f32", 0}, {"f16", 1}, {"q8_0", 7}, {"bf16", 32}};
    const char *name = x->p->dtype;
    if (!name) return x->store.is_gguf ? -1 : 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0) return known[i].number;
    return -1;
}

static still_status copy_meta(const sti_export *x, sti_writer *w, still_error *err)
{
    const int type = file_type(x);
    for (size_t i = 0; i < x->store.n_meta; i++) {
        const sti_meta *m = &x->store.meta[i];
        if (strcmp(m->key, "general.alignment") == 0) continue; /* the writer's own */
        if (type >= 0 && strcmp(m->key, "general.file_type") == 0) continue;
        STI_TRY(sti_writer_meta_copy(w, m, err));
    }
    if (type < 0) return STILL_OK;
    return sti_writer_meta_u32(w, "general.file_type", (uint32_t)type, err);
}

static still_status write_meta(const sti_export *x, sti_writer *w, still_error *err)
{
    STI_TRY(sti_config_put_gguf(&x->cfg, w, err));
    if (file_type(x) >= 0)
        STI_TRY(
            sti_writer_meta_u32(w, "general.file_type", (uint32_t)file_type(x), err));
    if (!x->tokenizer) /* llama.cpp wants to be told */
        return sti_writer_meta_str(w, "tokenizer.ggml.model", "none", err);
    return sti_tokenizer_save_gguf(x->tokenizer, x->cfg.vocab, w, err);
}

/* ---- Tensors ------------------------------------------------------------- */

/* A tensor of divisors of frequencies: the file's own, or made from the configuration
 * where it is wanted. */
static still_status add_divisors(sti_export *x, const char *name, sti_rope_table table,
                                 bool wanted, sti_export_list *l, still_error *err)
{
    const int half = x->cfg.rotary / 2;
    sti_tensor *own = &x->rope[table == STI_TABLE_LONG];
    sti_export_tensor t = {.type = STI_F32};
    snprintf(t.name, sizeof t.name, "%s", name);
    t.src = sti_store_find(&x->store, name);
    if (x->store.is_gguf)
        return t.src && t.src->type == STI_F32 ? sti_export_add(l, &t, err) : STILL_OK;
    if (!wanted) return STILL_OK;
    float *divisor = malloc((size_t)half * sizeof *divisor);
    if (!divisor) return sti_fail_memory(err, name, (size_t)half * sizeof *divisor);
    for (int i = 0; i < half; i++)
        divisor[i] = (float)sti_config_divisor(&x->cfg, table, i);
    *own = (sti_tensor){.name = (char *)name,
                        .type = STI_F32,
                        .n_dims = 1,
                        .dim = {half},
                        .data = divisor,
                        .bytes = (size_t)half * sizeof *divisor,
                        .path = x->store.path};
    t.src = own;
    return sti_export_add(l, &t, err);
}

/* Scaling that differs from frequency to frequency. */
static still_status add_rope(sti_export *x, sti_export_list *l, still_error *err)
{
    const bool two = x->cfg.long_from > 0, one = !two && sti_config_divided(&x->cfg);
    STI_TRY(
        add_divisors(x, "rope_factors_short.weight", STI_TABLE_GLOBAL, two, l, err));
    STI_TRY(add_divisors(x, "rope_factors_long.weight", STI_TABLE_LONG, two, l, err));
    return add_divisors(x, "rope_freqs.weight", STI_TABLE_GLOBAL, one, l, err);
}

static still_status write_model(sti_export *x, const sti_export_list *l,
                                const char *path, still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_writer_gguf(path, &w, err));
    still_status st = x->store.is_gguf ? copy_meta(x, w, err) : write_meta(x, w, err);
    if (st == STILL_OK) st = sti_export_write(x, l, w, err);
    if (st == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return st;
}

static still_status write_files(sti_export *x, const sti_export_list *model,
                                const sti_export_list *own, const char *folder,
                                still_error *err)
{
    char path[STI_PATH_ROOM];
    sti_adapter_spec spec;
    const char *slash = strrchr(x->path, '/');
    STI_TRY(sti_path_join(path, folder, STI_EXPORT_GGUF, err));
    STI_TRY(write_model(x, model, path, err));
    if (!x->linearized) return STILL_OK;
    STI_TRY(sti_export_own_spec(x, path, slash ? slash + 1 : x->path, &spec, err));
    STI_TRY(sti_path_join(path, folder, STI_EXPORT_GGUF_OWN, err));
    return sti_export_own_tensors(x, own, &spec, path, true, err);
}

still_status sti_export_gguf(sti_export *x, const char *folder, still_error *err)
{
    sti_export_list model = {0}, own = {0};
    still_status st = sti_export_add_model(x, true, type_of, &model, err);
    if (st == STILL_OK) st = add_rope(x, &model, err);
    if (st == STILL_OK && x->linearized) st = sti_export_add_own(x, true, &own, err);
    x->total = sti_export_bytes(&model) + sti_export_bytes(&own);
    if (st == STILL_OK) st = write_files(x, &model, &own, folder, err);
    sti_export_list_free(&model);
    sti_export_list_free(&own);
    return st;
}
