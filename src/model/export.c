/* export.c - still_export: opens what is to be exported, has a format write it into a
 * temporary folder beside the target, and moves the result into place.
 *
 * No backend is involved: weights are read from their files, never run. */
#include "model/export.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/sized.h"

typedef struct format {
    const char *name;
    bool file; /* NAME.gguf instead of a folder */
    still_status (*write)(sti_export *x, const char *folder, still_error *err);
} format;

static const format formats[] = {{"gguf", true, sti_export_gguf},
                                 {"safetensors", false, sti_export_safetensors},
                                 {"peft", false, sti_export_peft},
                                 {"adapter", false, sti_export_adapter}};

/* ---- Opening ------------------------------------------------------------- */

static void fingerprint_of(const sti_store *s, unsigned char out[STI_FINGERPRINT])
{
    const still_model shell = {.store = *s};
    sti_model_fingerprint(&shell, false, out);
}

static still_status open_adapter(sti_export *x, still_error *err)
{
    const char *path = x->p->adapter;
    unsigned char base[STI_FINGERPRINT];
    const sti_adapter_home home = {.cfg = &x->cfg};
    if (!path) return STILL_OK;
    STI_TRY(sti_adapter_read_spec(path, &x->spec, err));
    fingerprint_of(&x->store, base);
    if (memcmp(base, x->spec.base, sizeof base) != 0)
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: the adapter was trained for another base model ('%s') than "
            "%s",
            path, x->spec.base_name, x->store.path);
    STI_TRY(sti_adapter_open(path, &x->adapter, err));
    STI_TRY(sti_adapter_outline(&home, &x->spec, &x->trained, err));
    x->linearized = true;
    return STILL_OK;
}

static still_status open_all(sti_export *x, const char *model, still_error *err)
{
    STI_TRY(sti_store_open(model, &x->store, err));
    STI_TRY(sti_config_read(&x->store, &x->cfg, err));
    STI_TRY(sti_tokenizer_from_store(&x->store, &x->tokenizer, err));
    return open_adapter(x, err);
}

static void close_all(sti_export *x)
{
    sti_adapter_free(x->trained);
    sti_store_close(&x->adapter);
    still_tokenizer_free(x->tokenizer);
    sti_config_free(&x->cfg);
    sti_store_close(&x->store);
    free((void *)x->rope[0].data);
    free((void *)x->rope[1].data);
    free(x->path);
}

still_status sti_export_own_spec(const sti_export *x, const char *merged,
                                 const char *name, sti_adapter_spec *out,
                                 still_error *err)
{
    sti_store s = {0};
    sti_config c = {0};
    *out = x->spec;
    out->lora = (sti_lora_spec){0};
    snprintf(out->base_name, sizeof out->base_name, "%s", name);
    still_status st = sti_store_open(merged, &s, err);
    if (st == STILL_OK) st = sti_config_read(&s, &c, err); /* takes matrices apart */
    if (st == STILL_OK) fingerprint_of(&s, out->base);
    sti_config_free(&c);
    sti_store_close(&s);
    return st;
}

/* ---- Copying ------------------------------------------------------------- */

still_status sti_export_copy(const char *from_folder, const char *from,
                             const char *folder, const char *to, still_error *err)
{
    char source[STI_PATH_ROOM], path[STI_PATH_ROOM];
    struct stat info;
    sti_map m;
    STI_TRY(sti_path_join(source, from_folder, from, err));
    STI_TRY(sti_path_join(path, folder, to, err));
    if (stat(source, &info) != 0 || info.st_size == 0 || access(path, F_OK) == 0)
        return STILL_OK;
    STI_TRY(sti_map_open(source, &m, err));
    const still_status st = sti_write_file(path, m.data, m.size, err);
    sti_map_close(&m);
    return st;
}

/* ---- Names --------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), k = strlen(end);
    return n > k && strcmp(text + n - k, end) == 0;
}

static still_status must_not_exist(const char *path, still_error *err)
{
    struct stat info;
    if (lstat(path, &info) != 0) return STILL_OK;
    return sti_fail(err, STILL_E_IO, "%s: exists already; export writes to a new name",
                    path);
}

/* NAME.still.gguf of NAME.gguf. */
static still_status twin_of(const char *path, char out[STI_PATH_ROOM], still_error *err)
{
    const int stem = (int)(strlen(path) - strlen(".gguf"));
    if (snprintf(out, STI_PATH_ROOM, "%.*s.still.gguf", stem, path) >= STI_PATH_ROOM)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", path);
    return STILL_OK;
}

static still_status check_path(const sti_export *x, const format *f, still_error *err)
{
    char twin[STI_PATH_ROOM];
    STI_TRY(must_not_exist(x->path, err));
    if (!f->file) return STILL_OK;
    if (!ends_with(x->path, ".gguf") || ends_with(x->path, ".still.gguf"))
        return sti_fail(err, STILL_E_ARG,
                        "%s: a GGUF file must be called NAME.gguf (NAME.still.gguf is "
                        "for what goes beside it)",
                        x->path);
    STI_TRY(twin_of(x->path, twin, err));
    return must_not_exist(twin, err);
}

/* ---- Moving into place --------------------------------------------------- */

/* Removes a folder that holds nothing but files. */
static void remove_folder(const char *folder)
{
    DIR *d = opendir(folder);
    char path[STI_PATH_ROOM];
    for (const struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            sti_path_join(path, folder, e->d_name, NULL) == STILL_OK)
            unlink(path);
    if (d) closedir(d);
    rmdir(folder);
}

static still_status move(const char *from, const char *to, still_error *err)
{
    STI_TRY(must_not_exist(to, err)); /* it may have come meanwhile */
    if (rename(from, to) == 0) return STILL_OK;
    return sti_fail(err, STILL_E_IO, "%s: cannot rename to it: %s", to,
                    strerror(errno));
}

/* The model last, so that its twin is there once it is. */
static still_status move_files(const sti_export *x, const char *temp, still_error *err)
{
    char from[STI_PATH_ROOM], twin[STI_PATH_ROOM];
    STI_TRY(twin_of(x->path, twin, err));
    STI_TRY(sti_path_join(from, temp, STI_EXPORT_GGUF_OWN, err));
    if (x->linearized) STI_TRY(move(from, twin, err));
    still_status st = sti_path_join(from, temp, STI_EXPORT_GGUF, err);
    if (st == STILL_OK) st = move(from, x->path, err);
    if (st != STILL_OK && x->linearized) unlink(twin);
    return st;
}

static still_status write_and_move(sti_export *x, const format *f, still_error *err)
{
    char *temp;
    STI_TRY(sti_new_folder(x->path, &temp, err));
    still_status st = f->write(x, temp, err);
    if (st == STILL_OK)
        st = f->file ? move_files(x, temp, err) : move(temp, x->path, err);
    if (st != STILL_OK || f->file) remove_folder(temp);
    if (st == STILL_OK) sti_sync_folder_of(x->path);
    free(temp);
    return st;
}

still_status still_export(const char *model, const still_export_params *params,
                          still_error *err)
{
    const format *f = NULL;
    still_export_params own;
    const still_export_params *p = &own;
    STI_TRY(STI_TAKE(&own, params, still_export_params, err));
    if (!model || !p->format || !p->path || !*p->path)
        return sti_fail(err, STILL_E_ARG,
                        "export needs a model, a format and a path to write");
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, p->format) == 0) f = &formats[i];
    if (!f)
        return sti_fail(err, STILL_E_ARG,
                        "export format '%s' is not known (gguf, safetensors, peft, "
                        "adapter)",
                        p->format);
    size_t n = strlen(p->path);
    while (n > 1 && p->path[n - 1] == '/') n--;
    sti_export x = {.p = p, .path = sti_strndup(p->path, n)};
    still_status st = x.path ? check_path(&x, f, err) : sti_fail_memory(err, "path", n);
    if (st == STILL_OK) st = open_all(&x, model, err);
    if (st == STILL_OK) st = write_and_move(&x, f, err);
    close_all(&x);
    return st;
}
