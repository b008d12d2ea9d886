/* Whole training runs: every method learns; accumulation, mixing, masking, distillation
 * and dropout; what is refused. Runs that are interrupted: test_linearize_resume.c. The
 * shell's side of it: tests/cli/test_linearize.sh. */
#include "../run.h"
#include "linearize_runs.h"

/* ---- Learning ------------------------------------------------------------ */

/* The loss at the end of each stage is below that at its start. */
static void falls(const run *r, const char *what)
{
    for (int s = 1; s <= 2; s++) {
        double first = NAN, last = NAN;
        for (int i = 0; i < r->n; i++) {
            assert_true(isfinite(r->step[i].loss));
            if (r->step[i].stage != s) continue;
            if (isnan(first)) first = r->step[i].loss;
            last = r->step[i].loss;
        }
        if (!isnan(first) && !(last < first))
            fail_msg("%s, stage %d: loss %.5f at first, %.5f at last", what, s, first,
                     last);
    }
}

static void every_method_learns(void **state)
{
    (void)state;
    static const struct {
        const char *method;
        bool plain, per_head, window, weights;
        int stages; /* that have something to learn */
    } c[] = {{"still", .stages = 2},
             {"still", .plain = true, .stages = 2},
             {"still", .per_head = true, .window = true, .stages = 2},
             {"still", .weights = true, .stages = 2},
             {"lolcats", .stages = 2},
             {"lolcats", .weights = true, .stages = 2},
             {"hedgehog", .stages = 2},
             {"t2r", .stages = 2},
             {"supra", .stages = 2},
             {"swa", .stages = 1},
             {"liger", .stages = 1}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        run r;
        still_model *m;
        still_session *s;
        still_error e;
        setup(&r, c[i].method, 0, STEPS);
        if (c[i].plain) r.p.method.gate = r.p.method.norm_preserved = false;
        r.p.method.per_head = c[i].per_head;
        r.p.method.window_scale = c[i].window || strcmp(c[i].method, "lolcats") == 0;
        r.p.match_weights = c[i].weights;
        train(&r, "method");
        falls(&r, c[i].method);
        assert_int_equal(r.n, STEPS * c[i].stages);
        /* And what it wrote runs. */
        const int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
        must(still_model_open(in_dir("model.gguf"),
                              &STILL_PARAMS(still_model_params, .threads = 1,
                                            .adapter = in_dir("method")),
                              &m, &e),
             &e);
        must(still_session_new(m, &STILL_PARAMS(still_session_params, .ctx = 64), &s,
                               &e),
             &e);
        must(still_session_feed(s, ids, 12, &e), &e);
        assert_true(isfinite(still_session_logits(s)[0]));
        still_session_free(s);
        still_model_free(m);
    }
}

static void options_learn(void **state)
{
    (void)state;
    run r;
    setup(&r, "still", 2, 8);
    r.p.kd = 0.5;
    train(&r, "kd");
    falls(&r, "kd");
    assert_true(r.step[1].kl > 0);
    /* Both files: three sequences of the first for one of the second. */
    setup(&r, "still", 1, STEPS);
    r.p.n_data = 2;
    data[0].weight = 3, data[1].weight = 1;
    train(&r, "mixed");
    const double mixed = r.step[0].loss;
    data[0].weight = data[1].weight = 1;
    train(&r, "even");
    data[0].weight = data[1].weight = 0;
    assert_true(mixed != r.step[0].loss);
    /* Outputs alone are another loss. */
    setup(&r, "still", 2, STEPS);
    r.p.data = data + 1;
    train(&r, "all");
    const double all = r.step[0].loss;
    r.p.mask_prompt = true;
    train(&r, "masked");
    assert_true(r.step[0].loss != all);
}

/* A batch at once or in parts: the same loss at every step, within rounding. */
static void accumulation(void **state)
{
    (void)state;
    for (int stage = 1; stage <= 2; stage++) {
        run one, r;
        setup(&one, "still", stage, 4);
        one.p.data = data + 1;
        one.p.mask_prompt = true; /* parts of unequal weight */
        train(&one, "micro");
        for (int micro_batch = 2; micro_batch <= BATCH; micro_batch *= 2) {
            setup(&r, "still", stage, 4);
            r.p.data = data + 1;
            r.p.mask_prompt = true;
            r.p.micro_batch = micro_batch;
            train(&r, "micro");
            for (int i = 0; i < 4; i++)
                if (fabs(r.step[i].loss - one.step[i].loss) > 2e-5 * one.step[i].loss)
                    fail_msg("stage %d, %d at once, step %d: loss %.9g, not %.9g",
                             stage, micro_batch, i, r.step[i].loss, one.step[i].loss);
        }
    }
}

static void dropout_repeats(void **state)
{
    (void)state;
    run r;
    for (int i = 0; i < 3; i++) {
        setup(&r, "still", 2, 3);
        r.p.lora_dropout = i < 2 ? 0.2 : 0;
        train(&r, i == 0 ? "dropped" : i == 1 ? "again" : "kept");
    }
    assert_true(same_file(in_dir("dropped"), in_dir("again"), STI_ADAPTER_TENSORS));
    assert_false(same_file(in_dir("dropped"), in_dir("kept"), STI_ADAPTER_TENSORS));
}

/* Steps that see the same sequence and learn next to nothing: their losses differ by the
 * dropout masks alone, which are fresh in each. */
static void dropout_is_fresh(void **state)
{
    (void)state;
    run r;
    char text[256], start[256];
    snprintf(text, sizeof text, "%s", in_dir("single.jsonl"));
    snprintf(start, sizeof start, "%s", in_dir("learned"));
    const still_train_data single = {.path = text};
    write_text(text, 1);
    setup(&r, "still", 2, 1);
    train(&r, "learned"); /* LoRA starts at 0, where dropout has no effect */
    for (int dropped = 0; dropped < 2; dropped++) {
        setup(&r, "still", 2, 1);
        r.p.data = &single;
        r.p.start = start;
        r.p.batch = 1;
        r.p.tokens = 3 * SEQ;
        r.p.lr[2] = 1e-12;
        r.p.lora_dropout = dropped ? 0.5 : 0;
        train(&r, "single");
        assert_int_equal(r.n, 3);
        for (int i = 1; i < 3; i++) {
            const double apart = fabs(r.step[i].loss - r.step[i - 1].loss);
            if (dropped ? apart < 1e-7 : apart > 1e-9)
                fail_msg("dropout %d, step %d: losses are %g apart", dropped, i, apart);
        }
    }
}

/* Layers outside the range have no entry, and keep all of the past. */
static void some_layers(void **state)
{
    (void)state;
    run r;
    still_error e;
    sti_store s = {0};
    char path[512];
    setup(&r, "still", 0, 3);
    r.p.method.first_layer = 1;
    r.p.method.last_layer = 2;
    train(&r, "layers");
    falls(&r, "layers 1-2");
    snprintf(path, sizeof path, "%s/" STI_ADAPTER_TENSORS, in_dir("layers"));
    must(sti_store_open(path, &s, &e), &e);
    assert_null(sti_store_find(&s, "layers.0.map_q"));
    assert_null(sti_store_find(&s, "layers.0.lora.q.a"));
    assert_non_null(sti_store_find(&s, "layers.1.map_q"));
    assert_non_null(sti_store_find(&s, "layers.2.lora.q.b"));
    sti_store_close(&s);
}

/* A program need not name the base: its path stands for it. */
static void unnamed_base(void **state)
{
    (void)state;
    run r;
    size_t n;
    setup(&r, "swa", 2, 1);
    r.p.base_name = NULL;
    train(&r, "unnamed");
    char *card = read_all(in_dir("unnamed"), "README.md", &n);
    assert_null(strstr(card, "(null)"));
    assert_non_null(strstr(card, in_dir("model.gguf")));
    free(card);
}

static void steps_without_end(void **state)
{
    (void)state;
    run r;
    still_train_plan plan;
    setup(&r, "swa", 2, 1);
    r.p.tokens = UINT64_MAX;
    must(still_linearize_plan(model, &r.p, &plan, &r.err), &r.err);
    assert_true(plan.steps[2] == UINT64_MAX / (SEQ * BATCH) + 1);
}

/* ---- Refusals ------------------------------------------------------------ */

static void refuses(run *r, still_status want, const char *text)
{
    remove_all(in_dir("refused"));
    assert_int_equal(go(r, "refused"), want);
    if (!strstr(r->err.text, text)) fail_msg("%s", r->err.text);
    assert_int_equal(access(in_dir("refused"), F_OK), -1);
}

static void refusals(void **state)
{
    (void)state;
    run r;
    setup(&r, "swa", 1, 4);
    refuses(&r, STILL_E_ARG, "method swa has nothing to train in stage 1");
    setup(&r, "supra", 1, 4);
    r.p.match_weights = true;
    refuses(&r, STILL_E_ARG, "has no attention weights");
    setup(&r, "still", 2, 4);
    r.p.lr_scale[STILL_GROUP_LORA] = -1;
    r.p.freeze_maps = true;
    refuses(&r, STILL_E_ARG, "nothing to train in stage 2");
    setup(&r, "softmax", 0, 4);
    refuses(&r, STILL_E_ARG, "softmax is the teacher itself");
    double *const number[] = {&r.p.lr[1],    &r.p.lr[2],        &r.p.warmup,
                              &r.p.held_out, &r.p.beta1,        &r.p.beta2,
                              &r.p.decay,    &r.p.lora_dropout, &r.p.lora_alpha,
                              &r.p.kd,       &r.p.cap_share,    &r.p.clip};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        setup(&r, "still", 0, 4);
        *number[i] = NAN;
        refuses(&r, STILL_E_ARG, "is nan, it must be 0 ");
        if (number[i] == &r.p.clip) continue; /* the norm has no limit then */
        *number[i] = INFINITY;
        refuses(&r, STILL_E_ARG, "is inf, it must be 0 ");
    }
    setup(&r, "still", 0, 4);
    r.p.lr_scale[STILL_GROUP_MAPS] = NAN;
    refuses(&r, STILL_E_ARG, "scale nan");
    setup(&r, "still", 0, 4);
    r.p.n_data = 0;
    refuses(&r, STILL_E_ARG, "no training data");
    setup(&r, "still", 0, 4);
    r.p.seq = 1 << 18;
    r.p.batch = 1;
    refuses(&r, STILL_E_FORMAT, "tokens, expected at least the 262144");
}

RUN_TESTS_IN(set_up, tear_down, cmocka_unit_test(every_method_learns),
             cmocka_unit_test(options_learn), cmocka_unit_test(accumulation),
             cmocka_unit_test(dropout_repeats), cmocka_unit_test(dropout_is_fresh),
             cmocka_unit_test(some_layers), cmocka_unit_test(unnamed_base),
             cmocka_unit_test(steps_without_end), cmocka_unit_test(refusals))
