/* main.c - the still program: find the command, parse its options, run it. */
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "cli/options.h"
#include "cli/outputs.h"
#include "cli/settings.h"

/* More threads than processors would take turns on them and wait for each other. */
static void cap_threads(cli_options *o)
{
    const int most = sti_processors();
    if (o->threads <= most) return;
    cli_warn("--threads %lld: this process may use %d processor%s, so %d thread%s",
             (long long)o->threads, most, most == 1 ? "" : "s", most,
             most == 1 ? "" : "s");
    o->threads = most;
}

/* Help must come also where a setting is wrong. */
static bool explains(const cli_command *c, int argc, char **argv)
{
    if (c->run == cli_cmd_help || c->run == cli_cmd_version ||
        c->run == cli_cmd_completion)
        return true;
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return true;
    return false;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        cli_help_overview();
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h")) name = "help";
    if (!strcmp(name, "--version") || !strcmp(name, "-V")) name = "version";

    const cli_command *command = cli_command_find(name);
    if (!command && name[0] == '-')
        return cli_usage(NULL, "unknown option '%s'; the command comes first", name);
    if (!command) {
        const char *near = cli_command_near(name);
        if (near)
            return cli_usage(NULL, "unknown command '%s', did you mean %s?", name,
                             near);
        return cli_usage(NULL, "unknown command '%s'", name);
    }
    cli_options options;
    char *settings = NULL;
    int status = cli_presets(command, &options);
    if (status == CLI_OK && !explains(command, argc - 2, argv + 2))
        status = cli_settings(command, &options, &settings);
    if (status == CLI_OK) status = cli_parse(command, argc - 2, argv + 2, &options);
    if (status == CLI_OK && options.help) {
        cli_help_command(command);
    } else if (status == CLI_OK) {
        cap_threads(&options);
        status = cli_check_outputs(command, &options);
        if (status == CLI_OK) status = command->run(&options);
    }
    free(settings);
    return status;
}

int main(int argc, char **argv)
{
    cli_signals_install();
    int status = cli_finish(dispatch(argc, argv));
    return cli_interrupted() ? CLI_INTERRUPTED : status;
}
