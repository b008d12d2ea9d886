/* hf_home.h - what Hugging Face's own tools keep on this machine: their cache of models
 * and the access token. Read, never written. */
#ifndef CLI_FETCH_HF_HOME_H
#define CLI_FETCH_HF_HOME_H

#include "still.h"

/* $HF_HUB_CACHE, else hub/ of $HF_HOME, else ~/.cache/huggingface/hub. free() *out. */
still_status cli_hf_cache(char **out, still_error *err);
/* The snapshot of org/name that refs/main names; without one, the only snapshot there is.
 * *out NULL: there is none. free() it. */
still_status cli_hf_snapshot(const char *repo, char **out, still_error *err);
/* "models--org--name" as org/name; false: it is none. */
bool cli_hf_repo_of(const char *folder, char *out, size_t room);

/* The access token: `file` if it is not NULL, else $HF_TOKEN, else the file that `hf auth
 * login` writes ($HF_TOKEN_PATH, else token of $HF_HOME). *token NULL: there is none;
 * free() it. *asked: file or variable said so, it was not just lying there. */
still_status cli_hf_token(const char *file, char **token, bool *asked,
                          still_error *err);
/* HF_HUB_OFFLINE is set to 1, ON, YES or TRUE. */
bool cli_hf_offline(void);

#endif
