/* json.c - numbers within a range out of JSON values, and values that are built whole or
 * not at all. */
#include "base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/error.h"

/* ---- Numbers ------------------------------------------------------------- */

/* What an error says of a value. */
static const char *describe(const json_t *v, char room[40])
{
    if (!v) return "missing";
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: snprintf(room, 40, "%lld", json_integer_value(v)); return room;
    case JSON_REAL: snprintf(room, 40, "%.17g", json_real_value(v)); return room;
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    default: return "null";
    }
}

still_status sti_json_int(const char *what, const json_t *o, const char *key,
                          int64_t lo, int64_t hi, int64_t *out, still_error *err)
{
    const json_t *v = json_object_get(o, key);
    const json_int_t x = json_integer_value(v);
    char room[40];
    if (!json_is_integer(v) || x < lo || x > hi)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: '%s' is %s, expected a whole number from %" PRId64
                        " to %" PRId64,
                        what, key, describe(v, room), lo, hi);
    *out = x;
    return STILL_OK;
}

still_status sti_json_real(const char *what, const json_t *o, const char *key,
                           double lo, double hi, double *out, still_error *err)
{
    const json_t *v = json_object_get(o, key);
    const double x = json_number_value(v);
    char room[40];
    if (!json_is_number(v) || !(x >= lo && x <= hi))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: '%s' is %s, expected a number from %g to %g", what, key,
                        describe(v, room), lo, hi);
    *out = x;
    return STILL_OK;
}

/* ---- Building ------------------------------------------------------------ */

static void check(json_t **to, int failed)
{
    if (!failed) return;
    json_decref(*to);
    *to = NULL;
}

void sti_json_set(json_t **to, const char *key, json_t *v)
{
    check(to, json_object_set_new(*to, key, v)); /* takes v even when it fails */
}

void sti_json_append(json_t **to, json_t *v)
{
    check(to, json_array_append_new(*to, v));
}

void sti_json_set_real(json_t **to, const char *key, double v)
{
    if (isfinite(v)) sti_json_set(to, key, json_real(v));
}

json_t *sti_json_of_real(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

void sti_json_merge(json_t **to, json_t *from)
{
    check(to, json_object_update(*to, from));
    json_decref(from);
}

static int put(const char *p, size_t n, void *user)
{
    sti_buf *b = user;
    sti_buf_put(b, p, n);
    return b->failed ? -1 : 0; /* jansson ignores it for names, b does not */
}

char *sti_json_text(const json_t *v, size_t flags)
{
    sti_buf b = {0};
    if (json_dump_callback(v, put, &b, flags) == 0 && !b.failed) return b.p;
    sti_buf_free(&b);
    return NULL;
}
