/* told_tools.c - see told_tools.h. Not every template takes a system message, or a user's
 * behind a user's, so tools are told in the message that is first anyway, and results that
 * follow one another are one message. */
#include "server/told_tools.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"

static bool has_role(const json_t *message, const char *role)
{
    const char *is = json_string_value(json_object_get(message, "role"));
    return is && strcmp(is, role) == 0;
}

static void put_content(sti_buf *b, const json_t *message)
{
    const json_t *content = json_object_get(message, "content");
    sti_buf_put(b, json_string_value(content), json_string_length(content));
}

static void put_json(sti_buf *b, const json_t *v)
{
    char *text = sti_json_text(v, JSON_COMPACT);
    sti_buf_puts(b, text ? text : "");
    b->failed = b->failed || !text;
    free(text);
}

static void put_tools(sti_buf *b, const json_t *tools)
{
    size_t i;
    const json_t *tool;
    sti_buf_puts(b, "You can call these functions:\n<tools>\n");
    json_array_foreach(tools, i, tool)
    {
        put_json(b, json_object_get(tool, "function"));
        sti_buf_puts(b, "\n");
    }
    sti_buf_puts(b,
                 "</tools>\nTo call one, write its name and arguments as JSON:\n"
                 "<tool_call>\n{\"name\": NAME, \"arguments\": {...}}\n</tool_call>");
}

/* The message with another content; the text is freed. */
static json_t *with_content(const json_t *message, sti_buf *text)
{
    json_t *copy = json_object();
    sti_json_merge(&copy, json_incref((json_t *)message));
    sti_json_set(&copy, "content",
                 text->failed ? NULL : json_stringn(text->n ? text->p : "", text->n));
    sti_buf_free(text);
    return copy;
}

static json_t *tell_first(const json_t *message, const json_t *tools)
{
    sti_buf text = {0};
    const bool behind = has_role(message, "system");
    if (behind) put_content(&text, message);
    if (behind) sti_buf_puts(&text, "\n\n");
    put_tools(&text, tools);
    if (!behind) sti_buf_puts(&text, "\n\n");
    if (!behind) put_content(&text, message);
    return with_content(message, &text);
}

static json_t *tell_calls(const json_t *message)
{
    size_t i;
    const json_t *call;
    sti_buf text = {0};
    put_content(&text, message);
    json_array_foreach(json_object_get(message, "tool_calls"), i, call)
    {
        if (text.n) sti_buf_puts(&text, "\n");
        sti_buf_puts(&text, SRV_TOLD_OPENING);
        put_json(&text, json_object_get(call, "function"));
        sti_buf_puts(&text, "\n</tool_call>");
    }
    json_t *copy = with_content(message, &text);
    if (copy) json_object_del(copy, "tool_calls");
    return copy;
}

/* Results of calls, from message *i on; *i is then the last of them. */
static json_t *tell_results(const json_t *messages, size_t *i)
{
    static const char open[] = "<tool_response>\n", end[] = "\n</tool_response>";
    sti_buf text = {0};
    json_t *user = json_pack("{s:s}", "role", "user");
    for (;; (*i)++) {
        if (text.n) sti_buf_puts(&text, "\n");
        sti_buf_puts(&text, open);
        put_content(&text, json_array_get(messages, *i));
        sti_buf_puts(&text, end);
        if (!has_role(json_array_get(messages, *i + 1), "tool")) break;
    }
    json_t *told = with_content(user, &text);
    json_decref(user);
    return told;
}

still_status srv_told_tools(const json_t *tools, json_t **messages, still_error *err)
{
    json_t *list = json_array(), *old = *messages;
    const json_t *first = json_array_get(old, 0);
    const bool into_first = has_role(first, "system") || has_role(first, "user");
    if (tools && !into_first) {
        json_t *none = json_pack("{s:s, s:s}", "role", "user", "content", "");
        sti_json_append(&list, tell_first(none, tools));
        json_decref(none);
    }
    for (size_t i = 0; i < json_array_size(old); i++) {
        json_t *m = json_array_get(old, i);
        if (tools && i == 0 && into_first)
            sti_json_append(&list, tell_first(m, tools));
        else if (json_object_get(m, "tool_calls"))
            sti_json_append(&list, tell_calls(m));
        else if (has_role(m, "tool"))
            sti_json_append(&list, tell_results(old, &i));
        else
            sti_json_append(&list, json_incref(m));
    }
    json_decref(old);
    *messages = list;
    return list ? STILL_OK : sti_fail_memory(err, "messages", 0);
}
