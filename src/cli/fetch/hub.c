/* hub.c - see hub.h. Everything the server sends is untrusted: names are checked before
 * they become paths below the cache folder. */
#include "cli/fetch/hub.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/digest.h"
#include "cli/fetch/quant.h"

enum { LISTING_MAX = 32 << 20, ATTEMPTS = 4, NAME_LENGTH = 255 };

static const char NAME_CHARS[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                 "0123456789._-";

bool cli_hub_is_repo(const char *name)
{
    const char *slash = strchr(name, '/');
    if (!slash || slash == name || !slash[1] || strlen(name) > 2 * NAME_LENGTH)
        return false;
    size_t org = (size_t)(slash - name);
    return strspn(name, NAME_CHARS) == org && name[0] != '.' && slash[1] != '.' &&
           strspn(slash + 1, NAME_CHARS) == strlen(slash + 1);
}

/* A relative path without "." or ".." parts, hidden names or odd characters. */
static bool safe_name(const char *name)
{
    if (!*name || strlen(name) > 4 * NAME_LENGTH) return false;
    for (const char *part = name;;) {
        size_t n = strcspn(part, "/");
        if (n == 0 || n > NAME_LENGTH - 8 || part[0] == '.') return false;
        for (size_t i = 0; i < n; i++)
            if ((unsigned char)part[i] < 32 || part[i] == 127 || part[i] == '\\')
                return false;
        if (!part[n]) return true;
        part += n + 1;
    }
}

/* Percent-encodes what is not plain; slashes stay. */
static void put_path(sti_buf *url, const char *path)
{
    for (; *path; path++) {
        if (*path == '/' || strchr(NAME_CHARS, *path))
            sti_buf_put(url, path, 1);
        else
            sti_buf_printf(url, "%%%02X", (unsigned char)*path);
    }
}

static char *finish_url(sti_buf *url)
{
    if (!url->failed) return url->p;
    sti_buf_free(url);
    return NULL;
}

char *cli_hub_url(const cli_http *h, const char *repo, const char *revision,
                  const char *name)
{
    sti_buf url = {0};
    sti_buf_printf(&url, "%s/%s/resolve/", h->endpoint, repo);
    put_path(&url, revision);
    sti_buf_puts(&url, "/");
    put_path(&url, name);
    return finish_url(&url);
}

void cli_listing_free(cli_listing *l)
{
    for (size_t i = 0; i < l->n; i++) free(l->file[i].name);
    free(l->file);
    *l = (cli_listing){0};
}

/* ---- Reading the listing ------------------------------------------------- */

static bool collect(void *user, const cli_response *r, const char *data, size_t n)
{
    sti_buf *body = user;
    (void)r;
    if (body->n + n > LISTING_MAX) return false;
    sti_buf_put(body, data, n);
    return !body->failed;
}

/* One GET into body, retried on temporary errors. */
static still_status get_text(cli_http *h, const char *url, sti_buf *body,
                             cli_response *r, still_error *err)
{
    cli_request q = {.url = url, .body = collect, .user = body};
    for (int failures = 0;;) {
        bool again;
        sti_buf_clear(body);
        still_status status = cli_http_get(h, &q, r, &again, err);
        if (status == STILL_OK && r->status == 200) return STILL_OK;
        if (status == STILL_OK) status = cli_http_refused(h, url, r, &again, err);
        if (!again || ++failures == ATTEMPTS) return status;
        if (!cli_http_back_off(failures))
            return sti_fail(err, STILL_E_CANCELLED, "interrupted");
    }
}

static still_status add_file(cli_listing *l, const json_t *entry, const char *url,
                             still_error *err)
{
    const char *name = json_string_value(json_object_get(entry, "rfilename"));
    if (!name || name[0] == '.') return STILL_OK; /* .gitattributes and the like */
    if (!safe_name(name))
        return sti_fail(err, STILL_E_FORMAT, "%s: refuses file name '%s'", url, name);
    const json_t *lfs = json_object_get(entry, "lfs");
    const json_t *size = json_object_get(lfs, "size");
    if (!size) size = json_object_get(entry, "size");
    const char *sum = json_string_value(json_object_get(lfs, "sha256"));
    const char *blob = json_string_value(json_object_get(entry, "blobId"));

    cli_file *f = &l->file[l->n];
    *f = (cli_file){.name = sti_strdup(name), .size = -1};
    if (!f->name) return sti_fail_memory(err, "file name", strlen(name));
    l->n++;
    if (json_is_integer(size) && json_integer_value(size) >= 0)
        f->size = json_integer_value(size);
    if (sum && cli_is_hex(sum, 64))
        memcpy(f->sum, sum, 65);
    else if (!json_is_object(lfs) && blob && cli_is_hex(blob, 40))
        memcpy(f->sum, blob, 41); /* for a large file it would be that of the pointer */
    return STILL_OK;
}

static still_status parse_listing(const sti_buf *body, const char *url,
                                  cli_listing *out, still_error *err)
{
    json_t *root;
    still_status status =
        sti_json_read("the answer", body->p ? body->p : "", body->n, 0, &root, err);
    if (status == STILL_E_FORMAT)
        return sti_fail_prefix(err, status, "%s: not JSON, is this a hub?", url);
    STI_TRY(status);
    const json_t *siblings = json_object_get(root, "siblings");
    if (!json_is_array(siblings) || json_array_size(siblings) == 0)
        status = sti_fail(err, STILL_E_FORMAT, "%s: the answer lists no files", url);
    if (status == STILL_OK) {
        out->file = sti_alloc(json_array_size(siblings), sizeof *out->file);
        if (!out->file) status = sti_fail_memory(err, "listing", body->n);
    }
    for (size_t i = 0; status == STILL_OK && i < json_array_size(siblings); i++)
        status = add_file(out, json_array_get(siblings, i), url, err);
    json_decref(root);
    if (status != STILL_OK) cli_listing_free(out);
    return status;
}

still_status cli_hub_list(cli_http *h, const char *repo, const char *revision,
                          cli_listing *out, still_error *err)
{
    /* blobs=true gives sizes and checksums; simple mirrors know only the other form. */
    static const char *const form[] = {"?blobs=true", "", NULL};
    still_status status = STILL_OK;
    *out = (cli_listing){0};
    sti_buf body = {0};
    for (int i = 0; i < 3; i++) {
        if (!form[i] && strcmp(revision, "main") != 0) break;
        sti_buf address = {0};
        sti_buf_printf(&address, "%s/api/models/%s", h->endpoint, repo);
        if (form[i]) {
            sti_buf_puts(&address, "/revision/");
            put_path(&address, revision);
            sti_buf_puts(&address, form[i]);
        }
        char *url = finish_url(&address);
        if (!url) {
            status = sti_fail_memory(err, "address", 0);
            break;
        }
        cli_response r;
        still_error this_time = {0};
        still_status got = get_text(h, url, &body, &r, &this_time);
        bool unknown = got != STILL_OK && r.status == 404;
        if (got == STILL_OK) got = parse_listing(&body, url, out, &this_time);
        free(url);
        if (i == 0 || !unknown) { /* the first 404 says most */
            status = got;
            if (got != STILL_OK && err) *err = this_time;
        }
        if (!unknown) break;
    }
    sti_buf_free(&body);
    return status;
}

/* ---- Choosing ------------------------------------------------------------ */

static bool matches(const char *name, const char *const *pattern, int n)
{
    for (int i = 0; i < n; i++)
        if (fnmatch(pattern[i], name, FNM_PATHNAME) == 0) return true;
    return false;
}

static size_t count(const cli_listing *l, const char *pattern)
{
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) n += matches(l->file[i].name, &pattern, 1);
    return n;
}

static void keep(cli_listing *l, const char *const *pattern, int n_patterns,
                 const char *except)
{
    size_t kept = 0;
    for (size_t i = 0; i < l->n; i++) {
        bool in = matches(l->file[i].name, pattern, n_patterns) &&
                  !(except && matches(l->file[i].name, &except, 1));
        if (in)
            l->file[kept++] = l->file[i];
        else
            free(l->file[i].name);
    }
    l->n = kept;
}

static const char *listed_name(const void *list, size_t i)
{
    return ((const cli_listing *)list)->file[i].name;
}

/* Keeps the parts of the model that file `first` belongs to. */
static void keep_model(cli_listing *l, size_t first)
{
    size_t kept = 0;
    char *model = l->file[first].name; /* freed last, if it is not kept */
    for (size_t i = 0; i < l->n; i++) {
        if (i == first || cli_gguf_same(l->file[i].name, model))
            l->file[kept++] = l->file[i];
        else
            free(l->file[i].name);
    }
    l->n = kept;
}

/* Every part of a split model must be listed, or the download would be of no use. */
static still_status check_parts(const cli_listing *l, const char *repo,
                                still_error *err)
{
    cli_part part;
    if (!l->n || !cli_is_gguf(l->file[0].name, &part) || part.parts == l->n)
        return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: %s is one of %u parts, of which the hub lists %zu", repo,
                    l->file[0].name, part.parts, l->n);
}

static still_status select_gguf(cli_listing *l, const char *repo, const char *suffix,
                                still_error *err)
{
    size_t first;
    const cli_pick found = cli_gguf_pick(l, l->n, listed_name, suffix, &first);
    if (found == CLI_PICK_ONE) {
        keep_model(l, first);
        return check_parts(l, repo, err);
    }
    if (found == CLI_PICK_NONE)
        return sti_fail(err, STILL_E_UNSUPPORTED, "%s: has %s", repo,
                        suffix ? "no GGUF files; leave out the suffix"
                               : "neither safetensors nor GGUF files");
    sti_buf text = {0};
    sti_buf_printf(&text, "%s%s%s: ", repo, suffix ? ":" : "", suffix ? suffix : "");
    sti_buf_puts(&text, found == CLI_PICK_UNKNOWN
                            ? "no such file; choose one of "
                            : "has several GGUF models; choose one of ");
    cli_gguf_choices(l, l->n, listed_name, repo, strlen(repo), &text);
    const still_status status = text.failed ? sti_fail_memory(err, "names", 0)
                                            : sti_fail(err, STILL_E_ARG, "%s", text.p);
    sti_buf_free(&text);
    return status;
}

still_status cli_hub_select(cli_listing *l, const char *repo, const char *suffix,
                            const cli_list *include, still_error *err)
{
    static const char *const folder[] = {
        "config.json",   "generation_config.json",       "tokenizer*",
        "tekken.json",   "special_tokens_map.json",      "chat_template*",
        "*.safetensors", "model.safetensors.index.json", "still.json",
        "adapter.gguf"};
    static const char *const adapter[] = {"still.json", "adapter.*"};
    if (include->n) {
        keep(l, include->item, include->n, NULL);
        if (l->n) return STILL_OK;
        return sti_fail(err, STILL_E_ARG, "%s: no file matches --include %s", repo,
                        include->item[0]);
    }
    if (suffix) return select_gguf(l, repo, suffix, err);
    if (count(l, "*.safetensors") > count(l, "adapter.safetensors")) {
        /* Some repositories have the weights twice, whole and sharded. */
        bool twice = count(l, "model*.safetensors") > 0;
        keep(l, folder, sizeof folder / sizeof *folder,
             twice ? "consolidated*.safetensors" : NULL);
        return STILL_OK;
    }
    if (count(l, "still.json")) {
        keep(l, adapter, sizeof adapter / sizeof *adapter, NULL);
        return STILL_OK;
    }
    return select_gguf(l, repo, NULL, err);
}
