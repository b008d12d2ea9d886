/* Ranking options with shared beginnings against the plain way; fewer sessions than
 * options; many at once, as beside a GPU; written answers alone and together. */
#include "../run.h"
#include "eval_model.h"

#include "session/feed_batch.h"

/* ---- Ranking ------------------------------------------------------------- */

/* Sums of an item's options, each from an empty session: the plain way. */
static void plain_sums(const sti_item *it, const still_method *method, double *sum)
{
    still_error e;
    const still_session_params p = {.size = sizeof p, .ctx = 2048, .method = method};
    still_session *s;
    must(still_session_new(model, &p, &s, &e), &e);
    for (int i = 0; i < it->n_options; i++) {
        sti_ids o;
        must(sti_encode_options(still_model_tokenizer(model), &it->option[i], 1, 2048,
                                &o, &e),
             &e);
        float *logprob = calloc((size_t)o.n, sizeof *logprob);
        still_session_reset(s);
        must(still_session_logprobs(s, o.id, o.n, logprob, NULL, &e), &e);
        sum[i] = 0;
        for (int k = o.n_context; k < o.n; k++) sum[i] += (double)logprob[k - 1];
        free(logprob);
        free(o.id);
    }
    still_session_free(s);
}

/* Sanitizers, which are slow, see in one question what they see in three. */
#ifdef __SANITIZE_ADDRESS__
enum { ITEMS = 1 };
#else
enum { ITEMS = 3 };
#endif

static void ranked_like_plain(const char *task, const char *method_name)
{
    still_error e;
    still_method method;
    must(still_method_init(&method, method_name, 16, &e), &e);
    const still_session_params sp = {.size = sizeof sp, .ctx = 2048, .method = &method};
    sti_runner r;
    must(sti_runner_open(model, &sp, &r, &e), &e);
    const sti_eval_task *t = sti_task_find(task);
    const sti_task_params tp = {.data_dir = DATA, .shots = -1};
    sti_source *s;
    sti_item it[ITEMS];
    sti_answer fork[ITEMS], alone[ITEMS];
    must(t->open(&tp, &s, &e), &e);
    for (int i = 0; i < ITEMS; i++) must(t->next(s, &it[i], &e), &e);
    must(sti_run_loglik(&r, it, ITEMS, fork, &e), &e);
    const uint64_t fed = r.fed;
    assert_true(fed < r.counted || strcmp(task, "lambada") == 0);
    r.recompute = true;
    r.counted = r.fed = 0;
    must(sti_run_loglik(&r, it, ITEMS, alone, &e), &e);
    assert_int_equal(r.fed, r.counted);
    for (int i = 0; i < ITEMS; i++) {
        double sum[STI_MOST_OPTIONS];
        plain_sums(&it[i], &method, sum);
        for (int k = 0; k < it[i].n_options; k++) {
            if (fork[i].sum[k] != alone[i].sum[k] || fork[i].sum[k] != sum[k])
                fail_msg("%s %s, item %d, option %d: %.9g %.9g %.9g", task, method_name,
                         i, k, fork[i].sum[k], alone[i].sum[k], sum[k]);
        }
        assert_true(fork[i].greedy == alone[i].greedy);
        sti_item_free(&it[i]);
    }
    t->close(s);
    sti_runner_close(&r);
}

static void ranking(void **state)
{
    (void)state;
    static const char *const tasks[] = {"piqa",       "arc_easy", "hellaswag",
                                        "winogrande", "mmlu",     "lambada"};
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++) {
        ranked_like_plain(tasks[i], "softmax");
        ranked_like_plain(tasks[i], "still");
    }
    ranked_like_plain("arc_easy", "liger");
    ranked_like_plain("hellaswag", "supra");
}

/* Fewer sessions than options: waves. */
static void few_sessions(void **state)
{
    (void)state;
    still_error e;
    const still_session_params sp = {.size = sizeof sp, .ctx = 512};
    const sti_eval_task *t = sti_task_find("arc_challenge");
    const sti_task_params tp = {.data_dir = DATA, .shots = -1};
    double sum[2][4][STI_MOST_OPTIONS];
    for (int pass = 0; pass < 2; pass++) {
        sti_runner r;
        sti_source *s;
        sti_item it[4];
        sti_answer a[4];
        must(sti_runner_open(model, &sp, &r, &e), &e);
        if (pass == 1) r.most = 3;
        must(t->open(&tp, &s, &e), &e);
        for (int i = 0; i < 4; i++) must(t->next(s, &it[i], &e), &e);
        must(sti_run_loglik(&r, it, 4, a, &e), &e);
        for (int i = 0; i < 4; i++) {
            for (int k = 0; k < it[i].n_options; k++) sum[pass][i][k] = a[i].sum[k];
            for (int k = 0; pass == 1 && k < it[i].n_options; k++)
                assert_true(sum[0][i][k] == sum[1][i][k]);
            sti_item_free(&it[i]);
        }
        t->close(s);
        sti_runner_close(&r);
    }
}

/* ---- Written answers ----------------------------------------------------- */

static void writing(void **state)
{
    (void)state;
    still_error e;
    char prompt[3][64] = {"Hello there", "one two three four five", "x"};
    sti_item it[3];
    for (int i = 0; i < 3; i++)
        it[i] = (sti_item){.kind = STI_ITEM_GENERATE,
                           .prompt = prompt[i],
                           .max_new = 5 + i,
                           .memory = prompt[i]};
    sti_answer together[3], alone[3];
    sti_runner r;
    must(sti_runner_open(model, NULL, &r, &e), &e);
    must(sti_run_generate(&r, it, 3, together, &e), &e);
    for (int i = 0; i < 3; i++) {
        must(sti_run_generate(&r, &it[i], 1, &alone[i], &e), &e);
        assert_string_equal(together[i].output, alone[i].output);
        free(together[i].output);
        free(alone[i].output);
    }
    sti_runner_close(&r);
    /* No room to write in. */
    must(sti_runner_open(model, &STILL_PARAMS(still_session_params, .ctx = 5), &r, &e),
         &e);
    assert_int_equal(sti_run_generate(&r, it, 1, together, &e), STILL_E_LIMIT);
    sti_runner_close(&r);
}

/* ---- Beside a GPU -------------------------------------------------------- */

/* The cpu backend, said to have memory of its own: wide passes, many sessions, threads,
 * and sessions that stay in a step when they are over. */

enum { MANY = 24 };

/* Questions of several stems (mmlu) or without one, again and again. */
static void rank_many(const char *task, sti_answer *out)
{
    still_error e;
    sti_runner r;
    sti_source *s;
    sti_item one[ITEMS], it[MANY];
    const sti_eval_task *t = sti_task_find(task);
    const sti_task_params tp = {.data_dir = DATA, .shots = -1};
    must(sti_runner_open(model, &STILL_PARAMS(still_session_params, .ctx = 8192), &r,
                         &e),
         &e);
    must(t->open(&tp, &s, &e), &e);
    for (int i = 0; i < ITEMS; i++) must(t->next(s, &one[i], &e), &e);
    for (int i = 0; i < MANY; i++) it[i] = one[i * ITEMS / MANY];
    must(sti_run_loglik(&r, it, MANY, out, &e), &e);
    assert_true(r.fed < r.counted / (strcmp(task, "mmlu") == 0 ? 10 : 1));
    for (int i = 0; i < ITEMS; i++) sti_item_free(&one[i]);
    t->close(s);
    sti_runner_close(&r);
}

static void write_many(sti_answer *out, uint64_t *fed)
{
    still_error e;
    sti_runner r;
    char prompt[MANY][200];
    sti_item it[MANY];
    for (int i = 0; i < MANY; i++) {
        memset(prompt[i], 'a' + i % 26, sizeof prompt[i]);
        prompt[i][1 + i * 37 % 190] = 0;
        it[i] = (sti_item){
            .kind = STI_ITEM_GENERATE, .prompt = prompt[i], .max_new = i * 7 % 31};
    }
    must(sti_runner_open(model, NULL, &r, &e), &e);
    must(sti_run_generate(&r, it, MANY, out, &e), &e);
    *fed = r.fed;
    sti_runner_close(&r);
}

static void beside_a_gpu(void **state)
{
    (void)state;
    static const char *const tasks[] = {"mmlu", "winogrande"};
    const sti_backend *near = model->be;
    sti_backend far = *near;
    far.host_memory = false;
    sti_answer a[MANY], b[MANY];
    uint64_t fed[2];
    for (size_t i = 0; i < sizeof tasks / sizeof *tasks; i++) {
        rank_many(tasks[i], a);
        model->be = &far;
        rank_many(tasks[i], b);
        model->be = near;
        for (int k = 0; k < MANY; k++)
            assert_memory_equal(a[k].sum, b[k].sum, sizeof a[k].sum);
    }
    write_many(a, &fed[0]);
    model->be = &far;
    write_many(b, &fed[1]);
    model->be = near;
    assert_int_equal(fed[0], fed[1]);
    for (int k = 0; k < MANY; k++) {
        assert_string_equal(a[k].output, b[k].output);
        free(a[k].output), free(b[k].output);
    }
}

RUN_TESTS_IN(open_model, close_model, cmocka_unit_test(ranking),
             cmocka_unit_test(few_sessions), cmocka_unit_test(writing),
             cmocka_unit_test(beside_a_gpu))
