/* bring.c - see bring.h.
 *
 * Published files go to published/ in the data folder, each complete or as .part, and are
 * removed once they are converted (--keep leaves them). A file whose checksum the list
 * gives must have it. Of another the first download's is kept (kept.h), and a later
 * download must have that. */
#include "cli/data/bring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/new_file.h"
#include "cli/data/kept.h"
#include "cli/data/remote_zip.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"
#include "cli/fetch/fetch.h"
#include "cli/fetch/pull.h"

#define PUBLISHED "published"
enum { MOST_PART = 64 << 20 };

still_status cli_bring_open(cli_bring *b, const cli_options *o, const char *folder,
                            const char *mirror, still_error *err)
{
    *b = (cli_bring){.o = o, .folder = folder, .mirror = mirror};
    STI_TRY(cli_make_folders(folder, err));
    return cli_kept_read(folder, &b->kept, err);
}

void cli_bring_close(cli_bring *b)
{
    if (b->origin[0]) cli_http_close(&b->http);
    json_decref(b->kept);
    *b = (cli_bring){0};
}

/* FOLDER/NAME, or FOLDER/published/NAME. free() it; NULL: no memory. */
static char *path_in(const char *folder, const char *below, const char *name)
{
    sti_buf b = {0};
    sti_buf_printf(&b, "%s/%s%s%s", folder, below, *below && *name ? "/" : "", name);
    if (b.failed) sti_buf_free(&b);
    return b.p;
}

/* ---- What is here -------------------------------------------------------- */

bool cli_bring_is_here(const char *folder, const cli_set *set)
{
    for (int k = 0; k < CLI_MAKES && set->convert->makes[k]; k++) {
        char *path = path_in(folder, "", set->convert->makes[k]);
        const bool here = path && access(path, R_OK) == 0;
        free(path);
        if (!here) return false;
    }
    return true;
}

/* Whether the set's files are what was made; one that was made elsewhere counts. */
static still_status is_here(cli_bring *b, const cli_set *set, cli_brought *out,
                            still_error *err)
{
    out->here = !b->o->force && cli_bring_is_here(b->folder, set);
    for (int k = 0; k < CLI_MAKES && set->convert->makes[k] && out->here; k++) {
        const char *name = set->convert->makes[k],
                   *sum = cli_kept_sum(b->kept, "made", name);
        char *path = path_in(b->folder, "", name);
        if (!path) return sti_fail_memory(err, name, 0);
        out->theirs = out->theirs || !sum;
        const still_status st =
            sum ? cli_check_sum(path, sum, NULL, NULL, err) : STILL_OK;
        free(path);
        if (st == STILL_E_FORMAT) {
            cli_warn("%s; making it again", err->text);
            out->here = false;
        } else if (st != STILL_OK) {
            return st;
        }
    }
    return STILL_OK;
}

/* ---- Downloading --------------------------------------------------------- */

/* Opens a connection to the server of an address, if it is not the one before. */
static still_status connect_to(cli_bring *b, const char *url, still_error *err)
{
    const char *host = strstr(url, "://") + 3;
    const size_t n = (size_t)(host - url) + strcspn(host, "/");
    if (n >= sizeof b->origin)
        return sti_fail(err, STILL_E_ARG, "%s: the server's name is too long", url);
    if (strlen(b->origin) == n && !strncmp(b->origin, url, n)) return STILL_OK;
    if (b->origin[0]) cli_http_close(&b->http);
    snprintf(b->origin, sizeof b->origin, "%.*s", (int)n, url);
    const still_status st =
        cli_http_open(&b->http, b->origin, NULL, false, b->o->timeout, err);
    if (st != STILL_OK) b->origin[0] = 0;
    b->http.plain = true;
    return st;
}

static still_status fetch_from(cli_bring *b, const cli_published *p, const char *url,
                               const char *path, cli_brought *out, still_error *err)
{
    struct stat info;
    cli_progress bar;
    cli_file file = {.name = p->name, .size = p->bytes, .most = p->most};
    memcpy(file.sum, p->sum, sizeof file.sum);
    STI_TRY(connect_to(b, url, err));
    cli_progress_begin(&bar, b->o->quiet, p->name, NULL, 0,
                       p->bytes > 0 ? (uint64_t)p->bytes : 0);
    still_status st = cli_fetch(&b->http, url, path, &file, &bar, err);
    cli_progress_end(&bar);
    if (st == STILL_E_FORMAT && !strstr(err->text, url))
        sti_fail_prefix(err, st, "%s", url);
    if (st == STILL_OK && stat(path, &info) == 0) out->bytes += (uint64_t)info.st_size;
    return st;
}

/* FOLDER/published/ARCHIVE.PART. free() it; NULL: no memory. */
static char *part_path(const cli_bring *b, const cli_published *p, size_t i)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/" PUBLISHED "/%s.%s", b->folder, p->name,
                   p->part[i].name);
    if (path.failed) sti_buf_free(&path);
    return path.p;
}

static still_status fetch_part(cli_remote *r, const cli_bring *b,
                               const cli_published *p, size_t i, still_error *err)
{
    sti_buf text = {0};
    char *path = part_path(b, p, i);
    still_status st = path ? cli_remote_read(r, p->part[i].name, p->part[i].sum,
                                             MOST_PART, &text, err)
                           : sti_fail_memory(err, p->name, 0);
    if (st == STILL_OK) st = sti_write_file(path, text.n ? text.p : "", text.n, err);
    sti_buf_free(&text);
    free(path);
    return st;
}

/* The parts of an archive that are needed, without the rest. */
static still_status parts_from(cli_bring *b, const cli_published *p, const char *url,
                               const char *path, cli_brought *out, still_error *err)
{
    cli_progress bar;
    cli_remote *r = NULL;
    (void)path;
    STI_TRY(connect_to(b, url, err));
    cli_progress_begin(&bar, b->o->quiet, p->name, NULL, 0, 0);
    still_status st = cli_remote_open(&b->http, url, (uint64_t)p->bytes, &bar, &r, err);
    for (size_t i = 0; i < p->n_parts && st == STILL_OK; i++)
        st = fetch_part(r, b, p, i, err);
    cli_progress_end(&bar);
    if (r) out->bytes += cli_remote_bytes(r);
    cli_remote_close(r);
    return st;
}

typedef still_status (*fetch_fn)(cli_bring *b, const cli_published *p, const char *url,
                                 const char *path, cli_brought *out, still_error *err);

/* Tries a file's addresses in turn; *used: the last of them. The first error is the one
 * to tell. */
static still_status fetch_any(cli_bring *b, const cli_published *p, fetch_fn fetch,
                              const char *path, size_t *used, cli_brought *out,
                              still_error *err)
{
    sti_buf url = {0};
    still_status st = STILL_OK;
    still_error why;
    *used = 0;
    if (b->mirror) {
        const size_t n = strlen(b->mirror);
        sti_buf_printf(&url, "%s%s%s", b->mirror, b->mirror[n - 1] == '/' ? "" : "/",
                       p->name);
        st = url.failed ? sti_fail_memory(err, p->name, 0)
                        : fetch(b, p, url.p, path, out, err);
        sti_buf_free(&url);
        return st;
    }
    for (size_t i = 0; i < p->n_urls; i++) {
        st = fetch(b, p, p->url[i], path, out, i ? &why : err);
        *used = i;
        if (st == STILL_OK || st == STILL_E_CANCELLED || st == STILL_E_MEMORY) break;
        if (i + 1 < p->n_urls)
            cli_warn("%s; trying %s", i ? why.text : err->text, p->url[i + 1]);
    }
    return st;
}

/* Notes the checksum of a first download; a later one must have the same. */
static still_status note_published(cli_bring *b, const cli_published *p,
                                   const char *path, const char *url, still_error *err)
{
    char sum[65];
    struct stat info;
    const char *was = cli_kept_sum(b->kept, PUBLISHED, p->name);
    STI_TRY(cli_digest_file(path, CLI_SHA256, sum, NULL, NULL, err));
    if (stat(path, &info)) return sti_fail(err, STILL_E_IO, "%s: cannot be read", path);
    if (was && !p->sum[0] && strcmp(was, sum) != 0)
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: is not what it was when it was first downloaded: SHA-256 is "
            "%s, was %s; if that is meant, remove it from %s/" CLI_KEPT,
            p->name, sum, was, b->folder);
    cli_kept_set(&b->kept, PUBLISHED, p->name,
                 json_pack("{s:s,s:I,s:s,s:s}", "sha256", sum, "bytes",
                           (json_int_t)info.st_size, "url", url, "checked",
                           p->sum[0] ? "list" : "first download"));
    return cli_kept_write(b->folder, b->kept, err);
}

/* The parts of an archive in their place. STILL_E_UNSUPPORTED, STILL_E_FORMAT: it can only
 * be fetched as a whole, or its parts are others than expected. */
static still_status have_parts(cli_bring *b, const cli_published *p, cli_brought *out,
                               still_error *err)
{
    size_t used, here = 0;
    still_error why;
    for (size_t i = 0; i < p->n_parts; i++) {
        char *path = part_path(b, p, i);
        here += path && access(path, R_OK) == 0 &&
                cli_check_sum(path, p->part[i].sum, NULL, NULL, &why) == STILL_OK;
        free(path);
    }
    if (here == p->n_parts) return STILL_OK;
    return fetch_any(b, p, parts_from, NULL, &used, out, err);
}

/* A published file in its place, downloaded now or by a run that was interrupted. */
static still_status have_published(cli_bring *b, const cli_published *p,
                                   cli_brought *out, still_error *err)
{
    const char *sum = p->sum[0] ? p->sum : cli_kept_sum(b->kept, PUBLISHED, p->name);
    char *path = path_in(b->folder, PUBLISHED, p->name);
    if (!path) return sti_fail_memory(err, p->name, 0);
    still_error why;
    size_t used;
    bool here = sum && access(path, R_OK) == 0 &&
                cli_check_sum(path, sum, NULL, NULL, &why) == STILL_OK;
    bool parts = p->n_parts && !here;
    still_status st = parts ? have_parts(b, p, out, err) : STILL_OK;
    if (st == STILL_E_UNSUPPORTED || st == STILL_E_FORMAT) {
        char size[32];
        cli_warn("%s; downloading all of it, %s", err->text,
                 cli_bytes(size, (uint64_t)p->bytes));
        st = STILL_OK;
        parts = false;
    }
    here = here || parts;
    if (st == STILL_OK && !here)
        st = fetch_any(b, p, fetch_from, path, &used, out, err);
    if (st == STILL_OK && !here) {
        st = note_published(b, p, path, b->mirror ? b->mirror : p->url[used], err);
        if (st != STILL_OK) unlink(path);
    }
    free(path);
    return st;
}

/* ---- A set --------------------------------------------------------------- */

static void remove_published(const cli_bring *b, const cli_set *set)
{
    for (size_t i = 0; i < set->n; i++) {
        char *path = path_in(b->folder, PUBLISHED, set->file[i].name);
        if (path) unlink(path);
        free(path);
        for (size_t k = 0; k < set->file[i].n_parts; k++) {
            path = part_path(b, &set->file[i], k);
            if (path) unlink(path);
            free(path);
        }
    }
    char *folder = path_in(b->folder, PUBLISHED, "");
    if (folder) rmdir(folder); /* refused while others are in it */
    free(folder);
}

/* Converts what was downloaded, and notes the checksums of what was made. */
static still_status make(cli_bring *b, const cli_set *set, still_error *err)
{
    cli_make m;
    still_status st = STILL_OK;
    const char **name = sti_alloc(set->n, sizeof *name);
    char *from = path_in(b->folder, PUBLISHED, "");
    if (!name || !from) st = sti_fail_memory(err, set->name, 0);
    for (size_t i = 0; i < set->n && st == STILL_OK; i++) name[i] = set->file[i].name;
    if (st == STILL_OK)
        st = cli_convert(set->convert, from, name, set->n, b->folder, &m, err);
    for (int k = 0; k < CLI_MAKES && st == STILL_OK && m.out[k].name; k++) {
        char sum[65], *path = path_in(b->folder, "", m.out[k].name);
        st = path ? cli_digest_file(path, CLI_SHA256, sum, NULL, NULL, err)
                  : sti_fail_memory(err, m.out[k].name, 0);
        if (st == STILL_OK)
            cli_kept_set(&b->kept, "made", m.out[k].name,
                         json_pack("{s:s,s:I,s:I}", "sha256", sum, "bytes",
                                   (json_int_t)m.out[k].bytes, "records",
                                   (json_int_t)m.out[k].records));
        free(path);
    }
    if (st == STILL_OK) st = cli_kept_write(b->folder, b->kept, err);
    free(name);
    free(from);
    return st;
}

static uint64_t most_bytes(const cli_set *set)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < set->n; i++)
        sum += (uint64_t)(set->file[i].bytes > 0 ? set->file[i].bytes : 0);
    return 2 * sum; /* what is made of them is no larger */
}

static still_status bring(cli_bring *b, const cli_set *set, cli_brought *out,
                          still_error *err)
{
    char *folder = path_in(b->folder, PUBLISHED, "");
    still_status st =
        folder ? cli_make_folders(folder, err) : sti_fail_memory(err, set->name, 0);
    free(folder);
    if (st == STILL_OK) st = cli_check_space(b->folder, most_bytes(set), err);
    for (size_t i = 0; i < set->n && st == STILL_OK; i++)
        st = have_published(b, &set->file[i], out, err);
    if (st != STILL_OK) return st;
    st = make(b, set, err);
    const bool wrong = st == STILL_E_FORMAT || st == STILL_E_LIMIT ||
                       st == STILL_E_UNSUPPORTED; /* it would be wrong again */
    if ((st == STILL_OK && !b->o->keep) || wrong) remove_published(b, set);
    return st;
}

still_status cli_bring_set(cli_bring *b, const cli_set *set, cli_brought *out,
                           still_error *err)
{
    *out = (cli_brought){0};
    STI_TRY(is_here(b, set, out, err));
    if (out->here) return STILL_OK;
    if (cli_offline(b->o))
        return sti_fail(err, STILL_E_IO,
                        "offline, so nothing was downloaded: %s lacks %s of the data "
                        "set %s",
                        b->folder, set->convert->makes[0], set->name);
    return bring(b, set, out, err);
}
