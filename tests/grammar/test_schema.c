/* JSON schemas: texts that are valid and not, what is refused by name, and random texts
 * under the mask, which must parse and be valid. */
#include "grammars.h"

#include <math.h>
#include <stdio.h>

static still_tokenizer *tk;

static still_grammar *open_schema(const char *text)
{
    still_grammar *g;
    still_error err = {0};
    if (still_grammar_open_schema(tk, text, strlen(text), &g, &err))
        fail_msg("%s: %s", text, err.text);
    return g;
}

static void test_texts(void **state)
{
    (void)state;
    static const struct {
        const char *schema, *yes[8], *no[8];
    } cases[] = {
        {"{\"type\":\"object\"}",
         {"{}", "{\"a\":1}",
          "{\n  \"a\": [1, {\"b\":null}],\n  \"c\": \"\\u00e9\\n\"\n}"},
         {"", "[]", "{", "{\"a\"}", "{\"a\":1,}", "{a:1}", "{\"a\":01}"}},
        {"true",
         {"1", "-0.5e+3", "\"x\"", "[]", "null", "true"},
         {"", "nul", "1.", ".5"}},
        {"{\"type\":[\"string\",\"null\"]}",
         {"null", "\"\"", "\"\\ud83d\\ude00\""},
         {"1", "\"\\ud83d\"", "\"\\x\"", "\"\n\"", "\"\xC3\""}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{"
         "\"type\":"
         "\"boolean\"},\"c\":{\"type\":\"null\"}},\"required\":[\"b\"]}",
         {"{\"b\":true}", "{\"a\":1, \"b\": false}", "{\"a\":0,\"b\":true,\"c\":null}"},
         {"{}", "{\"a\":1}", "{\"b\":true,\"a\":1}", "{\"b\":true,\"d\":1}",
          "{\"b\":1}", "{,\"b\":true}"}},
        {"{\"properties\":{\"a\":{},\"b\":{}},\"additionalProperties\":false}",
         {"{}", "{\"a\":[]}", "{\"b\":1}", "{\"a\":1,\"b\":{}}"},
         {"{\"c\":1}", "[]"}},
        {"{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"null\"},\"\\u00e9\":"
         "true},"
         "\"additionalProperties\":{\"type\":\"integer\"}}",
         {"{\"ab\":null,\"x\":1}", "{\"a\":1,\"abc\":2}", "{\"\xC3\xA9q\":7}",
          "{\"b\":1}", "{\"\":3}"},
         {"{\"x\":null}", "{\"ab\":1}", "{\"ab\":null,\"ab\":1}",
          "{\"x\":1,\"\xC3\xA9\":2}"}},
        {"{\"type\":\"object\",\"additionalProperties\":{\"type\":\"string\"}}",
         {"{}", "{\"q\":\"\"}", "{\"q\":\"\",\"r\":\"x\"}"},
         {"{\"q\":1}"}},
        {"{\"type\":\"object\",\"properties\":{}}", {"{}", "{ }"}, {"{\"a\":1}"}},
        {"{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},\"minItems\":2,"
         "\"maxItems\":3}",
         {"[true,false]", "[true, true,\n  false]"},
         {"[]", "[true]", "[true,true,true,true]"}},
        {"{\"type\":\"array\",\"items\":{\"type\":\"null\"},\"maxItems\":1}",
         {"[]", "[null]"},
         {"[null,null]"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1},{\"const\":\"x\"}],"
         "\"items\":false}",
         {"[1,\"x\"]"},
         {"[1]", "[1,\"x\",1]", "[]"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1}],\"items\":{\"const\":2},"
         "\"minItems\":2}",
         {"[1,2]", "[1,2,2]"},
         {"[1]", "[2,2]"}},
        {"{\"enum\":[\"a\\\"b\",1,null,{\"k\":[true]}]}",
         {"\"a\\\"b\"", "1", "null", "{\"k\":[true]}"},
         {"\"a\"", "2"}},
        {"{\"type\":\"string\",\"enum\":[\"a\",1]}", {"\"a\""}, {"1"}},
        {"{\"const\":\"x/y\"}", {"\"x/y\""}, {"\"x\""}},
        {"{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"nullable\":true}",
         {"3", "\"3\"", "null"},
         {"true"}},
        /* Exactly one: by type, by const, by a required property, by closed objects. */
        {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":[\"string\",\"null\"]}]}",
         {"3", "\"3\"", "null"},
         {"true"}},
        {"{\"oneOf\":[{\"const\":1},{\"enum\":[2,\"x\"]},{\"anyOf\":[{\"type\":"
         "\"array\"},{\"const\":3}]}]}",
         {"1", "2", "\"x\"", "[]", "3"},
         {"4", "{}"}},
        {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1}},"
         "\"required\":[\"a\"]},{\"type\":\"object\",\"properties\":{\"b\":{}},"
         "\"additionalProperties\":false}]}",
         {"{\"a\":1}", "{\"b\":2}", "{}"},
         {"{\"a\":2}", "{\"a\":1,\"b\":2}"}},
        /* pydantic's discriminated unions, with a default for what tells them apart. */
        {"{\"oneOf\":[{\"$ref\":\"#/$defs/C\"},{\"$ref\":\"#/$defs/D\"}],"
         "\"discriminator\":{\"propertyName\":\"kind\"},\"$defs\":{\"C\":{"
         "\"properties\":{"
         "\"kind\":{\"const\":\"c\",\"default\":\"c\",\"type\":\"string\"},\"in\":{"
         "\"oneOf\":[{\"$ref\":\"#/$defs/C\"},{\"$ref\":\"#/$defs/D\"}],"
         "\"discriminator\":{\"propertyName\":\"kind\"}}},\"type\":\"object\"},\"D\":{"
         "\"properties\":{\"kind\":{\"const\":\"d\",\"default\":\"d\",\"type\":"
         "\"string\"}},\"type\":\"object\"}}}",
         {"{\"kind\":\"c\"}", "{\"kind\":\"c\",\"in\":{\"kind\":\"d\"}}"},
         {"{}", "{\"kind\":\"c\",\"in\":{}}", "{\"kind\":\"x\"}"}},
        {"{\"allOf\":[{\"$ref\":\"#/$defs/a\"},{\"properties\":{\"y\":{\"const\":2}},"
         "\"required\":[\"y\"]}],\"$defs\":{\"a\":{\"type\":\"object\",\"properties\":{"
         "\"x\":"
         "{\"const\":1}},\"required\":[\"x\"]}}}",
         {"{\"x\":1,\"y\":2}"},
         {"{\"x\":1}", "{\"y\":2}"}},
        {"{\"allOf\":[{\"$ref\":\"#/definitions/~0a~1b%20\"}],\"definitions\":{\"~a/b "
         "\":"
         "{\"const\":5}}}",
         {"5"},
         {"6"}},
        {"{\"$ref\":\"#/$defs/"
         "n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"k\":"
         "{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/"
         "n\"}}},\"required\":[\"k\"]}}}",
         {"{\"k\":[]}", "{\"k\":[{\"k\":[]},{\"k\":[{\"k\":[]}]}]}"},
         {"{\"k\":[1]}", "{}"}},
        {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
         {"\"ab\"", "\"a\xC3\xA9\\n\"", "\"\\ud83d\\ude00x\""},
         {"\"a\"", "\"abcd\"", "ab"}},
        {"{\"type\":\"string\",\"minLength\":1}", {"\"a\"", "\"abcdef\""}, {"\"\""}},
        {"{\"type\":\"string\",\"pattern\":\"^a[b-d]{2,}(x|yz)?$\"}",
         {"\"abc\"", "\"abcdx\"", "\"abbyz\""},
         {"\"ab\"", "\"abcy\"", "\"xabc\""}},
        {"{\"type\":\"string\",\"pattern\":\"b+?\"}",
         {"\"abc\"", "\"b\""},
         {"\"ac\"", "\"\""}},
        {"{\"type\":\"string\",\"pattern\":\"^a|b$\"}",
         {"\"ax\"", "\"xb\"", "\"ab\""},
         {"\"xa\"", "\"bx\""}},
        {"{\"type\":\"string\",\"pattern\":\"^(?:\\\\d\\\\w\\\\s|[^\\\\d\\\"])\\\\.$"
         "\"}",
         {"\"1a .\"", "\"1a\\t.\"", "\"x.\"", "\"\\\\.\"", "\"\\n.\""},
         {"\"1.\"", "\"\\\".\""}},
        {"{\"type\":\"string\",\"format\":\"date\"}",
         {"\"2024-02-28\"", "\"1999-12-31\""},
         {"\"2024-02-30\"", "\"2024-04-31\"", "\"0000-01-01\"", "\"2024-13-01\""}},
        {"{\"type\":\"string\",\"format\":\"date-time\"}",
         {"\"2024-02-28T23:59:59Z\"", "\"2024-02-28T00:00:00.5+01:00\""},
         {"\"2024-02-28\"", "\"2024-02-28T24:00:00Z\""}},
        {"{\"type\":\"string\",\"format\":\"uuid\"}",
         {"\"123e4567-e89b-12d3-a456-426614174000\""},
         {"\"123e4567\""}},
        {"{\"type\":\"integer\"}",
         {"0", "-7", "123456789012345678"},
         {"-0.5", "01", "1.0", "1234567890123456789"}},
        {"{\"type\":\"number\"}",
         {"0", "-7.25", "1e9", "1.5E-10"},
         {"1e", "01", "1e999"}},
        {"{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}",
         {"-12", "-9", "0", "9", "99", "100", "105"},
         {"-13", "106", "1000", "-", "-0"}},
        {"{\"type\":\"integer\",\"exclusiveMinimum\":9,\"maximum\":1e3}",
         {"10", "99", "999", "1000"},
         {"9", "1001", "-10"}},
        {"{\"type\":\"integer\",\"minimum\":0.5,\"exclusiveMaximum\":2.5}",
         {"1", "2"},
         {"0", "3"}},
        {"{\"type\":\"integer\",\"maximum\":-3}", {"-3", "-40"}, {"-2", "0", "3"}},
        {"{\"type\":\"number\",\"minimum\":0,\"maximum\":1}",
         {"0", "1", "0.5", "1.0", "0.000"},
         {"1.01", "2", "-0.1", "1e0", "1."}},
        /* No number whose double is the bound: readers would find it outside. */
        {"{\"type\":\"number\",\"exclusiveMaximum\":0}", {"-1", "-0.5"}, {"-0", "0"}},
        {"{\"type\":\"number\",\"exclusiveMaximum\":100}",
         {"99.999999999999", "-1.5"},
         {"99.999999999999999", "100"}},
        {"{\"type\":\"number\",\"exclusiveMinimum\":100000000000000}",
         {"100000000000001"},
         {"100000000000000", "100000000000000.1"}},
        {"{\"type\":\"number\",\"exclusiveMinimum\":0,\"exclusiveMaximum\":1.25}",
         {"0.001", "1", "1.2", "1.249", "1.24999"},
         {"0", "0.0", "1.25", "1.250", "1.3"}},
        {"{\"type\":\"number\",\"minimum\":-2.5,\"maximum\":-0.5}",
         {"-2.5", "-1", "-0.5", "-0.75", "-2.25"},
         {"-2.6", "-0.4", "0", "-0", "1"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_grammar *g = open_schema(cases[i].schema);
        for (int j = 0; j < 8 && cases[i].yes[j]; j++)
            if (!matches(g, cases[i].yes[j], strlen(cases[i].yes[j])))
                fail_msg("%s refuses %s", cases[i].schema, cases[i].yes[j]);
        for (int j = 0; j < 8 && cases[i].no[j]; j++)
            if (matches(g, cases[i].no[j], strlen(cases[i].no[j])))
                fail_msg("%s takes %s", cases[i].schema, cases[i].no[j]);
        still_grammar_free(g);
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *schema, *says;
        still_status code;
    } cases[] = {
        {"{", "line 1, column 2", STILL_E_FORMAT},
        {"3", "schema: /: expected a schema", STILL_E_FORMAT},
        {"false", "schema: /: nothing is valid", STILL_E_UNSUPPORTED},
        {"{\"type\":\"strin\"}", "schema: /type: expected object", STILL_E_FORMAT},
        {"{\"properties\":{\"a/b\":{\"if\":true}}}",
         "schema: /properties/a~1b/if: this keyword", STILL_E_UNSUPPORTED},
        {"{\"not\":{}}", "schema: /not: this keyword is not supported",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"array\",\"uniqueItems\":true}", "schema: /uniqueItems",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"array\",\"minItems\":3,\"maxItems\":2}", "schema: /maxItems",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"array\",\"minItems\":-1}", "schema: /minItems: expected a whole",
         STILL_E_FORMAT},
        {"{\"type\":\"string\",\"format\":\"uri\"}",
         "schema: /format: not supported; there are", STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"pattern\":\"a(?=b)\"}",
         "schema: /pattern: at character 3 of the pattern: look-around",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"pattern\":\"a\\\\1\"}", "this escape is not supported",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"pattern\":\"(a\"}", "no closing )",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"pattern\":\"a^b\"}", "only at the ends",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"pattern\":\"a\",\"maxLength\":4}",
         "schema: /maxLength", STILL_E_UNSUPPORTED},
        {"{\"type\":\"number\",\"multipleOf\":0.5}", "schema: /multipleOf",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "schema: /minimum",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"number\",\"minimum\":3,\"exclusiveMaximum\":3}",
         "schema: /minimum", STILL_E_UNSUPPORTED},
        {"{\"type\":\"number\",\"minimum\":1e300}", "schema: /minimum: bounds of up to",
         STILL_E_UNSUPPORTED},
        {"{\"$ref\":\"#/$defs/x\"}", "schema: /$ref: there is nothing", STILL_E_FORMAT},
        {"{\"$ref\":\"https://x/y\"}", "schema: /$ref: only places",
         STILL_E_UNSUPPORTED},
        {"{\"$ref\":\"#\"}", "schema: / is left-recursive", STILL_E_UNSUPPORTED},
        {"{\"$ref\":\"#/$defs/"
         "a\",\"$defs\":{\"a\":{\"type\":\"object\",\"properties\":{\"a\":"
         "{\"$ref\":\"#/$defs/a\"}},\"required\":[\"a\"]}}}",
         "never ends", STILL_E_UNSUPPORTED},
        {"{\"$ref\":\"#/$defs/a\",\"minimum\":3,\"$defs\":{\"a\":{}}}",
         "schema: /minimum: not supported beside '$ref'", STILL_E_UNSUPPORTED},
        {"{\"anyOf\":[]}", "schema: /anyOf: expected a list", STILL_E_FORMAT},
        {"{\"anyOf\":[{\"type\":\"x\"}]}", "schema: /anyOf/0/type", STILL_E_FORMAT},
        {"{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"integer\"},{\"type\":"
         "\"number\"}]"
         "}",
         "schema: /oneOf: a value may be valid for both 1 and 2", STILL_E_UNSUPPORTED},
        {"{\"oneOf\":[{\"const\":1},{\"enum\":[2,1.0]}]}", "schema: /oneOf: a value",
         STILL_E_UNSUPPORTED},
        {"{\"oneOf\":[{\"type\":\"null\"},true]}", "schema: /oneOf: a value",
         STILL_E_UNSUPPORTED},
        {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1}}},{"
         "\"type\":\"object\",\"properties\":{\"a\":{\"const\":2}}}]}",
         "schema: /oneOf: a value", STILL_E_UNSUPPORTED},
        {"{\"allOf\":[{\"minimum\":1},{\"maximum\":2}]}", "not supported in allOf",
         STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"enum\":[1]}", "schema: /enum: nothing is valid",
         STILL_E_UNSUPPORTED},
        {"{\"required\":[\"a\"],\"additionalProperties\":false,\"properties\":{\"b\":{}"
         "}}",
         "schema: /required", STILL_E_UNSUPPORTED},
        {"{\"minProperties\":1}", "schema: /minProperties", STILL_E_UNSUPPORTED},
        {"{\"type\":\"string\",\"maxLength\":1000000}", "schema: /: too large",
         STILL_E_LIMIT},
        {"{\"type\":\"string\",\"pattern\":\"^((a{99}){99}){99}$\"}",
         "schema: /: too large", STILL_E_LIMIT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_grammar *g;
        still_error err = {0};
        const still_status st = still_grammar_open_schema(
            tk, cases[i].schema, strlen(cases[i].schema), &g, &err);
        assert_null(g);
        if (st != cases[i].code || !strstr(err.text, cases[i].says))
            fail_msg("%s: status %d, '%s'", cases[i].schema, st, err.text);
    }
}

/* ---- Valid or not -------------------------------------------------------- */

static const json_t *root;

static bool valid(const json_t *s, const json_t *v);

static size_t characters(const json_t *v)
{
    size_t n = 0;
    for (const char *p = json_string_value(v); *p; p++) n += (*p & 0xC0) != 0x80;
    return n;
}

static bool is_type(const char *t, const json_t *v)
{
    if (!strcmp(t, "object")) return json_is_object(v);
    if (!strcmp(t, "array")) return json_is_array(v);
    if (!strcmp(t, "string")) return json_is_string(v);
    if (!strcmp(t, "integer")) return json_is_integer(v);
    if (!strcmp(t, "number")) return json_is_number(v);
    if (!strcmp(t, "boolean")) return json_is_boolean(v);
    return json_is_null(v);
}

static double number(const json_t *s, const char *key, double otherwise)
{
    const json_t *v = json_object_get(s, key);
    return v ? json_number_value(v) : otherwise;
}

static bool valid_object(const json_t *s, const json_t *v)
{
    const json_t *properties = json_object_get(s, "properties");
    const json_t *others = json_object_get(s, "additionalProperties");
    const json_t *required = json_object_get(s, "required");
    const char *name;
    json_t *member;
    for (size_t i = 0; i < json_array_size(required); i++)
        if (!json_object_get(v, json_string_value(json_array_get(required, i))))
            return false;
    json_object_foreach((json_t *)v, name, member)
    {
        const json_t *one = json_object_get(properties, name);
        if (!one) one = others;
        if (one && !valid(one, member)) return false;
    }
    return true;
}

static bool valid_list(const json_t *s, const json_t *v)
{
    const json_t *items = json_object_get(s, "items"),
                 *first = json_object_get(s, "prefixItems");
    const size_t n = json_array_size(v), before = json_array_size(first);
    for (size_t i = 0; i < n; i++) {
        const json_t *one = i < before ? json_array_get(first, i) : items;
        if (one && !valid(one, json_array_get(v, i))) return false;
    }
    return (double)n >= number(s, "minItems", 0) &&
           (double)n <= number(s, "maxItems", 1e9);
}

static bool valid(const json_t *s, const json_t *v)
{
    const json_t *type = json_object_get(s, "type"), *any = json_object_get(s, "anyOf");
    const json_t *list = json_object_get(s, "enum"),
                 *same = json_object_get(s, "const");
    const json_t *ref = json_object_get(s, "$ref");
    bool ok = !type, one = !any, found = !list;
    if (json_is_boolean(s)) return json_is_true(s);
    if (ref) {
        const json_t *defs = json_object_get(root, "$defs");
        return valid(json_object_get(defs, strrchr(json_string_value(ref), '/') + 1),
                     v);
    }
    if (json_is_string(type)) ok = is_type(json_string_value(type), v);
    for (size_t i = 0; i < json_array_size(type); i++)
        ok |= is_type(json_string_value(json_array_get(type, i)), v);
    for (size_t i = 0; i < json_array_size(any); i++)
        one |= valid(json_array_get(any, i), v);
    for (size_t i = 0; i < json_array_size(list); i++)
        found |= json_equal(json_array_get(list, i), v);
    if (!ok || !one || !found || (same && !json_equal(same, v))) return false;
    if (json_is_number(v)) {
        const double x = json_number_value(v);
        return x >= number(s, "minimum", -INFINITY) &&
               x <= number(s, "maximum", INFINITY) &&
               x > number(s, "exclusiveMinimum", -INFINITY) &&
               x < number(s, "exclusiveMaximum", INFINITY);
    }
    if (json_is_string(v))
        return (double)characters(v) >= number(s, "minLength", 0) &&
               (double)characters(v) <= number(s, "maxLength", 1e9);
    if (json_is_object(v)) return valid_object(s, v);
    return json_is_array(v) ? valid_list(s, v) : true;
}

/* One random text, token by token under the mask, which is checked on the way. Ends are
 * taken where they can be after a while; NULL: it did not come to one. */
static char *random_text(still_grammar *g, uint64_t seed)
{
    still_matcher *m = new_matcher(g);
    still_error err;
    uint64_t bits[WORDS];
    sti_buf text = {0};
    bool whole = false;
    for (int i = 0; i < 600 && !whole; i++) {
        int32_t id;
        size_t n;
        if (i % 8 == 0)
            check_mask(m, bits);
        else if (still_matcher_mask(m, bits, &err))
            fail_msg("%s", err.text);
        /* Late in a text, close what is open. */
        static const char closing[] = "\"}]el0";
        id = -1;
        for (const char *p = closing; i > 60 && *p && id < 0; p++)
            if (has(bits, (unsigned char)*p)) id = (unsigned char)*p;
        if (has(bits, END) && (i > 60 || sti_mix64(seed) % 4 == 0)) id = END;
        while (id < 0 || !has(bits, id)) {
            const uint64_t draw = sti_mix64(seed++);
            id = draw & 1 ? (int32_t)(draw >> 8) & 127
                          : (int32_t)((draw >> 8) % VOCAB_SIZE);
        }
        if (still_matcher_accept(m, id, &err)) fail_msg("token %d: %s", id, err.text);
        const char *p = still_tokenizer_piece(tk, id, false, &n);
        sti_buf_put(&text, p, n);
        whole = id == END || still_matcher_done(m);
    }
    still_matcher_free(m);
    if (whole) return text.p;
    sti_buf_free(&text);
    return NULL;
}

static void test_random(void **state)
{
    (void)state;
    static const char *const schemas[] = {
        "{\"type\":\"object\"}",
        /* What pydantic writes for nested models, options, unions and bounds. */
        "{\"$defs\":{\"Pet\":{\"properties\":{\"name\":{\"maxLength\":12,\"minLength\":"
        "1,"
        "\"title\":\"Name\",\"type\":\"string\"},\"kind\":{\"enum\":[\"cat\",\"dog\"],"
        "\"title\":"
        "\"Kind\",\"type\":\"string\"},\"age\":{\"anyOf\":[{\"maximum\":40,\"minimum\":"
        "0,\"type\":"
        "\"integer\"},{\"type\":\"null\"}],\"default\":null,\"title\":\"Age\"}},"
        "\"required\":["
        "\"name\",\"kind\"],\"title\":\"Pet\",\"type\":\"object\"}},\"description\":"
        "\"A person.\","
        "\"properties\":{\"id\":{\"exclusiveMinimum\":0,\"title\":\"Id\",\"type\":"
        "\"integer\"},"
        "\"pets\":{\"items\":{\"$ref\":\"#/$defs/"
        "Pet\"},\"maxItems\":3,\"title\":\"Pets\",\"type\":"
        "\"array\"},\"best\":{\"anyOf\":[{\"$ref\":\"#/$defs/"
        "Pet\"},{\"type\":\"null\"}]},"
        "\"share\":{\"minimum\":-0.25,\"exclusiveMaximum\":1.5,\"title\":\"Share\","
        "\"type\":"
        "\"number\"},\"pair\":{\"maxItems\":2,\"minItems\":2,\"prefixItems\":[{"
        "\"type\":"
        "\"integer\"},{\"type\":\"string\"}],\"title\":\"Pair\",\"type\":\"array\"},"
        "\"scores\":{"
        "\"additionalProperties\":{\"type\":\"number\"},\"title\":\"Scores\",\"type\":"
        "\"object\"}},"
        "\"required\":[\"id\",\"pets\",\"best\",\"share\",\"pair\",\"scores\"],"
        "\"title\":"
        "\"Person\",\"type\":\"object\"}",
        /* Recursive, as OpenAI's guide has it. */
        "{\"type\":\"object\",\"properties\":{\"linked\":{\"$ref\":\"#/$defs/"
        "node\"}},\"$defs\":{"
        "\"node\":{\"type\":\"object\",\"properties\":{\"value\":{\"type\":\"number\"},"
        "\"next\":{"
        "\"anyOf\":[{\"$ref\":\"#/$defs/"
        "node\"},{\"type\":\"null\"}]}},\"additionalProperties\":"
        "false,\"required\":[\"next\",\"value\"]}},\"additionalProperties\":false,"
        "\"required\":["
        "\"linked\"]}",
        "{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"boolean\"},\"abc\":{"
        "\"const\":2}},"
        "\"additionalProperties\":{\"type\":[\"integer\",\"string\"]}}",
        "{\"type\":\"array\",\"minItems\":2,\"items\":{\"type\":\"integer\","
        "\"minimum\":-1200,"
        "\"maximum\":57}}",
    };
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        still_grammar *g = open_schema(schemas[i]);
        still_error err = {0};
        json_t *schema;
        int whole = 0;
        assert_int_equal(
            sti_json_read("schema", schemas[i], strlen(schemas[i]), 0, &schema, &err),
            STILL_OK);
        root = schema;
        for (uint64_t seed = 0; seed < 24; seed++) {
            char *text = random_text(g, seed * 7919 + i);
            json_t *v;
            if (!text) continue;
            if (sti_json_read("text", text, strlen(text), STI_JSON_ANY | STI_JSON_NUL,
                              &v, &err)) {
                /* A name with \u0000 in it is JSON that this reader does not take. */
                if (!strstr(err.text, "\\u0000")) fail_msg("%s: %s", text, err.text);
            } else {
                if (!valid(schema, v)) fail_msg("not valid: %s", text);
                json_decref(v);
                whole++;
            }
            free(text);
        }
        if (whole < 8) fail_msg("%s: only %d texts", schemas[i], whole);
        json_decref(schema);
        still_grammar_free(g);
    }
}

static void test_any_object(void **state)
{
    (void)state;
    still_grammar *g;
    still_error err;
    assert_int_equal(still_grammar_open_json(tk, &g, &err), STILL_OK);
    assert_true(matches(g, "{\"a\": [1, 2]}", 13));
    assert_false(matches(g, "[1]", 3));
    still_grammar_free(g);
    assert_int_equal(still_grammar_open_json(NULL, &g, &err), STILL_E_ARG);
    assert_null(g);
}

static int setup(void **state)
{
    (void)state;
    tk = test_tokenizer();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    still_tokenizer_free(tk);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_any_object),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
