/* slash.h - a chat at work: the conversation, and the commands that begin with a slash. */
#ifndef CLI_CHAT_SLASH_H
#define CLI_CHAT_SLASH_H

#include "cli/chat/talk.h"

typedef struct cli_chat {
    cli_talk talk;
    sti_buf read; /* by /read: goes before the next message */
    char *start;  /* by /edit: what the next line begins with, or NULL */
    bool editing; /* the next message takes the place of the last one */
    bool tty;
    bool leave;
} cli_chat;

/* Runs the command. A status other than CLI_OK has printed why. */
int cli_slash(cli_chat *c, const char *line);
/* Sends a message, with what /read has read before it. */
int cli_say(cli_chat *c, const char *message);
/* What runs: model, adapter, method, memory. */
void cli_print_banner(const cli_chat *c);

#endif
