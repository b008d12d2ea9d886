/* export_config.c - config.json of an exported model, and how RoPE scaling is told in
 * either kind of file.
 *
 * A folder's own config.json is kept but for the type. For a GGUF file one is written
 * from the configuration as it was read; scaling that GGUF states as a divisor of each
 * frequency is recognized where it is Llama 3.1's, and refused where it is not. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/export.h"

/* ---- RoPE ---------------------------------------------------------------- */

static double plain_frequency(const sti_config *c, int i)
{
    return pow(c->rope_theta, -2.0 * i / c->head_dim);
}

double sti_export_rope_divisor(const sti_config *c, int i)
{
    return plain_frequency(c, i) / c->inv_freq[STI_TABLE_GLOBAL][i];
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-4 * fabs(b); /* tables are floats */
}

sti_rope_kind sti_export_rope(const sti_config *c, double *factor)
{
    *factor = sti_export_rope_divisor(c, 0);
    for (int i = 1; i < c->head_dim / 2; i++)
        if (!near(sti_export_rope_divisor(c, i), *factor)) return STI_ROPE_EACH;
    return near(*factor, 1) ? STI_ROPE_PLAIN : STI_ROPE_LINEAR;
}

/* Llama 3.1's rule (model/config.c) with borders 1 and 4, as all its models have. */
static bool is_llama3(const sti_config *c, double factor, double ctx)
{
    const double low = 1, high = 4;
    for (int i = 0; i < c->head_dim / 2; i++) {
        const double f = plain_frequency(c, i), wave = 2 * M_PI / f;
        double smooth = (ctx / wave - low) / (high - low);
        smooth = fmin(fmax(smooth, 0), 1);
        if (!near((1 - smooth) * f / factor + smooth * f,
                  (double)c->inv_freq[STI_TABLE_GLOBAL][i]))
            return false;
    }
    return true;
}

static still_status rope_scaling(const sti_export *x, json_t **out, still_error *err)
{
    const sti_config *c = &x->cfg;
    const double most_ctx = 1 << 20;
    double factor;
    *out = NULL;
    switch (sti_export_rope(c, &factor)) {
    case STI_ROPE_PLAIN: *out = json_null(); return STILL_OK;
    case STI_ROPE_LINEAR:
        *out = json_pack("{s:s,s:f}", "rope_type", "linear", "factor", factor);
        break;
    case STI_ROPE_EACH: {
        double ctx = 16;
        factor = round(1e3 * sti_export_rope_divisor(c, c->head_dim / 2 - 1)) / 1e3;
        while (ctx <= most_ctx && !is_llama3(c, factor, ctx)) ctx *= 2;
        if (ctx > most_ctx)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "%s: its scaling of RoPE frequencies is none that "
                            "config.json has a name for",
                            x->store.path);
        *out = json_pack("{s:s,s:f,s:f,s:f,s:i}", "rope_type", "llama3", "factor",
                         factor, "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                         "original_max_position_embeddings", (int)ctx);
    }
    }
    return *out ? STILL_OK : sti_fail_memory(err, "config.json", 0);
}

still_status sti_export_window(const sti_export *x, int *out, still_error *err)
{
    *out = x->cfg.window[0];
    for (int l = 1; l < x->cfg.layers; l++)
        if (x->cfg.window[l] != *out)
            return sti_fail(
                err, STILL_E_UNSUPPORTED,
                "%s: layers 0 and %d have windows of %d and %d; this format "
                "knows one for all",
                x->store.path, l, *out, x->cfg.window[l]);
    return STILL_OK;
}

/* ---- config.json --------------------------------------------------------- */

static const char *torch_name(sti_dtype t)
{
    return t == STI_F32 ? "float32" : t == STI_F16 ? "float16" : "bfloat16";
}

/* The decimal number that was meant: 1e-05, not the float nearest to it. */
static double decimal(float f)
{
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)f);
    return strtod(text, NULL);
}

/* Made from nothing but the numbers. */
static still_status config_of_gguf(const sti_export *x, json_t **out, still_error *err)
{
    const sti_config *c = &x->cfg;
    json_t *scaling;
    int window;
    STI_TRY(sti_export_window(x, &window, err));
    STI_TRY(rope_scaling(x, &scaling, err));
    const bool qwen = strcmp(c->arch, "qwen2") == 0;
    const bool mistral = !qwen && (window > 0 || strcmp(c->arch, "mistral") == 0);
    const char *type = qwen ? "qwen2" : mistral ? "mistral" : "llama";
    const char *class = qwen      ? "Qwen2ForCausalLM"
                        : mistral ? "MistralForCausalLM"
                                  : "LlamaForCausalLM";
    json_t *j =
        json_pack("{s:[s],s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:o,s:b}",
                  "architectures", class, "model_type", type, "hidden_act", "silu",
                  "vocab_size", c->vocab, "hidden_size", c->hidden, "intermediate_size",
                  c->ffn, "num_hidden_layers", c->layers, "num_attention_heads",
                  c->heads, "num_key_value_heads", c->kv_heads, "head_dim", c->head_dim,
                  "max_position_embeddings", c->ctx_train, "rms_norm_eps",
                  decimal(c->rms_eps), "rope_theta", c->rope_theta, "rope_scaling",
                  scaling, "tie_word_embeddings", c->tied);
    const still_tokenizer *tk = x->tokenizer;
    const int32_t bos = tk ? still_tokenizer_bos(tk) : -1;
    const int32_t eos = tk ? still_tokenizer_eos(tk) : -1;
    if (!qwen && !mistral) {
        const bool bias =
            sti_config_tensor(&x->cfg, &x->store, STI_PART_Q, 0, true) != NULL;
        sti_json_set(&j, "attention_bias", json_boolean(bias));
        sti_json_set(&j, "mlp_bias", json_false());
    }
    if (mistral || (qwen && window > 0))
        sti_json_set(&j, "sliding_window",
                     window > 0 ? json_integer(window) : json_null());
    if (qwen) sti_json_set(&j, "use_sliding_window", json_boolean(window > 0));
    if (bos >= 0) sti_json_set(&j, "bos_token_id", json_integer(bos));
    if (eos >= 0) sti_json_set(&j, "eos_token_id", json_integer(eos));
    *out = j;
    return j ? STILL_OK : sti_fail_memory(err, "config.json", 0);
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
