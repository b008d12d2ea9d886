/* map.c - feature maps (STILL eq. 6) and their gradients, one vector at a time.
 *
 *   u = x W;  norm preserved: u <- u |x| / max(|u|, 1e-6)
 *   softmax map: phi = [softmax(u), softmax(-u)];  relu map: phi = relu(u + b)
 *   phi <- max(phi, floor)
 *
 * Maps act on the rotated, unscaled q and k. Head sizes were checked against
 * STI_HEAD_DIM_MAX, so the few vectors needed lie on the stack. */
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"

static const double smallest_norm = 1e-6; /* of u, before it divides */

static sti_ref_map map_of(const sti_hybrid_settings *set, const sti_hybrid_shape *shape,
                          const double *W, const double *bias, int head)
{
    return (sti_ref_map){
        .kind = set->map,
        .norm_preserved = set->norm_preserved,
        .floor = set->feature_floor,
        .D = shape->D,
        .F = shape->F,
        .W = W ? W + (size_t)head * (size_t)shape->D * (size_t)shape->F : NULL,
        .bias = bias && set->map == STI_MAP_RELU ? bias[head] : 0,
    };
}

sti_ref_map sti_ref_map_q(const sti_hybrid_settings *set, const sti_hybrid_shape *shape,
                          const sti_hybrid_in64 *in, int h)
{
    return map_of(set, shape, in->map_q, in->bias_q, h);
}

sti_ref_map sti_ref_map_k(const sti_hybrid_settings *set, const sti_hybrid_shape *shape,
                          const sti_hybrid_in64 *in, int s)
{
    return map_of(set, shape, in->map_k, in->bias_k, s);
}

/* What the forward and the backward of one vector both need. */
typedef struct map_values {
    double raw[STI_HEAD_DIM_MAX]; /* x W */
    double u[STI_HEAD_DIM_MAX];   /* after the norm */
    double norm_x, norm_raw;      /* |x|, max(|x W|, smallest_norm) */
    bool norm_kept;               /* |x W| was above the floor */
} map_values;

/* STILL eq. 6, first line: u = f(x) |x| / |f(x)|, f(x) = x W. */
static void map_values_of(const sti_ref_map *m, const double *x, map_values *r)
{
    const int D = m->D, F = m->F;
    if (m->W) {
        memset(r->raw, 0, (size_t)F * sizeof *r->raw);
        for (int i = 0; i < D; i++) sti_ref_axpy(x[i], m->W + (size_t)i * F, r->raw, F);
    } else {
        memcpy(r->raw, x, (size_t)F * sizeof *x);
    }
    r->norm_x = sqrt(sti_ref_dot(x, x, D));
    double norm = sqrt(sti_ref_dot(r->raw, r->raw, F));
    r->norm_kept = norm > smallest_norm;
    r->norm_raw = fmax(norm, smallest_norm);
    const double scale = m->norm_preserved ? r->norm_x / r->norm_raw : 1;
    for (int i = 0; i < F; i++) r->u[i] = r->raw[i] * scale + m->bias;
}

/* STILL eq. 6, second line: phi before the floor. */
static void features(const sti_ref_map *m, const double *u, double *phi)
{
    const int F = m->F;
    if (m->kind == STI_MAP_RELU) {
        for (int i = 0; i < F; i++) phi[i] = fmax(u[i], 0);
        return;
    }
    for (int i = 0; i < F; i++) {
        phi[i] = u[i];
        phi[F + i] = -u[i];
    }
    sti_ref_softmax(phi, F);
    sti_ref_softmax(phi + F, F);
}

static int feature_count(const sti_ref_map *m)
{
    return m->kind == STI_MAP_RELU ? m->F : 2 * m->F;
}

/* STILL eq. 6, and the floor. */
void sti_ref_map_forward(const sti_ref_map *m, const double *x, double *phi)
{
    map_values r;
    map_values_of(m, x, &r);
    features(m, r.u, phi);
    for (int i = 0; i < feature_count(m); i++) phi[i] = fmax(phi[i], m->floor);
}

/* du from dphi; below the floor a feature is a constant. */
static void features_backward(const sti_ref_map *m, const double *u, const double *dphi,
                              double *du)
{
    const int F = m->F;
    double phi[2 * STI_HEAD_DIM_MAX];
    features(m, u, phi);
    if (m->kind == STI_MAP_RELU) {
        for (int i = 0; i < F; i++)
            du[i] = phi[i] > 0 && phi[i] >= m->floor ? dphi[i] : 0;
        return;
    }
    /* Each half: d softmax(x)_i = p_i (dphi_i - sum p dphi); x = -u in the second. */
    memset(du, 0, (size_t)F * sizeof *du);
    for (int half = 0; half < 2; half++) {
        const double *p = phi + half * F, *d = dphi + half * F;
        double mean = 0;
        for (int i = 0; i < F; i++)
            if (p[i] >= m->floor) mean += p[i] * d[i];
        for (int i = 0; i < F; i++) {
            double g = p[i] * ((p[i] >= m->floor ? d[i] : 0) - mean);
            du[i] += half == 0 ? g : -g;
        }
    }
}

void sti_ref_map_backward(const sti_ref_map *m, const double *x, const double *dphi,
                          double *dx, double *dW, double *dbias)
{
    const int D = m->D, F = m->F;
    map_values r;
    map_values_of(m, x, &r);
    double du[STI_HEAD_DIM_MAX];
    features_backward(m, r.u, dphi, du);
    if (dbias)
        for (int i = 0; i < F; i++) *dbias += du[i];

    /* u = raw |x| / |raw|:  draw = |x|/|raw| (du - raw (raw.du)/|raw|^2),
     * d|x| = raw.du / |raw|. At x = 0 the gradient of |x| is 0; under the floor |raw|
     * is a constant. */
    double draw[STI_HEAD_DIM_MAX];
    memcpy(draw, du, (size_t)F * sizeof *du);
    if (m->norm_preserved) {
        const double along = sti_ref_dot(r.raw, du, F) / r.norm_raw;
        if (r.norm_kept) sti_ref_axpy(-along / r.norm_raw, r.raw, draw, F);
        for (int i = 0; i < F; i++) draw[i] *= r.norm_x / r.norm_raw;
        if (r.norm_x > 0) sti_ref_axpy(along / r.norm_x, x, dx, D);
    }
    if (m->W) {
        for (int i = 0; i < D; i++) dx[i] += sti_ref_dot(m->W + (size_t)i * F, draw, F);
    } else {
        sti_ref_axpy(1, draw, dx, F);
    }
    if (dW)
        for (int i = 0; i < D; i++) sti_ref_axpy(x[i], draw, dW + (size_t)i * F, F);
}
