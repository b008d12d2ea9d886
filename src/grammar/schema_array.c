/* schema_array.c - lists: elements with a schema each (prefixItems), then any number of
 * others (items) within minItems and maxItems. All that prefixItems describes is written. */
#include <stdio.h>
#include <string.h>

#include "grammar/schema.h"

still_status sti_schema_count(sti_schema *c, const json_t *schema, const char *key,
                              int64_t *out)
{
    const json_t *v = json_object_get(schema, key);
    *out = -1;
    if (!v) return STILL_OK;
    if (json_is_real(v) && json_real_value(v) >= 0 && json_real_value(v) <= 1e9 &&
        json_real_value(v) == (double)(int64_t)json_real_value(v)) {
        *out = (int64_t)json_real_value(v);
        return STILL_OK;
    }
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return sti_schema_refuse(c, STILL_E_FORMAT, key,
                                 "expected a whole number that is not negative");
    *out = json_integer_value(v);
    return STILL_OK;
}

typedef struct list {
    const json_t *first; /* prefixItems; NULL: none */
    const json_t *items; /* of elements behind those; NULL: there are none */
    size_t n_first;
    int64_t min, max; /* max -1: any number */
} list;

static still_status read_list(sti_schema *c, const json_t *schema, list *l)
{
    const json_t *items = json_object_get(schema, "items");
    l->first = json_object_get(schema, "prefixItems");
    if (l->first && !json_is_array(l->first))
        return sti_schema_refuse(c, STILL_E_FORMAT, "prefixItems",
                                 "expected a list of schemas");
    if (json_is_array(items))
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "items",
                                 "a list of schemas is called prefixItems");
    if (json_is_true(json_object_get(schema, "uniqueItems")))
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "uniqueItems",
                                 "that all elements differ cannot be guaranteed");
    STI_TRY(sti_schema_count(c, schema, "minItems", &l->min));
    STI_TRY(sti_schema_count(c, schema, "maxItems", &l->max));
    if (l->min < 0) l->min = 0;
    l->n_first = json_array_size(l->first);
    /* Elements that nobody describes are left out, unless there must be some. */
    l->items = json_is_false(items)                          ? NULL
               : items                                       ? items
               : l->n_first && l->min <= (int64_t)l->n_first ? NULL
                                                             : json_true();
    if (l->max >= 0 && l->max < l->min)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "maxItems",
                                 "nothing is valid: it is less than minItems");
    if (!l->items && l->min > (int64_t)l->n_first)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "minItems",
                                 "nothing is valid: there are fewer elements");
    return STILL_OK;
}

static void comma(sti_schema *c, int32_t from, int32_t to)
{
    const int32_t after = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, after, ',', ',');
    sti_schema_call(c, after, to, STI_JSON_SPACE);
}

/* `,` and an element, min to max times, with the element as a rule. */
static void draw_counted(sti_schema *c, int32_t from, int32_t to, int32_t rule,
                         int64_t min, int64_t max)
{
    sti_sketch *k = c->k;
    const sti_mark since = sti_sketch_mark(k);
    const sti_part one = {sti_sketch_state(k), sti_sketch_state(k)};
    const int32_t element = sti_sketch_state(k);
    comma(c, one.first, element);
    sti_sketch_call(k, element, one.last, rule);
    const sti_part all = sti_sketch_repeat(k, since, one, min, max);
    sti_sketch_empty(k, from, all.first);
    sti_sketch_empty(k, all.last, to);
}

/* Elements behind the first; the list may close at `empty` and at `some`. */
static void draw_rest(sti_schema *c, const list *l, int32_t at, int32_t empty,
                      int32_t some, bool any_before)
{
    const int32_t rule = sti_schema_rule(c, l->items, "items");
    const int64_t before = (int64_t)l->n_first;
    int64_t min = l->min > before ? l->min - before : 0;
    int64_t max = l->max < 0 ? -1 : l->max - before;
    if (max == 0 || (l->max >= 0 && max < 0)) {
        sti_sketch_empty(c->k, at, any_before ? some : empty);
        return;
    }
    if (!any_before) { /* the first has no comma */
        const int32_t next = sti_sketch_state(c->k);
        if (min == 0) sti_sketch_empty(c->k, at, empty);
        sti_sketch_call(c->k, at, next, rule);
        at = next;
        min = min > 0 ? min - 1 : 0;
        max = max > 0 ? max - 1 : max;
    }
    draw_counted(c, at, some, rule, min, max);
}

still_status sti_schema_array(sti_schema *c, int32_t from, int32_t to,
                              const json_t *schema)
{
    sti_sketch *k = c->k;
    list l = {0};
    STI_TRY(read_list(c, schema, &l));
    if (!l.n_first && json_is_true(l.items) && l.min == 0 && l.max < 0) {
        sti_schema_call(c, from, to, STI_JSON_FREE_ARRAY);
        return STILL_OK;
    }
    const int32_t open = sti_sketch_state(k), some = sti_sketch_state(k);
    const int32_t empty = sti_sketch_state(k), close = sti_sketch_state(k);
    int32_t at = sti_sketch_state(k);
    sti_sketch_byte(k, from, open, '[', '[');
    sti_schema_call(c, open, at, STI_JSON_SPACE);
    const bool any = l.n_first > 0 && l.max != 0;
    size_t before = 0;
    sti_path_push(c, "prefixItems", &before);
    for (size_t i = 0; i < l.n_first; i++) {
        char number[24];
        const int32_t start = sti_sketch_state(k), next = sti_sketch_state(k);
        if (l.max >= 0 && (int64_t)i >= l.max) break;
        if (i)
            comma(c, at, start);
        else
            sti_sketch_empty(k, at, start);
        snprintf(number, sizeof number, "%zu", i);
        STI_TRY(sti_schema_draw(c, start, next, json_array_get(l.first, i), number));
        at = next;
    }
    sti_path_pop(c, before);
    if (l.items)
        draw_rest(c, &l, at, empty, some, any);
    else
        sti_sketch_empty(k, at, any ? some : empty);
    sti_sketch_byte(k, empty, to, ']', ']');
    sti_schema_call(c, some, close, STI_JSON_SPACE);
    sti_sketch_byte(k, close, to, ']', ']');
    return STILL_OK;
}
