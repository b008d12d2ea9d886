/* chat.c - conversations written the way a model was trained to read them: its own Jinja
 * template, run on the conversation; and a few templates by name, for models without. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/sized.h"
#include "base/utf8.h"
#include "template/template.h"
#include "token/tokenizer.h"

/* ---- Templates by name --------------------------------------------------- */

static const struct {
    const char *name, *text;
} named[] = {
    {"chatml",
     "{% for m in messages %}"
     "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
     "{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"},
    {"llama3",
     "{{ bos_token }}{% for m in messages %}"
     "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
     " + '<|eot_id|>' }}{% endfor %}"
     "{% if add_generation_prompt %}"
     "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"},
    {"mistral",
     "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
     "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
     "{% elif m.role == 'user' %}{{ ' [INST] ' + ns.system + m.content + ' [/INST]' }}"
     "{% set ns.system = '' %}"
     "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"},
    {"gemma",
     "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
     "{% if m.role == 'system' %}{% set ns.system = m.content | trim + '\\n\\n' %}"
     "{% else %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
     " + '\\n' + ns.system + m.content | trim + '<end_of_turn>\\n' }}"
     "{% set ns.system = '' %}{% endif %}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"},
    {"phi3", "{% for m in messages %}"
             "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"},
};

const char *still_chat_template_at(int i)
{
    return i >= 0 && i < (int)(sizeof named / sizeof *named) ? named[i].name : NULL;
}

const char *still_chat_template_named(const char *name)
{
    for (size_t i = 0; name && i < sizeof named / sizeof *named; i++)
        if (!strcmp(named[i].name, name)) return named[i].text;
    return NULL;
}

/* ---- Variables ----------------------------------------------------------- */

/* A string of the program's, with U+FFFD for what is no UTF-8. */
static json_t *text_value(const char *s)
{
    sti_buf b = {0};
    size_t n = strlen(s), bad;
    bool cut;
    const size_t good = sti_utf8_span(s, n);
    if (good == n) return json_stringn_nocheck(s, n);
    for (const char *end = s + n; s < end;) {
        const size_t span = sti_utf8_span(s, (size_t)(end - s));
        sti_buf_put(&b, s, span);
        s += span;
        if (s == end) break;
        sti_utf8_char(s, (size_t)(end - s), &bad, &cut);
        sti_buf_puts(&b, STI_UTF8_REPLACEMENT);
        s += bad;
    }
    json_t *v = b.failed ? NULL : json_stringn_nocheck(b.p, b.n);
    sti_buf_free(&b);
    return v;
}

static still_status check_messages(const json_t *list, still_error *err)
{
    size_t i;
    const json_t *m;
    if (!json_is_array(list) || !json_array_size(list))
        return sti_fail(err, STILL_E_ARG, "chat: there are no messages");
    json_array_foreach(list, i, m)
    {
        if (!json_is_string(json_object_get(m, "role")))
            return sti_fail(err, STILL_E_ARG, "chat: message %zu has no role", i);
    }
    return STILL_OK;
}

static still_status read_messages(const still_conversation *c, json_t **out,
                                  still_error *err)
{
    *out = json_array();
    for (size_t i = 0; i < c->n_messages; i++) {
        const still_message *m = &c->message[i];
        if (!m->role || !m->content) {
            json_decref(*out);
            *out = NULL;
            return sti_fail(err, STILL_E_ARG, "chat: message %zu lacks role or content",
                            i);
        }
        json_t *o = json_object();
        sti_json_set(&o, "role", text_value(m->role));
        sti_json_set(&o, "content", text_value(m->content));
        sti_json_append(out, o);
    }
    return *out ? STILL_OK : sti_fail_memory(err, "conversation", c->n_messages);
}

static still_status read_variables(const still_conversation *c, json_t **out,
                                   still_error *err)
{
    static const char nothing[] = "{}";
    const char *text = c->variables ? c->variables : nothing;
    const size_t n = c->variables && c->n_variables ? c->n_variables : strlen(text);
    still_status st = sti_json_read("variables of the chat template", text, n,
                                    STI_JSON_OBJECT | STI_JSON_NUL, out, err);
    if (st == STILL_OK && c->message) {
        json_t *messages;
        st = read_messages(c, &messages, err);
        if (st == STILL_OK) sti_json_set(out, "messages", messages);
        if (st == STILL_OK && !*out) st = sti_fail_memory(err, "conversation", n);
    }
    if (st == STILL_OK) st = check_messages(json_object_get(*out, "messages"), err);
    if (st == STILL_OK)
        sti_json_set(out, "add_generation_prompt",
                     json_boolean(c->add_generation_prompt));
    if (st == STILL_OK && !*out) st = sti_fail_memory(err, "conversation", n);
    if (st != STILL_OK) {
        json_decref(*out);
        *out = NULL;
    }
    return st;
}

/* ---- Rendering ----------------------------------------------------------- */

/* The text of a special token; *out NULL with STILL_OK: there is none. */
static still_status token_text(const still_tokenizer *tk, int32_t id, char **out,
                               still_error *err)
{
    size_t n = 0;
    const char *p = tk && id >= 0 ? still_tokenizer_piece(tk, id, true, &n) : NULL;
    *out = p ? sti_strndup(p, n) : NULL;
    return p && !*out ? sti_fail_memory(err, "special token", n) : STILL_OK;
}

still_status still_chat_render(const still_tokenizer *tk, const char *chat_template,
                               const still_conversation *given, still_rendering *out,
                               still_error *err)
{
    still_conversation own;
    const still_conversation *c = &own;
    if (!given || !out) return sti_fail(err, STILL_E_ARG, "chat: an argument is NULL");
    *out = (still_rendering){0};
    STI_TRY(STI_TAKE(&own, given, still_conversation, err));
    if (!chat_template && tk) chat_template = tk->chat_template;
    if (!chat_template)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "chat: the model brings no chat template");
    char *bos = NULL, *eos = NULL;
    json_t *variables = NULL;
    sti_template *t = NULL;
    still_status st = sti_template_parse(chat_template, strlen(chat_template), &t, err);
    if (st == STILL_OK) st = read_variables(c, &variables, err);
    if (st == STILL_OK) st = token_text(tk, tk ? tk->bos : -1, &bos, err);
    if (st == STILL_OK) st = token_text(tk, tk ? tk->eos : -1, &eos, err);
    if (st == STILL_OK) {
        const sti_template_input in = {variables, bos ? bos : "", eos ? eos : "", NULL};
        st = sti_template_render(t, &in, out, err);
    }
    free(bos);
    free(eos);
    json_decref(variables);
    sti_template_free(t);
    return st;
}
