/* cpu_device.h - devices of the cpu backend for tests of its operators: one for every
 * instruction set, numbers to feed it, and how far off what comes back is. */
#ifndef TESTS_CPU_DEVICE_H
#define TESTS_CPU_DEVICE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../skip.h"
#include "ops/ops.h"

static const char *const isa_name[] = {"portable", "avx2", "avx512"};
enum { N_ISA = 3 };

static inline const sti_backend *cpu(void)
{
    return sti_backend_find("cpu");
}

/* NULL: this processor lacks the instructions, which is told. */
static inline sti_dev *dev_of(const sti_backend *b, sti_dev_params p)
{
    still_error err;
    sti_dev *dev;
    const still_status st = b->dev_new(&p, &dev, &err);
    if (st == STILL_E_UNSUPPORTED && p.isa) {
        skip_isa(p.isa);
        return NULL;
    }
    assert_int_equal(st, STILL_OK);
    return dev;
}

static inline sti_dev *new_dev(const char *isa, int threads)
{
    return dev_of(cpu(), (sti_dev_params){.threads = threads, .isa = isa, .max_k = 64});
}

static inline void free_dev(sti_dev *dev)
{
    cpu()->dev_free(dev);
}

/* ---- Numbers, which the caller frees ------------------------------------- */

static inline float *floats(size_t n, float gain, uint32_t seed)
{
    float *x = sti_alloc(n, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = gain * ((float)(seed >> 8) / (1 << 23) - 1);
    }
    return x;
}

static inline float *copy(const float *x, size_t n)
{
    float *y = sti_alloc(n, sizeof *y);
    assert_non_null(y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

/* x in float, zeros if x is NULL. */
static inline float *narrow(const double *x, size_t n)
{
    float *y = sti_alloc(n, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; x && i < n; i++) y[i] = (float)x[i];
    return y;
}

/* Largest difference over the largest value, or over `size` if that is larger. */
static inline double relative_error(const float *got, const double *want, size_t n,
                                    double size)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) size = fmax(size, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
    }
    return size > 0 ? worst / size : worst;
}

#endif
