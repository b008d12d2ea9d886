/* The optimizer as a run uses it: which entries a stage moves and how fast, weight
 * decay, clipping, moments, and the schedule. AdamW itself: tests/backend. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "train/train.h"

typedef struct problem {
    sti_trainer t;
    float *before; /* values at the start, none of them 0 */
} problem;

static void begin(problem *p, const char *backend, still_train_params params)
{
    still_error e;
    *p = (problem){.t.p = params};
    must(still_method_init(&p->t.p.method, "still", 8, &e), &e);
    p->t.p.seq = 16;
    p->t.p.batch = 1;
    p->t.p.tokens = (uint64_t)16 * 100;
    p->t.p.lora_rank = 2;
    must(still_model_open(
             FIXTURES "/train/model",
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = 2),
             &p->t.m, &e),
         &e);
    must(sti_trainer_begin(&p->t, &e), &e);
    const size_t n = p->t.adapter->n_values;
    p->before = malloc(n * sizeof *p->before);
    assert_non_null(p->before);
    for (size_t i = 0; i < n; i++)
        p->before[i] = p->t.adapter->seen[i] = (i % 2 ? 1.0f : -1.0f) + (float)i / 1e5f;
}

static void end(problem *p)
{
    still_model *m = p->t.m;
    sti_trainer_end(&p->t, STILL_OK);
    still_model_free(m);
    free(p->before);
}

static double step_with(problem *p, float gradient)
{
    still_error e;
    double norm;
    for (size_t i = 0; i < p->t.adapter->n_values; i++) p->t.grad[i] = gradient;
    must(sti_optimizer_step(&p->t, &norm, &e), &e);
    p->t.step++;
    return norm;
}

/* Value i has gone to `want` of its entry's, within a few roundings. */
static void check(const problem *p, const sti_adapter_entry *e, size_t i, double want)
{
    const double got = p->t.adapter->seen[e->at + i];
    if (!(fabs(got - want) <= 5e-7 * (1 + fabs(want))))
        fail_msg("%s, element %zu: %.9g, expected %.9g (was %.9g)", e->name, i, got,
                 want, p->before[e->at + i]);
}

static const char *const backend[] = {"ref", "cpu"};

/* Without a gradient a step is decay alone: x - lr decay x, in what the stage trains. */
static void decay_alone(void **state)
{
    (void)state;
    for (int b = 0; b < 2; b++)
        for (int stage = 1; stage <= 2; stage++) {
            problem p;
            begin(&p, backend[b],
                  STILL_PARAMS(still_train_params, .stage = stage, .decay = 0.3,
                               .lr = {0, 0.1, 0.2}));
            const double lr = sti_schedule(p.t.p.lr[stage], 0, p.t.steps, p.t.p.warmup);
            step_with(&p, 0);
            for (size_t k = 0; k < p.t.adapter->n_entries; k++) {
                const sti_adapter_entry *e = &p.t.adapter->entry[k];
                const bool moves = sti_trains(&p.t, stage, e);
                for (size_t i = 0; i < e->n; i++) {
                    const double x = p.before[e->at + i];
                    check(&p, e, i, moves ? x * (1 - lr * 0.3) : x);
                }
            }
            end(&p);
        }
}

/* No decay, no gradient: nothing moves. */
static void no_decay_unless_asked(void **state)
{
    (void)state;
    problem p;
    begin(&p, "cpu", STILL_PARAMS(still_train_params, .stage = 1));
    step_with(&p, 0);
    assert_memory_equal(p.t.adapter->seen, p.before,
                        p.t.adapter->n_values * sizeof *p.before);
    end(&p);
}

static still_train_group group_of(const sti_adapter_entry *e)
{
    if (strstr(e->name, ".lora.")) return STILL_GROUP_LORA;
    if (strstr(e->name, ".gate")) return STILL_GROUP_GATE;
    if (strstr(e->name, ".map_")) return STILL_GROUP_MAPS;
    return STILL_GROUP_SCALARS;
}

/* The first step is the rate of the entry's group against the gradient's sign, whatever
 * the gradient's size: so is clipping of no effect on it. A frozen group stays, and what
 * a stage does not train stays. */
static void groups_have_rates(void **state)
{
    (void)state;
    for (int stage = 1; stage <= 2; stage++) {
        problem p;
        still_train_params s = {
            .size = sizeof s, .stage = stage, .lr = {0, 0.01, 0.02}};
        s.lr_scale[STILL_GROUP_MAPS] = 2;
        s.lr_scale[STILL_GROUP_LORA] = 3;
        s.lr_scale[STILL_GROUP_GATE] = 5;
        s.lr_scale[STILL_GROUP_SCALARS] = -1;
        begin(&p, "cpu", s);
        int seen[STILL_GROUPS] = {0};
        const double lr = sti_schedule(s.lr[stage], 0, p.t.steps, p.t.p.warmup);
        step_with(&p, -1e-3f);
        for (size_t k = 0; k < p.t.adapter->n_entries; k++) {
            const sti_adapter_entry *e = &p.t.adapter->entry[k];
            const still_train_group g = group_of(e);
            const bool moves = g == STILL_GROUP_MAPS ||
                               (g == STILL_GROUP_LORA && stage == 2) ||
                               (g == STILL_GROUP_GATE && stage == 1);
            seen[g]++;
            for (size_t i = 0; i < e->n; i++)
                check(&p, e, i, p.before[e->at + i] + (moves ? lr * s.lr_scale[g] : 0));
        }
        assert_true(seen[STILL_GROUP_MAPS] && seen[STILL_GROUP_GATE] &&
                    seen[STILL_GROUP_SCALARS]);
        assert_int_equal(seen[STILL_GROUP_LORA] > 0, stage == 2);
        end(&p);
    }
}

/* Moments as the formula has them after two steps, the first of them clipped: what
 * enters is clip / norm of the gradient, and c1, c2 undo that moments began as 0. */
static void moments_and_clipping(void **state)
{
    (void)state;
    problem p;
    begin(&p, "cpu",
          STILL_PARAMS(still_train_params, .stage = 1, .clip = 0.5, .beta1 = 0.8,
                       .beta2 = 0.6));
    const sti_adapter_entry *e = p.t.adapter->entry;
    while (!sti_trains(&p.t, 1, e)) e++;
    double m = 0, v = 0, x = p.before[e->at];
    size_t n = 0;
    for (size_t k = 0; k < p.t.adapter->n_entries; k++)
        if (sti_trains(&p.t, 1, &p.t.adapter->entry[k])) n += p.t.adapter->entry[k].n;
    for (int s = 0; s < 2; s++) {
        const double each = s == 0 ? 3 : 1e-5, norm = each * sqrt((double)n);
        const double g = norm > 0.5 ? each * 0.5 / (norm + 1e-6) : each;
        const double lr = sti_schedule(1e-2, (uint64_t)s, p.t.steps, p.t.p.warmup);
        assert_true(fabs(step_with(&p, (float)each) - norm) <= 1e-5 * norm);
        m = 0.8 * m + 0.2 * g;
        v = 0.6 * v + 0.4 * g * g;
        x -= lr * m / (1 - pow(0.8, s + 1)) / (sqrt(v / (1 - pow(0.6, s + 1))) + 1e-8);
        assert_true(fabs(p.t.moment1[e->at] - m) <= 1e-5 * m);
        assert_true(fabs(p.t.moment2[e->at] - v) <= 1e-5 * v);
        check(&p, e, 0, x);
    }
    end(&p);
}

static void schedule(void **state)
{
    (void)state;
    assert_true(fabs(sti_schedule(1, 0, 40, 0.05) - 0.5) < 1e-12);
    assert_true(fabs(sti_schedule(1, 1, 40, 0.05) - 1) < 1e-12);
    assert_true(fabs(sti_schedule(1, 21, 40, 0.05) - 0.55) < 1e-12);
    assert_true(sti_schedule(1, 39, 40, 0.05) < 0.11);
    assert_true(sti_schedule(1, 0, 1, 0.05) == 1);
}

RUN_TESTS(cmocka_unit_test(decay_alone), cmocka_unit_test(no_decay_unless_asked),
          cmocka_unit_test(groups_have_rates), cmocka_unit_test(moments_and_clipping),
          cmocka_unit_test(schedule))
