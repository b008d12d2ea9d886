/* attn.h - attention methods: what a layer remembers of the past and how it reads it.
 *
 * A method owns the layout of one layer's memory, the "state": softmax keeps every key
 * and value, other methods keep less. The model hands it rows of several sequences and
 * each sequence's state; operators come from the backend's table. */
#ifndef STI_ATTN_ATTN_H
#define STI_ATTN_ATTN_H

#include "ops/ops.h"

typedef struct sti_attn_layer {
    int heads, kv_heads, head_dim;
    int window;      /* sliding window the model was trained with; 0: none */
    sti_dtype cache; /* type of stored keys and values */
} sti_attn_layer;

/* Rows [row0, row0 + n) of a batch: the next n tokens of a sequence that holds `past`
 * tokens. `state` was made for contexts of ctx tokens fed at most `batch` at a time. */
typedef struct sti_attn_sequence {
    int row0, n, past, ctx, batch;
    void *state;
} sti_attn_sequence;

typedef struct sti_attn_io {
    const float *q, *k, *v; /* [M, H, D], [M, G, D], [M, G, D]; q, k after RoPE */
    float *o;               /* [M, H, D] */
    const sti_attn_sequence *rows;
    int n_rows;
    sti_attn_segment *segment; /* [n_rows]: scratch */
} sti_attn_io;

typedef struct sti_attn_method {
    const char *name;
    /* Bytes of one layer's state. Zeroed memory is an empty state. */
    size_t (*state_bytes)(const sti_attn_layer *, int ctx, int batch);
    still_status (*forward)(const sti_backend *, sti_dev *, const sti_attn_layer *,
                            const sti_attn_io *, still_error *);
} sti_attn_method;

const sti_attn_method *sti_attn_find(const char *name); /* NULL: softmax */

#endif
