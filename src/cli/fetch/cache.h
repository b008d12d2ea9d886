/* cache.h - where models live: ${XDG_CACHE_HOME:-~/.cache}/still/models/NAME. Tokenized
 * training data is beside them, in still/tokens. */
#ifndef CLI_FETCH_CACHE_H
#define CLI_FETCH_CACHE_H

#include "still.h"

#define CLI_DEFAULT_MODEL "smollm2"
#define CLI_SMOLLM2_FILE "SmolLM2-135M-Instruct.Q4_1.gguf"

/* The user's home folder. free() *out. */
still_status cli_home(char **out, still_error *err);
/* still/KIND[/NAME] in the cache; it need not exist. free() *out. */
still_status cli_cache_place(const char *kind, const char *name, char **out,
                             still_error *err);
/* The folder of a model in the cache; it need not exist. free() *out. */
still_status cli_cache_folder(const char *name, char **out, still_error *err);

/* Makes a folder and its parents. */
still_status cli_make_folders(const char *path, still_error *err);
/* Fails with both numbers if the folder's file system has less than `bytes` free. */
still_status cli_check_space(const char *folder, uint64_t bytes, still_error *err);

/* Two pulls of one model would write the same files: takes the folder's lock, or fails at
 * once. close() *fd to give it back. */
still_status cli_lock_folder(const char *folder, int *fd, still_error *err);

/* A folder records the checksums of its verified files in .still.json, so that a
 * second pull does not read them again. True if `name` exists with this size and was
 * verified to have this checksum. */
bool cli_verified(const char *folder, const char *name, const char *sum);
still_status cli_set_verified(const char *folder, const char *name, const char *sum,
                              still_error *err);

#endif
