/* route.c - which token is folded when, for whole sequences (the routing of STILL Alg.
 * 1).
 *
 * First the scores, head by head (eq. 2 to 5): logits of a tile of queries against its
 * own chunk and the one before, softmax over the last C tokens; a score needs only the
 * weight that a token gives itself. Then, for each selection head, the mean over its
 * query heads and the selection (eq. 8): of every chunk that leaves the window the
 * `select` best join the salient tokens, of which the `cap` best stay. Both lists are
 * kept in order, so that a chunk costs C log C + cap. */
#include <math.h>
#include <stdlib.h>

#include "backend/cpu/hybrid/train/train.h"

enum { TILE = STI_TRAIN_TILE };

typedef struct candidate {
    float score;
    int32_t token;
} candidate;

/* Memory of a worker. */
typedef struct worker {
    float *K;                    /* [2 span, Dp] */
    float *q, *trans;            /* [TILE,Dp], [D,TILE] */
    float *w;                    /* [2 span, TILE] */
    float *top, *sum;            /* [TILE] */
    float *weight;               /* [2 span] */
    candidate *chunk;            /* [span] */
    candidate *kept, *kept_next; /* [capacity] */
    float *likeness;             /* [T], where the score needs it */
} worker;

typedef struct job {
    sti_train t;
    const sti_score *score;
    float *arrived;  /* [B,H,T] */
    float *received; /* [B,H,T] or NULL */
    int capacity;    /* salient tokens after a chunk has left */
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

static void carve(sti_carve *c, worker *w, const job *j)
{
    const sti_train *t = &j->t;
    const size_t D = (size_t)t->Dp, keys = (size_t)t->most_keys, size = sizeof(float);
    const size_t span = (size_t)(t->span < t->a->T ? t->span : t->a->T);
    w->K = sti_carve_take(c, keys * D, size);
    w->q = sti_carve_take(c, TILE * D, size);
    w->trans = sti_carve_take(c, TILE * D, size);
    w->w = sti_carve_take(c, keys * TILE, size);
    w->top = sti_carve_take(c, TILE, size);
    w->sum = sti_carve_take(c, TILE, size);
    w->weight = sti_carve_take(c, keys, size);
    w->chunk = sti_carve_take(c, span, sizeof *w->chunk);
    w->kept = sti_carve_take(c, (size_t)j->capacity, sizeof *w->kept);
    w->kept_next = sti_carve_take(c, (size_t)j->capacity, sizeof *w->kept);
    w->likeness = sti_carve_take(c, j->score->likeness ? (size_t)t->a->T : 0, size);
}

/* ---- Scores -------------------------------------------------------------- */

/* Queries [first, first + n) of a span whose keys lie in K from row `own` on. */
typedef struct tile {
    int first, n, lanes, keys;
    int diag; /* row of the first query's own key */
} tile;

static void logits(const sti_train *t, const worker *w, const tile *r)
{
    t->f->multiply(r->keys, r->lanes, t->D, w->K, (size_t)t->Dp, 1, w->trans, TILE,
                   w->w, TILE, false);
    sti_train_mask(w->w, r->keys, r->diag, r->lanes, -INFINITY);
}

/* STILL eq. 3. */
static void softmax_weights(const sti_train *t, const worker *w, const tile *r)
{
    for (int i = 0; i < TILE; i++) {
        w->top[i] = -INFINITY;
        w->sum[i] = 0;
    }
    t->f->lane_max(w->w, r->keys, TILE, r->lanes, w->top);
    t->f->exp_shifted(w->w, r->keys, TILE, r->lanes, w->top, 1, w->sum);
}

/* STILL eq. 2, the last C tokens; STILL eq. 5 for s3. */
static void score_tile(const job *j, const worker *w, const tile *r, int b, int h)
{
    const sti_train *t = &j->t;
    float *arrived =
        j->arrived + ((size_t)b * (size_t)t->H + (size_t)h) * (size_t)t->a->T;
    logits(t, w, r);
    /* Query i does not see rows up to C before its own. */
    for (int k = 0; k < r->keys; k++)
        for (int i = r->n - 1; i >= 0 && k <= r->diag + i - t->span; i--)
            w->w[(size_t)k * TILE + (size_t)i] = -INFINITY;
    softmax_weights(t, w, r);
    for (int i = 0; i < r->n; i++) {
        const int token = r->first + i;
        const float *key =
            t->a->in.k + sti_train_row(t, b, token, t->G, h / t->per_kv) * (size_t)t->D;
        double square = 0;
        for (int e = 0; e < t->D; e++) square += (double)key[e] * key[e];
        const double self = w->w[(size_t)(r->diag + i) * TILE + (size_t)i];
        arrived[token] =
            (float)j->score->arrive(&(sti_score_stats){.self = self / (double)w->sum[i],
                                                       .key_norm = sqrt(square),
                                                       .eps = t->set->eps,
                                                       .seed = t->set->seed,
                                                       .position = token,
                                                       .layer = t->set->layer,
                                                       .head = h});
    }
}

/* received[j] += the weight that the tile's later queries give token j. */
static void receive_tile(const sti_train *t, const worker *w, const tile *r,
                         float *received)
{
    logits(t, w, r);
    softmax_weights(t, w, r);
    for (int i = 0; i < TILE; i++) w->sum[i] = i < r->n ? 1 / w->sum[i] : 0;
    for (int i = 0; i < r->n; i++) w->w[(size_t)(r->diag + i) * TILE + (size_t)i] = 0;
    t->f->row_dots(w->w, TILE, w->sum, 0, r->keys, r->lanes, w->weight);
    const int first_key = r->first - r->diag;
    for (int k = 0; k < r->keys; k++) received[first_key + k] += w->weight[k];
}

static void score_head(const job *j, const worker *w, int b, int h)
{
    const sti_train *t = &j->t;
    const size_t D = (size_t)t->Dp, T = (size_t)t->a->T;
    const size_t head = ((size_t)b * (size_t)t->H + (size_t)h) * T;
    if (!j->score->arrive) memset(j->arrived + head, 0, T * sizeof(float));
    if (j->received) memset(j->received + head, 0, T * sizeof(float));
    for (int c = 0; c < t->n_spans; c++) {
        const int end = sti_train_span_end(t, c);
        const int from = c > 0 ? (c - 1) * t->span : 0;
        for (int k = from; k < end; k++)
            sti_panel_row(w->K + (size_t)(k - from) * D,
                          t->a->in.k + sti_train_row(t, b, k, t->G, h / t->per_kv) *
                                           (size_t)t->D,
                          t->D, t->Dp);
        for (int first = c * t->span; first < end; first += TILE) {
            const int n = end - first < TILE ? end - first : TILE;
            const tile r = {first, n, sti_panel_padded(n), first + n - from,
                            first - from};
            for (int i = 0; i < n; i++)
                sti_panel_row(w->q + (size_t)i * D,
                              t->a->in.q + sti_train_row(t, b, first + i, t->H, h) *
                                               (size_t)t->D,
                              t->D, t->Dp);
            t->f->transpose(w->q, D, n, t->D, t->scale, w->trans, TILE);
            if (j->score->arrive) score_tile(j, w, &r, b, h);
            if (j->received) receive_tile(t, w, &r, j->received + head);
        }
    }
    for (int k = 0; j->received && k < t->a->T; k++) {
        /* Queries after k that still see it. */
        const int queries =
            sti_train_span_end(t, k / t->span + 1 < t->n_spans ? k / t->span + 1
                                                               : t->n_spans - 1) -
            1 - k;
        if (queries > 0) j->received[head + (size_t)k] /= (float)queries;
    }
    if (t->a->trace.score_head)
        for (int k = 0; k < t->a->T; k++)
            t->a->trace.score_head[sti_train_row(t, b, k, t->H, h)] =
                j->arrived[head + (size_t)k];
}

/* ---- Selection and eviction ---------------------------------------------- */

static int by_score(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->token < y->token ? -1 : 1; /* of equals the earlier token stays */
}

/* likeness [T] of a selection head's keys: see sti_score_end. */
static void compare_keys(const job *j, const worker *w, int b, int sel)
{
    const sti_train *t = &j->t;
    const int g = sel * t->per_sel / t->per_kv, D = t->D, T = t->a->T;
    for (int first = 0; first < T; first += t->span) {
        const int end = T - first < t->span ? T : first + t->span;
        double mean[STI_HEAD_DIM_MAX] = {0}, square = 0;
        for (int k = first; k < end; k++) {
            const float *key = t->a->in.k + sti_train_row(t, b, k, t->G, g) * (size_t)D;
            double norm = 0;
            for (int e = 0; e < D; e++) norm += (double)key[e] * key[e];
            norm = sqrt(norm);
            w->likeness[k] = norm > 0 ? (float)(1 / norm) : 0;
            for (int e = 0; e < D; e++) mean[e] += key[e] * (double)w->likeness[k];
        }
        for (int e = 0; e < D; e++) square += mean[e] * mean[e];
        for (int k = first; k < end; k++) {
            const float *key = t->a->in.k + sti_train_row(t, b, k, t->G, g) * (size_t)D;
            double dot = 0;
            for (int e = 0; e < D; e++) dot += key[e] * mean[e];
            w->likeness[k] =
                square > 0 ? (float)(dot * (double)w->likeness[k] / sqrt(square)) : 0;
        }
    }
}

/* Mean over the query heads of a selection head, then what the score makes of it. */
static float final_score(const job *j, const worker *w, int b, int sel, int k)
{
    const sti_train *t = &j->t;
    double arrived = 0, received = 0;
    for (int h = sel * t->per_sel; h < (sel + 1) * t->per_sel; h++) {
        const size_t at =
            ((size_t)b * (size_t)t->H + (size_t)h) * (size_t)t->a->T + (size_t)k;
        arrived += (double)j->arrived[at] / t->per_sel;
        if (j->received) received += (double)j->received[at] / t->per_sel;
    }
    if (!j->score->retire) return (float)arrived;
    return (float)j->score->retire(
        &(sti_score_end){.arrived = arrived,
                         .received = received,
                         .likeness = j->score->likeness ? (double)w->likeness[k] : 0,
                         .position = k});
}

/* STILL eq. 8: chunk now - 2 retires at the first token of chunk `now`. */
static void route_head(const job *j, worker *w, int b, int sel)
{
    const sti_train *t = &j->t;
    const int cap = sti_hybrid_cap(t->set, sel), C = t->span;
    int32_t *fold = t->a->fold_chunk + sti_train_row(t, b, 0, t->S, sel);
    const size_t S = (size_t)t->S;
    for (int k = 0; k < t->a->T; k++) fold[(size_t)k * S] = -1;
    if (j->score->likeness) compare_keys(j, w, b, sel);
    if (t->a->trace.score)
        for (int k = 0; k < t->a->T; k++)
            t->a->trace.score[sti_train_row(t, b, k, t->S, sel)] =
                final_score(j, w, b, sel, k);
    int kept = 0;
    for (int now = 2; now < t->n_spans; now++) {
        const int first = (now - 2) * C;
        for (int i = 0; i < C; i++)
            w->chunk[i] =
                (candidate){final_score(j, w, b, sel, first + i), (int32_t)(first + i)};
        qsort(w->chunk, (size_t)C, sizeof *w->chunk, by_score);
        for (int i = t->set->select; i < C; i++)
            fold[(size_t)w->chunk[i].token * S] = now;
        if (cap < 0) continue;
        /* Merge; what does not fit is folded. */
        int x = 0, y = 0, n = 0;
        while (x < kept || y < t->set->select) {
            const bool old = y == t->set->select ||
                             (x < kept && by_score(&w->kept[x], &w->chunk[y]) < 0);
            const candidate best = old ? w->kept[x++] : w->chunk[y++];
            if (n < cap)
                w->kept_next[n++] = best;
            else
                fold[(size_t)best.token * S] = now;
        }
        candidate *swap = w->kept;
        w->kept = w->kept_next;
        w->kept_next = swap;
        kept = n;
    }
}

/* ---- Entry --------------------------------------------------------------- */

static void score_work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, j);
    for (int u = me; u < j->t.a->B * j->t.H; u += workers)
        score_head(j, &w, u / j->t.H, u % j->t.H);
}

static void route_work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, j);
    for (int u = me; u < j->t.a->B * j->t.S; u += workers)
        route_head(j, &w, u / j->t.S, u % j->t.S);
}

still_status sti_cpu_hybrid_route(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                  still_error *err)
{
    job j = {0};
    STI_TRY(sti_train_new(&j.t, dev, a, err));
    const size_t tokens = (size_t)a->B * (size_t)a->T;
    if (!a->set->has_window) { /* every token is folded at once */
        for (size_t i = 0; i < tokens * (size_t)j.t.S; i++) a->fold_chunk[i] = -1;
        return STILL_OK;
    }
    const int64_t window = 2 * (int64_t)j.t.span;
    j.t.most_keys = (int)(window < a->T ? window : a->T);
    j.score = sti_score_at(a->set->score);
    j.capacity = a->set->cap < 0 ? 0 : a->set->cap < a->T ? a->set->cap : a->T;

    const size_t workers = (size_t)sti_pool_threads(dev->pool);
    worker w;
    sti_carve one = {0};
    carve(&one, &w, &j);
    j.bytes = (one.used + 63) / 64 * 64;
    for (int pass = 0; pass < 2; pass++) {
        sti_carve c = {.base = pass ? dev->scratch.p : NULL};
        j.memory = sti_carve_take(&c, workers, j.bytes);
        j.arrived = sti_carve_take(&c, tokens * (size_t)j.t.H, sizeof(float));
        if (j.score->received)
            j.received = sti_carve_take(&c, tokens * (size_t)j.t.H, sizeof(float));
        if (pass == 0) STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    }
    sti_pool_run(dev->pool, score_work, &j);
    sti_pool_run(dev->pool, route_work, &j);
    return STILL_OK;
}
