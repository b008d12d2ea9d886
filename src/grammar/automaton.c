/* automaton.c - see automaton.h: takes the empty arcs out of a sketch.
 *
 * A state is kept if a byte or a call leads to it, or if a rule starts there. It gets the
 * arcs of all states that empty arcs lead to, and ends its rule if they lead to the rule's
 * last state. */
#include "grammar/automaton.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum {
    MOST_EDGES = 1 << 20, /* of the automaton; of calls, too */
    MOST_WORK = 1 << 26   /* states passed while following empty arcs */
};

void sti_automaton_free(sti_automaton *a)
{
    free(a->state);
    free(a->edge);
    free(a->call);
    free(a->start);
    *a = (sti_automaton){0};
}

/* ---- Taking out empty arcs ----------------------------------------------- */

typedef struct maker {
    const sti_sketch *k;
    const sti_rules *r;
    sti_automaton *a;
    int32_t *number;        /* [states] of the state in the automaton, -1: not kept */
    int32_t *kept;          /* [a->n_states] and back */
    int32_t *stamp, *stack; /* [states] */
    bool *last;             /* [states] ends its rule */
    int32_t edge_room, call_room;
    int64_t work;
    still_status failed;
} maker;

static int32_t keep(maker *m, int32_t s)
{
    if (m->number[s] < 0) {
        m->number[s] = m->a->n_states;
        m->kept[m->a->n_states++] = s;
    }
    return m->number[s];
}

/* Room for one more of a list; the list, or NULL with m->failed. */
static void *room_for(maker *m, void *list, int32_t n, int32_t *room, size_t size)
{
    if (n < *room) return list;
    if (n >= MOST_EDGES) {
        m->failed = STILL_E_LIMIT;
        return NULL;
    }
    const int32_t more = *room ? 2 * *room : 256;
    void *grown = sti_grow(list, (size_t)more, size);
    if (grown)
        *room = more;
    else
        m->failed = STILL_E_MEMORY;
    return grown;
}

static void add_edge(maker *m, const sti_arc *arc)
{
    sti_automaton *a = m->a;
    sti_edge *list = room_for(m, a->edge, a->n_edges, &m->edge_room, sizeof *a->edge);
    if (!list) return;
    a->edge = list;
    const sti_edge edge = {arc->lo, arc->hi, keep(m, arc->to)};
    list[a->n_edges++] = edge;
}

static void add_call(maker *m, const sti_arc *arc)
{
    sti_automaton *a = m->a;
    sti_call *list = room_for(m, a->call, a->n_calls, &m->call_room, sizeof *a->call);
    if (!list) return;
    a->call = list;
    a->start[arc->rule] = keep(m, m->k->rule[arc->rule].first);
    list[a->n_calls++] = (sti_call){.rule = arc->rule, .back = keep(m, arc->to)};
}

static int by_lo(const void *a, const void *b)
{
    const sti_edge *x = a, *y = b;
    if (x->lo != y->lo) return x->lo < y->lo ? -1 : 1;
    return (x->to > y->to) - (x->to < y->to);
}

/* Edges and calls of state number i. */
static void fill(maker *m, int32_t i)
{
    sti_state *state = &m->a->state[i];
    int32_t n = 0;
    state->edge = m->a->n_edges;
    state->call = m->a->n_calls;
    m->stack[n++] = m->kept[i];
    m->stamp[m->kept[i]] = i + 1;
    while (n && !m->failed) {
        const int32_t s = m->stack[--n];
        state->final |= m->last[s];
        if (m->work-- == 0) m->failed = STILL_E_LIMIT;
        for (int32_t j = m->r->out[s]; j < m->r->out[s + 1] && !m->failed; j++) {
            const sti_arc *arc = &m->k->arc[m->r->arc[j]];
            if (arc->kind == STI_ARC_BYTE) add_edge(m, arc);
            if (arc->kind == STI_ARC_RULE) add_call(m, arc);
            if (arc->kind == STI_ARC_BYTE || m->stamp[arc->to] == i + 1 ||
                (arc->kind == STI_ARC_RULE && !m->r->empty[arc->rule]))
                continue;
            m->stamp[arc->to] = i + 1;
            m->stack[n++] = arc->to;
        }
    }
    const size_t edges = (size_t)(m->a->n_edges - state->edge);
    if (edges > 1) qsort(m->a->edge + state->edge, edges, sizeof(sti_edge), by_lo);
}

static void mark_tails(sti_automaton *a)
{
    for (int32_t i = 0; i < a->n_calls; i++) {
        const sti_state *back = &a->state[a->call[i].back];
        a->call[i].tail =
            back->final && back[1].edge == back->edge && back[1].call == back->call;
    }
}

/* ---- Kinds --------------------------------------------------------------- */

/* h[i] after n rounds tells apart states that some text of up to n bytes tells apart. */
static void hash_round(const sti_automaton *a, const sti_hash_key *key,
                       const uint64_t *h, uint64_t *next)
{
    for (int32_t i = 0; i < a->n_states; i++) {
        const sti_state *s = &a->state[i];
        uint64_t v = s->final;
        for (int32_t e = s->edge; e < s[1].edge; e++)
            v = sti_hash_pair(
                key, v,
                sti_hash_pair(key, h[a->edge[e].to],
                              (uint64_t)a->edge[e].lo << 8 | a->edge[e].hi));
        v = sti_hash_pair(key, v, 1);
        for (int32_t c = s->call; c < s[1].call; c++)
            v = sti_hash_pair(key, v,
                              sti_hash_pair(key, h[a->call[c].back],
                                            h[a->start[a->call[c].rule]] ^ 1));
        next[i] = v;
    }
}

static void number_kinds(sti_automaton *a, const uint64_t *h, int32_t *slot,
                         size_t mask)
{
    for (int32_t i = 0; i < a->n_states; i++) {
        size_t at = h[i] & mask;
        while (slot[at] && h[slot[at] - 1] != h[i]) at = (at + 1) & mask;
        if (!slot[at]) {
            slot[at] = i + 1;
            a->state[i].kind = a->n_kinds++;
        } else {
            a->state[i].kind = a->state[slot[at] - 1].kind;
        }
    }
}

static still_status find_kinds(sti_automaton *a, int look, still_error *err)
{
    const size_t n = (size_t)a->n_states;
    const sti_hash_key key = sti_hash_key_new();
    size_t mask = 1;
    while (mask < 2 * n) mask *= 2;
    uint64_t *h = sti_alloc(n, sizeof *h), *next = sti_alloc(n, sizeof *next);
    int32_t *slot = sti_alloc(mask, sizeof *slot);
    if (h && next && slot) {
        for (int i = 0; i < look; i++) {
            hash_round(a, &key, h, next);
            uint64_t *t = h;
            h = next;
            next = t;
        }
        number_kinds(a, h, slot, mask - 1);
    }
    const bool room = h && next && slot;
    free(h);
    free(next);
    free(slot);
    if (!room) return sti_fail_memory(err, "grammar", n * sizeof *h);
    return STILL_OK;
}

/* ---- All of it ----------------------------------------------------------- */

static void make(maker *m, int32_t root)
{
    const sti_sketch *k = m->k;
    sti_automaton *a = m->a;
    for (int32_t i = 0; i < k->n_states; i++) m->number[i] = -1;
    for (int32_t i = 0; i < k->n_rules; i++) {
        a->start[i] = -1;
        if (k->rule[i].drawn) m->last[k->rule[i].last] = true;
    }
    /* State 0 is no rule's: it calls the root and ends behind it. */
    a->n_states = 2;
    m->kept[1] = -1;
    a->start[root] = keep(m, k->rule[root].first);
    a->call = room_for(m, NULL, 0, &m->call_room, sizeof *a->call);
    if (!a->call) return;
    a->call[a->n_calls++] = (sti_call){.rule = root, .back = 1};
    a->state[0] = (sti_state){.final = m->r->empty[root]};
    a->state[1] = (sti_state){.call = 1, .final = true};
    for (int32_t i = 2; i < a->n_states && !m->failed; i++) fill(m, i);
    if (m->failed) return;
    a->state[a->n_states] = (sti_state){.edge = a->n_edges, .call = a->n_calls};
    mark_tails(a);
}

static still_status without_empty_arcs(const sti_sketch *k, const sti_rules *r,
                                       int32_t root, int look, sti_automaton *out,
                                       still_error *err)
{
    const size_t states = (size_t)k->n_states + 3;
    sti_automaton a = {.n_rules = k->n_rules};
    maker m = {.k = k, .r = r, .a = &a, .work = MOST_WORK};
    m.number = sti_alloc(states, sizeof *m.number);
    m.kept = sti_alloc(states, sizeof *m.kept);
    m.stamp = sti_alloc(states, sizeof *m.stamp);
    m.stack = sti_alloc(states, sizeof *m.stack);
    m.last = sti_alloc(states, sizeof *m.last);
    a.state = sti_alloc(states, sizeof *a.state);
    a.start = sti_alloc((size_t)k->n_rules + 1, sizeof *a.start);
    if (!m.number || !m.kept || !m.stamp || !m.stack || !m.last || !a.state || !a.start)
        m.failed = STILL_E_MEMORY;
    if (!m.failed) make(&m, root);
    free(m.number);
    free(m.kept);
    free(m.stamp);
    free(m.stack);
    free(m.last);
    still_status status = m.failed;
    if (status == STILL_E_MEMORY)
        status = sti_fail_memory(err, "grammar", states * sizeof *a.state);
    else if (status == STILL_E_LIMIT)
        status = sti_fail(err, STILL_E_LIMIT,
                          "grammar: too large: more than %d ways to go on, over all of "
                          "its places; use fewer optional parts in a row",
                          MOST_EDGES);
    else
        status = find_kinds(&a, look, err);
    if (status != STILL_OK) {
        sti_automaton_free(&a);
        return status;
    }
    *out = a;
    return STILL_OK;
}

still_status sti_automaton_make(const sti_sketch *k, int32_t root, int look,
                                sti_automaton *out, still_error *err)
{
    sti_rules r = {0};
    sti_sketch inlined = {0};
    still_status status = sti_rules_find(k, &r, err);
    if (status == STILL_OK) status = sti_rules_check(k, &r, err);
    if (status == STILL_OK) status = sti_sketch_inline(k, &r, &inlined, err);
    sti_rules_free(&r);
    if (status == STILL_OK) status = sti_rules_find(&inlined, &r, err);
    if (status == STILL_OK)
        status = without_empty_arcs(&inlined, &r, root, look, out, err);
    sti_rules_free(&r);
    sti_sketch_free(&inlined);
    return status;
}
