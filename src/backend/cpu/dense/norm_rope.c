/* norm_rope.c - rmsnorm, rope, swiglu and logprob of the cpu backend: rows shared out to
 * the pool when there is enough to do, run by the caller when there is not (a decode
 * step: waking the pool takes about as long as the work). */
#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/kernels.h"

#include <math.h>

/* Elements below which the caller works alone; about two microseconds each. */
enum { NORM_ALONE = 16384, SWIGLU_ALONE = 4096, ROPE_ALONE = 8192, GRAIN = 1024 };

typedef struct task {
    const sti_row_kernels *f;
    const void *args;
} task;

static void run(sti_dev *dev, sti_task fn, const void *args, int64_t size, int alone)
{
    task t = {dev->k->row, args};
    if (size < alone)
        fn(&t, 0, 1);
    else
        sti_pool_run(dev->pool, fn, &t);
}

static void rmsnorm_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_rmsnorm_args *a = t->args;
    int64_t lo, hi;
    sti_split(a->M, 1, w, workers, &lo, &hi);
    for (int64_t m = lo; m < hi; m++)
        (a->add ? t->f->rmsnorm_add : t->f->rmsnorm)(a->x + m * a->K, a->g,
                                                     a->y + m * a->K, a->K, a->eps);
}

still_status sti_cpu_rmsnorm(sti_dev *dev, const sti_rmsnorm_args *a, still_error *err)
{
    (void)err;
    run(dev, rmsnorm_work, a, (int64_t)a->M * a->K, NORM_ALONE);
    return STILL_OK;
}

static void rope_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_rope_args *a = t->args;
    int64_t lo, hi;
    sti_split(a->M, 1, w, workers, &lo, &hi);
    for (int64_t m = lo; m < hi; m++) {
        const int32_t pos = a->back ? -a->pos[m] : a->pos[m];
        t->f->rope(a->x + m * a->heads * a->D, pos, a->inv_freq, a->heads, a->D,
                   a->interleaved);
        if (a->also)
            t->f->rope(a->also + m * a->also_heads * a->D, pos, a->inv_freq,
                       a->also_heads, a->D, a->interleaved);
    }
}

still_status sti_cpu_rope(sti_dev *dev, const sti_rope_args *a, still_error *err)
{
    if (a->D % 2 != 0)
        return sti_fail(err, STILL_E_ARG, "cpu rope: head size %d is odd", a->D);
    run(dev, rope_work, a, (int64_t)a->M * a->heads * a->D, ROPE_ALONE);
    return STILL_OK;
}

static void swiglu_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_swiglu_args *a = t->args;
    int64_t lo, hi;
    sti_split((int64_t)a->M * a->K, GRAIN, w, workers, &lo, &hi);
    sti_gate_of(t->f, a->act)(a->gate + lo, a->up + lo, a->y + lo, hi - lo);
}

still_status sti_cpu_swiglu(sti_dev *dev, const sti_swiglu_args *a, still_error *err)
{
    (void)err;
    run(dev, swiglu_work, a, (int64_t)a->M * a->K, SWIGLU_ALONE);
    return STILL_OK;
}

static void logprob_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_logprob_args *a = t->args;
    for (int m = w; m < a->M; m += workers) {
        const float *l = a->logits + (int64_t)m * a->V;
        float max;
        double sum = t->f->sum_exp(l, a->V, &max);
        int top = 0;
        while (top < a->V - 1 && l[top] != max) top++;
        a->top[m] = top;
        a->logprob[m] = (float)((double)l[a->target[m]] - max - log(sum));
    }
}

still_status sti_cpu_logprob(sti_dev *dev, const sti_logprob_args *a, still_error *err)
{
    (void)err;
    run(dev, logprob_work, a, (int64_t)a->M * a->V, SWIGLU_ALONE);
    return STILL_OK;
}
