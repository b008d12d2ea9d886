/* match.c - the hybrid operator's attention weights held against those of full
 * softmax (sti_hybrid_match_args); equations in backend/ref/hybrid/match.c.
 *
 * The teacher sees all pairs, so time grows with T^2: four products of D or P numbers
 * and an exponential per pair. Work is cut by (sequence, head). A head holds its folded
 * keys in the order in which they are folded, so that those a span sees are the first
 * rows of one panel, and walks over tiles of queries, one query to a lane:
 *
 *   p [folded, TILE]   teacher's weights, then df = a / den - A / f
 *   f [folded, TILE]   phi(k).phi(q)
 *   dphi(q) = df^T phi(k),   dphi(k) += df phi(q)
 *
 * Of softmax keys only sums over a query's weights are needed: they have no gradient
 * but through the denominator and the window's factor. Arrays of size T exist once per
 * worker; every (sequence, head) has a gradient of its own, and a last step adds them
 * in order. */
#include <float.h>
#include <math.h>

#include "backend/cpu/hybrid/train/train.h"

enum { TILE = STI_TRAIN_TILE };

/* Hides a pair from exponentials; infinity times 0 would not do for their sums. */
static const float hidden = -1e30f;

/* Results of each (sequence, head), [B,H]. */
typedef struct sums {
    float *map_q, *map_k; /* [.,D,Fp]; NULL: not wanted */
    double *loss, *alpha, *window, *bias_q, *bias_k;
} sums;

typedef struct job {
    sti_train t;
    sums s;
    float scale;
    bool queries, keys; /* gradients of their maps are wanted */
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

/* A head and a tile of its queries. */
typedef struct worker {
    int b, h, g, sel;
    sti_panel_map_scratch scratch_q, scratch_k;
    sti_panel_map map_q, map_k;
    int32_t *order;              /* [T] */
    int *start;                  /* [n_spans + 1] */
    float *K, *raw, *phi, *dphi; /* [T, Dp Fp Pp Pp] of folded keys, as in order */
    float *exact;                /* [most_keys, Dp]: softmax keys of a span, own last */
    int n_exact, own;            /* rows of exact; the first of the span itself */
    int first, n, lanes;         /* queries */
    float *q, *raw_q, *phi_q, *dphi_q; /* [TILE, Dp Fp Pp Pp] */
    float *trans;                      /* [max(Dp,Pp), TILE] */
    float *l;                          /* [most_keys, TILE]: logits of softmax keys */
    float *p, *f;                      /* [T, TILE] */
    float *lane;                       /* [LANES, TILE] */
} worker;

/* Numbers of a query: largest logit of softmax keys and of all; sums over softmax keys
 * of e = exp(l - M) and of e (l - M), over folded ones of p, f and p log f; a / den and
 * 1 / sum of the teacher's weights. */
enum { MAX, TOP, SUM_E, MEAN_E, SUM_P, SUM_F, SUM_LOG, SHARE, WEIGHT, LANES };

static float *lane(const worker *w, int which)
{
    return w->lane + which * TILE;
}

static void carve(sti_carve *c, worker *w, const sti_train *t)
{
    const size_t T = (size_t)t->a->T, keys = (size_t)t->most_keys;
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t size = sizeof(float);
    w->scratch_q = sti_panel_map_carve(c, &t->a->shape, false);
    w->scratch_k = sti_panel_map_carve(c, &t->a->shape, false);
    w->order = sti_carve_take(c, T, sizeof *w->order);
    w->start = sti_carve_take(c, (size_t)t->n_spans + 1, sizeof *w->start);
    w->K = sti_carve_take(c, T * D, size);
    w->raw = sti_carve_take(c, T * F, size);
    w->phi = sti_carve_take(c, T * P, size);
    w->dphi = sti_carve_take(c, T * P, size);
    w->exact = sti_carve_take(c, keys * D, size);
    w->q = sti_carve_take(c, TILE * D, size);
    w->raw_q = sti_carve_take(c, TILE * F, size);
    w->phi_q = sti_carve_take(c, TILE * P, size);
    w->dphi_q = sti_carve_take(c, TILE * P, size);
    w->trans = sti_carve_take(c, TILE * (D > P ? D : P), size);
    w->l = sti_carve_take(c, TILE * keys, size);
    w->p = sti_carve_take(c, TILE * T, size);
    w->f = sti_carve_take(c, TILE * T, size);
    w->lane = sti_carve_take(c, LANES * TILE, size);
}

/* ---- Keys ---------------------------------------------------------------- */

static void load_key(const worker *w, const sti_train *t, int j, float *to)
{
    const size_t at = sti_train_row(t, w->b, j, t->G, w->g) * (size_t)t->D;
    sti_panel_row(to, t->a->in.k + at, t->D, t->Dp);
}

/* All keys that are ever folded, and their features. */
static void load_folded(const worker *w, const sti_train *t)
{
    const int n = w->start[t->n_spans];
    for (int i = 0; i < n; i++)
        load_key(w, t, w->order[i], w->K + (size_t)i * (size_t)t->Dp);
    sti_panel_map_rows(t->f, &w->map_k, w->K, n, w->raw, w->phi);
    memset(w->dphi, 0, (size_t)n * (size_t)t->Pp * sizeof *w->dphi);
}

/* The salient keys of span c, the span before, and the span itself. */
static void load_exact(worker *w, const sti_train *t, int c)
{
    const int first = c * t->span, window = c > 0 ? first - t->span : 0;
    w->n_exact = 0;
    for (int j = 0; t->set->has_window && j < sti_train_span_end(t, c); j++) {
        if (j < window && sti_train_fold_of(t, w->b, w->sel, j) <= c) continue;
        if (j == first) w->own = w->n_exact;
        load_key(w, t, j, w->exact + (size_t)w->n_exact++ * (size_t)t->Dp);
    }
}

/* ---- A tile of queries --------------------------------------------------- */

/* The teacher's weights: logits of all keys, MAX, TOP, SUM_E, MEAN_E; p and SUM_P. */
static void teacher_weights(worker *w, const sti_train *t, int folded)
{
    const size_t D = (size_t)t->Dp;
    const int diag = w->own + w->first % t->span; /* row of the first query */
    for (int i = 0; i < w->n; i++) {
        const size_t row = sti_train_row(t, w->b, w->first + i, t->H, w->h);
        sti_panel_row(w->q + (size_t)i * D, t->a->in.q + row * (size_t)t->D, t->D,
                      t->Dp);
    }
    memset(w->lane, 0, LANES * TILE * sizeof *w->lane);
    for (int i = 0; i < TILE; i++) lane(w, MAX)[i] = -INFINITY;
    t->f->transpose(w->q, D, w->n, t->D, t->scale, w->trans, TILE);
    if (w->n_exact > 0) {
        const int rows = diag + w->n;
        t->f->multiply(rows, w->lanes, t->D, w->exact, D, 1, w->trans, TILE, w->l, TILE,
                       false);
        sti_train_mask(w->l, rows, diag, w->lanes, hidden);
        t->f->lane_max(w->l, rows, TILE, w->lanes, lane(w, MAX));
        t->f->exp_moments(w->l, rows, TILE, w->lanes, lane(w, MAX), lane(w, SUM_E),
                          lane(w, MEAN_E));
    }
    memcpy(lane(w, TOP), lane(w, MAX), TILE * sizeof *w->lane);
    if (folded == 0) return;
    t->f->multiply(folded, w->lanes, t->D, w->K, D, 1, w->trans, TILE, w->p, TILE,
                   false);
    if (!t->set->has_window) sti_train_mask(w->p, folded, w->first, w->lanes, hidden);
    t->f->lane_max(w->p, folded, TILE, w->lanes, lane(w, TOP));
    t->f->exp_shifted(w->p, folded, TILE, w->lanes, lane(w, TOP), 1, lane(w, SUM_P));
}

/* The student's weights of folded keys: phi(q), f and SUM_F. */
static void linear_weights(const worker *w, const sti_train *t, int folded)
{
    const size_t P = (size_t)t->Pp;
    sti_panel_map_rows(t->f, &w->map_q, w->q, w->n, w->raw_q, w->phi_q);
    t->f->transpose(w->phi_q, P, w->n, t->Pp, 1, w->trans, TILE);
    t->f->multiply(folded, w->lanes, t->Pp, w->phi, P, 1, w->trans, TILE, w->f, TILE,
                   false);
    if (!t->set->has_window) sti_train_mask(w->f, folded, w->first, w->lanes, 0);
    t->f->lane_sum(w->f, folded, TILE, w->lanes, lane(w, SUM_F));
}

/* From the sums of a query: its loss but for SUM_LOG, its part of the gradients of
 * alpha and the window factor, and what its pairs need: SHARE and WEIGHT. */
static void query_loss(const job *j, const worker *w, bool linear)
{
    const sti_train *t = &j->t;
    const bool scaled = t->set->la_scale == STI_SCALE_EXACT;
    const size_t head = (size_t)w->b * (size_t)t->H + (size_t)w->h;
    const double alpha =
        t->set->alpha && t->a->in.alpha ? (double)t->a->in.alpha[w->h] : 0;
    const double factor = (double)sti_train_window_factor(t, w->h);
    for (int i = 0; i < w->n; i++) {
        const double most = (double)lane(w, MAX)[i], top = (double)lane(w, TOP)[i];
        const double sum_f = (double)lane(w, SUM_F)[i];
        double M = scaled && linear ? fmax(most, alpha) : most;
        if (t->a->max_in)
            M = (double)t->a->max_in[sti_train_row(t, w->b, w->first + i, t->H, w->h)];
        const double shift = !scaled && linear ? M + fmax(alpha, 0) : M;
        const double log_a = scaled ? alpha - M : fmin(alpha, 0);
        const double a = linear ? exp(log_a) : 0;

        /* Softmax keys: e is relative to MAX, the teacher to TOP, w to the shift. */
        double sum_e = 0, mean = 0, sum_w = 0;
        if (w->n_exact > 0) {
            sum_e = exp(most - top) * (double)lane(w, SUM_E)[i];
            mean = most + (double)lane(w, MEAN_E)[i] / (double)lane(w, SUM_E)[i];
            sum_w = factor * exp(most - shift) * (double)lane(w, SUM_E)[i];
        }
        const double all = sum_e + (double)lane(w, SUM_P)[i];
        const double soft_share = sum_e / all;
        const double folded_share = (double)lane(w, SUM_P)[i] / all;
        const double den = fmax(t->set->den_eps + sum_w + a * sum_f, DBL_MIN);
        double loss = log(den);
        if (w->n_exact > 0) loss -= soft_share * (log(factor) + mean - shift);
        if (linear) loss -= folded_share * log_a;
        j->s.loss[head] += loss;
        if (linear) j->s.alpha[head] += a * sum_f / den - folded_share;
        j->s.window[head] += (1 - factor) * (sum_w / den - soft_share);
        lane(w, SHARE)[i] = (float)(a / den);
        lane(w, WEIGHT)[i] = (float)(1 / all);
    }
}

/* p becomes df; from it dphi(k), dphi(q) and the gradient of the map of q. */
static void pair_gradients(const job *j, const worker *w, int folded)
{
    const sti_train *t = &j->t;
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t head = (size_t)w->b * (size_t)t->H + (size_t)w->h;
    t->f->match(w->p, w->f, folded, TILE, w->lanes, (float)STI_MATCH_FLOOR,
                lane(w, SHARE), lane(w, WEIGHT), lane(w, SUM_LOG));
    for (int i = 0; i < w->n; i++)
        j->s.loss[head] -= (double)lane(w, SUM_LOG)[i] * (double)lane(w, WEIGHT)[i];
    if (!t->set->has_window) sti_train_mask(w->p, folded, w->first, w->lanes, 0);
    if (j->keys)
        t->f->multiply(folded, t->Pp, w->n, w->p, TILE, 1, w->phi_q, P, w->dphi, P,
                       true);
    if (!j->queries) return;
    t->f->multiply(w->n, t->Pp, folded, w->p, 1, TILE, w->phi, P, w->dphi_q, P, false);
    j->s.bias_q[head] += (double)t->f->features_backward(&w->map_q, w->q, w->raw_q,
                                                         w->n, w->dphi_q, NULL);
    if (j->s.map_q)
        t->f->multiply(t->D, t->Fp, w->n, w->q, 1, D, w->raw_q, F,
                       j->s.map_q + head * (size_t)t->D * F, F, true);
}

static void run_tile(const job *j, worker *w, int first, int n)
{
    const sti_train *t = &j->t;
    const int folded = t->set->has_window ? w->start[first / t->span + 1] : first + n;
    w->first = first;
    w->n = n;
    w->lanes = sti_panel_padded(n);
    teacher_weights(w, t, folded);
    if (folded > 0) linear_weights(w, t, folded);
    query_loss(j, w, folded > 0);
    if (folded > 0) pair_gradients(j, w, folded);
}

/* ---- A head -------------------------------------------------------------- */

/* From dphi(k) to the map of k. */
static void map_keys_backward(const job *j, const worker *w)
{
    const sti_train *t = &j->t;
    const size_t D = (size_t)t->Dp, F = (size_t)t->Fp, P = (size_t)t->Pp;
    const size_t head = (size_t)w->b * (size_t)t->H + (size_t)w->h;
    const int all = w->start[t->n_spans];
    for (int i = 0; i < all; i += TILE) {
        const int n = all - i < TILE ? all - i : TILE;
        const float *k = w->K + (size_t)i * D;
        float *raw = w->raw + (size_t)i * F;
        j->s.bias_k[head] += (double)t->f->features_backward(
            &w->map_k, k, raw, n, w->dphi + (size_t)i * P, NULL);
        if (j->s.map_k)
            t->f->multiply(t->D, t->Fp, n, k, 1, D, raw, F,
                           j->s.map_k + head * (size_t)t->D * F, F, true);
    }
}

static void run_head(const job *j, worker *w, int b, int h)
{
    const sti_train *t = &j->t;
    const size_t part = (size_t)t->D * (size_t)t->Fp;
    const size_t head = (size_t)b * (size_t)t->H + (size_t)h;
    w->b = b;
    w->h = h;
    w->g = h / t->per_kv;
    w->sel = h / t->per_sel;
    w->own = 0;
    w->map_q = sti_train_map_q(t, h, &w->scratch_q);
    w->map_k = sti_train_map_k(t, w->sel, &w->scratch_k);
    double *const zero[] = {j->s.loss, j->s.alpha, j->s.window, j->s.bias_q,
                            j->s.bias_k};
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) zero[i][head] = 0;
    if (j->s.map_q) memset(j->s.map_q + head * part, 0, part * sizeof(float));
    if (j->s.map_k) memset(j->s.map_k + head * part, 0, part * sizeof(float));

    sti_train_fold_order(t, b, w->sel, w->order, w->start);
    load_folded(w, t);
    for (int c = 0; c < t->n_spans; c++) {
        const int end = sti_train_span_end(t, c);
        load_exact(w, t, c);
        for (int first = c * t->span; first < end; first += TILE)
            run_tile(j, w, first, end - first < TILE ? end - first : TILE);
    }
    if (j->keys) map_keys_backward(j, w);
}

static void head_work(void *v, int me, int workers)
{
    const job *j = v;
    worker w = {0};
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, &j->t);
    for (int u = me; u < j->t.a->B * j->t.H; u += workers)
        run_head(j, &w, u / j->t.H, u % j->t.H);
}

/* ---- Sums ---------------------------------------------------------------- */

/* grad [H / per, D, F] += scale times the parts [B,H,D,Fp], `per` query heads to one.
 */
static void add_maps(const job *j, float *grad, const float *part, int per, int head)
{
    const sti_train *t = &j->t;
    float *to = grad + (size_t)head * (size_t)t->D * (size_t)t->F;
    for (int b = 0; b < t->a->B; b++)
        for (int h = head * per; h < (head + 1) * per; h++)
            for (int r = 0; r < t->D; r++) {
                const size_t row =
                    ((size_t)b * (size_t)t->H + (size_t)h) * (size_t)t->D + (size_t)r;
                const float *x = part + row * (size_t)t->Fp;
                float *y = to + (size_t)r * (size_t)t->F;
                for (int i = 0; i < t->F; i++) y[i] += j->scale * x[i];
            }
}

/* The same of single numbers. */
static void add_numbers(const job *j, float *grad, const double *part, int per)
{
    for (int head = 0; grad && head < j->t.H / per; head++) {
        double sum = 0;
        for (int b = 0; b < j->t.a->B; b++)
            for (int h = head * per; h < (head + 1) * per; h++)
                sum += part[b * j->t.H + h];
        grad[head] += (float)((double)j->scale * sum);
    }
}

static void sum_work(void *v, int me, int workers)
{
    const job *j = v;
    const sti_train *t = &j->t;
    const sti_hybrid_grad *grad = &t->a->grad;
    for (int h = me; j->s.map_q && h < t->H; h += workers)
        add_maps(j, grad->map_q, j->s.map_q, 1, h);
    for (int s = me; j->s.map_k && s < t->S; s += workers)
        add_maps(j, grad->map_k, j->s.map_k, t->per_sel, s);
    if (me != 0) return;
    add_numbers(j, grad->alpha, j->s.alpha, 1);
    add_numbers(j, grad->window_logit, j->s.window, 1);
    add_numbers(j, grad->bias_q, j->s.bias_q, 1);
    add_numbers(j, grad->bias_k, j->s.bias_k, t->per_sel);
}

static void carve_sums(sti_carve *c, job *j)
{
    const sti_hybrid_grad *grad = &j->t.a->grad;
    const size_t heads = (size_t)j->t.a->B * (size_t)j->t.H;
    const size_t part = (size_t)j->t.D * (size_t)j->t.Fp;
    sums *s = &j->s;
    double **number[] = {&s->loss, &s->alpha, &s->window, &s->bias_q, &s->bias_k};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        *number[i] = sti_carve_take(c, heads, sizeof(double));
    if (grad->map_q) s->map_q = sti_carve_take(c, heads * part, sizeof(float));
    if (grad->map_k) s->map_k = sti_carve_take(c, heads * part, sizeof(float));
}

still_status sti_cpu_hybrid_match(sti_dev *dev, const sti_hybrid_match_args *a,
                                  still_error *err)
{
    const sti_hybrid_grad *grad = &a->p->grad;
    job j = {.scale = a->scale,
             .queries = grad->map_q || grad->bias_q,
             .keys = grad->map_k || grad->bias_k};
    STI_TRY(sti_train_new(&j.t, dev, a->p, err));
    STI_TRY(sti_hybrid_match_check(a->p->set, err));
    STI_TRY(sti_train_count_keys(&j.t, dev, err));
    const size_t workers = (size_t)sti_pool_threads(dev->pool);
    worker w;
    sti_carve one = {0};
    carve(&one, &w, &j.t);
    j.bytes = (one.used + 63) / 64 * 64;
    sti_carve c = {0};
    sti_carve_take(&c, workers, j.bytes);
    carve_sums(&c, &j);
    STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    c = (sti_carve){.base = dev->scratch.p};
    j.memory = sti_carve_take(&c, workers, j.bytes);
    carve_sums(&c, &j);

    sti_pool_run(dev->pool, head_work, &j);
    sti_pool_run(dev->pool, sum_work, &j);
    *a->loss = 0;
    for (int u = 0; u < j.t.a->B * j.t.H; u++) *a->loss += j.s.loss[u];
    return STILL_OK;
}
