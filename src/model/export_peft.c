/* export_peft.c - the low-rank additions as PEFT's LoraModel reads them: a folder with
 * adapter_config.json and adapter_model.safetensors.
 *
 * PEFT's y = W x + lora_alpha / r * lora_B lora_A x is ours. Its base is the Hugging
 * Face model, so rows of B of q and k that were trained on pairs become halves. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "model/export.h"

static const char *const module[] = {"q_proj", "k_proj", "v_proj", "o_proj"};

static still_status list_layer(const sti_export *x, int layer, sti_export_list *l,
                               still_error *err)
{
    for (int t = STI_TARGET_Q; t <= STI_TARGET_O; t++) {
        sti_export_tensor a = {.type = STI_F32}, b = {.type = STI_F32};
        STI_TRY(sti_export_low_rank(x, layer, (sti_target)t, &a.src, &b.src, err));
        if (!a.src || !b.src) continue;
        static const char form[] = "base_model.model.model.layers.%d.self_attn.%s.%s";
        snprintf(a.name, sizeof a.name, form, layer, module[t], "lora_A.weight");
        snprintf(b.name, sizeof b.name, form, layer, module[t], "lora_B.weight");
        if (t == STI_TARGET_Q || t == STI_TARGET_K)
            b.order = sti_export_order(x, false);
        STI_TRY(sti_export_add(l, &a, err));
        STI_TRY(sti_export_add(l, &b, err));
    }
    return STILL_OK;
}

static still_status write_tensors(sti_export *x, const sti_export_list *l,
                                  const char *folder, still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, folder, "adapter_model.safetensors", err));
    return sti_export_tensors(x, l, path, err);
}

static const char *base_name(const sti_export *x)
{
    return x->p->base_name ? x->p->base_name : x->spec.base_name;
}

/* The layers that have additions; NULL: no memory. */
static json_t *layer_numbers(const sti_export *x)
{
    json_t *list = json_array();
    int last = -1, n = 0;
    for (size_t i = 0; i < x->trained->n_entries; i++) {
        const sti_adapter_entry *e = &x->trained->entry[i];
        if (e->kind != STI_TRAINED_LORA_A || e->layer == last) continue;
        last = e->layer;
        n++;
        sti_json_append(&list, json_integer(last));
    }
    if (n < x->cfg.layers) return list;
    json_decref(list);
    return json_null(); /* all: PEFT's default */
}

static still_status write_config(const sti_export *x, const char *folder,
                                 still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, folder, "adapter_config.json", err));
    json_t *targets = json_array();
    for (int t = STI_TARGET_Q; t <= STI_TARGET_O; t++)
        if (x->spec.lora.targets >> t & 1)
            sti_json_append(&targets, json_string(module[t]));
    const double alpha = x->spec.lora.alpha;
    json_t *number =
        alpha == (json_int_t)alpha ? json_integer((json_int_t)alpha) : json_real(alpha);
    json_t *j = json_pack(
        "{s:s,s:s,s:s,s:i,s:o,s:f,s:s,s:b,s:o,s:o,s:n,s:b,s:b,s:n}", "peft_type",
        "LORA", "task_type", "CAUSAL_LM", "base_model_name_or_path", base_name(x), "r",
        x->spec.lora.rank, "lora_alpha", number, "lora_dropout", 0.0, "bias", "none",
        "fan_in_fan_out", 0, "target_modules", targets, "layers_to_transform",
        layer_numbers(x), "modules_to_save", "init_lora_weights", 1, "inference_mode",
        1, "revision");
    char *text = sti_json_text(j, JSON_INDENT(2));
    json_decref(j);
    if (!text) return sti_fail_memory(err, path, 0);
    still_status st = sti_write_text(path, text, err);
    free(text);
    return st;
}

static still_status write_card(const sti_export *x, const char *folder,
                               still_error *err)
{
    char path[STI_PATH_ROOM];
    sti_buf b = {0};
    STI_TRY(sti_path_join(path, folder, "README.md", err));
    sti_buf_printf(
        &b,
        "# Low-rank additions of a model linearized with still\n\n"
        "Base model: `%s`. Rank %d, alpha %g. Tensors are in the layout of "
        "the base's Hugging Face files.\n\n"
        "They were trained together with the attention method `%s`, whose own "
        "parts (feature maps, scalars, gates and the gates' low-rank "
        "additions) PEFT has no place for: they are not in this folder. With "
        "softmax attention, as PEFT runs it, the result is the fine-tuned "
        "base model, not the linearized one; for that use the adapter this "
        "was made from, or `still export --to safetensors`.\n",
        base_name(x), x->spec.lora.rank, (double)x->spec.lora.alpha,
        x->spec.method.name);
    still_status st =
        b.failed ? sti_fail_memory(err, path, b.n) : sti_write_text(path, b.p, err);
    sti_buf_free(&b);
    return st;
}

still_status sti_export_peft(sti_export *x, const char *folder, still_error *err)
{
    if (!x->linearized)
        return sti_fail(
            err, STILL_E_ARG,
            "%s: a plain model has no low-rank additions to export; name an "
            "adapter that `still linearize` wrote",
            x->store.path);
    if (x->cfg.form.fused)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: models of architecture '%s' keep q, k and v in one matrix, "
            "to which PEFT cannot add ours; export to gguf, safetensors or "
            "adapter",
            x->store.path, x->cfg.arch);
    sti_export_list l = {0};
    still_status st = STILL_OK;
    for (int i = 0; i < x->cfg.layers && st == STILL_OK; i++)
        st = list_layer(x, i, &l, err);
    if (st == STILL_OK && l.n == 0)
        st = sti_fail(err, STILL_E_ARG,
                      "%s: the adapter has no low-rank additions on q, k, v or o (they "
                      "are trained by stage 2 of `still linearize`)",
                      x->p->adapter);
    x->total = sti_export_bytes(&l);
    if (st == STILL_OK) st = write_tensors(x, &l, folder, err);
    sti_export_list_free(&l);
    if (st == STILL_OK) st = write_config(x, folder, err);
    return st == STILL_OK ? write_card(x, folder, err) : st;
}
