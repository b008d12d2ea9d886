/* registry.c - the only file that names backends. */
#include <string.h>

#include "ops/ops.h"

extern const sti_backend sti_backend_cpu, sti_backend_ref, sti_backend_bf16,
    sti_backend_cuda;

static const sti_backend *const backends[] = {
    &sti_backend_cpu,
    &sti_backend_ref,
    &sti_backend_bf16,
#if STI_HAVE_CUDA
    &sti_backend_cuda,
#endif
};

const sti_backend *sti_backend_find(const char *name)
{
    if (!name) return backends[0];
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(backends[i]->name, name) == 0) return backends[i];
    return NULL;
}

const char *sti_backend_names(void)
{
#if STI_HAVE_CUDA
    return "there are cpu, ref, bf16 and cuda";
#else
    return "there are cpu, ref and bf16; for cuda, build with: cmake --preset cuda";
#endif
}
