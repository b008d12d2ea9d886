/* outputs.c - see outputs.h. What is checked can change before the file is written, so
 * writing checks for itself; this saves the hours in between. */
#include "cli/outputs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/new_file.h"
#include "cli/fetch/cache.h"

static bool is_standard(const char *path)
{
    return strcmp(path, "-") == 0;
}

/* The folder that a path is in, "." where it names none. free() it. */
static char *folder_of(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--; /* of a folder that is named with one */
    while (n > 0 && path[n - 1] != '/') n--;
    while (n > 1 && path[n - 1] == '/') n--;
    return n ? sti_strndup(path, n) : sti_strdup(".");
}

/* 0, or the errno that creating something in this folder would give. */
static int try_folder(const char *folder)
{
    struct stat st;
    if (stat(folder, &st) != 0) return errno;
    if (!S_ISDIR(st.st_mode)) return ENOTDIR;
    return access(folder, W_OK | X_OK) == 0 ? 0 : errno;
}

static bool is_file(const struct stat *file, const char *path)
{
    struct stat st;
    return path && stat(path, &st) == 0 && st.st_ino == file->st_ino &&
           st.st_dev == file->st_dev;
}

/* Whether the command reads this file: an argument of its, or the FILE of an option. A
 * state may replace the one that it goes on from. */
static bool is_input(const cli_command *command, const cli_options *o,
                     const struct stat *file)
{
    for (int i = 0; i < o->n_args; i++)
        if (is_file(file, o->arg[i])) return true;
    for (const cli_option *row = cli_option_table; row->name; row++)
        if ((row->commands & command->bit) && row->writes == CLI_WRITES_NOTHING &&
            row->arg && !strcmp(row->arg, "FILE") &&
            strcmp(row->name, "load-state") != 0 &&
            is_file(file, *(const char *const *)((const char *)o + row->at)))
            return true;
    return false;
}

static int check(const cli_command *command, const cli_option *row, const char *path,
                 const cli_options *o)
{
    const char *name = command->name;
    struct stat st;
    still_error err;
    if (!*path) return cli_usage(name, "--%s: the name is empty", row->name);
    if (is_standard(path)) {
        if (row->writes == CLI_WRITES_TEXT) return CLI_OK;
        return cli_usage(name,
                         "--%s: standard output (-) cannot take it; ./- is a file of "
                         "that name",
                         row->name);
    }
    const bool there = stat(path, &st) == 0;
    if (row->writes == CLI_WRITES_FOLDER) {
        if (cli_make_folders(path, &err)) return cli_fail_error(&err);
        const int not = try_folder(path);
        if (not ) sti_fail_write(&err, path, not );
        return not ? cli_fail_error(&err) : CLI_OK;
    }
    if (there && S_ISDIR(st.st_mode) && row->writes != CLI_WRITES_NEW)
        return cli_fail("%s: is a folder; --%s needs the name of a file", path,
                        row->name);
    if (there && S_ISREG(st.st_mode) && is_input(command, o, &st))
        return cli_fail("%s: is read by this command; --%s needs another file", path,
                        row->name);
    if (there && !S_ISREG(st.st_mode)) return CLI_OK; /* a device, a pipe */
    char *folder = folder_of(path);
    if (!folder) return cli_fail("out of memory");
    const int why = try_folder(folder);
    free(folder);
    if (!why) return CLI_OK;
    sti_fail_write(&err, path, why);
    return cli_fail_error(&err);
}

int cli_check_outputs(const cli_command *command, cli_options *o)
{
    const char *standard = NULL;
    for (const cli_option *row = cli_option_table; row->name; row++) {
        if (!(row->commands & command->bit) || row->writes == CLI_WRITES_NOTHING)
            continue;
        const char *path = *(const char **)((char *)o + row->at);
        if (!path) continue;
        const int status = check(command, row, path, o);
        if (status != CLI_OK) return status;
        if (!is_standard(path)) continue;
        if (standard || o->json)
            return cli_usage(command->name,
                             "--%s - and --%s both write to standard output", row->name,
                             standard ? standard : "json");
        standard = row->name;
    }
    o->to_stdout = standard != NULL;
    return CLI_OK;
}

int cli_write(const char *path, const sti_buf *text)
{
    still_error err;
    if (text->failed) return cli_fail("%s: out of memory", path);
    if (is_standard(path)) {
        cli_put(text->p, text->n);
        return CLI_OK; /* cli_finish tells what went wrong */
    }
    if (sti_write_file(path, text->p, text->n, &err)) return cli_fail_error(&err);
    return CLI_OK;
}
