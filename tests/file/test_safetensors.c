/* test_safetensors.c - safetensors made by hand and Hugging Face folders: what is
 * read, what is refused and how, every truncation and every flipped header byte. */
#include <sys/stat.h>

#include "../run.h"
#include "damage.h"

static const char SAMPLE[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"a.x\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}";

static void reads_a_sample(void **state)
{
    (void)state;
    /* Padded to 8 as current writers do, and with data at an odd address. */
    for (size_t extra = 0; extra < 8; extra++) {
        sti_buf b = {0};
        sti_store s;
        still_error err;
        safetensors(&b, SAMPLE, strlen(SAMPLE) + extra, 32);
        assert_int_equal(open_bytes(b.p, b.n, &s, &err), STILL_OK);
        assert_false(s.is_gguf);
        assert_int_equal(s.n_tensors, 2);
        assert_string_equal(s.tensor[0].name, "a.x");
        const sti_tensor *t = sti_store_find(&s, "b");
        assert_int_equal(t->type, STI_F32);
        assert_int_equal(t->n_dims, 2);
        assert_int_equal(t->dim[0], 2);
        assert_int_equal(t->dim[1], 3);
        assert_int_equal((uintptr_t)t->data % 8, 0);
        assert_int_equal(((const unsigned char *)t->data)[23], 23);
        t = sti_store_find(&s, "a.x");
        assert_int_equal(t->type, STI_BF16);
        assert_int_equal(((const unsigned char *)t->data)[7], 31);
        sti_map_drop(s.map->data, s.map->size);
        assert_int_equal(((const unsigned char *)t->data)[7], 31); /* comes back */
        assert_string_equal(json_string_value(json_object_get(s.st_meta, "format")),
                            "pt");
        assert_null(s.config);
        sti_store_close(&s);
        sti_buf_free(&b);
    }
}

/* Lengths whose low bytes are the magic of something else must not mislead. */
static void a_length_is_not_a_magic(void **state)
{
    (void)state;
    static const size_t LENGTHS[] = {0x7b, 0x3c, 0x8b1f};
    static const char JSON[] =
        "{\"t\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}";
    for (size_t i = 0; i < 3; i++) {
        sti_buf b = {0};
        sti_store s;
        still_error err;
        safetensors(&b, JSON, LENGTHS[i], 8);
        assert_int_equal(open_bytes(b.p, b.n, &s, &err), STILL_OK);
        assert_int_equal(s.tensor[0].n_dims, 0); /* a scalar */
        assert_int_equal(s.tensor[0].bytes, 8);
        sti_store_close(&s);
        sti_buf_free(&b);
    }
}

#define ENTRY(dtype, shape, offsets)                                                   \
    "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void refuses_bad_headers(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        size_t data;
        still_status status;
        const char *word;
    } CASES[] = {
        {"{\"t\":", 0, STILL_E_FORMAT, "header: line 1, column"},
        {"{} x", 0, STILL_E_FORMAT, "header: line 1, column"},
        {"{\"t\":1}", 0, STILL_E_FORMAT, "'t' has dtype missing"},
        {"{}", 1, STILL_E_FORMAT, "1 bytes of data follow"},
        {"{\"t\":1,\"t\":2}", 0, STILL_E_FORMAT, "this name occurs twice"},
        {ENTRY("\"F8_E4M3\"", "[4]", "[0,4]"), 4, STILL_E_UNSUPPORTED, "F8_E4M3"},
        {ENTRY("7", "[4]", "[0,4]"), 4, STILL_E_FORMAT, "missing"},
        {ENTRY("\"F32\"", "4", "[0,4]"), 4, STILL_E_FORMAT, "no shape"},
        {ENTRY("\"F32\"", "[-1]", "[0,4]"), 4, STILL_E_FORMAT, "dimension 0"},
        {ENTRY("\"F32\"", "[0]", "[0,0]"), 0, STILL_E_FORMAT, "dimension 0"},
        {ENTRY("\"F32\"", "[1.0]", "[0,4]"), 4, STILL_E_FORMAT, "dimension 0"},
        {ENTRY("\"F32\"", "[1,1,1,1,1]", "[0,4]"), 4, STILL_E_UNSUPPORTED, "5 dim"},
        {ENTRY("\"F32\"", "[1]", "[0]"), 4, STILL_E_FORMAT, "two integers"},
        {ENTRY("\"F32\"", "[1]", "[0,4,8]"), 4, STILL_E_FORMAT, "two integers"},
        {ENTRY("\"F32\"", "[1]", "[0,\"4\"]"), 4, STILL_E_FORMAT, "two integers"},
        {ENTRY("\"F32\"", "[1]", "[4,0]"), 4, STILL_E_FORMAT, "4 to 0"},
        {ENTRY("\"F32\"", "[1]", "[-4,0]"), 4, STILL_E_FORMAT, "-4 to 0"},
        {ENTRY("\"F32\"", "[2]", "[0,8]"), 4, STILL_E_FORMAT, "0 to 8, file has 4"},
        {ENTRY("\"F32\"", "[2]", "[0,4]"), 4, STILL_E_FORMAT, "another number"},
        {ENTRY("\"F32\"", "[4611686018427387904,4]", "[0,4]"), 4, STILL_E_FORMAT,
         "another number"},
        {ENTRY("\"F32\"", "[1]", "[4,8]"), 8, STILL_E_FORMAT, "begins at data byte 4"},
        {ENTRY("\"F32\"", "[1]", "[1,5]"), 5, STILL_E_UNSUPPORTED, "not a multiple"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"u\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12, STILL_E_FORMAT, "the one before ends at 8"},
        /* The data would be tiled, but the first one says that it has more. */
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,12]},"
         "\"u\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
         16, STILL_E_FORMAT, "another number"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        sti_buf b = {0};
        safetensors(&b, CASES[i].json, 0, CASES[i].data);
        expect_refusal(b.p, b.n, CASES[i].status, CASES[i].word);
        sti_buf_free(&b);
    }
    /* Lengths the file cannot hold. */
    expect_refusal("\xff\0\0\0\0\0\0\0{}", 10, STILL_E_FORMAT, "header of 255 bytes");
    expect_refusal("\1\0\0\0\0\0\0\0{}", 10, STILL_E_FORMAT, "header of 1 bytes");
}

static void deep_json_is_refused(void **state)
{
    (void)state;
    sti_buf json = {0}, b = {0};
    sti_buf_puts(&json, "{\"t\":");
    for (int i = 0; i < 200000; i++) sti_buf_puts(&json, "[");
    safetensors(&b, json.p, 0, 0);
    expect_refusal(b.p, b.n, STILL_E_FORMAT, "nested too deeply");
    sti_buf_free(&json);
    sti_buf_free(&b);
}

static void every_prefix_is_refused(void **state)
{
    (void)state;
    sti_buf b = {0};
    safetensors(&b, SAMPLE, 0, 32);
    refuse_every_prefix(&b);
    sti_buf_free(&b);
}

static void every_flip_is_survived(void **state)
{
    (void)state;
    sti_buf b = {0};
    safetensors(&b, SAMPLE, 0, 32);
    survive_every_flip(&b);
    sti_buf_free(&b);
}

/* ---- Folders ------------------------------------------------------------- */

typedef struct folder {
    char path[32];
} folder;

static int folder_new(void **state)
{
    static folder f;
    strcpy(f.path, "/tmp/still-test-XXXXXX");
    *state = &f;
    return mkdtemp(f.path) == NULL;
}

static void put(const folder *f, const char *name, const void *p, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(p, 1, n, out), n);
    assert_int_equal(fclose(out), 0);
}

static void put_text(const folder *f, const char *name, const char *text)
{
    put(f, name, text, strlen(text));
}

static void put_tensor(const folder *f, const char *file, const char *name)
{
    char json[128];
    sti_buf b = {0};
    snprintf(json, sizeof json,
             "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}",
             name);
    safetensors(&b, json, 0, 8);
    put(f, file, b.p, b.n);
    sti_buf_free(&b);
}

static int folder_remove(void **state)
{
    static const char *const NAMES[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json", "a.safetensors",
                                        "b.safetensors"};
    const folder *f = *state;
    char path[128];
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        snprintf(path, sizeof path, "%s/%s", f->path, NAMES[i]);
        unlink(path);
    }
    return rmdir(f->path);
}

static void expect_folder_refusal(const folder *f, still_status status,
                                  const char *word)
{
    sti_store s;
    still_error err = {0};
    still_status got = sti_store_open(f->path, &s, &err);
    if (got == STILL_OK) sti_store_close(&s);
    if (got != status || !strstr(err.text, word))
        fail_msg("status %d, \"%s\"; expected %d and \"%s\"", got, err.text, status,
                 word);
}

static void opens_a_folder(void **state)
{
    const folder *f = *state;
    sti_store s;
    still_error err;
    expect_folder_refusal(f, STILL_E_FORMAT, "without config.json");
    put_text(f, "config.json", "");
    expect_folder_refusal(f, STILL_E_FORMAT, "config.json: file is empty");
    put_text(f, "config.json", "{\n\"a\":\n");
    expect_folder_refusal(f, STILL_E_FORMAT, "config.json:");
    put_text(f, "config.json", "[1]");
    expect_folder_refusal(f, STILL_E_FORMAT, "not a JSON object");
    put_text(f, "config.json", "{\"model_type\":\"llama\"}");
    expect_folder_refusal(f, STILL_E_FORMAT, "neither model.safetensors");
    put_tensor(f, "model.safetensors", "x");
    assert_int_equal(sti_store_open(f->path, &s, &err), STILL_OK);
    assert_int_equal(s.n_tensors, 1);
    assert_string_equal(json_string_value(json_object_get(s.config, "model_type")),
                        "llama");
    sti_store_close(&s);
}

static void opens_shards(void **state)
{
    const folder *f = *state;
    const char *index = "model.safetensors.index.json";
    sti_store s;
    still_error err;
    put_text(f, "config.json", "{}");
    put_text(f, index, "{}");
    expect_folder_refusal(f, STILL_E_FORMAT, "no weight_map");
    put_text(f, index, "{\"weight_map\":{\"x\":5}}");
    expect_folder_refusal(f, STILL_E_FORMAT, "not a string");
    put_text(f, index, "{\"weight_map\":{\"x\":\"../b.safetensors\"}}");
    expect_folder_refusal(f, STILL_E_FORMAT, "without '/' and '..'");
    put_text(f, index, "{\"weight_map\":{\"x\":\"/etc/passwd\"}}");
    expect_folder_refusal(f, STILL_E_FORMAT, "without '/' and '..'");
    put_text(f, index,
             "{\"weight_map\":{\"y\":\"b.safetensors\",\"x\":\"a.safetensors\"}}");
    put_tensor(f, "a.safetensors", "x");
    expect_folder_refusal(f, STILL_E_IO, "b.safetensors: no such file");
    put_tensor(f, "b.safetensors", "x");
    expect_folder_refusal(f, STILL_E_FORMAT, "'x' occurs twice");
    put_tensor(f, "b.safetensors", "z");
    expect_folder_refusal(f, STILL_E_FORMAT, "'y' in b.safetensors, which has no such");
    put_tensor(f, "b.safetensors", "y");
    assert_int_equal(sti_store_open(f->path, &s, &err), STILL_OK);
    assert_int_equal(s.n_maps, 2);
    assert_int_equal(s.n_tensors, 2);
    assert_non_null(strstr(sti_store_find(&s, "y")->path, "b.safetensors"));
    assert_int_equal(s.file_bytes, s.map[0].size + s.map[1].size);
    sti_store_close(&s);
}

RUN_TESTS(cmocka_unit_test(reads_a_sample), cmocka_unit_test(a_length_is_not_a_magic),
          cmocka_unit_test(refuses_bad_headers), cmocka_unit_test(deep_json_is_refused),
          cmocka_unit_test(every_prefix_is_refused),
          cmocka_unit_test(every_flip_is_survived),
          cmocka_unit_test_setup_teardown(opens_a_folder, folder_new, folder_remove),
          cmocka_unit_test_setup_teardown(opens_shards, folder_new, folder_remove))
