/* adapter_tensors.c - the numbers of an adapter for programs that put them into a model
 * of their own. The file is open as long as the object; numbers become floats when they
 * are asked for. */
#include <stdlib.h>
#include <string.h>

#include "model/adapter.h"

struct still_adapter {
    sti_store file;
    sti_adapter_spec spec;
    still_adapter_info info; /* points into spec */
    size_t n_tensors;
    size_t
        checksum; /* its place among the file's tensors; past the last: there is none */
};

/* The i-th tensor but for the checksum; NULL past the last. */
static const sti_tensor *tensor_at(const still_adapter *a, size_t i)
{
    if (i >= a->n_tensors) return NULL;
    return &a->file.tensor[i < a->checksum ? i : i + 1];
}

void still_adapter_free(still_adapter *a)
{
    if (!a) return;
    sti_store_close(&a->file);
    free(a);
}

still_status still_adapter_open(const char *path, still_adapter **out, still_error *err)
{
    *out = NULL;
    still_adapter *a = sti_alloc(1, sizeof *a);
    if (!a) return sti_fail_memory(err, path, sizeof *a);
    const still_status st = sti_adapter_open_checked(path, &a->file, &a->spec, err);
    if (st != STILL_OK) {
        still_adapter_free(a);
        return st;
    }
    a->info = (still_adapter_info){.method = &a->spec.method,
                                   .base = a->spec.base_name,
                                   .lora_rank = a->spec.lora.rank,
                                   .lora_alpha = (double)a->spec.lora.alpha};
    const size_t n = a->file.n_tensors;
    while (a->checksum < n &&
           strcmp(a->file.tensor[a->checksum].name, STI_CHECKSUM) != 0)
        a->checksum++;
    a->n_tensors = a->checksum < n ? n - 1 : n;
    *out = a;
    return STILL_OK;
}

const still_adapter_info *still_adapter_get_info(const still_adapter *a)
{
    return &a->info;
}

size_t still_adapter_tensor_count(const still_adapter *a)
{
    return a->n_tensors;
}

bool still_adapter_tensor(const still_adapter *a, size_t i, still_tensor_info *out)
{
    const sti_tensor *t = tensor_at(a, i);
    if (!t) return false;
    *out = (still_tensor_info){.name = t->name,
                               .dtype = sti_dtype_find((int)t->type)->name,
                               .n_dims = t->n_dims,
                               .bytes = t->bytes};
    memcpy(out->dim, t->dim, sizeof out->dim);
    return true;
}

still_status still_adapter_values(const still_adapter *a, size_t i, float *out,
                                  size_t n, still_error *err)
{
    const sti_tensor *t = tensor_at(a, i);
    if (!t)
        return sti_fail(err, STILL_E_ARG, "%s: has %zu tensors, there is no number %zu",
                        a->file.path, a->n_tensors, i);
    size_t all = 1;
    for (int d = 0; d < t->n_dims; d++)
        all *= (size_t)t->dim[d]; /* checked on opening */
    if (n != all)
        return sti_fail(
            err, STILL_E_ARG,
            "%s: tensor '%s' has %zu numbers, expected room for as many, not "
            "%zu",
            a->file.path, t->name, all, n);
    sti_dequant(t->type, t->data, out, (int64_t)n);
    return sti_adapter_check_finite(out, n, t->path, err);
}
