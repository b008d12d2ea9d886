/* gbnf.c - reads a grammar in GBNF, llama.cpp's notation (docs/grammar.md).
 *
 *     rules    = { name "::=" choices newline }
 *     choices  = sequence { "|" sequence }
 *     sequence = { item [ "*" | "+" | "?" | "{" m [ "," [ n ] ] "}" ] }
 *     item     = "text" | [set] | [^set] | "." | name | "(" choices ")"
 *
 * A sequence goes on over line ends inside parentheses and behind "|", and a line that
 * begins with "|" goes on with the rule. Each element is drawn as it is read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "grammar/grammar.h"

enum { MOST_RANGES = 1024 }; /* of one set */

typedef struct reader {
    const char *p;
    size_t n, at;
    sti_sketch *k;
    int depth;
    still_error *err;
    struct {
        size_t at;
        int line, column;
    } known; /* a place in the text */
    sti_range range[MOST_RANGES + 1];
} reader;

/* ---- Errors -------------------------------------------------------------- */

/* Goes on from the last place asked for, if that was before. */
static void place(reader *r, size_t at, int *line, int *column)
{
    if (at < r->known.at || !r->known.line) {
        r->known.at = 0;
        r->known.line = r->known.column = 1;
    }
    for (; r->known.at < at; r->known.at++) {
        const bool newline = r->p[r->known.at] == '\n';
        r->known.line += newline;
        r->known.column = newline ? 1 : r->known.column + 1;
    }
    *line = r->known.line;
    *column = r->known.column;
}

static still_status wrong(reader *r, size_t at, still_status code, const char *why)
{
    int line, column;
    place(r, at, &line, &column);
    return sti_fail(r->err, code, "grammar: line %d, column %d: %s", line, column, why);
}

static still_status format(reader *r, const char *why)
{
    return wrong(r, r->at, STILL_E_FORMAT, why);
}

/* ---- Characters ---------------------------------------------------------- */

static char peek(const reader *r)
{
    return r->at < r->n ? r->p[r->at] : 0;
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '-' || c == '_';
}

/* Spaces and comments, and line ends if `lines`. */
static void skip(reader *r, bool lines)
{
    for (; r->at < r->n; r->at++) {
        const char c = r->p[r->at];
        if (c == '#')
            while (r->at + 1 < r->n && r->p[r->at + 1] != '\n') r->at++;
        else if (c != ' ' && c != '\t' && c != '\r' && (!lines || c != '\n'))
            return;
    }
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    const char lower = (char)(c | 32);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* Behind a backslash. */
static still_status read_escape(reader *r, uint32_t *out)
{
    static const char from[] = "nrt\\\"[]-^'", to[] = "\n\r\t\\\"[]-^'";
    const size_t start = r->at - 1;
    const char c = peek(r);
    const char *found = c ? strchr(from, c) : NULL;
    const int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t v = 0;
    if (found) {
        r->at++;
        *out = (unsigned char)to[found - from];
        return STILL_OK;
    }
    if (!digits)
        return wrong(r, start, STILL_E_FORMAT,
                     "unknown escape; there are \\n \\r \\t \\\\ \\\" \\[ \\] \\xHH "
                     "\\uHHHH \\UHHHHHHHH");
    r->at++;
    for (int i = 0; i < digits; i++, r->at++) {
        const int digit = r->at < r->n ? hex_digit(r->p[r->at]) : -1;
        if (digit < 0) return format(r, "expected a hexadecimal digit");
        if (v >> 28) return wrong(r, start, STILL_E_FORMAT, "not a character");
        v = v << 4 | (uint32_t)digit;
    }
    if (v > 0x10FFFF || (v >= 0xD800 && v < 0xE000))
        return wrong(r, start, STILL_E_FORMAT, "not a character of Unicode");
    *out = v;
    return STILL_OK;
}

/* A character of a text or set, escaped or not. */
static still_status read_char(reader *r, uint32_t *out)
{
    size_t len, bad;
    bool cut;
    if (r->p[r->at] == '\\') {
        r->at++;
        return read_escape(r, out);
    }
    if (!sti_utf8_char(r->p + r->at, r->n - r->at, &bad, &cut))
        return format(r, "no UTF-8");
    *out = sti_utf8_decode(r->p + r->at, &len);
    r->at += len;
    return STILL_OK;
}

/* ---- Items --------------------------------------------------------------- */

static still_status read_text(reader *r, sti_part *out)
{
    sti_sketch *k = r->k;
    *out = (sti_part){sti_sketch_state(k), 0};
    int32_t at = out->first;
    const size_t start = r->at++;
    while (peek(r) != '"') {
        char utf8[4];
        uint32_t c = 0;
        if (r->at >= r->n || r->p[r->at] == '\n')
            return wrong(r, start, STILL_E_FORMAT, "this text has no closing quote");
        STI_TRY(read_char(r, &c));
        const int32_t next = sti_sketch_state(k);
        sti_sketch_text(k, at, next, utf8, sti_utf8_encode(c, utf8));
        at = next;
    }
    r->at++;
    out->last = at;
    return STILL_OK;
}

static int by_lo(const void *a, const void *b)
{
    const sti_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Everything that n ranges leave out; their number. There is room for one more. */
static size_t complement(sti_range *range, size_t n)
{
    uint32_t from = 0;
    size_t out = 0;
    qsort(range, n, sizeof *range, by_lo);
    for (size_t i = 0; i < n; i++) {
        const sti_range r = range[i];
        if (r.lo > from) range[out++] = (sti_range){from, r.lo - 1};
        if (r.hi + 1 > from) from = r.hi + 1;
    }
    if (from <= 0x10FFFF) range[out++] = (sti_range){from, 0x10FFFF};
    return out;
}

static still_status read_set(reader *r, sti_part *out)
{
    const size_t start = r->at++;
    const bool negated = peek(r) == '^';
    size_t n = 0;
    r->at += negated;
    while (peek(r) != ']') {
        sti_range one;
        if (r->at >= r->n || r->p[r->at] == '\n')
            return wrong(r, start, STILL_E_FORMAT, "this set has no closing ]");
        const size_t at = r->at;
        STI_TRY(read_char(r, &one.lo));
        one.hi = one.lo;
        if (peek(r) == '-' && r->at + 1 < r->n && r->p[r->at + 1] != ']') {
            r->at++;
            STI_TRY(read_char(r, &one.hi));
        }
        if (one.hi < one.lo)
            return wrong(r, at, STILL_E_FORMAT, "the range ends before it begins");
        if (n == MOST_RANGES)
            return wrong(r, start, STILL_E_LIMIT, "a set of more than 1024 ranges");
        r->range[n++] = one;
    }
    r->at++;
    if (negated) n = complement(r->range, n);
    if (n == 0) return wrong(r, start, STILL_E_FORMAT, "no character is in this set");
    *out = (sti_part){sti_sketch_state(r->k), sti_sketch_state(r->k)};
    sti_sketch_chars(r->k, out->first, out->last, r->range, n);
    return STILL_OK;
}

static still_status find_rule(reader *r, int32_t *rule)
{
    const size_t start = r->at;
    while (is_name(peek(r))) r->at++;
    *rule = sti_sketch_find_rule(r->k, r->p + start, r->at - start);
    if (*rule >= 0 && !r->k->rule[*rule].line)
        place(r, start, &r->k->rule[*rule].line, &r->k->rule[*rule].column);
    return STILL_OK;
}

static still_status read_choices(reader *r, bool nested, sti_part *out);

static still_status read_item(reader *r, sti_part *out)
{
    static const sti_range all = {0, 0x10FFFF};
    sti_sketch *k = r->k;
    const char c = peek(r);
    int32_t rule;
    if (c == '"') return read_text(r, out);
    if (c == '[') return read_set(r, out);
    if (c == '(') {
        const size_t start = r->at++;
        if (r->depth == STI_GRAMMAR_DEPTH)
            return wrong(r, start, STILL_E_LIMIT, "groups are nested too deep");
        r->depth++;
        skip(r, true);
        STI_TRY(read_choices(r, true, out));
        r->depth--;
        if (peek(r) != ')')
            return r->at < r->n ? format(r, "expected ')', '|' or something to read")
                                : wrong(r, start, STILL_E_FORMAT,
                                        "this group has no closing ')'");
        r->at++;
        return STILL_OK;
    }
    *out = (sti_part){sti_sketch_state(k), sti_sketch_state(k)};
    if (c == '.') {
        r->at++;
        sti_sketch_chars(k, out->first, out->last, &all, 1);
        return STILL_OK;
    }
    if (c == '<')
        return wrong(r, r->at, STILL_E_UNSUPPORTED,
                     "tokens in a grammar are not supported, only their text");
    STI_TRY(find_rule(r, &rule));
    sti_sketch_call(k, out->first, out->last, rule);
    return STILL_OK;
}

/* ---- Repetition, sequences, choices -------------------------------------- */

static bool read_count(reader *r, int64_t *out)
{
    const size_t start = r->at;
    int64_t v = 0;
    while (peek(r) >= '0' && peek(r) <= '9') {
        v = v > STI_GRAMMAR_STATES ? v : 10 * v + (r->p[r->at] - '0');
        r->at++;
    }
    *out = v;
    return r->at > start;
}

/* At '{'. */
static still_status read_counts(reader *r, int64_t *min, int64_t *max)
{
    const size_t start = r->at++;
    skip(r, false);
    const bool any = read_count(r, min);
    skip(r, false);
    *max = *min;
    if (peek(r) == ',') {
        r->at++;
        skip(r, false);
        if (!read_count(r, max)) *max = -1;
        skip(r, false);
    } else if (!any) {
        return format(r, "expected a number of times");
    }
    if (peek(r) != '}') return format(r, "expected '}'");
    r->at++;
    if (*max >= 0 && *max < *min)
        return wrong(r, start, STILL_E_FORMAT, "the most is less than the least");
    return STILL_OK;
}

static still_status read_repeats(reader *r, bool nested, sti_mark since, sti_part *part)
{
    for (;;) {
        int64_t min, max;
        skip(r, nested);
        const char c = peek(r);
        if (!c || !strchr("*+?{", c)) return STILL_OK;
        if (c == '{') {
            STI_TRY(read_counts(r, &min, &max));
        } else {
            r->at++;
            min = c == '+';
            max = c == '?' ? 1 : -1;
        }
        *part = sti_sketch_repeat(r->k, since, *part, min, max);
    }
}

static still_status read_sequence(reader *r, bool nested, sti_part *out)
{
    *out = (sti_part){sti_sketch_state(r->k), 0};
    int32_t at = out->first;
    for (;;) {
        skip(r, nested);
        const char c = peek(r);
        if (!c || (!is_name(c) && !strchr("\"[(.<", c))) break;
        const size_t start = r->at;
        const sti_mark since = sti_sketch_mark(r->k);
        sti_part part = {0};
        STI_TRY(read_item(r, &part));
        STI_TRY(read_repeats(r, nested, since, &part));
        sti_sketch_empty(r->k, at, part.first);
        at = part.last;
        if (r->k->failed) {
            char where[64];
            int line, column;
            place(r, start, &line, &column);
            snprintf(where, sizeof where, "grammar: line %d, column %d", line, column);
            return sti_sketch_fail(r->k, where, r->err);
        }
    }
    out->last = at;
    return STILL_OK;
}

static still_status read_choices(reader *r, bool nested, sti_part *out)
{
    *out = (sti_part){sti_sketch_state(r->k), sti_sketch_state(r->k)};
    for (;;) {
        sti_part one = {0};
        STI_TRY(read_sequence(r, nested, &one));
        sti_sketch_empty(r->k, out->first, one.first);
        sti_sketch_empty(r->k, one.last, out->last);
        const size_t here = r->at;
        if (!nested) skip(r, true); /* the next line may begin with '|' */
        if (peek(r) != '|') {
            r->at = here;
            return STILL_OK;
        }
        r->at++;
        skip(r, true);
    }
}

/* ---- Rules --------------------------------------------------------------- */

static still_status read_rule(reader *r)
{
    const size_t start = r->at;
    int32_t rule;
    sti_part all = {0};
    if (!is_name(peek(r))) return format(r, "expected the name of a rule");
    STI_TRY(find_rule(r, &rule));
    if (r->k->failed) return sti_sketch_fail(r->k, "grammar", r->err);
    if (r->k->rule[rule].drawn)
        return wrong(r, start, STILL_E_FORMAT, "this rule is defined a second time");
    place(r, start, &r->k->rule[rule].line, &r->k->rule[rule].column);
    skip(r, false);
    if (r->n - r->at < 3 || memcmp(r->p + r->at, "::=", 3) != 0)
        return format(r, "expected '::=' behind the name of a rule");
    r->at += 3;
    skip(r, true);
    sti_sketch_begin(r->k, rule);
    STI_TRY(read_choices(r, false, &all));
    if (r->k->failed) return sti_sketch_fail(r->k, "grammar", r->err);
    sti_sketch_empty(r->k, r->k->rule[rule].first, all.first);
    sti_sketch_empty(r->k, all.last, r->k->rule[rule].last);
    sti_sketch_end(r->k, rule);
    if (r->at < r->n && r->p[r->at] != '\n')
        return format(r, "expected something to read, '|' or the end of the line");
    return STILL_OK;
}

static still_status check_names(const reader *r, int32_t *root)
{
    *root = -1;
    for (int32_t i = 0; i < r->k->n_rules; i++) {
        const sti_sketch_rule *rule = &r->k->rule[i];
        if (!rule->drawn)
            return sti_fail(r->err, STILL_E_FORMAT,
                            "grammar: line %d, column %d: rule '%.64s' is not defined",
                            rule->line, rule->column, rule->name);
        if (!strcmp(rule->name, "root")) *root = i;
    }
    if (*root >= 0) return STILL_OK;
    return sti_fail(r->err, STILL_E_FORMAT,
                    "grammar: has no rule named 'root', where generation starts");
}

still_status sti_gbnf_read(const char *text, size_t n, sti_sketch *k, int32_t *root,
                           still_error *err)
{
    reader *r = sti_alloc(1, sizeof *r);
    if (!r) return sti_fail_memory(err, "grammar", sizeof *r);
    r->p = text;
    r->n = n;
    r->k = k;
    r->err = err;
    still_status status = STILL_OK;
    skip(r, true);
    while (r->at < n && status == STILL_OK) {
        status = read_rule(r);
        skip(r, true);
    }
    if (status == STILL_OK && k->failed) status = sti_sketch_fail(k, "grammar", err);
    if (status == STILL_OK) status = check_names(r, root);
    free(r);
    return status;
}
