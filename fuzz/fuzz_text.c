/* fuzz_text.c - plain text, JSON lines and gzip. JSON lines are known by name, so the
 * file is also reached through a link that is called .jsonl. */
#include <string.h>

#include "file/store.h"
#include "memory_file.h"

static void read_text(const char *path)
{
    char *text;
    size_t n;
    still_error err = {0};
    if (still_text_read(path, &text, &n, &err) == STILL_OK) {
        if (text[n] != 0) abort();
        free(text);
    } else if (text || !err.text[0]) {
        abort();
    }
}

static void read_lines(const char *path)
{
    sti_lines *l;
    char *line;
    size_t n;
    if (sti_lines_open(path, &l, NULL) != STILL_OK) return;
    while (sti_lines_next(l, &line, &n, NULL) == STILL_OK && line)
        if (line[n] != 0 || memchr(line, '\n', n)) abort();
    sti_lines_close(l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[32], link[64];
    int fd = memory_file(data, n, path);
    snprintf(link, sizeof link, "/tmp/still-fuzz-%ld.jsonl", (long)getpid());
    read_text(path);
    read_lines(path);
    if (symlink(path, link) == 0) {
        read_text(link);
        unlink(link);
    }
    close(fd);
    return 0;
}
