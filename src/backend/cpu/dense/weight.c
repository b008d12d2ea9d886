/* weight.c - weights as the cpu backend wants to multiply them.
 *
 * Quantized matrices are repacked while loading (packing.h); once copied, the file's
 * pages are given back. Floats stay where they are mapped.
 *
 * Copies are carved from arenas of ARENA bytes, not allocated one by one: many matrices
 * are smaller than a huge page, and streaming them from small pages costs a third of
 * the speed. What is not carved is never touched, so it takes no memory. */
#include <stdlib.h>

#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/kernels.h"

enum { ARENA = 64 << 20, LINE = 64 };

static bool supported(sti_dtype t)
{
    switch (t) {
    case STI_Q4_0:
    case STI_Q4_1:
    case STI_Q5_0:
    case STI_Q5_1:
    case STI_Q8_0:
    case STI_Q2_K:
    case STI_Q3_K:
    case STI_Q4_K:
    case STI_Q5_K:
    case STI_Q6_K:
    case STI_IQ4_NL:
    case STI_IQ4_XS:
    case STI_MXFP4:
    case STI_F32:
    case STI_F16:
    case STI_BF16: return true;
    default: return false;
    }
}

static bool is_float(sti_dtype t)
{
    return t == STI_F32 || t == STI_F16 || t == STI_BF16;
}

/* SIZE_MAX where the sizes are impossible, so that allocation fails. */
static size_t packed_bytes(sti_dtype t, int64_t N, int64_t K)
{
    if (is_float(t)) return 0;
    const size_t groups = ((size_t)N + STI_GROUP - 1) / STI_GROUP;
    const size_t nb = (size_t)K / STI_BLOCK_K; /* K is an int: no overflow */
    size_t bytes;
    if (!sti_mul(groups, sti_packed_bytes(sti_packing_of(t), nb), &bytes))
        return SIZE_MAX;
    return bytes > SIZE_MAX - LINE ? SIZE_MAX : (bytes + LINE - 1) / LINE * LINE;
}

size_t sti_cpu_weight_bytes(const sti_dev *dev, const sti_tensor *t)
{
    (void)dev;
    if (!supported(t->type) || t->n_dims != 2 || t->dim[1] > INT32_MAX) return 0;
    return packed_bytes(t->type, t->dim[0], t->dim[1]);
}

void sti_cpu_arena_free(sti_dev *dev)
{
    for (size_t i = 0; i < dev->n_arenas; i++) sti_block_free(&dev->arena[i]);
    free(dev->arena);
    dev->arena = NULL;
    dev->n_arenas = dev->arena_used = dev->n_weights = 0;
}

/* bytes (a multiple of LINE) for one weight; NULL: no memory. */
static void *arena_take(sti_dev *dev, size_t bytes)
{
    size_t last = dev->n_arenas - 1;
    if (dev->n_arenas == 0 || dev->arena[last].bytes - dev->arena_used < bytes) {
        sti_block *more = sti_grow(dev->arena, dev->n_arenas + 1, sizeof *more);
        if (!more) return NULL;
        dev->arena = more;
        last = dev->n_arenas;
        if (!sti_block_new(&more[last], bytes > ARENA ? bytes : ARENA)) return NULL;
        dev->n_arenas++;
        dev->arena_used = 0;
    }
    unsigned char *p = (unsigned char *)dev->arena[last].p + dev->arena_used;
    dev->arena_used += bytes;
    dev->n_weights++;
    return p;
}

typedef struct pack_job {
    const sti_dense_kernels *dense;
    const sti_tensor *t;
    uint8_t *out;
    size_t row_bytes, group_bytes; /* of the source, of the copy */
    size_t nb;
    bool flip; /* 8-bit weights + 128 */
} pack_job;

static int64_t groups_of(const sti_tensor *t)
{
    return (t->dim[0] + STI_GROUP - 1) / STI_GROUP;
}

static void pack_task(void *arg, int worker, int workers)
{
    const pack_job *j = arg;
    int64_t lo, hi;
    sti_split(groups_of(j->t), 1, worker, workers, &lo, &hi);
    for (int64_t g = lo; g < hi; g++) {
        const int64_t row = g * STI_GROUP, left = j->t->dim[0] - row;
        j->dense->pack(j->t->type,
                       (const uint8_t *)j->t->data + (size_t)row * j->row_bytes,
                       j->row_bytes, left < STI_GROUP ? (int)left : STI_GROUP, j->nb,
                       j->flip, j->out + (size_t)g * j->group_bytes);
    }
}

still_status sti_cpu_weight_new(sti_dev *dev, const sti_tensor *t, sti_weight *w,
                                still_error *err)
{
    *w = (sti_weight){0};
    const sti_dtype_info *info = sti_dtype_find((int)t->type);
    if (!info || !supported(t->type))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s' has type %s, which the cpu backend cannot "
                        "multiply",
                        t->path, t->name, info ? info->name : "unknown");
    if (t->n_dims != 2 || t->dim[0] < 1 || t->dim[1] < 1 || t->dim[1] > INT32_MAX ||
        t->dim[1] % info->block != 0)
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: tensor '%s' is no matrix of whole rows of %s (%d "
            "dimensions, last %lld, block %d)",
            t->path, t->name, info->name, t->n_dims,
            (long long)(t->n_dims > 0 && t->n_dims <= 4 ? t->dim[t->n_dims - 1] : 0),
            info->block);
    sti_weight v = {.src = t, .N = t->dim[0], .K = t->dim[1], .type = t->type};
    const size_t bytes = packed_bytes(v.type, v.N, v.K);
    if (bytes == 0) {
        v.data = t->data;
        *w = v;
        return STILL_OK;
    }
    v.own = (sti_block){.p = arena_take(dev, bytes), .bytes = bytes};
    if (!v.own.p) return sti_fail_memory(err, t->name, bytes);
    const size_t nb = (size_t)v.K / STI_BLOCK_K;
    pack_job job = {.dense = dev->k->dense,
                    .t = t,
                    .out = v.own.p,
                    .row_bytes =
                        (size_t)v.K / (size_t)info->block * (size_t)info->bytes,
                    .group_bytes = sti_packed_bytes(sti_packing_of(v.type), nb),
                    .nb = nb,
                    .flip = dev->k->quant->s8_flip};
    sti_pool_run(dev->pool, pack_task, &job);
    sti_map_drop(t->data, t->bytes);
    *w = v;
    return STILL_OK;
}

void sti_cpu_weight_free(sti_dev *dev, sti_weight *w)
{
    if (!w) return;
    if (w->own.p && --dev->n_weights == 0) sti_cpu_arena_free(dev);
    *w = (sti_weight){0};
}
