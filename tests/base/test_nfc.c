/* NFC: every character, and strings of those that interact, against checksums of what
 * Python's unicodedata makes of them (tools/make-nfc --sums); some by eye. */
#include "../run.h"

#include <stdlib.h>
#include <string.h>

#include "base/nfc.h"
#include "base/sha256.h"
#include "base/utf8.h"

static void check(const char *text, const char *want)
{
    sti_buf out = {0};
    const size_t n = strlen(text), span = sti_nfc_span(text, n);
    assert_true(span <= n && !memcmp(text, want, span));
    sti_nfc_put(text, n, &out);
    assert_false(out.failed);
    assert_int_equal(out.n, strlen(want));
    assert_memory_equal(out.p, want, out.n);
    sti_buf_free(&out);
}

static void test_known(void **state)
{
    (void)state;
    check("plain", "plain");
    check("e\u0301", "\u00e9");
    check("caf\u00e9 e\u0301 x", "caf\u00e9 \u00e9 x");
    check("\u00e9\u0323", "\u1eb9\u0301"); /* taken apart, sorted, joined */
    check("a\u0315\u0300\u05ae", "\u00e0\u05ae\u0315");
    check("\u0301e", "\u0301e");            /* a mark at the start stays */
    check("a\u0334\u0301", "\u00e1\u0334"); /* across a mark of a lower class */
    check("a\u0300\u0301", "\u00e0\u0301"); /* not across one of its own */
    check("\u1100\u1161\u11a8", "\uac01");  /* jamo */
    check("\uac00\u11a8", "\uac01");
    check("\u212b\u2126", "\u00c5\u03a9"); /* always replaced */
    check("\u0958", "\u0915\u093c");       /* never composed */
    check("\U0002f800", "\u4e3d");
    assert_int_equal(sti_nfc_span("caf\u00e9 \u4f60\u597d \uac01", 16), 16);
    assert_int_equal(sti_nfc_span("abc\u0301d", 6), 2);
    assert_int_equal(sti_nfc_span("", 0), 0);
}

static void same(sti_sha256 *sum, const char *want)
{
    unsigned char digest[STI_SHA256];
    char text[2 * STI_SHA256 + 1];
    sti_sha256_end(sum, digest);
    sti_hex(digest, STI_SHA256, text);
    assert_string_equal(text, want);
}

/* Adds the NFC of the text; it must be its own NFC. */
static void add(sti_sha256 *sum, const char *p, size_t n, sti_buf *out, sti_buf *again)
{
    sti_buf_clear(out);
    sti_buf_clear(again);
    sti_nfc_put(p, n, out);
    sti_nfc_put(out->p, out->n, again);
    assert_true(!out->failed && out->n == again->n &&
                !memcmp(out->p, again->p, out->n));
    sti_sha256_add(sum, out->p, out->n);
}

static void test_alone(void **state)
{
    (void)state;
    sti_sha256 sum;
    sti_buf out = {0}, again = {0};
    sti_sha256_start(&sum);
    for (uint32_t c = 0; c < 0x110000; c++) {
        char text[4];
        if (c >= 0xD800 && c < 0xE000) continue;
        add(&sum, text, sti_utf8_encode(c, text), &out, &again);
    }
    same(&sum, "1ffc8e6ce9e83df8e49fd62d6abb68f981775aed0b5101b88c213d4653e9b540");
    sti_buf_free(&out);
    sti_buf_free(&again);
}

static uint32_t draw(uint32_t *state, uint32_t n)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % n;
}

static void test_mixed(void **unused)
{
    (void)unused;
    static const uint32_t spans[][2] = {
        {0x41, 58},      {0x300, 112},     {0x1100, 256},   {0xAC00, 11172},
        {0x900, 0x500},  {0x1E00, 0x200},  {0xF900, 0x200}, {0x11000, 0x600},
        {0x1D15E, 0xA0}, {0x2F800, 0x21E}, {0x591, 0x1D0},  {0x3040, 0xC0}};
    sti_sha256 sum;
    sti_buf out = {0}, again = {0};
    uint32_t state = 1;
    sti_sha256_start(&sum);
    for (int line = 0; line < 200000; line++) {
        char text[64];
        size_t n = 0;
        for (uint32_t left = 1 + draw(&state, 12); left; left--) {
            const uint32_t which = draw(&state, 2) ? 1 : draw(&state, 12);
            n += sti_utf8_encode(spans[which][0] + draw(&state, spans[which][1]),
                                 text + n);
        }
        add(&sum, text, n, &out, &again);
        sti_sha256_add(&sum, "\n", 1);
    }
    same(&sum, "6a32067b0262a339297e815d3b0c467263c2dc514c6fb6f60724be6ea43665b1");
    sti_buf_free(&out);
    sti_buf_free(&again);
}

/* A megabyte of marks in the worst order: sorted by class, the order of equals kept. */
static void test_many_marks(void **state)
{
    (void)state;
    enum { MARKS = 1 << 18 };
    sti_buf text = {0}, out = {0};
    sti_buf_puts(&text, "q");
    for (int i = 0; i < MARKS; i++) sti_buf_puts(&text, i % 2 ? "\u0323" : "\u0301");
    sti_nfc_put(text.p, text.n, &out);
    assert_int_equal(out.n, text.n);
    assert_memory_equal(out.p, "q\u0323\u0323", 5);
    assert_memory_equal(out.p + out.n - 4, "\u0301\u0301", 4);
    sti_buf_free(&text);
    sti_buf_free(&out);
}

RUN_TESTS(cmocka_unit_test(test_known), cmocka_unit_test(test_alone),
          cmocka_unit_test(test_mixed), cmocka_unit_test(test_many_marks))
