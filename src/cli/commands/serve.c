/* serve.c - still serve: a model behind HTTP, until Ctrl-C. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "cli/chat_template.h"
#include "cli/fetch/cache.h"
#include "cli/run.h"
#include "server/capacity.h"
#include "server/server.h"

enum { MOST_CONTEXT = 8192, KEYS_MAX = 1 << 20, SPARE_FILES = 64 };

/* What a server is made from, and must be freed after it. */
typedef struct parts {
    still_model *model;
    char *keys;
    FILE *log;
    cli_chat_template form;
} parts;

static bool is_local(const char *host)
{
    return !strncmp(host, "127.", 4) || !strcmp(host, "::1") ||
           !strcmp(host, "localhost");
}

/* Clients see a model's name, not its path. */
static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static int read_parts(const cli_options *o, parts *p)
{
    still_error err;
    size_t n;
    int status = cli_chat_template_read("serve", o, &p->form);
    if (status == CLI_OK && o->api_key_file &&
        cli_read(o->api_key_file, KEYS_MAX, &p->keys, &n, &err))
        status = cli_fail_error(&err);
    if (status == CLI_OK && o->log) {
        p->log = strcmp(o->log, "-") == 0 ? stdout : fopen(o->log, "ae");
        if (!p->log) status = cli_fail("%s: %s", o->log, strerror(errno));
    }
    for (int i = 0; i < o->cors.n && status == CLI_OK; i++)
        if (strcmp(o->cors.item[i], "*") != 0 && !strstr(o->cors.item[i], "://"))
            status =
                cli_usage("serve",
                          "--cors takes an origin such as https://example.org, or *, "
                          "not '%s'",
                          o->cors.item[i]);
    return status;
}

static void free_parts(parts *p)
{
    still_model_free(p->model);
    free(p->keys);
    cli_chat_template_free(&p->form);
    if (p->log && p->log != stdout) fclose(p->log);
}

/* Every connection is a file; the usual limit of 1024 is for programs that use select. */
static void allow_files(int64_t connections)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
    rlim_t want = (rlim_t)connections + SPARE_FILES;
    if (r.rlim_cur >= want) return;
    r.rlim_cur = r.rlim_max < want ? r.rlim_max : want;
    if (setrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur < want)
        cli_warn(
            "the system lets this process open %llu files, --connections %lld needs "
            "more: see ulimit -n",
            (unsigned long long)r.rlim_cur, (long long)connections);
}

static int announce(const cli_options *o, const char *name, const srv_server *s,
                    const srv_capacity *c)
{
    const char *open = strchr(o->host, ':') ? "[" : "", *close = *open ? "]" : "";
    char url[512], each[32], softmax[32], total[32];
    int port = srv_port(s);
    snprintf(url, sizeof url, "http://%s%.400s%s:%d", open, o->host, close, port);
    if (o->json)
        return cli_print_json(json_pack(
            "{s:s, s:s, s:i, s:s, s:i, s:i, s:i, s:I, s:I, s:I}", "listening", url,
            "host", o->host, "port", port, "model", name, "ctx", srv_limit(s),
            "parallel", c->parallel, "kept", c->kept, "conversation_bytes",
            (json_int_t)c->conversation, "softmax_bytes", (json_int_t)c->softmax,
            "total_bytes", (json_int_t)c->total));
    cli_print("%s answers at %s (Ctrl-C ends it)\n", name, url);
    cli_print("%d conversations at once and %d kept, of up to %d tokens: %s each "
              "(softmax: %s), %s in all\n",
              c->parallel, c->kept, srv_limit(s), cli_bytes(each, c->conversation),
              cli_bytes(softmax, c->softmax), cli_bytes(total, c->total));
    cli_flush();
    return CLI_OK;
}

/* --memory, --parallel and --cache, or what the machine has room for. */
static int plan(const cli_options *o, srv_scheduler_params *p, srv_capacity *out)
{
    still_error err;
    size_t memory = 0;
    p->parallel = (int)o->parallel;
    p->queue = (int)o->queue;
    p->cache_bytes = SIZE_MAX;
    p->cache_dir = o->cache_dir;
    if (o->memory && (!cli_read_bytes(o->memory, &memory) || memory == 0))
        return cli_usage("serve", "--memory takes bytes, such as 6GB, not '%s'",
                         o->memory);
    if (o->prefix_cache && !cli_read_bytes(o->prefix_cache, &p->cache_bytes))
        return cli_usage("serve", "--prefix-cache takes bytes, such as 1GB, not '%s'",
                         o->prefix_cache);
    return srv_capacity_plan(p, memory, out, &err) ? cli_fail_error(&err) : CLI_OK;
}

/* The signal may reach any thread, so poll the flag instead of waiting for it. */
static void wait_for_interrupt(void)
{
    while (!cli_interrupted())
        nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
}

static int serve(const cli_options *o, const parts *p)
{
    still_error err;
    still_method method;
    srv_server *server = NULL;
    srv_capacity capacity;
    const still_tokenizer *tk;
    const char *name = last_part(o->arg[0] ? o->arg[0] : cli_default_model(o));
    int64_t trained = still_model_get_info(p->model)->ctx_train;
    int64_t ctx = o->ctx                              ? o->ctx
                  : trained && trained < MOST_CONTEXT ? trained
                                                      : MOST_CONTEXT;
    int status = cli_need_tokenizer(p->model, &tk);
    if (status == CLI_OK) status = cli_read_method(o, p->model, &method);
    if (status != CLI_OK) return status;
    srv_params params = {
        .host = o->host,
        .port = (int)o->port,
        .keys = p->keys,
        .origin = o->cors.item,
        .n_origins = (size_t)o->cors.n,
        .name = name,
        .model = {.model = p->model, .session = cli_session_params(o, &method, ctx)},
        .chat_template = p->form.text,
        .variables = p->form.variables,
        .most_tokens = (int)o->most_tokens,
        .connections = (int)o->connections,
        .drain_seconds = (int)o->drain,
        .log = p->log};
    status = plan(o, &params.model, &capacity);
    if (status != CLI_OK) return status;
    if (srv_start(&params, &server, &err)) {
        bool of_keys = o->api_key_file && strstr(err.text, "API key");
        return of_keys ? cli_fail("%s: %s", o->api_key_file, err.text)
                       : cli_fail_error(&err);
    }
    status = announce(o, name, server, &capacity);
    if (status == CLI_OK) wait_for_interrupt();
    srv_stop(server);
    return status;
}

int cli_cmd_serve(const cli_options *o)
{
    parts p = {0};
    int status = read_parts(o, &p);
    if (status == CLI_OK && !p.keys && !is_local(o->host))
        cli_warn("anybody who reaches %s can use this server: --api-key-file asks for "
                 "a key",
                 o->host);
    if (status == CLI_OK) allow_files(o->connections);
    if (status == CLI_OK) status = cli_open_model(o, o->arg[0], &p.model);
    if (status == CLI_OK) status = serve(o, &p);
    free_parts(&p);
    return status;
}
