/* elementwise_code.h - the kernels of elementwise.h over the vectors of simd.h. */
#ifndef STI_BACKEND_CPU_TRAIN_ELEMENTWISE_CODE_H
#define STI_BACKEND_CPU_TRAIN_ELEMENTWISE_CODE_H

#include <math.h>

#include "backend/cpu/simd.h"
#include "backend/cpu/train/elementwise.h"

/* ---- Norm, activation ---------------------------------------------------- */

/* With r = (mean(x^2) + eps)^-1/2:  dx_i += r (g_i dy_i - x_i r^2 mean(g dy x)). */
static void train_rmsnorm_back(const float *x, const float *g, const float *dy,
                               float *dx, int K, float eps)
{
    vf square[2] = {vf_set(0), vf_set(0)}, along[2] = {vf_set(0), vf_set(0)};
    for (int i = 0, u = 0; i < K; i += VL, u ^= 1) {
        const vf a = vf_load_or(x + i, K - i, 0);
        const vf d = vf_mul(vf_load_or(g + i, K - i, 0), vf_load_or(dy + i, K - i, 0));
        square[u] = vf_fma(a, a, square[u]);
        along[u] = vf_fma(a, d, along[u]);
    }
    const float r =
        1.0f / sqrtf(vf_hsum(vf_add(square[0], square[1])) / (float)K + eps);
    const float mean = vf_hsum(vf_add(along[0], along[1])) / (float)K;
    const vf by = vf_set(r), back = vf_set(-r * r * mean);
    for (int i = 0; i < K; i += VL) {
        const vf d = vf_mul(vf_load_or(g + i, K - i, 0), vf_load_or(dy + i, K - i, 0));
        const vf z = vf_fma(vf_load_or(x + i, K - i, 0), back, d);
        vf_store_some(dx + i, vf_fma(by, z, vf_load_or(dx + i, K - i, 0)), K - i);
    }
}

/* s = 1 / (1 + e^-g) and 1 - s = e^-g s; below -87, where s is no normal number any
 * more, e^-g stays what it is there, so that both stay finite. */
static void train_swiglu_back(const float *gate, const float *up, const float *dy,
                              float *dgate, float *dup, int64_t n)
{
    const vf one = vf_set(1);
    for (int64_t i = 0; i < n; i += VL) {
        const vf g = vf_load_or(gate + i, n - i, 0), u = vf_load_or(up + i, n - i, 0);
        const vf d = vf_load_or(dy + i, n - i, 0);
        const vf e = vf_exp(vf_min(vf_set(87), vf_sub(vf_set(0), g)));
        const vf s = vf_div(one, vf_add(one, e)), ds = vf_mul(d, s);
        vf_store_some(dup + i, vf_mul(ds, g), n - i);
        const vf slope = vf_fma(g, vf_mul(e, s), one);
        vf_store_some(dgate + i, vf_mul(vf_mul(ds, u), slope), n - i);
    }
}

/* The same with z and dz/dg of GELU in place of g and 1. */
static void train_geglu_back(const float *gate, const float *up, const float *dy,
                             float *dgate, float *dup, int64_t n)
{
    const vf one = vf_set(1), slope = vf_set((float)STI_GELU_SLOPE);
    for (int64_t i = 0; i < n; i += VL) {
        const vf g = vf_load_or(gate + i, n - i, 0), u = vf_load_or(up + i, n - i, 0);
        const vf d = vf_load_or(dy + i, n - i, 0);
        const vf square = vf_mul(vf_mul(vf_set((float)STI_GELU_CUBE), g), g);
        const vf z = vf_mul(slope, vf_fma(square, g, g));
        const vf dz = vf_mul(slope, vf_fma(vf_set(3), square, one));
        const vf e = vf_exp(vf_min(vf_set(87), vf_sub(vf_set(0), z)));
        const vf s = vf_div(one, vf_add(one, e)), ds = vf_mul(d, s);
        vf_store_some(dup + i, vf_mul(ds, g), n - i);
        const vf by = vf_fma(vf_mul(g, dz), vf_mul(e, s), one);
        vf_store_some(dgate + i, vf_mul(vf_mul(ds, u), by), n - i);
    }
}

/* ---- Loss ---------------------------------------------------------------- */

/* Vocabularies have 10^5 entries: float sums are moved into a double every SPAN
 * vectors, so that the result is as good as a sum in double. */
enum { TRAIN_SPAN = 64 };

STI_INLINE float train_highest(const float *x, int n)
{
    vf top = vf_set(-INFINITY);
    for (int i = 0; i < n; i += VL)
        top = vf_max(top, vf_load_or(x + i, n - i, -INFINITY));
    return vf_hmax(top);
}

/* x = e^(x - top); their sum. */
STI_INLINE double train_exp_sum(float *x, int n, float top)
{
    double sum = 0;
    for (int i = 0; i < n;) {
        vf part = vf_set(0);
        for (int end = i + TRAIN_SPAN * VL; i < end && i < n; i += VL) {
            const vf e =
                vf_exp(vf_sub(vf_load_or(x + i, n - i, -INFINITY), vf_set(top)));
            vf_store_some(x + i, e, n - i);
            part = vf_add(part, e);
        }
        sum += vf_hsum(part);
    }
    return sum;
}

/* The same beside the teacher's row t, which stays: sums of x, of e^(t - top_t), and of
 * e^(t - top_t) ((t - top_t) - (x - top)). A probability of 0 may come from a logit of
 * -infinity; it adds 0, because the difference is kept finite. */
typedef struct train_pair_sums {
    double x, t, apart;
} train_pair_sums;

STI_INLINE train_pair_sums train_exp_sums(float *x, const float *t, int n, float top,
                                          float top_t)
{
    const vf lowest = vf_set(-1e30f);
    train_pair_sums sum = {0};
    for (int i = 0; i < n;) {
        vf part_x = vf_set(0), part_t = part_x, part_apart = part_x;
        for (int end = i + TRAIN_SPAN * VL; i < end && i < n; i += VL) {
            const vf a = vf_sub(vf_load_or(x + i, n - i, -INFINITY), vf_set(top));
            const vf b = vf_sub(vf_load_or(t + i, n - i, -INFINITY), vf_set(top_t));
            const vf e = vf_exp(a), et = vf_exp(b);
            vf_store_some(x + i, e, n - i);
            part_x = vf_add(part_x, e);
            part_t = vf_add(part_t, et);
            const vf apart = vf_sub(vf_max(lowest, b), vf_max(lowest, a));
            part_apart = vf_fma(et, apart, part_apart);
        }
        sum.x += vf_hsum(part_x);
        sum.t += vf_hsum(part_t);
        sum.apart += vf_hsum(part_apart);
    }
    return sum;
}

/* With p = e / sum:  gradient_i = weight ((1 + kd) p_i - kd t_i - [i = target]). The
 * element of the target, where numbers near 1 cancel, is made in double. */
static void train_loss_alone(sti_loss_row *r)
{
    const float top = train_highest(r->x, r->V), at_target = r->x[r->target];
    const double sum = train_exp_sum(r->x, r->V, top);
    r->kl = 0;
    r->loss = log(sum) - ((double)at_target - top);
    const double target = r->weight * (r->x[r->target] / sum - 1);
    const vf by = vf_set((float)(r->weight / sum));
    for (int i = 0; i < r->V; i += VL)
        vf_store_some(r->x + i, vf_mul(by, vf_load_or(r->x + i, r->V - i, 0)),
                      r->V - i);
    r->x[r->target] = (float)target;
}

static void train_loss_with_teacher(sti_loss_row *r)
{
    const float top = train_highest(r->x, r->V), top_t = train_highest(r->t, r->V);
    const double under = (double)r->x[r->target] - top;
    const train_pair_sums sum = train_exp_sums(r->x, r->t, r->V, top, top_t);
    r->loss = log(sum.x) - under;
    r->kl = sum.apart / sum.t - (log(sum.t) - log(sum.x));
    const double of_x = r->weight * (1 + r->kd) / sum.x;
    const double of_t = r->weight * r->kd / sum.t;
    const double target = of_x * r->x[r->target] - r->weight -
                          of_t * exp((double)r->t[r->target] - top_t);
    const vf by = vf_set((float)of_x), back = vf_set((float)-of_t);
    for (int i = 0; i < r->V; i += VL) {
        const vf b = vf_sub(vf_load_or(r->t + i, r->V - i, -INFINITY), vf_set(top_t));
        const vf pull = vf_mul(back, vf_exp(b));
        const vf e = vf_load_or(r->x + i, r->V - i, 0);
        vf_store_some(r->x + i, vf_fma(by, e, pull), r->V - i);
    }
    r->x[r->target] = (float)target;
}

static void train_loss(sti_loss_row *r)
{
    if (r->t)
        train_loss_with_teacher(r);
    else
        train_loss_alone(r);
}

/* ---- Optimizer ----------------------------------------------------------- */

static void train_adam(const sti_adam_args *a, size_t lo, size_t hi)
{
    const vf scale = vf_set(a->scale), keep1 = vf_set(a->beta1);
    const vf keep2 = vf_set(a->beta2), new1 = vf_set((float)(1 - (double)a->beta1));
    const vf new2 = vf_set((float)(1 - (double)a->beta2));
    const vf by1 = vf_set((float)(1 / a->c1)), by2 = vf_set((float)(1 / a->c2));
    const vf eps = vf_set(a->eps), decay = vf_set(a->decay), down = vf_set(-a->lr);
    for (size_t i = lo; i < hi; i += VL) {
        const int64_t n = (int64_t)(hi - i);
        const vf g = vf_mul(scale, vf_load_or(a->grad + i, n, 0));
        const vf x = vf_load_or(a->x + i, n, 0);
        const vf m = vf_fma(keep1, vf_load_or(a->m + i, n, 0), vf_mul(new1, g));
        const vf v =
            vf_fma(keep2, vf_load_or(a->v + i, n, 0), vf_mul(vf_mul(new2, g), g));
        const vf under = vf_add(vf_sqrt(vf_mul(v, by2)), eps);
        const vf step = vf_fma(decay, x, vf_div(vf_mul(m, by1), under));
        vf_store_some(a->m + i, m, n);
        vf_store_some(a->v + i, v, n);
        vf_store_some(a->x + i, vf_fma(down, step, x), n);
    }
}

/* Sixteen sums side by side, plain C that compilers turn into vectors of double. */
static double train_sum_squares(const float *x, size_t n)
{
    enum { SUMS = 16 };
    double s[SUMS] = {0};
    size_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int j = 0; j < SUMS; j++) s[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i < n; i++, j++) s[j] += (double)x[i] * (double)x[i];
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) s[j] += s[j + half];
    return s[0];
}

#endif
