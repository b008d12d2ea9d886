/* Training against PyTorch: gradients of every trained tensor and 40-step curves of
 * both stages (tests/fixtures/train, made by tools/train-reference.py); and the trained
 * student as a session. Finite differences: test_gradients.c. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "train/train.h"

enum { B = 2, T = 40 };

typedef struct fixture {
    sti_store store;
    sti_trainer t;
    sti_tally tally;
    int steps;
    double *err2;
    const int32_t *ids; /* [steps, B, T] */
} fixture;

static const char *text_of(const fixture *f, const char *key)
{
    const char *s = json_string_value(json_object_get(f->store.st_meta, key));
    if (!s) fail_msg("fixture has no '%s'", key);
    return s;
}

static double number_of(const fixture *f, const char *key)
{
    return strtod(text_of(f, key), NULL);
}

static const sti_tensor *tensor_of(const fixture *f, const char *name)
{
    const sti_tensor *t = sti_store_find(&f->store, name);
    if (!t) fail_msg("fixture has no tensor '%s'", name);
    return t;
}

static void set_params(fixture *f, still_train_params *p)
{
    still_error e;
    const bool lolcats = strstr(text_of(f, "method"), "lolcats") != NULL;
    must(still_method_init(&p->method, lolcats ? "lolcats" : "still",
                           (int)number_of(f, "chunk"), &e),
         &e);
    if (!lolcats) {
        p->method.select = (int)number_of(f, "select");
        p->method.cap = (int)number_of(f, "cap");
        p->method.gate = sti_store_find(&f->store, "start.layers.0.gate") != NULL;
    }
    p->stage = (int)number_of(f, "stage");
    p->seq = T;
    p->batch = p->micro_batch = B;
    f->steps = (int)number_of(f, "steps");
    p->tokens = (uint64_t)f->steps * B * T;
    p->match_weights = strstr(text_of(f, "loss"), "weights") != NULL;
    if (f->steps > 1) p->lr[p->stage] = number_of(f, "lr");
    if (p->stage == 2) {
        p->lora_rank = (int)number_of(f, "lora_rank");
        p->lora_alpha = number_of(f, "lora_alpha");
        p->kd = number_of(f, "kd");
        if (lolcats) p->lora_targets = 15;
    }
}

static void open_fixture(fixture *f, const char *name, const char *backend, int threads)
{
    char path[512];
    still_error e;
    size_t found;
    *f = (fixture){0};
    snprintf(path, sizeof path, FIXTURES "/train/%s.safetensors", name);
    must(sti_store_open(path, &f->store, &e), &e);
    must(still_model_open(
             FIXTURES "/train/model",
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = threads),
             &f->t.m, &e),
         &e);
    set_params(f, &f->t.p);
    must(sti_trainer_begin(&f->t, &e), &e);
    must(sti_adapter_fill(f->t.adapter, &f->store, "start.", &found, &e), &e);
    assert_int_equal(found, f->t.adapter->n_entries);
    f->err2 = calloc(2 * (size_t)f->t.m->cfg.layers, sizeof *f->err2);
    f->tally = (sti_tally){.err2 = f->err2, .ref2 = f->err2 + f->t.m->cfg.layers};
    f->ids = tensor_of(f, "ids")->data;
    memset(f->t.counts, 1, B * T);
    f->t.batch.B = B;
}

static void close_fixture(fixture *f)
{
    still_model *m = f->t.m;
    sti_trainer_end(&f->t, STILL_OK);
    still_model_free(m);
    sti_store_close(&f->store);
    free(f->err2);
}

/* Loss of a step's batch; gradients in t->grad if learn. */
static double lose(fixture *f, int step, bool learn)
{
    still_error e;
    sti_trainer *t = &f->t;
    memcpy(t->ids, f->ids + (size_t)step * B * T, B * T * sizeof *t->ids);
    memset(t->grad, 0, t->adapter->n_values * sizeof *t->grad);
    f->tally.loss = f->tally.kl = 0;
    f->tally.bad_layer = -1;
    if (t->stage == 1)
        must(sti_stage1_run(t, 1.0 / (B * T), learn, &f->tally, &e), &e);
    else
        must(sti_stage2_run(t, 1.0 / (B * (T - 1)), learn, 0, &f->tally, &e), &e);
    return f->tally.loss;
}

/* Largest error of an entry's gradient over its largest element. */
static double gradient_error(const fixture *f, const sti_adapter_entry *e)
{
    char name[96];
    snprintf(name, sizeof name, "grad.%s", e->name);
    const sti_tensor *t = tensor_of(f, name);
    const float *want = t->data, *got = f->t.grad + e->at;
    double worst = 0, top = 0;
    assert_int_equal(t->bytes, e->n * sizeof(float));
    for (size_t i = 0; i < e->n; i++) {
        worst = fmax(worst, fabs((double)got[i] - want[i]));
        top = fmax(top, fabs((double)want[i]));
    }
    assert_true(top > 0);
    return worst / top;
}

static void check_case(const char *name, const char *backend)
{
    fixture f;
    still_error e;
    open_fixture(&f, name, backend, 2);
    const double *loss = tensor_of(&f, "loss")->data,
                 *norm = tensor_of(&f, "norm")->data;
    for (int s = 0; s < f.steps; s++) {
        const double got = lose(&f, s, true);
        if (fabs(got - loss[s]) > 1e-4 * loss[s])
            fail_msg("%s on %s, step %d: loss %.7g, expected %.7g", name, backend, s,
                     got, loss[s]);
        for (size_t i = 0; s == 0 && i < f.t.adapter->n_entries; i++) {
            const sti_adapter_entry *entry = &f.t.adapter->entry[i];
            if (!sti_trains(&f.t, f.t.stage, entry)) continue;
            const double error = gradient_error(&f, entry);
            if (!(error <= 1e-4))
                fail_msg("%s on %s: gradient of %s is off by %.2g", name, backend,
                         entry->name, error);
        }
        double got_norm = 0;
        must(sti_optimizer_step(&f.t, &got_norm, &e), &e);
        f.t.step++;
        if (fabs(got_norm - norm[s]) > 1e-3 * norm[s])
            fail_msg("%s on %s, step %d: norm %.7g, expected %.7g", name, backend, s,
                     got_norm, norm[s]);
    }
    close_fixture(&f);
}

static void cases_on_cpu(void **state)
{
    (void)state;
    const char *const name[] = {"still-stage1",   "lolcats-stage1",  "still-stage2",
                                "lolcats-stage2", "still-stage2-kd", "still-weights",
                                "lolcats-weights"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) check_case(name[i], "cpu");
}

static void cases_on_ref(void **state)
{
    (void)state;
    const char *const name[] = {"still-stage2-kd", "still-weights", "lolcats-weights",
                                "still-stage1", "lolcats-stage2"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) check_case(name[i], "ref");
}

/* One thread or three: the same bits. */
static void threads_change_nothing(void **state)
{
    (void)state;
    const char *const name[] = {"still-stage1", "still-stage2"};
    for (int c = 0; c < 2; c++) {
        fixture one, three;
        open_fixture(&one, name[c], "cpu", 1);
        open_fixture(&three, name[c], "cpu", 3);
        assert_true(lose(&one, 0, true) == lose(&three, 0, true));
        assert_memory_equal(one.t.grad, three.t.grad,
                            one.t.adapter->n_values * sizeof(float));
        close_fixture(&one);
        close_fixture(&three);
    }
}

/* The student as it was trained and as a session runs it, cut anyhow: one model. */
static void session_is_the_student(void **state)
{
    (void)state;
    const char *const name[] = {"still-stage2", "lolcats-stage2"};
    for (int c = 0; c < 2; c++) {
        fixture f;
        still_error e;
        still_session *s;
        float logprob[T];
        double nll = 0;
        open_fixture(&f, name[c], "cpu", 2);
        const double trained = lose(&f, 0, false);
        f.t.m->adapter = f.t.adapter;
        f.t.m->info.method = &f.t.adapter->spec.method;
        must(still_session_new(
                 f.t.m, &STILL_PARAMS(still_session_params, .ctx = T, .batch = 7), &s,
                 &e),
             &e);
        for (int b = 0; b < B; b++) {
            still_session_reset(s);
            must(still_session_logprobs(s, f.ids + b * T, T, logprob, NULL, &e), &e);
            for (int i = 0; i < T - 1; i++) nll -= logprob[i];
        }
        assert_true(fabs(nll / (B * (T - 1)) - trained) < 2e-5);
        still_session_free(s);
        f.t.m->adapter = NULL;
        close_fixture(&f);
    }
}

RUN_TESTS(cmocka_unit_test(cases_on_cpu), cmocka_unit_test(cases_on_ref),
          cmocka_unit_test(threads_change_nothing),
          cmocka_unit_test(session_is_the_student))
