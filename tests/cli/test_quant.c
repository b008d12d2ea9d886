/* Names of GGUF files: parts, labels, and which model a suffix means. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "cli/fetch/quant.h"
#include "cli/near.h"

static const char *name_of(const void *list, size_t i)
{
    return ((const char *const *)list)[i];
}

static void test_stem(void **state)
{
    (void)state;
    assert_int_equal(cli_name_stem("org/name:Q4_K_M"), 8);
    assert_int_equal(cli_name_stem("org/name"), 8);
    assert_int_equal(cli_name_stem("org/name:"), 9);
    assert_int_equal(cli_name_stem("a:b/c"), 5); /* a folder's colon */
    assert_int_equal(cli_name_stem("a:b/c:d"), 5);
    assert_int_equal(cli_name_stem(":x"), 2);
    assert_int_equal(cli_name_stem("org/:x"), 6);
}

static void test_label(void **state)
{
    static const char *const is[][2] = {
        {"tiny-Q4_K_M.gguf", "Q4_K_M"},
        {"tiny.q8_0.gguf", "Q8_0"},
        {"tiny_iq4_xs.gguf", "IQ4_XS"},
        {"tiny-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"},
        {"Qwen2.5-7B-bf16.gguf", "BF16"},
        {"Q6_K/tiny-00001-of-00002.gguf", "Q6_K"},
        {"Q6_K/tiny-Q5_0.gguf", "Q5_0"},
        {"gpt-oss-mxfp4.gguf", "MXFP4"},
        {"tiny-TQ1_0.GGUF", "TQ1_0"},
        {"Quark.gguf", "Quark"},
        {"model-Q4_K_M-new.gguf", "model-Q4_K_M-new"},
        {"tiny.safetensors", ""},
        {".gguf", ""},
    };
    char label[CLI_LABEL_MAX];
    (void)state;
    for (size_t i = 0; i < sizeof is / sizeof *is; i++)
        assert_string_equal(cli_gguf_label(is[i][0], label), is[i][1]);
}

static void test_parts(void **state)
{
    cli_part p;
    (void)state;
    assert_true(cli_is_gguf("a/x-00002-of-00003.gguf", &p));
    assert_int_equal(p.stem, 3);
    assert_int_equal(p.index, 2);
    assert_int_equal(p.parts, 3);
    /* These are no parts but names. */
    static const char *const whole[] = {
        "x-00000-of-00003.gguf", "x-00004-of-00003.gguf", "x-0001-of-00003.gguf",
        "x_00001-of-00003.gguf", "x-00001-or-00003.gguf"};
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        assert_true(cli_is_gguf(whole[i], &p));
        assert_int_equal(p.parts, 1);
    }
    static const char *const none[] = {"mmproj-F16.gguf", "x.imatrix.gguf",
                                       "x.still.gguf",    "adapter.gguf",
                                       "x.gguf.part",     "gguf"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        assert_false(cli_is_gguf(none[i], &p));
    assert_true(cli_gguf_same("x-00001-of-00002.gguf", "x-00002-of-00002.gguf"));
    assert_false(cli_gguf_same("x-00001-of-00002.gguf", "x-00001-of-00003.gguf"));
    assert_false(cli_gguf_same("x-00001-of-00002.gguf", "x.gguf"));
    assert_false(cli_gguf_same("x.gguf", "y.gguf"));
}

static void test_pick(void **state)
{
    static const char *const list[] = {"README.md",
                                       "x-Q8_0.gguf",
                                       "x-UD-Q4_K_M.gguf",
                                       "x-Q4_K_M.gguf",
                                       "x-UD-Q4_K_XL.gguf",
                                       "x-Q5_0-00001-of-00002.gguf",
                                       "x-Q5_0-00002-of-00002.gguf"};
    static const struct {
        size_t from, to; /* of list */
        const char *suffix;
        cli_pick found;
        size_t first;
    } want[] = {
        {0, 7, NULL, CLI_PICK_ONE, 3},        {0, 7, "q4_k_m", CLI_PICK_ONE, 3},
        {0, 3, "q4_k_m", CLI_PICK_ONE, 2},    {0, 7, "Q4_K_XL", CLI_PICK_ONE, 4},
        {0, 7, "ud-q4_k_m", CLI_PICK_ONE, 2}, {0, 7, "x-q8_0", CLI_PICK_ONE, 1},
        {0, 7, "Q5_0", CLI_PICK_ONE, 5},      {0, 7, "K_M", CLI_PICK_UNKNOWN, 0},
        {0, 7, "4_K_M", CLI_PICK_UNKNOWN, 0}, {0, 7, "", CLI_PICK_UNKNOWN, 0},
        {0, 2, NULL, CLI_PICK_ONE, 1},        {4, 7, NULL, CLI_PICK_MANY, 0},
        {5, 7, NULL, CLI_PICK_ONE, 0},        {0, 1, NULL, CLI_PICK_NONE, 0},
        {0, 0, "Q4_0", CLI_PICK_NONE, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        size_t first = 0;
        assert_int_equal(cli_gguf_pick(list + want[i].from, want[i].to - want[i].from,
                                       name_of, want[i].suffix, &first),
                         want[i].found);
        if (want[i].found == CLI_PICK_ONE) assert_int_equal(first, want[i].first);
    }
    sti_buf text = {0};
    cli_gguf_choices(list, 7, name_of, "a/b", 3, &text);
    assert_string_equal(text.p, "a/b:Q8_0, a/b:UD-Q4_K_M, a/b:Q4_K_M, a/b:UD-Q4_K_XL, "
                                "a/b:Q5_0");
    sti_buf_free(&text);
    /* Labels that two models share are no choice; their names are. */
    static const char *const same[] = {"x-Q4_0.gguf", "y-Q4_0.gguf"};
    cli_gguf_choices(same, 2, name_of, "a/b", 3, &text);
    assert_string_equal(text.p, "a/b:x-Q4_0, a/b:y-Q4_0");
    sti_buf_free(&text);
}

static void test_near(void **state)
{
    (void)state;
    assert_int_equal(cli_distance("smollm2", "SmolLM2"), 0);
    assert_int_equal(cli_distance("chta", "chat"), 1);
    assert_int_equal(cli_distance("", "abc"), 3);
    assert_int_equal(cli_distance("abcd", "acbd"), 1);
    cli_near best = {0};
    cli_near_consider(&best, "gen", "generate"); /* its beginning */
    assert_string_equal(best.name, "generate");
    best = (cli_near){0};
    cli_near_consider(&best, "xyz", "chat");
    assert_null(best.name);
}

RUN_TESTS(cmocka_unit_test(test_stem), cmocka_unit_test(test_label),
          cmocka_unit_test(test_parts), cmocka_unit_test(test_pick),
          cmocka_unit_test(test_near))
