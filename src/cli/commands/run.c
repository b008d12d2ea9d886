/* run.c - still run: pull what is missing, then chat or answer. */
#include <stdlib.h>

#include "cli/fetch/pull.h"
#include "cli/fetch/resolve.h"
#include "cli/options.h"

/* Whether the model is here; if not, *missing is what a pull could bring, or the reason
 * was printed and *missing is NULL. */
static int look(const cli_options *o, char **missing)
{
    still_error err;
    char *path = NULL, *adapter = NULL;
    const still_status status =
        cli_resolve_or_missing(o->arg[0], &path, &adapter, missing, &err);
    free(path);
    free(adapter);
    if (status == STILL_OK) return CLI_OK;
    if (*missing && cli_can_pull(*missing) && !cli_offline(o)) return CLI_OK;
    free(*missing);
    *missing = NULL;
    return cli_fail_error(&err);
}

int cli_cmd_run(const cli_options *o)
{
    /* First the model, then, of an adapter, its base. */
    for (int pulls = 0;; pulls++) {
        char *missing;
        still_error err;
        int status = look(o, &missing);
        if (status != CLI_OK) return status;
        if (!missing) return cli_cmd_chat(o);
        cli_pulled pulled = {0};
        if (pulls == 2)
            status = cli_fail("%s: was downloaded, but is still missing", missing);
        else if (cli_pull(o, missing, &pulled, &err))
            status = cli_fail_error(&err);
        free(pulled.path);
        free(missing);
        if (status != CLI_OK) return status;
    }
}
