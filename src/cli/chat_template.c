/* chat_template.c - see chat_template.h. */
#include "cli/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"

enum { TEMPLATE_MAX = 1 << 20 };

/* A name that still knows, else a file. */
static int read_text(const char *name, char **out)
{
    still_error err;
    size_t n;
    const char *known = still_chat_template_named(name);
    if (known) {
        *out = sti_strdup(known);
        return *out ? CLI_OK : cli_fail("out of memory: a chat template");
    }
    if (cli_read(name, TEMPLATE_MAX, out, &n, &err)) {
        sti_buf names = {0};
        for (int i = 0; still_chat_template_at(i); i++)
            sti_buf_printf(&names, "%s%s", i ? ", " : "", still_chat_template_at(i));
        const int status = cli_fail("--chat-template: %s; the names are %s", err.text,
                                    names.p ? names.p : "");
        sti_buf_free(&names);
        return status;
    }
    if (strlen(*out) != n) return cli_fail("%s: holds a byte 0", name);
    return CLI_OK;
}

/* "key=value": a value that is JSON is that, any other a string. */
static int add_variable(const char *command, const char *text, json_t **to)
{
    still_error err;
    json_t *v = NULL;
    const char *equals = strchr(text, '=');
    if (!equals || equals == text)
        return cli_usage(command, "--template-arg takes KEY=VALUE, not '%s'", text);
    char *key = sti_strndup(text, (size_t)(equals - text));
    if (!key) return cli_fail("out of memory: --template-arg");
    if (!strcmp(key, "messages")) {
        free(key);
        return cli_usage(command,
                         "--template-arg: messages are the conversation's own");
    }
    if (sti_json_read("value", equals + 1, strlen(equals + 1), STI_JSON_ANY, &v, &err))
        v = json_string(equals + 1);
    if (!v) {
        free(key);
        return cli_usage(command, "--template-arg %s: the value is no UTF-8", text);
    }
    sti_json_set(to, key, v);
    free(key);
    return CLI_OK;
}

int cli_chat_template_read(const char *command, const cli_options *o,
                           cli_chat_template *out)
{
    *out = (cli_chat_template){0};
    json_t *variables = json_object();
    int status = o->chat_template ? read_text(o->chat_template, &out->text) : CLI_OK;
    for (int i = 0; i < o->template_arg.n && status == CLI_OK; i++)
        status = add_variable(command, o->template_arg.item[i], &variables);
    if (status == CLI_OK && !(out->variables = sti_json_text(variables, 0)))
        status = cli_fail("out of memory: --template-arg");
    json_decref(variables);
    return status;
}

void cli_chat_template_free(cli_chat_template *t)
{
    free(t->text);
    free(t->variables);
    *t = (cli_chat_template){0};
}

int cli_chat_encode(const still_tokenizer *tk, const still_rendering *r, size_t from,
                    int32_t **ids, size_t *n_ids)
{
    still_error err;
    *ids = NULL;
    if (still_chat_encode(tk, r, from, NULL, 0, n_ids, &err))
        return cli_fail_error(&err);
    *ids = sti_alloc(*n_ids ? *n_ids : 1, sizeof **ids);
    if (!*ids) return cli_fail("out of memory: %zu tokens", *n_ids);
    if (still_chat_encode(tk, r, from, *ids, *n_ids, n_ids, &err)) {
        free(*ids);
        *ids = NULL;
        return cli_fail_error(&err);
    }
    return CLI_OK;
}
