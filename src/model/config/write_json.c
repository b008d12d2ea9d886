/* write_json.c - a configuration as config.json of a Hugging Face folder: the inverse of
 * json.c.
 *
 * Keys are those that every version of transformers reads which knows the architecture
 * (rope_theta and rope_scaling, not rope_parameters). Scaling that GGUF states as a
 * divisor of each frequency is recognized where it is Llama 3.1's, and refused where it
 * is not. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/config/read.h"

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-4 * fabs(b); /* tables are floats */
}

/* The decimal number that was meant: 1e-05, not the float nearest to it. */
static json_t *decimal(double v)
{
    const float f = (float)v;
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) break;
    }
    return json_real(strtod(text, NULL));
}

/* ---- RoPE ---------------------------------------------------------------- */

static double plain_frequency(const sti_config *c, int i)
{
    return pow(c->rope_theta, -2.0 * i / c->rotary);
}

static double global_divisor(const sti_config *c, int i)
{
    return c->rope_linear * sti_config_divisor(c, STI_TABLE_GLOBAL, i);
}

/* Llama 3.1's rule (rope.c) with borders 1 and 4, as all its models have. */
static bool is_llama3(const sti_config *c, double factor, double ctx)
{
    const double low = 1, high = 4;
    for (int i = 0; i < c->rotary / 2; i++) {
        const double f = plain_frequency(c, i), wave = 2 * M_PI / f;
        double smooth = (ctx / wave - low) / (high - low);
        smooth = fmin(fmax(smooth, 0), 1);
        if (!near((1 - smooth) * f / factor + smooth * f,
                  (double)c->inv_freq[STI_TABLE_GLOBAL][i]))
            return false;
    }
    return true;
}

static json_t *divisors(const sti_config *c, sti_rope_table t)
{
    json_t *list = json_array();
    for (int i = 0; i < c->rotary / 2; i++)
        sti_json_append(&list, decimal(sti_config_divisor(c, t, i)));
    return list;
}

/* LongRoPE; transformers makes the factor of rotated queries and keys from the lengths,
 * unless it is given. */
static json_t *long_scaling(const sti_config *c)
{
    const double times = (double)c->ctx_train / c->long_from;
    const double usual =
        times > 1 && c->long_from > 1 ? sqrt(1 + log(times) / log(c->long_from)) : 1;
    json_t *j = json_pack("{s:s,s:o,s:o}", "type", "longrope", "short_factor",
                          divisors(c, STI_TABLE_GLOBAL), "long_factor",
                          divisors(c, STI_TABLE_LONG));
    if (fabs(c->rope_factor - usual) > 1e-6)
        sti_json_set(&j, "attention_factor", decimal(c->rope_factor));
    return j;
}

static still_status llama3_scaling(const sti_config *c, json_t **out, still_error *err)
{
    const double most_ctx = 1 << 20;
    const double factor = round(1e3 * global_divisor(c, c->rotary / 2 - 1)) / 1e3;
    double ctx = 16;
    while (ctx <= most_ctx && !is_llama3(c, factor, ctx)) ctx *= 2;
    if (ctx > most_ctx)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: its scaling of RoPE frequencies is none that config.json "
                        "has a name for",
                        c->name);
    *out = json_pack("{s:s,s:f,s:f,s:f,s:i}", "rope_type", "llama3", "factor", factor,
                     "low_freq_factor", 1.0, "high_freq_factor", 4.0,
                     "original_max_position_embeddings", (int)ctx);
    return STILL_OK;
}

/* *out NULL, with STILL_OK: no memory. */
static still_status rope_scaling(const sti_config *c, json_t **out, still_error *err)
{
    const double factor = global_divisor(c, 0);
    bool even = true;
    for (int i = 1; i < c->rotary / 2; i++)
        even = even && near(global_divisor(c, i), factor);
    if (c->long_from)
        *out = long_scaling(c);
    else if (even && near(factor, 1))
        *out = json_null();
    else if (even)
        *out = json_pack("{s:s,s:o}", "rope_type", "linear", "factor", decimal(factor));
    else
        return llama3_scaling(c, out, err);
    return STILL_OK;
}

static still_status put_rope(json_t **j, const sti_config *c, still_error *err)
{
    json_t *scaling;
    STI_TRY(rope_scaling(c, &scaling, err));
    sti_json_set(j, "rope_theta", decimal(c->rope_theta));
    sti_json_set(j, "rope_scaling", scaling);
    if (c->of->local_period)
        sti_json_set(j, "rope_local_base_freq", decimal(c->rope_theta_local));
    if (c->rotary < c->head_dim)
        sti_json_set(j, "partial_rotary_factor",
                     json_real((double)c->rotary / c->head_dim));
    if (c->long_from)
        sti_json_set(j, "original_max_position_embeddings", json_integer(c->long_from));
    return STILL_OK;
}

/* ---- Layers -------------------------------------------------------------- */

/* Most of a layer's windows; 0: none has one. */
static int window_of(const sti_config *c)
{
    int most = 0;
    for (int l = 0; l < c->layers; l++)
        if (c->window[l] > most) most = c->window[l];
    return most;
}

/* The window, and which layers have it where they may differ. */
static still_status put_windows(json_t **j, const sti_config *c, still_error *err)
{
    const int window = window_of(c);
    const bool listed = c->of->local_period || c->of->window_switch;
    json_t *types = json_array();
    sti_json_set(j, "sliding_window", window > 0 ? json_integer(window) : json_null());
    if (c->of->window_switch)
        sti_json_set(j, "use_sliding_window", json_boolean(window > 0));
    for (int l = 0; l < c->layers; l++) {
        const bool local = c->window[l] > 0;
        sti_json_append(&types,
                        json_string(local ? "sliding_attention" : "full_attention"));
        if (c->window[l] == window || (listed && !local)) continue;
        json_decref(types);
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: layer %d has a window of %d, others of %d; config.json "
                        "knows one for all",
                        c->name, l, c->window[l], window);
    }
    if (listed && window > 0)
        sti_json_set(j, "layer_types", types);
    else
        json_decref(types);
    return STILL_OK;
}

static still_status put_plain_layers(json_t **j, const sti_config *c, still_error *err)
{
    json_t *turned = json_array();
    for (int l = 0; l < c->layers; l++) {
        const bool plain = c->table[l] == STI_TABLE_NONE;
        sti_json_append(&turned, json_integer(!plain));
        if (!plain || c->of->plain_period) continue;
        json_decref(turned);
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: layer %d has no RoPE, which config.json of '%s' cannot say", c->name,
            l, c->of->hf);
    }
    if (c->of->plain_period)
        sti_json_set(j, "no_rope_layers", turned);
    else
        json_decref(turned);
    return STILL_OK;
}

/* ---- The whole ----------------------------------------------------------- */

static still_status put_scales(json_t **j, const sti_config *c, still_error *err)
{
    const sti_form *f = &c->form;
    const double embed = c->of->form.embed_scale > 0 ? 1 : sqrt(c->hidden);
    if (c->of->scales) {
        sti_json_set(j, "embedding_multiplier", decimal(f->embed_scale));
        sti_json_set(j, "residual_multiplier", decimal(f->residual_scale));
        sti_json_set(j, "logits_scaling", decimal(f->logit_scale));
        sti_json_set(j, "attention_multiplier", decimal(f->attn_scale));
        return STILL_OK;
    }
    const double square = 1 / (f->attn_scale * f->attn_scale);
    if (c->of->hf_query_scalar)
        sti_json_set(j, "query_pre_attn_scalar",
                     near(square, round(square))
                         ? json_integer((json_int_t)round(square))
                         : decimal(square));
    if (near(f->embed_scale, embed) && near(f->residual_scale, 1) &&
        near(f->logit_scale, 1) &&
        (c->of->hf_query_scalar || near(square, c->head_dim)))
        return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "%s: scales of embeddings %g, residual stream %g, logits %g and "
                    "attention %g: config.json of '%s' has no keys for them",
                    c->name, f->embed_scale, f->residual_scale, f->logit_scale,
                    f->attn_scale, c->of->hf);
}

static still_status put_all(json_t **j, const sti_config *c, bool biased,
                            still_error *err)
{
    /* Gemma, the only one with GELU, has a name of its own for the key. */
    const bool gelu = c->form.act == STI_GELU_TANH;
    sti_json_set(j, gelu ? "hidden_activation" : "hidden_act",
                 json_string(gelu ? "gelu_pytorch_tanh" : "silu"));
    sti_json_set(j, "attention_bias", json_boolean(biased));
    sti_json_set(j, "mlp_bias", json_false());
    STI_TRY(put_rope(j, c, err));
    STI_TRY(put_windows(j, c, err));
    STI_TRY(put_plain_layers(j, c, err));
    return put_scales(j, c, err);
}

still_status sti_config_put_json(const sti_config *c, bool biased, json_t **out,
                                 still_error *err)
{
    const char *type =
        c->of->hf_windowed && window_of(c) > 0 ? c->of->hf_windowed : c->of->hf;
    json_t *j = json_pack(
        "{s:[s],s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:o,s:b}", "architectures",
        sti_config_class(type), "model_type", type, "vocab_size", c->vocab,
        "hidden_size", c->hidden, "intermediate_size", c->ffn, "num_hidden_layers",
        c->layers, "num_attention_heads", c->heads, "num_key_value_heads", c->kv_heads,
        "head_dim", c->head_dim, "max_position_embeddings", c->ctx_train,
        "rms_norm_eps", decimal((double)c->rms_eps), "tie_word_embeddings", c->tied);
    still_status st = put_all(&j, c, biased, err);
    if (st == STILL_OK && !j) st = sti_fail_memory(err, "config.json", 0);
    if (st != STILL_OK) {
        json_decref(j);
        j = NULL;
    }
    *out = j;
    return st;
}
