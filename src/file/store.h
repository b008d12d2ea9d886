/* store.h - a set of named tensors that lie in mapped files, with metadata.
 *
 * GGUF files and safetensors (single or sharded) are read into this one shape, so
 * nothing after this folder asks where a tensor came from. Every offset, count and
 * size has been checked against the file when open returns. */
#ifndef STI_FILE_STORE_H
#define STI_FILE_STORE_H

#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/new_file.h"
#include "file/dtype.h"

typedef struct sti_map { /* a read-only mapping of one file */
    char *path;
    const unsigned char *data;
    size_t size;
} sti_map;
still_status sti_map_open(const char *path, sti_map *out, still_error *err);
void sti_map_close(sti_map *m);
/* Tells the system that the pages of [p, p+n) are no longer needed in memory. */
void sti_map_drop(const void *p, size_t n);

typedef struct sti_tensor {
    char *name;
    sti_dtype type;
    int n_dims;
    int64_t dim[4];   /* outermost first: a matrix is [rows, cols] = [out, in] */
    const void *data; /* in the mapping; aligned for its numbers (blocks: 8 bytes) */
    size_t bytes;
    const char *path; /* of the file it lies in */
} sti_tensor;

/* GGUF metadata value types, by GGUF's numbers. */
typedef enum sti_meta_type {
    STI_META_U8,
    STI_META_I8,
    STI_META_U16,
    STI_META_I16,
    STI_META_U32,
    STI_META_I32,
    STI_META_F32,
    STI_META_BOOL,
    STI_META_STRING,
    STI_META_ARRAY,
    STI_META_U64,
    STI_META_I64,
    STI_META_F64
} sti_meta_type;

typedef struct sti_str { /* bytes in the mapping, not NUL-terminated */
    const char *p;
    size_t n;
} sti_str;

typedef struct sti_meta {
    char *key;
    sti_meta_type type;
    sti_meta_type elem; /* of an array; arrays of arrays are refused */
    uint64_t count;     /* of an array; 1 otherwise */
    const void *data;   /* scalars: little-endian value; arrays: first element */
    sti_str *str;       /* strings, and arrays of strings: [count] */
} sti_meta;

typedef struct sti_store {
    char *path; /* what was opened */
    bool is_gguf;
    sti_map *map; /* [n_maps] */
    size_t n_maps;
    sti_tensor *tensor; /* [n_tensors], sorted by name */
    size_t n_tensors;
    sti_meta *meta; /* GGUF metadata, sorted by key */
    size_t n_meta;
    json_t *config;  /* config.json of a Hugging Face folder; NULL otherwise */
    json_t *st_meta; /* __metadata__ of a single safetensors file; may be NULL */
    size_t file_bytes;
} sti_store;

/* path: a GGUF file (of a split model any part), a .safetensors file, or a Hugging Face
 * folder (config.json with model.safetensors or model.safetensors.index.json and its
 * shards). */
still_status sti_store_open(const char *path, sti_store *out, still_error *err);
void sti_store_close(sti_store *s);
const sti_tensor *sti_store_find(const sti_store *s, const char *name);

/* Metadata look-ups. "Need" versions name the key in their error. */
const sti_meta *sti_meta_find(const sti_store *s, const char *key);
bool sti_meta_int(const sti_meta *m, int64_t *out);  /* any integer type or bool */
bool sti_meta_float(const sti_meta *m, double *out); /* any number */
bool sti_meta_elem_int(const sti_meta *m, uint64_t i, int64_t *out);
bool sti_meta_elem_float(const sti_meta *m, uint64_t i, double *out);

/* A file that was sealed ends with tensor STI_CHECKSUM, eight I32: the SHA-256 of all
 * bytes before it, header, metadata and tensors. *sealed: whether this one was, and then
 * its bytes are those that were written. */
#define STI_CHECKSUM "still.checksum"
still_status sti_store_verify(const sti_store *s, bool *sealed, still_error *err);

/* ---- Writing (file/write.c): streaming, as base/new_file.h says */
typedef struct sti_writer sti_writer;
/* GGUF v3. Add all metadata, then all tensor headers, then tensor data in order. */
still_status sti_writer_gguf(const char *path, sti_writer **out, still_error *err);
/* safetensors: all headers, then data in order. metadata: JSON object of strings. */
still_status sti_writer_safetensors(const char *path, json_t *metadata,
                                    sti_writer **out, still_error *err);
/* Before any data: the file gets a checksum at its end (STI_CHECKSUM). */
void sti_writer_seal(sti_writer *w);
still_status sti_writer_meta_str(sti_writer *w, const char *key, const char *v,
                                 still_error *err);
still_status sti_writer_meta_u32(sti_writer *w, const char *key, uint32_t v,
                                 still_error *err);
still_status sti_writer_meta_f32(sti_writer *w, const char *key, float v,
                                 still_error *err);
still_status sti_writer_meta_bool(sti_writer *w, const char *key, bool v,
                                  still_error *err);
still_status sti_writer_meta_strs(sti_writer *w, const char *key, const sti_str *v,
                                  size_t n, still_error *err);
still_status sti_writer_meta_i32s(sti_writer *w, const char *key, const int32_t *v,
                                  size_t n, still_error *err);
/* Copies a metadata entry of another file unchanged. */
still_status sti_writer_meta_copy(sti_writer *w, const sti_meta *m, still_error *err);
still_status sti_writer_tensor(sti_writer *w, const char *name, sti_dtype t, int n_dims,
                               const int64_t *dim, still_error *err);
/* Appends bytes of the next unfinished tensor. */
still_status sti_writer_data(sti_writer *w, const void *p, size_t n, still_error *err);
/* Checks that all data was written, syncs, renames. Frees w either way; on failure
 * and on sti_writer_abort the file that was at path is untouched. */
still_status sti_writer_finish(sti_writer *w, still_error *err);
void sti_writer_abort(sti_writer *w);
/* A whole text file, in the same way. */
static inline still_status sti_write_text(const char *path, const char *text,
                                          still_error *err)
{
    return sti_write_file(path, text, strlen(text), err);
}
/* dir/name; fails if that is longer than any path can be. */
enum { STI_PATH_ROOM = 4096 };
static inline still_status sti_path_join(char out[STI_PATH_ROOM], const char *dir,
                                         const char *name, still_error *err)
{
    if (snprintf(out, STI_PATH_ROOM, "%s/%s", dir, name) >= STI_PATH_ROOM)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", dir);
    return STILL_OK;
}

/* The object that a JSON file is, whose names occur once (file/folder.c). *out is NULL on
 * error. */
still_status sti_json_load(const char *path, json_t **out, still_error *err);

/* ---- Text (file/text.c): see still_text_read. Lines of a JSONL file, gz or not. */
typedef struct sti_lines sti_lines;
still_status sti_lines_open(const char *path, sti_lines **out, still_error *err);
/* Next line without its newline; *line NULL at the end. Valid until the next call. */
still_status sti_lines_next(sti_lines *l, char **line, size_t *n, still_error *err);
/* The next byte that is not white space, without consuming it; 0 at the end. */
still_status sti_lines_peek(sti_lines *l, char *c, still_error *err);
/* Bytes of the file on disk read so far: compressed ones, if it is gzip. */
uint64_t sti_lines_offset(const sti_lines *l);
void sti_lines_close(sti_lines *l);

#endif
