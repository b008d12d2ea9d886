/* retire.c - a chunk leaves the window: its best tokens join the salient list; all
 * others, and what the list cannot keep, are folded into the linear state (STILL eq. 8
 * and 9).
 *
 * Each step is a task for all workers, so that three heads keep two of them busy:
 * selection and eviction, split over heads; the features of the tokens to fold, split
 * over tokens; their product with the values, split over rows of the state; the others
 * join the list, split over tokens. Tokens are folded in order: those of the chunk by position, then the
 * evicted by slot. Only the product of up to STI_HYB_KEYS of them is added to the
 * state: a long stream is few additions, and its state nearly as exact as that of a short
 * one. A state without a window, to which tokens are added one by one, is compensated
 * (Kahan). */
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid/salient.h"

/* ---- Order --------------------------------------------------------------- */

/* Higher scores first, equal ones by position: a total order. */
static uint64_t rank_of(float score, int32_t position)
{
    uint32_t bits;
    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, sizeof bits);
    bits ^= bits >> 31 ? UINT32_MAX : UINT32_C(1) << 31; /* ordered as the floats are */
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)position);
}

static void swap(sti_hyb_entry *a, sti_hyb_entry *b)
{
    const sti_hyb_entry t = *a;
    *a = *b;
    *b = t;
}

/* Moves the middle one of the first, the last and the one halfway to the front. */
static void pick_pivot(sti_hyb_entry *e, int n)
{
    sti_hyb_entry *mid = &e[n / 2], *last = &e[n - 1];
    if (mid->rank > last->rank) swap(mid, last);
    if (e->rank > last->rank) swap(e, last);
    if (mid->rank > e->rank) swap(mid, e);
}

/* Moves the k best of n to the front, in no order. */
static void top_first(sti_hyb_entry *e, int n, int k)
{
    while (k > 0 && k < n) {
        pick_pivot(e, n);
        const uint64_t pivot = e[0].rank;
        int better = 0;               /* e[1 .. better] are */
        for (int i = 1; i < n; i++) { /* no branch: it could not be predicted */
            swap(&e[i], &e[better + 1]);
            better += e[better + 1].rank > pivot;
        }
        swap(&e[0], &e[better]);
        if (k <= better) {
            n = better;
        } else {
            e += better + 1;
            n -= better + 1;
            k -= better + 1;
        }
    }
}

/* ---- Features ------------------------------------------------------------ */

/* RoPE: rotates a key to `position`, or back by -position. */
static void rotate(const sti_hyb *h, const sti_hybrid_in *in, float *key,
                   int64_t position)
{
    h->rows->rope(key, (int)position, in->inv_freq, 1, h->D, in->interleaved);
}

/* STILL eq. 6. */
void sti_hyb_map(const sti_hyb *h, const sti_hybrid_settings *set, const float *W,
                 float bias, const float *x, int ldx, int n, int step, float *u,
                 float *phi)
{
    const float smallest_norm = 1e-6f;
    const int D = h->D, F = h->F, ldu = step * h->ldu;
    if (W) h->k->product(n, D, F, x, ldx, W, F, u, ldu); /* STILL eq. 6, first line */
    sti_hybrid_features_args f = {.kind = set->map,
                                  .F = F,
                                  .scale = 1,
                                  .bias = set->map == STI_MAP_RELU ? bias : 0,
                                  .floor = (float)set->feature_floor};
    for (int i = 0; i < n; i++, x += ldx, u += ldu, phi += step * h->ldp) {
        if (!W) memcpy(u, x, (size_t)F * sizeof *u);
        /* The identity keeps the norm by itself. */
        if (set->norm_preserved && (W || F < D)) {
            const float norm = sqrtf(h->k->dot(u, u, F));
            f.scale = sqrtf(h->k->dot(x, x, D)) / fmaxf(norm, smallest_norm);
        }
        h->k->features(&f, u, phi);
    }
}

/* ---- Selection and eviction ---------------------------------------------- */

/* The chunk that leaves when chunk c begins: its first token, and that token's slot in
 * the window. */
static int64_t first_token(const sti_hyb *h, int64_t c)
{
    return (c - 2) * h->C;
}
static int first_slot(const sti_hyb *h, int64_t c)
{
    return (int)(first_token(h, c) % (2 * h->C));
}

/* likeness [C] of the keys of the chunk at `ring`: see sti_score_end. */
static void compare_keys(const sti_hyb *h, const sti_hybrid_state *st, int g, int ring,
                         float *likeness)
{
    const int D = h->D;
    float stored[STI_ATTN_MAX_D], x[STI_ATTN_MAX_D], mean[STI_ATTN_MAX_D] = {0};
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < h->C; i++) {
            sti_hyb_take_key(h, st, sti_hyb_window_key(h, st, g, ring + i), stored);
            h->k->widen(x, stored, st->kv_size == 2, D);
            const float norm = sqrtf(h->k->dot(x, x, D));
            const float per = norm > 0 ? 1 / norm : 0;
            if (pass == 1)
                likeness[i] = h->k->dot(x, mean, D) * per;
            else
                for (int d = 0; d < D; d++) mean[d] += x[d] * per;
        }
    const float norm = sqrtf(h->k->dot(mean, mean, D));
    for (int i = 0; i < h->C; i++) likeness[i] = norm > 0 ? likeness[i] / norm : 0;
}

/* Token i of the chunk that leaves when chunk c begins. */
static float final_score(const sti_hyb *h, const sti_hybrid_args *a, int sel, int64_t c,
                         int i)
{
    const sti_score *score = sti_score_at(a->set->score);
    const size_t at = (size_t)sel * 2 * h->C + (size_t)(first_slot(h, c) + i);
    const float arrived = ((const float *)a->state->win_score)[at];
    if (!score->retire) return arrived;
    sti_score_end e = {.arrived = arrived, .position = first_token(h, c) + i};
    if (score->received) {
        const int queries = 2 * h->C - 1 - i; /* that came after the token and saw it */
        const double sum = ((const float *)a->state->win_received)[at];
        e.received = queries > 0 ? sum / queries : 0;
    }
    if (score->likeness) e.likeness = h->retiring[sel].likeness[i];
    return (float)score->retire(&e);
}

/* STILL eq. 8: marks the tokens of the chunk that stay, and those of the list that
 * go. */
static void select_tokens(const sti_hyb *h, const sti_hybrid_args *a,
                          const sti_hyb_list *l, int64_t c)
{
    const sti_hybrid_state *st = a->state;
    const sti_hyb_retiring *to = &h->retiring[l->sel];
    const int count = *l->count, wanted = l->capacity > 0 ? a->set->select : 0;
    int stay = wanted;
    sti_hyb_entry *e = to->entry;
    memset(to->stays, 0, (size_t)h->C);
    if (a->set->cap >= 0) memset(to->evicted, 0, (size_t)count);
    if (wanted == 0) return;
    for (int i = 0; i < h->C; i++)
        e[i] = (sti_hyb_entry){
            rank_of(final_score(h, a, l->sel, c, i), (int32_t)first_token(h, c) + i),
            -1 - i};
    top_first(e, h->C, wanted);
    if (count + wanted > l->capacity) {
        const float *score = (const float *)st->sal_score + l->first;
        const int32_t *position = st->sal_pos + l->first;
        for (int i = 0; i < count; i++)
            e[wanted + i] = (sti_hyb_entry){rank_of(score[i], position[i]), i};
        stay = l->capacity;
        top_first(e, count + wanted, stay);
        for (int i = stay; i < count + wanted; i++)
            if (e[i].at >= 0) to->evicted[e[i].at] = 1;
    }
    for (int i = 0; i < stay; i++)
        if (e[i].at < 0) to->stays[-1 - e[i].at] = 1;
}

/* A token of the retiring chunk, as the window stores it. */
typedef struct window_token {
    sti_hyb_key key;
    const void *value;
} window_token;

static window_token token_at(const sti_hyb_list *l, int64_t c, int i)
{
    const sti_hyb *h = l->h;
    const sti_hybrid_state *st = l->st;
    const int g = sti_hyb_kv_of(h, l->sel), slot = first_slot(h, c) + i;
    const size_t value = (size_t)g * 2 * h->C + (size_t)slot;
    return (window_token){sti_hyb_window_key(h, st, g, slot),
                          sti_hyb_row(h, st, st->win_v, value)};
}

/* The position of a candidate; at: as in sti_hyb_entry. */
static int64_t position_of(const sti_hyb_list *l, int64_t c, int at)
{
    return at < 0 ? first_token(l->h, c) - 1 - at
                  : l->st->sal_pos[l->first + (size_t)at];
}

/* Its key and value [D] as numbers; whether the key is without RoPE. */
static bool read_candidate(const sti_hyb_list *l, int64_t c, int at, float *key,
                           float *value)
{
    if (at >= 0) {
        sti_hyb_read_slot(l, at, key, value);
        return sti_hyb_is_far(l, at);
    }
    const sti_hyb *h = l->h;
    const bool half = l->st->kv_size == 2;
    const window_token from = token_at(l, c, -1 - at);
    float stored[STI_ATTN_MAX_D];
    sti_hyb_take_key(h, l->st, from.key, stored);
    h->k->widen(key, stored, half, h->D);
    h->k->widen(value, from.value, half, h->D);
    return false;
}

/* Lists what is folded: at most C tokens, since no more are evicted than join. */
static void select_and_evict(const sti_hyb *h, const sti_hybrid_args *a, int sel,
                             int64_t c)
{
    const sti_hybrid_state *st = a->state;
    const sti_hyb_list l = sti_hyb_list_of(h, st, sel);
    sti_hyb_retiring *to = &h->retiring[sel];
    if (sti_score_at(a->set->score)->likeness)
        compare_keys(h, st, sti_hyb_kv_of(h, sel), first_slot(h, c), to->likeness);
    select_tokens(h, a, &l, c);
    int n = 0;
    for (int i = 0; i < h->C; i++)
        if (!to->stays[i]) to->fold[n++] = -1 - i;
    const int tokens = n;
    for (int i = 0; a->set->cap >= 0 && i < *l.count; i++)
        if (to->evicted[i]) to->fold[n++] = i;
    to->n_fold = n;
    to->n_evicted = n - tokens;
    st->folded[sel] += n;
    for (int i = 0; a->trace.fold_chunk && i < n; i++)
        a->trace.fold_chunk[position_of(&l, c, to->fold[i]) * h->S + sel] = (int32_t)c;
}

/* Slots of the evicted tokens, which those that join take first. */
static int32_t *gaps_of(const sti_hyb_retiring *r)
{
    return r->fold + (r->n_fold - r->n_evicted);
}

/* STILL eq. 9, h: those of tokens [lo, hi) of the chunk that stay join the list. Its
 * count is that of before until all have. */
static void keep_salient(const sti_hyb *h, const sti_hybrid_args *a, int sel, int64_t c,
                         int lo, int hi)
{
    const sti_hyb_list l = sti_hyb_list_of(h, a->state, sel);
    const sti_hyb_retiring *to = &h->retiring[sel];
    const int32_t *gap = gaps_of(to);
    float key[STI_ATTN_MAX_D];
    int n = 0; /* tokens that stay, before i */
    for (int i = 0; i < lo; i++) n += to->stays[i];
    for (int i = lo; i < hi; i++) {
        if (!to->stays[i]) continue;
        const int slot = n < to->n_evicted ? gap[n] : *l.count + n - to->n_evicted;
        const window_token from = token_at(&l, c, i);
        sti_hyb_take_key(h, a->state, from.key, key);
        sti_hyb_set_slot(&l, slot, key, from.value, final_score(h, a, sel, c, i),
                         (int32_t)position_of(&l, c, -1 - i));
        n++;
    }
}

/* ---- Folding ------------------------------------------------------------- */

static void key_features(const sti_hyb *h, const sti_hyb_worker *w,
                         const sti_hybrid_args *a, int sel, int n, float *phi)
{
    const sti_hybrid_in *in = &a->in;
    const float *W = in->map_k ? in->map_k + (size_t)sel * h->D * h->F : NULL;
    sti_hyb_map(h, a->set, W, in->bias_k ? in->bias_k[sel] : 0, w->x, h->D, n, 1, w->u,
                phi);
}

/* Rotates a key as its features want it. `raw`: it is not rotated now. */
static void key_position(const sti_hyb *h, const sti_hybrid_args *a, float *key,
                         int64_t position, bool raw)
{
    const bool wants_raw = a->set->feature_positions == STI_FEATURES_NONE;
    if (raw == wants_raw) return;
    rotate(h, &a->in, key, wants_raw ? -position : position);
}

/* STILL eq. 9, s and z, for one token. */
void sti_hyb_fold_token(const sti_hyb *h, const sti_hyb_worker *w,
                        const sti_hybrid_args *a, int sel, int row, int64_t position)
{
    const sti_hybrid_state *st = a->state;
    const size_t at = ((size_t)row * h->G + sti_hyb_kv_of(h, sel)) * h->D;
    const size_t D = (size_t)h->D, first = (size_t)sel * h->P;
    st->folded[sel]++;
    memcpy(w->x, a->in.k + at, D * sizeof *w->x);
    key_position(h, a, w->x, position, false);
    key_features(h, w, a, sel, 1, w->phi);
    float *s = (float *)st->lin_s + first * D, *comp = (float *)st->comp_s + first * D;
    for (size_t p = 0; p < (size_t)h->P; p++)
        h->k->add(s + p * D, comp + p * D, w->phi[p], a->in.v + at, h->D);
    h->k->add((float *)st->lin_z + first, (float *)st->comp_z + first, 1, w->phi, h->P);
}

/* Tokens of a head that are folded together, at most. */
static int batch_size(const sti_hyb *h)
{
    return h->C < STI_HYB_KEYS ? h->C : STI_HYB_KEYS;
}

/* Features and values of the tokens [lo, hi) of a batch, which begins at `done`. */
static void map_retired(const sti_hyb *h, const sti_hyb_worker *w,
                        const sti_hybrid_args *a, int sel, int done, int lo, int hi)
{
    const sti_hyb_list l = sti_hyb_list_of(h, a->state, sel);
    const sti_hyb_retiring *to = &h->retiring[sel];
    const int64_t c = a->state->pos / h->C;
    const size_t D = (size_t)h->D;
    float *x = w->x;
    if (hi > to->n_fold - done) hi = to->n_fold - done;
    for (int j = lo; j < hi; j++, x += D) {
        const int at = to->fold[done + j];
        const bool raw = read_candidate(&l, c, at, x, to->value + (size_t)j * D);
        key_position(h, a, x, position_of(&l, c, at), raw);
    }
    if (hi > lo) key_features(h, w, a, sel, hi - lo, to->phi + (size_t)lo * h->ldp);
}

/* STILL eq. 9: s += phi^T v, z += sum of phi; rows [lo, hi) of a head's state. */
static void fold_into_state(const sti_hyb *h, const sti_hyb_worker *w,
                            const sti_hybrid_state *st, int sel, int done, int lo,
                            int hi)
{
    const sti_hyb_retiring *from = &h->retiring[sel];
    const int left = from->n_fold - done, rows = hi - lo, D = h->D;
    const int n = left < batch_size(h) ? left : batch_size(h);
    const size_t at = (size_t)sel * h->P + (size_t)lo, el = at * (size_t)D;
    const float *phi = from->phi + lo, one = 1;
    if (n <= 0) return;
    h->k->product_t(rows, n, D, phi, h->ldp, from->value, D, w->sum, D);
    h->k->add((float *)st->lin_s + el, NULL, 1, w->sum, rows * D);
    h->k->product_t(1, n, rows, &one, 0, phi, h->ldp, w->sum, rows);
    h->k->add((float *)st->lin_z + at, NULL, 1, w->sum, rows);
}

/* ---- Retirement ---------------------------------------------------------- */

/* A session's retirement, as its steps see it. */
typedef struct retirement {
    const sti_hyb *h;
    const sti_hybrid_args *a;
    int64_t chunk;
    int done; /* tokens of each head that are folded */
} retirement;

static void select_work(void *v, int w, int workers)
{
    const retirement *r = v;
    for (int sel = w; sel < r->h->S; sel += workers)
        select_and_evict(r->h, r->a, sel, r->chunk);
}

static void map_work(void *v, int w, int workers)
{
    const retirement *r = v;
    const sti_hyb_worker own = sti_hyb_worker_of(r->h, w);
    int sel, lo, hi;
    for (sti_hyb_share s = sti_hyb_share_of(r->h->S, batch_size(r->h), w, workers);
         sti_hyb_share_next(&s, &sel, &lo, &hi);)
        map_retired(r->h, &own, r->a, sel, r->done, lo, hi);
}

static void fold_work(void *v, int w, int workers)
{
    const retirement *r = v;
    const sti_hyb_worker own = sti_hyb_worker_of(r->h, w);
    int sel, lo, hi;
    for (sti_hyb_share s = sti_hyb_share_of(r->h->S, r->h->P, w, workers);
         sti_hyb_share_next(&s, &sel, &lo, &hi);)
        fold_into_state(r->h, &own, r->a->state, sel, r->done, lo, hi);
}

static void keep_work(void *v, int w, int workers)
{
    const retirement *r = v;
    int sel, lo, hi;
    for (sti_hyb_share s = sti_hyb_share_of(r->h->S, r->h->C, w, workers);
         sti_hyb_share_next(&s, &sel, &lo, &hi);)
        keep_salient(r->h, r->a, sel, r->chunk, lo, hi);
}

static void far_gaps_work(void *v, int w, int workers)
{
    const retirement *r = v;
    for (int sel = w; sel < r->h->S; sel += workers) {
        const sti_hyb_list l = sti_hyb_list_of(r->h, r->a->state, sel);
        const sti_hyb_retiring *to = &r->h->retiring[sel];
        sti_hyb_fill_far_gaps(&l, gaps_of(to), to->n_evicted);
    }
}

static void far_work(void *v, int w, int workers)
{
    const retirement *r = v;
    for (int sel = w; sel < r->h->S; sel += workers) {
        const sti_hyb_list l = sti_hyb_list_of(r->h, r->a->state, sel);
        sti_hyb_make_far(&l, r->a, r->chunk);
    }
}

void sti_hyb_retire(const sti_hyb *h, const sti_hybrid_args *a)
{
    retirement r = {.h = h, .a = a, .chunk = a->state->pos / h->C};
    const bool far = a->set->position_cap > 0;
    int most = 0; /* tokens to fold, of the head that has most of them */
    sti_pool_run(h->pool, select_work, &r);
    for (int sel = 0; a->state->lin_s && sel < h->S; sel++)
        if (h->retiring[sel].n_fold > most) most = h->retiring[sel].n_fold;
    for (; r.done < most; r.done += batch_size(h)) {
        sti_pool_run(h->pool, map_work, &r);
        sti_pool_run(h->pool, fold_work, &r);
    }
    if (far) sti_pool_run(h->pool, far_gaps_work, &r);
    sti_pool_run(h->pool, keep_work, &r);
    for (int sel = 0; sel < h->S;
         sel++) /* the chunk and the evicted, less the folded */
        a->state->sal_count[sel] += h->C - h->retiring[sel].n_fold;
    if (far) sti_pool_run(h->pool, far_work, &r);
}
