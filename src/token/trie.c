/* trie.c - see trie.h. */
#include "token/trie.h"

#include <stdlib.h>

/* ---- Nodes --------------------------------------------------------------- */

static inline size_t first_slot(const sti_trie *t, int32_t parent, unsigned char byte)
{
    return sti_hash_pair(&t->key, (uint32_t)parent, byte) & t->mask;
}

/* The child of a node for a byte; 0: none. */
static inline int32_t step(const sti_trie *t, int32_t at, unsigned char byte)
{
    for (size_t i = first_slot(t, at, byte);; i = (i + 1) & t->mask) {
        const int32_t k = t->slot[i];
        if (!k || (t->node[k].parent == at && t->node[k].byte == byte)) return k;
    }
}

static void put(sti_trie *t, int32_t k)
{
    size_t i = first_slot(t, t->node[k].parent, t->node[k].byte);
    while (t->slot[i]) i = (i + 1) & t->mask;
    t->slot[i] = k;
}

/* Room for twice as many nodes, at least 64, in a table half as full again. */
static bool grow(sti_trie *t)
{
    const size_t capacity = t->capacity ? 2 * (size_t)t->capacity : 64;
    sti_trie_node *node = sti_grow(t->node, capacity, sizeof *node);
    if (node) t->node = node;
    int32_t *slot = node ? sti_alloc(2 * capacity, sizeof *slot) : NULL;
    if (!slot) return false;
    if (!t->capacity) t->key = sti_hash_key_new();
    free(t->slot);
    t->slot = slot;
    t->mask = 2 * capacity - 1;
    t->capacity = (int)capacity;
    for (int32_t k = 1; k < t->n; k++) put(t, k);
    return true;
}

static int32_t new_node(sti_trie *t, int32_t parent, unsigned char byte)
{
    if (t->n == t->capacity && !grow(t)) return -1;
    t->node[t->n] = (sti_trie_node){
        .parent = parent, .any = -1, .user = -1, .open = -1, .byte = byte};
    if (t->n) put(t, t->n);
    return t->n++;
}

still_status sti_trie_add(sti_trie *t, const char *p, size_t n, int32_t id,
                          sti_trie_use use, still_error *err)
{
    if (!n) return STILL_OK;
    if (t->n > INT32_MAX / 4)
        return sti_fail(err, STILL_E_LIMIT, "special tokens are too long (%zu bytes)",
                        n);
    int32_t at = t->n ? 0 : new_node(t, 0, 0);
    for (size_t i = n; at >= 0 && i-- > 0;) {
        const unsigned char byte = (unsigned char)p[i];
        const int32_t next = step(t, at, byte);
        at = next ? next : new_node(t, at, byte);
    }
    if (at < 0)
        return sti_fail_memory(err, "special tokens",
                               2 * (size_t)t->capacity * sizeof *t->node);
    if (t->node[at].any < 0) {
        sti_trie_node *node = &t->node[at];
        node->any = id;
        node->user = use == STI_TRIE_CONTROL ? -1 : id;
        node->open = use == STI_TRIE_OPEN ? id : -1;
        node->any_n = node->user_n = node->open_n = (int32_t)n;
        t->users |= use != STI_TRIE_CONTROL;
    }
    t->ends[(unsigned char)p[n - 1]] = true;
    return STILL_OK;
}

void sti_trie_free(sti_trie *t)
{
    free(t->node);
    free(t->slot);
    *t = (sti_trie){0};
}

size_t sti_trie_bytes(const sti_trie *t)
{
    return (size_t)t->capacity * (sizeof *t->node + 2 * sizeof *t->slot);
}

/* ---- Where to go on when a byte leads nowhere ----------------------------- */

/* Nodes from the root outwards: depth[k] is known from the parent, made before k. */
static void order_by_depth(const sti_trie *t, int32_t *depth, int32_t *first,
                           int32_t *order)
{
    int32_t deepest = 0;
    depth[0] = 0;
    for (int32_t k = 1; k < t->n; k++) {
        depth[k] = depth[t->node[k].parent] + 1;
        if (depth[k] > deepest) deepest = depth[k];
    }
    for (int32_t k = 0; k < t->n; k++) first[depth[k] + 1]++;
    for (int32_t d = 0; d <= deepest; d++) first[d + 1] += first[d];
    for (int32_t k = 0; k < t->n; k++) order[first[depth[k]]++] = k;
}

static void link_node(sti_trie *t, int32_t k)
{
    sti_trie_node *node = &t->node[k];
    int32_t at = t->node[node->parent].fail, next = 0;
    if (node->parent) {
        while (!(next = step(t, at, node->byte)) && at) at = t->node[at].fail;
        node->fail = next;
    }
    const sti_trie_node *shorter = &t->node[node->fail];
    if (node->any < 0) node->any = shorter->any, node->any_n = shorter->any_n;
    if (node->user < 0) node->user = shorter->user, node->user_n = shorter->user_n;
    if (node->open < 0) node->open = shorter->open, node->open_n = shorter->open_n;
}

still_status sti_trie_finish(sti_trie *t, still_error *err)
{
    if (!t->n) return STILL_OK;
    const size_t n = (size_t)t->n;
    int32_t *work = sti_alloc(3 * n + 2, sizeof *work);
    if (!work) return sti_fail_memory(err, "special tokens", 3 * n * sizeof *work);
    int32_t *order = work, *depth = work + n, *first = work + 2 * n;
    order_by_depth(t, depth, first, order);
    for (size_t i = 1; i < n; i++) link_node(t, order[i]);
    free(work);
    return STILL_OK;
}

/* ---- Text ---------------------------------------------------------------- */

static bool push(sti_trie_hits *h, size_t start, int32_t id, int32_t n)
{
    if (h->n == h->capacity) {
        const size_t capacity = h->capacity ? 2 * h->capacity : 64;
        sti_trie_hit *hit = sti_grow(h->hit, capacity, sizeof *hit);
        if (!hit) return false;
        h->hit = hit;
        h->capacity = capacity;
    }
    h->hit[h->n++] = (sti_trie_hit){start, id, n};
    return true;
}

static int32_t advance(const sti_trie *t, int32_t at, unsigned char byte)
{
    int32_t next;
    while (!(next = step(t, at, byte)) && at) at = t->node[at].fail;
    return next;
}

static still_status no_room(const sti_trie_hits *h, still_error *err)
{
    return sti_fail_memory(err, "places of special tokens",
                           2 * h->capacity * sizeof *h->hit);
}

/* Two automata: one forgets what it read where content begins, the other reads on and
 * knows only OPEN tokens. */
static still_status scan_marked(const sti_trie *t, const char *p,
                                const unsigned char *content, size_t n,
                                sti_trie_hits *out, still_error *err)
{
    int32_t own = 0, all = 0;
    for (size_t i = n; i-- > 0;) {
        const unsigned char byte = (unsigned char)p[i];
        own = content[i] || (!own && !t->ends[byte]) ? 0 : advance(t, own, byte);
        all = !t->users || (!all && !t->ends[byte]) ? 0 : advance(t, all, byte);
        const sti_trie_node *a = &t->node[own], *b = &t->node[all];
        const bool longer = b->open >= 0 && (a->any < 0 || b->open_n > a->any_n);
        const int32_t id = longer ? b->open : a->any;
        if (id >= 0 && !push(out, i, id, longer ? b->open_n : a->any_n))
            return no_room(out, err);
    }
    return STILL_OK;
}

still_status sti_trie_scan(const sti_trie *t, const char *p,
                           const unsigned char *content, size_t n, bool control,
                           sti_trie_hits *out, still_error *err)
{
    int32_t at = 0;
    out->n = 0;
    if (!t->n || (!control && !t->users)) return STILL_OK;
    if (content) return scan_marked(t, p, content, n, out, err);
    for (size_t i = n; i-- > 0;) {
        const unsigned char byte = (unsigned char)p[i];
        if (!at && !t->ends[byte]) continue;
        at = advance(t, at, byte);
        const sti_trie_node *node = &t->node[at];
        const int32_t id = control ? node->any : node->user;
        if (id >= 0 && !push(out, i, id, control ? node->any_n : node->user_n))
            return no_room(out, err);
    }
    return STILL_OK;
}

const sti_trie_hit *sti_trie_next(sti_trie_hits *h, size_t from)
{
    while (h->n && h->hit[h->n - 1].start < from) h->n--;
    return h->n ? &h->hit[--h->n] : NULL;
}

void sti_trie_hits_free(sti_trie_hits *h)
{
    free(h->hit);
    *h = (sti_trie_hits){0};
}

int32_t sti_trie_find(const sti_trie *t, const char *p, size_t n)
{
    int32_t at = 0;
    if (!t->n || !n) return -1;
    for (size_t i = n; i-- > 0;)
        if (!(at = step(t, at, (unsigned char)p[i]))) return -1;
    return t->node[at].any;
}
