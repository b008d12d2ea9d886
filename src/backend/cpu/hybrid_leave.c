/* hybrid_leave.c - a chunk leaves the window: its best tokens join the salient list,
 * all others, and what the list cannot keep, are folded into the linear state.
 *
 * The list holds its keys in order of arrival, far ones first (see position_cap in
 * hybrid.h); what is evicted closes up. Tokens are folded in order: those of the chunk
 * by position, then the evicted by slot. Their features and values are gathered,
 * multiplied, and only the product of up to STI_HYB_KEYS tokens is added to the state,
 * with its rounding kept (Kahan): the state of a long stream is as exact as a short
 * one's. */
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid_cpu.h"

/* ---- Order --------------------------------------------------------------- */

/* Equal scores keep the earlier token. */
static bool better(const sti_hyb_entry *a, const sti_hyb_entry *b)
{
    return a->score > b->score || (a->score == b->score && a->position < b->position);
}

static void swap(sti_hyb_entry *a, sti_hyb_entry *b)
{
    const sti_hyb_entry t = *a;
    *a = *b;
    *b = t;
}

/* Moves the k best of n to the front, in no order. Positions differ, so this is a total
 * order (NaN scores apart, which no order survives) and the result is a set. */
static void best_first(sti_hyb_entry *e, int n, int k)
{
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (better(&e[mid], &e[lo])) swap(&e[mid], &e[lo]);
        if (better(&e[hi], &e[lo])) swap(&e[hi], &e[lo]);
        if (better(&e[hi], &e[mid])) swap(&e[hi], &e[mid]);
        const sti_hyb_entry pivot = e[mid];
        int i = lo, j = hi;
        while (i <= j) {
            while (i < hi && better(&e[i], &pivot)) i++;
            while (j > lo && better(&pivot, &e[j])) j--;
            if (i <= j) swap(&e[i++], &e[j--]);
        }
        if (k <= j)
            hi = j;
        else if (k > i)
            lo = i;
        else
            return;
    }
}

/* ---- Features ------------------------------------------------------------ */

/* Turns a key to `position`, or back from it. */
static void rotate(const sti_hyb *h, const sti_hybrid_in *in, float *key,
                   int64_t position)
{
    h->rows->rope(key, (int)position, in->inv_freq, 1, h->D, in->interleaved);
}

void sti_hyb_map(const sti_hyb *h, const sti_hybrid_settings *set, const float *W,
                 float bias, const float *x, int ldx, int n, int step, float *u,
                 float *phi)
{
    const float smallest_norm = 1e-6f;
    const int D = h->D, F = h->F, ldu = step * h->ldu;
    if (W) h->k->product(n, D, F, x, ldx, W, F, u, ldu);
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

/* ---- Folding ------------------------------------------------------------- */

/* Tokens gathered for the next product. */
typedef struct batch {
    const sti_hyb *h;
    sti_hyb_worker *w;
    const sti_hybrid_args *a;
    int sel, n;
    int32_t chunk; /* that tokens are folded at */
} batch;

static void key_features(const batch *b)
{
    const sti_hyb *h = b->h;
    const sti_hybrid_in *in = &b->a->in;
    const float *W = in->map_k ? in->map_k + (size_t)b->sel * h->D * h->F : NULL;
    sti_hyb_map(h, b->a->set, W, in->bias_k ? in->bias_k[b->sel] : 0, b->w->x, h->D,
                b->n, 1, b->w->u, b->w->phi);
}

/* s += phi^T v, z += sum of phi. */
static void flush(batch *b)
{
    const sti_hyb *h = b->h;
    const sti_hybrid_state *st = b->a->state;
    sti_hyb_worker *w = b->w;
    const int n = b->n, P = h->P, D = h->D;
    if (n == 0 || !st->lin_s) {
        b->n = 0;
        return;
    }
    key_features(b);
    for (int j = 0; j < n; j++) {
        const float *phi = w->phi + (size_t)j * h->ldp;
        for (int p = 0; p < P; p++) w->phi_t[(size_t)p * STI_HYB_LDT + j] = phi[p];
    }
    const size_t row = (size_t)b->sel * P;
    h->k->product(P, n, D, w->phi_t, STI_HYB_LDT, w->value, D, w->sum, D);
    h->k->add((float *)st->lin_s + row * D, (float *)st->low_s + row * D, 1, w->sum,
              P * D);
    memcpy(w->sum, w->phi, (size_t)P * sizeof(float));
    for (int j = 1; j < n; j++) h->k->plus(w->sum, w->phi + (size_t)j * h->ldp, P);
    h->k->add((float *)st->lin_z + row, (float *)st->low_z + row, 1, w->sum, P);
    b->n = 0;
}

/* A key in the form its features are made of. `raw`: it is not rotated now. */
static void key_position(const batch *b, float *key, int64_t position, bool raw)
{
    const bool wants_raw = b->a->set->feature_positions == STI_FEATURES_NONE;
    if (raw == wants_raw) return;
    rotate(b->h, &b->a->in, key, wants_raw ? -position : position);
}

static void fold(batch *b, sti_hyb_key key, const void *value, int64_t position,
                 bool raw)
{
    const sti_hyb *h = b->h;
    const sti_hybrid_state *st = b->a->state;
    const bool half = st->kv_size == 2;
    st->folded[b->sel]++;
    if (b->a->trace.fold_chunk)
        b->a->trace.fold_chunk[position * h->S + b->sel] = b->chunk;
    if (!st->lin_s) return;
    float *x = b->w->x + (size_t)b->n * h->D, stored[STI_ATTN_MAX_D];
    sti_hyb_take_key(h, st, key, stored);
    h->k->widen(x, stored, half, h->D);
    h->k->widen(b->w->value + (size_t)b->n * h->D, value, half, h->D);
    key_position(b, x, position, raw);
    if (++b->n == STI_HYB_KEYS) flush(b);
}

/* One token at a time, no product to wait for. */
void sti_hyb_fold_token(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                        int sel, int row, int64_t position)
{
    const sti_hybrid_state *st = a->state;
    const size_t at = ((size_t)row * h->G + sti_hyb_kv_of(h, sel)) * h->D;
    const size_t D = (size_t)h->D, first = (size_t)sel * h->P;
    batch b = {.h = h, .w = w, .a = a, .sel = sel, .n = 1};
    st->folded[sel]++;
    memcpy(w->x, a->in.k + at, D * sizeof *w->x);
    key_position(&b, w->x, position, false);
    key_features(&b);
    float *s = (float *)st->lin_s + first * D, *low = (float *)st->low_s + first * D;
    for (size_t p = 0; p < (size_t)h->P; p++)
        h->k->add(s + p * D, low + p * D, w->phi[p], a->in.v + at, h->D);
    h->k->add((float *)st->lin_z + first, (float *)st->low_z + first, 1, w->phi, h->P);
}

/* ---- The salient list ---------------------------------------------------- */

typedef struct list {
    const sti_hyb *h;
    const sti_hybrid_state *st;
    int sel;
    size_t first; /* slot 0 in the arrays of all selection heads */
    int32_t *count;
} list;

static sti_hyb_key list_key(const list *l, int slot)
{
    return sti_hyb_key_at(l->h, l->st, l->st->sal_k, l->st->room, l->sel, slot);
}
static void *list_value(const list *l, int slot)
{
    return sti_hyb_row(l->h, l->st, l->st->sal_v, l->first + (size_t)slot);
}
static bool is_far(const list *l, int slot)
{
    return l->st->sal_far && l->st->sal_far[l->first + (size_t)slot];
}

static void set_slot(const list *l, int slot, const void *key, const void *value,
                     float score, int32_t position, bool far)
{
    const size_t bytes = (size_t)l->h->D * l->st->kv_size, at = l->first + (size_t)slot;
    sti_hyb_put_key(l->h, l->st, list_key(l, slot), key);
    memcpy(list_value(l, slot), value, bytes);
    ((float *)l->st->sal_score)[at] = score;
    l->st->sal_pos[at] = position;
    if (l->st->sal_far) l->st->sal_far[at] = far;
}

static void move_slot(const list *l, int to, int from)
{
    if (to == from) return;
    const size_t at = l->first + (size_t)from;
    float key[STI_ATTN_MAX_D];
    sti_hyb_take_key(l->h, l->st, list_key(l, from), key);
    set_slot(l, to, key, list_value(l, from), ((float *)l->st->sal_score)[at],
             l->st->sal_pos[at], is_far(l, from));
}

/* Folds the slots marked as evicted and closes the gaps. */
static void evict(const list *l, batch *b, const uint8_t *evicted)
{
    int kept = 0;
    for (int i = 0; i < *l->count; i++) {
        if (evicted[i])
            fold(b, list_key(l, i), list_value(l, i),
                 l->st->sal_pos[l->first + (size_t)i], is_far(l, i));
        else
            move_slot(l, kept++, i);
    }
    *l->count = kept;
}

/* Slot i trades places with the first near slot and is kept unrotated from now on. */
static void turn_far(const list *l, const batch *b, int i, int near)
{
    const sti_hyb *h = l->h;
    sti_hyb_worker *w = b->w;
    const bool half = l->st->kv_size == 2;
    const size_t at = l->first + (size_t)i;
    const float score = ((float *)l->st->sal_score)[at];
    const int32_t position = l->st->sal_pos[at];
    void *key = w->x, *value = w->value;
    sti_hyb_take_key(h, l->st, list_key(l, i), w->sum);
    h->k->widen(w->x, w->sum, half, h->D);
    rotate(h, &b->a->in, w->x, -position);
    if (half) h->f->to_f16(key = w->sum, w->x, h->D);
    memcpy(value, list_value(l, i), (size_t)h->D * l->st->kv_size);
    move_slot(l, i, near);
    set_slot(l, near, key, value, score, position, true);
}

/* Keys that are far from the last token of chunk c come first in the list. */
static void make_far(const list *l, const batch *b, int64_t c)
{
    const int64_t last = (c + 1) * l->h->C - 1;
    int far = 0;
    while (far < *l->count && is_far(l, far)) far++;
    for (int i = far; i < *l->count; i++)
        if (last - l->st->sal_pos[l->first + (size_t)i] >= b->a->set->position_cap)
            turn_far(l, b, i, far++);
}

/* ---- Leaving ------------------------------------------------------------- */

/* likeness [C] of the keys of the chunk at `ring`: see sti_score_end. */
static void compare_keys(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                         int g, int ring)
{
    const sti_hybrid_state *st = a->state;
    const int D = h->D;
    float stored[STI_ATTN_MAX_D], mean[STI_ATTN_MAX_D] = {0};
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < h->C; i++) {
            sti_hyb_take_key(h, st, sti_hyb_window_key(h, st, g, ring + i), stored);
            h->k->widen(w->x, stored, st->kv_size == 2, D);
            const float norm = sqrtf(h->k->dot(w->x, w->x, D));
            const float per = norm > 0 ? 1 / norm : 0;
            if (pass == 1)
                w->likeness[i] = h->k->dot(w->x, mean, D) * per;
            else
                for (int d = 0; d < D; d++) mean[d] += w->x[d] * per;
        }
    const float norm = sqrtf(h->k->dot(mean, mean, D));
    for (int i = 0; i < h->C; i++)
        w->likeness[i] = norm > 0 ? w->likeness[i] / norm : 0;
}

/* Token i of a chunk that begins at `first`, in the window at `ring`. */
static float final_score(const sti_hyb *h, const sti_hyb_worker *w,
                         const sti_hybrid_args *a, int sel, int64_t first, int i)
{
    const sti_score *score = sti_score_at(a->set->score);
    const int ring = (int)(first % (2 * h->C));
    const size_t at = (size_t)sel * 2 * h->C + (size_t)(ring + i);
    const float arrived = ((const float *)a->state->win_score)[at];
    if (!score->leave) return arrived;
    sti_score_end e = {.arrived = arrived, .position = first + i};
    if (score->received) {
        const int queries = 2 * h->C - 1 - i; /* that came after the token and saw it */
        const double sum = ((const float *)a->state->win_received)[at];
        e.received = queries > 0 ? sum / queries : 0;
    }
    if (score->likeness) e.likeness = w->likeness[i];
    return (float)score->leave(&e);
}

/* Marks which tokens of the chunk stay and which of the list go. Returns the number of
 * those that stay. */
static int select_tokens(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                         const list *l, int sel, int64_t first)
{
    const sti_hybrid_state *st = a->state;
    const int C = h->C, count = *l->count;
    const int wanted = st->room > 0 ? a->set->select : 0;
    sti_hyb_entry *e = w->entry;
    memset(w->stays, 0, (size_t)C);
    if (wanted == 0) return 0;
    for (int i = 0; i < C; i++)
        e[i] = (sti_hyb_entry){.score = final_score(h, w, a, sel, first, i),
                               .position = (int32_t)(first + i),
                               .at = -1 - i};
    best_first(e, C, wanted);
    int stay = wanted;
    if (a->set->cap >= 0) memset(w->evicted, 0, (size_t)count);
    if (count + wanted > st->room) {
        for (int i = 0; i < count; i++)
            e[wanted + i] =
                (sti_hyb_entry){.score = ((float *)st->sal_score)[l->first + i],
                                .position = st->sal_pos[l->first + i],
                                .at = i};
        best_first(e, count + wanted, st->room);
        for (int i = st->room; i < count + wanted; i++)
            if (e[i].at >= 0) w->evicted[e[i].at] = 1;
        stay = st->room;
    }
    int kept = 0;
    for (int i = 0; i < stay; i++)
        if (e[i].at < 0) {
            w->stays[-1 - e[i].at] = 1;
            kept++;
        }
    return kept;
}

void sti_hyb_leave(const sti_hyb *h, sti_hyb_worker *w, const sti_hybrid_args *a,
                   int sel, int64_t c)
{
    const sti_hybrid_state *st = a->state;
    const int64_t first = (c - 2) * h->C;
    const int ring = (int)(first % (2 * h->C)), g = sti_hyb_kv_of(h, sel);
    const size_t value = (size_t)g * 2 * h->C + (size_t)ring;
    float key[STI_ATTN_MAX_D];
    list l = {h, st, sel, (size_t)sel * (size_t)st->room, &st->sal_count[sel]};
    batch b = {.h = h, .w = w, .a = a, .sel = sel, .chunk = (int32_t)c};

    if (sti_score_at(a->set->score)->likeness) compare_keys(h, w, a, g, ring);
    const int kept = select_tokens(h, w, a, &l, sel, first);
    for (int i = 0; i < h->C; i++)
        if (!w->stays[i])
            fold(&b, sti_hyb_window_key(h, st, g, ring + i),
                 sti_hyb_row(h, st, st->win_v, value + (size_t)i), first + i, false);
    if (kept > 0 && a->set->cap >= 0) evict(&l, &b, w->evicted);
    flush(&b);
    for (int i = 0; kept > 0 && i < h->C; i++) {
        if (!w->stays[i]) continue;
        sti_hyb_take_key(h, st, sti_hyb_window_key(h, st, g, ring + i), key);
        set_slot(&l, (*l.count)++, key,
                 sti_hyb_row(h, st, st->win_v, value + (size_t)i),
                 final_score(h, w, a, sel, first, i), (int32_t)(first + i), false);
    }
    if (a->set->position_cap > 0) make_far(&l, &b, c);
}
