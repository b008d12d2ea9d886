/* hybrid.c - the hybrid operator for sessions on the GPU: which form runs what.
 *
 * Sessions that get a token or a few take steps together. Those that get more go,
 * together too, through the chunk-parallel form, or, where it does not take their
 * settings, through one step after the other. */
#include <math.h>

#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/step/step.h"

enum {
    FEW_TOKENS = 4,      /* so few are stepped rather than made chunks of */
    MOST_SESSIONS = 512, /* of one launch */
    SLOT_LISTS = 3,      /* see sti_cuda_table */
    SLOT_SESSIONS = 4,
    SLOT_POSITIONS = 5,
    SLOT_FREQUENCIES = 6
};

still_status sti_cuda_hybrid_lists(sti_dev *dev, const sti_hybrid_settings *set,
                                   sti_cuda_hybrid_params *h, still_error *err)
{
    STI_TRY(sti_cuda_score_check(set->score, err));
    if (!set->uneven) return STILL_OK;
    int32_t first[STI_UNEVEN_HEADS_MAX + 1] = {0};
    for (int i = 0; i < h->S; i++) first[i + 1] = first[i] + set->head_cap[i];
    const void *lists;
    STI_TRY(sti_cuda_table(dev, SLOT_LISTS, first, (size_t)(h->S + 1) * sizeof *first,
                           &lists, err));
    h->lists = lists;
    h->head_cap = set->head_cap;
    return STILL_OK;
}

sti_cuda_hybrid_params sti_cuda_hybrid_params_of(const sti_hybrid_settings *set,
                                                 const sti_hybrid_shape *shape,
                                                 const sti_hybrid_in *in,
                                                 size_t kv_size)
{
    const int S = sti_hybrid_selection_heads(set, shape);
    return (sti_cuda_hybrid_params){.H = shape->H,
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
                                    .key_bits = set->key_bits,
                                    .value_bits = set->value_bits,
                                    .score = (int)set->score,
                                    .la_scale = (int)set->la_scale,
                                    .map = (int)set->map,
                                    .per_head = set->per_head,
                                    .has_window = set->has_window,
                                    .has_linear = set->has_linear,
                                    .norm_preserved = set->norm_preserved,
                                    .gate = set->gate,
                                    .window_factor = set->window_factor,
                                    .raw_features =
                                        set->feature_positions == STI_FEATURES_NONE,
                                    .interleaved = in->interleaved,
                                    .unrotated = in->unrotated,
                                    .half_kv = kv_size == 2,
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

static sti_cuda_hybrid_params params_of(const sti_hybrid_args *a)
{
    return sti_cuda_hybrid_params_of(a->set, &a->shape, &a->in, a->state->kv_size);
}

/* The same with what has to be brought to the device. */
static still_status params_on_device(sti_dev *dev, const sti_hybrid_args *a,
                                     sti_cuda_hybrid_params *out, still_error *err)
{
    *out = params_of(a);
    STI_TRY(sti_cuda_hybrid_lists(dev, a->set, out, err));
    if (!a->in.inv_freq) return STILL_OK;
    const void *freq;
    STI_TRY(sti_cuda_table(dev, SLOT_FREQUENCIES, a->in.inv_freq,
                           (size_t)(out->D / 2) * sizeof(float), &freq, err));
    out->inv_freq = freq;
    return STILL_OK;
}

sti_cuda_hybrid_session sti_cuda_hybrid_session_of(const sti_hybrid_args *a,
                                                   const int32_t *pos)
{
    const sti_hybrid_state *st = a->state;
    return (sti_cuda_hybrid_session){.q = a->in.q,
                                     .k = a->in.k,
                                     .v = a->in.v,
                                     .gate = a->in.gate_logit,
                                     .q_raw = a->in.unrotated ? a->in.q : a->in.q_raw,
                                     .y = a->y,
                                     .pos = pos,
                                     .T = a->T,
                                     .capacity = st->sal_capacity,
                                     .win_k = st->win_k,
                                     .win_v = st->win_v,
                                     .win_score = st->win_score,
                                     .win_received = st->win_received,
                                     .sal_k = st->sal_k,
                                     .sal_v = st->sal_v,
                                     .sal_k_high = st->sal_k_high,
                                     .sal_v_high = st->sal_v_high,
                                     .sal_k_scale = st->sal_k_scale,
                                     .sal_v_scale = st->sal_v_scale,
                                     .sal_score = st->sal_score,
                                     .sal_pos = st->sal_pos,
                                     .sal_far = st->sal_far,
                                     .sal_count = st->sal_count,
                                     .lin_s = st->lin_s,
                                     .lin_z = st->lin_z,
                                     .comp_s = st->comp_s,
                                     .comp_z = st->comp_z,
                                     .folded = st->folded};
}

static bool begins_chunk(const sti_hybrid_args *a, int t)
{
    return t < a->T && (a->state->pos + t) % a->set->chunk == 0;
}

/* Steps of up to MOST_SESSIONS sessions, as many as the longest has tokens. */
static still_status step_sessions(sti_dev *dev, const sti_cuda_hybrid_params *h,
                                  const sti_hybrid_args *const *a, int n,
                                  const int32_t *row_of_first, still_error *err)
{
    sti_cuda_hybrid_session session[MOST_SESSIONS];
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
        session[i] = sti_cuda_hybrid_session_of(a[i], (const int32_t *)positions +
                                                          (pos ? row_of_first[i] : i));
        if (a[i]->T > longest) longest = a[i]->T;
    }
    STI_TRY(sti_cuda_table(dev, SLOT_SESSIONS, session, (size_t)n * sizeof *session,
                           &table, err));
    /* As much as any layer needs: if there is too little, the first one fails and no
     * state has changed. */
    size_t bytes = sti_cuda_hybrid_step_scratch(dev, h, n);
    if (bytes < (size_t)n * dev->step_scratch) bytes = (size_t)n * dev->step_scratch;
    void *scratch;
    STI_TRY(sti_cuda_scratch(dev, bytes, &scratch, err));
    for (int t = 0; t < longest; t++) {
        bool retires = false;
        for (int i = 0; h->has_window && i < n; i++)
            retires = retires || begins_chunk(a[i], t);
        if (retires) STI_TRY(sti_cuda_hybrid_retire(dev, h, table, n, t, scratch, err));
        /* A pass begins with a copy, and only its first step of a session may find that
         * nothing since then has written to the state. */
        const bool settled = pos && t == 0 && !retires;
        STI_TRY(sti_cuda_hybrid_step(dev, h, table, n, t, settled, scratch, err));
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

static still_status run_steps(sti_dev *dev, const sti_cuda_hybrid_params *h, queue *q,
                              still_error *err)
{
    const int n = q->n;
    q->n = 0;
    return n > 0 ? step_sessions(dev, h, q->a, n, q->row, err) : STILL_OK;
}

static still_status run_chunks(sti_dev *dev, const sti_cuda_hybrid_params *h, queue *q,
                               still_error *err)
{
    sti_cuda_hybrid_session session[MOST_SESSIONS];
    int64_t pos[MOST_SESSIONS];
    const int n = q->n;
    for (int i = 0; i < n; i++) {
        session[i] = sti_cuda_hybrid_session_of(q->a[i], NULL);
        pos[i] = q->a[i]->state->pos;
    }
    q->n = 0;
    return n > 0 ? sti_cuda_hybrid_chunk_run(dev, h, session, pos, n, err) : STILL_OK;
}

/* Steps apply RoPE themselves; chunks take rotated rows. */
bool sti_cuda_hybrid_ropes(const sti_hybrid_args *a, int n)
{
    if (n <= 0) return false;
    const sti_cuda_hybrid_params h = params_of(a);
    const bool chunks = sti_cuda_hybrid_chunk_supported(&h);
    for (int i = 0; i < n; i++)
        if (chunks && a[i].T > FEW_TOKENS) return false;
    return sti_cuda_hybrid_step_ropes(&h);
}

still_status sti_cuda_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                             still_error *err)
{
    if (n <= 0) return STILL_OK;
    sti_cuda_hybrid_params h;
    STI_TRY(params_on_device(dev, a, &h, err));
    const bool chunks = sti_cuda_hybrid_chunk_supported(&h);
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

/* Of a session's step, and of prompts of so many rows. */
static size_t scratch_of(const sti_dev *dev, const sti_cuda_hybrid_params *h, int rows)
{
    const size_t step = sti_cuda_hybrid_step_scratch(dev, h, 1);
    const size_t chunks =
        sti_cuda_hybrid_chunk_supported(h) ? sti_cuda_hybrid_chunk_scratch(h, rows) : 0;
    return chunks > step ? chunks : step;
}

still_status sti_cuda_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                     const sti_hybrid_shape *shape, int rows,
                                     still_error *err)
{
    sti_cuda_hybrid_params h;
    sti_hybrid_state st = {.kv_size = 2};
    const sti_hybrid_args a = {.set = set, .shape = *shape, .state = &st};
    STI_TRY(params_on_device(dev, &a, &h, err));
    const size_t step = sti_cuda_hybrid_step_scratch(dev, &h, 1);
    if (step > dev->step_scratch) dev->step_scratch = step;
    void *scratch;
    return sti_cuda_scratch(dev, scratch_of(dev, &h, rows), &scratch, err);
}

size_t sti_cuda_hybrid_bytes(const sti_dev *dev, const sti_hybrid_settings *set,
                             const sti_hybrid_shape *shape, int rows)
{
    sti_hybrid_state st = {.kv_size = 2};
    const sti_hybrid_args a = {.set = set, .shape = *shape, .state = &st};
    const sti_cuda_hybrid_params h = params_of(&a);
    return sti_cuda_bytes_with(dev, scratch_of(dev, &h, rows));
}
