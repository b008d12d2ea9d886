/* folder.c - a Hugging Face folder: config.json and its weights.
 *
 * Weights are model.safetensors, or the shards named by model.safetensors.index.json.
 * Names in the index come from outside, so they must be plain file names of this
 * folder; every tensor the index promises must be in the shard it names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "file/parse.h"

enum { MAX_JSON = 64 << 20 };

/* dir/name, to be freed; NULL: no memory. */
static char *join(const char *dir, const char *name)
{
    size_t n = strlen(dir), capacity = n + strlen(name) + 2;
    char *path = sti_alloc(capacity, 1);
    if (path)
        snprintf(path, capacity, "%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/",
                 name);
    return path;
}

static still_status exists(const char *dir, const char *name, bool *found,
                           still_error *err)
{
    char *path = join(dir, name);
    if (!path) return sti_fail_memory(err, dir, strlen(dir));
    *found = access(path, F_OK) == 0;
    free(path);
    return STILL_OK;
}

still_status sti_json_load(const char *path, json_t **out, still_error *err)
{
    sti_map map;
    *out = NULL;
    STI_TRY(sti_map_open(path, &map, err));
    const still_status status =
        map.size > MAX_JSON
            ? sti_fail(err, STILL_E_LIMIT, "%s: %zu bytes, expected at most %d", path,
                       map.size, MAX_JSON)
            : sti_json_read(path, (const char *)map.data, map.size,
                            STI_JSON_OBJECT | STI_JSON_ONCE, out, err);
    sti_map_close(&map);
    return status;
}

static still_status load_object_in(const char *dir, const char *name, json_t **out,
                                   still_error *err)
{
    char *path = join(dir, name);
    if (!path) return sti_fail_memory(err, dir, strlen(dir));
    still_status status = sti_json_load(path, out, err);
    free(path);
    return status;
}

static still_status add_shard(sti_store *s, const char *dir, const char *name,
                              json_t **metadata, still_error *err)
{
    sti_map map;
    char *path = join(dir, name);
    if (!path) return sti_fail_memory(err, dir, strlen(dir));
    still_status status = sti_map_open(path, &map, err);
    free(path);
    return status == STILL_OK ? sti_parse_safetensors(s, map, metadata, err) : status;
}

static bool plain_name(const char *name)
{
    return name && *name && !strchr(name, '/') && !strstr(name, "..");
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct shard names of the index, sorted; borrowed from weight_map. */
static still_status list_shards(const char *dir, json_t *weight_map, const char **shard,
                                size_t *n, still_error *err)
{
    const char *tensor;
    json_t *v;
    size_t all = 0, distinct = 0;
    json_object_foreach(weight_map, tensor, v)
    {
        const char *name = json_string_value(v);
        if (!plain_name(name))
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: index places tensor '%s' in '%.200s', expected a file "
                            "name without '/' and '..'",
                            dir, tensor, name ? name : "(not a string)");
        shard[all++] = name;
    }
    qsort(shard, all, sizeof *shard, by_text);
    for (size_t i = 0; i < all; i++)
        if (i == 0 || strcmp(shard[i], shard[distinct - 1]) != 0)
            shard[distinct++] = shard[i];
    *n = distinct;
    return STILL_OK;
}

/* Every tensor of the index must be there. */
static still_status check_index(const sti_store *s, json_t *weight_map,
                                still_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach(weight_map, name, v)
    {
        const sti_tensor *t = sti_store_find(s, name);
        if (!t)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: index places tensor '%s' in %s, which has no such "
                            "tensor",
                            s->path, name, json_string_value(v));
    }
    return STILL_OK;
}

static still_status add_shards(sti_store *s, const char *dir, json_t *index,
                               still_error *err)
{
    json_t *weight_map = json_object_get(index, "weight_map");
    size_t n = json_object_size(weight_map);
    if (n == 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s/model.safetensors.index.json: no weight_map", dir);
    const char **shard = sti_alloc(n, sizeof *shard);
    if (!shard) return sti_fail_memory(err, dir, n * sizeof *shard);
    still_status status = list_shards(dir, weight_map, shard, &n, err);
    for (size_t i = 0; status == STILL_OK && i < n; i++)
        status = add_shard(s, dir, shard[i], NULL, err);
    free(shard);
    if (status == STILL_OK) status = sti_store_sort(s, err);
    return status == STILL_OK ? check_index(s, weight_map, err) : status;
}

still_status sti_parse_folder(sti_store *s, const char *dir, still_error *err)
{
    static const char *const INDEX = "model.safetensors.index.json";
    bool found;
    STI_TRY(exists(dir, "config.json", &found, err));
    if (!found)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: folder without config.json, expected a Hugging Face model",
                        dir);
    STI_TRY(load_object_in(dir, "config.json", &s->config, err));
    STI_TRY(exists(dir, "model.safetensors", &found, err));
    if (found) {
        STI_TRY(add_shard(s, dir, "model.safetensors", &s->st_meta, err));
        return sti_store_sort(s, err);
    }
    STI_TRY(exists(dir, INDEX, &found, err));
    if (!found)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: folder with neither model.safetensors nor %s", dir, INDEX);
    json_t *index;
    STI_TRY(load_object_in(dir, INDEX, &index, err));
    still_status status = add_shards(s, dir, index, err);
    json_decref(index);
    return status;
}
