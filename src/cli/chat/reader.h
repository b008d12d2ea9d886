/* reader.h - where messages come from: an editor at a terminal, with the history of earlier
 * conversations, or the lines of a file or pipe. Three double quotes begin a message of
 * several lines, three more end it. */
#ifndef CLI_CHAT_READER_H
#define CLI_CHAT_READER_H

#include "cli/chat/editor.h"

typedef struct cli_reader {
    bool tty;
    cli_terminal terminal;
    cli_editor *editor;
    char *history; /* its file; NULL: none */
    sti_buf line;
} cli_reader;

/* A terminal on standard input and standard error is edited at. Close it also after
 * failure. */
int cli_reader_open(cli_reader *r);
void cli_reader_close(cli_reader *r);
/* The next message or command into *out. start: what its first line begins with, at a
 * terminal; NULL: nothing. */
cli_input cli_reader_next(cli_reader *r, const char *start, sti_buf *out);

#endif
