/* utf8.c - see utf8.h. Well-formed as Unicode defines it (table 3-7): no overlong
 * forms, no surrogates, nothing above U+10FFFF. */
#include "base/utf8.h"

#include <string.h>

size_t sti_utf8_char(const char *p, size_t n, size_t *bad, bool *cut)
{
    const unsigned char *s = (const unsigned char *)p;
    unsigned char lead = s[0], lo = 0x80, hi = 0xBF;
    size_t len;
    *bad = 1;
    *cut = false;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) {
        len = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        len = 3;
        if (lead == 0xE0) lo = 0xA0;
        if (lead == 0xED) hi = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        len = 4;
        if (lead == 0xF0) lo = 0x90;
        if (lead == 0xF4) hi = 0x8F;
    } else {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        *bad = i;
        if (i == n) {
            *cut = true;
            return 0;
        }
        if (s[i] < lo || s[i] > hi) return 0;
        lo = 0x80;
        hi = 0xBF;
    }
    return len;
}

size_t sti_utf8_span(const char *p, size_t n)
{
    size_t i = 0, bad;
    bool cut;
    while (i < n) {
        uint64_t word;
        if (n - i >= sizeof word) { /* eight ASCII bytes at a time */
            memcpy(&word, p + i, sizeof word);
            if (!(word & 0x8080808080808080u)) {
                i += sizeof word;
                continue;
            }
        }
        size_t len = sti_utf8_char(p + i, n - i, &bad, &cut);
        if (!len) break;
        i += len;
    }
    return i;
}

size_t sti_utf8_encode(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    const size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 63));
    out[0] = (char)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | c);
    return n;
}

uint32_t sti_utf8_decode(const char *p, size_t *len)
{
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) {
        *len = 1;
        return s[0];
    }
    if (s[0] < 0xE0) {
        *len = 2;
        return (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu);
    }
    if (s[0] < 0xF0) {
        *len = 3;
        return (s[0] & 0x0Fu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
    }
    *len = 4;
    return (s[0] & 0x07u) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 |
           (s[3] & 0x3Fu);
}

void sti_utf8_harmless(char *p, size_t n, bool lines)
{
    for (size_t i = 0, len; i < n; i += len) {
        size_t bad;
        bool cut;
        len = sti_utf8_char(p + i, n - i, &bad, &cut);
        const unsigned char c = (unsigned char)p[i];
        const bool c1 = len == 2 && c == 0xC2 && (unsigned char)p[i + 1] < 0xA0;
        const bool kept = len && !c1 && c != 0x7F &&
                          (c >= 0x20 || (lines && (c == '\n' || c == '\t')));
        if (!len) len = 1;
        if (!kept) memset(p + i, '?', len);
    }
}
