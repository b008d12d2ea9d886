/* bench.c - timing steps of training; see "Measuring" in still.h. */
#include <stdlib.h>

#include "base/process.h"
#include "base/sized.h"
#include "train/train.h"

enum { STEPS = 2, WARM_STEPS = 1 };

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static still_status step(sti_trainer *t, sti_tally *tally, double *seconds,
                         still_error *err)
{
    double norm;
    const double start = sti_now();
    STI_TRY(sti_step_run(t, tally, err));
    STI_TRY(sti_optimizer_step(t, &norm, err));
    *seconds = sti_now() - start;
    t->step++;
    return STILL_OK;
}

/* seconds: [n] of the timed steps. */
static still_status run(sti_trainer *t, const still_bench_params *p, int n,
                        double *seconds, sti_tally *tally, still_error *err)
{
    double unused;
    STI_TRY(sti_trainer_begin(t, err));
    STI_TRY(sti_data_random(t->m->cfg.vocab, t->p.seq, t->p.seed, &t->data, err));
    for (int i = -WARM_STEPS; i < n; i++) {
        STI_TRY(step(t, tally, i < 0 ? &unused : &seconds[i], err));
        if (p->progress && !p->progress(p->user, (uint64_t)(i + WARM_STEPS + 1),
                                        (uint64_t)(n + WARM_STEPS)))
            return sti_fail(err, STILL_E_CANCELLED, "the measurement was stopped");
    }
    return STILL_OK;
}

static void sum_up(double *seconds, int n, still_bench_result *out)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += seconds[i];
    qsort(seconds, (size_t)n, sizeof *seconds, by_value);
    out->seconds = sum / n;
    out->median = n % 2 ? seconds[n / 2] : (seconds[n / 2 - 1] + seconds[n / 2]) / 2;
    out->fastest = seconds[0];
    out->slowest = seconds[n - 1];
}

still_status still_bench_train(still_model *m, const still_bench_params *params,
                               still_bench_result *out, still_error *err)
{
    still_bench_params own;
    still_session_params with;
    const still_bench_params *p = &own;
    STI_TRY(STI_TAKE(&own, params, still_bench_params, err));
    STI_TRY(STI_TAKE(&with, own.session, still_session_params, err));
    const still_method *method = with.method;
    const int n = p->steps ? p->steps : STEPS, batch = p->batch ? p->batch : 1;
    if (!method) return sti_fail(err, STILL_E_ARG, "no method to train for is given");
    if (n < 0 || n > 1 << 20 || p->length < 1 || batch < 0 ||
        (p->stage != 1 && p->stage != 2))
        return sti_fail(err, STILL_E_ARG,
                        "%d steps of stage %d with %d sequences of %d tokens cannot be "
                        "measured",
                        n, p->stage, batch, p->length);
    const uint64_t tokens = (uint64_t)batch * (uint64_t)p->length;
    sti_trainer t = {.m = m,
                     .p = {.size = sizeof t.p,
                           .method = *method,
                           .stage = p->stage,
                           .seq = p->length,
                           .batch = batch,
                           .micro_batch = p->micro_batch,
                           .tokens = tokens * (uint64_t)(n + WARM_STEPS),
                           .seed = p->seed}};
    const size_t L = (size_t)m->cfg.layers;
    double *scratch = sti_alloc(2 * L + (size_t)n, sizeof *scratch);
    if (!scratch) return sti_fail_memory(err, "benchmark", (size_t)n * sizeof *scratch);
    sti_tally tally = {.err2 = scratch, .ref2 = scratch + L};
    (void)sti_model_peak(m, true);
    still_status st = run(&t, p, n, scratch + 2 * L, &tally, err);
    if (st == STILL_OK) {
        *out = (still_bench_result){.tokens = tokens, .peak = sti_model_peak(m, false)};
        sum_up(scratch + 2 * L, n, out);
    }
    sti_trainer_end(&t, st);
    free(scratch);
    return st;
}
