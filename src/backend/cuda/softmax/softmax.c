/* softmax.c - softmax attention's entry: checks a call, sorts its segments by the
 * kernel that serves them, and launches. The kernels and their split: softmax.h. */
#include "backend/cuda/softmax/softmax.h"

#include <math.h>

#include "base/error.h"

static still_status check(const sti_attn_args *a, still_error *err)
{
    if (a->H < 1 || a->G < 1 || a->D < 1 || a->H % a->G != 0)
        return sti_fail(err, STILL_E_ARG,
                        "cuda attention: %d heads of size %d cannot share %d kv heads",
                        a->H, a->D, a->G);
    if (a->D > STI_CUDA_ATTN_MAX_D)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda attention: head size %d, at most %d is supported", a->D,
                        STI_CUDA_ATTN_MAX_D);
    if (a->cache != STI_F16 && a->cache != STI_F32)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda attention: cache of type %d, expected f16 or f32",
                        (int)a->cache);
    for (int i = 0; i < a->n_seg; i++) {
        const sti_attn_segment *s = &a->seg[i];
        int64_t all = (int64_t)s->past + s->n;
        bool ring = a->window > 0 && s->capacity >= (int64_t)a->window + s->n - 1;
        if (s->n < 0 || s->past < 0 || s->capacity < 1 || all > INT32_MAX / 2 ||
            (s->capacity < all && !ring))
            return sti_fail(err, STILL_E_ARG,
                            "cuda attention: segment %d has %d new tokens after %d, "
                            "its cache holds %d with a window of %d",
                            i, s->n, s->past, s->capacity, a->window);
    }
    return STILL_OK;
}

/* Segments of one row each. */
static still_status decode(sti_dev *dev, const sti_cuda_attn *a, still_error *err)
{
    int capacity = 1;
    for (int s = 0; s < a->n_seg; s++)
        if (a->seg[s].capacity > capacity) capacity = a->seg[s].capacity;
    int pieces = (capacity - 1) / STI_CUDA_ATTN_PIECE + 1;
    if (pieces > STI_CUDA_ATTN_SPLITS) pieces = STI_CUDA_ATTN_SPLITS;

    size_t rows = (size_t)a->n_seg * (size_t)a->H * (size_t)pieces;
    size_t stats = rows * sizeof(float2), sums = rows * (size_t)a->D * sizeof(float);
    void *scratch;
    STI_TRY(sti_cuda_scratch(dev, stats + sums, &scratch, err));
    sti_cuda_attn_parts p = {
        .stat = scratch, .sum = (float *)((char *)scratch + stats), .pieces = pieces};
    if (a->half && a->D % 8 == 0) {
        STI_TRY(sti_cuda_attn_decode(dev, a, &p, err));
    } else {
        STI_TRY(sti_cuda_attn_store(dev, a, err));
        STI_TRY(sti_cuda_attn_plain(dev, a, &p, err));
    }
    return sti_cuda_attn_join(dev, a, &p, err);
}

/* Segments of several rows. */
static still_status prefill(sti_dev *dev, const sti_cuda_attn *a, still_error *err)
{
    STI_TRY(sti_cuda_attn_store(dev, a, err));
    if (!a->half || a->D % 8 != 0 || a->D > 128)
        return sti_cuda_attn_plain(dev, a, NULL, err);
    if (sti_cuda_attn_hopper_runs(dev, a)) return sti_cuda_attn_hopper(dev, a, err);
    return sti_cuda_attn_prefill(dev, a, err);
}

typedef still_status (*launcher)(sti_dev *, const sti_cuda_attn *, still_error *);

/* All segments that have one row (or all that have more), as many at a time as a launch
 * takes. */
static still_status launch(sti_dev *dev, const sti_attn_args *a, bool one_row,
                           launcher run, still_error *err)
{
    sti_cuda_attn l = {.q = a->q,
                       .k = a->k,
                       .v = a->v,
                       .o = a->o,
                       .pos = sti_cuda_pass_positions(dev),
                       .H = a->H,
                       .G = a->G,
                       .D = a->D,
                       .window = a->window,
                       .scale = (float)(1.4426950408889634 / sqrt((double)a->D)),
                       .half = a->cache == STI_F16};
    for (int i = 0; i < a->n_seg; i++) {
        const sti_attn_segment *s = &a->seg[i];
        if (s->n > 0 && (s->n == 1) == one_row)
            l.seg[l.n_seg++] = (sti_cuda_attn_seg){.K = s->K,
                                                   .V = s->V,
                                                   .row0 = s->row0,
                                                   .n = s->n,
                                                   .past = s->past,
                                                   .capacity = s->capacity};
        if (l.n_seg > 0 && (l.n_seg == STI_CUDA_ATTN_SEGS || i == a->n_seg - 1)) {
            STI_TRY(run(dev, &l, err));
            l.n_seg = 0;
        }
    }
    return STILL_OK;
}

still_status sti_cuda_softmax_attn(sti_dev *dev, const sti_attn_args *a,
                                   still_error *err)
{
    STI_TRY(check(a, err));
    STI_TRY(launch(dev, a, true, decode, err));
    return launch(dev, a, false, prefill, err);
}
