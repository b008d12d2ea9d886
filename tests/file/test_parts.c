/* A GGUF model in several files: any part opens all of them, and parts that are missing
 * or do not belong together are one clear error. */
#include "../run.h"
#include "helpers.h"

typedef struct part {
    uint32_t number, count, tensors;
    const char *name[3]; /* of its tensors */
} part;

static char folder[64];

static const char *path_of(int number, int count)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/m-%05d-of-%05d.gguf", folder, number, count);
    return path;
}

/* Tensor i of a part holds 100 times its number plus i. */
static void write_part(const char *path, const part *p)
{
    sti_writer *w;
    still_error err = {0};
    const int64_t dim[] = {2, 4};
    assert_int_equal(sti_writer_gguf(path, &w, &err), STILL_OK);
    if (p->number == 0) sti_writer_meta_str(w, "general.name", "whole", &err);
    sti_writer_meta_u32(w, "split.no", p->number, &err);
    sti_writer_meta_u32(w, "split.count", p->count, &err);
    sti_writer_meta_u32(w, "split.tensors.count", p->tensors, &err);
    for (int i = 0; i < 3 && p->name[i]; i++)
        assert_int_equal(sti_writer_tensor(w, p->name[i], STI_F32, 2, dim, &err),
                         STILL_OK);
    for (int i = 0; i < 3 && p->name[i]; i++) {
        float v[8];
        for (int k = 0; k < 8; k++) v[k] = (float)(100 * p->number + (uint32_t)i);
        assert_int_equal(sti_writer_data(w, v, sizeof v, &err), STILL_OK);
    }
    assert_int_equal(sti_writer_finish(w, &err), STILL_OK);
}

static const part whole[] = {
    {0, 3, 5, {"e", "a"}}, {1, 3, 5, {"c"}}, {2, 3, 5, {"b", "d"}}};

static int make(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/still-parts-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    for (int i = 0; i < 3; i++) write_part(path_of(i + 1, 3), &whole[i]);
    return 0;
}

static int clean(void **state)
{
    (void)state;
    for (int count = 1; count < 5; count++)
        for (int i = 1; i <= count; i++) remove(path_of(i, count));
    return rmdir(folder);
}

static void refuse(const char *path, const char *reason)
{
    sti_store s;
    still_error err = {0};
    const still_status st = sti_store_open(path, &s, &err);
    if (st == STILL_OK) sti_store_close(&s);
    if (st == STILL_OK || !strstr(err.text, reason))
        fail_msg("\"%s\" does not say \"%s\"", err.text, reason);
    assert_null(strchr(err.text, '\n'));
    assert_null(s.tensor);
    assert_null(s.map);
}

static void any_part_opens_all(void **state)
{
    (void)state;
    for (int i = 1; i <= 3; i++) {
        sti_store s;
        still_error err = {0};
        if (sti_store_open(path_of(i, 3), &s, &err)) fail_msg("%s", err.text);
        assert_int_equal(s.n_tensors, 5);
        assert_int_equal(s.n_maps, 3);
        assert_true(s.is_gguf && !strcmp(s.path, path_of(i, 3)));
        static const float want[] = {1, 200, 100, 201, 0}; /* of a to e */
        for (int t = 0; t < 5; t++) {
            const char name[] = {(char)('a' + t), 0};
            const sti_tensor *x = sti_store_find(&s, name);
            assert_non_null(x);
            assert_true(((const float *)x->data)[7] == want[t]);
        }
        assert_string_equal(sti_store_find(&s, "c")->path, path_of(2, 3));
        const sti_meta *m = sti_meta_find(&s, "general.name");
        assert_true(m && m->str[0].n == 5);
        int64_t number = -1;
        assert_true(sti_meta_int(sti_meta_find(&s, "split.no"), &number) && !number);
        touch(&s);
        sti_store_close(&s);
    }
}

/* Opens with part `at` replaced. */
static void with(int at, part p, const char *reason)
{
    write_part(path_of(at, 3), &p);
    refuse(path_of(1, 3), reason);
    refuse(path_of(3, 3), reason);
    write_part(path_of(at, 3), &whole[at - 1]);
}

static void parts_that_do_not_fit(void **state)
{
    (void)state;
    with(2, (part){2, 3, 5, {"c"}}, "says that it is part 3 of 3");
    with(2, (part){1, 4, 5, {"c"}}, "expected part 2 of 3");
    with(2, (part){1, 3, 6, {"c"}}, "with 6 tensors in all");
    with(2, (part){0, 1, 5, {"c"}}, "says that it is part 1 of 1");
    with(2, (part){1, 3, 5, {"a"}}, "tensor 'a' occurs twice");
    with(2, (part){1, 3, 5, {"c", "f"}}, "have 6 tensors, split.tensors.count is 5");
    with(2, (part){1, 3, 5, {NULL}}, "have 4 tensors");
    with(2, (part){7, 3, 5, {"c"}}, "split.no is missing or not 0 to 2");
    remove(path_of(2, 3));
    refuse(path_of(1, 3), "part 2 of 3");
    refuse(path_of(1, 3), "/m-00002-of-00003.gguf: no such file");
    FILE *f = fopen(path_of(2, 3), "wb");
    assert_non_null(f);
    fputs("GGML what is this", f);
    fclose(f);
    refuse(path_of(3, 3), "is no GGUF file");
    write_part(path_of(2, 3), &whole[1]);
}

static void names_that_do_not_fit(void **state)
{
    (void)state;
    char other[128];
    snprintf(other, sizeof other, "%s/other.gguf", folder);
    write_part(other, &whole[0]);
    refuse(other, "must end with -00001-of-00003.gguf");
    write_part(other, &(part){0, 60000, 5, {"a"}});
    refuse(other, "split.count is missing or not 0 to 9999");
    remove(other);
    write_part(path_of(1, 4), &whole[0]);
    refuse(path_of(1, 4), "must end with -00001-of-00003.gguf");
    write_part(path_of(1, 1), &(part){0, 1, 9, {"a"}}); /* one part is a whole model */
    sti_store s;
    still_error err;
    assert_int_equal(sti_store_open(path_of(1, 1), &s, &err), STILL_OK);
    sti_store_close(&s);
}

/* Each byte of the second part turned over, and each length of it: an error or a model. */
static void damage(void **state)
{
    (void)state;
    static unsigned char good[4096], bad[4096];
    FILE *f = fopen(path_of(2, 3), "rb");
    assert_non_null(f);
    const size_t n = fread(good, 1, sizeof good, f);
    fclose(f);
    for (size_t i = 0; i < 2 * n; i++) {
        memcpy(bad, good, n);
        if (i < n) bad[i] ^= (unsigned char)(1 << i % 8);
        f = fopen(path_of(2, 3), "wb");
        assert_non_null(f);
        fwrite(bad, 1, i < n ? n : i - n, f);
        fclose(f);
        sti_store s;
        still_error err = {0};
        if (sti_store_open(path_of(1 + (int)(i % 3), 3), &s, &err) == STILL_OK) {
            touch(&s);
            sti_store_close(&s);
        } else {
            assert_true(err.text[0] && !s.tensor && !s.map);
        }
    }
    write_part(path_of(2, 3), &whole[1]);
}

RUN_TESTS_IN(make, clean, cmocka_unit_test(any_part_opens_all),
             cmocka_unit_test(parts_that_do_not_fit),
             cmocka_unit_test(names_that_do_not_fit), cmocka_unit_test(damage))
