/* generation.h - a request for completions or chat, from its body to its answer.
 *
 * Three threads meet here. The one for texts reads the body, renders and encodes it, and
 * hands the sequences to the scheduler. The scheduler's thread turns tokens into text. The
 * one that moves bytes takes the answer, whole or as a stream, and may leave at any time:
 * what still runs is then cancelled, and the last one out frees everything. */
#ifndef SERVER_GENERATION_H
#define SERVER_GENERATION_H

#include "server/choice.h"
#include "server/reply.h"

/* What all requests share. Read-only once the server runs. */
typedef struct srv_api {
    const char *name; /* of the model, in answers */
    const still_model *model;
    const still_tokenizer *tk;
    srv_scheduler *scheduler;
    int limit, vocab;
    int most_tokens;           /* of an answer; 0: as many as fit */
    const char *chat_template; /* NULL: the model's own */
    json_t *variables;         /* of the template, beside those of a request; or NULL */
    srv_places places;         /* of the template */
    srv_options plain, chat;   /* defaults of the two endpoints */
} srv_api;

/* Whoever moves the bytes. Both are called while the generation is locked, so that a
 * pause and the resume that ends it cannot change places. */
typedef struct srv_mover {
    void (*pause)(void *user);  /* there is nothing to move now */
    void (*resume)(void *user); /* there is again; after a pause, once */
    void *user;
} srv_mover;

typedef struct srv_generation srv_generation;

/* Reads a body and starts its sequences. NULL: reply has the error. */
srv_generation *srv_generation_new(const srv_api *api, bool chat, const char *body,
                                   size_t n, const srv_mover *mover, srv_reply *reply);
bool srv_generation_streams(const srv_generation *g);

/* Not a stream: resume is called when the answer is ready, perhaps before this returns.
 * Then srv_generation_reply gives it. */
void srv_generation_wait(srv_generation *g);
void srv_generation_reply(srv_generation *g, srv_reply *reply);

/* A stream: up to n bytes. 0: *end tells that there are no more (a stream that was broken
 * off sets *broken, too); if not, pause was called, and resume follows. */
size_t srv_generation_read(srv_generation *g, char *p, size_t n, bool *end,
                           bool *broken);
/* A stream that waits and has been silent for so long says something. */
void srv_generation_ping(srv_generation *g, double now, double silence);

/* Ends all sequences at their next token; the answer still becomes ready. */
void srv_generation_cancel(srv_generation *g);
/* The mover leaves, and never looks at g again. */
void srv_generation_leave(srv_generation *g);

/* Tokens so far, and the reason why the first choice ended ("" if it has not). */
srv_usage srv_generation_usage(srv_generation *g, const char **finish);

/* All ids of a text. free() *id. */
still_status srv_encode(const still_tokenizer *tk, const char *text, size_t n,
                        unsigned flags, int32_t **id, size_t *n_ids, still_error *err);

#endif
