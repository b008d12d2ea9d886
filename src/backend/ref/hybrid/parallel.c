/* parallel.c - the hybrid operator over whole sequences (STILL Alg. 1), and its
 * gradient.
 *
 * A query sees the past through a mask made of one number per token, the chunk in
 * which it is folded: softmax tokens (window and salient) with w_j = f exp(l_j - M),
 * folded tokens with a phi(q).phi(k_j). Written out over all pairs, so that forward and
 * backward can be read next to the equation; the routing and, in window scaling, the
 * maximum M are constants for the gradient.
 *
 * Tokens outside the window that are, or were, salient count as they were stored
 * (ops/salient.h). The gradient passes the rounding as if it were the identity. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"

/* One sequence: inputs offset to its first token, features of all its tokens, and, for
 * the backward, gradients of both. */
typedef struct sequence {
    const sti_hybrid_settings *set;
    const sti_hybrid_shape *shape;
    sti_ref_dims d;
    int T;
    sti_hybrid_in64 in;
    double *stored_k,
        *stored_v; /* [T,G,D]: in.k and in.v as the salient cache has them */
    const int32_t *fold_chunk; /* [T,S] */
    const double *max_in;      /* [T,H] or NULL */
    double *phi_q, *phi_k;     /* [T,H,P], [T,S,P] */
    double *dphi_q, *dphi_k;
    double *dq, *dk, *dv; /* [T,H,D], [T,G,D] */
} sequence;

/* One query of one head: what it sees and with which weights. */
typedef struct query {
    int t, h, sel;
    int n_soft, n_lin;
    int *soft, *lin; /* [T] tokens of each kind */
    double *w;       /* [T] softmax weights; logits before that */
    double *f;       /* [T] phi(q).phi(k_j) of the folded tokens */
    double M, a, den;
    double *num_soft, *num_lin; /* [D]; y = (num_soft + num_lin * g) / den */
} query;

static const double *q_of(const sequence *s, const query *r)
{
    return s->in.q + ((size_t)r->t * s->d.H + r->h) * (size_t)s->d.D;
}

/* Offset of token j in k, v and their gradients, for head h. */
static size_t kv_at(const sequence *s, int j, int h)
{
    return ((size_t)j * s->d.G + h / s->d.per_kv) * (size_t)s->d.D;
}

/* Token j that is folded, for head h: whether it folds what the salient cache had. */
static bool folds_stored(const sequence *s, int j, int sel)
{
    return sti_hybrid_was_salient(s->set, j,
                                  s->fold_chunk[(size_t)j * s->d.S + (size_t)sel]);
}
/* What the features of token j are made of, and the value beside them. */
static const double *folded_key(const sequence *s, int j, int sel)
{
    const double *k = folds_stored(s, j, sel) ? s->stored_k : s->in.k;
    return k + kv_at(s, j, sel * s->d.per_sel);
}
static const double *folded_value(const sequence *s, int j, int sel)
{
    const double *v = folds_stored(s, j, sel) ? s->stored_v : s->in.v;
    return v + kv_at(s, j, sel * s->d.per_sel);
}
/* Key and value of softmax token j as query t sees them. */
static const double *soft_key(const sequence *s, int t, int j, int h)
{
    return (j < sti_ref_window_start(s->set, t) ? s->stored_k : s->in.k) +
           kv_at(s, j, h);
}
static const double *soft_value(const sequence *s, int t, int j, int h)
{
    return (j < sti_ref_window_start(s->set, t) ? s->stored_v : s->in.v) +
           kv_at(s, j, h);
}

static void store_tokens(const sequence *s)
{
    const int D = s->d.D;
    float x[STI_HEAD_DIM_MAX];
    for (int i = 0; i < s->T * s->d.G; i++) {
        const size_t at = (size_t)i * (size_t)D;
        memcpy(s->stored_k + at, s->in.k + at, (size_t)D * sizeof(double));
        memcpy(s->stored_v + at, s->in.v + at, (size_t)D * sizeof(double));
        if (s->set->key_bits) {
            for (int e = 0; e < D; e++) x[e] = (float)s->in.k[at + (size_t)e];
            sti_salient_round_key(s->set->key_bits, x, D, x);
            for (int e = 0; e < D; e++) s->stored_k[at + (size_t)e] = (double)x[e];
        }
        if (s->set->value_bits) {
            for (int e = 0; e < D; e++) x[e] = (float)s->in.v[at + (size_t)e];
            sti_salient_round_value(s->set->value_bits, x, D, x);
            for (int e = 0; e < D; e++) s->stored_v[at + (size_t)e] = (double)x[e];
        }
    }
}

static size_t phi_q_at(const sequence *s, const query *r)
{
    return ((size_t)r->t * s->d.H + r->h) * (size_t)s->d.P;
}

static size_t phi_k_at(const sequence *s, int j, int sel)
{
    return ((size_t)j * s->d.S + sel) * (size_t)s->d.P;
}

static void map_tokens(const sequence *s)
{
    const sti_ref_dims *d = &s->d;
    const size_t D = (size_t)d->D, P = (size_t)d->P;
    for (int t = 0; t < s->T; t++) {
        for (int h = 0; h < d->H; h++) {
            const size_t row = (size_t)t * d->H + h;
            const sti_ref_map m = sti_ref_map_q(s->set, s->shape, &s->in, h);
            sti_ref_map_forward(&m, s->in.q + row * D, s->phi_q + row * P);
        }
        for (int sel = 0; sel < d->S; sel++) {
            const sti_ref_map m = sti_ref_map_k(s->set, s->shape, &s->in, sel);
            sti_ref_map_forward(&m, folded_key(s, t, sel),
                                s->phi_k + phi_k_at(s, t, sel));
        }
    }
}

/* STILL Alg. 1, the masks: sorts the past of query (t, h) into softmax and folded
 * tokens. */
static void split_past(const sequence *s, query *r, int t, int h)
{
    r->t = t;
    r->h = h;
    r->sel = h / s->d.per_sel;
    r->n_soft = r->n_lin = 0;
    for (int j = 0; j <= t; j++) {
        const int32_t fold = s->fold_chunk[(size_t)j * s->d.S + r->sel];
        if (sti_hybrid_place(s->set, t, j, fold) != STI_PLACE_LINEAR)
            r->soft[r->n_soft++] = j;
        else if (s->set->has_linear)
            r->lin[r->n_lin++] = j;
    }
}

/* STILL eq. 11: numerators and denominators of both branches. */
static void sum_branches(const sequence *s, query *r)
{
    const int D = s->d.D, P = s->d.P, h = r->h;
    const double *q = q_of(s, r);
    for (int i = 0; i < r->n_soft; i++)
        r->w[i] = sti_ref_logit(q, soft_key(s, r->t, r->soft[i], h), D);
    const double alpha = sti_ref_alpha(s->set, &s->in, h);
    r->M = s->max_in ? s->max_in[(size_t)r->t * s->d.H + h]
                     : sti_ref_max(s->set, r->w, r->n_soft, alpha, r->n_lin > 0);
    const sti_ref_scales scale = sti_ref_scales_of(s->set, r->M, alpha, r->n_lin > 0);
    r->a = scale.linear;

    memset(r->num_soft, 0, (size_t)D * sizeof(double));
    memset(r->num_lin, 0, (size_t)D * sizeof(double));
    r->den = s->set->den_eps;
    const double factor = sti_ref_window_factor(s->set, &s->in, h);
    for (int i = 0; i < r->n_soft; i++) {
        r->w[i] = factor * exp(r->w[i] - scale.shift);
        r->den += r->w[i];
        sti_ref_axpy(r->w[i], soft_value(s, r->t, r->soft[i], h), r->num_soft, D);
    }
    for (int i = 0; i < r->n_lin; i++) {
        const int j = r->lin[i];
        r->f[i] = sti_ref_dot(s->phi_q + phi_q_at(s, r),
                              s->phi_k + phi_k_at(s, j, r->sel), P);
        r->den += r->a * r->f[i];
        sti_ref_axpy(r->a * r->f[i], folded_value(s, j, r->sel), r->num_lin, D);
    }
    r->den = fmax(r->den, DBL_MIN);
}

/* STILL eq. 10: y_t of one head into y [D]. */
static void joint_output(const sequence *s, const query *r, double *y)
{
    const size_t at = ((size_t)r->t * s->d.H + r->h) * (size_t)s->d.D;
    for (int e = 0; e < s->d.D; e++) {
        const double g = sti_ref_gate(s->set, &s->in, at + (size_t)e);
        y[e] = (r->num_soft[e] + r->num_lin[e] * g) / r->den;
    }
}

/* ---- Backward of one query ----------------------------------------------- */

/* With n = num_soft + num_lin * g and y = n / den:
 *   dn = dy / den, dden = -(dy . y) / den
 *   softmax token: dw = dn.v + dden, dl = w dw, dv += w dn
 *   folded token:  df = a ((dn * g).v + dden), dv += a f (dn * g), dalpha += f df
 * dy and the scratch vectors y, dn, dng are [D]; grad's parameters and gate_logit
 * (offset to this sequence) are those of the caller. */
static void query_backward(const sequence *s, const query *r, const double *dy,
                           double *y, double *dn, double *dng,
                           const sti_hybrid_grad64 *grad)
{
    const int D = s->d.D, P = s->d.P, h = r->h;
    const size_t at = ((size_t)r->t * s->d.H + h) * (size_t)D;
    joint_output(s, r, y);
    const double dden = -sti_ref_dot(dy, y, D) / r->den;
    for (int e = 0; e < D; e++) {
        const double g = sti_ref_gate(s->set, &s->in, at + (size_t)e);
        dn[e] = dy[e] / r->den;
        dng[e] = dn[e] * g;
        if (grad->gate_logit) /* g = 2 sigmoid(x): dg/dx = g (1 - g/2) */
            grad->gate_logit[at + (size_t)e] = dn[e] * r->num_lin[e] * g * (1 - g / 2);
    }

    const double scale = 1 / sqrt((double)D);
    const double factor = sti_ref_window_factor(s->set, &s->in, h);
    for (int i = 0; i < r->n_soft; i++) {
        const int j = r->soft[i];
        const size_t kv = kv_at(s, j, h);
        const double dl =
            r->w[i] * (sti_ref_dot(dn, soft_value(s, r->t, j, h), D) + dden);
        sti_ref_axpy(r->w[i], dn, s->dv + kv, D);
        sti_ref_axpy(dl * scale, soft_key(s, r->t, j, h), s->dq + at, D);
        sti_ref_axpy(dl * scale, q_of(s, r), s->dk + kv, D);
        if (grad->window_logit) grad->window_logit[h] += dl * (1 - factor);
    }
    const size_t pq = phi_q_at(s, r);
    for (int i = 0; i < r->n_lin; i++) {
        const size_t kv = kv_at(s, r->lin[i], h), pk = phi_k_at(s, r->lin[i], r->sel);
        const double *v = folded_value(s, r->lin[i], r->sel);
        const double df = r->a * (sti_ref_dot(dng, v, D) + dden);
        sti_ref_axpy(r->a * r->f[i], dng, s->dv + kv, D);
        sti_ref_axpy(df, s->phi_k + pk, s->dphi_q + pq, P);
        sti_ref_axpy(df, s->phi_q + pq, s->dphi_k + pk, P);
        if (grad->alpha) grad->alpha[h] += r->f[i] * df;
    }
}

static void map_tokens_backward(const sequence *s, const sti_hybrid_grad64 *grad)
{
    const sti_ref_dims *d = &s->d;
    const size_t D = (size_t)d->D, P = (size_t)d->P, map = D * (size_t)d->F;
    for (int t = 0; t < s->T; t++) {
        for (int h = 0; h < d->H; h++) {
            const size_t row = (size_t)t * d->H + h;
            const sti_ref_map m = sti_ref_map_q(s->set, s->shape, &s->in, h);
            sti_ref_map_backward(&m, s->in.q + row * D, s->dphi_q + row * P,
                                 s->dq + row * D,
                                 grad->map_q ? grad->map_q + (size_t)h * map : NULL,
                                 grad->bias_q ? grad->bias_q + h : NULL);
        }
        for (int sel = 0; sel < d->S; sel++) {
            const size_t kv = kv_at(s, t, sel * d->per_sel);
            const sti_ref_map m = sti_ref_map_k(s->set, s->shape, &s->in, sel);
            sti_ref_map_backward(&m, folded_key(s, t, sel),
                                 s->dphi_k + phi_k_at(s, t, sel), s->dk + kv,
                                 grad->map_k ? grad->map_k + (size_t)sel * map : NULL,
                                 grad->bias_k ? grad->bias_k + sel : NULL);
        }
    }
}

/* ---- Sequences ----------------------------------------------------------- */

/* Memory of one sequence and one query, carved from one block. */
static void carve_sequence(sti_carve *c, sequence *s, query *r, double **vec,
                           bool backward)
{
    const size_t T = (size_t)s->T, D = (size_t)s->d.D, P = (size_t)s->d.P;
    const size_t H = (size_t)s->d.H, G = (size_t)s->d.G, S = (size_t)s->d.S;
    s->stored_k = sti_carve_take(c, T * G * D, sizeof(double));
    s->stored_v = sti_carve_take(c, T * G * D, sizeof(double));
    s->phi_q = sti_carve_take(c, T * H * P, sizeof(double));
    s->phi_k = sti_carve_take(c, T * S * P, sizeof(double));
    r->soft = sti_carve_take(c, T, sizeof(int));
    r->lin = sti_carve_take(c, T, sizeof(int));
    r->w = sti_carve_take(c, T, sizeof(double));
    r->f = sti_carve_take(c, T, sizeof(double));
    r->num_soft = sti_carve_take(c, D, sizeof(double));
    r->num_lin = sti_carve_take(c, D, sizeof(double));
    if (!backward) return;
    s->dphi_q = sti_carve_take(c, T * H * P, sizeof(double));
    s->dphi_k = sti_carve_take(c, T * S * P, sizeof(double));
    s->dq = sti_carve_take(c, T * H * D, sizeof(double));
    s->dk = sti_carve_take(c, T * G * D, sizeof(double));
    s->dv = sti_carve_take(c, T * G * D, sizeof(double));
    *vec = sti_carve_take(c, 3 * D, sizeof(double));
}

/* Points s at sequence b of the arguments. */
static void select_sequence(sequence *s, const sti_hybrid_parallel_args64 *a, int b)
{
    const size_t rows = (size_t)b * (size_t)a->T, D = (size_t)s->d.D;
    s->in = a->in;
    s->in.q += rows * (size_t)s->d.H * D;
    s->in.k += rows * (size_t)s->d.G * D;
    s->in.v += rows * (size_t)s->d.G * D;
    if (s->in.gate_logit) s->in.gate_logit += rows * (size_t)s->d.H * D;
    s->fold_chunk = a->fold_chunk + rows * (size_t)s->d.S;
    s->max_in = a->max_in ? a->max_in + rows * (size_t)s->d.H : NULL;
}

static void forward_sequence(const sequence *s, query *r,
                             const sti_hybrid_parallel_args64 *a, size_t rows)
{
    const sti_ref_dims *d = &s->d;
    store_tokens(s);
    map_tokens(s);
    for (int t = 0; t < s->T; t++)
        for (int h = 0; h < d->H; h++) {
            const size_t row = (rows + (size_t)t) * (size_t)d->H + (size_t)h;
            split_past(s, r, t, h);
            sum_branches(s, r);
            joint_output(s, r, a->y + row * (size_t)d->D);
            if (a->max_out) a->max_out[row] = r->M;
            if (a->trace.salient) {
                const int C = s->set->chunk;
                const int window = !s->set->has_window ? 0
                                   : t < C             ? t + 1
                                                       : t % C + C + 1;
                a->trace.salient[(rows + (size_t)t) * (size_t)d->S + (size_t)r->sel] =
                    r->n_soft - window;
            }
        }
}

static void backward_sequence(sequence *s, query *r, double *vec,
                              const sti_hybrid_parallel_args64 *a, size_t rows)
{
    const sti_ref_dims *d = &s->d;
    const size_t T = (size_t)s->T, D = (size_t)d->D;
    const size_t nq = T * (size_t)d->H * D, nk = T * (size_t)d->G * D;
    memset(s->dphi_q, 0, T * (size_t)d->H * (size_t)d->P * sizeof(double));
    memset(s->dphi_k, 0, T * (size_t)d->S * (size_t)d->P * sizeof(double));
    memset(s->dq, 0, nq * sizeof(double));
    memset(s->dk, 0, nk * sizeof(double));
    memset(s->dv, 0, nk * sizeof(double));
    sti_hybrid_grad64 grad = a->grad;
    if (grad.gate_logit) grad.gate_logit += rows * (size_t)d->H * D;

    store_tokens(s);
    map_tokens(s);
    for (int t = 0; t < s->T; t++)
        for (int h = 0; h < d->H; h++) {
            const size_t row = (rows + (size_t)t) * (size_t)d->H + (size_t)h;
            split_past(s, r, t, h);
            sum_branches(s, r);
            query_backward(s, r, a->dy + row * D, vec, vec + D, vec + 2 * D, &grad);
        }
    map_tokens_backward(s, &grad);

    if (grad.q) memcpy(grad.q + rows * (size_t)d->H * D, s->dq, nq * sizeof(double));
    if (grad.k) memcpy(grad.k + rows * (size_t)d->G * D, s->dk, nk * sizeof(double));
    if (grad.v) memcpy(grad.v + rows * (size_t)d->G * D, s->dv, nk * sizeof(double));
}

static still_status run(const sti_hybrid_parallel_args64 *a, bool backward,
                        still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    sequence s = {.set = a->set, .shape = &a->shape, .T = a->T};
    s.d = sti_ref_dims_of(a->set, &a->shape);
    query r = {0};
    double *vec = NULL;
    sti_carve c = {0};
    carve_sequence(&c, &s, &r, &vec, backward);
    sti_block block;
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "hybrid attention, parallel form", c.used);
    c = (sti_carve){.base = block.p};
    carve_sequence(&c, &s, &r, &vec, backward);
    for (int b = 0; b < a->B; b++) {
        select_sequence(&s, a, b);
        const size_t rows = (size_t)b * (size_t)a->T;
        if (backward)
            backward_sequence(&s, &r, vec, a, rows);
        else
            forward_sequence(&s, &r, a, rows);
    }
    sti_block_free(&block);
    return STILL_OK;
}

/* STILL Alg. 1; routing (route.c) has gone before. */
still_status sti_ref_hybrid_parallel(const sti_hybrid_parallel_args64 *a,
                                     still_error *err)
{
    return run(a, false, err);
}

still_status sti_ref_hybrid_backward(const sti_hybrid_parallel_args64 *a,
                                     still_error *err)
{
    return run(a, true, err);
}
