/* test_train_cuda.c - gradients of whole models on the GPU against those of the cpu
 * backend: every trained tensor of both stages. The GPU multiplies what goes back
 * through weights in bfloat16, whose numbers are off by up to 2^-9, and activations in
 * half precision or TF32; the cpu multiplies in float. */
#include "../../../train/gradient_problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../gpu.h"

enum { T = 48, GPU = 0, CPU = 1, BOTH = 2 };
static const char *const backend[BOTH] = {"cuda", "cpu"};
/* Of |difference| / |gradient|. SUPRA's relu turns an input that rounding moved across
 * 0 into a gradient that is there or not. */
static const double BOUND = 2e-2, RELU_BOUND = 5e-2;

static const problem problems[] = {
    {"stage 1, still", "llama3", "still", .stage = 1},
    {"stage 1, lolcats", "llama3", "lolcats", .stage = 1},
    {"stage 1, hedgehog", "llama3", "hedgehog", .stage = 1},
    {"stage 1, t2r", "llama3", "t2r", .stage = 1},
    {"stage 2, still", "llama3", "still", .stage = 2},
    {"stage 2, still, rank 8", "llama3", "still", .stage = 2, .rank = 8},
    {"stage 2, still, computed again", "llama3", "still", .stage = 2, .rank = 8,
     .shared = true},
    {"stage 2, still, kd, biases, tied head", "qwen2-bias", "still", .stage = 2,
     .kd = 0.5},
    {"stage 2, still, dropout, one layer", "llama3", "still", .stage = 2,
     .dropout = 0.25, .one_layer = true},
    {"stage 2, lolcats", "llama3", "lolcats", .stage = 2},
    /* Weights in half take other ways; without a selection, which rounding may turn. */
    {"stage 2, lolcats, half", "llama3.2-tied", "lolcats", .stage = 2, .rank = 8},
    {"stage 2, lolcats, half, kd, computed again", "llama3.2-tied", "lolcats",
     .stage = 2, .kd = 0.5, .rank = 8, .shared = true},
    {"stage 2, t2r", "llama3", "t2r", .stage = 2},
    {"stage 1, supra", "llama3", "supra", .stage = 1},
    {"stage 2, supra", "qwen2-bias", "supra", .stage = 2},
    {"stage 2, liger", "llama3", "liger", .stage = 2},
    {"stage 2, liger, kd, one layer", "qwen2-bias", "liger", .stage = 2, .kd = 0.5,
     .one_layer = true},
};

/* Loss and gradient, the latter in the program's memory; the caller frees it. */
static double gradient(const problem *c, const char *name, sti_trainer *t, float **grad)
{
    still_error e;
    begin(c, params_of(c, T, 8, 5), /* some are evicted */
          &STILL_PARAMS(still_model_params, .backend = name), t);
    /* Tiny models leave room for the acts of all layers; a processor shares them. */
    assert_true((t->acts.step > 0) == (c->stage == 2 && !t->m->be->host_memory));
    if (c->shared) t->acts.step = 0;
    const double loss = run(t, 1.0 / (B * T), 7);
    const size_t bytes = t->adapter->n_values * sizeof **grad;
    *grad = malloc(bytes);
    assert_non_null(*grad);
    must(t->m->be->mem_move(t->m->dev, *grad, t->grad, bytes, &e), &e);
    return loss;
}

static void check(void **state)
{
    const problem *c = *state;
    need_gpu();
    sti_trainer t[BOTH];
    float *grad[BOTH];
    double loss[BOTH], worst = 0;
    for (int b = 0; b < BOTH; b++) loss[b] = gradient(c, backend[b], &t[b], &grad[b]);
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
        free(grad[b]);
        end(&t[b]);
    }
}

static int setup(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){.threads = 1, .max_k = 64});
}

int main(void)
{
    enum { N = sizeof problems / sizeof *problems };
    struct CMUnitTest tests[N];
    list_tests(tests, problems, N, check);
    return cmocka_run_group_tests(tests, setup, close_gpu);
}
