/* Bodies of conversations: what templates get of good ones, what bad ones are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/request.h"

static srv_chat read_places(const char *text, srv_places places)
{
    srv_chat c;
    still_error e = {0};
    const srv_options plain = srv_plain_options();
    if (srv_chat_read(text, strlen(text), 100, places, &plain, &c, &e))
        fail_msg("%s", e.text);
    return c;
}

static srv_chat read_good(const char *text, bool developer)
{
    return read_places(text, (srv_places){.developer = developer, .tools = true});
}

/* The variables of a body, as text. */
static void becomes(const char *text, bool developer, const char *want)
{
    srv_chat c = read_good(text, developer);
    char *got = sti_json_text(c.variables, JSON_COMPACT);
    assert_non_null(got);
    assert_string_equal(got, want);
    free(got);
    srv_chat_free(&c);
}

static void messages(void **state)
{
    (void)state;
    becomes("{\"messages\":[{\"role\":\"user\",\"content\":\"hi\",\"name\":\"Ann\"}]}",
            false,
            "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\",\"name\":"
            "\"Ann\"}]}");
    /* Parts are joined; a null is nothing; developers are the system's voice. */
    becomes("{\"messages\":[{\"role\":\"developer\",\"content\":\"be brief\"},"
            "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
            "{\"type\":\"text\",\"text\":\"b\"}]},"
            "{\"role\":\"assistant\",\"content\":null,\"refusal\":null,"
            "\"annotations\":[],\"tool_calls\":null}]}",
            false,
            "{\"messages\":[{\"role\":\"system\",\"content\":\"be brief\"},"
            "{\"role\":\"user\",\"content\":\"a\\nb\"},"
            "{\"role\":\"assistant\",\"content\":\"\"}]}");
    becomes("{\"messages\":[{\"role\":\"developer\",\"content\":\"x\"}]}", true,
            "{\"messages\":[{\"role\":\"developer\",\"content\":\"x\"}]}");
    /* A client's variables do not stand in for messages. */
    becomes(
        "{\"chat_template_kwargs\":{\"thinking\":false,\"messages\":1,\"tools\":2},"
        "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        false,
        "{\"thinking\":false,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}");
}

static void calls(void **state)
{
    (void)state;
    becomes(
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{"
        "\"id\":\"abc\",\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"arguments\":\"{\\\"x\\\": [1]}\"}}]},{\"role\":\"tool\",\"tool_call_id\":"
        "\"abc\",\"content\":\"42\"}]}",
        false,
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{"
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":[1]}}"
        ",\"id\":\"abc\"}]},{\"role\":\"tool\",\"content\":\"42\",\"tool_call_id\":"
        "\"abc\"}]}");
    static const char tools[] =
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]";
    static const char say[] = "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]";
    char body[300];
    snprintf(body, sizeof body, "{%s,%s,\"tool_choice\":\"auto\"}", tools, say);
    srv_chat c = read_good(body, false);
    assert_int_equal(json_array_size(c.tools), 1);
    srv_chat_free(&c);
    snprintf(body, sizeof body, "{%s,%s,\"tool_choice\":\"none\"}", tools, say);
    c = read_good(body, false);
    assert_null(c.tools);
    assert_null(json_object_get(c.variables, "tools"));
    assert_false(c.demanded);
    srv_chat_free(&c);
    snprintf(body, sizeof body, "{%s,%s,\"tool_choice\":\"required\"}", tools, say);
    c = read_good(body, false);
    assert_true(c.demanded && !c.function && json_array_size(c.tools) == 1);
    srv_chat_free(&c);
    snprintf(body, sizeof body,
             "{%s,%s,\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":"
             "\"f\"}}}",
             tools, say);
    c = read_good(body, false);
    assert_true(c.demanded);
    assert_string_equal(c.function, "f");
    srv_chat_free(&c);
}

/* A template without a place for tools: messages say what they are. */
static void tools_are_told(void **state)
{
    (void)state;
    static const struct {
        const char *messages, *want;
    } is[] = {
        {"{\"role\":\"system\",\"content\":\"be brief\"},"
         "{\"role\":\"user\",\"content\":\"x\"}",
         "[[\"system\",\"be brief\\n\\nTOOLS\"],[\"user\",\"x\"]]"},
        {"{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":"
         "null,\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":\"f\","
         "\"arguments\":\"{\\\"y\\\":1}\"}},{\"function\":{\"name\":\"g\","
         "\"arguments\":\"\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"a\","
         "\"content\":\"4\"},{\"role\":\"tool\",\"content\":\"5\"}",
         "[[\"user\",\"TOOLS\\n\\nx\"],[\"assistant\",\"<tool_call>\\n{\\\"name\\\":"
         "\\\"f\\\",\\\"arguments\\\":{\\\"y\\\":1}}\\n</tool_call>\\n<tool_call>\\n"
         "{\\\"name\\\":\\\"g\\\",\\\"arguments\\\":{}}\\n</tool_call>\"],"
         "[\"user\",\"<tool_response>\\n4\\n</tool_response>\\n<tool_response>\\n5\\n"
         "</tool_response>\"]]"},
        {"{\"role\":\"assistant\",\"content\":\"a\"}",
         "[[\"user\",\"TOOLS\\n\\n\"],[\"assistant\",\"a\"]]"},
    };
    static const char told[] =
        "You can call these "
        "functions:\\n<tools>\\n{\\\"name\\\":\\\"f\\\"}\\n</tools>\\n"
        "To call one, write its name and arguments as "
        "JSON:\\n<tool_call>\\n{\\\"name\\\": "
        "NAME, \\\"arguments\\\": {...}}\\n</tool_call>";
    for (size_t i = 0; i < sizeof is / sizeof *is; i++)
        for (int with = 0; with < 2; with++) {
            char body[1024], want[2048] = "";
            snprintf(body, sizeof body, "{\"messages\":[%s]%s}", is[i].messages,
                     with ? ",\"tools\":[{\"type\":\"function\",\"function\":"
                            "{\"name\":\"f\"}}]"
                          : "");
            srv_chat c = read_places(body, (srv_places){0});
            json_t *pairs = json_array();
            const json_t *m;
            size_t j;
            json_array_foreach(json_object_get(c.variables, "messages"), j, m)
            {
                sti_json_append(&pairs, json_pack("[O, O]", json_object_get(m, "role"),
                                                  json_object_get(m, "content")));
                assert_null(json_object_get(m, "tool_calls"));
            }
            char *got = sti_json_text(pairs, JSON_COMPACT);
            const char *at = strstr(is[i].want, "TOOLS");
            if (with)
                snprintf(want, sizeof want, "%.*s%s%s", (int)(at - is[i].want),
                         is[i].want, told, at + 5);
            if (with)
                assert_string_equal(got, want);
            else
                assert_null(strstr(got, "<tools>"));
            free(got);
            json_decref(pairs);
            srv_chat_free(&c);
        }
}

static void options(void **state)
{
    (void)state;
    srv_chat c = read_good(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"logprobs\":true,"
        "\"top_logprobs\":3,\"max_completion_tokens\":9,\"store\":false,\"metadata\":{}"
        ","
        "\"response_format\":{\"type\":\"text\"},\"parallel_tool_calls\":false,"
        "\"reasoning_effort\":null,\"prompt_cache_retention\":\"24h\"}",
        false);
    assert_int_equal(c.options.logprobs, 3);
    assert_int_equal(c.options.max_tokens, 9);
    assert_false(c.options.parallel_calls);
    srv_chat_free(&c);
    c = read_good(
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"logprobs\":true}",
        false);
    assert_int_equal(c.options.logprobs, 0);
    assert_int_equal(c.options.form, SRV_FREE);
    srv_chat_free(&c);
    c = read_good("{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],"
                  "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{"
                  "\"name\":\"a\",\"strict\":true,\"schema\":{\"type\":\"null\"}}}}",
                  false);
    assert_int_equal(c.options.form, SRV_SCHEMA);
    assert_string_equal(json_string_value(json_object_get(c.options.rules, "type")),
                        "null");
    srv_chat_free(&c);
}

static void wrong(void **state)
{
    (void)state;
#define SAY "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"
#define TOOLS ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"
#define CALL(x) "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":" x "}]}"
    static const struct {
        const char *text;
        still_status code;
        const char *words;
    } bad[] = {
        {"{}", STILL_E_ARG, "'messages' must be a list of 1"},
        {"{\"messages\":[]}", STILL_E_ARG, "'messages' must be a list of 1"},
        {"{\"messages\":[1]}", STILL_E_ARG, "'messages[0]' must have the role"},
        {"{\"messages\":[{\"role\":\"king\",\"content\":\"x\"}]}", STILL_E_ARG, "role"},
        {"{\"messages\":[{\"role\":\"user\"}]}", STILL_E_ARG, "'messages[0].content'"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":3}]}", STILL_E_ARG, "content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
         STILL_E_UNSUPPORTED, "'messages[0].content[0]' is of type 'image_url'"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
         STILL_E_ARG, "content[0]"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"audio\":{}}]}",
         STILL_E_UNSUPPORTED, "'messages[0].audio'"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[{}]}]}",
         STILL_E_ARG, "only the assistant"},
        {CALL("3"), STILL_E_ARG, "tool_calls' must be a list"},
        {CALL("[{\"type\":\"function\"}]"), STILL_E_ARG, "tool_calls[0]'"},
        {CALL("[{\"function\":{\"name\":\"f\",\"arguments\":\"[1]\"}}]"), STILL_E_ARG,
         "arguments' must be"},
        {SAY ",\"tools\":{}}", STILL_E_ARG, "'tools' must be a list"},
        {SAY ",\"tools\":[{\"type\":\"custom\"}]}", STILL_E_UNSUPPORTED, "'custom'"},
        {SAY ",\"tools\":[{\"type\":\"function\"}]}", STILL_E_ARG, "'tools[0]'"},
        {SAY ",\"tool_choice\":\"required\"}", STILL_E_ARG, "give 'tools'"},
        {SAY ",\"tool_choice\":\"required\",\"tools\":[]}", STILL_E_ARG,
         "give 'tools'"},
        {SAY ",\"tool_choice\":\"must\"}", STILL_E_UNSUPPORTED, "'tool_choice'"},
        {SAY ",\"tool_choice\":3}", STILL_E_UNSUPPORTED, "'tool_choice'"},
        {SAY ",\"tool_choice\":{\"type\":\"allowed_tools\"}}", STILL_E_UNSUPPORTED,
         "'tool_choice'"},
        {SAY TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":"
                   "\"g\"}}}",
         STILL_E_ARG, "'tool_choice' names no function that 'tools' has: 'g'"},
        {SAY TOOLS ",\"tool_choice\":{\"type\":\"function\"}}", STILL_E_ARG,
         "'tool_choice' names no function"},
        {SAY TOOLS ",\"tool_choice\":\"required\",\"grammar\":\"x\"}", STILL_E_ARG,
         "excludes"},
        {SAY ",\"logprobs\":3}", STILL_E_ARG, "'logprobs'"},
        {SAY ",\"top_logprobs\":3}", STILL_E_ARG, "needs 'logprobs'"},
        {SAY ",\"logprobs\":true,\"top_logprobs\":21}", STILL_E_ARG, "0 to 20"},
        {SAY ",\"prompt\":\"x\"}", STILL_E_UNSUPPORTED, "'prompt'"},
        {SAY ",\"response_format\":{\"type\":\"json_schema\"}}", STILL_E_ARG,
         "json_schema.schema"},
        {SAY ",\"response_format\":{\"type\":\"json_object\",\"schema\":{}}}",
         STILL_E_UNSUPPORTED, "'response_format.schema'"},
        {SAY ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{"
             "\"schema\":{},\"x\":1}}}",
         STILL_E_UNSUPPORTED, "'response_format.json_schema.x'"},
        {SAY ",\"max_tokens\":3,\"max_completion_tokens\":4}", STILL_E_ARG,
         "'max_tokens' and 'max_completion_tokens'"},
        {SAY ",\"parallel_tool_calls\":0}", STILL_E_ARG, "'parallel_tool_calls'"},
        {SAY ",\"still\":{\"x\":1}}", STILL_E_UNSUPPORTED, "'still.x'"},
        {SAY ",\"stream\":true,\"stream_options\":{\"include_obfuscation\":true}}",
         STILL_E_UNSUPPORTED, "'stream_options.include_obfuscation'"},
        {SAY ",\"response_format\":{\"type\":\"xml\"}}", STILL_E_UNSUPPORTED, "'xml'"},
        {SAY ",\"response_format\":3}", STILL_E_ARG, "'response_format'"},
        {SAY ",\"grammar\":\"\"}", STILL_E_ARG, "'grammar' must be"},
        {SAY ",\"grammar\":\"x\",\"response_format\":{\"type\":\"json_object\"}}",
         STILL_E_ARG, "exclude each other"},
        {SAY ",\"store\":true}", STILL_E_UNSUPPORTED, "'store'"},
        {SAY ",\"functions\":[]}", STILL_E_UNSUPPORTED, "'functions'"},
        {SAY ",\"chat_template_kwargs\":3}", STILL_E_ARG, "chat_template_kwargs"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        srv_chat c;
        still_error e = {0};
        const srv_options plain = srv_plain_options();
        still_status got = srv_chat_read(bad[i].text, strlen(bad[i].text), 100,
                                         (srv_places){.tools = true}, &plain, &c, &e);
        if (got != bad[i].code || !strstr(e.text, bad[i].words))
            fail_msg("%s: %d, %s", bad[i].text, got, e.text);
        assert_null(c.body);
        assert_null(c.variables);
    }
}

RUN_TESTS(cmocka_unit_test(messages), cmocka_unit_test(calls),
          cmocka_unit_test(tools_are_told), cmocka_unit_test(options),
          cmocka_unit_test(wrong))
