/* trie.c - see trie.h. */
#include "token/trie.h"

#include <stdlib.h>

static int32_t step(const sti_trie *t, int32_t at, unsigned char byte)
{
    int32_t k = t->node[at].child;
    while (k >= 0 && t->node[k].byte != byte) k = t->node[k].sibling;
    return k;
}

static int32_t new_node(sti_trie *t, unsigned char byte, int32_t sibling)
{
    if (t->n == t->room) {
        int room = t->room ? 2 * t->room : 64;
        sti_trie_node *node = sti_grow(t->node, (size_t)room, sizeof *node);
        if (!node) return -1;
        t->node = node;
        t->room = room;
    }
    t->node[t->n] = (sti_trie_node){-1, sibling, -1, byte};
    return t->n++;
}

still_status sti_trie_add(sti_trie *t, const char *p, size_t n, int32_t id,
                          still_error *err)
{
    if (!n) return STILL_OK;
    if (n > STI_MAX_PIECE || t->n > INT32_MAX / 4)
        return sti_fail(err, STILL_E_LIMIT, "special tokens are too long (%zu bytes)",
                        n);
    if (!t->n && new_node(t, 0, -1) < 0)
        return sti_fail_memory(err, "special tokens", sizeof *t->node);
    int32_t at = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t next = step(t, at, (unsigned char)p[i]);
        if (next < 0) {
            next = new_node(t, (unsigned char)p[i], t->node[at].child);
            if (next < 0)
                return sti_fail_memory(err, "special tokens", sizeof *t->node);
            t->node[at].child = next;
        }
        at = next;
    }
    if (t->node[at].id < 0) t->node[at].id = id;
    t->starts[(unsigned char)p[0]] = true;
    return STILL_OK;
}

void sti_trie_free(sti_trie *t)
{
    free(t->node);
    *t = (sti_trie){0};
}

int32_t sti_trie_find(const sti_trie *t, const sti_vocab *v, const char *p, size_t n,
                      size_t from, bool control, size_t *start, size_t *end)
{
    if (!t->n) return -1;
    for (size_t i = from; i < n; i++) {
        if (!t->starts[(unsigned char)p[i]]) continue;
        int32_t found = -1, at = 0;
        for (size_t k = i; k < n; k++) {
            at = step(t, at, (unsigned char)p[k]);
            if (at < 0) break;
            int32_t id = t->node[at].id;
            if (id < 0 || (v->kind[id] != STI_KIND_USER && !control)) continue;
            found = id;
            *end = k + 1;
        }
        if (found >= 0) {
            *start = i;
            return found;
        }
    }
    return -1;
}
