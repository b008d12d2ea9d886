/* hybrid.c - the hybrid operator for sessions on the GPU: which form runs what.
 *
 * Sessions that get a token or a few take steps together. Those that get more go,
 * together too, through the chunk-parallel form, or, where it does not take their
 * settings, through one step after the other. */
#include <math.h>

#include "backend/cuda/hybrid/chunk/chunk.h"

enum {
    FEW_TOKENS = 4,      /* so few are stepped rather than made chunks of */
    MOST_SESSIONS = 512, /* of one launch */
    SLOT_SESSIONS = 4,
    SLOT_POSITIONS = 5,
    SLOT_FREQUENCIES = 6
};

sti_cuda_shape sti_cuda_shape_of(const sti_hybrid_args *a)
{
    const sti_hybrid_settings *set = a->set;
    const sti_hybrid_shape *shape = &a->shape;
    const sti_hybrid_in *in = &a->in;
    const int S = sti_hybrid_selectors(set, shape);
    return (sti_cuda_shape){.H = shape->H,
                            .G = shape->G,
                            .D = shape->D,
                            .F = shape->F,
                            .S = S,
                            .P = sti_hybrid_features(set, shape),
                            .C = set->chunk,
                            .group = shape->H / S,
                            .per_kv = shape->H / shape->G,
                            .select = set->select,
                            .cap = set->cap,
                            .score = (int)set->score,
                            .la_scale = (int)set->la_scale,
                            .map = (int)set->map,
                            .per_head = set->per_head,
                            .has_window = set->has_window,
                            .has_linear = set->has_linear,
                            .norm_preserved = set->norm_preserved,
                            .gate = set->gate,
                            .window_factor = set->window_factor,
                            .raw_features = set->feature_positions == STI_FEATURES_NONE,
                            .interleaved = in->interleaved,
                            .unrotated = in->unrotated,
                            .half_kv = a->state->kv_size == 2,
                            .position_cap = set->position_cap,
                            .state_cap = set->state_cap,
                            .feature_floor = (float)set->feature_floor,
                            .den_eps = (float)set->den_eps,
                            .eps = (float)set->eps,
                            .scale = 1 / sqrtf((float)shape->D),
                            .seed = set->seed,
                            .layer = set->layer,
                            .alpha = set->alpha ? in->alpha : NULL,
                            .window_logit = in->window_logit,
                            .map_q = in->map_q,
                            .map_k = in->map_k,
                            .bias_q = in->bias_q,
                            .bias_k = in->bias_k};
}

/* The same with what has to be brought to the device. */
static still_status describe(sti_dev *dev, const sti_hybrid_args *a,
                             sti_cuda_shape *out, still_error *err)
{
    if (a->set->uneven)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "cuda hybrid attention: caps that differ between the heads of a "
            "layer run on the cpu: use --backend cpu");
    *out = sti_cuda_shape_of(a);
    if (!a->in.inv_freq) return STILL_OK;
    const void *freq;
    STI_TRY(sti_cuda_table(dev, SLOT_FREQUENCIES, a->in.inv_freq,
                           (size_t)(out->D / 2) * sizeof(float), &freq, err));
    out->inv_freq = freq;
    return STILL_OK;
}

sti_cuda_session sti_cuda_session_of(const sti_hybrid_args *a, const int32_t *pos)
{
    const sti_hybrid_state *st = a->state;
    return (sti_cuda_session){.q = a->in.q,
                              .k = a->in.k,
                              .v = a->in.v,
                              .gate = a->in.gate_logit,
                              .q_raw = a->in.unrotated ? a->in.q : a->in.q_raw,
                              .y = a->y,
                              .pos = pos,
                              .T = a->T,
                              .room = st->room,
                              .win_k = st->win_k,
                              .win_v = st->win_v,
                              .win_score = st->win_score,
                              .win_received = st->win_received,
                              .sal_k = st->sal_k,
                              .sal_v = st->sal_v,
                              .sal_score = st->sal_score,
                              .sal_pos = st->sal_pos,
                              .sal_far = st->sal_far,
                              .sal_count = st->sal_count,
                              .lin_s = st->lin_s,
                              .lin_z = st->lin_z,
                              .low_s = st->low_s,
                              .low_z = st->low_z,
                              .folded = st->folded};
}

static bool begins_chunk(const sti_hybrid_args *a, int t)
{
    return t < a->T && (a->state->pos + t) % a->set->chunk == 0;
}

/* Steps of up to MOST_SESSIONS sessions, as many as the longest has tokens. */
static still_status step_some(sti_dev *dev, const sti_cuda_shape *h,
                              const sti_hybrid_args *const *a, int n,
                              const int32_t *row_of_first, still_error *err)
{
    sti_cuda_session session[MOST_SESSIONS];
    int32_t first[MOST_SESSIONS];
    const int32_t *pos = sti_cuda_pass_positions(dev);
    const void *table, *positions = pos;
    if (!pos) {
        for (int i = 0; i < n; i++) first[i] = (int32_t)a[i]->state->pos;
        STI_TRY(sti_cuda_table(dev, SLOT_POSITIONS, first, (size_t)n * sizeof *first,
                               &positions, err));
    }
    int longest = 0;
    for (int i = 0; i < n; i++) {
        session[i] = sti_cuda_session_of(a[i], (const int32_t *)positions +
                                                   (pos ? row_of_first[i] : i));
        if (a[i]->T > longest) longest = a[i]->T;
    }
    STI_TRY(sti_cuda_table(dev, SLOT_SESSIONS, session, (size_t)n * sizeof *session,
                           &table, err));
    /* As much as any layer will ask for: if there is too little, the first one fails,
     * and no state has changed. */
    size_t bytes = sti_cuda_step_room(dev, h, n);
    if (bytes < (size_t)n * dev->step_room) bytes = (size_t)n * dev->step_room;
    void *room;
    STI_TRY(sti_cuda_scratch(dev, bytes, &room, err));
    for (int t = 0; t < longest; t++) {
        bool leaves = false;
        for (int i = 0; h->has_window && i < n; i++)
            leaves = leaves || begins_chunk(a[i], t);
        if (leaves) STI_TRY(sti_cuda_hybrid_leave(dev, h, table, n, t, room, err));
        /* A pass begins with a copy, and only its first step of a session may find that
         * nothing since then has written to the state. */
        const bool settled = pos && t == 0 && !leaves;
        STI_TRY(sti_cuda_hybrid_step(dev, h, table, n, t, settled, room, err));
    }
    return STILL_OK;
}

/* Sessions that wait for one of the two forms, and the row of each one's first token.
 */
typedef struct queue {
    const sti_hybrid_args *a[MOST_SESSIONS];
    int32_t row[MOST_SESSIONS];
    int n;
} queue;

static still_status run_steps(sti_dev *dev, const sti_cuda_shape *h, queue *q,
                              still_error *err)
{
    const int n = q->n;
    q->n = 0;
    return n > 0 ? step_some(dev, h, q->a, n, q->row, err) : STILL_OK;
}

static still_status run_chunks(sti_dev *dev, const sti_cuda_shape *h, queue *q,
                               still_error *err)
{
    sti_cuda_session session[MOST_SESSIONS];
    int64_t pos[MOST_SESSIONS];
    const int n = q->n;
    for (int i = 0; i < n; i++) {
        session[i] = sti_cuda_session_of(q->a[i], NULL);
        pos[i] = q->a[i]->state->pos;
    }
    q->n = 0;
    return n > 0 ? sti_cuda_chunks_run(dev, h, session, pos, n, err) : STILL_OK;
}

/* Steps turn rows; chunks are made of rows that have turned. */
bool sti_cuda_hybrid_turns(const sti_hybrid_args *a, int n)
{
    if (n <= 0) return false;
    const sti_cuda_shape h = sti_cuda_shape_of(a);
    const bool chunks = sti_cuda_chunks_supported(&h);
    for (int i = 0; i < n; i++)
        if (chunks && a[i].T > FEW_TOKENS) return false;
    return sti_cuda_step_turns(&h);
}

still_status sti_cuda_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                             still_error *err)
{
    if (n <= 0) return STILL_OK;
    sti_cuda_shape h;
    STI_TRY(describe(dev, a, &h, err));
    const bool chunks = sti_cuda_chunks_supported(&h);
    queue few = {.n = 0}, many = {.n = 0};
    for (int i = 0, at = 0; i < n; at += a[i++].T) {
        if (a[i].T <= 0) continue;
        queue *q = chunks && a[i].T > FEW_TOKENS ? &many : &few;
        q->row[q->n] = at;
        q->a[q->n++] = &a[i];
        if (few.n == MOST_SESSIONS) STI_TRY(run_steps(dev, &h, &few, err));
        if (many.n == MOST_SESSIONS) STI_TRY(run_chunks(dev, &h, &many, err));
    }
    STI_TRY(run_steps(dev, &h, &few, err));
    STI_TRY(run_chunks(dev, &h, &many, err));
    for (int i = 0; i < n; i++) a[i].state->pos += a[i].T;
    return STILL_OK;
}

still_status sti_cuda_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                     const sti_hybrid_shape *shape, int rows,
                                     still_error *err)
{
    sti_cuda_shape h;
    sti_hybrid_state st = {.kv_size = 2};
    const sti_hybrid_args a = {.set = set, .shape = *shape, .state = &st};
    STI_TRY(describe(dev, &a, &h, err));
    size_t bytes = sti_cuda_step_room(dev, &h, 1);
    if (bytes > dev->step_room) dev->step_room = bytes;
    if (sti_cuda_chunks_supported(&h) && sti_cuda_chunks_room(&h, rows) > bytes)
        bytes = sti_cuda_chunks_room(&h, rows);
    void *room;
    return sti_cuda_scratch(dev, bytes, &room, err);
}
