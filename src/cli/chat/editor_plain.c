/* editor_plain.c - see editor.h; for builds without libedit. Erases at the end of the line
 * (Backspace, Ctrl-U) and knows pasted text; other control keys do nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "cli/chat/editor.h"
#include "cli/cli.h"

enum { CTRL_D = 4, BACKSPACE = 8, CTRL_U = 21, ESCAPE = 27, DELETE = 127 };

struct cli_editor {
    cli_terminal *terminal;
    bool pasting;
};

cli_editor *cli_editor_new(cli_terminal *t)
{
    cli_editor *e = sti_alloc(1, sizeof *e);
    if (e) e->terminal = t;
    return e;
}

void cli_editor_free(cli_editor *e)
{
    free(e);
}

void cli_editor_remember(cli_editor *e, const char *text)
{
    (void)e; /* there are no keys to recall it with */
    (void)text;
}

/* ESC [ 200 ~ begins a paste, ESC [ 201 ~ ends it; other sequences are skipped. */
static int32_t skip_sequence(cli_editor *e)
{
    int number = 0;
    int32_t c = cli_terminal_key(e->terminal);
    if (c != '[') return c < 0 ? c : 0;
    do {
        c = cli_terminal_key(e->terminal);
        if (c >= '0' && c <= '9' && number < 1000) number = 10 * number + c - '0';
    } while (c >= 0x20 && c < 0x40);
    if (c == '~' && (number == 200 || number == 201)) e->pasting = number == 200;
    return c < 0 ? c : 0;
}

static void erase(sti_buf *line)
{
    while (line->n && ((unsigned char)line->p[line->n - 1] & 0xC0) == 0x80) line->n--;
    if (!line->n) return;
    line->p[--line->n] = 0;
    fputs("\b \b", stderr);
}

static void add(sti_buf *line, int32_t c)
{
    char u[5] = "";
    sti_utf8_encode((uint32_t)c, u);
    sti_buf_puts(line, u);
    cli_note("%s", u);
}

cli_input cli_editor_read(cli_editor *e, const char *prompt, const char *start,
                          sti_buf *out)
{
    cli_input why = CLI_INPUT_TEXT;
    sti_buf_clear(out);
    sti_buf_puts(out, start ? start : "");
    e->pasting = false;
    cli_note("%s%s", prompt, out->failed ? "" : out->p);
    cli_terminal_watch(e->terminal, true);
    for (;;) {
        int32_t c = cli_terminal_key(e->terminal);
        if (c == ESCAPE) c = skip_sequence(e);
        if (out->failed) {
            why = CLI_INPUT_FAILED;
            break;
        }
        if (c == CLI_KEY_INTERRUPT) {
            why = out->n ? CLI_INPUT_CLEARED : CLI_INPUT_LEAVE;
            break;
        }
        if (c == CLI_KEY_END || (c == CTRL_D && !out->n)) {
            why = CLI_INPUT_END;
            break;
        }
        if ((c == '\n' || c == '\r') && !e->pasting) break;
        if (c == BACKSPACE || c == DELETE) erase(out);
        while (c == CTRL_U && out->n) erase(out);
        if (c == '\n' || c == '\r' || c == '\t' || c >= 0x20) {
            if (c != DELETE) add(out, c == '\r' ? '\n' : c);
        }
    }
    cli_terminal_watch(e->terminal, false);
    fputc('\n', stderr);
    return why;
}
