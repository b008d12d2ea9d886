/* test_probe.c - probes: the same for a seed, facts where they say, answers that repeat
 * them token by token. */
#include <stdlib.h>
#include <string.h>

#include "../eval/tiny.h"
#include "allocate/probe.h"

static still_tokenizer *tk;

static int open_tokenizer(void **state)
{
    (void)state;
    still_error err;
    return still_tokenizer_open(FIXTURES "/vocab/smollm.gguf", &tk, &err);
}

static int close_tokenizer(void **state)
{
    (void)state;
    still_tokenizer_free(tk);
    return 0;
}

static sti_probe make(uint64_t seed, int index)
{
    sti_probe p;
    still_error err;
    must(sti_probe_make(tk, seed, index, 4, &p, &err), &err);
    return p;
}

static void test_spans(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        sti_probe p = make(3, i);
        assert_true(p.value.n > 0 && p.value.n == p.answer.n);
        assert_int_equal(p.answer.first + p.answer.n, p.n);
        /* Far away: at least the last passage lies between. */
        assert_in_range(p.value.first, 1, p.n - 300);
        assert_memory_equal(p.tok + p.value.first, p.tok + p.answer.first,
                            (size_t)p.value.n * sizeof *p.tok);
        free(p.tok);
    }
}

static void test_seeds(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        sti_probe a = make(1, i), b = make(1, i), c = make(2, i);
        assert_int_equal(a.n, b.n);
        assert_memory_equal(a.tok, b.tok, (size_t)a.n * sizeof *a.tok);
        assert_true(a.n != c.n || memcmp(a.tok, c.tok, (size_t)a.n * sizeof *a.tok));
        free(a.tok);
        free(b.tok);
        free(c.tok);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_spans),
                                       cmocka_unit_test(test_seeds)};
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
