/* test_data_oom.c - every allocation of opening training data fails in turn: the call
 * reports it, leaves no half-made cache, and the sanitizers find nothing leaked. */
#include "data_files.h"

#include "../../oom.h"

/* The first, second, ... allocation fails until none is left to fail. Opening may get
 * over a failure that costs nothing but a sync. */
static void sweep(const still_tokenizer *tk, const char *path, bool cached,
                  int at_least)
{
    char file[512];
    sti_data_source s = {path, 0};
    sti_data_params p = {.source = &s, .n_sources = 1, .seq = 8, .cache_dir = cache};
    for (int i = 0;; i++) {
        sti_data *d;
        still_error err = {0};
        if (!cached) cache_files(file, true);
        countdown = i;
        still_status status = sti_data_open(tk, &p, &d, &err);
        bool used_up = countdown < 0;
        countdown = -1;
        assert_true((status == STILL_OK) == (d != NULL));
        if (d) assert_int_equal(sti_data_get_report(d)->broken, 0);
        sti_data_free(d);
        if (status == STILL_OK && !used_up) {
            if (i < at_least) fail_msg("only %d allocations, expected %d", i, at_least);
            return;
        }
        if (status != STILL_OK && (status != STILL_E_MEMORY || !err.text[0]))
            fail_msg("allocation %d: status %d, \"%s\"", i, status, err.text);
        if (cache_files(file, false)) assert_null(strstr(file, ".tmp"));
        assert_true(i < 10000);
    }
}

static void opening_survives(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    sweep(tk, DATA("records.jsonl"), false, 20);
    sweep(tk, DATA("records.jsonl"), true, 8);
    sweep(tk, DATA("array.json.gz"), false, 20);
    still_tokenizer_free(tk);
    tk = tokenizer(VOCAB("spm-nobytes.model")); /* the prompt is encoded alone, too */
    sweep(tk, DATA("object.json"), false, 20);
    still_tokenizer_free(tk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opening_survives),
    };
    json_set_alloc_funcs(__wrap_malloc, free);
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
