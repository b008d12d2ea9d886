/* page.c - see page.h. */
#include "server/page.h"

#include <string.h>

static const char policy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const char *const srv_page_headers[] = {
    "Content-Security-Policy",
    policy,
    "X-Content-Type-Options",
    "nosniff",
    "X-Frame-Options",
    "DENY",
    "Referrer-Policy",
    "no-referrer",
    "Cross-Origin-Opener-Policy",
    "same-origin",
    "Cross-Origin-Resource-Policy",
    "same-origin",
    "Cache-Control",
    "no-cache", /* asked for again with its tag */
    NULL,
};

const srv_page_file *srv_page_find(const char *path)
{
    if (strcmp(path, "/") == 0) path = "/index.html";
    for (size_t i = 0; i < srv_page_count; i++)
        if (strcmp(srv_page_files[i].path, path) == 0) return &srv_page_files[i];
    return NULL;
}
