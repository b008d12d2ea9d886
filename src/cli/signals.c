/* signals.c - Ctrl-C as a flag, and failing writes as errors.
 *
 * The flag is the one mutable global of the program: a signal handler takes no
 * argument. Handlers are installed without SA_RESTART, so a read that waits for the
 * user returns and the flag is seen. */
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "cli/cli.h"

static volatile sig_atomic_t signals_seen;

static void on_signal(int number)
{
    (void)number;
    if (++signals_seen > 1) _exit(CLI_INTERRUPTED);
}

void cli_signals_install(void)
{
    struct sigaction on = {.sa_handler = on_signal};
    sigemptyset(&on.sa_mask);
    sigaction(SIGINT, &on, NULL);
    sigaction(SIGTERM, &on, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file past `ulimit -f` is an error like a full disk */
}

bool cli_interrupted(void)
{
    return signals_seen > 0;
}

void cli_interrupt_clear(void)
{
    signals_seen = 0;
}
