/* filters_text.c - filters that make strings and numbers. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "template/eval.h"

#define FILTER(name)                                                                   \
    static sti_tval name(sti_run *r, sti_tval v, const sti_tval *arg,                  \
                         const sti_targs *all)
#define UNUSED (void)r, (void)v, (void)arg, (void)all

/* ---- Strings ------------------------------------------------------------- */

FILTER(f_string)
{
    UNUSED;
    const sti_tstr *s = sti_t_str(r, v);
    return sti_t_sub(r, s, 0, s->n);
}

FILTER(f_lower)
{
    UNUSED;
    return sti_t_recase(r, sti_t_str(r, v), STI_T_LOWER);
}

FILTER(f_upper)
{
    UNUSED;
    return sti_t_recase(r, sti_t_str(r, v), STI_T_UPPER);
}

FILTER(f_capitalize)
{
    UNUSED;
    return sti_t_recase(r, sti_t_str(r, v), STI_T_CAPITAL);
}

FILTER(f_title)
{
    UNUSED;
    return sti_t_recase(r, sti_t_str(r, v), STI_T_TITLES);
}

FILTER(f_trim)
{
    UNUSED;
    return sti_t_stripped(r, sti_t_str(r, v), arg[0], true, true);
}

FILTER(f_replace)
{
    UNUSED;
    sti_tstr plain = *sti_t_str(r, v);
    plain.safe = false;
    const sti_tval self = sti_t_sub(r, &plain, 0, plain.n);
    const sti_tstr name = {.p = "replace", .n = 7};
    const sti_targs args = {sti_t_list(r, STI_T_PLAIN, 3).u.l, NULL};
    for (int i = 0; i < 2 && !r->failed; i++)
        sti_t_append(r, args.list, f_string(r, arg[i], NULL, NULL));
    sti_t_append(r, args.list, sti_t_int(sti_arg_int(r, arg[2], -1)));
    if (r->failed) return STI_T_UNDEF;
    return sti_call_builtin(r, sti_table_find(sti_string_methods(), &name), self,
                            &args);
}

FILTER(f_format)
{
    UNUSED;
    return sti_format_percent(r, sti_t_str(r, v), all);
}

FILTER(f_safe)
{
    UNUSED;
    return sti_t_safe(r, sti_t_str(r, v));
}

FILTER(f_escape)
{
    UNUSED;
    return sti_t_safe(r, sti_t_escape(r, sti_t_str(r, v)));
}

/* Fails unless v is a string: these filters ask for it where others take anything. */
static bool is_text(sti_run *r, sti_tval v, const char *filter)
{
    if (v.kind != STI_T_STRING)
        sti_run_fail(r, STILL_E_FORMAT, "%s: %s is no string", filter,
                     sti_t_kind_name(v));
    return !r->failed;
}

FILTER(f_indent)
{
    UNUSED;
    if (!is_text(r, v, "indent")) return STI_T_UNDEF;
    const sti_tstr *s = v.u.s;
    const sti_tval spaces = arg[0].kind == STI_T_STRING
                                ? arg[0]
                                : sti_binary(r, '*', sti_t_puts(r, " "),
                                             sti_t_int(sti_arg_int(r, arg[0], 4)));
    const bool first = sti_arg_true(r, arg[1], false),
               blank = sti_arg_true(r, arg[2], false);
    sti_tout out = {0};
    /* A newline at the end makes a last line that is empty. */
    const sti_tval ended = sti_binary(
        r, '+', (sti_tval){.kind = STI_T_STRING, .u.s = s}, sti_t_puts(r, "\n"));
    if (r->failed) return STI_T_UNDEF;
    const sti_tval lines = sti_t_lines(r, ended.u.s, false);
    for (size_t i = 0; !r->failed && i < lines.u.l->n; i++) {
        const sti_tstr *line = lines.u.l->v[i].u.s;
        if (i) sti_tout_puts(r, &out, "\n");
        if (i ? blank || line->n : first) sti_tout_str(r, &out, spaces);
        sti_tout_part(r, &out, line, 0, line->n);
    }
    const sti_tval text = sti_tout_take(r, &out);
    return s->safe && !r->failed ? sti_t_safe(r, text.u.s) : text;
}

FILTER(f_truncate)
{
    UNUSED;
    enum { LEEWAY = 5 };
    const sti_tstr *end = sti_arg_string(r, arg[2]);
    const sti_tstr dots = {.p = "...", .n = 3};
    const int64_t n = sti_t_length(r, v), most = sti_arg_int(r, arg[0], 255),
                  leeway = sti_arg_int(r, arg[3], LEEWAY);
    if (!end) end = &dots;
    const int64_t kept = most - (int64_t)sti_t_chars(end);
    if (kept < 0 || leeway < 0)
        return sti_run_fail(r, STILL_E_FORMAT, "truncate: the length is too small");
    if (r->failed || n - most <= leeway) return v;
    if (!is_text(r, v, "truncate")) return STI_T_UNDEF;
    const sti_tstr *s = v.u.s;
    sti_run_step(r, s->n / 32);
    size_t bytes = sti_t_byte_of(s, (size_t)kept);
    if (!sti_arg_true(r, arg[1], false)) {
        const char *space = memrchr(s->p, ' ', bytes);
        if (space) bytes = (size_t)(space - s->p);
    }
    sti_tout out = {0};
    sti_tout_part(r, &out, s, 0, bytes);
    sti_tout_part(r, &out, end, 0, end->n);
    return sti_tout_take(r, &out);
}

FILTER(f_center)
{
    UNUSED;
    const sti_tval self = f_string(r, v, NULL, NULL);
    const sti_tstr name = {.p = "center", .n = 6};
    sti_targs width = {sti_t_list(r, STI_T_PLAIN, 1).u.l, NULL};
    sti_t_append(r, width.list, sti_t_int(sti_arg_int(r, arg[0], 80)));
    if (r->failed) return STI_T_UNDEF;
    return sti_call_builtin(r, sti_table_find(sti_string_methods(), &name), self,
                            &width);
}

FILTER(f_wordcount)
{
    UNUSED;
    return sti_t_int(sti_t_matches(r, sti_t_str(r, v), "[\\p{L}\\p{N}_]+"));
}

FILTER(f_urlencode)
{
    UNUSED;
    if (v.kind == STI_T_DICT || v.kind == STI_T_LIST)
        return sti_run_fail(r, STILL_E_UNSUPPORTED, "urlencode takes text, not %s",
                            sti_t_kind_name(v));
    const sti_tstr *s = sti_t_str(r, v);
    sti_tout out = {0};
    for (size_t i = 0; i < s->n && sti_run_step(r, 1); i++) {
        const unsigned char c = (unsigned char)s->p[i];
        char room[4];
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                           (c >= '0' && c <= '9') || (c && strchr("_.-~/", c));
        snprintf(room, sizeof room, plain ? "%c" : "%%%02X", c);
        sti_tout_put(r, &out, room, strlen(room), sti_t_mark(s, i));
    }
    return sti_tout_take(r, &out);
}

/* transformers': json.dumps(x, ensure_ascii=False, ...). */
FILTER(f_tojson)
{
    UNUSED;
    sti_tout out = {0};
    const sti_tval indent = arg[1], separators = arg[2];
    const bool flat = indent.kind == STI_T_MISSING || indent.kind == STI_T_NONE;
    sti_tjson how = {.ascii = sti_arg_true(r, arg[0], false),
                     .sorted = sti_arg_true(r, arg[3], false)};
    const sti_tval spaces = flat || indent.kind == STI_T_STRING
                                ? indent
                                : sti_binary(r, '*', sti_t_puts(r, " "), indent),
                   item = sti_t_puts(r, flat ? ", " : ","), key = sti_t_puts(r, ": ");
    if (r->failed) return STI_T_UNDEF;
    how.indent = flat ? NULL : spaces.u.s;
    how.item = item.u.s;
    how.key = key.u.s;
    if (separators.kind == STI_T_LIST && separators.u.l->n == 2 &&
        separators.u.l->v[0].kind == STI_T_STRING &&
        separators.u.l->v[1].kind == STI_T_STRING) {
        how.item = separators.u.l->v[0].u.s;
        how.key = separators.u.l->v[1].u.s;
    } else if (separators.kind != STI_T_MISSING && separators.kind != STI_T_NONE) {
        return sti_run_fail(r, STILL_E_FORMAT, "tojson: separators are two strings");
    }
    sti_tout_json(r, &out, v, &how);
    return sti_tout_take(r, &out);
}

/* ---- Numbers ------------------------------------------------------------- */

/* A string as a number; false: it is none. White space around it is ignored. */
static bool number_of(sti_run *r, const sti_tstr *s, int base, bool whole,
                      sti_tval *out)
{
    enum { MOST = 400 };
    char text[MOST], *end;
    size_t from, to, n = 0;
    sti_run_step(r, s->n / 16);
    sti_t_strip(s, NULL, true, true, &from, &to);
    if (to == from || to - from >= MOST) return false;
    for (size_t i = from; i < to; i++)
        if (s->p[i] != '_') text[n++] = s->p[i];
    text[n] = 0;
    if (strpbrk(text, "xXpP") && base != 16) return false;
    errno = 0;
    if (whole)
        *out = sti_t_int(strtoll(text, &end, base));
    else
        *out = sti_t_real(strtod(text, &end));
    return !*end && end != text && !(whole && errno);
}

FILTER(f_int)
{
    UNUSED;
    sti_tval out = arg[0].kind == STI_T_MISSING ? sti_t_int(0) : arg[0],
             f = sti_t_real(0);
    const int64_t base = sti_arg_int(r, arg[1], 10);
    if (base < 2 || base > 36) return out;
    if (v.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, v);
    if (v.kind == STI_T_INT || v.kind == STI_T_BOOL) return sti_t_int(sti_t_whole(v));
    if (v.kind == STI_T_REAL)
        f = v;
    else if (v.kind != STI_T_STRING)
        return out;
    else if (number_of(r, v.u.s, (int)base, true, &f))
        return f;
    else if (!number_of(r, v.u.s, 10, false, &f))
        return out;
    if (fabs(f.u.f) < 9e18) return sti_t_int((int64_t)f.u.f);
    return isfinite(f.u.f)
               ? sti_run_fail(r, STILL_E_LIMIT, "a whole number beyond 64 bits")
               : out;
}

FILTER(f_float)
{
    UNUSED;
    sti_tval out = arg[0].kind == STI_T_MISSING ? sti_t_real(0) : arg[0], f;
    if (v.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, v);
    if (sti_t_number(v)) return sti_t_real(sti_t_double(v));
    return v.kind == STI_T_STRING && number_of(r, v.u.s, 10, false, &f) ? f : out;
}

FILTER(f_abs)
{
    UNUSED;
    if (v.kind == STI_T_REAL) return sti_t_real(fabs(v.u.f));
    if (!sti_t_number(v))
        return sti_run_fail(r, STILL_E_FORMAT, "abs: %s is no number",
                            sti_t_kind_name(v));
    const int64_t i = sti_t_whole(v);
    return sti_binary(r, i < 0 ? '-' : '+', sti_t_int(0), sti_t_int(i));
}

/* To the nearest, a tie to the even digit, of the number as it is in binary. */
static double round_to(double f, int64_t digits)
{
    char text[400];
    if (digits >= 0 && digits < 18 && fabs(f) < 1e22) {
        snprintf(text, sizeof text, "%.*f", (int)digits, f);
        return strtod(text, NULL);
    }
    if (digits >= 0) return f;
    const double unit = pow(10, -(double)digits);
    return isfinite(unit) ? nearbyint(f / unit) * unit : 0;
}

FILTER(f_round)
{
    UNUSED;
    const int64_t digits = sti_arg_int(r, arg[0], 0);
    const sti_tstr *method = sti_arg_string(r, arg[1]);
    if (!sti_t_number(v))
        return sti_run_fail(r, STILL_E_FORMAT, "round: %s is no number",
                            sti_t_kind_name(v));
    if (!method || sti_t_is(method, "common")) {
        if (v.kind != STI_T_REAL && digits >= 0) return sti_t_int(sti_t_whole(v));
        const double f = round_to(sti_t_double(v), digits);
        if (v.kind == STI_T_REAL) return sti_t_real(f);
        if (fabs(f) < 9e18) return sti_t_int((int64_t)f);
        return sti_run_fail(r, STILL_E_LIMIT, "a whole number beyond 64 bits");
    }
    const double unit = pow(10, (double)digits), f = sti_t_double(v) * unit;
    if (sti_t_is(method, "ceil")) return sti_t_real((ceil(f) + 0.0) / unit); /* no -0 */
    if (sti_t_is(method, "floor")) return sti_t_real((floor(f) + 0.0) / unit);
    return sti_run_fail(r, STILL_E_FORMAT,
                        "round: the method is common, ceil or floor");
}

static const sti_tbuiltin rows[] = {
    {"string", "", 0, f_string},
    {"safe", "", 0, f_safe},
    {"lower", "", 0, f_lower},
    {"upper", "", 0, f_upper},
    {"capitalize", "", 0, f_capitalize},
    {"title", "", 0, f_title},
    {"trim", "chars", 0, f_trim},
    {"replace", "old new count", 2, f_replace},
    {"format", NULL, 0, f_format},
    {"escape", "", 0, f_escape},
    {"e", "", 0, f_escape},
    {"forceescape", "", 0, f_escape},
    {"indent", "width first blank", 0, f_indent},
    {"truncate", "length killwords end leeway", 0, f_truncate},
    {"center", "width", 0, f_center},
    {"wordcount", "", 0, f_wordcount},
    {"urlencode", "", 0, f_urlencode},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, f_tojson},
    {"int", "default base", 0, f_int},
    {"float", "default", 0, f_float},
    {"abs", "", 0, f_abs},
    {"round", "precision method", 0, f_round},
};

sti_ttable sti_text_filters(void)
{
    return STI_TABLE(rows);
}
