/* gguf.c - a configuration from GGUF metadata, whose keys begin with the name of the
 * architecture. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/config/read.h"

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

/* An integer in [least, INT32_MAX]; `fallback` if the key is absent, -1: it must be. */
static still_status gguf_int(const gguf_reader *r, const char *suffix, int least,
                             int fallback, int *out)
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
    if (!sti_meta_int(m, &v) || v < least || v > INT32_MAX)
        return sti_fail(r->err, STILL_E_FORMAT,
                        "%s: metadata key '%s' is not an integer from %d to %d",
                        r->s->path, key, least, INT32_MAX);
    *out = (int)v;
    return STILL_OK;
}

/* *out stays as it is if the key is absent. Between 1e-30 and 1e30: what a float can
 * hold. */
static still_status gguf_float(const gguf_reader *r, const char *suffix, double *out)
{
    char key[160];
    const sti_meta *m = gguf_key(r, suffix, key, sizeof key);
    if (!m) return STILL_OK;
    if (!sti_meta_float(m, out) || !(*out >= 1e-30 && *out <= 1e30))
        return sti_fail(r->err, STILL_E_FORMAT,
                        "%s: metadata key '%s' is not a positive number", r->s->path,
                        key);
    return STILL_OK;
}

/* A tensor of divisors, one for each frequency; NULL: there is none. */
static still_status divisors(const sti_store *s, const sti_config *c, const char *name,
                             float **out, still_error *err)
{
    const sti_tensor *t = sti_store_find(s, name);
    const int half = c->rotary / 2;
    if (!t) return STILL_OK;
    if (t->type != STI_F32 || t->n_dims != 1 || t->dim[0] != half)
        return sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is not %d floats",
                        s->path, name, half);
    *out = sti_alloc((size_t)half, sizeof **out);
    if (!*out) return sti_fail_memory(err, name, t->bytes);
    for (int i = 0; i < half; i++) {
        float f;
        memcpy(&f, (const char *)t->data + 4 * i, 4);
        if (!isfinite(f) || f <= 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s' element %d is %g, not a positive number",
                            s->path, name, i, f);
        (*out)[i] = f;
    }
    return STILL_OK;
}

static bool is_text(const sti_meta *m, const char *text)
{
    return m->str[0].n == strlen(text) && !memcmp(m->str[0].p, text, m->str[0].n);
}

/* Llama 3.1's scaling comes as divisors of all frequencies, LongRoPE's as two sets. */
static still_status read_scaling(const gguf_reader *r, sti_config *c,
                                 sti_rope_scaling *scale)
{
    char key[160];
    const sti_meta *type = gguf_key(r, "rope.scaling.type", key, sizeof key);
    const bool stated = type && type->type == STI_META_STRING;
    scale->factor = 1;
    if (stated && is_text(type, "linear")) {
        scale->kind = ROPE_LINEAR;
        STI_TRY(gguf_float(r, "rope.scaling.factor", &scale->factor));
    } else if (stated && !is_text(type, "none") && !is_text(type, "longrope")) {
        const sti_str v = type->str[0];
        return sti_fail(r->err, STILL_E_UNSUPPORTED,
                        "%s: RoPE scaling '%.*s' is not supported (none, linear, "
                        "llama3, longrope)",
                        r->s->path, (int)(v.n < 40 ? v.n : 40), v.p);
    }
    STI_TRY(divisors(r->s, c, "rope_factors_short.weight", &scale->divisor[0], r->err));
    STI_TRY(divisors(r->s, c, "rope_factors_long.weight", &scale->divisor[1], r->err));
    if (!scale->divisor[0] && !scale->divisor[1])
        return divisors(r->s, c, "rope_freqs.weight", &scale->divisor[0], r->err);
    int ctx;
    STI_TRY(gguf_int(r, "rope.scaling.original_context_length", 1, -1, &ctx));
    scale->kind = ROPE_LONG;
    scale->ctx = ctx;
    scale->attn_factor = 1;
    return gguf_float(r, "rope.scaling.attn_factor", &scale->attn_factor);
}

/* Which layers have the window: a period, or a list. */
static still_status read_pattern(const gguf_reader *r, const sti_config *c,
                                 sti_config_draft *d)
{
    char key[160];
    const sti_meta *m =
        gguf_key(r, "attention.sliding_window_pattern", key, sizeof key);
    int64_t v;
    if (!m) return STILL_OK;
    if (sti_meta_int(m, &v) && v >= 1 && v <= c->layers) {
        for (int l = 0; l < c->layers; l++) d->local[l] = (l + 1) % v != 0;
        return STILL_OK;
    }
    for (int l = 0; l < c->layers; l++) {
        if (m->type != STI_META_ARRAY || m->count != (uint64_t)c->layers ||
            !sti_meta_elem_int(m, (uint64_t)l, &v))
            return sti_fail(r->err, STILL_E_FORMAT,
                            "%s: metadata key '%s' is neither a number from 1 to %d "
                            "nor a list of so many",
                            r->s->path, key, c->layers);
        d->local[l] = v != 0;
    }
    return STILL_OK;
}

static still_status read_sizes(const gguf_reader *r, sti_config *c, int *window)
{
    int value_length;
    STI_TRY(gguf_int(r, "block_count", 1, -1, &c->layers));
    STI_TRY(gguf_int(r, "embedding_length", 1, -1, &c->hidden));
    STI_TRY(gguf_int(r, "feed_forward_length", 1, -1, &c->ffn));
    STI_TRY(gguf_int(r, "attention.head_count", 1, -1, &c->heads));
    STI_TRY(gguf_int(r, "attention.head_count_kv", 1, c->heads, &c->kv_heads));
    STI_TRY(gguf_int(r, "attention.key_length", 1, c->hidden / c->heads, &c->head_dim));
    STI_TRY(gguf_int(r, "context_length", 1, -1, &c->ctx_train));
    STI_TRY(gguf_int(r, "attention.sliding_window", 0, 0, window));
    STI_TRY(gguf_int(r, "rope.dimension_count", 1, c->head_dim, &c->rotary));
    STI_TRY(gguf_int(r, "attention.value_length", 1, c->head_dim, &value_length));
    if (value_length != c->head_dim)
        return sti_fail(r->err, STILL_E_UNSUPPORTED,
                        "%s: heads of %d with %d value dimensions are not supported "
                        "(both must be equal)",
                        r->s->path, c->head_dim, value_length);
    return sti_config_check_heads(r->s->path, c, r->err);
}

static void copy_text(const sti_meta *m, char *out, size_t capacity)
{
    if (!m || m->type != STI_META_STRING) return;
    const size_t n = m->str->n < capacity - 1 ? m->str->n : capacity - 1;
    snprintf(out, capacity, "%.*s", (int)n, m->str->p);
}

still_status sti_config_read_gguf(const sti_store *s, sti_config *c,
                                  sti_config_draft *d, still_error *err)
{
    const sti_meta *arch = sti_meta_find(s, "general.architecture");
    if (!arch || arch->type != STI_META_STRING)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: metadata key 'general.architecture' is missing", s->path);
    copy_text(arch, c->arch, sizeof c->arch);
    copy_text(sti_meta_find(s, "general.name"), c->name, sizeof c->name);
    STI_TRY(sti_arch_find(s->path, true, c->arch, &d->arch, err));
    c->form = d->arch->form;
    c->rope_interleaved = c->gguf_pairs = d->arch->gguf_pairs;

    const gguf_reader r = {s, c->arch, err};
    double eps = 1e-5;
    STI_TRY(read_sizes(&r, c, &d->window));
    STI_TRY(gguf_float(&r, "attention.layer_norm_rms_epsilon", &eps));
    c->rms_eps = (float)eps;
    c->rope_theta = d->arch->theta > 0 ? d->arch->theta : 10000;
    c->rope_theta_local = d->arch->theta_local > 0 ? d->arch->theta_local : 10000;
    STI_TRY(gguf_float(&r, "rope.freq_base", &c->rope_theta));
    STI_TRY(gguf_float(&r, "rope.freq_base_swa", &c->rope_theta_local));
    STI_TRY(gguf_float(&r, "embedding_scale", &c->form.embed_scale));
    STI_TRY(gguf_float(&r, "residual_scale", &c->form.residual_scale));
    STI_TRY(gguf_float(&r, "logit_scale", &c->form.logit_scale));
    if (d->arch->wide_layers == c->layers)
        c->form.attn_scale = 1 / sqrt((double)c->hidden / c->heads);
    char key[160];
    c->attn_scale_stated = gguf_key(&r, "attention.scale", key, sizeof key) != NULL;
    STI_TRY(gguf_float(&r, "attention.scale", &c->form.attn_scale));
    STI_TRY(sti_config_new_layers(s->path, c, d, err));
    STI_TRY(read_pattern(&r, c, d));
    return read_scaling(&r, c, &d->scale);
}
