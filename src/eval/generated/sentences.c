/* sentences.c - a sentence splitter by rules, in place of NLTK's Punkt.
 *
 * It only decides where needles and facts may go, never what they say. As in Punkt,
 * a sentence ends at '?', '!' or a period before white space, together with the quotes
 * and brackets that close behind it, except
 *   - after an abbreviation, if those are known (Punkt's trained model; "untrained"
 *     Punkt knows none);
 *   - after an initial, one letter and a period, before an upper-case letter;
 *   - after a number and a period, or an ellipsis, before a lower-case letter.
 *
 * It differs from Punkt in what Punkt learned: Punkt has about a hundred abbreviations
 * from newspapers, ends a sentence after one if the next word is a frequent first word,
 * and knows pairs of words that belong together. Here the list is short and an
 * abbreviation never ends a sentence. */
#include "eval/generated/sentences.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

#include "base/utf8.h"

static const char *const ABBREVIATION[] = {
    "mr",   "mrs",  "ms",  "dr",   "prof",   "st",  "jr",  "sr",  "rev",  "hon",
    "gen",  "col",  "maj", "capt", "lt",     "sgt", "gov", "sen", "rep",  "messrs",
    "e.g",  "i.e",  "etc", "vs",   "cf",     "viz", "al",  "inc", "ltd",  "co",
    "corp", "dept", "est", "fig",  "vol",    "no",  "pp",  "ed",  "p.m",  "a.m",
    "u.s",  "u.k",  "b.c", "a.d",  "ph.d",   "jan", "feb", "aug", "sept", "oct",
    "nov",  "dec",  "mt",  "ave",  "approx", "esq",
};

size_t sti_white(const char *p, size_t n)
{
    const unsigned char c = (unsigned char)*p;
    if (c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1C && c <= 0x1F)) return 1;
    if (c < 0x80 || sti_utf8_char(p, n, &(size_t){0}, &(bool){0}) == 0) return 0;
    size_t len;
    const uint32_t u = sti_utf8_decode(p, &len);
    const bool white = u == 0x85 || u == 0xA0 || u == 0x1680 ||
                       (u >= 0x2000 && u <= 0x200A) || u == 0x2028 || u == 0x2029 ||
                       u == 0x202F || u == 0x205F || u == 0x3000;
    return white ? len : 0;
}

/* Bytes of a closing quote or bracket at p; 0: none. */
static size_t closer(const char *p, size_t n)
{
    if (n && strchr("\"')]}", *p) && *p) return 1;
    if (n >= 3 && (memcmp(p, "\u201D", 3) == 0 || memcmp(p, "\u2019", 3) == 0))
        return 3;
    return 0;
}

static bool is_abbreviation(const char *word, size_t n)
{
    for (size_t i = 0; i < sizeof ABBREVIATION / sizeof *ABBREVIATION; i++)
        if (strlen(ABBREVIATION[i]) == n && strncasecmp(word, ABBREVIATION[i], n) == 0)
            return true;
    return false;
}

/* Whether the period at text[dot], the last of its word, ends a sentence that began at
 * `start`; next is the first byte behind the white space, 0 at the end. */
static bool period_ends(const char *text, size_t start, size_t dot, char next,
                        bool abbreviations)
{
    size_t word = dot; /* the word in front of the period */
    while (word > start && !isspace((unsigned char)text[word - 1])) word--;
    while (word < dot && strchr("\"'([{", text[word])) word++;
    const char *w = text + word;
    const size_t n = dot - word;
    const bool upper = isupper((unsigned char)next),
               lower = islower((unsigned char)next);
    if (n && w[n - 1] == '.') return !lower;
    if (n == 1 && isalpha((unsigned char)*w)) return !upper;
    if (n && strspn(w, "0123456789.,") >= n) return !lower;
    return !(abbreviations && is_abbreviation(w, n));
}

bool sti_sentence_next(const char *text, size_t n, bool abbreviations, size_t *at,
                       size_t *start, size_t *end)
{
    size_t i = *at, k;
    while (i < n && (k = sti_white(text + i, n - i))) i += k;
    *start = *end = i;
    if (i == n) return false;
    while (i < n) {
        const char c = text[i++];
        if (c != '.' && c != '?' && c != '!') {
            if (!(k = sti_white(text + i - 1, n - i + 1)))
                *end = i;
            else
                i += k - 1;
            continue;
        }
        const size_t mark = i - 1;
        while (i < n && (k = closer(text + i, n - i))) i += k;
        *end = i;
        size_t next = i;
        while (next < n && (k = sti_white(text + next, n - next))) next += k;
        if (next == n) break;
        if (next == i) continue; /* inside a word */
        if (c != '.' || period_ends(text, *start, mark, text[next], abbreviations))
            break;
    }
    *at = i;
    return true;
}
