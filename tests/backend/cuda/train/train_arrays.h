/* train_arrays.h - what the tests of training's operators on the GPU share: both
 * devices, arrays and matrices in both memories, and how far results may be apart.
 *
 * Products round both sides to bfloat16 (what goes back through weights, 2^-9 at worst)
 * or to half or TF32 (2^-11), which on average over a sum is about a third of that on
 * each side: bounds are two to three times what follows, of the norm of the result.
 * Everything else is float, and sums in another order. */
#ifndef TESTS_CUDA_TRAIN_ARRAYS_H
#define TESTS_CUDA_TRAIN_ARRAYS_H

#include "../../matrix.h"

#include <math.h>
#include <stdio.h>

#include "../../../skip.h"

static const double BF16 = 4e-3, HALF = 1e-3, FLOATS = 1e-5; /* relative errors */

static inline const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static inline const sti_backend *ref(void)
{
    return sti_backend_find("ref");
}

typedef struct devices {
    sti_dev *gpu, *here;
} devices;

static inline int setup(void **state)
{
    static devices d;
    still_error err;
    const sti_dev_params p = {
        .threads = 1, .max_k = 16384, .heads = 8, .kv_heads = 4, .head_dim = 64};
    d = (devices){0};
    if (cuda() && cuda()->dev_new(&p, &d.gpu, &err) != STILL_OK) d.gpu = NULL;
    if (ref()->dev_new(&p, &d.here, &err) != STILL_OK) return -1;
    *state = &d;
    return 0;
}

static inline int teardown(void **state)
{
    devices *d = *state;
    if (d->gpu) cuda()->dev_free(d->gpu);
    ref()->dev_free(d->here);
    return 0;
}

static inline devices *begin(void **state)
{
    devices *d = *state;
    if (!d->gpu) skip_because("no GPU");
    return d;
}

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != STILL_OK) fail_msg("%s: %s", #call, err.text);                   \
    } while (0)

/* ---- Numbers here and there ---------------------------------------------- */

enum { BLOCKS = 24 };

/* Arrays of a test in both memories; all end with it. */
typedef struct arrays {
    devices *d;
    float *here[BLOCKS];
    sti_block there[BLOCKS];
    size_t n[BLOCKS];
    int count;
} arrays;

/* n random floats, or zeros; `off` floats after a multiple of 16 bytes on the GPU. */
static inline int add(arrays *a, size_t n, float gain, uint32_t seed, size_t off)
{
    still_error err;
    const int i = a->count++;
    assert_true(i < BLOCKS);
    a->n[i] = n;
    a->here[i] = malloc((n + 1) * sizeof(float));
    assert_non_null(a->here[i]);
    for (size_t k = 0; k < n; k++) a->here[i][k] = gain * uniform(&seed);
    OK(cuda()->mem_new(a->d->gpu, (n + off) * sizeof(float), &a->there[i], &err));
    float *to = (float *)a->there[i].p + off;
    OK(cuda()->mem_move(a->d->gpu, to, a->here[i], n * sizeof(float), &err));
    return i;
}

static inline float *on_gpu(const arrays *a, int i, size_t off)
{
    return (float *)a->there[i].p + off;
}

/* |gpu - ref| / |ref| of an array. */
static inline double error_of(arrays *a, int i, size_t off)
{
    still_error err;
    float *got = malloc((a->n[i] + 1) * sizeof *got);
    double wrong = 0, size = 0;
    assert_non_null(got);
    OK(cuda()->mem_move(a->d->gpu, got, on_gpu(a, i, off), a->n[i] * sizeof *got,
                        &err));
    for (size_t k = 0; k < a->n[i]; k++) {
        const double want = a->here[i][k], e = got[k] - want;
        wrong += e * e;
        size += want * want;
    }
    free(got);
    return sqrt(wrong / (size + 1e-30));
}

static inline void end(arrays *a)
{
    for (int i = 0; i < a->count; i++) {
        free(a->here[i]);
        cuda()->mem_free(a->d->gpu, &a->there[i]);
    }
}

static inline void hold(double error, double bound, const char *what, int M, int N,
                        int K)
{
    if (!(error <= bound))
        fail_msg("%s of %d x %d x %d: off by %.2g, at most %.2g is allowed", what, M, N,
                 K, error, bound);
}

/* ---- Matrices ------------------------------------------------------------ */

/* A matrix in both memories. trained: floats on the GPU that stay where they are. */
typedef struct matrix {
    source s;
    sti_weight here, there;
    sti_block floats;
    sti_tensor seen;
} matrix;

static inline void open_matrix(devices *d, sti_dtype type, bool trained, int N, int K,
                               uint32_t seed, matrix *m)
{
    still_error err;
    *m = (matrix){.s = make_source(trained ? STI_F32 : type, N, K, seed)};
    OK(ref()->weight_new(d->here, &m->s.t, &m->here, &err));
    if (!trained) {
        OK(cuda()->weight_new(d->gpu, &m->s.t, &m->there, &err));
        return;
    }
    const size_t bytes = (size_t)N * (size_t)K * sizeof(float);
    OK(cuda()->mem_new(d->gpu, bytes + 4, &m->floats, &err));
    /* As in an adapter: after whatever comes before it. */
    float *at = (float *)m->floats.p + (seed % 2);
    OK(cuda()->mem_move(d->gpu, at, m->s.value, bytes, &err));
    m->seen = m->s.t;
    m->seen.data = (void *)at;
    OK(cuda()->weight_new(d->gpu, &m->seen, &m->there, &err));
    assert_null(m->there.own.p);
}

static inline void close_matrix(devices *d, matrix *m)
{
    ref()->weight_free(d->here, &m->here);
    cuda()->weight_free(d->gpu, &m->there);
    cuda()->mem_free(d->gpu, &m->floats);
    free_source(&m->s);
}

#endif
