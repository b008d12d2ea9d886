/* double_model.h - a tiny model in double, from the embedding to the loss of either
 * stage, forwards only: what the gradients of training are the derivatives of.
 *
 * It shares no arithmetic with the trainer but the hybrid operator's double entry, and
 * its weights are the model file's own. Trained numbers are in `value`, arranged like
 * the adapter's: a test moves them by steps that a float could not hold. What the
 * gradient takes for constant is decided once, at the values it starts with: which
 * tokens are folded and when, the largest logit M of each query, the teacher. */
#ifndef TESTS_DOUBLE_MODEL_H
#define TESTS_DOUBLE_MODEL_H

#include "train/train.h"

typedef struct double_model {
    const sti_trainer *t; /* settings and ids */
    double *value;        /* [adapter->n_values] */
    struct parts *parts;
} double_model;

/* The student of t, and its next step: ids and counts are in t. share: as in
 * sti_stage1_run. A failure fails the test. */
double_model double_model_new(const sti_trainer *t, double share);
void double_model_free(double_model *d);

/* The loss, given that values of layers before `first` are those it started with. In
 * stage 1 those layers' own terms are left out: all others do without them. */
double double_model_loss(double_model *d, int first);

#endif
