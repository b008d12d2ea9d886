/* recurrent.c - the hybrid operator as a session runs it: token by token, with
 * an explicit state. This loop is the specification.
 *
 * At the first token of chunk c >= 2, before anything else, chunk c - 2 leaves the
 * window: its `select` best tokens join the salient cache, the others are folded; what
 * the cache cannot keep is folded too. Then the token enters the window, gets its
 * score, and
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
    double *logit;        /* [2C + room] */
    const double **value; /* [2C + room]: where the value of each softmax token is */
    double *phi;          /* [P] */
    double *key;          /* [D]: a key turned for its features */
    double *q_far;        /* [D]: the query as far keys see it */
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

/* First token of the window of query t. */
static int64_t window_start(const session *s, int64_t t)
{
    const int64_t C = s->set->chunk;
    return t / C > 0 ? (t / C - 1) * C : 0;
}

/* ---- Folding ------------------------------------------------------------- */

/* The key that features are made of. raw: it is kept as it was before RoPE. */
static const double *feature_key(session *s, const double *key, int64_t position,
                                 bool raw)
{
    const bool wants_raw = s->set->feature_positions == STI_FEATURES_NONE;
    if (raw == wants_raw) return key;
    memcpy(s->key, key, (size_t)s->d.D * sizeof *key);
    sti_ref_turn(s->key, s->d.D, (double)(wants_raw ? -position : position), &s->a->in);
    return s->key;
}

/* s += phi(k) v^T, z += phi(k). `position` is the token's, `now` the query's. */
static void fold(session *s, int sel, const double *key, bool raw, const double *value,
                 int64_t position, int64_t now)
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

/* Puts a token into the salient cache of `sel`; if it is full, the worst of them all,
 * which may be the newcomer, is folded. */
static void keep(session *s, int sel, int64_t j, double score, int64_t now)
{
    sti_hybrid_state *st = s->st;
    const sti_hybrid_list list = sti_hybrid_list_of(s->set, st, sel);
    const size_t D = (size_t)s->d.D, first = list.first;
    const int g = sti_ref_kv_of(&s->d, sel);
    double *scores = (double *)st->sal_score + first;
    int32_t *positions = st->sal_pos + first;
    uint8_t *far = st->sal_far ? st->sal_far + first : NULL;
    double *keys = (double *)st->sal_k + first * D,
           *values = (double *)st->sal_v + first * D;

    size_t at = (size_t)st->sal_count[sel];
    if (at == (size_t)list.room) {
        size_t worst = 0;
        for (size_t i = 1; i < at; i++)
            if (sti_ref_better(scores[worst], positions[worst], scores[i],
                               positions[i]))
                worst = i;
        if (sti_ref_better(scores[worst], positions[worst], score, j)) {
            fold(s, sel, key_at(s, g, j), false, value_at(s, g, j), j, now);
            return;
        }
        fold(s, sel, keys + worst * D, far && far[worst], values + worst * D,
             positions[worst], now);
        at = worst;
    } else {
        st->sal_count[sel]++;
    }
    memcpy(keys + at * D, key_at(s, g, j), D * sizeof(double));
    memcpy(values + at * D, value_at(s, g, j), D * sizeof(double));
    scores[at] = score;
    positions[at] = (int32_t)j;
    if (far) far[at] = 0;
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
            sti_ref_turn((double *)st->sal_k + at * (size_t)s->d.D, s->d.D,
                         -(double)st->sal_pos[at], &s->a->in);
            st->sal_far[at] = 1;
        }
}

/* The score a token leaves the window with. */
static double final_score(const session *s, int sel, int64_t j)
{
    const sti_score *score = sti_score_at(s->set->score);
    const int64_t C = s->set->chunk;
    sti_score_end e = {.arrived = ((double *)s->st->win_score)[window_at(s, sel, j)],
                       .position = j};
    if (!score->leave) return e.arrived;
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
    return score->leave(&e);
}

/* Chunk [first, first + C) leaves before query `now`. */
static void leave(session *s, int64_t first, int64_t now)
{
    const int64_t end = first + s->set->chunk;
    for (int sel = 0; sel < s->d.S; sel++) {
        const int g = sti_ref_kv_of(&s->d, sel);
        for (int64_t i = first; i < end; i++) {
            const double score = final_score(s, sel, i);
            int better = 0;
            for (int64_t j = first; j < end; j++)
                better += sti_ref_better(final_score(s, sel, j), j, score, i);
            if (better < s->set->select &&
                sti_hybrid_list_of(s->set, s->st, sel).room > 0)
                keep(s, sel, i, score, now);
            else
                fold(s, sel, key_at(s, g, i), false, value_at(s, g, i), i, now);
        }
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

        const int64_t last_c = t - s->set->chunk + 1 > 0 ? t - s->set->chunk + 1 : 0;
        for (int64_t j = last_c; j <= t; j++)
            s->logit[j - last_c] = sti_ref_logit(q, key_at(s, g, j), d->D);
        const double one = sti_ref_score(s->set, s->logit, (int)(t - last_c) + 1,
                                         key_at(s, g, t), d->D, t, h);
        score[window_at(s, sel, t)] += one / d->per_sel;
        if (trace->score_head) trace->score_head[(size_t)row * d->H + h] = one;

        if (!received) continue;
        const int64_t first = window_start(s, t);
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

/* Logits and values of the softmax tokens of query head h; returns their number. A far
 * key is seen at distance position_cap: q_far = R(position_cap) q_raw. */
static int softmax_tokens(session *s, const double *q, const double *q_raw, int64_t t,
                          int h)
{
    const sti_ref_dims *d = &s->d;
    const sti_hybrid_state *st = s->st;
    if (!s->set->has_window) return 0;
    int n = 0;
    for (int64_t j = window_start(s, t); j <= t; j++, n++) {
        s->logit[n] = sti_ref_logit(q, key_at(s, h / d->per_kv, j), d->D);
        s->value[n] = value_at(s, h / d->per_kv, j);
    }
    if (st->sal_far) {
        memcpy(s->q_far, q_raw, (size_t)d->D * sizeof *q);
        sti_ref_turn(s->q_far, d->D, s->set->position_cap, &s->a->in);
    }
    const int sel = h / d->per_sel;
    for (int i = 0; i < st->sal_count[sel]; i++, n++) {
        const size_t slot = sti_hybrid_list_of(s->set, st, sel).first + (size_t)i;
        const size_t at = slot * (size_t)d->D;
        const bool far = st->sal_far && st->sal_far[slot];
        s->logit[n] = sti_ref_logit(far ? s->q_far : q, (double *)st->sal_k + at, d->D);
        s->value[n] = (double *)st->sal_v + at;
    }
    return n;
}

static void output(session *s, int row, int64_t t, int h)
{
    const sti_ref_dims *d = &s->d;
    const sti_hybrid_in64 *in = &s->a->in;
    const int D = d->D, P = d->P, sel = h / d->per_sel;
    const size_t at = ((size_t)row * d->H + h) * (size_t)D;
    const double *q = in->q + at, *q_raw = in->q_raw ? in->q_raw + at : NULL;
    double *y = s->a->y + at;

    const int n = softmax_tokens(s, q, q_raw, t, h);
    const bool folded = s->set->has_linear && s->st->folded[sel] > 0;
    const double alpha = sti_ref_alpha(s->set, in, h) +
                         sti_hybrid_state_shift(s->set, sel, s->st->folded[sel]);
    const double M = sti_ref_max(s->set, s->logit, n, alpha, folded);
    const sti_ref_scales scale = sti_ref_scales_of(s->set, M, alpha, folded);
    const double factor = sti_ref_window_factor(s->set, in, h);

    double den = s->set->den_eps;
    memset(y, 0, (size_t)D * sizeof *y);
    for (int i = 0; i < n; i++) {
        const double w = factor * exp(s->logit[i] - scale.shift);
        den += w;
        sti_ref_axpy(w, s->value[i], y, D);
    }
    if (folded) {
        const double *S = (double *)s->st->lin_s + (size_t)sel * P * D;
        const double *z = (double *)s->st->lin_z + (size_t)sel * P;
        const sti_ref_map map = sti_ref_map_q(s->set, &s->a->shape, in, h);
        const bool raw = s->set->feature_positions == STI_FEATURES_NONE;
        sti_ref_map_forward(&map, raw ? q_raw : q, s->phi);
        den += scale.linear * sti_ref_dot(s->phi, z, P);
        for (int e = 0; e < D; e++) {
            double sum = 0;
            for (int p = 0; p < P; p++) sum += s->phi[p] * S[(size_t)p * D + e];
            y[e] += scale.linear * sum * sti_ref_gate(s->set, in, at + (size_t)e);
        }
    }
    for (int e = 0; e < D; e++) y[e] /= fmax(den, DBL_MIN);
}

static void step(session *s, int row)
{
    const int64_t t = s->st->pos, C = s->set->chunk;
    if (s->set->has_window) {
        if (t % C == 0 && t / C >= 2) {
            leave(s, t - 2 * C, t);
            if (s->st->sal_far) make_far(s, t);
        }
        arrive(s, row, t);
    } else {
        for (int sel = 0; sel < s->d.S; sel++) {
            const int g = sti_ref_kv_of(&s->d, sel);
            const size_t at = ((size_t)row * s->d.G + g) * (size_t)s->d.D;
            fold(s, sel, s->a->in.k + at, false, s->a->in.v + at, t, t);
        }
    }
    for (int h = 0; h < s->d.H; h++) output(s, row, t, h);
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
    if (sti_hybrid_rotates(a->set) && (!a->in.q_raw || !a->in.inv_freq))
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: capped positions or features without them, "
                        "but no queries before RoPE");
    session s = {.a = a, .set = a->set, .st = a->state};
    s.d = sti_ref_dims_of(a->set, &a->shape);
    const size_t tokens = 2 * (size_t)a->set->chunk + (size_t)a->state->room;
    s.logit = sti_alloc(tokens, sizeof *s.logit);
    s.value = sti_alloc(tokens, sizeof *s.value);
    s.phi = sti_alloc((size_t)s.d.P, sizeof *s.phi);
    s.key = sti_alloc((size_t)s.d.D, sizeof *s.key);
    s.q_far = sti_alloc((size_t)s.d.D, sizeof *s.q_far);
    still_status status = STILL_OK;
    if (!s.logit || !s.value || !s.phi || !s.key || !s.q_far)
        status = sti_fail_memory(err, "hybrid attention", tokens * sizeof *s.logit);
    for (int row = 0; status == STILL_OK && row < a->T; row++) step(&s, row);
    free(s.logit);
    free(s.value);
    free(s.phi);
    free(s.key);
    free(s.q_far);
    return status;
}
