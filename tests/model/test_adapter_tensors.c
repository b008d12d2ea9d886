/* test_adapter_tensors.c - the numbers of an adapter as other programs get them: those
 * that were written, from either kind of file. */
#include "../run.h"
#include "exports.h"

static const float *find(const sti_adapter *a, const char *name, size_t *n)
{
    for (size_t i = 0; i < a->n_entries; i++)
        if (strcmp(a->entry[i].name, name) == 0) {
            *n = a->entry[i].n;
            return a->value + a->entry[i].at;
        }
    fail_msg("no tensor '%s' was written", name);
    return NULL;
}

/* Every tensor of the file is one of the adapter's, within the rounding of its type. */
static void compare(const char *path, const sti_adapter *want, double rounding)
{
    still_error e;
    still_adapter *a;
    must(still_adapter_open(path, &a, &e), &e);
    const still_adapter_info *info = still_adapter_get_info(a);
    assert_string_equal(info->method->name, "still");
    assert_int_equal(info->method->cap, 8);
    assert_string_equal(info->base, "the base");
    assert_int_equal(info->lora_rank, RANK);
    assert_true(info->lora_alpha == 8);
    assert_int_equal(still_adapter_tensor_count(a), want->n_entries);
    still_tensor_info t;
    for (size_t i = 0; i < want->n_entries; i++) {
        assert_true(still_adapter_tensor(a, i, &t));
        size_t n = 0, all = 1;
        const float *x = find(want, t.name, &n);
        for (int d = 0; d < t.n_dims; d++) all *= (size_t)t.dim[d];
        assert_int_equal(n, all);
        float *got = calloc(n, sizeof *got);
        assert_non_null(got);
        must(still_adapter_values(a, i, got, n, &e), &e);
        for (size_t j = 0; j < n; j++)
            if (!(fabs((double)got[j] - (double)x[j]) <= rounding))
                fail_msg("%s, number %zu: %g, expected %g", t.name, j, (double)got[j],
                         (double)x[j]);
        assert_int_equal(still_adapter_values(a, i, got, n - 1, &e), STILL_E_ARG);
        free(got);
    }
    float one;
    assert_false(still_adapter_tensor(a, want->n_entries, &t));
    assert_int_equal(still_adapter_values(a, want->n_entries, &one, 1, &e),
                     STILL_E_ARG);
    still_adapter_free(a);
}

static void numbers_are_those_written(void **state)
{
    (void)state;
    still_error e;
    still_model *m;
    sti_adapter *want;
    char *dir = in_scratch("mine"), *small = in_scratch("small");
    make_adapter(FOLDER, "still", dir, 1);
    must(export(FOLDER, dir, "adapter", NULL, small, &e), &e);
    must(still_model_open(FOLDER, NULL, &m, &e), &e);
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_read(&home, dir, false, false, false, &want, &e), &e);
    compare(dir, want, 0);
    compare(small, want, 2e-2); /* gates in 8 bits */
    sti_adapter_free(want);
    still_model_free(m);
}

static void damage_is_refused(void **state)
{
    (void)state;
    still_error e;
    still_adapter *a;
    char path[300], *dir = in_scratch("damaged");
    assert_int_equal(still_adapter_open(in_scratch("nowhere"), &a, &e), STILL_E_IO);
    assert_null(a);
    make_adapter(FOLDER, "still", dir, 0);
    snprintf(path, sizeof path, "%s/" STI_ADAPTER_TENSORS, dir);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -40, SEEK_END), 0);
    const int c = fgetc(f);
    assert_int_equal(fseek(f, -40, SEEK_END), 0);
    fputc(c ^ 1, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(still_adapter_open(dir, &a, &e), STILL_E_FORMAT);
    assert_null(a);
    still_adapter_free(NULL);
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(numbers_are_those_written),
             cmocka_unit_test(damage_is_refused))
