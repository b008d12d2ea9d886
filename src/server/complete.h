/* complete.h - carries out a request for completions. */
#ifndef SERVER_COMPLETE_H
#define SERVER_COMPLETE_H

#include "server/prefix_cache.h"
#include "server/reply.h"
#include "server/request.h"

typedef struct srv_engine {
    const char *name; /* of the model, in answers */
    const still_tokenizer *tk;
    srv_prefix_cache cache;
    uint64_t served; /* requests so far; part of their ids */
} srv_engine;

/* Fills reply with the answer, or with the error if there is one. */
void srv_complete(srv_engine *e, srv_completion *c, srv_gone_fn gone, void *user,
                  srv_reply *reply);

/* All ids of a text. free() *id. */
still_status srv_encode(const still_tokenizer *tk, const char *text, size_t n,
                        unsigned flags, int32_t **id, size_t *n_ids, still_error *err);

#endif
