/* remote_zip.c - see remote_zip.h. Bytes come in blocks, the last few of which are kept: the
 * reader of archives asks for small neighbouring pieces. */
#include "cli/data/remote_zip.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sha256.h"
#include "cli/data/zip.h"

enum { BLOCK = 256 << 10, KEPT = 4, ATTEMPTS = 5 };

typedef struct block {
    uint64_t number;
    size_t n; /* bytes; 0: nothing is kept here */
    char *p;  /* [BLOCK] */
} block;

struct cli_remote {
    cli_http *http;
    char *url;
    uint64_t size, bytes;
    cli_progress *bar;
    block kept[KEPT];
    size_t next; /* to be replaced */
    cli_zip *zip;
};

/* ---- Blocks -------------------------------------------------------------- */

typedef struct answer {
    cli_remote *r;
    block *b;
    uint64_t from;
    size_t want;
    still_error why;
} answer;

static bool on_body(void *user, const cli_response *r, const char *data, size_t n)
{
    answer *a = user;
    if (r->status == 200) { /* the whole file: not what was asked for */
        sti_fail(&a->why, STILL_E_UNSUPPORTED,
                 "%s: the server does not send parts of files", a->r->url);
        return false;
    }
    if (r->status != 206) return true; /* an error page: dropped */
    if (r->range_first != (int64_t)a->from || r->range_total != (int64_t)a->r->size ||
        n > a->want - a->b->n) {
        sti_fail(
            &a->why, STILL_E_FORMAT,
            "%s: the server sent another part of the file than was asked for, or of "
            "another file (%lld bytes, expected %llu)",
            a->r->url, (long long)r->range_total, (unsigned long long)a->r->size);
        return false;
    }
    memcpy(a->b->p + a->b->n, data, n);
    a->b->n += n;
    a->r->bytes += n;
    cli_progress_update(a->r->bar, a->r->bytes);
    return true;
}

static still_status ask(cli_remote *r, block *b, bool *again, still_error *err)
{
    cli_response response;
    answer a = {.r = r, .b = b, .from = b->number * BLOCK};
    a.want = r->size - a.from < BLOCK ? (size_t)(r->size - a.from) : BLOCK;
    const cli_request q = {.url = r->url,
                           .from = (int64_t)a.from,
                           .to = (int64_t)(a.from + a.want - 1),
                           .body = on_body,
                           .user = &a};
    b->n = 0;
    const still_status st = cli_http_get(r->http, &q, &response, again, err);
    if (a.why.code != STILL_OK) {
        *again = false;
        if (err) *err = a.why;
        return a.why.code;
    }
    if (st != STILL_OK) return st;
    if (response.status == 200)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: the server does not send parts of files", r->url);
    if (response.status != 206)
        return cli_http_refused(r->http, r->url, &response, again, err);
    *again = b->n < a.want;
    return *again ? sti_fail(err, STILL_E_IO, "%s: a part of it ended early", r->url)
                  : STILL_OK;
}

/* The block with this number, which stays until a few others were asked for. */
static still_status get_block(cli_remote *r, uint64_t number, block **out,
                              still_error *err)
{
    for (size_t i = 0; i < KEPT; i++)
        if (r->kept[i].n && r->kept[i].number == number) {
            *out = &r->kept[i];
            return STILL_OK;
        }
    block *b = *out = &r->kept[r->next++ % KEPT];
    b->number = number;
    for (int failures = 0;;) {
        bool again = false;
        const still_status st = ask(r, b, &again, err);
        if (st == STILL_OK) return STILL_OK;
        b->n = 0;
        if (!again || ++failures == ATTEMPTS) return st;
        if (!cli_http_back_off(failures))
            return sti_fail(err, STILL_E_CANCELLED, "interrupted");
    }
}

static still_status read_at(void *user, uint64_t at, void *p, size_t n,
                            still_error *err)
{
    for (char *to = p; n > 0;) {
        block *b;
        STI_TRY(get_block(user, at / BLOCK, &b, err));
        const size_t from = (size_t)(at % BLOCK), k = n < b->n - from ? n : b->n - from;
        memcpy(to, b->p + from, k);
        to += k;
        at += k;
        n -= k;
    }
    return STILL_OK;
}

/* ---- The archive --------------------------------------------------------- */

still_status cli_remote_open(cli_http *http, const char *url, uint64_t size,
                             cli_progress *bar, cli_remote **out, still_error *err)
{
    *out = NULL;
    cli_remote *r = sti_alloc(1, sizeof *r);
    bool ok = r && (r->url = sti_strdup(url));
    for (size_t i = 0; i < KEPT && ok; i++) ok = (r->kept[i].p = malloc(BLOCK));
    if (!ok) {
        cli_remote_close(r);
        return sti_fail_memory(err, url, KEPT * BLOCK);
    }
    r->http = http;
    r->size = size;
    r->bar = bar;
    const still_status st = cli_zip_open(url, size, read_at, r, &r->zip, err);
    if (st != STILL_OK)
        cli_remote_close(r);
    else
        *out = r;
    return st;
}

void cli_remote_close(cli_remote *r)
{
    if (!r) return;
    cli_zip_close(r->zip);
    for (size_t i = 0; i < KEPT; i++) free(r->kept[i].p);
    free(r->url);
    free(r);
}

still_status cli_remote_read(cli_remote *r, const char *tail, const char *sum,
                             uint64_t most, sti_buf *out, still_error *err)
{
    size_t entry;
    unsigned char digest[STI_SHA256];
    char hex[2 * STI_SHA256 + 1];
    const size_t before = out->n;
    STI_TRY(cli_zip_find(r->zip, tail, &entry, err));
    STI_TRY(cli_zip_read(r->zip, entry, most, out, err));
    sti_sha256_of(out->n > before ? out->p + before : "", out->n - before, digest);
    sti_hex(digest, STI_SHA256, hex);
    if (!strcmp(hex, sum)) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s: checksum of %s is %s, expected %s",
                    r->url, tail, hex, sum);
}

uint64_t cli_remote_bytes(const cli_remote *r)
{
    return r->bytes;
}
