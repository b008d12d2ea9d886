/* RULER's other tasks: variables, common and frequent words, questions; the table of
 * all; and that prompts are as long as asked for. Needles: test_ruler_niah.c; files and
 * errors: test_ruler_files.c. */
#include "../../run.h"
#include "ruler_tasks.h"

static const char NOISE[] = "The grass is green. The sky is blue. The sun is yellow. "
                            "Here we go. There and back again.";

/* ---- Tables -------------------------------------------------------------- */

static void test_rows(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        assert_string_equal(sti_task_ruler[t].name, NAME[t]);
        items all = some(t, 1);
        assert_int_equal(all.item[0].max_new, SIZE[t].max_new);
        assert_int_equal(all.item[0].kind, STI_ITEM_GENERATE);
        assert_false(all.item[0].chat);
        free_all(&all);
    }
    assert_null(sti_task_ruler[TASKS].name);
}

/* ---- The others ---------------------------------------------------------- */

static const char VT_HEAD[] = "Memorize and track the chain(s) of variable assignment "
                              "hidden in the following text.\n\n";

/* Checks one text of assignments and noise; returns what follows its answer prefix. */
static const char *check_chain(const char *p, size_t letters, char name[5][8])
{
    char line[512], value[8] = "";
    assert_begins(p, VT_HEAD);
    p += strlen(VT_HEAD);
    int n = 0;
    for (;;) {
        const char *end = strchr(p, '\n');
        if (strncmp(p, "Question: ", 10) == 0) break;
        assert_non_null(end);
        snprintf(line, sizeof line, "%.*s", (int)(end - p), p);
        if (strncmp(line, "VAR ", 4) == 0) {
            assert_true(n < 5);
            snprintf(name[n], 8, "%.*s", (int)letters, line + 4);
            char want[64];
            if (n == 0) {
                snprintf(value, sizeof value, "%s", strstr(line, " = ") + 3);
                assert_int_equal(strlen(value), 5);
                snprintf(want, sizeof want, "VAR %s = %s", name[0], value);
            } else {
                snprintf(want, sizeof want, "VAR %s = VAR %s ", name[n], name[n - 1]);
            }
            assert_string_equal(line, want);
            n++;
        } else {
            assert_string_equal(line, NOISE);
        }
        p = end + 1;
    }
    assert_int_equal(n, 5);
    snprintf(
        line, sizeof line,
        "Question: Find all variables that are assigned the value %s in the text "
        "above. Answer: According to the chain(s) of variable assignment in the text "
        "above, 5 variables are assigned the value %s, they are: ",
        value, value);
    assert_begins(p, line);
    return p + strlen(line);
}

static void test_variables(void **state)
{
    (void)state;
    items all = some(VT, 4);
    char first[8] = "";
    for (int i = 0; i < all.n; i++) {
        char name[5][8], want[64];
        const char *p = check_chain(all.item[i].prompt, 3, name);
        const char *second = strstr(p, VT_HEAD);
        assert_non_null(second);
        char *example = strndup(all.item[i].prompt, (size_t)(p - all.item[i].prompt));
        assert_in_range(tokens_of(example), 1, 502); /* redrawn names differ a little */
        free(example);
        snprintf(want, sizeof want, " %s %s %s %s %s\n\n", name[0], name[1], name[2],
                 name[3], name[4]);
        assert_begins(p, want);
        assert_true(p + strlen(want) == second);
        if (i) assert_string_not_equal(first, name[0]); /* redrawn for each sample */
        strcpy(first, name[0]);
        p = check_chain(second, 5, name);
        assert_string_equal(p, "");
        assert_int_equal(all.item[i].n_expected, 5);
        for (int k = 0; k < 5; k++)
            assert_string_equal(all.item[i].expected[k], name[k]);
    }
    free_all(&all);
}

static const char CWE_HEAD[] =
    "Below is a numbered list of words. In these words, some appear more often than "
    "others. Memorize the ones that appear most often.\n";
static const char CWE_TAIL[] = "\nQuestion: What are the 10 most common words in the "
                               "above list? Answer: The top 10 "
                               "words that appear most often in the list are:";

/* Counts the words of a list; those `often` there go to common, in order of the first.
 */
static const char *check_list(const char *p, int often, int seldom, int *distinct,
                              char common[10][32])
{
    static char word[4096][32];
    static int count[4096];
    int n = 0, total = 0, found = 0, number, used;
    assert_begins(p, CWE_HEAD);
    p += strlen(CWE_HEAD);
    for (char w[32]; sscanf(p, "%d. %31s%n", &number, w, &used) == 2;) {
        assert_int_equal(number, ++total);
        int k = 0;
        while (k < n && strcmp(word[k], w) != 0) k++;
        if (k == n) {
            strcpy(word[n], w);
            count[n++] = 0;
        }
        count[k]++;
        p += used;
        if (*p == '\n') break;
        assert_int_equal(*p++, ' ');
    }
    for (int k = 0; k < n; k++) {
        if (count[k] == often)
            strcpy(common[found++], word[k]);
        else
            assert_int_equal(count[k], seldom);
    }
    assert_int_equal(found, 10);
    *distinct = n;
    assert_begins(p, CWE_TAIL);
    return p + strlen(CWE_TAIL);
}

static bool among(const char *word, char list[10][32])
{
    for (int i = 0; i < 10; i++)
        if (strcmp(word, list[i]) == 0) return true;
    return false;
}

static void check_cwe(int length, int often, int seldom, int example_words,
                      int example_often, int example_seldom)
{
    items all = read_ok(&sti_task_ruler[CWE], length, 3);
    for (int i = 0; i < all.n; i++) {
        char common[10][32], w[32];
        int n, number, used;
        const char *p =
            check_list(all.item[i].prompt, example_often, example_seldom, &n, common);
        assert_int_equal(n, example_words);
        for (int k = 1; k <= 10; k++) {
            assert_int_equal(*p++, ' ');
            assert_int_equal(sscanf(p, "%d. %31s%n", &number, w, &used), 2);
            assert_int_equal(number, k);
            assert_true(among(w, common));
            p += used;
        }
        assert_int_equal(*p++, '\n');
        p = check_list(p, often, seldom, &n, common);
        assert_string_equal(p, "");
        assert_in_range(n, 10, 500);
        assert_int_equal(all.item[i].n_expected, 10);
        for (int k = 0; k < 10; k++)
            assert_true(among(all.item[i].expected[k], common));
    }
    free_all(&all);
}

static void test_common_words(void **state)
{
    (void)state;
    check_cwe(SIZE[CWE].length, 6, 1, 20, 3, 1);
    check_cwe(9000, 30, 3, 40, 10, 3);
}

static void test_frequent_words(void **state)
{
    (void)state;
    static const char head[] = "Read the following coded text and track the frequency "
                               "of each coded word. Find "
                               "the three most frequently appeared coded words. ";
    static const char tail[] =
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What "
        "are the three most frequently appeared words in the above coded text? Answer: "
        "According to the coded text above, the three most frequently appeared words "
        "are:";
    items all = some(FWE, 6);
    for (int i = 0; i < all.n; i++) {
        const sti_item *it = &all.item[i];
        assert_begins(it->prompt, head);
        assert_ends(it->prompt, tail);
        assert_int_equal(it->n_expected, 3);
        char *text = strdup(it->prompt + strlen(head)), *rest = text, *w;
        *strstr(text, "\n") = 0;
        int dots = 0, rank[3] = {0}, others = 0;
        while ((w = strsep(&rest, " "))) {
            if (strcmp(w, "...") == 0) {
                dots++;
                continue;
            }
            assert_int_equal(strlen(w), 6);
            assert_int_equal(strspn(w, "abcdefghijklmnopqrstuvwxyz"), 6);
            int k = 0;
            while (k < 3 && strcmp(w, it->expected[k]) != 0) k++;
            if (k < 3)
                rank[k]++;
            else
                others++;
        }
        /* floor(n / (zeta(2) k^2)) for some n that gives so many dots */
        bool fits = false;
        for (int n = 10; n < 2000; n++) {
            const double one = n / 1.6449340668482264;
            fits |= (int)one == dots && (int)(one / 4) == rank[0] &&
                    (int)(one / 9) == rank[1] && (int)(one / 16) == rank[2];
        }
        assert_true(fits);
        assert_true(rank[2] > 0 && others > 0);
        free(text);
    }
    free_all(&all);
}

static const char QA_MIDDLE[] = "\n\nAnswer the question based on the given documents. "
                                "Only give me the answer and do "
                                "not output any other words.\n\nQuestion: ";

static void test_questions(void **state)
{
    (void)state;
    for (int t = QA_HOTPOT; t <= QA_SQUAD; t++) {
        items all = some(t, 4);
        assert_int_equal(all.n, 4);
        for (int i = 0; i < all.n; i++) {
            const sti_item *it = &all.item[i];
            assert_begins(it->prompt, QA_HEAD);
            const char *middle = strstr(it->prompt, QA_MIDDLE);
            assert_non_null(middle);
            assert_ends(it->prompt, " Answer:");
            const int docs = occurrences(it->prompt, "\n\nDocument ");
            assert_in_range(docs, 10, 60);
            char last[64];
            snprintf(last, sizeof last, "\n\nDocument %d:\n", docs);
            assert_int_equal(occurrences(it->prompt, last), 1);
            /* The answers stand in a document (comparisons of HotpotQA aside). */
            for (int k = 0; k < it->n_expected; k++) {
                const char *at = strcasestr(it->prompt, it->expected[k]);
                if (t == QA_SQUAD) assert_true(at && at < middle);
            }
            assert_true(it->n_expected >= 1);
            if (t == QA_HOTPOT) assert_int_equal(it->n_expected, 1);
        }
        free_all(&all);
    }
    items all = some(QA_SQUAD, 2);
    assert_ends(all.item[0].prompt,
                "\n\nQuestion: When did the 1973 oil crisis begin? Answer:");
    assert_ends(all.item[1].prompt,
                "\n\nQuestion: What was the price of oil in March of 1974? Answer:");
    free_all(&all);
}

/* ---- Sizes, repetition --------------------------------------------------- */

static void test_sizes(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        items all = some(t, 40);
        size_t longest = 0;
        for (int i = 0; i < all.n; i++) {
            const size_t n = tokens_of(all.item[i].prompt) + (size_t)SIZE[t].max_new;
            assert_true(n <= (size_t)SIZE[t].length);
            if (n > longest) longest = n;
            if (t < QA_HOTPOT && n + (size_t)SIZE[t].unit < (size_t)SIZE[t].length)
                fail_msg("%s/%d: %zu tokens", NAME[t], i, n);
        }
        assert_true(longest + longest / 8 > (size_t)SIZE[t].length);
        free_all(&all);
    }
}

RUN_TESTS_IN(open_tokenizer, close_tokenizer, cmocka_unit_test(test_rows),
             cmocka_unit_test(test_variables), cmocka_unit_test(test_common_words),
             cmocka_unit_test(test_frequent_words), cmocka_unit_test(test_questions),
             cmocka_unit_test(test_sizes))
