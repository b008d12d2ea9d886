/* Every allocation of loading, encoding, decoding and rendering fails in turn: the call
 * reports it, and the sanitizers find nothing leaked or used. */
#include "tokens.h"

#include <stdio.h>

#include "token/tokenizer.h"

#include "../oom.h"

typedef struct input {
    const still_tokenizer *tk;
    const char *p;
    size_t n;
    const char *split;
} input;

/* Runs the action with its first, second, ... allocation failing until it succeeds. */
static void sweep(still_status (*action)(const input *in, still_error *err), input in,
                  int at_least)
{
    for (int i = 0;; i++) {
        still_error err = {0};
        countdown = i;
        still_status status = action(&in, &err);
        bool used_up = countdown < 0;
        countdown = -1;
        if (status == STILL_OK && !used_up) {
            if (i < at_least) fail_msg("only %d allocations, expected %d", i, at_least);
            return;
        }
        if (status != STILL_E_MEMORY || !err.text[0])
            fail_msg("allocation %d: status %d, \"%s\"", i, status, err.text);
        assert_true(i < 10000);
    }
}

static still_status load(const input *in, still_error *err)
{
    still_tokenizer *tk;
    const sti_tokenizer_hints hints = {.split = in->split};
    still_status st = sti_tokenizer_from_bytes(in->p, in->n, &hints, &tk, err);
    assert_true((st == STILL_OK) == (tk != NULL));
    still_tokenizer_free(tk);
    return st;
}

static still_status encode_decode(const input *in, still_error *err)
{
    static int32_t ids[4096];
    size_t count, n;
    still_decoder *d;
    const char *p;
    STI_TRY(still_tokenizer_encode(in->tk, in->p, in->n, 0, ids, 4096, &count, err));
    assert_true(count && count < 4096);
    STI_TRY(still_decoder_new(in->tk, false, &d, err));
    still_status st = STILL_OK;
    for (size_t i = 0; i < count && st == STILL_OK; i++)
        st = still_decoder_push(d, ids[i], &p, &n, err);
    still_decoder_free(d);
    return st;
}

static still_status render(const input *in, still_error *err)
{
    still_rendering r;
    const still_message m = {"user", in->p};
    const still_conversation c = {.size = sizeof c, .message = &m, .n_messages = 1};
    still_status st =
        still_chat_render(NULL, still_chat_template_named("mistral"), &c, &r, err);
    assert_true((st == STILL_OK) == (r.text != NULL));
    still_rendering_free(&r);
    return st;
}

static void sweep_file(const char *path, int at_least)
{
    static char bytes[1 << 16];
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    const char *split = strstr(path, ".tiktoken") ? "qwen2" : NULL;
    sweep(load, (input){NULL, bytes, n, split}, at_least);
}

static void test_loading(void **state)
{
    (void)state;
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},"
        "\"merges\":[\"a b\"]},\"pre_tokenizer\":{\"type\":\"ByteLevel\"},"
        "\"added_tokens\":[{\"id\":3,\"content\":\"<x>\",\"special\":true,"
        "\"lstrip\":true}]}";
    sweep_file(VOCAB("spm-nobytes.model"), 20);
    sweep_file(VOCAB("llama3.tiktoken"), 10);
    sweep(load, (input){NULL, json, sizeof json - 1, NULL}, 10);
}

static void test_using(void **state)
{
    (void)state;
    static const char *const names[] = {VOCAB("smollm.json"), VOCAB("spm.model")};
    char text[601] = ""; /* words, then a long one for the heap */
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = i < 300 ? "the "[i % 4] : "thesky"[i % 6];
    for (size_t i = 0; i < 2; i++) {
        still_tokenizer *tk = open_tokenizer(names[i]);
        sweep(encode_decode, (input){tk, text, strlen(text), NULL}, 5);
        still_tokenizer_free(tk);
    }
    sweep(render, (input){NULL, text, strlen(text), NULL}, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loading),
        cmocka_unit_test(test_using),
    };
    json_set_alloc_funcs(__wrap_malloc, free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
