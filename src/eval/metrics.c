/* metrics.c - see metrics.h.
 *
 * Texts are compared character by character in lower case, without a copy, so a score
 * needs no memory and cannot fail. Lower case follows Unicode for Latin, Greek and
 * Cyrillic letters, which is all that references hold. */
#include "eval/metrics.h"

#include <string.h>

#include "base/utf8.h"

typedef struct span {
    const char *p, *end;
} span;

static span span_of(const char *s)
{
    return (span){s, s + strlen(s)};
}

static uint32_t lower(uint32_t u)
{
    if (u < 0x80) return u >= 'A' && u <= 'Z' ? u + 32 : u;
    if (u >= 0xC0 && u <= 0xDE && u != 0xD7) return u + 32;
    if (u == 0x130) return 'i';
    if (u == 0x178) return 0xFF;
    if ((u >= 0x100 && u <= 0x137) || (u >= 0x14A && u <= 0x177)) return u | 1;
    if ((u >= 0x139 && u <= 0x148) || (u >= 0x179 && u <= 0x17E)) return u + (u & 1);
    if (u >= 0x391 && u <= 0x3A9 && u != 0x3A2) return u + 32;
    if (u >= 0x410 && u <= 0x42F) return u + 32;
    if (u >= 0x400 && u <= 0x40F) return u + 80;
    if (u >= 0x1E00 && u <= 0x1E95) return u | 1;
    if (u >= 0x1EA0 && u <= 0x1EFF) return u | 1;
    return u;
}

/* The next character in lower case. A control character counts as a newline, as in
 * RULER; an invalid byte gets a value of its own above all characters. */
static uint32_t take(span *s)
{
    size_t bad, len = sti_utf8_char(s->p, (size_t)(s->end - s->p), &bad, &(bool){0});
    if (!len) return 0x110000u + (unsigned char)*s->p++;
    uint32_t u = sti_utf8_decode(s->p, &len);
    s->p += len;
    return u < 0x20 ? '\n' : lower(u);
}

static bool begins(span text, const char *what)
{
    span w = span_of(what);
    while (w.p < w.end)
        if (text.p == text.end || take(&text) != take(&w)) return false;
    return true;
}

/* The first place of what in text; text.end: none. */
static const char *find(span text, const char *what)
{
    for (; text.p < text.end; take(&text))
        if (begins(text, what)) return text.p;
    return *what ? text.end : text.p;
}

static bool has(span text, const char *what)
{
    return !*what || find(text, what) < text.end;
}

/* ---- RULER --------------------------------------------------------------- */

/* Control characters and white space around the output do not count. */
static span strip(span s)
{
    while (s.p < s.end && (unsigned char)*s.p <= ' ') s.p++;
    while (s.p < s.end && (unsigned char)s.end[-1] <= ' ') s.end--;
    return s;
}

double sti_match_all(const sti_item *it, const char *output)
{
    const span text = strip(span_of(output));
    int found = 0;
    for (int i = 0; i < it->n_expected; i++) found += has(text, it->expected[i]);
    return it->n_expected ? (double)found / it->n_expected : 0;
}

double sti_match_part(const sti_item *it, const char *output)
{
    const span text = strip(span_of(output));
    for (int i = 0; i < it->n_expected; i++)
        if (has(text, it->expected[i])) return 1;
    return 0;
}

/* ---- BABILong ------------------------------------------------------------ */

static const char *const PLACES[] = {"bathroom", "bedroom", "garden", "hallway",
                                     "kitchen",  "office",  NULL};
static const char *const GIFTS[] = {"bill",  "fred",     "jeff", "mary",
                                    "apple", "football", "milk", NULL};

static span question_of(const sti_item *it)
{
    static const char mark[] = "\nQuestion: ";
    span text = span_of(it->prompt);
    for (const char *p; (p = strstr(text.p, mark)) != NULL;)
        text.p = p + sizeof mark - 1;
    return text;
}

static bool same(span text, const char *what)
{
    return begins(text, what) && (size_t)(text.end - text.p) == strlen(what);
}

/* Correct iff the target is found, and no other label is. */
static double score_labels(const sti_item *it, const char *output,
                           const char *const *label)
{
    if (!it->n_expected) return 0;
    span text = span_of(output);
    text.end = find(text, ".");
    text.end = find(text, "<context>");
    text.end = find(text, "<example>");
    const span question = question_of(it), target = strip(span_of(it->expected[0]));
    bool right = false;
    for (; *label; label++) {
        if (!has(text, *label) || has(question, *label)) continue;
        if (!same(target, *label)) return 0;
        right = true;
    }
    return right;
}

double sti_babilong_places(const sti_item *it, const char *output)
{
    return score_labels(it, output, PLACES);
}

double sti_babilong_gifts(const sti_item *it, const char *output)
{
    return score_labels(it, output, GIFTS);
}
