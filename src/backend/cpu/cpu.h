/* cpu.h - what the files of the cpu backend share: the device and its operators. What
 * depends on the instruction set is in the table dev->k (kernels.h). */
#ifndef STI_BACKEND_CPU_CPU_H
#define STI_BACKEND_CPU_CPU_H

#include "base/pool.h"
#include "ops/ops.h"

#if defined(__x86_64__)
#define STI_CPU_X86 1
#else
#define STI_CPU_X86 0
#endif

struct sti_cpu_kernels; /* kernels.h */

/* Cosines and sines of RoPE at `position`. The hybrid operator rotates all queries of
 * far keys by one angle; computing the angle took longer than rotating them. */
enum { STI_ROPE_PAIRS_MAX = 128 }; /* pairs */
typedef struct sti_cpu_rope_angle {
    int position, pairs;
    float inv_freq[STI_ROPE_PAIRS_MAX],
        cos_sin[2 * STI_ROPE_PAIRS_MAX]; /* [pairs], [2, pairs] */
} sti_cpu_rope_angle;

struct sti_dev {
    sti_pool *pool;
    const struct sti_cpu_kernels *k; /* of the instruction set in use */
    bool pairs;                      /* see matmul_pairs_avx512.c */
    int max_k;                       /* largest K of any matrix */
    int heads, kv_heads, head_dim;   /* of attention; 0 where there is none */
    /* One block, used by whichever operator is running: nothing in it survives a
     * call. It holds what `rows` rows need; sti_cpu_need makes it larger. */
    sti_block scratch;
    int rows;
    /* Scratch of operators that are reserved: any call's, and per row. */
    size_t hybrid_fixed, hybrid_row, linear_fixed, linear_row;
    sti_cpu_rope_angle cap_rope; /* the last one asked for */
    /* Where repacked weights lie, see weight.c. */
    sti_block *arena;            /* [n_arenas] */
    size_t n_arenas, arena_used; /* bytes of the last one */
    size_t n_weights;            /* that lie in the arenas */
};

extern const sti_backend sti_backend_cpu;

/* Makes dev->scratch large enough for a call of `rows` rows. Does nothing after a
 * dev_reserve of as many, so operators call it first and decode never allocates. */
still_status sti_cpu_need(sti_dev *dev, int rows, still_error *err);
/* The same for operators whose scratch does not follow rows: those of training, whose
 * first call of a shape allocates and whose later ones do not. The old block goes. */
still_status sti_cpu_need_bytes(sti_dev *dev, size_t bytes, still_error *err);

/* Scratch bytes of an operator for `rows` rows; the block fits the largest. */
size_t sti_cpu_matmul_scratch(const sti_dev *dev, int rows);
size_t sti_cpu_attn_scratch(const sti_dev *dev, int rows);
size_t sti_cpu_hybrid_scratch(const sti_dev *dev, int rows);
size_t sti_cpu_linear_scratch(const sti_dev *dev, int rows);
size_t sti_cpu_ffn_scratch(const sti_dev *dev); /* of the few it takes */

/* Weights (weight.c). */
still_status sti_cpu_weight_new(sti_dev *dev, const sti_tensor *t, sti_weight *w,
                                still_error *err);
void sti_cpu_weight_free(sti_dev *dev, sti_weight *w);
size_t sti_cpu_weight_bytes(const sti_dev *dev, const sti_tensor *t);
void sti_cpu_arena_free(sti_dev *dev);

/* Operators, one file each; contracts in ops.h. */
still_status sti_cpu_matmul(sti_dev *dev, const sti_matmul_args *a, still_error *err);
still_status sti_cpu_embed(sti_dev *dev, const sti_embed_args *a, still_error *err);
still_status sti_cpu_rmsnorm(sti_dev *dev, const sti_rmsnorm_args *a, still_error *err);
still_status sti_cpu_rope(sti_dev *dev, const sti_rope_args *a, still_error *err);
still_status sti_cpu_swiglu(sti_dev *dev, const sti_swiglu_args *a, still_error *err);
still_status sti_cpu_ffn_forward(sti_dev *dev, const sti_ffn_args *a, still_error *err);
still_status sti_cpu_matmul_lora(sti_dev *dev, const sti_matmul_lora_args *a,
                                 still_error *err);
still_status sti_cpu_ffn_train(sti_dev *dev, const sti_ffn_train_args *a,
                               still_error *err);
still_status sti_cpu_ffn_back(sti_dev *dev, const sti_ffn_train_args *a,
                              still_error *err);
still_status sti_cpu_softmax_attn(sti_dev *dev, const sti_attn_args *a,
                                  still_error *err);
still_status sti_cpu_logprob(sti_dev *dev, const sti_logprob_args *a, still_error *err);
still_status sti_cpu_matmul_back(sti_dev *dev, const sti_matmul_back_args *a,
                                 still_error *err);
still_status sti_cpu_matmul_grad(sti_dev *dev, const sti_matmul_grad_args *all, int n,
                                 still_error *err);
still_status sti_cpu_rmsnorm_back(sti_dev *dev, const sti_rmsnorm_back_args *a,
                                  still_error *err);
still_status sti_cpu_swiglu_back(sti_dev *dev, const sti_swiglu_back_args *a,
                                 still_error *err);
still_status sti_cpu_loss(sti_dev *dev, const sti_loss_args *a, still_error *err);
still_status sti_cpu_adam(sti_dev *dev, const sti_adam_args *all, int n,
                          still_error *err);
still_status sti_cpu_sum_squares(sti_dev *dev, const float *x, const sti_span *span,
                                 int n, double *out, still_error *err);
still_status sti_cpu_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                    const sti_hybrid_shape *shape, int rows,
                                    still_error *err);
size_t sti_cpu_hybrid_bytes(const sti_dev *dev, const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape, int rows);
still_status sti_cpu_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                            still_error *err);
still_status sti_cpu_hybrid_route(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                  still_error *err);
still_status sti_cpu_hybrid_parallel(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                     still_error *err);
still_status sti_cpu_hybrid_backward(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                     still_error *err);
still_status sti_cpu_hybrid_match(sti_dev *dev, const sti_hybrid_match_args *a,
                                  still_error *err);
still_status sti_cpu_linear_reserve(sti_dev *dev, const sti_linear_shape *shape,
                                    int window, int rows, still_error *err);
size_t sti_cpu_linear_bytes(const sti_dev *dev, const sti_linear_shape *shape,
                            int window, int rows);
still_status sti_cpu_linear(sti_dev *dev, const sti_linear_args *a, int n,
                            still_error *err);
still_status sti_cpu_linear_backward(sti_dev *dev, const sti_linear_args *a, int n,
                                     still_error *err);

#endif
