/* mask.c - which tokens may come next.
 *
 * Bytes are read along the tree of tokens (token/pieces.h): a subtree is left out when its
 * first byte fits nothing. From a state inside a string nearly everything fits, and the walk
 * takes a millisecond. So what a state reads without leaving its rule is kept, once for all
 * states of a kind (automaton.h), together with the nodes at which the rule ended with more
 * of the token to come. What follows there depends on the callers, and is walked each time:
 * behind the quote that ends a string there are few tokens. */
#include <string.h>

#include "grammar/grammar.h"
#include "token/tokenizer.h"

enum {
    MOST_WORK =
        1 << 25, /* items and edges looked at for one mask: a twentieth of a second */
};

typedef struct level {
    int32_t lo, hi, frames, links;
} level;

static void set_tokens(const sti_pieces *p, uint32_t node, uint64_t *bits, size_t words)
{
    for (uint32_t i = p->token[node]; i < p->token[node + 1]; i++) {
        const uint32_t id = (uint32_t)p->id[i];
        if (id / 64 < words) bits[id / 64] |= (uint64_t)1 << id % 64;
    }
}

/* Walks what lies behind a node, from the machine's items lo..hi-1, and sets the bits of
 * the tokens there. ends: gets the nodes at which frame 0 ended and that have more behind
 * them; NULL: none are wanted. Returns their number. */
static uint32_t walk(sti_machine *m, const sti_pieces *p, uint32_t node, int32_t lo,
                     int32_t hi, uint64_t *bits, size_t words, uint32_t *ends)
{
    level way[STI_PIECE_LONGEST + 1];
    const int root = p->depth[node];
    uint32_t n = 0;
    way[0] = (level){lo, hi, m->n_frames, m->n_links};
    for (uint32_t i = node + 1; i < p->end[node] && !m->full;) {
        const int depth = p->depth[i] - root;
        const level from = way[depth - 1];
        m->n_items = from.hi;
        m->n_frames = from.frames;
        m->n_links = from.links;
        sti_machine_step(m, from.lo, from.hi, p->byte[i]);
        if (m->n_items == from.hi) {
            i = p->end[i];
            continue;
        }
        way[depth] = (level){from.hi, m->n_items, m->n_frames, m->n_links};
        set_tokens(p, i, bits, words);
        if (ends && m->ended && p->end[i] > i + 1) ends[n++] = i;
        i++;
    }
    m->n_items = hi;
    m->n_frames = way[0].frames;
    m->n_links = way[0].links;
    return n;
}

/* ---- What is kept -------------------------------------------------------- */

static uint32_t *store(still_grammar *g, size_t n)
{
    /* Everything fits into an empty store: see sti_grammar_new. */
    if (n > g->store_room - g->n_store) {
        for (int32_t i = 0; i < g->a.n_kinds; i++) g->mask[i].known = false;
        g->n_store = 0;
    }
    uint32_t *at = g->store + g->n_store;
    g->n_store += n;
    return at;
}

static void keep(still_grammar *g, sti_mask *mask, uint32_t n_ends)
{
    size_t count = 0;
    for (size_t i = 0; i < g->words; i++)
        count += (size_t)__builtin_popcountll(g->bits[i]);
    const bool list = count < 2 * g->words;
    const size_t n = list ? count : 2 * g->words;
    uint32_t *at = store(g, n + n_ends);
    *mask = (sti_mask){.known = true,
                       .list = list,
                       .at = (uint32_t)(at - g->store),
                       .n = (uint32_t)(list ? count : g->words),
                       .n_ends = n_ends};
    if (list) {
        uint32_t *to = at;
        for (size_t i = 0; i < g->words; i++)
            for (uint64_t w = g->bits[i]; w; w &= w - 1)
                *to++ = (uint32_t)(64 * i) + (uint32_t)__builtin_ctzll(w);
    } else {
        memcpy(at, g->bits, g->words * sizeof *g->bits);
    }
    memcpy(at + n, g->ends, n_ends * sizeof *at);
}

/* What a state reads without leaving its rule; NULL: that takes too much. */
static const sti_mask *mask_of(still_grammar *g, int32_t state)
{
    sti_mask *mask = &g->mask[g->a.state[state].kind];
    if (mask->known) return mask;
    memset(g->bits, 0, g->words * sizeof *g->bits);
    sti_machine_start(&g->m, state);
    sti_machine_close(&g->m, 0);
    const uint32_t n =
        walk(&g->m, g->pieces, 0, 0, g->m.n_items, g->bits, g->words, g->ends);
    if (g->m.full) return NULL;
    keep(g, mask, n);
    return mask;
}

static void unite(const still_grammar *g, const sti_mask *mask, uint64_t *bits,
                  size_t words)
{
    const uint32_t *at = g->store + mask->at;
    if (mask->list) {
        for (uint32_t i = 0; i < mask->n; i++)
            if (at[i] / 64 < words) bits[at[i] / 64] |= (uint64_t)1 << at[i] % 64;
        return;
    }
    for (size_t i = 0; i < mask->n && i < words; i++) {
        uint64_t word;
        memcpy(&word, at + 2 * i, sizeof word);
        bits[i] |= word;
    }
}

/* ---- A matcher's tokens -------------------------------------------------- */

/* Tokens that leave the rule of an item and go on in its callers. */
static void go_beyond(const still_matcher *mt, const sti_item *it, const sti_mask *mask,
                      uint64_t *bits, size_t words)
{
    still_grammar *g = mt->g;
    sti_machine *m = &g->m;
    const uint32_t *end =
        g->store + mask->at + (mask->list ? mask->n : 2 * (size_t)mask->n);
    if (!mask->n_ends || mt->frame[it->frame].link < 0) return;
    sti_matcher_load(mt, false);
    const int32_t first = m->n_items;
    for (int32_t l = m->frame[it->frame].link; l >= 0; l = m->link[l].next)
        sti_machine_add(m, first, m->link[l].back, m->link[l].frame);
    sti_machine_close(m, first);
    const int32_t last = m->n_items;
    for (uint32_t i = 0; i < mask->n_ends && !m->full; i++)
        walk(m, g->pieces, end[i], first, last, bits, words, NULL);
}

/* Whether an item reads what an earlier one reads. */
static bool again(const still_matcher *mt, int32_t at)
{
    const sti_state *state = mt->g->a.state;
    for (int32_t i = 0; i < at; i++)
        if (mt->item[i].frame == mt->item[at].frame &&
            state[mt->item[i].state].kind == state[mt->item[at].state].kind)
            return true;
    return false;
}

still_status still_matcher_mask(still_matcher *mt, uint64_t *bits, still_error *err)
{
    still_grammar *g = mt->g;
    const size_t words = ((size_t)mt->vocab + 63) / 64;
    uint64_t any = 0;
    memset(bits, 0, words * sizeof *bits);
    g->m.work = MOST_WORK;
    g->m.full = false;
    for (int32_t i = 0; i < mt->n_items && !mt->ended && !g->m.full; i++) {
        if (again(mt, i)) continue;
        const sti_mask *mask = mask_of(g, mt->item[i].state);
        if (!mask) break;
        unite(g, mask, bits, words);
        go_beyond(mt, &mt->item[i], mask, bits, words);
    }
    if (g->m.full)
        return sti_fail(
            err, STILL_E_LIMIT,
            "grammar: too ambiguous here: finding the next tokens takes more "
            "than %d steps, or frames of more than %d calls; write rules so "
            "that fewer of them can read the same text",
            MOST_WORK, STI_MACHINE_FRAMES);
    for (size_t i = 0; i < g->tk->n_end && mt->can_end; i++) {
        const int32_t id = g->tk->end[i];
        if (id < mt->vocab) bits[id / 64] |= (uint64_t)1 << id % 64;
    }
    if (mt->vocab % 64) bits[words - 1] &= ((uint64_t)1 << mt->vocab % 64) - 1;
    for (size_t i = 0; i < words; i++) any |= bits[i];
    if (!any)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "grammar: no token can come next: the vocabulary has none for the "
            "bytes, or for the end, that the grammar wants here");
    return STILL_OK;
}
