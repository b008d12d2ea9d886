/* chat_template.h - the chat template that a command uses, and the variables it gets. */
#ifndef CLI_CHAT_TEMPLATE_H
#define CLI_CHAT_TEMPLATE_H

#include "cli/options.h"

typedef struct cli_chat_template {
    char *text;      /* of --chat-template; NULL: the model's own */
    char *variables; /* of --template-arg, a JSON object */
} cli_chat_template;

/* Reads --chat-template and --template-arg. Free it also after failure. */
int cli_chat_template_read(const char *command, const cli_options *o,
                           cli_chat_template *out);
void cli_chat_template_free(cli_chat_template *t);

/* Ids of a rendering from byte `from` on. free() *ids. */
int cli_chat_encode(const still_tokenizer *tk, const still_rendering *r, size_t from,
                    int32_t **ids, size_t *n_ids);

#endif
