/* cache.h - where models live: ${XDG_CACHE_HOME:-~/.cache}/still/models/NAME. Tokenized
 * training data is beside them, in still/tokens. */
#ifndef CLI_FETCH_CACHE_H
#define CLI_FETCH_CACHE_H

#include "still.h"

#define CLI_DEFAULT_MODEL "smollm2"
#define CLI_SMOLLM2_FILE "SmolLM2-135M-Instruct.Q4_1.gguf"

/* still/KIND[/NAME] in the cache; it need not exist. free() *out. */
still_status cli_cache_place(const char *kind, const char *name, char **out,
                             still_error *err);
/* The folder of a model in the cache; it need not exist. free() *out. */
still_status cli_cache_folder(const char *name, char **out, still_error *err);

/* What MODEL means: an existing file or folder, else a name in the cache (a folder
 * that holds a GGUF and no config.json stands for that file), else an adapter that came
 * with the program (models/ of the source tree, share/still/models where it is
 * installed; both are found from where the program lies). An adapter's folder
 * stands for the base model it names, found in the same way, and *adapter is the
 * folder; a folder that holds a model, too, is its own base. Beside NAME.gguf,
 * NAME.still.gguf is its adapter. *adapter is NULL for a plain model. free() both;
 * adapter may be NULL if it is of no interest. */
still_status cli_resolve_model(const char *name, char **out, char **adapter,
                               still_error *err);

/* Makes a folder and its parents. */
still_status cli_make_folders(const char *path, still_error *err);
/* Fails with both numbers if the folder's file system has less than `bytes` free. */
still_status cli_check_space(const char *folder, uint64_t bytes, still_error *err);

/* A folder remembers the sums of its verified files in .still.json, so that a second
 * pull does not read them again. True if `name` is there, with this size, and was
 * verified to have this sum. */
bool cli_verified(const char *folder, const char *name, const char *sum);
still_status cli_set_verified(const char *folder, const char *name, const char *sum,
                              still_error *err);

#endif
