/* RULER: prompts against the text of the protocol, what samples are made of, sizes,
 * frozen samples character by character, and files that are missing or wrong. */
#include "generated.h"

#include "eval/generated/ruler.h"

enum { /* rows of sti_task_ruler */
       SINGLE_1,
       SINGLE_2,
       SINGLE_3,
       MULTIKEY_1,
       MULTIKEY_2,
       MULTIKEY_3,
       MULTIVALUE,
       MULTIQUERY,
       VT,
       CWE,
       FWE,
       QA_HOTPOT,
       QA_SQUAD,
       TASKS
};

static const char *const NAME[TASKS] = {"niah_single_1",
                                        "niah_single_2",
                                        "niah_single_3",
                                        "niah_multikey_1",
                                        "niah_multikey_2",
                                        "niah_multikey_3",
                                        "niah_multivalue",
                                        "niah_multiquery",
                                        "vt",
                                        "cwe",
                                        "fwe",
                                        "qa_hotpot",
                                        "qa_squad"};

/* A length that each task's smallest samples fit with the tests' small vocabulary, and
 * a bound for the tokens of one unit there. */
static const struct {
    int length, max_new, unit;
} SIZE[TASKS] = {
    [SINGLE_1] = {1024, 128, 250},    [SINGLE_2] = {3000, 128, 1900},
    [SINGLE_3] = {3000, 128, 1900},   [MULTIKEY_1] = {3000, 128, 1900},
    [MULTIKEY_2] = {1024, 128, 300},  [MULTIKEY_3] = {1024, 128, 550},
    [MULTIVALUE] = {3000, 128, 1900}, [MULTIQUERY] = {3000, 128, 1900},
    [VT] = {2048, 30, 300},           [CWE] = {1800, 120, 250},
    [FWE] = {1024, 50, 250},          [QA_HOTPOT] = {3000, 32, 2000},
    [QA_SQUAD] = {4096, 32, 4000},
};

static const char NOISE[] = "The grass is green. The sky is blue. The sun is yellow. "
                            "Here we go. There and back again.";

static items some(int t, int n)
{
    return read_ok(&sti_task_ruler[t], SIZE[t].length, n);
}

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

/* ---- Needles ------------------------------------------------------------- */

/* What lies between two texts, the first the last of its kind. */
static void between(const char *text, const char *before, const char *after, char *out,
                    size_t room)
{
    const char *from = NULL;
    for (const char *p = text; (p = strstr(p, before)); p++) from = p + strlen(before);
    assert_non_null(from);
    const char *to = strstr(from, after);
    assert_non_null(to);
    assert_true((size_t)(to - from) < room);
    memcpy(out, from, (size_t)(to - from));
    out[to - from] = 0;
}

static void assert_head_and_tail(const char *prompt, const char *one, const char *t,
                                 char *query, size_t room)
{
    char text[2048];
    const bool single = *one != 0;
    snprintf(text, sizeof text,
             single
                 ? "A special magic %s is hidden within the following text. Make sure "
                   "to memorize it. I will quiz you about the %s afterwards.\n"
                 : "Some special magic %s are hidden within the following text. Make "
                   "sure to memorize it. I will quiz you about the %s afterwards.\n",
             t, t);
    assert_begins(prompt, text);
    snprintf(text, sizeof text,
             single ? "\nWhat is the special magic %s for "
                    : "\nWhat are all the special magic %s for ",
             t);
    between(prompt, text, " mentioned in the provided text? The", query, room);
    snprintf(text, sizeof text,
             single
                 ? "\nWhat is the special magic %s for %s mentioned in the provided "
                   "text? The special magic %s for %s mentioned in the provided text "
                   "is"
                 : "\nWhat are all the special magic %s for %s mentioned in the "
                   "provided text? The special magic %s for %s mentioned in the "
                   "provided text are",
             t, query, t, query);
    assert_ends(prompt, text);
}

static void assert_needle(const char *prompt, const char *plural, const char *key,
                          const char *value)
{
    char text[512];
    snprintf(text, sizeof text, "One of the special magic %s for %s is: %s.", plural,
             key, value);
    assert_int_equal(occurrences(prompt, text), 1);
    assert_int_equal(occurrences(prompt, value), 1);
}

static bool is_number(const char *s)
{
    return strlen(s) == 7 && strspn(s, "0123456789") == 7 && *s != '0';
}

static bool is_uuid4(const char *s)
{
    if (strlen(s) != 36 || s[14] != '4' || !strchr("89ab", s[19])) return false;
    for (int i = 0; i < 36; i++) {
        const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
        if (dash ? s[i] != '-' : !strchr("0123456789abcdef", s[i])) return false;
    }
    return true;
}

static void test_one_needle(void **state)
{
    (void)state;
    const int task[] = {SINGLE_1,   SINGLE_2,   SINGLE_3,
                        MULTIKEY_1, MULTIKEY_2, MULTIKEY_3};
    for (size_t k = 0; k < sizeof task / sizeof *task; k++) {
        const int t = task[k];
        const bool uuid = t == SINGLE_3 || t == MULTIKEY_3;
        items all = some(t, 8);
        for (int i = 0; i < all.n; i++) {
            const sti_item *it = &all.item[i];
            char key[128];
            assert_int_equal(it->n_expected, 1);
            assert_head_and_tail(it->prompt, "A", uuid ? "uuid" : "number", key,
                                 sizeof key);
            assert_needle(it->prompt, uuid ? "uuids" : "numbers", key, it->expected[0]);
            assert_true(uuid ? is_uuid4(it->expected[0]) : is_number(it->expected[0]));
            assert_int_equal(is_uuid4(key), t == MULTIKEY_3);
            if (t == SINGLE_1) {
                char id[32];
                snprintf(id, sizeof id, "1024/%d", i);
                assert_string_equal(it->id, id);
            }
            if (t == MULTIKEY_1)
                assert_int_equal(occurrences(it->prompt, "One of the special magic "),
                                 4);
        }
        free_all(&all);
    }
}

static void test_several_needles(void **state)
{
    (void)state;
    items all = some(MULTIVALUE, 6);
    for (int i = 0; i < all.n; i++) {
        const sti_item *it = &all.item[i];
        char key[128];
        assert_head_and_tail(it->prompt, "", "numbers", key, sizeof key);
        assert_int_equal(it->n_expected, 4);
        for (int k = 0; k < 4; k++)
            assert_needle(it->prompt, "numbers", key, it->expected[k]);
    }
    free_all(&all);
    all = some(MULTIQUERY, 6);
    for (int i = 0; i < all.n; i++) {
        const sti_item *it = &all.item[i];
        char query[512], key[4][128];
        assert_head_and_tail(it->prompt, "", "numbers", query, sizeof query);
        assert_int_equal(sscanf(query, "%127[^,], %127[^,], %127[^,], and %127s",
                                key[0], key[1], key[2], key[3]),
                         4);
        assert_int_equal(it->n_expected, 4);
        for (int k = 0; k < 4; k++)
            assert_needle(it->prompt, "numbers", key[k], it->expected[k]);
    }
    free_all(&all);
}

/* Every line is noise, or another needle, or the one that is asked for. */
static void test_lines(void **state)
{
    (void)state;
    for (int t = SINGLE_1; t <= MULTIKEY_2; t += MULTIKEY_2) {
        items all = some(t, 4);
        for (int i = 0; i < all.n; i++) {
            char *text = strdup(all.item[i].prompt), *rest = text, *line;
            int lines = 0, needles = 0;
            while ((line = strsep(&rest, "\n"))) {
                if (strncmp(line, "One of the special magic numbers for ", 37) == 0)
                    needles++;
                else if (lines > 0 && rest)
                    assert_string_equal(line, NOISE);
                lines++;
            }
            if (t == SINGLE_1) assert_int_equal(needles, 1);
            if (t == MULTIKEY_2) assert_int_equal(needles, lines - 2);
            free(text);
        }
        free_all(&all);
    }
}

/* Without its needles, the context is the first words of the essays, from the start
 * again where they end. */
static void test_essay_text(void **state)
{
    (void)state;
    items all = some(SINGLE_2, 8);
    for (int i = 0; i < all.n; i++) {
        char *text = strstr(all.item[i].prompt, "\n") + 1, *needle, *end;
        end = strstr(text, "\nWhat is");
        *end = 0;
        needle = strstr(text, "One of the special magic numbers for ");
        assert_non_null(needle);
        if (needle > text) assert_int_equal(needle[-1], ' ');
        char *behind = strchr(strstr(needle, " is: "), '.') + 1;
        assert_int_equal(*behind, ' ');
        char *words = malloc(strlen(text) + 1);
        sprintf(words, "%.*s%s", (int)(needle - text), text, behind + 1);
        const char *w = *words == ' ' ? words + 1 : words;
        assert_begins(w, "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a "
                         "man who,");
        assert_null(strchr(words, '\n'));
        free(words);
    }
    free_all(&all);
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

static const char QA_HEAD[] =
    "Answer the question based on the given documents. Only give me the answer and do "
    "not "
    "output any other words.\n\nThe following are given documents.\n\nDocument 1:\n";
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

static void test_frozen_and_repeated(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        still_error err;
        items made = some(t, 2), more = some(t, 4), kept, other;
        sti_task_params p = params(SIZE[t].length, 2);
        p.data_dir = FROZEN;
        if (read_all(&sti_task_ruler[t], &p, &kept, &err)) fail_msg("%s", err.text);
        assert_same(&made, &kept);
        assert_string_equal(made.item[1].prompt, more.item[1].prompt);
        p = params(SIZE[t].length, 2);
        p.seed = 7;
        if (read_all(&sti_task_ruler[t], &p, &other, &err)) fail_msg("%s", err.text);
        assert_string_not_equal(made.item[0].prompt, other.item[0].prompt);
        free_all(&made);
        free_all(&more);
        free_all(&kept);
        free_all(&other);
    }
}

/* ---- Errors -------------------------------------------------------------- */

static void test_too_short(void **state)
{
    (void)state;
    for (int t = 0; t < TASKS; t++) {
        const int length[] = {-1, 0, 1, SIZE[t].max_new, SIZE[t].max_new + 60};
        for (size_t k = 0; k < sizeof length / sizeof *length; k++) {
            char text[32];
            sti_task_params p = params(length[k], 1);
            snprintf(text, sizeof text, "length %d ", length[k]);
            assert_error(&sti_task_ruler[t], &p, STILL_E_LIMIT, text);
        }
    }
    sti_task_params p = params(INT32_MAX, 1);
    assert_error(&sti_task_ruler[SINGLE_1], &p, STILL_E_LIMIT, "expected at most");
}

static void test_missing(void **state)
{
    (void)state;
    const struct {
        int task;
        const char *part;
    } missing[] = {
        {SINGLE_1,
         "/nowhere/words_adjectives.txt: no such file, nor with .gz (adjectives "
         "of wonderwords 3.0.1"},
        {SINGLE_2, "/nowhere/paul_graham_essays.jsonl: no such file"},
        {CWE, "/nowhere/words_nouns.txt: no such file"},
        {QA_HOTPOT, "HotpotQA, development set"},
        {QA_SQUAD, "SQuAD 2.0, development set"},
    };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        sti_task_params p = params(4096, 1);
        p.data_dir = "/nowhere";
        assert_error(&sti_task_ruler[missing[i].task], &p, STILL_E_IO, missing[i].part);
    }
    sti_task_params p = params(4096, 1);
    p.data_dir = NULL;
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "no folder with data");
    p = params(4096, 1);
    p.tk = NULL;
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "no tokenizer");
    p = params(4096, -1);
    assert_error(&sti_task_ruler[FWE], &p, STILL_E_ARG, "-1 samples");
}

static void test_bad_files(void **state)
{
    (void)state;
    char deep[4096];
    memset(deep, '[', sizeof deep);
    deep[sizeof deep - 1] = 0;
    const struct {
        int task;
        const char *file, *content, *part;
    } bad[] = {
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": 3}\n",
         ":1: no string 'text'"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \" \\n\"}\n", "has no text"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \"a\\u0000b\"}\n",
         ":1: column"},
        {SINGLE_2, "paul_graham_essays.jsonl", "{\"text\": \"\xFF\"}\n", ":1: column"},
        {SINGLE_2, "paul_graham_essays.jsonl", deep, ":1: column"},
        {SINGLE_1, "words_adjectives.txt", "\n\n", "has no words"},
        {SINGLE_1, "words_adjectives.txt", "good\n\xFF\n", ":2: not a word in UTF-8"},
        {QA_SQUAD, "squad_v2_dev.jsonl", "{}\n", ":1: no string 'title'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[{\"question\":\"q\",\"answers\":"
         "[null]}]}\n",
         ":1: 'answers'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[7]}\n",
         ":1: no string 'question'"},
        {QA_SQUAD, "squad_v2_dev.jsonl",
         "{\"title\":\"t\",\"context\":\"c\",\"qas\":[]}\n", "has no questions"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl",
         "{\"question\":\"q\",\"answer\":\"a\",\"context\":[{\"title\":\"t\"}]}\n",
         ":1: no array 'sentences'"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl",
         "{\"question\":\"q\",\"answer\":\"a\",\"context\":[]}\n", "has no questions"},
        {QA_HOTPOT, "hotpotqa_dev_distractor.jsonl", "", "has no questions"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        make_folder(bad[i].file, bad[i].content);
        sti_task_params p = params(4096, 1);
        p.data_dir = folder;
        assert_error(&sti_task_ruler[bad[i].task], &p, STILL_E_FORMAT, bad[i].part);
        drop_folder();
    }
}

/* One document, one question: no others to add, which is fine. */
static void test_few_documents(void **state)
{
    (void)state;
    make_folder("squad_v2_dev.jsonl",
                "{\"title\":\"t\",\"context\":\"c d\",\"qas\":[{\"question\":\"q?\","
                "\"answers\":[\"d\",\"D\"]}]}\n");
    sti_task_params p = params(4096, 0);
    p.data_dir = folder;
    items all;
    still_error err;
    assert_int_equal(read_all(&sti_task_ruler[QA_SQUAD], &p, &all, &err), STILL_OK);
    assert_int_equal(all.n, 1);
    assert_int_equal(all.item[0].n_expected, 2);
    assert_begins(all.item[0].prompt, QA_HEAD);
    assert_begins(all.item[0].prompt + strlen(QA_HEAD), "c d");
    free_all(&all);
    drop_folder();
}

/* The same document ten times over is one. */
static void test_repeated_documents(void **state)
{
    (void)state;
    sti_buf b = {0};
    sti_buf_puts(&b, "{\"question\":\"q\",\"answer\":\"a\",\"context\":[");
    for (int i = 0; i < 10; i++)
        sti_buf_printf(&b, "%s{\"title\":\"t\",\"sentences\":[\"s\"]}", i ? "," : "");
    sti_buf_puts(&b, "]}\n");
    make_folder("hotpotqa_dev_distractor.jsonl", b.p);
    sti_buf_free(&b);
    sti_task_params p = params(4096, 0);
    p.data_dir = folder;
    items all;
    still_error err;
    assert_int_equal(read_all(&sti_task_ruler[QA_HOTPOT], &p, &all, &err), STILL_OK);
    assert_int_equal(all.n, 1);
    assert_int_equal(occurrences(all.item[0].prompt, "\n\nDocument "), 1);
    free_all(&all);
    drop_folder();
}

static char *read_text(const char *path)
{
    char *text;
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text = calloc(1, 1 << 20);
    assert_in_range(fread(text, 1, (1 << 20) - 1, f), 1, (1 << 20) - 1);
    fclose(f);
    return text;
}

static void expect_frozen(const char *content, int samples, uint64_t seed,
                          still_status code, const char *part)
{
    make_folder("fwe-1024.jsonl", content);
    sti_task_params p = params(1024, samples);
    p.data_dir = folder;
    p.seed = seed;
    assert_error(&sti_task_ruler[FWE], &p, code, part);
    drop_folder();
}

static void test_frozen_files(void **state)
{
    (void)state;
    char *text = read_text(FROZEN "/fwe-1024.jsonl");
    expect_frozen(text, 3, 42, STILL_E_ARG, "holds 2 samples, 3 were asked for");
    expect_frozen(text, 2, 43, STILL_E_ARG, "made with seed 42, 43 was asked for");
    expect_frozen("", 2, 42, STILL_E_FORMAT, ":1: ends early");
    expect_frozen("{}\n", 2, 42, STILL_E_FORMAT, ":1: no string 'format'");
    expect_frozen("nonsense\n", 2, 42, STILL_E_FORMAT, ":1: column");
    char *at = strstr(text, "Read the following");
    *at = 'r';
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":4: the checksum");
    *at = 'R';
    at = strstr(text, "\"samples\":2");
    at[10] = '1';
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":4: 2 samples in the file, 1 expected");
    at[10] = '2';
    at = strstr(text, "\"samples\":2") - 1;
    *at = 0; /* the last line is gone */
    expect_frozen(text, 2, 42, STILL_E_FORMAT, ":3: no string 'sha256'");
    at = strstr(text, "\n");
    at[1] = 0;
    expect_frozen(text, 2, 42, STILL_E_FORMAT, "ends early");
    at = strstr(text, "\"fwe\"");
    at[1] = 'c';
    expect_frozen(text, 2, 42, STILL_E_FORMAT,
                  "is a set of cwe, length 1024, expected fwe");
    free(text);

    still_error err;
    sti_task_params p = params(1024, 2);
    const sti_eval_task other = {.name = "piqa"};
    assert_int_equal(sti_task_freeze(&other, &p, "/nowhere/x", &err), STILL_E_ARG);
    assert_int_equal(sti_task_freeze(&sti_task_ruler[FWE], &p, "/nowhere/x", &err),
                     STILL_E_IO);
    assert_non_null(strstr(err.text, "/nowhere/x"));
}

/* A folder of its own frozen set is read; freezing makes the samples anew. */
static void test_freeze_again(void **state)
{
    (void)state;
    char *text = read_text(FROZEN "/fwe-1024.jsonl"), *again;
    make_folder("fwe-1024.jsonl", "nonsense\n");
    still_error err;
    sti_task_params p = params(1024, 2);
    p.data_dir = folder;
    assert_int_equal(sti_task_freeze(&sti_task_ruler[FWE], &p, file_in_folder, &err),
                     STILL_OK);
    again = read_text(file_in_folder);
    assert_string_equal(text, again);
    free(text);
    free(again);
    drop_folder();
}

/* test_ruler freeze DIR: writes the frozen sets anew. */
int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "freeze") == 0) {
        still_error err = {0};
        if (open_tokenizer(NULL)) return 1;
        for (int t = 0; t < TASKS && !err.code; t++) {
            sti_task_params p = params(SIZE[t].length, 2);
            char *path = sti_frozen_path(argv[2], NAME[t], SIZE[t].length);
            sti_task_freeze(&sti_task_ruler[t], &p, path, &err);
            free(path);
        }
        if (err.code) puts(err.text);
        close_tokenizer(NULL);
        return err.code != 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_one_needle),
        cmocka_unit_test(test_several_needles),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_essay_text),
        cmocka_unit_test(test_variables),
        cmocka_unit_test(test_common_words),
        cmocka_unit_test(test_frequent_words),
        cmocka_unit_test(test_questions),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_frozen_and_repeated),
        cmocka_unit_test(test_too_short),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_few_documents),
        cmocka_unit_test(test_repeated_documents),
        cmocka_unit_test(test_frozen_files),
        cmocka_unit_test(test_freeze_again),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
