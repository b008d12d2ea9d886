/* remove.h - taking a model out of our cache. */
#ifndef CLI_FETCH_REMOVE_H
#define CLI_FETCH_REMOVE_H

#include "still.h"

/* What would go: the bytes of NAME[:SUFFIX] in our cache, unfinished downloads included,
 * and the folder. STILL_E_ARG with what to do instead if it is not there, or is a link.
 * free() *folder. */
still_status cli_cache_measure(const char *name, uint64_t *bytes, char **folder,
                               still_error *err);
/* Removes it: the whole folder, or the files that the suffix means and the folder if they
 * were the last. Links are removed, never followed. */
still_status cli_cache_remove(const char *name, still_error *err);

#endif
