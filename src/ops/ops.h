/* ops.h - the table every backend fills, and the argument struct of each operator.
 *
 * `ref` is the specification of every entry; `cpu` must agree with it. Shape letters:
 * M rows (tokens of a batch, of one or several sessions), K inputs, N outputs,
 * H query heads, G kv heads, D head size. All activations are float, row-major.
 *
 * A row's result never depends on the other rows of the call: the order in which a
 * row's numbers are added is fixed by its own shape. Batching therefore changes
 * nothing, bit for bit, and tests check it; on a GPU, where the library that multiplies
 * picks its kernel by the number of rows, nothing but the last bits. */
#ifndef STI_OPS_OPS_H
#define STI_OPS_OPS_H

#include "base/mem.h"
#include "file/store.h"
#include "ops/hybrid.h"
#include "ops/linear.h"

typedef struct sti_dev sti_dev; /* owned by a backend: pool, scratch */

/* A matrix [N, K] as the backend wants to multiply it. `own` is the backend's layout;
 * data points into the model file otherwise. */
typedef struct sti_weight {
    const sti_tensor *src; /* borrowed from the store */
    int64_t N, K;
    sti_dtype type;
    const void *data; /* rows as stored, or NULL */
    sti_block own;    /* repacked copy, or empty */
    int layout;       /* backend's own number */
} sti_weight;

/* y_i[M, N_i] = x[M, K] W_i^T + bias_i, for up to four matrices that read one input
 * (q, k, v and attention's gate; gate, up). accumulate: y_i += instead (residual
 * connections). norm: x goes through rmsnorm first; `normed` is where a backend may put
 * what comes of it, and where it must if keep_normed says that the caller reads it. */
#define STI_MATMUL_MAX 4
typedef struct sti_matmul_args {
    const float *x;
    int M, n;
    const float *norm; /* [K], or NULL: x is multiplied as it is */
    float eps;         /* of norm */
    float *normed;     /* with norm: [M, K], no alias */
    bool keep_normed;
    const sti_weight *w[STI_MATMUL_MAX];
    const float *bias[STI_MATMUL_MAX]; /* [N_i] or NULL */
    float *y[STI_MATMUL_MAX];          /* [M, N_i], no alias with x */
    bool accumulate;
} sti_matmul_args;

/* y[m] = row tok[m] of the embedding matrix. */
typedef struct sti_embed_args {
    const sti_weight *w; /* [vocab, K] */
    const int32_t *tok;  /* [M], in the program's memory */
    int M;
    float *y; /* [M, K] */
} sti_embed_args;

/* y = [y +] x / sqrt(mean(x^2) + eps) * g, per row. y may be x, unless it is added to. */
typedef struct sti_rmsnorm_args {
    const float *x, *g; /* [M, K], [K] */
    float *y;
    int M, K;
    float eps;
    bool add;
} sti_rmsnorm_args;

/* x[m, k] *= g[k]. */
typedef struct sti_scale_columns_args {
    float *x;       /* [M, K] */
    const float *g; /* [K] */
    int M, K;
} sti_scale_columns_args;

/* Rotary positions in place: pair i of a head is rotated by pos * inv_freq[i], a product in
 * double: in float a stream of a million tokens would be rotated by 0.03 too much or
 * too little. Pairs are (i, i + D/2) (Hugging Face), or (2i, 2i+1) if interleaved (GGUF
 * llama). back: rotates the other way, which is the gradient. */
typedef struct sti_rope_args {
    float *x;              /* [M, heads, D] */
    float *also;           /* [M, also_heads, D]: rotated likewise; or NULL */
    const int32_t *pos;    /* [M], in the program's memory */
    const float *inv_freq; /* [D/2], likewise */
    int M, heads, also_heads, D;
    bool interleaved, back;
} sti_rope_args;

/* The activation of a gate: silu(x) = x / (1 + e^-x), and GELU in its form with tanh,
 *   x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x / (1 + e^-2u), u what tanh is of. */
typedef enum sti_activation { STI_SILU, STI_GELU_TANH } sti_activation;
#define STI_GELU_SLOPE 1.5957691216057308 /* 2 sqrt(2/pi) */
#define STI_GELU_CUBE 0.044715

/* y = act(gate) * up, elementwise over [M, K]. y may be gate. */
typedef struct sti_swiglu_args {
    const float *gate, *up;
    float *y;
    int M, K;
    sti_activation act;
} sti_swiglu_args;

/* What the feed-forward half of a layer multiplies by: gate and up [ffn, K], down
 * [K, ffn], biases or NULL, norms of its input and of its output, [K] or NULL. */
typedef struct sti_ffn_weights {
    const sti_weight *gate, *up, *down;
    const float *gate_bias, *up_bias, *down_bias;
    const float *norm, *norm_out;
    float eps, eps_out;
    sti_activation act;
} sti_ffn_weights;

/* The feed-forward half of a layer, x += norm_out(W_down (act(W_gate h) * (W_up h))),
 * h = norm(x), biases left out here. One entry so that a backend may keep what lies
 * between in a form of its own: scratch_h and scratch are for that. */
typedef struct sti_ffn_args {
    float *x; /* [M, K], changed in place */
    int M;
    sti_ffn_weights w;
    float *scratch_h, *scratch; /* [M, K], [2, M, ffn] */
} sti_ffn_args;

/* Softmax attention of rows that belong to several sessions. Segment s is rows
 * [row0, row0 + n) of q, k, v: the next n tokens of a session that already holds
 * `past` tokens in its cache. The op stores k and v at past.. and writes
 *   o_t = sum_j softmax_j(q_t . k_j / sqrt(D)) v_j,   t - window < j <= t
 * (window 0: all j <= t). Cache rows are [G, capacity, D] each for K and V, of type `cache`
 * (STI_F16, or STI_F32 where precision is asked for; new rows are read back through it,
 * so that prefill and decode see the same numbers). A cache of capacity < past + n is a
 * ring that must hold the window (capacity >= window + n - 1): token j lives at row
 * j % capacity. */
typedef struct sti_attn_segment {
    int row0, n, past;
    void *K, *V;
    int capacity;
} sti_attn_segment;
typedef struct sti_attn_args {
    const float *q, *k, *v; /* [M, H, D], [M, G, D], [M, G, D]; q, k after RoPE */
    float *o;               /* [M, H, D] */
    int H, G, D, window;
    sti_dtype cache; /* STI_F16 or STI_F32 */
    const sti_attn_segment *seg;
    int n_seg;
} sti_attn_args;

/* Per row of logits [M, V]: logprob = logit[target] - log sum exp(logit), in double or
 * as good; top = the most likely id, the lowest of equals. */
typedef struct sti_logprob_args {
    const float *logits;
    const int32_t *target; /* [M]; this and the results: in the program's memory */
    int M, V;
    float *logprob; /* [M] */
    int32_t *top;   /* [M] */
} sti_logprob_args;

/* A matmul in training, whose matrices may have low-rank additions:
 *   y_i += lora_x_i B_i^T,  lora_x_i = scale x A_i^T,  x as the matmul multiplies it.
 * lora_x is kept for the backward. */
typedef struct sti_lora_args {
    const sti_weight *a, *b; /* [R, K], [N_i, R]; NULL: none */
    float *lora_x;           /* [M, R] */
} sti_lora_args;
typedef struct sti_matmul_lora_args {
    sti_matmul_args product; /* keeps what it normed, if it norms */
    const float *from;       /* [M, N_0]: what is accumulated to instead of y, n is 1;
                                NULL: y itself */
    sti_lora_args add[STI_MATMUL_MAX];
    float scale;
} sti_matmul_lora_args;

/* ---- Backward, for training ---------------------------------------------- */

/* Gradients are float; sums over rows that feed one number are made in a fixed order
 * whatever the number of threads. */

/* dx[M, K] = [dx +] scale sum_i dy_i[M, N_i] W_i: the inputs' gradient of a matmul, and
 * of the low-rank additions that read the same inputs. Bounded by arithmetic: 2 M N K
 * operations, weights widened to float on the way. */
#define STI_BACK_MAX (2 * STI_MATMUL_MAX)
typedef struct sti_matmul_back_args {
    const float *dy[STI_BACK_MAX]; /* [M, N_i] */
    int M, n;
    const sti_weight *w[STI_BACK_MAX];
    float *dx; /* no alias with dy */
    bool accumulate;
    float scale; /* 0: 1 */
} sti_matmul_back_args;

/* dw[N, K] += scale dy[M, N]^T x[M, K]: the gradient of a matrix in training. */
typedef struct sti_matmul_grad_args {
    const float *dy, *x;
    float *dw;
    int M, N, K;
    float scale;
} sti_matmul_grad_args;

/* dx[M, K] += gradient of rmsnorm, given dy; g is not trained. */
typedef struct sti_rmsnorm_back_args {
    const float *x, *g, *dy;
    float *dx; /* no alias */
    int M, K;
    float eps;
} sti_rmsnorm_back_args;

/* The feed-forward half of a layer in training, which leaves x as it is:
 *   y = x + norm_out(W_down (act(W_gate h) * (W_up h))),  h = norm(x), without biases.
 * What its backward asks for of what lies between is kept in a form of the backend's
 * own; scratch_h and scratch are for one call. */
typedef struct sti_ffn_train_args {
    const float *x; /* [M, K] */
    int M;
    sti_ffn_weights w;
    float *kept;     /* [2, M, ffn] */
    float *kept_out; /* [M, K]: what norm_out reads; NULL without it */
    float *y;        /* forwards: [M, K], no alias; NULL: only what is kept is wanted */
    float *dx;       /* backwards: [M, K], in: gradient of y, out: of x */
    float *scratch_h, *scratch; /* [M, K], [2, M, ffn] */
} sti_ffn_train_args;

/* dgate, dup [M, K] of swiglu; they may be gate and up themselves. */
typedef struct sti_swiglu_back_args {
    const float *gate, *up, *dy;
    float *dgate, *dup;
    int M, K;
    sti_activation act;
} sti_swiglu_back_args;

/* Loss of rows of logits and its gradient, which takes their place:
 *   loss = weight_m (-log p_m(target_m) + kd KL(t_m || p_m)),   p = softmax(logits),
 * t the softmax of the teacher's logits (kd 0: NULL). A row of weight 0 gets gradient
 * 0 and loss 0. loss[m] and kl[m] are the two terms before kd and weight (kl may be
 * NULL). With `head`, the matrix that made the logits, the gradient goes on to what it
 * read, dx = gradient W, and a backend may leave the logits in any state. */
typedef struct sti_loss_args {
    float *logits;         /* [M, V] in: logits, out: gradient */
    const float *teacher;  /* [M, V] or NULL */
    const int32_t *target; /* [M]; this and weight: in the program's memory */
    const float *weight;   /* [M] */
    float kd;
    int M, V;
    double *loss, *kl;      /* [M] */
    const sti_weight *head; /* [V, K] or NULL */
    float *dx;              /* [M, K]; with head */
} sti_loss_args;

/* AdamW over n numbers: g = scale * grad; m, v moments with bias corrections c1 = 1 -
 * beta1^t, c2 = 1 - beta2^t; x -= lr (m / c1 / (sqrt(v / c2) + eps) + decay x). */
typedef struct sti_adam_args {
    float *x, *m, *v;
    const float *grad;
    size_t n;
    float scale, lr, beta1, beta2, eps, decay;
    double c1, c2;
} sti_adam_args;

/* A stretch of an array. */
typedef struct sti_span {
    size_t at, n;
} sti_span;

/* y against what it should be: sums[0] = sum (y - o)^2, sums[1] = sum o^2; y becomes
 * its gradient, factor (y - o). */
typedef struct sti_compare_args {
    const float *o;
    float *y;
    size_t n;
    float factor;
    double *sums; /* [2] */
} sti_compare_args;

/* y = [y +] what dropout leaves of x: number i is 0 if the hash of key + i (sti_mix64,
 * its upper 53 bits) is below p 2^53, else it is divided by 1 - p. */
typedef struct sti_dropout_args {
    const float *x;
    float *y; /* may be x, unless it is added to */
    size_t n;
    float p;
    uint64_t key;
    bool add;
} sti_dropout_args;

/* Attention weights matched instead of outputs (--loss weights). Teacher: A[t,j], the
 * softmax of q_t . k_j / sqrt(D) over all j <= t. Student: B[t,j] = w_j / den where j
 * is in the window or salient, a phi(q_t).phi(k_j) / den where it is folded; the gate
 * has no part in it, nor has the rounding of salient tokens. *loss = sum over b, t and
 * heads of -sum_j A log B; its gradient times `scale` is added to p->grad's maps,
 * biases, alpha and window_logit (NULL: not wanted). Reads fold_chunk; time grows with
 * T^2, memory does not. */
typedef struct sti_hybrid_match_args {
    const sti_hybrid_parallel_args *p; /* y and dy are not used */
    float scale;
    double *loss;
} sti_hybrid_match_args;

typedef struct sti_dev_params {
    int threads;
    const char *isa;
    int max_k; /* largest K of any matrix */
    int heads, kv_heads, head_dim;
    size_t memory; /* most bytes that mem_new and operators take together; 0: all there
                      are. Of devices with memory of their own */
    /* A GPU: the one that is current in the calling thread, and `stream` of it (a
     * cudaStream_t), both the program's; else the device chooses and makes them. */
    bool callers_gpu;
    void *stream;
} sti_dev_params;

/* A pass over all layers: M rows, whose ids and positions the operators are given
 * (embed, rope) and whose sequences they advance. `key` tells one kind of pass from
 * another: passes of one key differ in ids and positions alone, so a backend may record
 * one and replay it. Keys are never reused. */
typedef struct sti_pass {
    const int32_t *tok, *pos; /* [M], in the program's memory */
    int M;
    const uint64_t *key; /* [n_key] */
    int n_key;
    bool one_each; /* every sequence has one row */
    int chunk;     /* a sequence whose position is a multiple of this does other work
                      than the rest; 0: none does */
} sti_pass;

enum { STI_DEVICE_NAME = 16, STI_RANKS_ID = 128 }; /* bytes */

typedef struct sti_backend {
    const char *name;
    sti_dtype cache;  /* what it keeps keys and values in unless told otherwise */
    int head_rows;    /* rows of logits it makes at once */
    int batch;        /* rows of a pass unless told otherwise */
    bool host_memory; /* the memory below is the program's own */

    /* Memory that operators read and write: activations, states, parameters. Pointers
     * in the argument structs are to this memory, except where one says otherwise (ids,
     * positions, segments, results). mem_new gives zeroed bytes. mem_move copies
     * between it and the program's memory, or within either, and is done when it
     * returns. */
    still_status (*mem_new)(sti_dev *, size_t bytes, sti_block *out, still_error *);
    void (*mem_free)(sti_dev *, sti_block *);
    still_status (*mem_move)(sti_dev *, void *to, const void *from, size_t bytes,
                             still_error *);
    still_status (*mem_clear)(sti_dev *, void *p, size_t bytes, still_error *);
    /* The most bytes of it that were in use since the last call with `restart`, which
     * gives back what operators keep for later first (there is no session then). Where
     * the memory is the program's own: all of the program's. */
    size_t (*mem_peak)(sti_dev *, bool restart);
    /* Bytes that can still be had of it; NULL: nobody knows before asking. */
    size_t (*mem_left)(const sti_dev *);
    /* Around the operators of a pass; NULL: not of interest. *done: it has been
     * replayed as a whole and the operators must not be called. whole: none of them
     * failed; else nothing of the pass is kept for replaying. */
    still_status (*pass_begin)(sti_dev *, const sti_pass *, bool *done, still_error *);
    still_status (*pass_end)(sti_dev *, bool whole, still_error *);

    still_status (*dev_new)(const sti_dev_params *, sti_dev **, still_error *);
    void (*dev_free)(sti_dev *);
    const char *(*dev_isa)(const sti_dev *);
    int (*dev_threads)(const sti_dev *);
    /* Makes calls of up to `rows` rows possible without allocating. */
    still_status (*dev_reserve)(sti_dev *, int rows, still_error *);
    size_t (*dev_bytes)(const sti_dev *, int rows); /* scratch for that many rows */

    /* Takes a tensor of a supported type for multiplication. */
    still_status (*weight_new)(sti_dev *, const sti_tensor *, sti_weight *,
                               still_error *);
    void (*weight_free)(sti_dev *, sti_weight *);
    /* Bytes of its own that weight_new needs for this tensor. */
    size_t (*weight_bytes)(const sti_dev *, const sti_tensor *);

    still_status (*matmul)(sti_dev *, const sti_matmul_args *, still_error *);
    still_status (*embed)(sti_dev *, const sti_embed_args *, still_error *);
    still_status (*rmsnorm)(sti_dev *, const sti_rmsnorm_args *, still_error *);
    still_status (*scale_columns)(sti_dev *, const sti_scale_columns_args *,
                                  still_error *);
    still_status (*rope)(sti_dev *, const sti_rope_args *, still_error *);
    still_status (*swiglu)(sti_dev *, const sti_swiglu_args *, still_error *);
    still_status (*ffn_forward)(sti_dev *, const sti_ffn_args *, still_error *);
    still_status (*softmax_attn)(sti_dev *, const sti_attn_args *, still_error *);
    still_status (*logprob)(sti_dev *, const sti_logprob_args *, still_error *);

    /* Training. matmul_grad, adam: n of them. sum_squares: of n stretches of x, in
     * double; out [n] is the program's. scale: x *= by. */
    still_status (*matmul_lora)(sti_dev *, const sti_matmul_lora_args *, still_error *);
    still_status (*matmul_back)(sti_dev *, const sti_matmul_back_args *, still_error *);
    still_status (*matmul_grad)(sti_dev *, const sti_matmul_grad_args *, int n,
                                still_error *);
    still_status (*rmsnorm_back)(sti_dev *, const sti_rmsnorm_back_args *,
                                 still_error *);
    still_status (*swiglu_back)(sti_dev *, const sti_swiglu_back_args *, still_error *);
    still_status (*ffn_train)(sti_dev *, const sti_ffn_train_args *, still_error *);
    still_status (*ffn_back)(sti_dev *, const sti_ffn_train_args *, still_error *);
    still_status (*loss)(sti_dev *, const sti_loss_args *, still_error *);
    still_status (*adam)(sti_dev *, const sti_adam_args *, int n, still_error *);
    still_status (*sum_squares)(sti_dev *, const float *x, const sti_span *, int n,
                                double *out, still_error *);
    still_status (*compare)(sti_dev *, const sti_compare_args *, still_error *);
    still_status (*dropout)(sti_dev *, const sti_dropout_args *, still_error *);
    still_status (*scale)(sti_dev *, float *x, size_t n, float by, still_error *);

    /* Devices of several processes that add without the program's help; NULL: they
     * cannot. ranks_name: of this device, another for every device there is. One
     * rank makes an id of the group, and all join by it; a device leaves when it is
     * freed. ranks_sum: x becomes its sum over ranks, added in their order. */
    still_status (*ranks_name)(sti_dev *, uint8_t name[STI_DEVICE_NAME], still_error *);
    still_status (*ranks_new_id)(uint8_t id[STI_RANKS_ID], still_error *);
    still_status (*ranks_join)(sti_dev *, const uint8_t id[STI_RANKS_ID], int rank,
                               int size, still_error *);
    still_status (*ranks_sum)(sti_dev *, float *x, size_t n, still_error *);

    /* The hybrid operator (ops/hybrid.h). `hybrid` advances n sessions, each by its own
     * T tokens; element sizes of their states are state_kv (0: the session's cache
     * type) and state_real. Scratch is reserved by dev_reserve like that of the others,
     * once hybrid_reserve has said what settings will come. hybrid_bytes: what dev_bytes
     * will be then; NULL: only dev_bytes says, once it has come to that.
     * hybrid_applies_rope: whether these calls may be `unrotated`; NULL: none may. */
    size_t state_kv, state_real;
    still_status (*hybrid_reserve)(sti_dev *, const sti_hybrid_settings *,
                                   const sti_hybrid_shape *, int rows, still_error *);
    /* Scratch that calls of these settings need; NULL: not counted. */
    size_t (*hybrid_bytes)(const sti_dev *, const sti_hybrid_settings *,
                           const sti_hybrid_shape *, int rows);
    bool (*hybrid_applies_rope)(const sti_hybrid_args *, int n);
    still_status (*hybrid)(sti_dev *, const sti_hybrid_args *, int n, still_error *);
    still_status (*hybrid_route)(sti_dev *, const sti_hybrid_parallel_args *,
                                 still_error *);
    still_status (*hybrid_parallel)(sti_dev *, const sti_hybrid_parallel_args *,
                                    still_error *);
    still_status (*hybrid_backward)(sti_dev *, const sti_hybrid_parallel_args *,
                                    still_error *);
    still_status (*hybrid_match)(sti_dev *, const sti_hybrid_match_args *,
                                 still_error *);
    /* Liger (window > 0) and SUPRA (ops/linear.h): n sessions; n whole sequences.
     * linear_reserve and linear_bytes are like those of the hybrid operator. */
    still_status (*linear_reserve)(sti_dev *, const sti_linear_shape *, int window,
                                   int rows, still_error *);
    size_t (*linear_bytes)(const sti_dev *, const sti_linear_shape *, int window,
                           int rows);
    still_status (*linear)(sti_dev *, const sti_linear_args *, int n, still_error *);
    still_status (*linear_backward)(sti_dev *, const sti_linear_args *, int n,
                                    still_error *);
} sti_backend;

/* The registry (backend/registry.c): NULL name is the default. */
const sti_backend *sti_backend_find(const char *name);
const char *sti_backend_names(void); /* "there are cpu, ref ..." */

#endif
