/* hub.h - which files a repository of a Hugging Face compatible hub has, and which of
 * them a model needs. */
#ifndef CLI_FETCH_HUB_H
#define CLI_FETCH_HUB_H

#include "cli/fetch/fetch.h"
#include "cli/options.h"

typedef struct cli_listing {
    cli_file *file;
    size_t n;
} cli_listing;

/* GET {endpoint}/api/models/{repo}/revision/{revision}. Names are checked. */
still_status cli_hub_list(cli_http *h, const char *repo, const char *revision,
                          cli_listing *out, still_error *err);
void cli_listing_free(cli_listing *l);

/* Keeps the files that match a pattern; without patterns, the GGUF file or files that
 * `suffix` means, and without one (NULL) what still needs to run the model: configuration,
 * tokenizer and safetensors, an adapter, or the GGUF model that quant.h chooses. */
still_status cli_hub_select(cli_listing *l, const char *repo, const char *suffix,
                            const cli_list *include, still_error *err);

/* Address of a file: {endpoint}/{repo}/resolve/{revision}/{name}. free() it; NULL: no
 * memory. */
char *cli_hub_url(const cli_http *h, const char *repo, const char *revision,
                  const char *name);
/* org/name of letters, digits, '.', '_' and '-'. */
bool cli_hub_is_repo(const char *name);

#endif
