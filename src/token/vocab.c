/* vocab.c - see vocab.h. Token bytes lie in one growing block; the look-up is an open
 * hash table of ids with a tag, so a miss rarely touches token bytes. */
#include "token/vocab.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

void sti_vocab_init(sti_vocab *v)
{
    *v = (sti_vocab){0};
    for (int b = 0; b < 256; b++) v->byte_id[b] = -1;
}

void sti_vocab_free(sti_vocab *v)
{
    free(v->text);
    free(v->at);
    free(v->kind);
    free(v->slot);
    sti_vocab_init(v);
}

size_t sti_vocab_bytes(const sti_vocab *v)
{
    size_t tokens = (size_t)v->capacity * (sizeof *v->at + sizeof *v->kind);
    size_t slots = v->slot ? (v->mask + 1) * sizeof *v->slot : 0;
    return v->text_capacity + tokens + slots;
}

static still_status grow_table(sti_vocab *v, size_t n, still_error *err)
{
    if (v->n + 1 >= v->capacity) {
        int capacity = v->capacity ? 2 * v->capacity : 1024;
        uint32_t *at = sti_grow(v->at, (size_t)capacity, sizeof *at);
        if (!at)
            return sti_fail_memory(err, "vocabulary", (size_t)capacity * sizeof *at);
        v->at = at;
        unsigned char *kind = sti_grow(v->kind, (size_t)capacity, sizeof *kind);
        if (!kind) return sti_fail_memory(err, "vocabulary", (size_t)capacity);
        v->kind = kind;
        v->capacity = capacity;
        at[v->n] = (uint32_t)v->bytes;
    }
    if (v->bytes + n >=
        v->text_capacity) { /* never empty: empty tokens point there too */
        size_t capacity = v->text_capacity ? v->text_capacity : 4096;
        while (capacity <= v->bytes + n) capacity *= 2;
        char *text = sti_grow(v->text, capacity, 1);
        if (!text) return sti_fail_memory(err, "vocabulary text", capacity);
        v->text = text;
        v->text_capacity = capacity;
    }
    return STILL_OK;
}

still_status sti_vocab_add(sti_vocab *v, const char *p, size_t n, sti_kind kind,
                           still_error *err)
{
    if (v->n >= STI_MAX_TOKENS)
        return sti_fail(err, STILL_E_LIMIT, "vocabulary has more than %d tokens",
                        STI_MAX_TOKENS);
    if (n > STI_MAX_PIECE || v->bytes + n > UINT32_MAX)
        return sti_fail(err, STILL_E_LIMIT,
                        "token %d has %zu bytes, at most %d are expected", v->n, n,
                        STI_MAX_PIECE);
    STI_TRY(grow_table(v, n, err));
    if (n) memcpy(v->text + v->bytes, p, n);
    v->bytes += n;
    v->kind[v->n++] = (unsigned char)kind;
    v->at[v->n] = (uint32_t)v->bytes;
    return STILL_OK;
}

/* ---- Look-up ------------------------------------------------------------- */

int32_t sti_vocab_find(const sti_vocab *v, const char *p, size_t n)
{
    if (!v->slot) return -1;
    uint64_t h = sti_hash_bytes(&v->key, p, n);
    for (size_t i = h & v->mask;; i = (i + 1) & v->mask) {
        sti_vocab_slot s = v->slot[i];
        if (s.id < 0) return -1;
        if (s.tag != (uint32_t)(h >> 32)) continue;
        size_t len;
        const char *piece = sti_vocab_piece(v, s.id, &len);
        if (len == n && !memcmp(piece, p, n)) return s.id;
    }
}

static void put(sti_vocab *v, int32_t id)
{
    size_t n;
    const char *p = sti_vocab_piece(v, id, &n);
    if (!sti_kind_merges(v->kind[id]) || !n || sti_vocab_find(v, p, n) >= 0) return;
    uint64_t h = sti_hash_bytes(&v->key, p, n);
    size_t i = h & v->mask;
    while (v->slot[i].id >= 0) i = (i + 1) & v->mask;
    v->slot[i] = (sti_vocab_slot){(uint32_t)(h >> 32), id};
}

still_status sti_vocab_index(sti_vocab *v, still_error *err)
{
    size_t capacity = 16;
    while (capacity < 2 * (size_t)v->n) capacity *= 2;
    sti_vocab_slot *slot = sti_alloc(capacity, sizeof *slot);
    if (!slot) return sti_fail_memory(err, "vocabulary index", capacity * sizeof *slot);
    free(v->slot);
    v->slot = slot;
    v->key = sti_hash_key_new();
    v->mask = capacity - 1;
    for (size_t i = 0; i < capacity; i++) slot[i].id = -1;
    for (int32_t id = 0; id < v->n; id++) put(v, id);
    return STILL_OK;
}

still_status sti_vocab_index_last(sti_vocab *v, still_error *err)
{
    if (2 * (size_t)v->n > v->mask + 1) return sti_vocab_index(v, err);
    put(v, v->n - 1);
    return STILL_OK;
}

/* ---- Ways bytes are spelled in vocabulary files -------------------------- */

/* GPT-2 writes printable Latin-1 bytes as themselves and the other 68, in order, as
 * U+0100 .. U+0143. */
static int byte_of_gpt2(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) ||
        (c >= 0xAE && c <= 0xFF))
        return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    int k = (int)c - 0x100;
    if (k <= 0x20) return k;               /* 00..20 */
    if (k <= 0x42) return 0x7F + k - 0x21; /* 7F..A0 */
    return 0xAD;
}

bool sti_bytes_of_gpt2(const char *p, size_t n, char *out, size_t *n_out)
{
    size_t k = 0;
    if (sti_utf8_span(p, n) != n) return false;
    for (size_t i = 0, len; i < n; i += len) {
        int b = byte_of_gpt2(sti_utf8_decode(p + i, &len));
        if (b < 0) return false;
        out[k++] = (char)b;
    }
    *n_out = k;
    return true;
}

static int hex(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

int sti_byte_of_name(const char *p, size_t n)
{
    if (n != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int hi = hex(p[3]), lo = hex(p[4]);
    return hi < 0 || lo < 0 ? -1 : hi << 4 | lo;
}
