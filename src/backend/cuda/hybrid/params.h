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
} sti_cuda_hybrid_params;

/* One session's share of a call, all pointers on the device. */
typedef struct sti_cuda_hybrid_session {
    const float *q, *k, *v, *gate, *q_raw; /* its rows; gate, q_raw may be NULL */
    float *y;
    const int32_t *pos; /* -> position of its first row */
    int T;
    int capacity;                           /* tokens a salient list can hold */
    void *win_k, *win_v;                    /* [G, 2C, D] */
    float *win_score, *win_received;        /* [S, 2C] */
    void *sal_k, *sal_v;                    /* [S, capacity, D] */
    float *sal_score;                       /* [S, capacity] */
    int32_t *sal_pos;                       /* [S, capacity] */
    uint8_t *sal_far;                       /* [S, capacity] or NULL */
    int32_t *sal_count;                     /* [S] */
    float *lin_s, *lin_z, *comp_s, *comp_z; /* [S, P, D], [S, P], likewise */
    int64_t *folded;                        /* [S] */
} sti_cuda_hybrid_session;

/* Refuses settings that no form computes: a score without a kernel, caps that
 * differ. */
still_status sti_cuda_hybrid_check(const sti_hybrid_settings *set, still_error *err);

/* Settings and shape of a call, in every form; without inv_freq. kv_size: bytes of a
 * number of stored keys and values, 0 where none are. */
sti_cuda_hybrid_params sti_cuda_hybrid_params_of(const sti_hybrid_settings *set,
                                                 const sti_hybrid_shape *shape,
                                                 const sti_hybrid_in *in,
                                                 size_t kv_size);

/* A session's rows and state; pos: where the position of its first row is. */
sti_cuda_hybrid_session sti_cuda_hybrid_session_of(const sti_hybrid_args *a,
                                                   const int32_t *pos);

#ifdef __cplusplus
}
#endif

#endif
