/* zip.c - see zip.h. The directory at the end of the archive says what is in it; the header
 * before an entry's bytes is only asked how long it is itself.
 *
 *   entries: local header (30 bytes, name, extra), packed bytes
 *   directory: an entry of 46 bytes, name, extra, comment for each
 *   end: 22 bytes and a comment of at most 65535 */
#include "cli/data/zip.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/mem.h"

enum { LOCAL = 30, CENTRAL = 46, END = 22, MOST_COMMENT = 65535 };
enum { STORED = 0, DEFLATED = 8, CHUNK = 64 << 10 };
enum { MOST_DIRECTORY = 16 << 20 };
#define LOCAL_MARK 0x04034b50u
#define CENTRAL_MARK 0x02014b50u
#define END_MARK 0x06054b50u

typedef struct entry {
    const char *name; /* into the directory; not ended by a NUL */
    size_t n_name;
    uint64_t at, packed, size;
    uint32_t crc;
    unsigned method, flags;
} entry;

struct cli_zip {
    char *what;
    uint64_t size;
    cli_read_at read;
    void *user;
    char *directory;
    entry *entries;
    size_t n;
};

static unsigned u16(const void *p)
{
    const unsigned char *b = p;
    return b[0] | (unsigned)b[1] << 8;
}

static uint32_t u32(const void *p)
{
    const unsigned char *b = p;
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* ---- The directory ------------------------------------------------------- */

/* Where the directory is. */
typedef struct place {
    uint64_t at, bytes;
    size_t n;
} place;

static still_status damaged(const cli_zip *z, const char *why, still_error *err)
{
    return sti_fail(err, STILL_E_FORMAT, "%s: damaged zip archive: %s", z->what, why);
}

/* The end record is the last place with its mark whose comment reaches the very end. */
static still_status find_end(const cli_zip *z, place *out, still_error *err)
{
    const size_t room =
        z->size < END + MOST_COMMENT ? (size_t)z->size : END + MOST_COMMENT;
    if (room < END)
        return sti_fail(err, STILL_E_FORMAT, "%s: is not a zip archive", z->what);
    char *tail = malloc(room);
    if (!tail) return sti_fail_memory(err, z->what, room);
    still_status st = z->read(z->user, z->size - room, tail, room, err);
    const char *end = NULL;
    for (size_t i = room - END + 1; st == STILL_OK && !end && i-- > 0;)
        if (u32(tail + i) == END_MARK && i + END + u16(tail + i + 20) == room)
            end = tail + i;
    if (st == STILL_OK && !end)
        st = sti_fail(err, STILL_E_FORMAT,
                      "%s: is not a zip archive, or not a whole one", z->what);
    if (st == STILL_OK) {
        const uint64_t before = z->size - room + (uint64_t)(end - tail);
        *out = (place){.n = u16(end + 10), .bytes = u32(end + 12), .at = u32(end + 16)};
        if (u16(end + 4) || u16(end + 6) || u16(end + 8) != out->n ||
            out->n == 0xffff || out->at == 0xffffffff)
            st = sti_fail(err, STILL_E_UNSUPPORTED,
                          "%s: zip64 and archives of several parts are not supported",
                          z->what);
        else if (out->bytes > MOST_DIRECTORY || out->at > before ||
                 out->bytes > before - out->at)
            st = damaged(z, "its directory lies outside of it", err);
    }
    free(tail);
    return st;
}

static still_status read_entries(cli_zip *z, const place *p, still_error *err)
{
    const size_t bytes = (size_t)p->bytes;
    size_t at = 0;
    for (z->n = 0; z->n < p->n; z->n++) {
        const char *h = z->directory + at;
        if (bytes - at < CENTRAL || u32(h) != CENTRAL_MARK)
            return damaged(z, "its directory has fewer entries than it says", err);
        const size_t name = u16(h + 28),
                     whole = CENTRAL + name + u16(h + 30) + u16(h + 32);
        if (bytes - at < whole) return damaged(z, "an entry leaves its directory", err);
        z->entries[z->n] = (entry){.name = h + CENTRAL,
                                   .n_name = name,
                                   .flags = u16(h + 8),
                                   .method = u16(h + 10),
                                   .crc = u32(h + 16),
                                   .packed = u32(h + 20),
                                   .size = u32(h + 24),
                                   .at = u32(h + 42)};
        at += whole;
    }
    return STILL_OK;
}

still_status cli_zip_open(const char *what, uint64_t size, cli_read_at read, void *user,
                          cli_zip **out, still_error *err)
{
    place p = {0};
    *out = NULL;
    cli_zip *z = sti_alloc(1, sizeof *z);
    if (!z || !(z->what = sti_strdup(what))) {
        free(z);
        return sti_fail_memory(err, what, sizeof *z);
    }
    z->size = size;
    z->read = read;
    z->user = user;
    still_status st = find_end(z, &p, err);
    if (st == STILL_OK) {
        z->directory = malloc((size_t)p.bytes + 1);
        z->entries = sti_alloc(p.n + 1, sizeof *z->entries);
        if (!z->directory || !z->entries)
            st = sti_fail_memory(err, what, (size_t)p.bytes);
    }
    if (st == STILL_OK && p.bytes)
        st = read(user, p.at, z->directory, (size_t)p.bytes, err);
    if (st == STILL_OK) st = read_entries(z, &p, err);
    if (st != STILL_OK) {
        cli_zip_close(z);
        return st;
    }
    *out = z;
    return STILL_OK;
}

void cli_zip_close(cli_zip *z)
{
    if (!z) return;
    free(z->what);
    free(z->directory);
    free(z->entries);
    free(z);
}

size_t cli_zip_count(const cli_zip *z)
{
    return z->n;
}

static bool is_named(const entry *e, const char *tail)
{
    const size_t n = strlen(tail);
    return e->n_name >= n && memcmp(e->name + e->n_name - n, tail, n) == 0 &&
           (e->n_name == n || e->name[e->n_name - n - 1] == '/');
}

still_status cli_zip_find(const cli_zip *z, const char *tail, size_t *out,
                          still_error *err)
{
    size_t found = 0;
    for (size_t i = 0; i < z->n; i++)
        if (is_named(&z->entries[i], tail)) {
            *out = i;
            found++;
        }
    if (found == 1) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s: has %s %s", z->what,
                    found ? "more than one" : "no", tail);
}

/* ---- An entry ------------------------------------------------------------ */

/* Where the packed bytes begin. */
static still_status find_bytes(const cli_zip *z, const entry *e, uint64_t *at,
                               still_error *err)
{
    char h[LOCAL];
    if (e->at > z->size || z->size - e->at < LOCAL)
        return damaged(z, "an entry lies outside of it", err);
    STI_TRY(z->read(z->user, e->at, h, LOCAL, err));
    if (u32(h) != LOCAL_MARK)
        return damaged(z, "an entry is not where it should be", err);
    *at = e->at + LOCAL + u16(h + 26) + u16(h + 28);
    if (*at > z->size || e->packed > z->size - *at)
        return damaged(z, "an entry is longer than it", err);
    return STILL_OK;
}

/* Bytes that were unpacked: no more than the directory says. */
static still_status take(const cli_zip *z, const entry *e, sti_buf *out, size_t before,
                         const void *p, size_t n, still_error *err)
{
    if (n > e->size - (out->n - before))
        return damaged(z, "an entry unpacks to more than its size", err);
    sti_buf_put(out, p, n);
    return out->failed ? sti_fail_memory(err, z->what, (size_t)e->size) : STILL_OK;
}

/* Copies or inflates the packed bytes, a chunk at a time. */
static still_status unpack(const cli_zip *z, const entry *e, uint64_t at, char *in,
                           char *text, sti_buf *out, still_error *err)
{
    z_stream s = {0};
    int code = Z_OK;
    const size_t before = out->n;
    const bool packed = e->method == DEFLATED;
    still_status st = STILL_OK;
    if (packed && inflateInit2(&s, -MAX_WBITS) != Z_OK)
        return sti_fail_memory(err, z->what, CHUNK);
    for (uint64_t left = e->packed; st == STILL_OK && left > 0 && code == Z_OK;) {
        const size_t n = left < CHUNK ? (size_t)left : CHUNK;
        st = z->read(z->user, at, in, n, err);
        at += n;
        left -= n;
        if (st == STILL_OK && !packed) st = take(z, e, out, before, in, n, err);
        s.next_in = (Bytef *)in;
        s.avail_in = packed ? (uInt)n : 0;
        while (st == STILL_OK && packed && code == Z_OK) {
            s.next_out = (Bytef *)text;
            s.avail_out = CHUNK;
            code = inflate(&s, Z_NO_FLUSH);
            st = take(z, e, out, before, text, CHUNK - s.avail_out, err);
            if (code == Z_BUF_ERROR) break; /* it wants more of the input */
        }
        if (code == Z_BUF_ERROR) code = Z_OK;
    }
    if (packed) inflateEnd(&s);
    if (st != STILL_OK) return st;
    if (code == Z_MEM_ERROR) return sti_fail_memory(err, z->what, CHUNK);
    if ((packed && code != Z_STREAM_END) || out->n - before != e->size ||
        crc32(0, (const Bytef *)(out->n > before ? out->p + before : ""),
              (uInt)(out->n - before)) != e->crc)
        return damaged(z, "an entry does not have the size and CRC that it says", err);
    return STILL_OK;
}

still_status cli_zip_read(const cli_zip *z, size_t i, uint64_t most, sti_buf *out,
                          still_error *err)
{
    const entry *e = &z->entries[i];
    uint64_t at;
    if ((e->flags & 1) || (e->method != STORED && e->method != DEFLATED))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: an entry is encrypted, or packed by method %u; stored and "
                        "deflated ones are supported",
                        z->what, e->method);
    if (e->size > most)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: an entry unpacks to %llu bytes, at most %llu are expected",
                        z->what, (unsigned long long)e->size, (unsigned long long)most);
    STI_TRY(find_bytes(z, e, &at, err));
    char *chunk = malloc(2 * CHUNK);
    if (!chunk) return sti_fail_memory(err, z->what, 2 * CHUNK);
    const still_status st = unpack(z, e, at, chunk, chunk + CHUNK, out, err);
    free(chunk);
    return st;
}
