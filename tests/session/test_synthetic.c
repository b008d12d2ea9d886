/* A synthetic past is as full as a real one: counts as feeding gives them, positions
 * possible, memory as the bill states it; and sessions go on from it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../run.h"

#include "session/session.h"

enum { CTX = 200, VOCAB = 384 };

static still_model *open_model(const char *backend)
{
    still_model *m;
    still_error e;
    must(still_model_open(
             FIXTURES "/models/llama3",
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = 2), &m,
             &e),
         &e);
    return m;
}

static still_session *session(still_model *m, const still_method *how,
                              const char *cache)
{
    still_session *s;
    still_error e;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = CTX, .batch = 64,
                                         .method = how, .cache = cache, .rollback = 1),
                           &s, &e),
         &e);
    return s;
}

/* Every method, and settings that change what a state holds. */
static int settings(still_method out[32])
{
    still_error e;
    const char *name;
    int n = 0;
    for (int i = 0; (name = still_method_at(i, NULL)); i++)
        must(still_method_init(&out[n++], name, 8, &e), &e);
    for (int i = 0; i < 7; i++)
        must(still_method_init(&out[n + i], "still", 8, &e), &e);
    out[n++].per_head = true;
    out[n].key_bits = 5;
    out[n++].value_bits = 3;
    out[n++].cap = -1;
    out[n++].select = 0;
    snprintf(out[n++].score, sizeof out->score, "received");
    out[n++].positions = STILL_POSITIONS_CAPPED;
    out[n].first_layer = 1;
    out[n++].last_layer = 1;
    return n;
}

static void check_sound(const still_session *s, const char *name)
{
    for (int l = 0; l < s->model->cfg.layers; l++) {
        const sti_attn_engine *engine = sti_attn_engine_of(&s->cfg, l);
        const sti_attn_layer layer = sti_model_attn_layer(s->model, l);
        if (engine->sound && !engine->sound(&s->cfg, &layer, &s->layer[l], s->length))
            fail_msg("%s: layer %d holds counts or positions that cannot be", name, l);
    }
}

/* The lists are as long, and as much is folded, as after feeding so many tokens. */
static void check_counts(const still_session *real, const still_session *other,
                         const char *name)
{
    for (int l = 0; l < real->model->cfg.layers; l++) {
        if (sti_attn_engine_of(&real->cfg, l) != &sti_attn_hybrid) continue;
        const sti_attn_layer layer = sti_model_attn_layer(real->model, l);
        const sti_hybrid_shape shape = sti_attn_hybrid_shape(&layer);
        const int S = sti_hybrid_selection_heads(&real->cfg.hybrid, &shape);
        const sti_hybrid_state *a = &real->layer[l].hybrid,
                               *b = &other->layer[l].hybrid;
        for (int i = 0; i < S; i++)
            if (a->sal_count[i] != b->sal_count[i] || a->folded[i] != b->folded[i])
                fail_msg(
                    "%s after %d tokens: %d salient and %lld folded, really %d and "
                    "%lld",
                    name, real->length, b->sal_count[i], (long long)b->folded[i],
                    a->sal_count[i], (long long)a->folded[i]);
    }
}

static void check_finite(const still_session *s, const char *name)
{
    const float *logits = still_session_logits(s);
    assert_non_null(logits);
    for (int i = 0; i < VOCAB; i++)
        if (!isfinite(logits[i])) fail_msg("%s: logit %d is %g", name, i, logits[i]);
}

static void goes_on(still_session *s, const char *name)
{
    still_error e;
    const int length = s->length;
    int32_t tok[20], top;
    for (int i = 0; i < 20; i++) tok[i] = (i * 37 + 5) % VOCAB;
    must(still_session_feed(s, tok, 20, &e), &e);
    check_finite(s, name);
    must(still_session_step_top(&s, tok, 1, &top, &e), &e);
    assert_in_range(top, 0, VOCAB - 1);
    assert_int_equal(still_session_length(s), length + 21);
}

static void one_setting(still_model *m, const still_method *how, const char *cache)
{
    static const int lengths[] = {1, 8, 17, 25, 119};
    still_error e;
    int32_t tok[CTX];
    for (int i = 0; i < CTX; i++) tok[i] = (i * 61 + 3) % VOCAB;
    still_session *real = session(m, how, cache), *s = session(m, how, cache),
                  *same = session(m, how, cache);
    still_bill bill;
    must(still_model_bill(m,
                          &STILL_PARAMS(still_session_params, .ctx = CTX, .batch = 64,
                                        .method = how, .cache = cache),
                          &bill, &e),
         &e);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        still_session_reset(real);
        must(still_session_feed(real, tok, lengths[i], &e), &e);
        must(sti_session_fill_synthetic(s, lengths[i], 7, &e), &e);
        assert_int_equal(still_session_length(s), lengths[i]);
        assert_null(still_session_logits(s));
        assert_true(s->state_bytes == bill.cache);
        check_sound(s, how->name);
        check_counts(real, s, how->name);
        must(sti_session_fill_like(same, s, &e), &e);
        assert_int_equal(still_session_length(same), lengths[i]);
        goes_on(s, how->name);
        goes_on(same, how->name);
        assert_memory_equal(s->logits, same->logits, VOCAB * sizeof(float));
    }
    still_session_free(real);
    still_session_free(s);
    still_session_free(same);
}

static void as_full_as_a_real_past(void **state)
{
    (void)state;
    still_method all[32];
    const int n = settings(all);
    still_model *cpu = open_model("cpu"), *ref = open_model("ref");
    for (int i = 0; i < n; i++) {
        one_setting(cpu, &all[i], "f16");
        one_setting(cpu, &all[i], "f32");
        if (i % 3 == 0) one_setting(ref, &all[i], NULL);
    }
    still_model_free(cpu);
    still_model_free(ref);
}

/* All of a cache is filled, also one that a single random block does not cover. */
static void a_long_cache_is_full(void **state)
{
    (void)state;
    enum { LONG = 40000 };
    still_error e;
    still_session *s;
    still_model *m = open_model("cpu");
    must(still_session_new(
             m, &STILL_PARAMS(still_session_params, .ctx = LONG, .cache = "f16"), &s,
             &e),
         &e);
    must(sti_session_fill_synthetic(s, LONG - 30, 1, &e), &e);
    const uint16_t *x = (const uint16_t *)(const void *)s->state;
    const size_t n = s->state_bytes / sizeof *x;
    size_t zeros = 0;
    for (size_t i = 0; i < n; i++) zeros += x[i] == 0;
    assert_true(n > 2u << 20);
    assert_true(zeros < n / 50); /* of about N(0, 1) one in 200 or so rounds to 0 */
    goes_on(s, "softmax");
    still_session_free(s);
    still_model_free(m);
}

static void limits(void **state)
{
    (void)state;
    still_error e;
    still_model *m = open_model("cpu");
    still_session *s = session(m, NULL, NULL);
    assert_int_equal(sti_session_fill_synthetic(s, CTX + 1, 0, &e), STILL_E_ARG);
    assert_int_equal(sti_session_fill_synthetic(s, -1, 0, &e), STILL_E_ARG);
    must(sti_session_fill_synthetic(s, CTX, 0, &e), &e);
    assert_int_equal(still_session_length(s), CTX);
    assert_int_equal(still_session_feed(s, &(int32_t){1}, 1, &e), STILL_E_LIMIT);
    must(sti_session_fill_synthetic(s, 0, 0, &e), &e);
    assert_int_equal(still_session_length(s), 0);
    still_session_free(s);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(as_full_as_a_real_past),
          cmocka_unit_test(a_long_cache_is_full), cmocka_unit_test(limits))
