/* json_read.c - reads a JSON text (RFC 8259) into jansson's values.
 *
 * jansson's own reader is not used: it ignores that its buffer for a token could not
 * grow, so for want of memory it returns names and numbers with a character missing, or
 * calls the text wrong. Its values report every failure, so this builds them directly.
 * A failure without a reason (`why`) is one of memory. */
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"

enum {
    MAX_DEPTH = 512, /* of arrays and objects; values are freed by recursion */
    MAX_NUMBER = 512 /* characters */
};

typedef struct reader {
    const char *p;
    size_t n, at;
    unsigned flags;
    int depth;
    const char *why;
    /* Decoded strings: names of the objects we are in, one behind the other, then the
     * string being read. */
    sti_buf text;
} reader;

static json_t *wrong(reader *r, const char *why)
{
    r->why = why;
    return NULL;
}

static char peek(reader *r)
{
    while (r->at < r->n && r->p[r->at] && strchr(" \t\r\n", r->p[r->at])) r->at++;
    return r->at < r->n ? r->p[r->at] : 0;
}

/* ---- Strings ------------------------------------------------------------- */

/* Four hexadecimal digits; -1: there are none. */
static int32_t read_hex(reader *r)
{
    int32_t v = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char c = r->at < r->n ? r->p[r->at] : 0;
        if (c >= '0' && c <= '9')
            v = v << 4 | (c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f')
            v = v << 4 | ((c | 32) - 'a' + 10);
        else
            return -1;
    }
    return v;
}

/* Behind "\u". */
static bool read_unicode(reader *r)
{
    const size_t start = r->at - 2;
    int32_t c = read_hex(r);
    r->why = c < 0 ? "expected four hexadecimal digits" : NULL;
    if (c >= 0xD800 && c < 0xDC00) { /* the first of a pair */
        int32_t low = -1;
        if (r->n - r->at >= 2 && memcmp(r->p + r->at, "\\u", 2) == 0) {
            r->at += 2;
            low = read_hex(r);
        }
        if (low >= 0xDC00 && low < 0xE000)
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    if (c >= 0xD800 && c < 0xE000) {
        r->at = start;
        r->why = "half a surrogate pair";
    }
    if (c == 0 && !(r->flags & STI_JSON_NUL)) r->why = "\\u0000 in a string";
    if (!r->why) {
        char utf8[4];
        sti_buf_put(&r->text, utf8, sti_utf8_encode((uint32_t)c, utf8));
    }
    return !r->why;
}

static bool read_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char c = ++r->at < r->n ? r->p[r->at] : 0;
    const char *found = c ? strchr(from, c) : NULL;
    if (!found && c != 'u') {
        r->why = "unknown escape";
        return false;
    }
    r->at++;
    if (!found) return read_unicode(r);
    sti_buf_put(&r->text, &to[found - from], 1);
    return true;
}

/* Appends the string at a quote to r->text. */
static bool read_string(reader *r)
{
    r->at++;
    for (;;) {
        const size_t start = r->at;
        size_t length = 1, bad;
        while (r->at < r->n && length) {
            const unsigned char c = (unsigned char)r->p[r->at];
            bool cut;
            if (c == '"' || c == '\\' || c < 0x20) break;
            length =
                c < 0x80 ? 1 : sti_utf8_char(r->p + r->at, r->n - r->at, &bad, &cut);
            r->at += length;
        }
        sti_buf_put(&r->text, r->p + start, r->at - start);
        if (r->at == r->n)
            r->why = "the text ends inside a string";
        else if (!length)
            r->why = "no UTF-8";
        else if ((unsigned char)r->p[r->at] < 0x20)
            r->why = "control character in a string";
        if (r->why) return false;
        if (r->p[r->at] == '"') break;
        if (!read_escape(r)) return false;
    }
    r->at++;
    return !r->text.failed;
}

static json_t *string_value(reader *r)
{
    const size_t start = r->text.n;
    json_t *v = NULL;
    if (read_string(r))
        v = json_stringn_nocheck(r->text.n > start ? r->text.p + start : "",
                                 r->text.n - start);
    r->text.n = start;
    return v;
}

/* ---- Numbers ------------------------------------------------------------- */

static size_t skip_digits(reader *r)
{
    const size_t start = r->at;
    while (r->at < r->n && r->p[r->at] >= '0' && r->p[r->at] <= '9') r->at++;
    return r->at - start;
}

/* Moves behind a number; *whole: it has neither fraction nor exponent. */
static bool skip_number(reader *r, bool *whole)
{
    *whole = true;
    if (r->p[r->at] == '-') r->at++;
    const bool zero = r->at < r->n && r->p[r->at] == '0';
    const size_t digits = skip_digits(r);
    if (digits == 0 || (zero && digits > 1)) return false;
    if (r->at < r->n && r->p[r->at] == '.') {
        *whole = false;
        r->at++;
        if (skip_digits(r) == 0) return false;
    }
    if (r->at < r->n && (r->p[r->at] | 32) == 'e') {
        *whole = false;
        r->at++;
        if (r->at < r->n && (r->p[r->at] == '+' || r->p[r->at] == '-')) r->at++;
        if (skip_digits(r) == 0) return false;
    }
    return true;
}

static json_t *number_value(reader *r)
{
    const size_t start = r->at;
    char text[MAX_NUMBER];
    bool whole;
    if (!skip_number(r, &whole)) return wrong(r, "malformed number");
    const size_t n = r->at - start;
    if (n >= sizeof text) return wrong(r, "number of too many digits");
    memcpy(text, r->p + start, n);
    text[n] = 0;
    errno = 0;
    if (whole) {
        const long long v = strtoll(text, NULL, 10);
        return errno ? wrong(r, "whole number beyond 64 bits") : json_integer(v);
    }
    char *point = strchr(text, '.');
    if (point) *point = *localeconv()->decimal_point; /* which strtod expects */
    const double v = strtod(text, NULL);
    return isfinite(v) ? json_real(v) : wrong(r, "number too large");
}

/* ---- Values -------------------------------------------------------------- */

static json_t *value(reader *r);

/* Behind ',' (true), or behind the closing bracket. False with r->why: neither is there. */
static bool goes_on(reader *r, char close)
{
    const char c = peek(r);
    if (c != ',' && c != close)
        r->why = close == ']' ? "expected ',' or ']'" : "expected ',' or '}'";
    else
        r->at++;
    return c == ',';
}

static json_t *array_value(reader *r)
{
    json_t *list = json_array();
    r->at++;
    bool more = peek(r) != ']', ok = list;
    if (!more) r->at++;
    while (more && ok) {
        json_t *v = value(r);
        ok = v && json_array_append_new(list, v) == 0;
        more = ok && goes_on(r, ']');
        ok = ok && !r->why;
    }
    if (ok) return list;
    json_decref(list);
    return NULL;
}

static bool read_member(reader *r, json_t *o)
{
    const size_t start = r->text.n;
    if (peek(r) != '"') return wrong(r, "expected a name in quotes");
    const size_t name_at = r->at;
    bool ok = read_string(r);
    sti_buf_put(&r->text, "", 1);
    ok = ok && !r->text.failed;
    if (ok && memchr(r->text.p + start, 0, r->text.n - start - 1)) {
        r->at = name_at;
        ok = wrong(r, "\\u0000 in a name");
    }
    if (ok && (r->flags & STI_JSON_ONCE) && json_object_get(o, r->text.p + start)) {
        r->at = name_at;
        ok = wrong(r, "this name occurs twice");
    }
    if (ok && peek(r) != ':') ok = wrong(r, "expected ':'");
    if (ok) {
        r->at++;
        json_t *v = value(r);
        ok = v && json_object_set_new_nocheck(o, r->text.p + start, v) == 0;
    }
    r->text.n = start;
    return ok;
}

static json_t *object_value(reader *r)
{
    json_t *o = json_object();
    r->at++;
    bool more = peek(r) != '}', ok = o;
    if (!more) r->at++;
    while (more && ok) {
        ok = read_member(r, o);
        more = ok && goes_on(r, '}');
        ok = ok && !r->why;
    }
    if (ok) return o;
    json_decref(o);
    return NULL;
}

static json_t *word_value(reader *r)
{
    static const char *const word[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        const size_t n = strlen(word[i]);
        if (r->n - r->at < n || memcmp(r->p + r->at, word[i], n) != 0) continue;
        r->at += n;
        return i == 2 ? json_null() : json_boolean(i == 0);
    }
    return wrong(r, r->at < r->n ? "expected a value" : "the text ends before a value");
}

static json_t *value(reader *r)
{
    const char c = peek(r);
    if (c == '"') return string_value(r);
    if (c == '-' || (c >= '0' && c <= '9')) return number_value(r);
    if (c != '[' && c != '{') return word_value(r);
    if (r->depth == MAX_DEPTH) return wrong(r, "nested too deeply");
    r->depth++;
    json_t *v = c == '[' ? array_value(r) : object_value(r);
    r->depth--;
    return v;
}

json_t *sti_json_next(const char *p, size_t n, size_t *at, unsigned flags,
                      const char **why)
{
    reader r = {.p = p, .n = n, .at = *at, .flags = flags};
    const char first = peek(&r);
    json_t *v = NULL;
    if (r.at < n && (flags & STI_JSON_OBJECT) && first != '{')
        wrong(&r, "not a JSON object");
    else if (r.at < n && !(flags & STI_JSON_ANY) && first != '{' && first != '[')
        wrong(&r, "expected '[' or '{'");
    else
        v = value(&r);
    sti_buf_free(&r.text);
    *at = r.at;
    *why = r.why;
    return v;
}

/* what NULL: the text is a line. */
static still_status fail_at(const char *what, const char *p, size_t at, const char *why,
                            still_error *err)
{
    size_t line = 1, start = 0;
    for (size_t i = 0; i < at; i++)
        if (p[i] == '\n') line++, start = i + 1;
    const size_t column = at - start + 1;
    if (!what) return sti_fail(err, STILL_E_FORMAT, "column %zu: %s", column, why);
    return sti_fail(err, STILL_E_FORMAT, "%s: line %zu, column %zu: %s", what, line,
                    column, why);
}

static still_status read_all(const char *what, const char *p, size_t n, unsigned flags,
                             json_t **out, still_error *err)
{
    size_t at = 0;
    const char *why;
    *out = sti_json_next(p, n, &at, flags, &why);
    if (!*out && !why) return sti_fail_memory(err, what ? what : "JSON", n);
    if (*out) {
        reader rest = {.p = p, .n = n, .at = at};
        peek(&rest);
        if (rest.at == n) return STILL_OK;
        json_decref(*out);
        *out = NULL;
        at = rest.at;
        why = "something follows the value";
    }
    return fail_at(what, p, at, why, err);
}

still_status sti_json_read(const char *what, const char *p, size_t n, unsigned flags,
                           json_t **out, still_error *err)
{
    return read_all(what, p, n, flags, out, err);
}

still_status sti_json_read_line(const char *p, size_t n, unsigned flags, json_t **out,
                                still_error *err)
{
    return read_all(NULL, p, n, flags, out, err);
}
