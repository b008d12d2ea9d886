/* export_safetensors.c - the merged model as a Hugging Face folder: config.json,
 * model.safetensors, the tokenizer's files, and beside them, where the model is
 * linearized, still.json and adapter.safetensors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/export.h"

/* ---- Types --------------------------------------------------------------- */

static still_status float_type(const sti_export *x, sti_dtype *out, still_error *err)
{
    const char *name = x->p->dtype;
    const sti_tensor *q = sti_config_tensor(&x->cfg, &x->store, STI_PART_Q, 0, false);
    if (!name) {
        *out = q && (q->type == STI_F32 || q->type == STI_F16) ? q->type : STI_BF16;
        return STILL_OK;
    }
    const sti_dtype_info *info = sti_dtype_by_name(name);
    if (!info ||
        (info->type != STI_F32 && info->type != STI_F16 && info->type != STI_BF16))
        return sti_fail(err, STILL_E_ARG,
                        "safetensors: type '%s' is not one of f32, f16, bf16", name);
    *out = info->type;
    return STILL_OK;
}

static still_status type_of(const sti_export *x, const sti_tensor *src, bool changed,
                            sti_dtype *out, still_error *err)
{
    (void)src;
    (void)changed;
    return float_type(x, out, err);
}

/* ---- Tokenizer ----------------------------------------------------------- */

static still_status write_tokenizer(const sti_export *x, const char *folder,
                                    still_error *err)
{
    static const char *const files[][2] = {
        {"tokenizer.json", "tokenizer.json"},
        {"tokenizer_config.json", "tokenizer_config.json"},
        {"tokenizer.model", "tokenizer.model"},
        {"original/tokenizer.model", "tokenizer.model"},
        {"special_tokens_map.json", "special_tokens_map.json"},
        {"added_tokens.json", "added_tokens.json"},
        {"vocab.json", "vocab.json"},
        {"merges.txt", "merges.txt"},
        {"chat_template.jinja", "chat_template.jinja"},
        {"generation_config.json", "generation_config.json"},
    };
    if (x->store.is_gguf)
        return x->tokenizer ? sti_tokenizer_save_json(x->tokenizer, folder, err)
                            : STILL_OK;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        STI_TRY(sti_export_copy(x->store.path, files[i][0], folder, files[i][1], err));
    return STILL_OK;
}

/* ---- Tensors ------------------------------------------------------------- */

static still_status write_lists(sti_export *x, const sti_export_list *model,
                                const sti_export_list *own, const char *folder,
                                still_error *err)
{
    char path[STI_PATH_ROOM];
    sti_adapter_spec spec;
    STI_TRY(sti_path_join(path, folder, "model.safetensors", err));
    STI_TRY(sti_export_tensors(x, model, path, err));
    if (!x->linearized) return STILL_OK;
    STI_TRY(sti_export_own_spec(x, folder, ".", &spec, err)); /* reads the model */
    STI_TRY(sti_path_join(path, folder, STI_ADAPTER_TENSORS, err));
    STI_TRY(sti_export_own_tensors(x, own, &spec, path, false, err));
    return sti_adapter_write_spec(&spec, folder, err);
}

still_status sti_export_safetensors(sti_export *x, const char *folder, still_error *err)
{
    sti_dtype type;
    sti_export_list model = {0}, own = {0};
    STI_TRY(float_type(x, &type, err));
    STI_TRY(sti_export_config(x, type, folder, err));
    STI_TRY(write_tokenizer(x, folder, err));
    still_status st = sti_export_add_model(x, false, type_of, &model, err);
    if (st == STILL_OK && x->linearized) st = sti_export_add_own(x, false, &own, err);
    x->total = sti_export_bytes(&model) + sti_export_bytes(&own);
    if (st == STILL_OK) st = write_lists(x, &model, &own, folder, err);
    sti_export_list_free(&model);
    sti_export_list_free(&own);
    return st;
}
