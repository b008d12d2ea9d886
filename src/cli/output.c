/* output.c - standard output, error lines and figures for people.
 *
 * Results go to stdout through stdio; whether they arrived is asked at flushes and
 * at the end, so that commands do not check every print. A reader that has left
 * (EPIPE) is an ordinary end, anything else a failure. */
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
#include "cli/cli.h"

static void print_line(const char *prefix, const char *suffix, const char *fmt,
                       va_list ap)
{
    char text[1400];
    vsnprintf(text, sizeof text, fmt, ap);
    for (char *c = text; *c; c++) /* arguments are untrusted: nothing raw to the tty */
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
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

void cli_put(const char *text, size_t n)
{
    fwrite(text, 1, n, stdout);
}

bool cli_flush(void)
{
    return fflush(stdout) == 0 && !ferror(stdout);
}

/* stdio may have met the error in an earlier implicit flush, where errno is lost;
 * a pipe without reader still answers POLLERR. */
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
    char *text = object ? json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(12) |
                                                 JSON_ENCODE_ANY)
                        : NULL;
    json_decref(object);
    if (!text) return cli_fail("out of memory while writing JSON");
    puts(text);
    free(text);
    cli_flush();
    return CLI_OK;
}

/* Length of the UTF-8 character at s (n bytes are left), 0 if it is not one. */
static size_t utf8_length(const unsigned char *s, size_t n)
{
    size_t length = s[0] < 0x80   ? 1
                    : s[0] < 0xc2 ? 0
                    : s[0] < 0xe0 ? 2
                    : s[0] < 0xf0 ? 3
                    : s[0] < 0xf5 ? 4
                                  : 0;
    if (length > n) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (length == 3 && s[0] == 0xe0 && s[1] < 0xa0) return 0; /* overlong */
    if (length == 3 && s[0] == 0xed && s[1] > 0x9f) return 0; /* surrogate */
    if (length == 4 && s[0] == 0xf0 && s[1] < 0x90) return 0; /* overlong */
    if (length == 4 && s[0] == 0xf4 && s[1] > 0x8f) return 0; /* past U+10FFFF */
    return length;
}

json_t *cli_json_text(const char *text, size_t n)
{
    if (!text) return json_string("");
    json_t *string = json_stringn(text, n);
    if (string || !n) return string;
    sti_buf clean = {0};
    for (size_t i = 0; i < n;) {
        size_t length = utf8_length((const unsigned char *)text + i, n - i);
        if (length)
            sti_buf_put(&clean, text + i, length);
        else
            sti_buf_puts(&clean, "\xef\xbf\xbd");
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
    sti_buf_put(&text, "", 0); /* even nothing is a string */
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
