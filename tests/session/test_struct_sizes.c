/* test_struct_sizes.c - params of another size than this library's: those of a program that
 * was built for an earlier one are shorter, for a later one longer. */
#include <stdio.h>
#include <string.h>

#include "../eval/tiny.h"
#include "../run.h"

/* still_session_params of an imagined earlier library, and of a later one. */
typedef struct earlier_params {
    size_t size;
    int ctx, batch;
} earlier_params;

typedef struct later_params {
    still_session_params known;
    int more, even_more;
    const char *name;
} later_params;

static void test_shorter(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_session *s, *same;
    still_error e;
    /* Behind it lies what would be a method, if it were read. */
    struct {
        earlier_params params;
        const char *behind[4];
    } given = {{.size = sizeof(earlier_params), .ctx = 77, .batch = 16},
               {"f99", "none", "of", "its own"}};
    const still_session_params *p = (const void *)&given.params;
    must(still_session_new(m, p, &s, &e), &e);
    assert_int_equal(still_session_limit(s), 77);
    must(still_session_new(
             m, &STILL_PARAMS(still_session_params, .ctx = 77, .batch = 16), &same, &e),
         &e);
    static const int32_t tok[] = {5, 6, 7, 8, 9};
    must(still_session_feed(s, tok, 5, &e), &e);
    must(still_session_feed(same, tok, 5, &e), &e);
    assert_memory_equal(still_session_logits(s), still_session_logits(same),
                        sizeof(float) * (size_t)m->info.vocab);
    still_session_free(same);
    still_session_free(s);
    still_model_free(m);
}

static void test_longer(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_session *s;
    still_error e;
    later_params given = {.known = {.size = sizeof given, .ctx = 33}};
    must(still_session_new(m, &given.known, &s, &e), &e);
    assert_int_equal(still_session_limit(s), 33);
    still_session_free(s);
    given.even_more = 1;
    assert_int_equal(still_session_new(m, &given.known, &s, &e), STILL_E_UNSUPPORTED);
    assert_null(s);
    assert_non_null(strstr(e.text, "still_session_params: sets something"));
    still_model_free(m);
}

/* The size that was forgotten is named, with the struct, by every function. */
static void refuses(still_status st, const still_error *e, const char *name)
{
    char want[64];
    snprintf(want, sizeof want, "%s: its size is 0 bytes", name);
    if (st != STILL_E_ARG || !strstr(e->text, want))
        fail_msg("%s of size 0: status %d, %s", name, st, e->text);
}

static void test_forgotten(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu"), *opened;
    still_error e = {0};
    still_session *session;
    still_bill bill;
    refuses(still_model_open("x", &(still_model_params){0}, &opened, &e), &e,
            "still_model_params");
    refuses(still_model_open_shape("tiny", &(still_model_params){0}, &opened, &e), &e,
            "still_model_params");
    refuses(still_session_new(m, &(still_session_params){.ctx = 9}, &session, &e), &e,
            "still_session_params");
    refuses(still_model_bill(m, &(still_session_params){0}, &bill, &e), &e,
            "still_session_params");
    still_sampler *sampler;
    refuses(still_sampler_new(&(still_sampler_params){0}, 9, &sampler, &e), &e,
            "still_sampler_params");
    still_train_plan plan;
    refuses(still_linearize(m, &(still_train_params){0}, &e), &e, "still_train_params");
    refuses(still_linearize_plan(m, &(still_train_params){0}, &plan, &e), &e,
            "still_train_params");
    still_allocation *allocation;
    refuses(still_allocate(m, &(still_allocate_params){0}, &allocation, &e), &e,
            "still_allocate_params");
    refuses(still_export("x", &(still_export_params){0}, &e), &e,
            "still_export_params");
    int n;
    still_eval_result result;
    refuses(still_eval_run(m, &(still_eval_params){0}, &result, 1, &n, &e), &e,
            "still_eval_params");
    refuses(still_eval_write_datasets(m, &(still_eval_params){0}, "x", &e), &e,
            "still_eval_params");
    still_bench_result bench;
    refuses(still_bench_prefill(m, &(still_bench_params){0}, &bench, &e), &e,
            "still_bench_params");
    refuses(still_bench_decode(m, &(still_bench_params){0}, &bench, &e), &e,
            "still_bench_params");
    refuses(still_bench_train(m, &(still_bench_params){0}, &bench, &e), &e,
            "still_bench_params");
    still_saliency *saliency;
    static const int32_t tok[] = {1, 2, 3};
    refuses(still_saliency_run(m, tok, 3, &(still_saliency_params){0}, &saliency, &e),
            &e, "still_saliency_params");
    refuses(still_selftest_run("models", "x", &(still_selftest_params){0}, NULL, NULL,
                               &n, &e),
            &e, "still_selftest_params");
    still_rendering text;
    refuses(still_chat_render(NULL, "x", &(still_conversation){0}, &text, &e), &e,
            "still_conversation");
    still_attention *attention;
    refuses(still_attention_new(&(still_attention_params){0}, &attention, &e), &e,
            "still_attention_params");
    still_model_free(m);
}

/* A struct within a struct has a size of its own. */
static void test_forgotten_within(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_error e = {0};
    const still_session_params none = {.ctx = 64};
    const char *const task[] = {"fwe"};
    still_bench_result bench;
    still_eval_result result;
    int n;
    refuses(still_bench_decode(
                m, &STILL_PARAMS(still_bench_params, .session = &none, .length = 8),
                &bench, &e),
            &e, "still_session_params");
    refuses(still_eval_run(m,
                           &STILL_PARAMS(still_eval_params, .task = task, .n_tasks = 1,
                                         .data = "x", .session = &none),
                           &result, 1, &n, &e),
            &e, "still_session_params");
    refuses(
        still_selftest_run("models", "x",
                           &STILL_PARAMS(still_selftest_params,
                                         .model = &(still_model_params){.threads = 1}),
                           NULL, NULL, &n, &e),
        &e, "still_model_params");
    still_model_free(m);
}

/* A method from a later library, with a setting that this one cannot follow. */
static void test_method(void **state)
{
    (void)state;
    still_model *m = open_tiny("cpu");
    still_session *s;
    still_error e;
    still_method how = method_of("still", 16);
    how.reserved[3] = 1;
    assert_int_equal(
        still_session_new(
            m, &STILL_PARAMS(still_session_params, .ctx = 64, .method = &how), &s, &e),
        STILL_E_UNSUPPORTED);
    assert_non_null(strstr(e.text, "a setting that still"));
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(test_shorter), cmocka_unit_test(test_longer),
          cmocka_unit_test(test_forgotten), cmocka_unit_test(test_forgotten_within),
          cmocka_unit_test(test_method))
