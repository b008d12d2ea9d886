/* sources.c - see sources.h. Everything that a list says is checked when it is read, also a
 * name that it has and we do not know: a misspelt "sha256" must not pass as none. */
#include "cli/data/sources.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"

enum { MOST_LIST = 4 << 20, MOST_SETS = 256, MOST_FILES = 4096, MOST_URLS = 8 };
static const int64_t MOST_BYTES = (int64_t)4 << 30; /* of a published file */

/* Where in the list we are, for errors. */
typedef struct place {
    const char *list, *set;
} place;

static still_status bad(const place *at, const char *what, const char *why,
                        still_error *err)
{
    return sti_fail(err, STILL_E_FORMAT, "%s: set '%s': \"%s\" %s", at->list,
                    at->set ? at->set : "?", what, why);
}

static still_status only_keys(const place *at, const json_t *o,
                              const char *const *known, still_error *err)
{
    const char *key;
    json_t *v;
    if (!json_is_object(o)) return bad(at, "sets, files", "are not JSON objects", err);
    json_object_foreach((json_t *)o, key, v)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0) i++;
        if (!known[i]) return bad(at, key, "is not a name that a list has", err);
    }
    return STILL_OK;
}

static still_status text_of(const place *at, const json_t *o, const char *key,
                            char **out, still_error *err)
{
    const char *text = json_string_value(json_object_get(o, key));
    if (!text || !*text) return bad(at, key, "is not a text", err);
    *out = sti_strdup(text);
    return *out ? STILL_OK : sti_fail_memory(err, at->list, strlen(text));
}

/* A file name and nothing else. */
static bool is_plain_name(const char *s)
{
    return *s && *s != '.' && *s != '-' && strlen(s) < 200 &&
           strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                     "0123456789._-+") == strlen(s);
}

/* `form` with word for each {}. NULL: no memory. */
static char *expand(const char *form, const char *word)
{
    sti_buf b = {0};
    for (const char *gap; word && (gap = strstr(form, "{}")); form = gap + 2) {
        sti_buf_put(&b, form, (size_t)(gap - form));
        sti_buf_puts(&b, word);
    }
    sti_buf_puts(&b, form);
    if (b.failed) sti_buf_free(&b);
    return b.p;
}

/* ---- Files --------------------------------------------------------------- */

static still_status read_urls(const place *at, const json_t *o, const char *word,
                              cli_published *f, still_error *err)
{
    const json_t *list = json_object_get(o, "url");
    const size_t n = json_array_size(list);
    if (n < 1 || n > MOST_URLS)
        return bad(at, "url", "is not a list of addresses", err);
    f->url = sti_alloc(n, sizeof *f->url);
    if (!f->url) return sti_fail_memory(err, at->list, n);
    for (size_t i = 0; i < n; i++) {
        const char *url = json_string_value(json_array_get(list, i));
        if (!url ||
            (strncmp(url, "https://", 8) != 0 && strncmp(url, "http://", 7) != 0))
            return bad(at, "url", "has an address that is not https:// or http://",
                       err);
        for (const char *c = url; *c; c++)
            if (*c <= ' ' || *c > '~')
                return bad(at, "url", "has a character that addresses have not", err);
        if (!(f->url[i] = expand(url, word))) return sti_fail_memory(err, at->list, n);
        f->n_urls++;
    }
    return STILL_OK;
}

/* Parts of an archive of known size, each with its checksum: nobody checks the whole. */
static still_status read_parts(const place *at, const json_t *parts, cli_published *f,
                               still_error *err)
{
    const char *name;
    json_t *v;
    if (!parts) return STILL_OK;
    if (json_object_size(parts) == 0 || json_object_size(parts) > MOST_URLS ||
        f->bytes < 1)
        return bad(at, "parts", "is not names and checksums of a file with \"bytes\"",
                   err);
    f->part = sti_alloc(json_object_size(parts), sizeof *f->part);
    if (!f->part) return sti_fail_memory(err, at->list, 1);
    json_object_foreach((json_t *)parts, name, v)
    {
        const char *sum = json_string_value(v);
        cli_part_of_zip *part = &f->part[f->n_parts];
        if (!is_plain_name(name) || !sum || !cli_is_hex(sum, 64))
            return bad(at, "parts", "is not plain file names and their checksums", err);
        if (!(part->name = sti_strdup(name))) return sti_fail_memory(err, at->list, 1);
        memcpy(part->sum, sum, sizeof part->sum);
        f->n_parts++;
    }
    return STILL_OK;
}

/* The file that o stands for, or for `word` of its "each". */
static still_status read_file(const place *at, const json_t *o, const char *word,
                              cli_published *f, still_error *err)
{
    const char *name = json_string_value(json_object_get(o, "name")),
               *sum = json_string_value(json_object_get(o, "sha256"));
    const json_t *bytes = json_object_get(o, "bytes"),
                 *most = json_object_get(o, "most");
    if (!name) return bad(at, "name", "is not a text", err);
    if (!(f->name = expand(name, word))) return sti_fail_memory(err, at->list, 64);
    if (!is_plain_name(f->name))
        return bad(at, "name", "is not a plain file name", err);
    STI_TRY(read_urls(at, o, word, f, err));
    if (!bytes == !most) return bad(at, "bytes", "or \"most\" is missing", err);
    f->bytes = bytes ? json_integer_value(bytes) : -1;
    f->most = bytes ? f->bytes : json_integer_value(most);
    if (f->most < 1 || f->most > MOST_BYTES)
        return bad(at, bytes ? "bytes" : "most", "is not a size up to 4 GiB", err);
    if (json_object_get(o, "sha256") && (!sum || word || !cli_is_hex(sum, 64)))
        return bad(at, "sha256", "is not the 64 digits of one file", err);
    if (sum) memcpy(f->sum, sum, sizeof f->sum);
    return read_parts(at, json_object_get(o, "parts"), f, err);
}

static still_status add_file(const place *at, const json_t *o, const char *word,
                             cli_set *set, still_error *err)
{
    if (set->n == MOST_FILES) return bad(at, "files", "are too many", err);
    cli_published *grown = sti_grow(set->file, set->n + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, at->list, sizeof *grown);
    set->file = grown;
    grown[set->n] = (cli_published){0};
    return read_file(at, o, word, &grown[set->n++], err);
}

static still_status read_files(const place *at, const json_t *list, cli_set *set,
                               still_error *err)
{
    static const char *const known[] = {"name", "url",    "each",  "bytes",
                                        "most", "sha256", "parts", NULL};
    if (json_array_size(list) == 0) return bad(at, "files", "is not a list", err);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i), *each = json_object_get(o, "each");
        STI_TRY(only_keys(at, o, known, err));
        if (each && json_array_size(each) == 0)
            return bad(at, "each", "is not a list of words", err);
        for (size_t k = 0; k < json_array_size(each); k++) {
            const char *word = json_string_value(json_array_get(each, k));
            if (!word || !is_plain_name(word))
                return bad(at, "each", "has what is not a plain word", err);
            STI_TRY(add_file(at, o, word, set, err));
        }
        if (!each) STI_TRY(add_file(at, o, NULL, set, err));
    }
    if (set->n < set->convert->files ||
        (set->convert->files && set->n > set->convert->files))
        return bad(at, "files", "are not as many as its converter reads", err);
    return STILL_OK;
}

/* ---- Sets ---------------------------------------------------------------- */

static still_status read_set(place *at, const json_t *o, cli_set *set, still_error *err)
{
    static const char *const known[] = {"name",    "title", "home", "licence",
                                        "convert", "files", NULL};
    char *convert = NULL;
    at->set = json_string_value(json_object_get(o, "name"));
    STI_TRY(only_keys(at, o, known, err));
    STI_TRY(text_of(at, o, "name", &set->name, err));
    if (!is_plain_name(set->name)) return bad(at, "name", "is not a plain word", err);
    STI_TRY(text_of(at, o, "title", &set->title, err));
    STI_TRY(text_of(at, o, "home", &set->home, err));
    STI_TRY(text_of(at, o, "licence", &set->licence, err));
    STI_TRY(text_of(at, o, "convert", &convert, err));
    set->convert = cli_converter_find(convert);
    free(convert);
    if (!set->convert)
        return bad(at, "convert", "names no converter of this still", err);
    return read_files(at, json_object_get(o, "files"), set, err);
}

/* A mirror has all files in one folder, and so have we: no two may share a name. */
static still_status no_twins(const char *list, const cli_sources *s, still_error *err)
{
    for (size_t a = 0; a < s->n; a++)
        for (size_t i = 0; i < s->set[a].n; i++)
            for (size_t b = 0; b <= a; b++)
                for (size_t k = 0; k < (b == a ? i : s->set[b].n); k++)
                    if (!strcmp(s->set[a].file[i].name, s->set[b].file[k].name))
                        return sti_fail(err, STILL_E_FORMAT,
                                        "%s: two files are named %s", list,
                                        s->set[a].file[i].name);
    for (size_t a = 0; a < s->n; a++)
        for (size_t b = 0; b < a; b++)
            if (!strcmp(s->set[a].name, s->set[b].name))
                return sti_fail(err, STILL_E_FORMAT, "%s: two sets are named %s", list,
                                s->set[a].name);
    return STILL_OK;
}

static still_status read_list(const char *list, const json_t *root, cli_sources *out,
                              still_error *err)
{
    place at = {.list = list};
    const json_t *sets = json_object_get(root, "sets");
    const size_t n = json_array_size(sets);
    if (json_integer_value(json_object_get(root, "version")) != 1)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: is not a list of data sources of version 1", list);
    if (n < 1 || n > MOST_SETS)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: \"sets\" is not a list of 1 to %d sets", list, MOST_SETS);
    out->set = sti_alloc(n, sizeof *out->set);
    if (!out->set) return sti_fail_memory(err, list, n);
    for (; out->n < n;) {
        cli_set *set = &out->set[out->n++];
        STI_TRY(read_set(&at, json_array_get(sets, out->n - 1), set, err));
    }
    return no_twins(list, out, err);
}

still_status cli_sources_read(const char *path, cli_sources *out, still_error *err)
{
    char *text = NULL;
    const char *name = path ? path : "sources.json",
               *p = (const char *)cli_sources_json;
    size_t n = cli_sources_json_size;
    json_t *root = NULL;
    *out = (cli_sources){0};
    if (path) {
        STI_TRY(cli_read(path, MOST_LIST, &text, &n, err));
        p = text;
    }
    still_status st =
        sti_json_read(name, p, n, STI_JSON_OBJECT | STI_JSON_ONCE, &root, err);
    if (st == STILL_OK) st = read_list(name, root, out, err);
    json_decref(root);
    free(text);
    if (st != STILL_OK) cli_sources_free(out);
    return st;
}

void cli_sources_free(cli_sources *s)
{
    for (size_t i = 0; i < s->n; i++) {
        cli_set *set = &s->set[i];
        for (size_t k = 0; k < set->n; k++) {
            for (size_t u = 0; u < set->file[k].n_urls; u++) free(set->file[k].url[u]);
            for (size_t u = 0; u < set->file[k].n_parts; u++)
                free(set->file[k].part[u].name);
            free(set->file[k].part);
            free(set->file[k].url);
            free(set->file[k].name);
        }
        free(set->file);
        free(set->name);
        free(set->title);
        free(set->home);
        free(set->licence);
    }
    free(s->set);
    *s = (cli_sources){0};
}

const cli_set *cli_sources_find(const cli_sources *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++)
        if (!strcmp(s->set[i].name, name)) return &s->set[i];
    return NULL;
}

/* ---- Names of data ------------------------------------------------------- */

/* Whether a name is a set's; *file: the first that is made of it. */
static still_status is_set(const char *name, const char **file, still_error *err)
{
    cli_sources s;
    *file = NULL;
    STI_TRY(cli_sources_read(NULL, &s, err));
    const cli_set *set = cli_sources_find(&s, name);
    if (set) *file = set->convert->makes[0]; /* of a table */
    cli_sources_free(&s);
    return STILL_OK;
}

still_status cli_data_path(const char *name, char **out, still_error *err)
{
    const char *file = NULL;
    *out = NULL;
    if (access(name, F_OK) != 0) STI_TRY(is_set(name, &file, err));
    if (file) return cli_cache_place("data", file, out, err);
    *out = sti_strdup(name);
    return *out ? STILL_OK : sti_fail_memory(err, name, strlen(name));
}

void cli_data_advise(const char *name, const char *path, still_error *err)
{
    const char *file;
    if (err->code != STILL_E_IO || access(path, F_OK) == 0 ||
        !strstr(err->text, path) || is_set(name, &file, NULL))
        return;
    if (file)
        sti_fail(err, STILL_E_IO,
                 "the data set '%s' is not here yet: `still pull-data %s` brings it; "
                 "without a network, demo/books.jsonl.gz is data to try",
                 name, name);
    else
        sti_fail(err, STILL_E_IO,
                 "%s: no such file; to try: demo/books.jsonl.gz, or `still pull-data "
                 "books` and --data books",
                 path);
}
