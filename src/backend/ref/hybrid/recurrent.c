/* recurrent.c - the hybrid operator as a session runs it (STILL, recurrent form): token
 * by token, with an explicit state. This loop is the specification.
 *
 * At the first token of chunk c >= 2, before anything else, chunk c - 2 retires from
 * the window (eq. 8 and 9): its `select` best tokens join the salient cache, the others
 * are folded into the state; what the cache cannot keep is folded too. Then the token
 * enters the window, gets its score (eq. 5), and its output (eq. 10 and 11) is
 *   y = (sum_j w_j v_j + a (phi(q) s) * g) / (sum_j w_j + a phi(q).z)
 * over window and salient tokens j, w_j = exp(l_j - M). */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"

typedef struct session {
    const sti_hybrid_args64 *a;
    const sti_hybrid_settings *set;
    sti_hybrid_state *st;
    sti_ref_dims d;
    double *logit; /* [2C + sal_capacity] */
    const double *
        *value;    /* [2C + sal_capacity]: where the value of each softmax token is */
    double *phi;   /* [P] */
    double *key;   /* [D]: a key rotated for its features */
    double *q_far; /* [D]: the query as far keys see it */
    double *sal_k, *sal_v; /* [D], [sal_capacity, D]: quantized ones as numbers */
    sti_ref_candidate
        *candidate; /* [sal_capacity + C]: salient tokens, then a chunk's */
} session;

/* Slot of token j in rows of 2C. */
static size_t slot_of(const session *s, int64_t j)
{
    return (size_t)(j % (2 * (int64_t)s->set->chunk));
}

static size_t window_at(const session *s, int head, int64_t j)
{
    return (size_t)head * 2 * (size_t)s->set->chunk + slot_of(s, j);
}

static double *key_at(const session *s, int g, int64_t j)
{
    return (double *)s->st->win_k + window_at(s, g, j) * (size_t)s->d.D;
}

static double *value_at(const session *s, int g, int64_t j)
{
    return (double *)s->st->win_v + window_at(s, g, j) * (size_t)s->d.D;
}

/* ---- Salient tokens as they are stored ------------------------------------- */

static void narrow(const double *x, int D, float *y)
{
    for (int i = 0; i < D; i++) y[i] = (float)x[i];
}
static const double *widen(const float *x, int D, double *y)
{
    for (int i = 0; i < D; i++) y[i] = (double)x[i];
    return y;
}

static void store_key(const session *s, size_t slot, const double *key)
{
    const int D = s->d.D, bits = s->set->key_bits;
    float x[STI_HEAD_DIM_MAX];
    if (bits == 0) {
        memcpy((double *)s->st->sal_k + slot * (size_t)D, key, (size_t)D * sizeof *key);
        return;
    }
    narrow(key, D, x);
    sti_salient_pack_key(bits, x, D, sti_hybrid_salient_key(s->set, s->st, D, slot));
}

static void store_value(const session *s, size_t slot, const double *value)
{
    const int D = s->d.D, bits = s->set->value_bits;
    float x[STI_HEAD_DIM_MAX];
    if (bits == 0) {
        memcpy((double *)s->st->sal_v + slot * (size_t)D, value,
               (size_t)D * sizeof *value);
        return;
    }
    narrow(value, D, x);
    sti_salient_pack_value(bits, x, D,
                           sti_hybrid_salient_value(s->set, s->st, D, slot));
}

/* The stored key of a slot; valid until the next call. */
static const double *stored_key(const session *s, size_t slot)
{
    const int D = s->d.D, bits = s->set->key_bits;
    float x[STI_HEAD_DIM_MAX];
    if (bits == 0) return (double *)s->st->sal_k + slot * (size_t)D;
    sti_salient_unpack_key(bits, sti_hybrid_salient_key(s->set, s->st, D, slot), D, x);
    return widen(x, D, s->sal_k);
}

/* The stored value of a slot, as a number in row i of sal_v if it has to be unpacked. */
static const double *stored_value(const session *s, size_t slot, int i)
{
    const int D = s->d.D, bits = s->set->value_bits;
    float x[STI_HEAD_DIM_MAX];
    if (bits == 0) return (double *)s->st->sal_v + slot * (size_t)D;
    sti_salient_unpack_value(bits, sti_hybrid_salient_value(s->set, s->st, D, slot), D,
                             x);
    return widen(x, D, s->sal_v + (size_t)i * (size_t)D);
}

static void rope(const session *s, double *x, double position)
{
    sti_ref_rope(x, s->d.D, position, s->a->in.inv_freq, s->a->in.interleaved);
}

/* ---- Retiring: folding, selection, eviction -------------------------------- */

/* The key that features are made of. raw: it is kept as it was before RoPE. */
static const double *feature_key(session *s, const double *key, int64_t position,
                                 bool raw)
{
    const bool wants_raw = s->set->feature_positions == STI_FEATURES_NONE;
    if (raw == wants_raw) return key;
    memcpy(s->key, key, (size_t)s->d.D * sizeof *key);
    rope(s, s->key, (double)(wants_raw ? -position : position));
    return s->key;
}

/* STILL eq. 9, s and z: s += phi(k)^T v, z += phi(k). `position` is the token's, `now`
 * the query's. */
static void fold_into_state(session *s, int sel, const double *key, bool raw,
                            const double *value, int64_t position, int64_t now)
{
    const int D = s->d.D, P = s->d.P;
    sti_hybrid_state *st = s->st;
    st->folded[sel]++;
    if (s->a->trace.fold_chunk && s->set->has_window)
        s->a->trace.fold_chunk[position * s->d.S + sel] =
            (int32_t)(now / s->set->chunk);
    if (!s->set->has_linear) return;
    const sti_ref_map map = sti_ref_map_k(s->set, &s->a->shape, &s->a->in, sel);
    sti_ref_map_forward(&map, feature_key(s, key, position, raw), s->phi);
    double *S = (double *)st->lin_s + (size_t)sel * P * D;
    double *z = (double *)st->lin_z + (size_t)sel * P;
    for (int p = 0; p < P; p++) {
        z[p] += s->phi[p];
        sti_ref_axpy(s->phi[p], value, S + (size_t)p * D, D);
    }
}

/* Salient keys at distance position_cap or more from the last token of the chunk that
 * begins with query `now` are kept as they were before RoPE. */
static void make_far(session *s, int64_t now)
{
    const sti_hybrid_state *st = s->st;
    const int64_t last = now + s->set->chunk - 1;
    for (int sel = 0; sel < s->d.S; sel++)
        for (int i = 0; i < st->sal_count[sel]; i++) {
            const size_t at = sti_hybrid_list_of(s->set, st, sel).first + (size_t)i;
            if (st->sal_far[at] || last - st->sal_pos[at] < s->set->position_cap)
                continue;
            memcpy(s->key, stored_key(s, at), (size_t)s->d.D * sizeof *s->key);
            rope(s, s->key, -(double)st->sal_pos[at]);
            store_key(s, at, s->key);
            st->sal_far[at] = 1;
        }
}

/* The score a token retires with. */
static double final_score(const session *s, int sel, int64_t j)
{
    const sti_score *score = sti_score_at(s->set->score);
    const int64_t C = s->set->chunk;
    sti_score_end e = {.arrived = ((double *)s->st->win_score)[window_at(s, sel, j)],
                       .position = j};
    if (!score->retire) return e.arrived;
    if (score->received) {
        const int64_t queries = (j / C + 2) * C - 1 - j; /* after j, that saw it */
        const double sum = ((double *)s->st->win_received)[window_at(s, sel, j)];
        e.received = queries > 0 ? sum / (double)queries : 0;
    }
    if (score->likeness) {
        /* A chunk is in one piece: the window is a ring of two. */
        const double *chunk = key_at(s, sel * s->d.per_sel / s->d.per_kv, j / C * C);
        e.likeness =
            sti_ref_likeness(chunk, (int)C, (size_t)s->d.D, s->d.D, (int)(j % C));
    }
    return score->retire(&e);
}

/* STILL eq. 9, h: copies token j of the window into slot `at` of the salient cache,
 * where it is quantized. */
static void keep_salient(session *s, int sel, int at, int64_t j, double score)
{
    const sti_hybrid_state *st = s->st;
    const size_t slot = sti_hybrid_list_of(s->set, st, sel).first + (size_t)at;
    const int g = sti_ref_kv_of(&s->d, sel);
    store_key(s, slot, key_at(s, g, j));
    store_value(s, slot, value_at(s, g, j));
    ((double *)st->sal_score)[slot] = score;
    st->sal_pos[slot] = (int32_t)j;
    if (st->sal_far) st->sal_far[slot] = 0;
}

/* STILL eq. 8 and eq. 9: chunk [first, first + C) retires before query `now`, for one
 * selection head. The cache never shrinks (eviction stops at the cap), so that
 * newcomers take the slots of the evicted, and then those behind them. */
static void retire_chunk(session *s, int sel, int64_t first, int64_t now)
{
    sti_hybrid_state *st = s->st;
    const int C = s->set->chunk, g = sti_ref_kv_of(&s->d, sel);
    const int kept = st->sal_count[sel];
    const size_t base = sti_hybrid_list_of(s->set, st, sel).first;
    sti_ref_candidate *salient = s->candidate, *chunk = salient + kept;
    for (int i = 0; i < kept; i++)
        salient[i] = (sti_ref_candidate){((double *)st->sal_score)[base + (size_t)i],
                                         st->sal_pos[base + (size_t)i], true};
    for (int i = 0; i < C; i++)
        chunk[i] =
            (sti_ref_candidate){final_score(s, sel, first + i), first + i, false};

    sti_ref_select_top(chunk, C, s->set->select);
    sti_ref_evict_over_cap(s->candidate, kept + C, sti_hybrid_cap(s->set, sel));

    for (int i = 0; i < kept; i++) {
        const size_t slot = base + (size_t)i;
        if (!salient[i].stays)
            fold_into_state(s, sel, stored_key(s, slot),
                            st->sal_far && st->sal_far[slot], stored_value(s, slot, i),
                            salient[i].position, now);
    }
    for (int i = 0, at = 0; i < C; i++) {
        const int64_t j = chunk[i].position;
        if (!chunk[i].stays) {
            fold_into_state(s, sel, key_at(s, g, j), false, value_at(s, g, j), j, now);
            continue;
        }
        while (at < kept && salient[at].stays) at++;
        keep_salient(s, sel, at++, j, chunk[i].score);
        if (at > st->sal_count[sel]) st->sal_count[sel] = at;
    }
}

/* ---- Arriving ------------------------------------------------------------ */

/* Token t enters the window with its score; earlier tokens of the window receive the
 * weight it gives them. Row `row` of the call's arrays. */
static void arrive(session *s, int row, int64_t t)
{
    const sti_ref_dims *d = &s->d;
    const size_t D = (size_t)d->D;
    const sti_hybrid_in64 *in = &s->a->in;
    const sti_hybrid_trace64 *trace = &s->a->trace;
    double *score = s->st->win_score, *received = s->st->win_received;
    for (int g = 0; g < d->G; g++) {
        const size_t from = ((size_t)row * d->G + g) * D;
        memcpy(key_at(s, g, t), in->k + from, D * sizeof(double));
        memcpy(value_at(s, g, t), in->v + from, D * sizeof(double));
    }
    for (int sel = 0; sel < d->S; sel++) {
        score[window_at(s, sel, t)] = 0;
        if (received) received[window_at(s, sel, t)] = 0;
    }
    for (int h = 0; h < d->H; h++) {
        const int g = h / d->per_kv, sel = h / d->per_sel;
        const double *q = in->q + ((size_t)row * d->H + h) * D;

        const int64_t from = sti_ref_score_start(s->set, t); /* STILL eq. 2 */
        for (int64_t j = from; j <= t; j++)
            s->logit[j - from] = sti_ref_logit(q, key_at(s, g, j), d->D);
        const double one = sti_ref_score(s->set, s->logit, (int)(t - from) + 1,
                                         key_at(s, g, t), d->D, t, h);
        score[window_at(s, sel, t)] += one / d->per_sel;
        if (trace->score_head) trace->score_head[(size_t)row * d->H + h] = one;

        if (!received) continue;
        const int64_t first = sti_ref_window_start(s->set, t);
        for (int64_t j = first; j <= t; j++)
            s->logit[j - first] = sti_ref_logit(q, key_at(s, g, j), d->D);
        sti_ref_softmax(s->logit, (int)(t - first) + 1);
        for (int64_t j = first; j < t; j++)
            received[window_at(s, sel, j)] += s->logit[j - first] / d->per_sel;
    }
    if (trace->score)
        for (int sel = 0; sel < d->S; sel++)
            trace->score[(size_t)row * d->S + sel] = score[window_at(s, sel, t)];
}

/* ---- Output -------------------------------------------------------------- */

/* Logits and values of the softmax tokens of query head h; returns their number, at
 * most 2C + cap however long the text is (STILL eq. 12). A far key is seen at distance
 * position_cap: q_far = R(position_cap) q_raw. */
static int softmax_tokens(session *s, const double *q, const double *q_raw, int64_t t,
                          int h)
{
    const sti_ref_dims *d = &s->d;
    const sti_hybrid_state *st = s->st;
    if (!s->set->has_window) return 0;
    int n = 0;
    for (int64_t j = sti_ref_window_start(s->set, t); j <= t; j++, n++) {
        s->logit[n] = sti_ref_logit(q, key_at(s, h / d->per_kv, j), d->D);
        s->value[n] = value_at(s, h / d->per_kv, j);
    }
    if (st->sal_far) {
        memcpy(s->q_far, q_raw, (size_t)d->D * sizeof *q);
        rope(s, s->q_far, s->set->position_cap);
    }
    const int sel = h / d->per_sel;
    for (int i = 0; i < st->sal_count[sel]; i++, n++) {
        const size_t slot = sti_hybrid_list_of(s->set, st, sel).first + (size_t)i;
        const bool far = st->sal_far && st->sal_far[slot];
        s->logit[n] = sti_ref_logit(far ? s->q_far : q, stored_key(s, slot), d->D);
        s->value[n] = stored_value(s, slot, i);
    }
    return n;
}

/* STILL eq. 11, SA: N = sum w_j v_j, added to num [D]; returns D = sum w_j. */
static double softmax_branch(const session *s, int n, double factor, double shift,
                             double *num)
{
    double den = 0;
    for (int i = 0; i < n; i++) {
        const double w = factor * exp(s->logit[i] - shift);
        den += w;
        sti_ref_axpy(w, s->value[i], num, s->d.D);
    }
    return den;
}

/* STILL eq. 7; eq. 11, LA: N = a (phi(q) s) * g, added to num [D]; returns
 * D = a phi(q).z. x: what the features of the query are made of; at: its place in
 * gate_logit. */
static double linear_branch(session *s, int h, const double *x, size_t at, double a,
                            double *num)
{
    const int D = s->d.D, P = s->d.P, sel = h / s->d.per_sel;
    const sti_hybrid_in64 *in = &s->a->in;
    const double *S = (double *)s->st->lin_s + (size_t)sel * P * D;
    const double *z = (double *)s->st->lin_z + (size_t)sel * P;
    const sti_ref_map map = sti_ref_map_q(s->set, &s->a->shape, in, h);
    sti_ref_map_forward(&map, x, s->phi);
    for (int e = 0; e < D; e++) {
        double sum = 0;
        for (int p = 0; p < P; p++) sum += s->phi[p] * S[(size_t)p * D + e];
        num[e] += a * sum * sti_ref_gate(s->set, in, at + (size_t)e);
    }
    return a * sti_ref_dot(s->phi, z, P);
}

/* STILL eq. 10: y = (N_SA + N_LA) / (D_SA + D_LA), the sum of two branches of eq. 1. */
static void joint_output(session *s, int row, int64_t t, int h)
{
    const sti_hybrid_in64 *in = &s->a->in;
    const int D = s->d.D, sel = h / s->d.per_sel;
    const size_t at = ((size_t)row * s->d.H + h) * (size_t)D;
    const double *q = in->q + at, *q_raw = in->q_raw ? in->q_raw + at : NULL;
    double *y = s->a->y + at;

    const int n = softmax_tokens(s, q, q_raw, t, h);
    const bool folded = s->set->has_linear && s->st->folded[sel] > 0;
    const double alpha = sti_ref_alpha(s->set, in, h) +
                         sti_hybrid_state_shift(s->set, sel, s->st->folded[sel]);
    const double M = sti_ref_max(s->set, s->logit, n, alpha, folded);
    const sti_ref_scales scale = sti_ref_scales_of(s->set, M, alpha, folded);
    const double factor = sti_ref_window_factor(s->set, in, h);

    memset(y, 0, (size_t)D * sizeof *y);
    double den = s->set->den_eps + softmax_branch(s, n, factor, scale.shift, y);
    if (folded) {
        const bool raw = s->set->feature_positions == STI_FEATURES_NONE;
        den += linear_branch(s, h, raw ? q_raw : q, at, scale.linear, y);
    }
    for (int e = 0; e < D; e++) y[e] /= fmax(den, DBL_MIN);
}

static void step(session *s, int row)
{
    const int64_t t = s->st->pos, C = s->set->chunk;
    if (s->set->has_window) {
        if (t % C == 0 && t / C >= 2) {
            for (int sel = 0; sel < s->d.S; sel++) retire_chunk(s, sel, t - 2 * C, t);
            if (s->st->sal_far) make_far(s, t);
        }
        arrive(s, row, t);
    } else {
        for (int sel = 0; sel < s->d.S; sel++) {
            const int g = sti_ref_kv_of(&s->d, sel);
            const size_t at = ((size_t)row * s->d.G + g) * (size_t)s->d.D;
            fold_into_state(s, sel, s->a->in.k + at, false, s->a->in.v + at, t, t);
        }
    }
    for (int h = 0; h < s->d.H; h++) joint_output(s, row, t, h);
    if (s->a->trace.salient)
        for (int sel = 0; sel < s->d.S; sel++)
            s->a->trace.salient[(size_t)row * s->d.S + sel] = s->st->sal_count[sel];
    s->st->pos++;
}

still_status sti_ref_hybrid_forward(const sti_hybrid_args64 *a, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    if (a->set->cap == STI_CAP_NONE && a->state->pos + a->T > a->state->max_tokens)
        return sti_fail(err, STILL_E_LIMIT,
                        "hybrid attention without a cap: %lld tokens, the state was "
                        "made for %lld",
                        (long long)(a->state->pos + a->T),
                        (long long)a->state->max_tokens);
    if (sti_hybrid_needs_raw(a->set) && (!a->in.q_raw || !a->in.inv_freq))
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: capped positions or features without them, "
                        "but no queries before RoPE");
    session s = {.a = a, .set = a->set, .st = a->state};
    s.d = sti_ref_dims_of(a->set, &a->shape);
    const size_t tokens = 2 * (size_t)a->set->chunk + (size_t)a->state->sal_capacity;
    s.logit = sti_alloc(tokens, sizeof *s.logit);
    s.value = sti_alloc(tokens, sizeof *s.value);
    s.phi = sti_alloc((size_t)s.d.P, sizeof *s.phi);
    s.key = sti_alloc((size_t)s.d.D, sizeof *s.key);
    s.q_far = sti_alloc((size_t)s.d.D, sizeof *s.q_far);
    s.sal_k = sti_alloc((size_t)s.d.D, sizeof *s.sal_k);
    if (a->set->value_bits)
        s.sal_v = sti_alloc((size_t)a->state->sal_capacity + 1,
                            (size_t)s.d.D * sizeof *s.sal_v);
    s.candidate = sti_alloc((size_t)a->state->sal_capacity + (size_t)a->set->chunk,
                            sizeof *s.candidate);
    still_status status = STILL_OK;
    if (!s.logit || !s.value || !s.phi || !s.key || !s.q_far || !s.sal_k ||
        (a->set->value_bits && !s.sal_v) || !s.candidate)
        status = sti_fail_memory(err, "hybrid attention", tokens * sizeof *s.logit);
    for (int row = 0; status == STILL_OK && row < a->T; row++) step(&s, row);
    free(s.logit);
    free(s.value);
    free(s.phi);
    free(s.key);
    free(s.q_far);
    free(s.sal_k);
    free(s.sal_v);
    free(s.candidate);
    return status;
}
