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
    cublasLtHandle_t lt;
    sti_block lt_room; /* cuBLASLt's workspace */
    sti_block scratch; /* of the operator that is being queued, see below */
    size_t half_room;  /* scratch of the largest matrix that is made half */
    size_t step_room;  /* scratch of a session's step, in the layer that needs most */
    struct sti_cuda_plans *plans;   /* matmul.c: cuBLASLt's choices, by shape */
    struct sti_cuda_passes *passes; /* graph.c: ids, positions, recorded graphs */
    struct sti_cuda_wide *wide;     /* weight_bf16.c: weights in bfloat16 */
    int n_wide;
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

/* `bytes` of scratch, valid until the next operator asks: operators follow each other
 * on the stream, so they share it. It grows, outside of recordings, and never shrinks.
 */
still_status sti_cuda_scratch(sti_dev *dev, size_t bytes, void **out, still_error *err);

/* ids and positions of the running pass, where they are on the device; outside of a
 * pass (tests, training) they are copied first. */
still_status sti_cuda_ids(sti_dev *dev, const int32_t *host, int n, const int32_t **out,
                          still_error *err);
/* A small table on the device (pointers to states, frequencies). Inside a pass the k-th
 * table of the pass has a place of its own and is copied only if it differs from what
 * the pass of that key had there before: a recorded pass makes no copies, and fails if
 * it would have to. Outside, `slot` (0..15) names the place. */
still_status sti_cuda_table(sti_dev *dev, int slot, const void *host, size_t bytes,
                            const void **out, still_error *err);
bool sti_cuda_recording(const sti_dev *dev);
/* Positions [M] of the rows of the running pass, on the device; NULL outside of one. */
const int32_t *sti_cuda_pass_positions(const sti_dev *dev);
still_status sti_cuda_passes_new(sti_dev *dev, still_error *err);
void sti_cuda_passes_free(sti_dev *dev);
/* Recorded passes are recorded anew: an address they use has changed. */
void sti_cuda_forget_passes(sti_dev *dev);
still_status sti_cuda_pass_begin(sti_dev *, const sti_pass *, bool *done,
                                 still_error *);
still_status sti_cuda_pass_end(sti_dev *, still_error *);

/* Memory (device.c): from a pool that follows the stream. */
still_status sti_cuda_mem_new(sti_dev *, size_t bytes, sti_block *out, still_error *);
void sti_cuda_mem_free(sti_dev *, sti_block *);
bool sti_cuda_on_device(const void *p); /* else it is the program's */

/* Whether 16 bytes can be read at once from p on. */
static inline bool sti_cuda_aligned(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* n rounded up to a multiple of step. */
static inline size_t sti_cuda_up_to(size_t n, size_t step)
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
still_status sti_cuda_feed_forward(sti_dev *, const sti_feed_forward_args *,
                                   still_error *);
void sti_cuda_plans_free(sti_dev *);
still_status sti_cuda_embed(sti_dev *, const sti_embed_args *, still_error *);
still_status sti_cuda_rmsnorm(sti_dev *, const sti_rmsnorm_args *, still_error *);
still_status sti_cuda_rope(sti_dev *, const sti_rope_args *, still_error *);
still_status sti_cuda_swiglu(sti_dev *, const sti_swiglu_args *, still_error *);
still_status sti_cuda_logprob(sti_dev *, const sti_logprob_args *, still_error *);
still_status sti_cuda_softmax_attn(sti_dev *, const sti_attn_args *, still_error *);
still_status sti_cuda_hybrid_reserve(sti_dev *, const sti_hybrid_settings *,
                                     const sti_hybrid_shape *, int rows, still_error *);
bool sti_cuda_hybrid_turns(const sti_hybrid_args *, int n);
still_status sti_cuda_hybrid(sti_dev *, const sti_hybrid_args *, int n, still_error *);

/* Training (train.c, lora.c, ffn.c, train.c). Results for the
 * program are waited for. */
still_status sti_cuda_matmul_added(sti_dev *, const sti_matmul_added_args *,
                                   still_error *);
still_status sti_cuda_matmul_back(sti_dev *, const sti_matmul_back_args *,
                                  still_error *);
still_status sti_cuda_matmul_grad(sti_dev *, const sti_matmul_grad_args *, int n,
                                  still_error *);
still_status sti_cuda_feed_train(sti_dev *, const sti_feed_train_args *, still_error *);
still_status sti_cuda_feed_back(sti_dev *, const sti_feed_train_args *, still_error *);
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
still_status sti_cuda_linear_forward(sti_dev *, const sti_linear_args *, int n,
                                     still_error *);
still_status sti_cuda_linear_backward(sti_dev *, const sti_linear_args *, int n,
                                      still_error *);
/* Whether kernels of this program wait for those before them (pdl.cuh). */
still_status sti_cuda_has_pdl(bool *out, still_error *err);
void sti_cuda_wide_free(sti_dev *dev);
/* A weight is gone, and its copy in float with it. */
void sti_cuda_wide_forget(sti_dev *dev, const void *of);

/* ---- The hybrid operator's kernels --------------------------------------- */

/* Settings and shape as kernels want them. */
typedef struct sti_cuda_shape {
    int H, G, D, F, S, P, C; /* letters of ops/hybrid.h */
    int group;               /* query heads of a selection head: H / S */
    int per_kv;              /* query heads of a kv head: H / G */
    int select, cap;         /* cap < 0: none */
    int score, la_scale, map;
    bool per_head, has_window, has_linear, norm_preserved, gate, window_factor;
    bool raw_features; /* feature_positions == STI_FEATURES_NONE */
    bool interleaved;
    bool unrotated; /* q and k come before RoPE */
    bool half_kv;   /* keys and values are stored as half, else float */
    int position_cap, state_cap;
    float feature_floor, den_eps, eps, scale; /* scale: 1 / sqrt(D) */
    uint64_t seed;
    int layer;
    /* Learned inputs, on the device; NULL: the start value (ops/hybrid.h). */
    const float *alpha, *window_logit, *map_q, *map_k, *bias_q, *bias_k;
    const float *inv_freq; /* [D/2] on the device; where it is needed */
} sti_cuda_shape;

/* One session's share of a call, all pointers on the device. */
typedef struct sti_cuda_session {
    const float *q, *k, *v, *gate, *q_raw; /* its rows; gate, q_raw may be NULL */
    float *y;
    const int32_t *pos; /* -> position of its first row */
    int T;
    int room;
    void *win_k, *win_v;                  /* [G, 2C, D] */
    float *win_score, *win_received;      /* [S, 2C] */
    void *sal_k, *sal_v;                  /* [S, room, D] */
    float *sal_score;                     /* [S, room] */
    int32_t *sal_pos;                     /* [S, room] */
    uint8_t *sal_far;                     /* [S, room] or NULL */
    int32_t *sal_count;                   /* [S] */
    float *lin_s, *lin_z, *low_s, *low_z; /* [S, P, D], [S, P], likewise */
    int64_t *folded;                      /* [S] */
} sti_cuda_session;

/* A call's settings, without inv_freq, and a session's rows and state as kernels see
 * them (hybrid.c); pos: where the position of its first row is. */
sti_cuda_shape sti_cuda_shape_of(const sti_hybrid_args *a);
sti_cuda_session sti_cuda_session_of(const sti_hybrid_args *a, const int32_t *pos);

/* Recurrent form (step.cu, retire.cu): token t of each of n sessions
 * (`session` is an array on the device). leave: for sessions whose token begins a
 * chunk, what leaves the window is selected, evicted, folded; for others nothing
 * happens. step: the token enters and its output is written. All settings, any shape.
 * settled: no kernel that was queued since the last copy writes to the states, so that
 * they can be read while those before still run (pdl.cuh).
 * room: scratch of sti_cuda_step_room bytes. */
size_t sti_cuda_step_room(const sti_dev *dev, const sti_cuda_shape *h, int n);
bool sti_cuda_step_turns(const sti_cuda_shape *h); /* rows may be unrotated */
still_status sti_cuda_hybrid_leave(sti_dev *, const sti_cuda_shape *h,
                                   const sti_cuda_session *session, int n, int t,
                                   void *room, still_error *err);
still_status sti_cuda_hybrid_step(sti_dev *, const sti_cuda_shape *h,
                                  const sti_cuda_session *session, int n, int t,
                                  bool settled, void *room, still_error *err);

/* Chunk-parallel form (chunk.h). supported: whether these settings and shape
 * are; the recurrent form runs the others. room: scratch of T rows, of one session or
 * of many. */
bool sti_cuda_chunks_supported(const sti_cuda_shape *h);
size_t sti_cuda_chunks_room(const sti_cuda_shape *h, int T);

#ifdef __cplusplus
}
#endif

#endif
