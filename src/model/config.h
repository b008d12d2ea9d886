/* config.h - what a model is: its numbers, read from GGUF metadata or config.json.
 *
 * All architectures share one forward pass. What differs is data here, not code there: a
 * row of the table in config/arch.c says what form the layers have, and the readers add
 * what a file says of itself. */
#ifndef STI_MODEL_CONFIG_H
#define STI_MODEL_CONFIG_H

#include "ops/ops.h"

/* Whether queries and keys are normed before RoPE: each head by itself, or all heads of
 * a token as one row. */
typedef enum sti_qk_norm { STI_QK_PLAIN, STI_QK_HEAD, STI_QK_WHOLE } sti_qk_norm;

/* The form of a layer. Each half of it, attention and feed-forward, is
 *   x += residual_scale norm_out(half(norm_in(x))),
 * where either norm may be absent. */
typedef struct sti_form {
    sti_qk_norm qk_norm;
    bool norm_in, norm_out;
    bool fused; /* q, k, v lie in one matrix, gate and up in another */
    sti_activation act;
    double norm_offset; /* is added to the weights of norms as files have them */
    double embed_scale; /* embeddings are multiplied by it */
    double attn_scale;  /* q . k is; 0: 1 / sqrt(head_dim) */
    double residual_scale;
    double logit_scale; /* logits are divided by it */
} sti_form;

/* The frequencies a layer may rotate by. */
typedef enum sti_rope_table {
    STI_TABLE_GLOBAL,
    STI_TABLE_LONG,  /* what takes its place in long sessions */
    STI_TABLE_LOCAL, /* of layers with a window */
    STI_TABLE_NONE,  /* zeros: a layer without RoPE rotates by nothing */
    STI_TABLES
} sti_rope_table;

enum { STI_HEAD_MAX = 4096 }; /* numbers of a head */

typedef struct sti_config {
    char arch[32];             /* as the file calls it */
    const struct sti_arch *of; /* its row in config/arch.c */
    char name[128];
    sti_form form;
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocab;
    int ctx_train;
    int *window;       /* [layers]: sliding window of each layer, 0: none */
    uint8_t *table;    /* [layers]: its sti_rope_table */
    bool *kept;        /* [layers]: stays as it is whatever method is asked for */
    double rope_theta; /* of the global table */
    double rope_theta_local;
    float *inv_freq[STI_TABLES]; /* [head_dim/2] each, scaling applied; one block */
    float *divisor[2]; /* [rotary/2] each: LongRoPE's, of the global and of the long
                          table, as files have them; NULL: there are none */
    int rotary;    /* numbers of a head that RoPE turns, the first ones; the rest have
                   frequency 0 (see sti_rotary_row) */
    int long_from; /* sessions of more tokens take STI_TABLE_LONG; 0: there is none */
    double rope_linear; /* what all global frequencies were divided by; 1 usually */
    double rope_factor; /* of rotated queries and keys; 1 usually */
    bool rope_interleaved;
    bool gguf_pairs; /* and so are all GGUF files of the architecture */
    float rms_eps;
    bool tied;              /* the output matrix is the embedding */
    bool attn_scale_stated; /* form.attn_scale is the file's own */
} sti_config;

/* Reads and checks the configuration; tensors are looked at for sizes that the
 * metadata leaves out (vocabulary, tied output). Fused matrices of the store become
 * views of their own, so that nothing after this knows of them. */
still_status sti_config_read(sti_store *s, sti_config *out, still_error *err);
void sti_config_free(sti_config *c);

/* RoPE turns pair i of a head, numbers i and i + head_dim/2. Where only the first
 * `rotary` numbers are turned, files pair i with i + rotary/2; rows of q and k are then
 * taken in another order when they are loaded, which no product of q and k notices, and
 * pairs past rotary/2 have frequency 0. Row r of a head, as it is used, is this one of
 * the file. */
static inline int sti_rotary_row(const sti_config *c, int r)
{
    const int half = c->head_dim / 2, turned = c->rotary / 2, i = r % half;
    if (i >= turned) return r < half ? turned + r : r;
    return r < half ? i : turned + i;
}
static inline bool sti_rotary_moves(const sti_config *c)
{
    return c->rotary < c->head_dim && !c->rope_interleaved;
}
/* The inverse: where row r of the file's head is used. */
static inline int sti_rotary_place(const sti_config *c, int r)
{
    const int half = c->head_dim / 2, turned = c->rotary / 2;
    if (r < turned || r >= half + turned) return r;
    return r < c->rotary ? half + r - turned : r - turned;
}

/* What norms of Hugging Face's files of the architecture need to be those of GGUF's. */
double sti_config_norm_offset(const sti_config *c);

/* What RoPE rotates by in a layer; ctx: tokens of the session. */
const float *sti_config_inv_freq(const sti_config *c, int layer, int ctx);
/* What frequency i of the global or the long table was divided by, beyond rope_linear;
 * i < rotary/2. */
double sti_config_divisor(const sti_config *c, sti_rope_table t, int i);
/* Whether any such divisor of the global table is not 1. */
bool sti_config_divided(const sti_config *c);

/* Names of a layer's tensors in both kinds of files. */
typedef enum sti_part {
    STI_PART_EMBED,
    STI_PART_FINAL_NORM,
    STI_PART_HEAD, /* not of a layer */
    STI_PART_ATTN_NORM,
    STI_PART_Q,
    STI_PART_K,
    STI_PART_V,
    STI_PART_O,
    STI_PART_FFN_NORM,
    STI_PART_GATE,
    STI_PART_UP,
    STI_PART_DOWN,
    STI_PART_Q_NORM,
    STI_PART_K_NORM,
    STI_PART_ATTN_OUT_NORM,
    STI_PART_FFN_OUT_NORM,
    STI_PARTS
} sti_part;
/* Whether a model of this form has the part. */
bool sti_config_has(const sti_config *c, sti_part part);
/* Its dimensions; cols 0: a vector. */
typedef struct sti_part_shape {
    int64_t rows, cols;
} sti_part_shape;
sti_part_shape sti_config_shape(const sti_config *c, sti_part part);
/* The tensor, or NULL. bias: its bias instead of its weight. */
const sti_tensor *sti_config_tensor(const sti_config *c, const sti_store *s,
                                    sti_part part, int layer, bool bias);
/* Its name in one kind of file. */
void sti_config_tensor_name(const sti_config *c, bool gguf, sti_part part, int layer,
                            bool bias, char *buf, size_t capacity);
/* The class of transformers of a model_type; NULL: unknown. */
const char *sti_config_class(const char *type);
/* The architecture's name and the numbers as GGUF metadata, as llama.cpp reads them. An
 * error if its layers differ in a way that no key tells. Weights of q's norm must have
 * been multiplied by sti_config_gguf_q_norm: a scale of q . k that no key says. */
still_status sti_config_put_gguf(const sti_config *c, sti_writer *w, still_error *err);
double sti_config_gguf_q_norm(const sti_config *c);
/* The same as config.json, as transformers reads it; biased: q has a bias. *out is the
 * caller's. An error names what no key tells. */
still_status sti_config_put_json(const sti_config *c, bool biased, json_t **out,
                                 still_error *err);
/* The name of the matrix that a fused form keeps a part and those after it in; "": the
 * part begins none. */
void sti_config_fused_name(const sti_config *c, bool gguf, sti_part part, int layer,
                           char *buf, size_t capacity);
/* Whether a part lies in the matrix of the part before it. */
bool sti_config_joined(const sti_config *c, sti_part part);

#endif
