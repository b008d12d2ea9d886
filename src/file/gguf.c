/* gguf.c - reads GGUF versions 2 and 3, little-endian, in place.
 *
 *   "GGUF"  u32 version  u64 tensors  u64 pairs
 *   pairs:    string key, u32 type, value       (string: u64 length, bytes)
 *   tensors:  string name, u32 n_dims, u64 dim[n_dims] innermost first, u32 type,
 *             u64 offset into the data
 *   padding to general.alignment (32 unless given), then the data
 *
 * Nothing in the file is trusted: `take` is the only way forward, and a count is
 * accepted only if the rest of the file could hold that many of the smallest entry.
 * Memory is therefore at most a small multiple of the file's header. Strings stay in
 * the mapping, so a vocabulary of 128K tokens is one array, read in milliseconds. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "file/parse.h"

enum {
    MIN_PAIR = 8 + 1 + 4 + 1,           /* key of one byte, value of one byte */
    MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8, /* name of one byte, one dim */
    MAX_KEY = 65535,
    MAX_NAME = 1024,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 20
};

typedef struct reader {
    const char *path;
    const unsigned char *data;
    size_t at, size;
    still_error *err;
} reader;

#define FAIL(r, code, fmt, ...)                                                        \
    sti_fail((r)->err, code, "%s: " fmt, (r)->path, __VA_ARGS__)

/* The next n bytes, or NULL if the file ends before them. */
static const unsigned char *take(reader *r, uint64_t n)
{
    if (n > r->size - r->at) return NULL;
    const unsigned char *p = r->data + r->at;
    r->at += (size_t)n;
    return p;
}

static still_status truncated(const reader *r, const char *what)
{
    return FAIL(r, STILL_E_FORMAT,
                "%s at byte %zu goes past the end of %zu bytes "
                "(truncated?)",
                what, r->at, r->size);
}

static still_status take_u32(reader *r, const char *what, uint32_t *out)
{
    const unsigned char *p = take(r, sizeof *out);
    if (!p) return truncated(r, what);
    memcpy(out, p, sizeof *out);
    return STILL_OK;
}

static still_status take_u64(reader *r, const char *what, uint64_t *out)
{
    const unsigned char *p = take(r, sizeof *out);
    if (!p) return truncated(r, what);
    memcpy(out, p, sizeof *out);
    return STILL_OK;
}

/* A count of entries of at least `min` bytes each. */
static still_status take_count(reader *r, const char *what, size_t min, uint64_t *out)
{
    STI_TRY(take_u64(r, what, out));
    if (*out > (r->size - r->at) / min)
        return FAIL(r, STILL_E_FORMAT,
                    "%s at byte %zu is %llu, more than the %zu bytes "
                    "that follow can hold",
                    what, r->at - 8, (unsigned long long)*out, r->size - r->at);
    return STILL_OK;
}

static still_status take_str(reader *r, const char *what, sti_str *out)
{
    uint64_t n;
    STI_TRY(take_count(r, what, 1, &n));
    *out = (sti_str){(const char *)take(r, n), (size_t)n};
    return STILL_OK;
}

/* A key or tensor name: 1..max bytes, none of them NUL. Allocates *out. */
static still_status take_name(reader *r, const char *what, size_t max, char **out)
{
    size_t begin = r->at;
    sti_str s;
    STI_TRY(take_str(r, what, &s));
    if (s.n == 0 || s.n > max)
        return FAIL(r, STILL_E_FORMAT,
                    "%s at byte %zu has %zu bytes, expected 1 to %zu", what, begin, s.n,
                    max);
    if (memchr(s.p, 0, s.n))
        return FAIL(r, STILL_E_FORMAT, "%s at byte %zu contains a NUL byte", what,
                    begin);
    *out = sti_strndup(s.p, s.n);
    return *out ? STILL_OK : sti_fail_memory(r->err, r->path, s.n + 1);
}

/* Bytes of a value of fixed size; 0 for strings, arrays and unknown types. */
static size_t scalar_size(uint32_t type)
{
    static const unsigned char SIZE[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof SIZE ? SIZE[type] : 0;
}

static still_status take_strings(reader *r, sti_meta *m)
{
    m->str = sti_alloc((size_t)m->count, sizeof *m->str);
    if (!m->str) return sti_fail_memory(r->err, r->path, (size_t)m->count * 16);
    for (uint64_t i = 0; i < m->count; i++) STI_TRY(take_str(r, m->key, &m->str[i]));
    return STILL_OK;
}

static still_status take_value(reader *r, sti_meta *m)
{
    uint32_t type, elem;
    size_t begin = r->at;
    STI_TRY(take_u32(r, m->key, &type));
    m->type = m->elem = (sti_meta_type)type;
    m->count = 1;
    elem = type;
    if (type == STI_META_ARRAY) {
        STI_TRY(take_u32(r, m->key, &elem));
        if (elem == STI_META_ARRAY)
            return FAIL(r, STILL_E_UNSUPPORTED,
                        "key '%s' at byte %zu is an array of "
                        "arrays",
                        m->key, begin);
        m->elem = (sti_meta_type)elem;
    }
    size_t each = elem == STI_META_STRING ? 8 : scalar_size(elem);
    if (each == 0)
        return FAIL(r, STILL_E_FORMAT,
                    "key '%s' at byte %zu has type %u, expected 0 to "
                    "12",
                    m->key, begin, elem);
    if (type == STI_META_ARRAY) STI_TRY(take_count(r, m->key, each, &m->count));
    if (elem == STI_META_STRING) {
        m->data = r->data + r->at;
        return take_strings(r, m);
    }
    m->data = take(r, m->count * each);
    return m->data ? STILL_OK : truncated(r, m->key);
}

static still_status take_pairs(reader *r, sti_store *s, uint64_t n)
{
    s->meta = sti_alloc((size_t)n, sizeof *s->meta);
    if (!s->meta) return sti_fail_memory(r->err, r->path, (size_t)n * sizeof *s->meta);
    while (s->n_meta < n) {
        sti_meta *m = &s->meta[s->n_meta];
        STI_TRY(take_name(r, "metadata key", MAX_KEY, &m->key));
        s->n_meta++; /* from here on the store frees it */
        STI_TRY(take_value(r, m));
    }
    return STILL_OK;
}

/* Types of GGML that still does not support, so that the error can name them. */
static const char *foreign_type(uint32_t type)
{
    static const char *const NAMES[] = {
        [4] = "q4_2",     [5] = "q4_3",    [9] = "q8_1",     [15] = "q8_k",
        [16] = "iq2_xxs", [17] = "iq2_xs", [18] = "iq3_xxs", [19] = "iq1_s",
        [21] = "iq3_s",   [22] = "iq2_s",  [24] = "i8",      [25] = "i16",
        [29] = "iq1_m",   [34] = "tq1_0",  [35] = "tq2_0"};
    if (type >= sizeof NAMES / sizeof *NAMES || !NAMES[type]) return "unknown";
    return NAMES[type];
}

/* Dims, type and offset. Where the data begins is known only after the last tensor. */
static still_status take_tensor(reader *r, sti_tensor *t, uint64_t *offset)
{
    size_t begin = r->at;
    uint32_t n_dims, type;
    STI_TRY(take_u32(r, t->name, &n_dims));
    if (n_dims < 1 || n_dims > 4)
        return FAIL(r, STILL_E_FORMAT,
                    "tensor '%s' at byte %zu has %u dimensions, "
                    "expected 1 to 4",
                    t->name, begin, n_dims);
    t->n_dims = (int)n_dims;
    for (int i = 0; i < 4; i++) t->dim[i] = 1;
    for (int i = t->n_dims - 1; i >= 0; i--) { /* the file has the innermost first */
        uint64_t n = 0;
        STI_TRY(take_u64(r, t->name, &n));
        if (n == 0 || n > INT64_MAX)
            return FAIL(r, STILL_E_FORMAT,
                        "tensor '%s' at byte %zu has a dimension of "
                        "%llu",
                        t->name, begin, (unsigned long long)n);
        t->dim[i] = (int64_t)n;
    }
    STI_TRY(take_u32(r, t->name, &type));
    const sti_dtype_info *info = type <= INT32_MAX ? sti_dtype_find((int)type) : NULL;
    if (!info)
        return FAIL(r, STILL_E_UNSUPPORTED,
                    "tensor '%s' at byte %zu has type %u (%s), "
                    "which is not supported",
                    t->name, begin, type, foreign_type(type));
    t->type = info->type;
    if (t->dim[t->n_dims - 1] % info->block != 0)
        return FAIL(r, STILL_E_FORMAT,
                    "tensor '%s' at byte %zu has rows of %lld "
                    "elements, not a multiple of %d (%s)",
                    t->name, begin, (long long)t->dim[t->n_dims - 1], info->block,
                    info->name);
    if (!sti_tensor_size(t->type, t->n_dims, t->dim, &t->bytes))
        return FAIL(r, STILL_E_FORMAT,
                    "tensor '%s' at byte %zu: the size of its "
                    "dimensions overflows",
                    t->name, begin);
    return take_u64(r, t->name, offset);
}

static still_status take_tensors(reader *r, sti_store *s, uint64_t n, uint64_t *offset)
{
    STI_TRY(sti_store_reserve(s, (size_t)n, r->err));
    for (uint64_t i = 0; i < n; i++) {
        sti_tensor *t = &s->tensor[s->n_tensors];
        STI_TRY(take_name(r, "tensor name", MAX_NAME, &t->name));
        s->n_tensors++;
        t->path = r->path;
        STI_TRY(take_tensor(r, t, &offset[i]));
    }
    return STILL_OK;
}

static still_status find_alignment(reader *r, const sti_store *s, size_t *out)
{
    *out = DEFAULT_ALIGNMENT;
    for (size_t i = 0; i < s->n_meta; i++) {
        int64_t v = 0;
        if (strcmp(s->meta[i].key, "general.alignment") != 0) continue;
        if (!sti_meta_int(&s->meta[i], &v) || v < 8 || v > MAX_ALIGNMENT ||
            (v & (v - 1)))
            return FAIL(r, STILL_E_FORMAT,
                        "general.alignment is %lld, expected a power "
                        "of two from 8 to %d",
                        (long long)v, MAX_ALIGNMENT);
        *out = (size_t)v;
    }
    return STILL_OK;
}

/* Turns offsets into pointers: aligned, inside the data, so never in the header. */
static still_status place(reader *r, sti_store *s, const uint64_t *offset)
{
    size_t alignment;
    STI_TRY(find_alignment(r, s, &alignment));
    size_t start = (r->at + alignment - 1) & ~(alignment - 1);
    if (start > r->size) start = r->size; /* no room for data: tensors fail below */
    for (size_t i = 0; i < s->n_tensors; i++) {
        sti_tensor *t = &s->tensor[i];
        if (offset[i] % alignment != 0)
            return FAIL(r, STILL_E_FORMAT,
                        "tensor '%s' has offset %llu, not a multiple "
                        "of %zu",
                        t->name, (unsigned long long)offset[i], alignment);
        size_t capacity = r->size - start;
        if (offset[i] > capacity || t->bytes > capacity - (size_t)offset[i])
            return FAIL(r, STILL_E_FORMAT,
                        "tensor '%s' has %zu bytes at offset %llu of "
                        "the data, which begin at byte %zu of %zu (truncated?)",
                        t->name, t->bytes, (unsigned long long)offset[i], start,
                        r->size);
        t->data = r->data + start + offset[i];
    }
    return STILL_OK;
}

static still_status check_version(reader *r)
{
    uint32_t version;
    STI_TRY(take_u32(r, "version", &version));
    if (version == 2 || version == 3) return STILL_OK;
    if (version << 16 == 0 && version != 0)
        return FAIL(r, STILL_E_UNSUPPORTED,
                    "GGUF of a big-endian machine (version reads "
                    "0x%08x), expected little-endian",
                    version);
    return FAIL(r, STILL_E_UNSUPPORTED, "GGUF version %u, expected 2 or 3", version);
}

still_status sti_parse_gguf(sti_store *s, sti_map map, still_error *err)
{
    reader r = {map.path, map.data, 4, map.size, err}; /* after the magic */
    uint64_t n_tensors, n_pairs;
    s->is_gguf = true;
    STI_TRY(sti_store_add_map(s, &map, err));
    STI_TRY(check_version(&r));
    STI_TRY(take_count(&r, "number of tensors", MIN_TENSOR, &n_tensors));
    STI_TRY(take_count(&r, "number of metadata pairs", MIN_PAIR, &n_pairs));
    STI_TRY(take_pairs(&r, s, n_pairs));
    /* Checked again: metadata may have used up the bytes that the tensors need. */
    if (n_tensors > (r.size - r.at) / MIN_TENSOR) return truncated(&r, "tensor list");
    uint64_t *offset = sti_alloc((size_t)n_tensors, sizeof *offset);
    if (!offset)
        return sti_fail_memory(err, r.path, (size_t)n_tensors * sizeof *offset);
    still_status status = take_tensors(&r, s, n_tensors, offset);
    if (status == STILL_OK) status = place(&r, s, offset);
    free(offset);
    return status == STILL_OK ? sti_store_sort(s, err) : status;
}
