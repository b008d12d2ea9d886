/* exchange.c - see exchange.h: from bytes to a request, from an answer to bytes.
 *
 * libmicrohttpd calls `handle` on its one thread: first with the headers, then with
 * pieces of the body, then once more. A request for another thread is suspended, queued
 * as a job and resumed when its answer is ready, or when its stream begins; `handle` is
 * then called again. A stream that has nothing to send suspends its connection, and is
 * resumed by the thread that has something for it. While a connection is suspended nobody
 * reads it, so srv_exchange_tend asks the system whether the client is still there. */
#include "server/exchange.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/process.h"
#include "server/listen.h"
#include "server/sequence.h"

enum { BLOCK = 16 << 10 }; /* most bytes of a stream that are sent at once */
static const double PING_SECONDS = 10;

/* A connection lives longer than its requests. */
struct srv_line {
    srv_line *next, **back;
    int fd;
    double since;           /* when it became idle, or its request began */
    int done;               /* looks at it since its client has no more to say */
    srv_exchange *exchange; /* NULL: idle, or reading headers */
};

struct srv_exchange {
    srv_job job; /* first: a job is its exchange */
    srv_floor *floor;
    srv_line *line;
    struct MHD_Connection *connection;
    const srv_route *route; /* NULL: reply holds an error already */
    char *method, *path;
    sti_buf body;
    size_t received;
    srv_reply reply;
    const char *allow; /* 405: the methods that would be allowed */
    bool answered;     /* reply, or generation if it is a stream, can be sent */
    bool asked;        /* the body is complete; under the floor's lock */
    srv_generation *generation; /* under the floor's lock; or NULL */
    double began;
};

static const char *header(const srv_exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

/* ---- Headers ------------------------------------------------------------- */

static void refuse(srv_exchange *x, int status, const char *code, const char *message)
{
    x->route = NULL;
    sti_buf_free(&x->body);
    srv_reply_error(&x->reply, status, code, message);
}

static void refuse_size(srv_exchange *x)
{
    char message[80];
    snprintf(message, sizeof message, "the body is larger than %d MiB",
             SRV_MOST_BODY >> 20);
    refuse(x, 413, "body_too_large", message);
}

/* A page of another origin cannot read answers without leave, but it could still ask:
 * browsers send simple requests unasked. */
static bool is_foreign(const srv_exchange *x)
{
    const srv_access *access = &x->floor->access;
    const char *origin = header(x, "Origin");
    return origin && !srv_access_allows(access, origin) &&
           !srv_access_own(access, origin, header(x, "Host"));
}

static bool is_encoded(const srv_exchange *x)
{
    const char *encoding = header(x, "Content-Encoding");
    return encoding && strcasecmp(encoding, "identity") != 0;
}

static enum MHD_Result count_length(void *user, enum MHD_ValueKind kind,
                                    const char *name, const char *value)
{
    int *n = user;
    (void)kind;
    if (strcasecmp(name, "Content-Length") == 0) (*n)++;
    if (strcasecmp(name, "Transfer-Encoding") == 0)
        *n += value && strcasecmp(value, "chunked") == 0 ? 1 : 2;
    return MHD_YES;
}

/* Whether a proxy before us could see another end of the request than we do, and so hide
 * a second one in its body. */
static bool is_ambiguous(const srv_exchange *x)
{
    int n = 0;
    MHD_get_connection_values(x->connection, MHD_HEADER_KIND, count_length, &n);
    return n > 1;
}

/* Finds the route; errors go into the reply. */
static void read_head(srv_exchange *x)
{
    char message[256];
    const char *length = header(x, "Content-Length");
    x->route = srv_route_find(x->method, x->path, &x->allow);
    if (!x->route && x->allow && strcmp(x->method, "OPTIONS") == 0) {
        x->reply.status = 204;
    } else if (!x->route && x->allow) {
        snprintf(message, sizeof message, "%.100s takes %s, not %.20s", x->path,
                 x->allow, x->method);
        refuse(x, 405, "method_not_allowed", message);
    } else if (!x->route) {
        snprintf(message, sizeof message, "there is no %.100s here", x->path);
        refuse(x, 404, "not_found", message);
    } else if (is_foreign(x)) {
        refuse(x, 403, "origin_not_allowed",
               "pages of this origin may not use the server: start it with --cors "
               "ORIGIN");
    } else if (!x->route->open &&
               !srv_access_has_key(&x->floor->access, header(x, "Authorization"))) {
        refuse(x, 401, "invalid_api_key",
               "this server needs an API key: Authorization: Bearer KEY");
    } else if (is_encoded(x)) {
        refuse(x, 415, "unsupported",
               "the body has a Content-Encoding: send it as it is, not compressed");
    }
    if (length && strtoull(length, NULL, 10) > SRV_MOST_BODY) x->received = SIZE_MAX;
}

/* ---- Answers ------------------------------------------------------------- */

static const char *const api_headers[] = {"X-Content-Type-Options",
                                          "nosniff",
                                          "Content-Security-Policy",
                                          "default-src 'none'; frame-ancestors 'none'",
                                          "Referrer-Policy",
                                          "no-referrer",
                                          "Cache-Control",
                                          "no-store",
                                          NULL};

/* What a page of another origin needs to be told by its browser. */
static void add_cors(const srv_exchange *x, struct MHD_Response *response)
{
    const char *origin = header(x, "Origin");
    const char *asked = header(x, "Access-Control-Request-Headers");
    if (x->floor->access.n_origins == 0) return;
    MHD_add_response_header(response, "Vary", "Origin");
    if (!origin || !srv_access_allows(&x->floor->access, origin)) return;
    MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
    if (x->reply.status != 204) return;
    MHD_add_response_header(response, "Access-Control-Allow-Methods", x->allow);
    if (asked && strlen(asked) <= 1024 &&
        strspn(asked, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                      "0123456789-_, ") == strlen(asked))
        MHD_add_response_header(response, "Access-Control-Allow-Headers", asked);
    MHD_add_response_header(response, "Access-Control-Max-Age", "86400");
}

static enum MHD_Result queue(srv_exchange *x, struct MHD_Response *response)
{
    const srv_reply *r = &x->reply;
    const char *const *h = r->headers ? r->headers : api_headers;
    if (r->status != 204)
        MHD_add_response_header(response, "Content-Type",
                                r->type ? r->type : "application/json");
    for (; *h; h += 2) MHD_add_response_header(response, h[0], h[1]);
    if (r->tag) MHD_add_response_header(response, "ETag", r->tag);
    if (x->allow && (r->status == 405 || r->status == 204))
        MHD_add_response_header(response, "Allow", x->allow);
    if (r->status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (r->status == 429) MHD_add_response_header(response, "Retry-After", "1");
    add_cors(x, response);
    if (x->floor->stopping) MHD_add_response_header(response, "Connection", "close");
    enum MHD_Result result =
        MHD_queue_response(x->connection, (unsigned)r->status, response);
    MHD_destroy_response(response);
    return result;
}

/* The response takes over the body's memory. */
static enum MHD_Result send_reply(srv_exchange *x)
{
    srv_reply *r = &x->reply;
    if (r->body.failed) {
        sti_buf_free(&r->body);
        srv_reply_error(r, 500, "out_of_memory", "out of memory: the answer");
    }
    const char *known = r->tag ? header(x, "If-None-Match") : NULL;
    if (known && strstr(known, r->tag)) {
        r->status = 304;
        r->n_fixed = 0;
    }
    struct MHD_Response *response =
        r->fixed ? MHD_create_response_from_buffer(
                       r->n_fixed, (void *)(uintptr_t)r->fixed, MHD_RESPMEM_PERSISTENT)
                 : MHD_create_response_from_buffer(r->body.n, r->body.p,
                                                   MHD_RESPMEM_MUST_FREE);
    if (!response) return MHD_NO;
    if (!r->fixed) r->body = (sti_buf){0};
    return queue(x, response);
}

/* ---- Streams ------------------------------------------------------------- */

static void pause_stream(void *user)
{
    srv_exchange *x = user;
    MHD_suspend_connection(x->connection);
}

static void resume_stream(void *user)
{
    srv_exchange *x = user;
    MHD_resume_connection(x->connection);
}

static ssize_t read_stream(void *user, uint64_t at, char *p, size_t n)
{
    srv_exchange *x = user;
    bool end, broken;
    (void)at;
    size_t got = srv_generation_read(x->generation, p, n, &end, &broken);
    if (broken) return MHD_CONTENT_READER_END_WITH_ERROR;
    return end ? MHD_CONTENT_READER_END_OF_STREAM : (ssize_t)got;
}

static enum MHD_Result send_stream(srv_exchange *x)
{
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, BLOCK, read_stream, x, NULL);
    if (!response) return MHD_NO;
    x->reply.status = 200;
    x->reply.type = "text/event-stream; charset=utf-8";
    MHD_add_response_header(response, "X-Accel-Buffering", "no"); /* of nginx */
    return queue(x, response);
}

static enum MHD_Result send_answer(srv_exchange *x)
{
    if (x->generation && srv_generation_streams(x->generation)) return send_stream(x);
    if (x->generation) srv_generation_reply(x->generation, &x->reply);
    return send_reply(x);
}

/* ---- Other threads' work ------------------------------------------------- */

static void answer(srv_exchange *x)
{
    srv_query q = {.api = &x->floor->api,
                   .path = x->path,
                   .body = &x->body,
                   .counts = &x->floor->counts,
                   .keys = x->floor->access.n_keys > 0};
    x->route->answer(&q, &x->reply);
}

/* After the last line of either branch the exchange is the other thread's. */
static void run_job(srv_job *job)
{
    srv_exchange *x = (srv_exchange *)job;
    srv_generation *g = NULL;
    x->answered = true;
    if (x->route->by == SRV_BY_MODEL) {
        srv_mover mover = {pause_stream, resume_stream, x};
        g = srv_generation_new(&x->floor->api, x->route->chat, x->body.p, x->body.n,
                               &mover, &x->reply);
        sti_buf_free(&x->body);
        pthread_mutex_lock(&x->floor->lock);
        x->generation = g;
        pthread_mutex_unlock(&x->floor->lock);
    } else {
        answer(x);
    }
    if (g && !srv_generation_streams(g))
        srv_generation_wait(g);
    else
        MHD_resume_connection(x->connection);
}

/* The request has arrived completely. */
static enum MHD_Result act(srv_exchange *x)
{
    srv_floor *f = x->floor;
    pthread_mutex_lock(&f->lock);
    x->asked = true;
    pthread_mutex_unlock(&f->lock);
    if (x->route && x->received > SRV_MOST_BODY) refuse_size(x);
    if (x->route && (x->body.failed || f->stopping))
        refuse(x, 503, "unavailable",
               f->stopping ? "the server is stopping" : "out of memory");
    if (x->route && x->route->by != SRV_HERE) {
        x->job.run = run_job;
        MHD_suspend_connection(x->connection);
        if (!srv_worker_add(&f->text, &x->job)) {
            refuse(x, 503, "unavailable", "the server is stopping");
            x->answered = true;
            MHD_resume_connection(x->connection);
        }
        return MHD_YES;
    }
    if (x->route) answer(x);
    x->answered = true;
    return send_reply(x);
}

/* ---- Requests ------------------------------------------------------------ */

static void count(srv_floor *f, int change)
{
    atomic_fetch_add(&f->counts.active, change);
    pthread_mutex_lock(&f->lock);
    f->requests += change;
    pthread_cond_signal(&f->change);
    pthread_mutex_unlock(&f->lock);
}

static void free_exchange(srv_exchange *x)
{
    sti_buf_free(&x->body);
    sti_buf_free(&x->reply.body);
    free(x->method);
    free(x->path);
    free(x);
}

static enum MHD_Result begin(srv_floor *f, struct MHD_Connection *connection,
                             const char *path, const char *method, void **context)
{
    srv_exchange *x = sti_alloc(1, sizeof *x);
    if (!x) return MHD_NO;
    x->floor = f;
    x->connection = connection;
    x->began = sti_now();
    x->method = sti_strndup(method, 32);
    x->path = sti_strndup(path, 1024);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    if (!x->method || !x->path || !info || !info->socket_context) {
        free_exchange(x);
        return MHD_NO;
    }
    x->line = info->socket_context;
    *context = x;
    count(f, 1);
    pthread_mutex_lock(&f->lock);
    x->line->exchange = x;
    x->line->since = x->began;
    pthread_mutex_unlock(&f->lock);
    read_head(x);
    const bool ambiguous = is_ambiguous(x);
    if (x->received <= SRV_MOST_BODY && !ambiguous) return MHD_YES;
    /* Before the body is sent: the connection ends with this answer. */
    if (ambiguous)
        refuse(x, 400, "invalid_value",
               "the headers must tell the end of the body in one way: one "
               "Content-Length, or Transfer-Encoding: chunked");
    else
        refuse_size(x);
    return send_reply(x);
}

enum MHD_Result srv_exchange_handle(void *user, struct MHD_Connection *connection,
                                    const char *path, const char *method,
                                    const char *version, const char *data, size_t *n,
                                    void **context)
{
    (void)version;
    srv_exchange *x = *context;
    if (!x) return begin(user, connection, path, method, context);
    if (x->answered) return send_answer(x);
    if (*n == 0) return act(x);
    /* A body without a stated length that is too long: read some more of it without
     * keeping it, so that the client gets to read the answer. */
    if (x->received > 4u * SRV_MOST_BODY) return MHD_NO;
    x->received += *n;
    if (x->route && x->received <= SRV_MOST_BODY)
        sti_buf_put(&x->body, data, *n);
    else
        sti_buf_free(&x->body);
    *n = 0;
    return MHD_YES;
}

/* ---- The log ------------------------------------------------------------- */

static void put_address(const srv_exchange *x, char *out, size_t n)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *a = info ? info->client_addr : NULL;
    snprintf(out, n, "?");
    if (a && a->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)a)->sin_addr,
                  out, (socklen_t)n);
    if (a && a->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  out, (socklen_t)n);
}

/* Who asked for what, how it ended and how long it took; nothing of what was said. */
static void write_log(const srv_exchange *x, bool complete)
{
    char client[INET6_ADDRSTRLEN], when[32];
    const char *finish = "";
    time_t now = time(NULL);
    struct tm utc;
    put_address(x, client, sizeof client);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *line =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:f, s:b}", "time", when, "client", client,
                  "method", x->method, "path", x->path, "status", x->reply.status,
                  "seconds", sti_now() - x->began, "complete", (int)complete);
    if (x->generation) {
        srv_usage u = srv_generation_usage(x->generation, &finish);
        sti_json_set(&line, "prompt_tokens", json_integer((json_int_t)u.prompt));
        sti_json_set(&line, "cached_tokens", json_integer((json_int_t)u.cached));
        sti_json_set(&line, "completion_tokens", json_integer((json_int_t)u.made));
        sti_json_set(&line, "finish", json_string(finish));
    }
    char *text = sti_json_text(line, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(line);
    if (text) fprintf(x->floor->log, "%s\n", text);
    fflush(x->floor->log);
    free(text);
}

void srv_exchange_completed(void *user, struct MHD_Connection *connection,
                            void **context, enum MHD_RequestTerminationCode why)
{
    (void)connection;
    srv_floor *f = user;
    srv_exchange *x = *context;
    if (!x) return;
    *context = NULL;
    size_t number = srv_route_number(x->route);
    srv_count(&f->counts, x->route ? number : SRV_MOST_ROUTES, x->reply.status);
    if (f->log) write_log(x, why == MHD_REQUEST_TERMINATED_COMPLETED_OK);
    pthread_mutex_lock(&f->lock);
    srv_generation *g = x->generation;
    x->generation = NULL;
    x->line->exchange = NULL;
    x->line->since = sti_now();
    pthread_mutex_unlock(&f->lock);
    if (g) srv_generation_leave(g);
    free_exchange(x);
    count(f, -1);
}

/* ---- Connections --------------------------------------------------------- */

void srv_exchange_connected(void *user, struct MHD_Connection *connection,
                            void **socket_context,
                            enum MHD_ConnectionNotificationCode what)
{
    srv_floor *f = user;
    srv_line *line = *socket_context;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        line = sti_alloc(1, sizeof *line);
        if (!line) return; /* its requests are refused */
        line->since = sti_now();
        line->fd =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)
                ->connect_fd;
        pthread_mutex_lock(&f->lock);
        line->next = f->lines;
        line->back = &f->lines;
        if (line->next) line->next->back = &line->next;
        f->lines = line;
        pthread_mutex_unlock(&f->lock);
        *socket_context = line;
    } else if (line) {
        pthread_mutex_lock(&f->lock);
        *line->back = line->next;
        if (line->next) line->next->back = line->back;
        pthread_mutex_unlock(&f->lock);
        free(line);
        *socket_context = NULL;
    }
}

/* A connection is off the list before its socket is closed, so the number is its own. */
void srv_exchange_tend(srv_floor *f)
{
    double now = sti_now();
    pthread_mutex_lock(&f->lock);
    for (srv_line *line = f->lines; line; line = line->next) {
        const srv_exchange *x = line->exchange;
        double limit = x ? SRV_BODY_SECONDS : SRV_HEAD_SECONDS;
        /* What is read may not have been looked at: wait for a second look. Half a
         * request that nothing follows would otherwise stay until its time is over. */
        line->done = srv_peer_done(line->fd) ? line->done + 1 : 0;
        if (x && x->generation && srv_peer_gone(line->fd))
            srv_generation_cancel(x->generation);
        else if (x && x->generation)
            srv_generation_ping(x->generation, now, PING_SECONDS);
        else if (!(x && x->asked) && (now - line->since > limit || line->done > 1))
            shutdown(line->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&f->lock);
}
