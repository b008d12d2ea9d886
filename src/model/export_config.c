/* export_config.c - config.json of an exported model.
 *
 * A folder's own config.json is kept but for the type. For a GGUF file one is written
 * from the configuration as it was read (config/write_json.c). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/export.h"

static const char *torch_name(sti_dtype t)
{
    return t == STI_F32 ? "float32" : t == STI_F16 ? "float16" : "bfloat16";
}

/* For a GGUF file: its numbers, and the ids that its tokenizer has. */
static still_status config_of_gguf(const sti_export *x, json_t **out, still_error *err)
{
    const bool biased =
        sti_config_tensor(&x->cfg, &x->store, STI_PART_Q, 0, true) != NULL;
    const sti_meta *meta = sti_meta_find(&x->store, "tokenizer.ggml.padding_token_id");
    const still_tokenizer *tk = x->tokenizer;
    const int32_t bos = tk ? still_tokenizer_bos(tk) : -1;
    const int32_t eos = tk ? still_tokenizer_eos(tk) : -1;
    int64_t pad = -1;
    STI_TRY(sti_config_put_json(&x->cfg, biased, out, err));
    if (!meta || !sti_meta_int(meta, &pad) || pad >= x->cfg.vocab) pad = -1;
    if (bos >= 0) sti_json_set(out, "bos_token_id", json_integer(bos));
    if (eos >= 0) sti_json_set(out, "eos_token_id", json_integer(eos));
    /* Said in any case: some classes have ids past a small vocabulary as default. */
    sti_json_set(out, "pad_token_id", pad >= 0 ? json_integer(pad) : json_null());
    return *out ? STILL_OK : sti_fail_memory(err, "config.json", 0);
}

still_status sti_export_config(const sti_export *x, sti_dtype type, const char *folder,
                               still_error *err)
{
    json_t *j = NULL;
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, folder, "config.json", err));
    if (x->store.config) {
        j = json_object();
        sti_json_merge(&j, json_incref(x->store.config)); /* its values are shared */
    } else {
        STI_TRY(config_of_gguf(x, &j, err));
    }
    json_object_del(j, "quantization_config");
    const char *key = json_object_get(j, "dtype") ? "dtype" : "torch_dtype";
    sti_json_set(&j, key, json_string(torch_name(type)));
    char *text = sti_json_text(j, JSON_INDENT(2) | JSON_REAL_PRECISION(16));
    json_decref(j);
    if (!text) return sti_fail_memory(err, path, 0);
    still_status st = sti_write_text(path, text, err);
    free(text);
    return st;
}
