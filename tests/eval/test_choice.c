/* Multiple-choice tasks: prompts and continuations character by character, cleaning,
 * and what broken data is answered with. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../run.h"

#include "eval/task.h"
#include "eval/text.h"

static const char DATA[] = FIXTURES "/eval/choice";

/* Item number `at` of a task. */
static sti_item item_of(const char *task, int shots, int at)
{
    still_error e;
    sti_source *s;
    sti_item it = {0};
    const sti_eval_task *t = sti_task_find(task);
    assert_non_null(t);
    const sti_task_params p = {.data_dir = DATA, .shots = shots};
    if (t->open(&p, &s, &e) != STILL_OK) fail_msg("%s", e.text);
    for (int i = 0; i <= at; i++) {
        sti_item_free(&it);
        if (t->next(s, &it, &e) != STILL_OK) fail_msg("%s", e.text);
        assert_non_null(it.memory);
    }
    t->close(s);
    return it;
}

static void expect_option(const sti_item *it, int i, const char *context,
                          const char *continuation, int length)
{
    assert_string_equal(it->option[i].context, context);
    assert_string_equal(it->option[i].continuation, continuation);
    assert_int_equal(it->option[i].length, length);
}

/* ---- Prompts ------------------------------------------------------------- */

static void piqa(void **state)
{
    (void)state;
    sti_item it = item_of("piqa", -1, 0);
    assert_int_equal(it.kind, STI_ITEM_CHOICE);
    assert_string_equal(it.id, "0");
    assert_int_equal(it.n_options, 2);
    assert_int_equal(it.gold, 0);
    expect_option(&it, 0,
                  "Question: keep soup warm\nAnswer:", " Pour it into a thermos flask.",
                  29);
    expect_option(
        &it, 1, "Question: keep soup warm\nAnswer:", " Pour it into a paper bag.", 25);
    assert_ptr_equal(it.option[0].context, it.option[1].context);
    sti_item_free(&it);
    it = item_of("piqa", -1, 1); /* spaces stay as they are, and count */
    expect_option(&it, 1, "Question: How do I open a tight jar?\nAnswer:",
                  " run hot water over  the lid ", 28);
    assert_int_equal(it.gold, 1);
    sti_item_free(&it);
    it = item_of("piqa", -1, 3); /* ids are those of the full set */
    assert_string_equal(it.id, "5");
    sti_item_free(&it);
}

static void arc(void **state)
{
    (void)state;
    sti_item it = item_of("arc_easy", -1, 1);
    assert_int_equal(it.n_options, 4);
    assert_int_equal(it.gold, 1);
    expect_option(
        &it, 3,
        "Question: Which piece of safety equipment is used to keep mold spores "
        "from entering the respiratory system?\nAnswer:",
        " lead apron", 10);
    sti_item_free(&it);
    it = item_of("arc_challenge", -1, 2);
    assert_int_equal(it.n_options, 3);
    expect_option(
        &it, 2,
        "Question: A toy truck rolls over a smooth surface. If the surface is "
        "covered with sand, the truck will most likely roll\nAnswer:",
        " at the same speed", 17);
    sti_item_free(&it);
    it = item_of("arc_challenge", -1, 3);
    assert_int_equal(it.n_options, 5);
    assert_int_equal(it.gold, 3);
    sti_item_free(&it);
}

static void hellaswag(void **state)
{
    (void)state;
    sti_item it = item_of("hellaswag", -1, 0);
    expect_option(&it, 3, "Roof shingle removal: A man is sitting on a roof. He",
                  " starts pulling up roofing on a roof.", 36);
    assert_int_equal(it.gold, 3);
    sti_item_free(&it);
    it = item_of("hellaswag", -1, 2);
    /* The header opens the context; ctx_b is empty, and what it leaves is not stripped:
     * strip comes first, so the one space at the end is gone before it. */
    expect_option(
        &it, 1,
        "Family Life: How to bond with your teen. Try to take interest in what "
        "your teen is interested in. For instance, if your teen enjoys a "
        "specific sport, or listens to a certain band, ask him or her to show "
        "you how the sport goes or how the band works. If you talk to your teen "
        "about what he or she likes, they will be more likely to want to talk "
        "to you.",
        "  Ask questions and relate things you know about your teen to the "
        "conversation. For instance, don't speak about really offensive stuff "
        "or bizarre rumors: try to stick to small talk without offending the "
        "teen.",
        207);
    assert_int_equal(it.option[1].length,
                     sti_text_code_points(it.option[1].continuation) - 1);
    sti_item_free(&it);
}

static void winogrande(void **state)
{
    (void)state;
    sti_item it = item_of("winogrande", -1, 0);
    assert_int_equal(it.gold, 1);
    assert_int_equal(it.n_options, 2);
    expect_option(&it, 0, "Sarah was a much better surgeon than Maria so Sarah",
                  " always got the easier cases.", 28);
    expect_option(&it, 1, "Sarah was a much better surgeon than Maria so Maria",
                  " always got the easier cases.", 28);
    sti_item_free(&it);
}

static void lambada(void **state)
{
    (void)state;
    sti_item it = item_of("lambada", -1, 1);
    assert_true(it.greedy);
    assert_int_equal(it.n_options, 1);
    assert_string_equal(it.id, "42");
    assert_string_equal(it.option[0].continuation, " eat");
    assert_memory_equal(it.option[0].context, "They just would have", 20);
    assert_string_equal(it.option[0].context + strlen(it.option[0].context) - 8,
                        " I don't");
    sti_item_free(&it);
}

#define ABOUT "The following are multiple choice questions (with answers) about "

static void mmlu(void **state)
{
    (void)state;
    sti_item it = item_of("mmlu", 0, 2); /* white space around a question goes */
    assert_string_equal(it.id, "formal_logic/2462");
    expect_option(&it, 1,
                  ABOUT
                  "formal logic.\n\n"
                  "Select the best translation into predicate logic: No artifacts "
                  "are people.\nA. ~Pa\nB. (∀x)(Ax ⊃ ~Px)\nC. ~Ap\nD. (∀x)(Ax • "
                  "~Px)\nAnswer:",
                  " B", 1);
    assert_int_equal(it.gold, 1);
    sti_item_free(&it);
    it = item_of("mmlu", 1, 0);
    expect_option(&it, 3,
                  ABOUT
                  "abstract algebra.\n\n"
                  "Find all c in Z_3 such that Z_3[x]/(x^2 + c) is a field.\nA. 0\n"
                  "B. 1\nC. 2\nD. 3\nAnswer: B\n\n"
                  "Find the degree for the given field extension Q(sqrt(2), "
                  "sqrt(3), sqrt(18)) over Q.\nA. 0\nB. 4\nC. 2\nD. 6\nAnswer:",
                  " D", 1);
    sti_item_free(&it);
    it = item_of("mmlu", -1, 0); /* five shots of its own */
    int answers = 0;
    for (const char *at = it.option[0].context; (at = strstr(at, "\nAnswer:")); at++)
        answers++;
    assert_int_equal(answers, 6);
    sti_item_free(&it);
}

/* ---- Text ---------------------------------------------------------------- */

static void expect_clean(const char *text, const char *clean)
{
    sti_buf b = {0};
    sti_buf_put(&b, "", 0);
    sti_text_clean(&b, text);
    assert_false(b.failed);
    assert_string_equal(b.p, clean);
    sti_buf_free(&b);
}

static void cleaning(void **state)
{
    (void)state;
    expect_clean("A. [header] How to bake [title] Heat.", "A. How to bake. Heat.");
    expect_clean("[step] Cold. [substeps] Very.", " Cold. Very.");
    expect_clean(" \t two  spaces   three    four \n", "two spaces  three  four");
    expect_clean("[a [b] c] d", " c] d");       /* the shortest, from the first [ */
    expect_clean("[a\nb] [c] ]d", "[a\nb] ]d"); /* not across lines */
    expect_clean("open [ never", "open [ never");
    expect_clean("x [title]", "x. "); /* no strip afterwards */
    expect_clean("", "");
    expect_clean("\u00a0\u3000wide\u2003", "wide");
}

static void capitals_and_lengths(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {{"", ""},
                                           {"he", "He"},
                                           {"he SAID I", "He said i"},
                                           {"éCOLE ÀÉ", "École àé"},
                                           {"1 Up", "1 up"},
                                           {"\u0101B", "\u0100b"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        sti_buf b = {0};
        sti_buf_put(&b, "", 0);
        sti_text_capitalize(&b, pairs[i][0]);
        assert_string_equal(b.p, pairs[i][1]);
        sti_buf_free(&b);
    }
    assert_int_equal(sti_text_code_points("naïve ∀"), 7);
    assert_int_equal(sti_text_code_points(""), 0);
    assert_int_equal(sti_text_strip_end("a b\u2003 \n", 7), 3);
    assert_int_equal(sti_text_strip_end(" \t", 2), 0);
}

/* ---- Bad data ------------------------------------------------------------ */

static char dir[] = "/tmp/still-choice-XXXXXX";

/* Opens a task on one file of the given content; its error is in e. */
static still_status open_with(const char *task, const char *file, const char *content,
                              int shots, still_error *e)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(content, f);
    fclose(f);
    sti_source *s = NULL;
    const sti_eval_task *t = sti_task_find(task);
    const sti_task_params p = {.data_dir = dir, .shots = shots};
    still_status st = t->open(&p, &s, e);
    if (st == STILL_OK)
        t->close(s);
    else
        assert_null(s);
    unlink(path);
    return st;
}

static void expect_broken(const char *task, const char *file, const char *content,
                          const char *say)
{
    still_error e = {0};
    if (open_with(task, file, content, 0, &e) != STILL_E_FORMAT)
        fail_msg("%s: %s is taken", task, content);
    if (!strstr(e.text, say) || !strstr(e.text, file))
        fail_msg("'%s' does not say '%s'", e.text, say);
}

#define GOOD "{\"goal\":\"g\",\"sol1\":\"a\",\"sol2\":\"b\",\"label\":0}\n"

static void broken_records(void **state)
{
    (void)state;
    still_error e;
    assert_int_equal(open_with("piqa", "piqa_valid.jsonl", GOOD "\n" GOOD, -1, &e),
                     STILL_OK); /* blank lines do not matter */
    expect_broken("piqa", "piqa_valid.jsonl", GOOD "{\"goal\":\"g\"", "2");
    expect_broken("piqa", "piqa_valid.jsonl", GOOD GOOD "[1]", "3");
    expect_broken("piqa", "piqa_valid.jsonl",
                  "{\"goal\":\"g\",\"sol1\":\"a\",\"label\":0}", "sol2");
    expect_broken("piqa", "piqa_valid.jsonl",
                  "{\"goal\":\"g\",\"sol1\":\"a\",\"sol2\":\"b\",\"label\":2}",
                  "\"label\" is not a whole number from 0 to 1");
    expect_broken("piqa", "piqa_valid.jsonl", "", "no records");
    expect_broken("arc_easy", "arc_easy_test.jsonl",
                  "{\"question\":\"q\",\"choices\":[\"a\"],\"answer\":0}",
                  "1 elements");
    expect_broken("arc_easy", "arc_easy_test.jsonl",
                  "{\"question\":\"q\",\"choices\":[\"a\",3],\"answer\":0}", "strings");
    expect_broken("arc_easy", "arc_easy_test.jsonl",
                  "{\"question\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":-1}",
                  "answer");
    expect_broken("winogrande", "winogrande_xl_valid.jsonl",
                  "{\"sentence\":\"no gap\",\"option1\":\"a\",\"option2\":\"b\","
                  "\"answer\":1}",
                  "no gap");
    expect_broken("lambada", "lambada_openai_test.jsonl",
                  "{\"context\":\"c\",\"target\":\"\"}", "target");
    expect_broken("mmlu", "mmlu_test.jsonl",
                  "{\"subject\":\"s\",\"question\":\"q\",\"choices\":[\"a\",\"b\"],"
                  "\"answer\":0}",
                  "expected 4");
    expect_broken("hellaswag", "hellaswag_valid.jsonl", "{\"ctx_a\":\"a\"}",
                  "activity_label");
}

static void missing_files(void **state)
{
    (void)state;
    still_error e;
    for (int i = 0; i < 7; i++) {
        const sti_eval_task *t = sti_task_at(i);
        sti_source *s;
        const sti_task_params p = {.data_dir = dir, .shots = -1};
        assert_int_equal(t->open(&p, &s, &e), STILL_E_IO);
        assert_null(s);
        assert_non_null(strstr(e.text, dir));
        assert_non_null(strstr(e.text, ".jsonl"));
    }
    /* Shots that the data does not have. */
    sti_source *s;
    const sti_task_params three = {.data_dir = DATA, .shots = 3},
                          nine = {.data_dir = DATA, .shots = 9};
    assert_int_equal(sti_task_find("piqa")->open(&three, &s, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "piqa"));
    assert_int_equal(sti_task_find("mmlu")->open(&nine, &s, &e), STILL_E_FORMAT);
    assert_non_null(strstr(e.text, "5 worked examples"));
}

static void table(void **state)
{
    (void)state;
    assert_null(sti_task_find("nonsense"));
    for (int i = 0; sti_task_at(i); i++) {
        const sti_eval_task *t = sti_task_at(i);
        assert_ptr_equal(sti_task_find(t->name), t);
        assert_true(t->summary && t->metric && t->open && t->next && t->count &&
                    t->close);
    }
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int drop_folder(void **state)
{
    (void)state;
    return rmdir(dir);
}

RUN_TESTS_IN(make_folder, drop_folder, cmocka_unit_test(piqa), cmocka_unit_test(arc),
             cmocka_unit_test(hellaswag), cmocka_unit_test(winogrande),
             cmocka_unit_test(lambada), cmocka_unit_test(mmlu),
             cmocka_unit_test(cleaning), cmocka_unit_test(capitals_and_lengths),
             cmocka_unit_test(broken_records), cmocka_unit_test(missing_files),
             cmocka_unit_test(table))
