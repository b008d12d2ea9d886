/* pull_data.c - still pull-data: benchmark files from a folder or an archive.
 *
 * Only files that a task names are taken, each as NAME or NAME.gz. An archive is
 * read as a stream of tar entries, gzipped or not; only the last part of a path is
 * used, so an archive cannot choose where files are written. A file appears under
 * its name only when it is complete. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include "base/buf.h"
#include "base/new_file.h"
#include "cli/fetch/cache.h"
#include "cli/options.h"

enum { TAR_BLOCK = 512, MOST_FILES = 64, NAME_ROOM = 128 };
static const uint64_t MOST_BYTES = (uint64_t)4 << 30; /* of one file */

typedef struct collection {
    char name[MOST_FILES][NAME_ROOM]; /* without .gz */
    bool here[MOST_FILES];
    int n;
    const char *out;
    int taken;
    uint64_t bytes;
} collection;

/* ---- Names --------------------------------------------------------------- */

static int find(const collection *c, const char *name, size_t n)
{
    for (int i = 0; i < c->n; i++)
        if (strlen(c->name[i]) == n && memcmp(c->name[i], name, n) == 0) return i;
    return -1;
}

static void gather(collection *c)
{
    const char *files = NULL;
    for (int t = 0; still_eval_task_at(t, NULL, &files, NULL); t++)
        for (const char *at = files ? files : ""; *at;) {
            const size_t n = strcspn(at, " ");
            if (n < NAME_ROOM && find(c, at, n) < 0 && c->n < MOST_FILES)
                memcpy(c->name[c->n++], at, n);
            at += n;
            at += strspn(at, " ");
        }
}

/* The index of the wanted file with this name, with or without .gz; -1: none. */
static int wanted(const collection *c, const char *base)
{
    size_t n = strlen(base);
    if (n > 3 && strcmp(base + n - 3, ".gz") == 0) n -= 3;
    return find(c, base, n);
}

/* ---- Copying ------------------------------------------------------------- */

/* Where bytes come from: a plain file, or an entry of an archive. */
typedef struct source {
    const char *path;
    FILE *file; /* or: */
    gzFile archive;
    uint64_t left; /* of the entry */
} source;

/* *got 0 at the end. */
static still_status read_some(source *s, void *p, size_t capacity, size_t *got,
                              still_error *err)
{
    if (s->file) {
        *got = fread(p, 1, capacity, s->file);
        if (ferror(s->file))
            return sti_fail(err, STILL_E_IO, "%s: %s", s->path, strerror(errno));
        return STILL_OK;
    }
    if (s->left < capacity) capacity = (size_t)s->left;
    const int n = capacity ? gzread(s->archive, p, (unsigned)capacity) : 0;
    if (n < 0 || (n == 0 && capacity))
        return sti_fail(err, STILL_E_FORMAT, "%s: ends early, or is damaged", s->path);
    s->left -= (uint64_t)n;
    *got = (size_t)n;
    return STILL_OK;
}

static still_status pour(source *s, sti_new_file *to, const char *name, uint64_t *total,
                         still_error *err)
{
    char part[1 << 14];
    size_t n = 0;
    do {
        STI_TRY(read_some(s, part, sizeof part, &n, err));
        *total += n;
        if (*total > MOST_BYTES)
            return sti_fail(err, STILL_E_LIMIT, "%s: larger than 4 GiB", name);
        STI_TRY(sti_new_file_put(to, part, n, err));
        if (cli_interrupted()) return sti_fail(err, STILL_E_CANCELLED, "interrupted");
    } while (n > 0);
    return STILL_OK;
}

static still_status take(collection *c, source *s, int file, const char *base,
                         still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", c->out, base);
    sti_new_file *to = NULL;
    uint64_t total = 0;
    still_status st = path.failed ? sti_fail_memory(err, "path", path.n)
                                  : sti_new_file_open(path.p, &to, err);
    if (st == STILL_OK) st = pour(s, to, path.p, &total, err);
    if (st == STILL_OK)
        st = sti_new_file_finish(to, err);
    else
        sti_new_file_abort(to);
    if (st == STILL_OK) {
        c->taken += !c->here[file];
        c->here[file] = true;
        c->bytes += total;
    }
    sti_buf_free(&path);
    return st;
}

/* ---- A folder ------------------------------------------------------------ */

static still_status take_folder(collection *c, const char *dir, still_error *err)
{
    still_status st = STILL_OK;
    for (int i = 0; i < 2 * c->n && st == STILL_OK; i++) {
        char base[NAME_ROOM + 4];
        struct stat info;
        sti_buf path = {0};
        snprintf(base, sizeof base, "%s%s", c->name[i / 2], i % 2 ? ".gz" : "");
        sti_buf_printf(&path, "%s/%s", dir, base);
        if (!path.failed && stat(path.p, &info) == 0 && S_ISREG(info.st_mode)) {
            source s = {.path = path.p, .file = fopen(path.p, "rb")};
            st = s.file ? take(c, &s, i / 2, base, err)
                        : sti_fail(err, STILL_E_IO, "%s: %s", path.p, strerror(errno));
            if (s.file) fclose(s.file);
        }
        sti_buf_free(&path);
    }
    return st;
}

/* ---- An archive ---------------------------------------------------------- */

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
static bool is_header(const unsigned char *h)
{
    uint64_t want, sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++) sum += i >= 148 && i < 156 ? ' ' : h[i];
    return octal((const char *)h + 148, 8, &want) && want == sum;
}

static still_status skip(source *s, uint64_t n, still_error *err)
{
    char part[TAR_BLOCK];
    size_t got;
    for (s->left = n; s->left > 0;) STI_TRY(read_some(s, part, sizeof part, &got, err));
    return STILL_OK;
}

static still_status take_entry(collection *c, source *s, const unsigned char *h,
                               still_error *err)
{
    char name[101] = {0};
    uint64_t size;
    if (!is_header(h) || !octal((const char *)h + 124, 12, &size) || size > MOST_BYTES)
        return sti_fail(err, STILL_E_FORMAT, "%s: is not a tar archive", s->path);
    memcpy(name, h, 100);
    const char *slash = strrchr(name, '/'), *base = slash ? slash + 1 : name;
    const bool plain = h[156] == '0' || h[156] == 0;
    const int file = plain ? wanted(c, base) : -1;
    const uint64_t padding = (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK;
    if (file < 0) return skip(s, size + padding, err);
    s->left = size;
    STI_TRY(take(c, s, file, base, err));
    return skip(s, padding, err);
}

static still_status take_archive(collection *c, const char *path, still_error *err)
{
    source s = {.path = path, .archive = gzopen(path, "rb")};
    if (!s.archive) return sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
    still_status st = STILL_OK;
    static const unsigned char zeros[TAR_BLOCK];
    for (bool first = true; st == STILL_OK; first = false) {
        unsigned char header[TAR_BLOCK];
        const int n = gzread(s.archive, header, TAR_BLOCK);
        if (n == 0 && !first) break; /* accept an end without zero blocks */
        if (n != TAR_BLOCK) {
            st = sti_fail(err, STILL_E_FORMAT, "%s: is not a whole tar archive", path);
        } else {
            if (memcmp(header, zeros, TAR_BLOCK) == 0) break;
            st = take_entry(c, &s, header, err);
        }
    }
    gzclose(s.archive);
    return st;
}

/* ---- The command --------------------------------------------------------- */

/* Files from earlier pulls count too. */
static void look_around(collection *c)
{
    for (int i = 0; i < 2 * c->n; i++) {
        sti_buf path = {0};
        sti_buf_printf(&path, "%s/%s%s", c->out, c->name[i / 2], i % 2 ? ".gz" : "");
        if (!path.failed && access(path.p, R_OK) == 0) c->here[i / 2] = true;
        sti_buf_free(&path);
    }
}

/* Lists what each task lacks. */
static int report(const cli_options *o, const collection *c)
{
    const char *name, *files;
    json_t *missing = json_object();
    if (!o->json) {
        char size[32];
        cli_print("%d files, %s: %s\n", c->taken, cli_bytes(size, c->bytes), c->out);
    }
    for (int t = 0; (name = still_eval_task_at(t, NULL, &files, NULL)); t++) {
        json_t *list = json_array();
        for (const char *at = files ? files : ""; *at;) {
            const size_t n = strcspn(at, " ");
            const int i = find(c, at, n);
            if (i >= 0 && !c->here[i]) sti_json_append(&list, json_stringn(at, n));
            at += n;
            at += strspn(at, " ");
        }
        if (json_array_size(list) > 0 && !o->json) {
            cli_print("%s lacks", name);
            for (size_t i = 0; i < json_array_size(list); i++)
                cli_print(" %s", json_string_value(json_array_get(list, i)));
            cli_print("\n");
        }
        if (!list || json_array_size(list) > 0)
            sti_json_set(&missing, name, list);
        else
            json_decref(list);
    }
    if (o->json)
        return cli_print_json(json_pack("{s:s,s:i,s:I,s:o}", "path", c->out, "files",
                                        c->taken, "bytes", (json_int_t)c->bytes,
                                        "missing", missing));
    json_decref(missing);
    return CLI_OK;
}

int cli_cmd_pull_data(const cli_options *o)
{
    still_error err;
    struct stat info;
    char *cache = NULL;
    collection *c = calloc(1, sizeof *c);
    if (!c) return cli_fail("out of memory");
    gather(c);
    still_status st = STILL_OK;
    if (stat(o->arg[0], &info) != 0)
        st = sti_fail(&err, STILL_E_IO, "%s: %s", o->arg[0], strerror(errno));
    else if (!o->out)
        st = cli_cache_place("data", "", &cache, &err);
    c->out = o->out ? o->out : cache;
    if (st == STILL_OK) st = cli_make_folders(c->out, &err);
    if (st == STILL_OK)
        st = S_ISDIR(info.st_mode) ? take_folder(c, o->arg[0], &err)
                                   : take_archive(c, o->arg[0], &err);
    if (st == STILL_OK && c->taken == 0)
        st = sti_fail(&err, STILL_E_FORMAT,
                      "%s: has none of the files that tasks need, such as %s or %s.gz",
                      o->arg[0], c->name[0], c->name[0]);
    int status = CLI_OK;
    if (st == STILL_OK) {
        look_around(c);
        status = report(o, c);
    } else {
        status = cli_fail_error(&err);
    }
    free(c);
    free(cache);
    return status;
}
