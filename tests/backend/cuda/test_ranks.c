/* test_ranks.c - GPUs of several processes that add together, with one process: it
 * meets itself through NCCL, and its sum goes out, comes back and is what it was. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../../run.h"

#include "../../skip.h"
#include "ops/ops.h"

enum { N = 100003, DOZENS = 40 << 20 };

static const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static int setup(void **state)
{
    const sti_backend *be = cuda();
    sti_dev *dev = NULL;
    still_error err;
    sti_dev_params p = {.threads = 1, .max_k = 64, .heads = 1, .head_dim = 64};
    const bool there = be && be->dev_new(&p, &dev, &err) == STILL_OK;
    *state = there ? dev : NULL;
    return 0;
}

static int teardown(void **state)
{
    if (*state) cuda()->dev_free(*state);
    return 0;
}

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != STILL_OK) fail_msg("%s: %s", #call, err.text);                   \
    } while (0)

static sti_dev *joined(void **state)
{
    const sti_backend *be = cuda();
    still_error err;
    uint8_t place[STI_RANKS_ID];
    if (!*state) skip_because("no GPU");
    if (!be->ranks_sum) skip_because("this build has no NCCL");
    OK(be->ranks_new_id(place, &err));
    OK(be->ranks_join(*state, place, 0, 1, &err));
    return *state;
}

static void check_sum(sti_dev *dev, size_t n)
{
    const sti_backend *be = cuda();
    still_error err;
    sti_block there;
    float *x = malloc(n * sizeof *x), *y = calloc(n, sizeof *y);
    assert_non_null(x);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++) x[i] = (float)(i % 8191) - 4000.5f;
    OK(be->mem_new(dev, n * sizeof *x, &there, &err));
    OK(be->mem_move(dev, there.p, x, n * sizeof *x, &err));
    OK(be->ranks_sum(dev, there.p, n, &err));
    OK(be->mem_move(dev, y, there.p, n * sizeof *y, &err));
    assert_memory_equal(x, y, n * sizeof *x);
    be->mem_free(dev, &there);
    free(x);
    free(y);
}

static void test_sum(void **state)
{
    sti_dev *dev = joined(state);
    check_sum(dev, 1);
    check_sum(dev, N);
    check_sum(dev, DOZENS); /* several blocks */
}

static void test_name(void **state)
{
    const sti_backend *be = cuda();
    still_error err;
    uint8_t a[STI_DEVICE_NAME] = {0}, b[STI_DEVICE_NAME], none[STI_DEVICE_NAME] = {0};
    if (!*state) skip_because("no GPU");
    if (!be->ranks_name) skip_because("this build has no NCCL");
    OK(be->ranks_name(*state, a, &err));
    OK(be->ranks_name(*state, b, &err));
    assert_memory_equal(a, b, sizeof a);
    assert_memory_not_equal(a, none, sizeof a);
}

RUN_TESTS(cmocka_unit_test_setup_teardown(test_name, setup, teardown),
          cmocka_unit_test_setup_teardown(test_sum, setup, teardown))
