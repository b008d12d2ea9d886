/* scan.c - see scan.h. A folder is whatever somebody put there: what is no file or folder
 * is left out, and the number of files is bounded. */
#include "cli/fetch/scan.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"

enum { MOST_FILES = 1 << 16 };

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n > k && strcmp(text + n - k, end) == 0;
}

/* Whether a file says what a folder is. */
static bool tells(const char *name)
{
    cli_part part;
    return cli_part_of(name, ".gguf", &part) ||
           cli_part_of(name, ".safetensors", &part) || !strcmp(name, "config.json") ||
           !strcmp(name, "still.json");
}

static still_status add(cli_scan *s, const char *prefix, const char *name,
                        uint64_t bytes, still_error *err)
{
    const bool part = ends_with(name, ".part");
    sti_buf path = {0};
    sti_buf_printf(&path, "%s%s", prefix, name);
    if (path.failed) return sti_fail_memory(err, "file name", strlen(name));
    if (part) path.p[path.n - strlen(".part")] = 0;
    if (!tells(path.p)) {
        sti_buf_free(&path);
        return STILL_OK;
    }
    if (s->n == MOST_FILES) {
        sti_buf_free(&path);
        return sti_fail(err, STILL_E_LIMIT, "more than %d model files", MOST_FILES);
    }
    if ((s->n & (s->n - 1)) == 0) { /* grows at powers of two */
        cli_scanned *more = sti_grow(s->file, s->n ? 2 * s->n : 1, sizeof *more);
        if (!more) {
            sti_buf_free(&path);
            return sti_fail_memory(err, "file names", s->n * sizeof *more);
        }
        s->file = more;
    }
    s->file[s->n++] = (cli_scanned){.name = path.p, .bytes = bytes, .part = part};
    return STILL_OK;
}

static still_status read_folder(int at, const char *prefix, bool below, cli_scan *out,
                                still_error *err);

/* One entry of the folder that `dir` reads. */
static still_status read_entry(int dir, const char *prefix, const char *name,
                               bool below, cli_scan *out, still_error *err)
{
    struct stat st;
    if (name[0] == '.' || fstatat(dir, name, &st, 0)) return STILL_OK;
    if (S_ISREG(st.st_mode)) {
        out->bytes += (uint64_t)st.st_size;
        return add(out, prefix, name, (uint64_t)st.st_size, err);
    }
    if (!S_ISDIR(st.st_mode) || !below) return STILL_OK;
    const int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return STILL_OK; /* not ours to read */
    sti_buf inner = {0};
    sti_buf_printf(&inner, "%s%s/", prefix, name);
    still_status status = inner.failed ? sti_fail_memory(err, "path", strlen(name))
                                       : read_folder(fd, inner.p, false, out, err);
    if (inner.failed) close(fd);
    sti_buf_free(&inner);
    return status;
}

/* Closes `at`. */
static still_status read_folder(int at, const char *prefix, bool below, cli_scan *out,
                                still_error *err)
{
    DIR *dir = fdopendir(at);
    if (!dir) {
        close(at);
        return sti_fail_memory(err, "folder", 0);
    }
    still_status status = STILL_OK;
    for (struct dirent *e; status == STILL_OK && (e = readdir(dir));)
        status = read_entry(at, prefix, e->d_name, below, out, err);
    closedir(dir);
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const cli_scanned *)a)->name, ((const cli_scanned *)b)->name);
}

still_status cli_scan_folder(const char *folder, bool below, cli_scan *out,
                             still_error *err)
{
    *out = (cli_scan){0};
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return STILL_OK;
    if (fd < 0) return sti_fail(err, STILL_E_IO, "%s: %s", folder, strerror(errno));
    still_status status = read_folder(fd, "", below, out, err);
    if (status != STILL_OK) {
        cli_scan_free(out);
        return status == STILL_E_LIMIT ? sti_fail_prefix(err, status, "%s", folder)
                                       : status;
    }
    /* The same file is chosen, and the same list printed, on every machine. */
    if (out->n) qsort(out->file, out->n, sizeof *out->file, by_name);
    return STILL_OK;
}

void cli_scan_free(cli_scan *s)
{
    for (size_t i = 0; i < s->n; i++) free(s->file[i].name);
    free(s->file);
    *s = (cli_scan){0};
}

const char *cli_scan_name(const void *scan, size_t i)
{
    return ((const cli_scan *)scan)->file[i].name;
}

bool cli_scan_has(const cli_scan *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (!s->file[i].part && !strcmp(s->file[i].name, name)) return true;
    return false;
}

/* Files of the same model as file[first], of ending ext: whether all its parts lie here. */
static bool all_parts(const cli_scan *s, size_t first, const char *ext)
{
    cli_part p, q;
    size_t here = 0;
    const char *name = s->file[first].name;
    if (!cli_part_of(name, ext, &p)) return false;
    for (size_t i = 0; i < s->n; i++)
        here += !s->file[i].part && cli_part_of(s->file[i].name, ext, &q) &&
                q.stem == p.stem && q.parts == p.parts &&
                !memcmp(s->file[i].name, name, p.stem);
    return here == p.parts;
}

bool cli_scan_weights(const cli_scan *s, bool *whole)
{
    bool any = false;
    cli_part part;
    *whole = true;
    for (size_t i = 0; i < s->n; i++) {
        const cli_scanned *f = &s->file[i];
        if (strchr(f->name, '/') || !strcmp(f->name, "adapter.safetensors") ||
            !cli_part_of(f->name, ".safetensors", &part))
            continue;
        /* The first of its parts that is here answers for all of them. */
        const bool first = i == 0 || part.parts == 1 ||
                           strncmp(s->file[i - 1].name, f->name, part.stem + 1) != 0;
        if (first && !all_parts(s, i, ".safetensors")) *whole = false;
        any = true;
    }
    return any;
}

bool cli_scan_complete(const cli_scan *s, size_t i)
{
    return all_parts(s, i, ".gguf");
}

cli_look cli_scan_look(const cli_scan *s, const char *suffix, const char **entry)
{
    bool whole;
    size_t first;
    *entry = NULL;
    if (!suffix && cli_scan_has(s, "still.json")) return CLI_LOOK_FOUND;
    if (!suffix && cli_scan_weights(s, &whole))
        return whole && cli_scan_has(s, "config.json") ? CLI_LOOK_FOUND
                                                       : CLI_LOOK_UNFINISHED;
    switch (cli_gguf_pick(s, s->n, cli_scan_name, suffix, &first)) {
    case CLI_PICK_NONE: return CLI_LOOK_NOTHING;
    case CLI_PICK_UNKNOWN: return CLI_LOOK_OTHERS;
    case CLI_PICK_MANY: return CLI_LOOK_MANY;
    case CLI_PICK_ONE: break;
    }
    if (!cli_scan_complete(s, first)) return CLI_LOOK_UNFINISHED;
    *entry = s->file[first].name;
    return CLI_LOOK_FOUND;
}
