/* write.c - a configuration as GGUF metadata: the inverse of gguf.c. */
#include <math.h>
#include <stdio.h>

#include "model/config/read.h"

typedef struct gguf_writer {
    sti_writer *w;
    const char *arch;
    still_error *err;
} gguf_writer;

static still_status put_int(const gguf_writer *g, const char *suffix, int value)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", g->arch, suffix);
    return sti_writer_meta_u32(g->w, key, (uint32_t)value, g->err);
}

static still_status put_float(const gguf_writer *g, const char *suffix, double value)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", g->arch, suffix);
    return sti_writer_meta_f32(g->w, key, (float)value, g->err);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(b);
}

/* Which layers are local and which have no RoPE is no key of a file, so they must be
 * those of the architecture; the window of the local ones is one number. */
static still_status window_of(const sti_config *c, int *window, still_error *err)
{
    const sti_arch *a = c->of;
    *window = 0;
    for (int l = 0; l < c->layers; l++)
        if (c->window[l] > *window) *window = c->window[l];
    for (int l = 0; l < c->layers; l++) {
        const bool local = !a->local_period || (l + 1) % a->local_period != 0;
        const bool plain = a->plain_period && (l + 1) % a->plain_period == 0;
        if (c->window[l] != (local ? *window : 0))
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "%s: layer %d has a window of %d, others of %d; this "
                            "format knows one for all",
                            c->name, l, c->window[l], *window);
        if ((c->table[l] == STI_TABLE_NONE) != plain)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "%s: layer %d has %s RoPE, which this format cannot say",
                            c->name, l, plain ? "a" : "no");
    }
    return STILL_OK;
}

static still_status put_rope(const gguf_writer *g, const sti_config *c)
{
    char key[96];
    STI_TRY(put_float(g, "rope.freq_base", c->rope_theta));
    if (c->of->local_period)
        STI_TRY(put_float(g, "rope.freq_base_swa", c->rope_theta_local));
    if (!near(c->rope_linear, 1)) {
        snprintf(key, sizeof key, "%s.rope.scaling.type", g->arch);
        STI_TRY(sti_writer_meta_str(g->w, key, "linear", g->err));
        STI_TRY(put_float(g, "rope.scaling.factor", c->rope_linear));
    }
    if (!c->long_from) return STILL_OK;
    STI_TRY(put_int(g, "rope.scaling.original_context_length", c->long_from));
    return put_float(g, "rope.scaling.attn_factor", c->rope_factor);
}

/* What llama.cpp scales q . k by without a key. */
static double own_attn_scale(const sti_config *c)
{
    const bool wide = c->of->wide_layers == c->layers;
    return 1 / sqrt(wide ? (double)c->hidden / c->heads : (double)c->head_dim);
}

/* llama.cpp reads attention.scale where an architecture has all four scales. Elsewhere
 * a norm of q takes what differs. */
double sti_config_gguf_q_norm(const sti_config *c)
{
    const double own = own_attn_scale(c);
    if (c->of->scales || c->form.qk_norm == STI_QK_PLAIN ||
        near(c->form.attn_scale, own))
        return 1;
    return c->form.attn_scale / own;
}

/* Those that are not what the architecture has without a key. */
static still_status put_scales(const gguf_writer *g, const sti_config *c)
{
    const sti_form *f = &c->form, *own = &c->of->form;
    const bool all = c->of->scales;
    const double q_norm = sti_config_gguf_q_norm(c);
    if (all || (own->embed_scale > 0 && !near(f->embed_scale, own->embed_scale)))
        STI_TRY(put_float(g, "embedding_scale", f->embed_scale));
    if (all || !near(f->residual_scale, 1))
        STI_TRY(put_float(g, "residual_scale", f->residual_scale));
    if (all || !near(f->logit_scale, 1))
        STI_TRY(put_float(g, "logit_scale", f->logit_scale));
    if (!all && near(f->attn_scale, own_attn_scale(c))) return STILL_OK;
    return put_float(g, "attention.scale", f->attn_scale / q_norm);
}

still_status sti_config_put_gguf(const sti_config *c, sti_writer *w, still_error *err)
{
    const char *arch = c->of->gguf_as ? c->of->gguf_as : c->of->gguf;
    const gguf_writer g = {w, arch, err};
    int window;
    STI_TRY(window_of(c, &window, err));
    const struct {
        const char *key;
        int value;
    } number[] = {{"block_count", c->layers},
                  {"context_length", c->ctx_train},
                  {"embedding_length", c->hidden},
                  {"feed_forward_length", c->ffn},
                  {"attention.head_count", c->heads},
                  {"attention.head_count_kv", c->kv_heads},
                  {"attention.key_length", c->head_dim},
                  {"attention.value_length", c->head_dim},
                  {"rope.dimension_count", c->rotary},
                  {"vocab_size", c->vocab},
                  {"attention.sliding_window", window}};
    STI_TRY(sti_writer_meta_str(w, "general.architecture", arch, err));
    STI_TRY(sti_writer_meta_str(w, "general.type", "model", err));
    STI_TRY(sti_writer_meta_str(w, "general.name", c->name, err));
    STI_TRY(sti_writer_meta_u32(w, "general.quantization_version", 2, err));
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        if (number[i].value > 0) STI_TRY(put_int(&g, number[i].key, number[i].value));
    STI_TRY(put_float(&g, "attention.layer_norm_rms_epsilon", (double)c->rms_eps));
    STI_TRY(put_scales(&g, c));
    return put_rope(&g, c);
}
