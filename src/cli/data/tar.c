/* tar.c - see tar.h. zlib reads gzipped and plain archives alike. */
#include "cli/data/tar.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/mem.h"

enum { BLOCK = 512, CHUNK = 64 << 10 };
static const uint64_t MOST_BYTES = (uint64_t)4 << 30; /* of one file */

struct cli_tar {
    char *path;
    gzFile gz;
    uint64_t left, padding; /* of the entry */
    bool first;             /* no header was read yet */
};

still_status cli_tar_open(const char *path, cli_tar **out, still_error *err)
{
    *out = NULL;
    cli_tar *t = sti_alloc(1, sizeof *t);
    if (!t || !(t->path = sti_strdup(path))) {
        free(t);
        return sti_fail_memory(err, path, sizeof *t);
    }
    t->first = true;
    t->gz = gzopen(path, "rb");
    if (!t->gz) {
        const still_status st =
            sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
        cli_tar_close(t);
        return st;
    }
    gzbuffer(t->gz, CHUNK);
    *out = t;
    return STILL_OK;
}

void cli_tar_close(cli_tar *t)
{
    if (!t) return;
    if (t->gz) gzclose(t->gz);
    free(t->path);
    free(t);
}

still_status cli_tar_read(cli_tar *t, void *p, size_t n, size_t *got, still_error *err)
{
    if (t->left < n) n = (size_t)t->left;
    if (n > CHUNK) n = CHUNK;
    const int k = n ? gzread(t->gz, p, (unsigned)n) : 0;
    *got = 0;
    if (k < 0 || (k == 0 && n))
        return sti_fail(err, STILL_E_FORMAT, "%s: ends early, or is damaged", t->path);
    t->left -= (uint64_t)k;
    *got = (size_t)k;
    return STILL_OK;
}

static still_status pass(cli_tar *t, still_error *err)
{
    char part[4096];
    size_t got;
    t->left += t->padding;
    t->padding = 0;
    while (t->left > 0) STI_TRY(cli_tar_read(t, part, sizeof part, &got, err));
    return STILL_OK;
}

/* ---- Headers ------------------------------------------------------------- */

/* A number in octal digits, up to a space or NUL. */
static bool octal(const char *p, size_t n, uint64_t *out)
{
    uint64_t v = 0;
    size_t i = 0;
    while (i < n && p[i] == ' ') i++;
    for (; i < n && p[i] >= '0' && p[i] <= '7'; i++) v = v * 8 + (uint64_t)(p[i] - '0');
    *out = v;
    return i == n || p[i] == ' ' || p[i] == 0;
}

/* Whether a block is a tar header: it contains the sum of its bytes, with spaces in
 * place of the sum itself. */
static bool is_header(const char *h)
{
    uint64_t want, sum = 0;
    for (int i = 0; i < BLOCK; i++)
        sum += i >= 148 && i < 156 ? ' ' : (unsigned char)h[i];
    return octal(h + 148, 8, &want) && want == sum;
}

static void read_name(const char *h, char *out)
{
    const size_t name = strnlen(h, 100);
    const bool ustar = memcmp(h + 257, "ustar", 6) == 0; /* GNU's has a space there */
    const size_t prefix = ustar ? strnlen(h + 345, 155) : 0;
    snprintf(out, CLI_TAR_NAME, "%.*s%s%.*s", (int)prefix, h + 345, prefix ? "/" : "",
             (int)name, h);
}

still_status cli_tar_next(cli_tar *t, cli_tar_entry *e, bool *more, still_error *err)
{
    static const char zeros[BLOCK];
    char h[BLOCK];
    *more = false;
    STI_TRY(pass(t, err));
    const int n = gzread(t->gz, h, BLOCK);
    if (n == 0 && !t->first) return STILL_OK; /* accept an end without zero blocks */
    if (n != BLOCK)
        return sti_fail(err, STILL_E_FORMAT, "%s: is not a whole tar archive", t->path);
    if (memcmp(h, zeros, BLOCK) == 0) return STILL_OK;
    t->first = false;
    if (!is_header(h) || !octal(h + 124, 12, &e->size) || e->size > MOST_BYTES)
        return sti_fail(err, STILL_E_FORMAT, "%s: is not a tar archive", t->path);
    read_name(h, e->name);
    e->plain = h[156] == '0' || h[156] == 0;
    t->left = e->size;
    t->padding = (BLOCK - e->size % BLOCK) % BLOCK;
    *more = true;
    return STILL_OK;
}
