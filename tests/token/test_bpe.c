/* The merge loops against the definition, on random vocabularies: find the lowest rank,
 * leftmost first, merge, start over. Short inputs go through the scan, long ones
 * through the heap, and sti_bpe_learn keeps one merge a token where the definition
 * tries every concatenation. */
#include "../run.h"
#include "tokens.h"

#include "token/bpe.h"

static uint32_t random_below(uint64_t *seed, uint32_t n)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % n;
}

/* Tokens over the letters a, b, c: the letters, and random concatenations. */
static void random_vocabulary(sti_vocab *v, uint64_t *seed)
{
    still_error err;
    sti_vocab_init(v);
    for (int i = 0; i < 3; i++) {
        char c = (char)('a' + i);
        v->byte_id[(unsigned char)c] = v->n;
        assert_int_equal(sti_vocab_add(v, &c, 1, STI_KIND_NORMAL, &err), STILL_OK);
    }
    for (int i = 0; i < 40; i++) {
        char piece[8];
        size_t n = 2 + random_below(seed, 5);
        for (size_t k = 0; k < n; k++) piece[k] = (char)('a' + random_below(seed, 3));
        assert_int_equal(sti_vocab_add(v, piece, n, STI_KIND_NORMAL, &err), STILL_OK);
    }
    assert_int_equal(sti_vocab_index(v, &err), STILL_OK);
}

/* The definition, by concatenation of bytes. Returns the number of symbols left. */
static size_t merge_by_definition(const sti_vocab *v, const uint32_t *rank,
                                  int32_t *sym, size_t n)
{
    for (;;) {
        size_t best = n;
        int32_t best_id = -1;
        for (size_t i = 0; i + 1 < n; i++) {
            size_t a, b;
            char both[64];
            const char *left = sti_vocab_piece(v, sym[i], &a);
            memcpy(both, left, a);
            const char *right = sti_vocab_piece(v, sym[i + 1], &b);
            memcpy(both + a, right, b);
            int32_t id = sti_vocab_find(v, both, a + b);
            if (id < 0 || (best < n && rank[id] >= rank[best_id])) continue;
            best = i;
            best_id = id;
        }
        if (best == n) return n;
        sym[best] = best_id;
        memmove(sym + best + 1, sym + best + 2, (n - best - 2) * sizeof *sym);
        n--;
    }
}

static void test_against_definition(void **state)
{
    (void)state;
    uint64_t seed = 7;
    still_error err;
    for (int round = 0; round < 300; round++) {
        sti_vocab v;
        sti_bpe b = {0};
        sti_bpe_work w = {0};
        uint32_t rank[64];
        random_vocabulary(&v, &seed);
        /* Ranks in any order, with ties in every third vocabulary. */
        for (int i = 0; i < v.n; i++)
            rank[i] = random_below(&seed, round % 3 ? 1000000 : 6);
        assert_int_equal(sti_bpe_learn(&b, &v, rank, &err), STILL_OK);
        for (int t = 0; t < 20; t++) {
            char text[300];
            int32_t fast[300], slow[300];
            size_t n = 1 + random_below(&seed, t % 2 ? 40 : 299);
            for (size_t i = 0; i < n; i++)
                text[i] = (char)('a' + random_below(&seed, 3));
            size_t k = sti_bpe_symbols(&b, &v, text, n, fast);
            assert_int_equal(k, n);
            memcpy(slow, fast, n * sizeof *fast);
            assert_int_equal(sti_bpe_run(&b, fast, &k, &w, &err), STILL_OK);
            size_t expected = merge_by_definition(&v, rank, slow, n);
            assert_int_equal(k, expected);
            assert_memory_equal(fast, slow, k * sizeof *fast);
        }
        /* Whole: a token's own bytes end as that token. */
        for (int32_t id = 0; id < v.n; id++) {
            int32_t sym[8];
            size_t n;
            const char *p = sti_vocab_piece(&v, id, &n);
            size_t k = sti_bpe_symbols(&b, &v, p, n, sym);
            k = merge_by_definition(&v, rank, sym, k);
            assert_int_equal(b.whole[id], k == 1 && sym[0] == id);
        }
        sti_bpe_work_free(&w);
        sti_bpe_free(&b);
        sti_vocab_free(&v);
    }
}

static void test_byte_spelling(void **state)
{
    (void)state;
    char out[16];
    size_t n;
    assert_true(sti_bytes_of_gpt2("\u0120a\u010a", 5, out, &n));
    assert_memory_equal(out, " a\n", 3);
    assert_true(sti_bytes_of_gpt2("\u0143", 2, out, &n));
    assert_int_equal((unsigned char)out[0], 0xAD);
    assert_false(sti_bytes_of_gpt2("\u0144", 2, out, &n));
    assert_false(sti_bytes_of_gpt2(" ", 1, out, &n));
    assert_int_equal(sti_byte_of_name("<0xE2>", 6), 0xE2);
    assert_int_equal(sti_byte_of_name("<0xG2>", 6), -1);
    assert_int_equal(sti_byte_of_name("<0xE2", 5), -1);
}

RUN_TESTS(cmocka_unit_test(test_against_definition),
          cmocka_unit_test(test_byte_spelling))
