/* config.h - what a model is: its numbers, read from GGUF metadata or config.json.
 *
 * Three families share one forward pass: llama (Llama 3, 3.1, 3.2, SmolLM2), mistral
 * (sliding window) and qwen2 (biases). What differs is data here, not code there. */
#ifndef STI_MODEL_CONFIG_H
#define STI_MODEL_CONFIG_H

#include "file/store.h"

typedef struct sti_config {
    char arch[32];
    char name[128];
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocab;
    int ctx_train;
    int *window; /* [layers]: sliding window of each layer, 0: none */
    double rope_theta;
    float *inv_freq; /* [head_dim/2], scaling applied */
    bool rope_interleaved;
    float rms_eps;
    bool tied; /* the output matrix is the embedding */
} sti_config;

/* Reads and checks the configuration; tensors are looked at for sizes that the
 * metadata leaves out (vocabulary, tied output). */
still_status sti_config_read(const sti_store *s, sti_config *out, still_error *err);
void sti_config_free(sti_config *c);

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
    STI_PART_DOWN
} sti_part;
/* The tensor, or NULL. bias: its bias instead of its weight. */
const sti_tensor *sti_config_tensor(const sti_store *s, sti_part part, int layer,
                                    bool bias);
/* Its name in this kind of file, for error messages. */
void sti_config_tensor_name(const sti_store *s, sti_part part, int layer, bool bias,
                            char *buf, size_t capacity);

#endif
