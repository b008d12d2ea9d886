/* chat.c - still chat: one question and its answer, or a conversation at a terminal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "cli/chat/reader.h"
#include "cli/chat/slash.h"
#include "cli/run.h"

enum { MOST_INPUT = 1 << 28 }; /* bytes of standard input, or of a system message */

/* Text of a file, or of standard input for "-"; white space at its end is dropped. */
static int read_text(const char *path, char **out)
{
    still_error err;
    size_t n;
    if (cli_read(path, MOST_INPUT, out, &n, &err)) return cli_fail_error(&err);
    if (strlen(*out) != n) {
        free(*out);
        *out = NULL;
        return cli_fail("%s: holds a byte 0, so it is no text",
                        strcmp(path, "-") ? path : "standard input");
    }
    while (n && strchr(" \t\r\n", (*out)[n - 1])) (*out)[--n] = 0;
    return CLI_OK;
}

static int set_system(cli_chat *c)
{
    const cli_options *o = &c->talk.o;
    char *text = NULL;
    if (o->system) return cli_talk_system(&c->talk, o->system);
    if (!o->system_file) return CLI_OK;
    int status = read_text(o->system_file, &text);
    if (status == CLI_OK) status = cli_talk_system(&c->talk, text);
    free(text);
    return status;
}

/* Ctrl-C and failures at a terminal end a turn, not the conversation. */
static int survive(cli_chat *c, int status)
{
    if (!c->tty || cli_terminated()) return status;
    if (cli_interrupted()) {
        fputs(
            status == CLI_INTERRUPTED
                ? "\n[stopped before the answer: the message was taken back, the arrow "
                  "key brings it up]\n"
                : "[stopped]\n",
            stderr);
        cli_interrupt_clear();
    }
    return CLI_OK;
}

static int take(cli_chat *c, const sti_buf *text)
{
    if (!text->n) { /* an edited question that is empty stays as it was */
        c->editing = false;
        return CLI_OK;
    }
    /* Pasted lines that begin with a path are no command. */
    const bool command = text->p[0] == '/' && !strchr(text->p, '\n');
    return survive(c, command ? cli_slash(c, text->p) : cli_say(c, text->p));
}

static int converse(cli_chat *c, cli_reader *r)
{
    sti_buf text = {0};
    int status = CLI_OK;
    while (!c->leave && status == CLI_OK && !cli_terminated() && cli_flush()) {
        if (!c->tty && cli_interrupted()) break;
        char *start = c->start;
        c->start = NULL;
        const cli_input got = cli_reader_next(r, start, &text);
        free(start);
        switch (got) {
        case CLI_INPUT_TEXT: status = take(c, &text); break;
        case CLI_INPUT_CLEARED: c->editing = false; break;
        case CLI_INPUT_LEAVE:
            c->editing = false;
            fputs("[/exit or Ctrl-D leaves, /help lists the commands]\n", stderr);
            break;
        case CLI_INPUT_END: c->leave = true; break;
        case CLI_INPUT_FAILED: status = cli_fail("out of memory: a message"); break;
        }
    }
    sti_buf_free(&text);
    return status == CLI_OK && cli_interrupted() ? CLI_INTERRUPTED : status;
}

/* Whether text waits on standard input: a file or a pipe, no terminal and no device. */
static bool piped(void)
{
    struct stat st;
    return fstat(STDIN_FILENO, &st) == 0 &&
           (S_ISREG(st.st_mode) || S_ISFIFO(st.st_mode));
}

/* A question of the command line, what is piped in, or both, as one message. */
static int ask_once(cli_chat *c, const char *question)
{
    char *input = NULL, *both = NULL;
    int status = CLI_OK;
    if (!question || piped()) status = read_text("-", &input);
    if (status == CLI_OK && question && input && *input &&
        asprintf(&both, "%s\n\n%s", question, input) < 0)
        status = cli_fail("out of memory: a message");
    const char *message = both ? both : question ? question : input;
    if (status == CLI_OK && !*message)
        status =
            cli_fail("standard input is empty: pipe a message in, or give it as an "
                     "argument: still chat MODEL 'QUESTION'");
    if (status == CLI_OK) status = cli_talk_turn(&c->talk, message);
    free(input);
    free(both);
    return status == CLI_OK && cli_interrupted() ? CLI_INTERRUPTED : status;
}

int cli_cmd_chat(const cli_options *given)
{
    const cli_options with = cli_with_text(given), *o = &with;
    const char *question = o->n_args > 1 ? o->arg[1] : NULL;
    const bool from_input = question && !strcmp(question, "-");
    if (from_input) question = NULL;
    cli_chat c = {0};
    if (o->system && o->system_file)
        return cli_usage("chat", "--system and --system-file exclude one another");
    if (question && o->lines)
        return cli_usage("chat",
                         "--lines reads messages from standard input; leave out "
                         "'%s'",
                         question);
    c.tty = !question && !from_input && isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    int status = cli_talk_open(&c.talk, o);
    if (status == CLI_OK) status = set_system(&c);
    if (status == CLI_OK && (question || from_input || (!c.tty && !o->lines))) {
        status = ask_once(&c, question);
    } else if (status == CLI_OK) {
        cli_reader r = {0};
        if (c.tty && !o->quiet) {
            cli_print_banner(&c);
            fputs("/help lists the commands, Ctrl-D leaves.\n", stderr);
        }
        status = cli_reader_open(&r);
        if (status == CLI_OK) status = converse(&c, &r);
        cli_reader_close(&r);
    }
    free(c.start);
    sti_buf_free(&c.read);
    cli_talk_close(&c.talk);
    return status;
}
