/* exchange.h - a request and its answer, on a connection of libmicrohttpd. */
#ifndef SERVER_EXCHANGE_H
#define SERVER_EXCHANGE_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdio.h>

#include "server/access.h"
#include "server/routes.h"
#include "server/worker.h"

enum {
    SRV_MOST_BODY = 64 << 20,
    SRV_HEAD_SECONDS = 60, /* for the headers of a request, and between two requests */
    SRV_BODY_SECONDS = 300 /* for its body */
};

typedef struct srv_exchange srv_exchange;
typedef struct srv_line srv_line; /* a connection */

/* What exchanges share. */
typedef struct srv_floor {
    srv_api api;
    srv_access access;
    srv_worker text;
    srv_counts counts;
    FILE *log; /* or NULL */
    atomic_bool stopping;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t change;
    int requests;    /* in progress */
    srv_line *lines; /* open connections */
} srv_floor;

/* Callbacks of libmicrohttpd; user is the floor. */
enum MHD_Result srv_exchange_handle(void *user, struct MHD_Connection *connection,
                                    const char *path, const char *method,
                                    const char *version, const char *data, size_t *n,
                                    void **context);
void srv_exchange_completed(void *user, struct MHD_Connection *connection,
                            void **context, enum MHD_RequestTerminationCode why);
void srv_exchange_connected(void *user, struct MHD_Connection *connection,
                            void **socket_context,
                            enum MHD_ConnectionNotificationCode what);

/* Looks after all connections: clients that have gone free what they asked for, streams
 * that wait say so, and those that take too long to say what they want are cut off. */
void srv_exchange_tend(srv_floor *f);

#endif
