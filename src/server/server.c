/* server.c - see server.h: what a server is made of, how it starts and how it ends. */
#include "server/server.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/exchange.h"
#include "server/listen.h"

enum {
    CONNECTIONS = 1024,
    GRACE_SECONDS = 5,     /* for clients to read answers when the server stops */
    TEND_NANOS = 200000000 /* between two looks after the connections */
};

struct srv_server {
    struct MHD_Daemon *daemon;
    int port;
    char *name, *chat_template;
    srv_floor floor;
    pthread_t tender;
    int drain_seconds;
    bool tending, ending; /* the thread runs; it shall end, under the floor's lock */
};

int srv_port(const srv_server *s)
{
    return s->port;
}

int srv_limit(const srv_server *s)
{
    return s->floor.api.limit;
}

/* ---- The thread that looks after connections ----------------------------- */

static void *tend(void *user)
{
    srv_server *s = user;
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = TEND_NANOS}, NULL);
        pthread_mutex_lock(&s->floor.lock);
        bool ending = s->ending;
        pthread_mutex_unlock(&s->floor.lock);
        if (ending) return NULL;
        srv_exchange_tend(&s->floor);
    }
}

static void end_tending(srv_server *s)
{
    if (!s->tending) return;
    pthread_mutex_lock(&s->floor.lock);
    s->ending = true;
    pthread_mutex_unlock(&s->floor.lock);
    pthread_join(s->tender, NULL);
    s->tending = false;
}

/* ---- Starting ------------------------------------------------------------ */

static void free_server(srv_server *s)
{
    srv_floor *f = &s->floor;
    end_tending(s);
    if (s->daemon) MHD_stop_daemon(s->daemon);
    srv_worker_free(&f->text);
    srv_scheduler_free(f->api.scheduler);
    json_decref(f->api.variables);
    srv_access_free(&f->access);
    pthread_cond_destroy(&f->change);
    pthread_mutex_destroy(&f->lock);
    free(s->chat_template);
    free(s->name);
    free(s);
}

/* A conversation is sampled as the model's authors say; numbers they leave out are
 * negative. Completions are what the model itself would say. */
static void set_defaults(srv_api *api, const still_sampler_params *p)
{
    api->plain = api->chat = srv_plain_options();
    api->chat.max_tokens = -1;
    if (p->temperature >= 0) api->chat.temperature = (double)p->temperature;
    if (p->top_p >= 0) api->chat.top_p = (double)p->top_p;
    if (p->min_p >= 0) api->chat.min_p = (double)p->min_p;
    if (p->top_k >= 0) api->chat.top_k = p->top_k;
    if (p->repeat_penalty >= 0) api->chat.repeat_penalty = (double)p->repeat_penalty;
}

static still_status make_api(srv_server *s, const srv_params *p, still_error *err)
{
    srv_api *api = &s->floor.api;
    const still_model_info *info = still_model_get_info(p->model.model);
    s->name = sti_strdup(p->name);
    s->chat_template = p->chat_template ? sti_strdup(p->chat_template) : NULL;
    if (!s->name || (p->chat_template && !s->chat_template))
        return sti_fail_memory(err, "server", sizeof *s);
    api->name = s->name;
    api->model = p->model.model;
    api->tk = still_model_tokenizer(p->model.model);
    if (!api->tk) return sti_fail(err, STILL_E_ARG, "%s: has no tokenizer", p->name);
    api->vocab = info->vocab;
    api->most_tokens = p->most_tokens;
    api->chat_template = s->chat_template;
    const char *chat =
        s->chat_template ? s->chat_template : still_tokenizer_chat_template(api->tk);
    api->places.developer = chat && strstr(chat, "developer");
    api->places.tools = chat && (strstr(chat, "tools") || strstr(chat, "tool_calls"));
    set_defaults(api, info->sampling);
    if (p->variables)
        STI_TRY(sti_json_read("template variables", p->variables, strlen(p->variables),
                              STI_JSON_OBJECT, &api->variables, err));
    STI_TRY(srv_scheduler_new(&p->model, &api->scheduler, err));
    api->limit = srv_scheduler_limit(api->scheduler);
    return STILL_OK;
}

/* Signals are for the caller's thread. */
static still_status start_threads(srv_server *s, const srv_params *p, still_error *err)
{
    int fd;
    sigset_t all, before;
    unsigned most = p->connections > 0 ? (unsigned)p->connections : CONNECTIONS;
    STI_TRY(srv_listen(p->host, p->port, &fd, &s->port, &s->floor.access.local, err));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->daemon = MHD_start_daemon(
        MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0,
        NULL, NULL, srv_exchange_handle, &s->floor, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_NOTIFY_COMPLETED, srv_exchange_completed, &s->floor,
        MHD_OPTION_NOTIFY_CONNECTION, srv_exchange_connected, &s->floor,
        MHD_OPTION_CONNECTION_LIMIT, most, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)SRV_HEAD_SECONDS, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    int failed = s->daemon ? pthread_create(&s->tender, NULL, tend, s) : 0;
    s->tending = s->daemon && !failed;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!s->daemon) {
        int saved = errno;
        close(fd);
        return sti_fail(err, STILL_E_IO, "cannot start the HTTP server: %s",
                        strerror(saved));
    }
    if (failed)
        return sti_fail(err, STILL_E_IO, "cannot start a thread: %s", strerror(failed));
    return STILL_OK;
}

still_status srv_start(const srv_params *p, srv_server **out, still_error *err)
{
    *out = NULL;
    srv_server *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "server", sizeof *s);
    pthread_mutex_init(&s->floor.lock, NULL);
    pthread_cond_init(&s->floor.change, NULL);
    s->floor.log = p->log;
    s->drain_seconds = p->drain_seconds;
    still_status status =
        srv_access_init(&s->floor.access, p->keys, p->origin, p->n_origins, err);
    if (status == STILL_OK) status = make_api(s, p, err);
    if (status == STILL_OK) status = srv_worker_start(&s->floor.text, err);
    if (status == STILL_OK) status = start_threads(s, p, err);
    if (status != STILL_OK)
        free_server(s);
    else
        *out = s;
    return status;
}

/* ---- Ending -------------------------------------------------------------- */

/* Finishes all work first, or cancels what takes too long, then waits a while for answers
 * to be sent. By then every suspended connection has been resumed, as the daemon
 * requires. */
void srv_stop(srv_server *s)
{
    struct timespec until;
    if (!s) return;
    srv_floor *f = &s->floor;
    f->stopping = true;
    int fd = MHD_quiesce_daemon(s->daemon);
    /* A proxy learns at once that it must ask another replica. Closed is the socket only
     * when no thread can be using it. */
    if (fd != MHD_INVALID_SOCKET) shutdown(fd, SHUT_RDWR);
    srv_worker_stop(&f->text);
    srv_scheduler_stop(f->api.scheduler, s->drain_seconds);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += GRACE_SECONDS;
    pthread_mutex_lock(&f->lock);
    while (f->requests > 0 && pthread_cond_timedwait(&f->change, &f->lock, &until) == 0)
        continue;
    pthread_mutex_unlock(&f->lock);
    free_server(s);
    if (fd != MHD_INVALID_SOCKET) close(fd);
}
