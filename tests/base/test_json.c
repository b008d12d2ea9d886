/* JSON: what is read is what jansson reads, errors have their place, numbers their range,
 * and a value with a part missing does not come out. */
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "base/json.h"

static json_t *must_read(const char *text, unsigned flags)
{
    json_t *v;
    still_error err = {0};
    if (sti_json_read("x", text, strlen(text), flags, &v, &err) != STILL_OK)
        fail_msg("%s: %s", text, err.text);
    return v;
}

static void values_are_those_of_jansson(void **state)
{
    (void)state;
    static const char *const text[] = {
        "{}",
        "[]",
        " [ ] ",
        "{\"a\": 1, \"b\" :[true,false , null],\"c\":{\"d\":\"e\"}}",
        "[0, -0, 1, -1, 9223372036854775807, -9223372036854775808]",
        "[0.0, -0.0, 1.5, 1e3, 1E+3, 1e-3, 2.5e-300, 1.7976931348623157e308, 1e-400]",
        "[3.14159265358979323846264338327950288419716939937510582097494459230781]",
        "[\"\", \"a\\\"b\\\\c\\/d\\b\\f\\n\\r\\t\", \"\\u00e9\\u20AC\\ud83d\\ude00\"]",
        "[\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\", \"\x7F\"]",
        "{\"a_name_that_is_long_enough\": \"and a value that is longer than that\"}",
        "{\"a\": 1, \"a\": 2}",
        "\r\n\t[1\r\n,\t2]\r\n",
    };
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        json_t *mine = must_read(text[i], 0);
        json_t *theirs = json_loads(text[i], 0, NULL);
        assert_non_null(theirs);
        if (!json_equal(mine, theirs)) fail_msg("differs: %s", text[i]);
        json_decref(mine);
        json_decref(theirs);
    }
    json_t *v = must_read("[\"a\\u0000b\"]", STI_JSON_NUL);
    assert_int_equal(json_string_length(json_array_get(v, 0)), 3);
    json_decref(v);
    v = must_read(" 7 ", STI_JSON_ANY);
    assert_int_equal(json_integer_value(v), 7);
    json_decref(v);
}

/* The decimal point of numbers is not the locale's. */
static void numbers_know_no_locale(void **state)
{
    (void)state;
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8")) setlocale(LC_NUMERIC, "C.UTF-8");
    json_t *v = must_read("[1.5]", 0);
    assert_true(json_real_value(json_array_get(v, 0)) == 1.5);
    json_decref(v);
    setlocale(LC_NUMERIC, "C");
}

static void errors_say_where(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
        unsigned flags;
    } wrong[] = {
        {"", "line 1, column 1: the text ends before a value", 0},
        {"  \n ", "line 2, column 2: the text ends before a value", 0},
        {"7", "column 1: expected '[' or '{'", 0},
        {"[1]", "column 1: not a JSON object", STI_JSON_OBJECT},
        {"[1,]", "column 4: expected a value", 0},
        {"[1\n 2]", "line 2, column 2: expected ',' or ']'", 0},
        {"[1", "column 3: expected ',' or ']'", 0},
        {"{\"a\" 1}", "column 6: expected ':'", 0},
        {"{\"a\":1", "column 7: expected ',' or '}'", 0},
        {"{a:1}", "column 2: expected a name in quotes", 0},
        {"{\"a\":1,}", "column 8: expected a name in quotes", 0},
        {"{\"a\":1,\"a\":2}", "column 8: this name occurs twice", STI_JSON_ONCE},
        {"{\"a\\u0000\":1}", "column 2: \\u0000 in a name", STI_JSON_NUL},
        {"[\"\\u0000\"]", "\\u0000 in a string", 0},
        {"[\"a", "column 4: the text ends inside a string", 0},
        {"[\"a\\", "column 5: unknown escape", 0},
        {"[\"\\x\"]", "unknown escape", 0},
        {"[\"\\u12g4\"]", "four hexadecimal digits", 0},
        {"[\"\\ud800\"]", "column 3: half a surrogate pair", 0},
        {"[\"\\ud800\\u0041\"]", "half a surrogate pair", 0},
        {"[\"\\udc00\"]", "half a surrogate pair", 0},
        {"[\"\n\"]", "line 1, column 3: control character", 0},
        {"[\"\xFF\"]", "column 3: no UTF-8", 0},
        {"[\"\xED\xA0\x80\"]", "no UTF-8", 0},
        {"[01]", "malformed number", 0},
        {"[-]", "malformed number", 0},
        {"[1.]", "malformed number", 0},
        {"[1e]", "malformed number", 0},
        {"[.5]", "expected a value", 0},
        {"[9223372036854775808]", "beyond 64 bits", 0},
        {"[1e400]", "number too large", 0},
        {"[nul]", "expected a value", 0},
        {"[NaN]", "expected a value", 0},
        {"[1] x", "column 5: something follows the value", 0},
        {"[1]]", "column 4: something follows the value", 0},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        json_t *v;
        still_error err = {0};
        const size_t n = strlen(wrong[i].text);
        char *exact = malloc(n ? n : 1); /* no byte behind it, for the sanitizers */
        assert_non_null(exact);
        memcpy(exact, wrong[i].text, n);
        assert_int_equal(sti_json_read("x", exact, n, wrong[i].flags, &v, &err),
                         STILL_E_FORMAT);
        assert_null(v);
        if (strncmp(err.text, "x: line ", 8) || !strstr(err.text, wrong[i].says))
            fail_msg("%s: \"%s\", expected \"%s\"", wrong[i].text, err.text,
                     wrong[i].says);
        free(exact);
    }
    char deep[2000];
    json_t *v;
    still_error err;
    memset(deep, '[', sizeof deep);
    assert_int_equal(sti_json_read("x", deep, sizeof deep, 0, &v, &err),
                     STILL_E_FORMAT);
    assert_non_null(strstr(err.text, "nested too deeply"));
    memset(deep, '1', sizeof deep);
    assert_int_equal(sti_json_read("x", deep, sizeof deep, STI_JSON_ANY, &v, &err),
                     STILL_E_FORMAT);
    assert_non_null(strstr(err.text, "too many digits"));
    assert_int_equal(sti_json_read_line("{\"a\"}", 5, 0, &v, &err), STILL_E_FORMAT);
    assert_string_equal(err.text, "column 5: expected ':'");
}

static void a_value_ends_where_it_ends(void **state)
{
    (void)state;
    static const char text[] = " [1, 2] ,{\"a\":3}x";
    size_t at = 0;
    const char *why;
    json_t *v = sti_json_next(text, strlen(text), &at, 0, &why);
    assert_int_equal(json_array_size(v), 2);
    assert_int_equal(at, 7);
    json_decref(v);
    at = 9;
    v = sti_json_next(text, strlen(text), &at, 0, &why);
    assert_int_equal(json_object_size(v), 1);
    assert_int_equal(at, 16);
    json_decref(v);
    assert_null(sti_json_next(text, strlen(text), &at, STI_JSON_ANY, &why));
    assert_string_equal(why, "expected a value");
}

static void numbers_have_a_range(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"{}", "f.json: 'n' is missing, expected a whole number from 1 to 10"},
        {"{\"n\":0}", "'n' is 0, expected"},
        {"{\"n\":11}", "'n' is 11, expected"},
        {"{\"n\":4294967304}", "'n' is 4294967304, expected"},
        {"{\"n\":2.0}", "'n' is 2, expected a whole number"},
        {"{\"n\":\"3\"}", "'n' is a string"},
        {"{\"n\":true}", "'n' is true"},
        {"{\"n\":null}", "'n' is null"},
        {"{\"n\":[]}", "'n' is a list"},
    };
    int64_t n = -5;
    double x = -5;
    still_error err;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        json_t *o = must_read(wrong[i].text, 0);
        assert_int_equal(sti_json_int("f.json", o, "n", 1, 10, &n, &err),
                         STILL_E_FORMAT);
        if (!strstr(err.text, wrong[i].says)) fail_msg("%s", err.text);
        json_decref(o);
    }
    assert_int_equal(n, -5);
    json_t *o = must_read("{\"lo\":1,\"hi\":10,\"big\":1e300,\"half\":0.5}", 0);
    assert_int_equal(sti_json_int("x", o, "lo", 1, 10, &n, &err), STILL_OK);
    assert_int_equal(n, 1);
    assert_int_equal(sti_json_int("x", o, "hi", 1, 10, &n, &err), STILL_OK);
    assert_int_equal(n, 10);
    assert_int_equal(sti_json_real("x", o, "big", -1e30, 1e30, &x, &err),
                     STILL_E_FORMAT);
    assert_string_equal(err.text, "x: 'big' is 1.0000000000000001e+300, expected a "
                                  "number from -1e+30 to 1e+30");
    assert_int_equal(sti_json_real("x", o, "half", 0, 1, &x, &err), STILL_OK);
    assert_true(x == 0.5);
    assert_int_equal(sti_json_real("x", o, "hi", 0, 10, &x, &err), STILL_OK);
    assert_true(x == 10);
    json_decref(o);
}

static void a_part_that_fails_fails_the_whole(void **state)
{
    (void)state;
    json_t *o = json_object(), *list = json_array();
    sti_json_append(&list, json_integer(1));
    sti_json_append(&list, sti_json_of_real(NAN));
    sti_json_set(&o, "list", list);
    sti_json_set_real(&o, "half", 0.5);
    sti_json_set_real(&o, "none", INFINITY);
    sti_json_merge(&o, json_pack("{s:i}", "more", 2));
    char *text = json_dumps(o, JSON_COMPACT);
    assert_string_equal(text, "{\"list\":[1,null],\"half\":0.5,\"more\":2}");
    free(text);
    sti_json_set(&o, "bad", NULL);
    assert_null(o);
    sti_json_set(&o, "later", json_integer(1)); /* no leak, says the sanitizer */
    sti_json_merge(&o, json_object());
    assert_null(o);
    o = json_object();
    sti_json_merge(&o, NULL);
    assert_null(o);
    list = json_array();
    sti_json_append(&list, NULL);
    assert_null(list);
}

RUN_TESTS(cmocka_unit_test(values_are_those_of_jansson),
          cmocka_unit_test(numbers_know_no_locale), cmocka_unit_test(errors_say_where),
          cmocka_unit_test(a_value_ends_where_it_ends),
          cmocka_unit_test(numbers_have_a_range),
          cmocka_unit_test(a_part_that_fails_fails_the_whole))
