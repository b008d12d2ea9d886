/* softmax.h - what the files of softmax attention share.
 *
 * softmax.c checks a call and hands its segments, by value, to kernels: descriptors
 * lie in the launch's parameters, so a captured launch carries them along and nothing
 * has to be copied to the device first. What changes from token to token, the position,
 * is read on the device. Rows that come alone (decode) and rows that come together
 * (prefill) go to different kernels:
 *
 *   decode.cu   one row a session, half cache: bounded by memory
 *   prefill.cu  many rows a session, half cache, D <= 128: by tensor cores
 *                         (on sm_90a, up to D = 64, with its own instructions)
 *   prefill_hopper.cu   the same on sm_90a, D above 64
 *   plain.cu    everything else: float caches, odd head sizes, wide heads */
#ifndef STI_BACKEND_CUDA_SOFTMAX_SOFTMAX_H
#define STI_BACKEND_CUDA_SOFTMAX_SOFTMAX_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STI_CUDA_ATTN_SEGS = 64, /* of one launch: parameters are limited to 4 KB */
    STI_CUDA_ATTN_MAX_D = 256,
    /* Most pieces of a row's keys, and fewest keys of a piece but for the last one: 8
     * kv heads fill a GPU. */
    STI_CUDA_ATTN_SPLITS = 48,
    STI_CUDA_ATTN_PIECE = 128,
    /* The same where a launch has so many rows times kv heads that longer pieces do:
     * those of 12 rows of 8 heads are whole rounds of three blocks on each of 132 SMs.
     */
    STI_CUDA_ATTN_CROWD = 48,
    STI_CUDA_ATTN_CROWD_SPLITS = 33,
    STI_CUDA_ATTN_CROWD_PIECE = 320,
};

typedef struct sti_cuda_attn_seg {
    void *K, *V; /* [G, capacity, D] */
    int row0, n, past, capacity;
} sti_cuda_attn_seg;

/* A launch: sti_attn_args for segments of one kind. */
typedef struct sti_cuda_attn {
    const float *q, *k, *v; /* [M, H, D], [M, G, D], [M, G, D] */
    float *o;               /* [M, H, D] */
    const int32_t *pos;     /* [M] of the running pass; NULL: seg's `past` counts */
    int H, G, D, window;
    float scale; /* log2(e) / sqrt(D): exponentials are powers of two */
    bool half;   /* cache type: half, else float */
    int n_seg;
    sti_cuda_attn_seg seg[STI_CUDA_ATTN_SEGS];
} sti_cuda_attn;

/* Where pieces of a row leave their sums until they are joined, for head h of segment s
 * and piece i of `pieces`: with l_j the logits times log2(e),
 *   stat[s, h, i] = (m, sum_j 2^(l_j - m)), m = max_j l_j;  sum[s, h, i, :] = sum_j
 *   2^(l_j - m) v_j. */
typedef struct sti_cuda_attn_parts {
    float2 *stat; /* [n_seg, H, pieces] */
    float *sum;   /* [n_seg, H, pieces, D] */
    int pieces;
} sti_cuda_attn_parts;

/* Stores the new rows of k and v. decode does so itself. */
still_status sti_cuda_attn_store(sti_dev *, const sti_cuda_attn *a, still_error *err);

/* Segments of one row each; half cache, D a multiple of 8. Then join, which also
 * follows plain with parts. */
still_status sti_cuda_attn_decode(sti_dev *, const sti_cuda_attn *a,
                                  const sti_cuda_attn_parts *p, still_error *err);
still_status sti_cuda_attn_join(sti_dev *, const sti_cuda_attn *a,
                                const sti_cuda_attn_parts *p, still_error *err);
/* Any segments; half cache, D a multiple of 8 up to 128; rows have been stored. */
still_status sti_cuda_attn_prefill(sti_dev *, const sti_cuda_attn *a, still_error *err);
/* The same on Hopper's own instructions, where they are: D above 64. */
bool sti_cuda_attn_hopper_runs(const sti_dev *, const sti_cuda_attn *a);
still_status sti_cuda_attn_hopper(sti_dev *, const sti_cuda_attn *a, still_error *err);
/* Any segments, any cache, any D; rows have been stored. p not NULL: segments have one
 * row each, whose keys are cut into pieces. */
still_status sti_cuda_attn_plain(sti_dev *, const sti_cuda_attn *a,
                                 const sti_cuda_attn_parts *p, still_error *err);

#ifdef __cplusplus
}
#endif

#endif
