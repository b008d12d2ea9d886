/* schema_object.c - objects: members in the order of `properties`, those that are not
 * required may be left out; then members of other names, where they are allowed.
 *
 * After i members have been written or left out, the text is at one of two states: nothing
 * was written yet, or something was, and the next member needs a comma. */
#include <string.h>

#include "grammar/schema.h"

enum { MOST_BESIDE = 256 }; /* properties, where other names are to be told from them */

typedef struct members {
    const json_t *properties; /* NULL: none */
    const json_t *others; /* schema of members with other names; NULL: none may be */
} members;

bool sti_schema_requires(const json_t *schema, const char *name)
{
    const json_t *required = json_object_get(schema, "required");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *one = json_string_value(json_array_get(required, i));
        if (one && !strcmp(one, name)) return true;
    }
    return false;
}

static void colon(sti_schema *c, int32_t from, int32_t to)
{
    const int32_t after = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, after, ':', ':');
    sti_sketch_empty(c->k, after, to);
    sti_sketch_byte(c->k, after, to, ' ', ' ');
}

static void comma(sti_schema *c, int32_t from, int32_t to)
{
    const int32_t after = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, after, ',', ',');
    sti_schema_call(c, after, to, STI_JSON_SPACE);
}

/* One member between "nothing yet" or "something", and "something". */
static still_status draw_member(sti_schema *c, const int32_t at[2], int32_t to,
                                const char *name, const json_t *schema,
                                const char *segment)
{
    sti_sketch *k = c->k;
    const int32_t start = sti_sketch_state(k), named = sti_sketch_state(k);
    const int32_t value = sti_sketch_state(k);
    sti_sketch_empty(k, at[0], start);
    comma(c, at[1], start);
    sti_schema_quoted(c, start, named, name, strlen(name));
    colon(c, named, value);
    return sti_schema_draw(c, value, to, schema, segment);
}

/* ---- Other names --------------------------------------------------------- */

/* A name without escapes that is none of `properties`, from behind its first quote, where
 * `n` bytes `prefix` of it were read; names that begin with the prefix are followed byte by
 * byte, and once none is left anything may come. */
static void draw_other_name(sti_schema *c, int32_t from, int32_t free_from, int32_t to,
                            const json_t *properties, const char *prefix, size_t n)
{
    sti_sketch *k = c->k;
    int32_t next[256];
    bool taken = false, wide = false,
         cut = false; /* cut: a character is not complete */
    const char *name, *longer[256] = {NULL};
    json_t *schema;
    if (k->failed) return;
    json_object_foreach((json_t *)properties, name, schema)
    {
        if (strlen(name) < n || memcmp(name, prefix, n) != 0) continue;
        const unsigned char byte = (unsigned char)name[n];
        taken |= byte == 0;
        wide |= byte >= 0x80;
        cut |= (byte & 0xC0) == 0x80;
        longer[byte] = name;
    }
    for (unsigned byte = 0x20; byte < 256; byte++) {
        next[byte] = -1;
        if (byte == '"' || byte == '\\') continue;
        if (longer[byte])
            next[byte] = sti_sketch_state(k);
        else if (byte < 0x80 && !cut)
            next[byte] = free_from;
        if (next[byte] >= 0) sti_sketch_byte(k, from, next[byte], byte, byte);
    }
    if (!wide) sti_schema_call(c, from, free_from, STI_JSON_WIDE);
    if (!taken && !cut) sti_sketch_byte(k, from, to, '"', '"');
    for (unsigned byte = 0x20; byte < 256; byte++)
        if (longer[byte] && byte != '"' && byte != '\\')
            draw_other_name(c, next[byte], free_from, to, properties, longer[byte],
                            n + 1);
}

/* Members of other names, any number, from both states and back to "something". */
static still_status draw_others(sti_schema *c, const int32_t at[2], const members *m)
{
    sti_sketch *k = c->k;
    const int32_t start = sti_sketch_state(k), inside = sti_sketch_state(k);
    const int32_t free_name = sti_sketch_state(k), named = sti_sketch_state(k);
    const int32_t value = sti_sketch_state(k);
    sti_sketch_empty(k, at[0], start);
    comma(c, at[1], start);
    sti_sketch_byte(k, start, inside, '"', '"');
    if (json_object_size(m->properties)) {
        const char *name;
        json_t *schema;
        if (json_object_size(m->properties) > MOST_BESIDE)
            return sti_schema_refuse(c, STILL_E_LIMIT, "additionalProperties",
                                     "not supported beside more than 256 properties");
        json_object_foreach((json_t *)m->properties, name, schema) if (
            strlen(name) >
            STI_GRAMMAR_DEPTH) return sti_schema_refuse(c, STILL_E_UNSUPPORTED,
                                                        "additionalProperties",
                                                        "not supported beside a "
                                                        "property whose name "
                                                        "is longer than 128 bytes");
        draw_other_name(c, inside, free_name, named, m->properties, "", 0);
    } else {
        sti_sketch_empty(k, inside, free_name);
    }
    sti_schema_char(c, free_name, free_name);
    sti_sketch_byte(k, free_name, named, '"', '"');
    colon(c, named, value);
    return sti_schema_draw(c, value, at[1], m->others, "additionalProperties");
}

/* ---- All members --------------------------------------------------------- */

static still_status check(sti_schema *c, const json_t *schema, members *m)
{
    static const char *const key[] = {"properties", "required"};
    const json_t *more = json_object_get(schema, "additionalProperties");
    for (int i = 0; i < 2; i++) {
        const json_t *v = json_object_get(schema, key[i]);
        if (v && !(i ? json_is_array(v) : json_is_object(v)))
            return sti_schema_refuse(c, STILL_E_FORMAT, key[i],
                                     i ? "expected a list of names"
                                       : "expected an object of schemas");
    }
    m->properties = json_object_get(schema, "properties");
    m->others = json_is_false(more) ? NULL : more;
    return STILL_OK;
}

/* Names that are required and have no property. */
static still_status draw_unnamed(sti_schema *c, const json_t *schema, const members *m,
                                 int32_t at[2], json_t *required)
{
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        if (!name)
            return sti_schema_refuse(c, STILL_E_FORMAT, "required",
                                     "expected a list of names");
        if (json_object_get(m->properties, name)) continue;
        if (json_is_false(json_object_get(schema, "additionalProperties")))
            return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "required",
                                     "nothing is valid: a name is no property, and "
                                     "additionalProperties is false");
        if (m->others)
            return sti_schema_refuse(
                c, STILL_E_UNSUPPORTED, "required",
                "a name that is no property is not supported beside "
                "additionalProperties");
        const int32_t none = sti_sketch_state(c->k), some = sti_sketch_state(c->k);
        STI_TRY(draw_member(c, at, some, name, json_true(), ""));
        at[0] = none;
        at[1] = some;
    }
    return STILL_OK;
}

still_status sti_schema_object(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema)
{
    sti_sketch *k = c->k;
    json_t *required = json_object_get(schema, "required"), *value;
    const char *name;
    members m = {0};
    size_t before = 0;
    STI_TRY(check(c, schema, &m));
    if (!m.properties && !json_array_size(required) &&
        (!m.others || json_is_true(m.others)) &&
        !json_is_false(json_object_get(schema, "additionalProperties"))) {
        sti_schema_call(c, from, to, STI_JSON_FREE_OBJECT);
        return STILL_OK;
    }
    const int32_t open = sti_sketch_state(k), close = sti_sketch_state(k);
    int32_t at[2] = {sti_sketch_state(k), sti_sketch_state(k)};
    sti_sketch_byte(k, from, open, '{', '{');
    sti_schema_call(c, open, at[0], STI_JSON_SPACE);
    sti_path_push(c, "properties", &before);
    json_object_foreach((json_t *)m.properties, name, value)
    {
        const int32_t next[2] = {sti_sketch_state(k), sti_sketch_state(k)};
        const bool must = sti_schema_requires(schema, name);
        if (!must && json_is_false(value)) continue; /* it never is there */
        STI_TRY(draw_member(c, at, next[1], name, value, name));
        if (!must)
            for (int i = 0; i < 2; i++) sti_sketch_empty(k, at[i], next[i]);
        memcpy(at, next, sizeof at);
    }
    sti_path_pop(c, before);
    STI_TRY(draw_unnamed(c, schema, &m, at, required));
    if (m.others) STI_TRY(draw_others(c, at, &m));
    sti_sketch_byte(k, at[0], to, '}', '}');
    sti_schema_call(c, at[1], close, STI_JSON_SPACE);
    sti_sketch_byte(k, close, to, '}', '}');
    return STILL_OK;
}
