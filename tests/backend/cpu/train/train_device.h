/* train_device.h - devices for tests of training's operators: the reference's, and the
 * cpu's with every instruction set and number of threads. */
#ifndef TESTS_TRAIN_DEVICE_H
#define TESTS_TRAIN_DEVICE_H

#include "../cpu_device.h"

enum { THREADS_MAX = 3, MAX_K = 2048 };

static const sti_backend *ref(void)
{
    return sti_backend_find("ref");
}

static inline sti_dev *any_dev(const sti_backend *b, const char *isa, int threads)
{
    return dev_of(b, (sti_dev_params){.threads = threads, .isa = isa, .max_k = MAX_K});
}

/* |y - want| <= rel |want| + abs, and a NaN never. */
static inline void assert_near(double y, double want, double rel, double abs,
                               const char *what, size_t i)
{
    if (!(fabs(y - want) <= rel * fabs(want) + abs))
        fail_msg("%s, element %zu: %.9g, expected %.9g", what, i, y, want);
}

/* Calls body(dev, name) for every instruction set and number of threads. */
static inline void each_cpu(void (*body)(sti_dev *, const char *, void *), void *arg)
{
    for (int isa = 0; isa < N_ISA; isa++)
        for (int threads = 1; threads <= THREADS_MAX; threads++) {
            sti_dev *dev = any_dev(cpu(), isa_name[isa], threads);
            if (!dev) break;
            body(dev, isa_name[isa], arg);
            free_dev(dev);
        }
}

#endif
