/* Splitting rules: the pieces of telling texts, and every rule against the others'
 * common ground: pieces put together are the text. */
#include "../run.h"
#include "tokens.h"

#include "token/split.h"

typedef struct pieces {
    char text[512]; /* pieces, each followed by '|' */
    size_t n;
} pieces;

static still_status collect(void *user, const char *p, size_t n, still_error *err)
{
    (void)err;
    pieces *out = user;
    memcpy(out->text + out->n, p, n);
    out->n += n;
    out->text[out->n++] = '|';
    out->text[out->n] = 0;
    return STILL_OK;
}

static void check(const char *rule, const char *text, const char *want)
{
    sti_split s = {0};
    pieces out = {0};
    still_error err = {0};
    const sti_rule *found;
    if (sti_split_add_named(&s, rule, strlen(rule), &found, &err))
        fail_msg("%s", err.text);
    assert_string_equal(found->name, rule);
    assert_int_equal(sti_split_walk(&s, text, strlen(text), collect, &out, &err),
                     STILL_OK);
    assert_string_equal(out.text, want);
    sti_split_free(&s);
}

static void test_rules(void **state)
{
    (void)state;
    check("gpt-2", "It's  12 apples,\n\n 3x", "It|'s| | 12| apples|,|\n\n| 3|x|");
    check("gpt-2", "I'LL", "I|'|LL|");
    check("smollm", "It's  12 apples  3", "It|'s|  |1|2| apples|  |3|");
    check("llama-bpe", "I'LL  12345\n\n ,x\n", "I|'LL| | |123|45|\n\n| ,|x|\n|");
    check("smaug-bpe", "I'LL 12345", "I|'LL| |123|45|");
    check("dbrx", "I'LL 12345", "I|'LL| |123|45|");
    check("refact", "It's  12 apples  3", "It|'s|  |1|2| apples|  |3|");
    check("qwen2", "I'll 123", "I|'ll| |1|2|3|");
    check("tekken", "I'll camelCase 12 a:/\n/", "I|'ll| camel|Case| |1|2| a|:/\n/|");
    check("gpt-4o", "I'll camelCase 1234", "I'll| camel|Case| |123|4|");
    check("default", "a,b 1234", "a|,|b| |123|4|");
}

/* U+180E is no white space in Unicode, U+0085 and U+3000 are. */
static void test_white_space(void **state)
{
    (void)state;
    check("gpt-2", "a\u180e", "a|\u180e|");
    check("gpt-2", "a \u180e", "a| \u180e|");
    check("gpt-2", "a\u3000b\xC2\x85", "a|\u3000|b|\xC2\x85|");
}

static void test_errors(void **state)
{
    (void)state;
    sti_split s = {0};
    still_error err;
    const sti_rule *rule;
    assert_int_equal(sti_split_add_named(&s, "gpt-3", 5, &rule, &err),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "'gpt-3' is not known (known: gpt-2, "));
    assert_non_null(strstr(err.text, "tekken"));
    assert_true(!rule && !s.n);
    assert_int_equal(sti_split_add(&s, "[", 1, &err), STILL_E_FORMAT);
    assert_int_equal(sti_split_add(&s, "", 0, &err), STILL_E_FORMAT);
    for (int i = 0; i < STI_SPLIT_STAGES; i++)
        assert_int_equal(sti_split_add(&s, "a?", 2, &err), STILL_OK);
    assert_int_equal(sti_split_add(&s, "a", 1, &err), STILL_E_UNSUPPORTED);
    pieces out = {0}; /* empty matches cut nothing */
    assert_int_equal(sti_split_walk(&s, "baab", 4, collect, &out, &err), STILL_OK);
    assert_string_equal(out.text, "b|a|a|b|");
    sti_split_free(&s);
}

/* A rule is recognized by what it does, and its relatives by what goes with it. */
static void test_names(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt-2", "smollm", "llama-bpe", "smaug-bpe",
                                        "qwen2", "tekken", "gpt-4o",    "default"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        sti_split s = {0};
        const sti_rule *rule, *found;
        still_error err;
        assert_int_equal(
            sti_split_add_named(&s, names[i], strlen(names[i]), &rule, &err), STILL_OK);
        assert_int_equal(sti_split_rule_of(&s, rule, &found, &err), STILL_OK);
        assert_non_null(found);
        assert_string_equal(found->name, names[i]);
        sti_split_free(&s);
    }
}

RUN_TESTS(cmocka_unit_test(test_rules), cmocka_unit_test(test_names),
          cmocka_unit_test(test_white_space), cmocka_unit_test(test_errors))
