/* server.h - an HTTP server that speaks the OpenAI completions API for one model.
 *
 * One thread of libmicrohttpd handles I/O for all clients, so a slow one blocks nobody.
 * Requests that run the model queue for the one thread that runs it; requests that only
 * tokenize have another thread. */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "still.h"

typedef struct srv_params {
    const char *host;       /* name or address to listen on */
    int port;               /* 0: any that is free */
    const char *api_key;    /* NULL: requests need none */
    const char *name;       /* what the model is called in answers */
    still_model *model;     /* must have a tokenizer */
    still_session *session; /* of model; empty */
} srv_params;

typedef struct srv_server srv_server;

/* Begins to listen and to answer. Model and session are used by the server's threads
 * until srv_stop; strings are copied. */
still_status srv_start(const srv_params *p, srv_server **out, still_error *err);
int srv_port(const srv_server *s); /* the port it listens on */
/* Accepts no more requests, finishes those it has, and frees the server. Waits a few
 * seconds for clients that do not read their answers. */
void srv_stop(srv_server *s);

#endif
