/* config.c - see config.h. Both readers fill the same struct and then pass the same
 * checks, so a hostile GGUF and a hostile config.json meet the same wall. */
#include "model/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* ---- Tensor names -------------------------------------------------------- */

static const struct {
    const char *gguf, *hf; /* %d is the layer */
} part_names[] = {
    [STI_PART_EMBED] = {"token_embd", "model.embed_tokens"},
    [STI_PART_FINAL_NORM] = {"output_norm", "model.norm"},
    [STI_PART_HEAD] = {"output", "lm_head"},
    [STI_PART_ATTN_NORM] = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},
    [STI_PART_Q] = {"blk.%d.attn_q", "model.layers.%d.self_attn.q_proj"},
    [STI_PART_K] = {"blk.%d.attn_k", "model.layers.%d.self_attn.k_proj"},
    [STI_PART_V] = {"blk.%d.attn_v", "model.layers.%d.self_attn.v_proj"},
    [STI_PART_O] = {"blk.%d.attn_output", "model.layers.%d.self_attn.o_proj"},
    [STI_PART_FFN_NORM] = {"blk.%d.ffn_norm",
                           "model.layers.%d.post_attention_layernorm"},
    [STI_PART_GATE] = {"blk.%d.ffn_gate", "model.layers.%d.mlp.gate_proj"},
    [STI_PART_UP] = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},
    [STI_PART_DOWN] = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"},
};

void sti_config_tensor_name(const sti_store *s, sti_part part, int layer, bool bias,
                            char *buf, size_t capacity)
{
    const char *pattern = s->is_gguf ? part_names[part].gguf : part_names[part].hf;
    const char *slot = strstr(pattern, "%d");
    const char *end = bias ? "bias" : "weight";
    if (slot)
        snprintf(buf, capacity, "%.*s%d%s.%s", (int)(slot - pattern), pattern, layer,
                 slot + 2, end);
    else
        snprintf(buf, capacity, "%s.%s", pattern, end);
}

const sti_tensor *sti_config_tensor(const sti_store *s, sti_part part, int layer,
                                    bool bias)
{
    char name[128];
    sti_config_tensor_name(s, part, layer, bias, name, sizeof name);
    return sti_store_find(s, name);
}

/* ---- Rotary frequencies -------------------------------------------------- */

typedef struct rope_scaling {
    enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3 } kind;
    double factor, low, high, ctx; /* ctx: the length trained before scaling */
} rope_scaling;

/* inv_freq[i] = theta^(-2i/D), then scaled. Llama 3.1 keeps the fast frequencies,
 * divides the slow ones by `factor`, and blends between (wavelengths ctx/high and
 * ctx/low mark the borders). */
static still_status rope_table(sti_config *c, const rope_scaling *r, still_error *err)
{
    int half = c->head_dim / 2;
    c->inv_freq = sti_alloc((size_t)half, sizeof *c->inv_freq);
    if (!c->inv_freq) return sti_fail_memory(err, "RoPE table", (size_t)half * 4);
    for (int i = 0; i < half; i++) {
        double f = pow(c->rope_theta, -2.0 * i / c->head_dim);
        if (r->kind == ROPE_LINEAR) f /= r->factor;
        if (r->kind == ROPE_LLAMA3) {
            double wave = 2 * M_PI / f, smooth;
            if (wave > r->ctx / r->low)
                smooth = 0;
            else if (wave < r->ctx / r->high)
                smooth = 1;
            else
                smooth = (r->ctx / wave - r->low) / (r->high - r->low);
            f = (1 - smooth) * f / r->factor + smooth * f;
        }
        c->inv_freq[i] = (float)f;
    }
    return STILL_OK;
}

static still_status check_scaling(const char *path, const rope_scaling *r,
                                  still_error *err)
{
    bool ok = r->kind == ROPE_PLAIN || (isfinite(r->factor) && r->factor > 0);
    if (r->kind == ROPE_LLAMA3)
        ok = ok && r->low > 0 && r->high > r->low && r->ctx > 0 && isfinite(r->high) &&
             isfinite(r->ctx);
    if (!ok)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: RoPE scaling makes no sense (factor %g, low %g, high %g, "
                        "original length %g)",
                        path, r->factor, r->low, r->high, r->ctx);
    return STILL_OK;
}

/* ---- GGUF ---------------------------------------------------------------- */

typedef struct gguf_reader {
    const sti_store *s;
    const char *arch;
    still_error *err;
} gguf_reader;

static const sti_meta *gguf_key(const gguf_reader *r, const char *suffix, char *key,
                                size_t capacity)
{
    snprintf(key, capacity, "%s.%s", r->arch, suffix);
    return sti_meta_find(r->s, key);
}

/* An integer in [1, INT32_MAX]; `fallback` if the key is absent, -1: it must be. */
static still_status gguf_int(const gguf_reader *r, const char *suffix, int fallback,
                             int *out)
{
    char key[160];
    const sti_meta *m = gguf_key(r, suffix, key, sizeof key);
    int64_t v;
    if (!m && fallback >= 0) {
        *out = fallback;
        return STILL_OK;
    }
    if (!m)
        return sti_fail(r->err, STILL_E_FORMAT, "%s: metadata key '%s' is missing",
                        r->s->path, key);
    if (!sti_meta_int(m, &v) || v < 1 || v > INT32_MAX)
        return sti_fail(r->err, STILL_E_FORMAT,
                        "%s: metadata key '%s' is not an integer from 1 to %d",
                        r->s->path, key, INT32_MAX);
    *out = (int)v;
    return STILL_OK;
}

static still_status gguf_float(const gguf_reader *r, const char *suffix,
                               double fallback, double *out)
{
    char key[160];
    const sti_meta *m = gguf_key(r, suffix, key, sizeof key);
    if (!m) {
        *out = fallback;
        return STILL_OK;
    }
    if (!sti_meta_float(m, out) || !isfinite(*out) || *out <= 0)
        return sti_fail(r->err, STILL_E_FORMAT,
                        "%s: metadata key '%s' is not a positive number", r->s->path,
                        key);
    return STILL_OK;
}

/* Llama 3.1's scaling comes as a tensor of divisors, one per frequency. */
static still_status gguf_rope_factors(const sti_store *s, sti_config *c,
                                      still_error *err)
{
    const sti_tensor *t = sti_store_find(s, "rope_freqs.weight");
    if (!t) return STILL_OK;
    int half = c->head_dim / 2;
    if (t->type != STI_F32 || t->n_dims != 1 || t->dim[0] != half)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor 'rope_freqs.weight' is not %d floats", s->path,
                        half);
    for (int i = 0; i < half; i++) {
        float f;
        memcpy(&f, (const char *)t->data + 4 * i, 4);
        if (!isfinite(f) || f <= 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor 'rope_freqs.weight' element %d is %g, not a "
                            "positive number",
                            s->path, i, f);
        c->inv_freq[i] /= f;
    }
    return STILL_OK;
}

static still_status gguf_scaling(const gguf_reader *r, rope_scaling *scale)
{
    char key[160];
    const sti_meta *type = gguf_key(r, "rope.scaling.type", key, sizeof key);
    if (!type || type->type != STI_META_STRING) return STILL_OK;
    const sti_str v = type->str[0];
    if (v.n == 6 && memcmp(v.p, "linear", 6) == 0) {
        scale->kind = ROPE_LINEAR;
        return gguf_float(r, "rope.scaling.factor", 1, &scale->factor);
    }
    if (v.n == 4 && memcmp(v.p, "none", 4) == 0) return STILL_OK;
    return sti_fail(r->err, STILL_E_UNSUPPORTED,
                    "%s: RoPE scaling '%.*s' is not supported (none, linear, llama3)",
                    r->s->path, (int)(v.n < 40 ? v.n : 40), v.p);
}

static still_status read_gguf(const sti_store *s, sti_config *c, int *window,
                              still_error *err)
{
    const sti_meta *arch = sti_meta_find(s, "general.architecture");
    if (!arch || arch->type != STI_META_STRING)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: metadata key 'general.architecture' is missing", s->path);
    snprintf(c->arch, sizeof c->arch, "%.*s",
             (int)(arch->str->n < 31 ? arch->str->n : 31), arch->str->p);
    if (strcmp(c->arch, "llama") != 0 && strcmp(c->arch, "mistral") != 0 &&
        strcmp(c->arch, "qwen2") != 0)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: architecture '%s' is not supported (llama, mistral, qwen2)", s->path,
            c->arch);
    const sti_meta *name = sti_meta_find(s, "general.name");
    if (name && name->type == STI_META_STRING)
        snprintf(c->name, sizeof c->name, "%.*s",
                 (int)(name->str->n < 127 ? name->str->n : 127), name->str->p);

    gguf_reader r = {s, c->arch, err};
    double eps;
    rope_scaling scale = {.kind = ROPE_PLAIN};
    STI_TRY(gguf_int(&r, "block_count", -1, &c->layers));
    STI_TRY(gguf_int(&r, "embedding_length", -1, &c->hidden));
    STI_TRY(gguf_int(&r, "feed_forward_length", -1, &c->ffn));
    STI_TRY(gguf_int(&r, "attention.head_count", -1, &c->heads));
    STI_TRY(gguf_int(&r, "attention.head_count_kv", c->heads, &c->kv_heads));
    STI_TRY(gguf_int(&r, "attention.key_length", c->hidden / c->heads, &c->head_dim));
    STI_TRY(gguf_int(&r, "context_length", -1, &c->ctx_train));
    STI_TRY(gguf_int(&r, "attention.sliding_window", 0, window));
    STI_TRY(gguf_float(&r, "rope.freq_base", 10000, &c->rope_theta));
    STI_TRY(gguf_float(&r, "attention.layer_norm_rms_epsilon", 1e-5, &eps));
    STI_TRY(gguf_scaling(&r, &scale));
    c->rms_eps = (float)eps;
    int rotary, value_length;
    STI_TRY(gguf_int(&r, "rope.dimension_count", c->head_dim, &rotary));
    STI_TRY(gguf_int(&r, "attention.value_length", c->head_dim, &value_length));
    if (rotary != c->head_dim || value_length != c->head_dim)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: heads of %d with %d rotary and %d value dimensions are not "
            "supported (all must be equal)",
            s->path, c->head_dim, rotary, value_length);
    /* Converters reorder the rows of q and k of llama files so that a rotated pair
     * lies side by side; qwen2 files keep the halves apart. */
    c->rope_interleaved = strcmp(c->arch, "qwen2") != 0;
    if (c->head_dim > 4096)
        return sti_fail(err, STILL_E_FORMAT, "%s: head size %d is absurd", s->path,
                        c->head_dim);
    STI_TRY(check_scaling(s->path, &scale, err));
    STI_TRY(rope_table(c, &scale, err));
    return gguf_rope_factors(s, c, err);
}

/* ---- config.json --------------------------------------------------------- */

typedef struct json_reader {
    const char *path;
    const json_t *j;
    still_error *err;
} json_reader;

static still_status json_int(const json_reader *r, const char *key, int fallback,
                             int *out)
{
    const json_t *v = json_object_get(r->j, key);
    if ((!v || json_is_null(v)) && fallback >= 0) {
        *out = fallback;
        return STILL_OK;
    }
    int64_t n = 0;
    const still_status st =
        sti_json_int("config.json", r->j, key, 1, INT32_MAX, &n, r->err);
    if (st != STILL_OK) return sti_fail_prefix(r->err, st, "%s", r->path);
    *out = (int)n;
    return STILL_OK;
}

static still_status json_float(const json_reader *r, const json_t *from,
                               const char *key, double fallback, double *out)
{
    const json_t *v = json_object_get(from, key);
    *out = fallback;
    if (!v || json_is_null(v)) return STILL_OK;
    /* What a float can hold, since some of these become floats. */
    const still_status st =
        sti_json_real("config.json", from, key, 1e-30, 1e30, out, r->err);
    return st == STILL_OK ? st : sti_fail_prefix(r->err, st, "%s", r->path);
}

/* The RoPE settings are spread over the top level and `rope_scaling` (older files) or
 * gathered in `rope_parameters`; the kind is "rope_type" or, older still, "type". */
static still_status json_rope(const json_reader *r, sti_config *c, rope_scaling *scale)
{
    const json_t *p = json_object_get(r->j, "rope_parameters");
    if (!json_is_object(p)) p = json_object_get(r->j, "rope_scaling");
    const json_t *theta_in = json_object_get(p, "rope_theta") ? p : r->j;
    STI_TRY(json_float(r, theta_in, "rope_theta", 10000, &c->rope_theta));
    if (!json_is_object(p)) return STILL_OK;
    const char *kind = json_string_value(json_object_get(p, "rope_type"));
    if (!kind) kind = json_string_value(json_object_get(p, "type"));
    if (!kind || strcmp(kind, "default") == 0) return STILL_OK;
    if (strcmp(kind, "linear") == 0)
        scale->kind = ROPE_LINEAR;
    else if (strcmp(kind, "llama3") == 0)
        scale->kind = ROPE_LLAMA3;
    else
        return sti_fail(r->err, STILL_E_UNSUPPORTED,
                        "%s/config.json: RoPE scaling '%s' is not supported (default, "
                        "linear, llama3)",
                        r->path, kind);
    STI_TRY(json_float(r, p, "factor", 1, &scale->factor));
    STI_TRY(json_float(r, p, "low_freq_factor", 1, &scale->low));
    STI_TRY(json_float(r, p, "high_freq_factor", 4, &scale->high));
    return json_float(r, p, "original_max_position_embeddings", c->ctx_train,
                      &scale->ctx);
}

static still_status read_json(const sti_store *s, sti_config *c, int *window,
                              still_error *err)
{
    json_reader r = {s->path, s->config, err};
    const char *arch = json_string_value(json_object_get(s->config, "model_type"));
    if (!arch)
        return sti_fail(err, STILL_E_FORMAT, "%s/config.json: 'model_type' is missing",
                        s->path);
    if (strcmp(arch, "llama") != 0 && strcmp(arch, "mistral") != 0 &&
        strcmp(arch, "qwen2") != 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s/config.json: architecture '%s' is not supported (llama, "
                        "mistral, qwen2)",
                        s->path, arch);
    const char *act = json_string_value(json_object_get(s->config, "hidden_act"));
    if (act && strcmp(act, "silu") != 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s/config.json: hidden_act '%s' is not supported (silu)",
                        s->path, act);
    snprintf(c->arch, sizeof c->arch, "%s", arch);
    const char *slash = strrchr(s->path, '/');
    snprintf(c->name, sizeof c->name, "%s", slash && slash[1] ? slash + 1 : s->path);

    rope_scaling scale = {.kind = ROPE_PLAIN};
    double eps;
    STI_TRY(json_int(&r, "num_hidden_layers", -1, &c->layers));
    STI_TRY(json_int(&r, "hidden_size", -1, &c->hidden));
    STI_TRY(json_int(&r, "intermediate_size", -1, &c->ffn));
    STI_TRY(json_int(&r, "num_attention_heads", -1, &c->heads));
    STI_TRY(json_int(&r, "num_key_value_heads", c->heads, &c->kv_heads));
    STI_TRY(json_int(&r, "head_dim", c->hidden / c->heads, &c->head_dim));
    STI_TRY(json_int(&r, "max_position_embeddings", 2048, &c->ctx_train));
    STI_TRY(json_int(&r, "sliding_window", 0, window));
    STI_TRY(json_float(&r, s->config, "rms_norm_eps", 1e-6, &eps));
    STI_TRY(json_rope(&r, c, &scale));
    c->rms_eps = (float)eps;
    /* qwen2 files carry a window that is switched off. */
    if (strcmp(arch, "qwen2") == 0 &&
        !json_is_true(json_object_get(s->config, "use_sliding_window")))
        *window = 0;
    if (c->head_dim < 1 || c->head_dim > 4096)
        return sti_fail(err, STILL_E_FORMAT, "%s/config.json: head size %d is absurd",
                        s->path, c->head_dim);
    STI_TRY(check_scaling(s->path, &scale, err));
    return rope_table(c, &scale, err);
}

/* ---- Both ---------------------------------------------------------------- */

static still_status check_numbers(const sti_store *s, const sti_config *c,
                                  still_error *err)
{
    const struct {
        const char *what;
        int value, most;
    } bounds[] = {{"layers", c->layers, 4096},      {"hidden size", c->hidden, 1 << 20},
                  {"ffn size", c->ffn, 1 << 22},    {"heads", c->heads, 4096},
                  {"kv heads", c->kv_heads, 4096},  {"head size", c->head_dim, 4096},
                  {"vocabulary", c->vocab, 1 << 24}};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        if (bounds[i].value < 1 || bounds[i].value > bounds[i].most)
            return sti_fail(err, STILL_E_FORMAT, "%s: %s %d is not between 1 and %d",
                            s->path, bounds[i].what, bounds[i].value, bounds[i].most);
    if (c->heads % c->kv_heads != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %d query heads are no multiple of %d kv heads", s->path,
                        c->heads, c->kv_heads);
    if (c->head_dim % 2 != 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: head size %d is odd", s->path,
                        c->head_dim);
    return STILL_OK;
}

/* Which layers use the window: all, unless the file lists kinds of layers. */
static still_status set_windows(const sti_store *s, sti_config *c, int window,
                                still_error *err)
{
    c->window = sti_alloc((size_t)c->layers, sizeof *c->window);
    if (!c->window) return sti_fail_memory(err, "layer table", (size_t)c->layers * 4);
    const json_t *types = json_object_get(s->config, "layer_types");
    for (int i = 0; i < c->layers; i++) {
        const char *t = json_string_value(json_array_get(types, (size_t)i));
        c->window[i] = t && strcmp(t, "full_attention") == 0 ? 0 : window;
    }
    return STILL_OK;
}

still_status sti_config_read(const sti_store *s, sti_config *c, still_error *err)
{
    *c = (sti_config){0};
    int window = 0;
    if (!s->is_gguf && !s->config)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: a bare safetensors file has no configuration; open the "
                        "folder that holds its config.json",
                        s->path);
    still_status st =
        s->is_gguf ? read_gguf(s, c, &window, err) : read_json(s, c, &window, err);
    if (st == STILL_OK) {
        const sti_tensor *embed = sti_config_tensor(s, STI_PART_EMBED, 0, false);
        if (!embed || embed->n_dims != 2) {
            char name[128];
            sti_config_tensor_name(s, STI_PART_EMBED, 0, false, name, sizeof name);
            st = sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is %s", s->path, name,
                          embed ? "not a matrix" : "missing");
        } else {
            c->vocab = embed->dim[0] > INT32_MAX ? -1 : (int)embed->dim[0];
            c->tied = json_is_true(json_object_get(s->config, "tie_word_embeddings")) ||
                      !sti_config_tensor(s, STI_PART_HEAD, 0, false);
        }
    }
    if (st == STILL_OK) st = check_numbers(s, c, err);
    if (st == STILL_OK) st = set_windows(s, c, window, err);
    if (st != STILL_OK) sti_config_free(c);
    return st;
}

void sti_config_free(sti_config *c)
{
    free(c->window);
    free(c->inv_freq);
    *c = (sti_config){0};
}
