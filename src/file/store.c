/* store.c - opening: find out what a path holds, let its parser fill the store, sort.
 *
 * Formats are recognized by content, not by name. If a file is not a model, the
 * error says what its first bytes look like: the usual causes are a failed download,
 * a git-lfs pointer or the wrong file of a folder. */
#include "file/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "base/sha256.h"
#include "file/parse.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "model files are little-endian and read in place");

still_status sti_store_add_map(sti_store *s, sti_map *map, still_error *err)
{
    sti_map *grown = sti_grow(s->map, s->n_maps + 1, sizeof *grown);
    if (!grown) {
        sti_map_close(map);
        return sti_fail_memory(err, s->path, (s->n_maps + 1) * sizeof *grown);
    }
    s->map = grown;
    s->map[s->n_maps++] = *map;
    s->file_bytes += map->size;
    *map = (sti_map){0};
    return STILL_OK;
}

still_status sti_store_reserve(sti_store *s, size_t n, still_error *err)
{
    size_t total;
    sti_tensor *grown = NULL;
    if (sti_add(s->n_tensors, n, &total))
        grown = sti_grow(s->tensor, total, sizeof *grown);
    if (!grown) return sti_fail_memory(err, s->path, n);
    if (n) memset(grown + s->n_tensors, 0, n * sizeof *grown);
    s->tensor = grown;
    return STILL_OK;
}

bool sti_tensor_size(sti_dtype t, int n_dims, const int64_t *dim, size_t *bytes)
{
    uint64_t n = 1;
    const sti_dtype_info *info = sti_dtype_find((int)t);
    if (!info || (n_dims > 0 && dim[n_dims - 1] % info->block != 0)) return false;
    for (int i = 0; i < n_dims; i++)
        if (__builtin_mul_overflow(n, (uint64_t)dim[i], &n)) return false;
    return n <= INT64_MAX && sti_dtype_bytes(t, n, bytes);
}

/* What the first bytes look like, in words; "" if unknown. */
static const char *describe_map(const sti_map *m)
{
    static const struct {
        const char *magic;
        size_t n;
        const char *words;
    } KNOWN[] = {
        {"PK\3\4", 4, " (a zip archive: a PyTorch checkpoint?)"},
        {"\x1f\x8b", 2, " (gzip: unpack it first)"},
        {"\x80\2", 2, " (a Python pickle: a PyTorch checkpoint?)"},
        {"version https://git-lfs", 23, " (a git-lfs pointer: fetch the file itself)"},
        {"lmgg", 4, " (GGML, older than GGUF)"},
        {"tjgg", 4, " (GGJT, older than GGUF)"},
        {"fmgg", 4, " (GGMF, older than GGUF)"},
        {"FUGG", 4, " (GGUF of a big-endian machine)"},
        {"\177ELF", 4, " (a program)"},
        {"<", 1, " (HTML or XML: a failed download?)"},
        {"{", 1, " (JSON: give the folder it lies in)"},
    };
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
        if (m->size >= KNOWN[i].n && memcmp(m->data, KNOWN[i].magic, KNOWN[i].n) == 0)
            return KNOWN[i].words;
    return "";
}

static still_status fail_unknown(const sti_map *m, still_error *err)
{
    char bytes[4 * 4 + 1] = "";
    for (size_t i = 0, n = 0; i < m->size && i < 4; i++) {
        unsigned char c = m->data[i];
        bool plain = c > ' ' && c < 0x7f && c != '\'';
        n += (size_t)snprintf(bytes + n, sizeof bytes - n, plain ? "%c" : "\\x%02x", c);
    }
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: starts with '%s'%s, expected a GGUF or safetensors file",
                    m->path, bytes, describe_map(m));
}

/* A length below 2^48, then JSON. The first byte alone says nothing: it is part of the
 * length. A file that only has the name is parsed too, for the parser's more exact
 * error, unless it looks like something else. */
static bool looks_like_safetensors(const sti_map *m)
{
    if (m->size >= 10 && m->data[6] == 0 && m->data[7] == 0 && m->data[8] == '{')
        return true;
    size_t n = strlen(m->path);
    return n >= 12 && strcmp(m->path + n - 12, ".safetensors") == 0 &&
           !*describe_map(m);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const sti_tensor *)a)->name, ((const sti_tensor *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const sti_meta *)a)->key, ((const sti_meta *)b)->key);
}

still_status sti_store_sort(sti_store *s, still_error *err)
{
    if (s->n_tensors) qsort(s->tensor, s->n_tensors, sizeof *s->tensor, by_name);
    for (size_t i = 1; i < s->n_tensors; i++) {
        const sti_tensor *a = &s->tensor[i - 1], *b = &s->tensor[i];
        if (strcmp(a->name, b->name) == 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s' occurs twice (also in %s)", b->path,
                            b->name, a->path);
    }
    if (s->n_meta) qsort(s->meta, s->n_meta, sizeof *s->meta, by_key);
    for (size_t i = 1; i < s->n_meta; i++)
        if (strcmp(s->meta[i - 1].key, s->meta[i].key) == 0)
            return sti_fail(err, STILL_E_FORMAT, "%s: metadata key '%s' occurs twice",
                            s->path, s->meta[i].key);
    return STILL_OK;
}

static still_status open_file(sti_store *s, const char *path, still_error *err)
{
    sti_map map;
    STI_TRY(sti_map_open(path, &map, err));
    if (map.size >= 4 && memcmp(map.data, "GGUF", 4) == 0) {
        STI_TRY(sti_parse_gguf(s, map, err));
        return sti_join_parts(s, err);
    }
    if (looks_like_safetensors(&map)) {
        STI_TRY(sti_parse_safetensors(s, map, &s->st_meta, err));
        return sti_store_sort(s, err);
    }
    still_status status = fail_unknown(&map, err);
    sti_map_close(&map);
    return status;
}

static still_status open_any(sti_store *s, const char *path, still_error *err)
{
    s->path = sti_strdup(path);
    if (!s->path) return sti_fail_memory(err, path, strlen(path) + 1);
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return sti_parse_folder(s, path, err);
    return open_file(s, path, err);
}

still_status sti_store_open(const char *path, sti_store *out, still_error *err)
{
    *out = (sti_store){0};
    still_status status = open_any(out, path, err);
    if (status != STILL_OK) sti_store_close(out);
    return status;
}

still_status sti_store_verify(const sti_store *s, bool *sealed, still_error *err)
{
    const sti_tensor *t = sti_store_find(s, STI_CHECKSUM);
    *sealed = t != NULL;
    if (!t) return STILL_OK;
    const unsigned char *begin = s->map[0].data, *sum = t->data;
    unsigned char now[STI_SHA256];
    if (s->n_maps != 1 || t->type != STI_I32 || t->bytes != sizeof now ||
        (size_t)(sum - begin) != s->map[0].size - sizeof now)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: '%s' is not the last of its tensors: it is damaged",
                        s->path, STI_CHECKSUM);
    sti_sha256_of(begin, (size_t)(sum - begin), now);
    if (memcmp(now, sum, sizeof now) != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: its checksum does not match its bytes: it is damaged",
                        s->path);
    return STILL_OK;
}

void sti_store_close(sti_store *s)
{
    for (size_t i = 0; i < s->n_tensors; i++) free(s->tensor[i].name);
    for (size_t i = 0; i < s->n_meta; i++) {
        free(s->meta[i].key);
        free(s->meta[i].str);
    }
    for (size_t i = 0; i < s->n_maps; i++) sti_map_close(&s->map[i]);
    free(s->tensor);
    free(s->meta);
    free(s->map);
    free(s->path);
    json_decref(s->config);
    json_decref(s->st_meta);
    *s = (sti_store){0};
}

const sti_tensor *sti_store_find(const sti_store *s, const char *name)
{
    sti_tensor key = {.name = (char *)(uintptr_t)name};
    if (!s->n_tensors) return NULL;
    return bsearch(&key, s->tensor, s->n_tensors, sizeof key, by_name);
}

const sti_meta *sti_meta_find(const sti_store *s, const char *key)
{
    sti_meta want = {.key = (char *)(uintptr_t)key};
    if (!s->n_meta) return NULL;
    return bsearch(&want, s->meta, s->n_meta, sizeof want, by_key);
}
