/* text.c - see text.h. */
#include "eval/text.h"

#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

/* The character at s, of n > 0 bytes; a broken byte stands for itself. */
static uint32_t char_at(const char *s, size_t n, size_t *len)
{
    size_t bad;
    bool cut;
    if (sti_utf8_char(s, n, &bad, &cut)) return sti_utf8_decode(s, len);
    *len = 1;
    return 0xFFFD;
}

/* White space as str.isspace() has it. */
static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 ||
           c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

int sti_text_code_points(const char *s)
{
    int count = 0;
    size_t len;
    for (size_t n = strlen(s); n > 0; n -= len, s += len, count++) char_at(s, n, &len);
    return count;
}

size_t sti_text_strip_end(const char *s, size_t n)
{
    size_t end = 0, len;
    for (size_t at = 0; at < n; at += len)
        if (!is_space(char_at(s + at, n - at, &len))) end = at + len;
    return end;
}

void sti_text_strip(const char **s, size_t *n)
{
    size_t len;
    while (*n > 0 && is_space(char_at(*s, *n, &len))) {
        *s += len;
        *n -= len;
    }
    *n = sti_text_strip_end(*s, *n);
}

/* ---- Capitals ------------------------------------------------------------ */

static uint32_t to_lower(uint32_t c)
{
    if (c >= 'A' && c <= 'Z') return c + 32;
    if (c >= 0xC0 && c <= 0xDE && c != 0xD7) return c + 32;
    if (c >= 0x100 && c <= 0x12F) return c | 1;
    return c;
}

static uint32_t to_upper(uint32_t c)
{
    if (c >= 'a' && c <= 'z') return c - 32;
    if (c >= 0xE0 && c <= 0xFE && c != 0xF7) return c - 32;
    if (c >= 0x100 && c <= 0x12F) return c & ~1u;
    return c;
}

void sti_text_capitalize(sti_buf *b, const char *s)
{
    size_t len;
    bool first = true;
    for (size_t n = strlen(s); n > 0; n -= len, s += len, first = false) {
        uint32_t c = char_at(s, n, &len), d = first ? to_upper(c) : to_lower(c);
        if (d == c) {
            sti_buf_put(b, s, len);
        } else if (d < 0x80) {
            sti_buf_put(b, &(char){(char)d}, 1);
        } else { /* what changes case here has two bytes */
            const char two[2] = {(char)(0xC0 | d >> 6), (char)(0x80 | (d & 0x3F))};
            sti_buf_put(b, two, 2);
        }
    }
}

/* ---- HellaSwag ----------------------------------------------------------- */

/* Appends s[0..n) with every `what` replaced, left to right. */
static void replace(sti_buf *b, const char *s, size_t n, const char *what,
                    const char *with)
{
    const size_t k = strlen(what);
    for (size_t at = 0; at < n;) {
        const char *found = memmem(s + at, n - at, what, k);
        size_t plain = found ? (size_t)(found - s) - at : n - at;
        sti_buf_put(b, s + at, plain);
        at += plain;
        if (!found) break;
        sti_buf_puts(b, with);
        at += k;
    }
}

/* Appends s[0..n) without [...]; one that does not close in its line stays. */
static void drop_brackets(sti_buf *b, const char *s, size_t n)
{
    for (size_t at = 0; at < n;) {
        size_t end = at + 1;
        if (s[at] == '[') {
            while (end < n && s[end] != ']' && s[end] != '\n') end++;
            if (end < n && s[end] == ']') {
                at = end + 1;
                continue;
            }
        }
        sti_buf_put(b, s + at, 1);
        at++;
    }
}

void sti_text_clean(sti_buf *b, const char *s)
{
    sti_buf titled = {0}, bare = {0};
    size_t n = strlen(s);
    sti_text_strip(&s, &n);
    replace(&titled, s, n, " [title]", ". ");
    drop_brackets(&bare, titled.p, titled.n);
    replace(b, bare.p, bare.n, "  ", " ");
    if (titled.failed || bare.failed) b->failed = true;
    sti_buf_free(&titled);
    sti_buf_free(&bare);
}
