/* signals.c - Ctrl-C as a flag, and failing writes as errors.
 *
 * What handlers read and write is the one mutable state of the program that no function
 * is given: a signal handler takes no argument. Handlers are installed without SA_RESTART,
 * so a read that waits for the user returns and the flag is seen; but a conversation
 * survives Ctrl-C, and with it a write that Ctrl-C finds at work (CLI_SIGNALS_FLAG). */
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "cli/cli.h"

static volatile sig_atomic_t signals_seen, terminated, mode, bytes_to = -1;

static void on_signal(int number)
{
    const int to = (int)bytes_to, saved = errno;
    const unsigned char byte = (unsigned char)number;
    if (number == SIGTERM) terminated = 1;
    if (to >= 0) {
        if (write(to, &byte, 1) < 0) { /* full: the reader has enough to look at */
        }
        errno = saved;
        return;
    }
    signals_seen++;
    if (mode == CLI_SIGNALS_AT_ONCE || (mode == CLI_SIGNALS_TWICE && signals_seen > 1))
        _exit(CLI_INTERRUPTED);
}

static void install(int number, int flags)
{
    struct sigaction on = {.sa_handler = on_signal, .sa_flags = flags};
    sigemptyset(&on.sa_mask);
    sigaction(number, &on, NULL);
}

void cli_signals_install(void)
{
    install(SIGINT, 0);
    install(SIGTERM, 0);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file past `ulimit -f` is an error like a full disk */
}

cli_signals cli_signals_mode(cli_signals to)
{
    const cli_signals was = (cli_signals)mode;
    const int flags = to == CLI_SIGNALS_FLAG ? SA_RESTART : 0;
    mode = to;
    install(SIGINT, flags);
    install(SIGTERM, flags);
    return was;
}

void cli_signals_to(int fd)
{
    static const int of_terminals[] = {SIGWINCH, SIGTSTP, SIGCONT};
    bytes_to = fd;
    for (size_t i = 0; i < sizeof of_terminals / sizeof *of_terminals; i++) {
        if (fd >= 0)
            install(of_terminals[i], SA_RESTART);
        else
            signal(of_terminals[i], SIG_DFL);
    }
}

bool cli_interrupted(void)
{
    return signals_seen > 0 || terminated;
}

bool cli_terminated(void)
{
    return terminated != 0;
}

void cli_interrupt_clear(void)
{
    signals_seen = 0;
}
