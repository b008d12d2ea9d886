/* resolve.c - see resolve.h. */
#include "cli/fetch/resolve.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/hf_home.h"
#include "cli/fetch/inventory.h"
#include "cli/fetch/scan.h"

enum { ROOM = CLI_PATH_ROOM };

/* A name as it was typed, and the two parts of it. */
typedef struct query {
    const char *typed;
    char *stem;         /* without the suffix */
    const char *suffix; /* NULL: none */
} query;

/* Whether a file is there is asked without allocating, so that want of memory cannot
 * look like its absence. */
static bool exists(const char *folder, const char *name)
{
    char path[ROOM];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", folder, name) < ROOM &&
           stat(path, &st) == 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), k = strlen(end);
    return n > k && strcmp(text + n - k, end) == 0;
}

static still_status copy(const char *path, char **out, still_error *err)
{
    *out = sti_strdup(path);
    return *out ? STILL_OK : sti_fail_memory(err, "path", strlen(path));
}

bool cli_could_be_cached(const char *name)
{
    int slashes = 0;
    for (const char *c = name; *c; c++) {
        if (*c == '/') slashes++;
        if ((c == name || c[-1] == '/') && (*c == '.' || *c == '/')) return false;
    }
    return *name && slashes <= 1 && name[strlen(name) - 1] != '/';
}

bool cli_shipped_place(size_t i, char out[CLI_PATH_ROOM])
{
    /* PREFIX/bin/still and PREFIX/share/still/models, or a build folder (build/,
     * build/asan/) and models/ of the source tree. */
    static const struct {
        int up; /* folders above the program's */
        const char *models;
    } place[] = {{1, "share/still/models"}, {1, "models"}, {2, "models"}};
    char program[ROOM / 2];
    if (i >= sizeof place / sizeof *place) return false;
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return false;
    program[n] = 0;
    for (int cut = 0; cut <= place[i].up; cut++) {
        char *slash = strrchr(program, '/');
        if (slash) *slash = 0;
    }
    snprintf(out, ROOM, "%s/%s", program, place[i].models);
    return true;
}

/* An adapter folder that ships with still. */
static bool shipped(const char *name, char out[ROOM])
{
    char folder[ROOM];
    if (strchr(name, '/')) return false;
    for (size_t i = 0; cli_shipped_place(i, folder); i++)
        if (snprintf(out, ROOM, "%s/%s", folder, name) < ROOM &&
            exists(out, "still.json"))
            return true;
    return false;
}

/* ---- Folders ------------------------------------------------------------- */

/* What there is to choose from, as an error: STILL_E_ARG if several could be meant,
 * STILL_E_IO if none has the suffix. `pull` NULL: it cannot be downloaded. */
static still_status choose(const query *q, const cli_scan *s, bool many,
                           const char *pull, still_error *err)
{
    sti_buf text = {0};
    sti_buf_printf(&text, "%s: %s: ", q->typed,
                   many   ? "which of these GGUF models?"
                   : pull ? "not in the cache, which has"
                          : "no such GGUF file; there are");
    cli_gguf_choices(s, s->n, cli_scan_name, q->stem, strlen(q->stem), &text);
    if (pull && !many) sti_buf_printf(&text, " (run `still pull %s`)", pull);
    still_status status = STILL_E_MEMORY;
    if (text.failed)
        status = sti_fail_memory(err, "names", 0);
    else if (many)
        status = sti_fail(err, STILL_E_ARG, "%s", text.p);
    else
        status = sti_fail(err, STILL_E_IO, "%s", text.p);
    sti_buf_free(&text);
    return status;
}

/* FOLDER/NAME, or FOLDER if there is no name. */
static still_status join(const char *folder, const char *name, char **out,
                         still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s%s%s", folder, name ? "/" : "", name ? name : "");
    if (path.failed || !path.p) return sti_fail_memory(err, "path", strlen(folder));
    *out = path.p;
    return STILL_OK;
}

/* A path that is a folder. One with config.json and weights, or an adapter, stands for
 * itself, and so does one that holds no model, of which the library says what it lacks. */
static still_status path_entry(const query *q, const char *folder, char **out,
                               still_error *err)
{
    cli_scan s;
    const char *entry;
    STI_TRY(cli_scan_folder(folder, q->suffix != NULL, &s, err));
    still_status status = STILL_OK;
    switch (cli_scan_look(&s, q->suffix, &entry)) {
    case CLI_LOOK_FOUND: break;
    case CLI_LOOK_MANY: status = choose(q, &s, true, NULL, err); break;
    case CLI_LOOK_OTHERS: status = choose(q, &s, false, NULL, err); break;
    case CLI_LOOK_NOTHING:
        if (q->suffix)
            status = sti_fail(err, STILL_E_ARG, "%s: holds no GGUF file", folder);
        break;
    case CLI_LOOK_UNFINISHED: break; /* the library says which part is missing */
    }
    if (status == STILL_OK) status = join(folder, entry, out, err);
    cli_scan_free(&s);
    return status;
}

/* ---- Names --------------------------------------------------------------- */

/* A folder of one of the caches. *out stays NULL if it does not have the model; then why
 * says what it has, if anything. */
static still_status cache_entry(const query *q, const char *folder, char **out,
                                still_error *why, still_error *err)
{
    cli_scan s;
    const char *entry;
    STI_TRY(cli_scan_folder(folder, true, &s, err));
    still_status status = STILL_OK;
    switch (cli_scan_look(&s, q->suffix, &entry)) {
    case CLI_LOOK_FOUND: status = join(folder, entry, out, err); break;
    case CLI_LOOK_NOTHING: break;
    case CLI_LOOK_MANY: choose(q, &s, true, q->typed, why); break;
    case CLI_LOOK_OTHERS: choose(q, &s, false, q->typed, why); break;
    case CLI_LOOK_UNFINISHED:
        (void)sti_fail(why, STILL_E_IO,
                       "model '%s': its download is not complete: run `still pull %s`",
                       q->typed, q->typed);
        break;
    }
    cli_scan_free(&s);
    return status;
}

/* Our cache, then Hugging Face's. *out NULL: in neither. */
static still_status cached(const query *q, char **out, still_error *why,
                           still_error *err)
{
    char *folder = NULL;
    STI_TRY(cli_cache_folder(q->stem, &folder, err));
    still_status status = STILL_OK;
    /* Of the default model's folder only its own file counts. */
    if (strcmp(q->stem, CLI_DEFAULT_MODEL) != 0 || exists(folder, CLI_SMOLLM2_FILE) ||
        exists(folder, "still.json"))
        status = cache_entry(q, folder, out, why, err);
    free(folder);
    if (status != STILL_OK || *out) return status;
    STI_TRY(cli_hf_snapshot(q->stem, &folder, err));
    if (!folder) return STILL_OK;
    still_error theirs = {0};
    status = cache_entry(q, folder, out, &theirs, err);
    if (why->code == STILL_OK) *why = theirs;
    free(folder);
    return status;
}

/* The error of a name that is nowhere. */
static still_status unknown(const query *q, const still_error *why, still_error *err)
{
    char near[CLI_NAME_ROOM], meant[CLI_NAME_ROOM + 32] = "";
    const still_status code = why->code;
    if (code != STILL_OK) return sti_fail(err, code, "%s", why->text);
    if (cli_inventory_near(q->typed, near))
        snprintf(meant, sizeof meant, "; did you mean %s?", near);
    if (!strcmp(q->stem, CLI_DEFAULT_MODEL) || strchr(q->stem, '/'))
        return sti_fail(
            err, STILL_E_IO,
            "model '%s' is neither a path nor in the cache: run `still pull "
            "%s`%s",
            q->typed, q->typed, meant);
    return sti_fail(err, STILL_E_IO,
                    "no model '%s': no such file or folder, and no such name in the "
                    "cache (`still pull " CLI_DEFAULT_MODEL
                    "` or `still pull org/name` brings one)%s",
                    q->typed, meant);
}

static still_status resolve_name(const query *q, char **out, char **missing,
                                 still_error *err)
{
    still_error why = {0};
    char with_still[ROOM];
    STI_TRY(cached(q, out, &why, err));
    if (*out) return STILL_OK;
    if (!q->suffix && shipped(q->stem, with_still)) return copy(with_still, out, err);
    const bool can_pull =
        !strcmp(q->stem, CLI_DEFAULT_MODEL) || strchr(q->stem, '/') != NULL;
    /* STILL_E_ARG: it is here, but which of several was meant nobody said. */
    if (can_pull && missing && why.code != STILL_E_ARG)
        STI_TRY(copy(q->typed, missing, err));
    return unknown(q, &why, err);
}

/* Resolves a name, ignoring adapters. */
static still_status resolve_plain(const char *name, char **out, char **missing,
                                  still_error *err)
{
    struct stat st;
    *out = NULL;
    if (!*name) return sti_fail(err, STILL_E_ARG, "the model's name is empty");
    if (stat(name, &st) == 0 && !S_ISDIR(st.st_mode)) return copy(name, out, err);
    const size_t n = cli_name_stem(name);
    const bool whole = stat(name, &st) == 0;
    query q = {.typed = name,
               .stem = sti_strndup(name, whole ? strlen(name) : n),
               .suffix = !whole && name[n] ? name + n + 1 : NULL};
    if (!q.stem) return sti_fail_memory(err, "path", n);
    still_status status;
    if (whole || (stat(q.stem, &st) == 0 && S_ISDIR(st.st_mode)))
        status = path_entry(&q, q.stem, out, err);
    else if (stat(q.stem, &st) == 0)
        status = sti_fail(err, STILL_E_ARG,
                          "%s: %s is a file; leave out :%s, which chooses one of the "
                          "files of a folder or repository",
                          name, q.stem, q.suffix);
    else if (!cli_could_be_cached(q.stem))
        status = sti_fail(err, STILL_E_IO, "%s: %s", name, strerror(errno));
    else
        status = resolve_name(&q, out, missing, err);
    free(q.stem);
    return status;
}

/* ---- Adapters ------------------------------------------------------------ */

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
static still_status resolve_base(char **path, char **adapter, char **missing,
                                 still_error *err)
{
    char base[1024], *found;
    still_error why;
    if (exists(*path, "config.json")) {
        found = sti_strdup(*path);
        if (!found) return sti_fail_memory(err, "path", strlen(*path));
    } else {
        STI_TRY(still_adapter_base(*path, base, sizeof base, err));
        const still_status st = resolve_plain(base, &found, missing, &why);
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

still_status cli_resolve_or_missing(const char *name, char **out, char **adapter,
                                    char **missing, still_error *err)
{
    if (adapter) *adapter = NULL;
    if (missing) *missing = NULL;
    STI_TRY(resolve_plain(name, out, missing, err));
    if (exists(*out, "still.json")) {
        still_status status = resolve_base(out, adapter, missing, err);
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

still_status cli_resolve_model(const char *name, char **out, char **adapter,
                               still_error *err)
{
    return cli_resolve_or_missing(name, out, adapter, NULL, err);
}
