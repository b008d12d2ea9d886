/* attn.h - attention methods: what a layer remembers of the past and how it reads it.
 *
 * One table lists the methods. Three engines run them: softmax keeps every key and
 * value (softmax.c); still, lolcats, hedgehog, t2r and swa are settings of the hybrid
 * operator (hybrid.c); liger and supra are gated or decayed linear attention
 * (linear.c). A layer's memory is a few pointers into one block of its session, sized
 * before the first token; zeroed memory is an empty past. */
#ifndef STI_ATTN_ATTN_H
#define STI_ATTN_ATTN_H

#include "ops/ops.h"

typedef struct sti_attn_engine sti_attn_engine;

typedef struct sti_attn_method {
    const char *name, *summary;
    const sti_attn_engine *engine;
} sti_attn_method;
const sti_attn_method *sti_attn_find(const char *name); /* NULL: unknown */
const sti_attn_method *sti_attn_at(int i); /* i-th row; NULL past the end */

/* Selection heads [first_head, last_head] of layers [first, last] keep so many salient
 * tokens. */
enum { STI_ATTN_CAPS = 512 };
typedef struct sti_attn_cap {
    int first, last, first_head, last_head, cap;
} sti_attn_cap;

/* A session's method with its settings, checked against the model. Sessions that are
 * computed together have equal ones. */
typedef struct sti_attn_config {
    const sti_attn_method *method;
    int first, last;            /* layers that use it, but for those that are kept; the
                                   others are softmax */
    const bool *kept;           /* as sti_attn_layer has it */
    sti_hybrid_settings hybrid; /* of a hybrid method; sti_attn_hybrid_settings has a
                                   layer's own */
    sti_attn_cap caps[STI_ATTN_CAPS]; /* heads whose lists have another size; the first
                                         that names a head counts */
    int n_caps;
    int window;      /* of liger */
    sti_dtype cache; /* type of stored keys and values */
    int ctx, batch;  /* tokens it can hold; rows of one call */
} sti_attn_config;

/* What training made of a layer's attention. NULL: it has its start value. */
typedef struct sti_attn_params {
    const float *map_q, *map_k; /* [H,D,D], [S,D,D]; SUPRA: [H D,H D], [G D,G D] */
    const float *bias_q, *bias_k;
    const float *alpha, *window_logit; /* [H] */
} sti_attn_params;

/* What the model says of a layer. */
typedef struct sti_attn_layer {
    int index;
    int heads, kv_heads, head_dim;
    int window;            /* sliding window the model was trained with; 0: none */
    const float *inv_freq; /* [D/2] */
    const float
        *inv_freq_long; /* its place in sessions of more than long_from tokens */
    int long_from;      /* 0: in none */
    bool interleaved;
    const bool *kept; /* [layers] of the model: those that no method converts, as their
                         own memory is constant; NULL: there is none */
    sti_attn_params trained;
} sti_attn_layer;

/* Fills out->method and its settings from the public description. ctx, batch and cache
 * are set. */
still_status sti_attn_configure(const still_method *m, const sti_attn_layer *layer,
                                int n_layers, int ctx_train, sti_attn_config *out,
                                still_error *err);

/* One layer's memory of one sequence. */
typedef struct sti_attn_memory {
    union {
        struct {
            void *k, *v; /* [G, capacity, D] */
            int capacity;
        } softmax;
        sti_hybrid_state hybrid;
        sti_linear_state linear;
    };
} sti_attn_memory;

/* Rows [row0, row0 + n) of a batch: the next n tokens of a sequence that holds `past`
 * tokens in `memory`. */
typedef struct sti_attn_seq {
    int row0, n, past;
    sti_attn_memory *memory;
} sti_attn_seq;

typedef struct sti_attn_io {
    float *q, *k;   /* [M, H, D], [M, G, D]: before RoPE; may be rotated in place */
    const float *v; /* [M, G, D] */
    const float *gate_logit; /* [M, H, D] or NULL */
    float *q_raw;            /* [M, H, D]: scratch for methods that need q both ways */
    float *o;                /* [M, H, D] */
    const int32_t *pos;      /* [M] */
    int M;
    const sti_attn_seq *rows;
    int n_rows;
    void *scratch; /* [n_rows] of STI_ATTN_SCRATCH bytes */
} sti_attn_io;

enum {
    STI_ATTN_SCRATCH = sizeof(sti_hybrid_args) > sizeof(sti_linear_args)
                           ? sizeof(sti_hybrid_args)
                           : sizeof(sti_linear_args)
};

struct sti_attn_engine {
    /* Lays a layer's memory out (counts with c->base NULL). */
    void (*carve_memory)(const sti_backend *, const sti_attn_config *,
                         const sti_attn_layer *, sti_carve *c, sti_attn_memory *out);
    /* Makes calls of `batch` rows possible without allocating. */
    still_status (*reserve)(const sti_backend *, sti_dev *, const sti_attn_config *,
                            const sti_attn_layer *, still_error *);
    /* Scratch that those need; the device has one block for all operators. */
    size_t (*scratch_bytes)(const sti_backend *, const sti_dev *,
                            const sti_attn_config *, const sti_attn_layer *);
    still_status (*forward)(const sti_backend *, sti_dev *, const sti_attn_config *,
                            const sti_attn_layer *, const sti_attn_io *, still_error *);
    /* Whether counts and positions in a memory of `length` tokens that came from a file
     * are possible, so that no index leaves its array. NULL: it holds none. */
    bool (*sound)(const sti_attn_config *, const sti_attn_layer *,
                  const sti_attn_memory *, int length);
    /* Tokens that a memory of `past` tokens takes such that all but the first can be
     * abandoned: what they leave is what the tokens that come in their place overwrite.
     * NULL: 1. */
    int (*undoable)(const sti_attn_config *, int past);
};
extern const sti_attn_engine sti_attn_softmax, sti_attn_hybrid, sti_attn_linear;

/* The hybrid operator's view of a layer: shape, settings, trained inputs. */
sti_hybrid_shape sti_attn_hybrid_shape(const sti_attn_layer *l);
sti_hybrid_settings sti_attn_hybrid_settings(const sti_attn_config *cfg,
                                             const sti_attn_layer *l);
sti_hybrid_in sti_attn_hybrid_in(const sti_attn_layer *l);

/* Tokens that a session holds before it folds one into a linear state. */
int sti_attn_unfolded(const sti_attn_config *c);

/* Whether the method takes the place of a layer's own attention. */
bool sti_attn_converts(const sti_attn_config *c, int layer);
int sti_attn_converted(const sti_attn_config *c); /* how many it does */
/* What a layer rotates by in a session of ctx tokens. */
static inline const float *sti_attn_inv_freq(const sti_attn_layer *l, int ctx)
{
    return l->long_from > 0 && ctx > l->long_from ? l->inv_freq_long : l->inv_freq;
}

/* The engine of a layer under a config. */
const sti_attn_engine *sti_attn_engine_of(const sti_attn_config *c, int layer);

/* The error of a method that the backend has no operator for. */
still_status sti_attn_no_kernels(const sti_backend *be, const sti_attn_config *c,
                                 still_error *err);

/* Bytes of a stored key or value element in a state. */
size_t sti_attn_kv_size(const sti_backend *be, const sti_attn_config *c);

/* RoPE on q and k of all rows; shared by engines that attend after RoPE. */
still_status sti_attn_rope(const sti_backend *be, sti_dev *dev,
                           const sti_attn_config *cfg, const sti_attn_layer *l,
                           const sti_attn_io *io, still_error *err);

#endif
