/* remove.c - see remove.h.
 *
 * Everything is reached from the cache's own folder, one name at a time, by openat with
 * O_NOFOLLOW: a link in the cache, whoever put it there, is removed itself or refused, and
 * what it leads to stays. */
#include "cli/fetch/remove.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/hf_home.h"
#include "cli/fetch/resolve.h"
#include "cli/fetch/scan.h"

enum { DEEPEST = 16, FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

/* A model of our cache. */
typedef struct target {
    char *stem, *folder;
    const char *suffix; /* NULL: all of it */
    cli_scan scan;
    size_t first; /* with a suffix: the first of its files */
} target;

static void target_free(target *t)
{
    free(t->stem);
    free(t->folder);
    cli_scan_free(&t->scan);
}

/* Why a name that is not in our cache cannot be removed. */
static still_status refuse(const target *t, const char *name, still_error *err)
{
    struct stat st;
    char *theirs = NULL;
    if (stat(name, &st) == 0)
        return sti_fail(err, STILL_E_ARG,
                        "%s: is a path; rm removes models of the cache only", name);
    STI_TRY(cli_hf_snapshot(t->stem, &theirs, err));
    const bool there = theirs != NULL;
    free(theirs);
    if (there)
        return sti_fail(err, STILL_E_ARG,
                        "%s: is in Hugging Face's cache, which still only reads: run "
                        "`hf cache rm model/%s`",
                        name, t->stem);
    return sti_fail(err, STILL_E_ARG,
                    "%s: not in the cache; `still list` shows what is", name);
}

/* Whether the folder is one that we may empty: no link on the way to it. */
static still_status check_folder(const target *t, const char *name, still_error *err)
{
    struct stat st;
    char *parent = sti_strdup(t->folder);
    if (!parent) return sti_fail_memory(err, "path", 0);
    still_status status = STILL_OK;
    for (int up = 0; up < (strchr(t->stem, '/') ? 2 : 1) && status == STILL_OK; up++) {
        if (lstat(parent, &st))
            status = refuse(t, name, err);
        else if (S_ISLNK(st.st_mode))
            status = sti_fail(err, STILL_E_ARG,
                              "%s: %s is a link; what it leads to is not the cache's: "
                              "remove the link with rm if you mean that",
                              name, parent);
        else if (!S_ISDIR(st.st_mode))
            status = refuse(t, name, err);
        *strrchr(parent, '/') = 0;
    }
    free(parent);
    return status;
}

/* A name without an organization might be one, with all its models. */
static bool is_model(const target *t)
{
    for (size_t i = 0; i < t->scan.n; i++)
        if (!strchr(t->scan.file[i].name, '/')) return true;
    return strchr(t->stem, '/') != NULL;
}

static still_status find(const char *name, target *t, still_error *err)
{
    const size_t n = cli_name_stem(name);
    *t =
        (target){.stem = sti_strndup(name, n), .suffix = name[n] ? name + n + 1 : NULL};
    if (!t->stem) return sti_fail_memory(err, "path", n);
    if (!cli_could_be_cached(t->stem)) return refuse(t, name, err);
    STI_TRY(cli_cache_folder(t->stem, &t->folder, err));
    STI_TRY(check_folder(t, name, err));
    STI_TRY(cli_scan_folder(t->folder, true, &t->scan, err));
    if (!is_model(t)) return refuse(t, name, err);
    if (!t->suffix) return STILL_OK;
    switch (cli_gguf_pick(&t->scan, t->scan.n, cli_scan_name, t->suffix, &t->first)) {
    case CLI_PICK_ONE: return STILL_OK;
    case CLI_PICK_NONE: return refuse(t, name, err);
    case CLI_PICK_UNKNOWN:
    case CLI_PICK_MANY: break;
    }
    sti_buf text = {0};
    sti_buf_printf(&text, "%s: the cache has ", name);
    cli_gguf_choices(&t->scan, t->scan.n, cli_scan_name, t->stem, n, &text);
    const still_status status = text.failed ? sti_fail_memory(err, "names", 0)
                                            : sti_fail(err, STILL_E_ARG, "%s", text.p);
    sti_buf_free(&text);
    return status;
}

still_status cli_cache_measure(const char *name, uint64_t *bytes, char **folder,
                               still_error *err)
{
    target t;
    *bytes = 0;
    *folder = NULL;
    const still_status status = find(name, &t, err);
    if (status == STILL_OK && !t.suffix) *bytes = t.scan.bytes;
    for (size_t i = 0; status == STILL_OK && t.suffix && i < t.scan.n; i++)
        if (cli_gguf_same(t.scan.file[i].name, t.scan.file[t.first].name))
            *bytes += t.scan.file[i].bytes;
    if (status == STILL_OK) {
        *folder = t.folder;
        t.folder = NULL;
    }
    target_free(&t);
    return status;
}

/* ---- Removing ------------------------------------------------------------ */

/* Removes what is in a folder. Closes fd. False: errno says why. */
static bool empty(int fd, int depth)
{
    DIR *dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return false;
    }
    bool done = true;
    for (struct dirent *e; done && (e = readdir(dir));) {
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        done = fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        if (done && S_ISDIR(st.st_mode)) {
            const int inner = depth < DEEPEST ? openat(fd, e->d_name, FOLDER) : -1;
            if (depth >= DEEPEST) errno = ELOOP;
            done = inner >= 0 && empty(inner, depth + 1) &&
                   unlinkat(fd, e->d_name, AT_REMOVEDIR) == 0;
        } else if (done) {
            done = unlinkat(fd, e->d_name, 0) == 0;
        }
        if (done) rewinddir(dir); /* what readdir says after a removal is not defined */
    }
    closedir(dir);
    return done;
}

/* Removes name, which may have a folder in it, and what a download left beside it. */
static bool remove_file(int folder, const char *name)
{
    const char *slash = strchr(name, '/');
    bool done = true;
    if (slash) {
        char *first = sti_strndup(name, (size_t)(slash - name));
        const int inner = first ? openat(folder, first, FOLDER) : -1;
        done = inner >= 0 && remove_file(inner, slash + 1);
        if (inner >= 0) close(inner);
        if (done) unlinkat(folder, first, AT_REMOVEDIR); /* if it was the last */
        free(first);
        return done;
    }
    static const char *const ending[] = {"", ".part", ".etag"};
    for (size_t i = 0; i < sizeof ending / sizeof *ending && done; i++) {
        sti_buf path = {0};
        sti_buf_printf(&path, "%s%s", name, ending[i]);
        done = !path.failed && (unlinkat(folder, path.p, 0) == 0 || errno == ENOENT);
        sti_buf_free(&path);
    }
    return done;
}

/* The model's folder, and the one it is in. */
static bool open_folder(const target *t, int *parent, int *folder)
{
    char *path = sti_strdup(t->folder);
    *parent = *folder = -1;
    if (!path) return false;
    char *slash = strrchr(path, '/');
    *slash = 0;
    *parent = open(path, FOLDER);
    if (*parent >= 0) *folder = openat(*parent, slash + 1, FOLDER);
    free(path);
    return *folder >= 0;
}

/* Removes the folder that `folder` reads, and its organization's if nothing is left. */
static bool remove_folder(const target *t, int parent, int folder)
{
    const char *last = strrchr(t->folder, '/') + 1;
    const int again = dup(folder);
    if (again < 0 || !empty(again, 0) || unlinkat(parent, last, AT_REMOVEDIR))
        return false;
    if (strchr(t->stem, '/')) {
        sti_buf org = {0};
        sti_buf_put(&org, t->folder, (size_t)(last - 1 - t->folder));
        if (!org.failed) rmdir(org.p); /* refused unless it is empty */
        sti_buf_free(&org);
    }
    return true;
}

static bool remove_chosen(const target *t, int parent, int folder)
{
    size_t left = 0;
    for (size_t i = 0; i < t->scan.n; i++) {
        const char *name = t->scan.file[i].name;
        if (!cli_gguf_same(name, t->scan.file[t->first].name))
            left++;
        else if (!remove_file(folder, name))
            return false;
    }
    return left > 0 || remove_folder(t, parent, folder);
}

still_status cli_cache_remove(const char *name, still_error *err)
{
    target t;
    int lock = -1, parent = -1, folder = -1;
    still_status status = find(name, &t, err);
    if (status == STILL_OK) status = cli_lock_folder(t.folder, &lock, err);
    if (status == STILL_OK && (!open_folder(&t, &parent, &folder) ||
                               !(t.suffix ? remove_chosen(&t, parent, folder)
                                          : remove_folder(&t, parent, folder))))
        status = sti_fail(err, STILL_E_IO, "%s: cannot remove all of it: %s", t.folder,
                          strerror(errno));
    if (folder >= 0) close(folder);
    if (parent >= 0) close(parent);
    if (lock >= 0) close(lock);
    target_free(&t);
    return status;
}
