/* hybrid_decode.c - one token of each of many sessions.
 *
 * Work is split over units (session, selection head, block of keys or the state), whose
 * results are joined in the order of hybrid_query.c: the same numbers as there, see
 * attn_tile.h. A step of one session takes microseconds, so it is one task for the
 * pool: workers get runs of units of equal cost, store the new keys with the block
 * they belong to, and join the rows they have units of. Those that several share are
 * begun first: when their turn to be joined comes, everybody's part is there. Bound by
 * memory: each unit asks for what the next one reads. */
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid_cpu.h"

/* ---- Units --------------------------------------------------------------- */

static sti_hyb_slot slot_at(const sti_hyb *h, int unit)
{
    const size_t n = (size_t)h->group, ldo = (size_t)h->ldo;
    float *p = h->slots + (size_t)unit * n * (ldo + 5);
    return (sti_hyb_slot){p,
                          p + n * ldo,
                          p + n * (ldo + 1),
                          p + n * (ldo + 2),
                          p + n * (ldo + 3),
                          p + n * (ldo + 4)};
}

static void run_unit(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u,
                     const sti_hyb_slot *to, const void *ahead)
{
    const sti_hybrid_state *st = u->a->state;
    const sti_hyb_block *b = &u->b;
    const int group = h->group, offset = (int)(st->pos % h->C);
    if (b->part == STI_HYB_LINEAR) {
        sti_hyb_linear(h, w, u->a, u->sel, 0, 1, to->o, to->l);
        return;
    }
    if (u->enters) sti_hyb_enter(h, u->a, u->sel, 0, 1);
    sti_hyb_queries(h, w, u->a, u->sel, 0, 1, b->part == STI_HYB_FAR);
    sti_attn_tile t = w->t;
    if (b->part == STI_HYB_FAR) t.q = w->q_far;
    const sti_attn_rows K = sti_hyb_rows(h, st, u->sel, b, true);
    const sti_attn_rows V = sti_hyb_rows(h, st, u->sel, b, false);
    const size_t first_value = (size_t)(b->slot + b->lo) * (size_t)h->D * st->kv_size;
    h->f->score_panels(&t, &K, b->slot, group, b->lo, b->hi,
                       (const char *)V.data + first_value);
    for (int r = 0; r < group; r++) {
        w->tail_l[r] = 0;
        w->self[r] = -1;
    }
    if (h->scored && b->part == STI_HYB_PREVIOUS)
        sti_hyb_tails(h, w, b, 0, group, offset);
    h->f->soften(&t, 0, group, b->lo, b->hi);
    if (h->scored && b->part == STI_HYB_OWN)
        sti_hyb_selves(h, w, b, 0, group, b->hi, offset);
    h->f->weigh_cache(&t, &V, b->slot, group, b->lo, b->hi, to->o, h->ldo, ahead);
    const size_t bytes = (size_t)group * sizeof(float);
    memcpy(to->m, t.m, bytes);
    memcpy(to->l, t.l, bytes);
    memcpy(to->tail_m, w->tail_m, bytes);
    memcpy(to->tail_l, w->tail_l, bytes);
    memcpy(to->self, w->self, bytes);
}

/* What the unit reads first. */
static const void *start_of(const sti_hyb *h, const sti_hyb_unit *u)
{
    const sti_hybrid_state *st = u->a->state;
    if (u->b.part == STI_HYB_LINEAR)
        return (const float *)st->lin_s + (size_t)u->sel * h->P * h->D;
    const sti_attn_rows K = sti_hyb_rows(h, st, u->sel, &u->b, true);
    return (const char *)K.data + (size_t)u->b.slot * (size_t)h->D * st->kv_size;
}

/* ---- Rows ---------------------------------------------------------------- */

/* Takes the results of a unit in. The sum of values lives in the output itself until
 * the last unit of the row. */
static void join_unit(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u,
                      const sti_hyb_slot *from)
{
    const sti_hybrid_args *a = u->a;
    const int group = h->group, D = h->D, first_head = u->sel * group;
    const size_t at = (size_t)u->row * h->H + first_head;
    float *M = h->M + at, *L = h->L + at,
          *o = a->y + sti_hyb_query_at(h, 0, first_head);
    sti_hyb_score *score = h->score + at;
    if (u->first)
        for (int i = 0; i < group; i++) {
            M[i] = -INFINITY;
            L[i] = 0;
            score[i] = sti_hyb_no_score();
            memset(o + (size_t)i * D, 0, (size_t)D * sizeof *o);
        }
    const bool linear = u->b.part == STI_HYB_LINEAR;
    if (!linear) {
        h->f->fold(M, L, from->m, from->l, w->t.keep, w->t.add, group);
        for (int i = 0; i < group; i++) {
            h->f->join(o + (size_t)i * D, from->o + (size_t)i * h->ldo, w->t.keep[i],
                       w->t.add[i], D);
            if (h->scored)
                sti_hyb_see(&score[i], from->tail_m[i], from->tail_l[i], from->self[i]);
            if (!h->received || !sti_hyb_in_window(&u->b)) continue;
            h->window_m[at + (size_t)i] = M[i];
            h->window_l[at + (size_t)i] = L[i];
        }
    }
    if (!u->last) return;
    for (int i = 0; i < group; i++)
        sti_hyb_finish(h, a, 0, first_head + i, o + (size_t)i * D, M[i], L[i],
                       linear ? from->o + (size_t)i * h->ldo : NULL,
                       linear ? from->l[i] : 0);
    if (h->scored) sti_hyb_score_token(h, a, u->sel, 0, a->state->pos, score);
}

/* ---- Rounds -------------------------------------------------------------- */

/* Units are given out in order, by the cost up to their middle. */
static int worker_of(const sti_hyb *h, int unit, int workers)
{
    return (int)(h->unit[unit].middle * workers / h->cost);
}

/* The units [first, *end) of the row that unit `first` begins, as far as they are in
 * this round. True: several workers run them. */
static bool row_at(const sti_hyb *h, int first, int workers, int *end)
{
    for (*end = first + 1; *end < h->n_units && !h->unit[*end - 1].last;) ++*end;
    return worker_of(h, first, workers) != worker_of(h, *end - 1, workers);
}

static void run_units(const sti_hyb *h, int w, int workers, bool shared)
{
    for (int first = 0, end; first < h->n_units; first = end) {
        if (row_at(h, first, workers, &end) != shared) continue;
        for (int i = first; i < end; i++) {
            if (worker_of(h, i, workers) != w) continue;
            const bool more = i + 1 < h->n_units && worker_of(h, i + 1, workers) == w;
            const sti_hyb_slot to = slot_at(h, i);
            run_unit(h, &h->worker[w], &h->unit[i], &to,
                     more ? start_of(h, &h->unit[i + 1]) : NULL);
        }
    }
}

/* Joins the rows that worker w has the last unit of. */
static void join_rows(const sti_hyb *h, int w, int workers, bool shared)
{
    for (int first = 0, end; first < h->n_units; first = end) {
        if (row_at(h, first, workers, &end) != shared) continue;
        for (int i = first; i < end && worker_of(h, end - 1, workers) == w; i++) {
            const sti_hyb_slot from = slot_at(h, i);
            join_unit(h, &h->worker[w], &h->unit[i], &from);
        }
    }
}

static void unit_work(void *v, int w, int workers)
{
    sti_hyb *h = v;
    run_units(h, w, workers, true);
    atomic_fetch_add_explicit(&h->shared_done, 1, memory_order_release);
    run_units(h, w, workers, false);
    join_rows(h, w, workers, false);
    sti_pool_await(&h->shared_done, workers);
    join_rows(h, w, workers, true);
}

static void run_round(sti_dev *dev, sti_hyb *h)
{
    atomic_store_explicit(&h->shared_done, 0, memory_order_relaxed);
    if (h->n_units > 0) sti_pool_run(dev->pool, unit_work, h);
    h->n_units = 0;
    h->cost = 0;
}

static void add_units(sti_dev *dev, sti_hyb *h, const sti_hybrid_args *a, int row,
                      int sel, bool enters)
{
    const int64_t chunk = a->state->pos / h->C;
    const int end = (int)(a->state->pos % h->C) + 1;
    sti_hyb_block next = {0};
    sti_hyb_next_block(h, a, chunk, sel, end, &next);
    for (bool first = true; next.part != STI_HYB_END; first = false) {
        sti_hyb_unit u = {a, next, sel, row, first, false, false, 0};
        sti_hyb_next_block(h, a, chunk, sel, end, &next);
        u.last = next.part == STI_HYB_END;
        u.enters = enters && u.b.part == STI_HYB_OWN && next.part != STI_HYB_OWN;
        /* A row of the state is floats, a key comes with its value. */
        const int cost = u.b.part == STI_HYB_LINEAR ? h->P : u.b.hi - u.b.lo;
        u.middle = h->cost + cost / 2;
        h->cost += cost;
        h->unit[h->n_units++] = u;
        if (h->n_units == STI_HYB_SLOTS) run_round(dev, h);
    }
}

void sti_hyb_decode(sti_dev *dev, sti_hyb *h, const sti_hybrid_args *a, int n,
                    bool enters)
{
    h->n_units = 0;
    h->cost = 0;
    for (int i = 0, row = 0; i < n; row += a[i++].T)
        for (int sel = 0; a[i].T == 1 && sel < h->S; sel++)
            add_units(dev, h, &a[i], row, sel, enters);
    run_round(dev, h);
}
