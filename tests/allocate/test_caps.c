/* test_caps.c - caps within a number of bytes: never more, nearly all of them used, on
 * the heads of the largest gain; a budget too small says what is needed. */
#include <stdio.h>
#include <string.h>

#include "../eval/tiny.h"
#include "allocate/allocate.h"

static size_t bytes_of(const still_model *m, const still_method *how)
{
    still_bill bill;
    still_error err;
    must(still_model_bill(m,
                          &STILL_PARAMS(still_session_params, .method = how,
                                        .ctx = m->info.ctx_train),
                          &bill, &err),
         &err);
    return bill.cache;
}

static size_t with_cap(const still_model *m, still_method how, int cap)
{
    how.cap = cap;
    return bytes_of(m, &how);
}

static void test_budgets(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads, G = m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 16), got;
    how.select = 16;
    for (int i = 0; i < heads; i++) gain[i] = 0.01;
    gain[heads - 1] = 0.9; /* the one that looks things up */
    for (int cap = 100; cap <= 400; cap += 100) {
        const size_t budget = with_cap(m, how, cap);
        int chosen;
        still_error err;
        must(sti_choose_caps(m, &how, gain, budget, false, &got, &chosen, &err), &err);
        const size_t used = bytes_of(m, &got);
        assert_in_range(used, budget - budget / 8, budget);
        assert_in_range(chosen, 1, heads - 1);
        char rule[32];
        snprintf(rule, sizeof rule, "%d/%d:", (heads - 1) / G, (heads - 1) % G);
        assert_ptr_equal(strstr(got.caps, rule), got.caps); /* comes first */
        assert_true(got.cap >= cap / 4 && got.cap < cap);
    }
    free(gain);
    still_model_free(m);
}

/* A cap beyond the length of a text is worth nothing on it: of heads that look things up
 * alike, all keep enough for short texts before one keeps a long one whole. */
static void test_coverage(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 16), got;
    still_error err;
    int chosen;
    m->info.ctx_train = 16384;
    how.select = 16;
    for (int i = 0; i < heads; i++) gain[i] = i < 2 ? 0.3 : 0.2;
    must(sti_choose_caps(m, &how, gain, with_cap(m, how, 4096), false, &got, &chosen,
                         &err),
         &err);
    assert_int_equal(chosen, heads);
    free(gain);
    still_model_free(m);
}

/* Lists of heads that keep a whole text of the trained length are not full at its end. The
 * budget holds for a longer text, too, which fills them. */
static void test_longer_texts(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads, trained = m->info.ctx_train;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 128), got;
    still_error err;
    int chosen;
    how.select = 128;
    how.positions = STILL_POSITIONS_ABSOLUTE;
    for (int i = 0; i < heads; i++) gain[i] = i == 1 ? 0.9 : 0.001;
    const size_t budget = with_cap(m, how, trained / 2);
    must(sti_choose_caps(m, &how, gain, budget, false, &got, &chosen, &err), &err);
    char rule[32];
    snprintf(rule, sizeof rule, "0/1:%d", trained);
    assert_memory_equal(got.caps, rule, strlen(rule));
    const size_t at_trained = bytes_of(m, &got);
    m->info.ctx_train = 8 * trained;
    const size_t longer = bytes_of(m, &got);
    assert_true(longer > at_trained);
    assert_in_range(longer, budget - budget / 8, budget);
    free(gain);
    still_model_free(m);
}

/* No cap beyond what the cuda backend reads by chunks, however much room there is. */
static void test_longest(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 16), got;
    still_error err;
    int chosen;
    m->info.ctx_train = 131072;
    how.select = 16;
    for (int i = 0; i < heads; i++) gain[i] = i == 1 ? 0.9 : 0.001;
    const size_t room = with_cap(m, how, 16384);
    must(sti_choose_caps(m, &how, gain, room / 2, false, &got, &chosen, &err), &err);
    assert_memory_equal(got.caps, "0/1:16384", 9);
    must(sti_choose_caps(m, &how, gain, 2 * room, false, &got, &chosen, &err), &err);
    assert_int_equal(chosen, heads);
    assert_in_range(bytes_of(m, &got), room - room / 8, room);
    free(gain);
    still_model_free(m);
}

/* Few bytes: the chunk is halved, then the state goes; a trained one stays. */
static void test_shrinks(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 128), got, small = how;
    still_error err;
    int chosen;
    how.select = 128;
    small.chunk = 64;
    for (int i = 0; i < heads; i++) gain[i] = 0.5;
    const size_t half = 2 * with_cap(m, small, 4);
    must(sti_choose_caps(m, &how, gain, half, true, &got, &chosen, &err), &err);
    assert_int_equal(got.chunk, 64);
    assert_int_equal(got.select, 64);
    assert_false(got.forget);
    assert_in_range(bytes_of(m, &got), half - half / 8, half);
    must(sti_choose_caps(m, &how, gain, half, false, &got, &chosen, &err), &err);
    assert_int_equal(got.chunk, 128);
    small.chunk = small.select = 16;
    const size_t least = with_cap(m, small, 4);
    must(sti_choose_caps(m, &how, gain, least, true, &got, &chosen, &err), &err);
    assert_true(got.forget);
    free(gain);
    still_model_free(m);
}

/* More heads than settings have places for: refused before anything is laid out. */
static void test_many_heads(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    sti_attn_layer layer = sti_model_attn_layer(m, 0);
    still_method how = method_of("still", 16);
    sti_attn_config cfg = {.ctx = 64};
    still_error err;
    layer.heads = layer.kv_heads = STI_UNEVEN_HEADS_MAX + 1;
    must(sti_attn_configure(&how, &layer, 2, 2048, &cfg, &err), &err);
    snprintf(how.caps, sizeof how.caps, "0/0:30");
    assert_int_equal(sti_attn_configure(&how, &layer, 2, 2048, &cfg, &err),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "129 heads"));
    still_model_free(m);
}

/* Of several rules that name a head the first one holds, and it leaves others alone. */
static void test_rules(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int want[2][2] = {{2, 30}, {7, 7}};
    still_method how = method_of("still", 16);
    sti_attn_config cfg = {.ctx = 64};
    still_error err;
    how.cap = 11;
    for (int rules = 1; rules >= 0; rules--) {
        const sti_attn_layer first = sti_model_attn_layer(m, 0);
        snprintf(how.caps, sizeof how.caps, "%s", rules ? "0/1:30,0/0:2,1:7" : "1/0:7");
        must(sti_attn_configure(&how, &first, m->cfg.layers, 2048, &cfg, &err), &err);
        for (int l = 0; l < 2; l++)
            for (int g = 0; g < 2; g++) {
                const sti_attn_layer layer = sti_model_attn_layer(m, l);
                const sti_hybrid_settings s = sti_attn_hybrid_settings(&cfg, &layer);
                const int alone = l == 1 && g == 0 ? 7 : 11;
                assert_int_equal(sti_hybrid_cap(&s, g), rules ? want[l][g] : alone);
            }
    }
    still_model_free(m);
}

/* Without a cap for all, a layer's list has no end: rules are for whole layers then. */
static void test_heads_without_cap(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_method how = method_of("still", 16);
    still_bill bill;
    still_error err;
    const still_session_params with =
        STILL_PARAMS(still_session_params, .method = &how, .ctx = 256);
    how.cap = -1;
    snprintf(how.caps, sizeof how.caps, "1:30");
    must(still_model_bill(m, &with, &bill, &err), &err);
    snprintf(how.caps, sizeof how.caps, "1/1:30");
    assert_int_equal(still_model_bill(m, &with, &bill, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "have none"));
    still_model_free(m);
}

/* Only layers that the method converts get tokens, however large the gains of others. */
static void test_some_layers(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads, G = m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 16), got;
    still_error err;
    int chosen;
    how.select = 16;
    how.first_layer = 1;
    for (int i = 0; i < heads; i++) gain[i] = i < G ? 0.9 : 0.1;
    const size_t budget = with_cap(m, how, 300);
    must(sti_choose_caps(m, &how, gain, budget, false, &got, &chosen, &err), &err);
    assert_in_range(chosen, 1, G);
    assert_memory_equal(got.caps, "1/", 2);
    assert_null(strstr(got.caps, "0/"));
    free(gain);
    still_model_free(m);
}

/* Every head of Llama 3.1 8B's shape with a cap of its own, as long as caps can be. */
static void test_all_heads(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    sti_attn_layer layer = sti_model_attn_layer(m, 0);
    still_method how = method_of("still", 16);
    sti_attn_config cfg = {.ctx = 64};
    still_error err;
    size_t at = 0;
    layer.heads = 32;
    layer.kv_heads = 8;
    layer.kept = NULL; /* the tiny model's list is of two layers */
    for (int h = 0; h < 32 * 8; h++) {
        at += (size_t)snprintf(how.caps + at, sizeof how.caps - at, "%s%d/%d:%d",
                               h ? "," : "", h / 8, h % 8, 131072 - h);
        assert_true(at < sizeof how.caps);
    }
    must(sti_attn_configure(&how, &layer, 32, 131072, &cfg, &err), &err);
    assert_int_equal(cfg.n_caps, 256);
    layer.index = 31;
    const sti_hybrid_settings s = sti_attn_hybrid_settings(&cfg, &layer);
    assert_int_equal(sti_hybrid_cap(&s, 7), 131072 - 255);
    still_model_free(m);
}

static void test_too_small(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    const int heads = m->cfg.layers * m->cfg.kv_heads;
    double *gain = sti_alloc((size_t)heads, sizeof *gain);
    still_method how = method_of("still", 16), got;
    still_error err;
    int chosen;
    how.select = 16;
    for (int i = 0; i < heads; i++) gain[i] = 0.5;
    assert_int_equal(
        sti_choose_caps(m, &how, gain, with_cap(m, how, 3), false, &got, &chosen, &err),
        STILL_E_ARG);
    assert_non_null(strstr(err.text, "too small"));
    for (int cap = 1; cap < 12; cap++) /* the check alone says the same */
        assert_int_equal(sti_check_budget(m, &how, with_cap(m, how, cap), false, &err),
                         sti_choose_caps(m, &how, gain, with_cap(m, how, cap), false,
                                         &got, &chosen, &err));
    free(gain);
    still_model_free(m);
}

/* Random weights without a tokenizer cannot be probed; that is said. */
static void test_no_tokenizer(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_allocation *a;
    still_error err;
    assert_int_equal(still_allocate(m, NULL, &a, &err), STILL_E_UNSUPPORTED);
    assert_null(a);
    assert_non_null(strstr(err.text, "tokenizer"));
    still_model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets),           cmocka_unit_test(test_coverage),
        cmocka_unit_test(test_longest),           cmocka_unit_test(test_longer_texts),
        cmocka_unit_test(test_shrinks),           cmocka_unit_test(test_some_layers),
        cmocka_unit_test(test_heads_without_cap), cmocka_unit_test(test_rules),
        cmocka_unit_test(test_many_heads),        cmocka_unit_test(test_all_heads),
        cmocka_unit_test(test_too_small),         cmocka_unit_test(test_no_tokenizer)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
