/* snapshot_file.c - a past in a file.
 *
 * A file holds what a snapshot holds, and what it must match: the model's fingerprint and
 * the settings as one line of text, which an error can show.
 *
 *   "STILLST1"  u32 version  u32 bytes of the settings line
 *   fingerprint [32]  u64 length  u64 state bytes  u64 vocabulary  u32 has logits
 *   settings line  logits [vocabulary]  past  u32 CRC-32 of all before it
 *
 * State bytes are those of a session with the same context; the past is what its tokens
 * have filled of them (snapshot.c). */
#include "session/snapshot.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

static const char MAGIC[8] = "STILLST1";
enum { VERSION = 3 };

typedef struct file_head {
    char magic[8];
    uint32_t version, line_bytes;
    unsigned char fingerprint[STI_FINGERPRINT];
    uint64_t length, state_bytes, vocab;
    uint32_t has_logits, zero;
} file_head;
_Static_assert(sizeof(file_head) == 80, "the file header has no holes");

static void make_head(const still_model *m, const char *settings, size_t state_bytes,
                      file_head *head)
{
    *head = (file_head){.version = VERSION,
                        .line_bytes = (uint32_t)strlen(settings),
                        .state_bytes = state_bytes,
                        .vocab = (uint64_t)m->cfg.vocab};
    memcpy(head->magic, MAGIC, sizeof MAGIC);
    sti_model_fingerprint(m, true, head->fingerprint);
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

still_status still_snapshot_save(const still_snapshot *p, const char *path,
                                 still_error *err)
{
    file_head head;
    make_head(p->model, p->settings, p->whole_bytes, &head);
    head.length = (uint64_t)p->length;
    head.has_logits = p->has_logits;
    part parts[] = {{&head, sizeof head},
                    {(void *)p->settings, head.line_bytes},
                    {p->logits, (size_t)head.vocab * sizeof(float)},
                    {p->past, p->past_bytes}};
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
    still_snapshot *p;
    STI_TRY(still_session_snapshot(s, &p, err));
    const still_status st = still_snapshot_save(p, path, err);
    still_snapshot_free(p);
    return st;
}

/* The next word of a line of n bytes from *at on; its length, 0 at the end. */
static size_t next_word(const char *line, size_t n, size_t *at)
{
    while (*at < n && line[*at] == ' ') ++*at;
    const char *end = memchr(line + *at, ' ', n - *at);
    return end ? (size_t)(end - line) - *at : n - *at;
}

static bool has_word(const char *line, size_t n, const char *word, size_t length)
{
    for (size_t at = 0, w; (w = next_word(line, n, &at)) > 0; at += w)
        if (w == length && memcmp(line + at, word, w) == 0) return true;
    return false;
}

/* The words of a line of settings that another does not have. */
static void only_in(const char *line, size_t n, const char *other, size_t n_other,
                    char out[static STI_SETTINGS_LINE])
{
    size_t used = 0;
    out[0] = 0;
    for (size_t at = 0, w; (w = next_word(line, n, &at)) > 0; at += w)
        if (!has_word(other, n_other, line + at, w) && used + w + 2 < STI_SETTINGS_LINE)
            used += (size_t)snprintf(out + used, STI_SETTINGS_LINE - used, "%s%.*s",
                                     used ? " " : "", (int)w, line + at);
}

static still_status other_settings(const still_session *s, const char *path,
                                   const char *line, size_t n, still_error *err)
{
    char theirs[STI_SETTINGS_LINE], ours[STI_SETTINGS_LINE];
    const size_t mine = strlen(s->settings);
    only_in(line, n, s->settings, mine, theirs);
    only_in(s->settings, mine, line, n, ours);
    return sti_fail(err, STILL_E_ARG, "%s: saved with '%s', the session has '%s'", path,
                    theirs, ours);
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
    make_head(s->model, s->settings, s->state_bytes, &want);
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
        return other_settings(s, path, text, got->line_bytes, err);
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
    size_t past = 0;
    STI_TRY(sti_session_past(s, (int)got->length, NULL, NULL, &past, err));
    size_t whole = sizeof *got + want.line_bytes + (size_t)want.vocab * sizeof(float) +
                   past + sizeof(uint32_t);
    if (map->size != whole)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: has %zu bytes, expected %zu (truncated?)", path, map->size,
                        whole);
    return STILL_OK;
}

typedef struct copy {
    unsigned char *state;
    const unsigned char *past;
} copy;

static still_status unpack(void *user, size_t at, size_t packed, size_t n,
                           still_error *err)
{
    const copy *c = user;
    (void)err;
    memcpy(c->state + at, c->past + packed, n);
    return STILL_OK;
}

/* Counts in the state index arrays, so they are checked, in a copy, before anything is
 * computed with them. */
static still_status check_sound(const still_session *s, const still_snapshot *p,
                                const char *path, still_error *err)
{
    const int layers = s->model->cfg.layers;
    sti_attn_memory *layer = sti_alloc((size_t)layers, sizeof *layer);
    sti_block block = {0};
    size_t bytes;
    still_status st = STILL_OK;
    if (!layer || !sti_block_new(&block, s->state_bytes))
        st = sti_fail_memory(err, path, s->state_bytes);
    if (st == STILL_OK) {
        copy c = {block.p, p->past};
        st = sti_session_past(s, p->length, unpack, &c, &bytes, err);
    }
    if (st == STILL_OK) sti_session_lay_out(s, block.p, layer);
    for (int l = 0; l < layers && st == STILL_OK; l++) {
        const sti_attn_engine *e = sti_attn_engine_of(&s->cfg, l);
        sti_attn_layer of = sti_model_attn_layer(s->model, l);
        if (e->sound && !e->sound(&s->cfg, &of, &layer[l], p->length))
            st = sti_fail(err, STILL_E_FORMAT, "%s: its counts of tokens cannot be",
                          path);
    }
    sti_block_free(&block);
    free(layer);
    return st;
}

static still_status read_map(const still_session *s, const sti_map *map,
                             const char *path, still_snapshot **out, still_error *err)
{
    file_head head;
    uint32_t crc;
    STI_TRY(check_head(s, map, path, &head, err));
    memcpy(&crc, map->data + map->size - sizeof crc, sizeof crc);
    if (checksum(&(part){(void *)map->data, map->size - sizeof crc}, 1) != crc)
        return sti_fail(err, STILL_E_FORMAT, "%s: checksum does not match its bytes",
                        path);
    still_snapshot *p;
    STI_TRY(sti_snapshot_new(s, (int)head.length, &p, err));
    const size_t logits = (size_t)head.vocab * sizeof(float);
    const unsigned char *from = map->data + sizeof head + head.line_bytes;
    memcpy(p->logits, from, logits);
    memcpy(p->past, from + logits, p->past_bytes);
    p->has_logits = head.has_logits != 0;
    const still_status st = check_sound(s, p, path, err);
    if (st == STILL_OK)
        *out = p;
    else
        still_snapshot_free(p);
    return st;
}

still_status still_snapshot_load(const still_session *s, const char *path,
                                 still_snapshot **out, still_error *err)
{
    sti_map map;
    *out = NULL;
    STI_TRY(sti_map_open(path, &map, err));
    const still_status st = read_map(s, &map, path, out, err);
    sti_map_close(&map);
    return st;
}

still_status still_session_load(still_session *s, const char *path, still_error *err)
{
    still_snapshot *p;
    STI_TRY(still_snapshot_load(s, path, &p, err));
    const still_status st = still_session_restore(s, p, err);
    still_snapshot_free(p);
    return st;
}
