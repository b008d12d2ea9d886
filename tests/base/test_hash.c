/* The keyed hash: published values, every length, keys that matter. */
#include <stdio.h>

#include "../run.h"

#include "base/hash.h"

/* hash(b"...") of CPython 3.11, whose algorithm is siphash13, with PYTHONHASHSEED=0: a
 * key of zeros. */
static void test_known_values(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t hash;
    } known[] = {{"a", 0x407448d2b89b1813u},
                 {"ab", 0x555508cbc6add439u},
                 {"abc", 0xc03bc3a0042630f2u},
                 {"abcd", 0xe3d1d5fdd52aae89u},
                 {"abcdefg", 0x6db12aae9070f506u},
                 {"abcdefgh", 0x3f7b849c0b8e35eau},
                 {"The quick brown fox", 0x975e410714568333u}};
    const sti_hash_key zero = {{0, 0}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const uint64_t h = sti_hash_bytes(&zero, known[i].text, strlen(known[i].text));
        if (h != known[i].hash) fail_msg("'%s': %llx", known[i].text, (long long)h);
    }
}

/* Each byte of each length counts, and so does the length. */
static void test_all_bytes_count(void **state)
{
    (void)state;
    const sti_hash_key key = {{1, 2}};
    unsigned char text[33] = {0};
    for (size_t n = 0; n < sizeof text; n++) {
        const uint64_t h = sti_hash_bytes(&key, text, n);
        assert_true(h != sti_hash_bytes(&key, text, n + 1));
        for (size_t i = 0; i < n; i++) {
            text[i] = 1;
            assert_true(h != sti_hash_bytes(&key, text, n));
            text[i] = 0;
        }
    }
}

static void test_keys(void **state)
{
    (void)state;
    const sti_hash_key a = sti_hash_key_new(), b = sti_hash_key_new();
    assert_memory_not_equal(&a, &b, sizeof a);
    assert_true(sti_hash_bytes(&a, "x", 1) != sti_hash_bytes(&b, "x", 1));
    assert_true(sti_hash_pair(&a, 1, 2) != sti_hash_pair(&b, 1, 2));
    assert_true(sti_hash_pair(&a, 1, 2) != sti_hash_pair(&a, 2, 1));
}

RUN_TESTS(cmocka_unit_test(test_known_values), cmocka_unit_test(test_all_bytes_count),
          cmocka_unit_test(test_keys))
