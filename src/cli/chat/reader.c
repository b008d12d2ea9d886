/* reader.c - see reader.h. */
#include "cli/chat/reader.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/chat/history.h"
#include "cli/cli.h"

#define QUOTES "\"\"\""

static void recall(void *editor, const char *text)
{
    cli_editor_remember(editor, text);
}

int cli_reader_open(cli_reader *r)
{
    *r = (cli_reader){.tty = isatty(STDIN_FILENO) && isatty(STDERR_FILENO)};
    if (!r->tty) return CLI_OK;
    cli_signals_mode(CLI_SIGNALS_FLAG);
    if (!cli_terminal_open(&r->terminal))
        return cli_fail(
            "the terminal cannot be used; pipe the message in, or give it as "
            "an argument: still chat MODEL 'QUESTION'");
    r->editor = cli_editor_new(&r->terminal);
    if (!r->editor) return cli_fail("out of memory: a line of input");
    r->history = cli_history_path();
    if (r->history) cli_history_load(r->history, recall, r->editor);
    return CLI_OK;
}

void cli_reader_close(cli_reader *r)
{
    cli_editor_free(r->editor);
    cli_terminal_close(&r->terminal);
    free(r->history);
    sti_buf_free(&r->line);
}

static cli_input read_line(cli_reader *r, const char *prompt, const char *start)
{
    if (r->tty) return cli_editor_read(r->editor, prompt, start, &r->line);
    int c;
    sti_buf_clear(&r->line);
    sti_buf_put(&r->line, "", 0);
    while ((c = getc(stdin)) != EOF && c != '\n') {
        const char byte = (char)c;
        sti_buf_put(&r->line, &byte, 1);
    }
    if (r->line.failed) return CLI_INPUT_FAILED;
    return c == EOF && !r->line.n ? CLI_INPUT_END : CLI_INPUT_TEXT;
}

static void trim_end(sti_buf *b)
{
    while (b->n && isspace((unsigned char)b->p[b->n - 1])) b->p[--b->n] = 0;
}

/* Whether b has a closing mark at its end; then it is taken away. */
static bool close_block(sti_buf *b)
{
    const size_t n = strlen(QUOTES);
    trim_end(b);
    if (b->n < n || memcmp(b->p + b->n - n, QUOTES, n) != 0) return false;
    b->n -= n;
    b->p[b->n] = 0;
    return true;
}

/* The first line began with quotes, and *out is what follows them: further lines until
 * one ends with quotes. */
static cli_input read_block(cli_reader *r, sti_buf *out)
{
    while (!close_block(out)) {
        const cli_input got = read_line(r, "... ", NULL);
        if (got == CLI_INPUT_END) {
            fputs("[the block has no " QUOTES " at its end: nothing was sent]\n",
                  stderr);
            return got;
        }
        if (got != CLI_INPUT_TEXT)
            return got == CLI_INPUT_LEAVE ? CLI_INPUT_CLEARED : got;
        sti_buf_puts(out, "\n");
        sti_buf_put(out, r->line.p, r->line.n);
    }
    trim_end(out);
    return out->failed ? CLI_INPUT_FAILED : CLI_INPUT_TEXT;
}

cli_input cli_reader_next(cli_reader *r, const char *start, sti_buf *out)
{
    sti_buf_clear(out);
    cli_input got = read_line(r, "> ", start);
    if (got != CLI_INPUT_TEXT) return got;
    trim_end(&r->line);
    if (strncmp(r->line.p, QUOTES, strlen(QUOTES)) == 0) {
        const char *text = r->line.p + strlen(QUOTES);
        sti_buf_puts(out, text + (*text == '\n'));
        got = read_block(r, out);
        if (got != CLI_INPUT_TEXT) return got;
        if (out->n && out->p[0] == '\n') { /* the quotes had a line of their own */
            memmove(out->p, out->p + 1, out->n);
            out->n--;
        }
    } else {
        sti_buf_put(out, r->line.p, r->line.n);
    }
    if (out->failed) return CLI_INPUT_FAILED;
    if (r->tty && out->n) {
        cli_editor_remember(r->editor, out->p);
        if (r->history) cli_history_add(r->history, out->p);
    }
    return CLI_INPUT_TEXT;
}
