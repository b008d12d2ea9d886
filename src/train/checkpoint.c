/* checkpoint.c - a run on disk: parameters and moments, its position, and its settings.
 *
 * Everything a step depends on is in it or follows from the settings, so a run
 * resumed from a checkpoint ends with the same bits as one that was never
 * interrupted. The file is written under a temporary name, synced and renamed, so
 * the last complete one always survives. A checksum at its end covers all of it; version
 * 1 of the format had none and does not say its version. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "train/train.h"

enum { VERSION = 2 };
static const char VERSION_KEY[] = "still_format";

bool sti_checkpoint_there(const char *dir)
{
    char path[STI_PATH_ROOM];
    struct stat st;
    return sti_path_join(path, dir, STI_CHECKPOINT, NULL) == STILL_OK &&
           stat(path, &st) == 0;
}

/* Removes only regular files named as our writers name them: FILE.NUMBER.tmp. */
void sti_checkpoint_sweep(const char *dir)
{
    static const char *const ours[] = {STI_CHECKPOINT ".",     STI_ADAPTER_TENSORS ".",
                                       STI_ADAPTER_CONFIG ".", "train.jsonl.",
                                       "README.md.",           "report.html."};
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
            const size_t n = strlen(ours[i]);
            if (strncmp(e->d_name, ours[i], n) != 0) continue;
            const size_t digits = strspn(e->d_name + n, "0123456789.");
            if (digits > 1 && strcmp(e->d_name + n + digits, "tmp") == 0)
                unlinkat(dirfd(d), e->d_name, 0);
        }
    }
    if (d) closedir(d);
}

/* ---- Settings ------------------------------------------------------------ */

/* Adds what `from` holds, objects in it as "key.key". */
static void put_parts(json_t **to, const char *prefix, json_t *from)
{
    const char *key;
    json_t *value;
    json_object_foreach(from, key, value)
    {
        char name[96];
        snprintf(name, sizeof name, "%s%s%s", prefix, *prefix ? "." : "", key);
        /* The user's name for the base model does not affect the result, nor does the
         * format of adapters. */
        if (strcmp(name, "base.name") == 0 || strcmp(name, "version") == 0) continue;
        if (json_is_object(value)) {
            put_parts(to, name, value);
            continue;
        }
        char *text = sti_json_text(value, JSON_COMPACT | JSON_ENCODE_ANY);
        sti_json_set(to, name, text ? json_string(text) : NULL);
        free(text);
    }
}

/* Every setting that affects a step, as an object of strings. NULL: no memory. */
static json_t *settings_of(const sti_trainer *t)
{
    const still_train_params *p = &t->p;
    unsigned char digest[STI_DATA_DIGEST];
    char hex[2 * STI_DATA_DIGEST + 1];
    sti_data_digest(t->data, digest);
    sti_hex(digest, sizeof digest, hex);
    json_t *adapter = sti_adapter_to_json(&t->adapter->spec), *s = json_object();
    /* The error names the first that differs, so derived settings come after their
     * causes. */
#define PUT(key, ...)                                                                  \
    do {                                                                               \
        char line[256];                                                                \
        snprintf(line, sizeof line, __VA_ARGS__);                                      \
        sti_json_set(&s, key, json_string(line));                                      \
    } while (0)
    PUT("batch", "%d x %d, %d at once", p->batch, p->seq, p->micro_batch);
    PUT("steps", "%llu + %llu", (unsigned long long)t->stage_steps[1],
        (unsigned long long)t->stage_steps[2]);
    PUT("ranks", "%d", sti_comm_size(t->comm));
    PUT("seed", "%llu", (unsigned long long)p->seed);
    PUT("learning rates", "%.9g, %.9g; %.9g %.9g %.9g %.9g; warm-up %.9g", p->lr[1],
        p->lr[2], p->lr_scale[0], p->lr_scale[1], p->lr_scale[2], p->lr_scale[3],
        p->warmup);
    PUT("optimizer", "clip %.9g, betas %.9g %.9g, decay %.9g", p->clip, p->beta1,
        p->beta2, p->decay);
    PUT("loss", "kd %.9g, %s%s, dropout %.9g", p->kd,
        p->match_weights ? "weights" : "outputs",
        p->freeze_maps ? ", maps frozen in stage 2" : "", p->lora_dropout);
    if (p->cap_share < 1) PUT("share of caps", "%.9g", p->cap_share);
    put_parts(&s, "", adapter);
    PUT("data", "%s", hex);
#undef PUT
    if (adapter) {
        json_decref(adapter);
        return s;
    }
    json_decref(s);
    return NULL;
}

/* ---- Writing ------------------------------------------------------------- */

/* One of the operators' arrays, copied through host memory. */
static still_status write_part(const sti_trainer *t, sti_writer *w, const float *x,
                               still_error *err)
{
    const size_t bytes = t->adapter->n_values * sizeof(float);
    if (t->m->be->host_memory) return sti_writer_data(w, x, bytes, err);
    sti_block copy;
    if (!sti_block_new(&copy, bytes))
        return sti_fail_memory(err, STI_CHECKPOINT, bytes);
    still_status st = t->m->be->mem_move(t->m->dev, copy.p, x, bytes, err);
    if (st == STILL_OK) st = sti_writer_data(w, copy.p, bytes, err);
    sti_block_free(&copy);
    return st;
}

still_status sti_checkpoint_write(const sti_trainer *t, still_error *err)
{
    char path[STI_PATH_ROOM], number[32];
    STI_TRY(sti_path_join(path, t->p.out, STI_CHECKPOINT, err));
    json_t *meta = settings_of(t);
    const uint64_t where[] = {(uint64_t)t->stage, t->step, t->tokens, VERSION};
    const char *const name[] = {"at.stage", "at.step", "at.tokens", VERSION_KEY};
    for (int i = 0; i < 4; i++) {
        snprintf(number, sizeof number, "%llu", (unsigned long long)where[i]);
        sti_json_set(&meta, name[i], json_string(number));
    }
    if (!meta) return sti_fail_memory(err, path, 0);
    sti_writer *w;
    still_status st = sti_writer_safetensors(path, meta, &w, err);
    json_decref(meta);
    if (st != STILL_OK) return st;
    sti_writer_seal(w);
    const int64_t dim[1] = {(int64_t)t->adapter->n_values};
    const float *const part[] = {t->moment1, t->moment2, t->adapter->seen};
    const char *const part_name[] = {"moment1", "moment2", "value"};
    for (int i = 0; i < 3 && st == STILL_OK; i++)
        st = sti_writer_tensor(w, part_name[i], STI_F32, 1, dim, err);
    for (int i = 0; i < 3 && st == STILL_OK; i++) st = write_part(t, w, part[i], err);
    if (st != STILL_OK) {
        sti_writer_abort(w);
        return st;
    }
    return sti_writer_finish(w, err);
}

/* ---- Reading ------------------------------------------------------------- */

static still_status compare(const sti_trainer *t, const sti_store *s, still_error *err)
{
    json_t *now = settings_of(t);
    if (!now) return sti_fail_memory(err, s->path, 0);
    const char *key;
    json_t *value;
    still_status st = STILL_OK;
    json_object_foreach(now, key, value)
    {
        const char *then = json_string_value(json_object_get(s->st_meta, key));
        if (st != STILL_OK || (then && strcmp(then, json_string_value(value)) == 0))
            continue;
        st =
            sti_fail(err, STILL_E_ARG,
                     "%s: the run was begun with other settings: %s was '%.200s', now "
                     "it is '%.200s'",
                     s->path, key, then ? then : "(missing)", json_string_value(value));
    }
    json_decref(now);
    return st;
}

/* A whole number lo..hi that the metadata has as text. */
static still_status read_number(const sti_store *s, const char *key, uint64_t lo,
                                uint64_t hi, uint64_t *out, still_error *err)
{
    const char *text = json_string_value(json_object_get(s->st_meta, key));
    char *end = NULL;
    errno = 0;
    if (text && *text >= '0' && *text <= '9') *out = strtoull(text, &end, 10);
    if (!end || *end || errno || *out < lo || *out > hi)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: '%s' is %.40s, expected a whole number from %llu to %llu",
                        s->path, key, text ? text : "missing", (unsigned long long)lo,
                        (unsigned long long)hi);
    return STILL_OK;
}

/* Of a version this program reads, and as it was written. */
static still_status check_file(const sti_store *s, still_error *err)
{
    uint64_t version = 1;
    bool sealed;
    STI_TRY(sti_store_verify(s, &sealed, err));
    if (json_object_get(s->st_meta, VERSION_KEY))
        STI_TRY(read_number(s, VERSION_KEY, 1, VERSION, &version, err));
    if (version > 1 && !sealed)
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: has no checksum, and checkpoints of version %llu have one: "
            "it is damaged",
            s->path, (unsigned long long)version);
    return STILL_OK;
}

static still_status take(sti_trainer *t, const sti_store *s, still_error *err)
{
    STI_TRY(check_file(s, err));
    STI_TRY(compare(t, s, err));
    uint64_t stage, step, tokens;
    STI_TRY(read_number(s, "at.stage", 1, 2, &stage, err));
    STI_TRY(read_number(s, "at.step", 0, t->stage_steps[stage], &step, err));
    STI_TRY(read_number(s, "at.tokens", 0, INT64_MAX, &tokens, err));
    if (t->stage_steps[stage] == 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: stands in stage %d, which has no steps", s->path,
                        (int)stage);
    float *const part[] = {t->moment1, t->moment2, t->adapter->seen};
    const char *const name[] = {"moment1", "moment2", "value"};
    const size_t n = t->adapter->n_values;
    for (int i = 0; i < 3; i++) {
        const sti_tensor *x = sti_store_find(s, name[i]);
        if (!x || x->type != STI_F32 || x->n_dims != 1 || x->dim[0] != (int64_t)n)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: tensor '%s' is missing or not %zu floats", s->path,
                            name[i], n);
        STI_TRY(
            t->m->be->mem_move(t->m->dev, part[i], x->data, n * sizeof(float), err));
    }
    t->stage = (int)stage;
    t->step = step;
    t->steps = t->stage_steps[stage];
    t->tokens = tokens;
    return STILL_OK;
}

still_status sti_checkpoint_read(sti_trainer *t, still_error *err)
{
    char path[STI_PATH_ROOM];
    sti_store s = {0};
    STI_TRY(sti_path_join(path, t->p.out, STI_CHECKPOINT, err));
    still_status st = sti_store_open(path, &s, err);
    if (st == STILL_OK) st = take(t, &s, err);
    sti_store_close(&s);
    return st;
}
