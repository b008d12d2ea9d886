/* test_gguf.c - GGUF files made by hand: what is read, what is refused and how, every
 * truncation and every flipped byte of a small one. */
#include "../run.h"
#include "damage.h"

static void reads_a_sample(void **state)
{
    (void)state;
    sti_buf b = {0};
    sti_store s;
    still_error err;
    int64_t integer;
    double real;
    gguf_sample(&b);
    assert_int_equal(open_bytes(b.p, b.n, &s, &err), STILL_OK);
    assert_true(s.is_gguf);
    assert_int_equal(s.n_tensors, 2);
    assert_int_equal(s.file_bytes, b.n);
    assert_string_equal(s.tensor[0].name, "q"); /* sorted */
    const sti_tensor *w = sti_store_find(&s, "w");
    assert_int_equal(w->dim[0], 2); /* outermost first */
    assert_int_equal(w->dim[1], 3);
    assert_int_equal(w->bytes, 24);
    assert_true(((const float *)w->data)[5] == 5);
    assert_int_equal(sti_store_find(&s, "q")->bytes, 36);
    assert_null(sti_store_find(&s, "v"));

    const sti_meta *m = sti_meta_find(&s, "general.architecture");
    assert_int_equal(m->str->n, 5);
    assert_memory_equal(m->str->p, "llama", 5);
    assert_false(sti_meta_int(m, &integer));
    assert_false(sti_meta_float(m, &real));
    assert_true(sti_meta_int(sti_meta_find(&s, "x.u8"), &integer) && integer == 7);
    assert_true(sti_meta_float(sti_meta_find(&s, "x.u8"), &real) && real == 7);
    assert_true(sti_meta_float(sti_meta_find(&s, "x.f32"), &real) && real == 1.5);
    assert_false(sti_meta_int(sti_meta_find(&s, "x.f32"), &integer));
    m = sti_meta_find(&s, "x.tokens");
    assert_int_equal(m->count, 3);
    assert_int_equal(m->str[1].n, 0);
    assert_memory_equal(m->str[2].p, "ccc", 3);
    m = sti_meta_find(&s, "x.ints");
    assert_true(sti_meta_elem_int(m, 1, &integer) && integer == -6);
    assert_true(sti_meta_elem_float(m, 0, &real) && real == 5);
    assert_false(sti_meta_elem_int(m, 2, &integer));
    assert_false(sti_meta_int(m, &integer));
    assert_null(sti_meta_find(&s, "absent"));
    assert_false(sti_meta_int(NULL, &integer));
    sti_map_drop(s.map->data, s.map->size);
    assert_int_equal(s.map->data[0], 'G'); /* comes back from the file */
    sti_store_close(&s);
    sti_buf_free(&b);
}

static void reads_every_number(void **state)
{
    (void)state;
    static const struct {
        sti_meta_type type;
        const char *bytes;
        size_t n;
        bool is_integer;
        double value;
    } CASES[] = {
        {STI_META_U8, "\xff", 1, true, 255},
        {STI_META_I8, "\xff", 1, true, -1},
        {STI_META_U16, "\xfe\xff", 2, true, 65534},
        {STI_META_I16, "\xfe\xff", 2, true, -2},
        {STI_META_U32, "\xff\xff\xff\xff", 4, true, 4294967295.0},
        {STI_META_I32, "\xff\xff\xff\xff", 4, true, -1},
        {STI_META_F32, "\0\0\x20\xc0", 4, false, -2.5},
        {STI_META_BOOL, "\x01", 1, true, 1},
        {STI_META_BOOL, "\x05", 1, true, 1},
        {STI_META_U64, "\0\0\0\0\0\0\0\x40", 8, true, 4611686018427387904.0},
        {STI_META_U64, "\0\0\0\0\0\0\0\x80", 8, false, 9223372036854775808.0},
        {STI_META_I64, "\0\0\0\0\0\0\0\x80", 8, true, -9223372036854775808.0},
        {STI_META_F64, "\0\0\0\0\0\0\x04\x40", 8, false, 2.5},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        sti_buf b = {0};
        sti_store s;
        still_error err;
        int64_t integer;
        double real;
        gguf_head(&b, 2, 0, 1); /* version 2 reads the same */
        str(&b, "k"), u32(&b, CASES[i].type),
            sti_buf_put(&b, CASES[i].bytes, CASES[i].n);
        assert_int_equal(open_bytes(b.p, b.n, &s, &err), STILL_OK);
        assert_int_equal(sti_meta_int(s.meta, &integer), CASES[i].is_integer);
        if (CASES[i].is_integer) assert_true((double)integer == CASES[i].value);
        assert_true(sti_meta_float(s.meta, &real) && real == CASES[i].value);
        sti_store_close(&s);
        sti_buf_free(&b);
    }
}

static void refuses_other_versions(void **state)
{
    (void)state;
    static const struct {
        uint32_t version;
        const char *word;
    } CASES[] = {{0, "version 0"},
                 {1, "version 1"},
                 {4, "version 4"},
                 {0x03000000, "big-endian"}};
    for (size_t i = 0; i < 4; i++) {
        sti_buf b = {0};
        gguf_head(&b, CASES[i].version, 0, 0);
        expect_refusal(b.p, b.n, STILL_E_UNSUPPORTED, CASES[i].word);
        sti_buf_free(&b);
    }
    expect_refusal("FUGG\0\0\0\3........", 16, STILL_E_FORMAT, "big-endian");
}

static void refuses_impossible_counts(void **state)
{
    (void)state;
    static const uint64_t HUGE[] = {5, 1u << 30, UINT64_MAX / 16, UINT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        sti_buf b = {0};
        gguf_head(&b, 3, HUGE[i], 0);
        expect_refusal(b.p, b.n, STILL_E_FORMAT, "number of tensors at byte 8");
        sti_buf_free(&b);
        gguf_head(&b, 3, 0, HUGE[i]);
        expect_refusal(b.p, b.n, STILL_E_FORMAT, "number of metadata pairs at byte 16");
        sti_buf_free(&b);
        for (int type = 0; type <= STI_META_F64; type++) { /* array of HUGE elements */
            if (type == STI_META_ARRAY) continue;
            gguf_head(&b, 3, 0, 1);
            str(&b, "key"), u32(&b, STI_META_ARRAY), u32(&b, (uint32_t)type);
            u64(&b, HUGE[i]), u32(&b, 0);
            expect_refusal(b.p, b.n, STILL_E_FORMAT, "key");
            sti_buf_free(&b);
        }
        gguf_head(&b, 3, 0, 1); /* a key of HUGE bytes */
        u64(&b, HUGE[i]), u32(&b, 0), u32(&b, 0);
        expect_refusal(b.p, b.n, STILL_E_FORMAT, "key");
        sti_buf_free(&b);
    }
}

static void refuses_bad_metadata(void **state)
{
    (void)state;
    sti_buf b = {0};
    gguf_head(&b, 3, 0, 1);
    str(&b, "nested"), u32(&b, STI_META_ARRAY), u32(&b, STI_META_ARRAY), u64(&b, 1);
    expect_refusal(b.p, b.n, STILL_E_UNSUPPORTED, "'nested' at byte 38");
    sti_buf_clear(&b);
    gguf_head(&b, 3, 0, 1);
    str(&b, "odd"), u32(&b, 13), u64(&b, 1);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "'odd' at byte 35 has type 13");
    sti_buf_clear(&b);
    gguf_head(&b, 3, 0, 2);
    for (int i = 0; i < 2; i++) str(&b, "twin"), u32(&b, STI_META_U32), u32(&b, 1);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "'twin' occurs twice");
    sti_buf_clear(&b);
    gguf_head(&b, 3, 0, 1);
    str(&b, ""), u32(&b, STI_META_U32), u64(&b, 1);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "0 bytes");
    sti_buf_clear(&b);
    gguf_head(&b, 3, 0, 1);
    u64(&b, 3), sti_buf_put(&b, "a\0b", 3), u32(&b, STI_META_U32), u32(&b, 1);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "NUL");
    static const uint32_t ALIGNMENT[] = {0, 1, 4, 24, 1u << 21, UINT32_MAX};
    for (size_t i = 0; i < sizeof ALIGNMENT / sizeof *ALIGNMENT; i++) {
        sti_buf_clear(&b);
        gguf_head(&b, 3, 0, 1);
        str(&b, "general.alignment"), u32(&b, STI_META_U32), u32(&b, ALIGNMENT[i]);
        expect_refusal(b.p, b.n, STILL_E_FORMAT, "general.alignment");
    }
    sti_buf_free(&b);
}

static void one_tensor(sti_buf *b, uint64_t inner, uint64_t outer, uint32_t type,
                       uint64_t offset)
{
    sti_buf_clear(b);
    gguf_head(b, 3, 1, 0);
    gguf_tensor(b, "the.tensor", inner, outer, type, offset);
    pad(b, 32);
    for (int i = 0; i < 64; i++) sti_buf_put(b, "", 1);
}

static void refuses_bad_tensors(void **state)
{
    (void)state;
    sti_buf b = {0};
    sti_store s;
    still_error err;
    one_tensor(&b, 8, 1, STI_F32, 32); /* the last 32 bytes: fine */
    assert_int_equal(open_bytes(b.p, b.n, &s, &err), STILL_OK);
    sti_store_close(&s);
    static const struct {
        uint64_t inner, outer;
        uint32_t type;
        uint64_t offset;
        still_status status;
        const char *word;
    } CASES[] = {
        {9, 1, STI_F32, 32, STILL_E_FORMAT, "truncated?"},
        {8, 1, STI_F32, 33, STILL_E_FORMAT, "offset 33, not a multiple of 32"},
        {8, 1, STI_F32, 64, STILL_E_FORMAT, "'the.tensor' has 32 bytes at offset 64"},
        {8, 1, STI_F32, UINT64_MAX - 31, STILL_E_FORMAT, "truncated?"},
        {0, 1, STI_F32, 0, STILL_E_FORMAT, "dimension of 0"},
        {8, 0, STI_F32, 0, STILL_E_FORMAT, "dimension of 0"},
        {UINT64_MAX, 1, STI_F32, 0, STILL_E_FORMAT,
         "dimension of 18446744073709551615"},
        {(uint64_t)1 << 40, (uint64_t)1 << 40, STI_F32, 0, STILL_E_FORMAT, "overflow"},
        {(uint64_t)1 << 62, 1, STI_F32, 0, STILL_E_FORMAT, "overflow"},
        {(uint64_t)1 << 61, 1, STI_F32, 0, STILL_E_FORMAT, "truncated?"},
        {33, 1, STI_Q4_0, 0, STILL_E_FORMAT, "rows of 33 elements"},
        {16, 2, STI_Q4_0, 0, STILL_E_FORMAT, "rows of 16 elements"},
        {8, 1, 21, 0, STILL_E_UNSUPPORTED, "type 21 (iq3_s)"},
        {8, 1, 4711, 0, STILL_E_UNSUPPORTED, "type 4711 (unknown)"},
        {8, 1, UINT32_MAX, 0, STILL_E_UNSUPPORTED, "(unknown)"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        one_tensor(&b, CASES[i].inner, CASES[i].outer, CASES[i].type, CASES[i].offset);
        expect_refusal(b.p, b.n, CASES[i].status, CASES[i].word);
    }
    for (uint32_t n_dims = 0; n_dims <= 5; n_dims += 5) {
        sti_buf_clear(&b);
        gguf_head(&b, 3, 1, 0);
        str(&b, "t"), u32(&b, n_dims);
        for (int i = 0; i < 8; i++) u64(&b, 1);
        expect_refusal(b.p, b.n, STILL_E_FORMAT, "dimensions, expected 1 to 4");
    }
    sti_buf_clear(&b);
    gguf_head(&b, 3, 2, 0);
    gguf_tensor(&b, "twin", 1, 1, STI_F32, 0);
    gguf_tensor(&b, "twin", 1, 1, STI_F32, 0);
    pad(&b, 32), u32(&b, 0);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "'twin' occurs twice");
    sti_buf_free(&b);
}

static void every_prefix_is_refused(void **state)
{
    (void)state;
    sti_buf b = {0};
    gguf_sample(&b);
    refuse_every_prefix(&b);
    sti_buf_free(&b);
}

static void every_flip_is_survived(void **state)
{
    (void)state;
    sti_buf b = {0};
    gguf_sample(&b);
    survive_every_flip(&b);
    sti_buf_free(&b);
}

static void names_what_is_no_model(void **state)
{
    (void)state;
    expect_refusal("", 0, STILL_E_FORMAT, "empty");
    expect_refusal("PK\3\4abcdefgh", 12, STILL_E_FORMAT, "zip");
    expect_refusal("\x1f\x8b\x08\0aaaaaaaaaaa", 15, STILL_E_FORMAT, "gzip");
    expect_refusal("\x80\2}q\0....", 9, STILL_E_FORMAT, "pickle");
    expect_refusal("<!DOCTYPE html>", 15, STILL_E_FORMAT, "HTML");
    expect_refusal("{\"a\": 1}", 8, STILL_E_FORMAT, "JSON");
    expect_refusal("version https://git-lfs.github.com/spec/v1", 42, STILL_E_FORMAT,
                   "git-lfs");
    expect_refusal("tjgg\1\0\0\0", 8, STILL_E_FORMAT, "GGJT");
    expect_refusal("\1\2", 2, STILL_E_FORMAT, "'\\x01\\x02'");
    expect_refusal("GG", 2, STILL_E_FORMAT, "starts with 'GG'");
    sti_store s;
    still_error err;
    assert_int_equal(sti_store_open("/nowhere/at/all.gguf", &s, &err), STILL_E_IO);
    assert_string_equal(err.text, "/nowhere/at/all.gguf: no such file or folder");
    assert_int_equal(sti_store_open("/dev/null", &s, &err), STILL_E_IO);
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_int_equal(sti_store_open(FIXTURES "/quant", &s, &err), STILL_E_FORMAT);
    assert_non_null(strstr(err.text, "without config.json"));
    assert_int_equal(sti_store_open("/nowhere", &s, NULL), STILL_E_IO);
}

RUN_TESTS(cmocka_unit_test(reads_a_sample), cmocka_unit_test(reads_every_number),
          cmocka_unit_test(refuses_other_versions),
          cmocka_unit_test(refuses_impossible_counts),
          cmocka_unit_test(refuses_bad_metadata), cmocka_unit_test(refuses_bad_tensors),
          cmocka_unit_test(every_prefix_is_refused),
          cmocka_unit_test(every_flip_is_survived),
          cmocka_unit_test(names_what_is_no_model))
