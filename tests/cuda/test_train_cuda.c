/* test_train_cuda.c - gradients of whole models on the GPU against those of the cpu
 * backend: every trained tensor of both stages. The GPU multiplies what goes back
 * through weights in bfloat16, whose numbers are off by up to 2^-9, and activations in
 * half precision or TF32; the cpu multiplies in float. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/random.h"
#include "train/train.h"

enum { B = 2, T = 48, CHUNK = 8, GPU = 0, CPU = 1, BOTH = 2 };
static const char *const backend[BOTH] = {"cuda", "cpu"};
/* Of |difference| / |gradient|. SUPRA's relu turns an input that rounding moved across
 * 0 into a gradient that is there or not. */
static const double BOUND = 2e-2, RELU_BOUND = 5e-2;

typedef struct problem {
    const char *name, *model, *method;
    int stage;
    double kd, dropout;
    bool one_layer;
    int rank;
    bool shared; /* layers share their acts, as where memory is short */
} problem;

static const problem problems[] = {
    {"stage 1, still", "llama3", "still", 1, 0, 0, false, 4, false},
    {"stage 1, lolcats", "llama3", "lolcats", 1, 0, 0, false, 4, false},
    {"stage 1, hedgehog", "llama3", "hedgehog", 1, 0, 0, false, 4, false},
    {"stage 1, t2r", "llama3", "t2r", 1, 0, 0, false, 4, false},
    {"stage 2, still", "llama3", "still", 2, 0, 0, false, 4, false},
    {"stage 2, still, rank 8", "llama3", "still", 2, 0, 0, false, 8, false},
    {"stage 2, still, computed again", "llama3", "still", 2, 0, 0, false, 8, true},
    {"stage 2, still, kd, biases, tied head", "qwen2-bias", "still", 2, 0.5, 0, false,
     4, false},
    {"stage 2, still, dropout, one layer", "llama3", "still", 2, 0, 0.25, true, 4,
     false},
    {"stage 2, lolcats", "llama3", "lolcats", 2, 0, 0, false, 4, false},
    /* Weights in half take other ways; without a selection, which rounding may turn. */
    {"stage 2, lolcats, half", "llama3.2-tied", "lolcats", 2, 0, 0, false, 8, false},
    {"stage 2, lolcats, half, kd, computed again", "llama3.2-tied", "lolcats", 2, 0.5,
     0, false, 8, true},
    {"stage 2, t2r", "llama3", "t2r", 2, 0, 0, false, 4, false},
    {"stage 1, supra", "llama3", "supra", 1, 0, 0, false, 4, false},
    {"stage 2, supra", "qwen2-bias", "supra", 2, 0, 0, false, 4, false},
    {"stage 2, liger", "llama3", "liger", 2, 0, 0, false, 4, false},
    {"stage 2, liger, kd, one layer", "qwen2-bias", "liger", 2, 0.5, 0, true, 4, false},
};

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

static double uniform(uint64_t i)
{
    return (double)(sti_mix64(i) >> 11) * 0x1p-52 - 1;
}

static still_train_params params_of(const problem *c)
{
    still_error e;
    still_train_params p = {.stage = c->stage,
                            .seq = T,
                            .batch = B,
                            .micro = B,
                            .tokens = 1,
                            .lora_rank = c->rank,
                            .lora_alpha = 8,
                            .lora_dropout = c->dropout,
                            .kd = c->kd};
    must(still_method_init(&p.method, c->method, CHUNK, &e), &e);
    p.method.cap = 5; /* some are evicted */
    if (c->one_layer) p.method.first_layer = p.method.last_layer = 1;
    return p;
}

static void fill(sti_trainer *t)
{
    still_error e;
    for (size_t i = 0; i < t->adapter->n_values; i++)
        t->adapter->value[i] += (float)(0.2 * uniform(i));
    must(sti_adapter_push(t->adapter, &e), &e);
    for (int i = 0; i < B * T; i++) {
        t->ids[i] =
            (int32_t)(sti_mix64(1000 + (uint64_t)i) % (uint64_t)t->m->cfg.vocab);
        t->counts[i] = i % 5 != 3;
    }
    t->batch.B = B;
}

/* Loss and gradient, the latter in the program's memory; the caller frees it. */
static double run(const problem *c, const char *name, sti_trainer *t, float **grad)
{
    char path[512];
    still_error e;
    *t = (sti_trainer){.p = params_of(c)};
    snprintf(path, sizeof path, FIXTURES "/models/%s", c->model);
    must(still_model_open(path, &(still_model_params){.backend = name}, &t->m, &e), &e);
    must(sti_trainer_begin(t, &e), &e);
    /* Tiny models leave room for the acts of all layers; a processor shares them. */
    assert_true((t->acts.step > 0) == (c->stage == 2 && !t->m->be->host_memory));
    if (c->shared) t->acts.step = 0;
    fill(t);
    double sums[2 * 8] = {0};
    sti_tally tally = {.err2 = sums, .ref2 = sums + 8, .bad_layer = -1};
    const double share = 1.0 / (B * T);
    if (t->stage == 1)
        must(sti_stage1_run(t, share, true, &tally, &e), &e);
    else
        must(sti_stage2_run(t, share, true, 7, &tally, &e), &e);
    const size_t bytes = t->adapter->n_values * sizeof **grad;
    *grad = malloc(bytes);
    assert_non_null(*grad);
    must(t->m->be->mem_move(t->m->dev, *grad, t->grad, bytes, &e), &e);
    return tally.loss;
}

static void check(void **state)
{
    const problem *c = *state;
    if (!sti_backend_find("cuda")) skip();
    sti_trainer t[BOTH];
    float *grad[BOTH];
    double loss[BOTH], worst = 0;
    for (int b = 0; b < BOTH; b++) loss[b] = run(c, backend[b], &t[b], &grad[b]);
    if (!(fabs(loss[GPU] / loss[CPU] - 1) <= 2e-3))
        fail_msg("%s: loss %.9g, on the cpu %.9g", c->name, loss[GPU], loss[CPU]);
    for (size_t i = 0; i < t[CPU].adapter->n_entries; i++) {
        const sti_adapter_entry *e = &t[CPU].adapter->entry[i];
        if (!sti_trains(&t[CPU], c->stage, e)) continue;
        double off = 0, size = 0;
        for (size_t k = 0; k < e->n; k++) {
            const double want = grad[CPU][e->at + k], d = grad[GPU][e->at + k] - want;
            off += d * d;
            size += want * want;
        }
        const double error = sqrt(off / (size + 1e-20));
        print_message("%s: %s off by %.1e\n", c->name, e->name, error);
        worst = fmax(worst, error);
    }
    const double bound = strcmp(c->method, "supra") == 0 ? RELU_BOUND : BOUND;
    if (!(worst <= bound)) fail_msg("%s: a gradient is off by %.2g", c->name, worst);
    for (int b = 0; b < BOTH; b++) {
        still_model *m = t[b].m;
        free(grad[b]);
        sti_trainer_end(&t[b], STILL_OK);
        still_model_free(m);
    }
}

int main(void)
{
    enum { N = sizeof problems / sizeof *problems };
    struct CMUnitTest tests[N];
    for (int i = 0; i < N; i++)
        tests[i] = (struct CMUnitTest){.name = problems[i].name,
                                       .test_func = check,
                                       .initial_state = (void *)&problems[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
