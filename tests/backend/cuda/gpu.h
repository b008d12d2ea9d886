/* gpu.h - the GPU of a test program, its memory, and tables of cases of which each is a
 * test of its own: a failure names its case, and a case can be run alone. */
#ifndef TESTS_CUDA_GPU_H
#define TESTS_CUDA_GPU_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../../skip.h"
#include "ops/ops.h"

typedef struct gpu {
    const sti_backend *be;
    sti_dev *dev; /* NULL: there is none */
} gpu;

static gpu the_gpu; /* from the group's setup to its teardown */

static inline int open_gpu(const sti_dev_params *p)
{
    still_error err;
    the_gpu = (gpu){.be = sti_backend_find("cuda")};
    if (!the_gpu.be || the_gpu.be->dev_new(p, &the_gpu.dev, &err) != STILL_OK)
        the_gpu.dev = NULL;
    return 0;
}

static inline int close_gpu(void **state)
{
    (void)state;
    if (the_gpu.dev) the_gpu.be->dev_free(the_gpu.dev);
    return 0;
}

/* The GPU, for a test that is skipped where there is none. */
static inline const gpu *need_gpu(void)
{
    if (!the_gpu.dev) skip_because("no GPU");
    return &the_gpu;
}

/* ---- Its memory ---------------------------------------------------------- */

static inline void move(const gpu *g, void *to, const void *from, size_t bytes)
{
    still_error err;
    if (g->be->mem_move(g->dev, to, from, bytes, &err) != STILL_OK)
        fail_msg("%s", err.text);
}

static inline sti_block new_block(const gpu *g, size_t bytes)
{
    sti_block b;
    still_error err;
    if (g->be->mem_new(g->dev, bytes ? bytes : 1, &b, &err) != STILL_OK)
        fail_msg("%s", err.text);
    return b;
}

/* x in float on the GPU; empty if x is NULL. */
static inline sti_block upload(const gpu *g, const double *x, size_t n)
{
    if (!x) return (sti_block){0};
    float *y = malloc(n * sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++) y[i] = (float)x[i];
    sti_block b = new_block(g, n * sizeof *y);
    move(g, b.p, y, n * sizeof *y);
    free(y);
    return b;
}

static inline void *download(const gpu *g, const void *p, size_t bytes)
{
    void *x = malloc(bytes ? bytes : 1);
    assert_non_null(x);
    move(g, x, p, bytes);
    return x;
}

/* ---- Cases --------------------------------------------------------------- */

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Appends n cases of `size` bytes to the `at` tests there are: each is named by the
 * first member of its case, which is what *state points to. Returns how many there are
 * then. */
static inline size_t add_cases(struct CMUnitTest *tests, size_t at,
                               CMUnitTestFunction test, const void *cases, size_t n,
                               size_t size)
{
    for (size_t i = 0; i < n; i++) {
        void *one = (char *)cases + i * size;
        tests[at + i] = (struct CMUnitTest){
            .name = *(const char *const *)one, .test_func = test, .initial_state = one};
    }
    return at + n;
}

#endif
