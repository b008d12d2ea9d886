/* snapshot.c - saves a session's past: in memory, in a file, at chunk boundaries.
 *
 * All layers' memories lie in one range of bytes, so a past is that range, a length and
 * the last logits. A file adds what it must match: the model's fingerprint and the
 * settings as one line of text, which an error can show.
 *
 *   "STILLST1"  u32 version  u32 bytes of the settings line
 *   fingerprint [32]  u64 length  u64 state bytes  u64 vocabulary  u32 has logits
 *   settings line  logits [vocabulary]  state  u32 CRC-32 of all before it */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "session/session.h"

struct still_snapshot {
    int length;
    bool has_logits;
    size_t state_bytes;
    const still_model *model;
    char settings[STI_SETTINGS_LINE];
    sti_block memory; /* state, then logits */
};

/* ---- In memory ----------------------------------------------------------- */

still_status still_session_fork(const still_session *s, still_session **out,
                                still_error *err)
{
    STI_TRY(sti_session_like(s, s->cfg.ctx, out, err));
    still_session *f = *out;
    memcpy(f->logits, s->logits, (size_t)s->model->cfg.vocab * sizeof(float));
    for (int i = 0; i < s->rollback; i++) f->boundary[i].length = s->boundary[i].length;
    f->length = s->length;
    f->has_logits = s->has_logits;
    /* The boundaries' states lie behind the session's own. */
    still_status st = s->model->be->mem_move(s->model->dev, f->memory.p, s->memory.p,
                                             s->memory.bytes, err);
    if (st != STILL_OK) {
        still_session_free(f);
        *out = NULL;
    }
    return st;
}

still_status still_session_snapshot(const still_session *s, still_snapshot **out,
                                    still_error *err)
{
    *out = NULL;
    size_t vocab = (size_t)s->model->cfg.vocab;
    still_snapshot *p = sti_alloc(1, sizeof *p);
    if (!p || !sti_block_new(&p->memory, s->state_bytes + vocab * sizeof(float))) {
        free(p);
        return sti_fail_memory(err, "snapshot", s->state_bytes);
    }
    p->length = s->length;
    p->has_logits = s->has_logits;
    p->state_bytes = s->state_bytes;
    p->model = s->model;
    memcpy(p->settings, s->settings, sizeof p->settings);
    memcpy((char *)p->memory.p + s->state_bytes, s->logits, vocab * sizeof(float));
    still_status st = s->model->be->mem_move(s->model->dev, p->memory.p, s->state,
                                             s->state_bytes, err);
    if (st != STILL_OK) {
        still_snapshot_free(p);
        return st;
    }
    *out = p;
    return STILL_OK;
}

void still_snapshot_free(still_snapshot *p)
{
    if (!p) return;
    sti_block_free(&p->memory);
    free(p);
}

/* Replaces the session's past; boundaries of the old past are dropped. */
static still_status adopt(still_session *s, const void *state, const void *logits,
                          int length, bool has_logits, still_error *err)
{
    STI_TRY(
        s->model->be->mem_move(s->model->dev, s->state, state, s->state_bytes, err));
    memcpy(s->logits, logits, (size_t)s->model->cfg.vocab * sizeof(float));
    for (int i = 0; i < s->rollback; i++) s->boundary[i].length = 0;
    s->length = length;
    s->has_logits = has_logits;
    return sti_session_mark(s, length, err);
}

still_status still_session_restore(still_session *s, const still_snapshot *p,
                                   still_error *err)
{
    if (p->model != s->model || p->state_bytes != s->state_bytes ||
        strcmp(p->settings, s->settings) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "the snapshot is of a session with another model, method, "
                        "settings or context");
    return adopt(s, p->memory.p, (const char *)p->memory.p + p->state_bytes, p->length,
                 p->has_logits, err);
}

/* ---- Chunk boundaries ---------------------------------------------------- */

int sti_session_chunk(const still_session *s)
{
    return s->cfg.hybrid.chunk > 0 ? s->cfg.hybrid.chunk : s->cfg.batch;
}

still_status sti_session_mark(still_session *s, int length, still_error *err)
{
    if (s->rollback == 0 || sti_session_keeps_all(s) || length == 0 ||
        length % sti_session_chunk(s) != 0)
        return STILL_OK;
    sti_boundary *b = &s->boundary[length / sti_session_chunk(s) % s->rollback];
    STI_TRY(
        s->model->be->mem_move(s->model->dev, b->state, s->state, s->state_bytes, err));
    b->length = length;
    return STILL_OK;
}

/* The shortest length a cache of all keys can be cut to: rings of sliding-window layers
 * have already overwritten what was before the window and a batch. */
static int oldest_length(const still_session *s)
{
    int oldest = 0;
    for (int l = 0; l < s->model->cfg.layers; l++) {
        int window = s->model->cfg.window[l], capacity = s->layer[l].softmax.capacity;
        if (capacity >= s->cfg.ctx) continue;
        int reach = s->length - (capacity - window);
        if (reach > oldest) oldest = reach;
    }
    return oldest;
}

still_status still_session_rollback(still_session *s, int length, int *at,
                                    still_error *err)
{
    if (length < 0 || length > s->length)
        return sti_fail(err, STILL_E_ARG, "cannot go back to %d tokens from %d", length,
                        s->length);
    if (length == 0) {
        still_session_reset(s);
        *at = 0;
        return STILL_OK;
    }
    if (sti_session_keeps_all(s)) {
        int oldest = oldest_length(s);
        if (length < oldest)
            return sti_fail(err, STILL_E_LIMIT,
                            "cannot go back to %d tokens: a sliding-window layer keeps "
                            "what %d or more need",
                            length, oldest);
    } else {
        const sti_boundary *best = NULL;
        for (int i = 0; i < s->rollback; i++) {
            const sti_boundary *b = &s->boundary[i];
            if (b->length && b->length <= length && (!best || b->length > best->length))
                best = b;
        }
        if (!best)
            return sti_fail(
                err, STILL_E_LIMIT,
                "cannot go back to %d tokens: no chunk boundary at or before "
                "it is kept (%d are)",
                length, s->rollback);
        STI_TRY(s->model->be->mem_move(s->model->dev, s->state, best->state,
                                       s->state_bytes, err));
        length = best->length;
        for (int i = 0; i < s->rollback; i++)
            if (s->boundary[i].length > length) s->boundary[i].length = 0;
    }
    s->length = length;
    s->has_logits = false;
    *at = length;
    return STILL_OK;
}

/* ---- In a file ----------------------------------------------------------- */

static const char MAGIC[8] = "STILLST1";
enum { VERSION = 2 };

typedef struct file_head {
    char magic[8];
    uint32_t version, line_bytes;
    unsigned char fingerprint[STI_FINGERPRINT];
    uint64_t length, state_bytes, vocab;
    uint32_t has_logits, zero;
} file_head;
_Static_assert(sizeof(file_head) == 80, "the file header has no holes");

static void make_head(const still_session *s, file_head *head)
{
    *head = (file_head){.version = VERSION,
                        .line_bytes = (uint32_t)strlen(s->settings),
                        .length = (uint64_t)s->length,
                        .state_bytes = s->state_bytes,
                        .vocab = (uint64_t)s->model->cfg.vocab,
                        .has_logits = s->has_logits};
    memcpy(head->magic, MAGIC, sizeof MAGIC);
    sti_model_fingerprint(s->model, true, head->fingerprint);
}

typedef struct part {
    void *p;
    size_t n;
} part;

static uint32_t checksum(const part *parts, int n)
{
    uLong crc = crc32(0, NULL, 0);
    for (int i = 0; i < n; i++) crc = crc32_z(crc, parts[i].p, parts[i].n);
    return (uint32_t)crc;
}

static still_status write_file(const still_session *s, file_head *head, void *state,
                               const char *path, still_error *err)
{
    part parts[] = {{head, sizeof *head},
                    {(void *)s->settings, head->line_bytes},
                    {s->logits, (size_t)head->vocab * sizeof(float)},
                    {state, s->state_bytes}};
    uint32_t crc = checksum(parts, 4);
    sti_new_file *f;
    STI_TRY(sti_new_file_open(path, &f, err));
    still_status st = STILL_OK;
    for (int i = 0; i < 4 && st == STILL_OK; i++)
        st = sti_new_file_put(f, parts[i].p, parts[i].n, err);
    if (st == STILL_OK) st = sti_new_file_put(f, &crc, sizeof crc, err);
    if (st == STILL_OK) return sti_new_file_finish(f, err);
    sti_new_file_abort(f);
    return st;
}

still_status still_session_save(const still_session *s, const char *path,
                                still_error *err)
{
    file_head head;
    sti_block copy;
    make_head(s, &head);
    if (s->model->be->host_memory) return write_file(s, &head, s->state, path, err);
    if (!sti_block_new(&copy, s->state_bytes))
        return sti_fail_memory(err, "the session's past", s->state_bytes);
    still_status st =
        s->model->be->mem_move(s->model->dev, copy.p, s->state, s->state_bytes, err);
    if (st == STILL_OK) st = write_file(s, &head, copy.p, path, err);
    sti_block_free(&copy);
    return st;
}

/* Compares the header of a file with what this session would write. */
static still_status check_head(const still_session *s, const sti_map *map,
                               const char *path, file_head *got, still_error *err)
{
    file_head want;
    if (map->size < sizeof *got || memcmp(map->data, MAGIC, sizeof MAGIC) != 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: not a saved session of still", path);
    memcpy(got, map->data, sizeof *got);
    if (got->version != VERSION)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: saved in version %u of the format, this program reads %d",
                        path, got->version, VERSION);
    make_head(s, &want);
    if (memcmp(got->fingerprint, want.fingerprint, STI_FINGERPRINT) != 0)
        return sti_fail(err, STILL_E_ARG, "%s: saved with another model than %s", path,
                        s->model->store.path);
    const char *text = (const char *)map->data + sizeof *got;
    if (got->line_bytes >= STI_SETTINGS_LINE ||
        map->size - sizeof *got < got->line_bytes)
        return sti_fail(err, STILL_E_FORMAT, "%s: its settings end outside the file",
                        path);
    if (got->line_bytes != want.line_bytes ||
        memcmp(text, s->settings, want.line_bytes) != 0)
        return sti_fail(err, STILL_E_ARG, "%s: saved with '%.*s', the session has '%s'",
                        path, (int)got->line_bytes, text, s->settings);
    if (got->state_bytes != want.state_bytes || got->vocab != want.vocab)
        return sti_fail(err, STILL_E_ARG,
                        "%s: holds %llu bytes of state, the session %llu: use the "
                        "context it was saved with",
                        path, (unsigned long long)got->state_bytes,
                        (unsigned long long)want.state_bytes);
    if (got->length > (uint64_t)s->cfg.ctx)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: holds %llu tokens, the session's context is %d", path,
                        (unsigned long long)got->length, s->cfg.ctx);
    size_t whole = sizeof *got + want.line_bytes + (size_t)want.vocab * sizeof(float) +
                   s->state_bytes + sizeof(uint32_t);
    if (map->size != whole)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: has %zu bytes, expected %zu (truncated?)", path, map->size,
                        whole);
    return STILL_OK;
}

/* Counts in the state index arrays, so they are checked, in a copy at `state`, before
 * anything is computed with them. layer [layers] is scratch. */
static bool sound(const still_session *s, void *state, sti_attn_memory *layer,
                  int length)
{
    sti_session_lay_out(s, state, layer);
    for (int l = 0; l < s->model->cfg.layers; l++) {
        const sti_attn_engine *e = sti_attn_engine_of(&s->cfg, l);
        sti_attn_layer of = sti_model_attn_layer(s->model, l);
        if (e->sound && !e->sound(&s->cfg, &of, &layer[l], length)) return false;
    }
    return true;
}

still_status still_session_load(still_session *s, const char *path, still_error *err)
{
    sti_map map;
    file_head head;
    STI_TRY(sti_map_open(path, &map, err));
    still_status st = check_head(s, &map, path, &head, err);
    if (st == STILL_OK) {
        uint32_t crc;
        memcpy(&crc, map.data + map.size - sizeof crc, sizeof crc);
        if (checksum(&(part){(void *)map.data, map.size - sizeof crc}, 1) != crc)
            st = sti_fail(err, STILL_E_FORMAT, "%s: checksum does not match its bytes",
                          path);
    }
    sti_block copy = {0};
    const size_t layers = (size_t)s->model->cfg.layers;
    sti_attn_memory *layer = sti_alloc(layers, sizeof *layer);
    if (st == STILL_OK && (!layer || !sti_block_new(&copy, s->state_bytes)))
        st = sti_fail_memory(err, path, s->state_bytes);
    if (st == STILL_OK) {
        const unsigned char *logits = map.data + sizeof head + head.line_bytes;
        memcpy(copy.p, logits + (size_t)head.vocab * sizeof(float), s->state_bytes);
        if (sound(s, copy.p, layer, (int)head.length))
            st = adopt(s, copy.p, logits, (int)head.length, head.has_logits != 0, err);
        else
            st = sti_fail(err, STILL_E_FORMAT, "%s: its counts of tokens cannot be",
                          path);
    }
    sti_block_free(&copy);
    free(layer);
    sti_map_close(&map);
    return st;
}
