/* softmax.c - softmax attention over the key/value cache: which worker runs which rows
 * against which blocks of keys. The arithmetic is in attn_tile.h, and its bits do
 * not depend on anything decided here.
 *
 * One new token per session (decode) is split over (session, kv head, block of keys),
 * so that even one session keeps every worker busy; each block leaves a partial result
 * in a slot, and the caller joins slots in order of position. Slots are few: long
 * contexts take several rounds. Several new tokens (prefill) are split over (kv head,
 * tile of tokens), each tile walking the keys on its own. */
#include <math.h>
#include <string.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/softmax/attn_tile.h"

enum {
    BLOCK = STI_ATTN_BLOCK,
    SLOTS = 128,             /* partial results of one round */
    STORE_ALONE = 64 * 1024, /* elements the caller stores without waking the pool */
    TILES_PER_WORKER = 4     /* aimed at, to even out the triangle of a causal mask */
};

/* Partial results of a block: y [group, ldo], m and l [group]. */
typedef struct slot {
    float *o, *m, *l;
} slot;

typedef struct scratch {
    sti_attn_tile *tile; /* [workers] */
    float *slots;        /* [SLOTS, group (ldo + 2)] */
    float *M, *L;        /* [rows, H], state of decoding rows */
    float *keep, *add;   /* [group], for the joining caller */
} scratch;

typedef struct job {
    const sti_attn_kernels *f;
    const sti_attn_args *a;
    scratch mem;
    int group; /* query heads of a kv head */
    int ldo;   /* D, padded */
    float scale;
    int64_t first, end; /* units of this round (decode) */
    int workers;
} job;

/* ---- Memory -------------------------------------------------------------- */

static int padded(int D)
{
    return (D + STI_ATTN_PAD - 1) / STI_ATTN_PAD * STI_ATTN_PAD;
}

/* Lays out everything for `rows` rows of H heads; counts if c has no base. */
static scratch carve(sti_carve *c, int workers, int rows, int H, int G, int D)
{
    size_t ld = (size_t)padded(D), group = (size_t)(H / G);
    size_t states = (size_t)rows * (size_t)H, n = STI_ATTN_ROWS;
    scratch x;
    x.tile = sti_carve_take(c, (size_t)workers, sizeof *x.tile);
    for (int w = 0; w < workers; w++) {
        sti_attn_tile t = {
            .q = sti_carve_take(c, n * STI_ATTN_LDQ, sizeof(float)),
            .s = sti_carve_take(c, n * STI_ATTN_LDS, sizeof(float)),
            .k = sti_carve_take(c, BLOCK * (size_t)D, sizeof(float)),
            .v = sti_carve_take(c, BLOCK * ld, sizeof(float)),
            .o = sti_carve_take(c, n * ld, sizeof(float)),
            .M = sti_carve_take(c, n, sizeof(float)),
            .L = sti_carve_take(c, n, sizeof(float)),
            .m = sti_carve_take(c, n, sizeof(float)),
            .l = sti_carve_take(c, n, sizeof(float)),
            .keep = sti_carve_take(c, n, sizeof(float)),
            .add = sti_carve_take(c, n, sizeof(float)),
        };
        if (x.tile) x.tile[w] = t;
    }
    x.slots = sti_carve_take(c, SLOTS * group * (ld + 2), sizeof(float));
    x.M = sti_carve_take(c, states, sizeof(float));
    x.L = sti_carve_take(c, states, sizeof(float));
    x.keep = sti_carve_take(c, group, sizeof(float));
    x.add = sti_carve_take(c, group, sizeof(float));
    return x;
}

size_t sti_cpu_attn_scratch(const sti_dev *dev, int rows)
{
    sti_carve c = {0};
    if (dev->heads < 1 || dev->kv_heads < 1 || dev->head_dim < 1) return 0;
    carve(&c, sti_pool_threads(dev->pool), rows, dev->heads, dev->kv_heads,
          dev->head_dim);
    return c.used;
}

static slot slot_at(const job *j, int64_t unit)
{
    size_t n = (size_t)j->group;
    float *p = j->mem.slots + (size_t)(unit - j->first) * n * (size_t)(j->ldo + 2);
    return (slot){p, p + n * (size_t)j->ldo, p + n * (size_t)(j->ldo + 1)};
}

/* ---- Cache --------------------------------------------------------------- */

static size_t cache_row(const job *j, const sti_attn_segment *s, int g, int token)
{
    return ((size_t)g * (size_t)s->capacity + (size_t)(token % s->capacity)) *
           (size_t)j->a->D;
}

static sti_attn_rows cache_head(const job *j, const sti_attn_segment *s,
                                const void *base, int g)
{
    size_t at = cache_row(j, s, g, 0);
    const void *p = j->a->cache == STI_F16 ? (const void *)((const uint16_t *)base + at)
                                           : (const void *)((const float *)base + at);
    return (sti_attn_rows){
        .data = p, .type = j->a->cache, .capacity = s->capacity, .D = j->a->D};
}

static void store_row(const job *j, void *base, size_t at, const float *x)
{
    if (j->a->cache == STI_F16)
        j->f->to_f16((uint16_t *)base + at, x, j->a->D);
    else
        memcpy((float *)base + at, x, (size_t)j->a->D * sizeof *x);
}

/* New keys and values enter the cache before any is read: all rows, then, are seen
 * through the cache's rounding, whether they came in this call or earlier. */
static void store_work(void *v, int w, int workers)
{
    const job *j = v;
    const sti_attn_args *a = j->a;
    for (int i = 0; i < a->n_seg; i++) {
        const sti_attn_segment *s = &a->seg[i];
        int64_t lo, hi;
        sti_split(s->n, 1, w, workers, &lo, &hi);
        for (int t = (int)lo; t < hi; t++)
            for (int g = 0; g < a->G; g++) {
                size_t to = cache_row(j, s, g, s->past + t);
                size_t from =
                    ((size_t)(s->row0 + t) * (size_t)a->G + (size_t)g) * (size_t)a->D;
                store_row(j, s->K, to, a->k + from);
                store_row(j, s->V, to, a->v + from);
            }
    }
}

/* ---- Rows and blocks ----------------------------------------------------- */

/* The first key token t sees. */
static int first_key(const sti_attn_args *a, int t)
{
    return a->window > 0 && t >= a->window ? t - a->window + 1 : 0;
}

/* Queries of tokens [i, i + n) of a segment, heads of group g, to the tile. */
static void take_queries(const job *j, const sti_attn_tile *t,
                         const sti_attn_segment *s, int g, int i, int n)
{
    const sti_attn_args *a = j->a;
    for (int r = 0; r < n * j->group; r++) {
        size_t row = (size_t)(s->row0 + i + r / j->group);
        size_t head = (size_t)(g * j->group + r % j->group);
        const float *q = a->q + (row * (size_t)a->H + head) * (size_t)a->D;
        j->f->scale(t->q + (size_t)r * STI_ATTN_LDQ, q, j->scale, a->D);
    }
}

/* ---- Decode: segments of one token --------------------------------------- */

/* A unit is one block of keys for one kv head of one session. */
typedef struct unit {
    const sti_attn_segment *s;
    int g, start, lo, hi; /* keys [start + lo, start + hi) */
    bool first, last;     /* of the row's blocks */
} unit;

static int blocks_of(const sti_attn_args *a, const sti_attn_segment *s)
{
    return s->past / BLOCK - first_key(a, s->past) / BLOCK + 1;
}

static int64_t count_units(const sti_attn_args *a)
{
    int64_t n = 0;
    for (int i = 0; i < a->n_seg; i++)
        if (a->seg[i].n == 1) n += (int64_t)a->G * blocks_of(a, &a->seg[i]);
    return n;
}

static unit unit_at(const sti_attn_args *a, int64_t index)
{
    const sti_attn_segment *s = a->seg;
    for (;; s++) {
        int64_t n = s->n == 1 ? (int64_t)a->G * blocks_of(a, s) : 0;
        if (index < n) break;
        index -= n;
    }
    int blocks = blocks_of(a, s), b = (int)(index % blocks),
        first = first_key(a, s->past);
    int start = (first / BLOCK + b) * BLOCK, end = s->past + 1;
    return (unit){.s = s,
                  .g = (int)(index / blocks),
                  .start = start,
                  .lo = first > start ? first - start : 0,
                  .hi = end - start < BLOCK ? end - start : BLOCK,
                  .first = b == 0,
                  .last = b == blocks - 1};
}

static void decode_work(void *v, int w, int workers)
{
    const job *j = v;
    const sti_attn_tile *t = &j->mem.tile[w];
    int64_t lo, hi;
    sti_split(j->end - j->first, 1, w, workers, &lo, &hi);
    for (int64_t i = j->first + lo; i < j->first + hi; i++) {
        unit u = unit_at(j->a, i);
        slot to = slot_at(j, i);
        take_queries(j, t, u.s, u.g, 0, 1);
        sti_attn_rows K = cache_head(j, u.s, u.s->K, u.g);
        sti_attn_rows V = cache_head(j, u.s, u.s->V, u.g);
        j->f->load_keys(&K, u.start, u.lo, u.hi, t->k);
        j->f->qk_logits(t, j->a->D, 0, j->group, u.lo, u.hi);
        j->f->softmax(t, 0, j->group, u.lo, u.hi);
        const size_t next = cache_row(j, u.s, 0, u.start + BLOCK),
                     size = V.type == STI_F16 ? 2 : 4;
        const sti_attn_ahead ahead = {{(const char *)V.data + next * size},
                                      {(size_t)V.D * size}};
        j->f->pv_product_cache(t, &V, u.start, j->group, u.lo, u.hi, to.o, j->ldo,
                               &ahead);
        memcpy(to.m, t->m, (size_t)j->group * sizeof(float));
        memcpy(to.l, t->l, (size_t)j->group * sizeof(float));
    }
}

/* Joins the slots of a round to the rows they belong to. A row's sum lives in the
 * output itself until its last block. */
static void join_slots(const job *j)
{
    const sti_attn_args *a = j->a;
    for (int64_t i = j->first; i < j->end; i++) {
        unit u = unit_at(a, i);
        slot from = slot_at(j, i);
        size_t at = (size_t)u.s->row0 * (size_t)a->H + (size_t)(u.g * j->group);
        float *M = j->mem.M + at, *L = j->mem.L + at, *o = a->o + at * (size_t)a->D;
        if (u.first)
            for (int h = 0; h < j->group; h++) {
                M[h] = -INFINITY;
                L[h] = 0;
                memset(o + h * a->D, 0, (size_t)a->D * sizeof *o);
            }
        j->f->merge_lse(M, L, from.m, from.l, j->mem.keep, j->mem.add, j->group);
        for (int h = 0; h < j->group; h++, o += a->D) {
            j->f->join(o, from.o + (size_t)h * (size_t)j->ldo, j->mem.keep[h],
                       j->mem.add[h], a->D);
            if (u.last) j->f->divide(o, o, L[h], a->D);
        }
    }
}

/* ---- Prefill: segments of several tokens --------------------------------- */

/* Rows of n tokens from `token` on (0: first of the tile) against keys [lo, hi). */
static void attend_block(const job *j, const sti_attn_tile *t, int token, int n, int lo,
                         int hi)
{
    int row = token * j->group, rows = n * j->group;
    j->f->qk_logits(t, j->a->D, row, rows, lo, hi);
    j->f->softmax(t, row, rows, lo, hi);
    j->f->merge_lse(t->M + row, t->L + row, t->m + row, t->l + row, t->keep + row,
                    t->add + row, rows);
    j->f->pv_product(t, j->a->D, row, rows, lo, hi, t->o + (size_t)row * (size_t)j->ldo,
                     j->ldo, t->keep + row, t->add + row);
}

/* Tokens [i, i + n) of a segment for kv head g. A token that sees a whole block goes
 * through it together with the others that do; one that sees part of it (causal mask,
 * edge of the window) goes alone with exactly its keys, so that no key it must not see
 * can reach it, not even as 0 times infinity. */
static void run_tile(const job *j, const sti_attn_tile *t, const sti_attn_segment *s,
                     int g, int i, int n)
{
    const sti_attn_args *a = j->a;
    int rows = n * j->group, pos = s->past + i, end = pos + n,
        first = first_key(a, pos);
    take_queries(j, t, s, g, i, n);
    for (int r = 0; r < rows; r++) {
        t->M[r] = -INFINITY;
        t->L[r] = 0;
    }
    memset(t->o, 0, (size_t)rows * (size_t)j->ldo * sizeof(float));

    sti_attn_rows K = cache_head(j, s, s->K, g), V = cache_head(j, s, s->V, g);
    for (int start = first / BLOCK * BLOCK; start < end; start += BLOCK) {
        int lo = first > start ? first - start : 0;
        int hi = end - start < BLOCK ? end - start : BLOCK;
        j->f->load_keys(&K, start, lo, hi, t->k);
        j->f->load_values(&V, start, lo, hi, t->v);
        /* Tokens [f0, f1) see the whole block. */
        int f0 = start + BLOCK - 1 > pos ? start + BLOCK - 1 : pos, f1 = end;
        if (a->window > 0 && a->window < end - start) f1 = start + a->window;
        if (f0 < f1) attend_block(j, t, f0 - pos, f1 - f0, 0, BLOCK);
        for (int p = pos; p < end; p++) {
            int from = first_key(a, p) - start, to = p + 1 - start;
            if (from < 0) from = 0;
            if (to > BLOCK) to = BLOCK;
            if ((p < f0 || p >= f1) && from < to)
                attend_block(j, t, p - pos, 1, from, to);
        }
    }
    for (int r = 0; r < rows; r++) {
        size_t row = (size_t)(s->row0 + i + r / j->group);
        size_t head = (size_t)(g * j->group + r % j->group);
        j->f->divide(a->o + (row * (size_t)a->H + head) * (size_t)a->D,
                     t->o + (size_t)r * (size_t)j->ldo, t->L[r], a->D);
    }
}

/* Tokens of a tile: as many as fit, fewer if that leaves workers without a tile. */
static int tile_tokens(const job *j, const sti_attn_segment *s)
{
    int most = STI_ATTN_ROWS / j->group;
    int tiles = (TILES_PER_WORKER * j->workers + j->a->G - 1) / j->a->G;
    int n = (s->n + tiles - 1) / tiles, least = (12 + j->group - 1) / j->group;
    if (n < least) n = least;
    return n < most ? n : most;
}

/* Later tiles see more keys. Worker w takes tiles w, 2W-1-w, 2W+w, ...: pairs of a
 * cheaper and a dearer one, all fixed in advance. */
static void prefill_work(void *v, int w, int workers)
{
    const job *j = v;
    const sti_attn_args *a = j->a;
    int64_t index = 0;
    for (const sti_attn_segment *s = a->seg; s < a->seg + a->n_seg; s++) {
        if (s->n < 2) continue;
        int step = tile_tokens(j, s);
        for (int i = 0; i < s->n; i += step)
            for (int g = 0; g < a->G; g++, index++) {
                int owner = (int)(index % (2 * workers));
                if (owner >= workers) owner = 2 * workers - 1 - owner;
                if (owner != w) continue;
                run_tile(j, &j->mem.tile[w], s, g, i,
                         s->n - i < step ? s->n - i : step);
            }
    }
}

/* ---- Entry --------------------------------------------------------------- */

static still_status check(const sti_dev *dev, const sti_attn_args *a, still_error *err)
{
    if (a->H < 1 || a->G < 1 || a->D < 1 || a->H % a->G != 0)
        return sti_fail(err, STILL_E_ARG,
                        "cpu attention: %d heads of size %d cannot share %d kv heads",
                        a->H, a->D, a->G);
    if (a->D > STI_ATTN_MAX_D || a->H / a->G > STI_ATTN_ROWS)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cpu attention: head size %d and %d heads per kv head, at most "
                        "%d and %d are supported",
                        a->D, a->H / a->G, STI_ATTN_MAX_D, STI_ATTN_ROWS);
    if (a->cache != STI_F16 && a->cache != STI_F32)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cpu attention: cache of type %d, expected f16 or f32",
                        a->cache);
    if (a->H > dev->heads || a->H / a->G > dev->heads / dev->kv_heads ||
        a->D > dev->head_dim)
        return sti_fail(
            err, STILL_E_ARG,
            "cpu attention: %d/%d heads of size %d, the device was made for "
            "%d/%d of size %d",
            a->H, a->G, a->D, dev->heads, dev->kv_heads, dev->head_dim);
    for (int i = 0; i < a->n_seg; i++) {
        const sti_attn_segment *s = &a->seg[i];
        int64_t all = (int64_t)s->past + s->n;
        bool ring = a->window > 0 && s->capacity >= (int64_t)a->window + s->n - 1;
        if (s->n < 0 || s->past < 0 || s->capacity < 1 || all > INT32_MAX - BLOCK ||
            (s->capacity < all && !ring))
            return sti_fail(err, STILL_E_ARG,
                            "cpu attention: segment %d has %d new tokens after %d, its "
                            "cache holds %d with a window of %d",
                            i, s->n, s->past, s->capacity, a->window);
    }
    return STILL_OK;
}

still_status sti_cpu_softmax_attn(sti_dev *dev, const sti_attn_args *a,
                                  still_error *err)
{
    STI_TRY(check(dev, a, err));
    int rows = 0;
    int64_t tokens = 0;
    bool prefill = false;
    for (int i = 0; i < a->n_seg; i++) {
        const sti_attn_segment *s = &a->seg[i];
        if (s->row0 + s->n > rows) rows = s->row0 + s->n;
        if (s->n > 1) prefill = true;
        tokens += s->n;
    }
    STI_TRY(sti_cpu_need(dev, rows, err));
    int workers = sti_pool_threads(dev->pool);
    sti_carve c = {.base = dev->scratch.p};
    job j = {.f = dev->k->attn,
             .a = a,
             .mem = carve(&c, workers, rows, a->H, a->G, a->D),
             .group = a->H / a->G,
             .ldo = padded(a->D),
             .scale = 1.0f / sqrtf((float)a->D),
             .workers = workers};

    if (tokens * a->G * a->D * 2 <= STORE_ALONE)
        store_work(&j, 0, 1);
    else
        sti_pool_run(dev->pool, store_work, &j);

    int64_t units = count_units(a);
    for (j.first = 0; j.first < units; j.first = j.end) {
        j.end = units - j.first < SLOTS ? units : j.first + SLOTS;
        sti_pool_run(dev->pool, decode_work, &j);
        join_slots(&j);
    }
    if (prefill) sti_pool_run(dev->pool, prefill_work, &j);
    return STILL_OK;
}
