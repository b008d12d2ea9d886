/* fields.c - see fields.h. The table first, then what reads it. jansson bounds nesting,
 * checks UTF-8 and refuses numbers that do not fit; here every field is checked for type
 * and range. A null field counts as absent, because clients send such fields. */
#include "server/fields.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

#define AT(member) offsetof(srv_options, member)
#define STRINGS                                                                        \
    "{\"anyOf\":[{\"type\":\"string\",\"minLength\":1},{\"type\":\"array\","           \
    "\"items\":{\"type\":\"string\",\"minLength\":1},\"maxItems\":16}]}"
#define OBJECT "{\"type\":\"object\"}"

const srv_field srv_fields[] = {
    {"messages", SRV_OWN, SRV_CHAT,
     .schema =
         "{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"object\","
         "\"required\":[\"role\"],\"properties\":{\"role\":{\"type\":\"string\","
         "\"enum\":[\"system\",\"developer\",\"user\",\"assistant\",\"tool\"]},"
         "\"content\":{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"array\",\"items\":"
         "{\"type\":\"object\",\"required\":[\"type\",\"text\"],\"properties\":{"
         "\"type\":{\"const\":\"text\"},\"text\":{\"type\":\"string\"}}}},{\"type\":"
         "\"null\"}]}}}}",
     .help = "the conversation; contents are strings or lists of text parts"},
    {"prompt", SRV_OWN, SRV_TEXTS,
     .schema = "{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"array\",\"minItems\":1,"
               "\"items\":{\"type\":\"string\"}},{\"type\":\"array\",\"minItems\":1,"
               "\"items\":{\"type\":\"integer\",\"minimum\":0}},{\"type\":\"array\","
               "\"minItems\":1,\"items\":{\"type\":\"array\",\"minItems\":1,\"items\":"
               "{\"type\":\"integer\",\"minimum\":0}}}]}",
     .help = "a string, a list of token ids, or a list of either"},
    {"max_tokens", SRV_INT, SRV_BOTH, 0, INT32_MAX, AT(max_tokens),
     .help = "most tokens of an answer"},
    {"max_completion_tokens", SRV_INT, SRV_CHAT, 0, INT32_MAX, AT(max_tokens),
     .help = "the same"},
    {"min_tokens", SRV_INT, SRV_BOTH, 0, INT32_MAX, AT(min_tokens),
     .help = "tokens before the model may end the answer"},
    {"n", SRV_INT, SRV_BOTH, 1, SRV_MOST_CHOICES, AT(n),
     .help = "choices of each prompt"},
    {"temperature", SRV_REAL, SRV_BOTH, 0, 100, AT(temperature),
     .help = "0 takes the most likely token"},
    {"top_p", SRV_REAL, SRV_BOTH, 0, 1, AT(top_p),
     .help = "sample from the most likely tokens that have this share together"},
    {"top_k", SRV_INT, SRV_BOTH, 0, INT32_MAX, AT(top_k),
     .help = "sample from this many tokens; 0: all"},
    {"min_p", SRV_REAL, SRV_BOTH, 0, 1, AT(min_p),
     .help = "sample from tokens at least this share as likely as the first"},
    {"repeat_penalty", SRV_REAL, SRV_BOTH, 0, 100, AT(repeat_penalty),
     .help = "divides logits of the last tokens; 1: off"},
    {"presence_penalty", SRV_REAL, SRV_BOTH, -2, 2, AT(presence_penalty),
     .help = "taken from logits of tokens that the answer has"},
    {"frequency_penalty", SRV_REAL, SRV_BOTH, -2, 2, AT(frequency_penalty),
     .help = "the same for each time it has them"},
    {"ignore_eos", SRV_BOOL, SRV_BOTH, 0, 0, AT(ignore_eos),
     .help = "go on where the model would end"},
    {"echo", SRV_BOOL, SRV_TEXTS, 0, 0, AT(echo),
     .help = "put the prompt before the answer"},
    {"stream", SRV_BOOL, SRV_BOTH, 0, 0, AT(stream),
     .help = "send tokens as they are made (server-sent events)"},
    {"stream_options", SRV_OWN, SRV_BOTH,
     .schema = "{\"type\":\"object\",\"properties\":{\"include_usage\":"
               "{\"type\":\"boolean\"},\"include_obfuscation\":{\"const\":false}},"
               "\"additionalProperties\":false}",
     .help = "include_usage: a last event with the numbers of tokens"},
    {"seed", SRV_OWN, SRV_BOTH, .schema = "{\"type\":\"integer\"}",
     .help = "the same seed samples the same tokens"},
    {"stop", SRV_OWN, SRV_BOTH, .schema = STRINGS,
     .help = "the text ends before the first that occurs"},
    {"logit_bias", SRV_OWN, SRV_BOTH,
     .schema = "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"number\","
               "\"minimum\":-100,\"maximum\":100}}",
     .help = "added to the logits of token ids"},
    {"logprobs", SRV_INT, SRV_TEXTS, 0, SRV_MOST_LOGPROBS, AT(logprobs),
     .help = "log-probabilities, with those of this many alternatives"},
    {"logprobs", SRV_OWN, SRV_CHAT, .schema = "{\"type\":\"boolean\"}",
     .help = "log-probabilities of the answer's tokens"},
    {"top_logprobs", SRV_OWN, SRV_CHAT,
     .schema = "{\"type\":\"integer\",\"minimum\":0,\"maximum\":20}",
     .help = "alternatives of each token"},
    {"tools", SRV_OWN, SRV_CHAT,
     .schema = "{\"type\":\"array\",\"items\":{\"type\":\"object\"},\"maxItems\":128}",
     .help = "functions that the model may call"},
    {"tool_choice", SRV_OWN, SRV_CHAT,
     .schema =
         "{\"anyOf\":[{\"enum\":[\"auto\",\"none\",\"required\"]},{\"type\":"
         "\"object\",\"required\":[\"type\",\"function\"],\"properties\":{\"type\":"
         "{\"enum\":[\"function\"]},\"function\":{\"type\":\"object\",\"required\":"
         "[\"name\"],\"properties\":{\"name\":{\"type\":\"string\"}}}}}]}",
     .help = "whether it may, must, or must call the function of a name"},
    {"parallel_tool_calls", SRV_BOOL, SRV_CHAT, 0, 0, AT(parallel_calls),
     .help = "false: an answer ends with its first call"},
    {"chat_template_kwargs", SRV_OWN, SRV_CHAT, .schema = OBJECT,
     .help = "variables of the chat template"},
    {"response_format", SRV_OWN, SRV_BOTH,
     .schema =
         "{\"type\":\"object\",\"required\":[\"type\"],\"properties\":{\"type\":"
         "{\"enum\":[\"text\",\"json_object\",\"json_schema\"]},\"json_schema\":"
         "{\"type\":\"object\",\"required\":[\"schema\"],\"properties\":{\"name\":"
         "{\"type\":\"string\"},\"description\":{\"type\":\"string\"},\"strict\":"
         "{\"type\":\"boolean\"},\"schema\":{\"type\":\"object\"}},"
         "\"additionalProperties\":false}},\"additionalProperties\":false}",
     .help = "what the answer must look like: text, any JSON object, or by a schema"},
    {"grammar", SRV_OWN, SRV_BOTH, .schema = "{\"type\":\"string\",\"minLength\":1}",
     .help = "the same as a grammar (GBNF)"},
    {"still", SRV_OWN, SRV_CHAT,
     .schema = "{\"type\":\"object\",\"properties\":{\"kept\":{\"type\":\"boolean\"}},"
               "\"additionalProperties\":false}",
     .help = "kept: say what the model kept of the conversation, in choices[].still"},
    {"best_of", SRV_ONLY, SRV_TEXTS, .schema = "[1]"},
    {"suffix", SRV_ONLY, SRV_TEXTS, .schema = "[\"\"]"},
    {"store", SRV_ONLY, SRV_BOTH, .schema = "[false]"},
    {"modalities", SRV_ONLY, SRV_CHAT, .schema = "[[\"text\"]]"},
    {"model", SRV_IGNORED, SRV_BOTH, .help = "the server has one model"},
    {"user", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"service_tier", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"metadata", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"safety_identifier", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"prompt_cache_key", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"prompt_cache_options", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
    {"prompt_cache_retention", SRV_IGNORED, SRV_BOTH, .help = "has no effect"},
};
const size_t srv_n_fields = sizeof srv_fields / sizeof *srv_fields;

json_t *srv_field_of(const json_t *body, const char *name)
{
    json_t *value = json_object_get(body, name);
    return json_is_null(value) ? NULL : value;
}

still_status srv_names_check(const json_t *object, const char *of,
                             const char *const *names, still_error *err)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value)
    {
        bool known = json_is_null(value);
        for (const char *const *p = names; *p && !known; p++)
            known = strcmp(*p, name) == 0;
        if (!known)
            return sti_fail(err, STILL_E_UNSUPPORTED, "'%s%.60s' is not implemented",
                            of, name);
    }
    return STILL_OK;
}

static const srv_field *find(const char *name, unsigned of)
{
    for (size_t i = 0; i < srv_n_fields; i++)
        if ((srv_fields[i].of & of) && strcmp(srv_fields[i].name, name) == 0)
            return &srv_fields[i];
    return NULL;
}

/* ---- Reading ------------------------------------------------------------- */

static still_status read_int(const json_t *value, const srv_field *f, int *out,
                             still_error *err)
{
    json_int_t v = json_integer_value(value);
    if (!json_is_integer(value) || (double)v < f->min || (double)v > f->max)
        return sti_fail(err, STILL_E_ARG,
                        "'%s' must be a whole number from %.0f to %.0f", f->name,
                        f->min, f->max);
    *out = (int)v;
    return STILL_OK;
}

static still_status read_real(const json_t *value, const srv_field *f, double *out,
                              still_error *err)
{
    double v = json_number_value(value);
    if (!json_is_number(value) || !(v >= f->min && v <= f->max))
        return sti_fail(err, STILL_E_ARG, "'%s' must be a number from %g to %g",
                        f->name, f->min, f->max);
    *out = v;
    return STILL_OK;
}

static still_status read_bool(const json_t *value, const srv_field *f, bool *out,
                              still_error *err)
{
    if (!json_is_boolean(value))
        return sti_fail(err, STILL_E_ARG, "'%s' must be true or false", f->name);
    *out = json_is_true(value);
    return STILL_OK;
}

/* The field's values are few; its text is what the client is told. */
static still_status read_only(const json_t *value, const srv_field *f, still_error *err)
{
    json_t *list, *one;
    size_t i;
    bool found = false;
    STI_TRY(sti_json_read(f->name, f->schema, strlen(f->schema), 0, &list, err));
    json_array_foreach(list, i, one) found = found || json_equal(one, value);
    json_decref(list);
    if (found) return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    strlen(f->schema) > 2
                        ? "'%s': only these values are implemented: %s"
                        : "'%s' is not implemented%s",
                    f->name, strlen(f->schema) > 2 ? f->schema : "");
}

static still_status read_member(const json_t *value, const srv_field *f,
                                srv_options *out, still_error *err)
{
    char *at = (char *)out + f->at;
    switch (f->kind) {
    case SRV_INT: return read_int(value, f, (int *)(void *)at, err);
    case SRV_REAL: return read_real(value, f, (double *)(void *)at, err);
    case SRV_BOOL: return read_bool(value, f, (bool *)(void *)at, err);
    case SRV_ONLY: return read_only(value, f, err);
    default: return STILL_OK;
    }
}

static still_status read_stop(const json_t *value, srv_options *o, still_error *err)
{
    size_t n = json_is_array(value) ? json_array_size(value) : value ? 1 : 0;
    if (n > SRV_MOST_STOPS)
        return sti_fail(err, STILL_E_ARG, "'stop' has %zu strings, at most %d can be",
                        n, SRV_MOST_STOPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_string(s) || json_string_length(s) == 0)
            return sti_fail(err, STILL_E_ARG,
                            "'stop' must be a string or a list of strings, none empty");
        o->stop[o->n_stops++] =
            (srv_stop_text){json_string_value(s), json_string_length(s)};
    }
    return STILL_OK;
}

static still_status read_seed(const json_t *value, srv_options *o, still_error *err)
{
    if (!value) return STILL_OK;
    if (!json_is_integer(value))
        return sti_fail(err, STILL_E_ARG, "'seed' must be a whole number");
    o->has_seed = true;
    o->seed = (uint64_t)json_integer_value(value);
    return STILL_OK;
}

static still_status read_stream_options(const json_t *value, srv_options *o,
                                        still_error *err)
{
    /* include_obfuscation pads events against eavesdroppers; false asks for none. */
    static const char *const names[] = {"include_obfuscation", "include_usage", NULL};
    const json_t *padded = srv_field_of(value, "include_obfuscation");
    const json_t *usage = srv_field_of(value, "include_usage");
    if (!value) return STILL_OK;
    if (!json_is_object(value) || !o->stream)
        return sti_fail(err, STILL_E_ARG,
                        "'stream_options' must be an object, and needs 'stream': true");
    if (usage && !json_is_boolean(usage))
        return sti_fail(err, STILL_E_ARG,
                        "'stream_options.include_usage' must be true or false");
    o->usage = json_is_true(usage);
    return srv_names_check(value, "stream_options.",
                           names + (padded && !json_is_false(padded)), err);
}

static still_status read_schema(const json_t *value, srv_options *o, still_error *err)
{
    const json_t *named = srv_field_of(value, "json_schema");
    static const char *const names[] = {"name", "description", "strict", "schema",
                                        NULL};
    STI_TRY(srv_names_check(named, "response_format.json_schema.", names, err));
    o->rules = srv_field_of(named, "schema");
    if (!json_is_object(o->rules) && !json_is_boolean(o->rules))
        return sti_fail(err, STILL_E_ARG,
                        "'response_format' must have the schema in json_schema.schema");
    o->form = SRV_SCHEMA;
    return STILL_OK;
}

static still_status read_form(const json_t *value, const json_t *grammar,
                              srv_options *o, still_error *err)
{
    static const char *const names[] = {"type", "json_schema", NULL};
    const char *type = json_string_value(srv_field_of(value, "type"));
    if (value && !type)
        return sti_fail(err, STILL_E_ARG,
                        "'response_format' must be an object with a 'type'");
    STI_TRY(srv_names_check(value, "response_format.", names, err));
    if (type && strcmp(type, "json_object") == 0) {
        o->form = SRV_JSON;
    } else if (type && strcmp(type, "json_schema") == 0) {
        STI_TRY(read_schema(value, o, err));
    } else if (type && strcmp(type, "text") != 0) {
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "'response_format' of type '%.40s' is not implemented", type);
    }
    if (!grammar) return STILL_OK;
    if (!json_is_string(grammar) || json_string_length(grammar) == 0)
        return sti_fail(err, STILL_E_ARG, "'grammar' must be a string");
    if (o->form != SRV_FREE)
        return sti_fail(err, STILL_E_ARG,
                        "'grammar' and 'response_format' exclude each other");
    o->form = SRV_GBNF;
    o->rules = grammar;
    return STILL_OK;
}

/* {"kept": true} */
static still_status read_still(const json_t *value, srv_options *o, still_error *err)
{
    static const char *const names[] = {"kept", NULL};
    const json_t *kept = srv_field_of(value, "kept");
    if (!value) return STILL_OK;
    if (!json_is_object(value))
        return sti_fail(err, STILL_E_ARG, "'still' must be an object");
    if (kept && !json_is_boolean(kept))
        return sti_fail(err, STILL_E_ARG, "'still.kept' must be true or false");
    o->kept = json_is_true(kept);
    return srv_names_check(value, "still.", names, err);
}

static still_status read_bias(const json_t *value, int vocab, srv_options *o,
                              still_error *err)
{
    const char *name;
    json_t *v;
    if (!value) return STILL_OK;
    size_t n = json_object_size(value);
    if (!json_is_object(value) || n > SRV_MOST_BIAS)
        return sti_fail(err, STILL_E_ARG,
                        "'logit_bias' must be an object of at most %d token ids",
                        SRV_MOST_BIAS);
    if (n == 0) return STILL_OK;
    o->bias = sti_alloc(n, sizeof *o->bias);
    if (!o->bias) return sti_fail_memory(err, "logit_bias", n * sizeof *o->bias);
    json_object_foreach((json_t *)value, name, v)
    {
        char *end;
        long id = strtol(name, &end, 10);
        double bias = json_number_value(v);
        if (name[0] < '0' || name[0] > '9' || *end || id >= vocab)
            return sti_fail(
                err, STILL_E_ARG,
                "'logit_bias': '%.60s' is no token id, these go from 0 to %d", name,
                vocab - 1);
        if (!json_is_number(v) || !(bias >= -100 && bias <= 100))
            return sti_fail(
                err, STILL_E_ARG,
                "'logit_bias': that of %ld must be a number from -100 to 100", id);
        o->bias[o->n_bias++] = (still_logit_bias){(int32_t)id, (float)bias};
    }
    return STILL_OK;
}

still_status srv_fields_read(const json_t *body, unsigned of, int vocab,
                             srv_options *out, still_error *err)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)body, name, value)
    {
        const srv_field *f = find(name, of);
        if (json_is_null(value)) continue;
        if (!f)
            return sti_fail(
                err, STILL_E_UNSUPPORTED,
                "'%.60s' is no field that %s has here: it would be ignored", name,
                of == SRV_CHAT ? "/v1/chat/completions" : "/v1/completions");
        STI_TRY(read_member(value, f, out, err));
    }
    const json_t *most = srv_field_of(body, "max_tokens");
    const json_t *same = srv_field_of(body, "max_completion_tokens");
    if (most && same && !json_equal(most, same))
        return sti_fail(err, STILL_E_ARG,
                        "'max_tokens' and 'max_completion_tokens' are the same and "
                        "must not differ");
    STI_TRY(read_stop(srv_field_of(body, "stop"), out, err));
    STI_TRY(read_seed(srv_field_of(body, "seed"), out, err));
    STI_TRY(read_stream_options(srv_field_of(body, "stream_options"), out, err));
    STI_TRY(read_form(srv_field_of(body, "response_format"),
                      srv_field_of(body, "grammar"), out, err));
    STI_TRY(read_still(srv_field_of(body, "still"), out, err));
    return read_bias(srv_field_of(body, "logit_bias"), vocab, out, err);
}

void srv_options_free(srv_options *o)
{
    free(o->bias);
    *o = (srv_options){0};
}

/* ---- Describing ---------------------------------------------------------- */

static json_t *parse(const char *text)
{
    json_t *v = NULL;
    return sti_json_read("schema", text, strlen(text), 0, &v, NULL) ? NULL : v;
}

static json_t *schema_of(const srv_field *f)
{
    switch (f->kind) {
    case SRV_INT:
        return json_pack("{s:s, s:I, s:I}", "type", "integer", "minimum",
                         (json_int_t)f->min, "maximum", (json_int_t)f->max);
    case SRV_REAL:
        return json_pack("{s:s, s:f, s:f}", "type", "number", "minimum", f->min,
                         "maximum", f->max);
    case SRV_BOOL: return json_pack("{s:s}", "type", "boolean");
    case SRV_ONLY: return json_pack("{s:o}", "enum", parse(f->schema));
    case SRV_OWN: return parse(f->schema);
    default: return json_object();
    }
}

json_t *srv_fields_schema(unsigned of)
{
    json_t *properties = json_object();
    for (size_t i = 0; i < srv_n_fields; i++) {
        const srv_field *f = &srv_fields[i];
        if (!(f->of & of)) continue;
        json_t *schema = schema_of(f);
        if (f->help) sti_json_set(&schema, "description", json_string(f->help));
        /* A null is a field that is absent. */
        if (strcmp(f->name, "messages") != 0 && strcmp(f->name, "prompt") != 0)
            schema = json_pack("{s:[o, {s:s}]}", "anyOf", schema, "type", "null");
        sti_json_set(&properties, f->name, schema);
    }
    return json_pack("{s:s, s:[s], s:{s:s}, s:o}", "type", "object", "required",
                     of == SRV_CHAT ? "messages" : "prompt", "additionalProperties",
                     "type", "null", "properties", properties);
}
