/* merge.h - a matrix and its low-rank addition as one matrix, W + scale B A.
 *
 * Floats stay in their type. Quantized matrices become Q8_0, whatever they were: the
 * numbers of W lie on a grid, and what training adds to one is about a twentieth of the
 * grid's step, so that rounding to the same grid takes most of it away again, and rounding
 * to one twice as fine adds noise of its own. With SmolLM2 in Q4_1 and its adapter,
 * perplexity of WikiText-2 grows by 10% in Q4_1, by 6% where errors are balanced
 * in the directions that A reads, by 1% in Q5_1 and by 0.1% in Q8_0 (docs/perf.md). */
#ifndef STI_MODEL_MERGE_H
#define STI_MODEL_MERGE_H

#include "base/pool.h"
#include "file/store.h"

typedef struct sti_lora_values {
    const float *a, *b; /* [rank, K], [N, rank] */
    int rank;
    float scale;
} sti_lora_values;

/* row [K] += scale b A, where b [rank] is the row's own of B. */
void sti_merge_row(const sti_lora_values *add, const float *b, int64_t K, float *row);

/* The type that a matrix of type t has once it is merged. */
sti_dtype sti_merge_type(sti_dtype t);

/* w [N, K] with its addition, in that type: as w, but for type and data, which is
 * malloc's. The pages of w leave memory. A number that does not fit is an error. */
still_status sti_merge(const sti_tensor *w, const sti_lora_values *add, sti_pool *pool,
                       sti_tensor *out, still_error *err);

#endif
