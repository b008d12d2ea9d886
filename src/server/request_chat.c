/* request_chat.c - see request.h: conversations. Messages are checked and brought into the
 * form that chat templates read: contents are strings, arguments of calls are objects, a
 * null content is empty. What a template would not look at, because this server does not
 * take it (images, audio), is refused by name. */
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "server/request.h"
#include "server/told_tools.h"

enum { MOST_MESSAGES = 65536, MOST_TOOLS = 128 };

/* ---- Contents ------------------------------------------------------------ */

/* The texts of a list of parts, a line break between two. */
static still_status join_parts(const json_t *parts, size_t at, json_t **out,
                               still_error *err)
{
    size_t i;
    const json_t *part;
    sti_buf text = {0};
    json_array_foreach(parts, i, part)
    {
        const char *type = json_string_value(srv_field_of(part, "type"));
        const json_t *words = srv_field_of(part, "text");
        if (type && strcmp(type, "text") == 0 && json_is_string(words)) {
            if (i) sti_buf_puts(&text, "\n");
            sti_buf_put(&text, json_string_value(words), json_string_length(words));
            continue;
        }
        sti_buf_free(&text);
        if (type && strcmp(type, "text") != 0)
            return sti_fail(
                err, STILL_E_UNSUPPORTED,
                "'messages[%zu].content[%zu]' is of type '%.40s': only text "
                "is implemented",
                at, i, type);
        return sti_fail(err, STILL_E_ARG,
                        "'messages[%zu].content[%zu]' must be {\"type\": \"text\", "
                        "\"text\": ...}",
                        at, i);
    }
    *out = text.failed ? NULL : json_stringn(text.n ? text.p : "", text.n);
    sti_buf_free(&text);
    return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
}

static still_status read_content(const json_t *message, size_t at, bool needed,
                                 json_t **out, still_error *err)
{
    const json_t *content = srv_field_of(message, "content");
    if (json_is_array(content)) return join_parts(content, at, out, err);
    if (json_is_string(content)) {
        *out = json_stringn(json_string_value(content), json_string_length(content));
        return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
    }
    if (content || needed)
        return sti_fail(err, STILL_E_ARG,
                        "'messages[%zu].content' must be a string or a list of text "
                        "parts",
                        at);
    *out = json_string("");
    return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
}

/* ---- Calls that the assistant made --------------------------------------- */

/* Clients send arguments as text, templates want the object. */
static still_status read_arguments(json_t *value, size_t at, size_t i, json_t **out,
                                   still_error *err)
{
    const char *text = json_string_value(value);
    if (json_is_object(value)) {
        *out = json_incref(value);
        return STILL_OK;
    }
    if (text && *text == 0) text = "{}";
    if (!text || sti_json_read("arguments", text, strlen(text),
                               STI_JSON_OBJECT | STI_JSON_NUL, out, err))
        return sti_fail(
            err, STILL_E_ARG,
            "'messages[%zu].tool_calls[%zu].function.arguments' must be the "
            "text of a JSON object",
            at, i);
    return STILL_OK;
}

static still_status read_call(const json_t *call, size_t at, size_t i, json_t **list,
                              still_error *err)
{
    const json_t *function = srv_field_of(call, "function");
    const json_t *name = srv_field_of(function, "name"), *id = srv_field_of(call, "id");
    const json_t *type = srv_field_of(call, "type");
    json_t *arguments;
    if (!json_is_string(name) || (id && !json_is_string(id)) ||
        (type &&
         strcmp(json_is_string(type) ? json_string_value(type) : "", "function") != 0))
        return sti_fail(
            err, STILL_E_ARG,
            "'messages[%zu].tool_calls[%zu]' must be {\"id\": ..., \"type\": "
            "\"function\", \"function\": {\"name\": ..., \"arguments\": ...}}",
            at, i);
    STI_TRY(
        read_arguments(srv_field_of(function, "arguments"), at, i, &arguments, err));
    json_t *copy = json_pack("{s:s, s:{s:s, s:o}}", "type", "function", "function",
                             "name", json_string_value(name), "arguments", arguments);
    if (id) sti_json_set(&copy, "id", json_string(json_string_value(id)));
    sti_json_append(list, copy);
    return STILL_OK;
}

static still_status read_calls(const json_t *calls, size_t at, json_t **out,
                               still_error *err)
{
    size_t i;
    const json_t *call;
    json_t *list = json_array();
    if (!json_is_array(calls)) {
        json_decref(list);
        return sti_fail(err, STILL_E_ARG, "'messages[%zu].tool_calls' must be a list",
                        at);
    }
    json_array_foreach(calls, i, call)
    {
        still_status status = read_call(call, at, i, &list, err);
        if (status != STILL_OK) {
            json_decref(list);
            return status;
        }
    }
    *out = list;
    return list ? STILL_OK : sti_fail_memory(err, "tool_calls", 0);
}

/* ---- Messages ------------------------------------------------------------ */

static bool is_role(const char *role)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant",
                                        "tool"};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (role && strcmp(role, roles[i]) == 0) return true;
    return false;
}

/* Members of a message other than role, content and tool_calls: texts that templates
 * read, and what answers have that clients send back. */
static still_status read_extra(const json_t *message, size_t at, json_t **out,
                               still_error *err)
{
    static const char *const texts[] = {"name", "tool_call_id", "reasoning_content"};
    static const char *const read[] = {"role", "content", "tool_calls"};
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)message, name, v)
    {
        bool known = json_is_null(v);
        for (size_t i = 0; i < sizeof read / sizeof *read; i++)
            known = known || strcmp(name, read[i]) == 0;
        for (size_t i = 0; i < sizeof texts / sizeof *texts && !known; i++) {
            if (strcmp(name, texts[i]) != 0) continue;
            if (!json_is_string(v))
                return sti_fail(err, STILL_E_ARG, "'messages[%zu].%s' must be a string",
                                at, name);
            sti_json_set(out, name,
                         json_stringn(json_string_value(v), json_string_length(v)));
            known = true;
        }
        if (strcmp(name, "annotations") == 0 && json_array_size(v) == 0) known = true;
        if (strcmp(name, "type") == 0)
            known = true; /* "text", "message": says nothing */
        if (!known)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "'messages[%zu].%.60s' is not implemented", at, name);
    }
    return STILL_OK;
}

static still_status read_message(const json_t *message, size_t at, bool developer,
                                 json_t **out, still_error *err)
{
    const char *role = json_string_value(srv_field_of(message, "role"));
    const json_t *calls = srv_field_of(message, "tool_calls");
    json_t *content, *list;
    *out = NULL;
    if (!json_is_object(message) || !is_role(role))
        return sti_fail(err, STILL_E_ARG,
                        "'messages[%zu]' must have the role system, developer, user, "
                        "assistant or tool",
                        at);
    bool assistant = strcmp(role, "assistant") == 0;
    if (calls && !assistant)
        return sti_fail(err, STILL_E_ARG,
                        "'messages[%zu].tool_calls': only the assistant calls tools",
                        at);
    if (!developer && strcmp(role, "developer") == 0) role = "system";
    STI_TRY(read_content(message, at, !assistant, &content, err));
    *out = json_pack("{s:s, s:o}", "role", role, "content", content);
    STI_TRY(read_extra(message, at, out, err));
    if (json_array_size(calls) == 0 && (!calls || json_is_array(calls)))
        return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
    STI_TRY(read_calls(calls, at, &list, err));
    sti_json_set(out, "tool_calls", list);
    return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
}

static still_status read_messages(const json_t *value, bool developer, json_t **out,
                                  still_error *err)
{
    size_t i;
    const json_t *message;
    json_t *one;
    size_t n = json_array_size(value);
    if (!json_is_array(value) || n == 0 || n > MOST_MESSAGES)
        return sti_fail(err, STILL_E_ARG,
                        "'messages' must be a list of 1 to %d messages", MOST_MESSAGES);
    *out = json_array();
    json_array_foreach(value, i, message)
    {
        still_status status = read_message(message, i, developer, &one, err);
        if (status != STILL_OK) {
            json_decref(one);
            return status;
        }
        sti_json_append(out, one);
    }
    return *out ? STILL_OK : sti_fail_memory(err, "messages", 0);
}

/* ---- The body ------------------------------------------------------------ */

static still_status read_tools(const json_t *value, still_error *err)
{
    size_t i;
    const json_t *tool;
    if (!json_is_array(value) || json_array_size(value) > MOST_TOOLS)
        return sti_fail(err, STILL_E_ARG, "'tools' must be a list of at most %d",
                        MOST_TOOLS);
    json_array_foreach(value, i, tool)
    {
        const char *type = json_string_value(srv_field_of(tool, "type"));
        const json_t *function = srv_field_of(tool, "function");
        if (type && strcmp(type, "function") != 0)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "'tools[%zu]' is of type '%.40s': only function is "
                            "implemented",
                            i, type);
        if (!type || !json_is_string(srv_field_of(function, "name")))
            return sti_fail(
                err, STILL_E_ARG,
                "'tools[%zu]' must be {\"type\": \"function\", \"function\": "
                "{\"name\": ..., ...}}",
                i);
    }
    return STILL_OK;
}

static still_status read_logprobs(const json_t *body, int vocab, srv_options *o,
                                  still_error *err)
{
    const json_t *wanted = srv_field_of(body, "logprobs");
    const json_t *top = srv_field_of(body, "top_logprobs");
    json_int_t k = json_integer_value(top);
    if (wanted && !json_is_boolean(wanted))
        return sti_fail(err, STILL_E_ARG, "'logprobs' must be true or false");
    if (top && (!json_is_integer(top) || k < 0 || k > SRV_MOST_LOGPROBS))
        return sti_fail(err, STILL_E_ARG,
                        "'top_logprobs' must be a whole number from 0 to %d",
                        SRV_MOST_LOGPROBS);
    if (k > 0 && !json_is_true(wanted))
        return sti_fail(err, STILL_E_ARG, "'top_logprobs' needs 'logprobs': true");
    if (json_is_true(wanted)) o->logprobs = k > vocab ? vocab : (int)k;
    return STILL_OK;
}

/* *use: whether the model is told of the tools. */
static still_status read_choice(const json_t *tools, srv_chat *c, bool *use,
                                still_error *err)
{
    const json_t *choice = srv_field_of(c->body, "tool_choice"), *tool;
    const char *word = json_string_value(choice);
    const char *type = json_string_value(srv_field_of(choice, "type"));
    size_t i;
    *use = json_array_size(tools) > 0 && !(word && strcmp(word, "none") == 0);
    if (!choice || (word && (!strcmp(word, "auto") || !strcmp(word, "none"))))
        return STILL_OK;
    if (word ? strcmp(word, "required") != 0 : !type || strcmp(type, "function") != 0)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "'tool_choice': only these are implemented: \"auto\", \"none\", "
            "\"required\", {\"type\": \"function\", \"function\": "
            "{\"name\": ...}}");
    if (!*use)
        return sti_fail(err, STILL_E_ARG, "'tool_choice' demands a call: give 'tools'");
    if (c->options.form != SRV_FREE)
        return sti_fail(
            err, STILL_E_ARG,
            "'tool_choice' demands a call, which excludes 'response_format' "
            "and 'grammar'");
    c->demanded = true;
    if (word) return STILL_OK;
    c->function =
        json_string_value(srv_field_of(srv_field_of(choice, "function"), "name"));
    json_array_foreach(tools, i, tool)
    {
        const json_t *name = srv_field_of(srv_field_of(tool, "function"), "name");
        if (c->function && strcmp(json_string_value(name), c->function) == 0)
            return STILL_OK;
    }
    return sti_fail(err, STILL_E_ARG,
                    "'tool_choice' names no function that 'tools' has: '%.60s'",
                    c->function ? c->function : "");
}

/* Variables of the client first, so that they cannot stand in for messages and tools. */
static still_status read_variables(srv_chat *c, srv_places places, still_error *err)
{
    json_t *kwargs = srv_field_of(c->body, "chat_template_kwargs");
    json_t *tools = srv_field_of(c->body, "tools");
    json_t *messages = NULL;
    bool use;
    if (kwargs && !json_is_object(kwargs))
        return sti_fail(err, STILL_E_ARG, "'chat_template_kwargs' must be an object");
    if (tools) STI_TRY(read_tools(tools, err));
    STI_TRY(read_choice(tools, c, &use, err));
    c->variables = json_object();
    if (kwargs) sti_json_merge(&c->variables, json_incref(kwargs));
    still_status status = read_messages(srv_field_of(c->body, "messages"),
                                        places.developer, &messages, err);
    if (status == STILL_OK && !places.tools)
        status = srv_told_tools(use ? tools : NULL, &messages, err);
    if (status != STILL_OK) {
        json_decref(messages);
        return status;
    }
    sti_json_set(&c->variables, "messages", messages);
    if (use) {
        sti_json_set(&c->variables, "tools", json_incref(tools));
        c->tools = json_object_get(c->variables, "tools");
    } else if (c->variables) {
        json_object_del(c->variables, "tools");
    }
    return c->variables ? STILL_OK : sti_fail_memory(err, "messages", 0);
}

still_status srv_chat_read(const char *text, size_t n, int vocab, srv_places places,
                           const srv_options *defaults, srv_chat *out, still_error *err)
{
    *out = (srv_chat){.options = *defaults};
    STI_TRY(sti_json_read("the body", text ? text : "", n,
                          STI_JSON_OBJECT | STI_JSON_NUL | STI_JSON_ONCE, &out->body,
                          err));
    still_status status =
        srv_fields_read(out->body, SRV_CHAT, vocab, &out->options, err);
    if (status == STILL_OK)
        status = read_logprobs(out->body, vocab, &out->options, err);
    if (status == STILL_OK) status = read_variables(out, places, err);
    if (status != STILL_OK) srv_chat_free(out);
    return status;
}

void srv_chat_free(srv_chat *c)
{
    srv_options_free(&c->options);
    json_decref(c->variables);
    json_decref(c->body);
    *c = (srv_chat){0};
}
