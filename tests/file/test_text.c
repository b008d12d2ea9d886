/* test_text.c - plain text and JSON lines, gzipped or not, and what is refused. */
#include <zlib.h>

#include "../run.h"
#include "helpers.h"

static char dir[] = "/tmp/still-text-XXXXXX";

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    return rmdir(dir);
}

typedef struct file {
    char path[64];
} file;

static file put(const char *name, const void *p, size_t n, bool gz)
{
    file f;
    snprintf(f.path, sizeof f.path, "%s/%s", dir, name);
    gzFile out = gzopen(f.path, gz ? "wb" : "wbT"); /* T: as it is */
    assert_non_null(out);
    if (n) assert_int_equal(gzwrite(out, p, (unsigned)n), n);
    assert_int_equal(gzclose(out), Z_OK);
    return f;
}

/* Reading text stored under name gives want, packed and not; then the file goes. */
static void expect_text(const char *name, const char *text, size_t n, const char *want,
                        size_t m)
{
    for (int gz = 0; gz < 2; gz++) {
        file f = put(name, text, n, gz);
        char *got;
        size_t size;
        still_error err = {0};
        if (still_text_read(f.path, &got, &size, &err) != STILL_OK)
            fail_msg("%s", err.text);
        assert_int_equal(size, m);
        assert_memory_equal(got, want, m);
        assert_int_equal(got[m], 0);
        free(got);
        unlink(f.path);
    }
}

static void expect_error(const char *name, const void *p, size_t n, still_status status,
                         const char *word)
{
    file f = put(name, p, n, false);
    char *got = (char *)1;
    size_t size;
    still_error err = {0};
    assert_int_equal(still_text_read(f.path, &got, &size, &err), status);
    assert_null(got);
    if (!strstr(err.text, word)) fail_msg("\"%s\" lacks \"%s\"", err.text, word);
    unlink(f.path);
}

static void reads_plain_text(void **state)
{
    (void)state;
    expect_text("a.txt", "", 0, "", 0);
    expect_text("a.txt", "one\ntwo", 7, "one\ntwo", 7);
    expect_text("a", "nul\0and \xff bytes", 16, "nul\0and \xff bytes", 16);
    expect_text("a.json", "{\"text\":\"as it is\"}", 19, "{\"text\":\"as it is\"}", 19);
    size_t n = 3 << 20; /* more than one chunk */
    char *long_text = malloc(n);
    for (size_t i = 0; i < n; i++) long_text[i] = (char)(i * 2654435761u >> 24);
    expect_text("a.txt", long_text, n, long_text, n);
    free(long_text);
}

static void joins_json_lines(void **state)
{
    (void)state;
    const char *lines =
        "{\"text\":\"a\\n\",\"id\":1}\r\n\n  \n{\"id\":2,\"text\":\"\\u00e9\"}\n"
        "{\"text\":\"\\u0000.\"}";
    expect_text("a.jsonl", lines, strlen(lines), "a\n\xc3\xa9\0.", 6);
    expect_text("a.jsonl.gz", lines, strlen(lines), "a\n\xc3\xa9\0.", 6);
    expect_text("a.JSONL", "", 0, "", 0);
}

static void names_the_bad_line(void **state)
{
    (void)state;
    const char *bad = "{\"text\":\"a\"}\n\n{\"text\":\n";
    expect_error("a.jsonl", bad, strlen(bad), STILL_E_FORMAT, "a.jsonl:3:");
    expect_error("a.jsonl", "[]", 2, STILL_E_FORMAT, "a.jsonl:1: expected");
    expect_error("a.jsonl", "{\"text\":5}", 10, STILL_E_FORMAT, "string \"text\"");
    expect_error("a.jsonl", "{\"text\":\"\xff\"}", 12, STILL_E_FORMAT, "a.jsonl:1:");
    expect_error("a.jsonl", "\0\0", 2, STILL_E_FORMAT, "a.jsonl:1:");
}

static void reads_long_lines(void **state)
{
    (void)state;
    sti_buf b = {0}, want = {0};
    for (int line = 0; line < 3; line++) { /* 1 MB each: the buffer must grow */
        sti_buf_puts(&b, "{\"text\":\"");
        for (int i = 0; i < 100000; i++) {
            sti_buf_puts(&b, "0123456789");
            sti_buf_puts(&want, "0123456789");
        }
        sti_buf_puts(&b, "\"}\n");
    }
    expect_text("a.jsonl", b.p, b.n, want.p, want.n);
    sti_buf_free(&b);
    sti_buf_free(&want);
}

/* 100 MB in 100 KB: refused before it fills the memory, whole or as lines. */
static void refuses_packed_nothing(void **state)
{
    (void)state;
    enum { N = 100 << 20 };
    char *zeros = calloc(1, N);
    assert_non_null(zeros);
    file f = put("a.txt", zeros, N, true);
    char *got = (char *)1;
    size_t size;
    still_error err = {0};
    assert_int_equal(still_text_read(f.path, &got, &size, &err), STILL_E_LIMIT);
    assert_null(got);
    if (!strstr(err.text, "more than 64 times its size") || !strstr(err.text, "gunzip"))
        fail_msg("%s", err.text);
    sti_lines *l;
    assert_int_equal(sti_lines_open(f.path, &l, &err), STILL_OK);
    assert_int_equal(sti_lines_next(l, &got, &size, &err), STILL_E_LIMIT);
    assert_non_null(strstr(err.text, "line longer than 33554432 bytes"));
    sti_lines_close(l);
    unlink(f.path);
    f = put("a.txt", zeros, N, false); /* as large on the disk: read */
    assert_int_equal(still_text_read(f.path, &got, &size, &err), STILL_OK);
    assert_int_equal(size, N);
    free(got);
    free(zeros);
    unlink(f.path);
}

static void hands_out_lines(void **state)
{
    (void)state;
    file f = put("lines", "one\n\nthree\r\nfour", 16, true);
    static const char *const WANT[] = {"one", "", "three\r", "four"};
    sti_lines *l;
    still_error err;
    char *line;
    size_t n;
    assert_int_equal(sti_lines_open(f.path, &l, &err), STILL_OK);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(sti_lines_next(l, &line, &n, &err), STILL_OK);
        assert_int_equal(n, strlen(WANT[i]));
        assert_string_equal(line, WANT[i]);
    }
    for (int i = 0; i < 2; i++) { /* the end stays the end */
        assert_int_equal(sti_lines_next(l, &line, &n, &err), STILL_OK);
        assert_null(line);
    }
    sti_lines_close(l);
    sti_lines_close(NULL);
    unlink(f.path);
}

/* Every truncation of a gzip file is an error, or (before its magic is whole) plain. */
static void refuses_damaged_gzip(void **state)
{
    (void)state;
    char text[2000], packed[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + i * i % 7);
    file f = put("whole.gz", text, sizeof text, true);
    FILE *in = fopen(f.path, "rb");
    size_t n = fread(packed, 1, sizeof packed, in);
    fclose(in);
    unlink(f.path);
    for (size_t k = 12; k < n; k++)
        expect_error("cut.gz", packed, k, STILL_E_FORMAT, "damaged gzip");
    packed[n / 2] ^= 0x40;
    expect_error("bad.gz", packed, n, STILL_E_FORMAT, "damaged gzip");
}

static void refuses_what_is_no_text_file(void **state)
{
    (void)state;
    char *got;
    size_t n;
    still_error err;
    assert_int_equal(still_text_read("/nowhere.txt", &got, &n, &err), STILL_E_IO);
    assert_string_equal(err.text, "/nowhere.txt: no such file");
    assert_int_equal(still_text_read("/", &got, &n, &err), STILL_E_IO);
    assert_non_null(strstr(err.text, "is a folder"));
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(reads_plain_text),
             cmocka_unit_test(joins_json_lines), cmocka_unit_test(names_the_bad_line),
             cmocka_unit_test(reads_long_lines),
             cmocka_unit_test(refuses_packed_nothing),
             cmocka_unit_test(hands_out_lines), cmocka_unit_test(refuses_damaged_gzip),
             cmocka_unit_test(refuses_what_is_no_text_file))
