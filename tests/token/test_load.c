/* Vocabulary files that are not what they should be: cut short, contradictory, asking
 * for what is not supported. Each is an error with a reason, never a crash. */
#include "../run.h"
#include "tokens.h"

#include <stdio.h>

#include "file/store.h"
#include "token/tokenizer.h"

static void refuse(const char *json, const char *reason)
{
    still_tokenizer *tk;
    still_error err = {0};
    assert_int_not_equal(sti_tokenizer_from_bytes(json, strlen(json), NULL, &tk, &err),
                         STILL_OK);
    assert_null(tk);
    if (!strstr(err.text, reason)) fail_msg("'%s' does not say '%s'", err.text, reason);
}

#define BYTES "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}"
#define AB "\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}"

static void test_json_refusals(void **state)
{
    (void)state;
    refuse("{", "line 1");
    refuse("{}", "model");
    refuse("{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", "neither byte-level");
    refuse("{\"model\":{" AB "}," BYTES "}", "merges");
    refuse("{\"model\":{" AB ",\"merges\":[\"a c\"]}," BYTES "}",
           "merge 0, 'a' and 'c'");
    refuse("{\"model\":{" AB ",\"merges\":[\"b a\"]}," BYTES "}",
           "the result is not in");
    refuse("{\"model\":{" AB ",\"merges\":[[\"a\"]]}," BYTES "}", "merge 0");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1}}," BYTES "}", "'a'");
    refuse("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4000000}}," BYTES "}", "'a'");
    refuse("{\"model\":{" AB ",\"merges\":[]},\"normalizer\":{\"type\":\"NFKC\"}," BYTES
           "}",
           "NFKC");
    refuse("{\"model\":{" AB ",\"merges\":[]},\"pre_tokenizer\":{\"type\":\"Sequence\","
           "\"pretokenizers\":[{\"type\":\"Punctuation\"},{\"type\":\"ByteLevel\","
           "\"add_prefix_space\":false}]}}",
           "Punctuation");
    refuse("{\"model\":{" AB ",\"merges\":[]},\"pre_tokenizer\":{\"type\":\"Sequence\","
           "\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
           "\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\"}]}}",
           "splitting rule '('");
}

static void test_tiktoken_refusals(void **state)
{
    (void)state;
    refuse("IQ== 1\n", "rank 1, expected 0");
    refuse("IQ== 0\nI*== 1\n", "line 2");
    refuse("IQ== 0\nIg==\n", "line 2");
    refuse("IQ== 0\n", "byte 0x00 has no token");
    still_tokenizer *tk;
    still_error err = {0};
    assert_int_equal(still_tokenizer_open(VOCAB("llama3.tiktoken"), &tk, &err),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "519 of them do not say how text is split"));
    assert_int_equal(
        still_tokenizer_open_split(VOCAB("llama3.tiktoken"), "gpt-9", &tk, &err),
        STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "'gpt-9'"));
    static const char *const files[] = {VOCAB("spm.model"), VOCAB("qwen.json"),
                                        VOCAB("qwen.gguf"), VOCAB("tekken"),
                                        VOCAB("folder")};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        assert_int_equal(still_tokenizer_open_split(files[i], "qwen2", &tk, &err),
                         STILL_E_ARG);
        assert_non_null(strstr(err.text, "says itself how text is split"));
    }
}

/* The special tokens that go with a rule. */
static void test_tiktoken_specials(void **state)
{
    (void)state;
    static const struct {
        const char *split;
        int more, bos, eos;
    } cases[] = {
        {"llama-bpe", 256, 519, 520}, {"qwen2", 3, -1, 521}, {"dbrx", 0, -1, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_tokenizer *tk = open_split(VOCAB("llama3.tiktoken"), cases[i].split);
        assert_int_equal(still_tokenizer_vocab_size(tk), 519 + cases[i].more);
        assert_int_equal(still_tokenizer_bos(tk), cases[i].bos);
        assert_int_equal(still_tokenizer_eos(tk), cases[i].eos);
        still_tokenizer_free(tk);
    }
}

#define TEKKEN(config, vocab, more)                                                    \
    "{\"config\":{" config "},\"vocab\":[" vocab "]" more "}"
#define PATTERN "\"pattern\":\"a|b\",\"default_vocab_size\":"
#define A "{\"rank\":0,\"token_bytes\":\"YQ==\",\"token_str\":\"a\"}"
#define SPECIALS "\"default_num_special_tokens\":"

static void test_tekken_refusals(void **state)
{
    (void)state;
    refuse(TEKKEN("", A, ""), "lacks vocab or config.pattern");
    refuse(TEKKEN("\"pattern\":7", A, ""), "lacks vocab or config.pattern");
    refuse(TEKKEN(PATTERN "1", A, ""), "default_num_special_tokens");
    refuse(TEKKEN(PATTERN "1," SPECIALS "-1", A, ""), "default_num_special_tokens");
    refuse(TEKKEN(PATTERN "1," SPECIALS "99999999", A, ""), "default_num_special");
    refuse(TEKKEN(PATTERN "5," SPECIALS "9", A, ""), "default_vocab_size");
    refuse(TEKKEN(PATTERN "99999999," SPECIALS "9", A, ""), "default_vocab_size");
    refuse(TEKKEN(PATTERN "9," SPECIALS "1", A, ""), "1 special tokens and 1 others");
    refuse(TEKKEN(PATTERN "2," SPECIALS "1", A, ""), "(none) must list its special");
    refuse(TEKKEN(PATTERN "2," SPECIALS "1,\"version\":\"v11\"", A, ""),
           "v11 must list");
    refuse(TEKKEN(PATTERN "2," SPECIALS "1,\"version\":\"v7\"", A, ""), "byte 0x00");
    refuse(TEKKEN(PATTERN "1," SPECIALS "0", A, ",\"special_tokens\":[{}]"),
           "special_tokens are 1");
    refuse(TEKKEN(PATTERN "2," SPECIALS "1", A, ",\"special_tokens\":[{}]"),
           "special_tokens[0] has no rank");
    refuse(TEKKEN(PATTERN "2," SPECIALS "1", A, ",\"special_tokens\":[{\"rank\":0}]"),
           "special_tokens[0] has no token_str");
    refuse(TEKKEN(PATTERN "1," SPECIALS "0", "{\"rank\":1,\"token_bytes\":\"YQ==\"}",
                  ",\"special_tokens\":[]"),
           "vocab[0] has no rank");
    refuse(TEKKEN(PATTERN "1," SPECIALS "0", "{\"rank\":0,\"token_bytes\":\"YQ\"}",
                  ",\"special_tokens\":[]"),
           "vocab[0] has no token_bytes");
}

/* Special tokens come first; unnamed ones are filled up. */
static void test_tekken_specials(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("tekken"));
    size_t n;
    assert_int_equal(still_tokenizer_vocab_size(tk), 524);
    assert_int_equal(still_tokenizer_bos(tk), 1);
    assert_int_equal(still_tokenizer_eos(tk), 2);
    assert_true(still_tokenizer_adds_bos(tk));
    assert_memory_equal(still_tokenizer_piece(tk, 3, true, &n), "[INST]", 6);
    int32_t *ids = encode(tk, "[INST]a", 7, STILL_ENCODE_SPECIAL, &n);
    assert_true(n == 2 && ids[0] == 3 && ids[1] >= 24);
    free(ids);
    free(encode(tk, "[INST]a", 7, 0, &n));
    assert_true(n > 2);
    ids = encode(tk, "<SPECIAL_23>", 12, STILL_ENCODE_SPECIAL, &n);
    assert_true(n == 1 && ids[0] == 23);
    free(ids);
    still_tokenizer_free(tk);
}

static char *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *p = malloc(1 << 20);
    assert_non_null(p);
    *n = fread(p, 1, 1 << 20, f);
    fclose(f);
    return p;
}

/* Every length of every kind of file; only the last one or two are whole. */
static void test_cut_short(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        size_t step;
    } files[] = {{VOCAB("spm.model"), 7},
                 {VOCAB("smollm.json"), 61},
                 {VOCAB("tekken/tekken.json"), 97},
                 {VOCAB("llama3.tiktoken"), 13}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        size_t n;
        char *p = read_all(files[i].path, &n);
        for (size_t cut = 0; cut + 2 < n; cut += files[i].step) {
            char *part = malloc(cut ? cut : 1); /* so that a sanitizer sees the end */
            assert_non_null(part);
            memcpy(part, p, cut);
            still_tokenizer *tk;
            still_error err = {0};
            const sti_tokenizer_hints hints = {.split = i == 3 ? "llama-bpe" : NULL};
            still_status st = sti_tokenizer_from_bytes(part, cut, &hints, &tk, &err);
            /* Ranks may end at any line once all bytes are there. */
            if (i != 3) assert_int_not_equal(st, STILL_OK);
            if (st != STILL_OK) assert_true(err.text[0] && !tk);
            still_tokenizer_free(tk);
            free(part);
        }
        free(p);
    }
}

/* Each byte of a model turned over: an error or a tokenizer, nothing else. */
static void test_bit_flips(void **state)
{
    (void)state;
    size_t n;
    char *p = read_all(VOCAB("spm-nobytes.model"), &n);
    for (size_t i = 0; i < n; i += 3) {
        still_tokenizer *tk;
        still_error err;
        p[i] ^= (char)(1 << i % 8);
        if (sti_tokenizer_load_spm(tk = sti_tokenizer_new(), p, n, &err) == STILL_OK &&
            sti_tokenizer_finish(tk, &err) == STILL_OK) {
            size_t count;
            free(encode(tk, "the sky <sym> \u00e9", 16, 0, &count));
        }
        still_tokenizer_free(tk);
        p[i] ^= (char)(1 << i % 8);
    }
    free(p);
}

static void gguf_with(const char *model, const char *pre, const char *reason)
{
    char path[] = "/tmp/still-test-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "wb");
    assert_non_null(f);
    sti_writer *w;
    still_error err = {0};
    still_tokenizer *tk;
    fclose(f);
    sti_str tokens[] = {{"a", 1}, {"b", 1}};
    assert_int_equal(sti_writer_gguf(path, &w, &err), STILL_OK);
    sti_writer_meta_str(w, "general.architecture", "llama", &err);
    sti_writer_meta_str(w, "tokenizer.ggml.model", model, &err);
    sti_writer_meta_str(w, "tokenizer.ggml.pre", pre, &err);
    sti_writer_meta_strs(w, "tokenizer.ggml.tokens", tokens, 2, &err);
    assert_int_equal(sti_writer_finish(w, &err), STILL_OK);
    assert_int_not_equal(still_tokenizer_open(path, &tk, &err), STILL_OK);
    if (!strstr(err.text, reason)) fail_msg("'%s' does not say '%s'", err.text, reason);
    remove(path);
}

static void test_gguf_refusals(void **state)
{
    (void)state;
    gguf_with("bert", "x", "'bert'");
    gguf_with("gpt2", "martian", "'martian'");
    gguf_with("gpt2", "gpt-2", "merges is missing");
    gguf_with("llama", "default", "scores is missing");
}

/* A folder's settings: BOS, end tokens, the chat template. */
static void test_settings(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(FIXTURES "/vocab/folder");
    assert_int_equal(still_tokenizer_bos(tk), 1);
    assert_int_equal(still_tokenizer_eos(tk), 2);
    assert_false(still_tokenizer_adds_bos(tk));
    assert_true(still_tokenizer_is_end(tk, 2));
    assert_true(still_tokenizer_is_end(tk, 5));
    assert_string_equal(still_tokenizer_chat_template(tk), "[INST]");
    still_tokenizer_free(tk);
}

RUN_TESTS(cmocka_unit_test(test_json_refusals),
          cmocka_unit_test(test_tiktoken_refusals),
          cmocka_unit_test(test_tiktoken_specials),
          cmocka_unit_test(test_tekken_refusals),
          cmocka_unit_test(test_tekken_specials), cmocka_unit_test(test_cut_short),
          cmocka_unit_test(test_bit_flips), cmocka_unit_test(test_gguf_refusals),
          cmocka_unit_test(test_settings))
