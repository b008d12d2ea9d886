/* routes.h - the endpoints: their methods, and the thread that answers each. */
#ifndef SERVER_ROUTES_H
#define SERVER_ROUTES_H

#include "base/buf.h"
#include "server/complete.h"

/* The thread that answers: the I/O thread (must be quick), the one for tokenizing,
 * or the one that runs the model. */
typedef enum srv_thread { SRV_HERE, SRV_TEXT, SRV_MODEL } srv_thread;

typedef struct srv_call {
    srv_engine *engine; /* for SRV_MODEL only */
    const sti_buf *body;
    srv_gone_fn gone;
    void *user;
} srv_call;

typedef struct srv_route {
    const char *method, *path;
    srv_thread thread;
    bool open; /* answers without an API key */
    void (*answer)(const srv_call *call, srv_reply *reply);
} srv_route;

/* The route of a request. NULL: *allow is the method that the path has, or NULL if
 * there is no such path. */
const srv_route *srv_route_find(const char *method, const char *path,
                                const char **allow);

#endif
