/* resolve.h - what MODEL means: from a name to the files to open. */
#ifndef CLI_FETCH_RESOLVE_H
#define CLI_FETCH_RESOLVE_H

#include "still.h"

/* Resolves MODEL: an existing file or folder, else a name in our cache, else in Hugging
 * Face's, else an adapter that ships with still (models/ of the source tree,
 * share/still/models when installed; both found relative to the program). A name may end
 * in :SUFFIX, which chooses one of the GGUF models of a folder (quant.h); without one it
 * means the safetensors, else Q4_K_M, else the only GGUF model. For an adapter folder,
 * *out is the base model it names, found in the same way, and *adapter the folder; a
 * folder that also holds a model is its own base. NAME.still.gguf is the adapter of
 * NAME.gguf beside it. *adapter is NULL for a plain model. free() both; adapter may be
 * NULL. */
still_status cli_resolve_model(const char *name, char **out, char **adapter,
                               still_error *err);
/* The same, and on failure *missing is what `still pull` could bring to make it work: the
 * name, or that of its base model; NULL: nothing. free() it. */
still_status cli_resolve_or_missing(const char *name, char **out, char **adapter,
                                    char **missing, still_error *err);

enum { CLI_PATH_ROOM = 4096 };
/* The i-th folder where adapters that ship with still may lie; false: there are no more. */
bool cli_shipped_place(size_t i, char out[CLI_PATH_ROOM]);
/* org/name or name, of which no part begins with a dot. */
bool cli_could_be_cached(const char *name);

#endif
