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
#include "base/sha256.h"
#include "model/adapter.h"
#include "model/sampling.h"

/* 1: nothing tells whether the tensors are those that were written. 2: their file has the
 * description, too, and a checksum of all of it. */
enum { VERSION = 2 };

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
    json_t *all = json_pack(
        "{s:s,s:i,s:{s:s,s:s},"
        "s:{s:s,s:i,s:i,s:i,s:s,s:i,s:i,s:s,s:s,s:s,s:s,s:b,s:b,s:i,s:i,s:I},"
        "s:{s:i,s:f,s:o}}",
        "format", "still-adapter", "version", VERSION, "base", "name", spec->base_name,
        "fingerprint", hex, "method", "name", m->name, "chunk", m->chunk, "select",
        m->select, "cap", m->cap, "caps", m->caps, "key_bits", m->key_bits,
        "value_bits", m->value_bits, "score", m->score, "heads",
        m->per_head ? "per-head" : "shared", "la_scale",
        m->window_scale ? "window" : "exact", "state", m->forget ? "none" : "linear",
        "gate", m->gate, "norm_map", m->norm_preserved, "first_layer", m->first_layer,
        "last_layer", m->last_layer, "seed", (json_int_t)m->seed, "lora", "rank",
        spec->lora.rank, "alpha", (double)spec->lora.alpha, "targets", targets);
    if (spec->has_sampling)
        sti_json_set(&all, "sampling", sti_sampling_to_json(&spec->sampling));
    return all;
}

static bool read_targets(const json_t *list, unsigned *out)
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
    return json_is_array(list);
}

/* The description being read: an object of it, and the file for errors. */
typedef struct part {
    const char *path;
    const json_t *o;
    still_error *err;
} part;

/* No setting of a method or an adapter is larger; each has limits of its own, which are
 * checked with the model. */
enum { MOST = 1 << 24 };

static still_status fail_key(const part *p, const char *key, const char *expected)
{
    return sti_fail(p->err, STILL_E_FORMAT, "%s: '%s' is missing or not %s", p->path,
                    key, expected);
}

static still_status take_part(const part *of, const char *key, part *out)
{
    *out = (part){of->path, json_object_get(of->o, key), of->err};
    return json_is_object(out->o) ? STILL_OK : fail_key(of, key, "an object");
}

static still_status take_text(const part *p, const char *key, char *out, size_t room)
{
    const char *text = json_string_value(json_object_get(p->o, key));
    if (text && snprintf(out, room, "%s", text) < (int)room) return STILL_OK;
    char expected[64];
    snprintf(expected, sizeof expected, "a string of less than %zu bytes", room);
    return fail_key(p, key, expected);
}

static still_status take_int(const part *p, const char *key, int lo, int hi, int *out)
{
    int64_t v = 0;
    STI_TRY(sti_json_int(p->path, p->o, key, lo, hi, &v, p->err));
    *out = (int)v;
    return STILL_OK;
}

static still_status take_bool(const part *p, const char *key, bool *out)
{
    const json_t *v = json_object_get(p->o, key);
    *out = json_is_true(v);
    return json_is_boolean(v) ? STILL_OK : fail_key(p, key, "true or false");
}

static still_status take_choice(const part *p, const char *key, const char *no,
                                const char *yes, bool *out)
{
    const char *text = json_string_value(json_object_get(p->o, key));
    *out = text && strcmp(text, yes) == 0;
    if (*out || (text && strcmp(text, no) == 0)) return STILL_OK;
    char expected[64];
    snprintf(expected, sizeof expected, "'%s' or '%s'", no, yes);
    return fail_key(p, key, expected);
}

static still_status take_method(const part *p, still_method *m)
{
    int64_t seed = 0;
    STI_TRY(take_text(p, "name", m->name, sizeof m->name));
    STI_TRY(take_int(p, "chunk", 0, MOST, &m->chunk));
    STI_TRY(take_int(p, "select", 0, MOST, &m->select));
    STI_TRY(take_int(p, "cap", STI_CAP_NONE, MOST, &m->cap));
    /* Settings that came later: adapters without them were trained without them. */
    if (json_object_get(p->o, "caps"))
        STI_TRY(take_text(p, "caps", m->caps, sizeof m->caps));
    if (json_object_get(p->o, "key_bits"))
        STI_TRY(take_int(p, "key_bits", 0, 32, &m->key_bits));
    if (json_object_get(p->o, "value_bits"))
        STI_TRY(take_int(p, "value_bits", 0, 32, &m->value_bits));
    if (json_object_get(p->o, "state"))
        STI_TRY(take_choice(p, "state", "linear", "none", &m->forget));
    STI_TRY(take_text(p, "score", m->score, sizeof m->score));
    STI_TRY(take_choice(p, "heads", "shared", "per-head", &m->per_head));
    STI_TRY(take_choice(p, "la_scale", "exact", "window", &m->window_scale));
    STI_TRY(take_bool(p, "gate", &m->gate));
    STI_TRY(take_bool(p, "norm_map", &m->norm_preserved));
    STI_TRY(take_int(p, "first_layer", 0, MOST, &m->first_layer));
    STI_TRY(take_int(p, "last_layer", -1, MOST, &m->last_layer));
    STI_TRY(sti_json_int(p->path, p->o, "seed", INT64_MIN, INT64_MAX, &seed, p->err));
    m->seed = (uint64_t)seed;
    return STILL_OK;
}

static still_status take_lora(const part *p, sti_lora_spec *out)
{
    double alpha = 0;
    STI_TRY(take_int(p, "rank", 0, MOST, &out->rank));
    STI_TRY(sti_json_real(p->path, p->o, "alpha", 0, 1e30, &alpha, p->err));
    out->alpha = (float)alpha;
    if (!read_targets(json_object_get(p->o, "targets"), &out->targets))
        return fail_key(p, "targets", "a list of projections");
    return STILL_OK;
}

static still_status spec_of_json(const json_t *j, const char *path,
                                 sti_adapter_spec *out, still_error *err)
{
    *out = (sti_adapter_spec){0};
    const part all = {path, j, err};
    part base, method, lora;
    const char *format = json_string_value(json_object_get(j, "format"));
    if (!format || strcmp(format, "still-adapter") != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: no still adapter: its format is '%s', expected "
                        "'still-adapter'",
                        path, format ? format : "");
    int64_t version;
    STI_TRY(sti_json_int(path, j, "version", 0, INT64_MAX, &version, err));
    if (version < 1 || version > VERSION)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: version %lld of the adapter format, this program reads 1 "
                        "to %d",
                        path, (long long)version, VERSION);
    out->version = (int)version;
    STI_TRY(take_part(&all, "base", &base));
    STI_TRY(take_part(&all, "method", &method));
    STI_TRY(take_part(&all, "lora", &lora));
    STI_TRY(take_text(&base, "name", out->base_name, sizeof out->base_name));
    if (!from_hex(json_string_value(json_object_get(base.o, "fingerprint")), out->base,
                  STI_FINGERPRINT))
        return fail_key(&base, "fingerprint", "64 hexadecimal digits");
    STI_TRY(take_method(&method, &out->method));
    const json_t *sampling = json_object_get(j, "sampling");
    out->has_sampling = json_is_object(sampling);
    sti_sampling_of_json(sampling, &out->sampling);
    return take_lora(&lora, &out->lora);
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

/* The description that the tensors' file has. */
static still_status read_inner(const sti_store *s, json_t **out, still_error *err)
{
    const sti_meta *meta = sti_meta_find(s, STI_ADAPTER_META);
    const json_t *text = json_object_get(s->st_meta, STI_ADAPTER_META);
    sti_str str = {json_string_value(text), json_string_length(text)};
    if (meta && meta->type == STI_META_STRING) str = *meta->str;
    if (!str.p)
        return sti_fail(err, STILL_E_FORMAT, "%s: has no '%s', so it is no adapter",
                        s->path, STI_ADAPTER_META);
    return sti_json_read(s->path, str.p, str.n, STI_JSON_OBJECT | STI_JSON_ONCE, out,
                         err);
}

static still_status open_gguf(const char *path, sti_store *s, sti_adapter_spec *spec,
                              still_error *err)
{
    json_t *j;
    STI_TRY(sti_adapter_open(path, s, err));
    STI_TRY(read_inner(s, &j, err));
    const still_status st = spec_of_json(j, path, spec, err);
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
    const size_t n = strlen(spec.base_name);
    if (n >= capacity)
        return sti_fail(
            err, STILL_E_LIMIT,
            "%s: the base model's name has %zu bytes, there is room for %zu", adapter,
            n, capacity);
    memcpy(name, spec.base_name, n + 1);
    return STILL_OK;
}

still_status sti_adapter_check_finite(const float *x, size_t n, const char *path,
                                      still_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return sti_fail(err, STILL_E_NUMERIC,
                            "%s: holds a number that is not finite", path);
    return STILL_OK;
}

/* The gate's low-rank addition, if it is to be merged. */
static void merge_gate(const sti_adapter *a, const sti_adapter_entry *e, float *gate)
{
    sti_lora_values add;
    if (!sti_adapter_low_rank(a, e->layer, STI_TARGET_GATE, &add)) return;
    for (int64_t i = 0; i < e->dim[0]; i++)
        sti_merge_row(&add, add.b + i * add.rank, e->dim[1], gate + i * e->dim[1]);
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
        merge_gate(a, e, wide);
        st = sti_adapter_check_finite(wide, e->n, t->path, err);
    }
    if (st == STILL_OK) {
        if (t->type == STI_Q8_0 && !a->merged) /* rounding twice could move it */
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
    float *low_rank = a->low_rank.p;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        const sti_tensor *t = sti_store_find(s, e->name);
        if (e->at != SIZE_MAX) {
            sti_dequant(t->type, t->data, a->value + e->at, (int64_t)e->n);
        } else if (e->kind != STI_TRAINED_GATE && !sti_adapter_is_map(e)) {
            sti_dequant(t->type, t->data, low_rank, (int64_t)e->n);
            low_rank += e->n;
        }
    }
    STI_TRY(sti_adapter_check_finite(a->low_rank.p, a->low_rank.bytes / sizeof(float),
                                     dir, err));
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (e->kind != STI_TRAINED_GATE) continue;
        if (e->at == SIZE_MAX)
            STI_TRY(bind_gate(a, e, sti_store_find(s, e->name), err));
        else
            merge_gate(a, e, a->value + e->at);
    }
    return sti_adapter_check_finite(a->value, a->n_values, dir, err);
}

/* ---- Maps that are read late --------------------------------------------- */

/* From the file into their block, in the order of their entries. */
static void fill_maps(sti_adapter *a)
{
    float *to = a->maps.p;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (!sti_adapter_is_map(e)) continue;
        const sti_tensor *t = sti_store_find(&a->file, e->name);
        sti_dequant(t->type, t->data, to, (int64_t)e->n);
        to += sti_adapter_room(e);
    }
}

/* Takes the file, looks at the maps once, and gives their pages and its own back. */
static still_status keep_file(sti_adapter *a, sti_store *s, const char *dir,
                              still_error *err)
{
    if (!a->maps.p) return STILL_OK;
    a->file = *s;
    *s = (sti_store){0};
    fill_maps(a);
    sti_sha256_of(a->maps.p, a->maps.bytes, a->maps_sum);
    const still_status st =
        sti_adapter_check_finite(a->maps.p, a->maps.bytes / sizeof(float), dir, err);
    sti_map_drop(a->maps.p, a->maps.bytes);
    for (size_t i = 0; i < a->file.n_maps; i++)
        sti_map_drop(a->file.map[i].data, a->file.map[i].size);
    return st;
}

void sti_adapter_need_maps(sti_adapter *a, const sti_attn_config *cfg, int64_t length)
{
    if (!a || !a->maps.p || a->maps_read || length <= sti_attn_unfolded(cfg)) return;
    fill_maps(a);
    sti_store_close(&a->file);
    a->maps_read = true;
}

/* Only folding reads the maps of the hybrid operator. A GPU has copies of its own. */
static bool may_be_late(const sti_adapter_home *home, const sti_adapter_spec *spec)
{
    sti_hybrid_settings usual;
    return home->be->host_memory && sti_hybrid_preset(spec->method.name, 1, &usual);
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

/* Whether still.json says what the tensors were written with, but for what users change:
 * the name of the base model, when they move it, and how to sample. */
static still_status compare(const char *dir, const sti_store *s, bool *same,
                            still_error *err)
{
    char path[STI_PATH_ROOM];
    json_t *outer, *inner = NULL;
    STI_TRY(sti_path_join(path, dir, STI_ADAPTER_CONFIG, err));
    STI_TRY(sti_json_load(path, &outer, err));
    const still_status st = read_inner(s, &inner, err);
    json_object_del(json_object_get(outer, "base"), "name");
    json_object_del(json_object_get(inner, "base"), "name");
    json_object_del(outer, "sampling");
    json_object_del(inner, "sampling");
    *same = json_equal(outer, inner);
    json_decref(outer);
    json_decref(inner);
    return st;
}

/* Since version 2: the tensors are those that were written, with these settings. */
static still_status check_sum(const sti_store *s, const char *dir,
                              const sti_adapter_spec *spec, still_error *err)
{
    bool sealed, same;
    STI_TRY(sti_store_verify(s, &sealed, err));
    if (!sealed && spec->version > 1)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: has no checksum, and adapters of version %d have one: it "
                        "is damaged",
                        s->path, spec->version);
    if (!sealed || is_file(dir)) return STILL_OK;
    STI_TRY(compare(dir, s, &same, err));
    if (!same)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s/%s: its settings are not those that %s was written with",
                        dir, STI_ADAPTER_CONFIG, s->path);
    return STILL_OK;
}

still_status sti_adapter_open_checked(const char *path, sti_store *s,
                                      sti_adapter_spec *spec, still_error *err)
{
    STI_TRY(is_file(path) ? open_gguf(path, s, spec, err)
                          : open_folder(path, s, spec, err));
    return check_sum(s, path, spec, err);
}

still_status sti_adapter_read(const sti_adapter_home *home, const char *dir,
                              bool quantized, bool merge, bool late_maps,
                              sti_adapter **out, still_error *err)
{
    *out = NULL;
    sti_store s = {0};
    sti_adapter_spec spec;
    sti_adapter *a = NULL;
    still_status st = sti_adapter_open_checked(dir, &s, &spec, err);
    if (st == STILL_OK) st = check_shapes(home, &spec, &s, dir, err);
    if (st == STILL_OK)
        st = sti_adapter_make(home, &spec, !quantized, merge,
                              late_maps && may_be_late(home, &spec), &a, err);
    if (st == STILL_OK) st = fill(a, &s, dir, err);
    if (st == STILL_OK) st = keep_file(a, &s, dir, err);
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

/* The description as text; NULL: no memory. */
static char *text_of(const sti_adapter_spec *spec, size_t flags)
{
    json_t *j = sti_adapter_to_json(spec);
    char *text = sti_json_text(j, flags);
    json_decref(j);
    return text;
}

still_status sti_adapter_write_spec(const sti_adapter_spec *spec, const char *dir,
                                    still_error *err)
{
    char path[STI_PATH_ROOM];
    STI_TRY(sti_path_join(path, dir, STI_ADAPTER_CONFIG, err));
    char *text = text_of(spec, JSON_INDENT(2));
    if (!text) return sti_fail_memory(err, path, 0);
    still_status st = sti_write_text(path, text, err);
    free(text);
    return st;
}

still_status sti_adapter_writer(const sti_adapter_spec *spec, const char *path,
                                bool gguf, sti_writer **out, still_error *err)
{
    *out = NULL;
    char *text = text_of(spec, JSON_COMPACT);
    json_t *meta = text ? json_pack("{s:s}", STI_ADAPTER_META, text) : NULL;
    still_status st = !meta  ? sti_fail_memory(err, path, 0)
                      : gguf ? sti_writer_gguf(path, out, err)
                             : sti_writer_safetensors(path, meta, out, err);
    if (st == STILL_OK) sti_writer_seal(*out);
    if (st == STILL_OK && gguf) {
        st = sti_writer_meta_str(*out, "general.architecture", "still", err);
        if (st == STILL_OK) st = sti_writer_meta_str(*out, STI_ADAPTER_META, text, err);
        if (st != STILL_OK) {
            sti_writer_abort(*out);
            *out = NULL;
        }
    }
    json_decref(meta);
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
    STI_TRY(sti_adapter_writer(&a->spec, path, false, &w, err));
    still_status st = write_tensors(a, w, err);
    if (st != STILL_OK) {
        sti_writer_abort(w);
        return st;
    }
    STI_TRY(sti_writer_finish(w, err));
    return sti_adapter_write_spec(&a->spec, dir, err);
}
