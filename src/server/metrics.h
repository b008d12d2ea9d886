/* metrics.h - what the server has done so far, for Prometheus. */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include <stdatomic.h>

#include "base/buf.h"
#include "server/scheduler.h"

enum { SRV_CODES = 13, SRV_MOST_ROUTES = 32 };

/* Requests by route (the last: no route) and status. Any thread. */
typedef struct srv_counts {
    atomic_uint_fast64_t n[SRV_MOST_ROUTES][SRV_CODES];
    atomic_int active; /* requests in progress */
} srv_counts;

void srv_count(srv_counts *c, size_t route, int status);
/* path: names of the first n routes. */
void srv_metrics_put(sti_buf *b, srv_counts *c, const char *const *path, size_t n,
                     const srv_metrics *m);

#endif
