/* csv.c - see csv.h. */
#include "cli/data/csv.h"

#include <string.h>

#include "base/utf8.h"

void cli_csv_open(cli_csv *c, const char *what, const char *p, size_t n)
{
    *c = (cli_csv){.what = what, .p = p, .n = n, .next = 1};
    if (n >= 3 && memcmp(p, "\xEF\xBB\xBF", 3) == 0) c->at = 3;
}

void cli_csv_close(cli_csv *c)
{
    sti_buf_free(&c->text);
}

const char *cli_csv_field(const cli_csv *c, int i)
{
    return c->text.p + c->start[i];
}

static still_status bad(const cli_csv *c, const char *why, still_error *err)
{
    return sti_fail(err, STILL_E_FORMAT, "%s:%zu: %s", c->what, c->line, why);
}

/* Moves behind a quoted part, whose opening quote was read. False: the text ends in it. */
static bool quoted(cli_csv *c)
{
    while (c->at < c->n) {
        const char *quote = memchr(c->p + c->at, '"', c->n - c->at);
        const size_t end = quote ? (size_t)(quote - c->p) : c->n;
        for (size_t i = c->at; i < end; i++) c->next += c->p[i] == '\n';
        sti_buf_put(&c->text, c->p + c->at, end - c->at);
        c->at = end;
        if (!quote) return false;
        c->at++;
        if (c->at == c->n || c->p[c->at] != '"') return true;
        sti_buf_put(&c->text, "\"", 1);
        c->at++;
    }
    return false;
}

/* A field up to the comma or line end behind it, which stays. A quote that is not the
 * field's first character is text. */
static still_status field(cli_csv *c, still_error *err)
{
    if (c->fields == CLI_CSV_FIELDS) return bad(c, "too many fields", err);
    const size_t begin = c->text.n;
    c->start[c->fields++] = begin;
    if (c->at < c->n && c->p[c->at] == '"') {
        c->at++;
        if (!quoted(c)) return bad(c, "the text ends inside quotes (truncated?)", err);
    }
    size_t n = 0;
    while (c->at + n < c->n && !strchr(",\r\n", c->p[c->at + n])) n++;
    sti_buf_put(&c->text, c->p + c->at, n);
    c->at += n;
    /* strchr stops at a NUL too: found here, in quotes or not. */
    const size_t length = c->text.n - begin;
    if (c->text.failed) return sti_fail_memory(err, c->what, c->text.n);
    if ((c->at < c->n && c->p[c->at] == 0) ||
        (length && memchr(c->text.p + begin, 0, length)))
        return bad(c, "a zero byte in the text", err);
    if (length && sti_utf8_span(c->text.p + begin, length) != length)
        return bad(c, "no UTF-8", err);
    if (c->text.n > CLI_CSV_ROW) return bad(c, "the row is too long", err);
    sti_buf_put(&c->text, "", 1);
    return c->text.failed ? sti_fail_memory(err, c->what, c->text.n) : STILL_OK;
}

/* Empty lines, and the end of the line that was read. */
static void pass_ends(cli_csv *c)
{
    while (c->at < c->n && (c->p[c->at] == '\r' || c->p[c->at] == '\n')) {
        c->next += c->p[c->at] == '\n';
        c->at++;
    }
}

still_status cli_csv_next(cli_csv *c, bool *more, still_error *err)
{
    *more = false;
    pass_ends(c);
    c->line = c->next;
    c->fields = 0;
    sti_buf_clear(&c->text);
    if (c->at == c->n) return STILL_OK;
    for (;;) {
        STI_TRY(field(c, err));
        if (c->at == c->n || c->p[c->at] != ',') break;
        c->at++;
    }
    *more = true;
    return STILL_OK;
}
