/* log.c - the log of a run: JSON lines, headers and records.
 *
 * A header says what a run is: model, settings, task, data. Its SHA-256, shortened,
 * is the run's name, which each of its records carries, so that one file may hold
 * several runs and a record never counts for a run with other settings. A line is
 * written in one call; an incomplete line after a crash is removed when the file is
 * opened again. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/sha256.h"
#include "eval/eval.h"

struct sti_log {
    char *path;
    int fd;
};

static still_status fail_io(const sti_log *l, const char *what, still_error *err)
{
    return sti_fail(err, STILL_E_IO, "%s: cannot be %s: %s", l->path, what,
                    strerror(errno));
}

/* Removes what follows the last newline. */
static still_status mend(const sti_log *l, still_error *err)
{
    struct stat st;
    if (fstat(l->fd, &st) != 0) return fail_io(l, "read", err);
    if (!S_ISREG(st.st_mode)) return STILL_OK;
    off_t end = st.st_size;
    char part[4096];
    while (end > 0) {
        const size_t n = end < (off_t)sizeof part ? (size_t)end : sizeof part;
        if (pread(l->fd, part, n, end - (off_t)n) != (ssize_t)n)
            return fail_io(l, "read", err);
        const char *newline = memrchr(part, '\n', n);
        if (newline) {
            end -= (off_t)n - (newline - part) - 1;
            break;
        }
        end -= (off_t)n;
    }
    if (end < st.st_size && ftruncate(l->fd, end) != 0)
        return fail_io(l, "mended", err);
    return STILL_OK;
}

/* Refuses a file that does not begin like a log. */
static still_status check_first(const sti_log *l, still_error *err)
{
    char first[24] = {0};
    const ssize_t n = pread(l->fd, first, sizeof first - 1, 0);
    if (n < 0) return fail_io(l, "read", err);
    if (n == 0 || strncmp(first, "{\"still_eval\":", 14) == 0) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: is not a log of still eval; name another file", l->path);
}

still_status sti_log_open(const char *path, sti_log **out, still_error *err)
{
    *out = NULL;
    if (!path) return STILL_OK;
    sti_log *l = sti_alloc(1, sizeof *l);
    if (!l || !(l->path = sti_strdup(path))) {
        free(l);
        return sti_fail_memory(err, path, sizeof *l);
    }
    l->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    still_status st = l->fd < 0 ? fail_io(l, "opened", err) : STILL_OK;
    if (st == STILL_OK && flock(l->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        st = sti_fail(err, STILL_E_IO, "%s: another evaluation is writing to it", path);
    if (st == STILL_OK) st = check_first(l, err);
    if (st == STILL_OK) st = mend(l, err);
    if (st != STILL_OK)
        sti_log_close(l);
    else
        *out = l;
    return st;
}

void sti_log_close(sti_log *l)
{
    if (!l) return;
    if (l->fd >= 0) close(l->fd);
    free(l->path);
    free(l);
}

static still_status name_run(const json_t *header, char run[17], still_error *err)
{
    unsigned char digest[STI_SHA256];
    char *text = sti_json_text(header, JSON_COMPACT | JSON_SORT_KEYS);
    if (!text) return sti_fail_memory(err, "log", 0);
    sti_sha256_of(text, strlen(text), digest);
    free(text);
    sti_hex(digest, 8, run);
    return STILL_OK;
}

static still_status put_line(sti_log *l, const json_t *o, still_error *err)
{
    char *text = sti_json_text(o, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (!text) return sti_fail_memory(err, l->path, 0);
    size_t n = strlen(text);
    text[n++] = '\n'; /* over the NUL: it goes out by its length */
    const bool written = sti_write_all(l->fd, text, n);
    free(text);
    return written ? STILL_OK : sti_fail_write(err, l->path, errno);
}

/* Reads a line of the log that belongs to the run. A malformed line is ignored: its
 * item is answered again. */
static still_status take_line(const char *line, size_t n, const char *run,
                              json_t **done, bool *known, still_error *err)
{
    json_t *o;
    if (!memmem(line, n, run, strlen(run))) return STILL_OK; /* another run's */
    if (sti_json_read_line(line, n, 0, &o, err) == STILL_E_MEMORY)
        return STILL_E_MEMORY;
    const char *of = json_string_value(json_object_get(o, "run")),
               *id = json_string_value(json_object_get(o, "id"));
    if (of && strcmp(of, run) == 0) {
        if (id)
            sti_json_set(done, id, json_incref(o));
        else
            *known = true;
    }
    json_decref(o);
    return *done ? STILL_OK : sti_fail_memory(err, "log", n);
}

still_status sti_log_begin(sti_log *l, const json_t *header, char run[17],
                           json_t **done, still_error *err)
{
    *done = NULL;
    STI_TRY(name_run(header, run, err));
    json_t *found = json_object();
    if (!found) return sti_fail_memory(err, "log", 0);
    bool known = false;
    sti_lines *lines = NULL;
    still_status st = l ? sti_lines_open(l->path, &lines, err) : STILL_OK;
    while (st == STILL_OK && lines) {
        char *line;
        size_t n;
        st = sti_lines_next(lines, &line, &n, err);
        if (st != STILL_OK || !line) break;
        st = take_line(line, n, run, &found, &known, err);
    }
    sti_lines_close(lines);
    if (st == STILL_OK && l && !known) {
        json_t *line = json_pack("{s:i,s:s}", "still_eval", 1, "run", run);
        sti_json_merge(&line, json_incref((json_t *)header));
        st = put_line(l, line, err);
        json_decref(line);
    }
    if (st != STILL_OK)
        json_decref(found);
    else
        *done = found;
    return st;
}

still_status sti_log_add(sti_log *l, const json_t *record, still_error *err)
{
    return l ? put_line(l, record, err) : STILL_OK;
}
