/* Scores of hand-made outputs, and the sentence splitter. */
#include <stdio.h>
#include <string.h>

#include "../run.h"

#include "eval/generated/sentences.h"
#include "eval/metrics.h"

static double all_of(const char *output, int n, char **expected)
{
    return sti_match_all(&(sti_item){.expected = expected, .n_expected = n}, output);
}

static double part_of(const char *output, int n, char **expected)
{
    return sti_match_part(&(sti_item){.expected = expected, .n_expected = n}, output);
}

static void test_match_all(void **state)
{
    (void)state;
    char *four[] = {"1234567", "7654321", "1111111", "2222222"};
    assert_float_equal(all_of(" 1234567, 7654321 and 1111111; 2222222.", 4, four), 1,
                       0);
    assert_float_equal(all_of("1234567 1111111", 4, four), 0.5, 0);
    assert_float_equal(all_of("12345678", 4, four), 0.25, 0); /* a substring counts */
    assert_float_equal(all_of("123456", 4, four), 0, 0);
    assert_float_equal(all_of("", 4, four), 0, 0);
    char *names[] = {"ABCDE", "\u00C9t\u00E9"};
    assert_float_equal(all_of("xabcdey \u00E9T\u00C9", 2, names), 1, 0);
    assert_float_equal(all_of("abcd e \u00E9te", 2, names), 0, 0);
    /* Control characters are newlines: they do not join what they separate. */
    char *lines[] = {"a\nb"};
    assert_float_equal(all_of("\x01 a\x02"
                              "b \t",
                              1, lines),
                       1, 0);
    assert_float_equal(all_of("ab", 1, lines), 0, 0);
    assert_float_equal(all_of("\xFF\xFE"
                              "abcde",
                              1, names),
                       1, 0); /* not UTF-8 */
}

static void test_match_part(void **state)
{
    (void)state;
    char *refs[] = {"October 1973", "October", "1973"};
    assert_float_equal(part_of(" It was in OCTOBER.", 3, refs), 1, 0);
    assert_float_equal(part_of("1973", 3, refs), 1, 0);
    assert_float_equal(part_of("Oct. 73", 3, refs), 0, 0);
    assert_float_equal(part_of("", 3, refs), 0, 0);
    assert_float_equal(part_of("anything", 0, NULL), 0, 0);
}

static double babi(double (*score)(const sti_item *, const char *),
                   const char *question, const char *target, const char *output)
{
    char prompt[256], *expected[] = {(char *)target};
    snprintf(prompt, sizeof prompt,
             "<context>\nQuestion: kitchen?\n</context>\n\nQuestion: %s", question);
    return score(&(sti_item){.prompt = prompt, .expected = expected, .n_expected = 1},
                 output);
}

static void test_babilong(void **state)
{
    (void)state;
    const struct {
        const char *question, *target, *output;
        double score;
    } place[] = {
        {"Where is Mary?", "kitchen", "The most recent location of Mary is Kitchen.",
         1},
        {"Where is Mary?", "kitchen", "kitchen or garden", 0},
        {"Where is Mary?", "kitchen", "kitchen. Before, she was in the garden.", 1},
        {"Where is Mary?", "kitchen", "kitchen <context> garden", 1},
        {"Where is Mary?", "kitchen", "kitchen\n<example>garden", 1},
        {"Where is Mary?", "kitchen", ". kitchen", 0},
        {"Where is Mary?", "kitchen", "garden", 0},
        {"Where is Mary?", "kitchen", "balcony", 0},
        {"Where is Mary?", "kitchen", "", 0},
        {"Where was the apple before the garden?", "office",
         "Before the garden the apple was in the office", 1},
        {"What is the kitchen south of?", "bedroom",
         "the kitchen is south of the bedroom", 1},
        {"What is the kitchen south of?", "kitchen", "kitchen", 0}, /* never counted */
    };
    for (size_t i = 0; i < sizeof place / sizeof *place; i++)
        assert_float_equal(babi(sti_babilong_places, place[i].question, place[i].target,
                                place[i].output),
                           place[i].score, 0);
    const char *who = "Who did Mary give the apple to?";
    assert_float_equal(babi(sti_babilong_gifts, who, "Fred", "Fred"), 1, 0);
    assert_float_equal(babi(sti_babilong_gifts, who, "Fred", "Mary gave it to Fred"), 1,
                       0);
    assert_float_equal(babi(sti_babilong_gifts, who, "Fred", "Fred and Bill"), 0, 0);
    assert_float_equal(babi(sti_babilong_gifts, who, "Fred", "kitchen, Fred"), 1, 0);
}

static void assert_sentences(const char *text, bool abbreviations,
                             const char *const *want)
{
    size_t at = 0, start, end;
    int i = 0;
    while (sti_sentence_next(text, strlen(text), abbreviations, &at, &start, &end)) {
        assert_non_null(want[i]);
        assert_int_equal(end - start, strlen(want[i]));
        assert_memory_equal(text + start, want[i], end - start);
        i++;
    }
    assert_null(want[i]);
}
#define SENTENCES(text, known, ...)                                                    \
    assert_sentences(text, known, (const char *const[]){__VA_ARGS__, NULL})

static void test_sentences(void **state)
{
    (void)state;
    assert_sentences("", true, (const char *const[]){NULL});
    assert_sentences(" \n\t", true, (const char *const[]){NULL});
    SENTENCES("One", true, "One");
    SENTENCES(" One. Two?  Three!\nfour ", true, "One.", "Two?", "Three!", "four");
    SENTENCES("He said \"Go.\" Then left.", true, "He said \"Go.\"", "Then left.");
    SENTENCES("\u201CGo.\u201D She went.", true, "\u201CGo.\u201D", "She went.");
    SENTENCES("Mr. Bennet, e.g. him. Yes.", true, "Mr. Bennet, e.g. him.", "Yes.");
    SENTENCES("Mr. Bennet.", false, "Mr.", "Bennet.");
    SENTENCES("J. R. Hartley came. No. 5 did.", true, "J. R. Hartley came.",
              "No. 5 did.");
    SENTENCES("Version 2.5 works. v1.0", true, "Version 2.5 works.", "v1.0");
    SENTENCES("Well... maybe. Well... Maybe.", true, "Well... maybe.", "Well...",
              "Maybe.");
    SENTENCES("in 1999. The end", true, "in 1999.", "The end");
    SENTENCES("A.\u00A0\u3000"
              "Behind.",
              false,
              "A.\u00A0\u3000"
              "Behind.");
    SENTENCES("End.\u00A0"
              "Next.",
              false, "End.", "Next.");
}

RUN_TESTS(cmocka_unit_test(test_match_all), cmocka_unit_test(test_match_part),
          cmocka_unit_test(test_babilong), cmocka_unit_test(test_sentences))
