/* chars.c - strings by character: what is white space, where a code point lies, case,
 * lines and searching. Strings are UTF-8, checked when a run begins. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <locale.h>
#include <pcre2.h>
#include <string.h>
#include <wctype.h>

#include "base/utf8.h"
#include "template/eval.h"

bool sti_t_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 ||
           c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

static bool starts_char(char c)
{
    return ((unsigned char)c & 0xC0) != 0x80;
}

size_t sti_t_chars(const sti_tstr *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) n += starts_char(s->p[i]);
    return n;
}

size_t sti_t_byte_of(const sti_tstr *s, size_t chars)
{
    size_t i = 0;
    for (; i < s->n; i++)
        if (starts_char(s->p[i]) && chars-- == 0) break;
    return i;
}

static bool stripped(const sti_tstr *set, const char *p, size_t len)
{
    size_t n;
    return set ? memmem(set->p, set->n, p, len) != NULL
               : sti_t_space(sti_utf8_decode(p, &n));
}

void sti_t_strip(const sti_tstr *s, const sti_tstr *set, bool left, bool right,
                 size_t *from, size_t *to)
{
    size_t a = 0, b = s->n, len;
    for (; left && a < b; a += len) {
        sti_utf8_decode(s->p + a, &len);
        if (!stripped(set, s->p + a, len)) break;
    }
    while (right && b > a) {
        size_t start = b - 1;
        while (!starts_char(s->p[start])) start--;
        if (!stripped(set, s->p + start, b - start)) break;
        b = start;
    }
    *from = a;
    *to = b;
}

size_t sti_t_find(sti_run *r, const sti_tstr *s, const sti_tstr *what, size_t from,
                  size_t to, bool last)
{
    enum { NEAR = 4096 };
    if (from > to || what->n > to - from) return SIZE_MAX;
    if (!what->n) return last ? to : from;
    if (!last) { /* nearby first: checkers of memmem look at all it might read */
        const size_t near = to - from - what->n < NEAR ? to - from : what->n + NEAR;
        const char *p = memmem(s->p + from, near, what->p, what->n);
        if (!p && near < to - from)
            p = memmem(s->p + from, to - from, what->p, what->n);
        const size_t at = p ? (size_t)(p - s->p) : to;
        sti_run_step(r, (at - from) / 16);
        return p ? at : SIZE_MAX;
    }
    /* Here every place may cost the whole length of what is looked for. */
    for (size_t i = to - what->n + 1; i-- > from && sti_run_step(r, 1 + what->n / 64);)
        if (!memcmp(s->p + i, what->p, what->n)) return i;
    return SIZE_MAX;
}

int64_t sti_t_matches(sti_run *r, const sti_tstr *s, const char *pattern)
{
    int error;
    size_t at;
    int64_t n = 0;
    if (!sti_run_step(r, 16 + s->n / 4)) return 0;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_DOTALL, &error, &at, NULL);
    pcre2_match_data *match = code ? pcre2_match_data_create(1, NULL) : NULL;
    if (!match) sti_run_fail(r, STILL_E_MEMORY, "out of memory");
    /* The first call checks the text, which later ones need not. */
    for (size_t from = 0;
         match && pcre2_match(code, (PCRE2_SPTR)s->p, s->n, from,
                              from ? PCRE2_NO_UTF_CHECK : 0, match, NULL) >= 0;
         n++)
        from = pcre2_get_ovector_pointer(match)[1];
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return n;
}

/* ---- Case ---------------------------------------------------------------- */

static size_t put_char(uint32_t c, char out[4])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    const size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 63));
    out[0] = (char)(lead[n] | c);
    return n;
}

/* The case of a character as Unicode has it, without the few that become two (but for the
 * sharp s and the capital i with a dot); of ASCII alone where the system has no table. */
static uint32_t recase(uint32_t c, bool upper, locale_t locale)
{
    if (c < 0x80)
        return upper ? (c >= 'a' && c <= 'z' ? c - 32 : c)
                     : (c >= 'A' && c <= 'Z' ? c + 32 : c);
    if (!locale) return c;
    return (uint32_t)(upper ? towupper_l((wint_t)c, locale)
                            : towlower_l((wint_t)c, locale));
}

sti_tval sti_t_recase(sti_run *r, const sti_tstr *s, sti_tcase to)
{
    enum { SHARP_S = 0xDF, DOTTED_I = 0x130 };
    if (!r->letters) /* reads files: once a run, not for every string */
        r->letters = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    const locale_t locale = r->letters;
    sti_tout out = {0};
    bool inside = false; /* a word, or behind the first character */
    char room[4];
    for (size_t i = 0, len; i < s->n && sti_run_step(r, 1); i += len) {
        const uint32_t c = sti_utf8_decode(s->p + i, &len);
        const bool upper = to == STI_T_SWAPPED
                               ? recase(c, false, locale) == c
                               : to == STI_T_UPPER || (to != STI_T_LOWER && !inside);
        const bool title =
            recase(c, true, locale) != c && recase(c, false, locale) != c;
        const uint32_t changed =
            to == STI_T_SWAPPED && title ? c : recase(c, upper, locale);
        inside = to == STI_T_CAPITAL ||
                 (to == STI_T_TITLES
                      ? !sti_t_space(c) && (c >= 0x80 || !strchr("-({[<", (int)c))
                      : recase(c, true, locale) != recase(c, false, locale));
        if (c == SHARP_S && upper)
            sti_tout_put(r, &out,
                         to == STI_T_TITLE || to == STI_T_CAPITAL ? "Ss" : "SS", 2,
                         sti_t_mark(s, i));
        else if (c == DOTTED_I && !upper)
            sti_tout_put(r, &out, "i\xCC\x87", 3, sti_t_mark(s, i));
        else
            sti_tout_put(r, &out, room, put_char(changed, room), sti_t_mark(s, i));
    }
    const sti_tval v = sti_tout_take(r, &out);
    return s->safe && !r->failed ? sti_t_safe(r, v.u.s) : v;
}

/* ---- Lines --------------------------------------------------------------- */

/* Bytes of the line end at p, as str.splitlines sees them; 0: none. */
static size_t line_end(const char *p, size_t n)
{
    const unsigned char c = (unsigned char)p[0];
    if (c == '\r') return n > 1 && p[1] == '\n' ? 2 : 1;
    if ((c >= '\n' && c <= '\f') || (c >= 0x1C && c <= 0x1E)) return 1;
    if (n > 1 && !memcmp(p, "\xC2\x85", 2)) return 2;
    if (n > 2 && (!memcmp(p, "\xE2\x80\xA8", 3) || !memcmp(p, "\xE2\x80\xA9", 3)))
        return 3;
    return 0;
}

sti_tval sti_t_lines(sti_run *r, const sti_tstr *s, bool keep)
{
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0);
    size_t from = 0;
    sti_run_step(r, s->n / 16);
    for (size_t i = 0; i < s->n && !r->failed;) {
        const size_t end = line_end(s->p + i, s->n - i);
        i += end ? end : 1;
        if (!end && i < s->n) continue;
        sti_t_append(r, out.u.l, sti_t_sub(r, s, from, i - from - (keep ? 0 : end)));
        from = i;
    }
    return out;
}

sti_tval sti_t_stripped(sti_run *r, const sti_tstr *s, sti_tval set, bool left,
                        bool right)
{
    size_t from, to;
    const sti_tstr *chars = sti_arg_string(r, set);
    if (!sti_run_step(r, (s->n / 16 + 1) * (chars ? chars->n / 16 + 1 : 1)))
        return STI_T_UNDEF;
    sti_t_strip(s, chars, left, right, &from, &to);
    return sti_t_sub(r, s, from, to - from);
}
