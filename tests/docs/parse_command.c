/* parse-command COMMAND [ARGUMENT ...]: reads a line of `still` as still does, with its own
 * tables, and does nothing. Status 0, or 2 and the line that still would print. */
#include <stdio.h>
#include <string.h>

#include "cli/options.h"

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "help";
    if (!strcmp(name, "--help") || !strcmp(name, "-h")) name = "help";
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) name = "version";
    const cli_command *command = cli_command_find(name);
    if (!command) {
        fprintf(stderr, "no command '%s'\n", name);
        return CLI_USAGE;
    }
    cli_options options;
    int status = cli_presets(command, &options);
    if (status == CLI_OK)
        status = cli_parse(command, argc > 2 ? argc - 2 : 0, argv + 2, &options);
    return status;
}
