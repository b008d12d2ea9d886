/* pull_data.c - still pull-data: data sets from where they are published, or files that are
 * ready from a folder or an archive. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "cli/data/bring.h"
#include "cli/data/collect.h"
#include "cli/data/kept.h"
#include "cli/fetch/cache.h"
#include "cli/near.h"

/* ---- The list ------------------------------------------------------------ */

/* What is downloaded; *exact: no size is a mere bound. */
static uint64_t set_bytes(const cli_set *set, bool *exact)
{
    uint64_t sum = 0;
    *exact = true;
    for (size_t i = 0; i < set->n; i++) {
        sum += (uint64_t)set->file[i].most;
        *exact = *exact && set->file[i].bytes >= 0;
    }
    return sum;
}

static json_t *makes_of(const cli_set *set)
{
    json_t *list = json_array();
    for (int k = 0; k < CLI_MAKES && set->convert->makes[k]; k++)
        sti_json_append(&list, json_string(set->convert->makes[k]));
    return list;
}

static json_t *published_of(const cli_set *set)
{
    json_t *list = json_array();
    for (size_t i = 0; i < set->n; i++) {
        const cli_published *p = &set->file[i];
        json_t *urls = json_array(), *file;
        for (size_t u = 0; u < p->n_urls; u++)
            sti_json_append(&urls, json_string(p->url[u]));
        file = json_pack("{s:s,s:o}", "name", p->name, "url", urls);
        sti_json_set(&file, p->bytes >= 0 ? "bytes" : "most",
                     json_integer((json_int_t)p->most));
        if (p->sum[0]) sti_json_set(&file, "sha256", json_string(p->sum));
        json_t *parts = p->n_parts ? json_object() : NULL;
        for (size_t k = 0; k < p->n_parts; k++)
            sti_json_set(&parts, p->part[k].name, json_string(p->part[k].sum));
        if (p->n_parts) sti_json_set(&file, "parts", parts);
        sti_json_append(&list, file);
    }
    return list;
}

static int list_json(const cli_set *const *sets, size_t n, const char *folder)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) {
        const cli_set *set = sets[i];
        sti_json_append(
            &list,
            json_pack("{s:s,s:s,s:s,s:s,s:s,s:b,s:o,s:o}", "name", set->name, "title",
                      set->title, "home", set->home, "licence", set->licence, "convert",
                      set->convert->name, "here", cli_bring_is_here(folder, set),
                      "makes", makes_of(set), "published", published_of(set)));
    }
    return cli_print_json(json_pack("{s:s,s:o}", "path", folder, "sets", list));
}

static int list_sets(const cli_set *const *sets, size_t n, const char *folder)
{
    for (size_t i = 0; i < n; i++) {
        const cli_set *set = sets[i];
        char size[32];
        bool exact, summed = true;
        const uint64_t bytes = set_bytes(set, &exact);
        for (size_t k = 0; k < set->n; k++) summed = summed && set->file[k].sum[0];
        cli_print("%s%s\n    %s\n    %s; %s%s%s; licence: %s\n    ", set->name,
                  cli_bring_is_here(folder, set) ? " (here)" : "", set->title,
                  set->home,
                  !exact                 ? "at most "
                  : set->file[0].n_parts ? "parts of "
                                         : "",
                  cli_bytes(size, bytes), summed ? "" : ", checksum not published",
                  set->licence);
        for (int k = 0; k < CLI_MAKES && set->convert->makes[k]; k++)
            cli_print("%s%s", k ? ", " : "", set->convert->makes[k]);
        cli_print("\n");
    }
    return CLI_OK;
}

/* ---- Which sets ---------------------------------------------------------- */

/* What the arguments name; *path: it is a folder or an archive instead. */
static int choose(const cli_options *o, const cli_sources *s, const cli_set **out,
                  size_t *n, bool *path)
{
    const bool every = o->all || (o->list && o->n_args == 0);
    *n = 0;
    *path = false;
    if (o->all && o->n_args)
        return cli_usage("pull-data", "--all is every set: leave out '%s'", o->arg[0]);
    for (size_t i = 0; every && i < s->n; i++) out[(*n)++] = &s->set[i];
    for (int i = 0; i < o->n_args; i++) {
        const char *name = o->arg[i];
        const cli_set *set = cli_sources_find(s, name);
        cli_near near = {0};
        if (set) out[(*n)++] = set;
        if (set) continue;
        if (o->n_args == 1 && access(name, F_OK) == 0) {
            *path = true;
            if (!o->list && !o->mirror && !o->force && !o->keep) return CLI_OK;
            return cli_usage("pull-data",
                             "--list, --mirror, --force and --keep are for data sets; "
                             "'%s' is a file or folder",
                             name);
        }
        for (size_t k = 0; k < s->n; k++)
            cli_near_consider(&near, name, s->set[k].name);
        return cli_fail(
            "'%s' is neither a data set nor a folder or archive%s%s; `still "
            "pull-data --list` shows the sets",
            name, near.name ? ", did you mean " : "", near.name ? near.name : "");
    }
    if (*n) return CLI_OK;
    return cli_usage("pull-data",
                     "which data sets? SET..., --all, or --list to see them");
}

/* ---- Bringing them ------------------------------------------------------- */

static void put_result(json_t **list, const cli_bring *b, const cli_set *set,
                       const cli_brought *got, const char *error)
{
    json_t *files = json_array();
    for (int k = 0; k < CLI_MAKES && set->convert->makes[k] && !error; k++) {
        const char *name = set->convert->makes[k];
        const json_t *kept = cli_kept_file(b->kept, "made", name);
        json_t *file = json_pack("{s:s}", "name", name);
        if (kept)
            sti_json_merge(&file, json_pack("{s:O,s:O,s:O}", "sha256",
                                            json_object_get(kept, "sha256"), "bytes",
                                            json_object_get(kept, "bytes"), "records",
                                            json_object_get(kept, "records")));
        sti_json_append(&files, file);
    }
    json_t *v = json_pack("{s:s,s:s,s:b,s:I,s:o}", "name", set->name, "licence",
                          set->licence, "here", got->here, "downloaded_bytes",
                          (json_int_t)got->bytes, "files", files);
    if (error) sti_json_set(&v, "error", json_string(error));
    sti_json_append(list, v);
}

static void print_result(const cli_bring *b, const cli_set *set, const cli_brought *got)
{
    if (got->here) {
        cli_print("%s: already here%s\n", set->name,
                  got->theirs ? ", from elsewhere (--force replaces it)"
                              : " and verified");
        return;
    }
    cli_print("%s (licence: %s):", set->name, set->licence);
    for (int k = 0; k < CLI_MAKES && set->convert->makes[k]; k++) {
        const json_t *kept = cli_kept_file(b->kept, "made", set->convert->makes[k]);
        cli_print("%s %s, %lld records", k ? ";" : "", set->convert->makes[k],
                  (long long)json_integer_value(json_object_get(kept, "records")));
    }
    cli_print("\n");
}

/* One set that fails does not keep the others away: servers come and go. */
static int bring_sets(cli_bring *b, const cli_set *const *set, size_t n)
{
    json_t *list = json_array();
    sti_buf failed = {0};
    size_t failures = 0;
    still_error err = {0};
    still_status st = STILL_OK;
    for (size_t i = 0; i < n && st != STILL_E_CANCELLED; i++) {
        cli_brought got;
        st = cli_bring_set(b, set[i], &got, &err);
        if (st == STILL_OK && !b->o->json) print_result(b, set[i], &got);
        put_result(&list, b, set[i], &got, st == STILL_OK ? NULL : err.text);
        if (st == STILL_OK || st == STILL_E_CANCELLED) continue;
        if (n > 1) cli_warn("%s: %s", set[i]->name, err.text);
        sti_buf_printf(&failed, "%s%s", failures++ ? ", " : "", set[i]->name);
    }
    int status = CLI_OK;
    if (b->o->json)
        status =
            cli_print_json(json_pack("{s:s,s:o}", "path", b->folder, "sets", list));
    else
        json_decref(list);
    if (!b->o->json && failures < n && st != STILL_E_CANCELLED)
        cli_print("in %s\n", b->folder);
    if (failures == 1 && n == 1 && st == STILL_E_IO)
        status = cli_fail("%s; without a network, demo/books.jsonl.gz is data to try",
                          err.text);
    else if (st == STILL_E_CANCELLED || (failures && n == 1))
        status = cli_fail_error(&err);
    else if (failures)
        status = cli_fail("%zu of %zu sets could not be brought: %s; the same command "
                          "tries again, --mirror URL takes another place, and "
                          "demo/books.jsonl.gz is data to try without a network",
                          failures, n, failed.p ? failed.p : "");
    sti_buf_free(&failed);
    return status;
}

static int bring_all(const cli_options *o, const cli_set *const *set, size_t n,
                     const char *folder, const char *mirror)
{
    cli_bring b;
    still_error err;
    int fd = -1, status;
    if (cli_make_folders(folder, &err) || cli_lock_folder(folder, &fd, &err))
        return cli_fail_error(&err);
    if (cli_bring_open(&b, o, folder, mirror, &err))
        status = cli_fail_error(&err);
    else
        status = bring_sets(&b, set, n);
    cli_bring_close(&b);
    close(fd);
    return status;
}

/* ---- The command --------------------------------------------------------- */

static int run(const cli_options *o, const cli_sources *s, const char *folder,
               const char *mirror)
{
    still_error err;
    size_t n;
    bool path;
    const cli_set **set = calloc(s->n + CLI_ARGS_MAX, sizeof *set);
    if (!set) return cli_fail("out of memory");
    int status = choose(o, s, set, &n, &path);
    if (status == CLI_OK && path) {
        if (cli_make_folders(folder, &err) || cli_collect(o, folder, &status, &err))
            status = cli_fail_error(&err);
    } else if (status == CLI_OK && o->list) {
        status = o->json ? list_json(set, n, folder) : list_sets(set, n, folder);
    } else if (status == CLI_OK) {
        status = bring_all(o, set, n, folder, mirror);
    }
    free(set);
    return status;
}

int cli_cmd_pull_data(const cli_options *o)
{
    still_error err;
    char *cache = NULL;
    cli_sources sources = {0};
    /* An address is where all files lie; anything else is a list of a mirror's own. */
    const bool base = o->mirror && (!strncmp(o->mirror, "https://", 8) ||
                                    !strncmp(o->mirror, "http://", 7));
    if ((!o->out && cli_cache_place("data", "", &cache, &err)) ||
        cli_sources_read(base ? NULL : o->mirror, &sources, &err)) {
        free(cache);
        return cli_fail_error(&err);
    }
    const int status =
        run(o, &sources, o->out ? o->out : cache, base ? o->mirror : NULL);
    cli_sources_free(&sources);
    free(cache);
    return status;
}
