/* tool_calls.h - finds the calls of functions in what a model writes.
 *
 * Models are trained to write calls in a few forms:
 *
 *     <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen, SmolLM
 *     [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          Mistral
 *     [TOOL_CALLS]name[ARGS]{...}                                   Mistral, since 2025
 *     {"name": ..., "parameters": {...}}                            Llama 3, whole answer
 *     <|python_tag|>{"name": ..., "parameters": {...}}; {...}       Llama 3
 *
 * All are recognized whatever the model. Text that looks like a call and is none is
 * content, byte for byte. Text can be pushed in pieces of any size with the same result;
 * space before a call and between calls is dropped. */
#ifndef SERVER_TOOL_CALLS_H
#define SERVER_TOOL_CALLS_H

#include "base/buf.h"
#include "base/json.h"

enum {
    SRV_MOST_CALLS = 128,
    SRV_CALL_ID = 9
}; /* calls of an answer; letters of an id */

typedef struct srv_call {
    char *name, *arguments; /* the text of a JSON object */
} srv_call;

typedef struct srv_calls {
    const json_t *tools; /* as in the request: names for the form without a mark */
    bool one;            /* the text is over with its first call */
    int state;
    size_t looked; /* bytes of held without the end of a call */
    sti_buf held;  /* not content and not a call yet */
    srv_call *call;
    int n, capacity;
    bool failed; /* out of memory */
} srv_calls;

/* Takes n more bytes; content that is certain is appended to out, calls that are
 * complete to p->call. */
void srv_calls_push(srv_calls *p, const char *text, size_t n, sti_buf *out);
/* The text is over. */
void srv_calls_end(srv_calls *p, sti_buf *out);
/* Whether the text is over with the call that was found. */
bool srv_calls_over(const srv_calls *p);
void srv_calls_free(srv_calls *p);

/* Whether a special token is a mark of a call, and so part of the text although special
 * tokens have none. */
bool srv_calls_mark(const char *text, size_t n);

/* Length of the mark that opens calls and that a text ends with; 0: it ends with none. */
size_t srv_calls_opening(const char *text, size_t n);

/* "a1B2c3D4e": Mistral's templates want nine letters or digits. */
void srv_call_id(uint64_t random, char out[SRV_CALL_ID + 1]);

#endif
