/* http.c - see http.h.
 *
 * The token is given to libcurl as a bearer token of the first request; libcurl does
 * not send it on when a redirect leads to another host, port or scheme. A redirect from
 * https to http is refused, and so is a token that would go out unencrypted. */
#include "cli/fetch/http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/cli.h"

typedef struct transfer {
    const cli_request *q;
    cli_response *r;
} transfer;

/* The value of a header line if it is the one named, trimmed, in out. */
static bool header_is(const char *line, size_t n, const char *name, char *out,
                      size_t capacity)
{
    size_t length = strlen(name);
    if (n <= length || strncasecmp(line, name, length) != 0 || line[length] != ':')
        return false;
    const char *value = line + length + 1, *end = line + n;
    while (value < end && (*value == ' ' || *value == '\t')) value++;
    while (end > value && (unsigned char)end[-1] <= ' ') end--;
    size_t m = (size_t)(end - value);
    if (m >= capacity) m = 0; /* ignore a tag this long */
    memcpy(out, value, m);
    out[m] = 0;
    return true;
}

static int64_t parse_size(const char *text)
{
    char *end;
    long long v = strtoll(text, &end, 10);
    return end == text || v < 0 ? -1 : v;
}

static size_t on_header(char *line, size_t size, size_t count, void *user)
{
    cli_response *r = ((transfer *)user)->r;
    size_t n = size * count;
    char value[256];
    if (n > 5 && !strncasecmp(line, "HTTP/", 5)) { /* a new response of the chain */
        const char *space = memchr(line, ' ', n);
        r->status = space ? strtol(space + 1, NULL, 10) : 0; /* ends at CR LF */
        r->etag[0] = r->type[0] = 0;
        r->length = r->range_first = r->range_total = -1;
    } else if (header_is(line, n, "ETag", r->etag, sizeof r->etag) ||
               header_is(line, n, "X-Linked-Etag", r->linked_etag,
                         sizeof r->linked_etag) ||
               header_is(line, n, "Content-Type", r->type, sizeof r->type)) {
        return n;
    } else if (header_is(line, n, "Content-Length", value, sizeof value)) {
        r->length = parse_size(value);
    } else if (header_is(line, n, "X-Linked-Size", value, sizeof value)) {
        r->linked_size = parse_size(value);
    } else if (header_is(line, n, "Content-Range", value, sizeof value)) {
        const char *slash = strchr(value, '/');
        if (!strncasecmp(value, "bytes ", 6)) r->range_first = parse_size(value + 6);
        if (slash) r->range_total = parse_size(slash + 1);
    }
    return n;
}

static size_t on_body(char *data, size_t size, size_t count, void *user)
{
    transfer *t = user;
    return t->q->body(t->q->user, t->r, data, size * count) ? size * count : 0;
}

static int on_tick(void *user, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    (void)user, (void)a, (void)b, (void)c, (void)d;
    return cli_interrupted();
}

/* Whether an address leads to this machine: localhost, 127.0.0.0/8, ::1. What the host
 * of an address is libcurl says, which will connect to it. */
static bool is_loopback(const char *address)
{
    CURLU *url = curl_url();
    char *host = NULL;
    struct in_addr v4;
    struct in6_addr v6;
    bool is = false;
    if (url && !curl_url_set(url, CURLUPART_URL, address, 0) &&
        !curl_url_get(url, CURLUPART_HOST, &host, 0)) {
        const size_t n = strlen(host);
        if (host[0] == '[' && host[n - 1] == ']') {
            host[n - 1] = 0;
            is = inet_pton(AF_INET6, host + 1, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
        } else {
            is = strcasecmp(host, "localhost") == 0 ||
                 (inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127);
        }
    }
    curl_free(host);
    curl_url_cleanup(url);
    return is;
}

still_status cli_http_open(cli_http *h, const char *endpoint, const char *token,
                           bool insecure, int64_t timeout, still_error *err)
{
    *h = (cli_http){.timeout = timeout, .loopback = is_loopback(endpoint)};
    size_t n = strlen(endpoint);
    while (n && endpoint[n - 1] == '/') n--;
    if (strncmp(endpoint, "https://", 8) != 0 && strncmp(endpoint, "http://", 7) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "endpoint '%s': expected an address that begins with https://",
                        endpoint);
    if (token && endpoint[4] == ':' && !h->loopback && !insecure)
        return sti_fail(err, STILL_E_ARG,
                        "endpoint '%s': everyone on the way could read the token; use "
                        "https://, leave the token out, or ask for it with "
                        "--insecure-token",
                        endpoint);
    h->endpoint = sti_strndup(endpoint, n);
    h->token = token ? sti_strdup(token) : NULL;
    h->curl = curl_easy_init();
    if (h->endpoint && (h->token || !token) && h->curl) return STILL_OK;
    cli_http_close(h);
    return sti_fail(err, STILL_E_MEMORY, "cannot start libcurl");
}

void cli_http_close(cli_http *h)
{
    if (h->curl) curl_easy_cleanup(h->curl);
    free(h->endpoint);
    free(h->token);
    *h = (cli_http){0};
}

static void configure(cli_http *h, const cli_request *q, transfer *t, char *message)
{
    CURL *c = h->curl;
    bool secure = !strncmp(h->endpoint, "https://", 8);
    curl_easy_reset(c); /* connections stay open */
    curl_easy_setopt(c, CURLOPT_URL, q->url);
    curl_easy_setopt(c, CURLOPT_ERRORBUFFER, message);
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_USERAGENT, "still/0.1");
    curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(c, CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
    curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(c, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)h->timeout);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)h->timeout);
    curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(c, CURLOPT_HEADERDATA, t);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_tick);
    if (h->loopback) curl_easy_setopt(c, CURLOPT_NOPROXY, "*");
    if (h->token) {
        curl_easy_setopt(c, CURLOPT_HTTPAUTH, (long)CURLAUTH_BEARER);
        curl_easy_setopt(c, CURLOPT_XOAUTH2_BEARER, h->token);
    }
}

/* Network errors that may be temporary. */
static bool passing(CURLcode code)
{
    switch (code) {
    case CURLE_COULDNT_CONNECT:
    case CURLE_PARTIAL_FILE:
    case CURLE_OPERATION_TIMEDOUT:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_HTTP2:
    case CURLE_HTTP2_STREAM: return true;
    default: return false;
    }
}

still_status cli_http_get(cli_http *h, const cli_request *q, cli_response *r,
                          bool *again, still_error *err)
{
    char message[CURL_ERROR_SIZE] = "", line[320], range[64];
    *r = (cli_response){
        .length = -1, .linked_size = -1, .range_first = -1, .range_total = -1};
    *again = false;
    transfer t = {q, r};
    configure(h, q, &t, message);
    struct curl_slist *headers = NULL;
    if (q->from > 0 || q->to > 0) {
        snprintf(range, sizeof range, "%lld-", (long long)q->from);
        if (q->to > 0)
            snprintf(range + strlen(range), sizeof range - strlen(range), "%lld",
                     (long long)q->to);
        curl_easy_setopt(h->curl, CURLOPT_RANGE, range);
        if (q->if_range) {
            snprintf(line, sizeof line, "If-Range: %s", q->if_range);
            headers = curl_slist_append(NULL, line);
            curl_easy_setopt(h->curl, CURLOPT_HTTPHEADER, headers);
        }
    }
    CURLcode code = curl_easy_perform(h->curl);
    curl_slist_free_all(headers);
    if (cli_interrupted()) return sti_fail(err, STILL_E_CANCELLED, "interrupted");
    if (code == CURLE_OK) return STILL_OK;
    *again = passing(code);
    return sti_fail(err, STILL_E_IO, "%s: %s", q->url,
                    message[0] ? message : curl_easy_strerror(code));
}

still_status cli_http_refused(const cli_http *h, const char *url, const cli_response *r,
                              bool *again, still_error *err)
{
    *again = r->status >= 500 || r->status == 429 || r->status == 408;
    if (h->plain)
        return sti_fail(err, STILL_E_IO, "%s: the server answers %ld%s", url, r->status,
                        r->status == 404 ? ", not found" : "");
    if (r->status == 401 || r->status == 403)
        return sti_fail(err, STILL_E_IO, "%s: the hub answers %ld: %s", url, r->status,
                        h->token
                            ? "the token gives no access; accept the model's terms "
                              "on its page, or check the token"
                            : "the model is private, gated or misspelt; set "
                              "HF_TOKEN or --token-file");
    if (r->status == 404)
        return sti_fail(err, STILL_E_IO,
                        "%s: the hub answers 404, not found: check name and --revision",
                        url);
    return sti_fail(err, STILL_E_IO, "%s: the hub answers %ld%s", url, r->status,
                    *again ? ", try again later" : "");
}

bool cli_http_back_off(int attempt)
{
    double seconds = 0.5 * (double)(1 << (attempt < 7 ? attempt - 1 : 6));
    double until = cli_now() + seconds;
    while (!cli_interrupted() && cli_now() < until) {
        struct timespec nap = {.tv_nsec = 50 * 1000 * 1000};
        nanosleep(&nap, NULL);
    }
    return !cli_interrupted();
}
