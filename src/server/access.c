/* access.c - see access.h. Keys are kept and compared as digests, all of each, so that
 * neither time nor memory tells them. */
#include "server/access.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

enum { MOST_KEYS = 4096 };

static still_status add_key(srv_access *a, const char *p, size_t n, size_t line,
                            still_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] <= ' ' || p[i] > '~')
            return sti_fail(
                err, STILL_E_FORMAT,
                "line %zu: an API key is one line of printable ASCII without "
                "spaces; byte %zu is not",
                line, i);
    if (a->n_keys == MOST_KEYS)
        return sti_fail(err, STILL_E_LIMIT, "line %zu: more than %d API keys", line,
                        MOST_KEYS);
    unsigned char(*grown)[STI_SHA256] = sti_grow(a->key, a->n_keys + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, "API keys", 0);
    a->key = grown;
    sti_sha256_of(p, n, a->key[a->n_keys++]);
    return STILL_OK;
}

static still_status read_keys(srv_access *a, const char *text, still_error *err)
{
    for (size_t line = 1; *text; line++) {
        size_t n = strcspn(text, "\n"), end = n;
        while (end > 0 && (text[end - 1] == '\r' || text[end - 1] == ' ')) end--;
        if (end > 0 && text[0] != '#') STI_TRY(add_key(a, text, end, line, err));
        text += n + (text[n] == '\n');
    }
    return a->n_keys ? STILL_OK : sti_fail(err, STILL_E_FORMAT, "holds no API key");
}

still_status srv_access_init(srv_access *a, const char *keys, const char *const *origin,
                             size_t n_origins, still_error *err)
{
    *a = (srv_access){0};
    if (keys) STI_TRY(read_keys(a, keys, err));
    if (n_origins == 0) return STILL_OK;
    a->origin = sti_alloc(n_origins, sizeof *a->origin);
    if (!a->origin) return sti_fail_memory(err, "origins", n_origins);
    for (; a->n_origins < n_origins; a->n_origins++) {
        a->origin[a->n_origins] = sti_strdup(origin[a->n_origins]);
        if (!a->origin[a->n_origins]) return sti_fail_memory(err, "origins", n_origins);
    }
    return STILL_OK;
}

void srv_access_free(srv_access *a)
{
    for (size_t i = 0; i < a->n_origins; i++) free(a->origin[i]);
    free(a->origin);
    free(a->key);
    *a = (srv_access){0};
}

bool srv_access_has_key(const srv_access *a, const char *authorization)
{
    static const char scheme[] = "Bearer ";
    unsigned char given[STI_SHA256];
    bool found = false;
    if (a->n_keys == 0) return true;
    if (!authorization || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0)
        return false;
    const char *key = authorization + sizeof scheme - 1;
    sti_sha256_of(key, strlen(key), given);
    for (size_t i = 0; i < a->n_keys; i++) {
        unsigned char differ = 0;
        for (size_t j = 0; j < sizeof given; j++) differ |= given[j] ^ a->key[i][j];
        found |= differ == 0;
    }
    return found;
}

bool srv_access_allows(const srv_access *a, const char *origin)
{
    for (size_t i = 0; i < a->n_origins; i++)
        if (strcmp(a->origin[i], "*") == 0 || strcasecmp(a->origin[i], origin) == 0)
            return true;
    return false;
}

/* host: with or without a port. */
static bool is_address(const char *host)
{
    static const char local[] = "localhost";
    char name[64];
    struct in_addr any;
    const size_t n = strcspn(host, ":");
    if (host[0] == '[') return true; /* only addresses of IPv6 have it */
    if (n >= sizeof name) return false;
    memcpy(name, host, n);
    name[n] = 0;
    return strcasecmp(name, local) == 0 || inet_pton(AF_INET, name, &any) == 1;
}

bool srv_access_own(const srv_access *a, const char *origin, const char *host)
{
    const char *at = strstr(origin, "://");
    return host && at && strcasecmp(at + 3, host) == 0 &&
           (!a->local || a->n_keys > 0 || is_address(host));
}
