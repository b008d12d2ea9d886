/* nfc.c - see nfc.h. Unicode Standard Annex 15, with the tables of nfc_table.h.
 *
 * Only a character with a flag in sti_nfc_class can change or combine with what is before
 * it. So text is copied up to the character before the first of these; from there to the
 * next character without a flag is a segment, which is decomposed, put in order and
 * composed on its own. A file may hold a segment of any length: sorting is n log n. */
#include "base/nfc.h"

#include <stdint.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/nfc_table.h"
#include "base/utf8.h"

enum {
    CLASSES = sizeof sti_nfc_class / sizeof *sti_nfc_class,
    SPLITS = sizeof sti_nfc_split / sizeof *sti_nfc_split,
    JOINS = sizeof sti_nfc_join / sizeof *sti_nfc_join,
    /* Hangul syllables are arithmetic: leading, vowel and trailing jamo. */
    SYLLABLE = 0xAC00,
    LEAD = 0x1100,
    VOWEL = 0x1161,
    TRAIL = 0x11A7, /* one before the first: 0 means no trailing one */
    LEADS = 19,
    VOWELS = 21,
    TRAILS = 28,
    SYLLABLES = LEADS * VOWELS * TRAILS
};

/* ---- Look-ups ------------------------------------------------------------ */

/* The first of n rows, sorted by a column, whose number in it is not below c; n: none. */
static size_t find_row(const uint32_t (*row)[3], size_t n, int column, uint32_t c)
{
    size_t lo = 0, hi = n;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (row[mid][column] < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Whether c has a flag; *ccc is its combining class. */
static bool flagged(uint32_t c, unsigned *ccc)
{
    *ccc = 0;
    /* Latin, the unified ideographs, and the syllables, which have none. */
    if (c < 0x300 || (c >= 0x4E00 && c < 0xA000) || c - SYLLABLE < SYLLABLES)
        return false;
    const size_t i = find_row(sti_nfc_class, CLASSES, 1, c);
    if (i == CLASSES || sti_nfc_class[i][0] > c) return false;
    *ccc = sti_nfc_class[i][2];
    return true;
}

static const uint32_t *split_of(uint32_t c)
{
    const size_t i = find_row(sti_nfc_split, SPLITS, 0, c);
    return i < SPLITS && sti_nfc_split[i][0] == c ? sti_nfc_split[i] : NULL;
}

/* What a and b compose into; 0: nothing. */
static uint32_t join_of(uint32_t a, uint32_t b)
{
    if (a - LEAD < LEADS && b - VOWEL < VOWELS)
        return SYLLABLE + ((a - LEAD) * VOWELS + (b - VOWEL)) * TRAILS;
    if (a - SYLLABLE < SYLLABLES && (a - SYLLABLE) % TRAILS == 0 && b > TRAIL &&
        b < TRAIL + TRAILS)
        return a + (b - TRAIL);
    size_t lo = 0, hi = JOINS;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        const uint32_t *j = sti_nfc_join[mid];
        if (j[0] < a || (j[0] == a && j[1] < b))
            lo = mid + 1;
        else
            hi = mid;
    }
    const uint32_t *j = sti_nfc_join[lo < JOINS ? lo : 0];
    return j[0] == a && j[1] == b ? j[2] : 0;
}

/* ---- A segment ----------------------------------------------------------- */

/* Characters with their class above and their place between, so that sorting by the
 * number sorts marks by class and keeps the order of equals. */
typedef struct segment {
    uint64_t *c;
    size_t n, capacity;
} segment;

enum { PLACE_BITS = 35, CODE_BITS = 21 };

static uint32_t code_of(uint64_t c)
{
    return (uint32_t)(c & ((1u << CODE_BITS) - 1));
}

static unsigned class_of(uint64_t c)
{
    return (unsigned)(c >> (PLACE_BITS + CODE_BITS));
}

static bool push(segment *s, uint32_t c)
{
    unsigned ccc;
    if (s->n == s->capacity) {
        const size_t capacity = s->capacity ? 2 * s->capacity : 32;
        uint64_t *grown = sti_grow(s->c, capacity, sizeof *grown);
        if (!grown) return false;
        s->c = grown;
        s->capacity = capacity;
    }
    flagged(c, &ccc);
    s->c[s->n] =
        (uint64_t)ccc << (PLACE_BITS + CODE_BITS) | (uint64_t)s->n << CODE_BITS | c;
    s->n++;
    return true;
}

/* Appends c, decomposed as far as it goes; the table is three steps deep at most. */
static bool push_split(segment *s, uint32_t c)
{
    if (c - SYLLABLE < SYLLABLES) {
        const uint32_t i = c - SYLLABLE, trail = i % TRAILS;
        return push(s, LEAD + i / TRAILS / VOWELS) &&
               push(s, VOWEL + i / TRAILS % VOWELS) &&
               (!trail || push(s, TRAIL + trail));
    }
    const uint32_t *parts = split_of(c);
    if (!parts) return push(s, c);
    return push_split(s, parts[1]) && (!parts[2] || push_split(s, parts[2]));
}

static int ascending(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* Each run of marks (class above 0) by class. */
static void sort_marks(segment *s)
{
    for (size_t i = 0, end; i < s->n; i = end) {
        end = i + 1;
        if (!class_of(s->c[i])) continue;
        while (end < s->n && class_of(s->c[end])) end++;
        if (end - i > 1) qsort(s->c + i, end - i, sizeof *s->c, ascending);
    }
}

/* Joins each character to the last one of class 0 if nothing between blocks it: no
 * character of class 0, and none of the same class. */
static void compose(segment *s)
{
    size_t kept = 0, first = SIZE_MAX; /* where that last one is */
    unsigned before = 0;               /* class of the last character kept behind it */
    for (size_t i = 0; i < s->n; i++) {
        const unsigned ccc = class_of(s->c[i]);
        const bool next_to = first != SIZE_MAX && kept == first + 1;
        if (first != SIZE_MAX && (next_to || before < ccc)) {
            const uint32_t whole = join_of(code_of(s->c[first]), code_of(s->c[i]));
            if (whole) {
                s->c[first] = whole;
                continue;
            }
        }
        if (!ccc) first = kept;
        before = ccc;
        s->c[kept++] = s->c[i];
    }
    s->n = kept;
}

/* Appends the segment at the start of p in NFC; its length. 0: no memory. */
static size_t put_segment(const char *p, size_t n, segment *s, sti_buf *out)
{
    size_t i = 0, len;
    unsigned ccc;
    s->n = 0;
    while (i < n) {
        const uint32_t c = sti_utf8_decode(p + i, &len);
        if (i && !flagged(c, &ccc)) break;
        if (!push_split(s, c)) return 0;
        i += len;
    }
    sort_marks(s);
    compose(s);
    for (size_t k = 0; k < s->n; k++) {
        char utf8[4];
        sti_buf_put(out, utf8, sti_utf8_encode(code_of(s->c[k]), utf8));
    }
    return i;
}

/* ---- Text ---------------------------------------------------------------- */

size_t sti_nfc_span(const char *p, size_t n)
{
    size_t before = 0, len; /* start of the character before */
    unsigned ccc;
    for (size_t i = 0; i < n; i += len) {
        const unsigned char b = (unsigned char)p[i];
        len = b < 0x80 ? 1 : 2;
        /* Lead bytes below 0xCC are characters below U+0300. */
        if (b >= 0xCC && flagged(sti_utf8_decode(p + i, &len), &ccc)) return before;
        before = i;
    }
    return n;
}

void sti_nfc_put(const char *p, size_t n, sti_buf *out)
{
    segment s = {0};
    while (n) {
        size_t span = sti_nfc_span(p, n);
        sti_buf_put(out, p, span);
        p += span;
        n -= span;
        if (!n) break;
        span = put_segment(p, n, &s, out);
        if (!span) {
            out->failed = true;
            break;
        }
        p += span;
        n -= span;
    }
    free(s.c);
}
