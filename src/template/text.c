/* text.c - strings as they grow, and values as Python prints them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/value.h"

/* ---- Growing ------------------------------------------------------------- */

static bool reserve(sti_run *r, sti_tout *o, size_t n)
{
    if (n > r->most_output || o->n > r->most_output - n) {
        sti_run_fail(r, STILL_E_LIMIT, "the text grows beyond %zu MiB",
                     r->most_output >> 20);
        return false;
    }
    if (!sti_run_step(r, n / 64)) return false;
    if (o->n + n <= o->capacity) return true;
    size_t capacity = o->capacity ? o->capacity : n < 32 ? 32 : n;
    while (capacity < o->n + n) capacity *= 2;
    char *p = sti_run_take(r, capacity, 2);
    if (!p) return false;
    unsigned char *mark = (unsigned char *)p + capacity;
    if (o->n) {
        memcpy(p, o->p, o->n);
        memcpy(mark, o->mark, o->n);
    }
    *o = (sti_tout){p, mark, o->n, capacity};
    return true;
}

void sti_tout_room(sti_run *r, sti_tout *o, size_t n)
{
    if (n) reserve(r, o, n);
}

void sti_tout_put(sti_run *r, sti_tout *o, const char *p, size_t n, unsigned char mark)
{
    if (!n || !reserve(r, o, n)) return;
    memcpy(o->p + o->n, p, n);
    memset(o->mark + o->n, mark, n);
    o->n += n;
}

void sti_tout_puts(sti_run *r, sti_tout *o, const char *s)
{
    sti_tout_put(r, o, s, strlen(s), 0);
}

void sti_tout_part(sti_run *r, sti_tout *o, const sti_tstr *s, size_t from, size_t n)
{
    if (!s->mark) {
        sti_tout_put(r, o, s->p + from, n, s->all);
    } else if (n && reserve(r, o, n)) {
        memcpy(o->p + o->n, s->p + from, n);
        memcpy(o->mark + o->n, s->mark + from, n);
        o->n += n;
    }
}

sti_tval sti_tout_take(sti_run *r, sti_tout *o)
{
    const sti_tstr s = {
        .p = o->n ? o->p : "", .mark = o->n ? o->mark : NULL, .n = o->n};
    return sti_t_sub(r, &s, 0, s.n);
}

/* ---- Numbers ------------------------------------------------------------- */

/* The fewest digits that give the number back; from 1e16 on and below 1e-4 with an
 * exponent. */
void sti_t_real_text(double f, char *out)
{
    char digits[40];
    if (!isfinite(f)) {
        snprintf(out, 40, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    int precision = 0;
    do snprintf(digits, sizeof digits, "%.*e", precision, f);
    while (strtod(digits, NULL) != f && ++precision < 17);
    const long exponent = strtol(strchr(digits, 'e') + 1, NULL, 10);
    if (exponent < -4 || exponent >= 16) {
        snprintf(out, 40, "%.*e", precision, f);
    } else {
        snprintf(out, 40, "%.*f", precision > exponent ? precision - (int)exponent : 1,
                 f);
    }
    char *comma = strchr(out, ','); /* of the program's locale */
    if (comma) *comma = '.';
}

/* ---- str() and repr() ---------------------------------------------------- */

static bool printable(uint32_t c)
{
    return c >= 0x20 && !(c >= 0x7F && c < 0xA1) && c != 0xAD &&
           !(c >= 0x2028 && c <= 0x202E) && !(sti_t_space(c) && c != ' ') &&
           !(c >= 0x200B && c <= 0x200F) && !(c >= 0x2060 && c <= 0x206F) &&
           c != 0xFEFF && !(c >= 0xE000 && c < 0xF900) && c < 0xE0000;
}

static void repr_string(sti_run *r, sti_tout *o, const sti_tstr *s)
{
    const bool twice = memchr(s->p, '\'', s->n) && !memchr(s->p, '"', s->n);
    const char quote = twice ? '"' : '\'';
    sti_tout_put(r, o, &quote, 1, 0);
    for (size_t i = 0, len; i < s->n && sti_run_step(r, 1); i += len) {
        char room[12];
        const uint32_t c = sti_utf8_decode(s->p + i, &len);
        const unsigned char mark = sti_t_mark(s, i);
        if (c == (unsigned char)quote || c == '\\')
            snprintf(room, sizeof room, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(room, sizeof room, "\\%c",
                     c == '\n'   ? 'n'
                     : c == '\r' ? 'r'
                                 : 't');
        else if (printable(c))
            room[0] = 0;
        else
            snprintf(room, sizeof room,
                     c < 0x100     ? "\\x%02x"
                     : c < 0x10000 ? "\\u%04x"
                                   : "\\U%08x",
                     (unsigned)c);
        if (room[0])
            sti_tout_put(r, o, room, strlen(room), mark);
        else
            sti_tout_part(r, o, s, i, len);
    }
    sti_tout_put(r, o, &quote, 1, 0);
}

static void repr_list(sti_run *r, sti_tout *o, const sti_tlist *l)
{
    const bool tuple = l->shape == STI_T_TUPLE || l->shape == STI_T_GROUP;
    const char *view = l->shape == STI_T_KEYS     ? "dict_keys("
                       : l->shape == STI_T_VALUES ? "dict_values("
                       : l->shape == STI_T_ITEMS  ? "dict_items("
                                                  : NULL;
    if (view) sti_tout_puts(r, o, view);
    sti_tout_puts(r, o, tuple ? "(" : "[");
    for (size_t i = 0; i < l->n && !r->failed; i++) {
        if (i) sti_tout_puts(r, o, ", ");
        sti_tout_repr(r, o, l->v[i]);
    }
    sti_tout_puts(r, o, tuple ? (l->n == 1 ? ",)" : ")") : "]");
    if (view) sti_tout_puts(r, o, ")");
}

static void repr_dict(sti_run *r, sti_tout *o, const sti_tdict *d)
{
    sti_tout_puts(r, o, "{");
    for (size_t i = 0; i < d->n && !r->failed; i++) {
        if (i) sti_tout_puts(r, o, ", ");
        sti_tout_repr(r, o, d->pair[i].key);
        sti_tout_puts(r, o, ": ");
        sti_tout_repr(r, o, d->pair[i].v);
    }
    sti_tout_puts(r, o, "}");
}

void sti_tout_repr(sti_run *r, sti_tout *o, sti_tval v)
{
    char room[48];
    if (!sti_run_enter(r)) v = STI_T_UNDEF;
    switch (v.kind) {
    case STI_T_UNDEFINED:
    case STI_T_MISSING: sti_tout_puts(r, o, "Undefined"); break;
    case STI_T_NONE: sti_tout_puts(r, o, "None"); break;
    case STI_T_BOOL: sti_tout_puts(r, o, v.u.b ? "True" : "False"); break;
    case STI_T_INT:
        snprintf(room, sizeof room, "%lld", (long long)v.u.i);
        sti_tout_puts(r, o, room);
        break;
    case STI_T_REAL:
        sti_t_real_text(v.u.f, room);
        sti_tout_puts(r, o, room);
        break;
    case STI_T_STRING:
        if (v.u.s->safe) sti_tout_puts(r, o, "Markup(");
        repr_string(r, o, v.u.s);
        if (v.u.s->safe) sti_tout_puts(r, o, ")");
        break;
    case STI_T_DICT: repr_dict(r, o, v.u.d); break;
    case STI_T_LIST:
        if (v.u.l->shape != STI_T_LAZY && v.u.l->shape != STI_T_RANGE) {
            repr_list(r, o, v.u.l);
            break;
        }
    /* fall through */
    default:
        sti_run_fail(r, STILL_E_FORMAT, "%s cannot be printed", sti_t_kind_name(v));
    }
    sti_run_leave(r);
}

void sti_tout_str(sti_run *r, sti_tout *o, sti_tval v)
{
    if (v.kind == STI_T_STRING)
        sti_tout_part(r, o, v.u.s, 0, v.u.s->n);
    else if (v.kind != STI_T_UNDEFINED)
        sti_tout_repr(r, o, v);
}

const sti_tstr *sti_t_str(sti_run *r, sti_tval v)
{
    static const sti_tstr nothing = {.p = "", .n = 0};
    sti_tout out = {0};
    if (v.kind == STI_T_STRING) return v.u.s;
    sti_tout_str(r, &out, v);
    const sti_tval s = sti_tout_take(r, &out);
    return r->failed ? &nothing : s.u.s;
}

const sti_tstr *sti_t_escape(sti_run *r, const sti_tstr *s)
{
    static const struct {
        char c;
        const char *text;
    } known[] = {
        {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&#34;"}, {'\'', "&#39;"}};
    sti_tout out = {0};
    if (s->safe) return s;
    for (size_t i = 0; i < s->n && sti_run_step(r, 1); i++) {
        size_t k = 0;
        while (k < 5 && known[k].c != s->p[i]) k++;
        if (k < 5)
            sti_tout_put(r, &out, known[k].text, strlen(known[k].text),
                         sti_t_mark(s, i));
        else
            sti_tout_part(r, &out, s, i, 1);
    }
    const sti_tval v = sti_tout_take(r, &out);
    return r->failed ? s : v.u.s;
}
