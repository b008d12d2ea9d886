/* test_data_errors.c - broken records are counted, broken files and parameters refused;
 * texts that are one JSON array. */
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../run.h"
#include "data_files.h"

static void expect_error(const still_tokenizer *tk, const char *text,
                         still_status status, const char *words)
{
    char path[512];
    sti_data *d = (sti_data *)1;
    still_error err = {0};
    if (text) put_data(text);
    int before = cache_files(path, false);
    sti_data_source s = {text ? data_file : DATA("nowhere.jsonl"), 0};
    sti_data_params p = {.source = &s, .n_sources = 1, .seq = 8, .cache_dir = cache};
    still_status got = sti_data_open(tk, &p, &d, &err);
    if (got != status || !strstr(err.text, words))
        fail_msg("status %d, \"%s\"; expected %d, \"%s\"", got, err.text, status,
                 words);
    assert_null(d);
    if (strstr(words, "none") || strstr(words, "no records"))
        assert_int_equal(cache_files(path, false), before);
}

static void broken_records_are_counted(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    static const struct {
        const char *record, *why;
    } cases[] = {
        {"nonsense", "line 2: "},
        {"{\"text\":\"cut", "line 2: "},
        {"[1]", "line 2: is no JSON object"},
        {"{}", "line 2: no field 'text', nor 'instruction' and 'output'"},
        {"{\"text\":1}", "line 2: 'text' is no string"},
        {"{\"text\":\"\"}", "line 2: 'text' is empty"},
        {"{\"instruction\":\"a\"}", "line 2: no field 'output'"},
        {"{\"output\":\"a\"}", "line 2: no field 'instruction'"},
        {"{\"instruction\":\"a\",\"output\":\"\"}", "line 2: 'output' is empty"},
        {"{\"instruction\":[],\"output\":\"a\"}", "line 2: 'instruction' is no string"},
        {"{\"instruction\":\"a\",\"output\":{}}", "line 2: 'output' is no string"},
        {"{\"instruction\":\"a\",\"output\":\"b\",\"input\":3}",
         "line 2: 'input' is neither a string nor null"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        for (int first = 0; first < 2; first++) { /* also as the first line */
            snprintf(
                text, sizeof text,
                "%s\n%s\n\n{\"instruction\":\"a\",\"output\":\"b\",\"input\":null}",
                first ? "" : "{\"text\":\"good\"}", cases[i].record);
            if (first && cases[i].record[0] == '[') continue; /* that is JSON */
            sti_data *d = open_one(tk, put_data(text), 4, false);
            const sti_data_report *r = sti_data_get_report(d);
            assert_int_equal(r->records, 3 - first);
            assert_int_equal(r->broken, 1);
            if (!strstr(r->first_broken, cases[i].why)) fail_msg("%s", r->first_broken);
            sti_data_free(d);
        }
    }
    expect_error(tk, "{}\n{\"text\":2}\n", STILL_E_FORMAT,
                 "data: none of 2 records has 'text' or 'instruction' and 'output'; "
                 "the first: line 1: no field 'text'");
    expect_error(tk, "[{\"text\":3}]", STILL_E_FORMAT,
                 "none of 1 record has 'text' or 'instruction' and 'output'; the "
                 "first: record 1: 'text' is no string");
    still_tokenizer_free(tk);
}

static void bad_files_are_named(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    expect_error(tk, NULL, STILL_E_IO, "nowhere.jsonl: no such file");
    expect_error(tk, "", STILL_E_FORMAT, "file is empty");
    expect_error(tk, "\n \n", STILL_E_FORMAT, "holds no records");
    expect_error(tk, "[]", STILL_E_FORMAT, "holds no records");
    expect_error(tk, "[{\"text\":\"a\"},\n{\"text\"", STILL_E_FORMAT, "data: line 2");
    expect_error(tk, "{\n\"rows\":[]\n}", STILL_E_FORMAT, "expected an array");
    expect_error(tk, "\x1f\x8b\x08", STILL_E_FORMAT, "damaged gzip");
    expect_error(tk, "{\"text\":\"12\"}", STILL_E_FORMAT,
                 "data: 3 tokens, expected at least the 8 of one sequence");
    still_tokenizer_free(tk);
}

/* Files that are one JSON value: what is an array of records and what is not. */
static void json_arrays(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int n; /* records; -1: not accepted */
        const char *why;
    } cases[] = {{" [ ] ", 0, ""},
                 {"[1, \"a\" ,{} , [2,[3]],null]\n", 5, ""},
                 {"{\"data\":[1,2]}", 2, ""},
                 {"{\"a\":{\"data\":[1]},\n\"data\" : [1,2,3] , \"b\":[]}", 3, ""},
                 {"{\n\"data\":1,\"x\":2}", -1, "expected an array of records"},
                 {"{\n}", -1, "expected an array of records"},
                 {"[1,2", -1, "line 1, column"},
                 {"[1,]", -1, "line 1, column"},
                 {"[1 2]", -1, "expected ',' or ']'"},
                 {"[\n1] x", -1, "line 2, column 4: end of file expected"},
                 {"[,1]", -1, "line 1, column 2: expected a value"},
                 {"[1]]", -1, "end of file expected"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sti_records *r;
        sti_record rec;
        still_error err = {0};
        const still_status st = sti_records_open(put_data(cases[i].text), &r, &err);
        if ((st == STILL_OK) != (cases[i].n >= 0) || !strstr(err.text, cases[i].why))
            fail_msg("'%s': status %d, \"%s\"", cases[i].text, st, err.text);
        int n = 0;
        for (bool more = st == STILL_OK; more; n += more) {
            assert_int_equal(sti_records_next(r, &rec, &more, &err), STILL_OK);
            assert_true(sti_records_offset(r, 1000) <= 1000);
        }
        if (st == STILL_OK) assert_int_equal(n, cases[i].n);
        sti_records_close(r);
    }
}

/* A list of numbers takes its text, not a value for each of them. */
static void json_takes_its_text(void **state)
{
    (void)state;
    enum { N = 8 << 20 };
    char *text = malloc(N + 1);
    assert_non_null(text);
    for (size_t i = 0; i < N - 2; i += 2) memcpy(text + i, ",0", 2);
    text[0] = '[';
    memcpy(text + N - 2, " ]", 3);
    put_data(text);
    free(text);
    const pid_t child = fork();
    if (child == 0) {
        sti_records *r;
        still_error err;
        struct rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        if (sti_records_open(data_file, &r, &err) != STILL_OK) _exit(2);
        getrusage(RUSAGE_SELF, &after);
        _exit(after.ru_maxrss - before.ru_maxrss > 64 << 10);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
#ifdef __SANITIZE_ADDRESS__ /* keeps what was freed for a while */
    assert_int_not_equal(WEXITSTATUS(status), 2);
#else
    assert_int_equal(WEXITSTATUS(status), 0);
#endif
}

static void parameters_are_checked(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    sti_data_source s[2] = {{DATA("records.jsonl"), 1}, {DATA("array.json"), 0}};
    sti_data_params p[] = {{.n_sources = 0, .seq = 8},
                           {.n_sources = 1, .seq = 1},
                           {.n_sources = 1, .seq = (1 << 20) + 1},
                           {.n_sources = 1, .seq = 8, .held_out = 1},
                           {.n_sources = 1, .seq = 8, .held_out = -.1},
                           {.n_sources = 2, .seq = 8}};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) {
        sti_data *d = (sti_data *)1;
        still_error err = {0};
        p[i].source = s;
        p[i].cache_dir = cache;
        assert_int_equal(sti_data_open(tk, &p[i], &d, &err), STILL_E_ARG);
        assert_null(d);
        assert_non_null(strstr(err.text, "expected"));
    }
    char path[96]; /* a file where the folder should be */
    sti_data *d;
    still_error err;
    put_data("x");
    snprintf(path, sizeof path, "%s/below", data_file);
    p[0] = (sti_data_params){.source = s, .n_sources = 1, .seq = 8, .cache_dir = path};
    assert_int_equal(sti_data_open(tk, &p[0], &d, &err), STILL_E_IO);
    assert_non_null(strstr(err.text, path));
    p[0].cache_dir = data_file;
    assert_int_equal(sti_data_open(tk, &p[0], &d, &err), STILL_E_IO);
    still_tokenizer_free(tk);
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(broken_records_are_counted),
             cmocka_unit_test(bad_files_are_named), cmocka_unit_test(json_arrays),
             cmocka_unit_test(json_takes_its_text),
             cmocka_unit_test(parameters_are_checked))
