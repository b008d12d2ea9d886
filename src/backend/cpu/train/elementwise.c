/* elementwise.c - rmsnorm_back, swiglu_back, loss, adam and sum_squares of the cpu
 * backend: rows or stretches of elements shared out to the pool. Everything but the
 * loss is bounded by memory. */
#include "backend/cpu/train/elementwise.h"
#include "backend/cpu/kernels.h"

#include <string.h>

enum {
    ALONE = 8192, /* elements below which the caller works alone */
    GRAIN = 1024,
    STRETCH = 4096, /* elements that make one partial sum of sum_squares */
};

typedef struct task {
    const sti_train_kernels *f;
    const void *args;
} task;

static void run(sti_dev *dev, sti_task fn, const void *args, int64_t elements)
{
    task t = {dev->k->train, args};
    if (elements < ALONE)
        fn(&t, 0, 1);
    else
        sti_pool_run(dev->pool, fn, &t);
}

static void rmsnorm_back_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_rmsnorm_back_args *a = t->args;
    int64_t lo, hi;
    sti_split(a->M, 1, w, workers, &lo, &hi);
    for (int64_t m = lo; m < hi; m++)
        t->f->rmsnorm_back(a->x + m * a->K, a->g, a->dy + m * a->K, a->dx + m * a->K,
                           a->K, a->eps);
}

still_status sti_cpu_rmsnorm_back(sti_dev *dev, const sti_rmsnorm_back_args *a,
                                  still_error *err)
{
    (void)err;
    run(dev, rmsnorm_back_work, a, (int64_t)a->M * a->K);
    return STILL_OK;
}

static void swiglu_back_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_swiglu_back_args *a = t->args;
    int64_t lo, hi;
    sti_split((int64_t)a->M * a->K, GRAIN, w, workers, &lo, &hi);
    (a->act == STI_GELU_TANH ? t->f->geglu_back : t->f->swiglu_back)(
        a->gate + lo, a->up + lo, a->dy + lo, a->dgate + lo, a->dup + lo, hi - lo);
}

still_status sti_cpu_swiglu_back(sti_dev *dev, const sti_swiglu_back_args *a,
                                 still_error *err)
{
    (void)err;
    run(dev, swiglu_back_work, a, (int64_t)a->M * a->K);
    return STILL_OK;
}

static void loss_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_loss_args *a = t->args;
    for (int m = w; m < a->M; m += workers) {
        sti_loss_row r = {.x = a->logits + (int64_t)m * a->V,
                          .t = a->teacher ? a->teacher + (int64_t)m * a->V : NULL,
                          .V = a->V,
                          .target = a->target[m],
                          .weight = (double)a->weight[m],
                          .kd = (double)a->kd};
        if (r.weight != 0)
            t->f->loss(&r);
        else
            memset(r.x, 0, (size_t)a->V * sizeof *r.x);
        a->loss[m] = r.loss;
        if (a->kl) a->kl[m] = r.kl;
    }
}

still_status sti_cpu_loss(sti_dev *dev, const sti_loss_args *a, still_error *err)
{
    for (int m = 0; m < a->M; m++)
        if (a->weight[m] != 0 && (a->target[m] < 0 || a->target[m] >= a->V))
            return sti_fail(err, STILL_E_ARG, "loss: target %d is not in 0..%d",
                            a->target[m], a->V - 1);
    run(dev, loss_work, a, (int64_t)a->M * a->V);
    if (!a->head) return STILL_OK;
    return sti_cpu_matmul_back(
        dev,
        &(sti_matmul_back_args){
            .dy = {a->logits}, .M = a->M, .n = 1, .w = {a->head}, .dx = a->dx},
        err);
}

static void adam_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_adam_args *a = t->args;
    int64_t lo, hi;
    sti_split((int64_t)a->n, GRAIN, w, workers, &lo, &hi);
    t->f->adam(a, (size_t)lo, (size_t)hi);
}

still_status sti_cpu_adam(sti_dev *dev, const sti_adam_args *all, int n,
                          still_error *err)
{
    (void)err;
    for (int i = 0; i < n; i++) run(dev, adam_work, &all[i], (int64_t)all[i].n);
    return STILL_OK;
}

/* Partial sums of fixed stretches, added in order: threads change nothing. */
typedef struct squares {
    const float *x;
    size_t n;
    double *part;
} squares;

static void squares_work(void *v, int w, int workers)
{
    const task *t = v;
    const squares *s = t->args;
    int64_t lo, hi;
    sti_split((int64_t)s->n, STRETCH, w, workers, &lo, &hi);
    for (size_t i = (size_t)lo; i < (size_t)hi; i += STRETCH)
        s->part[i / STRETCH] =
            t->f->sum_squares(s->x + i, s->n - i < STRETCH ? s->n - i : STRETCH);
}

static still_status sum_squares(sti_dev *dev, const float *x, size_t n, double *out,
                                still_error *err)
{
    const size_t parts = (n + STRETCH - 1) / STRETCH;
    STI_TRY(sti_cpu_need_bytes(dev, parts * sizeof(double), err));
    const squares s = {x, n, dev->scratch.p};
    run(dev, squares_work, &s, (int64_t)n);
    double sum = 0;
    for (size_t i = 0; i < parts; i++) sum += s.part[i];
    *out = sum;
    return STILL_OK;
}

still_status sti_cpu_sum_squares(sti_dev *dev, const float *x, const sti_span *span,
                                 int n, double *out, still_error *err)
{
    for (int i = 0; i < n; i++)
        STI_TRY(sum_squares(dev, x + span[i].at, span[i].n, &out[i], err));
    return STILL_OK;
}
