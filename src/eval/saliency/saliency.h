/* saliency.h - shared by the files of this folder and their tests; nobody else includes
 * it.
 *
 *     saliency.c        the run: layers, and what the method decides in each
 *     full_attention.c  two scores that need the whole past, or the future
 *     agreement.c       how far two scores select the same tokens */
#ifndef STI_EVAL_SALIENCY_SALIENCY_H
#define STI_EVAL_SALIENCY_SALIENCY_H

#include "base/pool.h"
#include "ops/hybrid.h"

/* Softmax attention of a layer over everything before, as the model was pretrained. */
typedef struct sti_full_attention_args {
    const float *q, *k; /* [T,H,D], [T,G,D], after RoPE */
    int T, H, G, D;
    int S;      /* selection heads: G or H */
    int window; /* the model's own sliding window; 0: none */
    int chunk;
    double eps;      /* of the score */
    float *whole;    /* [S,T]: Self-Saliency Score with the whole past as its window */
    float *received; /* [S,T]: mean weight from queries two chunks later and on; NaN: no
                        such query */
} sti_full_attention_args;

/* Time grows with T^2, memory with T; query heads are shared out to the pool. */
still_status sti_saliency_full_attention(const sti_full_attention_args *a,
                                         sti_pool *pool, still_error *err);

/* Of `chunks` chunks of scores a, the method's, and b >= 0. Of equal scores the earlier
 * token is chosen, as methods do. */
still_status sti_saliency_agreement(const float *a, const float *b, int chunk,
                                    int chunks, int select, still_agreement *out,
                                    still_error *err);

#endif
