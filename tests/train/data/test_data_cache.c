/* test_data_cache.c - the token cache: reused, made anew, refused, and a full disk. */
#include <sys/stat.h>

#include "../../run.h"
#include "../../skip.h"
#include "data_files.h"

static bool opens_cached(const still_tokenizer *tk, const char *path)
{
    sti_data *d = open_one(tk, path, 5, false);
    bool cached = sti_data_get_report(d)->cached;
    sti_data_free(d);
    return cached;
}

static void cache_follows_data_and_tokenizer(void **state)
{
    (void)state;
    char path[512];
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    still_tokenizer *other = tokenizer(VOCAB("llama3.json")); /* as many tokens */
    cache_files(path, true);
    put_data("{\"text\":\"one two three four\"}\n");
    assert_false(opens_cached(tk, data_file));
    assert_true(opens_cached(tk, data_file));
    assert_false(opens_cached(other, data_file));
    assert_true(opens_cached(tk, data_file));
    put_data("{\"text\":\"one two three five\"}\n");
    assert_false(opens_cached(tk, data_file));
    assert_int_equal(cache_files(path, false), 3);
    still_tokenizer_free(tk);
    still_tokenizer_free(other);
}

/* Each byte of the file broken in turn, then every length: made anew, same contents. */
static void damaged_cache_is_rebuilt(void **state)
{
    (void)state;
    char path[512];
    static char good[4096], bad[4096], again[4096];
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    cache_files(path, true);
    put_data("{\"text\":\"one two three four\"}\n{}\n");
    assert_false(opens_cached(tk, data_file));
    assert_int_equal(cache_files(path, false), 1);
    FILE *f = fopen(path, "rb");
    size_t n = fread(good, 1, sizeof good, f);
    fclose(f);
    assert_true(n > sizeof(sti_cache_header) && n < sizeof good);
    for (size_t i = 0; i < 2 * n; i += i % n < 16 ? 1 : 7) {
        memcpy(bad, good, n);
        bad[i % n] ^= 0x40;
        put_bytes(path, i < n ? bad : good, i < n ? n : i - n);
        assert_false(opens_cached(tk, data_file));
        assert_true(opens_cached(tk, data_file));
        f = fopen(path, "rb");
        assert_int_equal(fread(again, 1, sizeof again, f), n);
        fclose(f);
        assert_memory_equal(again, good, n);
    }
    sti_data *d = open_one(tk, data_file, 5, false); /* the report comes from it, too */
    const sti_data_report *r = sti_data_get_report(d);
    assert_true(r->cached);
    assert_int_equal(r->records, 2);
    assert_int_equal(r->broken, 1);
    assert_non_null(strstr(r->first_broken, "/data: line 2: no field 'text'"));
    sti_data_free(d);
    assert_int_equal(cache_files(path, false), 1); /* no temporary files */
    still_tokenizer_free(tk);
}

/* Right checksums do not make ids or counts right. */
static void forged_cache_is_refused(void **state)
{
    (void)state;
    unsigned char key[STI_DATA_DIGEST] = {1, 2, 3};
    uint32_t entries[] = {1, 2 | STI_CACHE_OUTPUT, 9};
    static const int vocab[] = {10, 9};
    for (int i = 0; i < 2; i++) {
        sti_cache_writer *w;
        sti_cache c;
        still_error err;
        sti_cache_header h = {.vocab = (uint32_t)vocab[i], .records = 1};
        memcpy(h.key, key, sizeof key);
        assert_int_equal(sti_cache_create(data_file, &w, &err), STILL_OK);
        assert_int_equal(sti_cache_put(w, entries, 3, &err), STILL_OK);
        assert_int_equal(sti_cache_finish(w, &h, &err), STILL_OK);
        still_status status = sti_cache_open(data_file, key, vocab[i], &c, &err);
        assert_int_equal(status, i ? STILL_E_FORMAT : STILL_OK);
        if (i) {
            assert_non_null(strstr(err.text, "token 2 is beyond 9 ids"));
            assert_null(c.map.data);
            continue;
        }
        assert_int_equal(c.head->tokens, 3);
        assert_memory_equal(c.entry, entries, sizeof entries);
        sti_cache_close(&c);
        key[0] ^= 1;
        assert_int_equal(sti_cache_open(data_file, key, 10, &c, &err), STILL_E_FORMAT);
        key[0] ^= 1;
    }
}

/* A file system that is full: the error says so. */
static void full_disk_is_an_error(void **state)
{
    (void)state;
    still_error err;
    sti_cache_writer *w;
    uint32_t entries[4096] = {0};
    struct stat st;
    if (stat("/dev/full", &st) != 0) skip_because("there is no /dev/full");
    assert_int_equal(sti_cache_create("/dev/full", &w, &err), STILL_OK);
    still_status status = STILL_OK;
    for (int i = 0; i < 8 && status == STILL_OK; i++)
        status = sti_cache_put(w, entries, 4096, &err);
    assert_int_equal(status, STILL_E_IO);
    assert_non_null(strstr(err.text, "No space left"));
    sti_cache_abort(w);
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(cache_follows_data_and_tokenizer),
             cmocka_unit_test(damaged_cache_is_rebuilt),
             cmocka_unit_test(forged_cache_is_refused),
             cmocka_unit_test(full_disk_is_an_error))
