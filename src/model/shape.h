/* shape.h - published model shapes, and models of them with random weights: what speed
 * and memory are measured on where nobody's weights are at hand. */
#ifndef STI_MODEL_SHAPE_H
#define STI_MODEL_SHAPE_H

#include "model/config.h"

typedef struct sti_shape {
    const char *name;
    const char *type; /* model_type */
    int layers, hidden, ffn, heads, kv_heads, head_dim, vocab, ctx;
    double theta, eps;
    bool tied;
    const char *more; /* further members of config.json; or NULL */
} sti_shape;

const sti_shape *sti_shape_at(int i); /* NULL past the last */
const sti_shape *sti_shape_find(const char *name);

/* config.json of the shape; torch_dtype: "float16". NULL: no memory. */
json_t *sti_shape_config(const sti_shape *s, const char *torch_dtype);
/* The same as a configuration that was read. */
still_status sti_shape_read(const sti_shape *s, sti_config *out, still_error *err);
/* Whether models of the shape have a bias of the part. */
bool sti_shape_biased(const sti_shape *s, sti_part part);

/* A store that looks like a Hugging Face folder of the shape: tensors in f16, matrices
 * random with deviation 1 / sqrt(columns), so that activations stay of one size, norms
 * 1; always the same numbers. own: every tensor has memory of its own; otherwise those
 * with equally long rows share theirs, which is enough where a backend copies it. */
still_status sti_shape_open(const char *name, bool own, sti_store *out,
                            still_error *err);

/* Random numbers of a type that can be written (F32, F16, BF16, Q8_0, ...), uniform
 * with this deviation. They repeat after some 100,000, which no product notices, so
 * that a model is made at the speed of memory. bytes: whole blocks. */
void sti_random_weights(sti_dtype type, double deviation, uint64_t seed, void *out,
                        size_t bytes);

#endif
