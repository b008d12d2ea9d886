/* GBNF: texts that grammars have and have not, grammars that are refused with their place,
 * and hostile ones, which must end in bounded time and memory. */
#include "grammars.h"

#include <stdio.h>

static still_tokenizer *tk;

static void test_texts(void **state)
{
    (void)state;
    static const struct {
        const char *grammar, *yes[8], *no[8];
    } cases[] = {
        {"root ::= \"abc\"", {"abc"}, {"", "ab", "abcd", "abd"}},
        {"root ::= \"a\" | \"b\" \"c\"", {"a", "bc"}, {"b", "ac", "c"}},
        {"root ::= [a-c]+ [^a-c]? # comment\n",
         {"a", "abcx", "cc\xC3\xA9"},
         {"", "x", "axx"}},
        {"root ::= x{2,3} y{2} z{1,}\nx ::= \"x\"\ny ::= \"y\"\nz ::= \"z\"",
         {"xxyyz", "xxxyyzzz"},
         {"xyyz", "xxxxyyz", "xxyz", "xxyy", "xxyyyz"}},
        {"root ::= \"a\"{0,2} \"b\"{,2}", {"", "a", "aab", "bb"}, {"aaa", "bbb"}},
        {"root ::= (\"a\" (\"b\" |\n \"c\")*)?", {"", "a", "abcb"}, {"b", "aa"}},
        {"root ::= .{2}",
         {"ab", "\xC3\xA9x", "\xF0\x9F\x98\x80\n"},
         {"a", "abc", "\xC3x"}},
        {"root ::= \"\\x41\\u00e9\\U0001F600\\\"\\\\\\n\\[\\]\"",
         {"A\xC3\xA9\xF0\x9F\x98\x80\"\\\n[]"},
         {"A"}},
        {"root ::= [\\u0410-\\u044F]+ [^\\x00-\\u07FF]",
         {"\xD0\x90\xD1\x8F\xE2\x82\xAC"},
         {"\xD0\x90", "\xD0\x90\xD0\x90", "a\xE2\x82\xAC"}},
        {"root ::= [-a\\]^]+", {"-a]^"}, {"b"}},
        {"root ::= \"(\" root \")\" | \"x\"", {"x", "((x))"}, {"", "(x", "((x)", "x)"}},
        {"root ::= list\nlist ::= [a-z] | [a-z] \",\" list",
         {"a", "a,b,c"},
         {"", "a,", ",a", "ab"}},
        {"root ::= expr\nexpr ::= term ([+-] term)*\nterm ::= [0-9]+ | \"(\" expr "
         "\")\"",
         {"1", "1+22-(3+4)", "((7))"},
         {"1+", "(1", "1)", "+1"}},
        /* Ambiguous: many ways to read one text. */
        {"root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"a\"? t*\nt ::= \"a\" | "
         "\"aa\"",
         {"aaaa", "aab", "aaaaaacbc", ""},
         {"b", "aabx"}},
        /* Rules that may be empty, everywhere. */
        {"root ::= e a e b e\ne ::= \"-\"*\na ::= \"a\"?\nb ::= e \"b\"? e",
         {"", "a", "--a-b--", "-b"},
         {"ba", "aa"}},
        {"root ::= a a a\na ::= b | \"\"\nb ::= \"x\" c\nc ::= \"y\"? |\n\n",
         {"", "x", "xyx", "xxyx"},
         {"y", "xxxx", "xyy"}},
        {"root-1 ::= \"q\"\nroot ::=\n  root-1 # over lines\n  | \"z\"\n",
         {"q", "z"},
         {"qz"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_grammar *g;
        still_error err = {0};
        const char *text = cases[i].grammar;
        if (still_grammar_open_gbnf(tk, text, strlen(text), &g, &err))
            fail_msg("%s: %s", text, err.text);
        for (int j = 0; j < 8 && cases[i].yes[j]; j++)
            if (!matches(g, cases[i].yes[j], strlen(cases[i].yes[j])))
                fail_msg("%s refuses '%s'", text, cases[i].yes[j]);
        for (int j = 0; j < 8 && cases[i].no[j]; j++)
            if (matches(g, cases[i].no[j], strlen(cases[i].no[j])))
                fail_msg("%s takes '%s'", text, cases[i].no[j]);
        still_grammar_free(g);
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *grammar, *says;
        still_status code;
    } cases[] = {
        {"", "no rule named 'root'", STILL_E_FORMAT},
        {"x ::= \"a\"", "no rule named 'root'", STILL_E_FORMAT},
        {"root ::= a\n", "line 1, column 10: rule 'a' is not defined", STILL_E_FORMAT},
        {"root = \"a\"", "line 1, column 6: expected '::='", STILL_E_FORMAT},
        {"root ::= \"a", "line 1, column 10: this text has no closing", STILL_E_FORMAT},
        {"root ::= [a", "line 1, column 10: this set has no closing", STILL_E_FORMAT},
        {"root ::= [z-a]", "ends before it begins", STILL_E_FORMAT},
        {"root ::= []", "no character is in this set", STILL_E_FORMAT},
        {"root ::= [^\\x00-\\U0010FFFF]", "no character is in this set",
         STILL_E_FORMAT},
        {"root ::= (\"a\"", "line 1, column 10: this group has no closing",
         STILL_E_FORMAT},
        {"root ::= \"a\")", "line 1, column 13: expected something", STILL_E_FORMAT},
        {"root ::= \"\\q\"", "unknown escape", STILL_E_FORMAT},
        {"root ::= \"\\ud800\"", "not a character", STILL_E_FORMAT},
        {"root ::= \"a\"{3,2}", "the most is less", STILL_E_FORMAT},
        {"root ::= \"a\"{x}", "expected a number of times", STILL_E_FORMAT},
        {"root ::= * \"a\"", "line 1, column 10", STILL_E_FORMAT},
        {"root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: this rule is defined a",
         STILL_E_FORMAT},
        {"root ::= <think>", "tokens in a grammar are not supported",
         STILL_E_UNSUPPORTED},
        {"root ::= \"\xFF\"", "no UTF-8", STILL_E_FORMAT},
        {"root ::= x\nx ::= x \"a\" | \"b\"",
         "line 2, column 1: rule 'x' is left-recursive", STILL_E_UNSUPPORTED},
        {"root ::= a\na ::= e b\nb ::= \"x\" | a\ne ::= \"y\"?", "is left-recursive",
         STILL_E_UNSUPPORTED},
        {"root ::= \"a\" root", "rule 'root' never ends", STILL_E_UNSUPPORTED},
        {"root ::= \"a\" | x\nx ::= \"b\" x", "rule 'x' never ends",
         STILL_E_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_grammar *g;
        still_error err = {0};
        const still_status st = still_grammar_open_gbnf(
            tk, cases[i].grammar, strlen(cases[i].grammar), &g, &err);
        assert_null(g);
        if (st != cases[i].code || !strstr(err.text, cases[i].says))
            fail_msg("%s: status %d, '%s'", cases[i].grammar, st, err.text);
    }
}

/* ---- Hostile grammars ---------------------------------------------------- */

static still_status open_text(const char *text, still_grammar **g, still_error *err)
{
    return still_grammar_open_gbnf(tk, text, strlen(text), g, err);
}

static void expect_limit(const char *text)
{
    still_grammar *g;
    still_error err = {0};
    const still_status st = open_text(text, &g, &err);
    assert_null(g);
    if (st != STILL_E_LIMIT) fail_msg("%.60s: status %d, '%s'", text, st, err.text);
}

static void test_too_large(void **state)
{
    (void)state;
    sti_buf text = {0};
    expect_limit("root ::= \"a\"{1000000000000000000000}");
    expect_limit("root ::= (\"a\"{1000}){1000}");
    expect_limit("root ::= ((((((\"ab\"{99}){99}){99}){99}){99}){99})*");
    sti_buf_puts(&text, "root ::= ");
    for (int i = 0; i < 100000; i++) sti_buf_puts(&text, "(");
    expect_limit(text.p);
    sti_buf_clear(&text);
    sti_buf_puts(&text, "root ::= "); /* each may be left out: as many ways as pairs */
    for (int i = 0; i < 20000; i++) sti_buf_puts(&text, "\"a\"?");
    expect_limit(text.p);
    sti_buf_clear(&text);
    for (int i = 0; i < 40000; i++) sti_buf_printf(&text, "r%d ::= \"a\"\n", i);
    expect_limit(text.p);
    sti_buf_clear(&text);
    while (text.n <= 1 << 20) sti_buf_puts(&text, "# nothing\n");
    expect_limit(text.p);
    sti_buf_free(&text);
}

/* Loops of nothing, and rules that double: they compile, and reading stays quick. */
static void test_doubling(void **state)
{
    (void)state;
    still_grammar *g;
    still_error err = {0};
    sti_buf text = {0};
    uint64_t bits[WORDS];
    if (open_text("root ::= ((\"a\"*)*)* (\"\"*)+ (((\"b\"?)*)?)*", &g, &err))
        fail_msg("%s", err.text);
    assert_true(matches(g, "aaabbb", 6));
    assert_false(matches(g, "aaabbba", 7));
    still_grammar_free(g);

    sti_buf_puts(&text, "root ::= r0\n"); /* 2^64 ways of reading one text */
    for (int i = 0; i < 64; i++)
        sti_buf_printf(&text, "r%d ::= r%d r%d | \"a\" r%d\n", i, i + 1, i + 1, i + 1);
    sti_buf_puts(&text, "r64 ::= \"a\" | \"b\" r0\n");
    const still_status st = open_text(text.p, &g, &err);
    if (st == STILL_OK) {
        still_matcher *m = new_matcher(g);
        for (int i = 0; i < 50; i++) {
            const still_status mask = still_matcher_mask(m, bits, &err);
            if (mask != STILL_OK && mask != STILL_E_LIMIT) fail_msg("%s", err.text);
            if (mask != STILL_OK || still_matcher_accept(m, 'a', &err)) break;
        }
        still_matcher_free(m);
        still_grammar_free(g);
    } else if (st != STILL_E_LIMIT) {
        fail_msg("%s", err.text);
    }
    sti_buf_free(&text);
}

/* A list of any length needs no more room when its recursion is last, and nesting beyond
 * the limit is an error that leaves the matcher as it was. */
static void test_depth(void **state)
{
    (void)state;
    still_grammar *g;
    still_error err = {0};
    if (open_text("root ::= l\nl ::= \"a\" | \"a\" \",\" l", &g, &err))
        fail_msg("%s", err.text);
    still_matcher *m = new_matcher(g);
    for (int i = 0; i < 100000; i++)
        if (still_matcher_accept(m, i % 2 ? ',' : 'a', &err)) fail_msg("%s", err.text);
    still_matcher_free(m);
    still_grammar_free(g);
    if (open_text("root ::= \"(\" root \")\" | \"x\"", &g, &err))
        fail_msg("%s", err.text);
    m = new_matcher(g);
    int depth = 0;
    while (still_matcher_accept(m, '(', &err) == STILL_OK && depth < 100000) depth++;
    assert_int_equal(err.code, STILL_E_LIMIT);
    assert_in_range(depth, 1000, 99999);
    assert_int_equal(still_matcher_accept(m, 'x', &err), STILL_OK);
    for (int i = 0; i < depth; i++)
        if (still_matcher_accept(m, ')', &err))
            fail_msg("%d of %d: %s", i, depth, err.text);
    assert_true(still_matcher_done(m));
    still_matcher_free(m);
    still_grammar_free(g);
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
        cmocka_unit_test(test_texts),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_too_large), cmocka_unit_test(test_doubling),
        cmocka_unit_test(test_depth),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
