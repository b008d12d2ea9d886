/* terminal.c - see terminal.h. */
#include "cli/chat/terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/cli.h"

/* Marks pasted text with ESC [200~ and ESC [201~, and stops doing so. */
static const char paste_marks_on[] = "\033[?2004h", paste_marks_off[] = "\033[?2004l";

static void tell(const char *sequence, size_t n)
{
    while (n) {
        const ssize_t done = write(STDERR_FILENO, sequence, n);
        if (done < 0 && errno != EINTR) return; /* no terminal, nothing to tell */
        if (done > 0) sequence += done, n -= (size_t)done;
    }
}

bool cli_terminal_open(cli_terminal *t)
{
    t->open = false;
    if (tcgetattr(STDIN_FILENO, &t->before)) return false;
    if (pipe2(t->wake, O_NONBLOCK | O_CLOEXEC)) return false;
    t->open = true;
    t->at = t->n = 0;
    cli_terminal_quiet(t);
    tell(paste_marks_on, sizeof paste_marks_on - 1);
    return true;
}

void cli_terminal_close(cli_terminal *t)
{
    if (!t->open) return;
    tell(paste_marks_off, sizeof paste_marks_off - 1);
    tcsetattr(STDIN_FILENO, TCSADRAIN, &t->before);
    close(t->wake[0]);
    close(t->wake[1]);
    t->open = false;
}

void cli_terminal_quiet(const cli_terminal *t)
{
    struct termios quiet = t->before;
    quiet.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    quiet.c_lflag |= ISIG;
    quiet.c_cc[VMIN] = 1;
    quiet.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &quiet);
}

void cli_terminal_watch(cli_terminal *t, bool on)
{
    cli_signals_to(on ? t->wake[1] : -1);
    cli_interrupt_clear(); /* Ctrl-C that came too late for what it was meant to stop */
}

/* Stops like any program at Ctrl-Z, in the mode that the shell knows. */
static void suspend(cli_terminal *t)
{
    struct termios mine;
    const bool known = tcgetattr(STDIN_FILENO, &mine) == 0;
    tell(paste_marks_off, sizeof paste_marks_off - 1);
    tcsetattr(STDIN_FILENO, TCSADRAIN, &t->before);
    kill(getpid(), SIGSTOP);
    if (known) tcsetattr(STDIN_FILENO, TCSADRAIN, &mine);
    tell(paste_marks_on, sizeof paste_marks_on - 1);
}

/* A signal that came through the pipe, as a key; 0: none that matters. */
static int32_t key_of_signal(cli_terminal *t)
{
    unsigned char number;
    if (read(t->wake[0], &number, 1) != 1) return 0;
    switch (number) {
    case SIGINT: return CLI_KEY_INTERRUPT;
    case SIGTERM: return CLI_KEY_END;
    case SIGTSTP: suspend(t); return CLI_KEY_RESIZED;
    case SIGWINCH:
    case SIGCONT: return CLI_KEY_RESIZED;
    default: return 0;
    }
}

/* The next byte, or an event; a byte that was read waits for the next call. */
static int32_t next_byte(cli_terminal *t)
{
    while (t->at == t->n) {
        struct pollfd wait[2] = {{.fd = t->wake[0], .events = POLLIN},
                                 {.fd = STDIN_FILENO, .events = POLLIN}};
        if (poll(wait, 2, -1) < 0 && errno != EINTR) return CLI_KEY_END;
        const int32_t event = wait[0].revents ? key_of_signal(t) : 0;
        if (event) return event;
        if (!wait[1].revents) continue;
        const ssize_t n = read(STDIN_FILENO, t->byte, sizeof t->byte);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return CLI_KEY_END;
        t->at = 0;
        t->n = (unsigned)n;
    }
    return t->byte[t->at++];
}

int32_t cli_terminal_key(cli_terminal *t)
{
    char c[4];
    size_t n = 0, bad;
    bool cut;
    for (;;) {
        const int32_t b = next_byte(t);
        if (b < 0) return b; /* half a character before Ctrl-C is none */
        c[n++] = (char)b;
        if (sti_utf8_char(c, n, &bad, &cut)) return (int32_t)sti_utf8_decode(c, &n);
        if (cut && n < sizeof c) continue;
        if (n > 1) t->at--; /* it begins another one; it was read from `byte` */
        return 0xFFFD;
    }
}
