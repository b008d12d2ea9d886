/* tool_calls.c - see tool_calls.h. */
#include "server/tool_calls.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "server/stop.h"

/* START: only space so far, TEXT: content, others: behind a mark. LEADING is the mark that
 * is none, a brace at the beginning. */
enum { START, TEXT, HERMES, MISTRAL, PYTHON, LEADING };

static const struct {
    const char *text;
    int state;
} marks[] = {
    {"<tool_call>", HERMES}, {"[TOOL_CALLS]", MISTRAL}, {"<|python_tag|>", PYTHON}};
enum { MARKS = sizeof marks / sizeof *marks };
static const char HERMES_END[] = "</tool_call>";
/* Special tokens inside or behind a call. */
static const char *const others[] = {HERMES_END, "[ARGS]", "[CALL_ID]"};

bool srv_calls_mark(const char *text, size_t n)
{
    for (size_t i = 0; i < MARKS; i++)
        if (strlen(marks[i].text) == n && memcmp(marks[i].text, text, n) == 0)
            return true;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strlen(others[i]) == n && memcmp(others[i], text, n) == 0) return true;
    return false;
}

size_t srv_calls_opening(const char *text, size_t n)
{
    for (size_t i = 0; i < MARKS; i++) {
        size_t length = strlen(marks[i].text);
        if (n >= length && memcmp(text + n - length, marks[i].text, length) == 0)
            return length;
    }
    return 0;
}

void srv_call_id(uint64_t random, char out[SRV_CALL_ID + 1])
{
    static const char letters[] =
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    for (int i = 0; i < SRV_CALL_ID; i++) {
        out[i] = letters[random % 62];
        random /= 62;
    }
    out[SRV_CALL_ID] = 0;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* ---- Calls --------------------------------------------------------------- */

static bool is_tool(const json_t *tools, const char *name)
{
    size_t i;
    const json_t *tool;
    json_array_foreach(tools, i, tool)
    {
        const char *known = json_string_value(
            json_object_get(json_object_get(tool, "function"), "name"));
        if (known && strcmp(known, name) == 0) return true;
    }
    return false;
}

static void add(srv_calls *p, const char *name, const json_t *arguments)
{
    if (p->n == p->capacity) {
        int more = p->capacity ? 2 * p->capacity : 4;
        srv_call *grown = sti_grow(p->call, (size_t)more, sizeof *grown);
        if (!grown) {
            p->failed = true;
            return;
        }
        p->call = grown;
        p->capacity = more;
    }
    srv_call c = {sti_strdup(name), sti_json_text(arguments, JSON_COMPACT)};
    if (!c.name || !c.arguments) {
        free(c.name);
        free(c.arguments);
        p->failed = true;
        return;
    }
    p->call[p->n++] = c;
}

/* One call as an object; false: it is none. */
static bool add_object(srv_calls *p, const json_t *v, bool known_only)
{
    const char *name = json_string_value(json_object_get(v, "name"));
    json_t *arguments = json_object_get(v, "arguments"), *read = NULL;
    if (!arguments) arguments = json_object_get(v, "parameters");
    if (!name || p->n == SRV_MOST_CALLS || (known_only && !is_tool(p->tools, name)))
        return false;
    if (json_is_string(arguments)) { /* some models quote them */
        const char *text = json_string_value(arguments);
        if (sti_json_read("arguments", text, strlen(text), STI_JSON_OBJECT, &read,
                          NULL))
            return false;
        arguments = read;
    }
    bool good = json_is_object(arguments);
    if (good) add(p, name, arguments);
    json_decref(read);
    return good;
}

/* Takes calls back that turned out to be part of something else. */
static void forget(srv_calls *p, int n)
{
    while (p->n > n) {
        p->n--;
        free(p->call[p->n].name);
        free(p->call[p->n].arguments);
    }
}

/* Objects, one after the other, with space and semicolons between them. */
static bool add_objects(srv_calls *p, const char *text, size_t n, bool known_only)
{
    int before = p->n;
    size_t at = 0;
    for (;;) {
        const char *why;
        while (at < n && (is_space(text[at]) || (text[at] == ';' && p->n > before)))
            at++;
        if (at == n) break;
        json_t *v = sti_json_next(text, n, &at, STI_JSON_NUL, &why);
        bool good = v && add_object(p, v, known_only);
        json_decref(v);
        if (good) continue;
        forget(p, before);
        return false;
    }
    return p->n > before;
}

static bool add_list(srv_calls *p, const char *text, size_t n)
{
    int before = p->n;
    size_t i, at = 0;
    const char *why;
    const json_t *one;
    json_t *list = sti_json_next(text, n, &at, STI_JSON_NUL, &why);
    bool good = json_array_size(list) > 0;
    json_array_foreach(list, i, one) good = good && add_object(p, one, false);
    json_decref(list);
    while (at < n && is_space(text[at])) at++;
    if (good && at == n) return true;
    forget(p, before);
    return false;
}

/* name[ARGS]{...}, or name[CALL_ID]id[ARGS]{...}, or name{...}; more follow behind further
 * marks. */
static bool add_named(srv_calls *p, const char *text, size_t n)
{
    int before = p->n;
    size_t at = 0;
    while (at < n) {
        const char *why, *mark = marks[1].text;
        size_t name = 0;
        while (at < n && is_space(text[at])) at++;
        if (n - at > strlen(mark) && memcmp(text + at, mark, strlen(mark)) == 0)
            at += strlen(mark);
        while (at + name < n && !strchr("[{ \n\t\r", text[at + name])) name++;
        const char *brace = memchr(text + at, '{', n - at);
        char *word = name && brace ? sti_strndup(text + at, name) : NULL;
        at = brace ? (size_t)(brace - text) : n;
        json_t *arguments =
            word ? sti_json_next(text, n, &at, STI_JSON_NUL, &why) : NULL;
        bool good = json_is_object(arguments) && p->n < SRV_MOST_CALLS;
        if (good) add(p, word, arguments);
        json_decref(arguments);
        free(word);
        if (!good) {
            forget(p, before);
            return false;
        }
        while (at < n && is_space(text[at])) at++;
    }
    return p->n > before;
}

/* ---- Text ---------------------------------------------------------------- */

static void drop(srv_calls *p, size_t n)
{
    memmove(p->held.p, p->held.p + n, p->held.n - n);
    p->held.n -= n;
    p->looked = 0;
}

static void release(srv_calls *p, size_t n, sti_buf *out)
{
    sti_buf_put(out, p->held.p, n);
    drop(p, n);
}

/* Content up to the next mark, without the space before it. True: a mark was found. */
static bool look_for_mark(srv_calls *p, sti_buf *out)
{
    size_t first = p->held.n, keep = 0;
    int which = -1;
    for (int i = 0; i < MARKS; i++) {
        size_t n = strlen(marks[i].text);
        const char *hit = memmem(p->held.p, p->held.n, marks[i].text, n);
        if (hit && (size_t)(hit - p->held.p) < first) {
            first = (size_t)(hit - p->held.p);
            which = i;
        }
        size_t part = srv_overlap(p->held.p, p->held.n, marks[i].text, n);
        if (part > keep) keep = part;
    }
    size_t end = which >= 0 ? first : p->held.n - keep;
    while (end > 0 && is_space(p->held.p[end - 1])) end--;
    size_t space = first - end;
    release(p, end, out);
    if (which < 0) return false;
    /* The mark stays: if this is no call, it is content, and so is the space. */
    p->looked = space + strlen(marks[which].text);
    p->state = marks[which].state;
    return true;
}

/* Where the call that held begins with has its own text. */
static size_t inside(const srv_calls *p, const char *mark)
{
    const char *hit = memmem(p->held.p, p->held.n, mark, strlen(mark));
    return hit ? (size_t)(hit - p->held.p) + strlen(mark) : 0;
}

/* The end of a Hermes call may also stand in one of its strings, so every end is tried.
 * True: the call is complete. */
static bool look_for_end(srv_calls *p)
{
    size_t from = inside(p, marks[0].text);
    const size_t n_end = sizeof HERMES_END - 1;
    if (p->looked < from) p->looked = from;
    for (;;) {
        const char *hit =
            memmem(p->held.p + p->looked, p->held.n - p->looked, HERMES_END, n_end);
        if (!hit) {
            size_t tail = p->held.n - p->looked;
            p->looked += tail < n_end ? 0 : tail - n_end + 1;
            return false;
        }
        size_t end = (size_t)(hit - p->held.p);
        if (add_objects(p, p->held.p + from, end - from, false)) {
            drop(p, end + n_end);
            return true;
        }
        p->looked = end + n_end;
    }
}

bool srv_calls_over(const srv_calls *p)
{
    return p->one && p->n > 0;
}

/* Where the text is over with its first call, what follows that is dropped. */
static void keep_one(srv_calls *p)
{
    if (!srv_calls_over(p)) return;
    forget(p, 1);
    sti_buf_clear(&p->held);
}

void srv_calls_push(srv_calls *p, const char *text, size_t n, sti_buf *out)
{
    if (n == 0 || srv_calls_over(p)) return;
    sti_buf_put(&p->held, text, n);
    if (p->held.failed) {
        p->failed = true;
        return;
    }
    if (p->state == START) {
        size_t at = 0;
        while (at < p->held.n && is_space(p->held.p[at])) at++;
        if (at == p->held.n) return;
        p->state = p->held.p[at] == '{' ? LEADING : TEXT;
    }
    while (p->state == TEXT || p->state == HERMES) {
        if (p->state == TEXT && !look_for_mark(p, out)) return;
        if (p->state == HERMES) {
            if (!look_for_end(p)) return;
            p->state = TEXT;
            keep_one(p);
        }
    }
}

void srv_calls_end(srv_calls *p, sti_buf *out)
{
    const char *text = p->held.n ? p->held.p : "";
    size_t n = p->held.n;
    bool call = false;
    if (p->failed || srv_calls_over(p)) return;
    if (p->state == MISTRAL) {
        size_t from = inside(p, marks[1].text);
        call =
            add_list(p, text + from, n - from) || add_named(p, text + from, n - from);
    } else if (p->state == PYTHON) {
        size_t from = inside(p, marks[2].text);
        call = add_objects(p, text + from, n - from, false);
    } else if (p->state == LEADING) {
        call = add_objects(p, text, n, true);
    } else if (p->state == HERMES) { /* some models leave the end out */
        size_t from = inside(p, marks[0].text);
        call = add_objects(p, text + from, n - from, false);
    } else if (p->state == TEXT && p->n > 0) {
        size_t at = 0;
        while (at < n && is_space(text[at])) at++;
        call = at == n; /* space behind a call */
    }
    if (!call) sti_buf_put(out, text, n);
    keep_one(p);
    sti_buf_clear(&p->held);
    p->state = TEXT;
}

void srv_calls_free(srv_calls *p)
{
    forget(p, 0);
    free(p->call);
    sti_buf_free(&p->held);
    *p = (srv_calls){0};
}
