/* cache.c - tokens of one file of training text, on disk.
 *
 * The name of a cache is a hash of what it was made from, so a cache is never stale: if
 * data or tokenizer change, it is not found. A cache is still untrusted input and is
 * checked completely before use; one pass at memory speed costs little next to training
 * on it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include "train/data/parts.h"

static const char MAGIC[8] = {'S', 'T', 'I', 'L', 'L', 'T', 'O', 'K'};

_Static_assert(sizeof(sti_cache_header) == 320, "the header has no holes");
_Static_assert(sizeof(sti_cache_header) % sizeof(uint32_t) == 0, "entries are aligned");

static uint32_t crc_of(uint32_t crc, const void *p, size_t n)
{
    return (uint32_t)crc32_z(crc, p, n);
}

uint32_t sti_cache_head_crc(const sti_cache_header *h)
{
    return crc_of(0, h, offsetof(sti_cache_header, head_crc));
}

/* ---- Reading ------------------------------------------------------------- */

static still_status check(const sti_cache *c, const unsigned char *key, int vocab,
                          still_error *err)
{
    const char *path = c->map.path;
    if (c->map.size < sizeof *c->head)
        return sti_fail(err, STILL_E_FORMAT, "%s: %zu bytes, the header has %zu", path,
                        c->map.size, sizeof *c->head);
    const sti_cache_header *h = c->head;
    if (memcmp(h->magic, MAGIC, sizeof MAGIC) != 0 || h->version != STI_CACHE_VERSION)
        return sti_fail(err, STILL_E_FORMAT, "%s: is no token cache of version %d",
                        path, STI_CACHE_VERSION);
    if (sti_cache_head_crc(h) != h->head_crc)
        return sti_fail(err, STILL_E_FORMAT, "%s: the header's checksum is wrong",
                        path);
    if (memcmp(h->key, key, sizeof h->key) != 0 || h->vocab != (uint32_t)vocab)
        return sti_fail(err, STILL_E_FORMAT, "%s: was made from something else", path);
    if (!memchr(h->first_broken, 0, sizeof h->first_broken) || h->broken > h->records)
        return sti_fail(err, STILL_E_FORMAT, "%s: damaged header", path);
    size_t body = c->map.size - sizeof *h;
    if (body % sizeof *c->entry || body / sizeof *c->entry != h->tokens)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %llu tokens in %zu bytes (truncated?)", path,
                        (unsigned long long)h->tokens, body);
    if (crc_of(0, c->entry, body) != h->body_crc)
        return sti_fail(err, STILL_E_FORMAT, "%s: the tokens' checksum is wrong", path);
    for (uint64_t i = 0; i < h->tokens; i++)
        if ((c->entry[i] & ~STI_CACHE_OUTPUT) >= h->vocab)
            return sti_fail(err, STILL_E_FORMAT, "%s: token %llu is beyond %d ids",
                            path, (unsigned long long)i, vocab);
    return STILL_OK;
}

still_status sti_cache_open(const char *path, const unsigned char *key, int vocab,
                            sti_cache *out, still_error *err)
{
    *out = (sti_cache){0};
    STI_TRY(sti_map_open(path, &out->map, err));
    out->head = (const void *)out->map.data;
    out->entry = (const void *)(out->map.data + sizeof *out->head);
    still_status status = check(out, key, vocab, err);
    if (status != STILL_OK) sti_cache_close(out);
    return status;
}

void sti_cache_close(sti_cache *c)
{
    sti_map_close(&c->map);
    *c = (sti_cache){0};
}

/* ---- Writing ------------------------------------------------------------- */

/* Entries are streamed after space for the header, which is written last, when
 * counts and checksums are known. */

struct sti_cache_writer {
    sti_new_file *file;
    uint64_t tokens;
    uint32_t crc;
};

still_status sti_cache_create(const char *path, sti_cache_writer **out,
                              still_error *err)
{
    static const sti_cache_header later;
    *out = NULL;
    sti_cache_writer *w = sti_alloc(1, sizeof *w);
    if (!w) return sti_fail_memory(err, path, sizeof *w);
    still_status status = sti_new_file_open(path, &w->file, err);
    if (status == STILL_OK)
        status = sti_new_file_put(w->file, &later, sizeof later, err);
    if (status != STILL_OK)
        sti_cache_abort(w);
    else
        *out = w;
    return status;
}

still_status sti_cache_put(sti_cache_writer *w, const uint32_t *entry, size_t n,
                           still_error *err)
{
    STI_TRY(sti_new_file_put(w->file, entry, n * sizeof *entry, err));
    w->crc = crc_of(w->crc, entry, n * sizeof *entry);
    w->tokens += n;
    return STILL_OK;
}

still_status sti_cache_finish(sti_cache_writer *w, sti_cache_header *h,
                              still_error *err)
{
    memcpy(h->magic, MAGIC, sizeof MAGIC);
    h->version = STI_CACHE_VERSION;
    h->tokens = w->tokens;
    h->body_crc = w->crc;
    h->head_crc = sti_cache_head_crc(h);
    still_status status = sti_new_file_put_at(w->file, 0, h, sizeof *h, err);
    if (status == STILL_OK) {
        status = sti_new_file_finish(w->file, err);
        w->file = NULL;
    }
    sti_cache_abort(w); /* frees; removes what is left of a failure */
    return status;
}

void sti_cache_abort(sti_cache_writer *w)
{
    if (!w) return;
    sti_new_file_abort(w->file);
    free(w);
}

still_status sti_cache_folder(const char *path, still_error *err)
{
    char *part = sti_strdup(path);
    if (!part) return sti_fail_memory(err, path, strlen(path) + 1);
    bool made = true;
    for (char *p = part + 1; made && *part; p++) {
        char c = *p;
        if (c != '/' && c != 0) continue;
        *p = 0;
        made = mkdir(part, 0777) == 0 || errno == EEXIST;
        *p = c;
        if (c == 0) break;
    }
    struct stat st;
    if (made && stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) {
        errno = ENOTDIR;
        made = false;
    }
    still_status status = made ? STILL_OK
                               : sti_fail(err, STILL_E_IO, "%s: cannot make folder: %s",
                                          path, strerror(errno));
    free(part);
    return status;
}
