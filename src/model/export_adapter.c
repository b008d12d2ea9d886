/* export_adapter.c - an adapter alone, smaller: a folder with still.json and
 * adapter.gguf, and the card and figures that came with it.
 *
 * Gates are four fifths of a trained adapter, and beside quantized weights they run in
 * 8 bits anyway, so 8 bits lose nothing there. Maps and low-rank additions run as
 * floats: half precision keeps 11 bits of them. Vectors (scalars of a head) are a few
 * hundred numbers and stay floats. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "model/export.h"

/* What gates are stored in, and all other matrices. */
typedef struct store_as {
    sti_dtype gate, other;
} store_as;

static still_status read_types(const char *name, store_as *out, still_error *err)
{
    const sti_dtype_info *info = sti_dtype_by_name(name ? name : "q8_0");
    if (!info ||
        (info->type != STI_Q8_0 && info->type != STI_F16 && info->type != STI_F32))
        return sti_fail(err, STILL_E_ARG,
                        "adapter: type '%s' is not one of q8_0, f16, f32", name);
    *out = (store_as){info->type, info->type == STI_F32 ? STI_F32 : STI_F16};
    return STILL_OK;
}

static sti_dtype type_of(const sti_adapter_entry *e, const store_as *t)
{
    size_t bytes;
    if (e->n_dims == 1) return STI_F32;
    if (e->kind != STI_TRAINED_GATE) return t->other;
    /* Rows that do not divide into blocks. */
    return sti_dtype_bytes(t->gate, (uint64_t)e->dim[1], &bytes) ? t->gate : STI_F16;
}

static still_status list_all(const sti_export *x, const store_as *as,
                             sti_export_list *l, still_error *err)
{
    for (size_t i = 0; i < x->trained->n_entries; i++) {
        const sti_adapter_entry *e = &x->trained->entry[i];
        sti_export_tensor t = {.type = type_of(e, as)};
        memcpy(t.name, e->name, sizeof e->name);
        STI_TRY(sti_export_trained(x, e, &t.src, err));
        STI_TRY(sti_export_add(l, &t, err));
    }
    return STILL_OK;
}

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* An adapter that lies with its base (an export) names it relative to itself; alone, it
 * needs the base's path. */
static still_status write_spec(const sti_export *x, sti_adapter_spec *spec,
                               const char *folder, still_error *err)
{
    const bool with_base =
        !is_folder(x->p->adapter) || strcmp(x->spec.base_name, ".") == 0;
    const char *name = x->p->base_name ? x->p->base_name
                       : with_base     ? x->store.path
                                       : x->spec.base_name;
    *spec = x->spec;
    if (snprintf(spec->base_name, sizeof spec->base_name, "%s", name) >=
        (int)sizeof spec->base_name)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: the base model's name is longer than %zu bytes", name,
                        sizeof spec->base_name);
    return sti_adapter_write_spec(spec, folder, err);
}

static still_status write_files(sti_export *x, const sti_export_list *l,
                                const char *folder, still_error *err)
{
    static const char *const carried[] = {"README.md", "train.jsonl"};
    char path[STI_PATH_ROOM];
    sti_adapter_spec spec;
    STI_TRY(write_spec(x, &spec, folder, err));
    STI_TRY(sti_path_join(path, folder, STI_ADAPTER_SMALL, err));
    STI_TRY(sti_export_own_tensors(x, l, &spec, path, true, err));
    for (size_t i = 0; i < sizeof carried / sizeof *carried; i++)
        if (is_folder(x->p->adapter))
            STI_TRY(
                sti_export_copy(x->p->adapter, carried[i], folder, carried[i], err));
    return STILL_OK;
}

still_status sti_export_adapter(sti_export *x, const char *folder, still_error *err)
{
    store_as as;
    sti_export_list l = {0};
    if (!x->linearized)
        return sti_fail(err, STILL_E_ARG,
                        "%s: a plain model has no adapter to export; name one that "
                        "`still linearize` wrote",
                        x->store.path);
    STI_TRY(read_types(x->p->dtype, &as, err));
    still_status st = list_all(x, &as, &l, err);
    x->total = sti_export_bytes(&l);
    if (st == STILL_OK) st = write_files(x, &l, folder, err);
    sti_export_list_free(&l);
    return st;
}
