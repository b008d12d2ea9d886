/* Small things everything rests on: errors, buffers, carved memory. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "../run.h"

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "base/utf8.h"

static void errors_are_one_safe_line(void **state)
{
    (void)state;
    still_error e;
    assert_int_equal(sti_fail(&e, STILL_E_IO, "a%sb", "\n\033[31m"), STILL_E_IO);
    assert_string_equal(e.text, "a??[31mb");
    sti_fail_prefix(&e, STILL_E_FORMAT, "file %d", 7);
    assert_string_equal(e.text, "file 7: a??[31mb");
    assert_int_equal(e.code, STILL_E_FORMAT);
    assert_int_equal(sti_fail(NULL, STILL_E_ARG, "nobody listens"), STILL_E_ARG);
    char long_text[3000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    sti_fail(&e, STILL_E_ARG, "%s", long_text);
    assert_int_equal(strlen(e.text), sizeof e.text - 1);
    /* Cut in the middle of a character, it is UTF-8 all the same. */
    for (int i = 0; i < 4; i++) {
        sti_fail(&e, STILL_E_ARG, "%.*s\xC3\xA9 and more", 1000, long_text);
        sti_fail_prefix(&e, STILL_E_ARG, "%.*s", 18 + i, long_text);
        assert_int_equal(sti_utf8_span(e.text, strlen(e.text)), strlen(e.text));
    }
    for (int s = 0; s <= STILL_E_CANCELLED; s++)
        assert_string_not_equal(still_status_name((still_status)s), "unknown status");
}

/* The examples of FIPS 180-4, whole and in pieces that end at every place of a block. */
static void sha256_is_the_standards(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int times;
        const char *hex;
    } known[] = {
        {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"a", 1000000,
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    unsigned char sum[STI_SHA256], whole[STI_SHA256];
    char hex[2 * STI_SHA256 + 1], bytes[200];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        sti_sha256 s;
        sti_sha256_start(&s);
        for (int k = 0; k < known[i].times; k++)
            sti_sha256_add(&s, known[i].text, strlen(known[i].text));
        sti_sha256_end(&s, sum);
        sti_hex(sum, sizeof sum, hex);
        assert_string_equal(hex, known[i].hex);
    }
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(7 * i);
    sti_sha256_of(bytes, sizeof bytes, whole);
    for (size_t cut = 0; cut <= sizeof bytes; cut++) {
        sti_sha256 s;
        sti_sha256_start(&s);
        sti_sha256_add(&s, bytes, cut);
        sti_sha256_add(&s, bytes + cut, sizeof bytes - cut);
        sti_sha256_end(&s, sum);
        assert_memory_equal(sum, whole, sizeof sum);
    }
}

static void buffers_grow(void **state)
{
    (void)state;
    sti_buf b = {0};
    for (int i = 0; i < 1000; i++) sti_buf_printf(&b, "%d,", i);
    assert_int_equal(b.n, 3890);
    assert_int_equal(strlen(b.p), b.n);
    sti_buf_clear(&b);
    sti_buf_puts(&b, "end");
    assert_string_equal(b.p, "end");
    sti_buf_put(&b, "x", SIZE_MAX / 2); /* refused, not read */
    assert_true(b.failed);
    assert_int_equal(b.n, 3);
    sti_buf_clear(&b);
    volatile int most = INT_MAX; /* that the compiler does not see what it will be */
    sti_buf_printf(&b, "%*s.", most, "");
    assert_true(b.failed);
    sti_buf_free(&b);
}

static void carving_counts_what_it_gives(void **state)
{
    (void)state;
    sti_carve count = {0};
    for (size_t i = 1; i < 50; i++) sti_carve_take(&count, i, 3);
    sti_block b;
    assert_true(sti_block_new(&b, count.used));
    sti_carve give = {.base = b.p};
    unsigned char *last = b.p;
    for (size_t i = 1; i < 50; i++) {
        unsigned char *p = sti_carve_take(&give, i, 3);
        assert_int_equal((uintptr_t)p % 64, 0);
        assert_true(p >= last && p + 3 * i <= (unsigned char *)b.p + b.bytes);
        memset(p, 1, 3 * i);
        last = p + 3 * i;
    }
    assert_int_equal(give.used, count.used);
    sti_block_free(&b);
    sti_carve_take(&count, SIZE_MAX / 2, 8);
    assert_false(sti_block_new(&b, count.used));
    assert_null(b.p);
}

static void large_blocks_are_aligned_and_zero(void **state)
{
    (void)state;
    sti_block b;
    assert_true(sti_block_new(&b, (9u << 20) + 123));
    assert_int_equal((uintptr_t)b.p % (2u << 20), 0);
    const unsigned char *p = b.p;
    unsigned sum = 0;
    for (size_t i = 0; i < b.bytes; i++) sum |= p[i];
    assert_int_equal(sum, 0);
    sti_block_free(&b);
    assert_true(sti_block_new(&b, 0));
    assert_null(b.p);
    assert_null(sti_alloc(SIZE_MAX / 2, 4));
    assert_null(sti_grow(NULL, SIZE_MAX / 2, 4));
}

/* Nothing that a terminal takes as a command is left, and nothing else is lost. */
static void test_harmless(void **state)
{
    (void)state;
    static const struct {
        const char *text, *line, *lines;
    } cases[] = {
        {"plain", "plain", "plain"},
        {"\033[31mred\007", "?[31mred?", "?[31mred?"},
        {"a\nb\tc\rd\177", "a?b?c?d?", "a\nb\tc?d?"},
        {"caf\xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x99\x82",
         "caf\xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x99\x82",
         "caf\xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x99\x82"},
        {"\302\23331m \302\240", "??31m \302\240", "??31m \302\240"}, /* CSI of C1 */
        {"\23331m \303 \377", "?31m ? ?", "?31m ? ?"},                /* no UTF-8 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64];
        for (int lines = 0; lines < 2; lines++) {
            snprintf(text, sizeof text, "%s", cases[i].text);
            sti_utf8_harmless(text, strlen(text), lines);
            assert_string_equal(text, lines ? cases[i].lines : cases[i].line);
        }
        still_error e;
        sti_fail(&e, STILL_E_IO, "%s", cases[i].text);
        assert_string_equal(e.text, cases[i].line);
    }
}

RUN_TESTS(cmocka_unit_test(test_harmless), cmocka_unit_test(errors_are_one_safe_line),
          cmocka_unit_test(sha256_is_the_standards), cmocka_unit_test(buffers_grow),
          cmocka_unit_test(carving_counts_what_it_gives),
          cmocka_unit_test(large_blocks_are_aligned_and_zero))
