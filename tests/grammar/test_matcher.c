/* Matchers: the mask is what reading byte by byte says, for every token at every step of
 * random texts; special tokens, ends, forks; sampling under a mask. */
#include "grammars.h"

#include <math.h>

#include "grammar/grammar.h"

static still_tokenizer *tk;

static still_grammar *open_gbnf(const char *text)
{
    still_grammar *g;
    still_error err = {0};
    if (still_grammar_open_gbnf(tk, text, strlen(text), &g, &err))
        fail_msg("%s: %s", text, err.text);
    return g;
}

/* Writes random texts, and compares the mask at each token. Long tokens are preferred:
 * they cross rules. Returns the tokens written. */
static int walk(still_grammar *g, uint64_t seed, int most)
{
    still_matcher *m = new_matcher(g);
    still_error err;
    uint64_t bits[WORDS];
    int made = 0;
    for (; made < most && !still_matcher_done(m); made++) {
        int32_t id, tries = 0;
        check_mask(m, bits);
        do {
            const uint64_t draw = sti_mix64(seed++);
            id = (int32_t)(draw % VOCAB_SIZE);
            if (++tries < 2000 && id < 256)
                id = 256 + (int32_t)((draw >> 32) % N_PIECES);
        } while (!has(bits, id));
        if (still_matcher_accept(m, id, &err)) fail_msg("token %d: %s", id, err.text);
    }
    still_matcher_free(m);
    return made;
}

static const char JSON[] =
    "root ::= value\n"
    "value ::= object | array | string | number | (\"true\" | \"false\" | \"null\") "
    "ws\n"
    "object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? "
    "\"}\" ws\n"
    "array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n"
    "string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" "
    "[0-9a-fA-F]{4}))* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? "
    "[0-9]+)? ws\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

static void test_masks(void **state)
{
    (void)state;
    static const char *const text[] = {
        JSON,
        "root ::= .*",
        "root ::= (\"name\" | \"na\" \"me\" | [a-n]+ \"ame\")* \"zz\"?",
        "root ::= word (\" \" word)*\nword ::= [a-z]+ | \"\\xE9\" word?",
        "root ::= \"a\"{3,40} \"\\\"\"",
        "root ::= e\ne ::= t ([+] t)*\nt ::= [0-9]+ | \"(\" e \")\" | \"[\" e \"]\"",
        "root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"a\"? t*\nt ::= \"a\" | "
        "\"aa\"",
        "root ::= l\nl ::= i | i \",\" l\ni ::= \"abc\" | \"{\" l? \"}\" | \"\"",
    };
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        still_grammar *g = open_gbnf(text[i]);
        int made = 0;
        for (uint64_t seed = 0; seed < 6; seed++) made += walk(g, 1000 * seed + i, 40);
        assert_true(made > 0);
        still_grammar_free(g);
    }
}

/* The same when everything that is kept has to make room all the time. */
static void test_small_store(void **state)
{
    (void)state;
    still_grammar *g = open_gbnf(JSON);
    g->store_room = 2 * g->words + g->pieces->n;
    for (uint64_t seed = 0; seed < 4; seed++) walk(g, seed, 60);
    still_grammar_free(g);
}

static void test_ends_and_specials(void **state)
{
    (void)state;
    still_grammar *g = open_gbnf("root ::= .{2,4}");
    still_matcher *m = new_matcher(g);
    still_error err;
    uint64_t bits[WORDS];
    check_mask(m, bits);
    assert_false(has(bits, END) || has(bits, START) || has(bits, USER_MARK));
    assert_int_equal(still_matcher_accept(m, END, &err), STILL_E_ARG);
    assert_int_equal(still_matcher_accept(m, START, &err), STILL_E_ARG);
    assert_int_equal(still_matcher_accept(m, USER_MARK, &err), STILL_E_ARG);
    assert_int_equal(still_matcher_accept(m, -1, &err), STILL_E_ARG);
    assert_int_equal(still_matcher_accept(m, VOCAB_SIZE, &err), STILL_E_ARG);
    /* A character cut into bytes: the end is not allowed inside it. */
    assert_int_equal(feed_bytes(m, "\xF0\x9F", 2), 2);
    assert_false(still_matcher_can_end(m));
    assert_int_equal(feed_bytes(m, "\x98\x80x", 3), 3);
    assert_true(still_matcher_can_end(m));
    assert_false(still_matcher_done(m));
    assert_int_equal(still_matcher_mask(m, bits, &err), STILL_OK);
    assert_true(has(bits, END) && has(bits, 'a'));
    still_matcher *fork;
    assert_int_equal(still_matcher_fork(m, &fork, &err), STILL_OK);
    assert_int_equal(feed_bytes(fork, "yzw", 3), 2);
    assert_true(still_matcher_done(fork));
    assert_int_equal(still_matcher_accept(fork, END, &err), STILL_OK);
    assert_int_equal(still_matcher_accept(fork, 'a', &err), STILL_E_ARG);
    assert_true(still_matcher_done(fork));
    assert_int_equal(still_matcher_mask(fork, bits, &err), STILL_OK);
    assert_true(has(bits, END) && !has(bits, 'a'));
    assert_false(still_matcher_done(m)); /* the other is where it was */
    still_matcher_reset(fork);
    assert_false(still_matcher_can_end(fork));
    assert_int_equal(feed_bytes(fork, "ab", 2), 2);
    still_matcher_free(fork);
    still_matcher_free(m);
    still_grammar_free(g);
}

/* Logits may be more or fewer than the tokenizer's tokens. */
static void test_other_vocabularies(void **state)
{
    (void)state;
    still_grammar *g = open_gbnf("root ::= .*");
    still_error err;
    for (int vocab = 70; vocab <= VOCAB_SIZE + 200; vocab += 130) {
        uint64_t bits[16];
        still_matcher *m;
        memset(bits, 0xFF, sizeof bits);
        assert_int_equal(still_matcher_new(g, vocab, &m, &err), STILL_OK);
        assert_int_equal(still_matcher_mask(m, bits, &err), STILL_OK);
        assert_true(has(bits, 'A'));
        for (int i = vocab; i < (vocab + 63) / 64 * 64; i++) assert_false(has(bits, i));
        for (int i = VOCAB_SIZE; i < vocab; i++) assert_false(has(bits, i));
        still_matcher_free(m);
    }
    still_grammar_free(g);
}

/* ---- Sampling ------------------------------------------------------------ */

static void test_sampling(void **state)
{
    (void)state;
    still_grammar *g = open_gbnf("root ::= \"yes\" | \"no\"");
    still_matcher *m = new_matcher(g), *wrong;
    still_error err;
    still_sampler *sp;
    float logits[VOCAB_SIZE];
    int32_t id;
    for (int i = 0; i < VOCAB_SIZE; i++) logits[i] = (float)(i % 7);
    logits['y'] = 3;
    logits['n'] = 2;
    for (int hot = 0; hot < 2; hot++) {
        const still_sampler_params p = {
            .size = sizeof p, .temperature = hot ? 1.5F : 0, .seed = 3};
        assert_int_equal(still_sampler_new(&p, VOCAB_SIZE, &sp, &err), STILL_OK);
        for (int i = 0; i < 200; i++) {
            assert_int_equal(still_sampler_sample_matched(sp, m, logits, &id, &err),
                             STILL_OK);
            assert_true(id == 'y' || (hot && id == 'n'));
        }
        still_sampler_free(sp);
    }
    assert_int_equal(feed_bytes(m, "ye", 2), 2);
    assert_int_equal(still_sampler_new(NULL, VOCAB_SIZE, &sp, &err), STILL_OK);
    logits['s'] = -1e30F; /* as unlikely as can be, and the only one */
    assert_int_equal(still_sampler_sample_matched(sp, m, logits, &id, &err), STILL_OK);
    assert_int_equal(id, 's');
    logits['q'] = 100; /* without a matcher the most likely, and with one that fits */
    assert_int_equal(still_sampler_sample_matched(sp, NULL, logits, &id, &err),
                     STILL_OK);
    assert_int_equal(id, 'q');
    assert_int_equal(still_matcher_new(g, VOCAB_SIZE + 1, &wrong, &err), STILL_OK);
    assert_int_equal(still_sampler_sample_matched(sp, wrong, logits, &id, &err),
                     STILL_E_ARG);
    still_matcher_free(wrong);
    still_sampler_free(sp);
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
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_small_store),
        cmocka_unit_test(test_ends_and_specials),
        cmocka_unit_test(test_other_vocabularies),
        cmocka_unit_test(test_sampling),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
