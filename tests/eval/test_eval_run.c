/* Whole runs: logs that are gone on with, what may be asked for, threads of a runner. */
#include "../run.h"
#include "eval_model.h"

#include <math.h>
#include <stdatomic.h>

#include "base/pool.h"

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
    const still_eval_params p = {.size = sizeof p,
                                 .task = two_tasks,
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
    must(run(&w, &STILL_PARAMS(still_session_params, .ctx = 64), parts, &n, &e), &e);
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
    still_eval_params p = {
        .size = sizeof p, .task = unknown, .n_tasks = 2, .data = DATA};
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "nonsense"));
    p.n_tasks = 0;
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_ARG);
    p = STILL_PARAMS(still_eval_params, .task = two_tasks, .n_tasks = 2,
                     .data = "/nowhere");
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_IO);
    assert_non_null(strstr(e.text, "piqa_valid.jsonl"));
    p.data = DATA;
    assert_int_equal(still_eval_run(model, &p, r, 1, &n, &e), STILL_E_ARG);
    assert_int_equal(n, 1);
    p.poll = never;
    assert_int_equal(still_eval_run(model, &p, r, 8, &n, &e), STILL_E_CANCELLED);
    p.poll = NULL;
    p.limit = 3; /* and contexts that do not fit are counted */
    const still_session_params tight = {.size = sizeof tight, .ctx = 16};
    p.session = &tight;
    must(still_eval_run(model, &p, r, 8, &n, &e), &e);
    assert_int_equal(r[0].n, 3);
    assert_true(r[1].cut > 0);
    const char *const lambada[] = {"lambada"};
    p = STILL_PARAMS(still_eval_params, .task = lambada, .n_tasks = 1, .data = DATA);
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

/* ---- Threads ------------------------------------------------------------- */

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

RUN_TESTS_IN(open_model, close_model, cmocka_unit_test(resuming),
             cmocka_unit_test(requests), cmocka_unit_test(threads))
