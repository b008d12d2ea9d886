/* outputs.h - files that commands write where an option says so. That a file can be
 * written is found out before the work, not after it. */
#ifndef CLI_OUTPUTS_H
#define CLI_OUTPUTS_H

#include "base/buf.h"
#include "cli/options.h"

/* Looks at the paths of all options of a command that name outputs, makes the folders
 * that are for several files, and sets o->to_stdout where one is -, standard output. Has printed its error. */
int cli_check_outputs(const cli_command *command, cli_options *o);
/* Writes a text, complete or not at all; - is standard output. Has printed its error. */
int cli_write(const char *path, const sti_buf *text);

#endif
