/* fetch.c - see fetch.h.
 *
 * What can go wrong and what is done:
 *   connection drops, stalls, 5xx   wait and continue from the last byte; give up after
 *                                   five attempts without a new byte, keeping .part
 *   server ignores Range            answers 200: the part starts over
 *   file changed meanwhile          If-Range does not match: 200 as well
 *   more or fewer bytes than stated error; the part is discarded
 *   wrong checksum                  a resumed part is discarded and fetched once more
 *                                   from the start; a fresh one is an error
 *   HTML where a file should be     error that says so (a login or proxy page) */
#include "cli/fetch/fetch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/new_file.h"
#include "cli/cli.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"

enum { ATTEMPTS = 5 };

typedef struct fetch {
    cli_http *http;
    const char *url, *path;
    cli_file *file;
    cli_progress *bar;
    char *part, *tag_path; /* path.part, path.etag */
    FILE *out;
    int64_t have;    /* bytes in part */
    int64_t asked;   /* first byte asked for */
    bool began;      /* this response was checked */
    bool resumed;    /* some of the part comes from an earlier response */
    char tag[256];   /* the server's tag of the bytes in part */
    still_error why; /* set by the body function when it ends a transfer */
} fetch;

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

static void save_tag(fetch *t)
{
    /* If it cannot be saved, the next run starts over: slower, but correct. */
    sti_write_file(t->tag_path, t->tag, strlen(t->tag), NULL);
}

static void load_tag(fetch *t)
{
    FILE *f = fopen(t->tag_path, "r");
    if (!f) return;
    size_t n = fread(t->tag, 1, sizeof t->tag - 1, f);
    t->tag[n] = 0;
    if (strpbrk(t->tag, "\r\n")) t->tag[0] = 0; /* would be a second header */
    fclose(f);
}

static void start_over(fetch *t)
{
    if (t->out) {
        rewind(t->out);
        if (ftruncate(fileno(t->out), 0))
            sti_fail(&t->why, STILL_E_IO, "%s: %s", t->part, strerror(errno));
    }
    t->have = 0;
    t->resumed = false;
}

/* Who says how large a file is. */
static const char *who(const fetch *t)
{
    return t->http->plain ? "the list of sources says" : "the hub lists";
}

/* Checks a response before its first byte is saved. False: it is not our file. */
static bool begin(fetch *t, const cli_response *r)
{
    cli_file *f = t->file;
    t->began = true;
    if (!strncmp(r->type, "text/html", 9) && !ends_with(f->name, ".html")) {
        sti_fail(&t->why, STILL_E_FORMAT,
                 "%s: the server sent an HTML page (type %s) instead of the file: a "
                 "login or proxy page?",
                 t->url, r->type);
        return false;
    }
    if (r->status == 206 && r->range_first != t->asked) {
        sti_fail(&t->why, STILL_E_FORMAT,
                 "%s: asked for bytes from %lld, the server sent "
                 "them from %lld",
                 t->url, (long long)t->asked, (long long)r->range_first);
        return false;
    }
    int64_t told = r->linked_size >= 0 ? r->linked_size : r->range_total;
    if (f->size >= 0 && told >= 0 && told != f->size) {
        sti_fail(
            &t->why, STILL_E_FORMAT,
            "%s: %s %lld bytes, the server speaks of %lld; nothing was kept of this "
            "answer",
            t->url, who(t), (long long)f->size, (long long)told);
        return false;
    }
    if (r->status == 200) start_over(t);
    snprintf(t->tag, sizeof t->tag, "%s", strncmp(r->etag, "W/", 2) ? r->etag : "");
    save_tag(t);
    return true;
}

static bool on_body(void *user, const cli_response *r, const char *data, size_t n)
{
    fetch *t = user;
    if (r->status != 200 && r->status != 206) return true; /* an error page: dropped */
    if (!t->began && !begin(t, r)) return false;
    if (t->file->size >= 0 && (int64_t)n > t->file->size - t->have) {
        sti_fail(&t->why, STILL_E_FORMAT,
                 "%s: the server sends more than the %lld bytes %s", t->url,
                 (long long)t->file->size, who(t));
        start_over(t);
        return false;
    }
    if (t->file->most > 0 && (int64_t)n > t->file->most - t->have) {
        sti_fail(
            &t->why, STILL_E_LIMIT,
            "%s: the server sends more than %lld bytes, the most that are expected",
            t->url, (long long)t->file->most);
        start_over(t);
        return false;
    }
    if (fwrite(data, 1, n, t->out) != n) {
        sti_fail_write(&t->why, t->part, errno);
        return false;
    }
    t->have += (int64_t)n;
    cli_progress_update(t->bar, (uint64_t)t->have);
    return true;
}

/* A tag of 64 or 40 hex digits, without quotes, is a sum of the content. */
static void sum_from_tag(cli_file *f, const char *tag)
{
    char plain[256];
    if (f->sum[0]) return;
    snprintf(plain, sizeof plain, "%s", tag[0] == '"' ? tag + 1 : tag);
    plain[strcspn(plain, "\"")] = 0;
    if (cli_is_hex(plain, 64) || cli_is_hex(plain, 40)) memcpy(f->sum, plain, 65);
}

/* One request. *done: the part is complete as far as sizes tell. */
static still_status attempt(fetch *t, bool *done, bool *again, still_error *err)
{
    cli_response r;
    t->began = false;
    t->why = (still_error){0};
    t->asked = t->have;
    cli_request q = {.url = t->url,
                     .body = on_body,
                     .user = t,
                     .from = t->have,
                     .if_range = t->tag[0] ? t->tag : NULL};
    still_status status = cli_http_get(t->http, &q, &r, again, err);
    if (fflush(t->out) && t->why.code == STILL_OK)
        sti_fail_write(&t->why, t->part, errno);
    if (t->why.code != STILL_OK) { /* our own reason, not curl's "write failed" */
        *again = false;
        if (err) *err = t->why;
        return t->why.code;
    }
    if (status != STILL_OK) return status;
    if (r.status == 416 && t->have > 0) { /* beyond the end: the part is stale */
        start_over(t);
        t->tag[0] = 0;
        *again = true;
        return sti_fail(err, STILL_E_IO, "%s: the part here is longer than the file",
                        t->url);
    }
    if (r.status != 200 && r.status != 206)
        return cli_http_refused(t->http, t->url, &r, again, err);
    if (!t->began && !begin(t, &r)) { /* an empty body */
        if (err) *err = t->why;
        return t->why.code;
    }
    /* Any server may tag files with 64 digits; a hub's are their checksum. */
    if (r.linked_etag[0] || !t->http->plain)
        sum_from_tag(t->file, r.linked_etag[0] ? r.linked_etag : r.etag);
    if (t->file->size >= 0 && t->have < t->file->size) {
        /* Everything the server announced has arrived, so its file is a different one.
         * Without an announced length it may just have closed early. */
        *again = r.length < 0;
        status = sti_fail(err, STILL_E_IO, "%s: ends after %lld bytes, %s %lld", t->url,
                          (long long)t->have, who(t), (long long)t->file->size);
        if (!*again) start_over(t);
        return status;
    }
    *done = true;
    return STILL_OK;
}

/* Attempts until the part is complete. */
static still_status download(fetch *t, still_error *err)
{
    bool done = t->file->size > 0 && t->have == t->file->size;
    int64_t furthest = t->have; /* only new bytes count as progress */
    for (int failures = 0; !done;) {
        bool again = false;
        still_status status = attempt(t, &done, &again, err);
        if (status == STILL_OK) break;
        if (t->have > furthest) {
            furthest = t->have;
            failures = 0;
        }
        if (t->have > 0) t->resumed = true;
        if (!again || ++failures == ATTEMPTS) return status;
        if (!cli_http_back_off(failures))
            return sti_fail(err, STILL_E_CANCELLED, "interrupted");
    }
    return STILL_OK;
}

static still_status verify(fetch *t, still_error *err)
{
    if (!t->file->sum[0]) return STILL_OK;
    return cli_check_sum(t->part, t->file->sum, cli_progress_tick, t->bar, err);
}

static still_status transfer(fetch *t, still_error *err)
{
    struct stat st;
    int fd;
    STI_TRY(sti_open_own(t->part, O_RDWR, &fd, err));
    t->out = fdopen(fd, "r+b");
    if (!t->out) {
        close(fd);
        return sti_fail_memory(err, t->part, BUFSIZ);
    }
    if (fstat(fd, &st) || fseeko(t->out, 0, SEEK_END))
        return sti_fail(err, STILL_E_IO, "%s: %s", t->part, strerror(errno));
    t->have = st.st_size;
    load_tag(t);
    /* Without a tag or a checksum nothing tells whether the rest would match this
     * beginning. */
    if ((!t->tag[0] && !t->file->sum[0]) ||
        (t->file->size >= 0 && t->have > t->file->size))
        start_over(t);
    t->resumed = t->have > 0;
    cli_progress_update(t->bar, (uint64_t)t->have);

    for (bool second = false;; second = true) {
        STI_TRY(download(t, err));
        bool pieced = t->resumed;
        still_status status = verify(t, err);
        if (status == STILL_OK) break;
        if (status != STILL_E_FORMAT) return status;
        start_over(t);
        t->tag[0] = 0;
        if (!pieced || second) return status;
    }
    FILE *out = t->out;
    t->out = NULL;
    if (fclose(out)) return sti_fail_write(err, t->part, errno);
    STI_TRY(sti_publish(t->part, t->path, err));
    unlink(t->tag_path);
    return STILL_OK;
}

still_status cli_fetch(cli_http *h, const char *url, const char *path, cli_file *f,
                       cli_progress *bar, still_error *err)
{
    fetch t = {.http = h, .url = url, .path = path, .file = f, .bar = bar};
    sti_buf part = {0}, tag = {0};
    sti_buf_printf(&part, "%s.part", path);
    sti_buf_printf(&tag, "%s.etag", path);
    t.part = part.p;
    t.tag_path = tag.p;
    still_status status =
        part.failed || tag.failed ? sti_fail_memory(err, path, 0) : transfer(&t, err);
    if (t.out) fclose(t.out);
    if (status != STILL_OK && t.have == 0 && t.part) { /* nothing worth keeping */
        unlink(t.part);
        unlink(t.tag_path);
    }
    sti_buf_free(&part);
    sti_buf_free(&tag);
    return status;
}
