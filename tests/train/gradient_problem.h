/* gradient_problem.h - a fixture model, a method and a stage: problems on which tests
 * compare a trainer's gradient with another one. */
#ifndef TESTS_GRADIENT_PROBLEM_H
#define TESTS_GRADIENT_PROBLEM_H

#include <stdio.h>

#include "../run.h"

#include "base/random.h"
#include "train/train.h"

enum { B = 2 };

typedef struct problem {
    const char *name, *model, *method;
    int stage;
    double kd, dropout;
    bool match_weights;
    bool one_layer; /* is converted, the second; the others stay softmax */
    int rank;       /* 0: 4 */
    bool shared;    /* layers share their acts, as where memory is short */
    int window;     /* of layers that have one; 0: as the model says */
} problem;

static inline double uniform(uint64_t key) /* [-1, 1) */
{
    return (double)(sti_mix64(key) >> 11) * 0x1p-52 - 1;
}

static inline still_train_params params_of(const problem *c, int T, int chunk, int cap)
{
    still_error e;
    still_train_params p = {.size = sizeof p,
                            .stage = c->stage,
                            .seq = T,
                            .batch = B,
                            .micro_batch = B,
                            .tokens = 1,
                            .lora_rank = c->rank ? c->rank : 4,
                            .lora_alpha = 8,
                            .lora_dropout = c->dropout,
                            .kd = c->kd,
                            .match_weights = c->match_weights};
    must(still_method_init(&p.method, c->method, chunk, &e), &e);
    p.method.cap = cap;
    if (c->match_weights) p.method.gate = false; /* it has no part in them */
    if (c->one_layer) p.method.first_layer = p.method.last_layer = 1;
    return p;
}

/* A trainer of B sequences: trained numbers away from their start, ids, and which of
 * them count. */
static inline void begin(const problem *c, still_train_params p,
                         const still_model_params *with, sti_trainer *t)
{
    char path[512];
    still_error e;
    *t = (sti_trainer){.p = p};
    snprintf(path, sizeof path, FIXTURES "/models/%s", c->model);
    must(still_model_open(path, with, &t->m, &e), &e);
    for (int l = 0; c->window && l < t->m->cfg.layers; l++)
        if (t->m->cfg.window[l]) t->m->cfg.window[l] = c->window;
    must(sti_trainer_begin(t, &e), &e);
    for (size_t i = 0; i < t->adapter->n_values; i++)
        t->adapter->value[i] += (float)(0.2 * uniform(i));
    must(sti_adapter_push(t->adapter, &e), &e);
    for (int i = 0; i < B * p.seq; i++) {
        t->ids[i] =
            (int32_t)(sti_mix64(1000 + (uint64_t)i) % (uint64_t)t->m->cfg.vocab);
        t->counts[i] = i % 5 != 3;
    }
    t->batch.B = B;
}

/* The loss; the gradient is then in t->grad. key: of dropout. */
static inline double run(sti_trainer *t, double share, uint64_t key)
{
    double sums[2 * 8] = {0};
    still_error e;
    assert_true(t->m->cfg.layers <= 8);
    sti_tally tally = {.err2 = sums, .ref2 = sums + 8, .bad_layer = -1};
    if (t->stage == 1)
        must(sti_stage1_run(t, share, true, &tally, &e), &e);
    else
        must(sti_stage2_run(t, share, true, key, &tally, &e), &e);
    return tally.loss;
}

static inline void end(sti_trainer *t)
{
    still_model *m = t->m;
    sti_trainer_end(t, STILL_OK);
    still_model_free(m);
}

/* A test of each of n problems, by its name. */
static inline void list_tests(struct CMUnitTest *tests, const problem *c, size_t n,
                              CMUnitTestFunction check)
{
    for (size_t i = 0; i < n; i++)
        tests[i] = (struct CMUnitTest){
            .name = c[i].name, .test_func = check, .initial_state = (void *)&c[i]};
}

#endif
