/* terminal.h - the keys of a terminal one by one, and what happens meanwhile: Ctrl-C, a
 * new size, Ctrl-Z, the end. Between open and close the terminal hands over bytes as they
 * come and echoes nothing, also while a reply is written: a line mode would drop what is
 * typed or pasted beyond 4,095 bytes. */
#ifndef CLI_CHAT_TERMINAL_H
#define CLI_CHAT_TERMINAL_H

#include <stdbool.h>
#include <stdint.h>
#include <termios.h>

typedef struct cli_terminal {
    struct termios before;
    int wake[2]; /* a pipe through which signals come */
    unsigned char byte[4096];
    unsigned at, n; /* those not yet taken */
    bool open;
} cli_terminal;

/* What is no character. */
enum {
    CLI_KEY_INTERRUPT = -1, /* Ctrl-C */
    CLI_KEY_RESIZED = -2,   /* the terminal, or it was another program's: draw again */
    CLI_KEY_END = -3        /* it has gone, or the program is to end */
};

/* Standard input is a terminal. False: it cannot be used so, and errno says why. */
bool cli_terminal_open(cli_terminal *t);
void cli_terminal_close(cli_terminal *t);
/* Mode of the terminal while a reply is written, and of the plain editor. */
void cli_terminal_quiet(const cli_terminal *t);
/* Before and after cli_terminal_key: signals come as keys. */
void cli_terminal_watch(cli_terminal *t, bool on);
/* Waits for the next character (its code point; U+FFFD for what is no UTF-8) or one of the
 * events above. */
int32_t cli_terminal_key(cli_terminal *t);

#endif
