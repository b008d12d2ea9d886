/* schema_json.c - JSON itself: strings, numbers, free values, and values that are given.
 *
 * Numbers have at most 18 digits before the point, 17 behind it and 2 in the exponent, so
 * every reader of JSON can hold them, and a model cannot write digits for ever. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "grammar/schema.h"

static const char *const name_of[STI_BUILTINS] = {
    [STI_JSON_SPACE] = "(space)",      [STI_JSON_WIDE] = "(character)",
    [STI_JSON_ESCAPE] = "(escape)",    [STI_JSON_STRING] = "(string)",
    [STI_JSON_NUMBER] = "(number)",    [STI_JSON_INTEGER] = "(integer)",
    [STI_JSON_VALUE] = "(value)",      [STI_JSON_FREE_OBJECT] = "(object)",
    [STI_JSON_FREE_ARRAY] = "(array)",
};

int32_t sti_schema_builtin(sti_schema *c, sti_builtin what)
{
    if (c->builtin[what] < 0)
        c->builtin[what] =
            sti_sketch_find_rule(c->k, name_of[what], strlen(name_of[what]));
    return c->builtin[what];
}

void sti_schema_call(sti_schema *c, int32_t from, int32_t to, sti_builtin what)
{
    sti_sketch_call(c->k, from, to, sti_schema_builtin(c, what));
}

/* ---- Strings ------------------------------------------------------------- */

void sti_schema_char(sti_schema *c, int32_t from, int32_t to)
{
    sti_sketch *k = c->k;
    const int32_t escape = sti_sketch_state(k);
    sti_sketch_byte(k, from, to, 0x20, 0x21); /* up to the quote */
    sti_sketch_byte(k, from, to, 0x23, 0x5B); /* up to the backslash */
    sti_sketch_byte(k, from, to, 0x5D, 0x7F);
    sti_schema_call(c, from, to, STI_JSON_WIDE);
    sti_sketch_byte(k, from, escape, '\\', '\\');
    sti_schema_call(c, escape, to, STI_JSON_ESCAPE);
}

/* How JSON writes a character; its length, up to 6. */
static size_t spell(uint32_t c, char out[8])
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *short_form = c && c < 128 ? strchr(from, (int)c) : NULL;
    if (short_form) {
        out[0] = '\\';
        out[1] = to[short_form - from];
        return 2;
    }
    if (c < 0x20) return (size_t)snprintf(out, 8, "\\u%04x", (unsigned)c);
    return sti_utf8_encode(c, out);
}

void sti_schema_chars(sti_schema *c, int32_t from, int32_t to, const sti_range *r,
                      size_t n)
{
    static const sti_range plain[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0x10FFFF}};
    for (size_t i = 0; i < n && !c->k->failed; i++) {
        for (size_t j = 0; j < 3; j++) {
            const sti_range part = {r[i].lo > plain[j].lo ? r[i].lo : plain[j].lo,
                                    r[i].hi < plain[j].hi ? r[i].hi : plain[j].hi};
            if (part.lo <= part.hi) sti_sketch_chars(c->k, from, to, &part, 1);
        }
        for (uint32_t at = r[i].lo; at <= r[i].hi && at <= '\\'; at++) {
            char text[8];
            if (at >= 0x20 && at != '"' && at != '\\') continue;
            sti_sketch_text(c->k, from, to, text, spell(at, text));
        }
    }
}

void sti_schema_quoted(sti_schema *c, int32_t from, int32_t to, const char *p, size_t n)
{
    int32_t at = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, at, '"', '"');
    for (size_t i = 0, len = 1; i < n; i += len) {
        char text[8];
        const uint32_t ch = sti_utf8_decode(p + i, &len);
        const int32_t next = sti_sketch_state(c->k);
        sti_sketch_text(c->k, at, next, text, spell(ch, text));
        at = next;
    }
    sti_sketch_byte(c->k, at, to, '"', '"');
}

static void draw_string(sti_schema *c, int32_t from, int32_t to)
{
    const int32_t inside = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, inside, '"', '"');
    sti_schema_char(c, inside, inside);
    sti_sketch_byte(c->k, inside, to, '"', '"');
}

static void hex(sti_sketch *k, int32_t from, int32_t to)
{
    sti_sketch_byte(k, from, to, '0', '9');
    sti_sketch_byte(k, from, to, 'a', 'f');
    sti_sketch_byte(k, from, to, 'A', 'F');
}

/* Behind "\": a letter, or u and four digits; half a surrogate pair is no character. */
static void draw_escape(sti_sketch *k, int32_t from, int32_t to)
{
    for (const char *p = "\"\\/bfnrt"; *p; p++)
        sti_sketch_byte(k, from, to, (unsigned char)*p, (unsigned char)*p);
    int32_t s[12];
    for (int i = 0; i < 12; i++) s[i] = sti_sketch_state(k);
    sti_sketch_byte(k, from, s[0], 'u', 'u');
    sti_sketch_byte(k, s[0], s[1], '0', '9'); /* not D */
    sti_sketch_byte(k, s[0], s[1], 'a', 'c');
    sti_sketch_byte(k, s[0], s[1], 'A', 'C');
    sti_sketch_byte(k, s[0], s[1], 'e', 'f');
    sti_sketch_byte(k, s[0], s[1], 'E', 'F');
    hex(k, s[1], s[2]);
    hex(k, s[2], s[3]);
    hex(k, s[3], to);
    sti_sketch_byte(k, s[0], s[4], 'd', 'd');
    sti_sketch_byte(k, s[0], s[4], 'D', 'D');
    sti_sketch_byte(k, s[4], s[2], '0', '7');
    sti_sketch_byte(k, s[4], s[5], '8', '9'); /* the first half; the second follows */
    sti_sketch_byte(k, s[4], s[5], 'a', 'b');
    sti_sketch_byte(k, s[4], s[5], 'A', 'B');
    hex(k, s[5], s[6]);
    hex(k, s[6], s[7]);
    sti_sketch_byte(k, s[7], s[8], '\\', '\\');
    sti_sketch_byte(k, s[8], s[9], 'u', 'u');
    sti_sketch_byte(k, s[9], s[10], 'd', 'd');
    sti_sketch_byte(k, s[9], s[10], 'D', 'D');
    sti_sketch_byte(k, s[10], s[11], 'c', 'f');
    sti_sketch_byte(k, s[10], s[11], 'C', 'F');
    hex(k, s[11], s[3]); /* and one more */
}

/* ---- The other rules ----------------------------------------------------- */

static void draw_space(sti_sketch *k, int32_t from, int32_t to)
{
    enum { MOST = 20 };
    int32_t at = sti_sketch_state(k);
    sti_sketch_empty(k, from, to);
    sti_sketch_byte(k, from, to, ' ', ' ');
    sti_sketch_byte(k, from, at, '\n', '\n');
    for (int i = 0; i < MOST; i++) {
        const int32_t next = sti_sketch_state(k);
        sti_sketch_empty(k, at, to);
        sti_sketch_byte(k, at, next, ' ', ' ');
        sti_sketch_byte(k, at, next, '\t', '\t');
        at = next;
    }
    sti_sketch_empty(k, at, to);
}

/* Digits, min to max of them. */
static void digits(sti_sketch *k, int32_t from, int32_t to, int min, int max)
{
    for (int i = 0; i <= max; i++) {
        if (i >= min) sti_sketch_empty(k, from, to);
        if (i == max) break;
        const int32_t next = sti_sketch_state(k);
        sti_sketch_byte(k, from, next, '0', '9');
        from = next;
    }
}

static void draw_integer(sti_sketch *k, int32_t from, int32_t to)
{
    const int32_t sign = sti_sketch_state(k), more = sti_sketch_state(k);
    sti_sketch_empty(k, from, sign);
    sti_sketch_byte(k, from, sign, '-', '-');
    sti_sketch_byte(k, sign, to, '0', '0');
    sti_sketch_byte(k, sign, more, '1', '9');
    digits(k, more, to, 0, 17);
}

static void draw_number(sti_schema *c, int32_t from, int32_t to)
{
    sti_sketch *k = c->k;
    const int32_t whole = sti_sketch_state(k), point = sti_sketch_state(k);
    const int32_t rest = sti_sketch_state(k), e = sti_sketch_state(k);
    const int32_t sign = sti_sketch_state(k);
    draw_integer(k, from, whole);
    sti_sketch_empty(k, whole, rest);
    sti_sketch_byte(k, whole, point, '.', '.');
    digits(k, point, rest, 1, 17);
    sti_sketch_empty(k, rest, to);
    sti_sketch_byte(k, rest, e, 'e', 'e');
    sti_sketch_byte(k, rest, e, 'E', 'E');
    sti_sketch_empty(k, e, sign);
    sti_sketch_byte(k, e, sign, '+', '+');
    sti_sketch_byte(k, e, sign, '-', '-');
    digits(k, sign, to, 1, 2);
}

static void draw_value(sti_schema *c, int32_t from, int32_t to)
{
    static const sti_builtin kind[] = {STI_JSON_FREE_OBJECT, STI_JSON_FREE_ARRAY,
                                       STI_JSON_STRING, STI_JSON_NUMBER};
    static const char *const word[] = {"true", "false", "null"};
    for (size_t i = 0; i < 4; i++) sti_schema_call(c, from, to, kind[i]);
    for (size_t i = 0; i < 3; i++)
        sti_sketch_text(c->k, from, to, word[i], strlen(word[i]));
}

/* Any number of elements or members between brackets. */
static void draw_free(sti_schema *c, int32_t from, int32_t to, bool object)
{
    sti_sketch *k = c->k;
    const int32_t open = sti_sketch_state(k), one = sti_sketch_state(k);
    const int32_t after = sti_sketch_state(k), comma = sti_sketch_state(k);
    const int32_t close = sti_sketch_state(k);
    sti_sketch_byte(k, from, open, object ? '{' : '[', object ? '{' : '[');
    sti_schema_call(c, open, one, STI_JSON_SPACE);
    if (object) {
        const int32_t name = sti_sketch_state(k), colon = sti_sketch_state(k);
        const int32_t value = sti_sketch_state(k);
        sti_schema_call(c, one, name, STI_JSON_STRING);
        sti_sketch_byte(k, name, colon, ':', ':');
        sti_sketch_empty(k, colon, value);
        sti_sketch_byte(k, colon, value, ' ', ' ');
        sti_schema_call(c, value, after, STI_JSON_VALUE);
    } else {
        sti_schema_call(c, one, after, STI_JSON_VALUE);
    }
    sti_sketch_byte(k, after, comma, ',', ',');
    sti_schema_call(c, comma, one, STI_JSON_SPACE);
    sti_schema_call(c, after, close, STI_JSON_SPACE);
    sti_sketch_byte(k, open, to, object ? '}' : ']', object ? '}' : ']');
    sti_sketch_byte(k, close, to, object ? '}' : ']', object ? '}' : ']');
}

static void draw_builtin(sti_schema *c, sti_builtin what)
{
    static const sti_range wide = {0x80, 0x10FFFF};
    sti_sketch *k = c->k;
    const int32_t rule = c->builtin[what];
    sti_sketch_begin(k, rule);
    if (k->failed) return;
    const int32_t from = k->rule[rule].first, to = k->rule[rule].last;
    switch (what) {
    case STI_JSON_SPACE: draw_space(k, from, to); break;
    case STI_JSON_WIDE: sti_sketch_chars(k, from, to, &wide, 1); break;
    case STI_JSON_ESCAPE: draw_escape(k, from, to); break;
    case STI_JSON_STRING: draw_string(c, from, to); break;
    case STI_JSON_NUMBER: draw_number(c, from, to); break;
    case STI_JSON_INTEGER: draw_integer(k, from, to); break;
    case STI_JSON_VALUE: draw_value(c, from, to); break;
    case STI_JSON_FREE_OBJECT: draw_free(c, from, to, true); break;
    case STI_JSON_FREE_ARRAY: draw_free(c, from, to, false); break;
    case STI_BUILTINS: break;
    }
    sti_sketch_end(k, rule);
}

void sti_schema_draw_builtins(sti_schema *c)
{
    for (bool more = true; more && !c->k->failed;) {
        more = false;
        for (int i = 0; i < STI_BUILTINS && !c->k->failed; i++) {
            const int32_t rule = c->builtin[i];
            if (rule < 0 || c->k->rule[rule].drawn) continue;
            draw_builtin(c, (sti_builtin)i);
            more = true;
        }
    }
}

/* ---- Values that are given ----------------------------------------------- */

still_status sti_schema_literal(sti_schema *c, int32_t from, int32_t to,
                                const json_t *value)
{
    if (json_is_string(value)) {
        sti_schema_quoted(c, from, to, json_string_value(value),
                          json_string_length(value));
        return STILL_OK;
    }
    char *text = sti_json_text(value, JSON_COMPACT | JSON_ENCODE_ANY);
    if (!text) return sti_fail_memory(c->err, "schema", 0);
    sti_sketch_text(c->k, from, to, text, strlen(text));
    free(text);
    return STILL_OK;
}
