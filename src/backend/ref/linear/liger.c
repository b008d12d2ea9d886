/* liger.c - Liger: gated linear attention made of the key projection, half and
 * half with a sliding window.
 *
 *   gamma_t = sigmoid(k_t)^(1/16)            per channel, k before RoPE
 *   S_t     = diag(gamma_t) S_{t-1} + softmax(k_t) v_t^T
 *   y_t     = 1/2 softmax(q_t)^T S_t + 1/2 (softmax attention over the last `window`
 *             tokens, q and k rotated, scaled by 1/sqrt(D))
 *
 * Gate and features of a key belong to its kv head, so the state does too. */
#include <stdlib.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"
#include "ops/linear.h"

static const double gate_power = 1.0 / 16;

/* sigmoid(x)^(1/16), through log sigmoid(x) = -log(1 + e^-x), safe at both ends. */
static double gate_of(double x)
{
    const double log_sigmoid = x > 0 ? -log1p(exp(-x)) : x - log1p(exp(x));
    return exp(log_sigmoid * gate_power);
}

static void softmax_of(const double *x, double *p, int n)
{
    memcpy(p, x, (size_t)n * sizeof *x);
    sti_ref_softmax(p, n);
}

/* dx += the gradient through p = softmax(x). */
static void softmax_backward(const double *p, const double *dp, double *dx, int n)
{
    const double mean = sti_ref_dot(p, dp, n);
    for (int i = 0; i < n; i++) dx[i] += p[i] * (dp[i] - mean);
}

/* S <- diag(gamma) S + softmax(k) v^T */
static void advance(double *S, const double *k, const double *v, int D)
{
    double p[STI_HEAD_DIM_MAX];
    softmax_of(k, p, D);
    for (int i = 0; i < D; i++) {
        double *row = S + (size_t)i * D;
        const double gamma = gate_of(k[i]);
        for (int e = 0; e < D; e++) row[e] = gamma * row[e] + p[i] * v[e];
    }
}

/* y = 1/2 softmax(q)^T S */
static void read_state(const double *S, const double *q, double *y, int D)
{
    double p[STI_HEAD_DIM_MAX];
    softmax_of(q, p, D);
    memset(y, 0, (size_t)D * sizeof *y);
    for (int i = 0; i < D; i++) sti_ref_axpy(0.5 * p[i], S + (size_t)i * D, y, D);
}

still_status sti_ref_liger_forward(const sti_linear_args64 *a, still_error *err)
{
    STI_TRY(sti_linear_check(&a->shape, a->T, a->window, err));
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D, W = a->window;
    if (W < 1) return sti_fail(err, STILL_E_ARG, "liger: window of %d tokens", W);
    double *weight = sti_alloc((size_t)W, sizeof *weight);
    if (!weight)
        return sti_fail_memory(err, "liger window", (size_t)W * sizeof *weight);
    sti_linear_state *st = a->state;
    const size_t head = (size_t)W * D;
    for (int row = 0; row < a->T; row++, st->pos++) {
        const int64_t t = st->pos, first = t - W + 1 > 0 ? t - W + 1 : 0;
        for (int g = 0; g < G; g++) {
            const size_t from = ((size_t)row * G + g) * D;
            const size_t at = (size_t)g * head + (size_t)(t % W) * D;
            double *key = (double *)st->win_k + at;
            memcpy(key, a->in.k + from, (size_t)D * sizeof *key);
            sti_ref_rope(key, D, t, a->in.inv_freq, a->in.interleaved);
            memcpy((double *)st->win_v + at, a->in.v + from, (size_t)D * sizeof *key);
            advance((double *)st->s + (size_t)g * D * D, a->in.k + from, a->in.v + from,
                    D);
        }
        for (int h = 0; h < H; h++) {
            const size_t at = ((size_t)row * H + h) * D;
            const size_t g = (size_t)(h / (H / G));
            double *y = a->y + at, q[STI_HEAD_DIM_MAX];
            read_state((double *)st->s + g * D * D, a->in.q + at, y, D);
            memcpy(q, a->in.q + at, (size_t)D * sizeof *q);
            sti_ref_rope(q, D, t, a->in.inv_freq, a->in.interleaved);
            const double *keys = (double *)st->win_k + g * head;
            const double *values = (double *)st->win_v + g * head;
            for (int64_t j = first; j <= t; j++)
                weight[j - first] = sti_ref_logit(q, keys + (j % W) * D, D);
            sti_ref_softmax(weight, (int)(t - first) + 1);
            for (int64_t j = first; j <= t; j++)
                sti_ref_axpy(0.5 * weight[j - first], values + (j % W) * D, y, D);
        }
    }
    free(weight);
    return STILL_OK;
}

/* ---- Backward ------------------------------------------------------------ */

typedef struct work {
    double *states;       /* [T + 1, D, D]: S before token t at t */
    double *dS;           /* [D,D] */
    double *q, *k;        /* rotated [T,H,D], [T,G,D] */
    double *dq, *dk;      /* gradients of the rotated ones */
    double *gq, *gk, *gv; /* gradients of the inputs */
    double *weight;       /* [window] */
} work;

static void carve(sti_carve *c, work *w, const sti_linear_args64 *a)
{
    const size_t T = (size_t)a->T, D = (size_t)a->shape.D;
    const size_t nq = T * (size_t)a->shape.H * D, nk = T * (size_t)a->shape.G * D;
    w->states = sti_carve_take(c, (T + 1) * D * D, sizeof(double));
    w->dS = sti_carve_take(c, D * D, sizeof(double));
    w->q = sti_carve_take(c, nq, sizeof(double));
    w->dq = sti_carve_take(c, nq, sizeof(double));
    w->gq = sti_carve_take(c, nq, sizeof(double));
    w->k = sti_carve_take(c, nk, sizeof(double));
    w->dk = sti_carve_take(c, nk, sizeof(double));
    w->gk = sti_carve_take(c, nk, sizeof(double));
    w->gv = sti_carve_take(c, nk, sizeof(double));
    w->weight = sti_carve_take(c, (size_t)a->window, sizeof(double));
}

/* Softmax attention of head h over the window: p = softmax(l), y = 1/2 p V, so
 * dl = p (dp - p.dp) with dp_j = 1/2 dy.v_j. */
static void window_backward(const sti_linear_args64 *a, work *w, int h)
{
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D, g = h / (H / G);
    const double scale = 1 / sqrt((double)D);
    for (int t = 0; t < a->T; t++) {
        const size_t at = ((size_t)t * H + h) * D;
        const int first = t - a->window + 1 > 0 ? t - a->window + 1 : 0;
        const double *dy = a->dy + at;
        for (int j = first; j <= t; j++)
            w->weight[j - first] =
                sti_ref_logit(w->q + at, w->k + ((size_t)j * G + g) * D, D);
        sti_ref_softmax(w->weight, t - first + 1);
        double mean = 0;
        for (int j = first; j <= t; j++)
            mean += w->weight[j - first] * 0.5 *
                    sti_ref_dot(dy, a->in.v + ((size_t)j * G + g) * D, D);
        for (int j = first; j <= t; j++) {
            const size_t kv = ((size_t)j * G + g) * D;
            const double p = w->weight[j - first];
            const double dl = p * (0.5 * sti_ref_dot(dy, a->in.v + kv, D) - mean);
            sti_ref_axpy(0.5 * p, dy, w->gv + kv, D);
            sti_ref_axpy(dl * scale, w->k + kv, w->dq + at, D);
            sti_ref_axpy(dl * scale, w->q + at, w->dk + kv, D);
        }
    }
}

/* The recurrence of kv head g, last token first. dS holds the gradient of S_t:
 *   dS += 1/2 softmax(q) dy^T over the query heads of g
 *   d softmax(k) = dS v, dv += dS^T softmax(k), dgamma_i = sum_e dS_ie S_{t-1,ie}
 *   dS <- diag(gamma) dS
 * gamma = sigmoid(k)^(1/16): dgamma/dk = gamma (1 - sigmoid(k)) / 16. */
static void linear_backward(const sti_linear_args64 *a, work *w, int g)
{
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D, group = H / G;
    const size_t DD = (size_t)D * D;
    double p[STI_HEAD_DIM_MAX], dp[STI_HEAD_DIM_MAX];
    memset(w->states, 0, DD * sizeof(double));
    for (int t = 0; t < a->T; t++) {
        const size_t kv = ((size_t)t * G + g) * D;
        double *next = w->states + ((size_t)t + 1) * DD;
        memcpy(next, next - DD, DD * sizeof(double));
        advance(next, a->in.k + kv, a->in.v + kv, D);
    }
    memset(w->dS, 0, DD * sizeof(double));
    for (int t = a->T - 1; t >= 0; t--) {
        const double *before = w->states + (size_t)t * DD, *after = before + DD;
        for (int h = g * group; h < (g + 1) * group; h++) {
            const size_t at = ((size_t)t * H + h) * D;
            softmax_of(a->in.q + at, p, D);
            for (int i = 0; i < D; i++) {
                dp[i] = 0.5 * sti_ref_dot(after + (size_t)i * D, a->dy + at, D);
                sti_ref_axpy(0.5 * p[i], a->dy + at, w->dS + (size_t)i * D, D);
            }
            softmax_backward(p, dp, w->gq + at, D);
        }
        const size_t kv = ((size_t)t * G + g) * D;
        const double *k = a->in.k + kv;
        softmax_of(k, p, D);
        for (int i = 0; i < D; i++) {
            double *dS = w->dS + (size_t)i * D;
            const double gamma = gate_of(k[i]);
            dp[i] = sti_ref_dot(dS, a->in.v + kv, D);
            sti_ref_axpy(p[i], dS, w->gv + kv, D);
            w->gk[kv + i] += sti_ref_dot(dS, before + (size_t)i * D, D) * gamma *
                             gate_power * sti_ref_sigmoid(-k[i]);
            for (int e = 0; e < D; e++) dS[e] *= gamma;
        }
        softmax_backward(p, dp, w->gk + kv, D);
    }
}

/* out = x after RoPE; rows of `heads` vectors, token after token. */
static void rotate_all(const double *x, double *out, int heads,
                       const sti_linear_args64 *a)
{
    const int D = a->shape.D;
    for (int t = 0; t < a->T; t++)
        for (int h = 0; h < heads; h++) {
            const size_t at = ((size_t)t * heads + h) * D;
            memcpy(out + at, x + at, (size_t)D * sizeof *x);
            sti_ref_rope(out + at, D, t, a->in.inv_freq, a->in.interleaved);
        }
}

/* dx += the gradient d of the rotated vectors, rotated back; d is overwritten. */
static void rotate_all_backward(double *d, double *dx, int heads,
                                const sti_linear_args64 *a)
{
    const int D = a->shape.D;
    for (int t = 0; t < a->T; t++)
        for (int h = 0; h < heads; h++) {
            const size_t at = ((size_t)t * heads + h) * D;
            sti_ref_rope(d + at, D, -t, a->in.inv_freq, a->in.interleaved);
            sti_ref_axpy(1, d + at, dx + at, D);
        }
}

still_status sti_ref_liger_backward(const sti_linear_args64 *a, still_error *err)
{
    STI_TRY(sti_linear_check(&a->shape, a->T, a->window, err));
    if (a->window < 1)
        return sti_fail(err, STILL_E_ARG, "liger: window of %d tokens", a->window);
    const int H = a->shape.H, G = a->shape.G;
    const size_t D = (size_t)a->shape.D;
    const size_t nq = (size_t)a->T * H * D, nk = (size_t)a->T * G * D;
    work w;
    sti_carve c = {0};
    carve(&c, &w, a);
    sti_block block; /* zeroed */
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "liger, backward", c.used);
    c = (sti_carve){.base = block.p};
    carve(&c, &w, a);

    rotate_all(a->in.q, w.q, H, a);
    rotate_all(a->in.k, w.k, G, a);
    for (int h = 0; h < H; h++) window_backward(a, &w, h);
    rotate_all_backward(w.dq, w.gq, H, a);
    rotate_all_backward(w.dk, w.gk, G, a);
    for (int g = 0; g < G; g++) linear_backward(a, &w, g);
    if (a->grad.q) memcpy(a->grad.q, w.gq, nq * sizeof(double));
    if (a->grad.k) memcpy(a->grad.k, w.gk, nk * sizeof(double));
    if (a->grad.v) memcpy(a->grad.v, w.gv, nk * sizeof(double));
    sti_block_free(&block);
    return STILL_OK;
}
