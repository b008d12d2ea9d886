/* pieces.c - see pieces.h. Tokens are sorted by their bytes; the tree then follows from
 * how many bytes each has in common with the one before it. */
#include "token/pieces.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

struct sti_pieces_slot {
    pthread_mutex_t lock;
    bool made;
    sti_pieces pieces;
};

sti_pieces_slot *sti_pieces_slot_new(void)
{
    sti_pieces_slot *s = sti_alloc(1, sizeof *s);
    if (s && pthread_mutex_init(&s->lock, NULL)) {
        free(s);
        s = NULL;
    }
    return s;
}

static void free_pieces(sti_pieces *t)
{
    free(t->end);
    free(t->token);
    free(t->id);
    free(t->byte);
    free(t->depth);
    *t = (sti_pieces){0};
}

void sti_pieces_slot_free(sti_pieces_slot *s)
{
    if (!s) return;
    free_pieces(&s->pieces);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- Sorting ------------------------------------------------------------- */

typedef struct piece {
    uint64_t first; /* 8 bytes, highest first, padded with zeros */
    const char *p;
    uint32_t n;
    int32_t id;
} piece;

static int by_bytes(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    const int order = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    if (order) return order;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Whether a token stands for text that a model may write. */
static bool is_text(const still_tokenizer *tk, int32_t id)
{
    const int kind = tk->v.kind[id];
    size_t n;
    const char *p = sti_vocab_piece(&tk->v, id, &n);
    if (n == 0 || n > STI_PIECE_LONGEST) return false;
    if (kind != STI_KIND_NORMAL && kind != STI_KIND_BYTE && kind != STI_KIND_USER)
        return false;
    if (kind == STI_KIND_USER && sti_looks_like_control(p, n)) return false;
    return !still_tokenizer_is_end(tk, id);
}

static piece *sorted(const still_tokenizer *tk, size_t *n_out)
{
    size_t n = 0;
    piece *list = sti_alloc((size_t)tk->n + 1, sizeof *list);
    if (!list) return NULL;
    for (int32_t id = 0; id < tk->n; id++) {
        if (!is_text(tk, id)) continue;
        size_t len;
        piece *t = &list[n++];
        t->p = sti_vocab_piece(&tk->v, id, &len);
        t->n = (uint32_t)len;
        t->id = id;
        for (size_t i = 0; i < 8; i++)
            t->first = t->first << 8 | (i < len ? (unsigned char)t->p[i] : 0);
    }
    qsort(list, n, sizeof *list, by_bytes);
    *n_out = n;
    return list;
}

/* ---- The tree ------------------------------------------------------------ */

static uint32_t common(const piece *list, size_t i)
{
    uint32_t k = 0;
    if (i == 0) return 0;
    const piece *a = &list[i - 1], *b = &list[i];
    while (k < a->n && k < b->n && a->p[k] == b->p[k]) k++;
    return k;
}

static void fill(sti_pieces *t, const piece *list, size_t n)
{
    uint32_t path[STI_PIECE_LONGEST + 1] = {0}, depth = 0, nodes = 1;
    t->token[0] = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t same = common(list, i);
        for (; depth > same; depth--) t->end[path[depth]] = nodes;
        while (depth < list[i].n) {
            path[++depth] = nodes;
            t->byte[nodes] = (unsigned char)list[i].p[depth - 1];
            t->depth[nodes] = (unsigned char)depth;
            t->token[nodes++] = (uint32_t)i;
        }
        t->id[i] = list[i].id;
    }
    for (;; depth--) {
        t->end[path[depth]] = nodes;
        if (depth == 0) break;
    }
    t->token[nodes] = (uint32_t)n;
}

static still_status make(const still_tokenizer *tk, sti_pieces *out, still_error *err)
{
    size_t n = 0, nodes = 1;
    piece *list = sorted(tk, &n);
    if (!list)
        return sti_fail_memory(err, "tree of tokens", (size_t)tk->n * sizeof *list);
    for (size_t i = 0; i < n; i++) nodes += list[i].n - common(list, i);
    sti_pieces t = {.n = (uint32_t)nodes};
    t.end = sti_alloc(nodes, sizeof *t.end);
    t.token = sti_alloc(nodes + 1, sizeof *t.token);
    t.id = sti_alloc(n + 1, sizeof *t.id);
    t.byte = sti_alloc(nodes, 1);
    t.depth = sti_alloc(nodes, 1);
    const bool room = t.end && t.token && t.id && t.byte && t.depth;
    if (room) fill(&t, list, n);
    free(list);
    if (!room) {
        free_pieces(&t);
        return sti_fail_memory(err, "tree of tokens", nodes * 10 + n * sizeof *t.id);
    }
    *out = t;
    return STILL_OK;
}

still_status sti_tokenizer_pieces(const still_tokenizer *tk, const sti_pieces **out,
                                  still_error *err)
{
    sti_pieces_slot *s = tk->pieces;
    still_status status = STILL_OK;
    pthread_mutex_lock(&s->lock);
    if (!s->made) {
        status = make(tk, &s->pieces, err);
        s->made = status == STILL_OK;
    }
    pthread_mutex_unlock(&s->lock);
    *out = status == STILL_OK ? &s->pieces : NULL;
    return status;
}
