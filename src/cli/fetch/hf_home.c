/* hf_home.c - see hf_home.h. The variables and the layout are those of huggingface_hub:
 *   HUB/models--org--name/refs/main             a commit
 *   HUB/models--org--name/snapshots/COMMIT/...  links to ../../blobs/SUM
 * Files of the cache are followed wherever their links lead, as Hugging Face's own tools
 * do; a name or a commit never leads out of HUB by itself. */
#include "cli/fetch/hf_home.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/hub.h"

enum { TOKEN_MAX = 4096, COMMIT_MAX = 256 };

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static still_status take(sti_buf *b, char **out, still_error *err)
{
    if (b->failed) {
        sti_buf_free(b);
        return sti_fail_memory(err, "path", b->n);
    }
    *out = b->p;
    return STILL_OK;
}

/* The value of a variable as a path, "~/" being the home folder, with `below` after it. */
static still_status expand(const char *value, const char *below, char **out,
                           still_error *err)
{
    sti_buf path = {0};
    if (value[0] == '~' && (value[1] == '/' || !value[1])) {
        char *home;
        STI_TRY(cli_home(&home, err));
        sti_buf_printf(&path, "%s%s%s", home, value + 1, below);
        free(home);
    } else {
        sti_buf_printf(&path, "%s%s", value, below);
    }
    return take(&path, out, err);
}

/* HF_HOME/below. */
static still_status in_home(const char *below, char **out, still_error *err)
{
    const char *home = variable("HF_HOME"), *cache = variable("XDG_CACHE_HOME");
    sti_buf path = {0};
    if (home) return expand(home, below, out, err);
    sti_buf_printf(&path, "/huggingface%s", below);
    if (path.failed) return sti_fail_memory(err, "path", 0);
    const still_status status = expand(cache ? cache : "~/.cache", path.p, out, err);
    sti_buf_free(&path);
    return status;
}

still_status cli_hf_cache(char **out, still_error *err)
{
    const char *hub = variable("HF_HUB_CACHE");
    if (!hub) hub = variable("HUGGINGFACE_HUB_CACHE"); /* its older name */
    *out = NULL;
    return hub ? expand(hub, "", out, err) : in_home("/hub", out, err);
}

/* ---- Snapshots ----------------------------------------------------------- */

static bool plain_name(const char *name)
{
    return *name && *name != '.' && strlen(name) < COMMIT_MAX && !strchr(name, '/');
}

/* The commit of FOLDER/refs/main; false: there is none. */
static bool main_commit(const char *folder, char out[COMMIT_MAX])
{
    char *text = NULL;
    size_t n;
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/refs/main", folder);
    const bool read =
        !path.failed && cli_read(path.p, COMMIT_MAX, &text, &n, NULL) == STILL_OK;
    if (read) {
        text[strcspn(text, " \t\r\n")] = 0;
        snprintf(out, COMMIT_MAX, "%s", plain_name(text) ? text : "");
    }
    free(text);
    sti_buf_free(&path);
    return read && out[0];
}

/* The one folder in FOLDER/snapshots; false: there is none, or there are several. */
static bool only_commit(const char *folder, char out[COMMIT_MAX])
{
    sti_buf path = {0};
    int found = 0;
    sti_buf_printf(&path, "%s/snapshots", folder);
    DIR *dir = path.failed ? NULL : opendir(path.p);
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (plain_name(e->d_name)) {
            found++;
            snprintf(out, COMMIT_MAX, "%s", e->d_name);
        }
    if (dir) closedir(dir);
    sti_buf_free(&path);
    return found == 1;
}

still_status cli_hf_snapshot(const char *repo, char **out, still_error *err)
{
    char *cache, commit[COMMIT_MAX] = "";
    struct stat st;
    *out = NULL;
    if (!cli_hub_is_repo(repo)) return STILL_OK;
    const char *slash = strchr(repo, '/');
    STI_TRY(cli_hf_cache(&cache, err));
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/models--%.*s--%s", cache, (int)(slash - repo), repo,
                   slash + 1);
    free(cache);
    if (path.failed) return sti_fail_memory(err, "path", 0);
    if (stat(path.p, &st) || !S_ISDIR(st.st_mode) ||
        !(main_commit(path.p, commit) || only_commit(path.p, commit))) {
        sti_buf_free(&path);
        return STILL_OK;
    }
    sti_buf_printf(&path, "/snapshots/%s", commit);
    STI_TRY(take(&path, out, err));
    if (stat(*out, &st) == 0 && S_ISDIR(st.st_mode)) return STILL_OK;
    free(*out);
    *out = NULL;
    return STILL_OK;
}

bool cli_hf_repo_of(const char *folder, char *out, size_t room)
{
    const char *org = folder + strlen("models--");
    const char *name = strncmp(folder, "models--", 8) ? NULL : strstr(org, "--");
    if (!name) return false;
    const int n = snprintf(out, room, "%.*s/%s", (int)(name - org), org, name + 2);
    return n > 0 && (size_t)n < room && cli_hub_is_repo(out);
}

/* ---- The token ----------------------------------------------------------- */

/* One word, without the white space after it. `from` is where it was found. */
static still_status check(char *token, const char *from, still_error *err)
{
    char *end = token + strlen(token);
    while (end > token && (unsigned char)end[-1] <= ' ') *--end = 0;
    for (const char *c = token; *c || c == token; c++)
        if ((unsigned char)*c <= ' ' || *c == 127)
            return sti_fail(err, STILL_E_ARG, "%s: holds no token (one word expected)",
                            from);
    return STILL_OK;
}

still_status cli_hf_token(const char *file, char **token, bool *asked, still_error *err)
{
    size_t n;
    const char *env = variable("HF_TOKEN"), *from = file;
    char *own = NULL;
    still_status status = STILL_OK;
    *token = NULL;
    *asked = true;
    if (!env) env = variable("HUGGING_FACE_HUB_TOKEN"); /* its older name */
    if (file) {
        STI_TRY(cli_read(file, TOKEN_MAX, token, &n, err));
    } else if (env) {
        *token = sti_strdup(env);
        from = "HF_TOKEN";
        if (!*token) return sti_fail_memory(err, "token", strlen(env));
    } else {
        *asked = false;
        const char *path = variable("HF_TOKEN_PATH");
        STI_TRY(path ? expand(path, "", &own, err) : in_home("/token", &own, err));
        from = own;
        if (access(own, F_OK) == 0) status = cli_read(own, TOKEN_MAX, token, &n, err);
    }
    if (status == STILL_OK && *token) status = check(*token, from, err);
    free(own);
    if (status != STILL_OK) {
        free(*token);
        *token = NULL;
    }
    return status;
}

bool cli_hf_offline(void)
{
    static const char *const yes[] = {"1", "on", "yes", "true"};
    const char *value = variable("HF_HUB_OFFLINE");
    for (size_t i = 0; value && i < sizeof yes / sizeof *yes; i++)
        if (!strcasecmp(value, yes[i])) return true;
    return false;
}
