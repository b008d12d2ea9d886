/* arch.c - the table of architectures, and the names of their tensors.
 *
 * A row says what its files do not: where norms are, what activation, which layers are
 * local. Numbers that a file states override it (gguf.c, json.c). */
#include <stdio.h>
#include <string.h>

#include "model/config/read.h"

#define SCALES .embed_scale = 1, .residual_scale = 1, .logit_scale = 1
#define LLAMA_FORM .norm_in = true, SCALES

static const sti_arch archs[] = {
    {.gguf = "llama",
     .hf = "llama",
     .hf_class = "LlamaForCausalLM",
     .hf_windowed = "mistral",
     .gguf_pairs = true,
     .form = {LLAMA_FORM}},
    {.gguf = "mistral",
     .hf = "mistral",
     .hf_class = "MistralForCausalLM",
     .gguf_as = "llama",
     .gguf_pairs = true,
     .form = {LLAMA_FORM}},
    {.gguf = "qwen2",
     .hf = "qwen2",
     .hf_class = "Qwen2ForCausalLM",
     .window_switch = true,
     .form = {LLAMA_FORM}},
    {.gguf = "qwen3",
     .hf = "qwen3",
     .hf_class = "Qwen3ForCausalLM",
     .window_switch = true,
     .form = {LLAMA_FORM, .qk_norm = STI_QK_HEAD}},
    {.gguf = "smollm3",
     .hf = "smollm3",
     .hf_class = "SmolLM3ForCausalLM",
     .gguf_pairs = true,
     .window_switch = true,
     .plain_period = 4,
     .form = {LLAMA_FORM}},
    {.gguf = "granite",
     .hf = "granite",
     .hf_class = "GraniteForCausalLM",
     .gguf_pairs = true,
     .scales = true,
     .form = {LLAMA_FORM}},
    {.gguf = "olmo2",
     .hf = "olmo2",
     .hf_class = "Olmo2ForCausalLM",
     .form = {SCALES, .qk_norm = STI_QK_WHOLE, .norm_out = true}},
    {.gguf = "gemma3",
     .hf = "gemma3_text",
     .hf_class = "Gemma3ForCausalLM",
     .local_period = 6,
     .theta = 1e6,
     .wide_layers = 62,
     .hf_norm_offset = 1,
     .hf_query_scalar = true,
     .form = {.norm_in = true,
              .norm_out = true,
              .qk_norm = STI_QK_HEAD,
              .act = STI_GELU_TANH,
              .residual_scale = 1,
              .logit_scale = 1}},
    {.gguf = "phi3",
     .hf = "phi3",
     .hf_class = "Phi3ForCausalLM",
     .form = {LLAMA_FORM, .fused = true}},
};
enum { N_ARCHS = sizeof archs / sizeof *archs };

still_status sti_arch_find(const char *path, bool gguf, const char *name,
                           const sti_arch **out, still_error *err)
{
    char known[256] = "";
    for (int i = 0; i < N_ARCHS; i++) {
        const char *own = gguf ? archs[i].gguf : archs[i].hf;
        *out = &archs[i];
        if (strcmp(own, name) == 0) return STILL_OK;
        const size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "", own);
    }
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "%s%s: architecture '%s' is not supported (%s)", path,
                    gguf ? "" : "/config.json", name, known);
}

const char *sti_config_class(const char *type)
{
    for (int i = 0; i < N_ARCHS; i++)
        if (strcmp(archs[i].hf, type) == 0) return archs[i].hf_class;
    return NULL;
}

double sti_config_norm_offset(const sti_config *c)
{
    return c->of->hf_norm_offset;
}

/* ---- Tensor names -------------------------------------------------------- */

#define LAYER "model.layers.%d."
static const struct {
    const char *gguf, *hf; /* %d is the layer */
} part_names[STI_PARTS] = {
    [STI_PART_EMBED] = {"token_embd", "model.embed_tokens"},
    [STI_PART_FINAL_NORM] = {"output_norm", "model.norm"},
    [STI_PART_HEAD] = {"output", "lm_head"},
    [STI_PART_ATTN_NORM] = {"blk.%d.attn_norm", LAYER "input_layernorm"},
    [STI_PART_Q] = {"blk.%d.attn_q", LAYER "self_attn.q_proj"},
    [STI_PART_K] = {"blk.%d.attn_k", LAYER "self_attn.k_proj"},
    [STI_PART_V] = {"blk.%d.attn_v", LAYER "self_attn.v_proj"},
    [STI_PART_O] = {"blk.%d.attn_output", LAYER "self_attn.o_proj"},
    [STI_PART_FFN_NORM] = {"blk.%d.ffn_norm", LAYER "post_attention_layernorm"},
    [STI_PART_GATE] = {"blk.%d.ffn_gate", LAYER "mlp.gate_proj"},
    [STI_PART_UP] = {"blk.%d.ffn_up", LAYER "mlp.up_proj"},
    [STI_PART_DOWN] = {"blk.%d.ffn_down", LAYER "mlp.down_proj"},
    [STI_PART_Q_NORM] = {"blk.%d.attn_q_norm", LAYER "self_attn.q_norm"},
    [STI_PART_K_NORM] = {"blk.%d.attn_k_norm", LAYER "self_attn.k_norm"},
    [STI_PART_ATTN_OUT_NORM] = {"blk.%d.post_attention_norm",
                                LAYER "post_attention_layernorm"},
    [STI_PART_FFN_OUT_NORM] = {"blk.%d.post_ffw_norm",
                               LAYER "post_feedforward_layernorm"},
};

bool sti_config_has(const sti_config *c, sti_part part)
{
    switch (part) {
    case STI_PART_HEAD: return !c->tied;
    case STI_PART_ATTN_NORM:
    case STI_PART_FFN_NORM: return c->form.norm_in;
    case STI_PART_Q_NORM:
    case STI_PART_K_NORM: return c->form.qk_norm != STI_QK_PLAIN;
    case STI_PART_ATTN_OUT_NORM:
    case STI_PART_FFN_OUT_NORM: return c->form.norm_out;
    default: return true;
    }
}

sti_part_shape sti_config_shape(const sti_config *c, sti_part part)
{
    const int64_t qd = (int64_t)c->heads * c->head_dim,
                  kd = (int64_t)c->kv_heads * c->head_dim;
    const bool whole = c->form.qk_norm == STI_QK_WHOLE;
    switch (part) {
    case STI_PART_EMBED:
    case STI_PART_HEAD: return (sti_part_shape){c->vocab, c->hidden};
    case STI_PART_Q: return (sti_part_shape){qd, c->hidden};
    case STI_PART_K:
    case STI_PART_V: return (sti_part_shape){kd, c->hidden};
    case STI_PART_O: return (sti_part_shape){c->hidden, qd};
    case STI_PART_GATE:
    case STI_PART_UP: return (sti_part_shape){c->ffn, c->hidden};
    case STI_PART_DOWN: return (sti_part_shape){c->hidden, c->ffn};
    case STI_PART_Q_NORM: return (sti_part_shape){whole ? qd : c->head_dim, 0};
    case STI_PART_K_NORM: return (sti_part_shape){whole ? kd : c->head_dim, 0};
    default: return (sti_part_shape){c->hidden, 0};
    }
}

void sti_config_tensor_name(const sti_config *c, bool gguf, sti_part part, int layer,
                            bool bias, char *buf, size_t capacity)
{
    const char *pattern = gguf ? part_names[part].gguf : part_names[part].hf;
    /* With a norm behind attention, the name of llama's second norm is that one's. */
    if (!gguf && part == STI_PART_FFN_NORM && c->form.norm_out)
        pattern = LAYER "pre_feedforward_layernorm";
    const char *slot = strstr(pattern, "%d");
    const char *end = bias ? "bias" : "weight";
    if (slot)
        snprintf(buf, capacity, "%.*s%d%s.%s", (int)(slot - pattern), pattern, layer,
                 slot + 2, end);
    else
        snprintf(buf, capacity, "%s.%s", pattern, end);
}

const sti_tensor *sti_config_tensor(const sti_config *c, const sti_store *s,
                                    sti_part part, int layer, bool bias)
{
    char name[128];
    sti_config_tensor_name(c, s->is_gguf, part, layer, bias, name, sizeof name);
    return sti_store_find(s, name);
}
