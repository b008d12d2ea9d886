/* train.h - the hybrid operator over whole sequences on the GPU (STILL Alg. 1 and its
 * gradient): what its kernels share.
 *
 * A sequence is cut into spans: chunks, or tiles of 64 tokens where there is no window.
 * Everything a span's queries need is made first, each in a kernel of its own:
 *
 *   scores     of every token and head (eq. 2 to 5)                   score.cu
 *   route      the chunk at which each token is folded (eq. 8)        route.cu
 *   lists      salient tokens a span sees, tokens it folds            lists.cu
 *   features   phi(q), phi(k) (eq. 6); q, k, v in half                map.cu
 *   states     S_c = sum of phi(k)^T v, z_c = sum of phi(k) (eq. 9)   state.cu
 *
 * after which queries are independent (forward.cu, eq. 7, 10, 11). A block takes 64
 * queries of a span and one head (4 warps of 16 rows) and goes over the keys they see
 * with softmax: the salient tokens, the span before, the span itself, one list of
 * ascending tokens gathered tile by tile. Backward, with n = f sum w_j v_j + a (phi(q)
 * S) g, y = n / den:
 *
 *   rows       the forward again, for what belongs to queries:        forward.cu
 *              P = f w / den, dy.y, dn = dy / den, dden = -dy.y / den, a g dn, a dden,
 *              gate, alpha, factor
 *   softmax    ds = P (dy.v - dy.y): dq = ds K by queries;            softmax_bwd.cu
 *              by keys, each span's share of dK = ds^T Q and dV = P^T dy, at the key's
 *              slot in the span's list
 *   linear     dphi(q) = a (S (dn g) + dden z);                       linear_bwd.cu
 *              dS_c = sum over the queries of c and later of phi(q)^T (a g dn);
 *              dphi(k) = dS v + dz, dv = dS^T phi(k), dS at the span that folded k
 *   maps       from dphi to q, k, W and the bias                      map_bwd.cu
 *   sums       over spans, heads and sequences, in a fixed order      sums.cu
 *
 * Products run on tensor cores with 11 bits of mantissa and float32 sums: in half
 * (mma.cuh) where the range is known - inputs, weights P, softmax features, means of
 * the state - or made known by a unit for each row (dy, ds, draw, what is summed over
 * tokens); in TF32 (tf32.cuh) where it is not: what is multiplied with the state and
 * its gradient. Those that decide something (scores, x W) take halves in three parts,
 * which makes nearly float32 of them. Columns are padded to DP, a multiple of 64, and
 * features to PP = 2 DP (relu: DP), with zeros. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_TRAIN_H
#define STI_BACKEND_CUDA_HYBRID_TRAIN_TRAIN_H

#include "backend/cuda/hybrid/params.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STI_HYBRID_TRAIN_ROWS = 64,       /* queries, or keys, of a block */
    STI_HYBRID_TRAIN_THREADS = 128,   /* 4 warps of 16 rows */
    STI_HYBRID_TRAIN_FEATURES = 32,   /* features of a step in TF32: PP is a multiple */
    STI_HYBRID_TRAIN_MAX_D = 128,     /* what the tiles are made for */
    STI_HYBRID_TRAIN_MAP_TOKENS = 256 /* of a block that runs a map, or sums its dW */
};

/* A call, all pointers on the device. What is not needed is NULL. */
typedef struct sti_hybrid_train {
    sti_cuda_hybrid_params h;
    int B, T;               /* sequences, tokens of each */
    int DP, PP;             /* D and the features, padded */
    int span, spans, tiles; /* tokens of a span, spans of a sequence, tiles of a span */
    int capacity, slots;    /* salient tokens of a span at most; keys at most */
    bool exact, relu;       /* scaling, map */
    bool vec;               /* rows of inputs and outputs are aligned to 16 bytes */
    float phi_unit;

    const float *q, *k, *v, *gate_logit; /* inputs; NULL: the start value */
    const float *dy;
    int32_t *fold; /* [B,T,S] */
    float *y;
    sti_hybrid_grad grad;

    /* Routing. */
    float *score_head;        /* [B,H,T] */
    float *row_max, *row_sum; /* [B,H,T]: of the window's softmax, for received weights;
                                 the maximum times log2 e */
    uint64_t *best;           /* [B,S,spans,select] of each span, best first */
    uint64_t *kept;           /* [B,S,2,capacity]: lists too long for shared memory */

    /* Lists, states. */
    int32_t *salient, *n_salient; /* [B,S,spans,capacity], [B,S,spans] */
    int32_t *folds, *n_folds;     /* [B,S,spans,span], [B,S,spans] */
    int32_t *n_folded;            /* [B,S,spans]: folded then or before */
    uint16_t *half_q;             /* [B,H,T,DP]: inputs in half */
    uint16_t *half_k, *half_v;    /* [B,G,T,DP]; behind them, where salient tokens are
                                     quantized, rows of what is stored */
    size_t half_stored;         /* from a row of them to what is stored; 0: the same */
    float *stored_k, *stored_v; /* [B,T,G,D]: k and v as the salient cache has them;
                                     NULL: as they are */
    uint16_t *phi_q, *phi_k;    /* [B,H,T,PP], [B,S,T,PP]: half, times phi_unit; of a
                                     relu map, which may be of any size, floats */
    float *state, *state_z;     /* [B,S,spans,PP,DP], [B,S,spans,PP] */
    uint16_t *mean;             /* as state: over n_folded, half; not of a relu map */

    /* Backward. */
    float *shift; /* [B,H,T]: P = f exp(l - M) / den = 2^(l log2 e - shift) */
    float *unit;  /* [B,H,T]: log2 of the unit of a row of half_dy and of delta */
    float *delta, *adden;             /* [B,H,T]: -dy.y; a dden */
    uint16_t *half_dy;                /* [B,H,T,DP] */
    float *adng;                      /* [B,H,T,DP]: a g dn, rounded to TF32 */
    float *dstate, *dstate_z;         /* as state */
    float *dphi_q, *dphi_k;           /* [B,H,T,PP], [B,S,T,PP] */
    float *dk_fold, *dv_fold;         /* [B,S,T,DP] */
    float *part_k, *part_v;           /* [B,S,spans,slots,DP] */
    float *part_alpha, *part_window;  /* [B spans tiles, H] */
    float *part_bias_q, *part_bias_k; /* [B map_parts, H], likewise S */
    float *part_map_q, *part_map_k;   /* [B map_parts, H, DP, DP], likewise S */
    int map_parts;                    /* of a sequence */
} sti_hybrid_train;

/* Launchers; each queues its kernels on the device's stream. */
still_status sti_hybrid_train_scores(sti_dev *, const sti_hybrid_train *,
                                     still_error *);
still_status sti_hybrid_train_choose(sti_dev *, const sti_hybrid_train *,
                                     still_error *);
/* Bytes of shared memory that a merge of two lists takes. */
size_t sti_hybrid_train_choose_shared(const sti_hybrid_train *);
bool sti_hybrid_train_evicts(const sti_hybrid_train *);

still_status sti_hybrid_train_lists(sti_dev *, const sti_hybrid_train *, still_error *);
/* What is read in half; q and k only where there are no features to make of them. */
still_status sti_hybrid_train_halves(sti_dev *, const sti_hybrid_train *,
                                     still_error *);
/* Keys and values as the salient cache has them, in both precisions. */
still_status sti_hybrid_train_store(sti_dev *, const sti_hybrid_train *, still_error *);
still_status sti_hybrid_train_features(sti_dev *, const sti_hybrid_train *,
                                       still_error *);
still_status sti_hybrid_train_states(sti_dev *, const sti_hybrid_train *,
                                     still_error *);
still_status sti_hybrid_train_attend(sti_dev *, const sti_hybrid_train *,
                                     still_error *);

still_status sti_hybrid_train_rows(sti_dev *, const sti_hybrid_train *, still_error *);
still_status sti_hybrid_train_softmax_queries(sti_dev *, const sti_hybrid_train *,
                                              still_error *);
still_status sti_hybrid_train_softmax_keys(sti_dev *, const sti_hybrid_train *,
                                           still_error *);
still_status sti_hybrid_train_linear_queries(sti_dev *, const sti_hybrid_train *,
                                             still_error *);
still_status sti_hybrid_train_dstates(sti_dev *, const sti_hybrid_train *,
                                      still_error *);
still_status sti_hybrid_train_linear_keys(sti_dev *, const sti_hybrid_train *,
                                          still_error *);
still_status sti_hybrid_train_maps(sti_dev *, const sti_hybrid_train *, still_error *);
still_status sti_hybrid_train_sum_keys(sti_dev *, const sti_hybrid_train *,
                                       still_error *);
still_status sti_hybrid_train_sum_parameters(sti_dev *, const sti_hybrid_train *,
                                             still_error *);

#ifdef __cplusplus
}
#endif

#endif
