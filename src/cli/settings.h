/* settings.h - what the user has said once for all: a file and the environment. */
#ifndef CLI_SETTINGS_H
#define CLI_SETTINGS_H

#include "cli/options.h"

/* Sets options of a command to what $XDG_CONFIG_HOME/still/config says, then to what
 * STILL_* variables say, before its arguments are read. *text is what strings in o point
 * to: free() it after the command. Returns CLI_OK, or a status whose line was printed. */
int cli_settings(const cli_command *c, cli_options *o, char **text);

#endif
