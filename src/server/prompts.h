/* prompts.h - from the body of a request to token ids: completions as they come, chat
 * through the template. */
#ifndef SERVER_PROMPTS_H
#define SERVER_PROMPTS_H

#include "server/generation.h"

/* A request of either kind, read. chat is set before; options and prompts are in one of
 * the two bodies. */
typedef struct srv_asked {
    bool chat;
    srv_completion text;
    srv_chat talk;
    srv_prompt rendered;
    const srv_options *options;
    srv_prompt *prompt; /* with ids; and with text, if it is echoed */
    size_t n_prompts;
    const json_t *tools;    /* calls are looked for; NULL: they are text */
    still_grammar *grammar; /* that answers are held to; NULL: they are free */
    sti_buf
        written; /* of the answer, in the prompt: how a call that is demanded begins */
    sti_buf *echo; /* [prompts], owned: texts of prompts that were ids; or NULL */
} srv_asked;

still_status srv_asked_read(const srv_api *api, const char *body, size_t n,
                            srv_asked *out, still_error *err);
void srv_asked_free(srv_asked *a);

#endif
