/* progress.c - see progress.h.
 *
 * A terminal is redrawn at most ten times a second and the line never wraps. A log
 * gets a line every ten seconds, so short work leaves none. */
#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/cli.h"

static const double TTY_SECONDS = 0.1, LOG_SECONDS = 10;
enum { MAX_COLUMNS = 100, NARROW = 50 };

void cli_progress_begin(cli_progress *p, bool quiet, const char *what, const char *unit,
                        uint64_t done, uint64_t total)
{
    *p = (cli_progress){.unit = unit, .first = done, .total = total};
    cli_line(p->what, sizeof p->what, what);
    p->on = !quiet;
    p->tty = isatty(STDERR_FILENO) == 1;
    p->start = p->last = cli_now();
}

static int columns(void)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) || size.ws_col == 0) return 80;
    return size.ws_col < MAX_COLUMNS ? size.ws_col : MAX_COLUMNS;
}

static void amount(const cli_progress *p, uint64_t value, char out[32])
{
    if (p->unit)
        snprintf(out, 32, "%llu", (unsigned long long)value);
    else
        cli_bytes(out, value);
}

/* "31.2 MiB of 98.9 MiB  12.1 MiB/s  0:05 left  note" */
static void describe_progress(const cli_progress *p, uint64_t done, double elapsed,
                              char *out, size_t capacity)
{
    char have[32], all[40] = "", speed[48], left[32] = "";
    double rate = elapsed > 0 ? (double)(done - p->first) / elapsed : 0;
    amount(p, done, have);
    if (p->total) {
        memcpy(all, " of ", sizeof " of ");
        amount(p, p->total, all + 4);
    }
    if (p->unit) {
        snprintf(speed, sizeof speed, " %s  %.*f %s/s", p->unit, rate < 10, rate,
                 p->unit);
    } else {
        char buf[32];
        snprintf(speed, sizeof speed, "  %s/s", cli_bytes(buf, (uint64_t)rate));
    }
    if (p->total > done && rate > 0) {
        double seconds = (double)(p->total - done) / rate;
        if (seconds < 360000) {
            int s = (int)(seconds + 0.5);
            if (s < 3600)
                snprintf(left, sizeof left, "  %d:%02d left", s / 60, s % 60);
            else
                snprintf(left, sizeof left, "  %d:%02d:%02d left", s / 3600,
                         s / 60 % 60, s % 60);
        }
    }
    snprintf(out, capacity, "%s%s%s%s%s%s", have, all, speed, left,
             p->note[0] ? "  " : "", p->note);
}

/* Leaves the cursor where the bar begins. */
static void draw_below(const char *text)
{
    int lines = 0;
    for (const char *at = text; *at; lines++) {
        const int n = (int)strcspn(at, "\n");
        fprintf(stderr, "\n\x1b[K%.*s", n, at);
        at += n + (at[n] == '\n');
    }
    if (lines) fprintf(stderr, "\x1b[%dA\r", lines);
}

int cli_progress_columns(void)
{
    return isatty(STDERR_FILENO) == 1 ? columns() : 0;
}

static void draw(cli_progress *p, uint64_t done, const char *text)
{
    int width = columns() - 1; /* the last column would wrap the line */
    int used = (int)(strlen(p->what) + strlen(text)) + 4;
    int bar = width - used - 7;
    if (bar > 30) bar = 30;
    fputs("\r\x1b[K", stderr);
    if (p->total && bar >= 5 && width >= NARROW) {
        double part = (double)done / (double)p->total;
        int full = part >= 1 ? bar : (int)(part * bar);
        fprintf(stderr, "%s  [", p->what);
        for (int i = 0; i < bar; i++) fputc(i < full ? '#' : '.', stderr);
        fprintf(stderr, "] %3d%%  %s", part >= 1 ? 100 : (int)(100 * part), text);
    } else {
        char line[512];
        snprintf(line, sizeof line, "%s  %s", p->what, text);
        fprintf(stderr, "%.*s", width, line);
    }
    if (p->below) draw_below(p->below);
    fflush(stderr);
}

void cli_progress_update(cli_progress *p, uint64_t done)
{
    double now = cli_now();
    if (!p->on || now - p->last < (p->tty ? TTY_SECONDS : LOG_SECONDS)) return;
    if (done < p->first) p->first = done; /* a download that had to start over */
    char text[256];
    describe_progress(p, done, now - p->start, text, sizeof text);
    if (p->tty)
        draw(p, done, text);
    else
        fprintf(stderr, "%s: %s\n", p->what, text);
    p->last = now;
    p->drawn = true;
}

void cli_progress_end(cli_progress *p)
{
    if (p->on && p->tty && p->drawn) {
        fputs(p->below ? "\r\x1b[J" : "\r\x1b[K", stderr);
        fflush(stderr);
    }
    p->drawn = false;
}

bool cli_progress_tick(void *user, uint64_t done, uint64_t total)
{
    cli_progress *p = user;
    if (total) p->total = total;
    cli_progress_update(p, done);
    return !cli_interrupted();
}
