/* tokenize.c - still tokenize: text to ids and back. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "cli/chat_template.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/resolve.h"
#include "cli/ids.h"
#include "cli/run.h"

enum { TEXT_MAX = 1 << 30 };

typedef struct source {
    const char *model, *text; /* arguments; NULL: not given */
} source;

/* One argument is the model, unless --tokenizer takes its place; a second is text. */
static int read_arguments(const cli_options *o, source *s)
{
    int next = 0;
    if (!o->tokenizer && o->n_args) s->model = o->arg[next++];
    if (next < o->n_args) s->text = o->arg[next++];
    if (next < o->n_args)
        return cli_usage("tokenize",
                         "--tokenizer takes the place of MODEL: '%s' is one "
                         "argument too many",
                         o->arg[next]);
    if (s->text && o->file)
        return cli_usage("tokenize", "TEXT and --file exclude each other");
    if (o->chat && (s->text || o->file || o->decode))
        return cli_usage("tokenize", "--chat excludes TEXT, --file and --decode");
    if (!o->chat && (o->chat_template || o->template_arg.n))
        return cli_usage("tokenize", "--chat-template and --template-arg need --chat");
    return CLI_OK;
}

static int open_tokenizer(const cli_options *o, const char *model,
                          still_tokenizer **out)
{
    still_error err;
    char *path = NULL;
    if (!o->tokenizer &&
        cli_resolve_model(model ? model : cli_default_model(o), &path, NULL, &err))
        return cli_fail_error(&err);
    still_status status =
        still_tokenizer_open_split(path ? path : o->tokenizer, o->split, out, &err);
    free(path);
    return status == STILL_OK ? CLI_OK : cli_fail_error(&err);
}

static json_t *id_list(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) sti_json_append(&list, json_integer(ids[i]));
    return list;
}

static int print_ids(const cli_options *o, const int32_t *ids, size_t n)
{
    if (o->json) return cli_print_json(json_pack("{s:o}", "ids", id_list(ids, n)));
    for (size_t i = 0; i < n; i++) cli_print("%s%d", i ? " " : "", (int)ids[i]);
    cli_print("\n");
    return CLI_OK;
}

static int encode(const cli_options *o, const still_tokenizer *tk, const char *text,
                  size_t n)
{
    int32_t *ids;
    size_t n_ids;
    unsigned flags =
        (o->bos ? STILL_ENCODE_BOS : 0u) | (o->special ? STILL_ENCODE_SPECIAL : 0u);
    int status = cli_encode(tk, text, n, flags, &ids, &n_ids);
    if (status == CLI_OK) status = print_ids(o, ids, n_ids);
    free(ids);
    return status;
}

static still_status decode_all(const still_tokenizer *tk, bool special,
                               const int32_t *ids, size_t n, sti_buf *text,
                               still_error *err)
{
    still_decoder *decoder;
    const char *part;
    size_t n_part;
    still_status status = still_decoder_new(tk, special, &decoder, err);
    for (size_t i = 0; i < n && status == STILL_OK; i++) {
        status = still_decoder_push(decoder, ids[i], &part, &n_part, err);
        if (status == STILL_OK) sti_buf_put(text, part, n_part);
    }
    if (status == STILL_OK) {
        still_decoder_flush(decoder, &part, &n_part);
        sti_buf_put(text, part, n_part);
    }
    still_decoder_free(decoder);
    return status;
}

static int decode(const cli_options *o, const still_tokenizer *tk, const char *text)
{
    still_error err;
    int32_t *ids;
    size_t n;
    sti_buf out = {0};
    if (cli_parse_ids(text, still_tokenizer_vocab_size(tk), &ids, &n, &err))
        return cli_fail_error(&err);
    int status = CLI_OK;
    if (decode_all(tk, o->special, ids, n, &out, &err)) {
        status = cli_fail_error(&err);
    } else if (out.failed) {
        status = cli_fail("out of memory: text of %zu tokens", n);
    } else if (o->json) {
        status =
            cli_print_json(json_pack("{s:o}", "text", cli_json_text(out.p, out.n)));
    } else {
        cli_put(out.n ? out.p : "", out.n);
        cli_put("\n", 1);
    }
    sti_buf_free(&out);
    free(ids);
    return status;
}

/* The conversation's variables: the file's, over those of --template-arg. */
static int read_conversation(const cli_options *o, const char *arguments, char **out,
                             bool *prompt)
{
    still_error err;
    char *text;
    size_t n;
    json_t *file = NULL, *all = NULL;
    *out = NULL;
    if (cli_read(o->chat, TEXT_MAX, &text, &n, &err)) return cli_fail_error(&err);
    still_status st = sti_json_read(o->chat, text, n, STI_JSON_NUL, &file, &err);
    free(text);
    if (st == STILL_OK)
        st = sti_json_read("--template-arg", arguments, strlen(arguments),
                           STI_JSON_OBJECT, &all, &err);
    if (st != STILL_OK) {
        json_decref(file);
        return cli_fail_error(&err);
    }
    if (json_is_array(file))
        sti_json_set(&all, "messages", file);
    else
        sti_json_merge(&all, file);
    const json_t *asked = json_object_get(all, "add_generation_prompt");
    *prompt = !asked || json_is_true(asked);
    *out = sti_json_text(all, 0);
    json_decref(all);
    return *out ? CLI_OK : cli_fail("out of memory: a conversation");
}

/* [start, end] of every stretch of content. */
static json_t *content_ranges(const still_rendering *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->n;) {
        const size_t start = i;
        while (i < r->n && r->content[i] == r->content[start]) i++;
        if (r->content[start])
            sti_json_append(&list,
                            json_pack("[I, I]", (json_int_t)start, (json_int_t)i));
    }
    return list;
}

static int print_rendering(const cli_options *o, const still_rendering *r,
                           const int32_t *ids, size_t n)
{
    if (o->json)
        return cli_print_json(json_pack("{s:o, s:o, s:o}", "text",
                                        cli_json_text(r->text, r->n), "content",
                                        content_ranges(r), "ids", id_list(ids, n)));
    cli_put(r->text, r->n);
    cli_put("\n", 1);
    return print_ids(o, ids, n);
}

static int encode_chat(const cli_options *o, const still_tokenizer *tk)
{
    still_error err;
    cli_chat_template form;
    still_conversation c = {.size = sizeof c};
    still_rendering r = {0};
    char *variables = NULL;
    int32_t *ids = NULL;
    size_t n;
    int status = cli_chat_template_read("tokenize", o, &form);
    if (status == CLI_OK)
        status =
            read_conversation(o, form.variables, &variables, &c.add_generation_prompt);
    c.variables = variables;
    if (status == CLI_OK && still_chat_render(tk, form.text, &c, &r, &err))
        status = cli_fail_error(&err);
    if (status == CLI_OK) status = cli_chat_encode(tk, &r, 0, &ids, &n);
    if (status == CLI_OK) status = print_rendering(o, &r, ids, n);
    free(ids);
    free(variables);
    still_rendering_free(&r);
    cli_chat_template_free(&form);
    return status;
}

int cli_cmd_tokenize(const cli_options *o)
{
    still_error err;
    source s = {0};
    still_tokenizer *tk = NULL;
    char *text = NULL;
    size_t n = 0;
    int status = read_arguments(o, &s);
    if (status == CLI_OK) status = open_tokenizer(o, s.model, &tk);
    if (status != CLI_OK) return status;
    if (o->chat) {
        status = encode_chat(o, tk);
        still_tokenizer_free(tk);
        return status;
    }
    if (!s.text && cli_read(o->file ? o->file : "-", TEXT_MAX, &text, &n, &err))
        status = cli_fail_error(&err);
    if (s.text) n = strlen(s.text);
    const char *input = s.text ? s.text : text;
    if (status == CLI_OK)
        status = o->decode ? decode(o, tk, input) : encode(o, tk, input, n);
    free(text);
    still_tokenizer_free(tk);
    return status;
}
