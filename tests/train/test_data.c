/* test_data.c - records, packing, masks, held-out sequences, and what is refused. */
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data_files.h"

#define LONG_HEAD                                                                      \
    "Below is an instruction that describes a task, paired with an input that "        \
    "provides further context. Write a response that appropriately completes the "     \
    "request.\n\n### Instruction:\n"
#define HEAD                                                                           \
    "Below is an instruction that describes a task. Write a response that "            \
    "appropriately completes the request.\n\n### Instruction:\n"

static const char *const PROMPTS[] = {HEAD "Name the sky's color.\n\n### Response:\n",
                                      LONG_HEAD
                                      "Add.\n\n### Input:\n1 and 2\n\n### Response:\n",
                                      "", HEAD "Say \"hi\".\n\n### Response:\n"};
static const char *const OUTPUTS[] = {
    "The sky is blue.", "3", "The sun is hot.\n<|endoftext|> is text here.", "hi"};

static void prompts_are_exact(void **state)
{
    (void)state;
    char *p = sti_data_prompt("Name the sky's color.", NULL);
    assert_string_equal(p, PROMPTS[0]);
    free(p);
    p = sti_data_prompt("Name the sky's color.", "");
    assert_string_equal(p, PROMPTS[0]);
    free(p);
    p = sti_data_prompt("Add.", "1 and 2");
    assert_string_equal(p, PROMPTS[1]);
    free(p);
}

static void records_of_every_shape(void **state)
{
    (void)state;
    static const char *const files[] = {DATA("records.jsonl"), DATA("records.jsonl.gz"),
                                        DATA("array.json"), DATA("array.json.gz"),
                                        DATA("object.json")};
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        sti_records *r;
        sti_record rec;
        still_error err;
        bool more;
        if (sti_records_open(files[f], &r, &err) != STILL_OK) fail_msg("%s", err.text);
        for (size_t i = 0; i < 4; i++) {
            assert_int_equal(sti_records_next(r, &rec, &more, &err), STILL_OK);
            assert_true(more);
            assert_null(rec.broken);
            assert_int_equal(rec.prompt, strlen(PROMPTS[i]));
            assert_int_equal(rec.n, rec.prompt + strlen(OUTPUTS[i]));
            assert_memory_equal(rec.text, PROMPTS[i], rec.prompt);
            assert_string_equal(rec.text + rec.prompt, OUTPUTS[i]);
        }
        assert_int_equal(sti_records_next(r, &rec, &more, &err), STILL_OK);
        assert_false(more);
        sti_records_close(r);
    }
}

/* What the cache must hold, made here with plain calls: all documents' ids and whether
 * they count. The byte at which an id begins tells prompt from output. */
typedef struct packed {
    int32_t ids[4096];
    uint8_t output[4096];
    size_t n;
} packed;

static void pack(packed *p, const still_tokenizer *tk, const char *prompt,
                 const char *output, size_t space_in_front)
{
    char text[2048];
    size_t n, begin = 0, len;
    int32_t *ids = p->ids + p->n;
    snprintf(text, sizeof text, "%s%s", prompt, output);
    assert_int_equal(still_tokenizer_encode(tk, text, strlen(text), STILL_ENCODE_BOS,
                                            ids, 1024, &n, NULL),
                     STILL_OK);
    for (size_t i = 0; i < n; i++) {
        bool bos = i == 0 && still_tokenizer_adds_bos(tk);
        p->output[p->n + i] = !bos && begin >= strlen(prompt) + space_in_front;
        if (*prompt == 0 && !bos) p->output[p->n + i] = 1;
        still_tokenizer_piece(tk, ids[i], true, &len);
        if (!bos) begin += len;
    }
    ids[n] = still_tokenizer_eos(tk);
    p->output[p->n + n] = 1;
    p->n += n + 1;
}

/* Every sequence lies where shuffling says, uncut, under both settings of the mask. */
static void expect_packed(const still_tokenizer *tk, const char *path, const packed *p)
{
    enum { SEQ = 7 };
    for (int mask = 0; mask < 2; mask++) {
        sti_data *d = open_one(tk, path, SEQ, mask);
        const sti_data_report *r = sti_data_get_report(d);
        assert_int_equal(r->tokens, p->n);
        assert_int_equal(r->train, p->n / SEQ);
        assert_int_equal(r->valid, 0);
        int32_t ids[SEQ];
        uint8_t counts[SEQ];
        for (uint64_t i = 0; i < r->train; i++) {
            size_t at = SEQ * sti_mix_shuffle(r->train, 0, 0, 0, i);
            sti_data_train(d, i, ids, counts);
            assert_memory_equal(ids, p->ids + at, sizeof ids);
            assert_int_equal(counts[0], 0);
            for (int t = 1; t < SEQ; t++)
                assert_int_equal(counts[t], !mask || p->output[at + (size_t)t]);
            sti_data_train(d, i, ids, NULL);
        }
        sti_data_free(d);
    }
}

static void packing_is_exact(void **state)
{
    (void)state;
    static const char *const names[] = {VOCAB("smollm.json"), VOCAB("llama3.tiktoken"),
                                        VOCAB("spm.model")};
    for (size_t v = 0; v < 3; v++) {
        static packed p;
        p.n = 0;
        still_tokenizer *tk = tokenizer(names[v]);
        for (size_t i = 0; i < 4; i++) pack(&p, tk, PROMPTS[i], OUTPUTS[i], v == 2);
        expect_packed(tk, DATA("records.jsonl"), &p);
        expect_packed(tk, DATA("array.json"), &p);
        still_tokenizer_free(tk);
    }
}

/* "Response:\n" and "   the" share the token "\n  ": it counts as prompt. */
static void straddling_token_is_prompt(void **state)
{
    (void)state;
    static packed p;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    char *prompt = sti_data_prompt("x", NULL);
    size_t alone, n, before = 0, len;
    int32_t ids[512];
    char text[512];
    snprintf(text, sizeof text, "%s   the", prompt);
    assert_int_equal(
        still_tokenizer_encode(tk, prompt, strlen(prompt), 0, ids, 512, &alone, NULL),
        STILL_OK);
    assert_int_equal(
        still_tokenizer_encode(tk, text, strlen(text), 0, ids, 512, &n, NULL),
        STILL_OK);
    still_tokenizer_piece(tk, ids[alone - 1], true, &len);
    assert_int_equal(len, 3); /* the case is what it says */
    p.n = 0;
    pack(&p, tk, prompt, "   the", 0);
    while (!p.output[before]) before++;
    assert_int_equal(before, alone);
    expect_packed(tk, put_data("{\"instruction\":\"x\",\"output\":\"   the\"}\n"), &p);
    free(prompt);
    still_tokenizer_free(tk);
}

/* Where pieces do not add up to the text, the prompt alone says where it ends. */
static void unknown_characters_keep_the_boundary(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("spm-nobytes.model"));
    sti_data *d = open_one(
        tk,
        put_data("{\"instruction\":\"\xE6\x97\xA5\xE6\x97\xA5\",\"output\":\"the\"}"),
        2, true);
    const char *prompt = HEAD "\xE6\x97\xA5\xE6\x97\xA5\n\n### Response:\n";
    size_t n;
    assert_int_equal(still_tokenizer_encode(tk, prompt, strlen(prompt),
                                            STILL_ENCODE_BOS, NULL, 0, &n, NULL),
                     STILL_OK);
    const sti_data_report *r = sti_data_get_report(d);
    assert_true(r->tokens > n + 1);
    uint64_t outputs = 0;
    uint8_t counts[2];
    int32_t ids[2];
    for (uint64_t i = 0; i < r->train; i++) {
        sti_data_train(d, i, ids, counts);
        outputs += counts[1]; /* of every second id */
    }
    uint64_t expected = 0;
    for (size_t i = 1; i < r->tokens; i += 2) expected += i >= n;
    assert_int_equal(outputs, expected);
    sti_data_free(d);
    still_tokenizer_free(tk);
}

/* ---- Held out ------------------------------------------------------------ */

static char *numbered_lines(int n)
{
    sti_buf b = {0};
    for (int i = 0; i < n; i++) sti_buf_printf(&b, "{\"text\":\"%d\"}\n", 100000 + i);
    assert_false(b.failed);
    return b.p;
}

/* Marks the sequences of the file by where they lie in it; `seq` is a document's. */
static void mark(const still_tokenizer *tk, const int32_t *ids, int seq, int *seen)
{
    char text[64] = "";
    for (int t = 0; t < seq - 1; t++) {
        size_t n;
        const char *p = still_tokenizer_piece(tk, ids[t], false, &n);
        strncat(text, p, n);
    }
    seen[atoi(text) - 100000]++;
}

static void held_out_is_disjoint(void **state)
{
    (void)state;
    enum { DOCS = 50 };
    static const struct {
        double share;
        uint64_t valid;
    } cases[] = {{0, 0}, {.001, 1}, {.1, 5}, {.5, 25}, {.999, 49}};
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    char *text = numbered_lines(DOCS);
    sti_data_source s = {put_data(text), 0};
    size_t seq;
    assert_int_equal(still_tokenizer_encode(tk, "100000", 6, 0, NULL, 0, &seq, NULL),
                     0);
    seq++; /* EOS: a sequence is a document */
    int32_t ids[16];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int seen[DOCS] = {0};
        sti_data *d = open_params(tk, (sti_data_params){.source = &s,
                                                        .n_sources = 1,
                                                        .seq = (int)seq,
                                                        .held_out = cases[c].share});
        const sti_data_report *r = sti_data_get_report(d);
        assert_int_equal(r->valid, cases[c].valid);
        assert_int_equal(r->train, DOCS - cases[c].valid);
        for (uint64_t i = 0; i < r->train; i++) {
            sti_data_train(d, i, ids, NULL);
            mark(tk, ids, (int)seq, seen);
        }
        for (uint64_t i = 0; i < r->valid; i++) {
            sti_data_valid(d, i, ids, NULL);
            mark(tk, ids, (int)seq, seen);
        }
        for (int i = 0; i < DOCS; i++) assert_int_equal(seen[i], 1);
        for (uint64_t i = 0; i < 2 * r->train; i++) { /* never in later passes */
            sti_data_train(d, i, ids, NULL);
            mark(tk, ids, (int)seq, seen);
        }
        for (uint64_t i = 0; i < DOCS; i++)
            assert_int_equal(seen[i], i < r->train ? 3 : 1);
        sti_data_free(d);
    }
    free(text);
    still_tokenizer_free(tk);
}

/* ---- Broken files -------------------------------------------------------- */

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
                 {"[\n1] x", -1, "line 2, column 3: end of file expected"},
                 {"[,1]", -1, "line 1, column"},
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

/* ---- Progress ------------------------------------------------------------ */

typedef struct calls {
    int n, stop_at;
    uint64_t done, total;
} calls;

static bool count_calls(void *user, uint64_t done, uint64_t total)
{
    calls *c = user;
    assert_true(done >= c->done && done <= total);
    c->done = done;
    c->total = total;
    return ++c->n != c->stop_at;
}

static void progress_counts_bytes_and_cancels(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    char path[512], *text = numbered_lines(300000);
    sti_data_source s[2] = {{put_data(text), 0}, {DATA("records.jsonl"), 0}};
    calls c = {.stop_at = 2};
    sti_data_params p = {.source = s,
                         .n_sources = 2,
                         .seq = 8,
                         .cache_dir = cache,
                         .progress = count_calls,
                         .user = &c};
    sti_data *d;
    still_error err;
    cache_files(path, true);
    assert_int_equal(sti_data_open(tk, &p, &d, &err), STILL_E_CANCELLED);
    assert_null(d);
    assert_int_equal(cache_files(path, false), 0);
    assert_true(c.done > 0 && c.done < c.total);
    c = (calls){0};
    assert_int_equal(sti_data_open(tk, &p, &d, &err), STILL_OK);
    assert_true(c.n > 3);
    assert_int_equal(c.done, c.total);
    assert_true(c.total > strlen(text));
    sti_data_free(d);
    cache_files(path, true);
    free(text);
    still_tokenizer_free(tk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_are_exact),
        cmocka_unit_test(records_of_every_shape),
        cmocka_unit_test(packing_is_exact),
        cmocka_unit_test(straddling_token_is_prompt),
        cmocka_unit_test(unknown_characters_keep_the_boundary),
        cmocka_unit_test(held_out_is_disjoint),
        cmocka_unit_test(broken_records_are_counted),
        cmocka_unit_test(bad_files_are_named),
        cmocka_unit_test(json_arrays),
        cmocka_unit_test(json_takes_its_text),
        cmocka_unit_test(parameters_are_checked),
        cmocka_unit_test(progress_counts_bytes_and_cancels),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
