/* collect.h - the files that tasks need, out of a folder or an archive that has them ready. */
#ifndef CLI_DATA_COLLECT_H
#define CLI_DATA_COLLECT_H

#include "cli/options.h"

/* Copies what tasks need from o->arg[0] to `folder`, prints what was copied and what tasks
 * lack. *status: what the command returns. */
still_status cli_collect(const cli_options *o, const char *folder, int *status,
                         still_error *err);

#endif
