/* decode.c - one token of each of many sessions.
 *
 * Work is split over units (session, selection head, block of keys or the state), whose
 * results are joined in the order of query.c, which gives the same numbers; see
 * attn_tile.h. A step of one session takes microseconds, so it is one task for the
 * pool: workers get runs of units of equal cost, store the new keys with the block
 * they belong to, and join units to the rows they began as they go. Units of a row that
 * another worker began wait in slots until all are done; then the caller joins them.
 * Every worker lists all units of the round for itself, which is faster than waiting for
 * cache lines that another core has just written. Bound by multiply-adds where memory is
 * fast, else by memory: each unit prefetches what the worker's next one reads. */
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid/hybrid.h"

/* A round, as one worker lists it. */
typedef struct unit_list {
    const sti_hyb *h;
    sti_hyb_worker own;
    int n;        /* units, in own.unit */
    int64_t cost; /* of all, as cost_of has it */
} unit_list;

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
                     const sti_hyb_slot *to, const sti_attn_ahead *ahead)
{
    const sti_hybrid_state *st = u->a->state;
    const sti_hyb_block *b = &u->b;
    const int group = h->group, offset = (int)(st->pos % h->C);
    if (b->part == STI_HYB_LINEAR) {
        sti_hyb_linear(h, w, u->a, u->sel, 0, 1, to->o, to->l);
        return;
    }
    if (u->stores) sti_hyb_store_kv(h, u->a, u->sel, 0, 0, 1);
    const sti_attn_tile t = b->part == STI_HYB_FAR ? sti_hyb_far_tile(w) : w->t;
    const sti_attn_rows K = sti_hyb_rows(h, st, u->sel, b, true);
    const sti_attn_rows V = sti_hyb_rows(h, st, u->sel, b, false);
    const sti_attn_ahead values = sti_attn_rows_ahead(&V, b->slot + b->lo, true);
    if (K.bits)
        h->f->qk_logits_levels(&t, &K, b->slot, group, b->lo, b->hi, &values);
    else
        h->f->qk_logits_panels(&t, &K, b->slot, group, b->lo, b->hi, &values);
    for (int r = 0; r < group; r++) {
        w->tail_l[r] = 0;
        w->self[r] = -1;
    }
    if (h->self && b->part == STI_HYB_PREVIOUS)
        sti_hyb_tail_lse(h, w, b, 0, group, offset);
    h->f->softmax(&t, 0, group, b->lo, b->hi);
    if (h->self && b->part == STI_HYB_OWN)
        sti_hyb_self_weight(h, w, b, 0, group, b->hi, offset);
    h->f->pv_product_cache(&t, &V, b->slot, group, b->lo, b->hi, to->o, h->ldo, ahead);
    const size_t bytes = (size_t)group * sizeof(float);
    memcpy(to->m, t.m, bytes);
    memcpy(to->l, t.l, bytes);
    memcpy(to->tail_m, w->tail_m, bytes);
    memcpy(to->tail_l, w->tail_l, bytes);
    memcpy(to->self, w->self, bytes);
}

/* What unit i reads first; false: there is no such unit. */
static bool start_of(const unit_list *r, int i, sti_attn_ahead *to)
{
    if (i >= r->n) return false;
    const sti_hyb *h = r->h;
    const sti_hyb_unit *u = &r->own.unit[i];
    const sti_hybrid_state *st = u->a->state;
    if (u->b.part == STI_HYB_LINEAR) { /* a state, while a block of keys is read */
        const float *s = (const float *)st->lin_s + (size_t)u->sel * h->P * h->D;
        const size_t bytes = (size_t)h->P * (size_t)h->D * sizeof *s;
        *to = (sti_attn_ahead){{(const char *)s}, {bytes / STI_ATTN_BLOCK}};
        return true;
    }
    const sti_attn_rows K = sti_hyb_rows(h, st, u->sel, &u->b, true);
    *to = sti_attn_rows_ahead(&K, u->b.slot, false);
    return true;
}

/* run_unit, prefetching what unit `then` reads. */
static void run_before(const unit_list *r, int i, int then, const sti_hyb_slot *to)
{
    sti_attn_ahead ahead;
    const bool any = start_of(r, then, &ahead);
    run_unit(r->h, &r->own, &r->own.unit[i], to, any ? &ahead : NULL);
}

/* ---- Rows ---------------------------------------------------------------- */

/* The sums of a row are with the worker that joins its units: M, L and score of its
 * tile, and o in the output itself. */
static float *sums_at(const sti_hyb *h, const sti_hyb_unit *u)
{
    return u->a->y + sti_hyb_query_at(h, 0, u->sel * h->group);
}

static void begin_row(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u)
{
    for (int i = 0; i < h->group; i++) {
        w->t.M[i] = -INFINITY;
        w->t.L[i] = 0;
        w->score[i] = sti_hyb_no_score();
    }
    memset(sums_at(h, u), 0, (size_t)h->group * (size_t)h->D * sizeof(float));
}

/* Hands a row on: save_row by who stops, load_row by who continues. */
static void save_row(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u)
{
    const size_t at = (size_t)u->row * h->H + u->sel * h->group, n = (size_t)h->group;
    memcpy(h->M + at, w->t.M, n * sizeof *h->M);
    memcpy(h->L + at, w->t.L, n * sizeof *h->L);
    memcpy(h->score + at, w->score, n * sizeof *h->score);
}
static void load_row(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u)
{
    const size_t at = (size_t)u->row * h->H + u->sel * h->group, n = (size_t)h->group;
    memcpy(w->t.M, h->M + at, n * sizeof *h->M);
    memcpy(w->t.L, h->L + at, n * sizeof *h->L);
    memcpy(w->score, h->score + at, n * sizeof *h->score);
}

/* Merges the results of a unit; after the last one of a row, writes its output. */
static void join_unit(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_unit *u,
                      const sti_hyb_slot *from)
{
    const sti_hybrid_args *a = u->a;
    const int group = h->group, D = h->D, first_head = u->sel * group;
    const size_t at = (size_t)u->row * h->H + first_head;
    const bool linear = u->b.part == STI_HYB_LINEAR;
    float *M = w->t.M, *L = w->t.L, *o = sums_at(h, u);
    if (!linear) {
        h->f->merge_lse(M, L, from->m, from->l, w->t.keep, w->t.add, group);
        for (int i = 0; i < group; i++) {
            h->f->join(o + (size_t)i * D, from->o + (size_t)i * h->ldo, w->t.keep[i],
                       w->t.add[i], D);
            if (h->self)
                sti_hyb_lse_update(&w->score[i], from->tail_m[i], from->tail_l[i],
                                   from->self[i]);
            if (!h->received || !sti_hyb_in_window(&u->b)) continue;
            h->window_m[at + (size_t)i] = M[i];
            h->window_l[at + (size_t)i] = L[i];
        }
    }
    if (!u->last) return;
    for (int i = 0; i < group; i++)
        sti_hyb_joint_output(h, a, 0, u->sel, i, o + (size_t)i * D, M[i], L[i],
                             linear ? from->o + (size_t)i * h->ldo : NULL,
                             linear ? from->l[i] : 0);
    if (h->scored) sti_hyb_score_token(h, a, u->sel, 0, a->state->pos, w->score);
}

/* ---- Rounds -------------------------------------------------------------- */

/* Worker w runs units [*lo, *hi): units go to workers in order, by the cost up to their
 * middle. */
static void units_of(const unit_list *r, int w, int workers, int *lo, int *hi)
{
    int i = 0;
    while (i < r->n && r->own.unit[i].middle * workers < r->cost * w) i++;
    *lo = i;
    while (i < r->n && r->own.unit[i].middle * workers < r->cost * (w + 1)) i++;
    *hi = i;
}

/* Runs units [lo, hi) and joins each at once. Loads a row that began before `lo`, saves
 * one that does not end. */
static void run_joined(const unit_list *r, int lo, int hi)
{
    const sti_hyb *h = r->h;
    const sti_hyb_worker *w = &r->own;
    for (int i = lo; i < hi; i++) {
        const sti_hyb_unit *u = &r->own.unit[i];
        const sti_hyb_slot to = slot_at(h, lo);
        if (u->first || i == lo) sti_hyb_queries(h, w, u->a, u->sel, 0, 1);
        if (u->first)
            begin_row(h, w, u);
        else if (i == lo)
            load_row(h, w, u);
        run_before(r, i, i + 1 < hi ? i + 1 : r->n, &to);
        join_unit(h, w, u, &to);
        if (i + 1 == hi && !u->last) save_row(h, w, u);
    }
}

/* Runs units [lo, hi) of a row that another worker began, then unit `then`. */
static void run_apart(const unit_list *r, int lo, int hi, int then)
{
    for (int i = lo; i < hi; i++) {
        const sti_hyb_slot to = slot_at(r->h, i);
        const sti_hyb_unit *u = &r->own.unit[i];
        if (i == lo) sti_hyb_queries(r->h, &r->own, u->a, u->sel, 0, 1);
        run_before(r, i, i + 1 < hi ? i + 1 : then, &to);
    }
}

/* Joins units [lo, hi), which were run apart, to the row that began before them. */
static void join_apart(const unit_list *r, int lo, int hi)
{
    const sti_hyb_worker *w = &r->own;
    for (int i = lo; i < hi; i++) {
        const sti_hyb_slot from = slot_at(r->h, i);
        if (i == lo) load_row(r->h, w, &r->own.unit[i]);
        join_unit(r->h, w, &r->own.unit[i], &from);
        if (i + 1 == hi && !r->own.unit[i].last) save_row(r->h, w, &r->own.unit[i]);
    }
}

/* Cost of a unit in hundredths of a key with its value in halves. A row of the state
 * has as many bytes, and is read as it lies in memory for the first time. */
static int cost_of(const sti_hyb *h, const sti_hyb_block *b)
{
    if (b->part == STI_HYB_LINEAR) return 125 * h->P;
    const bool levels = h->set->key_bits && !sti_hyb_in_window(b);
    return (b->hi - b->lo) * (levels ? h->f->levels_cost : 100);
}

/* The next selection head that decodes, from *p on; false: there is none. */
static bool next_head(const sti_hyb *h, sti_hyb_place *p)
{
    while (p->session < h->n && (h->a[p->session].T != 1 || p->sel == h->S)) {
        p->row += h->a[p->session++].T;
        p->sel = 0;
    }
    return p->session < h->n;
}

/* The units of a round, from h->from on: all that are left, or as many as have
 * slots. */
static unit_list list_units(const sti_hyb *h, int w)
{
    unit_list r = {.h = h, .own = sti_hyb_worker_of(h, w)};
    sti_hyb_place p = h->from;
    while (next_head(h, &p)) {
        const sti_hybrid_args *a = &h->a[p.session];
        const int64_t chunk = a->state->pos / h->C;
        const int end = (int)(a->state->pos % h->C) + 1;
        if (p.at.part == STI_HYB_START)
            sti_hyb_next_block(h, a, chunk, p.sel, end, &p.at);
        while (p.at.part != STI_HYB_END && r.n < STI_HYB_SLOTS) {
            sti_hyb_unit *u = &r.own.unit[r.n++];
            *u = (sti_hyb_unit){
                .a = a, .b = p.at, .sel = p.sel, .row = p.row, .first = p.first};
            sti_hyb_next_block(h, a, chunk, p.sel, end, &p.at);
            p.first = false;
            u->last = p.at.part == STI_HYB_END;
            u->stores =
                h->units_store && u->b.part == STI_HYB_OWN && p.at.part != STI_HYB_OWN;
            u->middle = r.cost + cost_of(h, &u->b) / 2;
            r.cost += cost_of(h, &u->b);
        }
        if (p.at.part != STI_HYB_END) break;
        p.sel++;
        p.at = (sti_hyb_block){0};
        p.first = true;
    }
    if (w == 0) h->round->next = p;
    return r;
}

/* The first unit of worker w, [lo, hi), whose row no other worker began; hi if there is
 * none. */
static int first_own(const unit_list *r, int lo, int hi)
{
    if (lo > 0)
        while (lo < hi && !r->own.unit[lo].first) lo++;
    return lo;
}

static void unit_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    const unit_list r = list_units(h, w);
    int lo, hi;
    units_of(&r, w, workers, &lo, &hi);
    const int own = first_own(&r, lo, hi);
    run_apart(&r, lo, own, own < hi ? own : r.n);
    run_joined(&r, own, hi);
    if (w == 0) {
        h->round->n = r.n;
        h->round->cost = r.cost;
        h->round->workers = workers;
    }
}

/* Ends a round: rows that several workers share get the units of all but the first. */
static void join_shared(const sti_hyb *h)
{
    const unit_list r = {.h = h,
                         .own = sti_hyb_worker_of(h, 0),
                         .n = h->round->n,
                         .cost = h->round->cost};
    for (int w = 1; w < h->round->workers; w++) {
        int lo, hi;
        units_of(&r, w, h->round->workers, &lo, &hi);
        join_apart(&r, lo, first_own(&r, lo, hi));
    }
}

void sti_hyb_decode(sti_dev *dev, sti_hyb *h)
{
    h->from = (sti_hyb_place){.first = true};
    while (next_head(h, &h->from)) {
        sti_pool_run(dev->pool, unit_work, h);
        join_shared(h);
        h->from = h->round->next;
    }
}
