/* schema_ref.c - schemas that stand elsewhere: $ref, and the parts of allOf as one. */
#include <stdlib.h>
#include <string.h>

#include "grammar/schema.h"

enum { MOST_SEGMENT = 256 };

/* The next segment of a JSON pointer, unescaped: ~0, ~1 and %HH. NULL: there is none that
 * could be a name. */
static const char *next_segment(const char *p, char out[MOST_SEGMENT])
{
    size_t n = 0;
    while (*p && *p != '/') {
        char ch = *p++;
        unsigned char high, low;
        if (ch == '~') {
            if (*p != '0' && *p != '1') return NULL;
            ch = *p++ == '0' ? '~' : '/';
        } else if (ch == '%') {
            static const char digits[] = "0123456789abcdef";
            const char *a = *p ? strchr(digits, *p | 32) : NULL;
            const char *b = a && p[1] ? strchr(digits, p[1] | 32) : NULL;
            if (!b) return NULL;
            high = (unsigned char)(a - digits);
            low = (unsigned char)(b - digits);
            ch = (char)(high << 4 | low);
            p += 2;
        }
        if (n + 1 == MOST_SEGMENT || !ch) return NULL;
        out[n++] = ch;
    }
    out[n] = 0;
    return p;
}

still_status sti_schema_target(sti_schema *c, const json_t *ref, const json_t **out,
                               const char **pointer)
{
    const char *p = json_string_value(ref);
    if (!p) return sti_schema_refuse(c, STILL_E_FORMAT, "$ref", "expected a string");
    if (strlen(p) != json_string_length(ref) || p[0] != '#' || (p[1] && p[1] != '/'))
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "$ref",
                                 "only places in the same schema are supported: # or "
                                 "#/$defs/NAME");
    const json_t *at = c->root;
    *pointer = p[1] ? p + 1 : "/";
    for (p++; *p && at;) {
        char name[MOST_SEGMENT];
        p = next_segment(p + 1, name);
        if (!p) break;
        if (json_is_array(at)) {
            char *end;
            const unsigned long i = strtoul(name, &end, 10);
            at = *name && !*end ? json_array_get(at, i) : NULL;
        } else {
            at = json_object_get(at, name);
        }
    }
    if (!p || !at)
        return sti_schema_refuse(c, STILL_E_FORMAT, "$ref",
                                 "there is nothing at this place of the schema");
    *out = at;
    return STILL_OK;
}

const json_t *sti_schema_resolve(sti_schema *c, const json_t *schema,
                                 const char **pointer)
{
    for (int i = 0; i < STI_GRAMMAR_DEPTH; i++) {
        const json_t *ref = json_object_get(schema, "$ref");
        if (!ref) return schema;
        if (sti_schema_target(c, ref, &schema, pointer)) return NULL;
    }
    return NULL;
}

/* ---- allOf --------------------------------------------------------------- */

static bool is_note(const char *name)
{
    static const char *const note[] = {"title",    "description", "default",
                                       "examples", "$schema",     "$id",
                                       "$comment", "$defs",       "definitions"};
    for (size_t i = 0; i < sizeof note / sizeof *note; i++)
        if (!strcmp(name, note[i])) return true;
    return false;
}

/* Adds an object schema to what was united so far. */
static still_status unite(sti_schema *c, json_t *properties, json_t *required,
                          const json_t *part, int depth)
{
    const char *name, *member;
    json_t *value, *schema;
    const char *pointer;
    if (json_object_get(part, "$ref")) {
        const json_t *target = NULL;
        if (depth == STI_GRAMMAR_DEPTH)
            return sti_schema_refuse(c, STILL_E_LIMIT, "", "$ref leads to itself");
        STI_TRY(sti_schema_target(c, json_object_get(part, "$ref"), &target, &pointer));
        STI_TRY(unite(c, properties, required, target, depth + 1));
    }
    json_object_foreach((json_t *)part, name, value)
    {
        if (is_note(name) || !strcmp(name, "allOf") || !strcmp(name, "$ref")) continue;
        if (!strcmp(name, "type") && json_is_string(value) &&
            !strcmp(json_string_value(value), "object"))
            continue;
        if (!strcmp(name, "properties") && json_is_object(value)) {
            json_object_foreach(value, member, schema)
            {
                if (json_object_get(properties, member))
                    return sti_schema_refuse(
                        c, STILL_E_UNSUPPORTED, "",
                        "two parts of allOf have the same property");
                sti_json_set(&properties, member, json_incref(schema));
                if (!properties) return sti_fail_memory(c->err, "schema", 64);
            }
        } else if (!strcmp(name, "required") && json_is_array(value)) {
            for (size_t i = 0; i < json_array_size(value); i++) {
                sti_json_append(&required, json_incref(json_array_get(value, i)));
                if (!required) return sti_fail_memory(c->err, "schema", 64);
            }
        } else {
            return sti_schema_refuse(c, STILL_E_UNSUPPORTED, name,
                                     "not supported in allOf, which may unite the "
                                     "properties of objects");
        }
    }
    return STILL_OK;
}

static still_status unite_all(sti_schema *c, const json_t *schema, json_t *properties,
                              json_t *required)
{
    const json_t *list = json_object_get(schema, "allOf");
    if (!json_is_array(list) || !json_array_size(list))
        return sti_schema_refuse(c, STILL_E_FORMAT, "allOf",
                                 "expected a list of at least one schema");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *part = json_array_get(list, i);
        if (!json_is_object(part) || json_object_get(part, "allOf"))
            return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "allOf",
                                     "its parts must be objects without allOf");
        STI_TRY(unite(c, properties, required, part, 0));
    }
    return unite(c, properties, required, schema, 0);
}

still_status sti_schema_all_of(sti_schema *c, const json_t *schema, const json_t **out)
{
    json_t *properties = json_object(), *required = json_array();
    json_t *made = properties && required
                       ? json_pack("{s:s, s:O, s:O}", "type", "object", "properties",
                                   properties, "required", required)
                       : NULL;
    still_status status = made ? unite_all(c, schema, properties, required)
                               : sti_fail_memory(c->err, "schema", 64);
    if (made && status == STILL_OK) {
        sti_json_append(&c->made, json_incref(made));
        if (!c->made) status = sti_fail_memory(c->err, "schema", 64);
    }
    *out = made;
    json_decref(made);
    json_decref(properties);
    json_decref(required);
    return status;
}
