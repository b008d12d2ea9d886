/* Chat templates: those that come with still, the model's own, what is refused, and that
 * content never becomes a special token. The language has tests in tests/template. */
#include "../run.h"
#include "tokens.h"

#include <stdio.h>

static const still_message TALK[] = {
    {"system", "S"}, {"user", "u"}, {"assistant", " a "}, {"user", "v"}};

static still_rendering render(const still_tokenizer *tk, const char *t,
                              const still_message *msg, size_t n, bool prompt)
{
    still_rendering r;
    still_error err = {0};
    const still_conversation c = {.size = sizeof c,
                                  .message = msg,
                                  .n_messages = n,
                                  .add_generation_prompt = prompt};
    if (still_chat_render(tk, t, &c, &r, &err)) fail_msg("%s", err.text);
    return r;
}

static void check(const still_tokenizer *tk, const char *t, const still_message *msg,
                  size_t n, bool prompt, const char *want)
{
    still_rendering r = render(tk, t, msg, n, prompt);
    assert_string_equal(r.text, want);
    assert_int_equal(r.n, strlen(want));
    still_rendering_free(&r);
}

static void test_named(void **state)
{
    (void)state;
    check(NULL, still_chat_template_named("chatml"), TALK, 2, true,
          "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
          "<|im_start|>assistant\n");
    check(NULL, still_chat_template_named("llama3"), TALK + 1, 2, false,
          "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>");
    check(NULL, still_chat_template_named("mistral"), TALK, 4, true,
          " [INST] S\n\nu [/INST] a [INST] v [/INST]");
    check(NULL, still_chat_template_named("gemma"), TALK, 2, true,
          "<start_of_turn>user\nS\n\nu<end_of_turn>\n<start_of_turn>model\n");
    check(NULL, still_chat_template_named("phi3"), TALK + 1, 1, true,
          "<|user|>\nu<|end|>\n<|assistant|>\n");
    assert_null(still_chat_template_named("nothing"));
    for (int i = 0; i < 5; i++) assert_non_null(still_chat_template_at(i));
    assert_null(still_chat_template_at(5));
    assert_null(still_chat_template_at(-1));
}

static void test_variables(void **state)
{
    (void)state;
    still_rendering r;
    still_error err;
    const still_conversation c = {
        .size = sizeof c,
        .variables = "{\"messages\": [{\"role\": \"user\", \"content\": [1]}], \"x\": "
                     "{\"a\": true}}"};
    assert_int_equal(
        still_chat_render(NULL, "{{ messages[0].content }}{{ x.a }}", &c, &r, &err),
        STILL_OK);
    assert_string_equal(r.text, "[1]True");
    still_rendering_free(&r);
}

static void test_refusals(void **state)
{
    (void)state;
    still_rendering r;
    still_error err;
    const still_message half[] = {{"user", NULL}};
    const still_conversation one = STILL_PARAMS(still_conversation, .message = TALK + 1,
                                                .n_messages = 1),
                             none = STILL_PARAMS(still_conversation, .message = TALK,
                                                 .n_messages = 0),
                             lacking = STILL_PARAMS(still_conversation, .message = half,
                                                    .n_messages = 1),
                             broken =
                                 STILL_PARAMS(still_conversation, .variables = "[");
    assert_int_equal(still_chat_render(NULL, NULL, &one, &r, &err),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no chat template"));
    assert_int_equal(still_chat_render(NULL, "x", &none, &r, &err), STILL_E_ARG);
    assert_int_equal(still_chat_render(NULL, "x", &lacking, &r, &err), STILL_E_ARG);
    assert_int_equal(still_chat_render(NULL, "x", &broken, &r, &err), STILL_E_FORMAT);
    assert_int_equal(
        still_chat_render(NULL, "\n {{ raise_exception('no ' + messages[0].role) }}",
                          &one, &r, &err),
        STILL_E_ARG);
    assert_string_equal(err.text, "chat template, line 2, column 5: no user");
    assert_null(r.text);
}

/* The text of the vocabulary's EOS, typed by a user between the template's own. */
static void check_injection(const char *vocabulary)
{
    still_tokenizer *tk = open_tokenizer(vocabulary);
    int32_t ids[256];
    size_t n, len;
    still_error err;
    const int32_t eos = still_tokenizer_eos(tk);
    assert_true(eos >= 0);
    const char *piece = still_tokenizer_piece(tk, eos, true, &len);
    char content[64];
    snprintf(content, sizeof content, "a %.*s b", (int)len, piece);
    const still_message m = {"user", content};
    still_rendering r =
        render(tk, "{{ messages[0].content + eos_token }}", &m, 1, false);
    assert_int_equal(r.n, 2 * len + 4);
    for (size_t i = 0; i < r.n; i++) assert_int_equal(r.content[i], i < len + 4);
    assert_int_equal(still_chat_encode(tk, &r, 0, ids, 256, &n, &err), STILL_OK);
    assert_true(n > 3 && n <= 256);
    for (size_t i = 0; i < n; i++) assert_true((ids[i] == eos) == (i + 1 == n));
    memset(r.content, 0, r.n); /* all the template's: both are the token */
    assert_int_equal(still_chat_encode(tk, &r, 0, ids, 256, &n, &err), STILL_OK);
    size_t found = 0;
    for (size_t i = 0; i < n; i++) found += ids[i] == eos;
    assert_int_equal(found, 2);
    /* Half of it typed, half of it the template's: still text. */
    r.content[r.n - 1] = 1;
    assert_int_equal(still_chat_encode(tk, &r, 0, ids, 256, &n, &err), STILL_OK);
    found = 0;
    for (size_t i = 0; i < n; i++) found += ids[i] == eos;
    assert_int_equal(found, 1);
    assert_int_equal(still_chat_encode(tk, &r, r.n, ids, 256, &n, &err), STILL_OK);
    assert_int_equal(n, 0);
    assert_int_equal(still_chat_encode(tk, &r, r.n + 1, ids, 256, &n, &err),
                     STILL_E_ARG);
    still_rendering_free(&r);
    still_tokenizer_free(tk);
}

static void test_injection(void **state)
{
    (void)state;
    check_injection(VOCAB("smollm.gguf")); /* byte-level */
    check_injection(VOCAB("spm.model"));   /* SentencePiece */
}

RUN_TESTS(cmocka_unit_test(test_named), cmocka_unit_test(test_variables),
          cmocka_unit_test(test_refusals), cmocka_unit_test(test_injection))
