/* kept.c - what a session holds of its past: for a head where each token is and with
 * which score it stays, and how many bytes all of it takes.
 *
 * Nothing is recorded for this. Where tokens are follows from the length and, for methods
 * that choose, from the positions in the salient lists; scores are those that the
 * operators keep to compare tokens with. The lists may lie in a GPU's memory, so they are
 * copied before they are read. */
#include <math.h>
#include <stdlib.h>

#include "session/session.h"

/* One head of one layer. */
typedef struct head_of {
    const still_session *s;
    const sti_attn_engine *engine;
    sti_attn_layer layer;
    sti_hybrid_settings set; /* of a hybrid method */
    int index, heads;
    int start; /* first token of the window */
} head_of;

/* ---- Places -------------------------------------------------------------- */

/* The first token that the last one sees in the window. */
static int window_start(const head_of *h)
{
    const int n = h->s->length, C = h->set.chunk;
    if (h->engine == &sti_attn_hybrid) {
        if (!h->set.has_window) return n;
        const int chunk = n > 0 ? (n - 1) / C : 0;
        return chunk > 0 ? (chunk - 1) * C : 0;
    }
    if (h->engine == &sti_attn_softmax) {
        const int window = h->layer.window;
        return window > 0 && n > window ? n - window : 0;
    }
    const int window = h->s->cfg.window; /* 0: linear attention alone */
    return n > window ? n - window : 0;
}

static still_status find_head(const still_session *s, int layer, int head, head_of *out,
                              still_error *err)
{
    const sti_config *g = &s->model->cfg;
    if (layer < 0 || layer >= g->layers)
        return sti_fail(err, STILL_E_ARG, "layer %d, the model has 0 to %d", layer,
                        g->layers - 1);
    *out = (head_of){.s = s,
                     .engine = sti_attn_engine_of(&s->cfg, layer),
                     .layer = sti_model_attn_layer(s->model, layer),
                     .index = head};
    out->heads = out->layer.kv_heads;
    if (out->engine == &sti_attn_hybrid) {
        const sti_hybrid_shape shape = sti_attn_hybrid_shape(&out->layer);
        out->set = sti_attn_hybrid_settings(&s->cfg, &out->layer);
        out->heads = sti_hybrid_selection_heads(&out->set, &shape);
    }
    if (head < 0 || head >= out->heads)
        return sti_fail(err, STILL_E_ARG, "head %d of layer %d, it has 0 to %d", head,
                        layer, out->heads - 1);
    out->start = window_start(out);
    return STILL_OK;
}

/* Where tokens are that have left the window and were not chosen. */
static still_place left_place(const head_of *h)
{
    if (h->engine == &sti_attn_softmax) return STILL_PLACE_GONE;
    if (h->engine == &sti_attn_hybrid && !h->set.has_linear) return STILL_PLACE_GONE;
    return STILL_PLACE_FOLDED;
}

/* ---- Lists --------------------------------------------------------------- */

static still_status copy(const still_session *s, void *to, const void *from,
                         size_t bytes, still_error *err)
{
    return bytes ? s->model->be->mem_move(s->model->dev, to, from, bytes, err)
                 : STILL_OK;
}

static float real_at(const void *real, size_t size, size_t i)
{
    return size == sizeof(double) ? (float)((const double *)real)[i]
                                  : ((const float *)real)[i];
}

/* Salient tokens of a head, at most as many as have left the window. */
static still_status count_salient(const head_of *h, int *n, still_error *err)
{
    *n = 0;
    if (h->engine != &sti_attn_hybrid) return STILL_OK;
    const sti_hybrid_state *st = &h->s->layer[h->layer.index].hybrid;
    int32_t count;
    STI_TRY(copy(h->s, &count, st->sal_count + h->index, sizeof count, err));
    const int capacity = sti_hybrid_list_of(&h->set, st, h->index).capacity;
    if (count > capacity) count = capacity;
    *n = count < 0 ? 0 : count > h->start ? h->start : count;
    return STILL_OK;
}

/* Scores of the window, if they are known before a chunk leaves it. work: room for 2C
 * numbers of the state. */
static still_status window_scores(const head_of *h, void *work, float *score,
                                  still_error *err)
{
    const sti_hybrid_state *st = &h->s->layer[h->layer.index].hybrid;
    if (!st->win_score || h->set.select == 0 || sti_score_at(h->set.score)->retire)
        return STILL_OK;
    const size_t ring = 2 * (size_t)h->set.chunk, size = st->real_size;
    const char *from = (const char *)st->win_score + (size_t)h->index * ring * size;
    STI_TRY(copy(h->s, work, from, ring * size, err));
    for (int j = h->start; j < h->s->length; j++)
        score[j] = real_at(work, size, (size_t)j % ring);
    return STILL_OK;
}

/* The salient list of a head, n tokens. work: room for n numbers of the state, and for n
 * positions behind them. */
static still_status salient_tokens(const head_of *h, int n, void *work, uint8_t *place,
                                   float *score, still_error *err)
{
    const sti_hybrid_state *st = &h->s->layer[h->layer.index].hybrid;
    const size_t first = sti_hybrid_list_of(&h->set, st, h->index).first,
                 size = st->real_size, count = (size_t)n;
    int32_t *position = (int32_t *)((char *)work + count * size);
    STI_TRY(copy(h->s, work, (const char *)st->sal_score + first * size, count * size,
                 err));
    STI_TRY(copy(h->s, position, st->sal_pos + first, count * sizeof *position, err));
    for (size_t i = 0; i < count; i++) {
        if (position[i] < 0 || position[i] >= h->start) continue;
        if (place) place[position[i]] = STILL_PLACE_SALIENT;
        if (score) score[position[i]] = real_at(work, size, i);
    }
    return STILL_OK;
}

static still_status read_lists(const head_of *h, int salient, uint8_t *place,
                               float *score, still_error *err)
{
    if (h->engine != &sti_attn_hybrid) return STILL_OK;
    const size_t ring = 2 * (size_t)h->set.chunk, n = (size_t)salient;
    const size_t bytes =
        (ring > n ? ring : n) * sizeof(double) + n * sizeof(int32_t) + 1;
    void *work = sti_alloc(1, bytes);
    if (!work) return sti_fail_memory(err, "a list of tokens", bytes);
    still_status st = score ? window_scores(h, work, score, err) : STILL_OK;
    if (st == STILL_OK && salient > 0)
        st = salient_tokens(h, salient, work, place, score, err);
    free(work);
    return st;
}

still_status still_session_kept(const still_session *s, int layer, int head,
                                uint8_t *place, float *score, still_kept *out,
                                still_error *err)
{
    head_of h;
    int salient;
    STI_TRY(find_head(s, layer, head, &h, err));
    STI_TRY(count_salient(&h, &salient, err));
    const still_place left = left_place(&h);
    for (int j = 0; place && j < s->length; j++)
        place[j] = (uint8_t)(j < h.start ? left : STILL_PLACE_WINDOW);
    for (int j = 0; score && j < s->length; j++) score[j] = NAN;
    if (place || score) STI_TRY(read_lists(&h, salient, place, score, err));
    if (!out) return STILL_OK;
    *out = (still_kept){.heads = h.heads};
    if (h.engine == &sti_attn_hybrid && h.set.select > 0)
        out->cap = sti_hybrid_cap(&h.set, head);
    out->count[STILL_PLACE_WINDOW] = s->length - h.start;
    out->count[STILL_PLACE_SALIENT] = salient;
    out->count[left] = h.start - salient;
    return STILL_OK;
}

/* ---- Bytes --------------------------------------------------------------- */

size_t sti_session_salient_bytes(const sti_hybrid_settings *set,
                                 const sti_hybrid_state *st, int D)
{
    const size_t as_window = (size_t)D * st->kv_size, groups = sti_salient_groups(D);
    const int kb = set->key_bits, vb = set->value_bits;
    const size_t key =
        kb ? sti_salient_low(kb, D) + sti_salient_high(kb, D) + groups * 2 : as_window;
    const size_t value =
        vb ? sti_salient_low(vb, D) + sti_salient_high(vb, D) + groups * 4 : as_window;
    return key + value + st->real_size + sizeof *st->sal_pos + (st->sal_far ? 1 : 0);
}

/* What the tokens fill of one layer's memory, which is `all` bytes: of a hybrid layer
 * everything but the free slots of its window and its lists. */
static still_status used_bytes(const still_session *s, int layer, size_t all,
                               size_t *out, still_error *err)
{
    head_of h;
    STI_TRY(find_head(s, layer, 0, &h, err));
    const sti_attn_memory *m = &s->layer[layer];
    *out = all;
    if (h.engine == &sti_attn_softmax) {
        const size_t capacity = (size_t)m->softmax.capacity, n = (size_t)s->length;
        *out = n < capacity ? all / capacity * n : all;
    } else if (h.engine == &sti_attn_hybrid) {
        const sti_hybrid_state *st = &m->hybrid;
        const size_t D = (size_t)h.layer.head_dim, G = (size_t)h.layer.kv_heads,
                     S = (size_t)h.heads,
                     slot = sti_session_salient_bytes(&h.set, st, (int)D);
        const size_t token =
            2 * G * D * st->kv_size + S * st->real_size * (st->win_received ? 2 : 1);
        if (h.set.has_window)
            *out -= token * (size_t)(2 * h.set.chunk - (s->length - h.start));
        for (int i = 0; i < h.heads; i++) {
            int n;
            h.index = i;
            STI_TRY(count_salient(&h, &n, err));
            *out -= slot * (size_t)(sti_hybrid_list_of(&h.set, st, i).capacity - n);
        }
    }
    return STILL_OK;
}

still_status still_session_held(const still_session *s, still_held *out,
                                still_error *err)
{
    const still_model *m = s->model;
    still_held held = {.bytes = s->state_bytes};
    sti_attn_config plain = s->cfg;
    plain.ctx = s->length;
    sti_carve softmax = {0};
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_layer layer = sti_model_attn_layer(m, l);
        sti_attn_memory unused;
        sti_carve own = {0};
        size_t used;
        sti_attn_engine_of(&s->cfg, l)
            ->carve_memory(m->be, &s->cfg, &layer, &own, &unused);
        STI_TRY(used_bytes(s, l, own.used, &used, err));
        held.used += used;
        sti_attn_softmax.carve_memory(m->be, &plain, &layer, &softmax, &unused);
    }
    held.softmax = softmax.used;
    *out = held;
    return STILL_OK;
}
