/* Calls in what a model writes, and stop strings: the same result however the text is cut
 * into pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/stop.h"
#include "server/tool_calls.h"

static json_t *tools(void)
{
    json_t *t =
        json_pack("[{s:s, s:{s:s}}, {s:s, s:{s:s}}]", "type", "function", "function",
                  "name", "sum", "type", "function", "function", "name", "now");
    assert_non_null(t);
    return t;
}

/* Content, then each call as name(arguments). */
static void read_in(const char *text, size_t piece, bool one, sti_buf *out)
{
    json_t *known = tools();
    srv_calls p = {.tools = known, .one = one};
    size_t n = strlen(text);
    for (size_t at = 0; at < n; at += piece)
        srv_calls_push(&p, text + at, n - at < piece ? n - at : piece, out);
    srv_calls_end(&p, out);
    sti_buf_puts(out, "|");
    for (int i = 0; i < p.n; i++)
        sti_buf_printf(out, "%s(%s)", p.call[i].name, p.call[i].arguments);
    assert_false(p.failed || out->failed);
    srv_calls_free(&p);
    json_decref(known);
}

static void becomes_if(bool one, const char *text, const char *want)
{
    size_t n = strlen(text) ? strlen(text) : 1;
    for (size_t piece = 1; piece <= n; piece++) {
        sti_buf out = {0};
        read_in(text, piece, one, &out);
        if (strcmp(out.p, want) != 0)
            fail_msg("'%s' in pieces of %zu: '%s', not '%s'", text, piece, out.p, want);
        sti_buf_free(&out);
    }
}

static void becomes(const char *text, const char *want)
{
    becomes_if(false, text, want);
}

#define SUM "{\"name\":\"sum\",\"arguments\":{\"x\":[1,2]}}"

static void hermes(void **state)
{
    (void)state;
    becomes("<tool_call>\n" SUM "\n</tool_call>", "|sum({\"x\":[1,2]})");
    becomes("Let me see.\n\n<tool_call>" SUM
            "</tool_call>\n<tool_call>{\"name\": \"now\", "
            "\"arguments\": {}}</tool_call>\n",
            "Let me see.|sum({\"x\":[1,2]})now({})");
    becomes("<tool_call>" SUM "</tool_call> done.", " done.|sum({\"x\":[1,2]})");
    becomes("<tool_call>{\"name\":\"sum\",\"arguments\":{\"x\":\"</tool_call>\"}}"
            "</tool_call>",
            "|sum({\"x\":\"</tool_call>\"})");
    becomes("<tool_call>" SUM, "|sum({\"x\":[1,2]})"); /* without its end */
    becomes("<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}</tool_call>",
            "|f({\"a\":1})");
    /* What is none stays text, byte for byte. */
    becomes("a <tool_call>no json</tool_call> b",
            "a <tool_call>no json</tool_call> b|");
    becomes("a <tool_call>{\"name\":3}</tool_call>",
            "a <tool_call>{\"name\":3}</tool_call>|");
    becomes("a < b, <tool, <tool_cal", "a < b, <tool, <tool_cal|");
    becomes(" space around \n", " space around \n|");
    becomes("", "|");
}

static void mistral(void **state)
{
    (void)state;
    becomes("[TOOL_CALLS][" SUM "]", "|sum({\"x\":[1,2]})");
    becomes("Yes. [TOOL_CALLS] [" SUM ", {\"name\":\"now\",\"arguments\":{}}]\n",
            "Yes.|sum({\"x\":[1,2]})now({})");
    becomes("[TOOL_CALLS]sum[ARGS]{\"x\": 1}", "|sum({\"x\":1})");
    becomes("[TOOL_CALLS]sum[CALL_ID]abcdefghi[ARGS]{\"x\": 1}[TOOL_CALLS]now[ARGS]{}",
            "|sum({\"x\":1})now({})");
    becomes("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing|");
    becomes("[TOOL_CALLS][]", "[TOOL_CALLS][]|");
}

static void llama(void **state)
{
    (void)state;
    becomes("{\"name\": \"sum\", \"parameters\": {\"x\": 1}}", "|sum({\"x\":1})");
    becomes(
        "\n{\"name\":\"sum\",\"parameters\":{}}; {\"name\":\"now\",\"parameters\":{}}",
        "|sum({})now({})");
    becomes("<|python_tag|>{\"name\": \"sum\", \"parameters\": {}}", "|sum({})");
    /* JSON that calls nothing we have is an answer. */
    becomes("{\"name\": \"Ann\", \"parameters\": {}}",
            "{\"name\": \"Ann\", \"parameters\": {}}|");
    becomes("{\"a\": 1}", "{\"a\": 1}|");
    becomes("{not json", "{not json|");
    becomes("<|python_tag|>print(1)", "<|python_tag|>print(1)|");
}

/* The text is over with its first call, in whatever form it is. */
static void one_call(void **state)
{
    (void)state;
    becomes_if(true,
               "Well. <tool_call>" SUM "</tool_call><tool_call>" SUM "</tool_call> x",
               "Well.|sum({\"x\":[1,2]})");
    becomes_if(true, "<tool_call>" SUM SUM "</tool_call>", "|sum({\"x\":[1,2]})");
    becomes_if(true, "[TOOL_CALLS][" SUM "," SUM "]", "|sum({\"x\":[1,2]})");
    becomes_if(true, "[TOOL_CALLS]sum[ARGS]{}[TOOL_CALLS]now[ARGS]{}", "|sum({})");
    becomes_if(true, "{\"name\":\"sum\",\"parameters\":{}};" SUM, "|sum({})");
    becomes_if(true, "<tool_call>none</tool_call> x", "<tool_call>none</tool_call> x|");
}

static void ids(void **state)
{
    (void)state;
    char id[SRV_CALL_ID + 1];
    for (uint64_t i = 0; i < 100; i++) {
        srv_call_id(i * 0x9e3779b97f4a7c15u, id);
        assert_int_equal(strlen(id), 9);
        assert_int_equal(strspn(id, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                    "abcdefghijklmnopqrstuvwxyz"),
                         9);
    }
    assert_true(srv_calls_mark("[TOOL_CALLS]", 12));
    assert_true(srv_calls_mark("</tool_call>", 12));
    assert_false(srv_calls_mark("<|im_end|>", 10));
}

static void stops_in(const char *text, size_t piece, const srv_stop_text *stop, int n,
                     const char *want, bool found)
{
    sti_buf out = {0};
    srv_stops s = {.stop = stop, .n = n};
    bool more = true;
    for (size_t at = 0, len = strlen(text); at < len && more; at += piece)
        more = srv_stops_push(&s, text + at, len - at < piece ? len - at : piece, &out);
    srv_stops_end(&s, &out);
    assert_int_equal(!more, found);
    assert_int_equal(out.n, strlen(want));
    assert_memory_equal(out.n ? out.p : "", want, out.n);
    srv_stops_free(&s);
    sti_buf_free(&out);
}

static void stops(void **state)
{
    (void)state;
    static const srv_stop_text two[] = {{"END", 3}, {"\n\n", 2}};
    for (size_t piece = 1; piece < 12; piece++) {
        stops_in("abcENDdef", piece, two, 2, "abc", true);
        stops_in("a\nb\n\nEND", piece, two, 2, "a\nb", true);
        stops_in("EN", piece, two, 2, "EN", false);
        stops_in("EEENEND", piece, two, 2, "EEEN", true);
        stops_in("END", piece, two, 2, "", true);
        stops_in("abcEND", piece, NULL, 0, "abcEND", false);
        stops_in("", piece, two, 2, "", false);
    }
    /* Nothing that may be taken back is released. */
    srv_stops s = {.stop = two, .n = 2};
    sti_buf out = {0};
    assert_true(srv_stops_push(&s, "abEN", 4, &out));
    assert_int_equal(out.n, 2);
    srv_stops_free(&s);
    sti_buf_free(&out);
}

RUN_TESTS(cmocka_unit_test(hermes), cmocka_unit_test(mistral), cmocka_unit_test(llama),
          cmocka_unit_test(one_call), cmocka_unit_test(ids), cmocka_unit_test(stops))
