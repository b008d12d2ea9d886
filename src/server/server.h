/* server.h - an HTTP server that speaks OpenAI's API for one model.
 *
 * One thread of libmicrohttpd moves the bytes of all clients, so a slow one blocks nobody;
 * one reads bodies and tokenizes; the scheduler's thread runs the model. A fourth looks
 * from time to time whether clients are still there. */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include <stdio.h>

#include "server/scheduler.h"

typedef struct srv_params {
    const char *host;          /* name or address to listen on */
    int port;                  /* 0: any that is free */
    const char *keys;          /* API keys, one a line; NULL: requests need none */
    const char *const *origin; /* [n_origins] pages that may use it (CORS); "*": all */
    size_t n_origins;
    const char *name;           /* what the model is called in answers */
    srv_scheduler_params model; /* must have a tokenizer */
    const char *chat_template;  /* NULL: the model's own */
    const char *variables;      /* of the template, a JSON object; NULL: none */
    int most_tokens;            /* of an answer; 0: as many as fit */
    int connections;            /* at once; 0: 1024 */
    int drain_seconds; /* for requests in progress when it stops; negative: no limit */
    FILE *log;         /* a line for each request; NULL: none */
} srv_params;

typedef struct srv_server srv_server;

/* Begins to listen and to answer. The model is used by the server's threads until
 * srv_stop; strings are copied. */
still_status srv_start(const srv_params *p, srv_server **out, still_error *err);
int srv_port(const srv_server *s);  /* the port it listens on */
int srv_limit(const srv_server *s); /* tokens of a sequence */
/* Accepts no more requests, finishes those it has, or after drain_seconds cancels them, and
 * frees the server. Waits a few seconds for clients that do not read their answers. */
void srv_stop(srv_server *s);

#endif
