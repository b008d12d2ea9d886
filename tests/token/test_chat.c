/* Chat templates: the golden conversations run in the self-test; here are default
 * system prompts, the variations of a family, and what is refused. */
#include "../run.h"
#include "tokens.h"

static const char CHATML[] =
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}";
static const char QWEN[] =
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- messages[0]['content'] }}{%- "
    "else %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- else "
    "%}"
    "{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}";
static const char MISTRAL_V1[] =
    "{{ bos_token }}{{ '[INST] ' + message['content'] + ' "
    "[/INST]' }}{{ message['content'] + eos_token + ' ' }}";
static const char MISTRAL_V3[] = "{%- if loop.last and system_message is defined %}"
                                 "{{- \"[INST] \" + system_message + \"\\n\\n\" + "
                                 "message[\"content\"] + \"[/INST]\" }}"
                                 "{{- \" \" + message[\"content\"]|trim + eos_token}}";
static const char LLAMA31[] =
    "{%- set date_string = \"26 Jul 2024\" %}{{- \"<|start_header_id|>system\" }}"
    "{{- \"Cutting Knowledge Date: December 2023\\n\" }}";

static void check(const char *t, const still_message *msg, size_t n, bool prompt,
                  const char *want)
{
    char *got;
    still_error err = {0};
    if (still_chat_render(t, msg, n, prompt, &got, &err)) fail_msg("%s", err.text);
    assert_string_equal(got, want);
    free(got);
}

static const still_message TALK[] = {
    {"system", "S"}, {"user", "u"}, {"assistant", " a "}, {"user", "v"}};

static void test_default_system(void **state)
{
    (void)state;
    check(CHATML, TALK + 1, 1, true,
          "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n");
    check(QWEN, TALK + 1, 1, false,
          "<|im_start|>system\nYou are "
          "helpful.<|im_end|>\n<|im_start|>user\nu<|im_end|>\n");
    check(QWEN, TALK, 2, false,
          "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nu<|im_end|>\n");
    still_tokenizer *tk = open_tokenizer(VOCAB("smollm.gguf"));
    check(still_tokenizer_chat_template(tk), TALK + 1, 1, false,
          "<|im_start|>system\nBe still.<|im_end|>\n<|im_start|>user\nu<|im_end|>\n");
    still_tokenizer_free(tk);
}

static void test_mistral(void **state)
{
    (void)state;
    check(MISTRAL_V1, TALK + 1, 3, true, "<s>[INST] u [/INST] a </s> [INST] v [/INST]");
    check(MISTRAL_V3, TALK, 4, true, "<s>[INST] u[/INST] a</s>[INST] S\n\nv[/INST]");
    char *out;
    still_error err;
    assert_int_equal(still_chat_render(MISTRAL_V1, TALK, 4, true, &out, &err),
                     STILL_E_ARG);
    assert_non_null(strstr(err.text, "system"));
    const still_message twice[] = {{"user", "a"}, {"user", "b"}};
    assert_int_equal(still_chat_render(MISTRAL_V3, twice, 2, true, &out, &err),
                     STILL_E_ARG);
    assert_non_null(strstr(err.text, "message 1 is from 'user', expected 'assistant'"));
    assert_null(out);
    assert_int_equal(still_chat_render(MISTRAL_V3, TALK, 1, true, &out, &err),
                     STILL_E_ARG);
}

static void test_llama3(void **state)
{
    (void)state;
    const still_message spaced[] = {{"user", "\u3000\t x y\u00a0\n"}};
    check("<|start_header_id|>", spaced, 1, false,
          "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx y<|eot_id|>");
    check(LLAMA31, TALK, 2, false,
          "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting "
          "Knowledge "
          "Date: December 2023\nToday Date: 26 Jul 2024\n\nS<|eot_id|>"
          "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>");
}

static void test_refusals(void **state)
{
    (void)state;
    char *out;
    still_error err;
    const still_message odd[] = {{"tool", "x"}}, half[] = {{"user", NULL}};
    assert_int_equal(still_chat_render(NULL, TALK, 2, true, &out, &err),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no chat template"));
    assert_int_equal(still_chat_render("{{ x }}", TALK, 2, true, &out, &err),
                     STILL_E_UNSUPPORTED);
    assert_int_equal(still_chat_render(CHATML, odd, 1, true, &out, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "'tool'"));
    assert_int_equal(still_chat_render(CHATML, half, 1, true, &out, &err), STILL_E_ARG);
    assert_int_equal(still_chat_render(CHATML, TALK, 0, true, &out, &err), STILL_E_ARG);
    assert_null(out);
    assert_int_equal(still_chat_format_of("[INST] <<SYS>>"), STILL_CHAT_NONE);
    assert_int_equal(still_chat_format_of("[INST]"), STILL_CHAT_MISTRAL);
    assert_string_equal(still_chat_format_name(STILL_CHAT_LLAMA3), "llama3");
}

RUN_TESTS(cmocka_unit_test(test_default_system), cmocka_unit_test(test_mistral),
          cmocka_unit_test(test_llama3), cmocka_unit_test(test_refusals))
