/* settings.c - see settings.h.
 *
 * The file has lines NAME = VALUE, NAME being that of an option without its dashes, and
 * sections [COMMAND]. Above the first section a line holds for every command that has the
 * option, in a section for that command. # begins a comment line. A name that no command
 * has is an error, so that a typing error does not go unnoticed. STILL_TOP_K=40 is the same
 * as a line top-k = 40; variables that name no option are somebody else's. */
#include "cli/settings.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/buf.h"
#include "cli/fetch/cache.h"
#include "cli/near.h"

enum { MOST = 1 << 20, NAME_ROOM = 64 };

/* ---- One setting --------------------------------------------------------- */

static bool is_one_of(const char *value, const char *words)
{
    char word[16];
    while (cli_next_word(&words, word, sizeof word))
        if (!strcasecmp(word, value)) return true;
    return false;
}

/* `said` is the place for errors. */
static int apply(const cli_command *c, const cli_option *o, const char *said,
                 const char *value, cli_options *options)
{
    if (o->kind == CLI_STRINGS || !strcmp(o->name, "help"))
        return cli_usage(c->name, "%s: --%s is for the command line only", said,
                         o->name);
    if (o->kind != CLI_FLAG) return cli_set_option_said(c, o, said, value, options);
    if (is_one_of(value, "1 true yes on"))
        return cli_set_option_said(c, o, said, value, options);
    if (is_one_of(value, "0 false no off")) {
        *(bool *)((char *)options + o->at) = false;
        return CLI_OK;
    }
    return cli_usage(c->name, "%s: '%s' is neither true nor false", said, value);
}

/* ---- The file ------------------------------------------------------------ */

static char *trim(char *text)
{
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) *--end = 0;
    return text;
}

/* Whether any command has an option of this name; *near: one that was meant. */
static bool known(const char *name, cli_near *near)
{
    for (const cli_option *o = cli_option_table; o->name; o++) {
        if (!strcmp(o->name, name)) return true;
        cli_near_consider(near, name, o->name);
    }
    for (size_t i = 0; cli_alias_table[i][0]; i++)
        if (!strcmp(cli_alias_table[i][0], name)) return true;
    return false;
}

/* One line; *section is the command it is for, NULL: all. */
static int read_line(const cli_command *c, char *line, const char *place,
                     const cli_command **section, cli_options *o)
{
    line = trim(line);
    const size_t n = strlen(line);
    if (!n || line[0] == '#') return CLI_OK;
    if (line[0] == '[' && line[n - 1] == ']') {
        line[n - 1] = 0;
        const char *name = trim(line + 1);
        *section = cli_command_find(name);
        if (*section) return CLI_OK;
        const char *near = cli_command_near(name);
        return cli_usage(NULL, "%s: no command '%s'%s%s", place, name,
                         near ? ", did you mean " : "", near ? near : "");
    }
    char *equals = strchr(line, '=');
    if (!equals)
        return cli_usage(NULL, "%s: expected NAME = VALUE or [COMMAND]", place);
    *equals = 0;
    const char *name = trim(line), *value = trim(equals + 1);
    cli_near near = {0};
    if (!known(name, &near))
        return cli_usage(NULL, "%s: no option '%s'%s%s", place, name,
                         near.name ? ", did you mean " : "",
                         near.name ? near.name : "");
    const cli_command *of = *section ? *section : c;
    const cli_option *option = cli_option_find(of, name, strlen(name));
    if (*section && !option)
        return cli_usage(NULL, "%s: '%s' has no option '%s'", place, (*section)->name,
                         name);
    if (!option || of != c) return CLI_OK; /* another command's */
    char said[1200];
    snprintf(said, sizeof said, "%s: %s", place, name);
    return apply(c, option, said, value, o);
}

/* $XDG_CONFIG_HOME/still/config; NULL: no memory or no home. */
static char *config_path(void)
{
    const char *folder = getenv("XDG_CONFIG_HOME");
    sti_buf path = {0};
    char *home = NULL;
    if (folder && folder[0] == '/')
        sti_buf_printf(&path, "%s/still/config", folder);
    else if (cli_home(&home, NULL) == STILL_OK)
        sti_buf_printf(&path, "%s/.config/still/config", home);
    free(home);
    if (path.failed) sti_buf_free(&path);
    return path.p;
}

static int read_file(const cli_command *c, cli_options *o, char **text)
{
    still_error err;
    size_t n;
    char *path = config_path(), place[1024];
    int status = CLI_OK;
    if (!path || access(path, F_OK) != 0) {
        free(path);
        return CLI_OK;
    }
    if (cli_read(path, MOST, text, &n, &err)) {
        free(path);
        return cli_fail_error(&err);
    }
    const cli_command *section = NULL;
    char *rest = *text;
    for (int line = 1; rest && status == CLI_OK; line++) {
        snprintf(place, sizeof place, "%s:%d", path, line);
        char *this_line = strsep(&rest, "\n");
        status = read_line(c, this_line, place, &section, o);
    }
    free(path);
    return status;
}

/* ---- The environment ----------------------------------------------------- */

/* STILL_TOP_K of top-k. Returns out. */
static const char *variable_of(const char *name, char out[NAME_ROOM])
{
    snprintf(out, NAME_ROOM, "STILL_%s", name);
    for (char *p = out; *p; p++)
        *p = (char)(*p == '-' ? '_' : toupper((unsigned char)*p));
    return out;
}

static int read_variable(const cli_command *c, const cli_option *row, const char *name,
                         cli_options *o)
{
    char variable[NAME_ROOM];
    const char *value = getenv(variable_of(name, variable));
    return value && *value ? apply(c, row, variable, value, o) : CLI_OK;
}

int cli_settings(const cli_command *c, cli_options *o, char **text)
{
    *text = NULL;
    int status = read_file(c, o, text);
    for (size_t i = 0; cli_alias_table[i][0] && status == CLI_OK; i++) {
        const char *name = cli_alias_table[i][0];
        const cli_option *row = cli_option_find(c, name, strlen(name));
        if (row && strcmp(row->name, name) != 0)
            status = read_variable(c, row, name, o);
    }
    for (const cli_option *row = cli_option_table; row->name && status == CLI_OK; row++)
        if (row->commands & c->bit) status = read_variable(c, row, row->name, o);
    return status;
}
