/* supra.c - SUPRA: linear attention with a ReLU map across heads, a fixed decay
 * for each head and a norm instead of a denominator.
 *
 *   fq_t = rope(relu(q_t W_q + b_q)), fk_t = rope(relu(k_t W_k + b_k)) / sqrt(D)
 *   S_t  = gamma_h S_{t-1} + fk_t v_t^T,   gamma_h = 1 - 2^(-5-h)
 *   o_t  = fq_t^T S_t,   y_t = (o_t - mean) / sqrt(var + 1e-5)   over the D of a head
 *
 * q_t and k_t are all heads of a token as one vector. */
#include <stdlib.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"
#include "ops/linear.h"

static const double norm_eps = 1e-5;

static double decay_of(int h)
{
    return 1 - ldexp(1, -5 - h);
}

/* out = x W + b over n = heads * D numbers of a token. */
static void mix_heads(const double *x, const double *W, const double *b, double *out,
                      int n)
{
    if (W) {
        memset(out, 0, (size_t)n * sizeof *out);
        for (int i = 0; i < n; i++) sti_ref_axpy(x[i], W + (size_t)i * n, out, n);
    } else {
        memcpy(out, x, (size_t)n * sizeof *out);
    }
    if (b) sti_ref_axpy(1, b, out, n);
}

/* Features of the heads of one token; `scale` is 1 for q, 1/sqrt(D) for k. */
static void features(const double *x, const double *W, const double *b, double *out,
                     int heads, int64_t t, double scale, const sti_linear_args64 *a)
{
    const int D = a->shape.D;
    mix_heads(x, W, b, out, heads * D);
    for (int i = 0; i < heads * D; i++) out[i] = fmax(out[i], 0) * scale;
    for (int h = 0; h < heads; h++)
        sti_ref_rope(out + h * D, D, t, a->in.inv_freq, a->in.interleaved);
}

/* Takes df [heads*D], the gradient of one token's features, to x, W and b. df and
 * `raw` [heads*D] are overwritten. */
static void features_backward(const double *x, const double *W, const double *b,
                              double *df, double *raw, int heads, int64_t t,
                              double scale, const sti_linear_args64 *a, double *dx,
                              double *dW, double *db)
{
    const int D = a->shape.D, n = heads * D;
    mix_heads(x, W, b, raw, n);
    for (int h = 0; h < heads; h++)
        sti_ref_rope(df + h * D, D, -t, a->in.inv_freq, a->in.interleaved);
    for (int i = 0; i < n; i++) df[i] = raw[i] > 0 ? df[i] * scale : 0;
    if (db) sti_ref_axpy(1, df, db, n);
    for (int i = 0; i < n; i++) {
        if (dW) sti_ref_axpy(x[i], df, dW + (size_t)i * n, n);
        if (dx) dx[i] = W ? sti_ref_dot(W + (size_t)i * n, df, n) : df[i];
    }
}

/* S <- gamma S + fk v^T */
static void advance(double *S, double gamma, const double *fk, const double *v, int D)
{
    for (int i = 0; i < D; i++)
        for (int e = 0; e < D; e++)
            S[(size_t)i * D + e] = gamma * S[(size_t)i * D + e] + fk[i] * v[e];
}

/* o = fq^T S, normed into y; returns 1 / sqrt(var + eps). */
static double read_state(const double *S, const double *fq, double *y, int D)
{
    memset(y, 0, (size_t)D * sizeof *y);
    for (int i = 0; i < D; i++) sti_ref_axpy(fq[i], S + (size_t)i * D, y, D);
    double mean = 0, var = 0;
    for (int e = 0; e < D; e++) mean += y[e] / D;
    for (int e = 0; e < D; e++) var += (y[e] - mean) * (y[e] - mean) / D;
    const double scale = 1 / sqrt(var + norm_eps);
    for (int e = 0; e < D; e++) y[e] = (y[e] - mean) * scale;
    return scale;
}

still_status sti_ref_supra_forward(const sti_linear_args64 *a, still_error *err)
{
    STI_TRY(sti_linear_check(&a->shape, a->T, a->window, err));
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D;
    const sti_linear_in64 *in = &a->in;
    const size_t both = (size_t)(H + G) * D;
    double *fq = sti_alloc(both, sizeof *fq);
    if (!fq) return sti_fail_memory(err, "supra features", both * sizeof *fq);
    double *fk = fq + (size_t)H * D;
    sti_linear_state *st = a->state;
    for (int row = 0; row < a->T; row++, st->pos++) {
        const size_t q = (size_t)row * H * D, k = (size_t)row * G * D;
        features(in->q + q, in->map_q, in->bias_q, fq, H, st->pos, 1, a);
        features(in->k + k, in->map_k, in->bias_k, fk, G, st->pos, 1 / sqrt((double)D),
                 a);
        for (int h = 0; h < H; h++) {
            const int g = h * G / H;
            double *S = (double *)st->s + (size_t)h * D * D;
            advance(S, decay_of(h), fk + g * D, in->v + k + (size_t)g * D, D);
            read_state(S, fq + h * D, a->y + q + (size_t)h * D, D);
        }
    }
    free(fq);
    return STILL_OK;
}

/* ---- Backward ------------------------------------------------------------ */

typedef struct work {
    double *fq, *fk, *dfq, *dfk; /* features and their gradients, all tokens */
    double *gv;                  /* [T,G,D] */
    double *states;              /* [T,D,D]: S_t of one head */
    double *dS;                  /* [D,D] */
    double *raw;                 /* [H*D] */
} work;

static void carve(sti_carve *c, work *w, const sti_linear_args64 *a)
{
    const size_t T = (size_t)a->T, D = (size_t)a->shape.D;
    const size_t nq = T * (size_t)a->shape.H * D, nk = T * (size_t)a->shape.G * D;
    w->fq = sti_carve_take(c, nq, sizeof(double));
    w->dfq = sti_carve_take(c, nq, sizeof(double));
    w->fk = sti_carve_take(c, nk, sizeof(double));
    w->dfk = sti_carve_take(c, nk, sizeof(double));
    w->gv = sti_carve_take(c, nk, sizeof(double));
    w->states = sti_carve_take(c, T * D * D, sizeof(double));
    w->dS = sti_carve_take(c, D * D, sizeof(double));
    w->raw = sti_carve_take(c, (size_t)a->shape.H * D, sizeof(double));
}

/* One head, last token first. y = (o - mean) r with r = 1/sqrt(var + eps), so
 *   do = r (dy - mean(dy) - y mean(dy y)); then dS_t = fq do^T + gamma dS_{t+1}. */
static void head_backward(const sti_linear_args64 *a, work *w, int h)
{
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D, g = h / (H / G);
    const size_t DD = (size_t)D * D;
    const double gamma = decay_of(h);
    double y[STI_HEAD_DIM_MAX], d_o[STI_HEAD_DIM_MAX];
    for (int t = 0; t < a->T; t++) {
        const size_t kv = ((size_t)t * G + g) * D;
        double *S = w->states + (size_t)t * DD;
        if (t)
            memcpy(S, S - DD, DD * sizeof *S);
        else
            memset(S, 0, DD * sizeof *S);
        advance(S, gamma, w->fk + kv, a->in.v + kv, D);
    }
    memset(w->dS, 0, DD * sizeof(double));
    for (int t = a->T - 1; t >= 0; t--) {
        const size_t at = ((size_t)t * H + h) * D, kv = ((size_t)t * G + g) * D;
        const double *S = w->states + (size_t)t * DD, *dy = a->dy + at;
        const double r = read_state(S, w->fq + at, y, D);
        double mean_dy = 0, mean_dyy = 0;
        for (int e = 0; e < D; e++) {
            mean_dy += dy[e] / D;
            mean_dyy += dy[e] * y[e] / D;
        }
        for (int e = 0; e < D; e++) d_o[e] = r * (dy[e] - mean_dy - y[e] * mean_dyy);
        for (int i = 0; i < D; i++) {
            double *dS = w->dS + (size_t)i * D;
            w->dfq[at + i] = sti_ref_dot(S + (size_t)i * D, d_o, D);
            sti_ref_axpy(w->fq[at + i], d_o, dS, D);
            w->dfk[kv + i] += sti_ref_dot(dS, a->in.v + kv, D);
            sti_ref_axpy(w->fk[kv + i], dS, w->gv + kv, D);
            for (int e = 0; e < D; e++) dS[e] *= gamma;
        }
    }
}

still_status sti_ref_supra_backward(const sti_linear_args64 *a, still_error *err)
{
    STI_TRY(sti_linear_check(&a->shape, a->T, a->window, err));
    const int H = a->shape.H, G = a->shape.G, D = a->shape.D;
    const size_t nq = (size_t)H * D, nk = (size_t)G * D; /* numbers of a token */
    const double k_scale = 1 / sqrt((double)D);
    const sti_linear_in64 *in = &a->in;
    const sti_linear_grad64 *grad = &a->grad;
    work w;
    sti_carve c = {0};
    carve(&c, &w, a);
    sti_block block; /* zeroed */
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "supra, backward", c.used);
    c = (sti_carve){.base = block.p};
    carve(&c, &w, a);

    for (size_t t = 0; t < (size_t)a->T; t++) {
        features(in->q + t * nq, in->map_q, in->bias_q, w.fq + t * nq, H, (int64_t)t, 1,
                 a);
        features(in->k + t * nk, in->map_k, in->bias_k, w.fk + t * nk, G, (int64_t)t,
                 k_scale, a);
    }
    for (int h = 0; h < H; h++) head_backward(a, &w, h);
    for (size_t t = 0; t < (size_t)a->T; t++) {
        features_backward(in->q + t * nq, in->map_q, in->bias_q, w.dfq + t * nq, w.raw,
                          H, (int64_t)t, 1, a, grad->q ? grad->q + t * nq : NULL,
                          grad->map_q, grad->bias_q);
        features_backward(in->k + t * nk, in->map_k, in->bias_k, w.dfk + t * nk, w.raw,
                          G, (int64_t)t, k_scale, a, grad->k ? grad->k + t * nk : NULL,
                          grad->map_k, grad->bias_k);
    }
    if (grad->v) memcpy(grad->v, w.gv, (size_t)a->T * nk * sizeof(double));
    sti_block_free(&block);
    return STILL_OK;
}
