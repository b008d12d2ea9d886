/* cache.c - see cache.h. A recorded checksum is trusted as long as the file's size and
 * modification time are those of its verification. */
#include "cli/fetch/cache.h"

#include <dirent.h>
#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

still_status cli_cache_place(const char *kind, const char *name, char **out,
                             still_error *err)
{
    *out = NULL;
    sti_buf path = {0};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/') {
        sti_buf_puts(&path, cache);
    } else {
        if (!home || home[0] != '/') {
            const struct passwd *me = getpwuid(getuid());
            home = me ? me->pw_dir : NULL;
        }
        if (!home)
            return sti_fail(err, STILL_E_IO,
                            "no cache folder: neither XDG_CACHE_HOME nor HOME is set");
        sti_buf_printf(&path, "%s/.cache", home);
    }
    sti_buf_printf(&path, "/still/%s%s%s", kind, *name ? "/" : "", name);
    return take(&path, out, err);
}

still_status cli_cache_folder(const char *name, char **out, still_error *err)
{
    return cli_cache_place("models", name, out, err);
}

/* Whether a file is there is asked without allocating, so that want of memory cannot
 * look like its absence. */
static bool stat_in(const char *folder, const char *name, struct stat *st)
{
    char path[ROOM];
    return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path &&
           stat(path, st) == 0;
}

static bool exists(const char *folder, const char *name)
{
    struct stat st;
    return stat_in(folder, name, &st);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n > k && strcmp(text + n - k, end) == 0;
}

/* The one GGUF of a folder without config.json, else the folder itself. An adapter
 * beside the GGUF does not count; an adapter's folder stands for itself. */
static still_status entry_of(char *folder, char **out, still_error *err)
{
    const bool whole = exists(folder, "config.json") || exists(folder, "still.json");
    DIR *dir = whole ? NULL : opendir(folder);
    if (!dir) {
        *out = folder;
        return STILL_OK;
    }
    int found = 0;
    sti_buf path = {0};
    for (struct dirent *e; (e = readdir(dir));) {
        if (!ends_with(e->d_name, ".gguf") || ends_with(e->d_name, ".still.gguf"))
            continue;
        if (found++ == 0) sti_buf_printf(&path, "%s/%s", folder, e->d_name);
    }
    closedir(dir);
    if (found > 1) {
        still_status status =
            sti_fail(err, STILL_E_ARG, "%s: holds %d GGUF files; name one of them",
                     folder, found);
        sti_buf_free(&path);
        free(folder);
        return status;
    }
    if (!found) {
        *out = folder;
        return STILL_OK;
    }
    free(folder);
    return take(&path, out, err);
}

/* org/name or name, made of letters, digits, '.', '_' and '-'. */
static bool could_be_cached(const char *name)
{
    int slashes = 0;
    for (const char *c = name; *c; c++) {
        if (*c == '/') slashes++;
        if ((c == name || c[-1] == '/') && (*c == '.' || *c == '/')) return false;
    }
    return *name && slashes <= 1 && name[strlen(name) - 1] != '/';
}

/* An adapter folder that ships with still, found relative to the program:
 * PREFIX/bin/still and PREFIX/share/still/models, or a build folder (build/,
 * build/asan/) and models/ of the source tree. False: there is none of this name. */
static bool shipped(const char *name, char out[ROOM])
{
    static const struct {
        int up; /* folders above the program's */
        const char *models;
    } place[] = {{1, "share/still/models"}, {1, "models"}, {2, "models"}};
    char program[ROOM / 2];
    if (strchr(name, '/')) return false;
    for (size_t i = 0; i < sizeof place / sizeof *place; i++) {
        const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
        if (n <= 0) return false;
        program[n] = 0;
        for (int cut = 0; cut <= place[i].up; cut++) {
            char *slash = strrchr(program, '/');
            if (slash) *slash = 0;
        }
        const int length =
            snprintf(out, ROOM, "%s/%s/%s", program, place[i].models, name);
        if (length < ROOM && exists(out, "still.json")) return true;
    }
    return false;
}

/* Resolves a name, ignoring adapters. */
static still_status resolve_plain(const char *name, char **out, still_error *err)
{
    *out = NULL;
    if (!*name) return sti_fail(err, STILL_E_ARG, "the model's name is empty");
    struct stat st;
    if (stat(name, &st) == 0) {
        char *path = sti_strdup(name);
        if (!path) return sti_fail_memory(err, "path", strlen(name));
        if (!S_ISDIR(st.st_mode)) {
            *out = path;
            return STILL_OK;
        }
        return entry_of(path, out, err);
    }
    if (!could_be_cached(name))
        return sti_fail(err, STILL_E_IO, "%s: %s", name, strerror(errno));
    char *folder;
    STI_TRY(cli_cache_folder(name, &folder, err));
    bool is_default = !strcmp(name, CLI_DEFAULT_MODEL);
    bool here = is_default ? exists(folder, CLI_SMOLLM2_FILE)
                           : stat(folder, &st) == 0 && S_ISDIR(st.st_mode);
    if (here) return entry_of(folder, out, err);
    free(folder);
    char with_still[ROOM];
    if (shipped(name, with_still)) {
        *out = sti_strdup(with_still);
        return *out ? STILL_OK : sti_fail_memory(err, "path", strlen(with_still));
    }
    if (is_default || strchr(name, '/'))
        return sti_fail(
            err, STILL_E_IO,
            "model '%s' is neither a path nor in the cache: run `still pull "
            "%s`",
            name, name);
    return sti_fail(err, STILL_E_IO,
                    "no model '%s': no such file or folder, and no such name in the "
                    "cache (`still pull " CLI_DEFAULT_MODEL
                    "` or `still pull org/name` brings one)",
                    name);
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

/* NAME.gguf and NAME.still.gguf: the one that `path` is not; false if it is neither, or
 * the other does not exist. */
static bool twin_of(const char *path, bool *is_adapter, char out[ROOM])
{
    *is_adapter = ends_with(path, ".still.gguf");
    if (!*is_adapter && !ends_with(path, ".gguf")) return false;
    size_t stem = strlen(path) - strlen(*is_adapter ? ".still.gguf" : ".gguf");
    const int n = snprintf(out, ROOM, "%.*s%s", (int)stem, path,
                           *is_adapter ? ".gguf" : ".still.gguf");
    struct stat st;
    return n < ROOM && stat(out, &st) == 0;
}

/* *path is an adapter: moves it to *adapter and sets *path to its base model. A folder
 * that also is a model (an export) is its own base. */
static still_status resolve_base(char **path, char **adapter, still_error *err)
{
    char base[1024], *found;
    still_error why;
    if (exists(*path, "config.json")) {
        found = sti_strdup(*path);
        if (!found) return sti_fail_memory(err, "path", strlen(*path));
    } else {
        STI_TRY(still_adapter_base(*path, base, sizeof base, err));
        const still_status st = resolve_plain(base, &found, &why);
        if (st == STILL_E_MEMORY) return sti_fail_memory(err, base, 0);
        if (st != STILL_OK)
            return sti_fail(err, STILL_E_IO,
                            "%s: is an adapter of base model '%s': %s (or correct the "
                            "name in its still.json)",
                            *path, base, why.text);
    }
    if (adapter)
        *adapter = *path;
    else
        free(*path);
    *path = found;
    return STILL_OK;
}

still_status cli_resolve_model(const char *name, char **out, char **adapter,
                               still_error *err)
{
    if (adapter) *adapter = NULL;
    STI_TRY(resolve_plain(name, out, err));
    if (exists(*out, "still.json")) {
        still_status status = resolve_base(out, adapter, err);
        if (status != STILL_OK) {
            free(*out);
            *out = NULL;
        }
        return status;
    }
    bool is_adapter;
    char other[ROOM];
    if (!twin_of(*out, &is_adapter, other)) return STILL_OK;
    char *twin = sti_strdup(other);
    if (!twin) {
        free(*out);
        *out = NULL;
        return sti_fail_memory(err, "path", strlen(other));
    }
    char *first = is_adapter ? twin : *out, *second = is_adapter ? *out : twin;
    *out = first;
    if (adapter)
        *adapter = second;
    else
        free(second);
    return STILL_OK;
}
