/* hybrid_chunks.h - what the kernels of the chunk-parallel hybrid operator share.
 *
 * A piece is T tokens from position pos on; it may begin and end inside a chunk. Its
 * kernels run one after the other on the device's stream:
 *   pack     keys and values, old and new, as half rows in one buffer   hybrid_pack.cu
 *   score    the score of every new token                               hybrid_score.cu
 *   select   the salient list of each chunk, the rows folded at each hybrid_select.cu
 *   state    what each chunk folds, then sums of it along the piece     hybrid_state.cu
 *   output   queries meet window, list and state                     hybrid_output.cu
 *            the same on Hopper                              hybrid_output_hopper.cu
 *   tail     window and list of the session after the piece            hybrid_pack.cu
 *
 * A selection head (S of them: kv heads, or with per_head query heads, which then each
 * have a copy of their keys) has rows of keys, values and scores: first the salient
 * list as the session brought it ([0, room)), then tokens in order, position `base` at
 * row `room`. base begins a chunk, the oldest that the piece needs: the chunk before
 * that of token pos - 1, and the session's ring holds all from there on.
 *
 * Chunk c leaves somebody if its first token is in the piece and c >= 2: leave number k
 * happens at the start of chunk first_leave + k, and chunk first_leave + k - 2 leaves.
 * How many tokens are then salient or folded follows from the counts the session
 * brought, which are known to the device alone. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNKS_H
#define STI_BACKEND_CUDA_HYBRID_CHUNKS_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STI_CHUNKS_PIECE = 8192, /* tokens taken at once, at most; bounds the scratch */
    STI_CHUNKS_MAX_C = 256,
    STI_CHUNKS_MAX_CAP = 1024
};

#ifdef __cplusplus
typedef __half sti_chunks_half;
#else
typedef uint16_t sti_chunks_half; /* C has no such type; it only hands them on */
#endif

typedef struct sti_chunks {
    sti_cuda_shape h;
    sti_cuda_session s; /* q, k, v, gate and y begin at the piece */
    int major, sms;     /* of the device */
    int pos, T;
    bool first; /* piece of a call: maps are still to be made halves */
    int base;
    int first_chunk, n_chunks; /* those that queries are in */
    int first_leave, n_leaves;
    int select, room; /* both 0 if one of them is */
    int rows; /* of a selection head: room for the list and the tokens from base on */
    /* Scratch. L leaves, N chunks, both at most. */
    sti_chunks_half *k, *v;         /* [S, rows, D] */
    float *score;                   /* [S, rows] */
    sti_chunks_half *map_q, *map_k; /* [H, D, D], [S, D, D] or NULL */
    int32_t *count;                 /* [S]: salient tokens before the piece */
    int64_t *folded;                /* [S]: folded tokens before the piece */
    uint64_t *candidate;            /* [L, S, select]: selected tokens, best first */
    int32_t *salient; /* [L, S, room]: rows of the list after a leave, best first */
    int32_t *fold;    /* [L, S, C]: rows folded at a leave */
    float *ds, *dz;   /* [L, S, P, D], [L, S, P]: what a leave adds to the state */
    sti_chunks_half *mean; /* [N, S, P, D]: s / z, for the queries of a chunk */
    float *z;              /* [N, S, P]: z times state_scale */
} sti_chunks;

/* Each queues its part of the piece. */
still_status sti_chunks_pack(cudaStream_t, const sti_chunks *, still_error *);
still_status sti_chunks_score(cudaStream_t, const sti_chunks *, still_error *);
still_status sti_chunks_select(cudaStream_t, const sti_chunks *, still_error *);
still_status sti_chunks_state(cudaStream_t, const sti_chunks *, still_error *);
still_status sti_chunks_output(cudaStream_t, const sti_chunks *, still_error *);
/* The same on Hopper, where it runs. */
bool sti_chunks_output_hopper_runs(const sti_chunks *);
still_status sti_chunks_output_hopper(cudaStream_t, const sti_chunks *, still_error *);
still_status sti_chunks_tail(cudaStream_t, const sti_chunks *, still_error *);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

/* ---- Counting ---------------------------------------------------------------------
 */

/* The kv head of a selection head. */
static __device__ __forceinline__ int kv_head(const sti_chunks &c, int g)
{
    return g / (c.h.S / c.h.G);
}
/* Leaves that a query of this chunk has behind it. */
static __device__ __forceinline__ int leaves_until(const sti_chunks &c, int chunk)
{
    return min(max(chunk - c.first_leave + 1, 0), c.n_leaves);
}
/* Salient tokens of selection head g after n leaves. */
static __device__ __forceinline__ int salient_after(const sti_chunks &c, int g, int n)
{
    const int64_t wanted = c.count[g] + (int64_t)c.select * n;
    return wanted < c.room ? (int)wanted : c.room;
}
static __device__ __forceinline__ int64_t folded_after(const sti_chunks &c, int g,
                                                       int n)
{
    return c.folded[g] + (int64_t)c.h.C * n - (salient_after(c, g, n) - c.count[g]);
}
/* Rows folded at leave k. */
static __device__ __forceinline__ int fold_count(const sti_chunks &c, int g, int k)
{
    return c.h.C - (salient_after(c, g, k + 1) - salient_after(c, g, k));
}
static __device__ __forceinline__ int window_row(const sti_chunks &c, int position)
{
    return c.room + position - c.base;
}

/* A power of two that keeps phi z of n folded tokens in half's range: features are at
 * most max(1, floor), so z is at most n times that, and the product below 2^15. */
static __device__ __forceinline__ float state_scale(const sti_chunks &c, int64_t n)
{
    const float top = fmaxf(1.0f, c.h.feature_floor), most = (float)n * top * top;
    const int e = (int)(__float_as_uint(most) >> 23) - 127;
    return __uint_as_float((uint32_t)(127 + 14 - e) << 23);
}

#endif

#endif
