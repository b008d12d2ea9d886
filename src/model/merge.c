/* merge.c - see merge.h. Rows are independent: workers share them, each with a row of
 * floats of its own. */
#include "model/merge.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/mem.h"

void sti_merge_row(const sti_lora_values *add, const float *b, int64_t K, float *row)
{
    for (int r = 0; r < add->rank; r++) {
        const float f = add->scale * b[r], *a = add->a + (int64_t)r * K;
        for (int64_t j = 0; j < K; j++) row[j] += f * a[j];
    }
}

sti_dtype sti_merge_type(sti_dtype t)
{
    return sti_dtype_find((int)t)->block == 1 ? t : STI_Q8_0;
}

typedef struct job {
    const sti_tensor *w;
    const sti_lora_values *add;
    sti_dtype type;
    size_t src_bytes, dst_bytes; /* of a row */
    float *row;                  /* [workers, K] */
    unsigned char *out;
    atomic_bool too_large; /* a number that the type cannot hold */
} job;

static bool fits(const float *row, int64_t K, sti_dtype type)
{
    const float most = type == STI_F32 || type == STI_BF16 ? FLT_MAX : 65504;
    int64_t fit = 0;
    for (int64_t j = 0; j < K; j++) fit += fabsf(row[j]) <= most;
    return fit == K;
}

static void merge_rows(void *arg, int worker, int workers)
{
    job *j = arg;
    const int64_t K = j->w->dim[1];
    float *row = j->row + worker * K;
    int64_t lo, hi;
    sti_split(j->w->dim[0], 1, worker, workers, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        sti_dequant(j->w->type, (const char *)j->w->data + (size_t)i * j->src_bytes,
                    row, K);
        sti_merge_row(j->add, j->add->b + i * j->add->rank, K, row);
        if (!fits(row, K, j->type)) atomic_store(&j->too_large, true);
        sti_quant(j->type, row, j->out + (size_t)i * j->dst_bytes, K);
    }
}

still_status sti_merge(const sti_tensor *w, const sti_lora_values *add, sti_pool *pool,
                       sti_tensor *out, still_error *err)
{
    const uint64_t N = (uint64_t)w->dim[0], K = (uint64_t)w->dim[1];
    job j = {.w = w, .add = add, .type = sti_merge_type(w->type)};
    *out = *w;
    out->type = j.type;
    out->data = NULL;
    if (!sti_dtype_bytes(w->type, K, &j.src_bytes) ||
        !sti_dtype_bytes(j.type, K, &j.dst_bytes) ||
        !sti_mul(N, j.dst_bytes, &out->bytes))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s' has rows of %llu numbers, which are no whole "
                        "blocks: open it with --no-merge",
                        w->path, w->name, (unsigned long long)K);
    j.row = sti_alloc((size_t)sti_pool_threads(pool) * K, sizeof *j.row);
    j.out = aligned_alloc(64, (out->bytes + 63) / 64 * 64);
    still_status st = STILL_OK;
    if (!j.row || !j.out) {
        st = sti_fail_memory(err, w->name, out->bytes);
    } else {
        sti_pool_run(pool, merge_rows, &j);
        sti_map_drop(w->data, w->bytes);
        if (atomic_load(&j.too_large))
            st = sti_fail(err, STILL_E_NUMERIC,
                          "%s: tensor '%s' and the adapter's addition to it hold a "
                          "number that type %s cannot",
                          w->path, w->name, sti_dtype_find((int)j.type)->name);
    }
    free(j.row);
    if (st == STILL_OK)
        out->data = j.out;
    else
        free(j.out);
    return st;
}
