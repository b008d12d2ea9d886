/* request.h - reads and checks the bodies of POST requests. */
#ifndef SERVER_REQUEST_H
#define SERVER_REQUEST_H

#include "base/json.h"
#include "still.h"

enum {
    SRV_MOST_LOGPROBS = 20, /* alternatives per token */
    SRV_MOST_STOPS = 16,
    SRV_MOST_PROMPTS = 65536 /* in one request */
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

typedef struct srv_stop_text {
    const char *p; /* borrowed from the body; not empty */
    size_t n;
} srv_stop_text;

typedef struct srv_completion {
    json_t *body;
    srv_prompt *prompt;
    size_t n_prompts;
    int max_tokens;
    int logprobs; /* alternatives; -1: no log-probabilities are asked for */
    bool echo, has_seed;
    uint64_t seed;
    double temperature, top_p, min_p;
    int top_k;
    srv_stop_text stop[SRV_MOST_STOPS];
    int n_stops;
} srv_completion;

/* Reads n bytes of JSON; ids are checked against the vocabulary. Errors are meant
 * for the client: STILL_E_FORMAT if it is not a JSON object, STILL_E_ARG for a wrong
 * field, STILL_E_UNSUPPORTED for a field that is not implemented. */
still_status srv_completion_read(const char *text, size_t n, int vocab,
                                 srv_completion *out, still_error *err);
void srv_completion_free(srv_completion *c);

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
