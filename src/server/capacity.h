/* capacity.h - how many conversations the memory holds, known before the first. */
#ifndef SERVER_CAPACITY_H
#define SERVER_CAPACITY_H

#include "server/scheduler.h"

typedef struct srv_capacity {
    size_t fixed;        /* weights, scratch, the program */
    size_t session;      /* a sequence that runs */
    size_t conversation; /* keys, values and states of one, in a session or kept */
    size_t softmax;      /* the same if every key were kept, at this context */
    size_t cache;        /* for conversations that are kept */
    size_t total;        /* all of it */
    int parallel;        /* sequences at once */
    int kept;            /* conversations of the whole context that the cache holds */
} srv_capacity;

/* Fills in p->parallel and p->cache_bytes where they are 0 and SIZE_MAX, so that all of it
 * takes at most `memory` bytes (0: what the process has and half of what is free). STILL_E_MEMORY if
 * what was asked for does not fit; the text says what would. */
still_status srv_capacity_plan(srv_scheduler_params *p, size_t memory,
                               srv_capacity *out, still_error *err);

#endif
