/* stage2.c - low-rank linearization: next-token loss through the whole student.
 *
 *   loss = mean over counted ids of (-log p(id) + kd KL(teacher || student))
 *
 * The forward keeps every layer's input and, if there is memory for it (trainer.c),
 * everything the backward needs; otherwise the backward recomputes each layer from its
 * input. Logits are computed and used a few rows at a time, so no [M, vocab] array
 * exists. */
#include <math.h>

#include "train/train.h"

static still_status embed(sti_trainer *t, float *x, still_error *err)
{
    return sti_model_embed(t->m, t->ids, t->batch.B * t->batch.T, x, err);
}

static still_status last_norm(sti_trainer *t, float *y, still_error *err)
{
    still_model *m = t->m;
    return m->be->rmsnorm(m->dev,
                          &(sti_rmsnorm_args){.x = t->x,
                                              .g = m->final_norm,
                                              .y = y,
                                              .M = t->batch.B * t->batch.T,
                                              .K = m->cfg.hidden,
                                              .eps = m->stream_eps},
                          err);
}

static still_status run_teacher(sti_trainer *t, still_error *err)
{
    const sti_layer_job teacher = {.m = t->m,
                                   .cfg = &t->cfg,
                                   .want = STI_WANT_OUTPUT,
                                   .batch = &t->batch,
                                   .acts = &t->acts,
                                   .back = &t->back};
    STI_TRY(embed(t, t->x, err));
    for (int l = 0; l < t->m->cfg.layers; l++)
        STI_TRY(sti_layer_forward(&teacher, l, t->x, t->x, err));
    return last_norm(t, t->teacher, err);
}

/* Row r predicts the next id of its sequence; the last row of a sequence predicts
 * none. */
static void set_targets(sti_trainer *t, double share)
{
    const int T = t->batch.T, M = t->batch.B * T;
    for (int r = 0; r < M; r++) {
        const bool last = r % T == T - 1;
        t->target[r] = last ? 0 : t->ids[r + 1];
        t->row_weight[r] = last || !t->counts[r + 1] ? 0 : (float)share;
    }
}

static still_status logits_of(sti_trainer *t, const float *normed, int rows,
                              float *logits, still_error *err)
{
    still_model *m = t->m;
    return m->be->matmul(
        m->dev,
        &(sti_matmul_args){
            .x = normed, .M = rows, .n = 1, .w = {sti_model_head(m)}, .y = {logits}},
        err);
}

/* Adds the rows' losses to the tally. */
static still_status add_up(sti_trainer *t, int M, sti_tally *tally, still_error *err)
{
    const bool taught = t->p.kd > 0;
    const size_t bytes = (size_t)M * (taught ? 2 : 1) * sizeof *t->sums;
    STI_TRY(t->m->be->mem_move(t->m->dev, t->results, t->sums, bytes, err));
    for (int r = 0; r < M; r++) {
        const double w = (double)t->row_weight[r];
        const double kl = taught ? t->results[M + r] : 0;
        if (w <= 0) continue;
        tally->loss += w * (t->results[r] + t->p.kd * kl);
        tally->kl += w * kl;
    }
    return STILL_OK;
}

/* The loss, and back.dh [M, hidden]: its gradient at the last norm's output. */
static still_status compute_loss(sti_trainer *t, bool learn, sti_tally *tally,
                                 still_error *err)
{
    still_model *m = t->m;
    const int M = t->batch.B * t->batch.T;
    const size_t hidden = (size_t)m->cfg.hidden;
    for (int r = 0; r < M; r += t->loss_rows) {
        const int n = M - r < t->loss_rows ? M - r : t->loss_rows;
        const size_t at = (size_t)r * hidden;
        STI_TRY(logits_of(t, t->normed + at, n, t->logits, err));
        if (t->p.kd > 0)
            STI_TRY(logits_of(t, t->teacher + at, n, t->teacher_logits, err));
        STI_TRY(m->be->loss(
            m->dev,
            &(sti_loss_args){.logits = t->logits,
                             .teacher = t->p.kd > 0 ? t->teacher_logits : NULL,
                             .target = t->target + r,
                             .weight = t->row_weight + r,
                             .kd = (float)t->p.kd,
                             .M = n,
                             .V = m->cfg.vocab,
                             .loss = t->sums + r,
                             .kl = t->p.kd > 0 ? t->sums + M + r : NULL,
                             .head = learn ? sti_model_head(m) : NULL,
                             .dx = t->back.dh + at},
            err));
    }
    return add_up(t, M, tally, err);
}

/* back.dh at the last norm's output -> dx at its input. */
static still_status last_norm_back(sti_trainer *t, still_error *err)
{
    still_model *m = t->m;
    const int M = t->batch.B * t->batch.T;
    const size_t bytes = (size_t)M * (size_t)m->cfg.hidden * sizeof(float);
    STI_TRY(m->be->mem_clear(m->dev, t->dx, bytes, err));
    return m->be->rmsnorm_back(m->dev,
                               &(sti_rmsnorm_back_args){.x = t->x,
                                                        .g = m->final_norm,
                                                        .dy = t->back.dh,
                                                        .dx = t->dx,
                                                        .M = M,
                                                        .K = m->cfg.hidden,
                                                        .eps = m->stream_eps},
                               err);
}

/* Marks the first layer whose output is not finite; err2 tells the other ranks. */
static still_status find_nan_layer(const sti_trainer *t, sti_tally *tally,
                                   still_error *err)
{
    const still_model *m = t->m;
    const int L = m->cfg.layers;
    const sti_span all = {0, (size_t)t->batch.B * (size_t)t->batch.T *
                                 (size_t)m->cfg.hidden};
    for (int l = 0; l < L; l++) {
        const float *out = l + 1 < L ? t->inputs + (size_t)(l + 1) * all.n : t->x;
        double square = 0;
        STI_TRY(m->be->sum_squares(m->dev, out, &all, 1, &square, err));
        if (isfinite(square)) continue;
        tally->err2[l] = NAN;
        break;
    }
    return STILL_OK;
}

still_status sti_stage2_run(sti_trainer *t, double share, bool learn, uint64_t key,
                            sti_tally *tally, still_error *err)
{
    still_model *m = t->m;
    const int M = t->batch.B * t->batch.T, L = m->cfg.layers;
    const size_t size = (size_t)M * (size_t)m->cfg.hidden;
    if (t->p.kd > 0) STI_TRY(run_teacher(t, err));
    sti_acts acts = t->acts;
    const bool kept = acts.step > 0;
    sti_layer_job job = {
        .m = m,
        .cfg = &t->cfg,
        .adapter = t->adapter,
        .gates = t->adapter,
        .want = STI_WANT_OUTPUT | (learn && kept ? STI_WANT_ACTS : 0),
        .grad = learn ? t->grad : NULL,
        .low_rank_only = true,
        .batch = &t->batch,
        .dropout = {.p = learn ? (float)t->p.lora_dropout : 0, .key = key},
        .acts = &acts,
        .back = &t->back};
    set_targets(t, share);
    tally->rows += (uint64_t)M;
    STI_TRY(embed(t, t->inputs, err));
    for (int l = 0; l < L; l++) {
        const float *x = t->inputs + (size_t)l * size;
        acts = sti_acts_of(&t->acts, l);
        STI_TRY(sti_layer_forward(
            &job, l, x, l + 1 < L ? t->inputs + (size_t)(l + 1) * size : t->x, err));
    }
    STI_TRY(last_norm(t, t->normed, err));
    STI_TRY(compute_loss(t, learn, tally, err));
    if (!isfinite(tally->loss)) STI_TRY(find_nan_layer(t, tally, err));
    if (!learn || !isfinite(tally->loss)) return STILL_OK;
    STI_TRY(last_norm_back(t, err));
    job.want = STI_WANT_ACTS;
    /* Below the first converted layer nothing is trained. */
    for (int l = L - 1; l >= t->cfg.first; l--) {
        const float *x = t->inputs + (size_t)l * size;
        acts = sti_acts_of(&t->acts, l);
        if (!kept) STI_TRY(sti_layer_forward(&job, l, x, NULL, err));
        STI_TRY(sti_layer_backward(&job, l, x, t->dx, err));
    }
    return STILL_OK;
}
