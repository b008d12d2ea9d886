/* train.c - what training adds to the reference: the backward of the plain operators,
 * the loss, the optimizer. Every sum runs in double, in the order of its index. Threads
 * split what is written, never a sum, so they change no number. */
#include <math.h>
#include <stdlib.h>

#include "backend/ref/ref.h"

enum { ROWS = 32 }; /* rows of dx that one dequantized weight row serves */

typedef struct task {
    sti_dev *d;
    const void *args;
    double *sums; /* [threads, width] */
    size_t width;
} task;

/* Runs fn with `width` numbers in double for every worker. */
static still_status run_with_sums(sti_dev *d, sti_task fn, const void *args,
                                  size_t width, still_error *err)
{
    task t = {.d = d, .args = args, .width = width};
    const size_t n = (size_t)sti_pool_threads(d->pool) * width;
    t.sums = sti_alloc(n, sizeof *t.sums);
    if (!t.sums) return sti_fail_memory(err, "ref training", n * sizeof *t.sums);
    sti_pool_run(d->pool, fn, &t);
    free(t.sums);
    return STILL_OK;
}

/* ---- dx = dy W ----------------------------------------------------------- */

static void matmul_back_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_matmul_back_args *a = t->args;
    const int64_t K = a->w[0]->K;
    const double scale = a->scale != 0 ? a->scale : 1;
    float *row = t->d->row + (size_t)w * (size_t)t->d->p.max_k;
    double *sum = t->sums + (size_t)w * t->width; /* [ROWS, K] */
    int64_t lo, hi;
    sti_split(a->M, 1, w, workers, &lo, &hi);
    for (int64_t m0 = lo; m0 < hi; m0 += ROWS) {
        const int64_t rows = hi - m0 < ROWS ? hi - m0 : ROWS;
        for (int64_t j = 0; j < rows * K; j++)
            sum[j] = a->accumulate ? a->dx[m0 * K + j] : 0;
        for (int i = 0; i < a->n; i++) {
            const sti_weight *W = a->w[i];
            const size_t bytes = W->src->bytes / (size_t)W->N;
            for (int64_t n = 0; n < W->N; n++) {
                sti_dequant(W->type, (const char *)W->data + (size_t)n * bytes, row, K);
                for (int64_t r = 0; r < rows; r++) {
                    const double dy = scale * a->dy[i][(m0 + r) * W->N + n];
                    for (int64_t k = 0; k < K; k++) sum[r * K + k] += dy * row[k];
                }
            }
        }
        for (int64_t j = 0; j < rows * K; j++) a->dx[m0 * K + j] = (float)sum[j];
    }
}

still_status sti_ref_matmul_back(sti_dev *d, const sti_matmul_back_args *a,
                                 still_error *err)
{
    if (a->M <= 0) return STILL_OK;
    return run_with_sums(d, matmul_back_work, a, ROWS * (size_t)a->w[0]->K, err);
}

/* ---- dw += scale dy^T x -------------------------------------------------- */

static void matmul_grad_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_matmul_grad_args *a = t->args;
    double *sum = t->sums + (size_t)w * t->width; /* [K] */
    int64_t lo, hi;
    sti_split(a->N, 1, w, workers, &lo, &hi);
    for (int64_t n = lo; n < hi; n++) {
        for (int64_t k = 0; k < a->K; k++) sum[k] = 0;
        for (int64_t m = 0; m < a->M; m++) {
            const double dy = a->dy[m * a->N + n];
            for (int64_t k = 0; k < a->K; k++) sum[k] += dy * a->x[m * a->K + k];
        }
        for (int64_t k = 0; k < a->K; k++)
            a->dw[n * a->K + k] = (float)(a->dw[n * a->K + k] + a->scale * sum[k]);
    }
}

still_status sti_ref_matmul_grad(sti_dev *d, const sti_matmul_grad_args *all, int n,
                                 still_error *err)
{
    for (int i = 0; i < n; i++)
        STI_TRY(run_with_sums(d, matmul_grad_work, &all[i], (size_t)all[i].K, err));
    return STILL_OK;
}

/* ---- Small operators ----------------------------------------------------- */

/* y_i = r x_i g_i with r = (mean(x^2) + eps)^-1/2, so that
 *   dx_i = r g_i dy_i - x_i r^3 / K sum_j g_j dy_j x_j. */
still_status sti_ref_rmsnorm_back(sti_dev *d, const sti_rmsnorm_back_args *a,
                                  still_error *err)
{
    (void)d;
    (void)err;
    for (int m = 0; m < a->M; m++) {
        const float *x = a->x + (int64_t)m * a->K, *dy = a->dy + (int64_t)m * a->K;
        float *dx = a->dx + (int64_t)m * a->K;
        double ss = 0, along = 0;
        for (int i = 0; i < a->K; i++) {
            ss += (double)x[i] * x[i];
            along += (double)a->g[i] * dy[i] * x[i];
        }
        const double r = 1 / sqrt(ss / a->K + a->eps);
        for (int i = 0; i < a->K; i++)
            dx[i] =
                (float)(dx[i] + r * a->g[i] * dy[i] - x[i] * r * r * r / a->K * along);
    }
    return STILL_OK;
}

/* y = g s u with s = 1 / (1 + e^-z), z of the activation:
 *   dg = dy u s (1 + g (1 - s) dz/dg),  du = dy g s. */
still_status sti_ref_swiglu_back(sti_dev *d, const sti_swiglu_back_args *a,
                                 still_error *err)
{
    (void)d;
    (void)err;
    for (int64_t i = 0; i < (int64_t)a->M * a->K; i++) {
        const double g = a->gate[i], u = a->up[i], dy = a->dy[i];
        const double z = sti_ref_slope(a->act, g);
        const double s = 1 / (1 + exp(-z)), rest = 1 / (1 + exp(z)); /* 1 - s */
        const double dz =
            a->act == STI_SILU ? 1 : STI_GELU_SLOPE * (1 + 3 * STI_GELU_CUBE * g * g);
        a->dgate[i] = (float)(dy * u * s * (1 + g * rest * dz));
        a->dup[i] = (float)(dy * g * s);
    }
    return STILL_OK;
}

/* ---- Loss ---------------------------------------------------------------- */

static double highest(const float *x, int n)
{
    double top = x[0];
    for (int i = 1; i < n; i++)
        if (x[i] > top) top = x[i];
    return top;
}

/* log sum_i e^(x_i). */
static double log_sum(const float *x, int n)
{
    const double top = highest(x, n);
    double sum = exp(x[0] - top);
    for (int i = 1; i < n; i++) sum += exp(x[i] - top);
    return top + log(sum);
}

/* d loss / d logit_i = weight (p_i - [i = target] + kd (p_i - t_i)). */
static void loss_row(const sti_loss_args *a, int m)
{
    float *x = a->logits + (int64_t)m * a->V;
    const float *t = a->teacher ? a->teacher + (int64_t)m * a->V : NULL;
    const double log_p = log_sum(x, a->V), log_t = t ? log_sum(t, a->V) : 0;
    const double weight = a->weight[m], kd = t ? a->kd : 0;
    double kl = 0;
    a->loss[m] = log_p - x[a->target[m]];
    for (int i = 0; i < a->V; i++) {
        const double p = exp(x[i] - log_p), pt = t ? exp(t[i] - log_t) : 0;
        if (t && pt > 0) kl += pt * ((t[i] - log_t) - (x[i] - log_p)); /* 0 log 0 = 0 */
        x[i] = (float)(weight * (p - (i == a->target[m]) + kd * (p - pt)));
    }
    if (a->kl) a->kl[m] = kl;
}

static void loss_work(void *v, int w, int workers)
{
    const sti_loss_args *a = ((const task *)v)->args;
    for (int m = w; m < a->M; m += workers) {
        if (a->weight[m] != 0) {
            loss_row(a, m);
            continue;
        }
        for (int i = 0; i < a->V; i++) a->logits[(int64_t)m * a->V + i] = 0;
        a->loss[m] = 0;
        if (a->kl) a->kl[m] = 0;
    }
}

still_status sti_ref_loss(sti_dev *d, const sti_loss_args *a, still_error *err)
{
    for (int m = 0; m < a->M; m++)
        if (a->weight[m] != 0 && (a->target[m] < 0 || a->target[m] >= a->V))
            return sti_fail(err, STILL_E_ARG, "loss: target %d is not in 0..%d",
                            a->target[m], a->V - 1);
    sti_pool_run(d->pool, loss_work, &(task){.d = d, .args = a});
    if (!a->head) return STILL_OK;
    return sti_ref_matmul_back(
        d,
        &(sti_matmul_back_args){
            .dy = {a->logits}, .M = a->M, .n = 1, .w = {a->head}, .dx = a->dx},
        err);
}

/* ---- Optimizer ----------------------------------------------------------- */

static void adam(const sti_adam_args *a)
{
    for (size_t i = 0; i < a->n; i++) {
        const double g = (double)a->scale * a->grad[i], x = a->x[i];
        const double m = (double)a->beta1 * a->m[i] + (1 - (double)a->beta1) * g;
        const double v = (double)a->beta2 * a->v[i] + (1 - (double)a->beta2) * g * g;
        a->m[i] = (float)m;
        a->v[i] = (float)v;
        a->x[i] = (float)(x - a->lr * (m / a->c1 / (sqrt(v / a->c2) + a->eps) +
                                       a->decay * x));
    }
}

still_status sti_ref_adam(sti_dev *d, const sti_adam_args *all, int n, still_error *err)
{
    (void)d;
    (void)err;
    for (int i = 0; i < n; i++) adam(&all[i]);
    return STILL_OK;
}

still_status sti_ref_sum_squares(sti_dev *d, const float *x, const sti_span *span,
                                 int n, double *out, still_error *err)
{
    (void)d;
    (void)err;
    for (int k = 0; k < n; k++) {
        const float *part = x + span[k].at;
        out[k] = 0;
        for (size_t i = 0; i < span[k].n; i++) out[k] += (double)part[i] * part[i];
    }
    return STILL_OK;
}
