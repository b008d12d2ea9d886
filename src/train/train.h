/* train.h - what the files of training share: the state of a run and its steps.
 *
 *   trainer.c     settings, the adapter at its start, memory
 *   linearize.c   the run: stages, steps, resuming, what ends it
 *   step.c        loss and gradient of one optimizer step, its sequences one by one
 *   stage1.c      attention transfer        stage2.c   next-token loss, end to end
 *   layer.c       a layer, forwards and backwards (attend.c, low_rank.c)
 *   optimizer.c   schedule, clipping, AdamW
 *   checkpoint.c  a run on disk             report.c   train.jsonl and the card
 *   comm.c        several processes as one  data/      sequences of token ids */
#ifndef STI_TRAIN_TRAIN_H
#define STI_TRAIN_TRAIN_H

#include "train/comm.h"
#include "train/data/data.h"
#include "train/layer.h"

typedef struct sti_trainer {
    still_model *m;
    still_train_params p; /* defaults filled in */
    sti_attn_config cfg;
    sti_adapter *adapter;
    sti_data *data;
    sti_comm *comm;

    int stage;               /* 1 or 2 */
    uint64_t step, steps;    /* of the stage */
    uint64_t stage_steps[3]; /* [stage]; 0: not run */
    uint64_t tokens;         /* seen in this stage, by all ranks */

    /* The optimizer's arrays, shaped like adapter->value, in the operators' memory. */
    sti_block moments;
    float *grad, *moment1, *moment2;

    /* Work space of one micro-batch: M = micro_batch * seq rows. */
    sti_block work;   /* of the operators */
    sti_block tables; /* of the program: ids, weights, positions, sums */
    int micro_batch, loss_rows;
    sti_batch batch;
    sti_acts acts;
    sti_grads back;
    float *x;       /* [M, hidden]: residual stream */
    float *inputs;  /* [layers, M, hidden]: stage 2, each layer's input */
    float *dx;      /* [M, hidden] */
    float *student; /* [M, H D]: stage 1, the student's output */
    float *teacher; /* [M, hidden]: distillation, the teacher's last norm */
    float *normed;  /* [M, hidden]: stage 2, the student's last norm */
    float *logits, *teacher_logits; /* [loss_rows, vocab] */

    double *sums; /* [2, M] loss and KL of rows, or [layers, 2] errors of a stage 1 */
    double *results;       /* the same, in host memory */
    float *row_weight;     /* [M] */
    int32_t *ids, *target; /* [M] */
    uint8_t *counts;       /* [M] */
    sti_span *span;        /* [entries]: what a stage trains */
    double *square;        /* [entries] */
    sti_adam_args *adam;   /* [entries] */
    bool devices_met;      /* devices add gradients over ranks among themselves */
    float *gathered;       /* [n_values]: gradients in host memory;
                              NULL: they are there already, or devices_met */
} sti_trainer;

/* Rows of logits computed at once: what fits a cache; on a GPU, what fills it. */
enum { STI_LOSS_ROWS = 128, STI_LOSS_ROWS_FAR = 2048 };

/* With t->m and t->p set: fills in defaults, checks them, makes adapter and memory,
 * but not the data. Call sti_trainer_end even after failure. */
still_status sti_trainer_begin(sti_trainer *t, still_error *err);
/* Frees everything but the model; st: the outcome, for the other ranks. */
void sti_trainer_end(sti_trainer *t, still_status st);

/* Sums over the sequences of a step (or of a validation). */
typedef struct sti_tally {
    double loss;  /* the step's mean loss, summed so far */
    double kl;    /* stage 2: mean of KL(teacher || student) */
    double *err2; /* [layers]: stage 1, squared error of attention outputs */
    double *ref2; /* [layers]: squares of the teacher's */
    /* [layers, H, 2]: both by query head; of validations, where the operators' memory is
     * the program's own. NULL: not asked for. */
    double *heads;
    uint64_t rows; /* tokens */
    int bad_layer; /* first layer whose loss is not finite; -1: none */
} sti_tally;

/* One micro-batch: ids and counts are in t. Adds to tally and, if learn, to t->grad.
 * share: 1 / number of rows (stage 1) or counted ids (stage 2) of the whole step. */
still_status sti_stage1_run(sti_trainer *t, double share, bool learn, sti_tally *tally,
                            still_error *err);
still_status sti_stage2_run(sti_trainer *t, double share, bool learn, uint64_t key,
                            sti_tally *tally, still_error *err);

/* Loss and gradient of step t->step: this rank's sequences, then the sum over ranks. */
still_status sti_step_run(sti_trainer *t, sti_tally *tally, still_error *err);
/* Mean over validation sequences, at most `most` of them; no gradient. */
still_status sti_step_validate(sti_trainer *t, uint64_t most, sti_tally *tally,
                               still_error *err);
/* Mean over layers of err2 / ref2. */
double sti_tally_relative(const sti_trainer *t, const sti_tally *tally);

/* ---- optimizer.c --------------------------------------------------------- */

/* Learning rate of step s of n: warm-up, then a cosine down to a tenth. */
double sti_schedule(double peak, uint64_t s, uint64_t n, double warmup);
/* Clips, steps, and sets *norm to the gradient's norm before clipping. Fails with
 * STILL_E_NUMERIC, naming the layer, if a gradient is not finite (nothing was changed)
 * or a value has become so. */
still_status sti_optimizer_step(sti_trainer *t, double *norm, still_error *err);
/* Whether an entry is trained in a stage. */
bool sti_trains(const sti_trainer *t, int stage, const sti_adapter_entry *e);

/* ---- checkpoint.c -------------------------------------------------------- */

#define STI_CHECKPOINT "checkpoint.safetensors"
still_status sti_checkpoint_write(const sti_trainer *t, still_error *err);
/* Fails if it was made with other settings, data or model, naming what differs. */
still_status sti_checkpoint_read(sti_trainer *t, still_error *err);
bool sti_checkpoint_there(const char *dir);
/* Removes temporary files that killed writers left in a run's folder. */
void sti_checkpoint_sweep(const char *dir);

/* ---- report.c ------------------------------------------------------------ */

/* Appends a line to train.jsonl. */
still_status sti_report_step(const sti_trainer *t, const still_train_progress *p,
                             const sti_tally *tally, still_error *err);
/* Drops lines of steps after the checkpoint's, which will be run again. */
still_status sti_report_rewind(const sti_trainer *t, still_error *err);
/* README.md of the folder. */
still_status sti_report_card(const sti_trainer *t, const still_train_progress *last,
                             still_error *err);

#endif
