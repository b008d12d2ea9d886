/* Encoding beyond the golden lines: flags, sizes, broken UTF-8, hostile lengths. */
#include "../run.h"
#include "tokens.h"

#include <time.h>

#include "token/tokenizer.h"

static void check(const still_tokenizer *tk, const char *text, unsigned flags,
                  const int32_t *want, size_t n)
{
    size_t count;
    int32_t *ids = encode(tk, text, strlen(text), flags, &count);
    assert_int_equal(count, n);
    if (n) assert_memory_equal(ids, want, n * sizeof *ids);
    free(ids);
}

static void test_special_only_when_asked(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("llama3.tiktoken"));
    int32_t bos = still_tokenizer_bos(tk), vocab = still_tokenizer_vocab_size(tk);
    assert_int_equal(bos, vocab - 256);
    check(tk, "<|begin_of_text|>", STILL_ENCODE_SPECIAL, &bos, 1);
    size_t n;
    int32_t *ids = encode(tk, "<|begin_of_text|>", 17, 0, &n);
    assert_true(n > 1);
    for (size_t i = 0; i < n; i++) assert_true(ids[i] < bos);
    free(ids);
    /* The longest special token counts, not the first. */
    int32_t eleven = bos + 12 + 9;
    check(tk, "<|reserved_special_token_11|>", STILL_ENCODE_SPECIAL, &eleven, 1);
    still_tokenizer_free(tk);
}

static void test_bos(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("spm.model"));
    assert_true(still_tokenizer_adds_bos(tk));
    check(tk, "", 0, NULL, 0);
    check(tk, "", STILL_ENCODE_BOS, (int32_t[]){1}, 1);
    check(tk, "<s></s>", STILL_ENCODE_SPECIAL, (int32_t[]){1, 2}, 2);
    assert_true(still_tokenizer_is_end(tk, 2));
    assert_false(still_tokenizer_is_end(tk, 1));
    still_tokenizer_free(tk);
    tk = open_tokenizer(VOCAB("smollm.gguf"));
    assert_false(still_tokenizer_adds_bos(tk));
    check(tk, "", STILL_ENCODE_BOS, NULL, 0);
    assert_int_equal(still_tokenizer_bos(tk), -1);
    assert_int_equal(still_tokenizer_eos(tk), 0);
    still_tokenizer_free(tk);
}

/* After a special token the text does not start again: no second leading space. */
static void test_leading_space_once(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("spm.model"));
    size_t n, k;
    int32_t *plain = encode(tk, "the sky", 7, 0, &n);
    int32_t *after = encode(tk, "<s> the sky", 11, STILL_ENCODE_SPECIAL, &k);
    assert_int_equal(k, n + 1);
    assert_memory_equal(plain, after + 1, n * sizeof *plain);
    free(plain);
    free(after);
    still_tokenizer_free(tk);
}

/* Added tokens that swallow the white space on one side of them, up to the text or the
 * token before. */
static void test_strip(void **state)
{
    (void)state;
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"\\u0120\":2,"
        "\"<l>\":3,\"<r>\":4},\"merges\":[]},"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":["
        "{\"id\":3,\"content\":\"<l>\",\"special\":true,\"lstrip\":true},"
        "{\"id\":4,\"content\":\"<r>\",\"special\":true,\"rstrip\":true}]}";
    still_error err;
    still_tokenizer *tk = sti_tokenizer_new();
    assert_non_null(tk);
    if (sti_tokenizer_load_json(tk, json, sizeof json - 1, &err) != STILL_OK ||
        sti_tokenizer_finish(tk, &err) != STILL_OK)
        fail_msg("%s", err.text);
    const unsigned special = STILL_ENCODE_SPECIAL;
    check(tk, "a  <l>  b", special, (int32_t[]){0, 3, 2, 2, 1}, 5);
    check(tk, "a  <r>  b", special, (int32_t[]){0, 2, 2, 4, 1}, 5);
    check(tk, " <l><l> ", special, (int32_t[]){3, 3, 2}, 3);
    check(tk, "<r>  <l>", special, (int32_t[]){4, 3}, 2);
    still_tokenizer_free(tk);
}

static void test_writes_no_more_than_cap(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("smollm.json"));
    int32_t ids[4] = {-7, -7, -7, -7};
    size_t n;
    still_error err;
    assert_int_equal(still_tokenizer_encode(tk, "1234567", 7, 0, ids, 2, &n, &err),
                     STILL_OK);
    assert_int_equal(n, 7);
    assert_int_not_equal(ids[1], -7);
    assert_int_equal(ids[2], -7);
    assert_int_equal(still_tokenizer_encode(tk, NULL, 3, 0, ids, 2, &n, &err),
                     STILL_E_ARG);
    still_tokenizer_free(tk);
}

/* Byte-level: broken UTF-8 becomes its bytes, and pieces put together give it back. */
static void test_broken_utf8_bytes(void **state)
{
    (void)state;
    static const char *const names[] = {VOCAB("smollm.json"), VOCAB("llama3.tiktoken"),
                                        VOCAB("llama3.json")};
    static const char text[] =
        "ab\xFF\xC3 cd\xE2\x82 \xED\xA0\x80\xF0\x9F\x98\x80\xC0\xAF"
        " the\x80 12\xF8 \xE2\x82";
    for (size_t t = 0; t < sizeof names / sizeof *names; t++) {
        still_tokenizer *tk = open_tokenizer(names[t]);
        size_t n, total = 0, len;
        char back[sizeof text];
        int32_t *ids = encode(tk, text, sizeof text - 1, 0, &n);
        for (size_t i = 0; i < n; i++) {
            const char *p = still_tokenizer_piece(tk, ids[i], false, &len);
            assert_non_null(p);
            assert_true(total + len < sizeof back);
            memcpy(back + total, p, len);
            total += len;
        }
        assert_int_equal(total, sizeof text - 1);
        assert_memory_equal(back, text, total);
        free(ids);
        still_tokenizer_free(tk);
    }
}

/* SentencePiece: every broken byte is U+FFFD. */
static void test_broken_utf8_spm(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("spm.model"));
    size_t n, k;
    int32_t *broken = encode(tk, "a\xE2\x82 b\xFF", 6, 0, &n);
    int32_t *said = encode(tk, "a\uFFFD\uFFFD b\uFFFD", 12, 0, &k);
    assert_int_equal(n, k);
    assert_memory_equal(broken, said, n * sizeof *said);
    free(broken);
    free(said);
    still_tokenizer_free(tk);
}

/* A long piece without a place to split must not take quadratic time: 512 KB would be
 * many minutes, and is a fraction of a second. */
static void test_long_pieces(void **state)
{
    (void)state;
    enum { N = 512 << 10 };
    static const char *const names[] = {VOCAB("smollm.json"), VOCAB("spm.model"),
                                        VOCAB("llama3.tiktoken")};
    static const char *const units[] = {"a", " ", "the", "ein", "\n ", "9"};
    char *text = malloc(N);
    assert_non_null(text);
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        size_t unit = strlen(units[u]), n, len;
        for (size_t i = 0; i < N; i++) text[i] = units[u][i % unit];
        for (size_t t = 0; t < sizeof names / sizeof *names; t++) {
            still_tokenizer *tk = open_tokenizer(names[t]);
            clock_t start = clock();
            int32_t *ids = encode(tk, text, N, 0, &n);
            assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 30);
            char *back = decode(tk, ids, n < 1000 ? n : 1000, false, &len);
            assert_memory_equal(back, text, len);
            free(back);
            free(ids);
            still_tokenizer_free(tk);
        }
    }
    free(text);
}

static void test_open_errors(void **state)
{
    (void)state;
    still_tokenizer *tk;
    still_error err;
    assert_int_not_equal(still_tokenizer_open(VOCAB("none"), &tk, &err), STILL_OK);
    assert_null(tk);
    assert_non_null(strstr(err.text, "none"));
    assert_int_not_equal(still_tokenizer_open(VOCAB(""), &tk, &err), STILL_OK);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    assert_int_not_equal(still_tokenizer_open(VOCAB("make.py"), &tk, &err), STILL_OK);
    assert_non_null(strstr(err.text, "not a tokenizer"));
}

RUN_TESTS(cmocka_unit_test(test_special_only_when_asked), cmocka_unit_test(test_bos),
          cmocka_unit_test(test_leading_space_once), cmocka_unit_test(test_strip),
          cmocka_unit_test(test_writes_no_more_than_cap),
          cmocka_unit_test(test_broken_utf8_bytes),
          cmocka_unit_test(test_broken_utf8_spm), cmocka_unit_test(test_long_pieces),
          cmocka_unit_test(test_open_errors))
