/* BABILong: prompts against the text of the protocol, contexts of the exact size, facts
 * in their order, frozen samples character by character. */
#include "generated.h"

enum { QA1, QA2, QA3, QA4, QA5, TASKS };

static const char *const HEAD[TASKS] = {
    "I will give you context with the facts about positions of different persons "
    "hidden in some random text and a question. You need to answer the question based "
    "only on the information from the facts. If a person was in different locations, "
    "use the latest location to answer the question.\n\n<example>\nCharlie went to the "
    "hallway. Judith come back to the kitchen. Charlie travelled to balcony. Where is "
    "Charlie?\nAnswer: The most recent location of Charlie is "
    "balcony.\n</example>\n\n<example>\nAlan moved to the garage. Charlie went to the "
    "beach. Alan went to the shop. Rouse travelled to balcony. Where is Alan?\nAnswer: "
    "The most recent location of Alan is shop.\n</example>\n\nAlways return your "
    "answer in the following format: The most recent location of "
    "\xE2\x80\x99person\xE2\x80\x99 is \xE2\x80\x99location\xE2\x80\x99. Do not write "
    "anything else after that.\n\n<context>\n",
    "I give you context with the facts about locations and actions of different "
    "persons hidden in some random text and a question.You need to answer the question "
    "based only on the information from the facts.\nIf a person got an item in the "
    "first location and travelled to the second location the item is also in the "
    "second location. If a person dropped an item in the first location and moved to "
    "the second location the item remains in the first location.\n\n<example>\nCharlie "
    "went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is "
    "the bottle?\nAnswer: The bottle is in the balcony.\n</example>\n<example>\nAlan "
    "moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where is "
    "the screw driver?\nAnswer: The screw driver is in the "
    "kitchen.\n</example>\n\nAlways return your answer in the following format: The "
    "\xE2\x80\x99item\xE2\x80\x99 is in \xE2\x80\x99location\xE2\x80\x99. Do not write "
    "anything else after that.\n\n<context>\n",
    "I give you context with the facts about locations and actions of different "
    "persons hidden in some random text and a question. You need to answer the "
    "question based only on the information from the facts.\nIf a person got an item "
    "in the first location and travelled to the second location the item is also in "
    "the second location. If a person dropped an item in the first location and moved "
    "to the second location the item remains in the first location.\n\n<example>\nJohn "
    "journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. "
    "Daniel journeyed to the bedroom. Daniel moved to the garden. Mary travelled to "
    "the kitchen. Where was the apple before the kitchen?\nAnswer: Before the kitchen "
    "the apple was in the bathroom.\n</example>\n<example>\nJohn went back to the "
    "bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
    "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. "
    "Where was the football before the bedroom?\nAnswer: Before the bedroom the "
    "football was in the garden.\n</example>\n\nAlways return your answer in the "
    "following format: Before the $location_1$ the $item$ was in the $location_2$. Do "
    "not write anything else after that.\n\n<context>\n",
    "I will give you context with the facts about different people, their location and "
    "actions, hidden in some random text and a question. You need to answer the "
    "question based only on the information from the facts.\n\n<example>\nThe hallway "
    "is south of the kitchen. The bedroom is north of the kitchen. What is the kitchen "
    "south of?\nAnswer: bedroom\n</example>\n<example>\nThe garden is west of the "
    "bedroom. The bedroom is west of the kitchen. What is west of the "
    "bedroom?\nAnswer: garden\n</example>\n\nYour answer should contain only one word "
    "- location. Do not write anything else after that.\n\n<context>\n",
    "I will give you context with the facts about locations and their relations hidden "
    "in some random text and a question. You need to answer the question based only on "
    "the information from the facts.\n\n<example>\nMary picked up the apple there. "
    "Mary gave the apple to Fred. Mary moved to the bedroom. Bill took the milk there. "
    "Who did Mary give the apple to?\nAnswer: Fred\n</example>\n<example>\nJeff took "
    "the football there. Jeff passed the football to Fred. Jeff got the milk there. "
    "Bill travelled to the bedroom. Who gave the football?\nAnswer: "
    "Jeff\n</example>\n<example>\nFred picked up the apple there. Fred handed the "
    "apple to Bill. Bill journeyed to the bedroom. Jeff went back to the garden. What "
    "did Fred give to Bill?\nAnswer: apple\n</example>\n\nYour answer should contain "
    "only one word. Do not write anything else after that. Do not explain your "
    "answer.\n\n<context>\n",
};

/* The first record of each task in the excerpt. */
static const char *const FACTS_ALONE[TASKS] = {
    [QA1] = "John travelled to the hallway. Mary journeyed to the bathroom.\n</context>"
            "\n\nQuestion: Where is John?",
    [QA2] =
        "Mary got the milk there. John moved to the bedroom. Sandra went back to the "
        "kitchen. Mary travelled to the hallway.\n</context>\n\nQuestion: Where is "
        "the milk?",
    [QA4] = "The hallway is east of the bathroom. The bedroom is west of the bathroom."
            "\n</context>\n\nQuestion: What is the bathroom east of?",
    [QA5] = "Fred picked up the football there. Fred gave the football to Jeff."
            "\n</context>\n\nQuestion: What did Fred give to Jeff?",
};

static void test_facts_alone(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        items all = read_ok(&sti_task_babilong[t], 0, 2);
        assert_int_equal(all.n, 2);
        assert_begins(all.item[0].prompt, HEAD[t]);
        if (FACTS_ALONE[t])
            assert_string_equal(all.item[0].prompt + strlen(HEAD[t]), FACTS_ALONE[t]);
        assert_true(all.item[0].chat);
        assert_int_equal(all.item[0].max_new, 20);
        assert_int_equal(all.item[0].n_expected, 1);
        assert_string_equal(all.item[0].id, "0/0");
        free_all(&all);
    }
}

/* The text between the last "<context>\n" and "\n</context>". */
static char *context_of(const sti_item *it)
{
    char *start = strstr(it->prompt, "<context>\n"), *end;
    assert_non_null(start);
    start += strlen("<context>\n");
    end = strstr(start, "\n</context>\n\nQuestion: ");
    assert_non_null(end);
    return strndup(start, (size_t)(end - start));
}

/* A few tokens are missing only where the cut falls on white space, or into a character
 * that this vocabulary spells byte by byte. */
static void test_sizes(void **state)
{
    (void)state;
    int made = 0, exact = 0;
    const int length[][2] = {{1000, 700}, {1024, 700}, {2048, 1700}, {3000, 2700}};
    for (int t = 0; t < TASKS; t++)
        for (size_t k = 0; k < sizeof length / sizeof *length; k++) {
            items all = read_ok(&sti_task_babilong[t], length[k][0], 6);
            for (int i = 0; i < all.n; i++) {
                char *context = context_of(&all.item[i]);
                const size_t n = tokens_of(context), size = (size_t)length[k][1];
                assert_in_range(n, size - 4, size);
                exact += n == size;
                made++;
                free(context);
            }
            free_all(&all);
        }
    assert_true(exact * 10 > made * 8);
}

/* Every fact of the sample without noise stands in the one with noise, in order. */
static void test_facts_in_order(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        items bare = read_ok(&sti_task_babilong[t], 0, 2);
        items noisy = read_ok(&sti_task_babilong[t], 2048, 2);
        for (int i = 0; i < 2; i++) {
            char *facts = context_of(&bare.item[i]), *text = context_of(&noisy.item[i]);
            const char *at = text;
            for (char *f = strtok(facts, "."); f; f = strtok(NULL, ".")) {
                while (*f == ' ') f++;
                at = strstr(at, f);
                assert_non_null(at);
                at += strlen(f);
            }
            assert_string_equal(bare.item[i].expected[0], noisy.item[i].expected[0]);
            free(facts);
            free(text);
        }
        free_all(&bare);
        free_all(&noisy);
    }
}

/* Stories of more lines than an eighth of the size are left out. */
static void test_long_stories_are_dropped(void **state)
{
    (void)state;
    items bare = read_ok(&sti_task_babilong[QA3], 0, 0);
    items small = read_ok(&sti_task_babilong[QA3], 1000, 0);
    items large = read_ok(&sti_task_babilong[QA3], 3000, 0);
    assert_int_equal(bare.n, 6);
    assert_in_range(small.n, 1, 5);
    assert_int_equal(large.n, 6);
    free_all(&bare);
    free_all(&small);
    free_all(&large);
}

static void test_frozen_and_repeated(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++)
        for (int length = 0; length <= 1024; length += 1024) {
            still_error err;
            items made = read_ok(&sti_task_babilong[t], length, 2), kept, more, other;
            sti_task_params p = params(length, 2);
            p.data_dir = FROZEN;
            if (read_all(&sti_task_babilong[t], &p, &kept, &err))
                fail_msg("%s", err.text);
            assert_same(&made, &kept);
            more = read_ok(&sti_task_babilong[t], length, 0);
            assert_string_equal(made.item[1].prompt, more.item[1].prompt);
            p = params(length, 2);
            p.seed = 43;
            assert_int_equal(read_all(&sti_task_babilong[t], &p, &other, &err),
                             STILL_OK);
            if (length)
                assert_string_not_equal(made.item[0].prompt, other.item[0].prompt);
            free_all(&made);
            free_all(&kept);
            free_all(&more);
            free_all(&other);
        }
}

static void test_bad_files(void **state)
{
    (void)state;
    static const char good[] =
        "{\"task\":\"qa1\",\"facts\":[\"A b.\"],\"question\":\"q\",\"answer\":\"a\"}\n";
    const struct {
        const char *content, *part;
        still_status code;
    } bad[] = {
        {"{\"task\":\"qa1\"}\n", "babi_qa1_qa5_test.jsonl:1: no string 'question'",
         STILL_E_FORMAT},
        {"\n{\"task\":\"qa1\",\"question\":\"q\",\"answer\":\"a\",\"facts\":[1]}\n",
         ":2: 'facts'", STILL_E_FORMAT},
        {"{\"task\":\"qa1\",\"question\":\"q\",\"answer\":\"a\",\"facts\":[]}\n",
         ":1: 'facts'", STILL_E_FORMAT},
        {"[1, 2]\n", ":1: column 1: not a JSON object", STILL_E_FORMAT},
        {"{\"task\": \"qa1\"", ":1: column", STILL_E_FORMAT},
        {"", "no story of qa1", STILL_E_LIMIT},
        {good,
         "gutenberg_books.jsonl: no such file, nor with .gz (books of Project "
         "Gutenberg",
         STILL_E_IO},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        make_folder("babi_qa1_qa5_test.jsonl", bad[i].content);
        sti_task_params p = params(1000, 1);
        p.data_dir = folder;
        assert_error(&sti_task_babilong[QA1], &p, bad[i].code, bad[i].part);
        drop_folder();
    }
    sti_task_params p = params(1000, 1);
    p.data_dir = "/nowhere";
    assert_error(&sti_task_babilong[QA1], &p, STILL_E_IO, "bAbI tasks 1.2");
    p = params(-1, 1);
    assert_error(&sti_task_babilong[QA1], &p, STILL_E_ARG, "length -1");
}

/* test_babilong freeze DIR: writes the frozen sets anew. */
int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "freeze") == 0) {
        still_error err = {0};
        if (open_tokenizer(NULL)) return 1;
        for (int t = 0; t < TASKS && !err.code; t++)
            for (int length = 0; length <= 1024 && !err.code; length += 1024) {
                sti_task_params p = params(length, 2);
                char *path =
                    sti_dataset_file_path(argv[2], sti_task_babilong[t].name, length);
                sti_dataset_file_write(&sti_task_babilong[t], &p, path, &err);
                free(path);
            }
        if (err.code) puts(err.text);
        close_tokenizer(NULL);
        return err.code != 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_facts_alone),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_facts_in_order),
        cmocka_unit_test(test_long_stories_are_dropped),
        cmocka_unit_test(test_frozen_and_repeated),
        cmocka_unit_test(test_bad_files),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
