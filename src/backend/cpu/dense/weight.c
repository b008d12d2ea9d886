/* weight.c - weights as the cpu backend wants to multiply them.
 *
 * Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are repacked while loading: 16 rows become a group
 * whose block of 32 k is
 *
 *     4-bit   [4 p][16 rows][4 bytes]   byte j of p: k = 4p + j low, 16 + 4p + j high
 *     8-bit   [8 p][16 rows][4 bytes]   byte j of p: k = 4p + j
 *     f16 scale[16], f16 minimum[16] where the type has one
 *
 * and blocks follow in the order of k, groups in the order of rows. Five bits become
 * eight. Rows past N are zero. Once copied, the file's pages are given back. K types
 * and floats stay where they are mapped.
 *
 * Copies are carved from arenas of ARENA bytes, not allocated one by one: many matrices
 * are smaller than a huge page, and streaming them from small pages costs a third of
 * the speed. What is not carved is never touched, so it takes no memory. */
#include <stdlib.h>

#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/kernels.h"
#include "file/blocks.h"

enum { ARENA = 64 << 20, LINE = 64 };

static sti_layout layout_of(sti_dtype t)
{
    switch (t) {
    case STI_Q4_0: return STI_L_U4;
    case STI_Q4_1: return STI_L_U4_MIN;
    case STI_Q5_0:
    case STI_Q8_0: return STI_L_S8;
    case STI_Q5_1: return STI_L_S8_MIN;
    case STI_F32:
    case STI_F16:
    case STI_BF16: return STI_L_FLOAT;
    default: return STI_L_K;
    }
}

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
    case STI_F32:
    case STI_F16:
    case STI_BF16: return true;
    default: return false;
    }
}

/* SIZE_MAX where the sizes are impossible, so that allocation fails. */
static size_t packed_bytes(sti_layout l, int64_t N, int64_t K)
{
    if (l == STI_L_K || l == STI_L_FLOAT) return 0;
    size_t groups = ((size_t)N + STI_GROUP - 1) / STI_GROUP, bytes;
    if (!sti_mul(groups, (size_t)K / STI_BLOCK_K, &bytes) ||
        !sti_mul(bytes, sti_packed_block(l), &bytes))
        return SIZE_MAX;
    return bytes > SIZE_MAX - LINE ? SIZE_MAX : (bytes + LINE - 1) / LINE * LINE;
}

size_t sti_cpu_weight_bytes(const sti_dev *dev, const sti_tensor *t)
{
    (void)dev;
    if (!supported(t->type) || t->n_dims != 2) return 0;
    return packed_bytes(layout_of(t->type), t->dim[0], t->dim[1]);
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
    const sti_tensor *t;
    uint8_t *out;
    sti_layout layout;
    size_t row_bytes, block_bytes; /* of the source */
    int64_t N;
    size_t nb;
    bool flip; /* 8-bit weights + 128 */
} pack_job;

/* The 32 five-bit values of a block, less `centre`, as bytes. */
static void expand_five(const uint8_t high[4], const uint8_t q[16], int centre,
                        uint8_t out[32])
{
    uint32_t h = (uint32_t)high[0] | (uint32_t)high[1] << 8 | (uint32_t)high[2] << 16 |
                 (uint32_t)high[3] << 24;
    for (int i = 0; i < 16; i++) {
        out[i] = (uint8_t)((int)((q[i] & 15u) | (h >> i & 1) << 4) - centre);
        out[i + 16] = (uint8_t)((int)((q[i] >> 4) | (h >> (i + 16) & 1) << 4) - centre);
    }
}

/* One block of one row: where its quants, scale and minimum lie (minimum may be NULL).
 * buf holds quants that had to be expanded. */
typedef struct source {
    const uint8_t *q, *d, *m;
    uint8_t buf[32];
} source;

static void open_block(sti_dtype t, const uint8_t *p, source *s)
{
    s->m = NULL;
    s->d = p; /* every type starts with its scale */
    switch (t) {
    case STI_Q4_0: s->q = ((const sti_block_q4_0 *)p)->q; break;
    case STI_Q4_1:
        s->q = ((const sti_block_q4_1 *)p)->q;
        s->m = ((const sti_block_q4_1 *)p)->m;
        break;
    case STI_Q5_0:
        expand_five(((const sti_block_q5_0 *)p)->high, ((const sti_block_q5_0 *)p)->q,
                    16, s->buf);
        s->q = s->buf;
        break;
    case STI_Q5_1:
        expand_five(((const sti_block_q5_1 *)p)->high, ((const sti_block_q5_1 *)p)->q,
                    0, s->buf);
        s->q = s->buf;
        s->m = ((const sti_block_q5_1 *)p)->m;
        break;
    default: s->q = ((const sti_block_q8_0 *)p)->q; break;
    }
}

static void pack_group(const pack_job *j, int64_t g)
{
    const bool wide = j->layout == STI_L_S8 || j->layout == STI_L_S8_MIN;
    const int steps = wide ? 8 : 4;
    const size_t block = sti_packed_block(j->layout);
    const uint32_t flip = wide && j->flip ? 0x80808080u : 0;
    uint8_t *group = j->out + (size_t)g * j->nb * block;
    for (int r = 0; r < STI_GROUP; r++) {
        int64_t row = g * STI_GROUP + r;
        if (row >= j->N) break; /* arenas come zeroed */
        const uint8_t *in = (const uint8_t *)j->t->data + (size_t)row * j->row_bytes;
        uint8_t *out = group;
        for (size_t b = 0; b < j->nb; b++, in += j->block_bytes, out += block) {
            source s;
            open_block(j->t->type, in, &s);
            for (int p = 0; p < steps; p++) {
                uint32_t v;
                memcpy(&v, s.q + 4 * p, 4);
                v ^= flip;
                memcpy(out + 64 * p + 4 * r, &v, 4);
            }
            memcpy(out + 64 * steps + 2 * r, s.d, 2);
            if (s.m) memcpy(out + 64 * steps + 32 + 2 * r, s.m, 2);
        }
    }
}

static void pack_task(void *arg, int worker, int workers)
{
    const pack_job *j = arg;
    int64_t lo, hi;
    sti_split((j->N + STI_GROUP - 1) / STI_GROUP, 1, worker, workers, &lo, &hi);
    for (int64_t g = lo; g < hi; g++) pack_group(j, g);
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
    sti_weight v = {.src = t,
                    .N = t->dim[0],
                    .K = t->dim[1],
                    .type = t->type,
                    .layout = (int)layout_of(t->type)};
    size_t bytes = packed_bytes((sti_layout)v.layout, v.N, v.K);
    if (bytes == 0) {
        v.data = t->data;
        *w = v;
        return STILL_OK;
    }
    v.own = (sti_block){.p = arena_take(dev, bytes), .bytes = bytes};
    if (!v.own.p) return sti_fail_memory(err, t->name, bytes);
    pack_job job = {.t = t,
                    .out = v.own.p,
                    .layout = (sti_layout)v.layout,
                    .row_bytes =
                        (size_t)v.K / (size_t)info->block * (size_t)info->bytes,
                    .block_bytes = (size_t)info->bytes,
                    .N = v.N,
                    .nb = (size_t)v.K / STI_BLOCK_K,
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
