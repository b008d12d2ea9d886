/* test_write.c - what the writers write, the readers read; a failed or abandoned
 * writer leaves the file that was there. */
#include <fcntl.h>
#include <sys/stat.h>

#include "../run.h"
#include "helpers.h"

static char dir[] = "/tmp/still-write-XXXXXX";
static char path[64];

static int make_dir(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return 1;
    snprintf(path, sizeof path, "%s/out", dir);
    return 0;
}

/* rmdir fails, and with it the group, if a temporary file was left. */
static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

#define OK(call)                                                                       \
    do {                                                                               \
        still_error ok_err = {0};                                                      \
        still_error *err = &ok_err;                                                    \
        if ((call) != STILL_OK) fail_msg("%s", ok_err.text);                           \
    } while (0)

#define FAILS(status, word, call)                                                      \
    do {                                                                               \
        still_error ok_err = {0};                                                      \
        still_error *err = &ok_err;                                                    \
        assert_int_equal(call, status);                                                \
        if (!strstr(ok_err.text, word))                                                \
            fail_msg("\"%s\" lacks \"%s\"", ok_err.text, word);                        \
    } while (0)

static void put_sample(sti_writer *w)
{
    static const int64_t WIDE[] = {2, 33}, BLOCKS[] = {3, 2, 64}, ONE[] = {5};
    unsigned char bytes[400];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * 31);
    OK(sti_writer_tensor(w, "wide", STI_F32, 2, WIDE, err));
    OK(sti_writer_tensor(w, "blocks", STI_Q4_0, 3, BLOCKS, err));
    OK(sti_writer_tensor(w, "one", STI_F16, 1, ONE, err));
    FAILS(STILL_E_ARG, "'one' occurs twice",
          sti_writer_tensor(w, "one", STI_F16, 1, ONE, err));
    OK(sti_writer_data(w, bytes, 100, err)); /* in pieces */
    OK(sti_writer_data(w, bytes + 100, 164, err));
    FAILS(STILL_E_ARG, "comes after data",
          sti_writer_tensor(w, "late", STI_F16, 1, ONE, err));
    FAILS(STILL_E_ARG, "'blocks' has 216 bytes", sti_writer_data(w, bytes, 217, err));
    OK(sti_writer_data(w, bytes + 7, 216, err));
    OK(sti_writer_data(w, bytes + 9, 10, err));
    FAILS(STILL_E_ARG, "after the last tensor", sti_writer_data(w, bytes, 1, err));
}

static void check_sample(const sti_store *s)
{
    const sti_tensor *t = sti_store_find(s, "wide");
    assert_int_equal(s->n_tensors, 3);
    assert_int_equal(t->dim[0], 2);
    assert_int_equal(t->dim[1], 33);
    assert_int_equal(t->bytes, 264);
    assert_int_equal(((const unsigned char *)t->data)[263], (unsigned char)(263 * 31));
    t = sti_store_find(s, "blocks");
    assert_int_equal(t->n_dims, 3);
    assert_int_equal(t->dim[0], 3);
    assert_int_equal(t->dim[2], 64);
    assert_int_equal(t->bytes, 216);
    assert_int_equal(((const unsigned char *)t->data)[0], 7 * 31);
    assert_int_equal((uintptr_t)t->data % 32, 0);
    t = sti_store_find(s, "one");
    assert_int_equal(t->bytes, 10);
    assert_int_equal(((const unsigned char *)t->data)[9], (unsigned char)(18 * 31));
}

static void put_pairs(sti_writer *w)
{
    static const sti_str WORDS[] = {{"a", 1}, {"", 0}, {"b\0c", 3}};
    static const int32_t INTS[] = {-1, 2};
    OK(sti_writer_meta_str(w, "s", "text", err));
    OK(sti_writer_meta_u32(w, "u", 4000000000u, err));
    OK(sti_writer_meta_f32(w, "f", -0.5f, err));
    OK(sti_writer_meta_bool(w, "b", true, err));
    OK(sti_writer_meta_strs(w, "words", WORDS, 3, err));
    OK(sti_writer_meta_strs(w, "none", NULL, 0, err));
    OK(sti_writer_meta_i32s(w, "ints", INTS, 2, err));
}

static void check_pairs(const sti_store *s)
{
    int64_t integer;
    double real;
    assert_int_equal(s->n_meta, 7);
    assert_memory_equal(sti_meta_find(s, "s")->str->p, "text", 4);
    assert_true(sti_meta_int(sti_meta_find(s, "u"), &integer) && integer == 4000000000);
    assert_true(sti_meta_float(sti_meta_find(s, "f"), &real) && real == -0.5);
    assert_true(sti_meta_int(sti_meta_find(s, "b"), &integer) && integer == 1);
    const sti_meta *m = sti_meta_find(s, "words");
    assert_int_equal(m->count, 3);
    assert_int_equal(m->str[1].n, 0);
    assert_memory_equal(m->str[2].p, "b\0c", 3);
    assert_int_equal(sti_meta_find(s, "none")->count, 0);
    assert_true(sti_meta_elem_int(sti_meta_find(s, "ints"), 0, &integer) &&
                integer == -1);
}

static void gguf_round_trip(void **state)
{
    (void)state;
    sti_writer *w;
    sti_store first, second;
    OK(sti_writer_gguf(path, &w, err));
    put_pairs(w);
    put_sample(w);
    FAILS(STILL_E_ARG, "'late' comes after data",
          sti_writer_meta_u32(w, "late", 1, err));
    OK(sti_writer_finish(w, err));
    OK(sti_store_open(path, &first, err));
    check_pairs(&first);
    check_sample(&first);

    /* Copied entry by entry, over the file that is still mapped. */
    OK(sti_writer_gguf(path, &w, err));
    for (size_t i = 0; i < first.n_meta; i++)
        OK(sti_writer_meta_copy(w, &first.meta[i], err));
    for (size_t i = 0; i < first.n_tensors; i++)
        OK(sti_writer_tensor(w, first.tensor[i].name, first.tensor[i].type,
                             first.tensor[i].n_dims, first.tensor[i].dim, err));
    for (size_t i = 0; i < first.n_tensors; i++)
        OK(sti_writer_data(w, first.tensor[i].data, first.tensor[i].bytes, err));
    OK(sti_writer_finish(w, err));
    OK(sti_store_open(path, &second, err));
    check_pairs(&second);
    check_sample(&second);
    sti_store_close(&first);
    sti_store_close(&second);
}

static void safetensors_round_trip(void **state)
{
    (void)state;
    static const int64_t SHAPE[] = {3, 1, 5}, ODD[] = {3};
    sti_writer *w;
    sti_store s;
    float x[15];
    for (int i = 0; i < 15; i++) x[i] = (float)i;
    json_t *metadata = json_pack("{s:s}", "note", "\xc3\xa9");
    OK(sti_writer_safetensors(path, metadata, &w, err));
    json_decref(metadata);
    OK(sti_writer_tensor(w, "x \"quoted\"", STI_F32, 3, SHAPE, err));
    OK(sti_writer_tensor(w, "odd", STI_BF16, 1, ODD, err));
    FAILS(STILL_E_ARG, "aligned", sti_writer_tensor(w, "y", STI_F32, 1, ODD, err));
    FAILS(STILL_E_UNSUPPORTED, "type q4_0",
          sti_writer_tensor(w, "q", STI_Q4_0, 1, (const int64_t[]){32}, err));
    FAILS(STILL_E_ARG, "safetensors", sti_writer_meta_u32(w, "key", 1, err));
    OK(sti_writer_data(w, x, sizeof x, err));
    OK(sti_writer_data(w, x, 6, err));
    OK(sti_writer_finish(w, err));
    OK(sti_store_open(path, &s, err));
    assert_string_equal(json_string_value(json_object_get(s.st_meta, "note")),
                        "\xc3\xa9");
    const sti_tensor *t = sti_store_find(&s, "x \"quoted\"");
    assert_int_equal(t->n_dims, 3);
    assert_int_equal(t->dim[2], 5);
    assert_memory_equal(t->data, x, sizeof x);
    assert_int_equal((uintptr_t)t->data % 8, 0);
    sti_store_close(&s);
    OK(sti_writer_safetensors(path, NULL, &w, err)); /* nothing at all is a file too */
    OK(sti_writer_finish(w, err));
    OK(sti_store_open(path, &s, err));
    assert_int_equal(s.n_tensors, 0);
    sti_store_close(&s);
}

static void failure_leaves_the_old_file(void **state)
{
    (void)state;
    static const int64_t SHAPE[] = {4}, EMPTY[] = {0}, PART[] = {48};
    sti_writer *w;
    char kept[4] = "";
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, "old", 3), 3);
    close(fd);
    OK(sti_writer_gguf(path, &w, err));
    FAILS(STILL_E_ARG, "dimension 0 is 0",
          sti_writer_tensor(w, "t", STI_F32, 1, EMPTY, err));
    FAILS(STILL_E_ARG, "0 dimensions",
          sti_writer_tensor(w, "t", STI_F32, 0, NULL, err));
    FAILS(STILL_E_ARG, "rows of 48", sti_writer_tensor(w, "t", STI_Q4_0, 1, PART, err));
    OK(sti_writer_tensor(w, "t", STI_F32, 1, SHAPE, err));
    OK(sti_writer_data(w, "12345678", 8, err));
    FAILS(STILL_E_ARG, "only 8 were written", sti_writer_finish(w, err));
    OK(sti_writer_gguf(path, &w, err));
    sti_writer_abort(w);
    sti_writer_abort(NULL);
    fd = open(path, O_RDONLY);
    assert_int_equal(read(fd, kept, 4), 3);
    close(fd);
    assert_string_equal(kept, "old");
    FAILS(STILL_E_IO, "/nowhere/x", sti_writer_gguf("/nowhere/x", &w, err));
    assert_null(w);
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(gguf_round_trip),
             cmocka_unit_test(safetensors_round_trip),
             cmocka_unit_test(failure_leaves_the_old_file))
