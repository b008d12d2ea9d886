/* text.c - text for training and measuring: plain or JSON lines, gzipped or not.
 *
 * zlib reads both gzip and plain files through one call, so compression is found by
 * content; JSON lines are found by name (.jsonl, .jsonl.gz), because a text may well
 * begin with a brace. The memory a file can demand is capped. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/buf.h"
#include "base/mem.h"
#include "file/parse.h"

enum { CHUNK = 256 << 10, MAX_LINE = 32 << 20 };
/* Whole texts: a small file must not fill the memory because it is packed. Text packs to
 * a third or a tenth; gzip can pack a thousandfold. */
enum { SMALL_TEXT = 64 << 20, MOST_TIMES = 64 };
static const size_t MAX_TEXT = (size_t)16 << 30;

/* ---- The stream: gzip or plain ------------------------------------------- */

static still_status open_stream(const char *path, gzFile *out, still_error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT) return sti_fail(err, STILL_E_IO, "%s: no such file", path);
        return sti_fail(err, STILL_E_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        close(fd);
        return sti_fail(err, STILL_E_IO, "%s: is a folder, expected a text file", path);
    }
    *out = gzdopen(fd, "rb");
    if (!*out) {
        close(fd);
        return sti_fail_memory(err, path, CHUNK);
    }
    gzbuffer(*out, CHUNK);
    return STILL_OK;
}

/* Up to capacity bytes; *n 0 at the end. Damaged and truncated gzip are errors. */
static still_status read_stream(gzFile gz, const char *path, void *p, size_t capacity,
                                size_t *n, still_error *err)
{
    int got = gzread(gz, p, (unsigned)capacity), code = Z_OK;
    const char *text = gzerror(gz, &code);
    if (code == Z_ERRNO)
        return sti_fail(err, STILL_E_IO, "%s: cannot read: %s", path, strerror(errno));
    if (code == Z_MEM_ERROR) return sti_fail_memory(err, path, CHUNK);
    if (got < 0 || (got == 0 && code != Z_OK))
        return sti_fail(err, STILL_E_FORMAT, "%s: damaged gzip: %s", path,
                        code == Z_BUF_ERROR ? "ends early (truncated?)" : text);
    *n = (size_t)got;
    return STILL_OK;
}

/* ---- Lines --------------------------------------------------------------- */

struct sti_lines {
    char *path;
    gzFile gz;
    char *buf; /* [capacity + 1]: unread bytes are [at, end) */
    size_t at, end, capacity;
    size_t line; /* number of the line last handed out, from 1 */
    bool eof;
};

still_status sti_lines_open(const char *path, sti_lines **out, still_error *err)
{
    *out = NULL;
    gzFile gz;
    STI_TRY(open_stream(path, &gz, err));
    sti_lines *l = sti_alloc(1, sizeof *l);
    if (l) {
        l->gz = gz;
        l->capacity = CHUNK;
        l->path = sti_strdup(path);
        l->buf = malloc(l->capacity + 1);
    }
    if (!l || !l->path || !l->buf) {
        if (l)
            sti_lines_close(l);
        else
            gzclose(gz);
        return sti_fail_memory(err, path, CHUNK);
    }
    *out = l;
    return STILL_OK;
}

void sti_lines_close(sti_lines *l)
{
    if (!l) return;
    gzclose(l->gz);
    free(l->path);
    free(l->buf);
    free(l);
}

/* Reads more after the unread bytes; makes room by moving them, then by growing. */
static still_status fill(sti_lines *l, still_error *err)
{
    if (l->at > 0) {
        memmove(l->buf, l->buf + l->at, l->end - l->at);
        l->end -= l->at;
        l->at = 0;
    }
    if (l->end == l->capacity) {
        if (l->capacity >= MAX_LINE)
            return sti_fail(err, STILL_E_LIMIT, "%s:%zu: line longer than %d bytes",
                            l->path, l->line + 1, MAX_LINE);
        char *grown = realloc(l->buf, 2 * l->capacity + 1);
        if (!grown) return sti_fail_memory(err, l->path, 2 * l->capacity + 1);
        l->buf = grown;
        l->capacity *= 2;
    }
    size_t n;
    STI_TRY(
        read_stream(l->gz, l->path, l->buf + l->end, l->capacity - l->end, &n, err));
    l->end += n;
    l->eof = n == 0;
    return STILL_OK;
}

still_status sti_lines_next(sti_lines *l, char **line, size_t *n, still_error *err)
{
    char *newline = NULL;
    size_t searched = 0;
    *line = NULL;
    *n = 0;
    for (;;) {
        size_t unread = l->end - l->at;
        if (unread > searched)
            newline = memchr(l->buf + l->at + searched, '\n', unread - searched);
        if (newline || l->eof) break;
        searched = unread;
        STI_TRY(fill(l, err));
    }
    if (!newline && l->at == l->end) return STILL_OK;
    *line = l->buf + l->at;
    *n = newline ? (size_t)(newline - *line) : l->end - l->at;
    l->at += *n + (newline ? 1 : 0);
    l->line++;
    (*line)[*n] = 0; /* over the newline, or into the byte kept for it */
    return STILL_OK;
}

still_status sti_lines_peek(sti_lines *l, char *c, still_error *err)
{
    for (size_t i = 0;; i++) {
        while (l->at + i == l->end && !l->eof) STI_TRY(fill(l, err));
        *c = l->at + i < l->end ? l->buf[l->at + i] : 0;
        if (*c == 0 || !strchr(" \t\r\n", *c)) return STILL_OK;
    }
}

uint64_t sti_lines_offset(const sti_lines *l)
{
    z_off_t at = gzoffset(l->gz);
    return at < 0 ? 0 : (uint64_t)at;
}

/* ---- Whole texts --------------------------------------------------------- */

/* Appends n bytes that were read from gz. */
static still_status append(sti_buf *b, gzFile gz, const char *path, const char *p,
                           size_t n, still_error *err)
{
    if (n > MAX_TEXT - b->n)
        return sti_fail(err, STILL_E_LIMIT, "%s: more than %zu bytes of text", path,
                        MAX_TEXT);
    const z_off_t at = gzoffset(gz); /* -1 in a pipe */
    const size_t packed = at < 0 ? 0 : (size_t)at;
    if (!gzdirect(gz) && b->n + n > SMALL_TEXT &&
        (b->n + n - SMALL_TEXT) / MOST_TIMES > packed)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: unpacks to more than %d times its size; if that is meant, "
                        "unpack it first (gunzip) and name the text",
                        path, MOST_TIMES);
    sti_buf_put(b, p, n);
    return b->failed ? sti_fail_memory(err, path, b->n + n) : STILL_OK;
}

static still_status read_plain(const char *path, sti_buf *b, still_error *err)
{
    gzFile gz;
    STI_TRY(open_stream(path, &gz, err));
    char *chunk = malloc(CHUNK);
    still_status status = chunk ? STILL_OK : sti_fail_memory(err, path, CHUNK);
    for (size_t n = 1; status == STILL_OK && n > 0;) {
        status = read_stream(gz, path, chunk, CHUNK, &n, err);
        if (status == STILL_OK) status = append(b, gz, path, chunk, n, err);
    }
    free(chunk);
    gzclose(gz);
    return status;
}

/* Appends the "text" of one line; blank lines are skipped. */
static still_status append_json(const sti_lines *l, const char *line, size_t n,
                                sti_buf *b, still_error *err)
{
    if (strspn(line, " \t\r") == n) return STILL_OK;
    json_t *v;
    still_status status = sti_json_read_line(line, n, STI_JSON_NUL, &v, err);
    if (status != STILL_OK)
        return sti_fail_prefix(err, status, "%s:%zu", l->path, l->line);
    const json_t *text = json_object_get(v, "text");
    if (json_is_string(text))
        status = append(b, l->gz, l->path, json_string_value(text),
                        json_string_length(text), err);
    else
        status = sti_fail(err, STILL_E_FORMAT,
                          "%s:%zu: expected a JSON object with a string \"text\"",
                          l->path, l->line);
    json_decref(v);
    return status;
}

static still_status read_jsonl(const char *path, sti_buf *b, still_error *err)
{
    sti_lines *l;
    STI_TRY(sti_lines_open(path, &l, err));
    still_status status;
    char *line;
    size_t n;
    while ((status = sti_lines_next(l, &line, &n, err)) == STILL_OK && line)
        if ((status = append_json(l, line, n, b, err)) != STILL_OK) break;
    sti_lines_close(l);
    return status;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && strcasecmp(s + n - k, tail) == 0;
}

still_status still_text_read(const char *path, char **out, size_t *n, still_error *err)
{
    *out = NULL;
    bool jsonl = ends_with(path, ".jsonl") || ends_with(path, ".jsonl.gz");
    sti_buf b = {0};
    still_status status = jsonl ? read_jsonl(path, &b, err) : read_plain(path, &b, err);
    sti_buf_put(&b, "", 0); /* "", not NULL */
    if (status == STILL_OK && b.failed) status = sti_fail_memory(err, path, b.n);
    if (status != STILL_OK) {
        sti_buf_free(&b);
        return status;
    }
    *out = b.p;
    *n = b.n;
    return STILL_OK;
}
