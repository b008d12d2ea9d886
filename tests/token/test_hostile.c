/* Files that try to make loading and encoding take the square of their size: entries
 * that would fall into one place of a table if its hash had no key, and special tokens
 * that nearly match everywhere. */
#include "../run.h"
#include "tokens.h"

#include <stdio.h>
#include <time.h>

#include "base/buf.h"
#include "token/tokenizer.h"

/* In a table that is half empty, runs of full places are short: of 2^17 places one of
 * 200 is seen once in billions of tables. Entries that collide form one run. */
enum { LONGEST_RUN = 500 };

static void check_run(size_t *run, size_t *full, bool used)
{
    *run = used ? *run + 1 : 0;
    *full += used;
    if (*run > LONGEST_RUN) fail_msg("%zu entries lie in one run", *run);
}

static void check_vocab_runs(const sti_vocab *v, size_t at_least)
{
    size_t run = 0, full = 0;
    for (size_t i = 0; i <= v->mask; i++) check_run(&run, &full, v->slot[i].id >= 0);
    assert_true(full >= at_least);
}

static void check_bpe_runs(const sti_bpe *b, size_t at_least)
{
    size_t run = 0, full = 0;
    for (size_t i = 0; i <= b->mask; i++) check_run(&run, &full, b->slot[i].left >= 0);
    assert_true(full >= at_least);
}

/* ---- Tables -------------------------------------------------------------- */

static uint64_t odd_inverse(uint64_t a)
{
    uint64_t x = a; /* right in 3 bits; each step doubles them */
    for (int i = 0; i < 5; i++) x *= 2 - a * x;
    return x;
}

/* Undoes h = (a ^ b) * C, h ^ h >> 29 for a. */
static uint64_t unmix(uint64_t y, uint64_t b)
{
    uint64_t h = y ^ y >> 29;
    h = y ^ h >> 29;
    return (h * odd_inverse(0x9E3779B97F4A7C15u)) ^ b;
}

static void put_base64(sti_buf *b, const unsigned char *p, size_t n)
{
    static const char digit[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = 0;
        char out[5] = "====";
        for (size_t j = 0; j < 3; j++)
            bits = bits << 8 | (i + j < n ? p[i + j] : (unsigned char)0);
        for (size_t j = 0; j < 4 && i + j < n + 1; j++)
            out[j] = digit[bits >> (18 - 6 * j) & 63];
        sti_buf_puts(b, out);
    }
}

/* A rank file of tokens that a mixing hash without a key (a multiplication and a shift
 * for each 8 bytes) sends to places that are multiples of 2^24. */
static void test_colliding_tokens(void **state)
{
    (void)state;
    enum { N = 50000 };
    sti_buf file = {0};
    for (int i = 0; i < 256 + N; i++) {
        unsigned char token[8] = {(unsigned char)i};
        const uint64_t place = (uint64_t)i << 24;
        const uint64_t word = unmix(unmix(place, 0xD6E8FEB86659FD93u), 8);
        if (i >= 256) memcpy(token, &word, sizeof word);
        put_base64(&file, token, i < 256 ? 1 : 8);
        sti_buf_printf(&file, " %d\n", i);
    }
    assert_false(file.failed);
    still_tokenizer *tk;
    still_error err = {0};
    const sti_tokenizer_hints hints = {.split = "llama-bpe"};
    if (sti_tokenizer_from_bytes(file.p, file.n, &hints, &tk, &err))
        fail_msg("%s", err.text);
    check_vocab_runs(&tk->v, N);
    size_t n;
    for (int i = 256; i < 256 + N; i += 997) {
        const char *piece = still_tokenizer_piece(tk, i, false, &n);
        assert_int_equal(sti_vocab_find(&tk->v, piece, n), i);
    }
    still_tokenizer_free(tk);
    sti_buf_free(&file);
}

/* Pairs that a multiplication without a key sends to the same few places. */
static void test_colliding_merges(void **state)
{
    (void)state;
    enum { IDS = 4096, PLACES = 1 << 17 };
    sti_bpe b = {0};
    still_error err;
    size_t n = 0;
    assert_int_equal(sti_bpe_reserve(&b, PLACES / 2, &err), STILL_OK);
    for (int32_t left = 0; left < IDS; left++) {
        for (int32_t right = 0; right < IDS; right++) {
            uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) *
                         0x9E3779B97F4A7C15u;
            if (((h >> 32 ^ h >> 15) & (PLACES - 1)) >= 64) continue;
            if (n < PLACES / 2) sti_bpe_put(&b, left, right, (uint32_t)n++, left);
        }
    }
    assert_true(n > 4000);
    assert_int_equal(b.n, n);
    check_bpe_runs(&b, n);
    sti_bpe_free(&b);
}

/* ---- Special tokens ------------------------------------------------------ */

/* What the automaton must find, by trying every place. */
static int32_t find_plain(char token[][8], int tokens, unsigned users, bool control,
                          const char *p, size_t n)
{
    int32_t best = -1;
    size_t longest = 0;
    for (int t = 0; t < tokens; t++) {
        const size_t len = strlen(token[t]);
        bool first = true;
        for (int u = 0; u < t; u++) first &= strcmp(token[u], token[t]) != 0;
        if (!first || (!control && !(users >> t & 1))) continue;
        if (len > longest && len <= n && !memcmp(p, token[t], len)) {
            best = t;
            longest = len;
        }
    }
    return best;
}

static void check_scan(char token[][8], int tokens, unsigned users, bool control,
                       const char *text, size_t n)
{
    sti_trie t = {0};
    sti_trie_hits hits = {0};
    still_error err;
    for (int i = 0; i < tokens; i++)
        assert_int_equal(sti_trie_add(&t, token[i], strlen(token[i]), i,
                                      users >> i & 1 ? STI_TRIE_OPEN : STI_TRIE_CONTROL,
                                      &err),
                         STILL_OK);
    assert_int_equal(sti_trie_finish(&t, &err), STILL_OK);
    assert_int_equal(sti_trie_scan(&t, text, NULL, n, control, &hits, &err), STILL_OK);
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        if (i < from) continue;
        const int32_t want = find_plain(token, tokens, users, control, text + i, n - i);
        if (want < 0) continue;
        const sti_trie_hit *hit = sti_trie_next(&hits, from);
        assert_non_null(hit);
        assert_int_equal(hit->start, i);
        assert_int_equal(hit->id, want);
        from = i + strlen(token[want]);
    }
    assert_null(sti_trie_next(&hits, from));
    for (int i = 0; i < tokens; i++) {
        const int32_t id = sti_trie_find(&t, token[i], strlen(token[i]));
        assert_string_equal(token[id], token[i]);
    }
    sti_trie_hits_free(&hits);
    sti_trie_free(&t);
}

static void test_scan_is_leftmost_longest(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int round = 0; round < 3000; round++) {
        char token[12][8] = {{0}}, text[64];
        const int tokens = 1 + round % 12, letters = 1 + round % 3;
        for (int t = 0; t < tokens; t++) {
            const size_t len = 1 + (seed = sti_mix64(seed)) % 7;
            for (size_t i = 0; i < len; i++)
                token[t][i] =
                    (char)('a' + (int)((seed = sti_mix64(seed)) % 3) % letters);
        }
        for (size_t i = 0; i < sizeof text; i++)
            text[i] = (char)('a' + (seed = sti_mix64(seed)) % 3);
        const unsigned users = (unsigned)(seed = sti_mix64(seed));
        check_scan(token, tokens, users, round & 1, text, sizeof text);
    }
}

static void put_added(sti_buf *b, int id, const char *content, bool last)
{
    sti_buf_printf(b, "{\"id\": %d, \"content\": \"%s\", \"special\": false}%s", id,
                   content, last ? "" : ", ");
}

/* A token of 64 KB that nearly stands everywhere, after one of a letter that does:
 * trying every place would take 10^11 steps. */
static void test_long_special_token(void **state)
{
    (void)state;
    enum { LONG = (1 << 16) - 1, TEXT = 4 << 20 };
    char *name = malloc(LONG + 1), *text = malloc(TEXT);
    assert_non_null(name);
    assert_non_null(text);
    memset(name, 'a', LONG);
    name[LONG - 1] = 'b';
    name[LONG] = 0;
    memset(text, 'a', TEXT);
    memcpy(text + TEXT - LONG, name, LONG);
    for (int turn = 0; turn < 2; turn++) {
        if (turn) { /* the odd letter in front: near matches from the other end */
            name[0] = text[0] = 'b';
            name[LONG - 1] = text[TEXT - 1] = 'a';
            memset(text + 1, 'a', TEXT - 1);
        }
        sti_buf file = {0};
        sti_buf_puts(&file, "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, "
                            "\"b\": 1}, \"merges\": []}, \"pre_tokenizer\": {\"type\": "
                            "\"ByteLevel\", \"add_prefix_space\": false}, "
                            "\"added_tokens\": [");
        put_added(&file, 2, name, false);
        put_added(&file, 3, "a", true);
        sti_buf_puts(&file, "]}");
        assert_false(file.failed);
        still_tokenizer *tk;
        still_error err = {0};
        const clock_t start = clock();
        if (sti_tokenizer_from_bytes(file.p, file.n, NULL, &tk, &err))
            fail_msg("%s", err.text);
        size_t n;
        int32_t *ids = encode(tk, text, TEXT, 0, &n);
        assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 20);
        assert_int_equal(n, TEXT - LONG + 1);
        assert_int_equal(ids[turn ? 0 : n - 1], 2);
        assert_int_equal(ids[turn ? n - 1 : 0], 3);
        free(ids);
        still_tokenizer_free(tk);
        sti_buf_free(&file);
    }
    free(name);
    free(text);
}

/* End tokens are compared one by one, so a file may not name any number of them. */
static void test_many_end_tokens(void **state)
{
    (void)state;
    still_tokenizer *tk = open_tokenizer(VOCAB("llama3.tiktoken"));
    still_error err = {0};
    still_status st = STILL_OK;
    int32_t id = 0;
    tk->n = 1 << 20; /* ids are only compared */
    while (st == STILL_OK && id < tk->n) st = sti_tokenizer_add_end(tk, id++, &err);
    assert_int_equal(st, STILL_E_LIMIT);
    assert_non_null(strstr(err.text, "end a text"));
    assert_true(tk->n_end <= 1024);
    still_tokenizer_free(tk);
}

RUN_TESTS(cmocka_unit_test(test_colliding_tokens),
          cmocka_unit_test(test_colliding_merges),
          cmocka_unit_test(test_scan_is_leftmost_longest),
          cmocka_unit_test(test_long_special_token),
          cmocka_unit_test(test_many_end_tokens))
