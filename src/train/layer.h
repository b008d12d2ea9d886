/* layer.h - one transformer layer over whole sequences, forwards and backwards.
 *
 * Sessions go through a text token by token and keep a state; training sees B sequences
 * of T tokens at once, from their beginning, and needs gradients. A layer keeps what
 * its backward needs in sti_acts. If memory allows, every layer has its own; otherwise
 * all share one layer's worth, and the backward of the whole model recomputes each
 * layer before differentiating it.
 *
 * Letters: M = B T rows, H query heads, G kv heads, D head size. */
#ifndef STI_TRAIN_LAYER_H
#define STI_TRAIN_LAYER_H

#include "model/model.h"

/* What a layer computed, in order. All float, [M, .] row-major. */
typedef struct sti_acts {
    float *h;           /* [M, hidden]: input of the projections */
    float *q_in, *k_in; /* [M, H D], [M, G D]: as projected; equal to q, k if the form
                           does not norm them */
    float *q, *k;       /* [M, H D], [M, G D]: before RoPE; equal to qr, kr if not
                       needed */
    float *qr, *kr;     /* after RoPE */
    float *v;           /* [M, G D] */
    float *gate;        /* [M, H D]: logits of attention's gate */
    float *y;           /* [M, H D]: attention's output */
    float *mid;  /* [M, hidden]: residual stream between attention and feed-forward */
    float *feed; /* [2, M, ffn]: what ffn_train keeps */
    float *out, *feed_out; /* [M, hidden]: what norms of the halves' outputs read; NULL
                              if the form has none */
    float *lora_x; /* [STI_TARGETS, M, rank]: scale x A^T of q, k, v, the gate and o */
    int32_t *fold; /* [M, H]: route */
    size_t step;   /* bytes from one layer's to the next layer's of all these;
                      0: they share one place */

    /* Not needed by any backward: one buffer for all layers. */
    void *cache; /* keys and values of softmax_attn, float [2, G, T, D] a sequence */
} sti_acts;

/* Gradients of activations, one layer's worth. */
typedef struct sti_grads {
    float *dh;                      /* [M, hidden]; scratch of the feed-forward, too */
    float *dq, *dk, *dv;            /* [M, H D], [M, G D] twice */
    float *dq_in, *dk_in;           /* of q_in and k_in; equal to dq, dk likewise */
    float *dout;                    /* [M, hidden]: of out; or NULL */
    float *dgate, *dy;              /* [M, H D] */
    float *dlora_x[STI_MATMUL_MAX]; /* [M, rank] each: of additions to one input */
    float *dropped;                 /* [M, max(hidden, H D)]: an input after dropout */
    float *feed; /* [2, M, ffn]: scratch of the feed-forward, both ways */
} sti_grads;

/* A batch of sequences, and the model that computes it. */
typedef struct sti_batch {
    int B, T;
    int32_t *pos;          /* [B T] */
    sti_attn_segment *seg; /* [B]; K and V are set per layer */
} sti_batch;

/* Takes positions and segments of b->B sequences of b->T tokens; fills them where c has
 * memory. */
void sti_batch_carve(sti_batch *b, sti_carve *c);

/* Dropout on LoRA's inputs: a hash of `key`, layer, target and i decides whether
 * element i of a target's input is kept; kept elements are multiplied by 1 / (1 -
 * p). The same key drops the same elements again. p 0: none. */
typedef struct sti_dropout {
    float p;
    uint64_t key;
} sti_dropout;

/* What a forward must produce. */
enum {
    STI_WANT_OUTPUT = 1, /* the next layer's input */
    STI_WANT_ACTS = 2    /* everything the backward needs */
};

typedef struct sti_layer_job {
    still_model *m;
    const sti_attn_config *cfg; /* of the student */
    const sti_adapter *adapter; /* NULL: the teacher, softmax everywhere */
    const sti_adapter *gates;   /* also project its attention gates; or NULL */
    unsigned want;              /* of a forward */
    float *grad;                /* [n_values]: added to; NULL: none wanted */
    bool low_rank_only;         /* the gate's own matrix is not trained */
    const sti_batch *batch;
    sti_dropout dropout;
    sti_acts *acts;
    sti_grads *back;
} sti_layer_job;

/* raw: also keep q and k before RoPE. layers: how many have acts of their own (1: all
 * share them); *out is the first one's. */
void sti_acts_carve(const still_model *m, int B, int T, int rank, bool raw, int layers,
                    sti_carve *c, sti_acts *out);
/* The acts of a layer. */
sti_acts sti_acts_of(const sti_acts *first, int layer);
void sti_grads_carve(const still_model *m, int B, int T, int rank, sti_carve *c,
                     sti_grads *out);

/* x [M, hidden] -> out, the next layer's x; out may be x, unless acts are wanted and x
 * is needed again for the backward. */
still_status sti_layer_forward(const sti_layer_job *j, int layer, const float *x,
                               float *out, still_error *err);
/* The two halves: up to attention's output, and the rest. */
still_status sti_layer_attend(const sti_layer_job *j, int layer, const float *x,
                              still_error *err);
still_status sti_layer_finish(const sti_layer_job *j, int layer, const float *x,
                              float *out, still_error *err);
/* x: the layer's input, acts: of its forward. dx [M, hidden] in: gradient of the
 * output, out: of the input. */
still_status sti_layer_backward(const sti_layer_job *j, int layer, const float *x,
                                float *dx, still_error *err);

/* Whether the student's attention replaces this layer's. */
bool sti_layer_converted(const sti_layer_job *j, int layer);
/* RoPE on queries and keys, in place; back: the inverse, on their gradients. */
still_status sti_layer_rotate(const sti_layer_job *j, int layer, float *q, float *k,
                              bool back, still_error *err);

/* ---- Attention alone (attend.c) ------------------------------------------ */

/* The student's attention: y from q, k, v and gate of the acts; computes the route
 * too. */
still_status sti_student_attend(const sti_layer_job *j, int layer, float *y,
                                still_error *err);
/* Gradients of everything attention reads, given dy; those of q, k, v only if `inputs`.
 * Gradients of parameters are added to j->grad. */
still_status sti_student_backward(const sti_layer_job *j, int layer, const float *dy,
                                  bool inputs, still_error *err);

/* The alternative loss: matches attention weights with the teacher's. *loss: see
 * sti_hybrid_match_args; gradients times scale are added to j->grad. */
still_status sti_student_match(const sti_layer_job *j, int layer, float scale,
                               double *loss, still_error *err);

/* ---- Low-rank additions (low_rank.c) ------------------------------------- */

/* Projections of one input that may have LoRA. */
typedef struct sti_low_rank {
    int n;
    sti_target target[STI_MATMUL_MAX]; /* O alone, or Q, K, V and then GATE */
    const float *x;                    /* [M, in] */
    float *y[STI_MATMUL_MAX];          /* [M, out]; going back: their gradients */
} sti_low_rank;

/* The product with the projections' own matrices, added to `from` if that is not NULL,
 * plus scale drop(x) A^T B^T for those with LoRA; keeps lora_x. */
still_status sti_low_rank_forward(const sti_layer_job *j, int layer,
                                  const sti_low_rank *r, const sti_matmul_args *base,
                                  const float *from, still_error *err);
/* Gradients of A and B, and of the input: through `base`, the projections' own
 * matrices, and through LoRA. */
still_status sti_low_rank_backward(const sti_layer_job *j, int layer,
                                   const sti_low_rank *r,
                                   const sti_matmul_back_args *base, still_error *err);

/* An entry's gradient; NULL: not trained. */
float *sti_grad_of(const sti_layer_job *j, int layer, sti_trained kind, sti_target t);

#endif
