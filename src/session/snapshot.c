/* snapshot.c - the past of a session, set aside in memory; chunk boundaries.
 *
 * All layers' memories lie in one range of bytes. A past is what its tokens have filled of
 * that range, packed: of a cache of keys the rows of its tokens, of a state everything. */
#include "session/snapshot.h"

#include <stdlib.h>
#include <string.h>

/* ---- Packing ------------------------------------------------------------- */

typedef struct walk {
    sti_past_fn each; /* NULL: only counts */
    void *user;
    size_t packed; /* bytes so far */
} walk;

static still_status visit(walk *w, size_t at, size_t n, still_error *err)
{
    if (w->each && n) STI_TRY(w->each(w->user, at, w->packed, n, err));
    w->packed += n;
    return STILL_OK;
}

/* The first rows of keys and values [G, capacity, D] each. */
static still_status visit_rows(walk *w, const still_session *s,
                               const sti_attn_layer *of, const sti_attn_memory *memory,
                               int rows, still_error *err)
{
    const size_t row = (size_t)of->head_dim *
                       (s->cfg.cache == STI_F32 ? sizeof(float) : sizeof(uint16_t));
    const size_t head = (size_t)memory->softmax.capacity * row;
    const unsigned char *const kv[] = {memory->softmax.k, memory->softmax.v};
    for (int i = 0; i < 2; i++)
        for (int g = 0; g < of->kv_heads; g++)
            STI_TRY(visit(w, (size_t)(kv[i] - s->state) + (size_t)g * head,
                          (size_t)rows * row, err));
    return STILL_OK;
}

still_status sti_session_past(const still_session *s, int length, sti_past_fn each,
                              void *user, size_t *bytes, still_error *err)
{
    const still_model *m = s->model;
    walk w = {each, user, 0};
    sti_carve c = {.base = s->state};
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_layer of = sti_model_attn_layer(m, l);
        const sti_attn_engine *e = sti_attn_engine_of(&s->cfg, l);
        const size_t before = c.used;
        sti_attn_memory memory;
        e->carve_memory(m->be, &s->cfg, &of, &c, &memory);
        if (e == &sti_attn_softmax && length < memory.softmax.capacity)
            STI_TRY(visit_rows(&w, s, &of, &memory, length, err));
        else
            STI_TRY(visit(&w, before, c.used - before, err));
    }
    STI_TRY(visit(&w, c.used, s->state_bytes - c.used, err)); /* the end of a line */
    *bytes = w.packed;
    return STILL_OK;
}

/* ---- In memory ----------------------------------------------------------- */

still_status still_session_fork(const still_session *s, still_session **out,
                                still_error *err)
{
    STI_TRY(sti_session_like(s, s->cfg.ctx, out, err));
    still_session *f = *out;
    memcpy(f->logits, s->logits, (size_t)s->model->cfg.vocab * sizeof(float));
    for (int i = 0; i < s->rollback; i++) f->boundary[i].length = s->boundary[i].length;
    f->length = s->length;
    f->written = s->written;
    f->has_logits = s->has_logits;
    /* The boundaries' states lie behind the session's own. */
    still_status st = s->model->be->mem_move(s->model->dev, f->memory.p, s->memory.p,
                                             s->memory.bytes, err);
    if (st != STILL_OK) {
        still_session_free(f);
        *out = NULL;
    }
    return st;
}

typedef struct transfer {
    const still_session *s;
    unsigned char *to;         /* packed; NULL: into the session, */
    const unsigned char *from; /* from here */
} transfer;

static still_status move(void *user, size_t at, size_t packed, size_t n,
                         still_error *err)
{
    const transfer *t = user;
    const still_model *m = t->s->model;
    unsigned char *state = t->s->state + at;
    return t->to ? m->be->mem_move(m->dev, t->to + packed, state, n, err)
                 : m->be->mem_move(m->dev, state, t->from + packed, n, err);
}

still_status sti_snapshot_new(const still_session *s, int length, still_snapshot **out,
                              still_error *err)
{
    *out = NULL;
    size_t past = 0;
    STI_TRY(sti_session_past(s, length, NULL, NULL, &past, err));
    still_snapshot *p = sti_alloc(1, sizeof *p);
    const size_t logits = (size_t)s->model->cfg.vocab * sizeof(float);
    if (!p || !sti_block_new(&p->memory, logits + past)) {
        free(p);
        return sti_fail_memory(err, "snapshot", logits + past);
    }
    p->length = length;
    p->model = s->model;
    p->whole_bytes = s->state_bytes;
    p->past_bytes = past;
    p->logits = p->memory.p;
    p->past = (unsigned char *)p->memory.p + logits;
    memcpy(p->settings, s->settings, sizeof p->settings);
    *out = p;
    return STILL_OK;
}

static still_status fill(still_snapshot *p, const still_session *s, still_error *err)
{
    size_t bytes;
    transfer t = {.s = s, .to = p->past};
    memcpy(p->logits, s->logits, (size_t)s->model->cfg.vocab * sizeof(float));
    p->length = s->length;
    p->has_logits = s->has_logits;
    return sti_session_past(s, s->length, move, &t, &bytes, err);
}

still_status still_session_snapshot(const still_session *s, still_snapshot **out,
                                    still_error *err)
{
    STI_TRY(sti_snapshot_new(s, s->length, out, err));
    const still_status st = fill(*out, s, err);
    if (st == STILL_OK) return STILL_OK;
    still_snapshot_free(*out);
    *out = NULL;
    return st;
}

still_status still_session_snapshot_again(const still_session *s, still_snapshot **p,
                                          still_error *err)
{
    size_t past = 0;
    if (*p) STI_TRY(sti_session_past(s, s->length, NULL, NULL, &past, err));
    if (*p && (*p)->model == s->model && (*p)->past_bytes == past &&
        (*p)->whole_bytes == s->state_bytes &&
        strcmp((*p)->settings, s->settings) == 0) {
        const still_status st = fill(*p, s, err);
        if (st == STILL_OK) return STILL_OK;
    }
    still_snapshot_free(*p);
    return still_session_snapshot(s, p, err);
}

void still_snapshot_free(still_snapshot *p)
{
    if (!p) return;
    sti_block_free(&p->memory);
    free(p);
}

size_t still_snapshot_bytes(const still_snapshot *p)
{
    return sizeof *p + p->memory.bytes;
}

size_t still_session_snapshot_bytes(const still_session *s)
{
    size_t past = 0;
    (void)sti_session_past(s, s->length, NULL, NULL, &past,
                           NULL); /* counting succeeds */
    return sizeof(still_snapshot) + (size_t)s->model->cfg.vocab * sizeof(float) + past;
}

int still_snapshot_length(const still_snapshot *p)
{
    return p->length;
}

/* Boundaries of the old past are dropped. */
still_status still_session_restore(still_session *s, const still_snapshot *p,
                                   still_error *err)
{
    size_t bytes;
    transfer t = {.s = s, .from = p->past};
    if (p->model != s->model || p->whole_bytes != s->state_bytes ||
        strcmp(p->settings, s->settings) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "the snapshot is of a session with another model, method, "
                        "settings or context");
    STI_TRY(sti_session_past(s, p->length, move, &t, &bytes, err));
    memcpy(s->logits, p->logits, (size_t)s->model->cfg.vocab * sizeof(float));
    for (int i = 0; i < s->rollback; i++) s->boundary[i].length = 0;
    s->length = p->length;
    s->has_logits = p->has_logits;
    sti_session_replaced(s);
    return sti_session_mark(s, p->length, err);
}

/* ---- Chunk boundaries ---------------------------------------------------- */

int sti_session_chunk(const still_session *s)
{
    return s->cfg.hybrid.chunk > 0 ? s->cfg.hybrid.chunk : s->cfg.batch;
}

still_status sti_session_mark(still_session *s, int length, still_error *err)
{
    if (s->rollback == 0 || sti_session_keeps_all(s) || length == 0 ||
        length % sti_session_chunk(s) != 0)
        return STILL_OK;
    sti_boundary *b = &s->boundary[length / sti_session_chunk(s) % s->rollback];
    STI_TRY(
        s->model->be->mem_move(s->model->dev, b->state, s->state, s->state_bytes, err));
    b->length = length;
    return STILL_OK;
}

/* The shortest length a cache of all keys can be cut to: rings of sliding-window layers
 * have already overwritten what was before the window and a batch. */
static int oldest_length(const still_session *s)
{
    const int end = s->written > s->length ? s->written : s->length;
    int oldest = 0;
    for (int l = 0; l < s->model->cfg.layers; l++) {
        int window = s->model->cfg.window[l], capacity = s->layer[l].softmax.capacity;
        if (capacity >= s->cfg.ctx) continue;
        int reach = end - (capacity - window);
        if (reach > oldest) oldest = reach;
    }
    return oldest;
}

still_status still_session_rollback(still_session *s, int length, int *at,
                                    still_error *err)
{
    if (length < 0 || length > s->length)
        return sti_fail(err, STILL_E_ARG, "cannot go back to %d tokens from %d", length,
                        s->length);
    if (length == 0) {
        still_session_reset(s);
        *at = 0;
        return STILL_OK;
    }
    if (sti_session_keeps_all(s)) {
        int oldest = oldest_length(s);
        if (length < oldest)
            return sti_fail(err, STILL_E_LIMIT,
                            "cannot go back to %d tokens: a sliding-window layer keeps "
                            "what %d or more need",
                            length, oldest);
    } else {
        const sti_boundary *best = NULL;
        for (int i = 0; i < s->rollback; i++) {
            const sti_boundary *b = &s->boundary[i];
            if (b->length && b->length <= length && (!best || b->length > best->length))
                best = b;
        }
        if (!best)
            return sti_fail(
                err, STILL_E_LIMIT,
                "cannot go back to %d tokens: no chunk boundary at or before "
                "it is kept (%d are)",
                length, s->rollback);
        STI_TRY(s->model->be->mem_move(s->model->dev, s->state, best->state,
                                       s->state_bytes, err));
        length = best->length;
        for (int i = 0; i < s->rollback; i++)
            if (s->boundary[i].length > length) s->boundary[i].length = 0;
    }
    if (s->length > s->written) s->written = s->length;
    s->length = length;
    s->has_logits = false;
    sti_session_forget_ahead(s);
    *at = length;
    return STILL_OK;
}
