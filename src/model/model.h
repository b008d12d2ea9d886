/* model.h - a loaded model and its forward pass over a batch of rows. */
#ifndef STI_MODEL_MODEL_H
#define STI_MODEL_MODEL_H

#include "model/adapter.h"
#include "token/token.h"

typedef struct sti_linear { /* y = x W^T + b */
    sti_weight w;
    const float *bias; /* or NULL */
} sti_linear;

/* Norms are NULL where the form has none. Scales of the form are folded into them as
 * they are loaded: norms of the output have the residual scale, q_norm and q_scale what
 * logits of attention are scaled by beyond 1 / sqrt(D). */
typedef struct sti_layer {
    const float *attn_norm, *ffn_norm;         /* [hidden] */
    const float *attn_norm_out, *ffn_norm_out; /* [hidden] */
    const float *q_norm, *k_norm;              /* [D] of each head, or [H D], [G D] */
    const float *q_scale;                      /* [H D]; NULL: 1, or in q_norm */
    sti_linear q, k, v, o, gate, up, down;
} sti_layer;

/* Activations of one pass, shared by all sessions of a model. Row-major; the first
 * group is the operators' memory, the second the program's. */
typedef struct sti_scratch {
    int rows, head_rows;
    sti_block memory, tables;
    float *x;             /* [rows, hidden]: the residual stream */
    float *h;             /* [rows, hidden]: normed */
    float *q, *q_raw, *o; /* [rows, H, D] */
    float *k, *v;         /* [rows, G, D] */
    float *ffn;           /* [2, rows, ffn]: scratch for gate and up */
    float *attn_gate;     /* [rows, H, D], with an adapter that gates */
    float *lora_x;        /* [STI_MATMUL_MAX, rows, rank], with one */
    float *logits;        /* [head_rows, vocab]; on the host over q and what follows */

    int32_t *pos;           /* [rows] */
    sti_attn_seq *sequence; /* [rows] */
    void *attn;             /* [rows] of STI_ATTN_SCRATCH bytes */
    uint64_t *key;          /* [rows + 1]: see sti_pass */
} sti_scratch;

struct still_model {
    sti_store store;
    sti_config cfg;
    still_model_info info;
    still_sampler_params sampling; /* what info points to */
    still_tokenizer *tokenizer;    /* or NULL */
    const sti_backend *be;
    sti_dev *dev;
    sti_layer *layer;       /* [cfg.layers] */
    sti_weight embed, head; /* head is unused when tied */
    const float *final_norm;
    float embed_scale, stream_eps; /* of embeddings; of norms of the residual stream:
                                      see fold_scales in model.c */
    sti_block vectors;             /* all norms and biases, as floats */
    size_t vectors_used, vectors_capacity;
    sti_adapter *adapter; /* or NULL */
    char *adapter_path;   /* or NULL */
    sti_tensor *own;      /* [n_own]: matrices that are not as their files have them
                             (low-rank additions merged, rows in another order); data
                             is the model's, NULL where the backend has its own */
    size_t n_own;
    bool merged;
    char merged_types[64];  /* of them: "q5_1" */
    sti_adapter **stand_in; /* [n_stand_ins]: made so far (bench.c) */
    int n_stand_ins;
    sti_scratch scratch;
    uint64_t sessions; /* made so far, for numbering them */
    uint64_t uses;     /* of scratch so far: what it held before one is gone */
    /* Of the process when the model was open, on backends in its memory: resident bytes,
     * and the most there had been; 0: not known. */
    size_t rss, peak_rss;
};

/* The matrix that makes logits. */
static inline const sti_weight *sti_model_head(const still_model *m)
{
    return m->cfg.tied ? &m->embed : &m->head;
}

/* What attention methods ask of a layer. */
sti_attn_layer sti_model_attn_layer(const still_model *m, int layer);
/* What its feed-forward half multiplies by. */
sti_ffn_weights sti_model_ffn(const still_model *m, int layer);
/* Embeddings [M, hidden] of tokens, as the first layer reads them. */
still_status sti_model_embed(still_model *m, const int32_t *tok, int M, float *x,
                             still_error *err);
/* What lies between the projections and RoPE: q [M, H D] and k [M, G D] from what was
 * projected, normed and scaled. Without norms both are in the same place. */
still_status sti_model_norm_qk(still_model *m, int layer, const float *q_in,
                               const float *k_in, float *q, float *k, int M,
                               still_error *err);

/* Makes passes of `rows` rows possible without allocating; what is enough stays. */
still_status sti_model_reserve(still_model *m, int rows, still_error *err);
/* What passes of so many rows need of the operators' memory, and of the program's. */
size_t sti_model_scratch_bytes(const still_model *m, int rows);
size_t sti_model_table_bytes(int rows);
void sti_model_scratch_free(still_model *m);

typedef struct sti_sequence { /* its share of a batch, rows in order */
    int n, past;
    sti_attn_memory *memory; /* [layers] */
    uint64_t session;        /* a number no other session of the model has or had */
} sti_sequence;

/* All ids are in the vocabulary. Called before a forward pass, which trusts them. */
still_status sti_model_check_tokens(const still_model *m, const int32_t *tok, int n,
                                    still_error *err);

/* Runs all layers over the tokens of the sequences; scratch.x then holds the residual
 * stream [M, hidden]. The sequences' memories are advanced. */
still_status sti_model_forward(still_model *m, const sti_attn_config *cfg,
                               const int32_t *tok, const sti_sequence *seq, int n_seq,
                               still_error *err);

/* The first layer whose output for the tokens of one sequence holds a number that is not
 * finite; cfg.layers: none does. A pass like sti_model_forward, which ends there. */
still_status sti_model_find_nan_layer(still_model *m, const sti_attn_config *cfg,
                                      const int32_t *tok, const sti_sequence *seq,
                                      int *layer, still_error *err);

/* Logits [n, vocab] of rows row0 .. row0+n-1 of the last pass into scratch.logits (n <=
 * scratch.head_rows). */
still_status sti_model_logits(still_model *m, int row0, int n, still_error *err);
/* Those of one row into `to`, in the operators' memory. */
still_status sti_model_logits_to(still_model *m, int row, float *to, still_error *err);

/* The additions of adapted projections: y_i += alpha / rank (x A_i^T) B_i^T for n
 * targets that read one input x [M, .]; those without one are skipped. lora_x [n, M, rank]
 * keeps alpha / rank x A^T, which is what the gradient of B asks for. */
still_status sti_model_add_low_rank(const sti_adapter *a, int layer,
                                    const sti_target *target, int n, const float *x,
                                    int M, float *lora_x, float *const *y,
                                    still_error *err);

sti_adapter_home sti_model_home(still_model *m);

/* ---- For measuring (bench.c) --------------------------------------------- */

/* Gives a model without adapter what training for the method would add to it, untrained
 * maps and random gates: time and memory of the two are the same. Kept for the next
 * time it is asked for; NULL, or softmax, takes it away. No session of the model may
 * be alive. A model with an adapter of its own keeps that. */
still_status sti_model_stand_in(still_model *m, const still_method *method,
                                still_error *err);
void sti_model_stand_ins_free(still_model *m);
/* The most memory in use since the call with `restart`: on a GPU that of the model,
 * its sessions and its scratch; elsewhere the process's. Stand-ins of other methods do
 * not count. With restart no session of the model may be alive. */
size_t sti_model_peak(still_model *m, bool restart);

/* SHA-256 of what the model is: names, types and shapes of its tensors and the ends of
 * their data; `with_adapter`: and of its adapter's numbers. Files made for one model
 * are bound to it by this. */
void sti_model_fingerprint(const still_model *m, bool with_adapter,
                           unsigned char out[STI_FINGERPRINT]);

#endif
