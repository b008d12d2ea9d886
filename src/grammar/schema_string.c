/* schema_string.c - strings: any, of a length, of a pattern, of a format. */
#include <string.h>

#include "grammar/schema.h"

/* Formats are patterns; each allows only what is valid, not all that is. Dates leave out
 * the year 0 and the 29th of February. */
#define YEAR "(\\d{3}[1-9]|\\d{2}[1-9]0|\\d[1-9]00|[1-9]000)"
#define DAY                                                                            \
    "((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0["  \
    "1-9]|1\\d|2[0-8]))"
#define TIME                                                                           \
    "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]"    \
    "\\d)"
#define OCTET "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define WORD "[A-Za-z0-9_+-]"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"

static const struct {
    const char *name, *pattern;
} format[] = {
    {"date", "^" YEAR "-" DAY "$"},
    {"time", "^" TIME "$"},
    {"date-time", "^" YEAR "-" DAY "T" TIME "$"},
    {"duration", "^P(\\d{1,4}D|\\d{1,4}W|(\\d{1,4}D)?T\\d{1,2}H\\d{1,2}M\\d{1,2}S)$"},
    {"uuid",
     "^[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"},
    {"ipv4", "^" OCTET "(\\." OCTET "){3}$"},
    {"hostname", "^" LABEL "(\\." LABEL "){0,4}$"},
    {"email", "^" WORD "{1,32}(\\." WORD "{1,32})?@(" LABEL "\\.){1,3}[A-Za-z]{2,16}$"},
};

/* min to max characters; max -1: any number. */
static void draw_length(sti_schema *c, int32_t from, int32_t to, int64_t min,
                        int64_t max)
{
    for (int64_t i = 0; !c->k->failed; i++) {
        if (i >= min) sti_sketch_empty(c->k, from, to);
        if (i == max) return;
        if (max < 0 && i == min) break;
        const int32_t next = sti_sketch_state(c->k);
        sti_schema_char(c, from, next);
        from = next;
    }
    sti_schema_char(c, from, from);
}

static still_status find_format(sti_schema *c, const json_t *name, const char **pattern)
{
    *pattern = NULL;
    for (size_t i = 0; i < sizeof format / sizeof *format; i++)
        if (json_is_string(name) && !strcmp(json_string_value(name), format[i].name))
            *pattern = format[i].pattern;
    if (*pattern) return STILL_OK;
    return sti_schema_refuse(
        c, STILL_E_UNSUPPORTED, "format",
        "not supported; there are date, time, date-time, duration, "
        "uuid, ipv4, hostname and email");
}

still_status sti_schema_string(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema)
{
    static const char *const key[] = {"pattern", "format"};
    const json_t *pattern = json_object_get(schema, "pattern");
    const json_t *named = json_object_get(schema, "format");
    int64_t min, max;
    STI_TRY(sti_schema_count(c, schema, "minLength", &min));
    STI_TRY(sti_schema_count(c, schema, "maxLength", &max));
    const bool counted = min > 0 || max >= 0;
    if (pattern && named)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "format",
                                 "not supported beside 'pattern'");
    if ((pattern || named) && counted)
        return sti_schema_refuse(
            c, STILL_E_UNSUPPORTED, max >= 0 ? "maxLength" : "minLength",
            "not supported beside 'pattern' or 'format'; a pattern "
            "can say how long it is");
    if (!pattern && !named && !counted) {
        sti_schema_call(c, from, to, STI_JSON_STRING);
        return STILL_OK;
    }
    if (max >= 0 && max < min)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "maxLength",
                                 "nothing is valid: it is less than minLength");
    const int32_t open = sti_sketch_state(c->k), close = sti_sketch_state(c->k);
    sti_sketch_byte(c->k, from, open, '"', '"');
    sti_sketch_byte(c->k, close, to, '"', '"');
    if (counted) {
        draw_length(c, open, close, min < 0 ? 0 : min, max);
        return STILL_OK;
    }
    const char *text = json_string_value(pattern);
    if (named) STI_TRY(find_format(c, named, &text));
    if (!text)
        return sti_schema_refuse(c, STILL_E_FORMAT, "pattern", "expected a string");
    return sti_schema_pattern(c, open, close, text,
                              named ? strlen(text) : json_string_length(pattern),
                              key[named != NULL]);
}
