/* parts.c - a GGUF model in several files, PREFIX-00001-of-0000N.gguf and so on.
 *
 * Each part is a whole GGUF file with tensors of its own. It says which part it is
 * (split.no, from 0), how many there are (split.count) and how many tensors all of them
 * have (split.tensors.count); the first one has the model's other metadata. Any part may
 * be named; the others are found by their names, which must agree with what is inside. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "file/parse.h"

enum {
    MAX_PARTS = 9999, /* far above any model; a part needs a mapping */
    DIGITS = 5,
    TAIL = 1 + DIGITS + 4 + DIGITS + 5 /* -00001-of-00002.gguf */
};

typedef struct place {
    int64_t number, count, tensors;
} place;

/* What a file says about itself; count is 1 where it is a model of its own. */
static still_status read_place(const sti_store *s, const char *path, place *out,
                               still_error *err)
{
    static const char *const key[] = {"split.count", "split.no", "split.tensors.count"};
    int64_t *const to[] = {&out->count, &out->number, &out->tensors};
    *out = (place){.count = 1};
    if (!sti_meta_find(s, key[0])) return STILL_OK;
    for (int i = 0; i < 3; i++) {
        const sti_meta *m = sti_meta_find(s, key[i]);
        const int64_t most = i == 0 ? MAX_PARTS : i == 1 ? out->count - 1 : INT32_MAX;
        if (i > 0 && out->count <= 1) break;
        if (!m || !sti_meta_int(m, to[i]) || *to[i] < 0 || *to[i] > most)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: %s is missing or not 0 to %lld, as a part of a model "
                            "has it",
                            path, key[i], (long long)most);
    }
    return STILL_OK;
}

/* Writes the name of a part behind the prefix; path has room. */
static void put_tail(char *path, size_t prefix, int64_t number, int64_t count)
{
    snprintf(path + prefix, TAIL + 1, "-%05u-of-%05u.gguf",
             (unsigned)(number + 1) % 100000, (unsigned)count % 100000);
}

/* Moves the tensors and maps of a part into s, and its metadata if it is the first. */
static still_status move_into(sti_store *s, sti_store *part, still_error *err)
{
    for (size_t i = 0; i < part->n_maps; i++)
        STI_TRY(sti_store_add_map(s, &part->map[i], err));
    STI_TRY(sti_store_reserve(s, part->n_tensors, err));
    memcpy(s->tensor + s->n_tensors, part->tensor, part->n_tensors * sizeof *s->tensor);
    s->n_tensors += part->n_tensors;
    part->n_tensors = 0;
    if (s->meta) return STILL_OK;
    s->meta = part->meta;
    s->n_meta = part->n_meta;
    part->meta = NULL;
    part->n_meta = 0;
    return STILL_OK;
}

static still_status open_part(const char *path, sti_store *out, still_error *err)
{
    sti_map map;
    out->path = sti_strdup(path);
    if (!out->path) return sti_fail_memory(err, path, strlen(path) + 1);
    STI_TRY(sti_map_open(path, &map, err));
    if (map.size >= 4 && memcmp(map.data, "GGUF", 4) == 0)
        return sti_parse_gguf(out, map, err);
    sti_map_close(&map);
    return sti_fail(err, STILL_E_FORMAT, "%s: is no GGUF file", path);
}

static still_status check_part(const sti_store *part, const char *path, int64_t number,
                               const place *want, still_error *err)
{
    place is;
    STI_TRY(read_place(part, path, &is, err));
    if (is.number == number && is.count == want->count && is.tensors == want->tensors)
        return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: says that it is part %lld of %lld with %lld tensors in all, "
                    "expected part %lld of %lld with %lld",
                    path, (long long)is.number + 1, (long long)is.count,
                    (long long)is.tensors, (long long)number + 1,
                    (long long)want->count, (long long)want->tensors);
}

/* All parts in their order, `opened` among them. */
static still_status join(sti_store *s, sti_store *opened, const place *p, char *path,
                         size_t prefix, still_error *err)
{
    for (int64_t i = 0; i < p->count; i++) {
        sti_store part = {0};
        put_tail(path, prefix, i, p->count);
        still_status st = STILL_OK;
        if (i == p->number) {
            part = *opened;
            *opened = (sti_store){0};
        } else {
            st = open_part(path, &part, err);
            if (st != STILL_OK)
                sti_fail_prefix(err, st, "part %lld of %lld", (long long)i + 1,
                                (long long)p->count);
        }
        if (st == STILL_OK) st = check_part(&part, path, i, p, err);
        if (st == STILL_OK) st = move_into(s, &part, err);
        sti_store_close(&part);
        STI_TRY(st);
    }
    STI_TRY(sti_store_sort(s, err));
    if ((int64_t)s->n_tensors == p->tensors) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: its %lld parts have %zu tensors, split.tensors.count is %lld",
                    s->path, (long long)p->count, s->n_tensors, (long long)p->tensors);
}

still_status sti_join_parts(sti_store *s, still_error *err)
{
    place p;
    STI_TRY(read_place(s, s->path, &p, err));
    if (p.count <= 1) return STILL_OK;
    const size_t n = strlen(s->path);
    char *path = sti_alloc(n + TAIL + 1, 1);
    if (!path) return sti_fail_memory(err, s->path, n + TAIL + 1);
    const size_t prefix = n > TAIL ? n - TAIL : 0;
    memcpy(path, s->path, prefix);
    put_tail(path, prefix, p.number, p.count);
    still_status st;
    if (strcmp(path, s->path) != 0) {
        st = sti_fail(err, STILL_E_FORMAT,
                      "%s: is part %lld of %lld of a model; its name must end with %s, "
                      "by which the other parts are found",
                      s->path, (long long)p.number + 1, (long long)p.count,
                      path + prefix);
    } else {
        sti_store opened = *s;
        *s = (sti_store){.path = opened.path, .is_gguf = true};
        opened.path = NULL;
        st = join(s, &opened, &p, path, prefix, err);
        sti_store_close(&opened);
    }
    free(path);
    return st;
}
