/* serve.c - still serve: a model behind HTTP, until Ctrl-C. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/fetch/cache.h"
#include "cli/run.h"
#include "server/server.h"

enum { MOST_CONTEXT = 8192, KEY_MAX = 4096 };

/* The key is the file's one line. */
static int read_key(const char *path, char **key)
{
    still_error err;
    size_t n;
    *key = NULL;
    if (!path) return CLI_OK;
    if (cli_read(path, KEY_MAX, key, &n, &err)) return cli_fail_error(&err);
    while (n > 0 && isspace((unsigned char)(*key)[n - 1])) (*key)[--n] = 0;
    for (size_t i = 0; i < n; i++)
        if ((*key)[i] <= ' ' || (*key)[i] > '~')
            return cli_fail("%s: an API key is one line of printable ASCII without "
                            "spaces; byte %zu is not",
                            path, i);
    return n ? CLI_OK : cli_fail("%s: holds no API key", path);
}

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

static int announce(const cli_options *o, const char *name, int port,
                    const still_session *s)
{
    const char *open = strchr(o->host, ':') ? "[" : "", *close = *open ? "]" : "";
    char url[512];
    snprintf(url, sizeof url, "http://%s%.400s%s:%d", open, o->host, close, port);
    if (o->json)
        return cli_print_json(json_pack("{s:s, s:s, s:i, s:s, s:i}", "listening", url,
                                        "host", o->host, "port", port, "model", name,
                                        "ctx", still_session_limit(s)));
    cli_print("%s answers at %s (Ctrl-C ends it)\n", name, url);
    cli_flush();
    return CLI_OK;
}

/* The signal may reach any thread, so poll the flag instead of waiting for it. */
static void wait_for_interrupt(void)
{
    while (!cli_interrupted())
        nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
}

static int serve(const cli_options *o, still_model *m, const char *key)
{
    still_error err;
    still_session *session = NULL;
    srv_server *server = NULL;
    const still_tokenizer *tk;
    const char *name = last_part(o->arg[0] ? o->arg[0] : CLI_DEFAULT_MODEL);
    int64_t trained = still_model_get_info(m)->ctx_train;
    int64_t ctx = o->ctx                              ? o->ctx
                  : trained && trained < MOST_CONTEXT ? trained
                                                      : MOST_CONTEXT;
    int status = cli_need_tokenizer(m, &tk);
    if (status == CLI_OK) status = cli_open_session(o, m, ctx, &session);
    srv_params params = {.host = o->host,
                         .port = (int)o->port,
                         .api_key = key,
                         .name = name,
                         .model = m,
                         .session = session};
    if (status == CLI_OK && srv_start(&params, &server, &err))
        status = cli_fail_error(&err);
    if (status == CLI_OK) status = announce(o, name, srv_port(server), session);
    if (status == CLI_OK) wait_for_interrupt();
    srv_stop(server);
    still_session_free(session);
    return status;
}

int cli_cmd_serve(const cli_options *o)
{
    still_model *m = NULL;
    char *key = NULL;
    int status = read_key(o->api_key_file, &key);
    if (status == CLI_OK && !key && !is_local(o->host))
        cli_warn("anybody who reaches %s can use this server: --api-key-file asks for "
                 "a key",
                 o->host);
    if (status == CLI_OK) status = cli_open_model(o, o->arg[0], &m);
    if (status == CLI_OK) status = serve(o, m, key);
    still_model_free(m);
    free(key);
    return status;
}
