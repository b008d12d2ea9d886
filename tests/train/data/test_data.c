/* test_data.c - records, packing, masks, held-out sequences, progress. */

#include "../../run.h"
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

/* A JSON value in one line of more bytes than a line of records may have. */
static void one_long_line(void **state)
{
    (void)state;
    enum { RECORDS = 40, TEXT = 1 << 20 };
    char *text = malloc(TEXT);
    FILE *f = fopen(data_file, "w");
    assert_non_null(f);
    assert_non_null(text);
    memset(text, 'a', TEXT - 1);
    text[TEXT - 1] = 0;
    for (int i = 0; i < RECORDS; i++)
        fprintf(f, "%s{\"text\": \"%s\"}", i ? ", " : "{\"data\": [", text);
    assert_true(fputs("]}", f) >= 0);
    assert_int_equal(fclose(f), 0);
    sti_records *r;
    sti_record rec;
    still_error err;
    bool more;
    if (sti_records_open(data_file, &r, &err) != STILL_OK) fail_msg("%s", err.text);
    for (int i = 0; i < RECORDS; i++) {
        assert_int_equal(sti_records_next(r, &rec, &more, &err), STILL_OK);
        assert_true(more);
        assert_int_equal(rec.n, TEXT - 1);
    }
    assert_int_equal(sti_records_next(r, &rec, &more, &err), STILL_OK);
    assert_false(more);
    sti_records_close(r);
    free(text);
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
    static const char prompt[] = HEAD "x\n\n### Response:\n";
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

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(records_of_every_shape),
             cmocka_unit_test(one_long_line), cmocka_unit_test(packing_is_exact),
             cmocka_unit_test(straddling_token_is_prompt),
             cmocka_unit_test(unknown_characters_keep_the_boundary),
             cmocka_unit_test(held_out_is_disjoint),
             cmocka_unit_test(progress_counts_bytes_and_cancels))
