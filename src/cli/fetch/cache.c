/* cache.c - see cache.h. A recorded checksum is trusted as long as the file's size and
 * modification time are those of its verification. */
#include "cli/fetch/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/new_file.h"
#include "cli/cli.h"

static const char NOTES[] = ".still.json";
enum { MOST_NOTES = 1 << 20 }; /* bytes */
enum { ROOM = 4096 };          /* of a path */

static still_status take(sti_buf *b, char **out, still_error *err)
{
    if (b->failed) {
        sti_buf_free(b);
        return sti_fail_memory(err, "path", b->n);
    }
    *out = b->p;
    return STILL_OK;
}

still_status cli_home(char **out, still_error *err)
{
    const char *home = getenv("HOME");
    *out = NULL;
    if (!home || home[0] != '/') {
        const struct passwd *me = getpwuid(getuid());
        home = me ? me->pw_dir : NULL;
    }
    if (!home)
        return sti_fail(err, STILL_E_IO,
                        "no cache folder: neither XDG_CACHE_HOME nor HOME is set");
    *out = sti_strdup(home);
    return *out ? STILL_OK : sti_fail_memory(err, "path", strlen(home));
}

still_status cli_cache_place(const char *kind, const char *name, char **out,
                             still_error *err)
{
    *out = NULL;
    sti_buf path = {0};
    const char *cache = getenv("XDG_CACHE_HOME");
    if (cache && cache[0] == '/') {
        sti_buf_puts(&path, cache);
    } else {
        char *home;
        STI_TRY(cli_home(&home, err));
        sti_buf_printf(&path, "%s/.cache", home);
        free(home);
    }
    sti_buf_printf(&path, "/still/%s%s%s", kind, *name ? "/" : "", name);
    return take(&path, out, err);
}

still_status cli_cache_folder(const char *name, char **out, still_error *err)
{
    return cli_cache_place("models", name, out, err);
}

static bool stat_in(const char *folder, const char *name, struct stat *st)
{
    char path[ROOM];
    return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path &&
           stat(path, st) == 0;
}

still_status cli_make_folders(const char *path, still_error *err)
{
    char *copy = sti_strdup(path);
    if (!copy) return sti_fail_memory(err, "path", strlen(path));
    still_status status = STILL_OK;
    for (char *c = copy + 1; status == STILL_OK; c++) {
        if (*c && *c != '/') continue;
        char was = *c;
        *c = 0;
        if (mkdir(copy, 0777) && errno != EEXIST)
            status = sti_fail(err, STILL_E_IO, "cannot make folder %s: %s", copy,
                              strerror(errno));
        *c = was;
        if (!was) break;
    }
    free(copy);
    return status;
}

still_status cli_check_space(const char *folder, uint64_t bytes, still_error *err)
{
    struct statvfs fs;
    if (statvfs(folder, &fs)) return STILL_OK; /* unknown: let the write fail later */
    uint64_t left = (uint64_t)fs.f_bavail * fs.f_frsize;
    char need[32], have[32];
    if (left >= bytes) return STILL_OK;
    return sti_fail(err, STILL_E_IO,
                    "%s: needs %s, the disk has %s free; make room or set "
                    "XDG_CACHE_HOME",
                    folder, cli_bytes(need, bytes), cli_bytes(have, left));
}

still_status cli_lock_folder(const char *folder, int *fd, still_error *err)
{
    sti_buf path = {0};
    struct stat st = {0};
    still_status status = STILL_OK;
    sti_buf_printf(&path, "%s/.lock", folder);
    *fd = -1;
    if (path.failed) return sti_fail_memory(err, "path", strlen(folder));
    /* Whoever held it may have removed the folder meanwhile, and its lock with it. */
    while (status == STILL_OK && st.st_nlink == 0) {
        if (*fd >= 0) close(*fd);
        *fd = open(path.p, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (*fd < 0 || fstat(*fd, &st))
            status = sti_fail(err, STILL_E_IO, "%s: %s", folder, strerror(errno));
        else if (flock(*fd, LOCK_EX | LOCK_NB))
            status = sti_fail(err, STILL_E_IO, "%s: another `still` is working on this",
                              folder);
        else if (fstat(*fd, &st))
            st.st_nlink = 0;
    }
    if (status != STILL_OK && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    sti_buf_free(&path);
    return status;
}

/* ---- Notes of verified files --------------------------------------------- */

/* What is noted of the folder's files; empty if there is no such file, or it is no JSON:
 * then they are verified again. NULL: no memory. */
static json_t *read_notes(const char *folder)
{
    sti_buf path = {0};
    char *text = NULL;
    size_t n;
    json_t *notes = NULL;
    sti_buf_printf(&path, "%s/%s", folder, NOTES);
    still_status st =
        path.failed ? STILL_E_MEMORY : cli_read(path.p, MOST_NOTES, &text, &n, NULL);
    if (st == STILL_OK)
        st = sti_json_read(path.p, text, n, STI_JSON_OBJECT, &notes, NULL);
    free(text);
    sti_buf_free(&path);
    return st == STILL_OK || st == STILL_E_MEMORY ? notes : json_object();
}

bool cli_verified(const char *folder, const char *name, const char *sum)
{
    struct stat st;
    json_t *notes = read_notes(folder);
    const json_t *note = json_object_get(notes, name);
    const char *noted = json_string_value(json_object_get(note, "sum"));
    bool same = noted && !strcmp(noted, sum) && stat_in(folder, name, &st) &&
                json_integer_value(json_object_get(note, "size")) == st.st_size &&
                json_integer_value(json_object_get(note, "mtime")) == st.st_mtime;
    json_decref(notes);
    return same;
}

still_status cli_set_verified(const char *folder, const char *name, const char *sum,
                              still_error *err)
{
    struct stat st;
    if (!stat_in(folder, name, &st))
        return sti_fail(err, STILL_E_IO, "%s/%s: %s", folder, name, strerror(errno));
    json_t *notes = read_notes(folder);
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", folder, NOTES);
    still_status status = STILL_OK;
    json_t *note = json_pack("{s:s, s:I, s:I}", "sum", sum, "size",
                             (json_int_t)st.st_size, "mtime", (json_int_t)st.st_mtime);
    sti_json_set(&notes, name, note);
    char *text = sti_json_text(notes, JSON_INDENT(1));
    status = text && !path.failed ? sti_write_file(path.p, text, strlen(text), err)
                                  : sti_fail_memory(err, NOTES, 0);
    free(text);
    json_decref(notes);
    sti_buf_free(&path);
    return status;
}
