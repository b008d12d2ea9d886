/* slash.c - see slash.h. Remarks are in brackets, on standard error. */
#include "cli/chat/slash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

typedef struct command {
    const char *name, *argument, *help;
    int (*run)(cli_chat *c, const char *argument);
} command;

/* ---- The conversation ---------------------------------------------------- */

int cli_say(cli_chat *c, const char *message)
{
    if (c->editing) cli_talk_undo(&c->talk);
    c->editing = false;
    if (!c->read.n) return cli_talk_turn(&c->talk, message);
    sti_buf whole = {0};
    sti_buf_printf(&whole, "%s\n\n%s", c->read.p, message);
    const int status =
        whole.failed ? cli_fail("out of memory: a message of %zu bytes", c->read.n)
                     : cli_talk_turn(&c->talk, whole.p);
    if (status == CLI_OK) sti_buf_clear(&c->read);
    sti_buf_free(&whole);
    return status;
}

static int note_nothing(const char *what)
{
    cli_note("[nothing to %s: there is no question yet]\n", what);
    return CLI_OK;
}

static int regen(cli_chat *c, const char *argument)
{
    (void)argument;
    const char *last = cli_talk_last(&c->talk);
    if (!last) return note_nothing("answer again");
    char *again = sti_strdup(last);
    if (!again) return cli_fail("out of memory: a message");
    if (c->talk.o.temp == 0)
        fputs("[at temperature 0 the answer is the same; /set temp 0.7 varies it]\n",
              stderr);
    cli_talk_undo(&c->talk);
    const int status = cli_talk_turn(&c->talk, again);
    free(again);
    return status;
}

static int edit(cli_chat *c, const char *argument)
{
    const char *last = cli_talk_last(&c->talk);
    if (!last) return note_nothing("edit");
    c->editing = true;
    if (*argument) return cli_say(c, argument);
    if (!c->tty) {
        c->editing = false;
        return cli_fail(
            "/edit needs a terminal; /edit TEXT replaces the last question");
    }
    c->start = sti_strdup(last);
    if (!c->start) return cli_fail("out of memory: a message");
    fputs("[change your question; Ctrl-C leaves it as it was]\n", stderr);
    return CLI_OK;
}

static int undo(cli_chat *c, const char *argument)
{
    (void)argument;
    if (!cli_talk_undo(&c->talk)) return note_nothing("undo");
    fputs("[the last question and its answer are taken back]\n", stderr);
    return CLI_OK;
}

static int reset(cli_chat *c, const char *argument)
{
    (void)argument;
    cli_talk_reset(&c->talk);
    sti_buf_clear(&c->read);
    fputs("[the conversation starts over]\n", stderr);
    return CLI_OK;
}

static int set_system(cli_chat *c, const char *argument)
{
    fputs(*argument ? "[system message set; the conversation starts over]\n"
                    : "[no system message; the conversation starts over]\n",
          stderr);
    return cli_talk_system(&c->talk, argument);
}

/* ---- Files --------------------------------------------------------------- */

static int read_file(cli_chat *c, const char *argument)
{
    still_error err;
    char *text, size[32];
    size_t n;
    if (still_text_read(argument, &text, &n, &err)) return cli_fail_error(&err);
    if (strlen(text) != n) {
        free(text);
        return cli_fail("%s: holds a byte 0, so it is no text", argument);
    }
    if (c->read.n) sti_buf_puts(&c->read, "\n\n");
    sti_buf_put(&c->read, text, n);
    free(text);
    if (c->read.failed) {
        sti_buf_free(&c->read);
        return cli_fail("%s: out of memory: %zu bytes", argument, n);
    }
    cli_note("[%s: %s go before your next message]\n", argument, cli_bytes(size, n));
    return CLI_OK;
}

static int save(cli_chat *c, const char *argument)
{
    const int status = cli_talk_save(&c->talk, argument);
    if (status == CLI_OK)
        cli_note("[%zu messages saved; /load %s brings them back]\n", c->talk.n,
                 argument);
    return status;
}

static int load(cli_chat *c, const char *argument)
{
    const int status = cli_talk_load(&c->talk, argument);
    if (status == CLI_OK)
        cli_note("[%zu messages loaded; they are read with your next one]\n",
                 c->talk.n);
    return status;
}

/* ---- Settings and figures ------------------------------------------------ */

/* Options that /set changes: those of sampling, and the length of a reply. */
static bool changes(const cli_command *chat, const cli_option *o)
{
    return (o->commands & chat->bit) &&
           (o->group == CLI_G_SAMPLING || !strcmp(o->name, "n-predict"));
}

static void put_value(sti_buf *to, const cli_option *o, const cli_options *options)
{
    const void *at = (const char *)options + o->at;
    if (o->kind == CLI_REAL)
        sti_buf_printf(to, "%g", *(const double *)at);
    else if (o->kind == CLI_SEED)
        sti_buf_printf(to, "%llu", (unsigned long long)*(const uint64_t *)at);
    else
        sti_buf_printf(to, "%lld", (long long)*(const int64_t *)at);
}

static void print_settings(const cli_chat *c)
{
    const cli_command *chat = cli_command_find("chat");
    sti_buf line = {0};
    for (const cli_option *o = cli_option_table; o->name; o++) {
        if (!changes(chat, o)) continue;
        sti_buf_printf(&line, "  /set %-15s ", o->name);
        put_value(&line, o, &c->talk.o);
        sti_buf_puts(&line, "\n");
    }
    cli_note("%s", line.failed ? "" : line.p);
    sti_buf_free(&line);
}

static int set(cli_chat *c, const char *argument)
{
    const cli_command *chat = cli_command_find("chat");
    char name[64];
    const size_t n = strcspn(argument, " =");
    const char *value = argument + n + strspn(argument + n, " =");
    if (!*argument) {
        print_settings(c);
        return CLI_OK;
    }
    snprintf(name, sizeof name, "%.*s", (int)(n < sizeof name ? n : sizeof name - 1),
             argument);
    for (const cli_option *o = cli_option_table; o->name; o++) {
        const char letter[2] = {o->letter, 0};
        if (!changes(chat, o) ||
            (strcmp(name, o->name) != 0 && strcmp(name, letter) != 0))
            continue;
        if (!*value) return cli_fail("/set %s needs a value: /set lists them", o->name);
        const cli_options before = c->talk.o;
        int status = cli_set_option(chat, o, value, &c->talk.o);
        if (status == CLI_OK && o->group == CLI_G_SAMPLING) {
            if (o->kind == CLI_SEED) c->talk.samplers = 0;
            status = cli_talk_sampler(&c->talk);
        }
        if (status != CLI_OK) c->talk.o = before;
        return status;
    }
    return cli_fail("/set knows no '%s': /set alone lists what it knows", name);
}

void cli_print_banner(const cli_chat *c)
{
    const cli_talk *t = &c->talk;
    const still_model_info *info = still_model_get_info(t->model);
    char name[256], method[160], bytes[32], adapter[256];
    const char *base = info->adapter ? strrchr(info->adapter, '/') : NULL;
    cli_line(name, sizeof name, info->name && *info->name ? info->name : info->path);
    cli_line(adapter, sizeof adapter,
             !info->adapter    ? "none"
             : base && base[1] ? base + 1
                               : info->adapter);
    cli_note("%s, adapter %s\n%s; ", name, adapter,
             cli_describe_method(&t->method, method, sizeof method));
    const int limit = still_session_limit(t->session);
    if (t->constant && !t->o.ctx)
        cli_note("%s of memory for a conversation of any length\n",
                 cli_bytes(bytes, t->bytes));
    else
        cli_note("%s of memory for %d tokens\n", cli_bytes(bytes, t->bytes), limit);
}

static int show(cli_chat *c, const char *argument)
{
    (void)argument;
    const cli_talk *t = &c->talk;
    cli_print_banner(c);
    if (t->n && !strcmp(t->msg[0].role, "system"))
        cli_note("system message: %s\n", t->msg[0].content);
    print_settings(c);
    return CLI_OK;
}

static double rate(size_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

static int stats(cli_chat *c, const char *argument)
{
    (void)argument;
    const cli_talk *t = &c->talk;
    char past[32], peak[32];
    if (t->total.turns)
        cli_note("last turn: %zu tokens read at %.1f a second, %zu written at %.1f\n",
                 t->last.prompt, rate(t->last.prompt, t->last.prompt_s), t->last.reply,
                 rate(t->last.reply, t->last.reply_s));
    if (t->total.turns > 1)
        cli_note("%zu turns: %zu tokens read at %.1f a second, %zu written at %.1f\n",
                 t->total.turns, t->total.prompt,
                 rate(t->total.prompt, t->total.prompt_s), t->total.reply,
                 rate(t->total.reply, t->total.reply_s));
    if (t->constant && !t->o.ctx)
        cli_note("context: %d tokens, without limit\n",
                 still_session_length(t->session));
    else
        cli_note("context: %d tokens of %d\n", still_session_length(t->session),
                 still_session_limit(t->session));
    cli_note("memory: %s of the conversation%s; the program took %s at most\n",
             cli_bytes(past, t->bytes),
             t->before.state ? ", and as much to go back to" : "",
             cli_bytes(peak, cli_peak_rss()));
    return CLI_OK;
}

static int leave(cli_chat *c, const char *argument)
{
    (void)argument;
    c->leave = true;
    return CLI_OK;
}

/* ---- The table ----------------------------------------------------------- */

static int help(cli_chat *c, const char *argument);

static const command commands[] = {
    {"/regen", NULL, "answer the last question again", regen},
    {"/edit", "[TEXT]", "change the last question and send it again", edit},
    {"/undo", NULL, "take back the last question and its answer", undo},
    {"/read", "FILE", "put the text of a file before your next message", read_file},
    {"/save", "FILE", "write the conversation to a file (JSON)", save},
    {"/load", "FILE", "go on with a conversation from a file", load},
    {"/system", "[TEXT]", "set the system message and start over", set_system},
    {"/reset", NULL, "forget the conversation, keep the system message", reset},
    {"/set", "[NAME VALUE]", "change how replies are chosen; alone: list the settings",
     set},
    {"/show", NULL, "what runs: model, adapter, method, memory, settings", show},
    {"/stats", NULL, "tokens a second and memory", stats},
    {"/help", NULL, "this list", help},
    {"/exit", NULL, "leave (also /quit, Ctrl-D)", leave},
    {"/quit", NULL, NULL, leave},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static int help(cli_chat *c, const char *argument)
{
    (void)argument;
    (void)c;
    for (int i = 0; i < COMMANDS; i++)
        if (commands[i].help)
            cli_note("%-8s %-13s %s\n", commands[i].name,
                     commands[i].argument ? commands[i].argument : "",
                     commands[i].help);
    fputs("\"\"\" begins and ends a message of several lines; pasted lines are one "
          "message, and Alt-Enter begins a new line.\n"
          "Ctrl-C stops a reply or drops what you are typing.\n",
          stderr);
    return CLI_OK;
}

int cli_slash(cli_chat *c, const char *line)
{
    const size_t n = strcspn(line, " ");
    const char *argument = line + n + strspn(line + n, " ");
    for (int i = 0; i < COMMANDS; i++) {
        const command *k = &commands[i];
        if (strlen(k->name) != n || memcmp(k->name, line, n) != 0) continue;
        if (k->argument && k->argument[0] != '[' && !*argument)
            return cli_fail("%s needs a file: %s %s", k->name, k->name, k->argument);
        if (!k->argument && *argument)
            return cli_fail("%s takes nothing after it: /help lists the commands",
                            k->name);
        return k->run(c, argument);
    }
    return cli_fail(
        "%.*s is no command: /help lists them; to send it as a message, put a "
        "space before it",
        (int)(n < 64 ? n : 64), line);
}
