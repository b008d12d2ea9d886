/* output.c - standard output, error lines and figures for people.
 *
 * Results go to stdout through stdio; errors are checked at flushes and at the end, so
 * that commands need not check every print. A reader that has gone (EPIPE) is a normal
 * end, anything else a failure. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/process.h"
#include "base/utf8.h"
#include "cli/cli.h"

static void print_line(const char *prefix, const char *suffix, const char *fmt,
                       va_list ap)
{
    char text[1400];
    vsnprintf(text, sizeof text, fmt, ap);
    sti_utf8_harmless(text, strlen(text), false); /* arguments are untrusted */
    fflush(stdout);
    fprintf(stderr, "still: %s%s%s\n", prefix, text, suffix);
}

int(cli_fail)(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    print_line("", "", fmt, ap);
    va_end(ap);
    return CLI_FAILED;
}

void cli_warn(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    print_line("warning: ", "", fmt, ap);
    va_end(ap);
}

int(cli_usage)(const char *command, const char *fmt, ...)
{
    char suffix[80];
    snprintf(suffix, sizeof suffix, " (see 'still help%s%s')", command ? " " : "",
             command ? command : "");
    va_list ap;
    va_start(ap, fmt);
    print_line("", suffix, fmt, ap);
    va_end(ap);
    return CLI_USAGE;
}

int cli_fail_error(const still_error *err)
{
    if (err->code == STILL_E_CANCELLED || cli_interrupted()) return CLI_INTERRUPTED;
    return cli_fail("%s", err->text);
}

/* Formatted text, made harmless. */
static void print_text(FILE *to, const char *fmt, va_list ap)
{
    char small[1024], *text = small;
    va_list again;
    va_copy(again, ap);
    const int n = vsnprintf(small, sizeof small, fmt, ap);
    if (n >= (int)sizeof small && (text = malloc((size_t)n + 1)))
        vsnprintf(text, (size_t)n + 1, fmt, again);
    va_end(again);
    if (!text) text = small; /* no memory: its beginning */
    const size_t length = n < 0 ? 0 : strlen(text);
    sti_utf8_harmless(text, length, true);
    fwrite(text, 1, length, to);
    if (text != small) free(text);
}

void cli_print(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    print_text(stdout, fmt, ap);
    va_end(ap);
}

void cli_note(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    print_text(stderr, fmt, ap);
    va_end(ap);
}

const char *cli_line(char *out, size_t room, const char *text)
{
    snprintf(out, room, "%s", text);
    sti_utf8_harmless(out, strlen(out), false);
    return out;
}

void cli_put(const char *text, size_t n)
{
    sti_buf plain = {0};
    if (isatty(STDOUT_FILENO)) {
        sti_buf_put(&plain, text, n);
        n = plain.failed ? 0 : n;
        if (n) sti_utf8_harmless(plain.p, n, true);
        text = plain.p;
    }
    if (n) fwrite(text, 1, n, stdout);
    sti_buf_free(&plain);
}

bool cli_flush(void)
{
    return fflush(stdout) == 0 && !ferror(stdout);
}

/* The error may have occurred in an earlier implicit flush, whose errno is lost; a pipe
 * without a reader still gives POLLERR. */
static bool reader_left(void)
{
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&out, 1, 0) == 1 && (out.revents & POLLERR);
}

int cli_finish(int status)
{
    if (cli_flush() || reader_left()) return status;
    return cli_fail("cannot write to standard output (disk full?)");
}

int cli_print_json(json_t *object)
{
    char *text = object ? sti_json_text(object, JSON_COMPACT | JSON_REAL_PRECISION(12) |
                                                    JSON_ENCODE_ANY)
                        : NULL;
    json_decref(object);
    if (!text) return cli_fail("out of memory while writing JSON");
    cli_put(text, strlen(text));
    cli_put("\n", 1);
    free(text);
    cli_flush();
    return CLI_OK;
}

json_t *cli_json_text(const char *text, size_t n)
{
    if (!text) return json_string("");
    json_t *string = json_stringn(text, n);
    if (string || !n) return string;
    sti_buf clean = {0};
    for (size_t i = 0; i < n;) {
        size_t bad;
        bool cut;
        const size_t length = sti_utf8_char(text + i, n - i, &bad, &cut);
        if (length)
            sti_buf_put(&clean, text + i, length);
        else
            sti_buf_puts(&clean, STI_UTF8_REPLACEMENT);
        i += length ? length : 1;
    }
    if (!clean.failed) string = json_stringn(clean.p, clean.n);
    sti_buf_free(&clean);
    return string;
}

const char *cli_bytes(char buf[32], uint64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    int u = 0;
    while (value >= 1000 && u < 6) {
        value /= 1024;
        u++;
    }
    snprintf(buf, 32, "%.*f %s", u && value < 100 ? (value < 10 ? 2 : 1) : 0, value,
             unit[u]);
    return buf;
}

const char *cli_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

double cli_now(void)
{
    return sti_now();
}

uint64_t cli_peak_rss(void)
{
    return sti_peak_rss();
}

still_status cli_read(const char *path, size_t cap, char **out, size_t *n,
                      still_error *err)
{
    *out = NULL;
    bool standard = !strcmp(path, "-");
    const char *name = standard ? "standard input" : path;
    FILE *f = standard ? stdin : fopen(path, "rb");
    if (!f) return sti_fail(err, STILL_E_IO, "%s: %s", name, strerror(errno));

    still_status status = STILL_OK;
    sti_buf text = {0};
    char part[65536];
    size_t got;
    sti_buf_put(&text, "", 0); /* never NULL */
    errno = 0;
    while ((got = fread(part, 1, sizeof part, f)) > 0 && text.n <= cap)
        sti_buf_put(&text, part, got);
    if (cli_interrupted())
        status = sti_fail(err, STILL_E_CANCELLED, "interrupted");
    else if (ferror(f))
        status = sti_fail(err, STILL_E_IO, "%s: %s", name, strerror(errno));
    else if (text.n > cap)
        status =
            sti_fail(err, STILL_E_LIMIT, "%s: larger than %zu MiB", name, cap >> 20);
    else if (text.failed)
        status = sti_fail_memory(err, name, text.n);
    if (!standard) fclose(f);
    if (status != STILL_OK) {
        sti_buf_free(&text);
        return status;
    }
    *out = text.p;
    *n = text.n;
    return STILL_OK;
}
