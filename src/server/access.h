/* access.h - who may ask: API keys, and the origins of web pages (CORS). */
#ifndef SERVER_ACCESS_H
#define SERVER_ACCESS_H

#include "base/sha256.h"
#include "still.h"

typedef struct srv_access {
    unsigned char (*key)[STI_SHA256]; /* [n_keys] digests; none: no key is needed */
    size_t n_keys;
    char **origin; /* [n_origins] of pages that may use the server; "*": all */
    size_t n_origins;
    bool local; /* only this machine can connect */
} srv_access;

/* keys: the text of a file, a key a line; empty lines and those that begin with # do not
 * count; NULL: no key is needed. Strings are copied. */
still_status srv_access_init(srv_access *a, const char *keys, const char *const *origin,
                             size_t n_origins, still_error *err);
void srv_access_free(srv_access *a);

/* authorization: the header's value, or NULL. */
bool srv_access_has_key(const srv_access *a, const char *authorization);
/* Whether a page of this origin may read the answers. */
bool srv_access_allows(const srv_access *a, const char *origin);
/* Whether a page of this origin came from the server itself, by the request's Host. The
 * name of another site can be made to lead here, which its pages' Host then shows: without
 * keys, a local server's own pages have an address or localhost instead. */
bool srv_access_own(const srv_access *a, const char *origin, const char *host);

#endif
