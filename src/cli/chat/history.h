/* history.h - what was typed in earlier conversations:
 * ${XDG_STATE_HOME:-~/.local/state}/still/chat-history, a JSON string a line, newest last,
 * readable by its owner alone. Conversations at the same time append to one file. */
#ifndef CLI_CHAT_HISTORY_H
#define CLI_CHAT_HISTORY_H

#include "cli/cli.h"

/* Path of the file, whose folder is made; NULL: there is no place for it. free() it. */
char *cli_history_path(void);
/* Calls each for every text, oldest first. A damaged line is skipped. */
void cli_history_load(const char *path, void (*each)(void *user, const char *text),
                      void *user);
/* Appends a text; a history that cannot be written is no reason to stop. */
void cli_history_add(const char *path, const char *text);

#endif
