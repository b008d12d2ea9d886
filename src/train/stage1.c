/* stage1.c - attention transfer: every layer's attention learns the teacher's output on
 * the teacher's own activations.
 *
 *   loss = 1/L sum_l 1000 mean((y_l - o_l)^2)
 *
 * o is the teacher's output per head before the output projection, y the student's from
 * the same q, k, v and normalized input. The next layer gets the teacher's output, so
 * layers learn independently and only one is in memory at a time. */
#include <math.h>

#include "train/train.h"

/* Compares the student's output with the teacher's in acts.y: adds the layer's
 * errors to t->sums and replaces the output by its gradient, factor (y - o). */
static still_status compare(sti_trainer *t, int layer, float factor, still_error *err)
{
    const sti_config *g = &t->m->cfg;
    return t->m->be->compare(
        t->m->dev,
        &(sti_compare_args){.o = t->acts.y,
                            .y = t->student,
                            .n = (size_t)t->batch.B * (size_t)t->batch.T *
                                 (size_t)g->heads * (size_t)g->head_dim,
                            .factor = factor,
                            .sums = t->sums + 2 * layer},
        err);
}

/* Adds what compare() adds, head by head: validations alone can afford it. */
static void add_heads(const sti_trainer *t, int layer, bool learn,
                      const sti_tally *tally)
{
    const sti_config *g = &t->m->cfg;
    const size_t H = (size_t)g->heads, D = (size_t)g->head_dim,
                 M = (size_t)t->batch.B * (size_t)t->batch.T;
    if (learn || !tally->heads || !t->m->be->host_memory) return;
    double *sums = tally->heads + (size_t)layer * H * 2;
    for (size_t i = 0; i < M * H; i++) {
        const float *o = t->acts.y + i * D, *y = t->student + i * D;
        for (size_t d = 0; d < D; d++) {
            const double e = (double)y[d] - (double)o[d];
            sums[i % H * 2] += e * e;
            sums[i % H * 2 + 1] += (double)o[d] * (double)o[d];
        }
    }
}

static int layers_of(const sti_trainer *t)
{
    return sti_attn_converted(&t->cfg);
}

/* Contribution of a unit of squared error to the loss. */
static double per_error(const sti_trainer *t, double share)
{
    const sti_config *g = &t->m->cfg;
    return 1000 * share /
           ((double)layers_of(t) * (double)g->heads * (double)g->head_dim);
}

static void tally_loss(sti_tally *tally, int layer, double loss)
{
    tally->loss += loss;
    if (!isfinite(loss) && tally->bad_layer < 0) tally->bad_layer = layer;
}

static still_status match_outputs(sti_trainer *t, const sti_layer_job *student,
                                  int layer, double share, bool learn, sti_tally *tally,
                                  still_error *err)
{
    STI_TRY(sti_student_attend(student, layer, t->student, err));
    add_heads(t, layer, learn, tally); /* the rest, once all layers' errors are known */
    STI_TRY(compare(t, layer, (float)(2 * per_error(t, share)), err));
    return learn ? sti_student_backward(student, layer, t->student, false, err)
                 : STILL_OK;
}

/* Cross entropy of attention weights; err2 and ref2 are still those of the outputs. */
static still_status match_weights(sti_trainer *t, const sti_layer_job *student,
                                  int layer, double share, bool learn, sti_tally *tally,
                                  still_error *err)
{
    double loss = 0;
    STI_TRY(sti_student_attend(student, layer, t->student, err));
    add_heads(t, layer, learn, tally);
    STI_TRY(compare(t, layer, 0, err));
    const double per = share / ((double)layers_of(t) * t->m->cfg.heads);
    STI_TRY(sti_student_match(student, layer, learn ? (float)per : 0, &loss, err));
    tally_loss(tally, layer, per * loss);
    return STILL_OK;
}

/* Adds the errors of all layers to the tally. */
static still_status add_up(sti_trainer *t, double share, sti_tally *tally,
                           still_error *err)
{
    const int first = t->cfg.first;
    STI_TRY(t->m->be->mem_move(t->m->dev, t->results, t->sums + 2 * first,
                               2 * (size_t)(t->cfg.last - first + 1) * sizeof *t->sums,
                               err));
    for (int l = first; l <= t->cfg.last; l++) {
        if (!sti_attn_converts(&t->cfg, l)) continue;
        const double *errors = t->results + 2 * (l - first);
        tally->err2[l] += errors[0];
        tally->ref2[l] += errors[1];
        if (!t->p.match_weights) tally_loss(tally, l, per_error(t, share) * errors[0]);
    }
    return STILL_OK;
}

still_status sti_stage1_run(sti_trainer *t, double share, bool learn, sti_tally *tally,
                            still_error *err)
{
    still_model *m = t->m;
    const int M = t->batch.B * t->batch.T;
    sti_layer_job teacher = {.m = m,
                             .cfg = &t->cfg,
                             .gates = t->adapter,
                             .want = STI_WANT_OUTPUT,
                             .batch = &t->batch,
                             .acts = &t->acts,
                             .back = &t->back};
    sti_layer_job student = teacher;
    student.adapter = t->adapter;
    student.grad = learn ? t->grad : NULL;
    STI_TRY(sti_model_embed(m, t->ids, M, t->x, err));
    tally->rows += (uint64_t)M;
    for (int l = 0; l <= t->cfg.last; l++) {
        STI_TRY(sti_layer_attend(&teacher, l, t->x, err));
        if (sti_attn_converts(&t->cfg, l))
            STI_TRY((t->p.match_weights ? match_weights : match_outputs)(
                t, &student, l, share, learn, tally, err));
        if (l < t->cfg.last) STI_TRY(sti_layer_finish(&teacher, l, t->x, t->x, err));
    }
    return add_up(t, share, tally, err);
}
