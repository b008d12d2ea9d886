/* adapter_file.c - adapters on disk: a folder with still.json and adapter.safetensors
 * or adapter.gguf, or one GGUF file that holds both (NAME.still.gguf, as `still export`
 * writes it beside a merged model).
 *
 * Nothing in a file is believed: the settings go through the same checks as a user's,
 * shapes must be those the settings ask for, and the base model's fingerprint must be
 * that of the model at hand. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "model/adapter.h"

enum { VERSION = 1 };

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

bool sti_adapter_is(const char *dir)
{
    char path[STI_PATH_ROOM];
    return sti_path_join(path, dir, STI_ADAPTER_CONFIG, NULL) == STILL_OK &&
           is_file(path);
}

/* ---- The description ----------------------------------------------------- */

static bool from_hex(const char *hex, unsigned char *out, size_t n)
{
    if (!hex || strlen(hex) != 2 * n) return false;
    for (size_t i = 0; i < n; i++) {
        const char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        char *end;
        out[i] = (unsigned char)strtoul(digits, &end, 16);
        if (end != digits + 2) return false;
    }
    return true;
}

json_t *sti_adapter_to_json(const sti_adapter_spec *spec)
{
    char hex[2 * STI_FINGERPRINT + 1];
    sti_hex(spec->base, STI_FINGERPRINT, hex);
    const still_method *m = &spec->method;
    json_t *targets = json_array();
    for (int t = 0; t < STI_TARGETS; t++)
        if (spec->lora.rank > 0 && (spec->lora.targets >> t & 1))
            sti_json_append(&targets, json_string(sti_target_name((sti_target)t)));
    return json_pack("{s:s,s:i,s:{s:s,s:s},"
                     "s:{s:s,s:i,s:i,s:i,s:s,s:i,s:i,s:s,s:s,s:s,s:b,s:b,s:i,s:i,s:I},"
                     "s:{s:i,s:f,s:o}}",
                     "format", "still-adapter", "version", VERSION, "base", "name",
                     spec->base_name, "fingerprint", hex, "method", "name", m->name,
                     "chunk", m->chunk, "select", m->select, "cap", m->cap, "caps",
                     m->caps, "key_bits", m->key_bits, "value_bits", m->value_bits,
                     "score", m->score, "heads", m->per_head ? "per-head" : "shared",
                     "la_scale", m->window_scale ? "window" : "exact", "gate", m->gate,
                     "norm_map", m->norm_preserved, "first_layer", m->first_layer,
                     "last_layer", m->last_layer, "seed", (json_int_t)m->seed, "lora",
                     "rank", spec->lora.rank, "alpha", (double)spec->lora.alpha,
                     "targets", targets);
}

static bool read_choice(const char *text, const char *no, const char *yes, bool *out)
{
    *out = strcmp(text, yes) == 0;
    return *out || strcmp(text, no) == 0;
}

static bool read_targets(json_t *list, unsigned *out)
{
    *out = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        int t = 0;
        while (name && t < STI_TARGETS &&
               strcmp(name, sti_target_name((sti_target)t)) != 0)
            t++;
        if (!name || t == STI_TARGETS) return false;
        *out |= 1u << t;
    }
    return true;
}

static still_status spec_of_json(json_t *j, const char *path, sti_adapter_spec *out,
                                 still_error *err)
{
    *out = (sti_adapter_spec){0};
    still_method *m = &out->method;
    const char *format = NULL, *base_name = NULL, *hex = NULL, *name = NULL,
               *score = NULL, *heads = NULL, *scale = NULL, *caps = "";
    int version = 0, gate = 0, norm = 0;
    json_int_t seed = 0;
    double alpha = 0;
    json_t *targets = NULL;
    json_error_t je;
    if (json_unpack_ex(j, &je, 0, "{s:s,s:i}", "format", &format, "version", &version))
        return sti_fail(err, STILL_E_FORMAT, "%s: no still adapter (%s)", path,
                        je.text);
    if (strcmp(format, "still-adapter") != 0 || version != VERSION)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: format '%s' version %d, expected still-adapter %d", path,
                        format, version, VERSION);
    if (json_unpack_ex(
            j, &je, 0,
            "{s:{s:s,s:s},s:{s:s,s:i,s:i,s:i,s?s,s?i,s?i,s:s,s:s,s:s,s:b,s:b,s:i,s:i,"
            "s:I},"
            "s:{s:i,s:F,s:o}}",
            "base", "name", &base_name, "fingerprint", &hex, "method", "name", &name,
            "chunk", &m->chunk, "select", &m->select, "cap", &m->cap, "caps", &caps,
            "key_bits", &m->key_bits, "value_bits", &m->value_bits, "score", &score,
            "heads", &heads, "la_scale", &scale, "gate", &gate, "norm_map", &norm,
            "first_layer", &m->first_layer, "last_layer", &m->last_layer, "seed", &seed,
            "lora", "rank", &out->lora.rank, "alpha", &alpha, "targets", &targets))
        return sti_fail(err, STILL_E_FORMAT, "%s: %s", path, je.text);
    bool fits =
        snprintf(m->name, sizeof m->name, "%s", name) < (int)sizeof m->name &&
        snprintf(m->score, sizeof m->score, "%s", score) < (int)sizeof m->score &&
        snprintf(m->caps, sizeof m->caps, "%s", caps) < (int)sizeof m->caps &&
        snprintf(out->base_name, sizeof out->base_name, "%s", base_name) <
            (int)sizeof out->base_name;
    if (!fits || !from_hex(hex, out->base, STI_FINGERPRINT) ||
        !read_choice(heads, "shared", "per-head", &m->per_head) ||
        !read_choice(scale, "exact", "window", &m->window_scale) ||
        !read_targets(targets, &out->lora.targets) || !isfinite(alpha))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: a name, fingerprint or setting in it is not one still "
                        "knows",
                        path);
    m->gate = gate;
    m->norm_preserved = norm;
    m->seed = (uint64_t)seed;
    out->lora.alpha = (float)alpha;
    return STILL_OK;
}

/* ---- Reading ------------------------------------------------------------- */

still_status sti_adapter_open(const char *path, sti_store *out, still_error *err)
{
    char tensors[STI_PATH_ROOM], small[STI_PATH_ROOM];
    if (is_file(path)) return sti_store_open(path, out, err);
    STI_TRY(sti_path_join(tensors, path, STI_ADAPTER_TENSORS, err));
    STI_TRY(sti_path_join(small, path, STI_ADAPTER_SMALL, err));
    const bool use_small = !is_file(tensors) && is_file(small);
    return sti_store_open(use_small ? small : tensors, out, err);
}

static still_status open_gguf(const char *path, sti_store *s, sti_adapter_spec *spec,
                              still_error *err)
{
    STI_TRY(sti_adapter_open(path, s, err));
    const sti_meta *meta = sti_meta_find(s, STI_ADAPTER_META);
    if (!meta || meta->type != STI_META_STRING)
        return sti_fail(err, STILL_E_FORMAT, "%s: has no '%s', so it is no adapter",
                        path, STI_ADAPTER_META);
    json_t *j;
    STI_TRY(sti_json_read(path, meta->str->p, meta->str->n,
                          STI_JSON_OBJECT | STI_JSON_ONCE, &j, err));
    still_status st = spec_of_json(j, path, spec, err);
    json_decref(j);
    return st;
}

static still_status open_folder(const char *dir, sti_store *s, sti_adapter_spec *spec,
                                still_error *err)
{
    char path[STI_PATH_ROOM];
    json_t *j;
    STI_TRY(sti_path_join(path, dir, STI_ADAPTER_CONFIG, err));
    STI_TRY(sti_json_load(path, &j, err));
    still_status st = spec_of_json(j, path, spec, err);
    json_decref(j);
    if (st == STILL_OK && s) st = sti_adapter_open(dir, s, err);
    return st;
}

still_status sti_adapter_read_spec(const char *dir, sti_adapter_spec *out,
                                   still_error *err)
{
    if (!is_file(dir)) return open_folder(dir, NULL, out, err);
    sti_store s = {0};
    still_status st = open_gguf(dir, &s, out, err);
    sti_store_close(&s);
    return st;
}

still_status still_adapter_base(const char *adapter, char *name, size_t capacity,
                                still_error *err)
{
    sti_adapter_spec spec;
    STI_TRY(sti_adapter_read_spec(adapter, &spec, err));
    if (snprintf(name, capacity, "%s", spec.base_name) >= (int)capacity)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: the base model's name is longer than "
                        "%zu bytes",
                        adapter, capacity);
    return STILL_OK;
}

static still_status check_finite(const float *x, size_t n, const char *path,
                                 still_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return sti_fail(err, STILL_E_NUMERIC,
                            "%s: holds a number that is not finite", path);
    return STILL_OK;
}

/* A gate matrix from the file in 8 bits: beside 4-bit weights, floats would be most of
 * what a decoded token reads. */
static still_status bind_gate(sti_adapter *a, const sti_adapter_entry *e,
                              const sti_tensor *t, still_error *err)
{
    size_t bytes;
    if (!sti_dtype_bytes(STI_Q8_0, (uint64_t)e->n, &bytes))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' has rows of %lld, which "
                        "are no whole blocks",
                        t->path, t->name, (long long)e->dim[1]);
    float *wide = sti_alloc(e->n, sizeof *wide);
    void *packed = aligned_alloc(64, (bytes + 63) / 64 * 64);
    still_status st = STILL_OK;
    if (!wide || !packed) st = sti_fail_memory(err, t->path, bytes);
    if (st == STILL_OK) {
        sti_dequant(t->type, t->data, wide, (int64_t)e->n);
        st = check_finite(wide, e->n, t->path, err);
    }
    if (st == STILL_OK) {
        if (t->type == STI_Q8_0) /* as it is: rounding twice could move it */
            memcpy(packed, t->data, bytes);
        else
            sti_quant(STI_Q8_0, wide, packed, (int64_t)e->n);
        sti_adapter_matrix *m = &a->layer[e->layer].gate;
        st = sti_adapter_matrix_bind(a, e, STI_Q8_0, packed, bytes, m, err);
        if (st == STILL_OK && m->w.own.bytes == 0) {
            m->owned = packed; /* the backend multiplies straight from it */
            packed = NULL;
        }
        a->resident += bytes;
    }
    free(wide);
    free(packed);
    sti_map_drop(t->data, t->bytes);
    return st;
}

static still_status fill(sti_adapter *a, const sti_store *s, const char *dir,
                         still_error *err)
{
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        const sti_tensor *t = sti_store_find(s, e->name);
        if (e->at == SIZE_MAX)
            STI_TRY(bind_gate(a, e, t, err));
        else
            sti_dequant(t->type, t->data, a->value + e->at, (int64_t)e->n);
    }
    return check_finite(a->value, a->n_values, dir, err);
}

/* Whether the file has what the description asks for, before there is memory for it. */
static still_status check_shapes(const sti_adapter_home *home,
                                 const sti_adapter_spec *spec, const sti_store *s,
                                 const char *dir, still_error *err)
{
    sti_adapter *outline;
    STI_TRY(sti_adapter_outline(home, spec, &outline, err));
    still_status st = STILL_OK;
    for (size_t i = 0; i < outline->n_entries && st == STILL_OK; i++) {
        const sti_adapter_entry *e = &outline->entry[i];
        const sti_tensor *t = sti_store_find(s, e->name);
        st = t ? sti_adapter_check(e, t, err)
               : sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is missing", dir,
                          e->name);
    }
    sti_adapter_free(outline);
    return st;
}

still_status sti_adapter_read(const sti_adapter_home *home, const char *dir,
                              bool quantized, sti_adapter **out, still_error *err)
{
    *out = NULL;
    sti_store s = {0};
    sti_adapter_spec spec;
    sti_adapter *a = NULL;
    still_status st = is_file(dir) ? open_gguf(dir, &s, &spec, err)
                                   : open_folder(dir, &s, &spec, err);
    if (st == STILL_OK) st = check_shapes(home, &spec, &s, dir, err);
    if (st == STILL_OK) st = sti_adapter_make(home, &spec, !quantized, &a, err);
    if (st == STILL_OK) st = fill(a, &s, dir, err);
    if (st == STILL_OK) st = sti_adapter_bind(a, false, err);
    sti_store_close(&s);
    if (st != STILL_OK) {
        sti_adapter_free(a);
        return st;
    }
    *out = a;
    return STILL_OK;
}

/* ---- Writing ------------------------------------------------------------- */

still_status sti_adapter_write_spec(const sti_adapter_spec *spec, const char *dir,
                                    still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, dir, STI_ADAPTER_CONFIG, err));
    json_t *j = sti_adapter_to_json(spec);
    char *text = j ? json_dumps(j, JSON_INDENT(2)) : NULL;
    json_decref(j);
    if (!text) return sti_fail_memory(err, path, 0);
    still_status st = sti_write_text(path, text, err);
    free(text);
    return st;
}

static still_status write_tensors(const sti_adapter *a, sti_writer *w, still_error *err)
{
    for (size_t i = 0; i < a->n_entries; i++)
        STI_TRY(sti_writer_tensor(w, a->entry[i].name, STI_F32, a->entry[i].n_dims,
                                  a->entry[i].dim, err));
    for (size_t i = 0; i < a->n_entries; i++)
        STI_TRY(sti_writer_data(w, a->value + a->entry[i].at,
                                a->entry[i].n * sizeof(float), err));
    return STILL_OK;
}

still_status sti_adapter_write(const sti_adapter *a, const char *dir, still_error *err)
{
    char path[STI_PATH_ROOM];
    sti_writer *w;
    STI_TRY(sti_path_join(path, dir, STI_ADAPTER_TENSORS, err));
    STI_TRY(sti_writer_safetensors(path, NULL, &w, err));
    still_status st = write_tensors(a, w, err);
    if (st != STILL_OK) {
        sti_writer_abort(w);
        return st;
    }
    STI_TRY(sti_writer_finish(w, err));
    return sti_adapter_write_spec(&a->spec, dir, err);
}
