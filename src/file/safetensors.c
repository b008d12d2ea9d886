/* safetensors.c - reads one safetensors file in place.
 *
 *   u64 n, n bytes of JSON, data
 *   JSON: {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ..,
 *          "__metadata__": {"key": "string"}}
 *
 * As the format demands, the tensors fill the data without holes or overlaps. Numbers
 * are read in place and must be aligned to their size; writers do that, but the format
 * does not require it, so a file whose data starts at an unaligned address is copied
 * once into memory. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "file/parse.h"

enum { MAX_HEADER = 100 << 20, ALIGNMENT = 8 };

static const struct {
    const char *name;
    sti_dtype type;
} DTYPES[] = {{"F32", STI_F32}, {"F16", STI_F16}, {"BF16", STI_BF16},
              {"F64", STI_F64}, {"I32", STI_I32}, {"I64", STI_I64}};

static const sti_dtype_info *find_dtype(const char *name)
{
    for (size_t i = 0; name && i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (strcmp(DTYPES[i].name, name) == 0)
            return sti_dtype_find((int)DTYPES[i].type);
    return NULL;
}

static still_status read_shape(sti_tensor *t, const json_t *shape, still_error *err)
{
    size_t n = json_array_size(shape);
    if (!json_is_array(shape))
        return sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' has no shape", t->path,
                        t->name);
    if (n > 4)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s' has %zu dimensions, expected at most 4",
                        t->path, t->name, n);
    t->n_dims = (int)n;
    for (size_t i = 0; i < 4; i++) {
        const json_t *v = i < n ? json_array_get(shape, i) : NULL;
        t->dim[i] = v ? json_integer_value(v) : 1;
        if (t->dim[i] < 1)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s': dimension %zu is not a positive integer",
                            t->path, t->name, i);
    }
    return STILL_OK;
}

/* One entry of the header; base and capacity are the data and its size. */
static still_status read_entry(sti_tensor *t, const json_t *v,
                               const unsigned char *base, size_t capacity,
                               still_error *err)
{
    const char *dtype = json_string_value(json_object_get(v, "dtype"));
    const sti_dtype_info *info = find_dtype(dtype);
    if (!info)
        return sti_fail(
            err, dtype ? STILL_E_UNSUPPORTED : STILL_E_FORMAT,
            "%s: tensor '%s' has dtype %.32s, expected F32, F16, BF16, F64, "
            "I32 or I64",
            t->path, t->name, dtype ? dtype : "missing");
    t->type = info->type;
    STI_TRY(read_shape(t, json_object_get(v, "shape"), err));
    const json_t *offsets = json_object_get(v, "data_offsets");
    const json_t *from = json_array_get(offsets, 0), *to = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(from) || !json_is_integer(to))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s': data_offsets are not two integers", t->path,
                        t->name);
    long long begin = json_integer_value(from), end = json_integer_value(to);
    if (begin < 0 || begin > end || (unsigned long long)end > capacity)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' lies at data bytes %lld to %lld, file has %zu "
                        "(truncated?)",
                        t->path, t->name, begin, end, capacity);
    if (!sti_tensor_size(t->type, t->n_dims, t->dim, &t->bytes) ||
        t->bytes != (size_t)(end - begin))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' has %lld bytes, its shape in %s needs another "
                        "number",
                        t->path, t->name, end - begin, info->name);
    if (begin % info->bytes != 0)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "%s: tensor '%s' begins at data byte %lld, not a multiple of %d "
            "(%s); write the file again with a current writer",
            t->path, t->name, begin, info->bytes, info->name);
    t->data = base + begin;
    return STILL_OK;
}

static int by_place(const void *a, const void *b)
{
    const unsigned char *x = ((const sti_tensor *)a)->data;
    const unsigned char *y = ((const sti_tensor *)b)->data;
    return (x > y) - (x < y);
}

/* Tensors of one file must tile its data. Sorts them by offset. */
static still_status check_tiling(sti_tensor *t, size_t n, const sti_map *map,
                                 const unsigned char *base, still_error *err)
{
    const unsigned char *at = base, *end = map->data + map->size;
    if (n) qsort(t, n, sizeof *t, by_place);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *p = t[i].data;
        if (p != at)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s' begins at data byte %zu, the one before "
                            "ends at %zu",
                            map->path, t[i].name, (size_t)(p - base),
                            (size_t)(at - base));
        at += t[i].bytes;
    }
    if (at != end)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %zu bytes of data follow the last tensor", map->path,
                        (size_t)(end - at));
    return STILL_OK;
}

static still_status read_entries(sti_store *s, size_t which, json_t *header,
                                 size_t header_bytes, still_error *err)
{
    const sti_map *map = &s->map[which];
    const unsigned char *base = map->data + 8 + header_bytes;
    size_t capacity = map->size - 8 - header_bytes, first = s->n_tensors;
    STI_TRY(sti_store_reserve(s, json_object_size(header), err));
    const char *name;
    json_t *v;
    json_object_foreach(header, name, v)
    {
        if (strcmp(name, "__metadata__") == 0) continue;
        sti_tensor *t = &s->tensor[s->n_tensors];
        t->name = sti_strdup(name);
        if (!t->name) return sti_fail_memory(err, map->path, strlen(name) + 1);
        s->n_tensors++; /* from here on the store frees it */
        t->path = map->path;
        STI_TRY(read_entry(t, v, base, capacity, err));
    }
    return check_tiling(s->tensor + first, s->n_tensors - first, map, base, err);
}

/* Loads the JSON; *n is its length in the file. */
static still_status read_header(const sti_map *map, json_t **out, size_t *n,
                                still_error *err)
{
    uint64_t length;
    if (map->size < 10)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %zu bytes are too few for a safetensors file", map->path,
                        map->size);
    memcpy(&length, map->data, sizeof length);
    if (length < 2 || length > map->size - 8)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: header of %llu bytes, file has %zu after its first 8 "
                        "(truncated?)",
                        map->path, (unsigned long long)length, map->size - 8);
    if (length > MAX_HEADER)
        return sti_fail(err, STILL_E_LIMIT, "%s: header of %llu bytes, more than %d",
                        map->path, (unsigned long long)length, MAX_HEADER);
    *n = (size_t)length;
    const still_status st = sti_json_read("header", (const char *)map->data + 8, *n,
                                          STI_JSON_OBJECT | STI_JSON_ONCE, out, err);
    return st == STILL_OK ? st : sti_fail_prefix(err, st, "%s", map->path);
}

still_status sti_parse_safetensors(sti_store *s, sti_map map, json_t **metadata,
                                   still_error *err)
{
    json_t *header = NULL;
    size_t n = 0, which = s->n_maps;
    STI_TRY(sti_store_add_map(s, &map, err));
    still_status status = read_header(&s->map[which], &header, &n, err);
    if (status == STILL_OK && n % ALIGNMENT != 0)
        status = sti_map_shift(&s->map[which], ALIGNMENT - n % ALIGNMENT, err);
    if (status == STILL_OK) status = read_entries(s, which, header, n, err);
    if (status == STILL_OK && metadata)
        *metadata = json_incref(json_object_get(header, "__metadata__"));
    json_decref(header);
    return status;
}
