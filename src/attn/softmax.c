/* softmax.c - the teacher's attention: every key and value is kept.
 *
 * A layer holds keys [G, capacity, D] and values [G, capacity, D]. capacity is the context, or less
 * where the model itself looks back only `window` tokens: the cache is then a ring that
 * holds the window and one batch. */
#include <limits.h>

#include "attn/attn.h"

_Static_assert(sizeof(sti_attn_segment) <= STI_ATTN_SCRATCH, "scratch is too small");

static void carve_softmax(const sti_backend *be, const sti_attn_config *cfg,
                          const sti_attn_layer *l, sti_carve *c, sti_attn_memory *out)
{
    (void)be;
    int64_t ring = (int64_t)l->window + cfg->batch;
    int capacity = l->window > 0 && ring < cfg->ctx ? (int)ring : cfg->ctx;
    size_t row = (size_t)l->kv_heads * (size_t)l->head_dim *
                 (cfg->cache == STI_F32 ? sizeof(float) : sizeof(uint16_t));
    out->softmax.k = sti_carve_take(c, (size_t)capacity, row);
    out->softmax.v = sti_carve_take(c, (size_t)capacity, row);
    out->softmax.capacity = capacity;
}

static still_status reserve(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            still_error *err)
{
    (void)l;
    return be->dev_reserve(dev, cfg->batch, err);
}

static size_t scratch_bytes(const sti_backend *be, const sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l)
{
    (void)l;
    return be->dev_bytes(dev, cfg->batch);
}

static still_status forward(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            const sti_attn_io *io, still_error *err)
{
    STI_TRY(sti_attn_rope(be, dev, cfg, l, io, err));
    sti_attn_segment *segment = io->scratch;
    for (int i = 0; i < io->n_rows; i++) {
        const sti_attn_seq *r = &io->rows[i];
        segment[i] = (sti_attn_segment){.row0 = r->row0,
                                        .n = r->n,
                                        .past = r->past,
                                        .K = r->memory->softmax.k,
                                        .V = r->memory->softmax.v,
                                        .capacity = r->memory->softmax.capacity};
    }
    return be->softmax_attn(dev,
                            &(sti_attn_args){.q = io->q,
                                             .k = io->k,
                                             .v = io->v,
                                             .o = io->o,
                                             .H = l->heads,
                                             .G = l->kv_heads,
                                             .D = l->head_dim,
                                             .window = l->window,
                                             .cache = cfg->cache,
                                             .seg = segment,
                                             .n_seg = io->n_rows},
                            err);
}

/* A key is in the slot of its position, and queries read no key after their own. */
static int undoable(const sti_attn_config *cfg, int past)
{
    (void)cfg, (void)past;
    return INT_MAX;
}

const sti_attn_engine sti_attn_softmax = {carve_softmax, reserve, scratch_bytes,
                                          forward,       NULL,    undoable};
