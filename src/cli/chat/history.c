/* history.c - see history.h. */
#include "cli/chat/history.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/new_file.h"
#include "cli/fetch/cache.h"

enum {
    KEPT = 1000,           /* texts that a file which has grown too large keeps */
    MOST_FILE = 4 << 20,   /* too large: bytes */
    MOST_TEXT = 256 << 10, /* longer ones can be recalled only in their conversation */
    MOST_READ = 64 << 20,
};

char *cli_history_path(void)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    sti_buf path = {0};
    still_error err;
    if (state && state[0] == '/')
        sti_buf_printf(&path, "%s/still", state);
    else if (home && home[0] == '/')
        sti_buf_printf(&path, "%s/.local/state/still", home);
    if (path.failed || !path.n || cli_make_folders(path.p, &err)) {
        sti_buf_free(&path);
        return NULL;
    }
    sti_buf_puts(&path, "/chat-history");
    if (!path.failed) return path.p;
    sti_buf_free(&path);
    return NULL;
}

/* The start of the last `KEPT` lines. */
static const char *last_lines(const char *text, size_t n)
{
    int lines = 0;
    while (n > 0)
        if (text[--n] == '\n' && ++lines > KEPT) return text + n + 1;
    return text;
}

void cli_history_load(const char *path, void (*each)(void *user, const char *text),
                      void *user)
{
    still_error err;
    char *all;
    size_t n;
    if (cli_read(path, MOST_READ, &all, &n, &err)) return; /* most likely none yet */
    const char *line = last_lines(all, n), *end = all + n;
    if (n > MOST_FILE) {
        const mode_t mask = umask(077);
        sti_write_file(path, line, (size_t)(end - line), &err);
        umask(mask);
    }
    for (const char *next; line < end; line = next + 1) {
        json_t *v;
        next = memchr(line, '\n', (size_t)(end - line));
        if (!next) next = end;
        if (sti_json_read_line(line, (size_t)(next - line), STI_JSON_ANY, &v, &err))
            continue;
        if (json_is_string(v)) each(user, json_string_value(v));
        json_decref(v);
    }
    free(all);
}

void cli_history_add(const char *path, const char *text)
{
    still_error err;
    int fd;
    const size_t n = strlen(text);
    json_t *v = n <= MOST_TEXT ? cli_json_text(text, n) : NULL;
    char *line = sti_json_text(v, JSON_ENCODE_ANY);
    json_decref(v);
    if (!line) return;
    sti_buf whole = {0};
    sti_buf_printf(&whole, "%s\n", line);
    free(line);
    const mode_t mask = umask(077);
    const still_status st = sti_open_own(path, O_WRONLY | O_APPEND, &fd, &err);
    umask(mask);
    if (st == STILL_OK) {
        if (!whole.failed)
            sti_write_all(fd, whole.p, whole.n); /* one call: whole lines */
        close(fd);
    }
    sti_buf_free(&whole);
}
