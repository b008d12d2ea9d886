/* sources.c - see sources.h. Reads whole files: the largest, the books of
 * BABILong's noise, are some twenty megabytes. */
#include "eval/generated/sources.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/utf8.h"

static const struct {
    const char *name, *origin, *set; /* of still pull-data */
} ORIGIN[] = {
    {"piqa_valid.jsonl", "PIQA, validation set", "piqa"},
    {"arc_easy_test.jsonl", "AI2 Reasoning Challenge, easy test set", "arc"},
    {"arc_challenge_test.jsonl", "AI2 Reasoning Challenge, challenge test set", "arc"},
    {"hellaswag_valid.jsonl", "HellaSwag, validation set", "hellaswag"},
    {"winogrande_xl_valid.jsonl", "WinoGrande XL, validation set", "winogrande"},
    {"mmlu_test.jsonl", "MMLU, test set", "mmlu"},
    {"mmlu_dev.jsonl", "MMLU, development set: the worked examples", "mmlu"},
    {"lambada_openai_test.jsonl", "LAMBADA, OpenAI version, test set", "lambada"},
    {"paul_graham_essays.jsonl", "essays collected by LLMTest_NeedleInAHaystack",
     "essays"},
    {"words_adjectives.txt", "adjectives of wonderwords 3.0.1", "words"},
    {"words_nouns.txt", "nouns of wonderwords 3.0.1", "words"},
    {"words_verbs.txt", "verbs of wonderwords 3.0.1", "words"},
    {"words_english.txt", "the words corpus of NLTK", "words"},
    {"squad_v2_dev.jsonl", "SQuAD 2.0, development set", "squad"},
    {"hotpotqa_dev_distractor.jsonl", "HotpotQA, development set with distractors",
     "hotpotqa"},
    {"babi_qa1_qa5_test.jsonl", "bAbI tasks 1.2, qa1 to qa5, test part", "babi"},
    {"gutenberg_books.jsonl", "books of Project Gutenberg", "books"},
};

static still_status not_there(const char *path, const char *name, still_error *err)
{
    for (size_t i = 0; i < sizeof ORIGIN / sizeof *ORIGIN; i++)
        if (strcmp(ORIGIN[i].name, name) == 0)
            return sti_fail(err, STILL_E_IO,
                            "%s: no such file, nor with .gz (%s; `still pull-data %s` "
                            "brings it, docs/evaluation.md says from where)",
                            path, ORIGIN[i].origin, ORIGIN[i].set);
    return sti_fail(err, STILL_E_IO, "%s: no such file, nor with .gz", path);
}

static still_status open_source_file(const char *dir, const char *name, sti_buf *path,
                                     sti_lines **out, still_error *err)
{
    sti_buf_printf(path, "%s/%s", dir, name);
    const size_t plain = path->n;
    if (!path->failed && access(path->p, F_OK) != 0) {
        sti_buf_puts(path, ".gz");
        if (!path->failed && access(path->p, F_OK) != 0) {
            path->p[path->n = plain] = 0;
            return not_there(path->p, name, err);
        }
    }
    if (path->failed) return sti_fail_memory(err, name, strlen(dir));
    return sti_lines_open(path->p, out, err);
}

/* ---- Records ------------------------------------------------------------- */

static still_status read_record(char *line, size_t n, sti_record_fn fn, void *user,
                                still_error *err)
{
    json_t *rec; /* its strings have no NUL inside */
    STI_TRY(sti_json_read_line(line, n, STI_JSON_OBJECT, &rec, err));
    const still_status status = fn(user, rec, err);
    json_decref(rec);
    return status;
}

still_status sti_source_read(const char *dir, const char *name, sti_record_fn fn,
                             void *user, still_error *err)
{
    sti_lines *l = NULL;
    sti_buf path = {0};
    still_status status = open_source_file(dir, name, &path, &l, err);
    for (size_t number = 1; status == STILL_OK; number++) {
        char *line;
        size_t n;
        status = sti_lines_next(l, &line, &n, err);
        if (status != STILL_OK || !line) break;
        if (strspn(line, " \t\r") == n) continue;
        status = read_record(line, n, fn, user, err);
        if (status != STILL_OK) sti_fail_prefix(err, status, "%s:%zu", path.p, number);
    }
    sti_lines_close(l);
    sti_buf_free(&path);
    return status;
}

still_status sti_field_string(const json_t *rec, const char *key, const char **out,
                              still_error *err)
{
    *out = json_string_value(json_object_get(rec, key));
    if (!*out) return sti_fail(err, STILL_E_FORMAT, "no string '%s'", key);
    return STILL_OK;
}

still_status sti_field_array(const json_t *rec, const char *key, json_t **out,
                             still_error *err)
{
    *out = json_object_get(rec, key);
    if (!json_is_array(*out))
        return sti_fail(err, STILL_E_FORMAT, "no array '%s'", key);
    return STILL_OK;
}

bool sti_all_strings(const json_t *array)
{
    for (size_t i = 0; i < json_array_size(array); i++)
        if (!json_is_string(json_array_get(array, i))) return false;
    return true;
}

/* ---- Words --------------------------------------------------------------- */

/* Appends the lines of a file to w->text, each with its NUL. */
static still_status append_words(const char *dir, const char *name, sti_words *w,
                                 still_error *err)
{
    sti_lines *l = NULL;
    sti_buf path = {0};
    still_status status = open_source_file(dir, name, &path, &l, err);
    const size_t before = w->n;
    for (size_t number = 1; status == STILL_OK; number++) {
        char *line;
        size_t n;
        status = sti_lines_next(l, &line, &n, err);
        if (status != STILL_OK || !line) break;
        while (n && strchr(" \t\r", line[n - 1])) line[--n] = 0;
        if (!n) continue;
        if (strlen(line) != n || sti_utf8_span(line, n) != n || w->n == UINT32_MAX)
            status = sti_fail(err, STILL_E_FORMAT, "%s:%zu: not a word in UTF-8",
                              path.p, number);
        sti_buf_put(&w->text, line, n + 1);
        w->n++;
    }
    if (status == STILL_OK && w->text.failed)
        status = sti_fail_memory(err, path.p, w->text.n);
    if (status == STILL_OK && w->n == before)
        status = sti_fail(err, STILL_E_FORMAT, "%s: has no words", path.p);
    sti_lines_close(l);
    sti_buf_free(&path);
    return status;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static still_status index_words(sti_words *w, bool as_set, still_error *err)
{
    w->word = sti_alloc(w->n, sizeof *w->word);
    if (!w->word) return sti_fail_memory(err, "words", w->n * sizeof *w->word);
    char *p = w->text.p;
    for (size_t i = 0; i < w->n; i++, p += strlen(p) + 1) w->word[i] = p;
    if (!as_set) return STILL_OK;
    qsort(w->word, w->n, sizeof *w->word, by_bytes);
    size_t kept = 1;
    for (size_t i = 1; i < w->n; i++)
        if (strcmp(w->word[i], w->word[kept - 1]) != 0) w->word[kept++] = w->word[i];
    w->n = kept;
    return STILL_OK;
}

still_status sti_words_load(const char *dir, const char *name, sti_words *w,
                            still_error *err)
{
    STI_TRY(append_words(dir, name, w, err));
    return index_words(w, false, err);
}

still_status sti_words_load_union(const char *dir, const char *const *name, int n,
                                  sti_words *w, still_error *err)
{
    for (int i = 0; i < n; i++) STI_TRY(append_words(dir, name[i], w, err));
    return index_words(w, true, err);
}

void sti_words_free(sti_words *w)
{
    sti_buf_free(&w->text);
    free(w->word);
    *w = (sti_words){0};
}
