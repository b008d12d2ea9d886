/* walk.c - the walk of a head over its sequence: the keys that a span's queries see,
 * the linear state carried along, and the weights of a tile of queries. See train.h. */
#include <float.h>
#include <math.h>

#include "backend/cpu/hybrid/train/train.h"
#include "backend/cpu/kernels.h"

enum { TILE = STI_TRAIN_TILE };

/* ---- A call -------------------------------------------------------------- */

still_status sti_train_new(sti_train *t, const sti_dev *dev,
                           const sti_hybrid_parallel_args *a, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    if (a->B < 0 || a->T < 0 || (int64_t)a->B * a->T > INT32_MAX)
        return sti_fail(err, STILL_E_ARG, "hybrid attention: %d sequences of %d tokens",
                        a->B, a->T);
    if (sti_hybrid_needs_raw(a->set))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "hybrid attention: capped positions and features before RoPE "
                        "exist in sessions only, not for whole sequences");
    const sti_hybrid_shape *s = &a->shape;
    const int S = sti_hybrid_selection_heads(a->set, s);
    const int Fp = sti_panel_padded(s->F);
    const int span = a->set->has_window ? a->set->chunk : TILE;
    *t = (sti_train){
        .a = a,
        .set = a->set,
        .f = dev->k->panel,
        .H = s->H,
        .G = s->G,
        .D = s->D,
        .F = s->F,
        .S = S,
        .per_kv = s->H / s->G,
        .per_sel = s->H / S,
        .Dp = sti_panel_padded(s->D),
        .Fp = Fp,
        .Pp = a->set->map == STI_MAP_RELU ? Fp : 2 * Fp,
        .span = span,
        .n_spans = (int)(((int64_t)a->T + span - 1) / span),
        .scale = 1.0f / sqrtf((float)s->D),
        .stored_k = a->in.k,
        .stored_v = a->in.v,
    };
    return STILL_OK;
}

void sti_train_store_carve(sti_carve *c, sti_train *t)
{
    const size_t n = (size_t)t->a->B * (size_t)t->a->T * (size_t)t->G * (size_t)t->D;
    if (t->set->key_bits) t->rounded_k = sti_carve_take(c, n, sizeof(float));
    if (t->set->value_bits) t->rounded_v = sti_carve_take(c, n, sizeof(float));
}

static void store_work(void *v, int me, int workers)
{
    const sti_train *t = v;
    int64_t lo, hi;
    sti_split((int64_t)t->a->B * t->a->T * t->G, 1, me, workers, &lo, &hi);
    for (int64_t row = lo; row < hi; row++) {
        const size_t at = (size_t)row * (size_t)t->D;
        if (t->rounded_k)
            sti_salient_round_key(t->set->key_bits, t->a->in.k + at, t->D,
                                  t->rounded_k + at);
        if (t->rounded_v)
            sti_salient_round_value(t->set->value_bits, t->a->in.v + at, t->D,
                                    t->rounded_v + at);
    }
}

void sti_train_store(sti_train *t, const sti_dev *dev)
{
    if (!t->rounded_k && !t->rounded_v) return;
    sti_pool_run(dev->pool, store_work, t);
    if (t->rounded_k) t->stored_k = t->rounded_k;
    if (t->rounded_v) t->stored_v = t->rounded_v;
}

/* The most salient tokens a head ever has. left: how many are evicted at each chunk,
 * [n_spans]. */
static int most_salient(const sti_train *t, int b, int sel, int *left)
{
    memset(left, 0, (size_t)t->n_spans * sizeof *left);
    int now = 0, most = 0;
    for (int c = 2; c < t->n_spans; c++) {
        const int first = (c - 2) * t->span;
        for (int j = first; j < first + t->span; j++) {
            const int fold = sti_train_fold_of(t, b, sel, j);
            now += fold > c;
            if (fold > c && fold < t->n_spans) left[fold]++;
        }
        now -= left[c];
        if (now > most) most = now;
    }
    return most;
}

still_status sti_train_count_keys(sti_train *t, sti_dev *dev, still_error *err)
{
    t->most_keys = t->a->T < TILE ? t->a->T : TILE;
    if (!t->set->has_window) return STILL_OK;
    STI_TRY(sti_cpu_need_bytes(dev, (size_t)t->n_spans * sizeof(int), err));
    int most = 0;
    for (int b = 0; b < t->a->B; b++)
        for (int sel = 0; sel < t->S; sel++) {
            const int n = most_salient(t, b, sel, dev->scratch.p);
            if (n > most) most = n;
        }
    const int64_t window = 2 * (int64_t)t->span;
    t->most_keys = most + (int)(window < t->a->T ? window : t->a->T);
    return STILL_OK;
}

/* ---- The walk ------------------------------------------------------------ */

void sti_train_walk_carve(sti_carve *c, sti_train_walk *w, const sti_train *t,
                          bool backward)
{
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t keys = (size_t)t->most_keys, size = sizeof(float);
    w->scratch_q = sti_panel_map_carve(c, &t->a->shape, backward);
    w->scratch_k = sti_panel_map_carve(c, &t->a->shape, false);
    w->K = sti_carve_take(c, keys * D, size);
    w->V = sti_carve_take(c, keys * D, size);
    w->token = sti_carve_take(c, keys, sizeof *w->token);
    w->S = sti_carve_take(c, P * D, size);
    w->z = sti_carve_take(c, P, size);
    w->fold_k = sti_carve_take(c, TILE * D, size);
    w->fold_v = sti_carve_take(c, TILE * D, size);
    w->fold_raw = sti_carve_take(c, TILE * F, size);
    w->fold_phi = sti_carve_take(c, TILE * P, size);
}

sti_panel_map sti_train_map_q(const sti_train *t, int h,
                              const sti_panel_map_scratch *scratch)
{
    const sti_hybrid_in *in = &t->a->in;
    const size_t map = (size_t)t->D * (size_t)t->F;
    return sti_panel_map_of(t->f, t->set, &t->a->shape,
                            in->map_q ? in->map_q + (size_t)h * map : NULL,
                            in->bias_q ? in->bias_q[h] : 0, scratch);
}

sti_panel_map sti_train_map_k(const sti_train *t, int sel,
                              const sti_panel_map_scratch *scratch)
{
    const sti_hybrid_in *in = &t->a->in;
    const size_t map = (size_t)t->D * (size_t)t->F;
    return sti_panel_map_of(t->f, t->set, &t->a->shape,
                            in->map_k ? in->map_k + (size_t)sel * map : NULL,
                            in->bias_k ? in->bias_k[sel] : 0, scratch);
}

void sti_train_walk_begin(sti_train_walk *w, const sti_train *t, int b, int h)
{
    w->t = t;
    w->b = b;
    w->h = h;
    w->g = h / t->per_kv;
    w->sel = h / t->per_sel;
    w->c = -1;
    w->n_salient = w->own = w->n_fold = 0;
    w->folded = false;
    if (!t->set->has_linear) return;
    w->map_q = sti_train_map_q(t, h, &w->scratch_q);
    w->map_k = sti_train_map_k(t, w->sel, &w->scratch_k);
    memset(w->S, 0, (size_t)t->Pp * (size_t)t->Dp * sizeof *w->S);
    memset(w->z, 0, (size_t)t->Pp * sizeof *w->z);
}

/* Token j as the window has it, or as the salient cache does. */
static void load_kv(const sti_train_walk *w, int j, bool stored, float *k, float *v)
{
    const sti_train *t = w->t;
    const size_t at = sti_train_row(t, w->b, j, t->G, w->g) * (size_t)t->D;
    sti_panel_row(k, (stored ? t->stored_k : t->a->in.k) + at, t->D, t->Dp);
    sti_panel_row(v, (stored ? t->stored_v : t->a->in.v) + at, t->D, t->Dp);
}

static void map_retired(sti_train_walk *w)
{
    sti_panel_map_rows(w->t->f, &w->map_k, w->fold_k, w->n_fold, w->fold_raw,
                       w->fold_phi);
}

/* STILL eq. 9, s and z: S += phi^T v, z += phi^T 1 over the tokens to be folded. */
static void fold_into_state(sti_train_walk *w)
{
    static const float one = 1;
    const sti_train *t = w->t;
    const size_t P = (size_t)t->Pp, D = (size_t)t->Dp;
    t->f->multiply(t->Pp, t->Dp, w->n_fold, w->fold_phi, 1, P, w->fold_v, D, w->S, D,
                   true);
    t->f->multiply(1, t->Pp, w->n_fold, &one, 0, 0, w->fold_phi, P, w->z, P, true);
    w->folded = w->folded || w->n_fold > 0;
    w->n_fold = 0;
}

static void fold(sti_train_walk *w, int j)
{
    if (!w->t->set->has_linear) return;
    const size_t at = (size_t)w->n_fold++ * (size_t)w->t->Dp;
    load_kv(w, j, sti_train_folds_stored(w->t, w->b, w->sel, j), w->fold_k + at,
            w->fold_v + at);
    if (w->n_fold < TILE) return;
    map_retired(w);
    fold_into_state(w);
}

static void load_row(sti_train_walk *w, int row, int j, bool salient)
{
    const size_t at = (size_t)row * (size_t)w->t->Dp;
    load_kv(w, j, salient, w->K + at, w->V + at);
    w->token[row] = j;
}

void sti_train_walk_to(sti_train_walk *w, int c)
{
    const sti_train *t = w->t;
    const int first = c * t->span, end = sti_train_span_end(t, c);
    const size_t D = (size_t)t->Dp;
    w->c = c;
    if (!t->set->has_window) {
        fold_into_state(w); /* the span before */
        for (w->n_fold = 0; w->n_fold < end - first; w->n_fold++) {
            const size_t at = (size_t)w->n_fold * D;
            load_kv(w, first + w->n_fold, false, w->fold_k + at, w->fold_v + at);
        }
        map_retired(w);
        return;
    }
    /* STILL eq. 8, 9: evicted tokens, then chunk c - 2. Rows only ever move up. */
    int kept = 0;
    for (int i = 0; i < w->n_salient; i++) {
        if (sti_train_fold_of(t, w->b, w->sel, w->token[i]) <= c)
            fold(w, w->token[i]);
        else
            w->token[kept++] = w->token[i];
    }
    for (int j = first - 2 * t->span; c >= 2 && j < first - t->span; j++) {
        if (sti_train_fold_of(t, w->b, w->sel, j) <= c)
            fold(w, j);
        else
            w->token[kept++] = j;
    }
    if (w->n_fold > 0) {
        map_retired(w);
        fold_into_state(w);
    }
    w->n_salient = kept;
    for (int i = 0; i < kept; i++) load_row(w, i, w->token[i], true);
    int row = kept;
    for (int j = c > 0 ? first - t->span : first; j < end; j++)
        load_row(w, row++, j, false);
    w->own = row - (end - first);
}

/* ---- A tile of queries --------------------------------------------------- */

void sti_train_tile_carve(sti_carve *c, sti_train_tile *r, const sti_train *t)
{
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t size = sizeof(float);
    r->q = sti_carve_take(c, TILE * D, size);
    r->trans = sti_carve_take(c, TILE * (D > P ? D : P), size);
    r->w = sti_carve_take(c, TILE * (size_t)t->most_keys, size);
    r->raw = sti_carve_take(c, TILE * F, size);
    r->phi = sti_carve_take(c, TILE * P, size);
    r->lin = sti_carve_take(c, TILE * D, size);
    r->gate = sti_carve_take(c, TILE * D, size);
    float **lane[] = {&r->M, &r->shift, &r->a, &r->den, &r->sum};
    for (size_t i = 0; i < sizeof lane / sizeof *lane; i++)
        *lane[i] = sti_carve_take(c, TILE, size);
}

static float alpha_of(const sti_train *t, int h)
{
    return t->set->alpha && t->a->in.alpha ? t->a->in.alpha[h] : 0;
}

/* STILL eq. 11: M of each query, the shift of softmax weights and the weight a of LA:
 * exp(l - M) and exp(alpha - M); in window scaling exp(l - M) and exp(alpha), both
 * divided by exp(alpha) where that is above 1. */
static void scales(const sti_train_walk *w, sti_train_tile *r)
{
    const sti_train *t = w->t;
    const bool exact = t->set->la_scale == STI_SCALE_EXACT;
    const float alpha = alpha_of(t, w->h);
    for (int i = 0; i < r->lanes; i++) {
        if (exact && r->linear) r->M[i] = fmaxf(r->M[i], alpha);
        if (t->a->max_in && i < r->n)
            r->M[i] = t->a->max_in[sti_train_row(t, w->b, r->first + i, t->H, w->h)];
        r->shift[i] = r->M[i];
        r->a[i] = 0;
        if (!r->linear) continue;
        r->a[i] = expf(exact ? alpha - r->M[i] : fminf(alpha, 0));
        if (!exact) r->shift[i] += fmaxf(alpha, 0);
    }
}

/* Without a window: w = phi(k).phi(q) of the span's own tokens, which are folded before
 * the query's output; adds them to lin and to sum. */
static void own_weights(const sti_train_walk *w, sti_train_tile *r)
{
    const sti_train *t = w->t;
    const size_t P = (size_t)t->Pp, D = (size_t)t->Dp;
    r->keys = r->n;
    t->f->transpose(r->phi, P, r->n, t->Pp, 1, r->trans, TILE);
    t->f->multiply(r->keys, r->lanes, t->Pp, w->fold_phi, P, 1, r->trans, TILE, r->w,
                   TILE, false);
    sti_train_mask(r->w, r->keys, 0, r->lanes, 0);
    t->f->lane_sum(r->w, r->keys, TILE, r->lanes, r->sum);
    t->f->multiply(r->n, t->Dp, r->keys, r->w, 1, TILE, w->fold_v, D, r->lin, D, true);
}

/* STILL eq. 7; eq. 11, LA: phi(q), lin, the gate, and the linear term's part of den. */
static void linear_weights(const sti_train_walk *w, sti_train_tile *r)
{
    const sti_train *t = w->t;
    const size_t P = (size_t)t->Pp, D = (size_t)t->Dp;
    sti_panel_map_rows(t->f, &w->map_q, r->q, r->n, r->raw, r->phi);
    t->f->multiply(r->n, t->Dp, t->Pp, r->phi, P, 1, w->S, D, r->lin, D, false);
    memset(r->sum, 0, TILE * sizeof *r->sum);
    t->f->row_dots(r->phi, P, w->z, 0, r->n, t->Pp, r->sum);
    if (!t->set->has_window) own_weights(w, r);
    for (int i = 0; i < r->n; i++) r->den[i] += r->a[i] * r->sum[i];

    const float *logit = t->set->gate ? t->a->in.gate_logit : NULL;
    for (int i = 0; i < r->n; i++) {
        float *g = r->gate + (size_t)i * D;
        if (logit) {
            const size_t row = sti_train_row(t, w->b, r->first + i, t->H, w->h);
            sti_panel_row(g, logit + row * (size_t)t->D, t->D, t->Dp);
            t->f->gate(g, g, t->Dp);
        } else {
            for (int e = 0; e < t->Dp; e++) g[e] = 1;
        }
    }
}

/* STILL eq. 11, the weights of both branches; D_SA + D_LA of eq. 10. */
void sti_train_weights(const sti_train_walk *w, sti_train_tile *r, int first, int n)
{
    const sti_train *t = w->t;
    const bool window = t->set->has_window;
    const size_t D = (size_t)t->Dp;
    r->first = first;
    r->n = n;
    r->lanes = sti_panel_padded(n);
    r->linear = t->set->has_linear && (w->folded || !window);
    for (int i = 0; i < n; i++) {
        const size_t row = sti_train_row(t, w->b, first + i, t->H, w->h);
        sti_panel_row(r->q + (size_t)i * D, t->a->in.q + row * (size_t)t->D, t->D,
                      t->Dp);
    }
    for (int i = 0; i < TILE; i++) {
        r->M[i] = -INFINITY;
        r->den[i] = (float)t->set->den_eps;
    }
    if (window) {
        const int diag = w->own + first - w->c * t->span; /* row of the first query */
        r->keys = diag + n;
        t->f->transpose(r->q, D, n, t->D, t->scale, r->trans, TILE);
        t->f->multiply(r->keys, r->lanes, t->D, w->K, D, 1, r->trans, TILE, r->w, TILE,
                       false);
        sti_train_mask(r->w, r->keys, diag, r->lanes, -INFINITY);
        t->f->lane_max(r->w, r->keys, TILE, r->lanes, r->M);
    }
    scales(w, r);
    if (window)
        t->f->exp_shifted(r->w, r->keys, TILE, r->lanes, r->shift,
                          sti_train_window_factor(t, w->h), r->den);
    if (r->linear) linear_weights(w, r);
    for (int i = 0; i < TILE; i++) r->den[i] = fmaxf(r->den[i], FLT_MIN);
}
