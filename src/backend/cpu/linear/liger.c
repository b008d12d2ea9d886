/* liger.c - Liger on the cpu backend, forward and backward; see linear.h.
 *
 *   gamma_t = sigmoid(k_t)^(1/16)            per channel, k before RoPE
 *   S_t     = diag(gamma_t) S_{t-1} + softmax(k_t) v_t^T
 *   y_t     = 1/2 softmax(q_t)^T S_t + 1/2 (softmax attention over the last W tokens)
 *
 * Work is cut by (session, kv head). The window goes in tiles of a few tokens, whose
 * queries, all heads of the group, are the lanes of a panel; the recurrence goes token
 * by token, because a gate may come close to 0 within a single one. Backward keeps the
 * state before every STEP tokens and walks each step again. */
#include <math.h>

#include "backend/cpu/linear/linear.h"

enum { LANES = 64, STEP = 16 };

/* sigmoid(x)^(1/16) through log sigmoid(x) = min(x, 0) - log(1 + e^-|x|). */
static float gate_of(float x)
{
    return expf((fminf(x, 0) - log1pf(expf(-fabsf(x)))) * (1.0f / 16));
}

/* Memory of a worker. Lanes are queries (token i, head e of the group): i * group + e.
 */
typedef struct worker {
    int tokens, lanes;     /* of a tile at most */
    float *K, *V;          /* [W - 1 + tokens, Dp]: window before the tile, tile */
    float *q, *o;          /* [lanes, Dp] */
    float *trans;          /* [Dp, lanes] */
    float *w;              /* [W - 1 + tokens, lanes] */
    float *top, *sum;      /* [lanes] */
    float *S;              /* [D,Dp] */
    float *pk, *gamma, *v; /* [Dp] of one token */
    float *pq, *yq;        /* [group, Dp] */
    /* Backward */
    float *dn;          /* [lanes, Dp] */
    float *d;           /* as w */
    float *dK, *dV;     /* as K */
    float *dS, *steps;  /* [D,Dp], [STEP + 1, D, Dp] */
    float *dp, *dgamma; /* [Dp] */
} worker;

typedef struct job {
    const sti_lin *l;
    /* Backward: */
    float *dq, *dk, *dv; /* rotated [H,T,Dp], [G,T,Dp]; [G,T,Dp] */
    float *saved;        /* [G, steps, D, Dp] */
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

static void carve(sti_carve *c, worker *w, const sti_lin *l, bool backward)
{
    const size_t D = (size_t)l->Dp, size = sizeof(float);
    w->tokens = l->group < LANES ? LANES / l->group : 1;
    w->lanes = sti_panel_padded(w->tokens * l->group);
    const size_t lanes = (size_t)w->lanes, group = (size_t)l->group;
    const size_t keys = (size_t)l->a->window - 1 + (size_t)w->tokens;
    w->K = sti_carve_take(c, keys * D, size);
    w->V = sti_carve_take(c, keys * D, size);
    w->q = sti_carve_take(c, lanes * D, size);
    w->o = sti_carve_take(c, lanes * D, size);
    w->trans = sti_carve_take(c, D * lanes, size);
    w->w = sti_carve_take(c, keys * lanes, size);
    w->top = sti_carve_take(c, lanes, size);
    w->sum = sti_carve_take(c, lanes, size);
    w->S = sti_carve_take(c, D * D, size);
    w->pk = sti_carve_take(c, D, size);
    w->gamma = sti_carve_take(c, D, size);
    w->v = sti_carve_take(c, D, size);
    w->pq = sti_carve_take(c, group * D, size);
    w->yq = sti_carve_take(c, group * D, size);
    if (!backward) return;
    w->dn = sti_carve_take(c, lanes * D, size);
    w->d = sti_carve_take(c, keys * lanes, size);
    w->dK = sti_carve_take(c, keys * D, size);
    w->dV = sti_carve_take(c, keys * D, size);
    w->dS = sti_carve_take(c, D * D, size);
    w->steps = sti_carve_take(c, (STEP + 1) * (size_t)l->D * D, size);
    w->dp = sti_carve_take(c, D, size);
    w->dgamma = sti_carve_take(c, D, size);
}

static size_t q_at(const sti_lin *l, int t, int h)
{
    return ((size_t)t * (size_t)l->H + (size_t)h) * (size_t)l->D;
}

static size_t kv_at(const sti_lin *l, int t, int g)
{
    return ((size_t)t * (size_t)l->G + (size_t)g) * (size_t)l->D;
}

/* ---- The window ---------------------------------------------------------- */

/* A row of the ring, as float; and back. Through 16 bits a row is read back as later
 * tiles will see it. */
static void ring_load(const sti_lin *l, const sti_linear_state *st, const void *ring,
                      size_t row, float *to)
{
    const size_t at = row * (size_t)l->D;
    if (st->kv_size == sizeof(float)) {
        memcpy(to, (const float *)ring + at, (size_t)l->D * sizeof *to);
    } else {
        for (int e = 0; e < l->D; e++)
            to[e] = sti_f16_to_f32(((const uint16_t *)ring)[at + (size_t)e]);
    }
    memset(to + l->D, 0, (size_t)(l->Dp - l->D) * sizeof *to);
}

static void ring_store(const sti_lin *l, const sti_linear_state *st, void *ring,
                       size_t row, const float *from)
{
    const size_t at = row * (size_t)l->D;
    if (st->kv_size == sizeof(float)) {
        memcpy((float *)ring + at, from, (size_t)l->D * sizeof *from);
    } else {
        for (int e = 0; e < l->D; e++)
            ((uint16_t *)ring)[at + (size_t)e] = sti_f32_to_f16(from[e]);
    }
}

/* Rotated queries of tokens [first, first + n) of the call; scaled, with queries as
 * lanes, in `trans`. */
static void load_queries(const sti_lin *l, const sti_linear_args *a, const worker *w,
                         int64_t pos, int g, int first, int n)
{
    for (int i = 0; i < n * l->group; i++) {
        const int t = first + i / l->group, h = g * l->group + i % l->group;
        float *q = w->q + (size_t)i * (size_t)l->Dp;
        sti_panel_row(q, a->in.q + q_at(l, t, h), l->D, l->Dp);
        sti_lin_rotate(l, q, pos + t);
    }
    l->f->transpose(w->q, (size_t)l->Dp, n * l->group, l->D, 1 / sqrtf((float)l->D),
                    w->trans, (size_t)w->lanes);
}

/* Weights of a tile, unnormalized, into w, their sums into sum. `before` keys lie
 * before its first token; token i sees rows (before + i - W, before + i]. */
static int window_weights(const sti_lin *l, const worker *w, int before, int n)
{
    const int W = l->a->window, keys = before + n;
    const int used = n * l->group, lanes = sti_panel_padded(used);
    const size_t ld = (size_t)w->lanes;
    l->f->multiply(keys, lanes, l->D, w->K, (size_t)l->Dp, 1, w->trans, ld, w->w, ld,
                   false);
    for (int r = 0; r < keys; r++)
        for (int i = 0; i < used; i++) {
            const int own = before + i / l->group;
            if (r > own || r <= own - W) w->w[(size_t)r * ld + (size_t)i] = -INFINITY;
        }
    for (int i = 0; i < lanes; i++) {
        w->top[i] = -INFINITY;
        w->sum[i] = 0;
    }
    l->f->lane_max(w->w, keys, ld, lanes, w->top);
    l->f->exp_shifted(w->w, keys, ld, lanes, w->top, 1, w->sum);
    return lanes;
}

/* y += 1/2 of the window's attention, for tokens [first, first + n) of a session. */
static void window_tile(const sti_lin *l, const sti_linear_args *a, const worker *w,
                        int g, int first, int n)
{
    const sti_linear_state *st = a->state;
    const int64_t t0 = st->pos + first;
    const int W = a->window, before = t0 < W - 1 ? (int)t0 : W - 1;
    const size_t D = (size_t)l->Dp, ring = (size_t)g * (size_t)W;
    for (int r = 0; r < before; r++) {
        const size_t row = ring + (size_t)((t0 - before + r) % W);
        ring_load(l, st, st->win_k, row, w->K + (size_t)r * D);
        ring_load(l, st, st->win_v, row, w->V + (size_t)r * D);
    }
    for (int i = 0; i < n; i++) {
        const size_t row = ring + (size_t)((t0 + i) % W), at = (size_t)(before + i) * D;
        const size_t from = kv_at(l, first + i, g);
        sti_panel_row(w->K + at, a->in.k + from, l->D, l->Dp);
        sti_lin_rotate(l, w->K + at, t0 + i);
        ring_store(l, st, st->win_k, row, w->K + at);
        ring_store(l, st, st->win_v, row, a->in.v + from);
        ring_load(l, st, st->win_k, row, w->K + at);
        ring_load(l, st, st->win_v, row, w->V + at);
    }
    load_queries(l, a, w, st->pos, g, first, n);
    window_weights(l, w, before, n);
    l->f->multiply(n * l->group, l->Dp, before + n, w->w, 1, (size_t)w->lanes, w->V, D,
                   w->o, D, false);
    for (int i = 0; i < n * l->group; i++) {
        const int t = first + i / l->group, h = g * l->group + i % l->group;
        float *y = a->y + q_at(l, t, h);
        for (int e = 0; e < l->D; e++)
            y[e] += 0.5f * w->o[(size_t)i * D + (size_t)e] / w->sum[i];
    }
}

/* ---- The recurrence ------------------------------------------------------ */

static void token_gates(const sti_lin *l, const worker *w, const float *k)
{
    l->f->softmax(w->pk, k, l->D);
    for (int i = 0; i < l->D; i++) w->gamma[i] = gate_of(k[i]);
}

static void advance(const sti_lin *l, const sti_linear_args *a, const worker *w,
                    float *S, int g, int t)
{
    token_gates(l, w, a->in.k + kv_at(l, t, g));
    sti_panel_row(w->v, a->in.v + kv_at(l, t, g), l->D, l->Dp);
    l->f->decay(S, (size_t)l->Dp, l->D, l->Dp, w->gamma, w->pk, w->v);
}

/* pq = softmax(q) of the group's heads. */
static void query_features(const sti_lin *l, const sti_linear_args *a, const worker *w,
                           int g, int t)
{
    for (int e = 0; e < l->group; e++)
        l->f->softmax(w->pq + (size_t)e * (size_t)l->Dp,
                      a->in.q + q_at(l, t, g * l->group + e), l->D);
}

static void run_head(const sti_lin *l, const sti_linear_args *a, const worker *w, int g)
{
    const size_t D = (size_t)l->D, Dp = (size_t)l->Dp;
    float *state = (float *)a->state->s + (size_t)g * D * D;
    for (size_t i = 0; i < D; i++)
        sti_panel_row(w->S + i * Dp, state + i * D, l->D, l->Dp);
    for (int t = 0; t < a->T; t++) {
        advance(l, a, w, w->S, g, t);
        query_features(l, a, w, g, t);
        l->f->multiply(l->group, l->Dp, l->D, w->pq, Dp, 1, w->S, Dp, w->yq, Dp, false);
        for (int e = 0; e < l->group; e++) {
            float *y = a->y + q_at(l, t, g * l->group + e);
            for (size_t i = 0; i < D; i++) y[i] = 0.5f * w->yq[(size_t)e * Dp + i];
        }
    }
    for (size_t i = 0; i < D; i++)
        memcpy(state + i * D, w->S + i * Dp, D * sizeof *state);
    for (int first = 0; first < a->T; first += w->tokens)
        window_tile(l, a, w, g, first,
                    a->T - first < w->tokens ? a->T - first : w->tokens);
}

static void work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, j->l, false);
    for (int u = me; u < j->l->n * j->l->G; u += workers)
        run_head(j->l, &j->l->a[u / j->l->G], &w, u % j->l->G);
}

/* Of one worker, in whole lines. */
static size_t worker_bytes(const sti_lin *l)
{
    worker w;
    sti_carve c = {0};
    carve(&c, &w, l, false);
    return (c.used + 63) / 64 * 64;
}

size_t sti_cpu_liger_scratch(const sti_lin *l)
{
    return (size_t)l->workers * worker_bytes(l);
}

void sti_cpu_liger(sti_dev *dev, const sti_lin *l)
{
    job j = {.l = l, .bytes = worker_bytes(l), .memory = dev->scratch.p};
    sti_pool_run(dev->pool, work, &j);
}

/* ---- Backward ------------------------------------------------------------ */

/* Row of a head's token in dq, dk and dv. */
static size_t row_at(const job *j, int head, int t)
{
    return ((size_t)head * (size_t)j->l->a->T + (size_t)t) * (size_t)j->l->Dp;
}

/* p = w / sum, y = 1/2 p V: with dn = dy / (2 sum),
 *   dl_j = w_j (dn.v_j - sum_i w_i dn.v_i / sum),  dv_j += w_j dn */
static void window_backward(const job *j, const worker *w, int g, int first, int n)
{
    const sti_lin *l = j->l;
    const sti_linear_args *a = l->a;
    const size_t D = (size_t)l->Dp, ld = (size_t)w->lanes;
    const int used = n * l->group;
    const int before = first < a->window - 1 ? first : a->window - 1;
    const int keys = before + n;
    for (int r = 0; r < keys; r++) {
        const int t = first - before + r;
        sti_panel_row(w->K + (size_t)r * D, a->in.k + kv_at(l, t, g), l->D, l->Dp);
        sti_lin_rotate(l, w->K + (size_t)r * D, t);
        sti_panel_row(w->V + (size_t)r * D, a->in.v + kv_at(l, t, g), l->D, l->Dp);
    }
    load_queries(l, a, w, 0, g, first, n);
    const int lanes = window_weights(l, w, before, n);
    for (int i = 0; i < used; i++) {
        const int t = first + i / l->group, h = g * l->group + i % l->group;
        float *dn = w->dn + (size_t)i * D;
        sti_panel_row(dn, a->dy + q_at(l, t, h), l->D, l->Dp);
        for (int e = 0; e < l->D; e++) dn[e] *= 0.5f / w->sum[i];
    }
    l->f->transpose(w->dn, D, used, l->D, 1, w->trans, ld);
    l->f->multiply(keys, lanes, l->D, w->V, D, 1, w->trans, ld, w->d, ld, false);
    float *mean = w->top; /* free by now */
    memset(mean, 0, ld * sizeof *mean);
    l->f->dot(w->w, w->d, keys, ld, lanes, mean);
    for (int i = 0; i < lanes; i++) mean[i] /= -w->sum[i];
    float *ignored = w->sum;
    l->f->softmax_backward(w->w, w->d, keys, ld, lanes, mean, ignored);

    const float scale = 1 / sqrtf((float)l->D);
    l->f->multiply(used, l->Dp, keys, w->d, 1, ld, w->K, D, w->o, D, false);
    l->f->multiply(keys, l->Dp, used, w->d, ld, 1, w->q, D, w->dK, D, false);
    l->f->multiply(keys, l->Dp, used, w->w, ld, 1, w->dn, D, w->dV, D, false);
    for (int i = 0; i < used; i++) {
        float *dq =
            j->dq + row_at(j, g * l->group + i % l->group, first + i / l->group);
        for (size_t e = 0; e < D; e++) dq[e] = scale * w->o[(size_t)i * D + e];
    }
    for (int r = 0; r < keys; r++) {
        const size_t at = row_at(j, g, first - before + r);
        l->f->add_scaled(j->dk + at, w->dK + (size_t)r * D, scale, l->Dp);
        l->f->add_scaled(j->dv + at, w->dV + (size_t)r * D, 1, l->Dp);
    }
}

/* dx += the gradient through p = softmax(x). */
static void softmax_backward(const sti_lin *l, const float *p, const float *dp,
                             float *dx)
{
    float mean = 0;
    l->f->row_dots(p, 0, dp, 0, 1, l->Dp, &mean);
    for (int i = 0; i < l->D; i++) dx[i] += p[i] * (dp[i] - mean);
}

/* Token t of the recurrence, S before and after it known; dS is the gradient of S_t:
 *   dS += 1/2 softmax(q) dy^T over the query heads of g
 *   d softmax(k) = dS v, dv += dS^T softmax(k), dgamma_i = sum_e dS_ie S_{t-1,ie}
 *   dS <- diag(gamma) dS,   dgamma/dk = gamma (1 - sigmoid(k)) / 16 */
static void token_backward(const job *j, const worker *w, const float *before, int g,
                           int t)
{
    const sti_lin *l = j->l;
    const sti_linear_args *a = l->a;
    const size_t D = (size_t)l->Dp;
    float *dk = j->dk + row_at(j, g, t), *dv = j->dv + row_at(j, g, t);
    const float *after = before + (size_t)l->D * D;
    query_features(l, a, w, g, t);
    for (int e = 0; e < l->group; e++) {
        float *dy = w->yq + (size_t)e * D;
        sti_panel_row(dy, a->dy + q_at(l, t, g * l->group + e), l->D, l->Dp);
        for (int i = 0; i < l->D; i++) dy[i] *= 0.5f;
        memset(w->dp, 0, D * sizeof *w->dp);
        l->f->row_dots(after, D, dy, 0, l->D, l->Dp, w->dp);
        softmax_backward(l, w->pq + (size_t)e * D, w->dp,
                         j->dq + row_at(j, g * l->group + e, t));
    }
    l->f->multiply(l->D, l->Dp, l->group, w->pq, 1, D, w->yq, D, w->dS, D, true);

    const float *k = a->in.k + kv_at(l, t, g);
    token_gates(l, w, k);
    sti_panel_row(w->v, a->in.v + kv_at(l, t, g), l->D, l->Dp);
    memset(w->dp, 0, D * sizeof *w->dp);
    l->f->row_dots(w->dS, D, w->v, 0, l->D, l->Dp, w->dp);
    l->f->row_dots(w->dS, D, before, D, l->D, l->Dp, w->dgamma);
    l->f->multiply(1, l->Dp, l->D, w->pk, 0, 1, w->dS, D, dv, D, true);
    for (int i = 0; i < l->D; i++) {
        dk[i] += w->dgamma[i] * w->gamma[i] / (16 * (1 + expf(k[i])));
        for (size_t e = 0; e < D; e++) w->dS[(size_t)i * D + e] *= w->gamma[i];
    }
    softmax_backward(l, w->pk, w->dp, dk);
}

/* The recurrence of kv head g, last token first; adds to dq, dk and dv. */
static void recurrence_backward(const job *j, const worker *w, int g)
{
    const sti_lin *l = j->l;
    const sti_linear_args *a = l->a;
    const size_t panel = (size_t)l->D * (size_t)l->Dp, bytes = panel * sizeof(float);
    const int T = a->T, steps = (T + STEP - 1) / STEP;
    float *saved = j->saved + (size_t)g * (size_t)steps * panel;
    memset(w->S, 0, bytes);
    for (int t = 0; t < T; t++) {
        if (t % STEP == 0) memcpy(saved + (size_t)(t / STEP) * panel, w->S, bytes);
        advance(l, a, w, w->S, g, t);
    }
    memset(w->dS, 0, bytes);
    for (int s = steps - 1; s >= 0; s--) {
        const int first = s * STEP, n = T - first < STEP ? T - first : STEP;
        memcpy(w->steps, saved + (size_t)s * panel, bytes);
        for (int i = 0; i < n; i++) {
            float *next = w->steps + (size_t)(i + 1) * panel;
            memcpy(next, next - panel, bytes);
            advance(l, a, w, next, g, first + i);
        }
        for (int i = n - 1; i >= 0; i--)
            token_backward(j, w, w->steps + (size_t)i * panel, g, first + i);
    }
}

/* The window's gradients are those of rotated vectors: they are rotated back before the
 * recurrence adds its own. */
static void head_backward(const job *j, const worker *w, int g)
{
    const sti_lin *l = j->l;
    const sti_linear_args *a = l->a;
    const size_t rows = (size_t)a->T * (size_t)l->Dp * sizeof(float);
    const size_t row = (size_t)l->D * sizeof(float);
    memset(j->dk + row_at(j, g, 0), 0, rows);
    memset(j->dv + row_at(j, g, 0), 0, rows);
    for (int t = 0; t < a->T; t += w->tokens)
        window_backward(j, w, g, t, a->T - t < w->tokens ? a->T - t : w->tokens);
    for (int t = 0; t < a->T; t++) {
        sti_lin_rotate(l, j->dk + row_at(j, g, t), -(int64_t)t);
        for (int h = g * l->group; h < (g + 1) * l->group; h++)
            sti_lin_rotate(l, j->dq + row_at(j, h, t), -(int64_t)t);
    }
    recurrence_backward(j, w, g);
    for (int t = 0; t < a->T; t++) {
        const size_t to = kv_at(l, t, g), from = row_at(j, g, t);
        if (a->grad.k) memcpy(a->grad.k + to, j->dk + from, row);
        if (a->grad.v) memcpy(a->grad.v + to, j->dv + from, row);
        for (int h = g * l->group; a->grad.q && h < (g + 1) * l->group; h++)
            memcpy(a->grad.q + q_at(l, t, h), j->dq + row_at(j, h, t), row);
    }
}

static void backward_work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, j->l, true);
    for (int g = me; g < j->l->G; g += workers) head_backward(j, &w, g);
}

still_status sti_cpu_liger_backward(sti_dev *dev, const sti_lin *l, still_error *err)
{
    const size_t T = (size_t)l->a->T, D = (size_t)l->Dp, size = sizeof(float);
    const size_t H = (size_t)l->H, G = (size_t)l->G, steps = (T + STEP - 1) / STEP;
    worker w;
    sti_carve one = {0};
    carve(&one, &w, l, true);
    job j = {.l = l, .bytes = (one.used + 63) / 64 * 64};
    for (int pass = 0; pass < 2; pass++) {
        sti_carve c = {.base = pass ? dev->scratch.p : NULL};
        j.memory = sti_carve_take(&c, (size_t)l->workers, j.bytes);
        j.dq = sti_carve_take(&c, H * T * D, size);
        j.dk = sti_carve_take(&c, G * T * D, size);
        j.dv = sti_carve_take(&c, G * T * D, size);
        j.saved = sti_carve_take(&c, G * steps * (size_t)l->D * D, size);
        if (pass == 0) STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    }
    sti_pool_run(dev->pool, backward_work, &j);
    return STILL_OK;
}
