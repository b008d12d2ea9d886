/* registry.c - the only file that names backends. */
#include <string.h>

#include "ops/ops.h"

extern const sti_backend sti_backend_cpu, sti_backend_ref;

static const sti_backend *const backends[] = {&sti_backend_cpu, &sti_backend_ref};

const sti_backend *sti_backend_find(const char *name)
{
    if (!name) return backends[0];
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(backends[i]->name, name) == 0) return backends[i];
    return NULL;
}

const char *sti_backend_names(void)
{
    return "cpu, ref";
}
