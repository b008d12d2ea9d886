/* methods_string.c - methods of strings. Positions are in characters, as in Python. */
#include <string.h>

#include "base/utf8.h"
#include "template/eval.h"

#define METHOD(name)                                                                   \
    static sti_tval name(sti_run *r, sti_tval self, const sti_tval *arg,               \
                         const sti_targs *all)
#define UNUSED (void)r, (void)self, (void)arg, (void)all

/* ---- Case and white space ------------------------------------------------ */

METHOD(m_upper)
{
    UNUSED;
    return sti_t_recase(r, self.u.s, STI_T_UPPER);
}

METHOD(m_lower)
{
    UNUSED;
    return sti_t_recase(r, self.u.s, STI_T_LOWER);
}

METHOD(m_title)
{
    UNUSED;
    return sti_t_recase(r, self.u.s, STI_T_TITLE);
}

METHOD(m_capitalize)
{
    UNUSED;
    return sti_t_recase(r, self.u.s, STI_T_CAPITAL);
}

METHOD(m_swapcase)
{
    UNUSED;
    return sti_t_recase(r, self.u.s, STI_T_SWAPPED);
}

METHOD(m_strip)
{
    UNUSED;
    return sti_t_stripped(r, self.u.s, arg[0], true, true);
}

METHOD(m_lstrip)
{
    UNUSED;
    return sti_t_stripped(r, self.u.s, arg[0], true, false);
}

METHOD(m_rstrip)
{
    UNUSED;
    return sti_t_stripped(r, self.u.s, arg[0], false, true);
}

/* ---- Splitting ----------------------------------------------------------- */

static void add_part(sti_run *r, sti_tval out, const sti_tstr *s, size_t from,
                     size_t to)
{
    sti_t_append(r, out.u.l, sti_t_sub(r, s, from, to - from));
}

static void turn_round(sti_tlist *l)
{
    for (size_t i = 0; i < l->n / 2; i++) {
        const sti_tval v = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = v;
    }
}

/* Bytes of the run of white space, or of anything else, at one end of s[from..to). */
static size_t run_of(const sti_tstr *s, size_t from, size_t to, bool space, bool last)
{
    const size_t n = to - from;
    size_t len;
    while (from < to) {
        size_t at = last ? to - 1 : from;
        while (last && ((unsigned char)s->p[at] & 0xC0) == 0x80) at--;
        if (sti_t_space(sti_utf8_decode(s->p + at, &len)) != space) break;
        *(last ? &to : &from) = last ? at : at + len;
    }
    return n - (to - from);
}

/* At runs of white space, at most `most` times from that end; what is left keeps the
 * white space at its other end. */
static sti_tval split_space(sti_run *r, const sti_tstr *s, int64_t most, bool last)
{
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0);
    size_t from = 0, to = s->n;
    while (!r->failed) {
        const size_t space = run_of(s, from, to, true, last);
        *(last ? &to : &from) += last ? 0 - space : space;
        if (from == to) break;
        const bool rest = most >= 0 && (int64_t)out.u.l->n == most;
        const size_t word = rest ? to - from : run_of(s, from, to, false, last);
        if (last)
            add_part(r, out, s, to - word, to);
        else
            add_part(r, out, s, from, from + word);
        *(last ? &to : &from) += last ? 0 - word : word;
    }
    if (last && !r->failed) turn_round(out.u.l);
    return out;
}

static sti_tval split_at(sti_run *r, const sti_tstr *s, const sti_tstr *sep,
                         int64_t most, bool last)
{
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0);
    size_t from = 0, to = s->n;
    if (!sep->n) return sti_run_fail(r, STILL_E_FORMAT, "an empty separator");
    while (!r->failed && (most < 0 || (int64_t)out.u.l->n < most)) {
        const size_t at = sti_t_find(r, s, sep, from, to, last);
        if (at == SIZE_MAX) break;
        if (last)
            add_part(r, out, s, at + sep->n, to);
        else
            add_part(r, out, s, from, at);
        *(last ? &to : &from) = last ? at : at + sep->n;
    }
    if (!r->failed) add_part(r, out, s, from, to);
    if (last && !r->failed) turn_round(out.u.l);
    return out;
}

static sti_tval split(sti_run *r, sti_tval self, const sti_tval *arg, bool last)
{
    const sti_tstr *sep = sti_arg_string(r, arg[0]);
    const int64_t most = sti_arg_int(r, arg[1], -1);
    if (!sti_run_step(r, self.u.s->n / 16)) return STI_T_UNDEF;
    return sep ? split_at(r, self.u.s, sep, most, last)
               : split_space(r, self.u.s, most, last);
}

METHOD(m_split)
{
    UNUSED;
    return split(r, self, arg, false);
}

METHOD(m_rsplit)
{
    UNUSED;
    return split(r, self, arg, true);
}

METHOD(m_splitlines)
{
    UNUSED;
    return sti_t_lines(r, self.u.s, sti_arg_true(r, arg[0], false));
}

static sti_tval partition(sti_run *r, sti_tval self, sti_tval separator, bool last)
{
    const sti_tstr *s = self.u.s, *sep = sti_arg_string(r, separator);
    const sti_tval out = sti_t_list(r, STI_T_TUPLE, 3);
    if (!sep || !sep->n) return sti_run_fail(r, STILL_E_FORMAT, "an empty separator");
    const size_t at = sti_t_find(r, s, sep, 0, s->n, last);
    const size_t first = at != SIZE_MAX ? at
                         : last         ? 0
                                        : s->n,
                 second = at != SIZE_MAX ? at + sep->n : first;
    add_part(r, out, s, 0, first);
    add_part(r, out, s, first, second);
    add_part(r, out, s, second, s->n);
    return out;
}

METHOD(m_partition)
{
    UNUSED;
    return partition(r, self, arg[0], false);
}

METHOD(m_rpartition)
{
    UNUSED;
    return partition(r, self, arg[0], true);
}

/* ---- Searching ----------------------------------------------------------- */

/* Bytes of the characters from arg[1] to arg[2]; false: there is no such range. */
static bool range(sti_run *r, const sti_tstr *s, const sti_tval *arg, size_t *from,
                  size_t *to)
{
    *from = 0;
    *to = s->n;
    if (arg[1].kind == STI_T_MISSING) return true;
    const int64_t n = (int64_t)sti_t_chars(s);
    int64_t a = sti_arg_int(r, arg[1], 0), b = sti_arg_int(r, arg[2], n);
    sti_run_step(r, s->n / 32);
    if (a < 0) a = a < -n ? 0 : a + n;
    if (b < 0) b = b < -n ? 0 : b + n;
    if (b > n) b = n;
    if (a > b) return false;
    *from = sti_t_byte_of(s, (size_t)a);
    *to = sti_t_byte_of(s, (size_t)b);
    return true;
}

/* Whether s[from..to) starts (ends) with `what`, a string or a tuple of them. */
static bool borders(sti_run *r, const sti_tstr *s, sti_tval what, size_t from,
                    size_t to, bool end)
{
    if (sti_t_is_tuple(what)) {
        for (size_t i = 0; i < what.u.l->n && !r->failed; i++) {
            const sti_tval one = what.u.l->v[i];
            if (one.kind != STI_T_STRING)
                sti_run_fail(r, STILL_E_FORMAT, "%s where a string is expected",
                             sti_t_kind_name(one));
            else if (borders(r, s, one, from, to, end))
                return true;
        }
        return false;
    }
    const sti_tstr *t = sti_arg_string(r, what);
    if (!t) {
        sti_run_fail(r, STILL_E_FORMAT, "%s where a string is expected",
                     sti_t_kind_name(what));
        return false;
    }
    sti_run_step(r, t->n / 64);
    return t->n <= to - from && !memcmp(s->p + (end ? to - t->n : from), t->p, t->n);
}

METHOD(m_startswith)
{
    UNUSED;
    size_t from, to;
    return sti_t_bool(range(r, self.u.s, arg, &from, &to) &&
                      borders(r, self.u.s, arg[0], from, to, false));
}

METHOD(m_endswith)
{
    UNUSED;
    size_t from, to;
    return sti_t_bool(range(r, self.u.s, arg, &from, &to) &&
                      borders(r, self.u.s, arg[0], from, to, true));
}

static int64_t find(sti_run *r, sti_tval self, const sti_tval *arg, bool last)
{
    size_t from, to;
    const sti_tstr *s = self.u.s, *what = sti_arg_string(r, arg[0]);
    if (!what || !range(r, s, arg, &from, &to)) return -1;
    const size_t at = sti_t_find(r, s, what, from, to, last);
    if (at == SIZE_MAX) return -1;
    const sti_tstr before = {.p = s->p, .n = at};
    return (int64_t)sti_t_chars(&before);
}

METHOD(m_find)
{
    UNUSED;
    return sti_t_int(find(r, self, arg, false));
}

METHOD(m_rfind)
{
    UNUSED;
    return sti_t_int(find(r, self, arg, true));
}

static sti_tval index_of(sti_run *r, sti_tval self, const sti_tval *arg, bool last)
{
    const int64_t at = find(r, self, arg, last);
    return at >= 0 ? sti_t_int(at)
                   : sti_run_fail(r, STILL_E_FORMAT, "the string is not found");
}

METHOD(m_index)
{
    UNUSED;
    return index_of(r, self, arg, false);
}

METHOD(m_rindex)
{
    UNUSED;
    return index_of(r, self, arg, true);
}

METHOD(m_count)
{
    UNUSED;
    size_t from, to;
    int64_t n = 0;
    const sti_tstr *s = self.u.s, *what = sti_arg_string(r, arg[0]);
    if (!what || !range(r, s, arg, &from, &to)) return sti_t_int(0);
    if (!what->n) {
        const sti_tstr part = {.p = s->p + from, .n = to - from};
        return sti_t_int((int64_t)sti_t_chars(&part) + 1);
    }
    for (size_t at; (at = sti_t_find(r, s, what, from, to, false)) != SIZE_MAX; n++)
        from = at + what->n;
    return sti_t_int(n);
}

/* ---- Changing ------------------------------------------------------------ */

/* An empty `old` is found before every character and at the end. */
METHOD(m_replace)
{
    UNUSED;
    const sti_tstr *s = self.u.s, *old = sti_arg_string(r, arg[0]),
                   *new = sti_arg_string(r, arg[1]);
    const int64_t most = sti_arg_int(r, arg[2], -1);
    sti_tout out = {0};
    size_t from = 0, len;
    if (!old || !new)
        return sti_run_fail(r, STILL_E_FORMAT, "replace takes two strings");
    if (s->safe) old = sti_t_escape(r, old), new = sti_t_escape(r, new);
    for (int64_t n = 0; n != most && sti_run_step(r, 1); n++) {
        const size_t at = sti_t_find(r, s, old, from, s->n, false);
        if (at == SIZE_MAX) break;
        sti_tout_part(r, &out, s, from, at - from);
        sti_tout_part(r, &out, new, 0, new->n);
        from = at + old->n;
        if (old->n) continue;
        if (from == s->n) break;
        sti_utf8_decode(s->p + from, &len);
        sti_tout_part(r, &out, s, from, len);
        from += len;
    }
    sti_tout_part(r, &out, s, from, s->n - from);
    const sti_tval v = sti_tout_take(r, &out);
    return s->safe && !r->failed ? sti_t_safe(r, v.u.s) : v;
}

METHOD(m_removeprefix)
{
    UNUSED;
    const bool is = borders(r, self.u.s, arg[0], 0, self.u.s->n, false);
    const size_t cut = is && arg[0].kind == STI_T_STRING ? arg[0].u.s->n : 0;
    return sti_t_sub(r, self.u.s, cut, self.u.s->n - cut);
}

METHOD(m_removesuffix)
{
    UNUSED;
    const bool is = borders(r, self.u.s, arg[0], 0, self.u.s->n, true);
    const size_t cut = is && arg[0].kind == STI_T_STRING ? arg[0].u.s->n : 0;
    return sti_t_sub(r, self.u.s, 0, self.u.s->n - cut);
}

METHOD(m_join)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, arg[0]);
    sti_tout out = {0};
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        if (l->v[i].kind != STI_T_STRING)
            return sti_run_fail(r, STILL_E_FORMAT, "join: %s is no string",
                                sti_t_kind_name(l->v[i]));
        if (i) sti_tout_part(r, &out, self.u.s, 0, self.u.s->n);
        sti_tout_str(r, &out, l->v[i]);
    }
    return sti_tout_take(r, &out);
}

METHOD(m_format)
{
    UNUSED;
    return sti_format_braces(r, self.u.s, all);
}

/* Fills up to a width: left and right say on which sides. */
static sti_tval fill(sti_run *r, sti_tval self, const sti_tval *arg, bool left,
                     bool right)
{
    const sti_tstr *s = self.u.s, *with = sti_arg_string(r, arg[1]);
    const sti_tstr space = {.p = " ", .n = 1};
    const int64_t n = (int64_t)sti_t_chars(s), width = sti_arg_int(r, arg[0], 0);
    const int64_t missing = width > n ? width - n : 0;
    const int64_t before = left && right ? missing / 2 + (missing & width & 1)
                           : left        ? missing
                                         : 0;
    sti_tout out = {0};
    if (!with) with = &space;
    for (int64_t i = 0; i < before && sti_run_step(r, 1); i++)
        sti_tout_part(r, &out, with, 0, with->n);
    sti_tout_part(r, &out, s, 0, s->n);
    for (int64_t i = before; i < missing && sti_run_step(r, 1); i++)
        sti_tout_part(r, &out, with, 0, with->n);
    const sti_tval v = sti_tout_take(r, &out);
    return s->safe && !r->failed ? sti_t_safe(r, v.u.s) : v;
}

METHOD(m_ljust)
{
    UNUSED;
    return fill(r, self, arg, false, true);
}

METHOD(m_rjust)
{
    UNUSED;
    return fill(r, self, arg, true, false);
}

METHOD(m_center)
{
    UNUSED;
    return fill(r, self, arg, true, true);
}

METHOD(m_zfill)
{
    UNUSED;
    const sti_tval zero = sti_t_puts(r, "0");
    const sti_tstr *s = self.u.s;
    const bool sign = s->n && (s->p[0] == '-' || s->p[0] == '+');
    if (r->failed) return STI_T_UNDEF;
    const sti_tval width = {.kind = STI_T_INT, .u.i = sti_arg_int(r, arg[0], 0) - sign},
                   both[] = {width, zero}, digits = sti_t_sub(r, s, sign, s->n - sign);
    if (r->failed) return STI_T_UNDEF;
    const sti_tval filled = fill(r, digits, both, true, false);
    return sign ? sti_binary(r, '+', sti_t_sub(r, s, 0, 1), filled) : filled;
}

/* ---- Asking -------------------------------------------------------------- */

#define ASK(name, pattern)                                                             \
    METHOD(name)                                                                       \
    {                                                                                  \
        UNUSED;                                                                        \
        return sti_t_bool(sti_t_matches(r, self.u.s, pattern) > 0);                    \
    }

ASK(m_isalpha, "\\A\\p{L}+\\z")
ASK(m_isalnum, "\\A[\\p{L}\\p{N}]+\\z")
ASK(m_isdecimal, "\\A\\p{Nd}+\\z")
ASK(m_isdigit, "\\A[\\p{Nd}\\x{B2}\\x{B3}\\x{B9}\\x{2070}-\\x{2089}]+\\z")
ASK(m_isnumeric, "\\A\\p{N}+\\z")
ASK(m_isidentifier, "\\A[\\p{L}\\p{Nl}_][\\p{L}\\p{N}\\p{Mn}\\p{Mc}\\p{Pc}]*\\z")
/* Words begin with a letter of upper case, and have no other. */
ASK(m_istitle, "\\A(?!.*(?<![\\p{Ll}\\p{Lu}\\p{Lt}])\\p{Ll})"
               "(?!.*[\\p{Ll}\\p{Lu}\\p{Lt}][\\p{Lu}\\p{Lt}]).*[\\p{Lu}\\p{Lt}]")

METHOD(m_isascii)
{
    UNUSED;
    return sti_t_bool(!sti_t_matches(r, self.u.s, "[^\\x{0}-\\x{7F}]"));
}

METHOD(m_isspace)
{
    UNUSED;
    size_t from, to;
    sti_run_step(r, self.u.s->n / 16);
    sti_t_strip(self.u.s, NULL, true, false, &from, &to);
    return sti_t_bool(self.u.s->n && from == to);
}

METHOD(m_isupper)
{
    UNUSED;
    const sti_tstr name = {.p = "upper", .n = 5};
    return sti_t_bool(sti_test(r, &name, self, all));
}

METHOD(m_islower)
{
    UNUSED;
    const sti_tstr name = {.p = "lower", .n = 5};
    return sti_t_bool(sti_test(r, &name, self, all));
}

static const sti_tbuiltin rows[] = {
    {"upper", "", 0, m_upper},
    {"lower", "", 0, m_lower},
    {"title", "", 0, m_title},
    {"capitalize", "", 0, m_capitalize},
    {"swapcase", "", 0, m_swapcase},
    {"strip", "chars", 0, m_strip},
    {"lstrip", "chars", 0, m_lstrip},
    {"rstrip", "chars", 0, m_rstrip},
    {"split", "sep maxsplit", 0, m_split},
    {"rsplit", "sep maxsplit", 0, m_rsplit},
    {"splitlines", "keepends", 0, m_splitlines},
    {"partition", "sep", 1, m_partition},
    {"rpartition", "sep", 1, m_rpartition},
    {"startswith", "prefix start end", 1, m_startswith},
    {"endswith", "suffix start end", 1, m_endswith},
    {"find", "sub start end", 1, m_find},
    {"rfind", "sub start end", 1, m_rfind},
    {"index", "sub start end", 1, m_index},
    {"rindex", "sub start end", 1, m_rindex},
    {"count", "sub start end", 1, m_count},
    {"replace", "old new count", 2, m_replace},
    {"removeprefix", "prefix", 1, m_removeprefix},
    {"removesuffix", "suffix", 1, m_removesuffix},
    {"join", "iterable", 1, m_join},
    {"format", NULL, 0, m_format},
    {"ljust", "width fillchar", 1, m_ljust},
    {"rjust", "width fillchar", 1, m_rjust},
    {"center", "width fillchar", 1, m_center},
    {"zfill", "width", 1, m_zfill},
    {"isdigit", "", 0, m_isdigit},
    {"isdecimal", "", 0, m_isdecimal},
    {"isnumeric", "", 0, m_isnumeric},
    {"isalpha", "", 0, m_isalpha},
    {"isalnum", "", 0, m_isalnum},
    {"isascii", "", 0, m_isascii},
    {"isidentifier", "", 0, m_isidentifier},
    {"isspace", "", 0, m_isspace},
    {"istitle", "", 0, m_istitle},
    {"isupper", "", 0, m_isupper},
    {"islower", "", 0, m_islower},
};

sti_ttable sti_string_methods(void)
{
    return STI_TABLE(rows);
}
