/* Allocations of making, freezing and reading a set fail in turn: the call reports it,
 * and the sanitizers find nothing leaked or used. The linker sends our own malloc,
 * calloc and realloc to those of oom.h; jansson is told to use them. */
#include "generated.h"

#include "../../oom.h"

typedef still_status (*action)(const sti_eval_task *t, sti_task_params *p,
                               still_error *err);

static still_status make(const sti_eval_task *t, sti_task_params *p, still_error *err)
{
    items all;
    still_status status = read_all(t, p, &all, err);
    free_all(&all);
    return status;
}

static still_status freeze(const sti_eval_task *t, sti_task_params *p, still_error *err)
{
    return sti_dataset_file_write(t, p, file_in_folder, err);
}

/* Every allocation of the first 64 fails once, later ones ever more seldom. */
static void sweep(action run, const sti_eval_task *t, sti_task_params p)
{
    for (long i = 0;; i += 1 + i / 64) {
        still_error err = {0};
        countdown = i;
        still_status status = run(t, &p, &err);
        bool used_up = countdown < 0;
        countdown = -1;
        if (status == STILL_OK && !used_up) {
            assert_true(i > 10);
            return;
        }
        if (status != STILL_OK && (status != STILL_E_MEMORY || !err.text[0]))
            fail_msg("%s, allocation %ld: status %d, \"%s\"", t->name, i, status,
                     err.text);
    }
}

static void test_making(void **state)
{
    (void)state;
    for (const sti_eval_task *t = sti_task_ruler; t->name; t++)
        sweep(make, t, params(strcmp(t->name, "qa_squad") == 0 ? 4096 : 3000, 1));
    for (const sti_eval_task *t = sti_task_babilong; t->name; t++)
        sweep(make, t, params(1024, 1));
}

static void test_freezing(void **state)
{
    (void)state;
    make_folder("fwe-1024.jsonl", "");
    sweep(freeze, sti_task_find("fwe"), params(1024, 1));
    sti_task_params p = params(1024, 1);
    p.data_dir = folder;
    sweep(make, sti_task_find("fwe"), p);
    drop_folder();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_making),
        cmocka_unit_test(test_freezing),
    };
    json_set_alloc_funcs(__wrap_malloc, free);
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
