/* params.h - settings, shape and sessions of the hybrid operator as its kernels see
 * them: one struct that hybrid.c fills, for every form. */
#ifndef STI_BACKEND_CUDA_HYBRID_PARAMS_H
#define STI_BACKEND_CUDA_HYBRID_PARAMS_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers of a head, and of its features, in sessions at most: no model has more. */
enum { STI_STEP_MAX_D = 256, STI_STEP_MAX_P = 2 * STI_STEP_MAX_D };

/* Settings and shape; of a call, or of all sessions of one. */
typedef struct sti_cuda_hybrid_params {
    int H, G, D, F, S, P, C; /* letters of ops/hybrid.h */
    int group;               /* query heads of a selection head: H / S */
    int per_kv;              /* query heads of a kv head: H / G */
    int select, cap;         /* cap < 0: none; the largest if heads differ */
    /* Where the salient list of each selection head begins, in slots, and behind them
     * where the last one ends: [S + 1] on the device. NULL: all lists are as long. */
    const int32_t *lists;
    const int32_t *head_cap; /* their lengths [S], on the host */
    int key_bits,
        value_bits; /* of salient tokens, see stored.cuh; 0: as in the window */
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
} sti_cuda_hybrid_params;

/* One session's share of a call, all pointers on the device. */
typedef struct sti_cuda_hybrid_session {
    const float *q, *k, *v, *gate, *q_raw; /* its rows; gate, q_raw may be NULL */
    float *y;
    const int32_t *pos; /* -> position of its first row */
    int T;
    int capacity;                     /* tokens the largest salient list holds */
    void *win_k, *win_v;              /* [G, 2C, D] */
    float *win_score, *win_received;  /* [S, 2C] */
    void *sal_k, *sal_v;              /* [slots, D]: one list behind the other */
    uint8_t *sal_k_high, *sal_v_high; /* of quantized tokens: ops/salient.h */
    uint16_t *sal_k_scale, *sal_v_scale;
    float *sal_score;       /* [slots] */
    int32_t *sal_pos;       /* [slots] */
    uint8_t *sal_far;       /* [slots] or NULL */
    int32_t *sal_count;     /* [S] */
    float *lin_s, *lin_z;   /* [S, P, D], [S, P] */
    float *comp_s, *comp_z; /* likewise; NULL with a window */
    int64_t *folded;        /* [S] */
} sti_cuda_hybrid_session;

/* Settings and shape of a call, in every form; without inv_freq and lists. kv_size: bytes of a
 * number of stored keys and values, 0 where none are. */
sti_cuda_hybrid_params sti_cuda_hybrid_params_of(const sti_hybrid_settings *set,
                                                 const sti_hybrid_shape *shape,
                                                 const sti_hybrid_in *in,
                                                 size_t kv_size);

/* Whether salient tokens are quantized. */
static inline bool sti_cuda_hybrid_quantized(const sti_cuda_hybrid_params *h)
{
    return h->key_bits > 0 || h->value_bits > 0;
}

/* Refuses a score without a kernel, and brings caps that differ between heads to the
 * device: h->lists. set is used as long as h is. */
still_status sti_cuda_hybrid_lists(sti_dev *dev, const sti_hybrid_settings *set,
                                   sti_cuda_hybrid_params *h, still_error *err);

/* A session's rows and state; pos: where the position of its first row is. */
sti_cuda_hybrid_session sti_cuda_hybrid_session_of(const sti_hybrid_args *a,
                                                   const int32_t *pos);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

/* Slots [first, first + capacity) of a salient list. */
typedef struct salient_list {
    int first, capacity;
} salient_list;

/* The list of selection head `sel`; capacity: that of the largest. */
static __device__ __forceinline__ salient_list
salient_list_of(const sti_cuda_hybrid_params &h, int capacity, int sel)
{
    if (!h.lists) return {sel * capacity, capacity};
    const int first = h.lists[sel];
    return {first, h.lists[sel + 1] - first};
}

/* Tokens that the state of a selection head may weigh as, see sti_hybrid_state_shift;
 * 0: as many as were folded. */
static __device__ __forceinline__ int state_cap_of(const sti_cuda_hybrid_params &h,
                                                   int sel)
{
    if (!h.lists || h.state_cap == 0) return h.state_cap;
    return h.state_cap - h.cap + (h.lists[sel + 1] - h.lists[sel]);
}

#endif

#endif
