/* Streaming decode: whole characters only, nothing lost, U+FFFD for what is broken. */
#include "../run.h"
#include "tokens.h"

#include "base/utf8.h"

static const char TEXT[] =
    "Wörter, 世界 und 🙂🙂 – the sky. \u2581 नमस्ते";

/* Whatever the vocabulary, each push hands out whole characters, and all of them. */
static void test_never_cuts_a_character(void **state)
{
    (void)state;
    static const char *const names[] = {VOCAB("smollm.json"), VOCAB("llama3.tiktoken"),
                                        VOCAB("spm.model"), VOCAB("metaspace.json")};
    for (size_t t = 0; t < sizeof names / sizeof *names; t++) {
        still_tokenizer *tk = open_tokenizer(names[t]);
        still_decoder *d;
        still_error err;
        size_t n, k, total = 0, held = 0;
        char out[2 * sizeof TEXT];
        const char *p;
        int32_t *ids = encode(tk, TEXT, sizeof TEXT - 1, 0, &n);
        assert_int_equal(still_decoder_new(tk, false, &d, &err), STILL_OK);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(still_decoder_push(d, ids[i], &p, &k, &err), STILL_OK);
            assert_int_equal(sti_utf8_span(p, k), k);
            assert_int_equal(p[k], 0);
            assert_true(total + k < sizeof out);
            memcpy(out + total, p, k);
            total += k;
            held += k == 0;
        }
        assert_true(held > 5); /* the text did come in parts of characters */
        still_decoder_flush(d, &p, &k);
        assert_int_equal(k, 0);
        if (strstr(names[t], "spm") || strstr(names[t], "metaspace")) {
            assert_int_equal(total, sizeof TEXT - 1 - 2); /* U+2581 came as a space */
        } else {
            assert_int_equal(total, sizeof TEXT - 1);
            assert_memory_equal(out, TEXT, total);
        }
        still_decoder_free(d);
        free(ids);
        still_tokenizer_free(tk);
    }
}

static int32_t byte_token(const still_tokenizer *tk, unsigned char byte)
{
    for (int32_t id = 0; id < still_tokenizer_vocab_size(tk); id++) {
        size_t n;
        const char *p = still_tokenizer_piece(tk, id, false, &n);
        if (n == 1 && (unsigned char)*p == byte) return id;
    }
    fail_msg("no token for byte %02x", byte);
    return -1;
}

static void check_bytes(const still_tokenizer *tk, const char *bytes, const char *want)
{
    int32_t ids[16];
    size_t n = strlen(bytes), len;
    for (size_t i = 0; i < n; i++) ids[i] = byte_token(tk, (unsigned char)bytes[i]);
    char *got = decode(tk, ids, n, false, &len);
    assert_string_equal(got, want);
    free(got);
}

static void test_broken_bytes(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("llama3.tiktoken"));
    check_bytes(tk, "a\xE2\x82\xAC", "a€");
    check_bytes(tk, "a\xE2\x82", "a\uFFFD");               /* flushed */
    check_bytes(tk, "\xE2\x82z", "\uFFFDz");               /* one broken character */
    check_bytes(tk, "\x80\xFFz", "\uFFFD\uFFFDz");         /* two broken bytes */
    check_bytes(tk, "\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"); /* a surrogate */
    still_tokenizer_free(tk);
    tk = open_tokenizer(VOCAB("spm.model"));
    check_bytes(tk, "\xE2\x82z", "\uFFFD\uFFFDz"); /* SentencePiece: byte by byte */
    still_tokenizer_free(tk);
}

static void test_special_tokens(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("spm.model"));
    size_t n, len;
    int32_t *ids = encode(tk, "<s>the sky</s>", 14, STILL_ENCODE_SPECIAL, &n);
    char *with = decode(tk, ids, n, true, &len),
         *without = decode(tk, ids, n, false, &len);
    assert_string_equal(with, "<s>the sky</s>");
    assert_string_equal(without, "the sky");
    free(with);
    free(without);
    free(ids);
    assert_string_equal(still_tokenizer_piece(tk, 1, false, &n), "");
    assert_int_equal(n, 0);
    assert_null(still_tokenizer_piece(tk, -1, true, &n));
    assert_null(still_tokenizer_piece(tk, still_tokenizer_vocab_size(tk), true, &n));
    still_decoder *d;
    still_error err;
    const char *p;
    assert_int_equal(still_decoder_new(tk, true, &d, &err), STILL_OK);
    assert_int_equal(still_decoder_push(d, 1 << 30, &p, &n, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "outside the vocabulary"));
    still_decoder_free(d);
    still_tokenizer_free(tk);
}

RUN_TESTS(cmocka_unit_test(test_never_cuts_a_character),
          cmocka_unit_test(test_broken_bytes), cmocka_unit_test(test_special_tokens))
