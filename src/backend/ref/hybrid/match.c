/* match.c - attention weights of the hybrid operator held against those of full
 * softmax, and the gradient of their cross entropy. Contract: sti_hybrid_match_args in
 * ops/ops.h.
 *
 * For one query, with l_j = q.k_j / sqrt(D) and A = softmax(l) over all j <= t:
 *   softmax token:  log B_j = log factor + l_j - shift - log den
 *   folded token:   log B_j = log a + log f_j - log den,   f_j = phi(q).phi(k_j)
 *   loss = -sum_j A_j log B_j, of which log den has the weight sum_j A_j = 1:
 *   df_j = a / den - A_j / f_j
 *   dalpha = a sum f / den - sum A over folded tokens
 *   domega = (1 - factor) (sum w / den - sum A over softmax tokens)
 * Written out over all pairs. The routing and, in window scaling, M are constants. */
#include <float.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"

/* One call, its current sequence, and the numbers of its current query. */
typedef struct match {
    const sti_hybrid_parallel_args64 *a;
    sti_ref_dims d;
    double scale;
    double *phi_q, *phi_k;   /* [T,H,P], [T,S,P] of the sequence */
    double *dphi_q, *dphi_k; /* likewise */
    double *logit;           /* [T] */
    double *soft;            /* [T]: the logits of softmax tokens alone */
    double *f;               /* [T]: phi(q).phi(k_j); negative for softmax tokens */
    double *dx;              /* [D], of no interest */
} match;

static void carve_match(sti_carve *c, match *m)
{
    const size_t T = (size_t)m->a->T, P = (size_t)m->d.P;
    const size_t q = T * (size_t)m->d.H * P, k = T * (size_t)m->d.S * P;
    m->phi_q = sti_carve_take(c, q, sizeof(double));
    m->phi_k = sti_carve_take(c, k, sizeof(double));
    m->dphi_q = sti_carve_take(c, q, sizeof(double));
    m->dphi_k = sti_carve_take(c, k, sizeof(double));
    m->logit = sti_carve_take(c, T, sizeof(double));
    m->soft = sti_carve_take(c, T, sizeof(double));
    m->f = sti_carve_take(c, T, sizeof(double));
    m->dx = sti_carve_take(c, (size_t)m->d.D, sizeof(double));
}

/* Rows of token t of sequence b in q, and in k as kv head g sees it. */
static const double *q_of(const match *m, int b, int t, int h)
{
    const size_t row = ((size_t)b * (size_t)m->a->T + (size_t)t) * (size_t)m->d.H;
    return m->a->in.q + (row + (size_t)h) * (size_t)m->d.D;
}

static const double *k_of(const match *m, int b, int t, int g)
{
    const size_t row = ((size_t)b * (size_t)m->a->T + (size_t)t) * (size_t)m->d.G;
    return m->a->in.k + (row + (size_t)g) * (size_t)m->d.D;
}

static size_t phi_q_at(const match *m, int t, int h)
{
    return ((size_t)t * (size_t)m->d.H + (size_t)h) * (size_t)m->d.P;
}

static size_t phi_k_at(const match *m, int t, int sel)
{
    return ((size_t)t * (size_t)m->d.S + (size_t)sel) * (size_t)m->d.P;
}

static void map_tokens(const match *m, int b)
{
    const sti_hybrid_parallel_args64 *a = m->a;
    for (int t = 0; t < a->T; t++) {
        for (int h = 0; h < m->d.H; h++) {
            const sti_ref_map map = sti_ref_map_q(a->set, &a->shape, &a->in, h);
            sti_ref_map_forward(&map, q_of(m, b, t, h), m->phi_q + phi_q_at(m, t, h));
        }
        for (int sel = 0; sel < m->d.S; sel++) {
            const sti_ref_map map = sti_ref_map_k(a->set, &a->shape, &a->in, sel);
            sti_ref_map_forward(&map, k_of(m, b, t, sti_ref_kv_of(&m->d, sel)),
                                m->phi_k + phi_k_at(m, t, sel));
        }
    }
}

/* From dphi to the maps and their biases. */
static void map_tokens_backward(const match *m, int b)
{
    const sti_hybrid_parallel_args64 *a = m->a;
    const sti_hybrid_grad64 *g = &a->grad;
    const size_t size = (size_t)m->d.D * (size_t)m->d.F;
    for (int t = 0; t < a->T; t++) {
        for (int h = 0; h < m->d.H; h++) {
            const sti_ref_map map = sti_ref_map_q(a->set, &a->shape, &a->in, h);
            sti_ref_map_backward(&map, q_of(m, b, t, h), m->dphi_q + phi_q_at(m, t, h),
                                 m->dx, g->map_q ? g->map_q + (size_t)h * size : NULL,
                                 g->bias_q ? g->bias_q + h : NULL);
        }
        for (int sel = 0; sel < m->d.S; sel++) {
            const sti_ref_map map = sti_ref_map_k(a->set, &a->shape, &a->in, sel);
            sti_ref_map_backward(&map, k_of(m, b, t, sti_ref_kv_of(&m->d, sel)),
                                 m->dphi_k + phi_k_at(m, t, sel), m->dx,
                                 g->map_k ? g->map_k + (size_t)sel * size : NULL,
                                 g->bias_k ? g->bias_k + sel : NULL);
        }
    }
}

/* The loss of query (t, h); its gradient goes to dphi, alpha and window_logit. */
static double one_query(const match *m, int b, int t, int h)
{
    const sti_hybrid_parallel_args64 *x = m->a;
    const int P = m->d.P, sel = h / m->d.per_sel, g = h / m->d.per_kv;
    const size_t row = (size_t)b * (size_t)x->T;
    const double *phi_q = m->phi_q + phi_q_at(m, t, h);
    double top = -INFINITY, sum = 0, sum_f = 0;
    int n_soft = 0;
    for (int j = 0; j <= t; j++) {
        const int32_t fold = x->fold_chunk[(row + (size_t)j) * (size_t)m->d.S + sel];
        m->logit[j] = sti_ref_logit(q_of(m, b, t, h), k_of(m, b, j, g), m->d.D);
        top = fmax(top, m->logit[j]);
        m->f[j] = -1;
        if (sti_hybrid_place(x->set, t, j, fold) == STI_PLACE_LINEAR)
            m->f[j] = sti_ref_dot(phi_q, m->phi_k + phi_k_at(m, j, sel), P);
        else
            m->soft[n_soft++] = m->logit[j];
        sum_f += fmax(m->f[j], 0);
    }
    for (int j = 0; j <= t; j++) sum += exp(m->logit[j] - top);

    const bool folded = n_soft <= t;
    const double alpha = sti_ref_alpha(x->set, &x->in, h);
    const double factor = sti_ref_window_factor(x->set, &x->in, h);
    const double M = x->max_in ? x->max_in[(row + (size_t)t) * (size_t)m->d.H + h]
                               : sti_ref_max(x->set, m->soft, n_soft, alpha, folded);
    const sti_ref_scales scale = sti_ref_scales_of(x->set, M, alpha, folded);
    const double log_a =
        x->set->la_scale == STI_SCALE_EXACT ? alpha - M : fmin(alpha, 0);
    double sum_w = 0;
    for (int i = 0; i < n_soft; i++) sum_w += factor * exp(m->soft[i] - scale.shift);
    const double den = fmax(x->set->den_eps + sum_w + scale.linear * sum_f, DBL_MIN);

    double loss = log(den), soft_share = 0, folded_share = 0;
    for (int j = 0; j <= t; j++) {
        const double A = exp(m->logit[j] - top) / sum;
        if (m->f[j] < 0) {
            loss -= A * (log(factor) + m->logit[j] - scale.shift);
            soft_share += A;
            continue;
        }
        const double f = fmax(m->f[j], STI_MATCH_FLOOR);
        const size_t at_q = phi_q_at(m, t, h), at_k = phi_k_at(m, j, sel);
        const double df =
            m->scale * (scale.linear / den - (m->f[j] > STI_MATCH_FLOOR ? A / f : 0));
        loss -= A * (log_a + log(f));
        folded_share += A;
        sti_ref_axpy(df, m->phi_k + at_k, m->dphi_q + at_q, P);
        sti_ref_axpy(df, m->phi_q + at_q, m->dphi_k + at_k, P);
    }
    if (x->grad.alpha && folded)
        x->grad.alpha[h] += m->scale * (scale.linear * sum_f / den - folded_share);
    if (x->grad.window_logit)
        x->grad.window_logit[h] += m->scale * (1 - factor) * (sum_w / den - soft_share);
    return loss;
}

static double one_sequence(const match *m, int b)
{
    const size_t T = (size_t)m->a->T, P = (size_t)m->d.P;
    double loss = 0;
    memset(m->dphi_q, 0, T * (size_t)m->d.H * P * sizeof(double));
    memset(m->dphi_k, 0, T * (size_t)m->d.S * P * sizeof(double));
    map_tokens(m, b);
    for (int t = 0; t < m->a->T; t++)
        for (int h = 0; h < m->d.H; h++) loss += one_query(m, b, t, h);
    map_tokens_backward(m, b);
    return loss;
}

still_status sti_ref_hybrid_match(const sti_hybrid_parallel_args64 *a, double scale,
                                  double *loss, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    STI_TRY(sti_hybrid_match_check(a->set, err));
    match m = {.a = a, .d = sti_ref_dims_of(a->set, &a->shape), .scale = scale};
    sti_carve c = {0};
    carve_match(&c, &m);
    sti_block block;
    if (!sti_block_new(&block, c.used))
        return sti_fail_memory(err, "matching attention weights", c.used);
    c = (sti_carve){.base = block.p};
    carve_match(&c, &m);
    *loss = 0;
    for (int b = 0; b < a->B; b++) *loss += one_sequence(&m, b);
    sti_block_free(&block);
    return STILL_OK;
}
