/* request.h - reads and checks the bodies of POST requests. Errors are meant for the
 * client: STILL_E_FORMAT if a body is not a JSON object, STILL_E_ARG for a wrong field,
 * STILL_E_UNSUPPORTED for a field that is not implemented. */
#ifndef SERVER_REQUEST_H
#define SERVER_REQUEST_H

#include "server/fields.h"

enum {
    SRV_MOST_PROMPTS = 65536,  /* in one request */
    SRV_MOST_SEQUENCES = 65536 /* prompts x n */
};

/* Either text, which the model's tokenizer encodes, or ids, which are used
 * unchanged. */
typedef struct srv_prompt {
    const char *text; /* borrowed from the body; NULL: ids were given */
    size_t n_text;
    int32_t *id; /* owned; NULL while it is text */
    size_t n;
    bool has_bos; /* id[0] was not in the text */
} srv_prompt;

typedef struct srv_completion {
    json_t *body;
    srv_options options;
    srv_prompt *prompt;
    size_t n_prompts;
} srv_completion;

/* Reads n bytes of JSON; ids are checked against the vocabulary. *defaults is what holds
 * for fields that the body does not have. */
still_status srv_completion_read(const char *text, size_t n, int vocab,
                                 const srv_options *defaults, srv_completion *out,
                                 still_error *err);
void srv_completion_free(srv_completion *c);

/* What completions have if nobody says otherwise: 16 tokens, plain sampling. */
srv_options srv_plain_options(void);

/* ---- Chat (request_chat.c) ----------------------------------------------- */

typedef struct srv_chat {
    json_t *body;
    srv_options options;
    json_t *variables; /* of the template: messages and, if calls may be made, tools */
    json_t *tools;     /* borrowed from variables; NULL: no calls */
    bool demanded;     /* the answer must be a call */
    const char *function; /* of this tool, borrowed from the body; NULL: of any */
} srv_chat;

/* What the chat template has a place for. */
typedef struct srv_places {
    bool developer; /* this role; without it that is system */
    bool tools;     /* without it messages tell of them, see told_tools.h */
} srv_places;

still_status srv_chat_read(const char *text, size_t n, int vocab, srv_places places,
                           const srv_options *defaults, srv_chat *out,
                           still_error *err);
void srv_chat_free(srv_chat *c);

/* ---- Tokenizing ---------------------------------------------------------- */

/* {"prompt": TEXT, "add_special_tokens": true}. text is borrowed from body;
 * json_decref() that. */
typedef struct srv_tokenize {
    json_t *body;
    const char *text;
    size_t n_text;
    bool add_special;
} srv_tokenize;
still_status srv_tokenize_read(const char *text, size_t n, srv_tokenize *out,
                               still_error *err);

/* {"tokens": [ID, ...]}. free() *id. */
still_status srv_detokenize_read(const char *text, size_t n, int vocab, int32_t **id,
                                 size_t *n_ids, still_error *err);

#endif
