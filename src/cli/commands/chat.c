/* chat.c - still chat: a conversation in the model's own format.
 *
 * Each turn renders the whole conversation as text, but only what the session has
 * not yet seen is tokenized and fed: the session already holds the previous text and
 * the reply's own tokens. If the text does not continue what was seen (a stop string
 * cut a reply, a turn was undone, old turns were dropped), the session rolls back to
 * where both agree, as far as its method can. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "cli/chat_template.h"
#include "cli/run.h"

enum { MOST_CONTEXT = 8192 }; /* by default, since a long cache costs memory */

typedef struct chat {
    const cli_options *o;
    bool tty; /* input is a terminal */
    still_model *model;
    const still_tokenizer *tk;
    cli_chat_template form;
    still_session *session;
    still_sampler *sampler;
    still_message *msg; /* contents are owned; a system message comes first */
    size_t n;
    int32_t *held; /* [limit]: ids the session holds, n_held of them */
    size_t n_held;
    char *seen;      /* rendered text the session holds, without the last reply */
    cli_reply reply; /* the last reply; its text follows `seen` */
} chat;

static void forget_session(chat *c)
{
    still_session_reset(c->session);
    c->n_held = 0;
    free(c->seen);
    c->seen = NULL;
    cli_reply_free(&c->reply);
}

/* Rolls the session back to where it agrees with ids, and removes from ids those it
 * then holds. At least one id is left to feed. */
static void go_back(chat *c, int32_t *ids, size_t *n)
{
    size_t same = 0;
    int at = 0;
    while (same < c->n_held && same + 1 < *n && c->held[same] == ids[same]) same++;
    if (still_session_rollback(c->session, (int)same, &at, NULL) != STILL_OK) at = 0;
    if (at == 0) still_session_reset(c->session);
    c->n_held = (size_t)at;
    *n -= (size_t)at;
    memmove(ids, ids + at, *n * sizeof *ids);
    free(c->seen);
    c->seen = NULL;
    cli_reply_free(&c->reply);
}

static void hold(chat *c, const int32_t *ids, size_t n)
{
    if (n) memcpy(c->held + c->n_held, ids, n * sizeof *ids);
    c->n_held += n;
}

static int add_message(chat *c, const char *role, const char *text, size_t n)
{
    still_message *grown = sti_grow(c->msg, c->n + 1, sizeof *c->msg);
    char *copy = grown ? sti_strndup(text, n) : NULL;
    if (grown) c->msg = grown;
    if (!copy) return cli_fail("out of memory: a message of %zu bytes", n);
    c->msg[c->n++] = (still_message){role, copy};
    return CLI_OK;
}

static void remove_message(chat *c, size_t i)
{
    free((char *)c->msg[i].content);
    memmove(c->msg + i, c->msg + i + 1, (c->n - i - 1) * sizeof *c->msg);
    c->n--;
}

static bool has_system(const chat *c)
{
    return c->n > 0 && !strcmp(c->msg[0].role, "system");
}

/* Drops the oldest question and its answer; false if only the newest is left. */
static bool drop_oldest_turn(chat *c)
{
    size_t first = has_system(c);
    if (c->n < first + 2) return false;
    do remove_message(c, first);
    while (c->n > first + 1 && strcmp(c->msg[first].role, "user") != 0);
    return true;
}

static void start_over(chat *c)
{
    while (c->n > (size_t)has_system(c)) remove_message(c, c->n - 1);
    forget_session(c);
}

static int set_system(chat *c, const char *text)
{
    while (c->n) remove_message(c, c->n - 1);
    forget_session(c);
    return *text ? add_message(c, "system", text, strlen(text)) : CLI_OK;
}

/* The part of text that follows what the session holds; NULL if text does not
 * continue it. Templates trim a reply or add a space before it, so white space
 * around it is ignored. */
static const char *unseen(const chat *c, const char *text)
{
    if (!c->seen || c->reply.cut) return NULL;
    size_t n = strlen(c->seen);
    if (strncmp(text, c->seen, n) != 0) return NULL;
    text += n;
    const char *said = c->reply.text.n ? c->reply.text.p : "";
    size_t length = c->reply.text.n;
    while (length && isspace((unsigned char)*said)) said++, length--;
    while (length && isspace((unsigned char)said[length - 1])) length--;
    while (isspace((unsigned char)*text) && length) text++;
    return strncmp(text, said, length) == 0 ? text + length : NULL;
}

/* Ids to feed for `r`, the whole conversation: the reply's tokens that were shown
 * but not fed, then the unseen text. *fresh: the session must start over. */
static int ids_for(const chat *c, const still_rendering *r, int32_t **ids, size_t *n,
                   bool *fresh)
{
    const char *rest = unseen(c, r->text);
    *fresh = !rest;
    if (!rest) rest = r->text;
    int status = cli_chat_encode(c->tk, r, (size_t)(rest - r->text), ids, n);
    size_t owed = *fresh ? 0 : c->reply.n_tokens - c->reply.n_fed;
    if (status != CLI_OK || !owed) return status;
    int32_t *all = sti_alloc(owed + *n, sizeof *all);
    if (!all) {
        free(*ids);
        *ids = NULL;
        return cli_fail("out of memory: %zu tokens", owed + *n);
    }
    memcpy(all, c->reply.token + c->reply.n_fed, owed * sizeof *all);
    memcpy(all + owed, *ids, *n * sizeof *all);
    free(*ids);
    *ids = all;
    *n += owed;
    return CLI_OK;
}

/* Renders the conversation and finds what to feed, dropping old turns until it fits
 * with room for a reply. */
static int prepare(chat *c, still_rendering *r, int32_t **ids, size_t *n)
{
    still_error err;
    size_t limit = (size_t)still_session_limit(c->session);
    size_t capacity = (size_t)c->o->n < limit / 4 ? (size_t)c->o->n : limit / 4;
    int dropped = 0;
    for (;;) {
        bool fresh;
        *ids = NULL;
        const still_conversation talk = {.message = c->msg,
                                         .n_messages = c->n,
                                         .add_generation_prompt = true,
                                         .variables = c->form.variables};
        if (still_chat_render(c->tk, c->form.text, &talk, r, &err))
            return cli_fail_error(&err);
        int status = ids_for(c, r, ids, n, &fresh);
        if (status != CLI_OK) {
            still_rendering_free(r);
            return status;
        }
        size_t held = fresh ? 0 : (size_t)still_session_length(c->session);
        if (held + *n + capacity <= limit) {
            if (fresh) go_back(c, *ids, n);
            if (dropped && !c->o->quiet)
                cli_note("[the context of %zu tokens is full: forgot the oldest %d "
                         "turn%s]\n",
                         limit, dropped, dropped > 1 ? "s" : "");
            return CLI_OK;
        }
        still_rendering_free(r);
        free(*ids);
        *ids = NULL;
        if (!drop_oldest_turn(c))
            return cli_fail(
                "the message has %zu tokens, the context holds %zu of which "
                "%zu are kept for the reply: shorten it or raise --ctx",
                *n, limit, capacity);
        dropped++;
    }
}

static int print_reply(const chat *c, double prefill_s, size_t n_prompt)
{
    const cli_reply *r = &c->reply;
    if (!c->o->json) {
        cli_put("\n", 1);
        cli_flush();
        if (!strcmp(r->stop, "length") && !c->o->quiet)
            fputs("[the reply was cut: see -n and --ctx]\n", stderr);
        return CLI_OK;
    }
    return cli_print_json(json_pack(
        "{s:o, s:s, s:I, s:I, s:f, s:f}", "reply", cli_json_text(r->text.p, r->text.n),
        "stop", r->stop, "prompt_tokens", (json_int_t)n_prompt, "tokens",
        (json_int_t)r->n_tokens, "prefill_s", prefill_s, "decode_s", r->seconds));
}

/* One message and its reply. After a failure that the conversation survives (too long a
 * message), it is unchanged. */
static int turn(chat *c, const char *message)
{
    still_rendering r = {0};
    int32_t *ids = NULL;
    size_t n = 0;
    int status = add_message(c, "user", message, strlen(message));
    if (status != CLI_OK) return status;
    status = prepare(c, &r, &ids, &n);
    if (status != CLI_OK || !ids) {
        remove_message(c, c->n - 1);
        return status;
    }
    double start = cli_now();
    status = cli_feed(c->o, c->session, ids, n);
    double prefill_s = cli_now() - start;
    for (size_t i = 0; i < n; i++) still_sampler_accept(c->sampler, ids[i]);
    if (status == CLI_OK) hold(c, ids, n);
    free(ids);
    cli_reply_free(&c->reply);
    free(c->seen);
    c->seen = r.text;
    r.text = NULL;
    still_rendering_free(&r);
    if (status == CLI_OK)
        status = cli_generate(c->o, c->session, c->sampler, c->tk, &c->reply);
    if (status != CLI_OK) {
        remove_message(c, c->n - 1);
        forget_session(c);
        return status;
    }
    hold(c, c->reply.token, c->reply.n_fed);
    status = print_reply(c, prefill_s, n);
    if (status != CLI_OK) return status;
    return add_message(c, "assistant", c->reply.text.n ? c->reply.text.p : "",
                       c->reply.text.n);
}

/* Removes the last question and its answer from the conversation. */
static bool undo(chat *c)
{
    size_t first = has_system(c);
    if (c->n < first + 2) return false;
    remove_message(c, c->n - 1);
    remove_message(c, c->n - 1);
    free(c->seen); /* the session no longer ends where the text does */
    c->seen = NULL;
    return true;
}

/* A line that starts with '/'. Sets *leave for /exit. */
static int slash(chat *c, const char *line, bool *leave)
{
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit")) {
        *leave = true;
    } else if (!strcmp(line, "/reset")) {
        start_over(c);
        fputs("[the conversation starts over]\n", stderr);
    } else if (!strcmp(line, "/undo")) {
        fputs(undo(c) ? "[the last exchange is taken back]\n" : "[nothing to undo]\n",
              stderr);
    } else if (!strncmp(line, "/system", 7) && (!line[7] || line[7] == ' ')) {
        fputs("[system message set; the conversation starts over]\n", stderr);
        return set_system(c, line + 7 + strspn(line + 7, " "));
    } else if (!strcmp(line, "/help")) {
        fputs("/undo         take back the last question and its answer\n"
              "/reset        forget the conversation, keep the system message\n"
              "/system TEXT  set the system message and start over\n"
              "/exit         leave (also Ctrl-D)\n"
              "Ctrl-C stops a reply; pressed again it leaves.\n",
              stderr);
    } else {
        cli_note("[unknown command; /help lists them]\n");
    }
    return CLI_OK;
}

static int converse(chat *c)
{
    char *line = NULL;
    size_t capacity = 0;
    int status = CLI_OK;
    for (bool leave = false; !leave && cli_flush();) {
        if (c->tty) fputs("> ", stderr);
        ssize_t n = getline(&line, &capacity, stdin);
        if (n < 0) {
            if (c->tty) fputc('\n', stderr);
            if (cli_interrupted()) status = CLI_INTERRUPTED;
            break;
        }
        while (n && isspace((unsigned char)line[n - 1])) line[--n] = 0;
        if (!n) continue;
        status = line[0] == '/' ? slash(c, line, &leave) : turn(c, line);
        if (cli_interrupted() && c->tty) { /* only the reply was stopped */
            cli_interrupt_clear();
            status = CLI_OK;
            fputs("[stopped]\n", stderr);
        }
        if (status != CLI_OK && !c->tty) break;
        if (cli_interrupted()) {
            status = CLI_INTERRUPTED;
            break;
        }
    }
    free(line);
    return c->tty && status == CLI_FAILED ? CLI_OK : status;
}

static int open_chat(chat *c)
{
    const cli_options *o = c->o;
    int status = cli_chat_template_read("chat", o, &c->form);
    if (status == CLI_OK) status = cli_open_model(o, o->arg[0], &c->model);
    if (status != CLI_OK) return status;
    status = cli_need_tokenizer(c->model, &c->tk);
    if (status != CLI_OK) return status;
    const still_model_info *info = still_model_get_info(c->model);
    if (!c->form.text && !still_tokenizer_chat_template(c->tk))
        return cli_fail(
            "%s: brings no chat template: name one with --chat-template, or "
            "use `still generate` for plain text",
            info->path);
    int64_t ctx = o->ctx                                              ? o->ctx
                  : info->ctx_train && info->ctx_train < MOST_CONTEXT ? info->ctx_train
                                                                      : MOST_CONTEXT;
    status = cli_open_session(o, c->model, ctx, &c->session);
    if (status == CLI_OK) status = cli_open_sampler(o, c->model, &c->sampler);
    c->held = sti_alloc((size_t)ctx, sizeof *c->held);
    if (status == CLI_OK && !c->held)
        status = cli_fail("out of memory: a context of %lld tokens", (long long)ctx);
    if (status == CLI_OK && o->system) status = set_system(c, o->system);
    char name[256];
    if (status == CLI_OK && c->tty && !o->quiet)
        cli_note("%s, %lld tokens of context. /help lists commands, Ctrl-D "
                 "leaves.\n",
                 cli_line(name, sizeof name,
                          info->name && *info->name ? info->name : info->path),
                 (long long)ctx);
    return status;
}

int cli_cmd_chat(const cli_options *o)
{
    chat c = {.o = o, .tty = isatty(STDIN_FILENO) == 1};
    int status = open_chat(&c);
    if (status == CLI_OK) status = converse(&c);
    while (c.n) remove_message(&c, c.n - 1);
    free(c.msg);
    cli_chat_template_free(&c.form);
    free(c.seen);
    free(c.held);
    cli_reply_free(&c.reply);
    still_sampler_free(c.sampler);
    still_session_free(c.session);
    still_model_free(c.model);
    return status;
}
