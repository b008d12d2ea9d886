/* Running a model on items: tokens by the rules, ranking with shared beginnings against
 * the plain way, choosing, figures, logs that are gone on with, and limits. The model
 * is small and random, but has a tokenizer. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/pool.h"
#include "eval/eval.h"
#include "session/feed_batch.h"

static const char DATA[] = FIXTURES "/eval/choice";
static char dir[] = "/tmp/still-rank-XXXXXX", model_path[64], log_path[64];
static still_model *model;

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

/* ---- Tokens -------------------------------------------------------------- */

static sti_ids encode(const still_tokenizer *tk, const char *context,
                      const char *continuation, int limit)
{
    still_error e;
    sti_ids ids;
    const sti_option o = {context, continuation, 0};
    must(sti_encode_options(tk, &o, 1, limit, &ids, &e), &e);
    return ids;
}

static int count(const still_tokenizer *tk, const char *text, unsigned flags)
{
    size_t n;
    still_error e;
    must(still_tokenizer_encode(tk, text, strlen(text), flags, NULL, 0, &n, &e), &e);
    return (int)n;
}

static void same_ids(const sti_ids *a, const sti_ids *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->id, b->id, (size_t)a->n * sizeof *a->id);
}

/* Rules 2 and 3: one text, and a border that lies where the context alone ends. */
static void borders(void **state)
{
    (void)state;
    still_error e;
    still_tokenizer *tk;
    must(still_tokenizer_open(FIXTURES "/vocab/smollm.json", &tk, &e), &e);
    sti_ids a = encode(tk, "The answer:", " the cat", 100),
            b = encode(tk, "The answer: ", "the cat", 100),
            c = encode(tk, "The answer:  \n", " the", 100);
    same_ids(&a, &b); /* white space moves over, the text is the same */
    assert_int_equal(a.n_context, count(tk, "The answer:", 0));
    assert_int_equal(b.n_context, a.n_context);
    assert_int_equal(c.n_context, a.n_context);
    assert_int_equal(c.n, count(tk, "The answer:  \n the", 0));
    /* A merge across the border: "th" + "e" is one token of the whole text, so that
     * fewer tokens are the continuation's than it has alone. */
    sti_ids d = encode(tk, "in th", "e end", 100);
    assert_int_equal(d.n, count(tk, "in the end", 0));
    assert_int_equal(d.n_context, count(tk, "in th", 0));
    assert_true(count(tk, "in th", 0) + count(tk, "e end", 0) > d.n);
    free(a.id), free(b.id), free(c.id), free(d.id);
    still_tokenizer_free(tk);
}

/* Rules 4 and 6: BOS where the tokenizer adds it; nothing before a text is BOS or EOS.
 */
static void beginnings(void **state)
{
    (void)state;
    still_error e;
    still_tokenizer *tk;
    must(still_tokenizer_open(FIXTURES "/vocab/spm.model", &tk, &e), &e);
    assert_true(still_tokenizer_adds_bos(tk));
    sti_ids a = encode(tk, "Hello", " there", 100), b = encode(tk, "", " there", 100),
            c = encode(tk, " \n", "there", 100);
    assert_int_equal(a.id[0], still_tokenizer_bos(tk));
    assert_int_equal(a.n_context, count(tk, "Hello", STILL_ENCODE_BOS));
    assert_int_equal(b.id[0], still_tokenizer_bos(tk));
    assert_int_equal(b.n, 1 + count(tk, " there", 0));
    assert_int_equal(b.n_context, 1);
    assert_int_equal(c.n_context, 1);
    assert_int_equal(c.n, 1 + count(tk, " \nthere", 0));
    free(a.id), free(b.id), free(c.id);
    still_tokenizer_free(tk);
    must(still_tokenizer_open(FIXTURES "/vocab/smollm.json", &tk, &e), &e);
    assert_false(still_tokenizer_adds_bos(tk));
    a = encode(tk, "Hello", " there", 100);
    assert_int_equal(a.n, count(tk, "Hello there", 0));
    free(a.id);
    still_tokenizer_free(tk);
}

/* Rule 5: the last limit + 1 tokens, of which the last is target only. */
static void too_long(void **state)
{
    (void)state;
    const still_tokenizer *tk = still_model_tokenizer(model);
    const char *context = "a b c d e f g h i j k l m n o p";
    sti_ids whole = encode(tk, context, " q r", 1000),
            cut = encode(tk, context, " q r", 8);
    const int over = whole.n - 9;
    assert_true(over > 0 && !whole.cut && cut.cut);
    assert_int_equal(cut.n, 9);
    assert_memory_equal(cut.id, whole.id + over, 9 * sizeof *cut.id);
    assert_int_equal(cut.n_context, whole.n_context - over);
    free(cut.id);
    cut = encode(tk, context, " q r s t u v w x y z", 4); /* no room for the context */
    assert_int_equal(cut.n, 5);
    assert_int_equal(cut.n_context, 1);
    free(cut.id);
    free(whole.id);
}

/* ---- Choosing ------------------------------------------------------------ */

static void picking(void **state)
{
    (void)state;
    const double sum[] = {-4, -3, -3, -9};
    const int length[] = {8, 2, 2, 27};
    assert_int_equal(sti_record_pick(sum, NULL, 4), 1);   /* a tie: the lowest index */
    assert_int_equal(sti_record_pick(sum, length, 4), 3); /* -0.5 -1.5 -1.5 -0.33 */
    assert_int_equal(sti_record_pick((double[]){-1, -2}, (int[]){2, 4}, 2), 0);
    assert_int_equal(sti_record_pick((double[]){-5, -1}, (int[]){0, 1}, 2), 1);
}

static void figures(void **state)
{
    (void)state;
    sti_tally t = {0};
    still_eval_result r;
    static const char *const lines[] = {"{\"correct\":true,\"correct_norm\":false}",
                                        "{\"correct\":true,\"correct_norm\":true}",
                                        "{\"correct\":false,\"correct_norm\":false,"
                                        "\"cut\":true}",
                                        "{\"correct\":true,\"correct_norm\":false}"};
    for (int i = 0; i < 4; i++) {
        json_t *o = json_loads(lines[i], 0, NULL);
        sti_tally_add(&t, o);
        json_decref(o);
    }
    sti_tally_result(&t, &r);
    assert_int_equal(r.n, 4);
    assert_int_equal(r.cut, 1);
    assert_float_equal(r.acc, 0.75, 1e-12);
    assert_float_equal(r.acc_stderr, 0.25, 1e-12); /* sd 0.5, n 4 */
    assert_float_equal(r.acc_norm, 0.25, 1e-12);
    assert_true(isnan(r.perplexity));
    t = (sti_tally){0};
    for (int i = 0; i < 2; i++) {
        json_t *o = json_pack("{s:f,s:f}", "score", 0.25 + 0.5 * i, "nll", 1.0 + 2 * i);
        sti_tally_add(&t, o);
        json_decref(o);
    }
    sti_tally_result(&t, &r);
    assert_float_equal(r.acc, 0.5, 1e-12);
    assert_float_equal(r.acc_stderr, 0.25, 1e-12);
    assert_float_equal(r.perplexity, exp(2), 1e-9);
    assert_true(isnan(r.acc_norm));
}

/* ---- Ranking ------------------------------------------------------------- */

/* Sums of an item's options, each from an empty session: the plain way. */
static void plain_sums(const sti_item *it, const still_method *method, double *sum)
{
    still_error e;
    const still_session_params p = {.ctx = 2048, .method = method};
    still_session *s;
    must(still_session_new(model, &p, &s, &e), &e);
    for (int i = 0; i < it->n_options; i++) {
        sti_ids o;
        must(sti_encode_options(still_model_tokenizer(model), &it->option[i], 1, 2048,
                                &o, &e),
             &e);
        float *logprob = calloc((size_t)o.n, sizeof *logprob);
        still_session_reset(s);
        must(still_session_score(s, o.id, o.n, logprob, NULL, &e), &e);
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
    const still_session_params sp = {.ctx = 2048, .method = &method};
    sti_runner r;
    must(sti_runner_open(model, &sp, &r, &e), &e);
    const sti_eval_task *t = sti_task_find(task);
    const sti_task_params tp = {.data_dir = DATA, .shots = -1};
    sti_source *s;
    sti_item it[ITEMS];
    sti_answer fork[ITEMS], alone[ITEMS];
    must(t->open(&tp, &s, &e), &e);
    for (int i = 0; i < ITEMS; i++) must(t->next(s, &it[i], &e), &e);
    must(sti_rank(&r, it, ITEMS, fork, &e), &e);
    const uint64_t fed = r.fed;
    assert_true(fed < r.counted || strcmp(task, "lambada") == 0);
    r.recompute = true;
    r.counted = r.fed = 0;
    must(sti_rank(&r, it, ITEMS, alone, &e), &e);
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
    const still_session_params sp = {.ctx = 512};
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
        must(sti_rank(&r, it, 4, a, &e), &e);
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

/* ---- Whole runs ---------------------------------------------------------- */

typedef struct watch {
    int seen, resumed, stop_after;
} watch;

static bool on_item(void *user, const still_eval_item *item)
{
    watch *w = user;
    json_t *o = json_loads(item->record, 0, NULL);
    assert_non_null(json_object_get(o, "id"));
    json_decref(o);
    w->seen++;
    w->resumed += item->resumed;
    return w->stop_after == 0 || w->seen < w->stop_after;
}

static const char *const two_tasks[] = {"piqa", "arc_easy"};

static still_status run(watch *w, const still_session_params *sp, still_eval_result *r,
                        int *n, still_error *e)
{
    const still_eval_params p = {.task = two_tasks,
                                 .n_tasks = 2,
                                 .data = DATA,
                                 .session = sp,
                                 .log = log_path,
                                 .each = on_item,
                                 .user = w};
    return still_eval_run(model, &p, r, 8, n, e);
}

static char *read_log(void)
{
    static char text[1 << 16];
    FILE *f = fopen(log_path, "rb");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    return text;
}

static void write_log(const char *text, size_t n)
{
    FILE *f = fopen(log_path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
}

/* Stopped after each item in turn, gone on with: the same figures and the same log. */
static void resuming(void **state)
{
    (void)state;
    still_error e;
    still_eval_result whole[8], parts[8];
    int n;
    unlink(log_path);
    watch w = {0};
    must(run(&w, NULL, whole, &n, &e), &e);
    assert_int_equal(n, 2);
    assert_int_equal(w.seen, 8);
    assert_int_equal(w.resumed, 0);
    char *expected = strdup(read_log());
    const size_t size = strlen(expected);
    for (int stop = 1; stop < 8; stop++) {
        unlink(log_path);
        w = (watch){.stop_after = stop};
        assert_int_equal(run(&w, NULL, parts, &n, &e), STILL_E_CANCELLED);
        w = (watch){0};
        must(run(&w, NULL, parts, &n, &e), &e);
        assert_int_equal(w.resumed, stop);
        assert_string_equal(read_log(), expected);
        assert_true(parts[1].acc == whole[1].acc &&
                    parts[0].acc_norm == whole[0].acc_norm);
    }
    /* Cut at every 97th byte, as a crash would: the torn line goes. */
    for (size_t at = 1; at < size; at += 97) {
        write_log(expected, at);
        w = (watch){0};
        if (run(&w, NULL, parts, &n, &e) != STILL_OK) {
            /* Within the first header there is nothing that tells it from others. */
            assert_true(at < 14 && strstr(e.text, "not a log"));
            continue;
        }
        assert_int_equal(w.seen, 8);
        assert_string_equal(read_log(), expected);
    }
    /* Other settings are another run, in the same file. */
    write_log(expected, size);
    w = (watch){0};
    must(run(&w, &(still_session_params){.ctx = 64}, parts, &n, &e), &e);
    assert_int_equal(w.resumed, 0);
    w = (watch){0};
    must(run(&w, NULL, parts, &n, &e), &e);
    assert_int_equal(w.resumed, 8);
    /* Somebody else's file is left alone. */
    write_log("dear diary\n", 11);
    assert_int_equal(run(&w, NULL, parts, &n, &e), STILL_E_FORMAT);
    assert_string_equal(read_log(), "dear diary\n");
    free(expected);
}

static bool never(void *user)
{
    (void)user;
    return false;
}

static void requests(void **state)
{
    (void)state;
    still_error e;
    still_eval_result r[8];
    int n;
    const char *const unknown[] = {"piqa", "nonsense"};
    still_eval_params p = {.task = unknown, .n_tasks = 2, .data = DATA};
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "nonsense"));
    p.n_tasks = 0;
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_ARG);
    p = (still_eval_params){.task = two_tasks, .n_tasks = 2, .data = "/nowhere"};
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_IO);
    assert_non_null(strstr(e.text, "piqa_valid.jsonl"));
    p.data = DATA;
    assert_int_equal(still_eval_run(model, &p, r, 1, &n, &e), STILL_E_ARG);
    assert_int_equal(n, 1);
    p.poll = never;
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_CANCELLED);
    p.poll = NULL;
    p.limit = 3; /* and contexts that do not fit are counted */
    const still_session_params tight = {.ctx = 16};
    p.session = &tight;
    must(still_eval_run(model, &p, r, 8, &n, &e), &e);
    assert_int_equal(r[0].n, 3);
    assert_true(r[1].cut > 0);
    const char *const lambada[] = {"lambada"};
    p = (still_eval_params){.task = lambada, .n_tasks = 1, .data = DATA};
    must(still_eval_run(model, &p, r, 8, &n, &e), &e);
    assert_true(r[0].perplexity > 1 && isnan(r[0].acc_norm));
    const char *name, *summary, *files;
    const int *lengths = (const int[]){1};
    assert_non_null(name = still_eval_task_at(0, &summary, &files, &lengths));
    assert_null(lengths);
    assert_string_equal(name, "piqa");
    assert_string_equal(files, "piqa_valid.jsonl");
    assert_null(still_eval_task_at(10000, NULL, NULL, NULL));
    assert_null(still_eval_task_at(-1, NULL, NULL, NULL));
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
    must(sti_write(&r, it, 3, together, &e), &e);
    for (int i = 0; i < 3; i++) {
        must(sti_write(&r, &it[i], 1, &alone[i], &e), &e);
        assert_string_equal(together[i].output, alone[i].output);
        free(together[i].output);
        free(alone[i].output);
    }
    sti_runner_close(&r);
    /* No room to write in. */
    must(sti_runner_open(model, &(still_session_params){.ctx = 5}, &r, &e), &e);
    assert_int_equal(sti_write(&r, it, 1, together, &e), STILL_E_LIMIT);
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
    must(sti_runner_open(model, &(still_session_params){.ctx = 8192}, &r, &e), &e);
    must(t->open(&tp, &s, &e), &e);
    for (int i = 0; i < ITEMS; i++) must(t->next(s, &one[i], &e), &e);
    for (int i = 0; i < MANY; i++) it[i] = one[i * ITEMS / MANY];
    must(sti_rank(&r, it, MANY, out, &e), &e);
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
    must(sti_write(&r, it, MANY, out, &e), &e);
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

/* Of the errors of several threads, that of the first item. */
static still_status fail_some(void *arg, int i, still_error *err)
{
    atomic_int *calls = arg;
    atomic_fetch_add(calls, 1);
    return i % 10 == 7 ? sti_fail(err, STILL_E_LIMIT, "item %d", i) : STILL_OK;
}

static void threads(void **state)
{
    (void)state;
    still_error e;
    sti_runner r = {0};
    for (int workers = 0; workers < 4; workers++) {
        atomic_int calls = 0;
        if (workers) must(sti_pool_new(workers, &r.pool, &e), &e);
        assert_int_equal(sti_runner_each(&r, 7, fail_some, &calls, &e), STILL_OK);
        assert_int_equal(sti_runner_each(&r, 100, fail_some, &calls, &e),
                         STILL_E_LIMIT);
        assert_string_equal(e.text, "item 7");
        assert_int_equal(calls, 107);
        sti_pool_free(r.pool);
        r.pool = NULL;
    }
}

static int open_model(void **state)
{
    (void)state;
    char command[512];
    still_error e;
    if (!mkdtemp(dir)) return -1;
    snprintf(model_path, sizeof model_path, "%s/tiny.gguf", dir);
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", dir);
    snprintf(command, sizeof command,
             "%s/make-model tiny %s --type f32 >/dev/null 2>&1", STILL_TOOLS,
             model_path);
    if (system(command) != 0) return -1;
    return still_model_open(model_path, &(still_model_params){.threads = 2}, &model,
                            &e);
}

static int close_model(void **state)
{
    (void)state;
    still_model_free(model);
    unlink(model_path);
    unlink(log_path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(borders),      cmocka_unit_test(beginnings),
        cmocka_unit_test(too_long),     cmocka_unit_test(picking),
        cmocka_unit_test(figures),      cmocka_unit_test(ranking),
        cmocka_unit_test(few_sessions), cmocka_unit_test(resuming),
        cmocka_unit_test(requests),     cmocka_unit_test(writing),
        cmocka_unit_test(beside_a_gpu), cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
