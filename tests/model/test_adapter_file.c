/* test_adapter_file.c - adapters on disk: every number has a range, and a byte that
 * changed, in the settings or in the tensors, is found. Adapters of version 1, which have
 * no checksum, load as they did. */
#include "../run.h"
#include "exports.h"

static char *slurp(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *p = malloc(1 << 22);
    assert_non_null(p);
    *n = fread(p, 1, 1 << 22, f);
    assert_true(*n > 0 && *n < 1 << 22);
    fclose(f);
    return p;
}

static void spit(const char *path, const char *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

typedef struct files {
    char *config_path, *tensors_path, *config, *tensors;
    size_t n_config, n_tensors;
} files;

static files files_of(const char *dir, const char *tensors)
{
    files f = {0};
    char name[300];
    snprintf(name, sizeof name, "%s/" STI_ADAPTER_CONFIG, dir);
    f.config_path = strdup(name);
    snprintf(name, sizeof name, "%s/%s", dir, tensors);
    f.tensors_path = strdup(name);
    f.config = slurp(f.config_path, &f.n_config);
    f.tensors = slurp(f.tensors_path, &f.n_tensors);
    return f;
}

static void files_free(files *f)
{
    free(f->config_path);
    free(f->tensors_path);
    free(f->config);
    free(f->tensors);
}

static still_status read_adapter(still_model *m, const char *dir, still_error *e)
{
    sti_adapter *a;
    const sti_adapter_home home = sti_model_home(m);
    const still_status st = sti_adapter_read(&home, dir, false, false, false, &a, e);
    assert_true((st == STILL_OK) == (a != NULL));
    sti_adapter_free(a);
    return st;
}

/* Damages one byte after the other: all of the settings but the base model's name, which
 * users may change; of the tensors all of the header and some of the rest. */
static void flip_all(still_model *m, const char *dir, const files *f)
{
    still_error e;
    const char *name = strstr(f->config, "\"the base\"");
    assert_non_null(name);
    const size_t lo = (size_t)(name - f->config) + 1, hi = lo + strlen("the base");
    char *p = malloc(f->n_config);
    assert_non_null(p);
    memcpy(p, f->config, f->n_config);
    for (size_t i = 0; i < f->n_config; i++) {
        if (i >= lo && i < hi) continue;
        p[i] ^= 1;
        spit(f->config_path, p, f->n_config);
        p[i] ^= 1;
        if (read_adapter(m, dir, &e) == STILL_OK)
            fail_msg("%s: byte %zu, '%c', may be another", STI_ADAPTER_CONFIG, i, p[i]);
        assert_non_null(strstr(e.text, dir));
    }
    p[lo] ^= 1;
    spit(f->config_path, p, f->n_config);
    must(read_adapter(m, dir, &e), &e);
    spit(f->config_path, f->config, f->n_config);
    free(p);

    FILE *file = fopen(f->tensors_path, "r+b");
    assert_non_null(file);
    setvbuf(file, NULL, _IONBF, 0);
    for (size_t i = 0; i < f->n_tensors; i += i < 3000 ? 7 : f->n_tensors / 97) {
        for (int back = 0; back < 2; back++) {
            assert_int_equal(fseek(file, (long)i, SEEK_SET), 0);
            fputc((unsigned char)f->tensors[i] ^ (back ? 0 : 4), file);
            if (!back && read_adapter(m, dir, &e) == STILL_OK)
                fail_msg("%s: byte %zu of %zu may be another", f->tensors_path, i,
                         f->n_tensors);
        }
        assert_non_null(strstr(e.text, dir));
    }
    fclose(file);
    must(read_adapter(m, dir, &e), &e); /* whole again */
    spit(f->tensors_path, f->tensors, f->n_tensors - 32);
    assert_int_not_equal(read_adapter(m, dir, &e), STILL_OK);
    spit(f->tensors_path, f->tensors, f->n_tensors);
}

static void damage_is_found(void **state)
{
    (void)state;
    still_error e;
    still_model *m;
    char *dir = in_scratch("mine"), *small = in_scratch("small");
    make_adapter(FOLDER, "still", dir, 1);
    must(export(FOLDER, dir, "adapter", NULL, small, &e), &e);
    must(still_model_open(FOLDER, NULL, &m, &e), &e);
    files f = files_of(dir, STI_ADAPTER_TENSORS),
          g = files_of(small, STI_ADAPTER_SMALL);
    flip_all(m, dir, &f);
    flip_all(m, small, &g);
    /* Tensors and settings of two adapters do not go together. */
    char *other = in_scratch("other");
    make_adapter(FOLDER, "still", other, 0);
    files h = files_of(other, STI_ADAPTER_TENSORS);
    spit(f.tensors_path, h.tensors, h.n_tensors);
    assert_int_equal(read_adapter(m, dir, &e), STILL_E_FORMAT);
    assert_non_null(strstr(e.text, "settings are not those"));
    spit(f.tensors_path, f.tensors, f.n_tensors);
    files_free(&f);
    files_free(&g);
    files_free(&h);
    still_model_free(m);
}

/* The same numbers under version 1: no checksum, no description in the tensors' file. */
static void make_old(still_model *m, const char *from, const char *dir)
{
    still_error e;
    sti_adapter *a;
    sti_writer *w;
    char path[300];
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_read(&home, from, false, false, false, &a, &e), &e);
    assert_int_equal(mkdir(dir, 0777), 0);
    must(sti_adapter_write_spec(&a->spec, dir, &e), &e);
    snprintf(path, sizeof path, "%s/%s", dir, STI_ADAPTER_TENSORS);
    must(sti_writer_safetensors(path, NULL, &w, &e), &e);
    for (size_t i = 0; i < a->n_entries; i++)
        must(sti_writer_tensor(w, a->entry[i].name, STI_F32, a->entry[i].n_dims,
                               a->entry[i].dim, &e),
             &e);
    for (size_t i = 0; i < a->n_entries; i++)
        must(sti_writer_data(w, a->value + a->entry[i].at,
                             a->entry[i].n * sizeof(float), &e),
             &e);
    must(sti_writer_finish(w, &e), &e);
    sti_adapter_free(a);
}

/* still.json with one value replaced. */
static void put_changed(const files *f, const char *old, const char *new)
{
    const char *at = strstr(f->config, old);
    if (!at) fail_msg("no %s", old);
    FILE *out = fopen(f->config_path, "wb");
    assert_non_null(out);
    fwrite(f->config, 1, (size_t)(at - f->config), out);
    fputs(new, out);
    at += strlen(old);
    fwrite(at, 1, f->n_config - (size_t)(at - f->config), out);
    fclose(out);
}

static void versions_and_ranges(void **state)
{
    (void)state;
    static const struct {
        const char *old, *new, *says;
    } wrong[] = {
        {"\"chunk\": 8", "\"chunk\": 4294967304", "'chunk' is 4294967304, expected"},
        {"\"chunk\": 8", "\"chunk\": 8.0", "'chunk' is 8, expected a whole number"},
        {"\"select\": 2", "\"select\": -1", "'select' is -1, expected"},
        {"\"cap\": 8", "\"cap\": -2", "'cap' is -2, expected a whole number from -1"},
        {"\"first_layer\": 1", "\"first_layer\": -4294967295", "'first_layer' is"},
        {"\"last_layer\": -1", "\"last_layer\": 99999999999", "'last_layer' is"},
        {"\"seed\": 0", "\"seed\": 1e3", "'seed' is 1000, expected a whole number"},
        {"\"rank\": 4", "\"rank\": 4294967300", "'rank' is 4294967300, expected"},
        {"\"alpha\": 8.0", "\"alpha\": 1e300", "'alpha' is 1.0000000000000001e+300"},
        {"\"alpha\": 8.0", "\"alpha\": -1.0", "'alpha' is -1, expected"},
        {"\"gate\": true", "\"gate\": 1", "'gate' is missing or not true or false"},
        {"\"heads\": \"shared\"", "\"heads\": \"all\"", "'heads' is missing or not"},
        {"\"score\": \"s3\"", "\"score\": \"a name that is longer than any other\"",
         "'score' is missing or not a string of less than"},
        {"\"fingerprint\": \"", "\"fingerprint\": \"x", "64 hexadecimal digits"},
        {"\"q\",", "\"w\",", "'targets' is missing or not a list of projections"},
        {"\"lora\"", "\"laro\"", "'lora' is missing or not an object"},
        {"\"version\": 1", "\"version\": 2", "has no checksum"},
        {"\"version\": 1", "\"version\": 3", "version 3 of the adapter format"},
        {"\"version\": 1", "\"version\": 4294967297", "version 4294967297 of"},
        {"still-adapter", "other-adapter", "its format is 'other-adapter'"},
    };
    still_error e;
    still_model *m;
    must(still_model_open(FOLDER, NULL, &m, &e), &e);
    char *from = in_scratch("mine"), *dir = in_scratch("old");
    make_old(m, from, dir);
    files f = files_of(dir, STI_ADAPTER_TENSORS);
    put_changed(&f, "\"version\": 2", "\"version\": 1");
    must(read_adapter(m, dir, &e), &e);
    assert_true(distance(FOLDER, from, FOLDER, dir) == 0);
    files_free(&f);
    f = files_of(dir, STI_ADAPTER_TENSORS);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        put_changed(&f, wrong[i].old, wrong[i].new);
        const still_status st = read_adapter(m, dir, &e);
        if (st == STILL_OK || !strstr(e.text, wrong[i].says) || !strstr(e.text, dir))
            fail_msg("%s: status %d, \"%s\"", wrong[i].new, st, e.text);
    }
    files_free(&f);
    still_model_free(m);
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(damage_is_found),
             cmocka_unit_test(versions_and_ranges))
