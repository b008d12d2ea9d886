/* schema.h - what the files that read JSON schemas share.
 *
 * Each draws between two states. The texts that a schema allows are drawn in one form where
 * JSON has several: members in the order of `properties`, little white space, escapes only
 * where they must be. So every text that is drawn is valid, and not every valid text is
 * drawn. What a keyword demands and cannot be drawn is refused, with its JSON pointer. */
#ifndef STI_GRAMMAR_SCHEMA_H
#define STI_GRAMMAR_SCHEMA_H

#include "base/buf.h"
#include "base/json.h"
#include "grammar/grammar.h"

/* Rules that many schemas use; drawn if they are (schema_json.c). */
typedef enum sti_builtin {
    STI_JSON_SPACE,  /* nothing, a space, or a line end and up to 20 spaces */
    STI_JSON_WIDE,   /* a character beyond ASCII */
    STI_JSON_ESCAPE, /* what follows a backslash */
    STI_JSON_STRING,
    STI_JSON_NUMBER,
    STI_JSON_INTEGER,
    STI_JSON_VALUE,
    STI_JSON_FREE_OBJECT,
    STI_JSON_FREE_ARRAY,
    STI_BUILTINS
} sti_builtin;

typedef struct sti_pending {
    int32_t rule;
    size_t pointer_at; /* the schema's pointer in the rule's name */
    const json_t *schema;
} sti_pending;

typedef struct sti_schema {
    sti_sketch *k;
    json_t *root;
    json_t *made; /* a list of schemas that were put together from others */
    sti_buf path; /* JSON pointer of the schema that is being drawn */
    int depth;
    sti_pending *pending; /* rules to draw, for $ref and elements of lists */
    size_t n_pending, pending_room;
    int32_t builtin[STI_BUILTINS]; /* rules; -1: not used */
    still_error *err;
} sti_schema;

/* Errors: "schema: POINTER[/KEY]: WHY". */
still_status sti_schema_refuse(sti_schema *c, still_status code, const char *key,
                               const char *why);

/* A schema, with `segment` behind the path while it is drawn ("": none). */
still_status sti_schema_draw(sti_schema *c, int32_t from, int32_t to,
                             const json_t *schema, const char *segment);
/* The types that values of a schema may have, as bits, and whether a value has one of
 * them. Without `type` that is all; whole numbers are numbers. */
enum { STI_ONLY_OBJECTS = 1 };
unsigned sti_schema_types(const json_t *schema);
bool sti_schema_has_type(const json_t *value, unsigned types);
/* The same as a rule of its own, drawn later; -1: failed. */
int32_t sti_schema_rule(sti_schema *c, const json_t *schema, const char *segment);
void sti_path_push(sti_schema *c, const char *segment, size_t *before);
void sti_path_pop(sti_schema *c, size_t before);

/* ---- schema_json.c ------------------------------------------------------- */

int32_t sti_schema_builtin(sti_schema *c, sti_builtin what);
void sti_schema_call(sti_schema *c, int32_t from, int32_t to, sti_builtin what);
/* Draws the rules that were called; they may call others. */
void sti_schema_draw_builtins(sti_schema *c);
/* One character of a string as JSON writes it, any or of a set. */
void sti_schema_char(sti_schema *c, int32_t from, int32_t to);
void sti_schema_chars(sti_schema *c, int32_t from, int32_t to, const sti_range *r,
                      size_t n);
/* A value, written in one way. */
still_status sti_schema_literal(sti_schema *c, int32_t from, int32_t to,
                                const json_t *value);
/* The string with its quotes. */
void sti_schema_quoted(sti_schema *c, int32_t from, int32_t to, const char *p,
                       size_t n);

/* ---- schema_object.c, schema_array.c, schema_ref.c ----------------------- */

still_status sti_schema_object(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema);
bool sti_schema_requires(const json_t *schema, const char *name);
still_status sti_schema_array(sti_schema *c, int32_t from, int32_t to,
                              const json_t *schema);
/* The parts of allOf as one object; owned by c->made. */
still_status sti_schema_all_of(sti_schema *c, const json_t *schema, const json_t **out);
/* What a $ref points to, and its pointer, borrowed. */
still_status sti_schema_target(sti_schema *c, const json_t *ref, const json_t **out,
                               const char **pointer);
/* What a schema is behind all its $ref; *pointer is left as it is if it has none. NULL: they
 * lead nowhere. */
const json_t *sti_schema_resolve(sti_schema *c, const json_t *schema,
                                 const char **pointer);

/* ---- schema_one_of.c ----------------------------------------------------- */

/* Refuses a list of schemas of which two may hold for the same value. tag: a member that
 * objects have whether it is required or not; or NULL. */
still_status sti_schema_one_of(sti_schema *c, const json_t *list, const char *tag);

/* ---- schema_string.c, schema_pattern.c, schema_number.c ------------------ */

still_status sti_schema_string(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema);
/* A regular expression, as the inside of a string. key: for errors. */
still_status sti_schema_pattern(sti_schema *c, int32_t from, int32_t to, const char *p,
                                size_t n, const char *key);
still_status sti_schema_number(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema, bool whole);
/* A whole number of keyword `key`, 0..most; *out -1: it is not there. */
still_status sti_schema_count(sti_schema *c, const json_t *schema, const char *key,
                              int64_t *out);

#endif
