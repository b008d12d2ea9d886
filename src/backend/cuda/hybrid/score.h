/* score.h - the scores that the CUDA backend computes: what each is made of, and its
 * formula, for every form (recurrent, chunk-parallel, training). Their meaning is in
 * ops/score.c. This is the only place that names them: kernels ask where a score comes
 * from, so a new one is a line and a formula in this file.
 *
 * The first part is for host and device and needs no CUDA. */
#ifndef STI_BACKEND_CUDA_HYBRID_SCORE_H
#define STI_BACKEND_CUDA_HYBRID_SCORE_H

#include "backend/cuda/both.h"
#include "ops/hybrid.h"

typedef enum sti_score_source {
    STI_FROM_NOWHERE,  /* not computed here */
    STI_FROM_SELF,     /* the weight a token gives itself among the last C tokens */
    STI_FROM_QUERIES,  /* the weights it gets from later queries of the window */
    STI_FROM_KEY,      /* its key as it is kept; query heads score alike */
    STI_FROM_POSITION, /* query head and position */
    STI_FROM_CHUNK     /* all keys of its chunk, once it is complete; the last */
} sti_score_source;

/* Whether a score comes from there. With a constant source, one comparison. */
STI_BOTH bool sti_score_from(int score, sti_score_source source)
{
    switch (source) {
    case STI_FROM_SELF: return score == STI_SCORE_S3;
    case STI_FROM_QUERIES: return score == STI_SCORE_RECEIVED;
    case STI_FROM_KEY: return score == STI_SCORE_KEYNORM;
    case STI_FROM_POSITION: return score == STI_SCORE_RANDOM;
    case STI_FROM_CHUNK: return score == STI_SCORE_DISTINCT;
    default: return false;
    }
}

static inline sti_score_source sti_score_source_of(int score)
{
    int source = STI_FROM_CHUNK;
    while (source > STI_FROM_NOWHERE &&
           !sti_score_from(score, (sti_score_source)source))
        source--;
    return (sti_score_source)source;
}

/* Refuses a score that is not computed here; on the way into every form. */
static inline still_status sti_cuda_score_check(sti_score_kind score, still_error *err)
{
    unsigned known = 0;
    for (int i = 0; i < STI_SCORE_COUNT; i++)
        if (sti_score_source_of(i) != STI_FROM_NOWHERE) known |= 1u << i;
    return sti_score_check(score, known, "cuda", err);
}

#ifdef __CUDACC__

#include "backend/cuda/ptx/reduce.cuh"

/* ---- Formulas; the first argument is the score --------------------------- */

/* STI_FROM_SELF: the token gives itself weight `self` and all others `others`, of any
 * sum. s3: STILL eq. 3, eq. 4 and eq. 5 in closed form, p the share of the own weight,
 *   (1 - p) log(1 - p) + p log((p + eps) / eps) */
STI_DEVICE float self_score(int, float self, float others, float eps)
{
    const float sum = self + others, p = self / sum, rest = others / sum;
    return (rest > 0 ? rest * logf(rest) : 0) + p * logf((p + eps) / eps);
}

/* STI_FROM_QUERIES: token i of a chunk of C has got weights of this sum, by the time
 * the chunk retires, from all queries behind it in its own chunk and the next.
 * received: their mean. */
STI_DEVICE float queries_score(int, float sum, int C, int i)
{
    const int queries = 2 * C - 1 - i;
    return queries > 0 ? sum / (float)queries : 0;
}

/* STI_FROM_KEY: |k|^2 of the key as it is kept. keynorm. */
template <class real> STI_DEVICE float key_score(int, real square)
{
    return (float)-sqrt(square);
}

/* STI_FROM_POSITION: random: splitmix64 of seed, layer, head and position. */
STI_DEVICE uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
STI_DEVICE float position_score(int, uint64_t seed, int layer, int head, int position)
{
    uint64_t x = mix(seed);
    x = mix(x ^ (uint64_t)layer);
    x = mix(x ^ (uint64_t)head);
    x = mix(x ^ (uint64_t)position);
    return (float)(x >> 40) / (float)(1 << 24);
}

/* ---- STI_FROM_CHUNK ------------------------------------------------------ */

/* distinct, the formula of KeyDiff (arXiv 2504.15364): how unlike its chunk a key is,
 * by the cosine of each of n keys and the mean of their directions. */

STI_DEVICE float inverse_length(float square)
{
    return square > 0 ? 1 / sqrtf(square) : 0;
}

/* The score of the token at `position`: the first is kept always. */
STI_DEVICE float distinct_score(float likeness, int position)
{
    return position == 0 ? STI_DISTINCT_FIRST
                         : STI_DISTINCT_RECENT * (float)position - likeness;
}

/* Scores of the n tokens of a chunk, the first of which is at `first`. key(i, d):
 * number d of key i. put(i, score), by one thread for each i. mean [D] is shared
 * memory. All threads of a block of WARPS warps call it. */
template <int WARPS, class Key, class Put>
static __device__ void chunk_scores(int, int n, int D, int first, float *mean, Key key,
                                    Put put)
{
    enum { DIMS = STI_HEAD_DIM_MAX / 32 }; /* of a key, by lane */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float sum[DIMS] = {}, x[DIMS];
    for (int d = (int)threadIdx.x; d < D; d += 32 * WARPS) mean[d] = 0;
    for (int i = warp; i < n; i += WARPS) {
        float square = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            x[e] = lane + 32 * e < D ? key(i, lane + 32 * e) : 0;
            square += x[e] * x[e];
        }
        const float per = inverse_length(warp_sum(square));
#pragma unroll
        for (int e = 0; e < DIMS; e++) sum[e] += x[e] * per;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int e = 0; e < DIMS; e++)
            if (w == warp && lane + 32 * e < D) mean[lane + 32 * e] += sum[e];
        __syncthreads();
    }
    float all = 0;
#pragma unroll
    for (int e = 0; e < DIMS; e++) {
        sum[e] = lane + 32 * e < D ? mean[lane + 32 * e] : 0;
        all += sum[e] * sum[e];
    }
    const float per_mean = inverse_length(warp_sum(all));
    for (int i = warp; i < n; i += WARPS) {
        float square = 0, dot = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            const float one = lane + 32 * e < D ? key(i, lane + 32 * e) : 0;
            square += one * one;
            dot += one * sum[e];
        }
        square = warp_sum(square);
        dot = warp_sum(dot);
        if (lane == 0)
            put(i, distinct_score(dot * inverse_length(square) * per_mean, first + i));
    }
    __syncthreads();
}

#endif

#endif
