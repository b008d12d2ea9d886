/* RULER's files: frozen sets and sets made anew are the same; what is too short,
 * missing or damaged is refused. */
#include "ruler_tasks.h"

/* ---- Repetition ---------------------------------------------------------- */

static void test_frozen_and_repeated(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        still_error err;
        items made = some(t, 2), more = some(t, 4), kept, other;
        sti_task_params p = params(SIZE[t].length, 2);
        p.data_dir = FROZEN;
        if (read_all(&sti_task_ruler[t], &p, &kept, &err)) fail_msg("%s", err.text);
        assert_same(&made, &kept);
        assert_string_equal(made.item[1].prompt, more.item[1].prompt);
        p = params(SIZE[t].length, 2);
        p.seed = 7;
        if (read_all(&sti_task_ruler[t], &p, &other, &err)) fail_msg("%s", err.text);
        assert_string_not_equal(made.item[0].prompt, other.item[0].prompt);
        free_all(&made);
        free_all(&more);
        free_all(&kept);
        free_all(&other);
    }
}

/* ---- Errors -------------------------------------------------------------- */

static void test_too_short(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        const int length[] = {-1, 0, 1, SIZE[t].max_new, SIZE[t].max_new + 60};
        for (size_t k = 0; k < sizeof length / sizeof *length; k++) {
            char text[32];
            sti_task_params p = params(length[k], 1);
            snprintf(text, sizeof text, "length %d ", length[k]);
            assert_error(&sti_task_ruler[t], &p, STILL_E_LIMIT, text);
        }
    }
    sti_task_params p = params(INT32_MAX, 1);
    assert_error(&sti_task_ruler[SINGLE_1], &p, STILL_E_LIMIT, "expected at most");
}

static void test_missing(void **state)
{
    (void)state;
    const struct {
        int task;
        const char *part;
    } missing[] = {
        {SINGLE_1,
         "/nowhere/words_adjectives.txt: no such file, nor with .gz (adjectives "
         "of wonderwords 3.0.1"},
        {SINGLE_2, "/nowhere/paul_graham_essays.jsonl: no such file"},
        {CWE, "/nowhere/words_nouns.txt: no such file"},
        {QA_HOTPOT, "HotpotQA, development set"},
        {QA_SQUAD, "SQuAD 2.0, development set"},
    };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        sti_task_params p = params(4096, 1);
        p.data_dir = "/nowhere";
        assert_error(&sti_task_ruler[missing[i].task], &p, STILL_E_IO, missing[i].part);
    }
    sti_task_params p = params(4096, 1);
    p.data_dir = NULL;
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "no folder with data");
    p = params(4096, 1);
    p.tk = NULL;
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "no tokenizer");
    p = params(4096, -1);
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "-1 samples");
}

static void test_bad_files(void **state)
{
    (void)state;
    char deep[4096];
    memset(deep, '[', sizeof deep);
    deep[sizeof deep - 1] = 0;
    const struct {
        int task;
        const char *file, *content, *part;
    } bad[] = {
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": 3}\n",
         ":1: no string 'text'"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \" \\n\"}\n", "has no text"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \"a\\u0000b\"}\n",
         ":1: column"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \"\xFF\"}\n", ":1: column"},
        {SINGLE_2, "paul_graham_essays.jsonl", deep, ":1: column"},
        {SINGLE_1, "words_adjectives.txt", "\n\n", "has no words"},
        {SINGLE_1, "words_adjectives.txt", "good\n\xFF\n", ":2: not a word in UTF-8"},
        {QA_SQUAD, "squad_v2_dev.jsonl", "{}\n", ":1: no string 'title'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[{\"question\":\"q\",\"answers\":"
         "[null]}]}\n",
         ":1: 'answers'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[7]}\n",
         ":1: no string 'question'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[]}\n", "has no questions"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl",
         "{\"question\":\"q\",\"answer\":\"a\",\"context\":[{\"title\":\"t\"}]}\n",
         ":1: no array 'sentences'"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl",
         "{\"question\":\"q\",\"answer\":\"a\",\"context\":[]}\n", "has no questions"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl", "", "has no questions"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        make_folder(bad[i].file, bad[i].content);
        sti_task_params p = params(4096, 1);
        p.data_dir = folder;
        assert_error(&sti_task_ruler[bad[i].task], &p, STILL_E_FORMAT, bad[i].part);
        drop_folder();
    }
}

/* One document, one question: no others to add, which is fine. */
static void test_few_documents(void **state)
{
    (void)state;
    make_folder("squad_v2_dev.jsonl",
                "{\"title\":\"t\",\"context\":\"c d\",\"qas\":[{\"question\":\"q?\","
                "\"answers\":[\"d\",\"D\"]}]}\n");
    sti_task_params p = params(4096, 0);
    p.data_dir = folder;
    items all;
    still_error err;
    assert_int_equal(read_all(&sti_task_ruler[QA_SQUAD], &p, &all, &err), STILL_OK);
    assert_int_equal(all.n, 1);
    assert_int_equal(all.item[0].n_expected, 2);
    assert_begins(all.item[0].prompt, QA_HEAD);
    assert_begins(all.item[0].prompt + strlen(QA_HEAD), "c d");
    free_all(&all);
    drop_folder();
}

/* The same document ten times over is one. */
static void test_repeated_documents(void **state)
{
    (void)state;
    sti_buf b = {0};
    sti_buf_puts(&b, "{\"question\":\"q\",\"answer\":\"a\",\"context\":[");
    for (int i = 0; i < 10; i++)
        sti_buf_printf(&b, "%s{\"title\":\"t\",\"sentences\":[\"s\"]}", i ? "," : "");
    sti_buf_puts(&b, "]}\n");
    make_folder("hotpotqa_dev_distractor.jsonl", b.p);
    sti_buf_free(&b);
    sti_task_params p = params(4096, 0);
    p.data_dir = folder;
    items all;
    still_error err;
    assert_int_equal(read_all(&sti_task_ruler[QA_HOTPOT], &p, &all, &err), STILL_OK);
    assert_int_equal(all.n, 1);
    assert_int_equal(occurrences(all.item[0].prompt, "\n\nDocument "), 1);
    free_all(&all);
    drop_folder();
}

static char *read_text(const char *path)
{
    char *text;
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text = calloc(1, 1 << 20);
    assert_in_range(fread(text, 1, (1 << 20) - 1, f), 1, (1 << 20) - 1);
    fclose(f);
    return text;
}

static void expect_frozen(const char *content, int samples, uint64_t seed,
                          still_status code, const char *part)
{
    make_folder("fwe-1024.jsonl", content);
    sti_task_params p = params(1024, samples);
    p.data_dir = folder;
    p.seed = seed;
    assert_error(&sti_task_ruler[FWE], &p, code, part);
    drop_folder();
}

static void test_frozen_files(void **state)
{
    (void)state;
    char *text = read_text(FROZEN "/fwe-1024.jsonl");
    expect_frozen(text, 3, 42, STILL_E_ARG, "holds 2 samples, 3 were asked for");
    expect_frozen(text, 2, 43, STILL_E_ARG, "made with seed 42, 43 was asked for");
    expect_frozen("", 2, 42, STILL_E_FORMAT, ":1: ends early");
    expect_frozen("{}\n", 2, 42, STILL_E_FORMAT, ":1: no string 'format'");
    expect_frozen("nonsense\n", 2, 42, STILL_E_FORMAT, ":1: column");
    char *at = strstr(text, "Read the following");
    *at = 'r';
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":4: the checksum");
    *at = 'R';
    at = strstr(text, "\"samples\":2");
    at[10] = '1';
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":4: 2 samples in the file, 1 expected");
    at[10] = '2';
    at = strstr(text, "\"samples\":2") - 1;
    *at = 0; /* the last line is gone */
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":3: no string 'sha256'");
    at = strstr(text, "\n");
    at[1] = 0;
    expect_frozen(text, 2, 42, STILL_E_FORMAT, "ends early");
    at = strstr(text, "\"fwe\"");
    at[1] = 'c';
    expect_frozen(text, 2, 42, STILL_E_FORMAT,
                  "is a set of cwe, length 1024, expected fwe");
    free(text);

    still_error err;
    sti_task_params p = params(1024, 2);
    const sti_eval_task other = {.name = "piqa"};
    assert_int_equal(sti_dataset_file_write(&other, &p, "/nowhere/x", &err),
                     STILL_E_ARG);
    assert_int_equal(
        sti_dataset_file_write(&sti_task_ruler[FWE], &p, "/nowhere/x", &err),
        STILL_E_IO);
    assert_non_null(strstr(err.text, "/nowhere/x"));
}

/* A folder of its own frozen set is read; freezing makes the samples anew. */
static void test_freeze_again(void **state)
{
    (void)state;
    char *text = read_text(FROZEN "/fwe-1024.jsonl"), *again;
    make_folder("fwe-1024.jsonl", "nonsense\n");
    still_error err;
    sti_task_params p = params(1024, 2);
    p.data_dir = folder;
    assert_int_equal(
        sti_dataset_file_write(&sti_task_ruler[FWE], &p, file_in_folder, &err),
        STILL_OK);
    again = read_text(file_in_folder);
    assert_string_equal(text, again);
    free(text);
    free(again);
    drop_folder();
}

/* test_ruler_files freeze DIR: writes the frozen sets anew. */
int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "freeze") == 0) {
        still_error err = {0};
        if (open_tokenizer(NULL)) return 1;
        for (int t = 0; t < TASKS && !err.code; t++) {
            sti_task_params p = params(SIZE[t].length, 2);
            char *path = sti_dataset_file_path(argv[2], NAME[t], SIZE[t].length);
            sti_dataset_file_write(&sti_task_ruler[t], &p, path, &err);
            free(path);
        }
        if (err.code) puts(err.text);
        close_tokenizer(NULL);
        return err.code != 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen_and_repeated),
        cmocka_unit_test(test_too_short),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_few_documents),
        cmocka_unit_test(test_repeated_documents),
        cmocka_unit_test(test_frozen_files),
        cmocka_unit_test(test_freeze_again),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
