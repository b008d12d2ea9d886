/* schema_pattern.c - regular expressions of JSON schemas, drawn as the inside of a string.
 *
 *     choices  = sequence { "|" sequence }
 *     sequence = { item [ ("*" | "+" | "?" | "{" m [ "," [ n ] ] "}") [ "?" ] ] }
 *     item     = character | "." | [set] | \d \D \w \W \s \S | "(" ["?:"] choices ")"
 *
 * As JSON schema has it, a pattern may match anywhere in the string: where it does not begin
 * with ^ or end with $, anything may come before or after. These two stand only at the ends
 * of the whole pattern or of its outermost choices. Look-around, back references, \b and
 * \p are not regular or not simple, and are refused. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "grammar/schema.h"

enum { MOST_RANGES = 512, LAST = 0x10FFFF };

typedef struct set {
    sti_range r[MOST_RANGES + 1];
    size_t n;
} set;

typedef struct reader {
    sti_schema *c;
    const char *p, *key;
    size_t n, at;
    int depth;
    set *one, *other; /* the set that is read, and room to turn it over */
} reader;

static still_status refuse(reader *r, const char *why)
{
    sti_buf text = {0};
    sti_buf_printf(&text, "at character %zu of the pattern: %s", r->at + 1, why);
    const still_status status =
        text.failed ? sti_fail_memory(r->c->err, "schema", 64)
                    : sti_schema_refuse(r->c, STILL_E_UNSUPPORTED, r->key, text.p);
    sti_buf_free(&text);
    return status;
}

static char peek(const reader *r)
{
    return r->at < r->n ? r->p[r->at] : 0;
}

/* ---- Sets ---------------------------------------------------------------- */

static still_status add(reader *r, uint32_t lo, uint32_t hi)
{
    if (r->one->n == MOST_RANGES) return refuse(r, "a set of too many ranges");
    r->one->r[r->one->n++] = (sti_range){lo, hi};
    return STILL_OK;
}

static int by_lo(const void *a, const void *b)
{
    const sti_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* The set becomes all that it leaves out, from range `first` on. */
static void turn_over(reader *r, size_t first)
{
    set *s = r->one, *to = r->other;
    uint32_t from = 0;
    to->n = 0;
    qsort(s->r + first, s->n - first, sizeof *s->r, by_lo);
    for (size_t i = first; i < s->n; i++) {
        if (s->r[i].lo > from) to->r[to->n++] = (sti_range){from, s->r[i].lo - 1};
        if (s->r[i].hi + 1 > from) from = s->r[i].hi + 1;
    }
    if (from <= LAST) to->r[to->n++] = (sti_range){from, LAST};
    for (size_t i = 0; i < to->n && first + i < MOST_RANGES; i++)
        s->r[first + i] = to->r[i];
    s->n = first + to->n < MOST_RANGES ? first + to->n : MOST_RANGES;
}

/* \d and its like; false: c is none of them. */
static bool named_set(reader *r, char c, still_status *status)
{
    static const sti_range digit[] = {{'0', '9'}},
                           word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                           space[] = {{'\t', '\r'},     {' ', ' '},
                                      {0xA0, 0xA0},     {0x1680, 0x1680},
                                      {0x2000, 0x200A}, {0x2028, 0x2029},
                                      {0x202F, 0x202F}, {0x205F, 0x205F},
                                      {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
    const char lower = (char)(c | 32);
    const sti_range *list = lower == 'd' ? digit : lower == 'w' ? word : space;
    const size_t n = lower == 'd' ? 1 : lower == 'w' ? 4 : sizeof space / sizeof *space;
    const size_t first = r->one->n;
    if (lower != 'd' && lower != 'w' && lower != 's') return false;
    *status = STILL_OK;
    for (size_t i = 0; i < n && *status == STILL_OK; i++)
        *status = add(r, list[i].lo, list[i].hi);
    if (*status == STILL_OK && c != lower) turn_over(r, first);
    return true;
}

static still_status read_hex(reader *r, int digits, uint32_t *out)
{
    uint32_t v = 0;
    for (int i = 0; i < digits; i++, r->at++) {
        static const char all[] = "0123456789abcdef";
        const char *found = peek(r) ? strchr(all, peek(r) | 32) : NULL;
        if (!found) return refuse(r, "expected a hexadecimal digit");
        v = v << 4 | (uint32_t)(found - all);
    }
    if (v >= 0xD800 && v < 0xE000) return refuse(r, "half a surrogate pair");
    *out = v;
    return STILL_OK;
}

/* Behind a backslash; a single character. */
static still_status read_escape(reader *r, uint32_t *out)
{
    static const char from[] = "nrtfv", to[] = "\n\r\t\f\v";
    const char c = peek(r);
    const char *found = c ? strchr(from, c) : NULL;
    if (c == 'x' || c == 'u') {
        r->at++;
        return read_hex(r, c == 'x' ? 2 : 4, out);
    }
    if (!found && (!c || !strchr("^$\\.*+?()[]{}|/-\"'#@!%&,:;<=>~`_ ", c)))
        return refuse(r, "this escape is not supported");
    *out = found ? (unsigned char)to[found - from] : (unsigned char)c;
    r->at++;
    return STILL_OK;
}

static still_status read_plain(reader *r, uint32_t *out)
{
    size_t len, bad;
    bool cut;
    if (!sti_utf8_char(r->p + r->at, r->n - r->at, &bad, &cut))
        return refuse(r, "no UTF-8");
    *out = sti_utf8_decode(r->p + r->at, &len);
    r->at += len;
    return STILL_OK;
}

/* One end of a range in a set; *whole: it was a named set, and is added. */
static still_status read_end(reader *r, uint32_t *out, bool *whole)
{
    still_status status;
    *whole = false;
    if (peek(r) != '\\') return read_plain(r, out);
    r->at++;
    if (peek(r) == 'b') { /* in a set it is a character */
        r->at++;
        *out = '\b';
        return STILL_OK;
    }
    *whole = named_set(r, peek(r), &status);
    if (!*whole) return read_escape(r, out);
    r->at++;
    return status;
}

static still_status read_set(reader *r)
{
    r->at++;
    const bool negated = peek(r) == '^';
    r->at += negated;
    while (peek(r) != ']') {
        uint32_t lo = 0, hi = 0;
        bool whole;
        if (r->at >= r->n) return refuse(r, "a set has no closing ]");
        STI_TRY(read_end(r, &lo, &whole));
        if (whole) continue;
        hi = lo;
        if (peek(r) == '-' && r->at + 1 < r->n && r->p[r->at + 1] != ']') {
            r->at++;
            STI_TRY(read_end(r, &hi, &whole));
            if (whole || hi < lo) return refuse(r, "not a range");
        }
        STI_TRY(add(r, lo, hi));
    }
    r->at++;
    if (negated) turn_over(r, 0);
    return r->one->n ? STILL_OK : refuse(r, "no character is in this set");
}

/* ---- Items, sequences, choices ------------------------------------------- */

static still_status read_choices(reader *r, bool outer, sti_part *out);

static still_status read_group(reader *r, sti_part *out)
{
    r->at++;
    if (peek(r) == '?') {
        if (r->n - r->at < 2 || r->p[r->at + 1] != ':')
            return refuse(r, "look-around and named groups are not supported");
        r->at += 2;
    }
    if (r->depth == STI_GRAMMAR_DEPTH) return refuse(r, "groups are nested too deep");
    r->depth++;
    STI_TRY(read_choices(r, false, out));
    r->depth--;
    if (peek(r) != ')') return refuse(r, "a group has no closing )");
    r->at++;
    return STILL_OK;
}

static still_status read_item(reader *r, sti_part *out)
{
    sti_sketch *k = r->c->k;
    const char c = peek(r);
    uint32_t one = 0;
    still_status status;
    if (c == '(') return read_group(r, out);
    if (strchr("*+?{", c)) return refuse(r, "there is nothing to repeat");
    if (c == '^' || c == '$')
        return refuse(r, "supported only at the ends of the pattern");
    r->one->n = 0;
    if (c == '[') {
        STI_TRY(read_set(r));
    } else if (c == '.') {
        r->at++;
        STI_TRY(add(r, '\n', '\n'));
        STI_TRY(add(r, '\r', '\r'));
        STI_TRY(add(r, 0x2028, 0x2029));
        turn_over(r, 0);
    } else if (c == '\\') {
        r->at++;
        if (named_set(r, peek(r), &status)) {
            STI_TRY(status);
            r->at++;
        } else {
            STI_TRY(read_escape(r, &one));
            STI_TRY(add(r, one, one));
        }
    } else {
        STI_TRY(read_plain(r, &one));
        STI_TRY(add(r, one, one));
    }
    *out = (sti_part){sti_sketch_state(k), sti_sketch_state(k)};
    sti_schema_chars(r->c, out->first, out->last, r->one->r, r->one->n);
    return STILL_OK;
}

static bool read_number(reader *r, int64_t *out)
{
    const size_t start = r->at;
    *out = 0;
    for (; peek(r) >= '0' && peek(r) <= '9'; r->at++)
        if (*out <= STI_GRAMMAR_STATES) *out = 10 * *out + (r->p[r->at] - '0');
    return r->at > start;
}

static still_status read_repeat(reader *r, sti_mark since, sti_part *part)
{
    int64_t min, max;
    const char c = peek(r);
    if (!c || !strchr("*+?{", c)) return STILL_OK;
    r->at++;
    min = c == '+';
    max = c == '?' ? 1 : -1;
    if (c == '{') {
        if (!read_number(r, &min)) return refuse(r, "expected a number of times");
        max = min;
        if (peek(r) == ',') {
            r->at++;
            if (!read_number(r, &max)) max = -1;
        }
        if (peek(r) != '}') return refuse(r, "expected }");
        r->at++;
        if (max >= 0 && max < min) return refuse(r, "the most is less than the least");
    }
    if (peek(r) == '?') r->at++; /* as few as possible: the same texts */
    *part = sti_sketch_repeat(r->c->k, since, *part, min, max);
    return STILL_OK;
}

static void draw_anything(reader *r, int32_t at)
{
    sti_schema_char(r->c, at, at);
}

static still_status read_sequence(reader *r, bool outer, sti_part *out)
{
    sti_sketch *k = r->c->k;
    *out = (sti_part){sti_sketch_state(k), 0};
    int32_t at = out->first;
    bool closed = false;
    if (outer && peek(r) == '^')
        r->at++;
    else if (outer)
        draw_anything(r, at);
    while (r->at < r->n && peek(r) != '|' && peek(r) != ')') {
        const sti_mark since = sti_sketch_mark(k);
        sti_part part = {0};
        if (outer && peek(r) == '$' && (r->at + 1 == r->n || r->p[r->at + 1] == '|')) {
            r->at++;
            closed = true;
            break;
        }
        STI_TRY(read_item(r, &part));
        STI_TRY(read_repeat(r, since, &part));
        if (k->failed) return STILL_OK; /* the caller reports it */
        sti_sketch_empty(k, at, part.first);
        at = part.last;
    }
    out->last = at;
    if (outer &&
        !closed) { /* a state of its own: the last may be one that goes round */
        out->last = sti_sketch_state(k);
        sti_sketch_empty(k, at, out->last);
        draw_anything(r, out->last);
    }
    return STILL_OK;
}

static still_status read_choices(reader *r, bool outer, sti_part *out)
{
    sti_sketch *k = r->c->k;
    *out = (sti_part){sti_sketch_state(k), sti_sketch_state(k)};
    for (;;) {
        sti_part one = {0};
        STI_TRY(read_sequence(r, outer, &one));
        if (k->failed) return STILL_OK;
        sti_sketch_empty(k, out->first, one.first);
        sti_sketch_empty(k, one.last, out->last);
        if (peek(r) != '|') return STILL_OK;
        r->at++;
    }
}

still_status sti_schema_pattern(sti_schema *c, int32_t from, int32_t to, const char *p,
                                size_t n, const char *key)
{
    reader r = {.c = c, .p = p, .n = n, .key = key};
    sti_part all = {0};
    r.one = sti_alloc(2, sizeof *r.one);
    if (!r.one) return sti_fail_memory(c->err, "schema", 2 * sizeof *r.one);
    r.other = r.one + 1;
    still_status status = read_choices(&r, true, &all);
    if (status == STILL_OK && r.at < n && !c->k->failed)
        status = refuse(&r, "a ) that closes nothing");
    if (status == STILL_OK && !c->k->failed) {
        sti_sketch_empty(c->k, from, all.first);
        sti_sketch_empty(c->k, all.last, to);
    }
    free(r.one);
    return status;
}
