/* Every allocation of reading and building JSON fails in turn, jansson's own included:
 * reading says memory and nothing else, and what is built is whole or NULL. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"

#include "../oom.h"

static const char TEXT[] =
    "{\"a name that outgrows the buffers\": [\"a value that does\\u00e9 so, too\", "
    "12345678901234567, 0.12345678901234567, true, null, {\"inner\": {\"x\": []}}],"
    "\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"i\":1,\"j\":1}";

static void reading(void **state)
{
    (void)state;
    json_t *want, *v;
    assert_int_equal(sti_json_read("x", TEXT, strlen(TEXT), 0, &want, NULL), STILL_OK);
    for (int i = 0;; i++) {
        still_error err;
        countdown = i;
        const still_status st = sti_json_read("x", TEXT, strlen(TEXT), 0, &v, &err);
        const bool used_up = countdown < 0;
        countdown = -1;
        if (st == STILL_OK) {
            if (!json_equal(v, want)) fail_msg("allocation %d changes the value", i);
            json_decref(v);
            if (used_up) continue;
            assert_true(i > 30);
            break;
        }
        assert_null(v);
        if (st != STILL_E_MEMORY) fail_msg("allocation %d: \"%s\"", i, err.text);
    }
    json_decref(want);
}

static json_t *build(void)
{
    json_t *o = json_pack("{s:s}", "one", "two"), *list = json_array();
    for (int i = 0; i < 20; i++) sti_json_append(&list, json_integer(i));
    for (char key[] = "a"; *key <= 'p'; ++*key) sti_json_set(&o, key, json_real(0.5));
    sti_json_set(&o, "list", list);
    sti_json_merge(&o, json_pack("{s:[s]}", "three", "four"));
    return o;
}

static void building(void **state)
{
    (void)state;
    json_t *want = build();
    assert_non_null(want);
    for (int i = 0;; i++) {
        countdown = i;
        json_t *o = build();
        const bool used_up = countdown < 0;
        countdown = -1;
        if (o && !json_equal(o, want)) fail_msg("allocation %d leaves a part out", i);
        const bool whole = o != NULL;
        json_decref(o);
        if (!used_up) {
            assert_true(whole && i > 50);
            break;
        }
    }
    json_decref(want);
}

static void writing(void **state)
{
    (void)state;
    json_t *o = build();
    char *want = sti_json_text(o, JSON_SORT_KEYS);
    assert_non_null(want);
    for (int i = 0;; i++) {
        countdown = i;
        char *text = sti_json_text(o, JSON_SORT_KEYS);
        const bool used_up = countdown < 0;
        countdown = -1;
        if (text && strcmp(text, want) != 0) fail_msg("allocation %d: %s", i, text);
        assert_true(text || used_up);
        free(text);
        if (!used_up) {
            assert_true(i > 5);
            break;
        }
    }
    assert_null(sti_json_text(NULL, JSON_ENCODE_ANY));
    free(want);
    json_decref(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reading),
                                       cmocka_unit_test(building),
                                       cmocka_unit_test(writing)};
    json_set_alloc_funcs(__wrap_malloc, free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
