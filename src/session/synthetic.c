/* synthetic.c - a past that was never fed: what a session holds after `length` tokens,
 * in size and shape, with random numbers in it. A benchmark of a step at depth 65536
 * need not compute the 65536 tokens before it.
 *
 * A cache of keys and values is filled with one random block, doubled in place, so
 * that little data is transferred to a device. States of other methods are built
 * layer by layer in host memory and moved: the counts, positions and sums that so
 * many tokens would give, with keys and values of unit variance. */
#include <math.h>
#include <string.h>

#include "base/random.h"
#include "session/session.h"

enum { SEED_BLOCK = 4 << 20 };

typedef struct past {
    const still_session *s;
    int length;
    uint64_t seed;   /* advances with every array */
    sti_block block; /* in the program's memory: random numbers, or a layer's state */
} past;

/* ---- Numbers ------------------------------------------------------------- */

/* About N(0, 1): the sum of four bytes. */
static float normal(uint64_t r)
{
    const int sum =
        (int)((r & 255) + (r >> 8 & 255) + (r >> 16 & 255) + (r >> 24 & 255));
    return (float)(sum - 510) / 147.8f;
}

/* n numbers mean + deviation * N(0, 1), stored in `size` bytes each: 2 is half. */
static void fill(past *p, void *out, size_t n, size_t size, float mean, float deviation)
{
    const uint64_t key = sti_mix64(++p->seed);
    for (size_t i = 0; out && i < n; i++) {
        const float x = mean + deviation * normal(sti_mix64(key + i));
        if (size == sizeof(uint16_t))
            ((uint16_t *)out)[i] = sti_f32_to_f16(x);
        else if (size == sizeof(float))
            ((float *)out)[i] = x;
        else
            ((double *)out)[i] = (double)x;
    }
}

/* ---- Softmax ------------------------------------------------------------- */

static still_status fill_cache(const past *p, unsigned char *to, size_t bytes,
                               still_error *err)
{
    const still_model *m = p->s->model;
    size_t done = bytes < SEED_BLOCK ? bytes : SEED_BLOCK;
    STI_TRY(m->be->mem_move(m->dev, to, p->block.p, done, err));
    for (size_t n; done < bytes; done += n) {
        n = bytes - done < done ? bytes - done : done;
        STI_TRY(m->be->mem_move(m->dev, to + done, to, n, err));
    }
    return STILL_OK;
}

static still_status fill_softmax(past *p, int layer, still_error *err)
{
    const sti_attn_layer l = sti_model_attn_layer(p->s->model, layer);
    const size_t size = p->s->cfg.cache == STI_F32 ? sizeof(float) : sizeof(uint16_t);
    const sti_attn_memory *m = &p->s->layer[layer];
    const size_t n =
        (size_t)l.kv_heads * (size_t)m->softmax.capacity * (size_t)l.head_dim * size;
    fill(p, p->block.p, (n < SEED_BLOCK ? n : SEED_BLOCK) / size, size, 0, 1);
    STI_TRY(fill_cache(p, m->softmax.k, n, err));
    return fill_cache(p, m->softmax.v, n, err);
}

/* ---- States -------------------------------------------------------------- */

/* Tokens that have left the window: all chunks before the last token's chunk and its
 * predecessor. */
static int64_t tokens_left(const sti_hybrid_settings *set, int64_t length)
{
    if (!set->has_window) return length;
    const int64_t chunk = length > 0 ? (length - 1) / set->chunk : 0;
    return chunk > 1 ? (chunk - 1) * set->chunk : 0;
}

/* Salient tokens of one list: as many as were selected, or as fit. */
static int64_t salient(const sti_hybrid_settings *set, sti_hybrid_list list,
                       int64_t left)
{
    const int64_t chosen = left / set->chunk * set->select;
    return chosen < list.capacity ? chosen : list.capacity;
}

/* n groups of `scales` numbers each: d of levels below `top`, and a minimum if there are
 * two. */
static void fill_scales(uint16_t *to, size_t n, int scales, int top)
{
    for (size_t i = 0; i < n; i++) {
        to[i * (size_t)scales] = sti_f32_to_f16(5.0f / (float)top);
        if (scales == 2) to[2 * i + 1] = sti_f32_to_f16(-2.5f);
    }
}

static void fill_bytes(past *p, uint8_t *to, size_t n)
{
    const uint64_t key = sti_mix64(++p->seed);
    for (size_t i = 0; to && i < n; i++) to[i] = (uint8_t)sti_mix64(key + i);
}

/* Keys and values of the slots of all lists. */
static void fill_slots(past *p, const sti_hybrid_settings *set,
                       const sti_hybrid_state *st, size_t slots, int D)
{
    const int kb = set->key_bits, vb = set->value_bits;
    if (!kb) fill(p, st->sal_k, slots * (size_t)D, st->kv_size, 0, 1);
    if (!vb) fill(p, st->sal_v, slots * (size_t)D, st->kv_size, 0, 1);
    if (kb && st->sal_k) {
        fill_bytes(p, st->sal_k, slots * sti_salient_low(kb, D));
        fill_bytes(p, st->sal_k_high, slots * sti_salient_high(kb, D));
        fill_scales(st->sal_k_scale, slots * sti_salient_groups(D), 1, 1 << kb);
    }
    if (vb && st->sal_v) {
        fill_bytes(p, st->sal_v, slots * sti_salient_low(vb, D));
        fill_bytes(p, st->sal_v_high, slots * sti_salient_high(vb, D));
        fill_scales(st->sal_v_scale, slots * sti_salient_groups(D), 2, 1 << vb);
    }
}

static void fill_salient(past *p, const sti_hybrid_settings *set, sti_hybrid_state *st,
                         int64_t left, size_t S)
{
    const int64_t end = ((int64_t)p->length - 1) / set->chunk * set->chunk + set->chunk;
    for (size_t s = 0; s < S; s++) {
        const sti_hybrid_list list = sti_hybrid_list_of(set, st, (int)s);
        const int64_t n = salient(set, list, left);
        st->sal_count[s] = (int32_t)n;
        st->folded[s] = left - n;
        for (int64_t i = 0; i < n; i++) {
            const size_t at = list.first + (size_t)i;
            const int64_t pos = i * left / n;
            st->sal_pos[at] = (int32_t)pos;
            if (st->sal_far) st->sal_far[at] = end - 1 - pos >= set->position_cap;
        }
    }
}

/* A feature is about 1 / D a token: z is their sum, s that of products with values. */
static void fill_hybrid(past *p, const sti_attn_layer *l, sti_hybrid_state *st)
{
    const sti_hybrid_settings own = sti_attn_hybrid_settings(&p->s->cfg, l),
                              *set = &own;
    const sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const size_t S = (size_t)sti_hybrid_selection_heads(set, &shape),
                 P = (size_t)sti_hybrid_features(set, &shape), D = (size_t)shape.D,
                 window = 2 * (size_t)set->chunk, keys = (size_t)shape.G * window * D,
                 list = sti_hybrid_list_of(set, st, (int)S).first;
    const int64_t left = tokens_left(set, p->length);
    fill(p, st->win_k, keys, st->kv_size, 0, 1);
    fill(p, st->win_v, keys, st->kv_size, 0, 1);
    fill(p, st->win_score, S * window, st->real_size, 0.5f, 0.1f);
    fill(p, st->win_received, S * window, st->real_size, 0.5f, 0.1f);
    fill_slots(p, set, st, list, shape.D);
    fill(p, st->sal_score, list, st->real_size, 0.5f, 0.1f);
    fill_salient(p, set, st, left, S);
    const float tokens = (float)st->folded[0], one = 1 / (float)D;
    fill(p, st->lin_s, S * P * D, st->real_size, 0, one * sqrtf(tokens));
    fill(p, st->lin_z, S * P, st->real_size, one * tokens, 0.1f * one * tokens);
}

static void fill_linear(past *p, const sti_attn_layer *l, sti_linear_state *st)
{
    const int window = p->s->cfg.window;
    const size_t D = (size_t)l->head_dim, G = (size_t)l->kv_heads,
                 heads = window ? G : (size_t)l->heads;
    fill(p, st->win_k, G * (size_t)window * D, st->kv_size, 0, 1);
    fill(p, st->win_v, G * (size_t)window * D, st->kv_size, 0, 1);
    fill(p, st->s, heads * D * D, p->s->model->be->state_real, 0, 0.1f);
}

/* One layer's state, laid out in the block as it lies in the session, then moved. */
static still_status fill_state(past *p, int layer, still_error *err)
{
    const still_session *s = p->s;
    const still_model *m = s->model;
    const sti_attn_engine *engine = sti_attn_engine_of(&s->cfg, layer);
    const sti_attn_layer l = sti_model_attn_layer(m, layer);
    sti_carve count = {0}, c = {.base = p->block.p};
    sti_attn_memory there = s->layer[layer], here;
    engine->carve_memory(m->be, &s->cfg, &l, &count, &here);
    memset(p->block.p, 0, count.used);
    engine->carve_memory(m->be, &s->cfg, &l, &c, &here);
    unsigned char *begin;
    if (engine == &sti_attn_hybrid) {
        fill_hybrid(p, &l, &here.hybrid);
        begin = (unsigned char *)there.hybrid.sal_count -
                ((unsigned char *)here.hybrid.sal_count - c.base);
    } else {
        fill_linear(p, &l, &here.linear);
        begin =
            (unsigned char *)there.linear.s - ((unsigned char *)here.linear.s - c.base);
    }
    return m->be->mem_move(m->dev, begin, p->block.p, count.used, err);
}

/* ---- Together ------------------------------------------------------------ */

/* The block must hold the largest state of a layer, and the seed of a cache. */
static size_t block_bytes(const still_session *s)
{
    size_t most = SEED_BLOCK;
    for (int i = 0; i < s->model->cfg.layers; i++) {
        const sti_attn_engine *engine = sti_attn_engine_of(&s->cfg, i);
        const sti_attn_layer l = sti_model_attn_layer(s->model, i);
        sti_carve count = {0};
        sti_attn_memory unused;
        if (engine == &sti_attn_softmax) continue;
        engine->carve_memory(s->model->be, &s->cfg, &l, &count, &unused);
        if (count.used > most) most = count.used;
    }
    return most;
}

still_status sti_session_fill_synthetic(still_session *s, int length, uint64_t seed,
                                        still_error *err)
{
    if (length < 0 || length > s->cfg.ctx)
        return sti_fail(err, STILL_E_ARG, "a session of %d tokens cannot hold %d",
                        s->cfg.ctx, length);
    still_session_reset(s);
    if (length == 0) return STILL_OK;
    past p = {.s = s, .length = length, .seed = seed};
    if (!sti_block_new(&p.block, block_bytes(s)))
        return sti_fail_memory(err, "a synthetic past", block_bytes(s));
    still_status st = STILL_OK;
    for (int l = 0; l < s->model->cfg.layers && st == STILL_OK; l++)
        st = sti_attn_engine_of(&s->cfg, l) == &sti_attn_softmax
                 ? fill_softmax(&p, l, err)
                 : fill_state(&p, l, err);
    sti_block_free(&p.block);
    if (st == STILL_OK)
        s->length = length;
    else
        still_session_reset(s);
    return st;
}

still_status sti_session_fill_like(still_session *s, const still_session *other,
                                   still_error *err)
{
    STI_TRY(s->model->be->mem_move(s->model->dev, s->state, other->state,
                                   s->state_bytes, err));
    for (int i = 0; i < s->rollback; i++) s->boundary[i].length = 0;
    s->length = other->length;
    sti_session_replaced(s);
    s->has_logits = false;
    return STILL_OK;
}
