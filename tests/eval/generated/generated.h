/* generated.h - what the tests of generated tasks share: a tokenizer of a few hundred
 * tokens, excerpts of the ingredients, and whole sets in memory. */
#ifndef TEST_EVAL_GENERATED_H
#define TEST_EVAL_GENERATED_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "eval/generated/generated.h"

#define INGREDIENTS FIXTURES "/eval/ingredients"
#define FROZEN FIXTURES "/eval/frozen"
enum { MAX_ITEMS = 64 };

static still_tokenizer *tk;

static inline int open_tokenizer(void **state)
{
    (void)state;
    still_error err;
    return still_tokenizer_open(FIXTURES "/vocab/smollm.gguf", &tk, &err);
}

static inline int close_tokenizer(void **state)
{
    (void)state;
    still_tokenizer_free(tk);
    return 0;
}

static inline sti_task_params params(int length, int samples)
{
    return (sti_task_params){.data_dir = INGREDIENTS,
                             .tk = tk,
                             .shots = -1,
                             .length = length,
                             .samples = samples,
                             .seed = 42};
}

typedef struct items {
    sti_item item[MAX_ITEMS];
    int n;
} items;

static inline still_status read_all(const sti_eval_task *t, const sti_task_params *p,
                                    items *out, still_error *err)
{
    sti_source *s;
    memset(out, 0, sizeof *out);
    still_status status = t->open(p, &s, err);
    if (status != STILL_OK) return status;
    const uint64_t count = t->count(s);
    while ((status = t->next(s, &out->item[out->n], err)) == STILL_OK &&
           out->item[out->n].memory)
        out->n++;
    t->close(s);
    if (status == STILL_OK) assert_int_equal(out->n, count);
    return status;
}

static inline void free_all(items *all)
{
    for (int i = 0; i < all->n; i++) sti_item_free(&all->item[i]);
}

static inline items read_ok(const sti_eval_task *t, int length, int samples)
{
    items all;
    still_error err;
    sti_task_params p = params(length, samples);
    if (read_all(t, &p, &all, &err) != STILL_OK) fail_msg("%s: %s", t->name, err.text);
    return all;
}

static inline void assert_same(const items *a, const items *b)
{
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        const sti_item *x = &a->item[i], *y = &b->item[i];
        assert_string_equal(x->id, y->id);
        assert_string_equal(x->prompt, y->prompt);
        assert_int_equal(x->n_expected, y->n_expected);
        assert_int_equal(x->max_new, y->max_new);
        for (int k = 0; k < x->n_expected; k++)
            assert_string_equal(x->expected[k], y->expected[k]);
    }
}

static inline size_t tokens_of(const char *text)
{
    size_t n;
    still_error err;
    assert_int_equal(
        still_tokenizer_encode(tk, text, strlen(text), 0, NULL, 0, &n, &err), STILL_OK);
    return n;
}

static inline int occurrences(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)); p += strlen(what)) n++;
    return n;
}

static inline void assert_begins(const char *text, const char *head)
{
    if (strncmp(text, head, strlen(head)) != 0)
        fail_msg("begins with \"%.*s\", expected \"%s\"", (int)strlen(head), text,
                 head);
}

static inline void assert_ends(const char *text, const char *tail)
{
    const size_t n = strlen(text), k = strlen(tail);
    if (n < k || strcmp(text + n - k, tail) != 0)
        fail_msg("ends with \"%s\", expected \"%s\"", n < k ? text : text + n - k,
                 tail);
}

static inline void assert_error(const sti_eval_task *t, const sti_task_params *p,
                                still_status code, const char *part)
{
    items all;
    still_error err;
    const still_status status = read_all(t, p, &all, &err);
    free_all(&all);
    assert_int_equal(status, code);
    if (!strstr(err.text, part))
        fail_msg("message '%s' does not say '%s'", err.text, part);
}

/* A folder of its own with one file in it; both are removed by drop_folder. */
static char folder[64], file_in_folder[256];

static inline void make_folder(const char *name, const char *content)
{
    strcpy(folder, "/tmp/still-eval-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(file_in_folder, sizeof file_in_folder, "%s/%s", folder, name);
    FILE *f = fopen(file_in_folder, "wb");
    assert_non_null(f);
    fputs(content, f);
    fclose(f);
}

static inline void drop_folder(void)
{
    unlink(file_in_folder);
    rmdir(folder);
}

#endif
