/* call_form.c - see call_form.h: first how a template writes calls, then the schema. */
#include "server/call_form.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "server/tool_calls.h"

/* ---- How a template writes a call ---------------------------------------- */

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* Steps back over space, and then over a word if it stands there. */
static bool step_back(const char *text, size_t *at, const char *word)
{
    size_t end = *at, n = strlen(word);
    while (end > 0 && is_space(text[end - 1])) end--;
    if (end < n || memcmp(text + end - n, word, n) != 0) return false;
    *at = end - n;
    return true;
}

static bool step(const char *text, size_t n, size_t *at, const char *word)
{
    size_t i = *at, length = strlen(word);
    while (i < n && is_space(text[i])) i++;
    if (n - i < length || memcmp(text + i, word, length) != 0) return false;
    *at = i + length;
    return true;
}

/* The last place of the name: a template may also speak of tools before it. */
static size_t find_last(const char *text, size_t n)
{
    size_t at = n;
    const char *from = text, *hit;
    while ((hit = memmem(from, n - (size_t)(from - text), SRV_PROBE,
                         sizeof SRV_PROBE - 1))) {
        at = (size_t)(hit - text);
        from = hit + 1;
    }
    return at;
}

/* The mark that ends before `start`, with the space between them if that has a line break:
 * a single space belongs to the first token of what follows. */
static bool take_mark(const char *text, size_t start, srv_call_form *out)
{
    size_t end = start, most = sizeof out->before - 1;
    while (end > 0 && is_space(text[end - 1])) end--;
    size_t mark = srv_calls_opening(text, end);
    bool line = memchr(text + end, '\n', start - end) != NULL;
    size_t n = mark + (line ? start - end : 0);
    if (mark == 0 || n > most) return false;
    memcpy(out->before, text + end - mark, n);
    out->before[n] = 0;
    return true;
}

/* [TOOL_CALLS]name[ARGS]{ */
static bool read_named(const char *text, size_t n, size_t name, srv_call_form *out)
{
    size_t from = name + sizeof SRV_PROBE - 1;
    const char *brace = memchr(text + from, '{', n - from);
    if (!brace || (size_t)(brace - text) - from >= sizeof out->behind) return false;
    out->kind = SRV_CALL_NAMED;
    memcpy(out->behind, text + from, (size_t)(brace - text) - from);
    out->behind[(size_t)(brace - text) - from] = 0;
    return take_mark(text, name, out);
}

/* {"name": "NAME", "arguments": */
static bool read_object(const char *text, size_t n, size_t opening, size_t name,
                        srv_call_form *out)
{
    size_t start = name, at = name + sizeof SRV_PROBE - 1;
    if (!step_back(text, &start, "\"") || !step_back(text, &start, ":") ||
        !step_back(text, &start, "\"name\"") || !step_back(text, &start, "{"))
        return false;
    if (!step(text, n, &at, "\"") || !step(text, n, &at, ",")) return false;
    if (step(text, n, &at, "\"arguments\""))
        out->key = "arguments";
    else if (step(text, n, &at, "\"parameters\""))
        out->key = "parameters";
    else
        return false;
    out->kind = step_back(text, &start, "[") ? SRV_CALL_LIST : SRV_CALL_OBJECT;
    if (take_mark(text, start, out)) return true;
    while (start > opening && is_space(text[start - 1])) start--;
    return opening > 0 && start == opening; /* no mark: it is the whole answer */
}

/* Whether a call in this form is read back as one. */
static bool reads_back(const srv_call_form *f)
{
    sti_buf text = {0}, content = {0};
    json_t *tools = json_pack("[{s:{s:s}}]", "function", "name", SRV_PROBE);
    srv_calls p = {.tools = tools};
    srv_call_form_open(f, SRV_PROBE, &text);
    if (f->kind == SRV_CALL_NAMED)
        sti_buf_puts(&text, "{}");
    else
        sti_buf_printf(&text,
                       f->kind == SRV_CALL_LIST ? "[{\"name\":\"%s\",\"%s\":{}}]"
                                                : "{\"name\":\"%s\",\"%s\":{}}",
                       SRV_PROBE, f->key);
    if (tools && !text.failed) srv_calls_push(&p, text.p, text.n, &content);
    srv_calls_end(&p, &content);
    bool good = p.n == 1 && content.n == 0 && !strcmp(p.call[0].name, SRV_PROBE);
    srv_calls_free(&p);
    json_decref(tools);
    sti_buf_free(&text);
    sti_buf_free(&content);
    return good;
}

bool srv_call_form_read(const char *text, size_t n, size_t opening, srv_call_form *out)
{
    size_t name = find_last(text, n);
    *out = (srv_call_form){.key = "arguments"};
    if (name == n) return false;
    return (read_object(text, n, opening, name, out) ||
            read_named(text, n, name, out)) &&
           reads_back(out);
}

void srv_call_form_open(const srv_call_form *f, const char *name, sti_buf *out)
{
    sti_buf_puts(out, f->before);
    if (f->kind != SRV_CALL_NAMED) return;
    sti_buf_puts(out, name);
    sti_buf_puts(out, f->behind);
}

/* ---- The schema ---------------------------------------------------------- */

static const char *name_of(const json_t *tool)
{
    return json_string_value(
        json_object_get(json_object_get(tool, "function"), "name"));
}

/* Members of a schema that are data, and members whose own members are names. */
static bool is_data(const char *key)
{
    return !strcmp(key, "const") || !strcmp(key, "enum") || !strcmp(key, "default") ||
           !strcmp(key, "examples");
}

static bool is_map(const char *key)
{
    return !strcmp(key, "properties") || !strcmp(key, "$defs") ||
           !strcmp(key, "definitions") || !strcmp(key, "patternProperties");
}

/* A schema that has become part of another: its $ref begin where it stands now. map: the
 * members are schemas by name. Depth is bounded by the reader of bodies. False: no
 * memory. */
static bool move_refs(json_t *v, const char *place, bool map)
{
    const char *key;
    json_t *member;
    size_t i;
    bool good = true;
    if (json_is_array(v)) {
        json_array_foreach(v, i, member) good = good && move_refs(member, place, false);
        return good;
    }
    json_object_foreach(v, key, member)
    {
        const char *ref = json_string_value(member);
        if (!map && ref && !strcmp(key, "$ref") && ref[0] == '#') {
            sti_buf moved = {0};
            sti_buf_printf(&moved, "#%s%s", place, ref + 1);
            good = good && !moved.failed && json_string_set(member, moved.p) == 0;
            sti_buf_free(&moved);
        } else if (map || !is_data(key)) {
            good = good && move_refs(member, place, !map && is_map(key));
        }
    }
    return good;
}

still_status srv_call_arguments(const json_t *tools, size_t i, json_t **out,
                                still_error *err)
{
    const json_t *function = json_object_get(json_array_get(tools, i), "function");
    const json_t *given = json_object_get(function, "parameters");
    const json_t *type = json_object_get(given, "type");
    *out = NULL;
    if (!given || json_is_null(given)) { /* a function without any */
        *out = json_pack("{s:s, s:b}", "type", "object", "additionalProperties", 0);
        return *out ? STILL_OK : sti_fail_memory(err, "tools", 0);
    }
    if (!json_is_object(given) || json_object_get(given, "$ref") ||
        json_object_get(given, "anyOf") || json_object_get(given, "oneOf") ||
        (type &&
         (!json_is_string(type) || strcmp(json_string_value(type), "object") != 0)))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "'tools[%zu].function.parameters' must be a schema of type "
                        "object for a call that 'tool_choice' demands",
                        i);
    char *text = sti_json_text(given, JSON_COMPACT);
    if (!text) return sti_fail_memory(err, "tools", 0);
    still_status status =
        sti_json_read("tools", text, strlen(text), STI_JSON_NUL, out, err);
    free(text);
    STI_TRY(status);
    if (!type) sti_json_set(out, "type", json_string("object"));
    return *out ? STILL_OK : sti_fail_memory(err, "tools", 0);
}

/* {"name": NAME, KEY: ARGUMENTS}, at a place of the whole schema. */
static still_status call_of(const srv_call_form *f, const json_t *tools, size_t i,
                            const char *place, json_t **out, still_error *err)
{
    json_t *arguments;
    char at[80];
    const json_t *name =
        json_object_get(json_object_get(json_array_get(tools, i), "function"), "name");
    STI_TRY(srv_call_arguments(tools, i, &arguments, err));
    snprintf(at, sizeof at, "%s/properties/%s", place, f->key);
    if (!move_refs(arguments, at, false)) {
        json_decref(arguments);
        return sti_fail_memory(err, "tools", 0);
    }
    *out = json_pack("{s:s, s:b, s:[s, s], s:{s:{s:O}, s:o}}", "type", "object",
                     "additionalProperties", 0, "required", "name", f->key,
                     "properties", "name", "const", name, f->key, arguments);
    return *out ? STILL_OK : sti_fail_memory(err, "tools", 0);
}

static still_status any_call(const srv_call_form *f, const json_t *tools,
                             const char *name, const char *place, json_t **out,
                             still_error *err)
{
    size_t i;
    const json_t *tool;
    char at[40];
    json_t *list = json_array();
    json_array_foreach(tools, i, tool)
    {
        json_t *one = NULL;
        if (name && strcmp(name_of(tool), name) != 0) continue;
        snprintf(at, sizeof at, "%s/anyOf/%zu", place, json_array_size(list));
        still_status status = call_of(f, tools, i, at, &one, err);
        if (status != STILL_OK) {
            json_decref(list);
            return status;
        }
        sti_json_append(&list, one);
        if (name) break;
    }
    *out = json_pack("{s:o}", "anyOf", list);
    return *out ? STILL_OK : sti_fail_memory(err, "tools", 0);
}

/* The name is in the prompt, so it must be known, and be one that is read back. */
static still_status named_arguments(const json_t *tools, const char *name, json_t **out,
                                    still_error *err)
{
    size_t i = 0;
    if (!name && json_array_size(tools) == 1) name = name_of(json_array_get(tools, 0));
    if (!name)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "'tool_choice': the model's chat template writes names of "
                        "tools outside of JSON, so with several tools a call can only "
                        "be demanded of one: {\"type\": \"function\", \"function\": "
                        "{\"name\": ...}}");
    if (!*name || strpbrk(name, "[{ \n\t\r"))
        return sti_fail(err, STILL_E_ARG,
                        "'tool_choice': the model's chat template cannot write a call "
                        "of '%.60s': use letters, digits, _ and -",
                        name);
    while (strcmp(name_of(json_array_get(tools, i)), name) != 0) i++;
    return srv_call_arguments(tools, i, out, err);
}

still_status srv_call_form_schema(const srv_call_form *f, const json_t *tools,
                                  const char *name, json_t **out, still_error *err)
{
    json_t *call;
    *out = NULL;
    if (f->kind == SRV_CALL_NAMED) return named_arguments(tools, name, out, err);
    if (f->kind == SRV_CALL_OBJECT) return any_call(f, tools, name, "", out, err);
    STI_TRY(any_call(f, tools, name, "/items", &call, err));
    *out = json_pack("{s:s, s:i, s:i, s:o}", "type", "array", "minItems", 1, "maxItems",
                     1, "items", call);
    return *out ? STILL_OK : sti_fail_memory(err, "tools", 0);
}
