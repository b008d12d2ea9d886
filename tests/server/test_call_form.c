/* Calls that a request demands: how templates write calls, and the schema of one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/call_form.h"

#define P SRV_PROBE

static void forms(void **state)
{
    (void)state;
    static const struct {
        const char *opening, *rest; /* of a conversation with a call */
        int kind;                   /* -1: none is found */
        const char *before, *behind, *key;
    } all[] = {
        {"<|im_start|>assistant\n",
         "<tool_call>\n{\"name\": \"" P "\", \"arguments\": {\"a\": 1}}\n</tool_call>",
         SRV_CALL_OBJECT, "<tool_call>\n", "", "arguments"},
        {"x", "<tool_call>{\"name\":\"" P "\",\"arguments\":{}}</tool_call>",
         SRV_CALL_OBJECT, "<tool_call>", "", "arguments"},
        /* Another opening than that of an answer: with a mark it does not matter. */
        {"", "<tool_call> {\"name\":\"" P "\",\"arguments\":{}}", SRV_CALL_OBJECT,
         "<tool_call>", "", "arguments"},
        {"[/INST]",
         "[TOOL_CALLS] [{\"name\": \"" P "\", \"arguments\": {}, \"id\": \"1\"}]</s>",
         SRV_CALL_LIST, "[TOOL_CALLS]", "", "arguments"},
        {"[/INST]", "[TOOL_CALLS]" P "[ARGS]{}</s>", SRV_CALL_NAMED, "[TOOL_CALLS]",
         "[ARGS]", "arguments"},
        {"[/INST]", "[TOOL_CALLS]" P "[CALL_ID]000000000[ARGS]{}</s>", SRV_CALL_NAMED,
         "[TOOL_CALLS]", "[CALL_ID]000000000[ARGS]", "arguments"},
        {"assistant\n\n", "{\"name\": \"" P "\", \"parameters\": {}}<|eot_id|>",
         SRV_CALL_OBJECT, "", "", "parameters"},
        {"a", "<|python_tag|>{\"name\": \"" P "\", \"parameters\": {}}",
         SRV_CALL_OBJECT, "<|python_tag|>", "", "parameters"},
        /* The last place counts. */
        {"tools: {\"name\": \"" P "\"} a\n",
         "<tool_call>\n{\"name\": \"" P "\", \"arguments\": {}}", SRV_CALL_OBJECT,
         "<tool_call>\n", "", "arguments"},
        /* Nothing that is read back. */
        {"a", "", -1, NULL, NULL, NULL},
        {"a", P, -1, NULL, NULL, NULL},
        {"a", "<function=" P ">{}</function>", -1, NULL, NULL, NULL},
        {"a", "I call {\"name\": \"" P "\", \"parameters\": {}}", -1, NULL, NULL, NULL},
        {"", "{\"name\": \"" P "\", \"parameters\": {}}", -1, NULL, NULL, NULL},
        {"a", "<tool_call>[{\"name\": \"" P "\", \"arguments\": {}}]", -1, NULL, NULL,
         NULL},
        {"a", "<tool_call>\n{\"name\": \"" P "\", \"input\": {}}", -1, NULL, NULL,
         NULL},
        {"a", "<tool_call>{\"arguments\": {}, \"name\": \"" P "\"}", -1, NULL, NULL,
         NULL},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        srv_call_form f;
        sti_buf text = {0};
        sti_buf_puts(&text, all[i].opening);
        sti_buf_puts(&text, all[i].rest);
        /* In memory of its own size: reading beyond it is noticed. */
        char *exact = malloc(text.n ? text.n : 1);
        assert_non_null(exact);
        if (text.n) memcpy(exact, text.p, text.n);
        bool found = srv_call_form_read(exact, text.n, strlen(all[i].opening), &f);
        if (found != (all[i].kind >= 0)) fail_msg("%s: %d", text.p, found);
        if (found) {
            assert_int_equal((int)f.kind, all[i].kind);
            assert_string_equal(f.before, all[i].before);
            assert_string_equal(f.behind, all[i].behind);
            assert_string_equal(f.key, all[i].key);
        }
        free(exact);
        sti_buf_free(&text);
    }
}

static json_t *parse(const char *text)
{
    json_t *v;
    still_error e;
    if (sti_json_read("test", text, strlen(text), STI_JSON_ANY, &v, &e))
        fail_msg("%s: %s", text, e.text);
    return v;
}

static void becomes(const srv_call_form *f, const char *tools, const char *name,
                    const char *want)
{
    json_t *list = parse(tools), *schema, *wanted = parse(want);
    still_error e;
    if (srv_call_form_schema(f, list, name, &schema, &e)) fail_msg("%s", e.text);
    char *got = sti_json_text(schema, JSON_COMPACT);
    if (!json_equal(schema, wanted)) fail_msg("%s\nis not\n%s", got, want);
    free(got);
    json_decref(schema);
    json_decref(wanted);
    json_decref(list);
}

#define TOOL(name, rest) "{\"function\":{\"name\":\"" name "\"" rest "}}"
#define CALL(name, key, arguments)                                                     \
    "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"name\","      \
    "\"" key "\"],\"properties\":{\"name\":{\"const\":\"" name "\"},\"" key            \
    "\":" arguments "}}"
#define NONE "{\"type\":\"object\",\"additionalProperties\":false}"

static void schemas(void **state)
{
    (void)state;
    const srv_call_form object = {.kind = SRV_CALL_OBJECT, .key = "parameters"};
    const srv_call_form list = {.kind = SRV_CALL_LIST, .key = "arguments"};
    const srv_call_form named = {.kind = SRV_CALL_NAMED, .behind = "[ARGS]"};
    const char *two = "[" TOOL("f", "") "," TOOL("g", ",\"parameters\":{}") "]";
    becomes(&object, two, NULL,
            "{\"anyOf\":[" CALL("f", "parameters", NONE) "," CALL(
                "g", "parameters", "{\"type\":\"object\"}") "]}");
    becomes(&object, two, "f", "{\"anyOf\":[" CALL("f", "parameters", NONE) "]}");
    becomes(&list, two, "f",
            "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1,\"items\":{\"anyOf\":"
            "[" CALL("f", "arguments", NONE) "]}}");
    becomes(&named, two, "f", NONE);
    becomes(&named, "[" TOOL("f", "") "]", NULL, NONE);
    /* What refers to places in the parameters refers to them still; data is data, and a
     * property may have any name. */
#define SHARED(at)                                                                     \
    "{\"type\":\"object\",\"$defs\":{\"x\":{\"type\":\"null\"},\"enum\":{\"$ref\":"    \
    "\"#" at "/$defs/x\"}},\"properties\":{\"a\":{\"$ref\":\"#" at                     \
    "\"},\"b\":{\"const\":{\"$ref\":\"#\"}},\"$ref\":{\"items\":{\"$ref\":\"#" at      \
    "/$defs/x\"}},\"c\":{\"anyOf\":[{\"$ref\":\"other\"},{\"$ref\":\"#" at             \
    "/$defs/x\"}]}}}"
    const char *shared =
        "[" TOOL("f", "") "," TOOL("g", ",\"parameters\":" SHARED("")) "]";
    becomes(&object, shared, NULL,
            "{\"anyOf\":[" CALL("f", "parameters", NONE) "," CALL(
                "g", "parameters", SHARED("/anyOf/1/properties/parameters")) "]}");
    becomes(
        &list, shared, "g",
        "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1,\"items\":{\"anyOf\":[" CALL(
            "g", "arguments", SHARED("/items/anyOf/0/properties/arguments")) "]}}");
    becomes(&named, shared, "g", SHARED(""));
}

static void refused(const srv_call_form *f, const char *tools, const char *name,
                    still_status code, const char *words)
{
    json_t *list = parse(tools), *schema;
    still_error e;
    assert_int_equal(srv_call_form_schema(f, list, name, &schema, &e), code);
    if (!strstr(e.text, words)) fail_msg("%s", e.text);
    assert_null(schema);
    json_decref(list);
}

static void refusals(void **state)
{
    (void)state;
    const srv_call_form object = {.kind = SRV_CALL_OBJECT, .key = "arguments"};
    const srv_call_form named = {.kind = SRV_CALL_NAMED, .behind = "[ARGS]"};
    refused(&named, "[" TOOL("f", "") "," TOOL("g", "") "]", NULL, STILL_E_UNSUPPORTED,
            "'tool_choice'");
    refused(&named, "[" TOOL("a[ARGS]b", "") "]", NULL, STILL_E_ARG, "a[ARGS]b");
    static const char *const bad[] = {"3",
                                      "[]",
                                      "{\"type\":\"string\"}",
                                      "{\"type\":[\"object\"]}",
                                      "{\"$ref\":\"#\"}",
                                      "{\"anyOf\":[]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char tools[200];
        snprintf(tools, sizeof tools,
                 "[" TOOL("f", "") "," TOOL("g", ",\"parameters\":%s") "]", bad[i]);
        refused(&object, tools, NULL, STILL_E_UNSUPPORTED, "'tools[1].function");
        refused(&object, tools, "g", STILL_E_UNSUPPORTED, "'tools[1].function");
    }
}

RUN_TESTS(cmocka_unit_test(forms), cmocka_unit_test(schemas),
          cmocka_unit_test(refusals))
