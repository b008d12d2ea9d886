/* rm.c - still rm: out of our cache, after asking. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "cli/fetch/inventory.h"
#include "cli/fetch/remove.h"
#include "cli/options.h"

/* Whether a person at the terminal says yes. */
static bool agreed(const char *name, const char *size, const char *folder)
{
    char answer[16];
    cli_note("remove %s, %s, from %s? [y/N] ", name, size, folder);
    fflush(stderr);
    if (!fgets(answer, sizeof answer, stdin)) return false;
    return !strcasecmp(answer, "y\n") || !strcasecmp(answer, "yes\n");
}

static int remove_it(const cli_options *o, const char *name)
{
    still_error err;
    uint64_t bytes;
    char *folder, size[32], near[CLI_NAME_ROOM];
    if (cli_cache_measure(name, &bytes, &folder, &err)) {
        if (err.code == STILL_E_ARG && cli_inventory_near(name, near))
            return cli_fail("%s; did you mean %s?", err.text, near);
        return cli_fail_error(&err);
    }
    int status = CLI_OK;
    cli_bytes(size, bytes);
    if (!o->yes && !(isatty(STDIN_FILENO) && isatty(STDERR_FILENO)))
        status = cli_usage("rm", "nobody can be asked here: say --yes to remove %s, %s",
                           name, size);
    else if (!o->yes && !agreed(name, size, folder))
        status = cli_interrupted() ? CLI_INTERRUPTED : cli_fail("nothing was removed");
    free(folder);
    if (status != CLI_OK) return status;
    if (cli_cache_remove(name, &err)) return cli_fail_error(&err);
    if (o->json)
        return cli_print_json(json_pack("{s:o, s:I}", "removed",
                                        cli_json_text(name, strlen(name)), "bytes",
                                        (json_int_t)bytes));
    cli_print("%s: removed, %s\n", name, size);
    return CLI_OK;
}

int cli_cmd_rm(const cli_options *o)
{
    return remove_it(o, o->arg[0]);
}
