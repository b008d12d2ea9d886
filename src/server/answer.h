/* answer.h - the texts of answers: choices, events of a stream, log-probabilities, numbers
 * of tokens, in the form of OpenAI's API. All is written directly as JSON text: an answer
 * may have hundreds of thousands of tokens, and an object for each would cost more than
 * computing it. */
#ifndef SERVER_ANSWER_H
#define SERVER_ANSWER_H

#include "base/buf.h"
#include "server/scheduler.h"
#include "server/tool_calls.h"

/* What all parts of an answer have in common. */
typedef struct srv_head {
    char id[32];
    const char *model;
    long long created; /* seconds since 1970 */
    bool chat;         /* else a text completion */
    bool usage;        /* events say "usage": null until the last */
} srv_head;

typedef struct srv_usage {
    uint64_t prompt, cached, made; /* tokens; cached: of the prompt, not computed */
} srv_usage;

/* Lists that grow by an entry for each token. */
typedef struct srv_logprobs {
    bool chat;
    sti_buf tokens, logprobs, tops, offsets; /* chat: tokens holds whole entries */
    size_t characters;                       /* of the text before the next token */
} srv_logprobs;
/* The token itself is always among the alternatives of completions. */
void srv_logprobs_add(srv_logprobs *l, const still_tokenizer *tk, const srv_token *t);
void srv_logprobs_clear(srv_logprobs *l); /* the entries, not the characters */
void srv_logprobs_free(srv_logprobs *l);

/* A choice, or what an event adds to one. */
typedef struct srv_part {
    size_t index;
    bool first; /* of a stream: says the role */
    const char *text;
    size_t n;
    const srv_call *call;         /* [n_calls] */
    int n_calls, call_at;         /* number of the first */
    uint64_t call_seed;           /* ids of calls are made from it and their number */
    const srv_logprobs *logprobs; /* NULL: none were asked for */
    const char *finish;           /* NULL: not yet */
    const sti_buf *kept;          /* JSON: what the model kept; NULL: nobody asked */
} srv_part;

/* A whole answer: open, choices, close. */
void srv_put_open(sti_buf *b, const srv_head *h);
void srv_put_choice(sti_buf *b, const srv_head *h, const srv_part *p);
void srv_put_close(sti_buf *b, const srv_usage *u);

/* Events of a stream. */
void srv_put_event(sti_buf *b, const srv_head *h, const srv_part *p);
void srv_put_usage_event(sti_buf *b, const srv_head *h, const srv_usage *u);
void srv_put_error_event(sti_buf *b, const char *error, size_t n); /* a JSON text */
void srv_put_done(sti_buf *b);
void srv_put_ping(sti_buf *b); /* a comment, which clients skip */

#endif
