/* keys_bwd.c - the gradient of folded keys and values (through STILL eq. 9 and 6): a
 * walk backwards in time over one selection head. See train.h.
 *
 * A token folded at chunk f is seen through the state by all queries of chunks c >= f,
 * so with dS_f = sum of a phi(q) (dn g)^T and dz_f = sum of a dden phi(q) over them
 *   dphi(k) = dS_f v + dz_f,  dv = dS_f^T phi(k)
 * and the map takes dphi(k) to k, W and the bias. Without a window a query also sees
 * part of its own span, pair by pair. */
#include "backend/cpu/hybrid/train/train.h"

enum { TILE = STI_TRAIN_TILE };

typedef struct keys {
    const sti_train *t;
    const sti_train_sums *s;
    int b, sel, g;
    sti_panel_map_scratch scratch;
    sti_panel_map map;
    int32_t *order;           /* [T]: tokens by the chunk that folds them, */
    int *start;               /* [n_spans + 1]: from start[c] on those of chunk c */
    float *dSt, *dS, *dz;     /* [D,Pp], [Pp,Dp], [Pp] */
    float *k, *v, *raw, *phi; /* [TILE, Dp Dp Fp Pp] of some tokens */
    float *dphi, *dk, *dv;    /* [TILE, Pp Dp Dp] of the same */
    float *trans;             /* [max(Dp,Pp), TILE] */
    float *w;                 /* [TILE,TILE] */
} keys;

static void carve(sti_carve *c, keys *x, const sti_train *t)
{
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t size = sizeof(float);
    x->scratch = sti_panel_map_carve(c, &t->a->shape, true);
    x->order = sti_carve_take(c, (size_t)t->a->T, sizeof *x->order);
    x->start = sti_carve_take(c, (size_t)t->n_spans + 1, sizeof *x->start);
    x->dSt = sti_carve_take(c, D * P, size);
    x->dS = sti_carve_take(c, P * D, size);
    x->dz = sti_carve_take(c, P, size);
    x->k = sti_carve_take(c, TILE * D, size);
    x->v = sti_carve_take(c, TILE * D, size);
    x->raw = sti_carve_take(c, TILE * F, size);
    x->phi = sti_carve_take(c, TILE * P, size);
    x->dphi = sti_carve_take(c, TILE * P, size);
    x->dk = sti_carve_take(c, TILE * D, size);
    x->dv = sti_carve_take(c, TILE * D, size);
    x->trans = sti_carve_take(c, TILE * (D > P ? D : P), size);
    x->w = sti_carve_take(c, TILE * TILE, size);
}

size_t sti_train_keys_bytes(const sti_train *t)
{
    keys x;
    sti_carve c = {0};
    carve(&c, &x, t);
    return c.used;
}

/* The chunk that folds token j; without a window, the span it belongs to. */
static int folded_at(const sti_train *t, int b, int sel, int j)
{
    return t->set->has_window ? sti_train_fold_of(t, b, sel, j) : j / t->span;
}

void sti_train_fold_order(const sti_train *t, int b, int sel, int32_t *order,
                          int *start)
{
    const int spans = t->n_spans, T = t->a->T;
    memset(start, 0, ((size_t)spans + 1) * sizeof *start);
    for (int j = 0; j < T; j++) {
        const int at = folded_at(t, b, sel, j);
        if (at < spans) start[at + 1]++;
    }
    for (int c = 0; c < spans; c++) start[c + 1] += start[c];
    for (int j = 0; j < T; j++) {
        const int at = folded_at(t, b, sel, j);
        if (at < spans) order[start[at]++] = j;
    }
    for (int c = spans; c > 0; c--) start[c] = start[c - 1];
    start[0] = 0;
}

static void load(const keys *x, const int32_t *token, int n)
{
    const sti_train *t = x->t;
    for (int i = 0; i < n; i++) {
        const size_t at = sti_train_row(t, x->b, token[i], t->G, x->g) * (size_t)t->D;
        const size_t to = (size_t)i * (size_t)t->Dp;
        const bool stored = sti_train_folds_stored(t, x->b, x->sel, token[i]);
        sti_panel_row(x->k + to, (stored ? t->stored_k : t->a->in.k) + at, t->D, t->Dp);
        sti_panel_row(x->v + to, (stored ? t->stored_v : t->a->in.v) + at, t->D, t->Dp);
    }
    sti_panel_map_rows(t->f, &x->map, x->k, n, x->raw, x->phi);
}

/* dphi = dS v + dz, dv = dS^T phi */
static void through_state(const keys *x, int n)
{
    const sti_train *t = x->t;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp;
    t->f->multiply(n, t->Pp, t->D, x->v, D, 1, x->dSt, P, x->dphi, P, false);
    for (int i = 0; i < n; i++)
        t->f->add_scaled(x->dphi + (size_t)i * P, x->dz, 1, t->Pp);
    t->f->multiply(n, t->Dp, t->Pp, x->phi, P, 1, x->dS, D, x->dv, D, false);
}

/* Pairs within a span of n tokens from `first` on, for query head h:
 *   dv_j += sum_t (phi(k_j).a phi(q_t)) dng_t
 *   dphi(k_j) += sum_t (v_j.dng_t + dden_t) a phi(q_t),   t >= j */
static void pair_by_pair(const keys *x, int first, int n, int h)
{
    const sti_train *t = x->t;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp;
    const int lanes = sti_panel_padded(n);
    const size_t at =
        ((size_t)x->b * (size_t)t->H + (size_t)h) * (size_t)t->a->T + (size_t)first;
    const float *aphi = x->s->aphi + at * P, *dng = x->s->dng + at * D;
    t->f->transpose(aphi, P, n, t->Pp, 1, x->trans, TILE);
    t->f->multiply(n, lanes, t->Pp, x->phi, P, 1, x->trans, TILE, x->w, TILE, false);
    sti_train_mask(x->w, n, 0, lanes, 0);
    t->f->multiply(n, t->Dp, n, x->w, TILE, 1, dng, D, x->dv, D, true);

    t->f->transpose(dng, D, n, t->D, 1, x->trans, TILE);
    t->f->multiply(n, lanes, t->D, x->v, D, 1, x->trans, TILE, x->w, TILE, false);
    for (int j = 0; j < n; j++)
        for (int i = 0; i < n; i++)
            x->w[(size_t)j * TILE + (size_t)i] += x->s->dden[at + (size_t)i];
    sti_train_mask(x->w, n, 0, lanes, 0);
    t->f->multiply(n, t->Pp, n, x->w, TILE, 1, aphi, P, x->dphi, P, true);
}

/* From dphi and dv to the tokens' own gradients and those of the map. */
static void write_gradients(const keys *x, const int32_t *token, int n)
{
    const sti_train *t = x->t;
    const sti_train_sums *s = x->s;
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp;
    const size_t head = (size_t)x->b * (size_t)t->S + (size_t)x->sel;
    memset(x->dk, 0, (size_t)n * D * sizeof *x->dk);
    s->bias_k[head] +=
        (double)t->f->features_backward(&x->map, x->k, x->raw, n, x->dphi, x->dk);
    if (s->map_k)
        t->f->multiply(t->D, t->Fp, n, x->k, 1, D, x->raw, F,
                       s->map_k + head * (size_t)t->D * F, F, true);
    if (s->dk_fold) sti_panel_map_back(t->f, &x->map, x->raw, n, x->dk);
    for (int i = 0; i < n; i++) {
        const size_t to = (head * (size_t)t->a->T + (size_t)token[i]) * D;
        const size_t from = (size_t)i * D, bytes = D * sizeof(float);
        if (s->dk_fold) memcpy(s->dk_fold + to, x->dk + from, bytes);
        if (s->dv_fold) memcpy(s->dv_fold + to, x->dv + from, bytes);
    }
}

/* Adds the queries of span c to dS and dz. */
static void add_queries(const keys *x, int c)
{
    const sti_train *t = x->t;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp;
    const int first = c * t->span, n = sti_train_span_end(t, c) - first;
    for (int h = x->sel * t->per_sel; h < (x->sel + 1) * t->per_sel; h++) {
        const size_t at =
            ((size_t)x->b * (size_t)t->H + (size_t)h) * (size_t)t->a->T + (size_t)first;
        const float *aphi = x->s->aphi + at * P;
        t->f->multiply(t->D, t->Pp, n, x->s->dng + at * D, 1, D, aphi, P, x->dSt, P,
                       true);
        t->f->multiply(1, t->Pp, n, x->s->dden + at, 0, 1, aphi, P, x->dz, P, true);
    }
}

void sti_train_keys_run(const sti_train *t, const sti_train_sums *s, int b, int sel,
                        void *memory)
{
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp, T = (size_t)t->a->T;
    const size_t size = sizeof(float);
    const size_t head = (size_t)b * (size_t)t->S + (size_t)sel;
    keys x = {.t = t, .s = s, .b = b, .sel = sel, .g = sel * t->per_sel / t->per_kv};
    sti_carve carved = {.base = memory};
    carve(&carved, &x, t);
    x.map = sti_train_map_k(t, sel, &x.scratch);
    memset(x.dSt, 0, D * P * size);
    memset(x.dz, 0, P * size);
    s->bias_k[head] = 0;
    if (s->map_k)
        memset(s->map_k + head * (size_t)t->D * (size_t)t->Fp, 0,
               (size_t)t->D * (size_t)t->Fp * size);
    if (s->dk_fold) memset(s->dk_fold + head * T * D, 0, T * D * size);
    if (s->dv_fold) memset(s->dv_fold + head * T * D, 0, T * D * size);

    sti_train_fold_order(t, b, sel, x.order, x.start);
    const bool window = t->set->has_window;
    /* Before the first fold queries see no state, and saved nothing. */
    for (int c = t->n_spans - 1; c >= 0 && x.start[c + 1] > 0; c--) {
        if (window) add_queries(&x, c);
        t->f->transpose(x.dSt, P, t->D, t->Pp, 1, x.dS, D);
        for (int i = x.start[c]; i < x.start[c + 1]; i += TILE) {
            const int n = x.start[c + 1] - i < TILE ? x.start[c + 1] - i : TILE;
            load(&x, x.order + i, n);
            through_state(&x, n);
            for (int h = sel * t->per_sel; !window && h < (sel + 1) * t->per_sel; h++)
                pair_by_pair(&x, x.order[i], n, h);
            write_gradients(&x, x.order + i, n);
        }
        if (!window) add_queries(&x, c);
    }
}
