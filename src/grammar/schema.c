/* schema.c - reads a JSON schema: which keywords there are, and what a schema is of.
 *
 * A schema is drawn where it stands. What `$ref` names is a rule of its own, so that a
 * schema may contain itself. */
#include "grammar/schema.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* ---- Errors and paths ---------------------------------------------------- */

still_status sti_schema_refuse(sti_schema *c, still_status code, const char *key,
                               const char *why)
{
    size_t before = 0;
    if (*key) sti_path_push(c, key, &before);
    const char *path = c->path.n ? c->path.p : "/";
    const still_status status = sti_fail(c->err, code, "schema: %.600s: %s", path, why);
    if (*key) sti_path_pop(c, before);
    return status;
}

void sti_path_push(sti_schema *c, const char *segment, size_t *before)
{
    *before = c->path.n;
    sti_buf_puts(&c->path, "/");
    for (const char *p = segment; *p; p++) {
        if (*p == '~' || *p == '/')
            sti_buf_puts(&c->path, *p == '~' ? "~0" : "~1");
        else
            sti_buf_put(&c->path, p, 1);
    }
    if (c->path.failed) c->k->failed = STILL_E_MEMORY;
}

void sti_path_pop(sti_schema *c, size_t before)
{
    c->path.n = before;
    if (c->path.p) c->path.p[before] = 0;
}

/* ---- Keywords ------------------------------------------------------------ */

typedef enum use {
    NOTE,   /* says nothing of what is valid */
    OBJECT, /* of one type */
    ARRAY,
    STRING,
    NUMBER,
    SHAPE /* drawn below */
} use;

static const struct {
    const char *name;
    use use;
} keyword[] = {
    {"title", NOTE},
    {"description", NOTE},
    {"default", NOTE},
    {"examples", NOTE},
    {"example", NOTE},
    {"deprecated", NOTE},
    {"readOnly", NOTE},
    {"writeOnly", NOTE},
    {"discriminator", NOTE}, /* beside anyOf and oneOf: which member tells them apart */
    {"contentMediaType", NOTE},
    {"contentEncoding", NOTE},
    {"$schema", NOTE},
    {"$id", NOTE},
    {"$comment", NOTE},
    {"$defs", NOTE}, /* drawn where $ref names them */
    {"definitions", NOTE},
    {"$ref", SHAPE},
    {"anyOf", SHAPE},
    {"oneOf", SHAPE},
    {"allOf", SHAPE},
    {"enum", SHAPE},
    {"const", SHAPE},
    {"type", SHAPE},
    {"nullable", SHAPE},
    {"properties", OBJECT},
    {"required", OBJECT},
    {"additionalProperties", OBJECT},
    {"items", ARRAY},
    {"prefixItems", ARRAY},
    {"minItems", ARRAY},
    {"maxItems", ARRAY},
    {"uniqueItems", ARRAY},
    {"minLength", STRING},
    {"maxLength", STRING},
    {"pattern", STRING},
    {"format", STRING},
    {"minimum", NUMBER},
    {"maximum", NUMBER},
    {"exclusiveMinimum", NUMBER},
    {"exclusiveMaximum", NUMBER},
    {"multipleOf", NUMBER},
};
enum { N_KEYWORDS = sizeof keyword / sizeof *keyword };

static int find_keyword(const char *name)
{
    for (int i = 0; i < N_KEYWORDS; i++)
        if (!strcmp(keyword[i].name, name)) return i;
    return -1;
}

/* Uses of a schema's keywords as bits; refuses one that is not known. */
static still_status check_keywords(sti_schema *c, const json_t *schema, unsigned *uses)
{
    const char *name;
    json_t *value;
    *uses = 0;
    json_object_foreach((json_t *)schema, name, value)
    {
        const int i = find_keyword(name);
        if (i < 0)
            return sti_schema_refuse(c, STILL_E_UNSUPPORTED, name,
                                     "this keyword is not supported");
        *uses |= 1u << keyword[i].use;
    }
    return STILL_OK;
}

/* Beside a keyword that says it all: refuses another that would narrow it. Those in
 * `fine`, "a b", are looked after. */
static still_status check_alone(sti_schema *c, const json_t *schema, const char *key,
                                const char *fine)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)schema, name, value)
    {
        const int i = find_keyword(name);
        const size_t n = strlen(name);
        bool known = !strcmp(name, key) || (i >= 0 && keyword[i].use == NOTE);
        for (const char *p = fine; *p && !known; p += *p == ' ') {
            const size_t word = strcspn(p, " ");
            known = word == n && !memcmp(p, name, n);
            p += word;
        }
        if (known) continue;
        sti_buf why = {0};
        sti_buf_printf(&why, "not supported beside '%s'", key);
        const still_status status =
            why.failed ? sti_fail_memory(c->err, "schema", 64)
                       : sti_schema_refuse(c, STILL_E_UNSUPPORTED, name, why.p);
        sti_buf_free(&why);
        return status;
    }
    return STILL_OK;
}

/* ---- Types --------------------------------------------------------------- */

static const char *const type_name[] = {"object",  "array",   "string", "number",
                                        "integer", "boolean", "null"};
enum {
    TYPES = 7,
    T_OBJECT = 0,
    T_ARRAY,
    T_STRING,
    T_NUMBER,
    T_INTEGER,
    T_BOOLEAN,
    T_NULL
};

static unsigned type_bit(const json_t *name)
{
    for (int i = 0; i < TYPES; i++)
        if (json_is_string(name) && !strcmp(json_string_value(name), type_name[i]))
            return 1u << i;
    return 0;
}

static still_status add_type(sti_schema *c, const json_t *name, unsigned *types)
{
    *types |= type_bit(name);
    if (type_bit(name)) return STILL_OK;
    return sti_schema_refuse(
        c, STILL_E_FORMAT, "type",
        "expected object, array, string, number, integer, boolean, "
        "null, or a list of them");
}

/* The types a schema allows, as bits. Where it does not say, its keywords do: what is valid
 * for that type is valid. */
static still_status find_types(sti_schema *c, const json_t *schema, unsigned uses,
                               unsigned *types)
{
    const json_t *type = json_object_get(schema, "type");
    *types = 0;
    if (json_is_array(type)) {
        for (size_t i = 0; i < json_array_size(type); i++)
            STI_TRY(add_type(c, json_array_get(type, i), types));
        if (!*types) return add_type(c, NULL, types);
    } else if (type) {
        STI_TRY(add_type(c, type, types));
    } else {
        *types |= (uses >> OBJECT & 1u) << T_OBJECT;
        *types |= (uses >> ARRAY & 1u) << T_ARRAY;
        *types |= (uses >> STRING & 1u) << T_STRING;
        *types |= (uses >> NUMBER & 1u) << T_NUMBER;
    }
    if (*types >> T_NUMBER & 1) *types &= ~(1u << T_INTEGER);
    const json_t *nullable = json_object_get(schema, "nullable");
    if (nullable && !json_is_boolean(nullable))
        return sti_schema_refuse(c, STILL_E_FORMAT, "nullable",
                                 "expected true or false");
    if (json_is_true(nullable) && *types) *types |= 1u << T_NULL;
    return STILL_OK;
}

unsigned sti_schema_types(const json_t *schema)
{
    const json_t *type = json_object_get(schema, "type");
    const unsigned number = 1u << T_NUMBER | 1u << T_INTEGER;
    unsigned types = type_bit(type);
    for (size_t i = 0; i < json_array_size(type); i++)
        types |= type_bit(json_array_get(type, i));
    if (json_is_true(json_object_get(schema, "nullable"))) types |= 1u << T_NULL;
    if (!type) types = (1u << TYPES) - 1;
    return types & number ? types | number : types;
}

bool sti_schema_has_type(const json_t *v, unsigned types)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return types >> T_OBJECT & 1;
    case JSON_ARRAY: return types >> T_ARRAY & 1;
    case JSON_STRING: return types >> T_STRING & 1;
    case JSON_INTEGER: return (types >> T_INTEGER | types >> T_NUMBER) & 1;
    case JSON_REAL: return types >> T_NUMBER & 1;
    case JSON_NULL: return types >> T_NULL & 1;
    default: return types >> T_BOOLEAN & 1;
    }
}

/* ---- Rules --------------------------------------------------------------- */

/* The rule of a name, in which the schema's pointer begins at `pointer_at`; it is drawn
 * later, if it is new. */
static int32_t rule_at(sti_schema *c, const char *name, size_t pointer_at,
                       const json_t *schema)
{
    const int32_t before = c->k->n_rules;
    const int32_t rule = sti_sketch_find_rule(c->k, name, strlen(name));
    if (rule < before) return rule; /* or failed */
    if (c->n_pending == c->pending_room) {
        const size_t room = c->pending_room ? 2 * c->pending_room : 16;
        sti_pending *grown = sti_grow(c->pending, room, sizeof *grown);
        if (!grown) {
            c->k->failed = STILL_E_MEMORY;
            return -1;
        }
        c->pending = grown;
        c->pending_room = room;
    }
    c->pending[c->n_pending++] = (sti_pending){rule, pointer_at, schema};
    return rule;
}

int32_t sti_schema_rule(sti_schema *c, const json_t *schema, const char *segment)
{
    size_t before = 0;
    sti_path_push(c, segment, &before);
    const int32_t rule = c->k->failed ? -1 : rule_at(c, c->path.p, 0, schema);
    sti_path_pop(c, before);
    return rule;
}

/* ---- Shapes -------------------------------------------------------------- */

static still_status draw_types(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema, unsigned types)
{
    for (int i = 0; i < TYPES; i++) {
        if (!(types >> i & 1)) continue;
        /* Each starts at a state of its own: it may come back there. */
        const int32_t at = sti_sketch_state(c->k);
        sti_sketch_empty(c->k, from, at);
        switch (i) {
        case T_OBJECT: STI_TRY(sti_schema_object(c, at, to, schema)); break;
        case T_ARRAY: STI_TRY(sti_schema_array(c, at, to, schema)); break;
        case T_STRING: STI_TRY(sti_schema_string(c, at, to, schema)); break;
        case T_NUMBER: STI_TRY(sti_schema_number(c, at, to, schema, false)); break;
        case T_INTEGER: STI_TRY(sti_schema_number(c, at, to, schema, true)); break;
        case T_BOOLEAN:
            sti_sketch_text(c->k, at, to, "true", 4);
            sti_sketch_text(c->k, at, to, "false", 5);
            break;
        default: sti_sketch_text(c->k, at, to, "null", 4); break;
        }
    }
    return STILL_OK;
}

static still_status draw_values(sti_schema *c, int32_t from, int32_t to,
                                const json_t *schema, const char *key)
{
    const json_t *value = json_object_get(schema, key);
    const bool list = !strcmp(key, "enum");
    const size_t n = list ? json_array_size(value) : 1;
    unsigned types, drawn = 0;
    STI_TRY(check_alone(c, schema, key, "type nullable"));
    STI_TRY(find_types(c, schema, 0, &types));
    if (list && !json_is_array(value))
        return sti_schema_refuse(c, STILL_E_FORMAT, key, "expected a list of values");
    for (size_t i = 0; i < n; i++) {
        const json_t *one = list ? json_array_get(value, i) : value;
        if (types && !sti_schema_has_type(one, types)) continue;
        STI_TRY(sti_schema_literal(c, from, to, one));
        drawn++;
    }
    if (json_is_true(json_object_get(schema, "nullable"))) {
        sti_sketch_text(c->k, from, to, "null", 4);
        drawn++;
    }
    if (!drawn)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, key,
                                 "nothing is valid: no value has the type");
    return STILL_OK;
}

/* The schema with one more property that is required; owned by c->made. */
static still_status require(sti_schema *c, const json_t *schema, const char *name,
                            const json_t **out)
{
    const json_t *given = json_object_get(schema, "required");
    json_t *copy = json_object(), *required = json_array();
    sti_json_merge(&copy, json_incref((json_t *)schema));
    for (size_t i = 0; i < json_array_size(given); i++)
        sti_json_append(&required, json_incref(json_array_get(given, i)));
    sti_json_append(&required, json_string(name));
    sti_json_set(&copy, "required", required);
    *out = copy;
    sti_json_append(&c->made, copy);
    return c->made ? STILL_OK : sti_fail_memory(c->err, "schema", 64);
}

/* One of the schemas between which `tag` tells: objects then have that member. pydantic
 * does not require it where it has a default. */
static still_status draw_tagged(sti_schema *c, int32_t from, int32_t to,
                                const json_t *schema, const char *tag,
                                const char *segment)
{
    const char *pointer = NULL;
    const json_t *target = sti_schema_resolve(c, schema, &pointer);
    sti_buf name = {0};
    if (!json_object_get(json_object_get(target, "properties"), tag) ||
        sti_schema_requires(target, tag))
        return sti_schema_draw(c, from, to, schema, segment);
    STI_TRY(require(c, target, tag, &target));
    if (!pointer) return sti_schema_draw(c, from, to, target, segment);
    sti_buf_printf(&name, "(%zu %s)", strlen(tag), tag);
    const size_t pointer_at = name.n;
    sti_buf_puts(&name, pointer);
    if (name.failed)
        c->k->failed = STILL_E_MEMORY;
    else
        sti_sketch_call(c->k, from, to, rule_at(c, name.p, pointer_at, target));
    sti_buf_free(&name);
    return STILL_OK;
}

static still_status draw_choices(sti_schema *c, int32_t from, int32_t to,
                                 const json_t *schema, const char *key)
{
    const json_t *list = json_object_get(schema, key);
    const char *tag = json_string_value(
        json_object_get(json_object_get(schema, "discriminator"), "propertyName"));
    STI_TRY(check_alone(c, schema, key, "nullable"));
    if (!json_is_array(list) || !json_array_size(list))
        return sti_schema_refuse(c, STILL_E_FORMAT, key,
                                 "expected a list of at least one schema");
    if (!strcmp(key, "oneOf")) STI_TRY(sti_schema_one_of(c, list, tag));
    size_t before = 0;
    sti_path_push(c, key, &before);
    for (size_t i = 0; i < json_array_size(list); i++) {
        sti_buf number = {0};
        sti_buf_printf(&number, "%zu", i);
        const int32_t at = sti_sketch_state(c->k);
        sti_sketch_empty(c->k, from, at);
        const still_status status =
            number.failed ? sti_fail_memory(c->err, "schema", 32)
            : tag ? draw_tagged(c, at, to, json_array_get(list, i), tag, number.p)
                  : sti_schema_draw(c, at, to, json_array_get(list, i), number.p);
        sti_buf_free(&number);
        STI_TRY(status);
    }
    sti_path_pop(c, before);
    if (json_is_true(json_object_get(schema, "nullable")))
        sti_sketch_text(c->k, from, to, "null", 4);
    return STILL_OK;
}

/* ---- References -------------------------------------------------------- */

static still_status draw_ref(sti_schema *c, int32_t from, int32_t to,
                             const json_t *schema)
{
    const char *pointer;
    const json_t *target;
    STI_TRY(check_alone(c, schema, "$ref", ""));
    STI_TRY(sti_schema_target(c, json_object_get(schema, "$ref"), &target, &pointer));
    sti_sketch_call(c->k, from, to, rule_at(c, pointer, 0, target));
    return STILL_OK;
}

static still_status draw_all_of(sti_schema *c, int32_t from, int32_t to,
                                const json_t *schema)
{
    const json_t *list = json_object_get(schema, "allOf"), *united;
    if (json_is_array(list) && json_array_size(list) == 1) {
        unsigned uses;
        STI_TRY(check_keywords(c, schema, &uses));
        if (!(uses & ~(1u << NOTE | 1u << SHAPE)) && !json_object_get(schema, "type")) {
            size_t before = 0;
            STI_TRY(check_alone(c, schema, "allOf", ""));
            sti_path_push(c, "allOf", &before);
            STI_TRY(sti_schema_draw(c, from, to, json_array_get(list, 0), "0"));
            sti_path_pop(c, before);
            return STILL_OK;
        }
    }
    STI_TRY(sti_schema_all_of(c, schema, &united));
    return sti_schema_object(c, from, to, united);
}

static still_status draw_object(sti_schema *c, int32_t from, int32_t to,
                                const json_t *schema)
{
    unsigned uses, types;
    STI_TRY(check_keywords(c, schema, &uses));
    if (json_object_get(schema, "$ref")) return draw_ref(c, from, to, schema);
    if (json_object_get(schema, "allOf")) return draw_all_of(c, from, to, schema);
    if (json_object_get(schema, "anyOf"))
        return draw_choices(c, from, to, schema, "anyOf");
    if (json_object_get(schema, "oneOf"))
        return draw_choices(c, from, to, schema, "oneOf");
    if (json_object_get(schema, "const"))
        return draw_values(c, from, to, schema, "const");
    if (json_object_get(schema, "enum"))
        return draw_values(c, from, to, schema, "enum");
    STI_TRY(find_types(c, schema, uses, &types));
    if (!types) {
        sti_schema_call(c, from, to, STI_JSON_VALUE);
        return STILL_OK;
    }
    return draw_types(c, from, to, schema, types);
}

still_status sti_schema_draw(sti_schema *c, int32_t from, int32_t to,
                             const json_t *schema, const char *segment)
{
    size_t before = c->path.n;
    still_status status = STILL_OK;
    if (*segment) sti_path_push(c, segment, &before);
    if (c->depth == STI_GRAMMAR_DEPTH)
        status = sti_schema_refuse(c, STILL_E_LIMIT, "", "schemas are nested too deep");
    else if (json_is_true(schema))
        sti_schema_call(c, from, to, STI_JSON_VALUE);
    else if (json_is_false(schema))
        status = sti_schema_refuse(c, STILL_E_UNSUPPORTED, "",
                                   "nothing is valid for the schema 'false'");
    else if (!json_is_object(schema))
        status = sti_schema_refuse(c, STILL_E_FORMAT, "",
                                   "expected a schema: an object, true or false");
    else {
        c->depth++;
        status = draw_object(c, from, to, schema);
        c->depth--;
    }
    if (status == STILL_OK && c->k->failed) {
        sti_buf where = {0};
        sti_buf_printf(&where, "schema: %.600s", c->path.n ? c->path.p : "/");
        status = sti_sketch_fail(c->k, where.p ? where.p : "schema", c->err);
        sti_buf_free(&where);
    }
    sti_path_pop(c, before);
    return status;
}

/* ---- All of it ----------------------------------------------------------- */

/* Rules are drawn one after the other; drawing one may ask for more. */
static still_status draw_pending(sti_schema *c)
{
    for (size_t i = 0; i < c->n_pending; i++) {
        const sti_pending next = c->pending[i];
        sti_sketch_begin(c->k, next.rule);
        c->path.n = 0;
        sti_buf_puts(&c->path, c->k->rule[next.rule].name + next.pointer_at);
        if (c->path.n == 1) sti_path_pop(c, 0); /* "/" */
        const sti_sketch_rule *r = &c->k->rule[next.rule];
        STI_TRY(sti_schema_draw(c, r->first, r->last, next.schema, ""));
        sti_sketch_end(c->k, next.rule);
    }
    sti_schema_draw_builtins(c);
    if (c->k->failed) return sti_sketch_fail(c->k, "schema", c->err);
    return STILL_OK;
}

still_status sti_schema_read(const char *text, size_t n, sti_sketch *k, int32_t *root,
                             still_error *err)
{
    sti_schema c = {.k = k, .err = err};
    still_status status = sti_json_read(
        "schema", text, n, STI_JSON_ANY | STI_JSON_ONCE | STI_JSON_NUL, &c.root, err);
    if (status != STILL_OK) return status;
    for (int i = 0; i < STI_BUILTINS; i++) c.builtin[i] = -1;
    c.made = json_array();
    *root = c.made ? rule_at(&c, "/", 0, c.root) : -1;
    if (*root < 0)
        status = sti_fail_memory(err, "schema", 64);
    else
        status = draw_pending(&c);
    json_decref(c.root);
    json_decref(c.made);
    free(c.pending);
    sti_buf_free(&c.path);
    return status;
}
