/* collect.c - see collect.h.
 *
 * Only files that a task names are taken, each as NAME or NAME.gz. Only the last part of a
 * path in an archive is used, so an archive cannot choose where files are written. A file
 * appears under its name only when it is complete. */
#include "cli/data/collect.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/new_file.h"
#include "cli/data/tar.h"

enum { MOST_FILES = 64, NAME_ROOM = 128 };
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
    cli_tar *tar;
} source;

/* *got 0 at the end. */
static still_status read_some(source *s, void *p, size_t capacity, size_t *got,
                              still_error *err)
{
    if (s->tar) return cli_tar_read(s->tar, p, capacity, got, err);
    *got = fread(p, 1, capacity, s->file);
    if (ferror(s->file))
        return sti_fail(err, STILL_E_IO, "%s: %s", s->path, strerror(errno));
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

static still_status take_archive(collection *c, const char *path, still_error *err)
{
    source s = {.path = path};
    cli_tar_entry e;
    still_status st = cli_tar_open(path, &s.tar, err);
    for (bool more = st == STILL_OK; more && st == STILL_OK;) {
        st = cli_tar_next(s.tar, &e, &more, err);
        if (st != STILL_OK || !more) break;
        const char *slash = strrchr(e.name, '/'), *base = slash ? slash + 1 : e.name;
        const int file = e.plain ? wanted(c, base) : -1;
        if (file >= 0) st = take(c, &s, file, base, err);
    }
    cli_tar_close(s.tar);
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

still_status cli_collect(const cli_options *o, const char *folder, int *status,
                         still_error *err)
{
    struct stat info;
    collection *c = calloc(1, sizeof *c);
    if (!c) return sti_fail_memory(err, "files", sizeof *c);
    gather(c);
    still_status st = STILL_OK;
    if (stat(o->arg[0], &info) != 0)
        st = sti_fail(err, STILL_E_IO, "%s: %s", o->arg[0], strerror(errno));
    c->out = folder;
    if (st == STILL_OK)
        st = S_ISDIR(info.st_mode) ? take_folder(c, o->arg[0], err)
                                   : take_archive(c, o->arg[0], err);
    if (st == STILL_OK && c->taken == 0)
        st = sti_fail(err, STILL_E_FORMAT,
                      "%s: has none of the files that tasks need, such as %s or %s.gz",
                      o->arg[0], c->name[0], c->name[0]);
    if (st == STILL_OK) {
        look_around(c);
        *status = report(o, c);
    }
    free(c);
    return st;
}
