/* cuda.h - the CUDA backend: its device, and what its files call of each other.
 *
 * Everything runs on one stream of one GPU; an operator has been queued, not done, when
 * it returns. Only mem_move and the operators that hand numbers to the program
 * (logprob, loss) wait. Host code is C (.c), kernels and their launchers are CUDA C
 * (.cu); the launchers below are all that C sees of a kernel.
 *
 * Arithmetic: activations and states are float32 in memory, products run on tensor
 * cores in half precision with float32 sums. Half rather than bfloat16: three more
 * bits, and what is converted (normed rows, keys, values, features, weights) fits its
 * range; conversions saturate. What goes back through weights in training is bfloat16.
 */
#ifndef STI_BACKEND_CUDA_CUDA_H
#define STI_BACKEND_CUDA_CUDA_H

#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Device (device.c) --------------------------------------------------- */

struct sti_dev {
    int ordinal, sms, major, minor;
    bool pdl;      /* the code was made for sm_90: see pdl.cuh */
    char name[96]; /* "NVIDIA H200 (sm_90)" */
    int max_k, heads, kv_heads, head_dim;
    cudaStream_t stream;
    bool callers; /* GPU and stream are the program's; stream 0 is the default one */
    cublasLtHandle_t lt;
    sti_block lt_workspace; /* cuBLASLt's workspace */
    sti_block scratch;      /* of the operator that is being queued, see below */
    size_t limit, used;     /* bytes it may take, 0: all there are; that it has */
    size_t copies;          /* of them in second copies of weights, see weight.c */
    size_t half_scratch;    /* scratch of the largest matrix that is made half */
    size_t step_scratch; /* scratch of a session's step, in the layer that needs most */
    struct sti_cublaslt_plans *plans;  /* matmul.c: cuBLASLt's choices, by shape */
    struct sti_cuda_graphs *graphs;    /* graph.c: ids, positions, captured graphs */
    struct sti_cuda_weight_bf16 *bf16; /* weight_bf16.c: weights in bfloat16 */
    int n_bf16;
    struct ncclComm *ranks; /* ranks.c: GPUs of other processes; NULL: alone */
    int rank, n_ranks;
};

/* err from a CUDA, or cuBLASLt status; `what` names what was attempted. */
still_status sti_cuda_check(cudaError_t e, const char *what, still_error *err);
still_status sti_cublas_check(cublasStatus_t e, const char *what, still_error *err);
#define STI_CUDA(call, what)                                                           \
    do {                                                                               \
        still_status sti_st_ = sti_cuda_check((call), (what), err);                    \
        if (sti_st_ != STILL_OK) return sti_st_;                                       \
    } while (0)

/* `bytes` of scratch, valid until the next operator takes it: operators follow each
 * other on the stream, so they share it. It grows, outside of captures, and never
 * shrinks. */
still_status sti_cuda_scratch(sti_dev *dev, size_t bytes, void **out, still_error *err);

/* ids and positions of the running pass, where they are on the device; outside of a
 * pass (tests, training) they are copied first. */
still_status sti_cuda_ids(sti_dev *dev, const int32_t *host, int n, const int32_t **out,
                          still_error *err);
/* A small table on the device (pointers to states, frequencies). Inside a pass the k-th
 * table of the pass has a place of its own and is copied only if it differs from what
 * the pass of that key had there before: a captured pass makes no copies, and fails if
 * it would have to. Outside, `slot` (0..15) names the place. */
still_status sti_cuda_table(sti_dev *dev, int slot, const void *host, size_t bytes,
                            const void **out, still_error *err);
bool sti_cuda_capturing(const sti_dev *dev);
/* Positions [M] of the rows of the running pass, on the device; NULL outside of one. */
const int32_t *sti_cuda_pass_positions(const sti_dev *dev);
still_status sti_cuda_graphs_new(sti_dev *dev, still_error *err);
void sti_cuda_graphs_free(sti_dev *dev);
/* Drops captured graphs: an address they use has changed. */
void sti_cuda_graphs_forget(sti_dev *dev);
still_status sti_cuda_pass_begin(sti_dev *, const sti_pass *, bool *done,
                                 still_error *);
still_status sti_cuda_pass_end(sti_dev *, bool whole, still_error *);

/* Memory (device.c): from a pool that follows the stream, up to dev->limit. */
still_status sti_cuda_mem_new(sti_dev *, size_t bytes, sti_block *out, still_error *);
void sti_cuda_mem_free(sti_dev *, sti_block *);
size_t sti_cuda_mem_left(const sti_dev *);
bool sti_cuda_on_device(const void *p); /* else it is the program's */
/* What the backend's dev_bytes is if an operator needs so many bytes of scratch. */
size_t sti_cuda_bytes_with(const sti_dev *, size_t scratch);

/* Whether 16 bytes can be read at once from p on. */
static inline bool sti_cuda_aligned(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* n rounded up to a multiple of step. */
static inline size_t sti_cuda_round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

/* ---- Operators (matmul.c, norm_rope.c, softmax.c, hybrid.c) ----------------- */

extern const sti_backend sti_backend_cuda; /* the table of all below (device.c) */

still_status sti_cuda_weight_new(sti_dev *, const sti_tensor *, sti_weight *,
                                 still_error *);
void sti_cuda_weight_free(sti_dev *, sti_weight *);
size_t sti_cuda_weight_bytes(const sti_dev *, const sti_tensor *);
still_status sti_cuda_matmul(sti_dev *, const sti_matmul_args *, still_error *);
still_status sti_cuda_ffn(sti_dev *, const sti_ffn_args *, still_error *);
void sti_cublaslt_free(sti_dev *);
still_status sti_cuda_embed(sti_dev *, const sti_embed_args *, still_error *);
still_status sti_cuda_rmsnorm(sti_dev *, const sti_rmsnorm_args *, still_error *);
still_status sti_cuda_rope(sti_dev *, const sti_rope_args *, still_error *);
still_status sti_cuda_swiglu(sti_dev *, const sti_swiglu_args *, still_error *);
still_status sti_cuda_scale_columns(sti_dev *, const sti_scale_columns_args *,
                                    still_error *);
still_status sti_cuda_logprob(sti_dev *, const sti_logprob_args *, still_error *);
still_status sti_cuda_softmax_attn(sti_dev *, const sti_attn_args *, still_error *);
still_status sti_cuda_hybrid_reserve(sti_dev *, const sti_hybrid_settings *,
                                     const sti_hybrid_shape *, int rows, still_error *);
size_t sti_cuda_hybrid_bytes(const sti_dev *, const sti_hybrid_settings *,
                             const sti_hybrid_shape *, int rows);
bool sti_cuda_hybrid_ropes(const sti_hybrid_args *, int n);
still_status sti_cuda_hybrid(sti_dev *, const sti_hybrid_args *, int n, still_error *);

/* Training (folders train and hybrid/train). Results for the program are waited for. */
still_status sti_cuda_matmul_lora(sti_dev *, const sti_matmul_lora_args *,
                                  still_error *);
still_status sti_cuda_matmul_back(sti_dev *, const sti_matmul_back_args *,
                                  still_error *);
still_status sti_cuda_matmul_grad(sti_dev *, const sti_matmul_grad_args *, int n,
                                  still_error *);
still_status sti_cuda_ffn_train(sti_dev *, const sti_ffn_train_args *, still_error *);
still_status sti_cuda_ffn_back(sti_dev *, const sti_ffn_train_args *, still_error *);
still_status sti_cuda_loss(sti_dev *, const sti_loss_args *, still_error *);
still_status sti_cuda_adam(sti_dev *, const sti_adam_args *, int n, still_error *);
still_status sti_cuda_sum_squares(sti_dev *, const float *x, const sti_span *, int n,
                                  double *out, still_error *);
still_status sti_cuda_compare(sti_dev *, const sti_compare_args *, still_error *);
still_status sti_cuda_hybrid_route(sti_dev *, const sti_hybrid_parallel_args *,
                                   still_error *);
still_status sti_cuda_hybrid_parallel(sti_dev *, const sti_hybrid_parallel_args *,
                                      still_error *);
still_status sti_cuda_hybrid_backward(sti_dev *, const sti_hybrid_parallel_args *,
                                      still_error *);
/* Liger and SUPRA (linear.c), of sessions and in training. */
still_status sti_cuda_linear_reserve(sti_dev *, const sti_linear_shape *, int window,
                                     int rows, still_error *);
size_t sti_cuda_linear_bytes(const sti_dev *, const sti_linear_shape *, int window,
                             int rows);
still_status sti_cuda_linear_forward(sti_dev *, const sti_linear_args *, int n,
                                     still_error *);
still_status sti_cuda_linear_backward(sti_dev *, const sti_linear_args *, int n,
                                      still_error *);
/* Whether kernels of this program wait for those in front of them (pdl.cuh). */
still_status sti_cuda_has_pdl(bool *out, still_error *err);
void sti_cuda_bf16_free(sti_dev *dev);
/* A weight is gone, and its copy in float with it. */
void sti_cuda_bf16_forget(sti_dev *dev, const void *of);

#ifdef __cplusplus
}
#endif

#endif
