/* schema_one_of.c - oneOf: a text must be valid for exactly one of its schemas, so no value
 * may be valid for two. That is shown where it is easy to show: by types, by values that are
 * given, by a property that both objects need and that tells them apart. */
#include <stdio.h>
#include <string.h>

#include "grammar/schema.h"

enum { MOST_WORK = 4000000, MOST_DEPTH = 16 };

typedef struct search {
    sti_schema *c;
    const char *tag; /* a member that the schemas of the list require, too; or NULL */
    int work;        /* comparisons that may still be made */
    int depth;
} search;

/* False: it takes too long. */
static bool work(search *s)
{
    return s->work > 0 && s->work-- > 0;
}

/* ---- What tells two schemas apart ---------------------------------------- */

/* The values of const or enum as a list; NULL: the schema has neither. */
static json_t *values_of(const json_t *schema)
{
    json_t *one = json_object_get(schema, "const");
    if (one) return json_pack("[O]", one);
    return json_incref(json_object_get(schema, "enum"));
}

static bool differ(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) != json_number_value(b);
    if (json_is_object(a) || json_is_array(a)) return json_typeof(a) != json_typeof(b);
    return !json_equal(a, b);
}

/* Whether each of the values is outside of a schema that has the values `other`, or
 * NULL, and the types. */
static bool values_apart(search *s, const json_t *list, const json_t *other,
                         unsigned types)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        bool in = !other && sti_schema_has_type(v, types);
        for (size_t j = 0; j < json_array_size(other) && !in; j++)
            in = !work(s) || !differ(v, json_array_get(other, j));
        if (in || !work(s)) return false;
    }
    return true;
}

static bool is_apart(search *s, const json_t *a, const json_t *b);

/* Whether each schema of the list is apart from b. */
static bool list_apart(search *s, const json_t *list, const json_t *b)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!is_apart(s, json_array_get(list, i), b)) return false;
    return json_array_size(list) > 0;
}

/* Whether objects of a, which have the member, are no objects of b. */
static bool member_apart(search *s, const json_t *a, const json_t *b, const char *name)
{
    const json_t *mine = json_object_get(json_object_get(a, "properties"), name);
    const json_t *others = json_object_get(json_object_get(b, "properties"), name);
    if (!mine || !work(s)) return false;
    if (others) return is_apart(s, mine, others);
    return json_is_false(json_object_get(b, "additionalProperties"));
}

static bool objects_apart(search *s, const json_t *a, const json_t *b)
{
    const json_t *required = json_object_get(a, "required");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        if (name && member_apart(s, a, b, name)) return true;
    }
    return s->tag && s->depth == 1 && member_apart(s, a, b, s->tag);
}

static bool shapes_apart(search *s, const json_t *a, const json_t *b)
{
    const unsigned of_a = sti_schema_types(a), of_b = sti_schema_types(b);
    json_t *in_a = values_of(a), *in_b = values_of(b);
    bool apart;
    if (in_a)
        apart = values_apart(s, in_a, in_b, of_b);
    else if (in_b)
        apart = values_apart(s, in_b, NULL, of_a);
    else if ((of_a & of_b) == STI_ONLY_OBJECTS)
        apart = objects_apart(s, a, b) || objects_apart(s, b, a);
    else
        apart = !(of_a & of_b);
    json_decref(in_a);
    json_decref(in_b);
    return apart;
}

static bool is_apart(search *s, const json_t *a, const json_t *b)
{
    static const char *const lists[] = {"anyOf", "oneOf"};
    bool apart = false;
    const char *pointer;
    a = sti_schema_resolve(s->c, a, &pointer);
    b = sti_schema_resolve(s->c, b, &pointer);
    if (!json_is_object(a) || !json_is_object(b) || s->depth == MOST_DEPTH || !work(s))
        return false;
    s->depth++;
    for (int i = 0; i < 2 && !apart; i++)
        apart = list_apart(s, json_object_get(a, lists[i]), b) ||
                list_apart(s, json_object_get(b, lists[i]), a);
    apart = apart || shapes_apart(s, a, b);
    s->depth--;
    return apart;
}

still_status sti_schema_one_of(sti_schema *c, const json_t *list, const char *tag)
{
    search s = {.c = c, .tag = tag, .work = MOST_WORK};
    for (size_t i = 0; i < json_array_size(list); i++)
        for (size_t j = 0; j < i; j++) {
            char why[200];
            if (is_apart(&s, json_array_get(list, j), json_array_get(list, i)))
                continue;
            snprintf(why, sizeof why,
                     "a value may be valid for both %zu and %zu: use anyOf, or tell "
                     "them apart by type or by the const of a required property",
                     j, i);
            return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "oneOf", why);
        }
    return STILL_OK;
}
