/* prefix_ids.h - the file that says of which tokens a stored past is. */
#ifndef SERVER_PREFIX_IDS_H
#define SERVER_PREFIX_IDS_H

#include "still.h"

typedef struct srv_prefix_ids {
    int32_t *id; /* [n], owned */
    int n;
    bool has_logits;     /* the past has logits after its last token */
    uint64_t past_bytes; /* of the file with the past */
} srv_prefix_ids;

size_t srv_prefix_ids_bytes(int n); /* of such a file */

/* Whether p[0..size) is whole, of this model, and of at most `most` tokens; fills out. */
bool srv_prefix_ids_parse(const unsigned char *p, size_t size, uint64_t model, int most,
                          srv_prefix_ids *out);
/* The file appears whole or not at all. */
still_status srv_prefix_ids_write(const srv_prefix_ids *ids, uint64_t model,
                                  const char *path, still_error *err);

#endif
