/* Gradients of both stages against finite differences of the same model in double
 * (double_model.h): every trained tensor, on each backend. */
#include "gradient_problem.h"

#include <math.h>
#include <string.h>

#include "double_model.h"

/* Derivatives of a tensor are taken along DIRECTIONS vectors of random signs. For the
 * difference d of two gradients the mean of (signs . d)^2 is |d|^2, and an error in a
 * single number shows in each of them. Tensors of few numbers: along each number. */
enum { T = 24, DIRECTIONS = 4, BACKENDS = 2, MAX_ENTRY = 1 << 14 };
static const double STEP = 3e-5;  /* length of a step */
static const double BOUND = 1e-4; /* of |difference| / |gradient| */
static const char *const backend[BACKENDS] = {"ref", "cpu"};

static const problem problems[] = {
    {"stage 1, still", "llama3", "still", .stage = 1},
    {"stage 1, lolcats", "llama3", "lolcats", .stage = 1},
    {"stage 1, t2r", "llama3", "t2r", .stage = 1},
    {"stage 1, still, weights", "llama3", "still", .stage = 1, .match_weights = true},
    {"stage 1, lolcats, weights", "llama3", "lolcats", .stage = 1,
     .match_weights = true},
    {"stage 2, still", "llama3", "still", .stage = 2},
    {"stage 2, still, kd, biases", "qwen2-bias", "still", .stage = 2, .kd = 0.5},
    {"stage 2, still, dropout, one layer", "llama3", "still", .stage = 2,
     .dropout = 0.25, .one_layer = true},
    {"stage 2, lolcats", "llama3", "lolcats", .stage = 2},
    {"stage 2, t2r", "llama3", "t2r", .stage = 2},
    {"stage 1, norms of heads", "qwen3", "still", .stage = 1},
    {"stage 2, norms of heads", "qwen3", "still", .stage = 2},
    {"stage 1, norms behind", "olmo2", "still", .stage = 1},
    {"stage 2, norms behind", "olmo2", "still", .stage = 2, .kd = 0.5},
    {"stage 2, norms behind, dropout", "olmo2", "still", .stage = 2, .dropout = 0.25},
    {"stage 1, layers without RoPE", "smollm3", "still", .stage = 1},
    {"stage 2, layers without RoPE", "smollm3", "still", .stage = 2},
    {"stage 1, scales", "granite", "still", .stage = 1},
    {"stage 2, scales", "granite", "still", .stage = 2},
    {"stage 1, partial RoPE", "phi3", "still", .stage = 1},
    {"stage 2, partial RoPE", "phi3", "still", .stage = 2},
    {"stage 1, local layers", "gemma3", "still", .stage = 1, .window = 7},
    {"stage 2, local layers", "gemma3", "still", .stage = 2, .window = 7},
    {"stage 2, local layers, lolcats", "gemma3", "lolcats", .stage = 2, .window = 7},
};
enum { PROBLEMS = sizeof problems / sizeof *problems };

static double share_of(const sti_trainer *t)
{
    int counted = 0;
    for (int i = 0; i < B * T; i++) counted += i % T != 0 && t->counts[i];
    return 1.0 / (t->stage == 1 ? B * T : counted);
}

/* ---- Differences --------------------------------------------------------- */

static int directions_of(const sti_adapter_entry *e)
{
    return e->n < DIRECTIONS ? (int)e->n : DIRECTIONS;
}

static void draw(const sti_adapter_entry *e, int i, double *along)
{
    for (size_t k = 0; k < e->n; k++)
        if (e->n <= DIRECTIONS)
            along[k] = k == (size_t)i;
        else
            along[k] = sti_mix64(k * DIRECTIONS + (uint64_t)i) & 1 ? 1 : -1;
}

/* Slope of the loss along a direction of an entry, by a central difference. */
static double slope(double_model *d, const sti_adapter_entry *e, const double *along)
{
    double *x = d->value + e->at, start[MAX_ENTRY], loss[2], length = 0;
    for (size_t k = 0; k < e->n; k++) length += along[k] * along[k];
    const double h = STEP / sqrt(length);
    memcpy(start, x, e->n * sizeof *x);
    for (int side = 0; side < 2; side++) {
        for (size_t k = 0; k < e->n; k++) x[k] = start[k] + (side ? h : -h) * along[k];
        loss[side] = double_model_loss(d, e->layer);
    }
    memcpy(x, start, e->n * sizeof *x);
    return (loss[1] - loss[0]) / (2 * h);
}

/* Relative errors of the backends' gradients of an entry. */
static void compare(double_model *d, const sti_adapter_entry *e, const sti_trainer *t,
                    double error[BACKENDS])
{
    double along[MAX_ENTRY], square = 0, off[BACKENDS] = {0};
    assert_true(e->n <= MAX_ENTRY);
    for (int i = 0; i < directions_of(e); i++) {
        draw(e, i, along);
        const double found = slope(d, e, along);
        square += found * found;
        for (int b = 0; b < BACKENDS; b++) {
            double said = 0;
            for (size_t k = 0; k < e->n; k++)
                said += along[k] * (double)t[b].grad[e->at + k];
            off[b] += (said - found) * (said - found);
        }
    }
    for (int b = 0; b < BACKENDS; b++) error[b] = sqrt(off[b] / square);
}

static void check(void **state)
{
    const problem *c = *state;
    sti_trainer t[BACKENDS];
    double loss[BACKENDS], worst[BACKENDS] = {0};
    for (int b = 0; b < BACKENDS; b++) {
        begin(c, params_of(c, T, 4, 2), /* some are evicted */
              &STILL_PARAMS(still_model_params, .backend = backend[b], .threads = 1),
              &t[b]);
        loss[b] = run(&t[b], share_of(&t[b]), 0);
    }
    double_model d = double_model_new(&t[0], share_of(&t[0]));
    const double expected = double_model_loss(&d, 0);
    for (int b = 0; b < BACKENDS; b++)
        if (!(fabs(loss[b] / expected - 1) <= 1e-5))
            fail_msg("%s on %s: loss %.9g, in double %.9g", c->name, backend[b],
                     loss[b], expected);
    for (size_t i = 0; i < t[0].adapter->n_entries; i++) {
        const sti_adapter_entry *e = &t[0].adapter->entry[i];
        double error[BACKENDS];
        if (!sti_trains(&t[0], c->stage, e)) continue;
        compare(&d, e, t, error);
        for (int b = 0; b < BACKENDS; b++) {
            if (!(error[b] <= BOUND))
                fail_msg("%s on %s: gradient of %s is off by %.2g", c->name, backend[b],
                         e->name, error[b]);
            worst[b] = fmax(worst[b], error[b]);
        }
    }
    for (int b = 0; b < BACKENDS; b++)
        print_message("%s on %s: within %.1e\n", c->name, backend[b], worst[b]);
    double_model_free(&d);
    for (int b = 0; b < BACKENDS; b++) end(&t[b]);
}

int main(void)
{
    struct CMUnitTest tests[PROBLEMS];
    list_tests(tests, problems, PROBLEMS, check);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
