/* server.c - connections: from bytes to a request, from an answer to bytes.
 *
 * libmicrohttpd calls `handle` on its one thread: first with the headers, then with
 * pieces of the body, then once more. A request for another thread is suspended, queued
 * as a job and resumed when its answer is ready; `handle` then sends it. The job checks
 * the socket between tokens and so notices a client that has disconnected. */
#include "server/server.h"

#include <errno.h>
#include <microhttpd.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/listen.h"
#include "server/routes.h"
#include "server/worker.h"

enum {
    MOST_BODY = 64 << 20,
    MOST_CONNECTIONS = 256,
    IDLE_SECONDS = 60, /* before an idle connection is closed */
    GRACE_SECONDS = 5  /* for clients to read answers when the server stops */
};

struct srv_server {
    struct MHD_Daemon *daemon;
    int port;
    char *api_key, *name;
    srv_engine engine;
    srv_worker text, model;
    pthread_mutex_t lock;
    pthread_cond_t change;
    int requests; /* in progress */
    atomic_bool stopping;
};

typedef struct request {
    srv_job job; /* first: a job is its request */
    srv_server *server;
    struct MHD_Connection *connection;
    const srv_route *route; /* NULL: reply holds an error already */
    sti_buf body;
    size_t received;
    srv_reply reply;
    const char *allow; /* 405: the method that would be allowed */
    bool answered;
    int fd;
} request;

/* ---- Headers ------------------------------------------------------------- */

/* Constant time, so that timing does not reveal the key. */
static bool same_key(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    unsigned char differ = n != m;
    for (size_t i = 0; i < m; i++) differ |= (unsigned char)((n ? a[i % n] : 0) ^ b[i]);
    return !differ;
}

static bool has_key(const request *r)
{
    static const char scheme[] = "Bearer ";
    if (!r->server->api_key) return true;
    const char *value =
        MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, "Authorization");
    return value && strncasecmp(value, scheme, sizeof scheme - 1) == 0 &&
           same_key(value + sizeof scheme - 1, r->server->api_key);
}

static void refuse(request *r, int status, const char *code, const char *message)
{
    r->route = NULL;
    srv_reply_error(&r->reply, status, code, message);
}

/* Finds the route; errors go into the reply. */
static void read_head(request *r, const char *method, const char *path)
{
    char message[256];
    r->route = srv_route_find(method, path, &r->allow);
    if (!r->route && r->allow) {
        snprintf(message, sizeof message, "%.100s takes %s, not %.20s", path, r->allow,
                 method);
        refuse(r, 405, "method_not_allowed", message);
    } else if (!r->route) {
        snprintf(message, sizeof message, "there is no %.100s here", path);
        refuse(r, 404, "not_found", message);
    } else if (!r->route->open && !has_key(r)) {
        refuse(r, 401, "invalid_api_key",
               "this server needs its API key: Authorization: Bearer KEY");
    }
    const char *length =
        MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, "Content-Length");
    if (length && strtoull(length, NULL, 10) > MOST_BODY) r->received = SIZE_MAX;
}

static void refuse_size(request *r)
{
    char message[80];
    snprintf(message, sizeof message, "the body is larger than %d MiB",
             MOST_BODY >> 20);
    refuse(r, 413, "body_too_large", message);
}

/* ---- Answers ------------------------------------------------------------- */

static bool client_gone(void *user)
{
    const request *r = user;
    return srv_peer_gone(r->fd);
}

static void answer(request *r)
{
    srv_call call = {
        .engine = &r->server->engine, .body = &r->body, .gone = client_gone, .user = r};
    r->route->answer(&call, &r->reply);
    if (r->reply.body.failed) {
        sti_buf_free(&r->reply.body);
        srv_reply_error(&r->reply, 500, "out_of_memory", "out of memory: the answer");
    }
}

static void run_job(srv_job *job)
{
    request *r = (request *)job;
    answer(r);
    r->answered = true;
    MHD_resume_connection(r->connection); /* r is the other thread's now */
}

/* The response takes over the body's memory. */
static enum MHD_Result send_reply(request *r)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(
        r->reply.body.n, r->reply.body.p, MHD_RESPMEM_MUST_FREE);
    if (!response) return MHD_NO;
    r->reply.body = (sti_buf){0};
    MHD_add_response_header(response, "Content-Type", "application/json");
    if (r->reply.status == 405) MHD_add_response_header(response, "Allow", r->allow);
    if (r->reply.status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (r->server->stopping) MHD_add_response_header(response, "Connection", "close");
    enum MHD_Result result =
        MHD_queue_response(r->connection, (unsigned)r->reply.status, response);
    MHD_destroy_response(response);
    return result;
}

/* The request has arrived completely. */
static enum MHD_Result act(request *r)
{
    if (r->route && r->received > MOST_BODY) refuse_size(r);
    if (r->route && (r->body.failed || r->server->stopping))
        refuse(r, 503, "unavailable",
               r->server->stopping ? "the server is stopping" : "out of memory");
    if (!r->route) {
        r->answered = true;
    } else if (r->route->thread == SRV_HERE) {
        answer(r);
        r->answered = true;
    } else {
        srv_server *s = r->server;
        r->job.run = run_job;
        MHD_suspend_connection(r->connection);
        if (!srv_worker_add(r->route->thread == SRV_TEXT ? &s->text : &s->model,
                            &r->job)) {
            refuse(r, 503, "unavailable", "the server is stopping");
            r->answered = true;
            MHD_resume_connection(r->connection);
        }
        return MHD_YES;
    }
    return send_reply(r);
}

/* ---- Connections --------------------------------------------------------- */

static void count(srv_server *s, int change)
{
    pthread_mutex_lock(&s->lock);
    s->requests += change;
    pthread_cond_signal(&s->change);
    pthread_mutex_unlock(&s->lock);
}

static enum MHD_Result begin(srv_server *s, struct MHD_Connection *connection,
                             const char *path, const char *method, void **context)
{
    request *r = sti_alloc(1, sizeof *r);
    if (!r) return MHD_NO;
    r->server = s;
    r->connection = connection;
    r->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)
                ->connect_fd;
    *context = r;
    count(s, 1);
    read_head(r, method, path);
    if (r->received <= MOST_BODY) return MHD_YES;
    refuse_size(r); /* before it is sent */
    return send_reply(r);
}

static enum MHD_Result handle(void *user, struct MHD_Connection *connection,
                              const char *path, const char *method, const char *version,
                              const char *data, size_t *n, void **context)
{
    (void)version;
    request *r = *context;
    if (!r) return begin(user, connection, path, method, context);
    if (r->answered) return send_reply(r);
    if (*n == 0) return act(r);
    /* A body without a stated length that is too long: read some more of it without
     * keeping it, so that the client gets to read the answer. */
    if (r->received > 4u * MOST_BODY) return MHD_NO;
    r->received += *n;
    if (r->route && r->received <= MOST_BODY)
        sti_buf_put(&r->body, data, *n);
    else
        sti_buf_free(&r->body);
    *n = 0;
    return MHD_YES;
}

static void completed(void *user, struct MHD_Connection *connection, void **context,
                      enum MHD_RequestTerminationCode why)
{
    (void)connection;
    (void)why;
    request *r = *context;
    if (!r) return;
    *context = NULL;
    sti_buf_free(&r->body);
    sti_buf_free(&r->reply.body);
    free(r);
    count(user, -1);
}

/* ---- The server ---------------------------------------------------------- */

int srv_port(const srv_server *s)
{
    return s->port;
}

static void free_server(srv_server *s)
{
    if (s->daemon) MHD_stop_daemon(s->daemon);
    srv_worker_free(&s->text);
    srv_worker_free(&s->model);
    srv_prefix_cache_free(&s->engine.cache);
    pthread_cond_destroy(&s->change);
    pthread_mutex_destroy(&s->lock);
    free(s->api_key);
    free(s->name);
    free(s);
}

static still_status start_daemon(srv_server *s, const srv_params *p, still_error *err)
{
    int fd;
    sigset_t all, before;
    STI_TRY(srv_listen(p->host, p->port, &fd, &s->port, err));
    sigfillset(&all); /* signals are for the caller's thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->daemon = MHD_start_daemon(
        MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0,
        NULL, NULL, handle, s, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_NOTIFY_COMPLETED, completed, s, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)MOST_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_SECONDS, MHD_OPTION_END);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (s->daemon) return STILL_OK;
    close(fd);
    return sti_fail(err, STILL_E_IO, "cannot start the HTTP server: %s",
                    strerror(errno));
}

still_status srv_start(const srv_params *p, srv_server **out, still_error *err)
{
    *out = NULL;
    srv_server *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "server", sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    s->name = sti_strdup(p->name);
    s->api_key = p->api_key ? sti_strdup(p->api_key) : NULL;
    s->engine.name = s->name;
    s->engine.tk = still_model_tokenizer(p->model);
    still_status status = STILL_OK;
    if (!s->name || (p->api_key && !s->api_key))
        status = sti_fail_memory(err, "server", sizeof *s);
    if (status == STILL_OK && !s->engine.tk)
        status = sti_fail(err, STILL_E_ARG, "%s: has no tokenizer", p->name);
    if (status == STILL_OK)
        status = srv_prefix_cache_new(p->model, p->session, &s->engine.cache, err);
    if (status == STILL_OK) status = srv_worker_start(&s->text, err);
    if (status == STILL_OK) status = srv_worker_start(&s->model, err);
    if (status == STILL_OK) status = start_daemon(s, p, err);
    if (status != STILL_OK)
        free_server(s);
    else
        *out = s;
    return status;
}

/* Finishes all jobs first, however long they take, then waits a while for answers to be
 * sent. By then every suspended connection has been resumed, as the daemon requires. */
void srv_stop(srv_server *s)
{
    struct timespec until;
    if (!s) return;
    s->stopping = true;
    int fd = MHD_quiesce_daemon(s->daemon);
    srv_worker_stop(&s->text);
    srv_worker_stop(&s->model);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += GRACE_SECONDS;
    pthread_mutex_lock(&s->lock);
    while (s->requests > 0 && pthread_cond_timedwait(&s->change, &s->lock, &until) == 0)
        continue;
    pthread_mutex_unlock(&s->lock);
    free_server(s);
    if (fd != MHD_INVALID_SOCKET) close(fd);
}
