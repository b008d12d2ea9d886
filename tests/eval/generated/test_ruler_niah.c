/* RULER's needles: head and tail of the prompt, the needles themselves, and what they
 * lie in. */
#include "../../run.h"
#include "ruler_tasks.h"

static const char NOISE[] = "The grass is green. The sky is blue. The sun is yellow. "
                            "Here we go. There and back again.";

/* ---- Needles ------------------------------------------------------------- */

/* What lies between two texts, the first the last of its kind. */
static void between(const char *text, const char *before, const char *after, char *out,
                    size_t capacity)
{
    const char *from = NULL;
    for (const char *p = text; (p = strstr(p, before)); p++) from = p + strlen(before);
    assert_non_null(from);
    const char *to = strstr(from, after);
    assert_non_null(to);
    assert_true((size_t)(to - from) < capacity);
    memcpy(out, from, (size_t)(to - from));
    out[to - from] = 0;
}

static void assert_head_and_tail(const char *prompt, const char *one, const char *t,
                                 char *query, size_t capacity)
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
    between(prompt, text, " mentioned in the provided text? The", query, capacity);
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

RUN_TESTS_IN(open_tokenizer, close_tokenizer, cmocka_unit_test(test_one_needle),
             cmocka_unit_test(test_several_needles), cmocka_unit_test(test_lines),
             cmocka_unit_test(test_essay_text))
