/* keep.c - what probes said of a model, kept in a file; see allocate.h.
 *
 *     {"format": "still-heads", "version": 1, "model": "02b5…", "seed": 0, "probes": 24,
 *      "layers": 30, "heads": 3, "gain": [0.01, …]}
 *
 * Gains depend on the model and the probes, not on the budget or the method, so one file
 * serves all of those. Whatever is not exactly as expected makes the file useless, and
 * nothing more: the probes are run again, and the file is replaced. */
#include <stdlib.h>
#include <string.h>

#include "allocate/allocate.h"
#include "base/buf.h"
#include "base/json.h"
#include "base/new_file.h"
#include "file/store.h"

/* Raise it when probes or their evaluation change: then old files are made again. */
enum { VERSION = 1 };
static const char FORMAT[] = "still-heads";

void sti_kept_name(const still_model *m, char out[STI_KEPT_NAME])
{
    unsigned char print[STI_FINGERPRINT];
    sti_model_fingerprint(m, false, print);
    sti_hex(print, sizeof print, out);
}

still_status sti_kept_path(const char *name, const still_allocate_params *p, char **out,
                           still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%.16s-%d-%llu.json", p->folder, name, p->probes,
                   (unsigned long long)p->seed);
    *out = path.p;
    if (!path.failed) return STILL_OK;
    sti_buf_free(&path);
    *out = NULL;
    return sti_fail_memory(err, p->folder, strlen(p->folder));
}

static bool says_text(const json_t *o, const char *key, const char *text)
{
    const char *found = json_string_value(json_object_get(o, key));
    return found && strcmp(found, text) == 0;
}
static bool says_int(const json_t *o, const char *key, uint64_t value)
{
    const json_t *v = json_object_get(o, key);
    return json_is_integer(v) && (uint64_t)json_integer_value(v) == value;
}

/* Whether the object says what a run of these probes on this model would write. */
static bool read_gains(const json_t *o, const char *name, const still_model *m,
                       const still_allocate_params *p, double *gain)
{
    const json_t *list = json_object_get(o, "gain");
    double sum = 0;
    if (!says_text(o, "format", FORMAT) || !says_int(o, "version", VERSION) ||
        !says_text(o, "model", name) || !says_int(o, "seed", p->seed) ||
        !says_int(o, "probes", (uint64_t)p->probes) ||
        !says_int(o, "layers", (uint64_t)m->cfg.layers) ||
        !says_int(o, "heads", (uint64_t)m->cfg.kv_heads) ||
        json_array_size(list) != (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads)
        return false;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        gain[i] = json_number_value(v);
        if (!json_is_number(v) || !(gain[i] >= 0 && gain[i] <= 1)) return false;
        sum += gain[i];
    }
    return sum > 0;
}

still_status sti_kept_read(const char *path, const char *name, const still_model *m,
                           const still_allocate_params *p, double *gain,
                           still_error *err)
{
    json_t *o;
    STI_TRY(sti_json_load(path, &o, err));
    const bool good = read_gains(o, name, m, p, gain);
    json_decref(o);
    if (good) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s: not what probes of this model say", path);
}

still_status sti_kept_write(const char *path, const char *name, const still_model *m,
                            const still_allocate_params *p, const double *gain,
                            still_error *err)
{
    const int n = m->cfg.layers * m->cfg.kv_heads;
    json_t *list = json_array();
    for (int i = 0; i < n; i++) sti_json_append(&list, json_real(gain[i]));
    json_t *o = json_pack("{s:s, s:i, s:s, s:I, s:i, s:i, s:i, s:o}", "format", FORMAT,
                          "version", VERSION, "model", name, "seed",
                          (json_int_t)p->seed, "probes", p->probes, "layers",
                          m->cfg.layers, "heads", m->cfg.kv_heads, "gain", list);
    char *text = sti_json_text(o, JSON_COMPACT); /* 17 digits: exact */
    json_decref(o);
    if (!text) return sti_fail_memory(err, path, (size_t)n * sizeof *gain);
    const still_status st = sti_write_file(path, text, strlen(text), err);
    free(text);
    return st;
}
