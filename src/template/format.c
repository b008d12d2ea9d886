/* format.c - Python's two ways to put values into a string: "%s" % x and "{}".format(x).
 * Both end in a field with fill, alignment, sign, width, precision and type. */
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "template/eval.h"

typedef struct field {
    char fill[5]; /* a character */
    char align;   /* < > ^ =; 0: numbers right, others left */
    char sign;    /* + or a space: in front of numbers that are not negative */
    bool group;   /* commas between thousands */
    bool other;   /* # */
    int64_t width, precision; /* precision -1: none */
    char type;
} field;

enum { MOST_PRECISION = 100, MOST_WIDTH = 100000, DIGITS = 512 };

/* ---- A field ------------------------------------------------------------- */

static bool numeric(char type)
{
    return type && strchr("dixXobfFeEgG%", type);
}

/* Puts a comma before every three digits that end before the point. */
static void group(char *text, size_t capacity)
{
    size_t digits = strspn(text, "0123456789"), n = strlen(text);
    for (; digits > 3 && n + 2 < capacity; n++) {
        digits -= 3;
        memmove(text + digits + 1, text + digits, n - digits + 1);
        text[digits] = ',';
    }
}

static void binary(uint64_t v, char *out)
{
    int top = 63;
    while (top > 0 && !(v >> top & 1)) top--;
    for (; top >= 0; top--) *out++ = (char)('0' + (v >> top & 1));
    *out = 0;
}

/* The digits of |v| without a sign; text has room for DIGITS. */
static void digits_of(const field *f, sti_tval v, char *text)
{
    const char type = f->type;
    const bool whole = v.kind != STI_T_REAL && type && strchr("dixXob", type);
    const int precision = (int)(f->precision < 0 ? 6 : f->precision);
    if (whole || (v.kind != STI_T_REAL && !type) || (type && strchr("di", type))) {
        const int64_t i = v.kind == STI_T_REAL ? (int64_t)v.u.f : sti_t_whole(v);
        const uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
        if (type == 'b')
            binary(u, text);
        else
            snprintf(text, DIGITS,
                     type == 'x'   ? "%llx"
                     : type == 'X' ? "%llX"
                     : type == 'o' ? "%llo"
                                   : "%llu",
                     (unsigned long long)u);
        return;
    }
    const double d = sti_t_double(v), x = (d < 0 ? -d : d) * (type == '%' ? 100 : 1);
    if (!type && f->precision < 0) {
        sti_t_real_text(x, text);
        return;
    }
    switch (type) {
    case 'e': snprintf(text, DIGITS, "%.*e", precision, x); break;
    case 'E': snprintf(text, DIGITS, "%.*E", precision, x); break;
    case 'g':
    case 0: snprintf(text, DIGITS, "%.*g", precision ? precision : 1, x); break;
    case 'G': snprintf(text, DIGITS, "%.*G", precision ? precision : 1, x); break;
    case '%': snprintf(text, DIGITS, "%.*f%%", precision, x); break;
    default: snprintf(text, DIGITS, "%.*f", precision, x);
    }
}

static void pad(sti_run *r, sti_tout *o, const field *f, int64_t n)
{
    const char *fill = f->fill[0] ? f->fill : " ";
    for (int64_t i = 0; i < n && sti_run_step(r, 1); i++) sti_tout_puts(r, o, fill);
}

/* sign and text side by side in a field. */
static void put_field(sti_run *r, sti_tout *o, const field *f, const char *sign,
                      const sti_tstr *text, char align)
{
    const int64_t n = (int64_t)sti_t_chars(text) + (int64_t)strlen(sign),
                  missing = f->width > n ? f->width - n : 0;
    const int64_t before = align == '>' ? missing : align == '^' ? missing / 2 : 0;
    pad(r, o, f, before);
    sti_tout_puts(r, o, sign);
    if (align == '=') pad(r, o, f, missing);
    sti_tout_part(r, o, text, 0, text->n);
    if (align != '=') pad(r, o, f, missing - before);
}

static void put_number(sti_run *r, sti_tout *o, const field *f, sti_tval v)
{
    char text[DIGITS + 256], sign[4] = "";
    const bool negative = v.kind == STI_T_REAL ? v.u.f < 0 : sti_t_whole(v) < 0;
    if (v.kind == STI_T_REAL && !(v.u.f > -1e300 && v.u.f < 1e300)) {
        sti_run_fail(r, STILL_E_FORMAT, "a number too large to format");
        return;
    }
    if (v.kind == STI_T_REAL && f->type && strchr("dixXob", f->type) &&
        !(v.u.f > -9e18 && v.u.f < 9e18)) {
        sti_run_fail(r, STILL_E_FORMAT, "a number too large for '%c'", f->type);
        return;
    }
    digits_of(f, v, text);
    if (f->group) group(text, sizeof text);
    if (negative)
        strcpy(sign, "-");
    else if (f->sign)
        sign[0] = f->sign;
    if (f->other && f->type && strchr("xXob", f->type))
        snprintf(sign + strlen(sign), 3, "0%c", f->type);
    const sti_tstr s = {.p = text, .n = strlen(text)};
    put_field(r, o, f, sign, &s, f->align ? f->align : '>');
}

static void put_value(sti_run *r, sti_tout *o, const field *f, sti_tval v)
{
    if (f->width > MOST_WIDTH) {
        sti_run_fail(r, STILL_E_LIMIT, "a field wider than %d", MOST_WIDTH);
        return;
    }
    const bool number =
        sti_t_number(v) && (f->type ? numeric(f->type) : v.kind != STI_T_BOOL);
    if (number && f->precision > MOST_PRECISION) {
        sti_run_fail(r, STILL_E_LIMIT, "more than %d digits", MOST_PRECISION);
        return;
    }
    if (number) {
        put_number(r, o, f, v);
        return;
    }
    if (f->type && f->type != 's') {
        sti_run_fail(r, STILL_E_FORMAT, "'%c' does not take %s", f->type,
                     sti_t_kind_name(v));
        return;
    }
    const sti_tstr *s = sti_t_str(r, v);
    sti_tstr cut = *s;
    if (f->precision >= 0) cut.n = sti_t_byte_of(s, (size_t)f->precision);
    put_field(r, o, f, "", &cut, f->align ? f->align : '<');
}

static int64_t read_number(const char *p, size_t n, size_t *i)
{
    int64_t v = 0;
    for (; *i < n && p[*i] >= '0' && p[*i] <= '9'; (*i)++)
        if (v <= MOST_WIDTH) v = 10 * v + (p[*i] - '0');
    return v;
}

/* ---- "%s" % x ------------------------------------------------------------ */

/* Reads a field behind '%'; the (name) was taken. */
static field percent_field(const sti_tstr *s, size_t *i)
{
    field f = {.precision = -1};
    for (; *i < s->n && strchr("-+ 0#", s->p[*i]) && s->p[*i]; (*i)++) {
        const char c = s->p[*i];
        if (c == '-') f.align = '<';
        if (c == '+' || (c == ' ' && !f.sign)) f.sign = c;
        if (c == '#') f.other = true;
        if (c == '0') {
            f.fill[0] = '0';
            if (!f.align) f.align = '=';
        }
    }
    if (f.align == '<') f.fill[0] = 0;
    f.width = read_number(s->p, s->n, i);
    if (*i < s->n && s->p[*i] == '.') {
        (*i)++;
        f.precision = read_number(s->p, s->n, i);
    }
    if (*i < s->n) f.type = s->p[(*i)++];
    return f;
}

/* Behind "%(": the value of that name. */
static sti_tval named_value(sti_run *r, const sti_tstr *s, size_t *i,
                            const sti_targs *all)
{
    const char *close = memchr(s->p + *i, ')', s->n - *i);
    const size_t from = *i;
    if (!close) return sti_run_fail(r, STILL_E_FORMAT, "a name in a format has no end");
    *i = (size_t)(close - s->p) + 1;
    const sti_tval key = sti_t_sub(r, s, from, *i - 1 - from);
    const sti_tdict *d = all->named;
    if (!d && all->list->n == 1 && all->list->v[0].kind == STI_T_DICT)
        d = all->list->v[0].u.d;
    const sti_tval *v = d && !r->failed ? sti_t_get(r, d, key) : NULL;
    return v ? *v
             : sti_run_fail(r, STILL_E_FORMAT,
                            "a format names a value that is missing");
}

sti_tval sti_format_percent(sti_run *r, const sti_tstr *format, const sti_targs *all)
{
    sti_tout out = {0};
    size_t used = 0, from = 0;
    while (!r->failed) {
        const char *percent = memchr(format->p + from, '%', format->n - from);
        size_t i = percent ? (size_t)(percent - format->p) : format->n;
        sti_tout_part(r, &out, format, from, i - from);
        if (!percent) break;
        i++;
        sti_tval v = {.kind = STI_T_MISSING};
        if (i < format->n && format->p[i] == '(') {
            i++;
            v = named_value(r, format, &i, all);
        }
        field f = percent_field(format, &i);
        from = i;
        if (f.type == '%') {
            sti_tout_puts(r, &out, "%");
            continue;
        }
        if (v.kind == STI_T_MISSING)
            v = used < all->list->n
                    ? all->list->v[used++]
                    : sti_run_fail(r, STILL_E_FORMAT, "a format needs more values");
        if (f.type == 'r' && !r->failed) {
            sti_tout repr = {0};
            sti_tout_repr(r, &repr, v);
            v = sti_tout_take(r, &repr);
            f.type = 's';
        } else if (f.type == 's' && sti_t_number(v)) {
            v = (sti_tval){.kind = STI_T_STRING, .u.s = sti_t_str(r, v)};
        }
        if (!f.align) f.align = '>';
        if (f.align == '=' && f.type == 's') f.align = '>', f.fill[0] = 0;
        if (!f.type || !strchr("sdixXofFeEgG", f.type))
            return sti_run_fail(r, STILL_E_FORMAT, "an unknown field in a format");
        if (!r->failed) put_value(r, &out, &f, v);
    }
    const sti_tval first = all->list->n == 1 ? all->list->v[0] : STI_T_UNDEF;
    if (used < all->list->n && !all->named && first.kind != STI_T_DICT &&
        first.kind != STI_T_LIST)
        return sti_run_fail(r, STILL_E_FORMAT, "a format takes %zu of %zu values", used,
                            all->list->n);
    return sti_tout_take(r, &out);
}

/* ---- "{}".format(x) ------------------------------------------------------ */

static field brace_field(sti_run *r, const char *p, size_t n)
{
    field f = {.precision = -1};
    size_t i = 0, len = 0;
    if (n) sti_utf8_decode(p, &len);
    if (len && len < n && strchr("<>^=", p[len])) {
        memcpy(f.fill, p, len);
        f.align = p[len];
        i = len + 1;
    } else if (n && strchr("<>^=", p[0])) {
        f.align = p[i++];
    }
    if (i < n && strchr("+- ", p[i])) {
        f.sign = p[i] == '-' ? 0 : p[i];
        i++;
    }
    if (i < n && p[i] == '#') f.other = true, i++;
    if (i < n && p[i] == '0' && !f.align) {
        f.fill[0] = '0';
        f.align = '=';
        i++;
    }
    f.width = read_number(p, n, &i);
    if (i < n && p[i] == ',') f.group = true, i++;
    if (i < n && p[i] == '.') {
        i++;
        f.precision = read_number(p, n, &i);
    }
    if (i < n) f.type = p[i++];
    if (i < n || (f.type && f.type != 's' && !numeric(f.type)))
        sti_run_fail(r, STILL_E_FORMAT, "an unknown format '%.*s'",
                     (int)(n < 40 ? n : 40), p);
    return f;
}

/* name[.attribute][[key]]..., of the next value if the name is empty. */
static sti_tval brace_value(sti_run *r, const sti_tstr *s, size_t from, size_t to,
                            const sti_targs *all, size_t *used)
{
    size_t i = from;
    while (i < to && s->p[i] != '.' && s->p[i] != '[') i++;
    const sti_tval name = sti_t_sub(r, s, from, i - from);
    sti_tval v = {.kind = STI_T_MISSING};
    if (r->failed) return STI_T_UNDEF;
    size_t at = 0;
    const int64_t index = read_number(name.u.s->p, name.u.s->n, &at);
    if (at == name.u.s->n) {
        const size_t k = at ? (size_t)index : (*used)++;
        if (k < all->list->n) v = all->list->v[k];
    } else if (all->named) {
        const sti_tval *found = sti_t_get(r, all->named, name);
        if (found) v = *found;
    }
    if (v.kind == STI_T_MISSING)
        return sti_run_fail(r, STILL_E_FORMAT,
                            "a format needs a value that is missing");
    while (i < to && !r->failed) {
        const bool item = s->p[i] == '[';
        const size_t start = ++i;
        while (i < to && (item ? s->p[i] != ']' : s->p[i] != '.' && s->p[i] != '['))
            i++;
        const sti_tval key = sti_t_sub(r, s, start, i - start);
        if (!r->failed)
            v = item ? sti_item(r, v, key, NULL) : sti_attribute(r, v, key.u.s, NULL);
        i += item && i < to;
    }
    return v;
}

static void put_brace(sti_run *r, sti_tout *o, const sti_tstr *s, size_t from,
                      size_t to, const sti_targs *all, size_t *used)
{
    const char *colon = memchr(s->p + from, ':', to - from);
    size_t end = colon ? (size_t)(colon - s->p) : to;
    const char *bang = memchr(s->p + from, '!', end - from);
    const size_t name_end = bang ? (size_t)(bang - s->p) : end;
    sti_tval v = brace_value(r, s, from, name_end, all, used);
    if (r->failed) return;
    if (bang) {
        sti_tout text = {0};
        if (bang[1] == 'r')
            sti_tout_repr(r, &text, v);
        else
            sti_tout_str(r, &text, v);
        v = sti_tout_take(r, &text);
    }
    const size_t spec = colon ? end + 1 : to;
    if (spec < to && v.kind != STI_T_STRING && !sti_t_number(v)) {
        sti_run_fail(r, STILL_E_FORMAT, "%s takes no format", sti_t_kind_name(v));
        return;
    }
    const field f = brace_field(r, s->p + spec, to - spec);
    if (!r->failed) put_value(r, o, &f, v);
}

sti_tval sti_format_braces(sti_run *r, const sti_tstr *s, const sti_targs *all)
{
    sti_tout out = {0};
    size_t used = 0;
    for (size_t i = 0; i < s->n && sti_run_step(r, 1);) {
        const char c = s->p[i];
        const bool twice = i + 1 < s->n && s->p[i + 1] == c;
        if ((c == '{' || c == '}') && twice) {
            sti_tout_part(r, &out, s, i, 1);
            i += 2;
        } else if (c == '{') {
            const char *close = memchr(s->p + i, '}', s->n - i);
            if (!close)
                return sti_run_fail(r, STILL_E_FORMAT, "a { in a format has no }");
            const size_t end = (size_t)(close - s->p);
            put_brace(r, &out, s, i + 1, end, all, &used);
            i = end + 1;
        } else if (c == '}') {
            return sti_run_fail(r, STILL_E_FORMAT, "a } in a format has no {");
        } else {
            sti_tout_part(r, &out, s, i++, 1);
        }
    }
    return sti_tout_take(r, &out);
}
