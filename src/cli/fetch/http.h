/* http.h - GET requests with libcurl: redirects, stalls, headers, Ctrl-C. */
#ifndef CLI_FETCH_HTTP_H
#define CLI_FETCH_HTTP_H

#include <curl/curl.h>

#include "still.h"

typedef struct cli_http {
    CURL *curl;
    char *endpoint;  /* "https://host"; no slash at the end */
    char *token;     /* NULL: none. Goes to the endpoint's host only */
    bool loopback;   /* the endpoint is this machine: no proxy is asked */
    int64_t timeout; /* seconds without a byte */
    bool plain;      /* a server of files, no hub: what errors advise, what tags mean */
} cli_http;

/* What the last response of a chain of redirects said. */
typedef struct cli_response {
    long status;
    char etag[256];        /* as sent, with its quotes */
    char linked_etag[256]; /* X-Linked-Etag of any response of the chain */
    char type[64];         /* Content-Type */
    int64_t length;        /* Content-Length; -1: not said */
    int64_t linked_size;   /* X-Linked-Size; -1: not said */
    int64_t range_first;   /* Content-Range: first byte and whole size; -1: not said */
    int64_t range_total;
} cli_response;

/* Body bytes of the last response. False ends the transfer. */
typedef bool (*cli_body_fn)(void *user, const cli_response *r, const char *data,
                            size_t n);

typedef struct cli_request {
    const char *url;
    int64_t from;         /* > 0: Range from this byte */
    int64_t to;           /* > 0: up to this one, itself included */
    const char *if_range; /* with from: only if the file still has this tag */
    cli_body_fn body;
    void *user;
} cli_request;

/* token may be NULL; over http:// to another machine it is refused unless `insecure`.
 * Copies endpoint and token. */
still_status cli_http_open(cli_http *h, const char *endpoint, const char *token,
                           bool insecure, int64_t timeout, still_error *err);
void cli_http_close(cli_http *h);

/* STILL_OK: a response arrived whole, of whatever status. STILL_E_IO: the network
 * failed, or body returned false; *again tells whether trying again may help. */
still_status cli_http_get(cli_http *h, const cli_request *q, cli_response *r,
                          bool *again, still_error *err);

/* What to tell the user about a status that is not 2xx; *again as above. */
still_status cli_http_refused(const cli_http *h, const char *url, const cli_response *r,
                              bool *again, still_error *err);

/* Waits before attempt number `attempt` (1, 2, ...): 0.5, 1, 2, 4 ... seconds. False if
 * Ctrl-C was pressed meanwhile. */
bool cli_http_back_off(int attempt);

#endif
