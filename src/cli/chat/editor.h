/* editor.h - one line of input at a terminal, of any length, that can be edited and
 * recalled; pasted text may have several lines. With libedit (editor_libedit.c): cursor keys, search,
 * history. In builds without it (editor_plain.c): erasing at the end alone. */
#ifndef CLI_CHAT_EDITOR_H
#define CLI_CHAT_EDITOR_H

#include "base/buf.h"
#include "cli/chat/terminal.h"

typedef struct cli_editor cli_editor;

typedef enum cli_input {
    CLI_INPUT_TEXT,    /* a text, without the newline that ended it */
    CLI_INPUT_CLEARED, /* Ctrl-C: what was typed is dropped */
    CLI_INPUT_LEAVE,   /* Ctrl-C where nothing was typed */
    CLI_INPUT_END,     /* Ctrl-D where nothing was typed, or the end of the input */
    CLI_INPUT_FAILED   /* no memory */
} cli_input;

/* NULL: no memory, or a terminal that cannot be used. */
cli_editor *cli_editor_new(cli_terminal *t);
void cli_editor_free(cli_editor *e);
/* Reads into *out, which is emptied first. start: text that is there already; NULL: none. */
cli_input cli_editor_read(cli_editor *e, const char *prompt, const char *start,
                          sti_buf *out);
/* A text that the arrow keys bring back, newest last. */
void cli_editor_remember(cli_editor *e, const char *text);

#endif
