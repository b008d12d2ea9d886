/* bpe.c - see bpe.h.
 *
 * Short inputs (nearly all words) are merged by scanning an array of ranks; long ones
 * go through a heap over a linked list, so a megabyte of one letter costs n log n.
 * Both choose the lowest rank, leftmost first, and give the same result. */
#include "token/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

enum { SHORT = 48 }; /* symbols; beyond it the heap wins */
static const uint32_t NO_RANK = UINT32_MAX;

/* ---- Table --------------------------------------------------------------- */

static inline size_t first_slot(const sti_bpe *b, int32_t left, int32_t right)
{
    return sti_hash_pair(&b->key, (uint32_t)left, (uint32_t)right) & b->mask;
}

static inline const sti_pair *find(const sti_bpe *b, int32_t left, int32_t right)
{
    if ((left | right) < 0) return NULL;
    for (size_t i = first_slot(b, left, right);; i = (i + 1) & b->mask) {
        const sti_pair *s = &b->slot[i];
        if (s->left == left && s->right == right) return s;
        if (s->left < 0) return NULL;
    }
}

still_status sti_bpe_reserve(sti_bpe *b, size_t n, still_error *err)
{
    size_t capacity = 16;
    while (capacity < 2 * n) capacity *= 2;
    b->slot = sti_alloc(capacity, sizeof *b->slot);
    if (!b->slot) return sti_fail_memory(err, "merges", capacity * sizeof *b->slot);
    b->mask = capacity - 1;
    b->key = sti_hash_key_new();
    for (size_t i = 0; i < capacity; i++) b->slot[i].left = -1;
    return STILL_OK;
}

void sti_bpe_put(sti_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    size_t i = first_slot(b, left, right);
    for (; b->slot[i].left >= 0; i = (i + 1) & b->mask) {
        sti_pair *s = &b->slot[i];
        if (s->left != left || s->right != right) continue;
        if (rank < s->rank) *s = (sti_pair){left, right, rank, id};
        return;
    }
    b->slot[i] = (sti_pair){left, right, rank, id};
    b->n++;
}

void sti_bpe_free(sti_bpe *b)
{
    free(b->slot);
    free(b->whole);
    free(b->parts);
    *b = (sti_bpe){0};
}

size_t sti_bpe_bytes(const sti_bpe *b, int vocab)
{
    size_t per_token = (b->whole ? 1 : 0) + (b->parts ? sizeof *b->parts : 0);
    return (b->slot ? (b->mask + 1) * sizeof *b->slot : 0) + per_token * (size_t)vocab;
}

/* ---- Short inputs -------------------------------------------------------- */

static void run_short(const sti_bpe *b, int32_t *sym, size_t *count)
{
    uint32_t rank[SHORT]; /* of the pair (i, i+1) */
    int32_t made[SHORT];
    size_t n = *count;
    for (size_t i = 0; i + 1 < n; i++) {
        const sti_pair *s = find(b, sym[i], sym[i + 1]);
        rank[i] = s ? s->rank : NO_RANK;
        made[i] = s ? s->id : -1;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        sym[best] = made[best];
        n--;
        memmove(sym + best + 1, sym + best + 2, (n - best - 1) * sizeof *sym);
        memmove(rank + best, rank + best + 1, (n - best - 1) * sizeof *rank);
        memmove(made + best, made + best + 1, (n - best - 1) * sizeof *made);
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const sti_pair *s = find(b, sym[i], sym[i + 1]);
            rank[i] = s ? s->rank : NO_RANK;
            made[i] = s ? s->id : -1;
        }
    }
    *count = n;
}

/* ---- Long inputs --------------------------------------------------------- */

/* The heap holds pairs as rank << 32 | index of the left symbol: smaller goes first. */

static void heap_push(uint64_t *h, size_t *n, uint64_t x)
{
    size_t i = (*n)++;
    for (; i && x < h[(i - 1) / 2]; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}

static uint64_t heap_pop(uint64_t *h, size_t *n)
{
    uint64_t top = h[0], x = h[--*n];
    size_t i = 0;
    for (size_t kid; (kid = 2 * i + 1) < *n; i = kid) {
        if (kid + 1 < *n && h[kid + 1] < h[kid]) kid++;
        if (x <= h[kid]) break;
        h[i] = h[kid];
    }
    h[i] = x;
    return top;
}

static void offer(const sti_bpe *b, const int32_t *sym, int32_t left, int32_t right,
                  uint64_t *heap, size_t *n)
{
    if (left < 0 || right < 0) return;
    const sti_pair *s = find(b, sym[left], sym[right]);
    if (s) heap_push(heap, n, (uint64_t)s->rank << 32 | (uint32_t)left);
}

static still_status run_long(const sti_bpe *b, int32_t *sym, size_t *count,
                             sti_bpe_work *w, still_error *err)
{
    size_t n = *count, heaped = 0;
    if (n > INT32_MAX / 4)
        return sti_fail(
            err, STILL_E_LIMIT,
            "%zu symbols without a place to split, at most %d can be merged", n,
            INT32_MAX / 4);
    if (w->link_capacity < n) {
        int32_t *prev = sti_grow(w->prev, n, sizeof *prev);
        if (prev) w->prev = prev;
        int32_t *next = sti_grow(w->next, n, sizeof *next);
        if (next) w->next = next;
        if (!prev || !next)
            return sti_fail_memory(err, "merging", 2 * n * sizeof *prev);
        w->link_capacity = n;
    }
    if (w->heap_capacity <
        3 * n) { /* n - 1 pairs, and two more for each of n - 1 merges */
        uint64_t *heap = sti_grow(w->heap, 3 * n, sizeof *heap);
        if (!heap) return sti_fail_memory(err, "merging", 3 * n * sizeof *heap);
        w->heap = heap;
        w->heap_capacity = 3 * n;
    }
    int32_t *prev = w->prev, *next = w->next;
    for (size_t i = 0; i < n; i++) {
        prev[i] = (int32_t)i - 1;
        next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
        if (i) offer(b, sym, (int32_t)i - 1, (int32_t)i, w->heap, &heaped);
    }
    while (heaped) {
        uint64_t top = heap_pop(w->heap, &heaped);
        int32_t at = (int32_t)(uint32_t)top, right = next[at];
        /* The pair may have changed since it was offered. A symbol merged away holds
         * -1 and is in no pair; a new pair of the same rank may as well go now, since
         * its own entry is equal to this one. */
        const sti_pair *s = right < 0 ? NULL : find(b, sym[at], sym[right]);
        if (!s || s->rank != (uint32_t)(top >> 32)) continue;
        sym[at] = s->id;
        sym[right] = -1;
        next[at] = next[right];
        if (next[right] >= 0) prev[next[right]] = at;
        offer(b, sym, prev[at], at, w->heap, &heaped);
        offer(b, sym, at, next[at], w->heap, &heaped);
    }
    size_t k = 0;
    for (int32_t i = 0; i >= 0; i = next[i]) sym[k++] = sym[i];
    *count = k;
    return STILL_OK;
}

still_status sti_bpe_run(const sti_bpe *b, int32_t *sym, size_t *n, sti_bpe_work *w,
                         still_error *err)
{
    if (*n > SHORT) return run_long(b, sym, n, w, err);
    run_short(b, sym, n);
    return STILL_OK;
}

void sti_bpe_work_free(sti_bpe_work *w)
{
    free(w->sym);
    free(w->prev);
    free(w->next);
    free(w->heap);
    *w = (sti_bpe_work){0};
}

still_status sti_bpe_work_symbols(sti_bpe_work *w, size_t n, still_error *err)
{
    if (n <= w->sym_capacity) return STILL_OK;
    size_t capacity = w->sym_capacity ? w->sym_capacity : 256;
    while (capacity < n) capacity *= 2;
    int32_t *sym = sti_grow(w->sym, capacity, sizeof *sym);
    if (!sym) return sti_fail_memory(err, "encoding", capacity * sizeof *sym);
    w->sym = sym;
    w->sym_capacity = capacity;
    return STILL_OK;
}

/* ---- From tokens to merges ----------------------------------------------- */

size_t sti_bpe_symbols(const sti_bpe *b, const sti_vocab *v, const char *p, size_t n,
                       int32_t *sym)
{
    size_t k = 0;
    if (!b->by_char) {
        for (size_t i = 0; i < n; i++) sym[k++] = v->byte_id[(unsigned char)p[i]];
        return k;
    }
    for (size_t i = 0, len; i < n; i += len) {
        sti_utf8_decode(p + i, &len);
        sym[k++] = sti_vocab_find(v, p + i, len);
    }
    return k;
}

/* What encoding a token's own bytes ends with, given the merges in the table. */
typedef struct outcome {
    bool single; /* the token itself */
    bool pair;   /* two tokens, left and right */
    int32_t left, right;
} outcome;

static still_status encode_token(const sti_bpe *b, const sti_vocab *v, int32_t id,
                                 sti_bpe_work *w, outcome *out, still_error *err)
{
    size_t n;
    const char *p = sti_vocab_piece(v, id, &n);
    *out = (outcome){false, false, -1, -1};
    if (!n || (b->by_char && sti_utf8_span(p, n) != n)) return STILL_OK;
    if (sti_vocab_find(v, p, n) != id) return STILL_OK;
    STI_TRY(sti_bpe_work_symbols(w, n, err));
    size_t k = sti_bpe_symbols(b, v, p, n, w->sym);
    STI_TRY(sti_bpe_run(b, w->sym, &k, w, err));
    out->single = k == 1 && w->sym[0] == id;
    out->pair = k == 2 && w->sym[0] >= 0 && w->sym[1] >= 0;
    out->left = w->sym[0];
    out->right = k > 1 ? w->sym[1] : -1;
    return STILL_OK;
}

still_status sti_bpe_mark_whole(sti_bpe *b, const sti_vocab *v, still_error *err)
{
    b->whole = sti_alloc((size_t)v->n, 1);
    if (!b->whole) return sti_fail_memory(err, "merges", (size_t)v->n);
    sti_bpe_work w = {0};
    still_status st = STILL_OK;
    for (int32_t id = 0; id < v->n && st == STILL_OK; id++) {
        outcome o;
        st = encode_token(b, v, id, &w, &o, err);
        if (st == STILL_OK) b->whole[id] = o.single;
    }
    sti_bpe_work_free(&w);
    return st;
}

/* Token ids by length, shortest first, stable. */
static int32_t *ids_by_length(const sti_vocab *v)
{
    uint32_t *first = sti_alloc(STI_MAX_PIECE + 2, sizeof *first);
    int32_t *order = sti_alloc((size_t)v->n, sizeof *order);
    if (first && order) {
        for (int32_t i = 0; i < v->n; i++) first[v->at[i + 1] - v->at[i] + 1]++;
        for (int i = 1; i <= STI_MAX_PIECE + 1; i++) first[i] += first[i - 1];
        for (int32_t i = 0; i < v->n; i++) order[first[v->at[i + 1] - v->at[i]]++] = i;
    } else {
        free(order);
        order = NULL;
    }
    free(first);
    return order;
}

/* A token T can only arise inside a text if no merge crosses T's ends, and then its
 * bytes were merged just as they are when T stands alone. So the last merge that makes
 * T is always the same one, found by encoding T with the merges of shorter tokens: if
 * two symbols are left, those two are it; if more are left, T never arises. This holds
 * for any ranks, in order or not, and keeps one merge a token. */
still_status sti_bpe_learn(sti_bpe *b, const sti_vocab *v, const uint32_t *rank,
                           still_error *err)
{
    size_t n = (size_t)v->n;
    STI_TRY(sti_bpe_reserve(b, n, err));
    b->whole = sti_alloc(n, 1);
    b->parts = sti_alloc(n, sizeof *b->parts);
    int32_t *order = ids_by_length(v);
    sti_bpe_work w = {0};
    still_status st = STILL_OK;
    if (!b->whole || !b->parts || !order) st = sti_fail_memory(err, "merges", n * 9);
    for (size_t i = 0; i < n && st == STILL_OK; i++) {
        int32_t id = order[i];
        outcome o;
        st = encode_token(b, v, id, &w, &o, err);
        if (st != STILL_OK) break;
        b->whole[id] = o.single || o.pair;
        b->parts[id][0] = o.pair ? o.left : -1;
        b->parts[id][1] = o.pair ? o.right : -1;
        if (o.pair) sti_bpe_put(b, o.left, o.right, rank[id], id);
    }
    sti_bpe_work_free(&w);
    free(order);
    return st;
}
