/* routes.h - the endpoints: their methods, and the thread that answers each. */
#ifndef SERVER_ROUTES_H
#define SERVER_ROUTES_H

#include "server/generation.h"
#include "server/metrics.h"

/* Who answers: the thread that moves bytes (must be quick), the one for texts, or the
 * scheduler. */
typedef enum srv_by { SRV_HERE, SRV_BY_TEXT, SRV_BY_MODEL } srv_by;

typedef struct srv_query {
    const srv_api *api;
    const char *path;
    const sti_buf *body;
    srv_counts *counts;
    bool keys; /* the server asks for one */
} srv_query;

typedef struct srv_route {
    const char *method; /* GET (and with it HEAD) or POST */
    const char *path;   /* one that ends in a slash: all that begin with it */
    srv_by by;
    bool open; /* answers without an API key */
    bool chat; /* SRV_BY_MODEL: which of the two */
    void (*answer)(const srv_query *q, srv_reply *reply); /* not of SRV_BY_MODEL */
} srv_route;

/* The route of a request. NULL: *allow has the methods that the path has, or is NULL if
 * there is no such path. */
const srv_route *srv_route_find(const char *method, const char *path,
                                const char **allow);
const srv_route *srv_route_at(size_t i);     /* all of them; NULL past the last */
size_t srv_route_number(const srv_route *r); /* NULL: one past the last */

#endif
