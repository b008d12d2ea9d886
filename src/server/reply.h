/* reply.h - an HTTP reply: a status and a body, mostly JSON. */
#ifndef SERVER_REPLY_H
#define SERVER_REPLY_H

#include "base/buf.h"
#include "base/json.h"
#include "still.h"

typedef struct srv_reply {
    int status; /* of HTTP */
    sti_buf body;
    const char *type; /* of the body; NULL: application/json */
    /* Name, value, ..., NULL: sent instead of the headers that answers of the API have;
     * NULL: those. */
    const char *const *headers;
    const char *tag;   /* ETag, with its quotes; NULL: none */
    const void *fixed; /* [n_fixed] a body that lives as long as the program; or NULL */
    size_t n_fixed;
} srv_reply;

/* {"error": {"message", "type", "param", "code"}} with that status. */
void srv_reply_error(srv_reply *r, int status, const char *code, const char *message);
/* The same for a failed call of the library: wrong requests are 400, the rest 500. */
void srv_reply_failure(srv_reply *r, const still_error *err);
/* Takes over the reference; NULL (no memory) is answered with an error. */
void srv_reply_json(srv_reply *r, json_t *body);

/* n bytes of UTF-8 as a JSON string with its quotes. Bytes that are not UTF-8 (a token
 * may end inside a character) are written as OpenAI does: "bytes:\xe2\x80". */
void srv_put_string(sti_buf *b, const char *text, size_t n);

#endif
