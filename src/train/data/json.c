/* json.c - the elements of an array in a JSON text, one at a time.
 *
 * Parsed as a whole, a list of numbers takes twenty times its bytes; here it is the text
 * and the values of one element, whose size is capped. The array is the text itself, or
 * "data" of the object that the text is. */
#include <string.h>

#include "train/data/parts.h"

enum { MOST = 32 << 20 }; /* bytes of an element */

static still_status fail_at(const sti_elements *e, size_t at, const char *why,
                            still_error *err)
{
    size_t line = 1, start = 0;
    if (at > e->n) at = e->n;
    for (size_t i = 0; i < at; i++)
        if (e->p[i] == '\n') line++, start = i + 1;
    return sti_fail(err, STILL_E_FORMAT, "%s: line %zu, column %zu: %s", e->path, line,
                    at - start + 1, why);
}

/* The next byte that is no white space; 0 at the end. */
static char peek(sti_elements *e)
{
    while (e->at < e->n && e->p[e->at] && strchr(" \t\r\n", e->p[e->at])) e->at++;
    return e->at < e->n ? e->p[e->at] : 0;
}

static still_status take_char(sti_elements *e, char c, const char *why,
                              still_error *err)
{
    if (peek(e) != c) return fail_at(e, e->at, why, err);
    e->at++;
    return STILL_OK;
}

static still_status take_value(sti_elements *e, json_t **out, still_error *err)
{
    const char *why;
    const size_t end = e->n - e->at > MOST ? e->at + MOST : e->n;
    *out = sti_json_next(e->p, end, &e->at, STI_JSON_NUL | STI_JSON_ANY, &why);
    if (*out) return STILL_OK;
    if (!why) return sti_fail_memory(err, e->path, end - e->at);
    if (e->at == end && end < e->n)
        return sti_fail(err, STILL_E_LIMIT, "%s: a record is longer than %d MiB",
                        e->path, MOST >> 20);
    return fail_at(e, e->at, why, err);
}

/* A member of the object: reads its name, and its value unless that is the array. */
static still_status take_member(sti_elements *e, bool *found, still_error *err)
{
    json_t *v;
    if (peek(e) != '"') return fail_at(e, e->at, "expected a name in quotes", err);
    STI_TRY(take_value(e, &v, err));
    const bool data = strcmp(json_string_value(v), "data") == 0;
    json_decref(v);
    STI_TRY(take_char(e, ':', "expected ':'", err));
    *found = peek(e) == '[' && data && !e->in_object;
    if (*found) return STILL_OK;
    STI_TRY(take_value(e, &v, err));
    json_decref(v);
    return STILL_OK;
}

/* What follows the array, or an object without one: members up to the end. */
static still_status take_rest(sti_elements *e, still_error *err)
{
    bool found = false;
    while (e->in_object && peek(e) == ',') {
        e->at++;
        STI_TRY(take_member(e, &found, err));
    }
    if (e->in_object) STI_TRY(take_char(e, '}', "expected ',' or '}'", err));
    return peek(e) || e->at < e->n ? fail_at(e, e->at, "end of file expected", err)
                                   : STILL_OK;
}

/* Stands behind the array's bracket, or fails. */
static still_status find_array(sti_elements *e, still_error *err)
{
    bool found = peek(e) == '[';
    if (peek(e) == '{') {
        e->at++;
        while (!found && peek(e) != '}') {
            STI_TRY(take_member(e, &found, err));
            if (!found && peek(e) != '}')
                STI_TRY(take_char(e, ',', "expected ',' or '}'", err));
        }
        e->in_object = true;
        if (!found) STI_TRY(take_rest(e, err));
    } else if (!found) {
        json_t *v;
        STI_TRY(take_value(e, &v, err));
        json_decref(v);
        STI_TRY(take_rest(e, err));
    }
    e->is_json = !found;
    if (found) return take_char(e, '[', "expected '['", err);
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: expected an array of records, or an object with one as "
                    "\"data\"",
                    e->path);
}

still_status sti_elements_open(sti_elements *e, const char *path, const char *p,
                               size_t n, still_error *err)
{
    *e = (sti_elements){.path = path, .p = p, .n = n};
    STI_TRY(find_array(e, err));
    const sti_elements start = *e;
    json_t *v;
    do { /* all of it must be right before the first is handed out */
        STI_TRY(sti_elements_next(e, &v, err));
        json_decref(v);
    } while (v);
    *e = start;
    return STILL_OK;
}

still_status sti_elements_next(sti_elements *e, json_t **out, still_error *err)
{
    *out = NULL;
    if (e->ended) return STILL_OK;
    e->ended = e->taken == 0 && peek(e) == ']';
    if (!e->ended) {
        STI_TRY(take_value(e, out, err));
        e->taken++;
        e->ended = peek(e) == ']';
        if (!e->ended && peek(e) != ',') {
            json_decref(*out);
            *out = NULL;
            return fail_at(e, e->at, "expected ',' or ']'", err);
        }
    }
    e->at++;
    if (!e->ended) return STILL_OK;
    const still_status st = take_rest(e, err);
    if (st == STILL_OK) return STILL_OK;
    json_decref(*out);
    *out = NULL;
    return st;
}
