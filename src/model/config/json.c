/* json.c - a configuration from config.json of a Hugging Face folder. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/config/read.h"

typedef struct json_reader {
    const char *path;
    const json_t *j;
    still_error *err;
} json_reader;

static bool given(const json_t *from, const char *key)
{
    const json_t *v = json_object_get(from, key);
    return v && !json_is_null(v);
}

static still_status json_int(const json_reader *r, const char *key, int fallback,
                             int *out)
{
    int64_t n = 0;
    if (!given(r->j, key) && fallback >= 0) {
        *out = fallback;
        return STILL_OK;
    }
    const still_status st =
        sti_json_int("config.json", r->j, key, 1, INT32_MAX, &n, r->err);
    if (st != STILL_OK) return sti_fail_prefix(r->err, st, "%s", r->path);
    *out = (int)n;
    return STILL_OK;
}

/* *out stays as it is if the key is absent. */
static still_status json_float(const json_reader *r, const json_t *from,
                               const char *key, double *out)
{
    if (!given(from, key)) return STILL_OK;
    /* What a float can hold, since some of these become floats. */
    const still_status st =
        sti_json_real("config.json", from, key, 1e-30, 1e30, out, r->err);
    return st == STILL_OK ? st : sti_fail_prefix(r->err, st, "%s", r->path);
}

/* ---- RoPE ---------------------------------------------------------------- */

/* LongRoPE's divisors: one for each frequency. */
static still_status json_divisors(const json_reader *r, const json_t *from,
                                  const char *key, int n, float **out)
{
    const json_t *list = json_object_get(from, key);
    if (!json_is_array(list) || json_array_size(list) != (size_t)n)
        return sti_fail(r->err, STILL_E_FORMAT,
                        "%s/config.json: '%s' is not a list of %d numbers", r->path,
                        key, n);
    *out = sti_alloc((size_t)n, sizeof **out);
    if (!*out) return sti_fail_memory(r->err, key, (size_t)n * sizeof **out);
    for (int i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        const double f = json_is_number(v) ? json_number_value(v) : 0;
        if (!(f >= 1e-30 && f <= 1e30))
            return sti_fail(r->err, STILL_E_FORMAT,
                            "%s/config.json: '%s' element %d is not a positive number",
                            r->path, key, i);
        (*out)[i] = (float)f;
    }
    return STILL_OK;
}

static still_status json_scaling(const json_reader *r, const sti_config *c,
                                 const json_t *p, sti_rope_scaling *scale)
{
    const char *kind = json_string_value(json_object_get(p, "rope_type"));
    if (!kind) kind = json_string_value(json_object_get(p, "type"));
    if (!kind || strcmp(kind, "default") == 0) return STILL_OK;
    if (strcmp(kind, "linear") == 0)
        scale->kind = ROPE_LINEAR;
    else if (strcmp(kind, "llama3") == 0)
        scale->kind = ROPE_LLAMA3;
    else if (strcmp(kind, "longrope") == 0 || strcmp(kind, "su") == 0)
        scale->kind = ROPE_LONG;
    else
        return sti_fail(r->err, STILL_E_UNSUPPORTED,
                        "%s/config.json: RoPE scaling '%s' is not supported (default, "
                        "linear, llama3, longrope)",
                        r->path, kind);
    static const char *const original = "original_max_position_embeddings";
    scale->factor = scale->low = 1;
    scale->high = 4;
    scale->ctx = c->ctx_train;
    STI_TRY(json_float(r, p, "factor", &scale->factor));
    STI_TRY(json_float(r, p, "low_freq_factor", &scale->low));
    STI_TRY(json_float(r, p, "high_freq_factor", &scale->high));
    STI_TRY(json_float(r, given(p, original) ? p : r->j, original, &scale->ctx));
    if (scale->kind != ROPE_LONG) return STILL_OK;
    const int n = c->rotary / 2;
    STI_TRY(json_float(r, p, "attention_factor", &scale->attn_factor));
    STI_TRY(json_divisors(r, p, "short_factor", n, &scale->divisor[0]));
    return json_divisors(r, p, "long_factor", n, &scale->divisor[1]);
}

/* The RoPE settings are spread over the top level and `rope_scaling` (older files) or
 * gathered in `rope_parameters`, there once or for each kind of layer; the kind of
 * scaling is "rope_type" or, older still, "type". */
static still_status json_rope(const json_reader *r, const sti_arch *arch, sti_config *c,
                              sti_rope_scaling *scale)
{
    const json_t *p = json_object_get(r->j, "rope_parameters"), *local = NULL;
    if (!json_is_object(p)) p = json_object_get(r->j, "rope_scaling");
    if (json_is_object(json_object_get(p, "full_attention"))) {
        local = json_object_get(p, "sliding_attention");
        p = json_object_get(p, "full_attention");
    }
    double part = 1;
    c->rope_theta = arch->theta > 0 ? arch->theta : 10000;
    c->rope_theta_local = arch->theta_local > 0 ? arch->theta_local : 10000;
    STI_TRY(
        json_float(r, given(p, "rope_theta") ? p : r->j, "rope_theta", &c->rope_theta));
    STI_TRY(json_float(r, r->j, "rope_local_base_freq", &c->rope_theta_local));
    STI_TRY(json_float(r, local, "rope_theta", &c->rope_theta_local));
    STI_TRY(json_float(r, given(p, "partial_rotary_factor") ? p : r->j,
                       "partial_rotary_factor", &part));
    c->rotary = part > 1 ? -1 : (int)(c->head_dim * part);
    STI_TRY(sti_config_check_heads(r->path, c, r->err));
    return json_is_object(p) ? json_scaling(r, c, p, scale) : STILL_OK;
}

/* ---- Layers -------------------------------------------------------------- */

/* A list with an entry for each layer; NULL, with STILL_OK: there is none. */
static still_status json_list(const json_reader *r, const char *key, int n,
                              const json_t **out)
{
    *out = given(r->j, key) ? json_object_get(r->j, key) : NULL;
    if (!*out || (json_is_array(*out) && json_array_size(*out) == (size_t)n))
        return STILL_OK;
    return sti_fail(r->err, STILL_E_FORMAT,
                    "%s/config.json: '%s' is not a list of %d, one for each layer",
                    r->path, key, n);
}

static still_status json_layers(const json_reader *r, const sti_config *c,
                                sti_config_draft *d)
{
    const json_t *types, *turned;
    int period = 0;
    STI_TRY(json_int(r, "sliding_window_pattern", 0, &period));
    for (int l = 0; period > 0 && l < c->layers; l++)
        d->local[l] = (l + 1) % period != 0;
    STI_TRY(json_list(r, "layer_types", c->layers, &types));
    STI_TRY(json_list(r, "no_rope_layers", c->layers, &turned));
    for (int l = 0; types && l < c->layers; l++) {
        const char *t = json_string_value(json_array_get(types, (size_t)l));
        d->local[l] = t && strcmp(t, "sliding_attention") == 0;
        if (!d->local[l] && (!t || strcmp(t, "full_attention") != 0))
            return sti_fail(r->err, STILL_E_UNSUPPORTED,
                            "%s/config.json: layer %d is of type '%s', which is not "
                            "supported (full_attention, sliding_attention)",
                            r->path, l, t ? t : "(not a string)");
    }
    for (int l = 0; turned && l < c->layers; l++)
        d->plain[l] = !json_integer_value(json_array_get(turned, (size_t)l));
    return STILL_OK;
}

/* ---- The whole ----------------------------------------------------------- */

/* What the forward pass has no place for. */
static still_status refuse_unknown(const json_reader *r)
{
    static const char *const unknown[] = {"attn_logit_softcapping",
                                          "final_logit_softcapping",
                                          "use_bidirectional_attention"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (given(r->j, unknown[i]) &&
            !json_is_false(json_object_get(r->j, unknown[i])))
            return sti_fail(r->err, STILL_E_UNSUPPORTED,
                            "%s/config.json: '%s' is not supported", r->path,
                            unknown[i]);
    return STILL_OK;
}

static still_status json_activation(const json_reader *r, sti_form *f)
{
    const char *act = json_string_value(json_object_get(r->j, "hidden_act"));
    if (!act) act = json_string_value(json_object_get(r->j, "hidden_activation"));
    if (!act) return STILL_OK;
    if (strcmp(act, "silu") == 0)
        f->act = STI_SILU;
    else if (strcmp(act, "gelu_pytorch_tanh") == 0)
        f->act = STI_GELU_TANH;
    else
        return sti_fail(r->err, STILL_E_UNSUPPORTED,
                        "%s/config.json: hidden_act '%s' is not supported (silu, "
                        "gelu_pytorch_tanh)",
                        r->path, act);
    return STILL_OK;
}

static still_status json_scales(const json_reader *r, sti_config *c)
{
    sti_form *f = &c->form;
    double square = 0;
    STI_TRY(json_float(r, r->j, "embedding_multiplier", &f->embed_scale));
    STI_TRY(json_float(r, r->j, "residual_multiplier", &f->residual_scale));
    STI_TRY(json_float(r, r->j, "logits_scaling", &f->logit_scale));
    STI_TRY(json_float(r, r->j, "attention_multiplier", &f->attn_scale));
    STI_TRY(json_float(r, r->j, "query_pre_attn_scalar", &square));
    if (square > 0) f->attn_scale = 1 / sqrt(square);
    c->attn_scale_stated = square > 0 || given(r->j, "attention_multiplier");
    return STILL_OK;
}

static still_status json_sizes(const json_reader *r, sti_config *c)
{
    STI_TRY(json_int(r, "num_hidden_layers", -1, &c->layers));
    STI_TRY(json_int(r, "hidden_size", -1, &c->hidden));
    STI_TRY(json_int(r, "intermediate_size", -1, &c->ffn));
    STI_TRY(json_int(r, "num_attention_heads", -1, &c->heads));
    STI_TRY(json_int(r, "num_key_value_heads", c->heads, &c->kv_heads));
    STI_TRY(json_int(r, "head_dim", c->hidden / c->heads, &c->head_dim));
    return json_int(r, "max_position_embeddings", 2048, &c->ctx_train);
}

still_status sti_config_read_json(const sti_store *s, sti_config *c,
                                  sti_config_draft *d, still_error *err)
{
    const json_reader r = {s->path, s->config, err};
    const char *name = json_string_value(json_object_get(s->config, "model_type"));
    const char *slash = strrchr(s->path, '/');
    double eps = 1e-6;
    if (!name)
        return sti_fail(err, STILL_E_FORMAT, "%s/config.json: 'model_type' is missing",
                        s->path);
    STI_TRY(sti_arch_find(s->path, false, name, &d->arch, err));
    snprintf(c->arch, sizeof c->arch, "%s", name);
    snprintf(c->name, sizeof c->name, "%s", slash && slash[1] ? slash + 1 : s->path);
    c->form = d->arch->form;
    c->form.norm_offset = d->arch->hf_norm_offset;
    c->gguf_pairs = d->arch->gguf_pairs;
    STI_TRY(refuse_unknown(&r));
    STI_TRY(json_activation(&r, &c->form));
    STI_TRY(json_sizes(&r, c));
    STI_TRY(json_int(&r, "sliding_window", 0, &d->window));
    if (d->arch->window_switch &&
        !json_is_true(json_object_get(s->config, "use_sliding_window")))
        d->window = 0;
    STI_TRY(json_float(&r, s->config, "rms_norm_eps", &eps));
    c->rms_eps = (float)eps;
    STI_TRY(json_scales(&r, c));
    STI_TRY(json_rope(&r, d->arch, c, &d->scale));
    STI_TRY(sti_config_new_layers(s->path, c, d, err));
    return json_layers(&r, c, d);
}
