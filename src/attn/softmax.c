/* softmax.c - the teacher's attention: every key and value is kept.
 *
 * State of a layer: keys [G, room, D], then values [G, room, D]. room is the context,
 * or less where the model itself looks back only `window` tokens: the cache is then a
 * ring that holds the window and one batch. */
#include <string.h>

#include "attn/attn.h"

static int room_of(const sti_attn_layer *l, int ctx, int batch)
{
    int64_t ring = (int64_t)l->window + batch;
    return l->window > 0 && ring < ctx ? (int)ring : ctx;
}

static size_t half_bytes(const sti_attn_layer *l, int room)
{
    size_t elements = 0, bytes = 0;
    if (!sti_mul((size_t)l->kv_heads * (size_t)l->head_dim, (size_t)room, &elements) ||
        !sti_mul(elements, l->cache == STI_F32 ? 4 : 2, &bytes) || bytes > SIZE_MAX / 4)
        return SIZE_MAX / 4; /* more than any machine has: the allocation says no */
    return bytes;
}

static size_t state_bytes(const sti_attn_layer *l, int ctx, int batch)
{
    return 2 * half_bytes(l, room_of(l, ctx, batch));
}

static still_status forward(const sti_backend *be, sti_dev *dev, const sti_attn_layer *l,
                            const sti_attn_io *io, still_error *err)
{
    for (int i = 0; i < io->n_rows; i++) {
        const sti_attn_sequence *r = &io->rows[i];
        int room = room_of(l, r->ctx, r->batch);
        io->segment[i] = (sti_attn_segment){
            .row0 = r->row0,
            .n = r->n,
            .past = r->past,
            .K = r->state,
            .V = (char *)r->state + half_bytes(l, room),
            .room = room,
        };
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
                                             .cache = l->cache,
                                             .seg = io->segment,
                                             .n_seg = io->n_rows},
                            err);
}

static const sti_attn_method softmax = {"softmax", state_bytes, forward};

const sti_attn_method *sti_attn_find(const char *name)
{
    return !name || strcmp(name, softmax.name) == 0 ? &softmax : NULL;
}
