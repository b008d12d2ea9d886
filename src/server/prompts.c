/* prompts.c - see prompts.h. Only what the chat template writes itself becomes special
 * tokens: <|im_end|> in a message stays text. Prompts of completions are the client's own,
 * special tokens and all. */
#include "server/prompts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/call_form.h"
#include "server/told_tools.h"

still_status srv_encode(const still_tokenizer *tk, const char *text, size_t n,
                        unsigned flags, int32_t **id, size_t *n_ids, still_error *err)
{
    *id = NULL;
    STI_TRY(still_tokenizer_encode(tk, text, n, flags, NULL, 0, n_ids, err));
    int32_t *list = sti_alloc(*n_ids ? *n_ids : 1, sizeof *list);
    if (!list) return sti_fail_memory(err, "token ids", *n_ids * sizeof *list);
    still_status status =
        still_tokenizer_encode(tk, text, n, flags, list, *n_ids, n_ids, err);
    if (status == STILL_OK)
        *id = list;
    else
        free(list);
    return status;
}

/* ---- Completions --------------------------------------------------------- */

/* The text of ids that are to be echoed. */
static still_status write_ids(const still_tokenizer *tk, const srv_prompt *p,
                              sti_buf *out, still_error *err)
{
    still_decoder *d;
    const char *text;
    size_t n;
    STI_TRY(still_decoder_new(tk, true, &d, err));
    still_status status = STILL_OK;
    for (size_t i = 0; i < p->n && status == STILL_OK; i++) {
        status = still_decoder_push(d, p->id[i], &text, &n, err);
        if (status == STILL_OK) sti_buf_put(out, text, n);
    }
    if (status == STILL_OK) {
        still_decoder_flush(d, &text, &n);
        sti_buf_put(out, text, n);
        if (out->failed) status = sti_fail_memory(err, "the prompt", out->n);
    }
    still_decoder_free(d);
    return status;
}

/* name: of the prompt, for its errors. */
static still_status check_length(const srv_api *api, const srv_prompt *p,
                                 const char *name, still_error *err)
{
    if (p->n == 0)
        return sti_fail(err, STILL_E_ARG,
                        "%s is empty, and this model has no start token to begin with",
                        name);
    if (p->n > (size_t)api->limit)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s has %zu tokens, the context holds %d: shorten it, or start "
                        "the server with a larger --ctx",
                        name, p->n, api->limit);
    return STILL_OK;
}

static still_status encode_text(const srv_api *api, srv_asked *a, size_t i,
                                still_error *err)
{
    srv_prompt *p = &a->prompt[i];
    if (p->text) {
        int32_t bos = still_tokenizer_bos(api->tk);
        STI_TRY(srv_encode(api->tk, p->text, p->n_text,
                           STILL_ENCODE_BOS | STILL_ENCODE_SPECIAL, &p->id, &p->n,
                           err));
        p->has_bos = still_tokenizer_adds_bos(api->tk) && p->n && p->id[0] == bos;
    } else if (a->options->echo) {
        STI_TRY(write_ids(api->tk, p, &a->echo[i], err));
        p->text = a->echo[i].n ? a->echo[i].p : "";
        p->n_text = a->echo[i].n;
    }
    char name[40] = "the prompt";
    if (a->n_prompts > 1) snprintf(name, sizeof name, "prompt %zu", i);
    return check_length(api, p, name, err);
}

static still_status read_text(const srv_api *api, const char *body, size_t n,
                              srv_asked *a, still_error *err)
{
    STI_TRY(srv_completion_read(body, n, api->vocab, &api->plain, &a->text, err));
    a->options = &a->text.options;
    a->prompt = a->text.prompt;
    a->n_prompts = a->text.n_prompts;
    if (a->options->echo) a->echo = sti_alloc(a->n_prompts, sizeof *a->echo);
    if (a->options->echo && !a->echo)
        return sti_fail_memory(err, "prompts", a->n_prompts);
    for (size_t i = 0; i < a->n_prompts; i++) STI_TRY(encode_text(api, a, i, err));
    return STILL_OK;
}

static still_status open_schema(const srv_api *api, const json_t *schema,
                                still_grammar **out, still_error *err)
{
    char *text = sti_json_text(schema, JSON_COMPACT | JSON_ENCODE_ANY);
    if (!text) return sti_fail_memory(err, "the schema", 0);
    still_status status =
        still_grammar_open_schema(api->tk, text, strlen(text), out, err);
    free(text);
    return status;
}

/* ---- Chat ---------------------------------------------------------------- */

static still_status encode_rendering(const srv_api *api, const still_rendering *r,
                                     srv_prompt *p, still_error *err)
{
    STI_TRY(still_chat_encode(api->tk, r, 0, NULL, 0, &p->n, err));
    p->id = sti_alloc(p->n ? p->n : 1, sizeof *p->id);
    if (!p->id) return sti_fail_memory(err, "token ids", p->n * sizeof *p->id);
    STI_TRY(still_chat_encode(api->tk, r, 0, p->id, p->n, &p->n, err));
    return check_length(api, p, "the conversation", err);
}

/* The server's variables, and over them the request's. */
static still_status render(const srv_api *api, json_t *variables, bool open,
                           still_rendering *r, still_error *err)
{
    json_t *all = json_object();
    if (api->variables) sti_json_merge(&all, json_incref(api->variables));
    sti_json_merge(&all, json_incref(variables));
    char *text = sti_json_text(all, JSON_COMPACT);
    json_decref(all);
    if (!text) return sti_fail_memory(err, "messages", 0);
    still_conversation talk = {.size = sizeof talk,
                               .add_generation_prompt = open,
                               .variables = text,
                               .n_variables = strlen(text)};
    still_status status = still_chat_render(api->tk, api->chat_template, &talk, r, err);
    free(text);
    return status;
}

/* Lets the template write a call, and an answer's beginning before it. */
static still_status render_probe(const srv_api *api, const srv_chat *c, bool call,
                                 still_rendering *r, still_error *err)
{
    json_t *variables = json_object();
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", "a");
    if (call)
        sti_json_append(&messages,
                        json_pack("{s:s, s:s, s:[{s:s, s:s, s:{s:s, s:{s:s}}}]}",
                                  "role", "assistant", "content", "", "tool_calls",
                                  "id", "000000000", "type", "function", "function",
                                  "name", SRV_PROBE, "arguments", "a", "b"));
    sti_json_merge(&variables, json_incref(c->variables));
    sti_json_set(&variables, "messages", messages);
    if (!variables) return sti_fail_memory(err, "messages", 0);
    still_status status = render(api, variables, !call, r, err);
    json_decref(variables);
    return status;
}

/* How this template writes calls. One that fails to write one may say so with an
 * exception: the request is refused in either case. */
static still_status find_form(const srv_api *api, const srv_chat *c, srv_call_form *out,
                              still_error *err)
{
    still_rendering open = {0}, call = {0};
    bool found = false;
    if (!api->places.tools) {
        *out = (srv_call_form){.before = SRV_TOLD_OPENING, .key = "arguments"};
        return STILL_OK;
    }
    still_status status = render_probe(api, c, false, &open, err);
    if (status == STILL_OK) status = render_probe(api, c, true, &call, err);
    if (status == STILL_OK) {
        bool same = call.n >= open.n && memcmp(call.text, open.text, open.n) == 0;
        found = srv_call_form_read(call.text, call.n, same ? open.n : 0, out);
    }
    still_rendering_free(&open);
    still_rendering_free(&call);
    if (status == STILL_E_MEMORY || found) return status;
    return sti_fail(
        err, STILL_E_UNSUPPORTED,
        "'tool_choice' demands a call, and the model's chat template writes "
        "none in a form that is read back: use \"auto\", or start the "
        "server with a --chat-template that has one");
}

/* The rendering with the beginning of the answer behind it. A tool's name in it, bytes
 * `from` to `to`, comes from the client: it becomes no special token. */
static still_status encode_open(const srv_api *api, const still_rendering *r,
                                size_t from, size_t to, srv_asked *a, still_error *err)
{
    sti_buf text = {0}, content = {0};
    const sti_buf *w = &a->written;
    sti_buf_put(&text, r->text, r->n);
    sti_buf_put(&text, w->p, w->n);
    sti_buf_put(&content, r->content, r->n);
    for (size_t i = 0; i < w->n; i++)
        sti_buf_put(&content, i >= from && i < to ? "\1" : "\0", 1);
    const still_rendering whole = {text.p, (unsigned char *)content.p, text.n};
    still_status status = text.failed || content.failed || w->failed
                              ? sti_fail_memory(err, "the prompt", r->n)
                              : encode_rendering(api, &whole, &a->rendered, err);
    sti_buf_free(&text);
    sti_buf_free(&content);
    return status;
}

/* Which tool's parameters a grammar cannot be made of. */
static still_status blame_tool(const srv_api *api, const srv_chat *c, still_error *err)
{
    char text[sizeof err->text];
    const still_status code =
        err->code == STILL_E_UNSUPPORTED ? STILL_E_UNSUPPORTED : STILL_E_ARG;
    snprintf(text, sizeof text, "%s", err->text);
    for (size_t i = 0; i < json_array_size(c->tools); i++) {
        json_t *schema;
        still_grammar *g = NULL;
        still_status status = srv_call_arguments(c->tools, i, &schema, err);
        if (status == STILL_OK) status = open_schema(api, schema, &g, err);
        json_decref(schema);
        still_grammar_free(g);
        if (status == STILL_OK) continue;
        if (status == STILL_E_MEMORY) return status;
        snprintf(text, sizeof text, "%s", err->text);
        return sti_fail(err, code, "'tools[%zu].function.parameters': %s", i, text);
    }
    return sti_fail(err, code, "'tools': %s", text);
}

/* A call that the request demands: its beginning is in the prompt, the rest is held to a
 * schema. */
static still_status demand_call(const srv_api *api, const still_rendering *r,
                                srv_asked *a, still_error *err)
{
    srv_call_form form;
    json_t *schema;
    const srv_chat *c = &a->talk;
    const char *name = c->function;
    STI_TRY(find_form(api, c, &form, err));
    STI_TRY(srv_call_form_schema(&form, c->tools, name, &schema, err));
    still_status status = open_schema(api, schema, &a->grammar, err);
    json_decref(schema);
    if (status == STILL_E_MEMORY) return status;
    if (status != STILL_OK) return blame_tool(api, c, err);
    if (!name) /* where it matters, there is one tool */
        name = json_string_value(json_object_get(
            json_object_get(json_array_get(c->tools, 0), "function"), "name"));
    srv_call_form_open(&form, name, &a->written);
    const size_t from = strlen(form.before);
    const size_t to = form.kind == SRV_CALL_NAMED ? from + strlen(name) : from;
    return encode_open(api, r, from, to, a, err);
}

static still_status read_talk(const srv_api *api, const char *body, size_t n,
                              srv_asked *a, still_error *err)
{
    STI_TRY(srv_chat_read(body, n, api->vocab, api->places, &api->chat, &a->talk, err));
    still_rendering r = {0};
    a->options = &a->talk.options;
    a->tools = a->talk.tools;
    a->prompt = &a->rendered;
    a->n_prompts = 1;
    still_status status = render(api, a->talk.variables, true, &r, err);
    if (status == STILL_OK && a->talk.demanded)
        status = demand_call(api, &r, a, err);
    else if (status == STILL_OK)
        status = encode_rendering(api, &r, &a->rendered, err);
    still_rendering_free(&r);
    return status;
}

/* ---- Form ---------------------------------------------------------------- */

/* What is wrong with rules is the client's affair. */
static still_status open_rules(const srv_api *api, const srv_options *o,
                               still_grammar **out, still_error *err)
{
    still_status status = STILL_OK;
    const char *field = o->form == SRV_GBNF ? "grammar" : "response_format";
    if (o->form == SRV_JSON) status = still_grammar_open_json(api->tk, out, err);
    if (o->form == SRV_SCHEMA) status = open_schema(api, o->rules, out, err);
    if (o->form == SRV_GBNF)
        status = still_grammar_open_gbnf(api->tk, json_string_value(o->rules),
                                         json_string_length(o->rules), out, err);
    if (status == STILL_OK || status == STILL_E_MEMORY) return status;
    char text[sizeof err->text];
    snprintf(text, sizeof text, "%s", err->text);
    if (status == STILL_E_UNSUPPORTED)
        return sti_fail(err, STILL_E_UNSUPPORTED, "'%s': %s", field, text);
    return sti_fail(err, STILL_E_ARG, "'%s': %s", field, text);
}

still_status srv_asked_read(const srv_api *api, const char *body, size_t n,
                            srv_asked *out, still_error *err)
{
    STI_TRY(out->chat ? read_talk(api, body, n, out, err)
                      : read_text(api, body, n, out, err));
    return open_rules(api, out->options, &out->grammar, err);
}

void srv_asked_free(srv_asked *a)
{
    for (size_t i = 0; a->echo && i < a->n_prompts; i++) sti_buf_free(&a->echo[i]);
    free(a->echo);
    free(a->rendered.id);
    sti_buf_free(&a->written);
    srv_completion_free(&a->text);
    srv_chat_free(&a->talk);
    still_grammar_free(a->grammar);
}
