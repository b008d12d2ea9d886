/* Models of a shape, and the measurements on them: figures that make sense, stops,
 * refusals, and a model that is as it was afterwards. */
#include "../run.h"
#include "tiny.h"

#include <math.h>
#include <string.h>

#include "model/shape.h"

static still_method method(const char *name)
{
    return method_of(name, 16);
}

/* ---- Shapes -------------------------------------------------------------- */

static void logits_of(const char *backend, float out[VOCAB])
{
    still_error e;
    still_session *s;
    still_model *m = open_tiny(backend);
    int32_t tok[40];
    for (int i = 0; i < 40; i++) tok[i] = (i * 91 + 1) % VOCAB;
    must(still_session_new(m, &STILL_PARAMS(still_session_params, .ctx = 64), &s, &e),
         &e);
    must(still_session_feed(s, tok, 40, &e), &e);
    memcpy(out, still_session_logits(s), VOCAB * sizeof *out);
    still_session_free(s);
    still_model_free(m);
}

static void a_shape_is_a_model(void **state)
{
    (void)state;
    float a[VOCAB], b[VOCAB], ref[VOCAB];
    double most = 0, least = 0, worst = 0;
    logits_of("cpu", a);
    logits_of("cpu", b);
    logits_of("ref", ref);
    assert_memory_equal(a, b, sizeof a); /* the same weights every time */
    for (int i = 0; i < VOCAB; i++) {
        assert_true(isfinite(a[i]));
        most = fmax(most, (double)a[i]);
        least = fmin(least, (double)a[i]);
        worst = fmax(worst, fabs((double)a[i] - (double)ref[i]));
    }
    assert_true(most > 1 && most < 10 && least < -1 && least > -10);
    assert_true(worst < 0.02);
    still_model *m = open_tiny(NULL);
    const still_model_info *info = still_model_get_info(m);
    assert_string_equal(info->name, "tiny");
    assert_string_equal(info->arch, "llama");
    assert_int_equal(info->layers, 2);
    assert_int_equal(info->vocab, VOCAB);
    assert_null(still_model_tokenizer(m));
    for (size_t i = 1; i < m->store.n_tensors; i++) /* as sti_store_find needs them */
        assert_true(strcmp(m->store.tensor[i - 1].name, m->store.tensor[i].name) < 0);
    still_model_free(m);
}

/* Sharing memory changes what lies in it, not what is there: the same tensors. */
static void shared_memory_is_smaller(void **state)
{
    (void)state;
    sti_store own, shared;
    still_error e;
    must(sti_shape_open("tiny", true, &own, &e), &e);
    must(sti_shape_open("tiny", false, &shared, &e), &e);
    assert_int_equal(own.n_tensors, shared.n_tensors);
    assert_true(shared.map[0].size < own.map[0].size / 2);
    for (size_t i = 0; i < own.n_tensors; i++) {
        const sti_tensor *a = &own.tensor[i], *b = &shared.tensor[i];
        assert_string_equal(a->name, b->name);
        assert_true(a->bytes == b->bytes);
        const unsigned char *begin = shared.map[0].data, *at = b->data;
        assert_true(at >= begin && at + b->bytes <= begin + shared.map[0].size);
        assert_true(((const uint16_t *)b->data)[b->bytes / 2 - 1] != 0);
    }
    sti_store_close(&own);
    sti_store_close(&shared);
    must(sti_shape_open("qwen2-0.5b", false, &shared, &e), &e);
    assert_non_null(sti_store_find(&shared, "model.layers.3.self_attn.k_proj.bias"));
    sti_store_close(&shared);
}

static void unknown_shapes(void **state)
{
    (void)state;
    still_error e;
    still_model *m;
    assert_int_equal(still_model_open_shape("llama9", NULL, &m, &e), STILL_E_ARG);
    assert_null(m);
    assert_non_null(strstr(e.text, "llama3.1-8b"));
    assert_int_equal(still_model_open_shape(NULL, NULL, &m, &e), STILL_E_ARG);
    bool found = false;
    for (int i = 0; still_shape_at(i); i++)
        found = found || strcmp(still_shape_at(i), "llama3.1-8b") == 0;
    assert_true(found);
    assert_null(still_shape_at(-1));
}

/* ---- Stand-ins ----------------------------------------------------------- */

static void stand_ins_have_gates_and_maps(void **state)
{
    (void)state;
    still_error e;
    still_model *m = open_tiny("cpu");
    still_method still = method("still"), lolcats = method("lolcats"),
                 swa = method("swa"), plain = method("still");
    plain.gate = false;
    must(sti_model_stand_in(m, &still, &e), &e);
    const sti_adapter *first = m->adapter;
    assert_non_null(first);
    assert_int_equal(first->layer[1].gate.w.N, 256);
    assert_non_null(sti_model_attn_layer(m, 1).trained.map_q);
    must(sti_model_stand_in(m, &lolcats, &e), &e);
    assert_true(m->adapter != first);
    assert_int_equal(m->adapter->layer[1].gate.w.N, 0);
    assert_non_null(sti_model_attn_layer(m, 1).trained.map_k);
    must(sti_model_stand_in(m, &swa, &e), &e);
    assert_null(m->adapter); /* it learns nothing */
    must(sti_model_stand_in(m, &plain, &e), &e);
    assert_int_equal(m->adapter->layer[0].gate.w.N, 0);
    still.cap = 5; /* sizes are not the adapter's */
    must(sti_model_stand_in(m, &still, &e), &e);
    assert_true(m->adapter == first);
    must(sti_model_stand_in(m, NULL, &e), &e);
    assert_null(m->adapter);
    still_model_free(m);
}

/* ---- Figures ------------------------------------------------------------- */

static void check_result(const still_bench_result *r, const char *what)
{
    if (!(r->seconds > 0) || !(r->median > 0) || !(r->fastest > 0) ||
        r->fastest > r->median || r->median > r->slowest)
        fail_msg("%s: %g s, median %g in %g to %g", what, r->seconds, r->median,
                 r->fastest, r->slowest);
    assert_true(r->peak > 1 << 20);
    assert_true(r->peak < (size_t)1 << 30);
}

static void every_method(void **state)
{
    (void)state;
    still_error e;
    const char *name;
    still_model *m = open_tiny("cpu");
    for (int i = 0; (name = still_method_at(i, NULL)); i++) {
        still_method how = method(name);
        still_session_params with = {.size = sizeof with, .batch = 64, .method = &how};
        still_bench_params p = {
            .size = sizeof p, .session = &with, .length = 100, .batch = 2, .steps = 5};
        still_bench_result r;
        must(still_bench_prefill(m, &p, &r, &e), &e);
        check_result(&r, name);
        assert_int_equal(r.tokens, 200);
        must(still_bench_decode(m, &p, &r, &e), &e);
        check_result(&r, name);
        assert_int_equal(r.tokens, 2);
        /* Steps that begin a chunk are timed where there are any. */
        const bool leaves = strcmp(name, "still") == 0 ||
                            strcmp(name, "lolcats") == 0 || strcmp(name, "swa") == 0;
        assert_true((r.boundary > 0) == leaves);
        still_bill bill;
        with.ctx = 0;
        assert_true(r.state > 0);
        must(still_model_bill(m, &with, &bill, &e), &e);
        if (strcmp(name, "softmax") != 0) /* does not depend on the length */
            assert_true(r.state == 2 * bill.cache);
        assert_null(m->adapter);
    }
    still_model_free(m);
}

static void training(void **state)
{
    (void)state;
    still_error e;
    still_method how = method("still");
    still_model *m = open_tiny("cpu");
    const still_session_params with = {.size = sizeof with, .method = &how};
    still_bench_params p = {
        .size = sizeof p, .session = &with, .length = 48, .batch = 2, .stage = 1};
    still_bench_result r;
    for (p.stage = 1; p.stage <= 2; p.stage++) {
        must(still_bench_train(m, &p, &r, &e), &e);
        check_result(&r, "training");
        assert_int_equal(r.tokens, 96);
    }
    assert_int_equal(still_bench_train(m, &p, &r, &e), STILL_E_ARG); /* stage 3 */
    still_model_free(m);
}

static bool stop_at_once(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    ++*(int *)user;
    return false;
}

static void refusals(void **state)
{
    (void)state;
    still_error e;
    int asked = 0;
    still_method softmax = method("softmax");
    still_model *m = open_tiny("cpu");
    const still_session_params with = {.size = sizeof with, .method = &softmax};
    still_bench_params p = {
        .size = sizeof p, .session = &with, .length = 1 << 30, .batch = 65536};
    still_bench_result r = {.seconds = 1};
    assert_int_equal(still_bench_decode(m, &p, &r, &e), STILL_E_MEMORY);
    p.length = 0;
    assert_int_equal(still_bench_prefill(m, &p, &r, &e), STILL_E_ARG);
    assert_int_equal(still_bench_decode(m, &p, &r, &e), STILL_E_ARG);
    assert_int_equal(still_bench_train(m, &p, &r, &e), STILL_E_ARG);
    assert_int_equal(still_bench_prefill(m, NULL, &r, &e), STILL_E_ARG);
    assert_int_equal(still_bench_decode(m, NULL, &r, &e), STILL_E_ARG);
    assert_int_equal(still_bench_train(m, NULL, &r, &e), STILL_E_ARG);
    assert_true(r.seconds == 1);
    p = STILL_PARAMS(still_bench_params, .session = &with, .length = 100,
                     .progress = stop_at_once, .user = &asked);
    assert_int_equal(still_bench_prefill(m, &p, &r, &e), STILL_E_CANCELLED);
    assert_int_equal(still_bench_decode(m, &p, &r, &e), STILL_E_CANCELLED);
    assert_int_equal(asked, 2);
    p.progress = NULL;
    must(still_bench_decode(m, &p, &r, &e), &e); /* the model is as it was */
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(a_shape_is_a_model),
          cmocka_unit_test(shared_memory_is_smaller), cmocka_unit_test(unknown_shapes),
          cmocka_unit_test(stand_ins_have_gates_and_maps),
          cmocka_unit_test(every_method), cmocka_unit_test(training),
          cmocka_unit_test(refusals))
