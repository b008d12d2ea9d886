/* inventory.c - see inventory.h. What cannot be read is left out: a list of what works
 * must not fail on what does not. */
#include "cli/fetch/inventory.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/hf_home.h"
#include "cli/fetch/resolve.h"
#include "cli/fetch/scan.h"
#include "cli/near.h"

enum { MOST = 1 << 14 };

static void entry_free(cli_entry *e)
{
    free(e->name);
    free(e->path);
    free(e->base);
    free(e->quant);
}

void cli_inventory_free(cli_inventory *v)
{
    for (size_t i = 0; i < v->n; i++) entry_free(&v->entry[i]);
    free(v->entry);
    *v = (cli_inventory){0};
}

/* Takes e's strings. A name that is listed already stays what it resolves to first. */
static still_status add(cli_inventory *v, cli_entry e, still_error *err)
{
    bool known = v->n == MOST || !e.name || !e.path;
    const bool failed = !e.name || !e.path;
    for (size_t i = 0; i < v->n && !known; i++)
        known = !strcmp(v->entry[i].name, e.name) && strcmp(e.where, "still") != 0;
    if (!known && (v->n & (v->n - 1)) == 0) {
        cli_entry *more = sti_grow(v->entry, v->n ? 2 * v->n : 1, sizeof *more);
        if (!more) {
            entry_free(&e);
            return sti_fail_memory(err, "list of models", 0);
        }
        v->entry = more;
    }
    if (known)
        entry_free(&e);
    else
        v->entry[v->n++] = e;
    return failed ? sti_fail_memory(err, "list of models", 0) : STILL_OK;
}

static char *join(const char *a, const char *between, const char *b)
{
    sti_buf text = {0};
    sti_buf_printf(&text, "%s%s%s", a, between, b);
    if (text.failed) sti_buf_free(&text);
    return text.p;
}

/* ---- One folder ---------------------------------------------------------- */

static still_status add_adapter(cli_inventory *v, const char *name, const char *folder,
                                const char *where, const cli_scan *s, still_error *err)
{
    char base[1024];
    bool whole;
    const bool own = cli_scan_weights(s, &whole); /* an export is its own base */
    const bool says =
        !own && still_adapter_base(folder, base, sizeof base, NULL) == STILL_OK;
    return add(v,
               (cli_entry){.name = sti_strdup(name),
                           .path = sti_strdup(folder),
                           .base = says ? sti_strdup(base) : NULL,
                           .type = "adapter",
                           .where = where,
                           .bytes = s->bytes},
               err);
}

/* The GGUF models of a folder, one entry for all parts of each. */
static still_status add_ggufs(cli_inventory *v, const char *name, const char *folder,
                              const char *where, const cli_scan *s, still_error *err)
{
    still_status status = STILL_OK;
    for (size_t i = 0; i < s->n && status == STILL_OK; i++) {
        cli_part part;
        char label[CLI_LABEL_MAX];
        const char *file = s->file[i].name;
        if (!cli_is_gguf(file, &part) ||
            (i && cli_gguf_same(file, s->file[i - 1].name)))
            continue;
        uint64_t bytes = 0;
        for (size_t k = i; k < s->n && cli_gguf_same(file, s->file[k].name); k++)
            bytes += s->file[k].bytes;
        sti_buf whole = {0};
        sti_buf_puts(&whole, name);
        if (strchr(name, '/')) {
            sti_buf_puts(&whole, ":");
            cli_gguf_suffix(s, s->n, cli_scan_name, i, &whole);
        }
        if (whole.failed) sti_buf_free(&whole);
        status =
            add(v,
                (cli_entry){.name = whole.p,
                            .path = join(folder, "/", file),
                            .quant = sti_strdup(cli_gguf_label(file, label)),
                            .type = cli_scan_complete(s, i) ? "gguf" : "unfinished",
                            .where = where,
                            .bytes = bytes},
                err);
    }
    return status;
}

static still_status add_folder(cli_inventory *v, const char *name, const char *folder,
                               const char *where, still_error *err)
{
    cli_scan s;
    bool whole = true;
    still_status status = cli_scan_folder(folder, true, &s, err);
    if (status != STILL_OK) return status == STILL_E_MEMORY ? status : STILL_OK;
    if (cli_scan_has(&s, "still.json"))
        status = add_adapter(v, name, folder, where, &s, err);
    else if (cli_scan_weights(&s, &whole))
        status = add(v,
                     (cli_entry){.name = sti_strdup(name),
                                 .path = sti_strdup(folder),
                                 .type = whole && cli_scan_has(&s, "config.json")
                                             ? "safetensors"
                                             : "unfinished",
                                 .where = where,
                                 .bytes = s.bytes},
                     err);
    if (status == STILL_OK) status = add_ggufs(v, name, folder, where, &s, err);
    cli_scan_free(&s);
    return status;
}

/* ---- Places -------------------------------------------------------------- */

/* Names in a folder that are folders or links to such; calls each until one fails. */
typedef still_status (*each_fn)(cli_inventory *v, const char *prefix, const char *name,
                                const char *folder, still_error *err);

static still_status each_folder(cli_inventory *v, const char *prefix,
                                const char *folder, each_fn each, still_error *err)
{
    DIR *dir = opendir(folder);
    still_status status = STILL_OK;
    for (struct dirent *e; dir && status == STILL_OK && (e = readdir(dir));) {
        struct stat st;
        if (e->d_name[0] == '.') continue;
        char *path = join(folder, "/", e->d_name);
        if (!path)
            status = sti_fail_memory(err, "list of models", 0);
        else if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
            status = each(v, prefix, e->d_name, path, err);
        free(path);
    }
    if (dir) closedir(dir);
    return status;
}

static still_status add_named(cli_inventory *v, const char *prefix, const char *name,
                              const char *folder, still_error *err)
{
    char *whole = join(prefix, "/", name);
    if (!whole) return sti_fail_memory(err, "list of models", 0);
    const still_status status = add_folder(v, whole, folder, "still", err);
    free(whole);
    return status;
}

/* A name of our cache, or an organization with names of its own. */
static still_status add_ours(cli_inventory *v, const char *prefix, const char *name,
                             const char *folder, still_error *err)
{
    cli_scan top;
    (void)prefix;
    still_status status = cli_scan_folder(folder, false, &top, err);
    if (status != STILL_OK) return status == STILL_E_MEMORY ? status : STILL_OK;
    const bool model = top.n > 0;
    cli_scan_free(&top);
    return model ? add_folder(v, name, folder, "still", err)
                 : each_folder(v, name, folder, add_named, err);
}

static still_status add_theirs(cli_inventory *v, const char *prefix, const char *name,
                               const char *folder, still_error *err)
{
    char repo[CLI_NAME_ROOM], *snapshot;
    (void)prefix, (void)folder;
    if (!cli_hf_repo_of(name, repo, sizeof repo)) return STILL_OK;
    STI_TRY(cli_hf_snapshot(repo, &snapshot, err));
    const still_status status =
        snapshot ? add_folder(v, repo, snapshot, "huggingface", err) : STILL_OK;
    free(snapshot);
    return status;
}

static still_status add_shipped(cli_inventory *v, const char *prefix, const char *name,
                                const char *folder, still_error *err)
{
    (void)prefix;
    return add_folder(v, name, folder, "shipped", err);
}

static int by_name(const void *a, const void *b)
{
    const cli_entry *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : strcmp(x->where, y->where);
}

still_status cli_inventory_read(cli_inventory *out, still_error *err)
{
    char *ours = NULL, *theirs = NULL, with_still[CLI_PATH_ROOM];
    *out = (cli_inventory){0};
    still_status status = cli_cache_folder("", &ours, err);
    if (status == STILL_OK) status = each_folder(out, "", ours, add_ours, err);
    if (status == STILL_OK) status = cli_hf_cache(&theirs, err);
    if (status == STILL_OK) status = each_folder(out, "", theirs, add_theirs, err);
    for (size_t i = 0; status == STILL_OK && cli_shipped_place(i, with_still); i++)
        status = each_folder(out, "", with_still, add_shipped, err);
    free(ours);
    free(theirs);
    if (status != STILL_OK)
        cli_inventory_free(out);
    else if (out->n)
        qsort(out->entry, out->n, sizeof *out->entry, by_name);
    return status;
}

/* ---- Mistyped names ------------------------------------------------------ */

bool cli_inventory_near(const char *typed, char out[CLI_NAME_ROOM])
{
    cli_inventory v;
    cli_near best = {0}, part = {0};
    const char *whole = NULL; /* of the entry whose last part is nearest */
    cli_near_consider(&best, typed, CLI_DEFAULT_MODEL);
    if (cli_inventory_read(&v, NULL)) v = (cli_inventory){0};
    for (size_t i = 0; i < v.n; i++) {
        const char *name = v.entry[i].name, *slash = strrchr(name, '/');
        if (!strcmp(v.entry[i].type, "unfinished")) continue;
        cli_near_consider(&best, typed, name);
        if (!slash || strchr(typed, '/')) continue;
        cli_near_consider(&part, typed, slash + 1);
        if (part.name == slash + 1) whole = name;
    }
    const char *found = best.name ? best.name : whole;
    const bool near = found && strcmp(found, typed) != 0;
    if (near) snprintf(out, CLI_NAME_ROOM, "%s", found);
    cli_inventory_free(&v);
    return near;
}
