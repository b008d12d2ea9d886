/* step.c - the sequences of one optimizer step, computed a micro-batch at a time.
 *
 * Sequence numbers depend on the step alone: ranks take the `batch` sequences of a
 * step in turn, each rank sums its own in order, and the sums are added in the order
 * of ranks. */
#include <math.h>
#include <string.h>

#include "base/random.h"
#include "train/train.h"

static void clear(sti_trainer *t, sti_tally *tally)
{
    const size_t bytes = (size_t)t->m->cfg.layers * sizeof(double);
    memset(tally->err2, 0, bytes);
    memset(tally->ref2, 0, bytes);
    tally->loss = tally->kl = 0;
    tally->rows = 0;
    tally->bad_layer = -1;
}

/* First sequence of a step; stage 2 continues where stage 1 ended. */
static uint64_t first_sequence(const sti_trainer *t)
{
    const uint64_t before = t->stage == 2 ? t->stage_steps[1] : 0;
    return (before + t->step) * (uint64_t)t->p.batch;
}

/* Ids of a sequence that count in the loss; the first never does. */
static uint64_t counted(const uint8_t *counts, int T)
{
    uint64_t n = 0;
    for (int i = 1; i < T; i++) n += counts[i];
    return n;
}

typedef void sequence_fn(const sti_data *d, uint64_t i, int32_t *ids, uint8_t *counts);

/* 1 / the number of terms in the mean loss of n sequences from `first`. */
static double share_of(sti_trainer *t, sequence_fn *sequence, uint64_t first,
                       uint64_t n)
{
    if (t->stage == 1) return 1 / ((double)n * t->p.seq);
    uint64_t all = 0;
    for (uint64_t i = 0; i < n; i++) {
        sequence(t->data, first + i, t->ids, t->counts);
        all += counted(t->counts, t->p.seq);
    }
    return all ? 1 / (double)all : 0;
}

/* This rank's share of the n sequences from `first`. */
static still_status run_own(sti_trainer *t, sequence_fn *sequence, uint64_t first,
                            uint64_t n, bool learn, sti_tally *tally, still_error *err)
{
    const double share = share_of(t, sequence, first, n);
    const uint64_t rank = (uint64_t)sti_comm_rank(t->comm),
                   size = (uint64_t)sti_comm_size(t->comm);
    const size_t T = (size_t)t->p.seq;
    for (uint64_t i = rank; i < n;) {
        const uint64_t key = sti_mix64(t->p.seed ^ sti_mix64(first + i));
        int B = 0;
        for (; B < t->micro_batch && i < n; B++, i += size)
            sequence(t->data, first + i, t->ids + (size_t)B * T,
                     t->counts + (size_t)B * T);
        t->batch.B = B;
        if (t->stage == 1)
            STI_TRY(sti_stage1_run(t, share, learn, tally, err));
        else
            STI_TRY(sti_stage2_run(t, share, learn, key, tally, err));
    }
    return STILL_OK;
}

static still_status sum_tally(sti_trainer *t, sti_tally *tally, still_error *err)
{
    const size_t L = (size_t)t->m->cfg.layers;
    double rows = (double)tally->rows;
    STI_TRY(sti_comm_sum_doubles(t->comm, &tally->loss, 1, err));
    STI_TRY(sti_comm_sum_doubles(t->comm, &tally->kl, 1, err));
    STI_TRY(sti_comm_sum_doubles(t->comm, &rows, 1, err));
    STI_TRY(sti_comm_sum_doubles(t->comm, tally->err2, L, err));
    STI_TRY(sti_comm_sum_doubles(t->comm, tally->ref2, L, err));
    tally->rows = (uint64_t)rows;
    for (size_t l = 0; l < L && tally->bad_layer < 0; l++)
        if (!isfinite(tally->err2[l])) tally->bad_layer = (int)l;
    return STILL_OK;
}

/* Devices joined by NCCL add among themselves; others add in host memory, in `gathered`
 * if that is not the operators' own. */
static still_status sum_gradients(sti_trainer *t, still_error *err)
{
    const sti_backend *be = t->m->be;
    const size_t n = t->adapter->n_values;
    if (sti_comm_size(t->comm) == 1) return STILL_OK;
    if (t->devices_met) return be->ranks_sum(t->m->dev, t->grad, n, err);
    if (!t->gathered) return sti_comm_sum(t->comm, t->grad, n, err);
    STI_TRY(be->mem_move(t->m->dev, t->gathered, t->grad, n * sizeof *t->grad, err));
    STI_TRY(sti_comm_sum(t->comm, t->gathered, n, err));
    return be->mem_move(t->m->dev, t->grad, t->gathered, n * sizeof *t->grad, err);
}

still_status sti_step_run(sti_trainer *t, sti_tally *tally, still_error *err)
{
    clear(t, tally);
    const size_t n = t->adapter->n_values;
    STI_TRY(t->m->be->mem_clear(t->m->dev, t->grad, n * sizeof *t->grad, err));
    STI_TRY(run_own(t, sti_data_train, first_sequence(t), (uint64_t)t->p.batch, true,
                    tally, err));
    /* The tally first: its sum notices a dead rank, for which devices would wait
     * forever. */
    STI_TRY(sum_tally(t, tally, err));
    STI_TRY(sum_gradients(t, err));
    if (tally->bad_layer >= 0)
        return sti_fail(err, STILL_E_NUMERIC,
                        "stage %d, step %llu: what layer %d computes is not a number; "
                        "the last checkpoint is good: try a smaller learning rate",
                        t->stage, (unsigned long long)t->step, tally->bad_layer);
    if (!isfinite(tally->loss))
        return sti_fail(err, STILL_E_NUMERIC,
                        "stage %d, step %llu: the loss is not a number; the last "
                        "checkpoint is good: try a smaller learning rate",
                        t->stage, (unsigned long long)t->step);
    return STILL_OK;
}

still_status sti_step_validate(sti_trainer *t, uint64_t most, sti_tally *tally,
                               still_error *err)
{
    const uint64_t there = sti_data_get_report(t->data)->valid;
    const size_t heads = 2 * (size_t)t->m->cfg.layers * (size_t)t->m->cfg.heads;
    clear(t, tally);
    if (tally->heads) memset(tally->heads, 0, heads * sizeof *tally->heads);
    STI_TRY(
        run_own(t, sti_data_valid, 0, there < most ? there : most, false, tally, err));
    STI_TRY(sum_tally(t, tally, err));
    return tally->heads ? sti_comm_sum_doubles(t->comm, tally->heads, heads, err)
                        : STILL_OK;
}

double sti_tally_relative(const sti_trainer *t, const sti_tally *tally)
{
    double sum = 0;
    for (int l = t->cfg.first; l <= t->cfg.last; l++)
        sum += tally->ref2[l] > 0 ? tally->err2[l] / tally->ref2[l] : 0;
    return sum / sti_attn_converted(&t->cfg);
}
