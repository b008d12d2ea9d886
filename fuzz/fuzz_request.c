/* fuzz_request.c - bodies of HTTP requests: any bytes give a request whose every field
 * is in range, or an error with a text; calls of functions in what a model wrote, and how a
 * template writes one. The first byte says which. */
#include <stdlib.h>
#include <string.h>

#include "server/call_form.h"
#include "server/request.h"
#include "server/tool_calls.h"

enum { VOCAB = 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(bool holds)
{
    if (!holds) abort();
}

static void check_ids(const int32_t *id, size_t n)
{
    for (size_t i = 0; i < n; i++) check(id[i] >= 0 && id[i] < VOCAB);
}

static void check_options(const srv_options *o)
{
    check(o->max_tokens >= -1 && o->logprobs >= -1 && o->top_k >= 0 && o->n >= 1);
    check(o->logprobs <= SRV_MOST_LOGPROBS && o->n_stops <= SRV_MOST_STOPS);
    check(o->temperature >= 0 && o->temperature <= 100 && o->top_p >= 0 &&
          o->top_p <= 1);
    check(o->n <= SRV_MOST_CHOICES && o->n_bias <= SRV_MOST_BIAS && o->min_tokens >= 0);
    for (int i = 0; i < o->n_stops; i++) check(o->stop[i].n > 0);
    for (int i = 0; i < o->n_bias; i++) check_ids(&o->bias[i].id, 1);
}

static void completion(const char *text, size_t n)
{
    srv_completion c;
    still_error err = {0};
    const srv_options plain = srv_plain_options();
    if (srv_completion_read(text, n, VOCAB, &plain, &c, &err) != STILL_OK) {
        check(err.text[0] && !c.body && !c.prompt);
        return;
    }
    check(c.n_prompts >= 1);
    check_options(&c.options);
    for (size_t i = 0; i < c.n_prompts; i++) {
        check(!c.prompt[i].text == (c.prompt[i].n > 0));
        check_ids(c.prompt[i].id, c.prompt[i].n);
        check(!c.prompt[i].text || strlen(c.prompt[i].text) <= c.prompt[i].n_text);
    }
    srv_completion_free(&c);
}

/* The schema of a call that a request demands, in every form. */
static void demand(const srv_chat *c)
{
    for (int kind = SRV_CALL_OBJECT; kind <= SRV_CALL_NAMED; kind++) {
        const srv_call_form f = {.kind = (srv_call_kind)kind, .key = "arguments"};
        still_error err = {0};
        json_t *schema;
        if (srv_call_form_schema(&f, c->tools, c->function, &schema, &err) == STILL_OK)
            check(json_is_object(schema));
        else
            check(!schema && err.text[0]);
        json_decref(schema);
    }
}

/* What a template wrote, of which the first half may be what comes before an answer. */
static void form(const char *text, size_t n)
{
    for (int half = 0; half < 2; half++) {
        srv_call_form f;
        if (!srv_call_form_read(text, n, half ? n / 2 : 0, &f)) continue;
        check(f.key && strlen(f.before) < sizeof f.before && (f.before[0] || half));
        check(memmem(text, n, f.before, strlen(f.before)) != NULL);
    }
}

/* Contents of messages are strings, whatever the client sent. */
static void chat(const char *text, size_t n)
{
    srv_chat c;
    still_error err = {0};
    const srv_options plain = srv_plain_options();
    size_t i;
    const json_t *m;
    const srv_places places = {.developer = n % 2 == 0, .tools = n % 4 < 2};
    if (srv_chat_read(text, n, VOCAB, places, &plain, &c, &err) != STILL_OK) {
        check(err.text[0] && !c.body && !c.variables);
        return;
    }
    check_options(&c.options);
    const json_t *list = json_object_get(c.variables, "messages");
    check(json_array_size(list) >= 1);
    json_array_foreach(list, i, m)
    {
        check(json_is_string(json_object_get(m, "role")));
        check(json_is_string(json_object_get(m, "content")));
    }
    check(!c.tools || json_is_array(c.tools));
    check(!c.demanded || json_array_size(c.tools) > 0);
    if (c.demanded) demand(&c);
    srv_chat_free(&c);
}

/* What a model wrote: the same in one piece and byte by byte. */
static void calls(const char *text, size_t n)
{
    srv_calls one = {0}, many = {0};
    sti_buf out = {0}, outs = {0};
    srv_calls_push(&one, text, n, &out);
    srv_calls_end(&one, &out);
    for (size_t i = 0; i < n; i++) srv_calls_push(&many, text + i, 1, &outs);
    srv_calls_end(&many, &outs);
    check(one.n == many.n && out.n == outs.n && out.n <= n);
    check(out.n == 0 || memcmp(out.p, outs.p, out.n) == 0);
    for (int i = 0; i < one.n; i++)
        check(strcmp(one.call[i].name, many.call[i].name) == 0 &&
              strcmp(one.call[i].arguments, many.call[i].arguments) == 0);
    srv_calls_free(&one);
    srv_calls_free(&many);
    sti_buf_free(&out);
    sti_buf_free(&outs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0) return 0;
    const char *text = (const char *)data + 1;
    still_error err = {0};
    if (data[0] == 't') {
        srv_tokenize t;
        check(srv_tokenize_read(text, n - 1, &t, &err) == STILL_OK ? t.text != NULL
                                                                   : err.text[0]);
        json_decref(t.body);
    } else if (data[0] == 'd') {
        int32_t *id;
        size_t n_ids = 0;
        if (srv_detokenize_read(text, n - 1, VOCAB, &id, &n_ids, &err) == STILL_OK)
            check_ids(id, n_ids);
        else
            check(!id && err.text[0]);
        free(id);
    } else if (data[0] == 'm') {
        chat(text, n - 1);
    } else if (data[0] == 'c') {
        calls(text, n - 1);
    } else if (data[0] == 'f') {
        form(text, n - 1);
    } else {
        completion(text, n - 1);
    }
    return 0;
}
