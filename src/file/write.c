/* write.c - streaming writers of GGUF v3 and safetensors.
 *
 * Headers are collected in memory and written before the first data: sizes and
 * offsets follow from types and shapes alone. The file gets its name only when
 * everything is on disk, so a reader never sees half a model. The two formats differ
 * only in the encoding of the header and the padding between tensors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "file/parse.h"

enum { GGUF_ALIGNMENT = 32, SAFETENSORS_ALIGNMENT = 8 };

typedef struct entry {
    char *name;
    sti_dtype type;
    int n_dims;
    int64_t dim[4];
    size_t bytes;
    uint64_t offset; /* from the start of the data */
} entry;

struct sti_writer {
    char *path;
    sti_new_file *file;
    bool is_gguf, started; /* started: the header is written */
    bool sealed;           /* with the SHA-256 of what was written so far: */
    sti_sha256 sum;
    sti_buf pairs; /* GGUF: metadata, encoded */
    uint64_t n_pairs;
    json_t *metadata; /* safetensors */
    entry *tensor;
    size_t n_tensors, capacity;
    uint64_t end;         /* of the data declared so far, padding included */
    size_t current, done; /* tensor being filled, bytes of it written */
};

/* ---- The file ------------------------------------------------------------ */

static still_status put(sti_writer *w, const void *p, size_t n, still_error *err)
{
    if (w->sealed) sti_sha256_add(&w->sum, p, n);
    return sti_new_file_put(w->file, p, n, err);
}

static still_status put_zeros(sti_writer *w, size_t n, still_error *err)
{
    static const unsigned char ZERO[GGUF_ALIGNMENT];
    return put(w, ZERO, n, err);
}

static size_t padding(uint64_t at, size_t alignment)
{
    return (size_t)(-at & (alignment - 1));
}

static still_status writer_new(const char *path, bool is_gguf, sti_writer **out,
                               still_error *err)
{
    *out = NULL;
    sti_writer *w = sti_alloc(1, sizeof *w);
    if (!w) return sti_fail_memory(err, path, sizeof *w);
    w->is_gguf = is_gguf;
    w->path = sti_strdup(path);
    still_status status = w->path ? sti_new_file_open(path, &w->file, err)
                                  : sti_fail_memory(err, path, strlen(path) + 1);
    if (status != STILL_OK)
        sti_writer_abort(w);
    else
        *out = w;
    return status;
}

still_status sti_writer_gguf(const char *path, sti_writer **out, still_error *err)
{
    return writer_new(path, true, out, err);
}

still_status sti_writer_safetensors(const char *path, json_t *metadata,
                                    sti_writer **out, still_error *err)
{
    STI_TRY(writer_new(path, false, out, err));
    (*out)->metadata = json_incref(metadata);
    return STILL_OK;
}

void sti_writer_seal(sti_writer *w)
{
    w->sealed = true;
    sti_sha256_start(&w->sum);
}

void sti_writer_abort(sti_writer *w)
{
    if (!w) return;
    sti_new_file_abort(w->file);
    for (size_t i = 0; i < w->n_tensors; i++) free(w->tensor[i].name);
    free(w->tensor);
    sti_buf_free(&w->pairs);
    json_decref(w->metadata);
    free(w->path);
    free(w);
}

/* ---- GGUF metadata ------------------------------------------------------- */

static void put_u32(sti_buf *b, uint32_t v)
{
    sti_buf_put(b, &v, sizeof v);
}

static void put_u64(sti_buf *b, uint64_t v)
{
    sti_buf_put(b, &v, sizeof v);
}

static void put_str(sti_buf *b, const char *p, size_t n)
{
    put_u64(b, n);
    sti_buf_put(b, p, n);
}

static still_status begin_pair(sti_writer *w, const char *key, sti_meta_type type,
                               still_error *err)
{
    if (!w->is_gguf || w->started)
        return sti_fail(err, STILL_E_ARG, "%s: key '%s' %s", w->path, key,
                        w->is_gguf ? "comes after data" : "in a safetensors file");
    put_str(&w->pairs, key, strlen(key));
    put_u32(&w->pairs, type);
    return STILL_OK;
}

static still_status end_pair(sti_writer *w, still_error *err)
{
    if (w->pairs.failed) return sti_fail_memory(err, w->path, w->pairs.n);
    w->n_pairs++;
    return STILL_OK;
}

static still_status put_pair(sti_writer *w, const char *key, sti_meta_type type,
                             const void *p, size_t n, still_error *err)
{
    STI_TRY(begin_pair(w, key, type, err));
    sti_buf_put(&w->pairs, p, n);
    return end_pair(w, err);
}

still_status sti_writer_meta_u32(sti_writer *w, const char *key, uint32_t v,
                                 still_error *err)
{
    return put_pair(w, key, STI_META_U32, &v, sizeof v, err);
}

still_status sti_writer_meta_f32(sti_writer *w, const char *key, float v,
                                 still_error *err)
{
    return put_pair(w, key, STI_META_F32, &v, sizeof v, err);
}

still_status sti_writer_meta_bool(sti_writer *w, const char *key, bool v,
                                  still_error *err)
{
    return put_pair(w, key, STI_META_BOOL, &(unsigned char){v}, 1, err);
}

still_status sti_writer_meta_str(sti_writer *w, const char *key, const char *v,
                                 still_error *err)
{
    STI_TRY(begin_pair(w, key, STI_META_STRING, err));
    put_str(&w->pairs, v, strlen(v));
    return end_pair(w, err);
}

static void put_strs(sti_buf *b, const sti_str *v, size_t n)
{
    for (size_t i = 0; i < n; i++) put_str(b, v[i].p, v[i].n);
}

still_status sti_writer_meta_strs(sti_writer *w, const char *key, const sti_str *v,
                                  size_t n, still_error *err)
{
    STI_TRY(begin_pair(w, key, STI_META_ARRAY, err));
    put_u32(&w->pairs, STI_META_STRING);
    put_u64(&w->pairs, n);
    put_strs(&w->pairs, v, n);
    return end_pair(w, err);
}

still_status sti_writer_meta_i32s(sti_writer *w, const char *key, const int32_t *v,
                                  size_t n, still_error *err)
{
    STI_TRY(begin_pair(w, key, STI_META_ARRAY, err));
    put_u32(&w->pairs, STI_META_I32);
    put_u64(&w->pairs, n);
    sti_buf_put(&w->pairs, v, n * sizeof *v);
    return end_pair(w, err);
}

static size_t scalar_bytes(sti_meta_type t)
{
    switch (t) {
    case STI_META_U16:
    case STI_META_I16: return 2;
    case STI_META_U32:
    case STI_META_I32:
    case STI_META_F32: return 4;
    case STI_META_U64:
    case STI_META_I64:
    case STI_META_F64: return 8;
    default: return 1;
    }
}

still_status sti_writer_meta_copy(sti_writer *w, const sti_meta *m, still_error *err)
{
    STI_TRY(begin_pair(w, m->key, m->type, err));
    if (m->type == STI_META_ARRAY) {
        put_u32(&w->pairs, m->elem);
        put_u64(&w->pairs, m->count);
    }
    if (m->str)
        put_strs(&w->pairs, m->str, (size_t)m->count);
    else
        sti_buf_put(&w->pairs, m->data, (size_t)m->count * scalar_bytes(m->elem));
    return end_pair(w, err);
}

/* ---- Tensors ------------------------------------------------------------- */

static const char *safetensors_dtype(sti_dtype t)
{
    switch (t) {
    case STI_F32: return "F32";
    case STI_F16: return "F16";
    case STI_BF16: return "BF16";
    case STI_F64: return "F64";
    case STI_I32: return "I32";
    case STI_I64: return "I64";
    default: return NULL;
    }
}

static still_status check_tensor(const sti_writer *w, const entry *e, still_error *err)
{
    const sti_dtype_info *info = sti_dtype_find((int)e->type);
    if (w->started)
        return sti_fail(err, STILL_E_ARG, "%s: tensor '%s' comes after data", w->path,
                        e->name);
    for (size_t i = 0; i < w->n_tensors; i++)
        if (strcmp(w->tensor[i].name, e->name) == 0)
            return sti_fail(err, STILL_E_ARG, "%s: tensor '%s' occurs twice", w->path,
                            e->name);
    if (!info || (!w->is_gguf && !safetensors_dtype(e->type)))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: tensor '%s': type %s cannot be written to %s", w->path,
                        e->name, info ? info->name : "unknown",
                        w->is_gguf ? "GGUF" : "safetensors");
    if (!w->is_gguf && w->end % (uint64_t)info->bytes != 0)
        return sti_fail(err, STILL_E_ARG,
                        "%s: tensor '%s' would not be aligned: put wider types first",
                        w->path, e->name);
    return STILL_OK;
}

still_status sti_writer_tensor(sti_writer *w, const char *name, sti_dtype t, int n_dims,
                               const int64_t *dim, still_error *err)
{
    entry e = {.type = t, .n_dims = n_dims, .offset = w->end};
    if (n_dims < 1 || n_dims > 4)
        return sti_fail(err, STILL_E_ARG, "%s: tensor '%s' has %d dimensions", w->path,
                        name, n_dims);
    memcpy(e.dim, dim, (size_t)n_dims * sizeof *dim);
    for (int i = 0; i < n_dims; i++)
        if (dim[i] < 1)
            return sti_fail(err, STILL_E_ARG, "%s: tensor '%s': dimension %d is %lld",
                            w->path, name, i, (long long)dim[i]);
    if (!sti_tensor_size(t, n_dims, dim, &e.bytes) || e.bytes > INT64_MAX / 2)
        return sti_fail(err, STILL_E_ARG,
                        "%s: tensor '%s': rows of %lld elements do not fit type %d",
                        w->path, name, (long long)dim[n_dims - 1], (int)t);
    if (w->n_tensors == w->capacity) {
        size_t capacity = w->capacity ? 2 * w->capacity : 64;
        entry *grown = sti_grow(w->tensor, capacity, sizeof *grown);
        if (!grown) return sti_fail_memory(err, w->path, capacity * sizeof *grown);
        w->tensor = grown;
        w->capacity = capacity;
    }
    e.name = sti_strdup(name);
    if (!e.name) return sti_fail_memory(err, w->path, strlen(name) + 1);
    still_status status = check_tensor(w, &e, err);
    if (status != STILL_OK) {
        free(e.name);
        return status;
    }
    w->tensor[w->n_tensors++] = e;
    w->end += e.bytes;
    if (w->is_gguf) w->end += padding(w->end, GGUF_ALIGNMENT);
    return STILL_OK;
}

static void encode_gguf(const sti_writer *w, sti_buf *b)
{
    sti_buf_put(b, "GGUF", 4);
    put_u32(b, 3);
    put_u64(b, w->n_tensors);
    put_u64(b, w->n_pairs);
    sti_buf_put(b, w->pairs.p, w->pairs.n);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const entry *e = &w->tensor[i];
        put_str(b, e->name, strlen(e->name));
        put_u32(b, (uint32_t)e->n_dims);
        for (int j = e->n_dims - 1; j >= 0; j--) put_u64(b, (uint64_t)e->dim[j]);
        put_u32(b, (uint32_t)e->type);
        put_u64(b, e->offset);
    }
    static const char ZERO[GGUF_ALIGNMENT];
    sti_buf_put(b, ZERO, padding(b->n, GGUF_ALIGNMENT));
}

/* {"dtype": .., "shape": [..], "data_offsets": [begin, end]}; NULL: no memory. */
static json_t *describe_entry(const entry *e)
{
    json_t *shape = json_array();
    for (int j = 0; j < e->n_dims; j++)
        sti_json_append(&shape, json_integer(e->dim[j]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", safetensors_dtype(e->type),
                     "shape", shape, "data_offsets", (json_int_t)e->offset,
                     (json_int_t)e->offset + (json_int_t)e->bytes);
}

static void encode_safetensors(const sti_writer *w, sti_buf *b)
{
    json_t *header = json_object();
    if (w->metadata) sti_json_set(&header, "__metadata__", json_incref(w->metadata));
    for (size_t i = 0; i < w->n_tensors; i++)
        sti_json_set(&header, w->tensor[i].name, describe_entry(&w->tensor[i]));
    char *text = sti_json_text(header, JSON_COMPACT);
    json_decref(header);
    if (!text) {
        b->failed = true;
        return;
    }
    size_t n = strlen(text), pad = padding(n, SAFETENSORS_ALIGNMENT);
    put_u64(b, n + pad);
    sti_buf_put(b, text, n);
    sti_buf_put(b, "       ", pad);
    free(text);
}

static still_status start(sti_writer *w, still_error *err)
{
    sti_buf b = {0};
    if (w->sealed)
        STI_TRY(sti_writer_tensor(w, STI_CHECKSUM, STI_I32, 1,
                                  (int64_t[]){STI_SHA256 / 4}, err));
    if (w->is_gguf)
        encode_gguf(w, &b);
    else
        encode_safetensors(w, &b);
    still_status status =
        b.failed ? sti_fail_memory(err, w->path, w->pairs.n) : put(w, b.p, b.n, err);
    sti_buf_free(&b);
    w->started = status == STILL_OK;
    return status;
}

still_status sti_writer_data(sti_writer *w, const void *p, size_t n, still_error *err)
{
    if (!w->started) STI_TRY(start(w, err));
    if (n == 0) return STILL_OK;
    if (w->current == w->n_tensors)
        return sti_fail(err, STILL_E_ARG, "%s: data after the last tensor", w->path);
    const entry *e = &w->tensor[w->current];
    if (n > e->bytes - w->done)
        return sti_fail(err, STILL_E_ARG,
                        "%s: tensor '%s' has %zu bytes, %zu came after %zu", w->path,
                        e->name, e->bytes, n, w->done);
    STI_TRY(put(w, p, n, err));
    w->done += n;
    if (w->done < e->bytes) return STILL_OK;
    w->current++;
    w->done = 0;
    return w->is_gguf ? put_zeros(w, padding(e->bytes, GGUF_ALIGNMENT), err) : STILL_OK;
}

static still_status finish_file(sti_writer *w, still_error *err)
{
    if (!w->started) STI_TRY(start(w, err));
    if (w->sealed && w->current + 1 == w->n_tensors) {
        unsigned char sum[STI_SHA256];
        sti_sha256_end(&w->sum, sum);
        w->sealed = false;
        STI_TRY(sti_writer_data(w, sum, sizeof sum, err));
    }
    if (w->current < w->n_tensors)
        return sti_fail(
            err, STILL_E_ARG, "%s: tensor '%s' has %zu bytes, only %zu were written",
            w->path, w->tensor[w->current].name, w->tensor[w->current].bytes, w->done);
    sti_new_file *file = w->file;
    w->file = NULL;
    return sti_new_file_finish(file, err);
}

still_status sti_writer_finish(sti_writer *w, still_error *err)
{
    still_status status = finish_file(w, err);
    sti_writer_abort(w); /* frees; removes what is left of a failure */
    return status;
}
