/* test_file_oom.c - every allocation of opening, writing and reading fails in turn:
 * the call reports it, and the sanitizers find nothing leaked or used.
 *
 * The linker sends our own malloc, calloc and realloc to those of oom.h; jansson, a
 * shared library, is told to use them. */
#include "helpers.h"

#include "../oom.h"

/* Runs the action with its first, second, ... allocation failing until it succeeds. */
static void sweep(still_status (*action)(const char *path, still_error *err),
                  const char *path, int at_least)
{
    for (int i = 0;; i++) {
        still_error err = {0};
        countdown = i;
        still_status status = action(path, &err);
        bool used_up = countdown < 0;
        countdown = -1;
        if (status == STILL_OK && !used_up) {
            if (i < at_least) fail_msg("only %d allocations, expected %d", i, at_least);
            return;
        }
        if (status != STILL_OK && (status != STILL_E_MEMORY || !err.text[0]))
            fail_msg("allocation %d: status %d, \"%s\"", i, status, err.text);
        assert_true(i < 10000);
    }
}

static still_status open_store(const char *path, still_error *err)
{
    sti_store s;
    STI_TRY(sti_store_open(path, &s, err));
    sti_store_close(&s);
    return STILL_OK;
}

static void opening_gguf(void **state)
{
    (void)state;
    sti_buf b = {0};
    gguf_sample(&b);
    memory_file f = memory_file_new(b.p, b.n);
    sweep(open_store, f.path, 12);
    close(f.fd);
    sti_buf_free(&b);
}

static void opening_safetensors(void **state)
{
    (void)state;
    sti_buf b = {0};
    safetensors(&b,
                "{\"__metadata__\":{\"k\":\"v\"},"
                "\"t\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}}",
                0, 8);
    memory_file f = memory_file_new(b.p, b.n);
    sweep(open_store, f.path, 20);
    close(f.fd);
    sti_buf_free(&b);
}

static void opening_a_folder(void **state)
{
    (void)state;
    sweep(open_store, FIXTURES "/folder", 30);
}

static still_status write_gguf(const char *path, still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_writer_gguf(path, &w, err));
    still_status status = sti_writer_meta_str(w, "key", "value", err);
    if (!status) status = sti_writer_tensor(w, "t", STI_F32, 1, (int64_t[]){2}, err);
    if (!status) status = sti_writer_data(w, "12345678", 8, err);
    if (!status) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return status;
}

static still_status write_safetensors(const char *path, still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_writer_safetensors(path, NULL, &w, err));
    still_status status = sti_writer_tensor(w, "t", STI_F32, 1, (int64_t[]){2}, err);
    if (!status) status = sti_writer_data(w, "12345678", 8, err);
    if (!status) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return status;
}

static void writing(void **state)
{
    (void)state;
    char dir[] = "/tmp/still-oom-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/out", dir);
    sweep(write_gguf, path, 5);
    sweep(write_safetensors, path, 10);
    unlink(path);
    assert_int_equal(rmdir(dir), 0); /* no temporary file is left */
}

static still_status read_text(const char *path, still_error *err)
{
    char *text;
    size_t n;
    STI_TRY(still_text_read(path, &text, &n, err));
    free(text);
    return STILL_OK;
}

static void reading_text(void **state)
{
    (void)state;
    sweep(read_text, FIXTURES "/text/lines.jsonl", 8);
    sweep(read_text, FIXTURES "/folder/config.json", 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opening_gguf),     cmocka_unit_test(opening_safetensors),
        cmocka_unit_test(opening_a_folder), cmocka_unit_test(writing),
        cmocka_unit_test(reading_text),
    };
    json_set_alloc_funcs(__wrap_malloc, free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
