/* dense_problem.h - numbers and weights of every type on the GPU, for the tests of the
 * cuda backend's dense operators. */
#ifndef TESTS_CUDA_DENSE_PROBLEM_H
#define TESTS_CUDA_DENSE_PROBLEM_H

#include "../../matrix.h"

#include <math.h>

#include "../gpu.h"

static const sti_dtype TYPES[] = {STI_Q4_0,  STI_Q4_1, STI_Q5_0,   STI_Q5_1,
                                  STI_Q8_0,  STI_Q2_K, STI_Q3_K,   STI_Q4_K,
                                  STI_Q5_K,  STI_Q6_K, STI_IQ4_NL, STI_IQ4_XS,
                                  STI_MXFP4, STI_F32,  STI_F16,    STI_BF16};
enum { N_TYPES = COUNT(TYPES) };
static const int ROWS[] = {1, 2, 3, 7, 8, 9, 16, 20, 33, 64, 200, 513};
enum { N_ROWS = COUNT(ROWS) };

static inline const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static const sti_dev_params SIZES = {
    .threads = 2, .max_k = 16384, .heads = 8, .kv_heads = 4, .head_dim = 64};

static inline int open_dense_gpu(void **state)
{
    (void)state;
    return open_gpu(&SIZES);
}

/* A device with so little memory that quants get no copy in half: what copies may take,
 * a sixteenth of it, one weight has taken. */
static source hog;
static sti_weight hog_weight;

static inline int open_frugal_gpu(void **state)
{
    (void)state;
    sti_dev_params p = SIZES;
    still_error err;
    p.memory = 1 << 30;
    open_gpu(&p);
    hog_weight = (sti_weight){0};
    if (!the_gpu.dev) return 0;
    hog = make_source(STI_Q8_0, 8192, 4096, 1);
    if (cuda()->weight_new(the_gpu.dev, &hog.t, &hog_weight, &err) != STILL_OK)
        fail_msg("%s", err.text);
    assert_int_equal(hog_weight.own.bytes,
                     cuda()->weight_bytes(the_gpu.dev, &hog.t) + (64 << 20));
    return 0;
}

static inline int close_frugal_gpu(void **state)
{
    if (the_gpu.dev) {
        cuda()->weight_free(the_gpu.dev, &hog_weight);
        free_source(&hog);
    }
    return close_gpu(state);
}

/* What the GPU is compared with. */
static inline sti_dev *ref_dev(void)
{
    sti_dev *dev = NULL;
    still_error err;
    if (sti_backend_find("ref")->dev_new(&SIZES, &dev, &err) != STILL_OK)
        fail_msg("%s", err.text);
    return dev;
}

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != STILL_OK) fail_msg("%s: %s", #call, err.text);                   \
    } while (0)

/* ---- Numbers here and there ---------------------------------------------- */

static inline float *floats(int64_t n, float gain, uint32_t seed)
{
    float *x = malloc(sizeof *x * (size_t)n);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) x[i] = gain * uniform(&seed);
    return x;
}

static inline float *copy(const float *x, int64_t n)
{
    float *y = malloc(sizeof *y * (size_t)n);
    assert_non_null(y);
    memcpy(y, x, sizeof *y * (size_t)n);
    return y;
}

/* n floats on the GPU; NULL: zeros. */
static inline sti_block there(const float *x, int64_t n)
{
    sti_block b = new_block(&the_gpu, sizeof *x * (size_t)n);
    if (x) move(&the_gpu, b.p, x, sizeof *x * (size_t)n);
    return b;
}

/* The floats of a block, which is freed. */
static inline float *back(sti_block *b, int64_t n)
{
    float *x = download(&the_gpu, b->p, sizeof *x * (size_t)n);
    the_gpu.be->mem_free(the_gpu.dev, b);
    return x;
}

static inline sti_weight weight(sti_dev *dev, const source *s)
{
    sti_weight w;
    still_error err;
    size_t bytes = cuda()->weight_bytes(dev, &s->t);
    OK(cuda()->weight_new(dev, &s->t, &w, &err));
    if (hog_weight.N)
        assert_int_equal(w.own.bytes, bytes);
    else
        assert_true(w.own.bytes >= bytes); /* there may be a copy */
    return w;
}

/* Columns that suit a type, near k. */
static inline int64_t columns(sti_dtype t, int64_t k)
{
    int64_t block = sti_dtype_find((int)t)->block;
    return block == 1 ? k : (k + block - 1) / block * block;
}

static inline void near(double y, double want, double tol, const char *what,
                        sti_dtype t, int M, int64_t i)
{
    if (!(fabs(y - want) <= tol))
        fail_msg("%s of %s, %d rows, element %lld: %.9g, expected %.9g +- %.2g", what,
                 sti_dtype_find((int)t)->name, M, (long long)i, y, want, tol);
}

#endif
