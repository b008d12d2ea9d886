/* backward.c - the gradient of the hybrid operator (STILL eq. 6, 7, 10, 11): the walk
 * over queries, and the sums over heads and sequences at the end. See train.h.
 *
 * With n = sum w_j v_j + a lin g, y = n / den and dn = dy / den, for one query:
 *   dden = -dn.y = -(sum_j w_j dn.v_j + a phi(q).(S (dn g))) / den    y is not needed
 *   softmax key:  dl_j = w_j (dn.v_j + dden),  dv_j += w_j dn
 *   linear term:  dphi(q) = a (S (dn g) + dden z),  dalpha += phi(q).dphi(q)
 *   gate:         dlogit = dn a lin g (1 - g/2)
 * Logits are computed again; the routing and, in window scaling, M are constants. */
#include <math.h>

#include "backend/cpu/hybrid/train/train.h"

enum { TILE = STI_TRAIN_TILE };

/* Memory of a worker. */
typedef struct worker {
    sti_train_walk walk;
    sti_train_tile tile;
    float *dn, *dng;   /* [TILE,Dp] */
    float *d;          /* [most_keys, TILE]: dn.v_j, then dl */
    float *dphi;       /* [TILE,Pp] */
    float *dq;         /* [TILE,Dp] */
    float *dK, *dV;    /* [most_keys, Dp] of the span */
    float *St;         /* [D,Pp]: S transposed */
    float *dden, *lin; /* [TILE]; lin: a phi(q).(S (dn g)) */
} worker;

typedef struct job {
    sti_train t;
    sti_train_sums s;
    bool soft;  /* gradients of logits are wanted */
    bool map_q; /* dphi(q) is wanted */
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

static void carve(sti_carve *c, worker *w, const sti_train *t)
{
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp, keys = (size_t)t->most_keys;
    const size_t size = sizeof(float);
    sti_train_walk_carve(c, &w->walk, t, true);
    sti_train_tile_carve(c, &w->tile, t);
    w->dn = sti_carve_take(c, TILE * D, size);
    w->dng = sti_carve_take(c, TILE * D, size);
    w->d = sti_carve_take(c, TILE * keys, size);
    w->dphi = sti_carve_take(c, TILE * P, size);
    w->dq = sti_carve_take(c, TILE * D, size);
    w->dK = sti_carve_take(c, keys * D, size);
    w->dV = sti_carve_take(c, keys * D, size);
    w->St = sti_carve_take(c, D * P, size);
    w->dden = sti_carve_take(c, TILE, size);
    w->lin = sti_carve_take(c, TILE, size);
}

/* ---- A tile -------------------------------------------------------------- */

/* dn and dn g; rows past n are not written. */
static void load_gradient(const worker *w, const sti_train *t)
{
    const sti_train_tile *r = &w->tile;
    for (int i = 0; i < r->n; i++) {
        const size_t row = sti_train_row(t, w->walk.b, r->first + i, t->H, w->walk.h);
        const size_t at = (size_t)i * (size_t)t->Dp;
        float *dn = w->dn + at, *dng = w->dng + at;
        sti_panel_row(dn, t->a->dy + row * (size_t)t->D, t->D, t->Dp);
        for (int e = 0; e < t->Dp; e++) dn[e] /= r->den[i];
        for (int e = 0; r->linear && e < t->Dp; e++)
            dng[e] = dn[e] * r->gate[at + (size_t)e];
    }
}

/* d = dn.v_j of the softmax keys (or (dn g).v_j of the span's own tokens without a
 * window), dphi = S (dn g), and from both dden. */
static void products_with_values(const worker *w, const sti_train *t)
{
    const sti_train_tile *r = &w->tile;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp;
    const bool window = t->set->has_window;
    memset(w->dden, 0, TILE * sizeof *w->dden);
    memset(w->lin, 0, TILE * sizeof *w->lin);
    if (r->linear) {
        t->f->multiply(r->n, t->Pp, t->D, w->dng, D, 1, w->St, P, w->dphi, P, false);
        t->f->row_dots(r->phi, P, w->dphi, P, r->n, t->Pp, w->lin);
    }
    t->f->transpose(window ? w->dn : w->dng, D, r->n, t->D, 1, r->trans, TILE);
    t->f->multiply(r->keys, r->lanes, t->D, window ? w->walk.V : w->walk.fold_v, D, 1,
                   r->trans, TILE, w->d, TILE, false);
    t->f->dot(r->w, w->d, r->keys, TILE, r->lanes, window ? w->dden : w->lin);
    for (int i = 0; i < TILE; i++) {
        w->lin[i] *= i < r->n ? r->a[i] : 0;
        w->dden[i] = -(w->dden[i] + w->lin[i]) / r->den[i];
    }
}

/* Keys and values of the window and the salient tokens, and their part of dq. */
static void softmax_backward(const job *j, const worker *w)
{
    const sti_train *t = &j->t;
    const sti_train_tile *r = &w->tile;
    const size_t D = (size_t)t->Dp;
    float sum[TILE] = {0};
    if (j->s.dv)
        t->f->multiply(r->keys, t->Dp, r->n, r->w, TILE, 1, w->dn, D, w->dV, D, true);
    if (!j->soft) return;
    t->f->softmax_backward(r->w, w->d, r->keys, TILE, r->lanes, w->dden, sum);
    /* w = sigmoid(omega) exp(.): dw/domega = w (1 - sigmoid) */
    const double slope = 1 - (double)sti_train_window_factor(t, w->walk.h);
    const size_t head = (size_t)w->walk.b * (size_t)t->H + (size_t)w->walk.h;
    for (int i = 0; i < r->n; i++) j->s.window[head] += slope * (double)sum[i];
    if (t->a->grad.q)
        t->f->multiply(r->n, t->Dp, r->keys, w->d, 1, TILE, w->walk.K, D, w->dq, D,
                       false);
    if (j->s.dk)
        t->f->multiply(r->keys, t->Dp, r->n, w->d, TILE, 1, r->q, D, w->dK, D, true);
}

/* phi(q): dphi = a (S (dn g) + dden z), without a window also the span's own tokens;
 * through the map to dq, W and the bias. */
static void map_backward(const job *j, const worker *w)
{
    const sti_train *t = &j->t;
    const sti_train_tile *r = &w->tile;
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    if (!t->set->has_window) {
        for (int k = 0; k < r->keys; k++)
            t->f->add_scaled(w->d + (size_t)k * TILE, w->dden, 1, r->lanes);
        sti_train_mask(w->d, r->keys, 0, r->lanes, 0);
        t->f->multiply(r->n, t->Pp, r->keys, w->d, 1, TILE, w->walk.fold_phi, P,
                       w->dphi, P, true);
    }
    for (int i = 0; i < r->n; i++) {
        float *dphi = w->dphi + (size_t)i * P;
        t->f->add_scaled(dphi, w->walk.z, w->dden[i], t->Pp);
        for (int p = 0; p < t->Pp; p++) dphi[p] *= r->a[i];
    }
    const size_t head = (size_t)w->walk.b * (size_t)t->H + (size_t)w->walk.h;
    const float bias = t->f->features_backward(&w->walk.map_q, r->q, r->raw, r->n,
                                               w->dphi, t->a->grad.q ? w->dq : NULL);
    j->s.bias_q[head] += (double)bias;
    if (j->s.map_q)
        t->f->multiply(t->D, t->Fp, r->n, r->q, 1, D, r->raw, F,
                       j->s.map_q + head * (size_t)t->D * F, F, true);
    if (t->a->grad.q) sti_panel_map_back(t->f, &w->walk.map_q, r->raw, r->n, w->dq);
}

/* Saves what the walk over keys needs of these queries. */
static void save_for_keys(const job *j, const worker *w)
{
    const sti_train *t = &j->t;
    const sti_train_tile *r = &w->tile;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp;
    const size_t head = (size_t)w->walk.b * (size_t)t->H + (size_t)w->walk.h;
    const size_t at = head * (size_t)t->a->T + (size_t)r->first;
    const size_t rows = (size_t)r->n;
    if (!r->linear) return; /* nothing was folded yet: no key reads these */
    memcpy(j->s.dng + at * D, w->dng, rows * D * sizeof(float));
    memcpy(j->s.dden + at, w->dden, rows * sizeof(float));
    for (size_t i = 0; i < rows; i++)
        for (size_t p = 0; p < P; p++)
            j->s.aphi[(at + i) * P + p] = r->a[i] * r->phi[i * P + p];
}

/* dlogit = dn a lin g (1 - g/2), and dq out of its panel. */
static void write_rows(const worker *w, const sti_train *t)
{
    const sti_train_tile *r = &w->tile;
    const sti_hybrid_grad *grad = &t->a->grad;
    for (int i = 0; i < r->n; i++) {
        const size_t at = (size_t)i * (size_t)t->Dp;
        const size_t to =
            sti_train_row(t, w->walk.b, r->first + i, t->H, w->walk.h) * (size_t)t->D;
        if (grad->q) memcpy(grad->q + to, w->dq + at, (size_t)t->D * sizeof(float));
        for (int e = 0; grad->gate_logit && e < t->D; e++) {
            const size_t x = at + (size_t)e;
            grad->gate_logit[to + (size_t)e] =
                r->linear ? w->dng[x] * r->a[i] * r->lin[x] * (1 - r->gate[x] / 2) : 0;
        }
    }
}

static void run_tile(const job *j, worker *w, int first, int n)
{
    const sti_train *t = &j->t;
    const sti_train_tile *r = &w->tile;
    const size_t D = (size_t)t->Dp;
    const size_t head = (size_t)w->walk.b * (size_t)t->H + (size_t)w->walk.h;
    sti_train_weights(&w->walk, &w->tile, first, n);
    load_gradient(w, t);
    products_with_values(w, t);
    if (t->a->grad.q && !t->set->has_window) memset(w->dq, 0, TILE * D * sizeof(float));
    if (t->set->has_window) {
        softmax_backward(j, w);
        for (int i = 0; t->a->grad.q && i < n; i++)
            for (int e = 0; e < t->Dp; e++)
                w->dq[(size_t)i * D + (size_t)e] *= t->scale;
    }
    if (r->linear) {
        for (int i = 0; i < n; i++)
            j->s.alpha[head] += (double)(w->lin[i] + w->dden[i] * r->a[i] * r->sum[i]);
        if (j->s.aphi) save_for_keys(j, w);
        if (j->map_q) map_backward(j, w);
    }
    write_rows(w, t);
}

/* ---- A head -------------------------------------------------------------- */

/* Adds the span's dK, dV to the tokens they belong to. */
static void scatter(const job *j, const worker *w, int keys)
{
    const sti_train *t = &j->t;
    const size_t head = (size_t)w->walk.b * (size_t)t->H + (size_t)w->walk.h;
    for (int k = 0; k < keys; k++) {
        const size_t from = (size_t)k * (size_t)t->Dp;
        const size_t to =
            (head * (size_t)t->a->T + (size_t)w->walk.token[k]) * (size_t)t->Dp;
        if (j->s.dk) t->f->add_scaled(j->s.dk + to, w->dK + from, t->scale, t->Dp);
        if (j->s.dv) t->f->add_scaled(j->s.dv + to, w->dV + from, 1, t->Dp);
    }
}

static void run_head(const job *j, worker *w, int b, int h)
{
    const sti_train *t = &j->t;
    const size_t D = (size_t)t->Dp, P = (size_t)t->Pp, T = (size_t)t->a->T;
    const size_t head = (size_t)b * (size_t)t->H + (size_t)h;
    if (j->s.dk) memset(j->s.dk + head * T * D, 0, T * D * sizeof(float));
    if (j->s.dv) memset(j->s.dv + head * T * D, 0, T * D * sizeof(float));
    if (j->s.map_q)
        memset(j->s.map_q + head * (size_t)t->D * (size_t)t->Fp, 0,
               (size_t)t->D * (size_t)t->Fp * sizeof(float));
    j->s.bias_q[head] = j->s.alpha[head] = j->s.window[head] = 0;

    sti_train_walk_begin(&w->walk, t, b, h);
    for (int c = 0; c < t->n_spans; c++) {
        const int end = sti_train_span_end(t, c);
        sti_train_walk_to(&w->walk, c);
        const int keys = w->walk.own + end - c * t->span;
        const size_t bytes = (size_t)keys * D * sizeof(float);
        const bool window = t->set->has_window;
        if (window && j->s.dk) memset(w->dK, 0, bytes);
        if (window && j->s.dv) memset(w->dV, 0, bytes);
        if (t->set->has_linear) t->f->transpose(w->walk.S, D, t->Pp, t->D, 1, w->St, P);
        for (int first = c * t->span; first < end; first += TILE)
            run_tile(j, w, first, end - first < TILE ? end - first : TILE);
        if (window) scatter(j, w, keys);
    }
}

/* ---- Sums ---------------------------------------------------------------- */

/* grad[b,t,g] = the heads of g, softmax side, then its selection heads, folded side. */
static void add_heads(const sti_train *t, float *grad, const float *soft,
                      const float *fold, int b, int j, int g)
{
    const size_t T = (size_t)t->a->T, Dp = (size_t)t->Dp;
    const int sels = t->S / t->G;
    float sum[STI_HEAD_DIM_MAX] = {0};
    for (int h = g * t->per_kv; soft && h < (g + 1) * t->per_kv; h++)
        t->f->add_scaled(
            sum, soft + (((size_t)b * (size_t)t->H + (size_t)h) * T + (size_t)j) * Dp,
            1, t->Dp);
    for (int s = g * sels; fold && s < (g + 1) * sels; s++)
        t->f->add_scaled(
            sum, fold + (((size_t)b * (size_t)t->S + (size_t)s) * T + (size_t)j) * Dp,
            1, t->Dp);
    memcpy(grad + sti_train_row(t, b, j, t->G, g) * (size_t)t->D, sum,
           (size_t)t->D * sizeof *grad);
}

/* grad [heads,D,F] += the parts [B,heads,D,Fp] of all sequences. */
static void add_maps(const sti_train *t, float *grad, const float *part, int heads,
                     int head)
{
    for (int b = 0; b < t->a->B; b++)
        for (int r = 0; r < t->D; r++) {
            const size_t from =
                ((size_t)b * (size_t)heads + (size_t)head) * (size_t)t->D;
            const float *x = part + (from + (size_t)r) * (size_t)t->Fp;
            float *y = grad + ((size_t)head * (size_t)t->D + (size_t)r) * (size_t)t->F;
            for (int i = 0; i < t->F; i++) y[i] += x[i];
        }
}

/* grad [heads] += the parts [B,heads] of all sequences. */
static void add_numbers(const sti_train *t, float *grad, const double *part, int heads)
{
    for (int h = 0; grad && part && h < heads; h++) {
        double sum = 0;
        for (int b = 0; b < t->a->B; b++) sum += part[b * heads + h];
        grad[h] += (float)sum;
    }
}

/* ---- Entry --------------------------------------------------------------- */

static void query_work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, &j->t);
    for (int u = me; u < j->t.a->B * j->t.H; u += workers)
        run_head(j, &w, u / j->t.H, u % j->t.H);
}

static void key_work(void *v, int me, int workers)
{
    const job *j = v;
    for (int u = me; u < j->t.a->B * j->t.S; u += workers)
        sti_train_keys_run(&j->t, &j->s, u / j->t.S, u % j->t.S,
                           j->memory + (size_t)me * j->bytes);
}

static void sum_work(void *v, int me, int workers)
{
    const job *j = v;
    const sti_train *t = &j->t;
    const sti_hybrid_grad *grad = &t->a->grad;
    int64_t lo, hi;
    sti_split((int64_t)t->a->B * t->a->T, 1, me, workers, &lo, &hi);
    for (int64_t row = lo; row < hi; row++)
        for (int g = 0; g < t->G; g++) {
            const int b = (int)(row / t->a->T), k = (int)(row % t->a->T);
            if (grad->k) add_heads(t, grad->k, j->s.dk, j->s.dk_fold, b, k, g);
            if (grad->v) add_heads(t, grad->v, j->s.dv, j->s.dv_fold, b, k, g);
        }
    for (int h = me; j->s.map_q && h < t->H; h += workers)
        add_maps(t, grad->map_q, j->s.map_q, t->H, h);
    for (int s = me; j->s.map_k && s < t->S; s += workers)
        add_maps(t, grad->map_k, j->s.map_k, t->S, s);
    if (me != 0) return;
    add_numbers(t, grad->bias_q, j->s.bias_q, t->H);
    add_numbers(t, grad->bias_k, j->s.bias_k, t->S);
    add_numbers(t, grad->alpha, j->s.alpha, t->H);
    add_numbers(t, grad->window_logit, j->s.window, t->H);
}

/* Which gradients are wanted, and memory for them. */
static void carve_sums(sti_carve *c, job *j)
{
    const sti_train *t = &j->t;
    const sti_hybrid_grad *grad = &t->a->grad;
    const size_t B = (size_t)t->a->B, T = (size_t)t->a->T, size = sizeof(float);
    const size_t D = (size_t)t->Dp, H = (size_t)t->H, S = (size_t)t->S;
    const size_t map = (size_t)t->D * (size_t)t->Fp;
    const bool window = t->set->has_window, linear = t->set->has_linear;
    const bool keys = linear && (grad->k || grad->v || grad->map_k || grad->bias_k);
    sti_train_sums *s = &j->s;
    *s = (sti_train_sums){0};
    j->soft = window && (grad->q || grad->k || grad->window_logit);
    j->map_q = linear && (grad->q || grad->map_q || grad->bias_q);
    s->alpha = sti_carve_take(c, B * H, sizeof *s->alpha);
    s->window = sti_carve_take(c, B * H, sizeof *s->window);
    s->bias_q = sti_carve_take(c, B * H, sizeof *s->bias_q);
    if (window && grad->k) s->dk = sti_carve_take(c, B * H * T * D, size);
    if (window && grad->v) s->dv = sti_carve_take(c, B * H * T * D, size);
    if (linear && grad->map_q) s->map_q = sti_carve_take(c, B * H * map, size);
    if (!keys) return;
    s->aphi = sti_carve_take(c, B * H * T * (size_t)t->Pp, size);
    s->dng = sti_carve_take(c, B * H * T * D, size);
    s->dden = sti_carve_take(c, B * H * T, size);
    s->bias_k = sti_carve_take(c, B * S, sizeof *s->bias_k);
    if (grad->k) s->dk_fold = sti_carve_take(c, B * S * T * D, size);
    if (grad->v) s->dv_fold = sti_carve_take(c, B * S * T * D, size);
    if (grad->map_k) s->map_k = sti_carve_take(c, B * S * map, size);
}

still_status sti_cpu_hybrid_backward(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                     still_error *err)
{
    job j = {0};
    STI_TRY(sti_train_new(&j.t, dev, a, err));
    STI_TRY(sti_train_count_keys(&j.t, dev, err));
    const size_t workers = (size_t)sti_pool_threads(dev->pool);
    const size_t keys = sti_train_keys_bytes(&j.t);
    worker w;
    sti_carve one = {0};
    carve(&one, &w, &j.t);
    j.bytes = ((one.used > keys ? one.used : keys) + 63) / 64 * 64;
    sti_carve c = {0};
    sti_carve_take(&c, workers, j.bytes);
    carve_sums(&c, &j);
    sti_train_store_carve(&c, &j.t);
    STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    c = (sti_carve){.base = dev->scratch.p};
    j.memory = sti_carve_take(&c, workers, j.bytes);
    carve_sums(&c, &j);
    sti_train_store_carve(&c, &j.t);
    sti_train_store(&j.t, dev);

    sti_pool_run(dev->pool, query_work, &j);
    if (j.s.aphi) sti_pool_run(dev->pool, key_work, &j);
    sti_pool_run(dev->pool, sum_work, &j);
    return STILL_OK;
}
